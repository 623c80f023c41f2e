"""Times by rows: lines through what was seen, and how little one bad moment may say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lever.times import CREDIBLE, WEIGHT, Average, Line, Scaled, through

Observations = dict[int, float]  # seconds by rows


def line_of(*seen: tuple[int, float], beyond: float = 1.0) -> Line:
    line = Line(beyond)
    for rows, seconds in seen:
        line.observe(rows, seconds)
    return line


# --- averages -----------------------------------------------------------------------------------------------


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


def test_an_average_that_was_foretold_gives_way_to_the_first_observation() -> None:
    average = Average(1.0)
    assert average.value == 1.0
    average.observe(3.0)
    assert average.value == 3.0
    average.observe(4.0)
    assert average.value == pytest.approx(3.0 + WEIGHT)


# --- lines --------------------------------------------------------------------------------------------------


def test_a_line_that_has_seen_nothing_says_so() -> None:
    assert Line().seconds(1) == Line().seconds(100) == 0.0


def test_one_row_is_on_no_line_with_others() -> None:
    """Kernels for one row read weights as fast as memory gives them; what four rows take tells nothing of it."""
    line = line_of((8, 0.20), (16, 0.30), (1, 0.04), (12, 0.25))
    assert [line.seconds(rows) for rows in (1, 8, 12, 20)] == pytest.approx([0.04, 0.20, 0.25, 0.35])


@pytest.mark.parametrize(("beyond", "seconds"), [(1.0, 0.4), (0.5, 0.25)])
def test_with_one_row_seen_only_others_go_by_it(beyond: float, seconds: float) -> None:
    assert line_of((1, 0.1), (1, 0.1), beyond=beyond).seconds(4) == pytest.approx(seconds)


@pytest.mark.parametrize(("beyond", "seconds"), [(1.0, 2.0), (0.5, 1.5), (0.0, 1.0)])
def test_with_one_number_of_rows_seen_others_go_in_proportion_or_a_share_of_it(beyond: float, seconds: float) -> None:
    line = line_of((4, 1.0), (4, 1.0), beyond=beyond)
    assert line.seconds(4) == pytest.approx(1.0)
    assert line.seconds(8) == pytest.approx(seconds)


@pytest.mark.parametrize("rows", [1, 8, 16, 40])
def test_times_that_lie_on_a_line_are_known_everywhere(rows: int) -> None:
    line = line_of(*((n, 0.1 + 0.02 * n) for n in (1, 16, 4, 9, 16)))
    assert line.seconds(rows) == pytest.approx(0.1 + 0.02 * rows)


def test_the_slope_is_that_of_least_squares_with_the_later_ones_counting_more() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(1, 33, 60)
    seconds = 0.1 + 0.02 * rows + rng.normal(0, 0.002, 60)
    line = line_of(*((int(n), float(s)) for n, s in zip(rows, seconds, strict=True)))
    weights = 0.9 ** np.arange(59, -1, -1)
    slope, start = np.polyfit(rows, seconds, 1, w=np.sqrt(weights))
    assert line.seconds(1) == pytest.approx(start + slope, rel=0.02)
    assert line.seconds(40) == pytest.approx(start + 40 * slope, rel=0.02)


def test_more_rows_never_take_less_nor_more_than_in_proportion() -> None:
    falling = line_of((4, 1.0), (8, 0.5), (4, 1.0), (8, 0.5))
    assert falling.seconds(4) == pytest.approx(falling.seconds(8))
    steep = line_of((8, 0.1), (16, 1.0), (8, 0.1), (16, 1.0))
    assert steep.seconds(1) >= 0


def test_a_slope_that_was_known_stays_known_while_one_number_of_rows_is_seen() -> None:
    line = line_of((1, 0.1), (16, 0.4), (1, 0.1), (16, 0.4))
    for _ in range(200):
        line.observe(16, 0.4)
    assert line.seconds(1) == pytest.approx(0.1, rel=0.05)


def test_one_bad_moment_makes_no_number_of_rows_dear_beside_its_neighbours() -> None:
    """What one more row takes decides how large trees are; a table of averages would say that the next row is dear."""
    line = line_of(*((n, 0.1 + 0.02 * n) for n in (8, 9, 16, 8, 9, 16)))
    line.observe(10, 5.0)
    more = [line.seconds(n + 1) - line.seconds(n) for n in range(8, 16)]
    assert max(more) == pytest.approx(min(more))
    assert line.seconds(10) < CREDIBLE * 0.3


def test_what_is_slow_for_good_is_learned_in_a_few_steps() -> None:
    line = line_of((8, 0.1), (8, 0.1), (8, 0.1))
    for _ in range(12):
        line.observe(8, 1.0)
    assert line.seconds(8) > 0.7


# --- what was foretold --------------------------------------------------------------------------------------


def test_what_was_foretold_holds_until_something_is_seen() -> None:
    assert [Scaled({1: 0.1, 16: 0.4}).seconds(rows) for rows in (1, 6, 16)] == pytest.approx([0.1, 0.2, 0.4])


def test_the_level_is_what_was_seen_and_the_shape_what_was_foretold() -> None:
    times = Scaled({1: 0.1, 16: 0.4})
    times.observe(16, 0.8)
    assert [times.seconds(rows) for rows in (1, 6, 16, 31)] == pytest.approx([0.2, 0.4, 0.8, 1.4])


def test_a_first_moment_that_is_bad_is_not_believed_whole() -> None:
    times = Scaled({1: 0.1, 16: 0.4})
    times.observe(1, 60.0)
    assert times.seconds(1) == pytest.approx(CREDIBLE * 0.1)


def test_one_bad_moment_raises_the_level_a_little() -> None:
    times = Scaled({1: 0.1, 16: 0.4})
    times.observe(16, 0.4)
    times.observe(16, 40.0)
    assert times.seconds(16) == pytest.approx(0.4 * (1 + WEIGHT * (CREDIBLE - 1)))


@given(foretold=st.dictionaries(st.integers(1, 48), st.floats(1e-4, 10), min_size=1, max_size=6))
def test_lines_go_through_all_points(foretold: Observations) -> None:
    assert [through(foretold, rows) for rows in foretold] == pytest.approx(list(foretold.values()))


def test_outside_of_the_points_it_is_proportion_before_and_the_last_line_beyond() -> None:
    points = {4: 1.0, 8: 3.0, 16: 4.0}
    assert [through(points, rows) for rows in (1, 2, 6, 12, 32)] == pytest.approx([0.25, 0.5, 2.0, 3.5, 6.0])
    assert through({4: 1.0}, 8) == pytest.approx(2.0)
    assert through({4: 1.0, 8: 0.5}, 16) == pytest.approx(0.5)  # a line that falls is level


def test_a_shape_that_was_foretold_wrongly_gives_way_to_what_many_passes_show() -> None:
    times = Scaled({1: 0.01, 16: 1.6})
    for rows in (4, 12, 16, 8, 1) * 20:
        times.observe(rows, 0.1 + 0.02 * rows)
    assert [times.seconds(rows) for rows in (1, 10, 24)] == pytest.approx([0.12, 0.3, 0.58], rel=0.1)


def test_what_one_row_takes_is_as_foretold_until_it_is_seen() -> None:
    times = Scaled({1: 0.05, 16: 0.4})
    for rows in (4, 12, 16, 8) * 3:
        times.observe(rows, 0.1 + 0.02 * rows)
    assert times.seconds(1) == pytest.approx(0.05, rel=0.5)
    times.observe(1, 0.04)
    assert times.seconds(1) == pytest.approx(0.04)
