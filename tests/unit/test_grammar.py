"""What a schema or grammar allows to follow, against a plain judge of each single token; and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lever import grammar
from lever.errors import LeverError
from lever.grammar import Grammar, GrammarConstraint, Vocabulary
from lever.tokenizer import Tokenizer
from tests import languages as lang
from tests import tiny
from tests.lacking import needs
from tests.languages import Language, either, json_of, many, one_of, text, then, times
from tests.unit.test_tokenizer import header

needs("llguidance")

# Beside single bytes and words: what lies across the parts of JSON, and parts of characters.
ACROSS = ['{"', '":', '":Ġ', '","', '"}', '"]', "],", "[]", "{}", "true", "tru", "null", "[1", "10", "-1", "Ċ", "ĊĠĠ"]
ACROSS += ["ab", "ba", '"a', 'b"', "ĠĠ", "é", '"Ã', '©"', ",Ġ", "aa", "aaa"]
PROMPT = [5, 6, 7]


def speaking(words: Sequence[str], *, model: str = "bpe") -> Tokenizer:
    """A small vocabulary with these words in it."""
    metadata: dict[str, Any] = tiny.spm_vocabulary(None) if model == "spm" else tiny.bpe_vocabulary(None)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    new = [word for word in dict.fromkeys(words) if word not in tokens]
    tokens += new
    types += [tiny.NORMAL] * len(new)
    if model == "spm":
        metadata["tokenizer.ggml.scores"] += [-50.0] * len(new)
    return Tokenizer.from_gguf(header(metadata))


BPE = speaking(ACROSS)
SPM = speaking(['{"', '":', '":▁', '"}', "true", "10", "ab", "▁▁"], model="spm")
VOCABULARIES = {"bpe": Vocabulary(BPE), "spm": Vocabulary(SPM)}


def follow(source: Grammar, *, vocabulary: str = "bpe", n_prompt: int = len(PROMPT)) -> GrammarConstraint:
    return VOCABULARIES[vocabulary].constraint(source, n_prompt)


def allowed_by(judge: Language, tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """One token after the other: whether it can be the next one of a text of this language."""
    ends = [token in tokenizer.eog_ids for token in range(tokenizer.n_vocab)]
    texts = [tokenizer.token_bytes(token) for token in range(tokenizer.n_vocab)]
    judged = (
        judge.has_empty if end else bool(said) and judge.after(said) != lang.NOTHING
        for end, said in zip(ends, texts, strict=True)
    )
    return np.array(list(judged))


def walk(constraint: GrammarConstraint, judge: Language, tokenizer: Tokenizer, seed: int, steps: int = 25) -> str:
    """Write at random what is allowed, and compare at each step with the judge; the text."""
    choose, answer = random.Random(seed), list[int]()
    while len(answer) < steps:
        here = judge.after(b"".join(map(tokenizer.token_bytes, answer)))
        expected = allowed_by(here, tokenizer)
        assert constraint.complete([*PROMPT, *answer]) == (here == lang.END)
        found = constraint.allowed([*PROMPT, *answer])
        differ = [tokenizer.token_bytes(int(token)) for token in np.flatnonzero(found != expected)]
        assert not differ, f"after {tokenizer.decode(answer)!r}"
        token = choose.choice(np.flatnonzero(found).tolist())
        if token in tokenizer.eog_ids:
            break
        answer.append(token)
    return tokenizer.decode(answer)


# --- JSON schemas ---------------------------------------------------------------------------------------------

SIMPLE = st.sampled_from(
    [
        {"type": "null"},
        {"type": "boolean"},
        {"type": "integer"},
        {"type": "string", "pattern": "^[ab]{0,3}$"},
        {"type": "string", "pattern": "^[aé]{1,2}$"},
        {"enum": ["a", "ab", "é", 1, 10, None, True]},
    ]
)


def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.builds(
        lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    objects = st.builds(
        lambda values, needed: {
            "type": "object",
            "properties": dict(zip("ab", values, strict=False)),
            "required": [name for name, _ in zip("ab", values, strict=False) if name in needed],
            "additionalProperties": False,
        },
        st.lists(inner, max_size=2),
        st.sets(st.sampled_from("ab")),
    )
    return arrays | objects


SCHEMAS = st.recursive(SIMPLE, nested, max_leaves=4)


@settings(max_examples=60, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 10**6))
def test_after_any_beginning_each_token_is_allowed_just_when_json_can_go_on_with_it(
    schema: dict[str, Any], seed: int
) -> None:
    walk(follow(Grammar.from_json_schema(schema)), json_of(schema), BPE, seed)


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[ab]{1,3}$"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(("vocabulary", "tokenizer"), [("bpe", BPE), ("spm", SPM)])
def test_a_vocabulary_of_either_kind_writes_documents_of_the_schema(vocabulary: str, tokenizer: Tokenizer) -> None:
    valid = needs("jsonschema_rs").validator_for(PERSON)
    complete = 0
    for seed in range(30):
        constraint = follow(Grammar.from_json_schema(PERSON), vocabulary=vocabulary)
        written = walk(constraint, json_of(PERSON), tokenizer, seed, steps=60)
        if constraint.complete([*PROMPT, *constraint._followed]):
            complete += 1
            valid.validate(json.loads(written))
    assert complete > 5


@pytest.mark.parametrize("text", ["Hello, world", "naïve 12", "<|im_end|>", ""])
@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_library_cuts_text_as_the_tokenizer_does(name: str, text: str) -> None:
    vocabulary = VOCABULARIES[name]
    assert vocabulary.native.tokenize_str(text) == vocabulary.tokenizer.encode(text, add_special=False)


def test_json_object_is_any_object_and_nothing_else() -> None:
    constraint = follow(Grammar.json_object())
    written = BPE.encode('{"a": [1, {"b": null}], "é": "x"}', add_special=False)
    for n in range(len(written)):
        assert constraint.allowed([*PROMPT, *written[:n]])[written[n]]
    assert constraint.complete([*PROMPT, *written])
    assert not constraint.allowed(PROMPT)[BPE.encode("[", add_special=False)[0]]


def test_blanks_between_parts_are_few() -> None:
    """A model that would rather say nothing must not be able to write blanks for ever."""
    constraint, blank = follow(Grammar.json_object()), BPE.encode("\n", add_special=False)
    start = [*PROMPT, *BPE.encode("{", add_special=False)]
    assert constraint.allowed(start)[blank[0]]
    assert not constraint.allowed([*start, *blank * 2])[blank[0]]


# --- grammars -------------------------------------------------------------------------------------------------


def expressions(depth: int, choose: random.Random) -> tuple[str, Language]:
    """A piece of GBNF, and what it means."""
    kind = choose.randrange(8) if depth else choose.randrange(3)
    if kind == 0:
        word = "".join(choose.choice("ab") for _ in range(choose.randrange(4)))
        return f'"{word}"', text(word)
    if kind == 1:
        return choose.choice([("[ab]", one_of("ab")), (r"[\x61-\u0062]", one_of("ab")), ("[aé]", one_of("aé"))])
    if kind == 2:
        return choose.choice([('"é"', text("é")), (r'"\U000000e9"', text("é")), (r'"\"\\"', text('"\\'))])
    (a, first), (b, second) = expressions(depth - 1, choose), expressions(depth - 1, choose)
    if kind < 5:
        return f"{a} {b}", then(first, second)
    if kind == 5:
        return f"( {a}\n| {b} )", either(first, second)
    return choose.choice(
        [
            (f"({a})*", many(first)),
            (f"({a})+", then(first, many(first))),
            (f"({a})?", lang.maybe(first)),
            (f"({a}){{2}}", times(first, 2, 2)),
            (f"({a}){{ 1 , 2 }}", times(first, 1, 2)),
            (f"({a}){{1,}}", then(first, many(first))),
        ]
    )


@pytest.mark.parametrize("seed", range(80))
def test_after_any_beginning_each_token_is_allowed_just_when_the_grammar_can_go_on_with_it(seed: int) -> None:
    written, judge = expressions(4, random.Random(seed))
    walk(follow(Grammar.from_text(f"root ::= {written}\n")), judge, BPE, seed)


def test_rules_names_comments_and_lines_mean_what_they_mean_to_llama_cpp() -> None:
    source = Grammar.from_text(
        'root ::= a-1 | # the first\n  a_2 ( "b"  # within\n  | aA )*\r\n\n'
        '# nothing\naA ::= [^a-z\\]] .\na_2 ::= | "a"\na-1::="é"'
    )
    judge = either(text("é"), then(lang.maybe(text("a")), many(either(text("b"), text("1\n"), text("A-")))))
    constraint = follow(source)
    for written in ("é", "", "ab", "b1\nb", "aA-bb"):
        ids = BPE.encode(written, add_special=False)
        assert judge.after(written.encode()).has_empty
        assert all(constraint.allowed([*PROMPT, *ids[:n]])[ids[n]] for n in range(len(ids)))
        assert constraint.allowed([*PROMPT, *ids])[list(BPE.eog_ids)].all()
    assert not constraint.allowed(PROMPT)[BPE.encode("x", add_special=False)[0]]


def test_a_grammar_may_refer_to_itself() -> None:
    constraint = follow(Grammar.from_text('root ::= "a" root "b" | "ab"'))
    ids = BPE.encode("aaabbb", add_special=False)
    letters = [BPE.encode(letter, add_special=False)[0] for letter in "aaabbb"]
    for answer in (ids, letters):
        assert constraint.complete([*PROMPT, *answer])
        assert not constraint.complete([*PROMPT, *answer[:-1]])


# --- a function of the tokens -----------------------------------------------------------------------------------


def test_I19_what_is_allowed_does_not_depend_on_what_was_asked_before() -> None:
    judge, choose = json_of(PERSON), random.Random(4)
    source = Grammar.from_json_schema(PERSON)
    constraint, answers = follow(source), [list[int]()]
    for _ in range(300):
        answer = answers[-1]
        if choose.random() < 0.3 or constraint.complete([*PROMPT, *answer]):  # an earlier place of another answer
            other = choose.choice(answers)
            answers.append(other[: choose.randrange(len(other) + 1)])
            continue
        found = constraint.allowed([*PROMPT, *answer])
        assert (found == allowed_by(judge.after(b"".join(map(BPE.token_bytes, answer))), BPE)).all()
        assert (found == follow(source).allowed([*PROMPT, *answer])).all()
        token = choose.choice([t for t in np.flatnonzero(found).tolist() if t not in BPE.eog_ids])
        answers.append([*answer, token])


def test_the_prompt_is_no_part_of_the_answer() -> None:
    source = Grammar.from_text('root ::= "a"')
    for prompt in ([], [1], BPE.encode("b" * 9, add_special=False)):
        constraint = follow(source, n_prompt=len(prompt))
        assert np.flatnonzero(constraint.allowed(prompt)).tolist() == BPE.encode("a", add_special=False)


def test_only_end_tokens_end_and_no_other_control_token_is_ever_allowed() -> None:
    constraint = follow(Grammar.from_text("root ::= .*"))
    found = constraint.allowed(PROMPT)
    for token in range(BPE.n_vocab):
        if not BPE.token_bytes(token):
            assert found[token] == (token in BPE.eog_ids)
    at_the_end = follow(Grammar.from_text('root ::= "a"'))
    assert set(np.flatnonzero(at_the_end.allowed([*PROMPT, *BPE.encode("a", add_special=False)]))) == BPE.eog_ids


def test_what_was_remembered_of_a_long_text_is_forgotten_when_it_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of limited length has states of its own at each place: 700 hold 76 letters here, with what may follow."""
    source = Grammar.from_json_schema({"type": "string", "maxLength": 3000})
    roomy = follow(source)
    monkeypatch.setattr(grammar, "MOST_STATES", 700)
    narrow, made = follow(source), [0]
    monkeypatch.setattr(grammar, "_compile", counting(made))
    start, letter = BPE.encode('"', add_special=False), BPE.encode("x", add_special=False)
    for n in range(200):
        tokens = [*PROMPT, *start, *letter * n]
        assert (narrow.allowed(tokens) == roomy.allowed(tokens)).all()
    assert made[0] > 1


def counting(made: list[int]) -> Callable[..., Any]:
    compiled = grammar._compile

    def compile(*arguments: Any) -> Any:
        made[0] += 1
        return compiled(*arguments)

    return compile


def test_tokens_that_the_grammar_never_allowed_are_an_error_and_do_no_harm() -> None:
    constraint, wrong = follow(Grammar.from_text('root ::= "ab"')), BPE.encode("x", add_special=False)
    with pytest.raises(LeverError, match="after 'x'"):
        constraint.allowed([*PROMPT, *wrong])
    assert constraint.allowed(PROMPT)[BPE.encode("a", add_special=False)[0]]
