"""What a cycle costs, from times that are written down: tables, the lines between their entries, and the knee."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lever.cycle_cost import (
    ENOUGH,
    FIRST_PAUSE,
    FORGOTTEN,
    LAST_PAUSE,
    LEAST_TRUST,
    WEIGHT,
    Average,
    CycleCost,
    Reliability,
    RowTable,
    Worth,
)

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


@pytest.mark.parametrize(("beyond", "seconds"), [(1.0, 6.0), (0.5, 4.0), (0.0, 2.0)])
def test_beyond_the_most_rows_a_table_adds_its_share_of_what_proportion_says(beyond: float, seconds: float) -> None:
    table = RowTable(beyond)
    table.observe(4, 2.0)
    assert table.seconds(12) == pytest.approx(seconds)
    assert table.seconds(4) == 2.0
    assert table.seconds(2) == 1.0  # below the fewest it is proportion always


def test_a_prompt_gives_a_first_idea_and_says_nothing_once_a_pass_was_seen() -> None:
    cost = CycleCost(n_threads=2)
    cost.observe_prefill(8, compute_s=0.8, read_s=0.4, threads=2)
    assert cost.knows_passes
    assert cost.pass_s(1) == pytest.approx(0.4)
    assert cost.pass_s(16) == pytest.approx(1.6)
    cost.observe_pass(1, 0.5, 0.1, 0.5, threads=2)
    before = [cost.pass_s(rows) for rows in (1, 8, 64)]
    cost.observe_prefill(8, compute_s=80.0, read_s=40.0, threads=2)
    cost.observe_prefill(512, compute_s=80.0, read_s=40.0, threads=1)
    assert [cost.pass_s(rows) for rows in (1, 8, 64)] == before


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_what_was_asked_before_is_not_what_is_answered_after_something_was_seen(rows: int) -> None:
    """Answers are kept until then; all of them are those of an object that was never asked."""

    def observe(cost: CycleCost, step: int) -> None:
        if step < 2:
            cost.observe_prefill(8, 0.8 - 0.3 * step, 0.4 + step, threads=1)
        else:
            cost.observe_pass(1 + 7 * step, 0.9 * step, 0.2 * step, 0.1 * step, threads=1 + step % 2)

    asked = CycleCost(n_threads=2)
    for n in range(8):
        observe(asked, n)
        fresh = CycleCost(n_threads=2)
        for step in range(n + 1):
            observe(fresh, step)
        assert (asked.pass_s(rows), asked.threads(rows)) == (fresh.pass_s(rows), fresh.threads(rows))


# --- reliability --------------------------------------------------------------------------------------------


def reliability_after(promised: float, met: float, n: int = 400, start: Reliability | None = None) -> Reliability:
    """A draft whose candidates have one probability by its own word, and another in truth: evenly spread."""
    found, total = start or Reliability(), 0.0
    for _ in range(n):
        total += met
        found.observe(promised, total >= 1)
        total -= total >= 1
    return found


def test_a_draft_is_believed_before_anything_was_seen() -> None:
    assert Reliability().value == 1.0


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 1.0])
def test_an_honest_draft_is_believed_however_much_it_knows(share: float) -> None:
    assert reliability_after(share, share).value == pytest.approx(1.0, abs=0.15)


def test_a_modest_draft_is_not_believed_more_than_it_says() -> None:
    assert reliability_after(0.3, 0.9).value == 1.0


@pytest.mark.parametrize(("promised", "met"), [(0.9, 0.3), (1.0, 0.5), (0.8, 0.2)])
def test_a_boaster_is_believed_as_far_as_it_was_right(promised: float, met: float) -> None:
    assert reliability_after(promised, met).value == pytest.approx(met / promised, rel=0.2)


def test_a_boaster_that_has_become_honest_is_believed_again() -> None:
    boaster = reliability_after(1.0, 0.0, 50)
    assert boaster.value < 0.1
    assert reliability_after(0.9, 0.9, 60, boaster).value > 0.9


def test_a_draft_that_was_never_right_keeps_a_way_back() -> None:
    """At nothing, no candidate would ever be worth a row, and there would be nothing to divide by."""
    never = reliability_after(1.0, 0.0, 20_000)
    assert never.value == LEAST_TRUST > 0


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=60))
def test_what_is_believed_is_a_share(seen: list[tuple[float, bool]]) -> None:
    found = Reliability()
    for promised, met in seen:
        found.observe(promised, met)
        assert LEAST_TRUST <= found.value <= 1


# --- worth --------------------------------------------------------------------------------------------------


class Cycles:
    """Cycles one after another, as the engine has them; which of them guessed."""

    def __init__(self) -> None:
        self.worth = Worth()
        self.guessed: list[bool] = []

    def run(self, n: int, *, tokens: int, seconds: float, plain_s: float = 1.0) -> Cycles:
        for _ in range(n):
            self.guessed.append(self.worth.guessing)
            if self.worth.guessing:
                self.worth.observe(tokens, seconds, plain_s)
            else:
                self.worth.wait()
        return self

    @property
    def pauses(self) -> list[int]:
        """Lengths of the runs of cycles without a guess, the last one too."""
        runs = "".join(".x"[not guessed] for guessed in self.guessed).split(".")
        return [len(run) for run in runs if run]


def test_guessing_that_pays_goes_on() -> None:
    cycles = Cycles().run(200, tokens=3, seconds=2.0)
    assert all(cycles.guessed)
    assert cycles.worth.tokens_per_s == pytest.approx(1.5)


def test_guessing_that_does_not_pay_pauses_after_a_few_cycles_and_for_longer_each_time() -> None:
    cycles = Cycles().run(1000, tokens=1, seconds=2.0)
    assert cycles.guessed[: ENOUGH + 1] == [True] * ENOUGH + [False]
    doubled = [FIRST_PAUSE << n for n in range(6)]
    assert cycles.pauses[:-1] == [*doubled, LAST_PAUSE]
    assert sum(cycles.guessed) == ENOUGH + len(doubled) + 1


def test_one_bad_cycle_among_good_ones_is_no_reason_to_pause() -> None:
    cycles = Cycles()
    for _ in range(20):
        cycles.run(4, tokens=4, seconds=2.0).run(1, tokens=1, seconds=2.0)
    assert all(cycles.guessed)


def test_after_a_pause_guessing_that_pays_goes_on_and_the_next_pause_is_short_again() -> None:
    cycles = Cycles().run(80, tokens=1, seconds=2.0)
    assert cycles.pauses[:2] == [FIRST_PAUSE, 2 * FIRST_PAUSE]
    while not cycles.worth.guessing:
        cycles.worth.wait()
    cycles.guessed.clear()
    cycles.run(30, tokens=4, seconds=2.0)
    assert all(cycles.guessed)
    cycles.run(60, tokens=1, seconds=2.0)
    assert cycles.pauses[0] == FIRST_PAUSE


def test_what_guessing_brought_is_unknown_before_there_was_any() -> None:
    worth = Worth()
    assert worth.guessing
    assert worth.tokens_per_s is None
    worth.wait()
    assert worth.guessing


def test_guessing_that_pays_on_the_whole_is_hardly_ever_left() -> None:
    """Cycles of one to eight tokens, as long as two plain ones. By chance a few in a row bring one each."""
    rng, guessed = random.Random(1), 0
    for _ in range(50):
        cycles = Cycles()
        for _ in range(300):
            cycles.run(1, tokens=rng.randint(1, 8), seconds=2.0)
        guessed += sum(cycles.guessed)
    assert guessed > 0.97 * 50 * 300
