"""What a cycle costs, from times that are written down: parts, threads, the knee, and what was foretold."""

from __future__ import annotations

from typing import Any

import pytest

from lever.cycle_cost import FORGOTTEN_PASSES, CycleCost, Foretold
from lever.policies import Situation, preset
from lever.tree import IN_TEXT, DraftTree

Observations = dict[int, float]  # seconds by rows


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


def test_a_pass_takes_reading_and_computing_at_once_and_what_neither_hides() -> None:
    cost = CycleCost()
    cost.observe_pass(1, seconds=0.55, compute_s=0.1, read_s=0.5)
    assert cost.pass_s(1) == pytest.approx(0.55)
    assert cost.pass_s(3) == pytest.approx(0.55, rel=0.01)  # computes for 0.3 s: hidden
    assert cost.pass_s(5) == pytest.approx(0.05 + 1.12 * 0.5, rel=0.01)  # the knee, where each waits for the other
    assert cost.pass_s(8) == pytest.approx(0.85, rel=0.02)


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
    assert cost.pass_s(1) == pytest.approx(0.5, rel=1e-3)


def test_drafts_go_by_nodes_and_projections_by_one() -> None:
    cost = CycleCost()
    cost.observe_draft(1, 0.02)
    cost.observe_draft(3, 0.03)
    cost.observe_project(1, 0.01)
    assert cost.draft_s(2) == pytest.approx(0.025)
    assert cost.draft_s(6) == pytest.approx(0.045)
    assert cost.project_s() == 0.01
    assert cost.project_s(3) == pytest.approx(0.02)  # each more is thought to add half of what proportion says


def test_a_draft_that_was_too_slow_once_is_tried_again() -> None:
    """Where drafting does not seem to pay nothing is drafted, so nothing else would ever correct the figure."""
    cost = CycleCost()
    cost.observe_pass(1, 0.4, 0.1, 0.4)
    cost.observe_draft(2, 60.0)
    for _ in range(FORGOTTEN_PASSES):
        cost.observe_pass(1, 0.4, 0.1, 0.4)
        assert cost.draft_s(2) == 60.0
    cost.observe_pass(1, 0.4, 0.1, 0.4)
    assert cost.draft_s(2) == 0.0


def test_a_number_of_threads_that_was_slow_once_is_tried_again() -> None:
    cost = CycleCost(n_threads=2)
    cost.observe_pass(16, 0.8, 0.8, 0.4, threads=1)
    cost.observe_pass(16, 5.0, 5.0, 0.4, threads=2)
    assert cost.threads(16) == 1
    for _ in range(FORGOTTEN_PASSES + 1):
        cost.observe_pass(16, 0.8, 0.8, 0.4, threads=1)
    assert cost.threads(16) == 2


def test_a_prompt_gives_a_first_idea_and_says_nothing_once_a_pass_was_seen() -> None:
    cost = CycleCost(n_threads=2)
    cost.observe_prefill(8, compute_s=0.8, read_s=0.4, threads=2)
    assert cost.knows_passes
    assert cost.pass_s(1) == pytest.approx(0.4, rel=0.01)
    assert cost.pass_s(16) == pytest.approx(1.6, rel=0.01)
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


def passes_with(cost: CycleCost, n: int, seconds: dict[int, float], rows: int = 16) -> list[int]:
    """Threads of so many passes, whose compute takes so long by threads; nothing is read."""
    found = []
    for _ in range(n):
        threads = cost.next_threads(rows)
        cost.observe_pass(rows, seconds[threads], seconds[threads], 0.0, threads)
        found.append(threads)
    return found


def test_more_threads_that_were_foretold_to_be_slower_are_tried_and_kept_where_they_are_not() -> None:
    """A profile that was measured at a bad moment would else hold for good."""
    slower = {1: {1: 0.1, 16: 0.4}, 2: {1: 0.3, 16: 1.2}}
    found = passes_with(CycleCost(2, foretold(compute=slower, read_s=0.0, rest_s=0.0)), 30, {1: 0.4, 2: 0.2})
    assert found[:2] == [1, 1]
    assert found.count(1) <= 6
    assert found[-1] == 2


def test_trials_of_threads_that_fail_come_ever_more_seldom() -> None:
    cost = CycleCost(2, foretold(compute={1: {16: 0.4}, 2: {16: 1.2}}, read_s=0.0, rest_s=0.0))
    found = passes_with(cost, 200, {1: 0.4, 2: 2.0})
    assert 2 <= found.count(2) <= 6
    assert found[100:].count(2) <= found[:100].count(2)


def test_no_number_of_threads_is_tried_while_reads_are_the_limit() -> None:
    cost = CycleCost(2, foretold())
    for _ in range(50):
        assert cost.next_threads(1) == 1
        cost.observe_pass(1, 0.3, 0.1, 0.3, 1)


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


def test_before_the_first_pass_all_is_known_that_was_foretold() -> None:
    cost = CycleCost(2, foretold())

    assert cost.knows_passes
    assert cost.pass_s(1) == pytest.approx(0.32, rel=0.01)  # reads, and the rest
    assert cost.pass_s(16) == pytest.approx(0.32, rel=0.03)  # two threads hide it
    assert cost.draft_s(2) == pytest.approx(0.035)
    assert cost.project_s() == pytest.approx(0.01)
    assert cost.project_threads == (2, 2)
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
    cost.observe_draft(2, 0.07)
    assert cost.draft_s(2) == pytest.approx(0.07)
    for _ in range(FORGOTTEN_PASSES + 1):
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


