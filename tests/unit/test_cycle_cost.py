"""What a cycle costs, from times that are written down: tables, the lines between their entries, and the knee."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lever.cycle_cost import FORGOTTEN, WEIGHT, Average, CycleCost, Foretold, ForetoldTable, RowTable
from lever.policies import Situation, preset
from lever.tree import IN_TEXT, DraftTree

Observations = dict[int, float]  # seconds by rows


def table_of(seen: Observations) -> RowTable:
    table = RowTable()
    for rows, seconds in seen.items():
        table.observe(rows, seconds)
    return table


# --- averages and tables ------------------------------------------------------------------------------------


def test_an_average_is_its_first_observation_and_then_moves_towards_each() -> None:
    average = Average()
    assert average.value is None
    average.observe(2.0)
    assert average.value == 2.0
    average.observe(3.0)
    assert average.value == pytest.approx(2.0 + WEIGHT)
    for _ in range(50):
        average.observe(5.0)
    assert average.value == pytest.approx(5.0)


def test_an_empty_table_says_nothing_is_known() -> None:
    assert RowTable().seconds(1) == RowTable().seconds(100) == 0.0


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        (4, 1.0),  # seen
        (8, 3.0),
        (16, 4.0),
        (6, 2.0),  # between
        (5, 1.5),
        (12, 3.5),
        (2, 0.5),  # in proportion to the nearest
        (1, 0.25),
        (32, 8.0),
        (20, 5.0),
    ],
)
def test_a_table_knows_what_it_saw_lines_between_and_proportions_outside(rows: int, seconds: float) -> None:
    assert table_of({16: 4.0, 4: 1.0, 8: 3.0}).seconds(rows) == pytest.approx(seconds)


def test_each_entry_of_a_table_moves_alone() -> None:
    table = table_of({4: 1.0, 8: 3.0})
    table.observe(8, 4.0)
    assert table.seconds(8) == pytest.approx(3.0 + WEIGHT)
    assert table.seconds(4) == 1.0


@given(seen=st.dictionaries(st.integers(1, 64), st.floats(0.001, 10), min_size=1, max_size=6), rows=st.integers(1, 100))
def test_a_guess_inside_of_what_was_seen_lies_between_its_neighbours(seen: Observations, rows: int) -> None:
    found = table_of(seen).seconds(rows)
    if rows in seen:
        assert found == seen[rows]
    elif rows < min(seen) or rows > max(seen):
        nearest = min(seen, key=lambda at: abs(at - rows))
        assert found == pytest.approx(seen[nearest] / nearest * rows)
    else:
        below = seen[max(at for at in seen if at < rows)]
        above = seen[min(at for at in seen if at > rows)]
        assert min(below, above) <= found * (1 + 1e-12)
        assert found <= max(below, above) * (1 + 1e-12)


# --- a cycle ------------------------------------------------------------------------------------------------


def test_nothing_is_known_before_the_first_pass() -> None:
    cost = CycleCost()
    assert not cost.knows_passes
    assert (cost.pass_s(4), cost.draft_s(2), cost.project_s()) == (0.0, 0.0, 0.0)
    cost.observe_draft(2, 0.1)
    cost.observe_project(1, 0.1)
    assert not cost.knows_passes
    cost.observe_pass(1, 0.5, 0.1, 0.4)
    assert cost.knows_passes


def test_a_pass_takes_the_slower_of_reading_and_computing_and_what_neither_hides() -> None:
    cost = CycleCost()
    cost.observe_pass(1, seconds=0.55, compute_s=0.1, read_s=0.5)
    assert cost.pass_s(1) == pytest.approx(0.55)
    assert cost.pass_s(4) == pytest.approx(0.55)  # computes for 0.4 s: hidden
    assert cost.pass_s(5) == pytest.approx(0.55)  # the knee
    assert cost.pass_s(8) == pytest.approx(0.85)


def test_a_pass_that_reads_nothing_is_its_compute() -> None:
    cost = CycleCost()
    cost.observe_pass(1, 0.1, 0.1, 0.0)
    cost.observe_pass(8, 0.2, 0.2, 0.0)
    assert cost.knows_passes
    assert [cost.pass_s(rows) for rows in (1, 8)] == pytest.approx([0.1, 0.2])


def test_a_pass_that_was_faster_than_its_parts_hides_all_of_them() -> None:
    """Bytes that were read ahead while the draft worked are counted before the pass begins."""
    cost = CycleCost()
    cost.observe_pass(1, seconds=0.3, compute_s=0.1, read_s=0.5)
    assert cost.pass_s(1) == 0.5


def test_drafts_go_by_nodes_and_projections_by_one() -> None:
    cost = CycleCost()
    cost.observe_draft(1, 0.02)
    cost.observe_draft(3, 0.03)
    cost.observe_project(1, 0.01)
    assert cost.draft_s(2) == pytest.approx(0.025)
    assert cost.draft_s(6) == pytest.approx(0.045)  # each more adds half of what proportion says
    assert cost.project_s() == 0.01


def test_a_draft_that_was_too_slow_once_is_tried_again() -> None:
    """Where drafting does not seem to pay nothing is drafted, so nothing else would ever correct the figure."""
    cost = CycleCost()
    cost.observe_pass(1, 0.4, 0.1, 0.4)
    cost.observe_draft(2, 60.0)
    for _ in range(FORGOTTEN):
        cost.observe_pass(1, 0.4, 0.1, 0.4)
        assert cost.draft_s(2) == 60.0
    cost.observe_pass(1, 0.4, 0.1, 0.4)
    assert cost.draft_s(2) == 0.0


def test_a_number_of_threads_that_was_slow_once_is_tried_again() -> None:
    cost = CycleCost(n_threads=2)
    cost.observe_pass(16, 0.8, 0.8, 0.4, threads=1)
    cost.observe_pass(16, 5.0, 5.0, 0.4, threads=2)
    assert cost.threads(16) == 1
    for _ in range(FORGOTTEN + 1):
        cost.observe_pass(16, 0.8, 0.8, 0.4, threads=1)
    assert cost.threads(16) == 2


# --- what is foretold ---------------------------------------------------------------------------------------

ONE_THREAD, TWO_THREADS = {1: 0.1, 16: 0.4, 48: 1.2}, {1: 0.08, 16: 0.22, 48: 0.6}
STEPS = {1: {1: 0.04, 2: 0.05, 4: 0.08}, 2: {1: 0.03, 2: 0.035, 4: 0.05}}


def foretold(**more: Any) -> Foretold:
    figures: dict[str, Any] = {
        "compute": {1: ONE_THREAD, 2: TWO_THREADS},
        "read_s": 0.3,
        "rest_s": 0.02,
        "project": {1: 0.012, 2: 0.01},
        "draft": STEPS,
    }
    return Foretold(**figures | more)


def test_an_average_that_was_foretold_gives_way_to_the_first_observation() -> None:
    average = Average(1.0)
    assert average.value == 1.0
    average.observe(3.0)
    assert average.value == 3.0
    average.observe(4.0)
    assert average.value == pytest.approx(3.0 + WEIGHT)


def test_a_foretold_table_is_what_was_foretold_until_something_is_seen() -> None:
    table = ForetoldTable({1: 0.1, 16: 0.4})

    assert [table.seconds(rows) for rows in (1, 6, 16)] == pytest.approx([0.1, 0.2, 0.4])


def test_the_level_is_what_was_seen_and_the_shape_what_was_foretold() -> None:
    table = ForetoldTable({1: 0.1, 16: 0.4})
    table.observe(16, 0.8)

    assert [table.seconds(rows) for rows in (1, 6, 16, 32)] == pytest.approx([0.2, 0.4, 0.8, 1.6])


def test_numbers_between_two_that_were_seen_take_a_level_between_theirs() -> None:
    table = ForetoldTable({1: 0.1, 21: 0.5})
    table.observe(1, 0.1)
    table.observe(21, 1.0)

    assert [table.seconds(rows) for rows in (1, 11, 21)] == pytest.approx([0.1, 1.5 * 0.3, 1.0])
    assert table.seconds(42) == pytest.approx(2 * 0.5 * 2)  # beyond: the level of the last


@given(
    foretold=st.dictionaries(st.integers(1, 48), st.floats(1e-4, 10), min_size=1, max_size=6),
    seen=st.dictionaries(st.integers(1, 48), st.floats(1e-4, 10), min_size=1, max_size=6),
)
def test_a_number_of_rows_that_was_seen_takes_what_was_seen(foretold: Observations, seen: Observations) -> None:
    table = ForetoldTable(foretold)
    for rows, seconds in seen.items():
        table.observe(rows, seconds)

    assert [table.seconds(rows) for rows in seen] == pytest.approx(list(seen.values()))
    assert all(table.seconds(rows) > 0 for rows in range(1, 60))


def test_before_the_first_pass_all_is_known_that_was_foretold() -> None:
    cost = CycleCost(2, foretold())

    assert cost.knows_passes
    assert cost.pass_s(1) == pytest.approx(0.32)  # reads, and the rest
    assert cost.pass_s(16) == pytest.approx(0.32)  # two threads hide it
    assert cost.draft_s(2) == pytest.approx(0.035)
    assert cost.project_s() == pytest.approx(0.012)  # with the threads of a plain pass
    assert (cost.threads(1), cost.threads(16), cost.threads(48)) == (1, 2, 2)
    assert cost.draft_threads == (2, 2)


def test_the_first_cycle_drafts_where_it_was_plain_without_a_word() -> None:
    def steps(cost: CycleCost) -> list[int]:
        tree = DraftTree.rooted_at(0)
        tree.expand(0, IN_TEXT, [(1, 0.9), (2, 0.05)])
        return preset("lever").grow(Situation(tree, cost, 0.0, 48))

    assert steps(CycleCost(2)) == []
    assert steps(CycleCost(2, foretold())) != []
    assert steps(CycleCost(2, foretold(draft={1: {1: 60.0}, 2: {1: 60.0}}))) == []


def test_a_slower_machine_than_foretold_is_slower_at_every_number_of_rows_and_threads() -> None:
    cost = CycleCost(2, foretold(read_s=0.01, rest_s=0.0))
    before = {rows: cost.pass_s(rows) for rows in (4, 16, 32)}
    assert cost.threads(16) == 2
    cost.observe_pass(16, 0.44, 0.44, 0.01, threads=2)  # twice as long

    assert {rows: cost.pass_s(rows) for rows in before} == pytest.approx({r: 2 * s for r, s in before.items()})
    assert cost.threads(16) == 2  # one thread is expected to be slower as well


def test_what_was_seen_of_draft_steps_goes_back_to_what_was_foretold_when_it_is_old() -> None:
    cost = CycleCost(2, foretold())
    cost.observe_pass(1, 0.4, 0.1, 0.4)
    cost.observe_draft(2, 60.0)
    assert cost.draft_s(2) == 60.0
    for _ in range(FORGOTTEN + 1):
        cost.observe_pass(1, 0.4, 0.1, 0.4)
    assert cost.draft_s(2) == pytest.approx(0.035)


def test_a_number_of_threads_of_which_nothing_was_foretold_shares_the_work_evenly() -> None:
    cost = CycleCost(4, foretold(compute={1: ONE_THREAD}, read_s=0.0, rest_s=0.0))
    cost.observe_pass(16, 0.4, 0.4, 0.0, threads=1)

    assert cost.threads(16) == 4
    assert cost.pass_s(16) == pytest.approx(0.1)


def test_a_model_without_a_draft_is_foretold_without_steps() -> None:
    cost = CycleCost(2, foretold(draft={}))

    assert (cost.draft_s(2), cost.draft_threads) == (0.0, (1, 2))


@pytest.mark.parametrize(
    ("steps", "most", "threads"),
    [
        ({1: {2: 0.05}, 2: {2: 0.03}}, 2, (2, 2)),
        ({1: {2: 0.05}, 2: {2: 0.03}}, 1, (1, 1)),
        ({1: {2: 0.05}, 2: {2: 0.049}}, 2, (1, 2)),  # as good: the fewest
        ({1: {2: 0.05}, 2: {2: 0.07}}, 2, (1, 2)),  # it may have been a moment's
        ({1: {2: 0.05}, 2: {1: 0.7}}, 2, (1, 1)),  # without a core of their own
        ({}, 2, (1, 2)),
    ],
)
def test_a_draft_gets_the_fewest_threads_that_are_as_good_and_none_that_were_far_worse(
    steps: dict[int, Observations], most: int, threads: tuple[int, int]
) -> None:
    assert CycleCost(most, foretold(draft=steps)).draft_threads == threads
