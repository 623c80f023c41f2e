"""What a cycle costs, from times that are written down: tables, the lines between their entries, and the knee."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lever.cycle_cost import FORGOTTEN, WEIGHT, Average, CycleCost, RowTable

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