# --- thinned passes -----------------------------------------------------------------------------------------


def test_a_thinned_pass_computes_each_share_of_the_layers_for_the_rows_that_it_has_there() -> None:
    cost = CycleCost(1, foretold(read_s=0.0))

    assert cost.thinned_s(48, 16, share=0.5) == pytest.approx(0.5 * 1.2 + 0.5 * 0.4 + 0.02)
    assert cost.thinned_s(48, 16, share=0.75) == pytest.approx(0.75 * 1.2 + 0.25 * 0.4 + 0.02)


@pytest.mark.parametrize("rows", [2, 16, 48])
def test_a_pass_that_is_thinned_of_nothing_or_behind_all_layers_takes_as_long_as_a_whole_one(rows: int) -> None:
    cost = CycleCost(2, foretold())

    assert cost.thinned_s(rows, rows, share=0.5) == pytest.approx(cost.pass_s(rows))
    assert cost.thinned_s(rows, 1, share=1.0) == pytest.approx(cost.pass_s(rows))


def test_thinning_saves_time_beyond_the_knee_and_hardly_any_under_it() -> None:
    cost = CycleCost(2, foretold())

    assert cost.thinned_s(48, 16, share=0.5) < 0.8 * cost.pass_s(48)
    assert 0.97 * cost.pass_s(16) < cost.thinned_s(16, 4, share=0.5) <= cost.pass_s(16)


def test_a_thinned_pass_keeps_the_threads_that_it_began_with() -> None:
    few_are_faster_on_one = {1: {1: 0.1, 48: 1.2}, 2: {1: 0.3, 48: 0.6}}
    cost = CycleCost(2, foretold(compute=few_are_faster_on_one, read_s=0.0, rest_s=0.0))

    assert (cost.threads(48), cost.threads(1)) == (2, 1)
    assert cost.thinned_s(48, 1, share=0.5) == pytest.approx(0.5 * 0.6 + 0.5 * 0.3)


def test_a_thinned_pass_tells_of_both_numbers_of_rows_and_is_foretold_as_it_was() -> None:
    cost = CycleCost()
    cost.observe_pass(16, seconds=0.45, compute_s=0.4, read_s=0.0, whole={16: 0.6, 4: 0.2})

    assert [cost.pass_s(rows) for rows in (16, 4)] == pytest.approx([0.65, 0.25])
    assert cost.thinned_s(16, 4, share=0.5) == pytest.approx(0.45)


def test_a_thinned_pass_is_one_pass_however_many_numbers_of_rows_it_tells_of() -> None:
    cost = CycleCost()
    cost.observe_draft(2, 60.0)
    for _ in range(FORGOTTEN_PASSES):
        cost.observe_pass(16, 0.45, 0.4, 0.0, whole={16: 0.6, 4: 0.2})
        assert cost.draft_s(2) == 60.0
    cost.observe_pass(16, 0.45, 0.4, 0.0, whole={16: 0.6, 4: 0.2})
    assert cost.draft_s(2) == 0.0


# --- plain passes -------------------------------------------------------------------------------------------


def test_a_plain_pass_is_wanted_first_where_nobody_knows_it_and_reads_are_not_the_limit() -> None:
    """What passes over many rows take tells little of it, and with all in memory it may be faster than any guess."""
    cost = CycleCost(2)
    cost.observe_prefill(64, compute_s=1.0, read_s=0.0, threads=2)
    assert cost.must_be_plain
    cost.observe_pass(1, 0.05, 0.05, 0.0, threads=2)
    assert not cost.must_be_plain
    for _ in range(5):
        cost.observe_pass(16, 0.3, 0.3, 0.0, threads=2)
        cost.observe_pass(8, 0.2, 0.2, 0.0, threads=2)
    assert cost.pass_s(1) == pytest.approx(0.05)


def test_no_plain_pass_is_wanted_where_reads_take_longer_anyway_or_all_was_foretold() -> None:
    cost = CycleCost(2)
    cost.observe_prefill(64, compute_s=1.0, read_s=0.4, threads=2)
    assert not cost.must_be_plain
    assert not CycleCost(2, foretold(read_s=0.0)).must_be_plain


def test_a_plain_pass_is_still_wanted_after_one_of_which_the_root_alone_went_on() -> None:
    """That one row took its layers among others, and only some of them."""
    cost = CycleCost()
    cost.observe_pass(16, 0.4, 0.4, 0.0, whole={16: 0.6, 1: 0.2})
    assert cost.must_be_plain


def test_passes_wait_for_reads_up_to_the_knee() -> None:
    cost = CycleCost(2, foretold())

    assert [cost.waits_for_reads_of(rows) for rows in (1, 16, 48)] == [True, True, False]
    assert cost.waits_for_reads
    assert not CycleCost(1, foretold()).waits_for_reads_of(16)  # one thread alone takes longer for them
    assert not CycleCost(2, foretold(read_s=0.0)).waits_for_reads_of(1)
