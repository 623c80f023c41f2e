"""Answers that obey a schema: every preset writes those of plain decoding, and what is written fits the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lever.errors import Cancelled, DoesNotFit, UsageError
from lever.gguf import read
from lever.grammar import Grammar, Vocabulary, nbytes
from lever.llm import LLM, GenerationSettings
from lever.loader import GRAMMAR, ModelSettings
from lever.memory import MIB
from lever.policies import Preset, preset
from lever.sample import Sampler
from lever.settings import SamplerSettings
from lever.tokenizer import Tokenizer
from tests.command import Lever
from tests.lacking import needs
from tests.native.test_speculation import (
    AT_THE_BORDER,
    N_VOCAB,
    POLICIES,
    SAMPLERS,
    SHORT,
    Answer,
    Answers,
    Models,
    opened,
)
from tests.tiny import tiny_model

needs("llguidance")
SCHEMA: dict[str, Any] = {
    "x-guidance": {"whitespace_flexible": False},  # such models would write blanks wherever they may
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z ]{2,6}$"},
        "kind": {"enum": ["this", "that", None, 12]},
        "parts": {
            "type": "array",
            "items": {"type": "object", "properties": {"on": {"type": "boolean"}}, "additionalProperties": False},
            "maxItems": 3,
        },
    },
    "required": ["name", "kind", "parts"],
    "additionalProperties": False,
}
WIDEST = 120  # tokens of a document are fewer
VALID = needs("jsonschema_rs").validator_for(SCHEMA)


STRICT, LAX = Grammar.from_json_schema(SCHEMA), Grammar.from_text('root ::= [^"{]*')


class Obeying:
    """Models, and answers of theirs that obey a grammar."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self.tokenizer = Tokenizer.from_gguf(read(models.path))
        self.vocabulary = Vocabulary(self.tokenizer)
        self._plain: dict[tuple[str, int, Grammar], Answer] = {}

    def sampler(self, name: str, n_prompt: int, grammar: Grammar, seed: int = 5) -> Sampler:
        constraint = self.vocabulary.constraint(grammar, n_prompt)
        return Sampler(SamplerSettings(seed=seed, **SAMPLERS[name]), N_VOCAB, constraint)

    def answer(self, answers: Answers, prompt: list[int], sampler: Sampler, n: int = 30, **options: Any) -> Answer:
        return answers.to(
            prompt,
            sampler.draw,
            complete=sampler.complete,
            end=self.tokenizer.eog_ids,
            temperature=sampler.settings.temperature,
            n=n,
            **options,
        )

    def plainly(self, name: str, prompt: list[int], grammar: Grammar) -> Answer:
        """By an engine without a draft, and a constraint that was never asked before."""
        key = name, len(prompt), grammar
        if key not in self._plain:
            sampler = self.sampler(name, len(prompt), grammar)
            self._plain[key] = self.answer(Answers(self.models.plain), prompt, sampler)
        return self._plain[key]


@pytest.fixture(scope="module")
def obeying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Obeying]:
    with opened(tmp_path_factory.mktemp("grammar"), {"ffn_down": "Q6_K", "*": "Q4_K"}) as models:
        yield Obeying(models)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("name", SAMPLERS)
def test_H7_every_preset_obeys_with_the_tokens_and_bits_of_plain_decoding(
    obeying: Obeying, name: str, policy: Preset
) -> None:
    answers = obeying.models.answers(policy)
    for prompt, grammar in ((AT_THE_BORDER, STRICT), (SHORT, LAX), (SHORT, STRICT)):
        found = obeying.answer(answers, prompt, obeying.sampler(name, len(prompt), grammar))
        assert found.same(obeying.plainly(name, prompt, grammar))


@pytest.mark.parametrize("name", ["chain-sd", "specinfer", "opt-tree"])
def test_what_a_draft_guesses_is_accepted_where_the_grammar_allows_it(obeying: Obeying, name: str) -> None:
    """So that the test above walks along paths, too. A draft knows no grammar, and a strict one forbids its guesses."""
    answers = obeying.models.answers(preset(name))
    lax, strict = (obeying.answer(answers, SHORT, obeying.sampler("greedy", len(SHORT), g)) for g in (LAX, STRICT))
    assert lax.stats.accepted > 8 > strict.stats.accepted


