"""What a rule would have pruned of trees that went through a pass whole, and what it would have lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from lever.prune import DRAFT, PAPER, Mix, candidates, weigh
from lever.trace import Cycle
from lever.training.trees import Checked, Kept, Watching, by_paper, by_reach, kept_by, tightest
from lever.tree import DraftTree, depth_first
from tests.unit.test_prune import grown

ACCEPTED = 0.95
Rule = Callable[[Checked], Sequence[int]]


def checked(accepted: Sequence[int] = (1, 2, 3)) -> Checked:
    """A root with a chain of three likely nodes behind it, and two unlikely siblings of the first."""
    tree = DraftTree.rooted_at(0)
    tree.expand(0, 0, [(1, 0.6), (2, 0.2), (3, 0.1)])
    tree.expand(1, 1, [(4, 0.5)])
    tree.expand(4, 2, [(5, 0.5)])
    rows = depth_first(tree, range(len(tree)))
    found = candidates(tree, rows)
    return Checked(tree, rows, found, [0.0] * len(found), accepted)


def grown_and_checked(seed: int) -> Checked:
    """Any tree with any scores, of which a path is accepted that is the likelier the likelier its edges are."""
    tree, rows = grown(seed)
    dice, found = random.Random(seed), candidates(tree, rows)
    scores = [dice.gauss(0, 1) for _ in found]
    edge, path = weigh(tree, rows, found, scores, PAPER).edge, [0]
    for row, parent in enumerate(rows.parents):
        if parent == path[-1] and dice.random() < edge[row]:
            path.append(row)
    return Checked(tree, rows, found, scores, path[1:])


TREES = [grown_and_checked(seed) for seed in range(40)]


def keeping(*rows: int) -> Rule:
    return lambda _tree: rows


# --- what is kept -------------------------------------------------------------------------------------------


def test_shares_are_of_rows_behind_the_root_and_of_what_is_accepted() -> None:
    assert checked().rows.parents == (-1, 0, 1, 2, 0, 0)
    assert kept_by([checked()], keeping(0, 1, 2, 3)) == Kept(0.6, 1.0)
    assert kept_by([checked()], keeping(0, 1, 2)) == Kept(0.4, 2 / 3)
    assert kept_by([checked()], keeping(0)) == Kept(0.0, 0.0)


def test_what_is_accepted_ends_at_the_first_row_that_is_pruned() -> None:
    assert kept_by([checked()], keeping(0, 1, 3, 4)).accepted == pytest.approx(1 / 3)
    assert kept_by([checked()], keeping(0, 2, 3, 4, 5)).accepted == 0


def test_trees_count_by_their_rows() -> None:
    tree = DraftTree.rooted_at(0)
    tree.expand(0, 0, [(1, 0.6)])
    rows = depth_first(tree, [0, 1])
    small = Checked(tree, rows, candidates(tree, rows), [0.0], [1])
    assert kept_by([checked(), small], lambda tree: [0, 1] if tree is small else [0]) == Kept(1 / 6, 1 / 4)


def test_of_no_trees_all_is_kept_and_nothing_is_shown() -> None:
    """So that a predictor that was never tried is not taken for one that leaves nothing."""
    assert kept_by([], keeping(0)) == Kept(1.0, 0.0)
    assert tightest([], by_reach(DRAFT), ACCEPTED) == (0.0, Kept(1.0, 0.0))


# --- the tightest threshold ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", [DRAFT, PAPER, Mix(0.5, 0.8)], ids=str)
def test_the_tightest_threshold_keeps_what_it_must_and_a_larger_one_does_not(mix: Mix) -> None:
    threshold, kept = tightest(TREES, by_reach(mix), ACCEPTED)
    assert kept == kept_by(TREES, by_reach(mix)(threshold))
    assert kept.accepted >= ACCEPTED
    assert 0 < kept.rows < 1
    assert kept_by(TREES, by_reach(mix)(threshold * 1.0001)).accepted < ACCEPTED


@pytest.mark.parametrize("least", [0.3, 0.8, 0.95, 1.0])
def test_the_papers_rule_keeps_what_it_must(least: float) -> None:
    threshold, kept = tightest(TREES, by_paper, least)
    assert kept == kept_by(TREES, by_paper(threshold))
    assert kept.accepted >= least
    assert 0 <= threshold <= 1


def test_what_is_kept_by_reach_shrinks_as_thresholds_rise() -> None:
    found = [kept_by(TREES, by_reach(PAPER)(threshold)) for threshold in (0.0, 0.001, 0.01, 0.05, 0.2, 0.5, 1.0)]
    assert found[0] == Kept(1.0, 1.0)
    for shares in ([kept.rows for kept in found], [kept.accepted for kept in found]):
        assert shares == sorted(shares, reverse=True)
        assert len(set(shares)) > 3


def test_the_less_must_be_kept_the_fewer_rows_are() -> None:
    rows = [tightest(TREES, by_reach(PAPER), least)[1].rows for least in (1.0, 0.95, 0.7, 0.4)]
    assert rows == sorted(rows, reverse=True)
    assert len(set(rows)) == 4


def test_where_every_threshold_loses_too_much_all_is_kept() -> None:
    def harsh(threshold: float) -> Rule:
        return lambda tree: range(len(tree.rows.nodes)) if threshold == 0 else [0]

    assert tightest(TREES, harsh, ACCEPTED) == (0.0, Kept(1.0, 1.0))


def test_where_nothing_was_accepted_no_threshold_is_shown_to_do_no_harm() -> None:
    assert tightest([checked(accepted=())], by_reach(DRAFT), ACCEPTED) == (0.0, Kept(1.0, 0.0))


def test_what_is_less_likely_than_the_end_of_what_is_accepted_may_go() -> None:
    """Of the siblings the one of 0.1, and not that of 0.2."""
    threshold, kept = tightest([checked()], by_reach(DRAFT), 1.0)
    assert kept == Kept(0.8, 1.0)
    assert threshold == pytest.approx(0.15, rel=1e-4)


# --- watching -----------------------------------------------------------------------------------------------


def ended(accepted: Sequence[int]) -> Cycle:
    tree = checked()
    return Cycle(tree.tree, tree.rows, tuple(accepted), 0, 0.0, ())


def test_a_rule_that_watches_prunes_nothing_and_remembers_what_became_of_it() -> None:
    watching, tree = Watching(), checked()
    assert list(watching.rule(tree.tree, tree.rows, tree.found, tree.scores)) == list(range(6))
    watching.cycle(ended([1, 2]))
    assert watching.checked == [Checked(tree.tree, tree.rows, tree.found, tree.scores, (1, 2))]


def test_a_cycle_in_which_nothing_was_asked_leaves_nothing() -> None:
    watching, tree = Watching(), checked()
    watching.cycle(ended([]))
    watching.rule(tree.tree, tree.rows, tree.found, tree.scores)
    watching.cycle(ended([1]))
    watching.cycle(ended([1, 2]))
    assert [found.accepted for found in watching.checked] == [(1,)]
