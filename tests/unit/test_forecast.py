"""What a cycle with a draft is expected to be, from figures that are given here."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lever.cost import Measured, RowTime, at_once
from lever.cycle_cost import CycleCost
from lever.forecast import (
    MOST_FIRST,
    Cycle,
    Streamed,
    agreement,
    expected_cycle,
    foretell,
    guesses,
    tokens_of_best,
)
from lever.policies import preset
from tests.unit.test_cost import LAYER_BYTES, N_LAYERS, WHOLE, layer, profile, together

MOST_ROWS = 48
STEPS = tuple(RowTime(n, 1, Measured(0.01 + 0.001 * n)) for n in (1, 2, 4))


# --- a draft that is made up --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "among_two", "among_four"),
    [(0.90, 0.96, 0.99), (0.83, 0.93, 0.96)],  # the demo pair: math, and chats
)
def test_the_made_up_draft_is_as_often_right_as_the_demo_pair(
    first: float, among_two: float, among_four: float
) -> None:
    shares = guesses(first)

    assert sum(shares[:2]) == pytest.approx(among_two, abs=0.01)
    assert sum(shares) == pytest.approx(among_four, abs=0.015)
    assert list(shares) == sorted(shares, reverse=True)


def test_no_draft_is_right_more_often_than_always() -> None:
    for hundredths in range(101):
        assert sum(guesses(hundredths / 100)) <= 1
        assert min(guesses(hundredths / 100)) >= 0


def test_a_root_alone_brings_one_token_and_a_chain_the_sum_of_its_powers() -> None:
    assert tokens_of_best(0.9, 1) == 1.0
    assert tokens_of_best(0.9, 4) == pytest.approx(1 + 0.9 + 0.81 + 0.729)
    assert tokens_of_best(0.0, 9) == 1.0


@pytest.mark.parametrize(
    ("first", "rows", "tokens"), [(0.90, 16, 8.7), (0.90, 26, 10.0), (0.83, 8, 3.8), (0.83, 26, 5.1)]
)
def test_tokens_of_trees_are_near_those_that_the_demo_pair_gave(first: float, rows: int, tokens: float) -> None:
    """A draft that is equally sure everywhere is a simplification: a quarter is near enough for a plan."""
    assert tokens_of_best(first, rows) == pytest.approx(tokens, rel=0.25)


@pytest.mark.parametrize("rows", [2, 8, 26, 48])
def test_a_better_draft_never_brings_fewer_tokens(rows: int) -> None:
    tokens = [tokens_of_best(hundredths / 100, rows) for hundredths in range(101)]

    assert all(few <= many for few, many in pairwise(tokens))


@given(first=st.floats(0.05, 0.98), rows=st.integers(2, 48))
def test_the_agreement_is_found_again_from_the_tokens_that_it_brings(first: float, rows: int) -> None:
    assert agreement(tokens_of_best(first, rows), rows) == pytest.approx(first, abs=1e-3)


def test_passes_with_and_without_a_guess_are_told_apart_by_their_mean() -> None:
    """One pass in four checks one guess, which is right in 8 of 10."""
    assert agreement(1.2, 1.25) == pytest.approx(0.8, abs=1e-3)


def test_an_agreement_lies_within_its_bounds_whatever_a_run_brought() -> None:
    assert agreement(1.0, 8) == pytest.approx(0, abs=1e-3)
    assert agreement(99.0, 8) == pytest.approx(MOST_FIRST, abs=1e-3)


# --- what a profile says ------------------------------------------------------------------------------------


def test_a_profile_and_a_plan_foretell_each_part_of_a_cycle() -> None:
    p = profile()
    half = Streamed(layers=WHOLE // 2, projection=LAYER_BYTES)
    found = foretell(p, half, STEPS, (1, 2), MOST_ROWS)

    assert found.read_s == pytest.approx(0.05)  # at 1 GB/s
    assert found.compute[1][1] == pytest.approx(N_LAYERS * 3.5e-3)  # half as much slower as with all streamed
    assert found.compute[2][16] == pytest.approx(N_LAYERS * 9e-3 + N_LAYERS * 0.5 * (2.5e-3 * 16 - 9e-3))
    assert found.project == pytest.approx({1: 0.01, 2: 0.01})  # its bands take longer than its product
    assert found.draft == {1: {1: 0.011, 2: 0.012, 4: 0.014}}
    assert list(found.compute[1]) == [1, 2, 4, 8, 16, 24, 32, 48]


def test_what_neither_side_explains_is_foretold_as_the_rest() -> None:
    slow = profile(together=(together(1, 1, seconds=0.2),))
    found = foretell(slow, Streamed(WHOLE, 0), (), (1,), MOST_ROWS)

    assert found.rest_s == pytest.approx(0.2 - 0.1, rel=0.02)
    assert found.rest_s > at_once(0.1, 0.046) - 0.1


def test_steps_with_more_threads_than_are_allowed_are_left_out() -> None:
    both = (*STEPS, RowTime(1, 2, Measured(0.005)))

    assert set(foretell(profile(), Streamed(WHOLE, 0), both, (1,), MOST_ROWS).draft) == {1}
    assert foretell(profile(), Streamed(WHOLE, 0), (), (1,), MOST_ROWS).draft == {}


# --- a cycle ------------------------------------------------------------------------------------------------


def cycle(first: float, layers: int = WHOLE, steps: tuple[RowTime, ...] = STEPS, name: str = "lever") -> Cycle:
    cost = CycleCost(1, foretell(profile(), Streamed(layers, 0), steps, (1,), MOST_ROWS))
    return expected_cycle(preset(name), cost, first, MOST_ROWS)


def test_a_chain_of_eight_is_eight_draft_steps_and_nine_rows() -> None:
    found = cycle(0.8, name="chain-sd")

    assert (found.steps, found.rows) == (8, 9)
    assert found.tokens == pytest.approx(sum(0.8**n for n in range(9)))
    assert found.draft_s == pytest.approx(8 * 0.011)
    assert found.project_s == pytest.approx(found.tokens * 5e-3)
    assert found.seconds == pytest.approx(found.draft_s + found.pass_s + found.project_s)


def test_tokens_of_a_cycle_are_those_that_chance_brings() -> None:
    """The tree of a made-up draft, walked 4000 times by a target that agrees as often as assumed.

    The mean of a chain of 8 has a standard error of 0.05: within 0.25 it fails by chance once in a million runs.
    """
    rng = random.Random(1)
    found = cycle(0.8, name="chain-sd")
    walks = [next(n for n in range(9) if n == 8 or rng.random() >= 0.8) + 1 for _ in range(4000)]

    assert found.tokens == pytest.approx(sum(walks) / len(walks), abs=0.25)


def test_a_draft_that_is_right_more_often_brings_more_tokens_a_second() -> None:
    rates = [cycle(share).tokens / cycle(share).seconds for share in (0.3, 0.6, 0.83, 0.95)]

    assert rates == sorted(rates)
    assert rates[-1] > 1.3 * rates[0]


def test_more_rows_are_checked_where_reads_hide_them() -> None:
    thin = profile(layers=(layer(1, 1, 0.5), layer(48, 1, 6)), together=(together(1, 1, layer=0.5e-3),))
    rows = []
    for streamed in (WHOLE, WHOLE // 100):
        cost = CycleCost(1, foretell(thin, Streamed(streamed, 0), STEPS, (1,), MOST_ROWS))
        rows.append(expected_cycle(preset("lever"), cost, 0.83, MOST_ROWS).rows)

    assert rows[0] > rows[1]


def test_a_slow_draft_is_asked_once_and_no_more() -> None:
    slow = tuple(RowTime(n, 1, Measured(5.0)) for n in (1, 2, 4))

    assert cycle(0.9, steps=slow).steps == 1
