"""The loop from tokens to tokens, over a scripted model: when it ends, what it computes again, and what it counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lever.engine import Engine
from lever.errors import Cancelled, ContextOverflow, LeverError, StorageError, UsageError
from lever.request import Step
from lever.stats import RunStats
from tests.fakes import LAYER_S, N_VOCAB, ScriptedModel

END = 31
PROMPT = [1, 2, 3, 4, 5, 6]
SCRIPT = [*range(10, 26), *[7] * 100]  # what comes after row 0, 1, 2 ...


class Run:
    """An engine over a scripted model, and what its last answer was."""

    def __init__(self, script: Sequence[int] = SCRIPT, **shape: int) -> None:
        self.model = ScriptedModel(script, **shape)
        self.engine = Engine(self.model.as_model(), self.model.store.as_store(), n_threads=2)
        self.drawn_at: list[tuple[list[int], int]] = []
        self.prefilled: list[int] = []
        self.stats = RunStats()

    def answer(self, prompt: Sequence[int], max_new_tokens: int | None = 5) -> list[Step]:
        self.model.passes.clear()
        self.drawn_at.clear()
        self.prefilled.clear()
        self.stats = RunStats()
        steps = self.engine.steps(
            prompt,
            self.draw,
            max_new_tokens=max_new_tokens,
            end_tokens=frozenset({END}),
            stats=self.stats,
            on_prefill=self.prefilled.append,
        )
        return list(steps)

    def draw(self, logits: NDArray[np.float32], history: Sequence[int], position: int) -> int:
        self.drawn_at.append((list(history), position))
        return int(np.argmax(logits))


def tokens_of(steps: Sequence[Step]) -> list[int]:
    return [step.token for step in steps]


# --- endings ------------------------------------------------------------------------------------------------


def test_an_answer_ends_after_max_new_tokens() -> None:
    run = Run()
    steps = run.answer(PROMPT, max_new_tokens=3)
    assert tokens_of(steps) == [15, 16, 17]
    assert [step.finish_reason for step in steps] == [None, None, "length"]


def test_no_token_at_all_may_be_asked_for() -> None:
    run = Run()
    assert run.answer(PROMPT, max_new_tokens=0) == []
    assert run.stats.prompt_tokens == len(PROMPT)
    assert run.stats.new_tokens == 0


@pytest.mark.parametrize("n_before", [0, 1, 4])
def test_I13_an_end_token_ends_the_answer_and_is_the_last_step(n_before: int) -> None:
    run = Run([*SCRIPT[: 5 + n_before], END, *SCRIPT])
    steps = run.answer(PROMPT, max_new_tokens=10)
    assert tokens_of(steps) == [*SCRIPT[5 : 5 + n_before], END]
    assert [step.finish_reason for step in steps] == [None] * n_before + ["stop"]


def test_an_end_token_that_is_also_the_last_allowed_one_is_a_stop() -> None:
    run = Run([*SCRIPT[:5], END])
    assert run.answer(PROMPT, max_new_tokens=1)[-1].finish_reason == "stop"


@pytest.mark.parametrize("limit", [3, 10])
def test_a_complete_text_ends_the_answer_without_a_pass_for_an_end_token(limit: int) -> None:
    run = Run()
    steps = list(
        run.engine.steps(
            PROMPT,
            run.draw,
            max_new_tokens=limit,
            end_tokens=frozenset({END}),
            stats=run.stats,
            complete=lambda tokens: tokens == [*PROMPT, 15, 16, 17],
        )
    )
    assert [(step.token, step.finish_reason) for step in steps] == [(15, None), (16, None), (17, "stop")]
    assert run.stats.cycles == 2


@pytest.mark.parametrize("max_new_tokens", [None, 100])
def test_K4_a_full_context_ends_the_answer_as_length(max_new_tokens: int | None) -> None:
    """The last token needs no row: nothing comes after it."""
    run = Run(n_ctx=10)
    steps = run.answer(PROMPT, max_new_tokens)
    assert tokens_of(steps) == [15, 16, 17, 18]
    assert steps[-1].finish_reason == "length"
    assert len(run.model.rows) == 9


def test_K4_a_prompt_that_leaves_room_for_one_token_gets_one() -> None:
    steps = Run(n_ctx=7).answer(PROMPT)
    assert [(step.token, step.finish_reason) for step in steps] == [(15, "length")]


@pytest.mark.parametrize("n_ctx", [1, 5, 6])
def test_K4_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(n_ctx: int) -> None:
    run = Run(n_ctx=n_ctx)
    with pytest.raises(ContextOverflow, match=f"the prompt has 6 tokens and the context {n_ctx}: .* -c") as caught:
        run.answer(PROMPT)
    assert caught.value.exit_code == 1
    assert run.model.passes == []


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="the prompt is empty") as caught:
        Run().answer([])
    assert caught.value.exit_code == 2


# --- what is drawn from what --------------------------------------------------------------------------------


def test_H5_a_token_is_drawn_from_its_logits_the_tokens_before_it_and_its_position() -> None:
    run = Run()
    steps = run.answer(PROMPT, max_new_tokens=3)
    assert run.drawn_at == [(PROMPT, 6), ([*PROMPT, 15], 7), ([*PROMPT, 15, 16], 8)]
    assert [int(np.argmax(step.logits)) for step in steps] == [15, 16, 17]
    assert all(step.logits.shape == (N_VOCAB,) for step in steps)


def test_the_prompt_is_not_changed() -> None:
    prompt = list(PROMPT)
    Run().answer(prompt)
    assert prompt == PROMPT


# --- what is computed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_batch", "passes"), [(1, [[token] for token in PROMPT]), (4, [[1, 2, 3, 4], [5, 6]]), (6, [PROMPT])]
)
def test_a_prompt_is_read_in_passes_and_each_new_token_is_one(n_batch: int, passes: list[list[int]]) -> None:
    run = Run(n_batch=n_batch)
    run.answer(PROMPT, max_new_tokens=3)
    assert run.model.passes == [*passes, [15], [16]]


@pytest.mark.parametrize("n_layers", [1, 3, 7])
@pytest.mark.parametrize("n_batch", [1, 4, 6])
def test_progress_of_the_prompt_adds_up_to_it(n_batch: int, n_layers: int) -> None:
    run = Run(n_batch=n_batch, n_layers=n_layers)
    run.answer(PROMPT)
    assert sum(run.prefilled) == len(PROMPT)
    assert all(count >= 0 for count in run.prefilled)
    run.answer([*PROMPT, 30])
    assert sum(run.prefilled) == 1 == len([*PROMPT, 30]) - run.stats.cached_tokens


@pytest.mark.parametrize(
    ("prompt", "cached", "forwarded"),
    [
        (PROMPT, 5, [6]),  # the last token always: its logits are wanted
        ([*PROMPT, 15, 16, 17, 18, 30], 10, [30]),  # the answer's rows are there too, but for its last token
        ([*PROMPT, 15, 16, 17, 18, 19, 30], 10, [19, 30]),
        ([*PROMPT, 15, 9], 7, [9]),
        ([1, 2, 9, 9], 2, [9, 9]),
        ([1], 0, [1]),
        ([9, 2, 3], 0, [9, 2, 3]),
    ],
)
def test_I5_only_rows_that_are_not_cached_are_computed(prompt: list[int], cached: int, forwarded: list[int]) -> None:
    run = Run()
    run.answer(PROMPT)
    run.answer(prompt, max_new_tokens=1)
    assert (run.stats.prompt_tokens, run.stats.cached_tokens) == (len(prompt), cached)
    assert run.model.passes == [forwarded]
    assert run.model.rows == prompt


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6),
    n_new=st.integers(0, 4),
)
def test_K14_rows_are_always_those_of_the_prompt_whatever_came_before(prompts: list[list[int]], n_new: int) -> None:
    run = Run()
    for prompt in prompts:
        tokens = tokens_of(run.answer(prompt, n_new))
        assert tokens == SCRIPT[len(prompt) - 1 :][:n_new]
        assert run.model.rows == [*prompt, *tokens[:-1]]


def test_an_answer_given_up_half_way_is_still_in_the_cache() -> None:
    run = Run()
    steps = run.engine.steps(PROMPT, run.draw, max_new_tokens=9, end_tokens=frozenset(), stats=RunStats())
    assert [next(steps).token, next(steps).token] == [15, 16]
    steps.close()  # type: ignore[attr-defined]  # a generator, as iterators of steps are
    run.answer([*PROMPT, 15, 30], max_new_tokens=1)
    assert run.model.passes == [[30]]


@pytest.mark.parametrize("layer", [0, 2])
def test_I20_after_a_failed_pass_the_next_answer_is_right(layer: int) -> None:
    run = Run()
    run.answer(PROMPT[:4], max_new_tokens=1)
    run.model.fails_at = layer
    with pytest.raises(StorageError, match="scripted"):
        run.answer(PROMPT)
    run.model.fails_at = None
    assert tokens_of(run.answer(PROMPT, 2)) == [15, 16]
    assert run.model.rows == [*PROMPT, 15]
    assert run.stats.cached_tokens == 4


def test_I20_a_pass_that_failed_in_mid_answer_loses_no_row() -> None:
    run = Run()
    steps = run.engine.steps(PROMPT, run.draw, max_new_tokens=9, end_tokens=frozenset(), stats=RunStats())
    next(steps)
    run.model.fails_at = 1
    with pytest.raises(StorageError):
        next(steps)
    run.model.fails_at = None
    run.answer([*PROMPT, 15], max_new_tokens=1)
    assert run.stats.cached_tokens == 6
    assert run.model.passes == [[15]]


@pytest.mark.parametrize(("n_layers", "n_rows"), [(1, 0), (3, 0), (4, 4), (6, 4), (8, 6), (11, 7)])
def test_K2_an_answer_given_up_ends_with_the_layer_and_the_next_one_is_right(n_layers: int, n_rows: int) -> None:
    """Three layers a pass; two passes for the prompt, then one for each token."""
    run = Run()
    steps = run.engine.steps(
        PROMPT,
        run.draw,
        max_new_tokens=9,
        end_tokens=frozenset(),
        stats=RunStats(),
        cancelled=lambda: run.model.stats.layers_s >= n_layers * LAYER_S,
    )
    with pytest.raises(Cancelled) as caught:
        list(steps)
    assert caught.value.exit_code == 130
    assert run.model.stats.layers_s == n_layers * LAYER_S
    assert run.model.rows == [*PROMPT, 15][:n_rows]
    assert tokens_of(run.answer(PROMPT, 3)) == [15, 16, 17]


def test_an_answer_that_another_one_replaced_cannot_go_on() -> None:
    run = Run()
    steps = run.engine.steps(PROMPT, run.draw, max_new_tokens=9, end_tokens=frozenset(), stats=RunStats())
    next(steps)
    assert tokens_of(run.answer([9, 9], 2)) == [11, 12]
    with pytest.raises(LeverError, match="one at a time"):
        next(steps)
    assert tokens_of(run.answer(PROMPT, 2)) == [15, 16]


def test_threads_of_a_pass_are_never_more_than_allowed() -> None:
    run = Run()
    run.answer(PROMPT, max_new_tokens=40)
    assert len(run.model.threads) > 40
    assert set(run.model.threads) | set(run.model.projection_threads) <= {1, 2}


# --- figures ------------------------------------------------------------------------------------------------


def test_figures_are_of_the_decode_phase() -> None:
    run = Run()
    run.answer(PROMPT, max_new_tokens=5)
    stats = run.stats
    assert (stats.prompt_tokens, stats.cached_tokens, stats.new_tokens, stats.cycles) == (6, 0, 5, 4)
    assert stats.verify_s == 4 * 3 * LAYER_S
    assert stats.project_s == 4 * LAYER_S
    assert stats.read_bytes == 4 * 3 * 100
    assert stats.tokens_per_cycle == 1.0
    assert stats.prefill_s > 0
    assert stats.decode_s > 0
    assert stats.python_s == pytest.approx(stats.decode_s - stats.verify_s - stats.project_s)


def test_figures_of_an_answer_begin_at_zero() -> None:
    run = Run()
    run.answer(PROMPT, max_new_tokens=5)
    run.answer([*PROMPT, 15], max_new_tokens=2)
    assert (run.stats.new_tokens, run.stats.cycles, run.stats.read_bytes) == (2, 1, 300)
    assert run.stats.verify_s == 3 * LAYER_S


def test_figures_are_up_to_date_at_every_step() -> None:
    run = Run()
    stats = RunStats()
    steps = run.engine.steps(PROMPT, run.draw, max_new_tokens=4, end_tokens=frozenset(), stats=stats)
    assert [(stats.new_tokens, stats.cycles, stats.read_bytes) for _ in steps] == [
        (1, 0, 0),
        (2, 1, 300),
        (3, 2, 600),
        (4, 3, 900),
    ]


def test_the_first_pass_for_a_token_gets_the_threads_that_were_asked_for() -> None:
    for start, expected in ((None, 1), (2, 2)):
        run = Run()
        run.engine = Engine(run.model.as_model(), run.model.store.as_store(), n_threads=4, start_threads=start)
        run.answer(PROMPT, max_new_tokens=2)
        assert run.model.threads[-1] == expected