@pytest.mark.parametrize("policy", [preset("flash-ar"), preset("lever"), preset("specinfer")], ids=lambda p: p.name)
def test_what_is_written_fits_the_schema_and_ends_where_it_must(obeying: Obeying, policy: Preset) -> None:
    answers, written = obeying.models.answers(policy), set()
    for seed in range(4):
        sampler = obeying.sampler("hot with penalties", len(SHORT), STRICT, seed)
        answer = obeying.answer(answers, SHORT, sampler, n=WIDEST)
        assert answer.reasons[-1] == "stop"
        text = obeying.tokenizer.decode(answer.tokens)
        VALID.validate(json.loads(text))
        written.add(text)
    assert len(written) == 4


@pytest.mark.parametrize("policy", [preset("flash-ar"), preset("lever"), preset("opt-tree")], ids=lambda p: p.name)
def test_I19_a_sampler_that_served_an_answer_that_was_given_up_serves_the_next(
    obeying: Obeying, policy: Preset
) -> None:
    answers, sampler = obeying.models.answers(policy), obeying.sampler("warm", len(SHORT), LAX)
    for n_layers in (1, 7, 20):
        asked = iter(range(n_layers))
        with pytest.raises(Cancelled):
            obeying.answer(answers, SHORT, sampler, cancelled=lambda asked=asked: next(asked, None) is None)
        assert obeying.answer(answers, SHORT, sampler).same(obeying.plainly("warm", SHORT, LAX))


# --- a whole model --------------------------------------------------------------------------------------------


def asking(grammar: Grammar, **sampler: Any) -> GenerationSettings:
    return GenerationSettings(
        sampler=SamplerSettings(**{"seed": 3, "temperature": 1.5, **sampler}), max_new_tokens=WIDEST, constraint=grammar
    )


@pytest.mark.parametrize("tokenizer", ["bpe", "spm"])
def test_a_model_obeys_one_grammar_after_another(tmp_path: Path, tokenizer: str) -> None:
    path = tiny_model(tmp_path / "m.gguf", n_ff=256, type="Q4_0", tokenizer=tokenizer)
    with LLM(path, ModelSettings(dram=1 << 40, grammars=True), lookup=True) as llm:
        assert llm.loaded.plan.parts[GRAMMAR] == nbytes(llm.config.n_vocab)
        prompt = llm.encode_raw("Hello")
        for seed in range(3):
            document = llm.generate(prompt, asking(STRICT, seed=seed))
            VALID.validate(json.loads("".join(document)))
            word = llm.generate(prompt, asking(Grammar.from_text('root ::= "yes" | "no"'), seed=seed))
            assert "".join(word) in ("yes", "no")
            assert document.finish_reason == word.finish_reason == "stop"
            assert not set(document.tokens) & llm.tokenizer.eog_ids  # no pass was made for an end
        with pytest.raises(UsageError, match="nothing can follow"):
            llm.generate(prompt, asking(Grammar.from_text("root ::= root")))
        free = llm.generate(prompt, GenerationSettings(sampler=SamplerSettings(seed=3), max_new_tokens=5))
        assert len(list(free)) > 0


def test_a_budget_without_room_for_grammars_says_what_they_take(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m.gguf", n_ff=256, type="Q4_0")
    with LLM(path, ModelSettings(dram=1 << 40)) as llm:
        total = llm.plan()[1].total
    with LLM(path, ModelSettings(dram=total + 12 * MIB)) as llm:
        prompt = llm.encode_raw("Hello")
        with pytest.raises(DoesNotFit, match="grammar 24"):
            llm.generate(prompt, asking(Grammar.json_object()))
        assert list(llm.generate(prompt, GenerationSettings(sampler=SamplerSettings(seed=3), max_new_tokens=5)))


def test_the_command_writes_json_that_fits(lever: Lever, tmp_path: Path) -> None:
    path, schema = tiny_model(tmp_path / "m.gguf", n_ff=256, type="Q4_0"), tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    words: list[str | Path] = ["run", path, "Hello", "--temp", "1.5", "-s", "3", "--json-schema-file", schema]
    documents = [lever.json(*words, "--draft", draft) for draft in ("none", "lookup")]
    assert documents[0]["text"] == documents[1]["text"]
    assert documents[0]["finish_reason"] == "stop"
    VALID.validate(json.loads(documents[0]["text"]))
