"""The arithmetic of `benchmarks.perplexity`: likelihoods as in float64, differences paired token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.perplexity import Answer, Scores, compare, difference, mean_of, measure, read_answers, score
from numpy.typing import NDArray

from lever.loader import ModelSettings
from tests import reference, tiny
from tests.models import TOKENS, open_tiny

# In passes of 9 or 16 tokens: over several, from the second one on, a single token, and a prompt of a single one.
ANSWERS = [
    Answer(TOKENS[:5], TOKENS[5:40]),
    Answer(TOKENS[40:60], TOKENS[60:70]),
    Answer(TOKENS[70:77], TOKENS[77:78]),
    Answer(TOKENS[80:81], TOKENS[81:98]),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_model(tmp_path_factory.mktemp("ppl") / "tiny.gguf", n_ff=256, type="F32")


def scored(path: Path, answers: Sequence[Answer] = ANSWERS, **settings: Any) -> Scores:
    with open_tiny(path, **settings) as loaded:
        return score(loaded, answers)


def reference_logits(path: Path, answer: Answer) -> NDArray[np.float64]:
    """Those that the tokens of an answer are drawn from."""
    return reference.forward(path, [*answer.prompt, *answer.tokens])[len(answer.prompt) - 1 : -1]


def reference_logprobs(path: Path, answer: Answer) -> NDArray[np.float64]:
    logits = reference_logits(path, answer)
    logprobs: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logprobs[np.arange(len(answer.tokens)), list(answer.tokens)]


# --- likelihoods --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_batch", "n_logits"), [(512, 32), (16, 32), (9, 4)])
def test_each_token_of_the_answers_has_the_likelihood_of_the_reference(
    model: Path, n_batch: int, n_logits: int
) -> None:
    found = scored(model, n_batch=n_batch, n_logits=n_logits)
    expected = [reference_logprobs(model, answer) for answer in ANSWERS]
    assert np.allclose(found.logprobs, np.concatenate(expected), rtol=0, atol=2e-3)
    assert found.answers.tolist() == [0] * 35 + [1] * 10 + [2] + [3] * 17


def test_the_greedy_token_of_each_place_is_that_of_the_reference(model: Path) -> None:
    logits = [
        reference.forward(model, [*answer.prompt, *answer.tokens])[len(answer.prompt) - 1 : -1] for answer in ANSWERS
    ]
    assert scored(model).greedy.tolist() == np.concatenate(logits).argmax(axis=1).tolist()


def test_what_was_scored_before_does_not_matter(model: Path) -> None:
    """The cache begins anew with each answer."""
    alone, among = scored(model, ANSWERS[1:2]), scored(model)
    assert alone.logprobs.tolist() == among.logprobs[among.answers == 1].tolist()


# --- differences --------------------------------------------------------------------------------------------


def test_a_model_differs_from_itself_by_exactly_nothing(model: Path) -> None:
    settings = ModelSettings(dram=1 << 40, n_ctx=64)
    first, again = compare(iter([("a", model), ("b", model)]), ANSWERS, settings)
    for found in (first.against_first, again.against_first, again.against_previous):
        assert (found.nll.mean, found.nll.error, found.greedy_differs) == (0, 0, 0)
    assert first.nll == again.nll
    assert again.n_tokens == 63
    assert again.perplexity == np.exp(again.nll.mean)


def test_differences_are_paired(model: Path, tmp_path: Path) -> None:
    """Of a third model against the first and against the one before it."""
    kinds = ("Q8_0", "Q4_0")
    others = [tiny.tiny_model(tmp_path / f"{kind}.gguf", n_ff=256, type=kind) for kind in kinds]
    settings = ModelSettings(dram=1 << 40, n_ctx=64)
    paths = [model, *others]
    a, b, c = (measure(path, ANSWERS, settings)[0] for path in paths)
    reports = list(compare(iter([(path.name, path) for path in paths]), ANSWERS, settings))
    assert reports[2].against_first == difference(c, a)
    assert reports[2].against_previous == difference(c, b)
    assert difference(c, a).nll.mean == pytest.approx(reports[2].nll.mean - reports[0].nll.mean, abs=1e-12)
    assert difference(c, a).greedy_differs > difference(b, a).greedy_differs
    assert [report.types["output.weight"] for report in reports] == ["F32", *kinds]


def test_an_error_is_that_of_answers_which_vary_as_a_whole() -> None:
    """40 answers of 25 tokens that are all alike: the error is that of 40 independent numbers.

    Of 400 such errors the root mean square varies by 0.6 %, of 400 means the deviation by 3.5 %: both 5 times over.
    """
    rng = np.random.default_rng(0)
    answers = np.repeat(np.arange(40), 25)
    means = [mean_of(rng.standard_normal(40)[answers], answers) for _ in range(400)]
    assert np.sqrt(np.mean([m.error**2 for m in means])) == pytest.approx(1 / np.sqrt(40), rel=0.03)
    assert np.std([m.mean for m in means]) == pytest.approx(1 / np.sqrt(40), rel=0.18)


# --- the text -----------------------------------------------------------------------------------------------


def test_a_text_is_cut_after_so_many_tokens_of_answers(tmp_path: Path) -> None:
    path = tmp_path / "text.json"
    path.write_text(json.dumps([{"prompt": [1, 2], "tokens": [3, 4, 5]}] * 3))
    assert [len(answer.tokens) for answer in read_answers(path, None)] == [3, 3, 3]
    assert [len(answer.tokens) for answer in read_answers(path, 4)] == [3, 1]
    assert [len(answer.tokens) for answer in read_answers(path, 6)] == [3, 3]
    with pytest.raises(SystemExit, match="1 answers within 3 tokens"):
        read_answers(path, 3)
