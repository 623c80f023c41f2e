"""lever as a library, as its documentation shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lever
from lever import LLM
from lever.errors import DoesNotFit, LeverError, UsageError
from lever.grammar import Grammar
from tests.lacking import needs
from tests.tiny import tiny_model


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEVER_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("api") / "model.gguf", arch="qwen2")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, dram="1GiB", draft="none", use_profile=False) as opened:
        yield opened


def test_pieces_of_a_stream_are_the_text_of_the_answer(llm: LLM) -> None:
    stream = llm.stream("Hello", max_tokens=20, temperature=0, ignore_eos=True, raw=True)
    assert "".join(stream) == stream.text
    assert (len(stream.tokens), stream.finish_reason, stream.stats.new_tokens) == (20, "length", 20)
    assert llm.answer("Hello", max_tokens=20, temperature=0, ignore_eos=True, raw=True).text == stream.text


def test_H5_a_seed_gives_the_same_text_and_without_one_it_is_told(llm: LLM) -> None:
    first = llm.answer("Hello", max_tokens=20, temperature=1.5, raw=True)
    assert llm.answer("Hello", max_tokens=20, temperature=1.5, raw=True).tokens != first.tokens
    again = llm.answer("Hello", max_tokens=20, temperature=1.5, raw=True, seed=first.stats.seed)
    assert again.tokens == first.tokens


def test_a_guess_ahead_changes_no_token(model: Path, llm: LLM) -> None:
    options = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "raw": True}
    with LLM(model, dram="1GiB", draft=model, use_profile=False, preset="chain-sd") as drafting:
        found = drafting.answer("a b a b", **options)  # type: ignore[arg-type]
        assert found.stats.accepted > 0
        assert found.tokens == llm.answer("a b a b", **options).tokens  # type: ignore[arg-type]


def test_a_model_that_has_drafted_for_another_writes_the_text_that_it_wrote_before(model: Path, llm: LLM) -> None:
    """A draft is kept in Q4_0: that image is not for text."""
    expected = llm.answer("Hello", max_tokens=12, temperature=0, raw=True, logprobs=0)
    with LLM(model, dram="1GiB", draft=model, use_profile=False):
        pass
    with LLM(model, dram="1GiB", draft="none", use_profile=False) as again:
        found = again.answer("Hello", max_tokens=12, temperature=0, raw=True, logprobs=0)
        assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)


def test_an_answer_tells_of_probabilities_where_asked(llm: LLM) -> None:
    found = llm.answer("Hello", max_tokens=3, raw=True, logprobs=2)
    assert [len(entry.top) for entry in found.logprobs] == [2, 2, 2]


def test_an_answer_obeys_a_schema(model: Path) -> None:
    needs("llguidance")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "maxProperties": 1}
    with LLM(model, dram="1GiB", draft="none", use_profile=False, grammars=True) as obeying:
        found = obeying.answer("Hello", grammar=Grammar.from_json_schema(schema), temperature=0, raw=True)
    if found.finish_reason == "stop":
        assert list(json.loads(found.text)) == ["n"]
    else:
        assert found.text.lstrip().startswith("{")


def test_an_answer_that_is_cancelled_ends_and_the_next_one_is_sound(llm: LLM) -> None:
    expected = llm.answer("Hello", max_tokens=12, temperature=0, raw=True).tokens
    stream = llm.stream("Other words", max_tokens=200, ignore_eos=True, raw=True)
    for _ in stream:
        stream.cancel()
    assert stream.finish_reason is None
    assert llm.answer("Hello", max_tokens=12, temperature=0, raw=True).tokens == expected


def test_a_stream_that_is_gone_on_with_after_another_has_begun_is_refused(llm: LLM) -> None:
    first = iter(llm.stream("Hello", max_tokens=50, ignore_eos=True, raw=True))
    next(first)
    llm.answer("Other words", max_tokens=2, raw=True)
    with pytest.raises(LeverError, match="one at a time"):
        list(first)


def test_two_models_answer_in_turn_in_one_process(model: Path, llm: LLM) -> None:
    alone = llm.answer("Hello", max_tokens=8, temperature=0, raw=True).tokens
    with LLM(model, dram="2GiB", draft="none", use_profile=False, pin=0) as other:
        for _ in range(2):
            assert other.answer("Hello", max_tokens=8, temperature=0, raw=True).tokens == alone
            assert llm.answer("Hello", max_tokens=8, temperature=0, raw=True).tokens == alone


def test_messages_are_a_conversation_in_the_models_template(llm: LLM) -> None:
    told = llm.answer([{"role": "user", "content": "Hello"}], max_tokens=2)
    asked = llm.answer("Hello", max_tokens=2)
    bare = llm.answer("Hello", max_tokens=2, raw=True)
    assert told.stats.prompt_tokens == asked.stats.prompt_tokens > bare.stats.prompt_tokens


@pytest.mark.parametrize(
    ("wrong", "error"),
    [({"dram": "much"}, UsageError), ({"dram": "1MiB"}, DoesNotFit), ({"preset": "best"}, UsageError)],
)
def test_what_cannot_be_is_refused_when_it_is_made(model: Path, wrong: dict[str, str], error: type[Exception]) -> None:
    with pytest.raises(error):
        LLM(model, **{"use_profile": False, **wrong})  # type: ignore[arg-type]


def test_a_word_that_is_no_option_is_refused(llm: LLM) -> None:
    with pytest.raises(TypeError, match="tempreature"):
        llm.answer("Hello", tempreature=0)  # type: ignore[call-arg]


def test_the_package_alone_loads_nothing_heavy() -> None:
    code = "import sys, lever; print('numpy' in sys.modules or 'lever.llm' in sys.modules); lever.LLM"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
    assert lever.__all__ == ["LLM"]
    with pytest.raises(AttributeError, match="Model"):
        lever.Model  # noqa: B018
