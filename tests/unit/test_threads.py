"""ThreadChooser against machines whose times are written down."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from lever.threads import LAST_PAUSE, ThreadChooser

# threads -> (seconds, seconds of them spent waiting for reads)
Machine = Callable[[int], tuple[float, float]]


def counts(chooser: ThreadChooser, machine: Machine, n: int) -> list[int]:
    """The thread counts of n pieces of work."""
    used = []
    for _ in range(n):
        used.append(chooser.count)
        chooser.observe(*machine(chooser.count))
    return used


def bound_by_compute(threads: int) -> tuple[float, float]:
    return 1.0 / threads, 0.0


def bound_by_reads(threads: int) -> tuple[float, float]:
    return 1.0, 1.0 - 0.3 / threads


def contended(threads: int) -> tuple[float, float]:
    """Another process has all cores but one: threads wait for a partner that does not run."""
    return (1.0, 0.0) if threads == 1 else (4.0, 0.0)


def test_work_that_is_bound_by_compute_soon_gets_all_threads_and_keeps_them() -> None:
    chooser = ThreadChooser(1, 8)
    used = counts(chooser, bound_by_compute, 400)
    assert 8 in used[:16]
    assert used[200:].count(8) > 190


def test_more_threads_than_there_are_are_never_used() -> None:
    assert max(counts(ThreadChooser(1, 6), bound_by_compute, 100)) == 6


def test_a_pass_that_waits_for_reads_stays_with_one_thread() -> None:
    assert set(counts(ThreadChooser(1, 8), bound_by_reads, 100)) == {1}


def test_a_pass_that_waits_for_reads_gives_up_threads_it_does_not_need() -> None:
    assert counts(ThreadChooser(8, 8), bound_by_reads, 40)[-1] == 1


def test_threads_that_are_in_each_others_way_are_dropped() -> None:
    used = counts(ThreadChooser(2, 2), contended, 400)
    assert used[2:].count(2) < 12


def test_trials_that_fail_become_rare() -> None:
    used = counts(ThreadChooser(2, 2), bound_by_compute, 4 * LAST_PAUSE)
    trials = [place for place, count in enumerate(used) if count == 1]
    pauses = [later - earlier for earlier, later in pairwise(trials)]
    assert pauses == sorted(pauses)
    assert len(trials) <= 8


def test_a_machine_that_becomes_free_is_noticed() -> None:
    chooser = ThreadChooser(2, 2)
    assert counts(chooser, contended, 50)[-1] == 1
    assert counts(chooser, bound_by_compute, 2 * LAST_PAUSE)[-1] == 2


def test_one_thread_is_one_thread() -> None:
    assert set(counts(ThreadChooser(1, 1), bound_by_compute, 50)) == {1}


def test_it_says_which_pieces_of_work_are_trials() -> None:
    """Their time is not what such work usually takes."""
    chooser, trials = ThreadChooser(1, 2), []
    for _ in range(30):
        trials.append((chooser.count, chooser.trying))
        chooser.observe(1.0 if chooser.count == 1 else 9.0, 0.0)
    assert {count for count, trying in trials if trying} == {2}
    assert {count for count, trying in trials if not trying} == {1}
