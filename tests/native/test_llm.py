"""Answers of a small model through `lever.llm`: probabilities and cycles, beside the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lever.errors import UsageError
from lever.llm import LLM, Generation, GenerationSettings
from lever.loader import ModelSettings
from lever.settings import SamplerSettings
from lever.stats import RunStats
from lever.trace import Cycle
from tests.tiny import tiny_model

BUDGET = 1 << 30
PROMPT = "a b a b a b"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llm") / "model.gguf", arch="qwen2")


@pytest.fixture(scope="module", params=["plain", "drafted"])
def llm(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    draft = model if request.param == "drafted" else None
    with LLM(model, ModelSettings(dram=BUDGET), draft=draft) as opened:
        yield opened


def settings(*, temperature: float = 0.0, n: int = 12, n_logprobs: int | None = None) -> GenerationSettings:
    sampler = SamplerSettings(temperature=temperature, seed=7)
    return GenerationSettings(sampler=sampler, max_new_tokens=n, ignore_eos=True, n_logprobs=n_logprobs)


def answered(generation: Generation) -> Generation:
    for _ in generation:
        pass
    return generation


def log_softmax(llm: LLM, tokens: list[int]) -> NDArray[np.float64]:
    """Of the token that follows these, in float64."""
    steps = llm.engine.steps(tokens, lambda *_: 0, max_new_tokens=1, end_tokens=frozenset(), stats=RunStats())
    logits = next(iter(steps)).logits.astype(np.float64)
    shifted: NDArray[np.float64] = logits - logits.max()
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_K10_each_token_has_its_probability_by_the_raw_softmax_whatever_drew_it(llm: LLM, temperature: float) -> None:
    prompt = llm.encode_raw(PROMPT)
    found = answered(llm.generate(prompt, settings(temperature=temperature, n_logprobs=5)))

    assert [entry.token for entry in found.logprobs] == found.tokens
    for n, entry in enumerate(found.logprobs):
        expected = log_softmax(llm, prompt + found.tokens[:n])
        best = np.argsort(-expected, kind="stable")[:5]
        assert [token for token, _ in entry.top] == best.tolist()
        assert np.allclose([value for _, value in entry.top], expected[best], rtol=0, atol=1e-12)
        assert entry.logprob == pytest.approx(expected[entry.token], abs=1e-12)


def test_K10_without_likeliest_ones_each_token_has_its_own_probability(llm: LLM) -> None:
    found = answered(llm.generate(llm.encode_raw(PROMPT), settings(n_logprobs=0)))
    assert [entry.token for entry in found.logprobs] == found.tokens
    assert all(entry.top == () and entry.logprob <= 0 for entry in found.logprobs)


def test_nobody_who_asks_for_no_probabilities_gets_any(llm: LLM) -> None:
    assert answered(llm.generate(llm.encode_raw(PROMPT), settings())).logprobs == []


@pytest.mark.parametrize("n", [-1, 21])
def test_K10_more_probabilities_than_openai_knows_are_refused(n: int) -> None:
    with pytest.raises(UsageError, match="0 to 20"):
        settings(n_logprobs=n)


def test_every_cycle_is_told_of_with_the_tokens_that_it_brought(llm: LLM) -> None:
    cycles: list[Cycle] = []
    found = answered(llm.generate(llm.encode_raw(PROMPT), settings(n=40), on_cycle=cycles.append))

    assert len(cycles) == found.stats.cycles
    assert sum(len(cycle.accepted) for cycle in cycles) == found.stats.accepted
    told = [cycle.rows.tokens[row] for cycle in cycles for row in (0, *cycle.accepted)]
    assert told == found.tokens[:-1][: len(told)]


@pytest.mark.parametrize("failing", ["_loaded", "_companion"])
def test_all_is_closed_in_order_when_closing_one_part_fails(
    model: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(model, ModelSettings(dram=BUDGET), draft=model)
    llm.load()
    closed: list[str] = []

    def watched(name: str, close: Callable[[], None]) -> Callable[[], None]:
        def closing() -> None:
            close()
            closed.append(name)
            if name == failing:
                raise KeyboardInterrupt

        return closing

    for name in ("_loaded", "_companion", "_devices"):
        monkeypatch.setattr(vars(llm)[name], "close", watched(name, vars(llm)[name].close))
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    assert closed == ["_loaded", "_companion", "_devices"]
    monkeypatch.undo()
    llm.close()
