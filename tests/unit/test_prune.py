"""Which rows of a tree go on behind a middle layer."""

from __future__ import annotations

import math
import random

import pytest

from lever.prune import DRAFT, PAPER, Candidate, Mix, candidates, most_worth, over_threshold, weigh
from lever.tree import DraftTree, TreeRows, depth_first


def tree() -> tuple[DraftTree, TreeRows]:
    """A root with candidates a .5, b .3 and c .1, of which a and b are rows; behind a are d .6 (a row) and e .2."""
    found = DraftTree.rooted_at(0)
    found.expand(0, 0, [(1, 0.5), (2, 0.3), (3, 0.1)])
    found.expand(1, 1, [(4, 0.6), (5, 0.2)])
    return found, depth_first(found, [0, 1, 2, 4])


A, D, B = 1, 2, 3  # rows, depth-first


def grown(seed: int, n: int = 24) -> tuple[DraftTree, TreeRows]:
    """Any tree, and any part of it that is one."""
    dice = random.Random(seed)
    found = DraftTree.rooted_at(0)
    for slot in range(8):
        node = dice.choice([node for node in range(len(found)) if not found.expanded(node)])
        chances = sorted((dice.random() for _ in range(4)), reverse=True)
        found.expand(node, slot, [(10 * len(found) + k, chance / 4) for k, chance in enumerate(chances)])
    chosen = {0}
    while len(chosen) < min(n, len(found)):
        chosen.add(dice.choice([node for node in range(len(found)) if found.parents[node] in chosen]))
    return found, depth_first(found, chosen)


def test_candidates_are_all_that_the_draft_said_behind_rows_with_a_child() -> None:
    assert candidates(*tree()) == [
        Candidate(0, 1, A),
        Candidate(0, 2, B),
        Candidate(0, 3, None),
        Candidate(A, 4, D),
        Candidate(A, 5, None),
    ]


def test_equal_scores_leave_the_draft_its_probabilities() -> None:
    found, rows = tree()
    edges = weigh(found, rows, candidates(found, rows), [7.0] * 5, Mix(1.0, 1.0))
    assert edges.reach == pytest.approx([1.0, 0.5, 0.3, 0.3])
    assert edges.edge == pytest.approx([1.0, 5 / 9, 6 / 8, 3 / 9])


def test_the_papers_score_is_the_softmax_over_the_whole_candidate_set() -> None:
    found, rows = tree()
    scores = [math.log(2), math.log(5), math.log(3), math.log(1), math.log(4)]
    edge = weigh(found, rows, candidates(found, rows), scores, PAPER).edge
    assert edge == pytest.approx([1.0, 0.2, 0.2, 0.5])


def test_without_shadow_candidates_an_only_child_is_certain() -> None:
    found, rows = tree()
    edge = weigh(found, rows, candidates(found, rows), [0.0] * 5, PAPER, shadow=False).edge
    assert edge == pytest.approx([1.0, 0.5, 1.0, 0.5])


def test_the_drafts_mix_knows_no_scores() -> None:
    found, rows = tree()
    few = weigh(found, rows, candidates(found, rows), [1.0, -3.0, 9.0, 0.0, 50.0], DRAFT).reach
    assert few == pytest.approx([found.reach[node] for node in rows.nodes])


@pytest.mark.parametrize("seed", range(20))
def test_a_path_is_never_likelier_than_what_it_goes_through(seed: int) -> None:
    found, rows = grown(seed)
    at = candidates(found, rows)
    dice = random.Random(seed)
    edges = weigh(found, rows, at, [dice.gauss(0, 20) for _ in at], Mix(0.7, 0.4))
    assert all(0 <= edge <= 1 for edge in edges.edge)
    assert all(0 <= edges.reach[row] <= edges.reach[parent] for row, parent in enumerate(rows.parents) if row)


def test_candidates_without_a_chance_weigh_nothing_and_break_nothing() -> None:
    found = DraftTree.rooted_at(0)
    found.expand(0, 0, [(1, 0.0), (2, 0.0)])
    found.expand(1, 1, [(3, 0.0)])
    rows = depth_first(found, range(4))
    edges = weigh(found, rows, candidates(found, rows), [0.0, 1.0, 2.0], Mix(1.0, 1.0))
    assert all(map(math.isfinite, [*edges.edge, *edges.reach]))
    assert edges.reach[1:] == pytest.approx([0.0] * 3)


# --- the paper's rule ---------------------------------------------------------------------------------------

#      0
#   1     5     8
#  2 3    6    9
#  4      7
BRANCHES = TreeRows(tuple(range(10)), tuple(range(10)), (-1, 0, 1, 1, 3, 0, 5, 6, 0, 8))
SURE = [1.0] * 10


def edges(**low: float) -> list[float]:
    return [low.get(f"r{row}", 0.9) for row in range(10)]


def test_edges_under_the_threshold_go_with_what_is_behind_them() -> None:
    found = over_threshold(BRANCHES, edges(r3=0.1, r5=0.2), 0.3, safeguards=False)
    assert found == [0, 1, 2, 8, 9]


def test_ancestors_of_what_is_kept_are_kept() -> None:
    assert over_threshold(BRANCHES, edges(r8=0.1, r2=0.1), 0.3) == [0, 1, 3, 4, 5, 6, 7, 8, 9]


def test_the_backbone_is_kept_whatever_its_edges() -> None:
    found = over_threshold(BRANCHES, [1.0, 0.2, 0.1, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], 0.3)
    assert {0, 1, 3, 4} <= set(found)


def test_two_children_of_the_root_are_kept() -> None:
    found = over_threshold(BRANCHES, [1.0, 0.2, 0.1, 0.2, 0.1, 0.15, 0.1, 0.1, 0.1, 0.1], 0.3)
    assert found == [0, 1, 3, 4, 5]


def test_a_tree_of_which_too_little_would_be_left_is_not_pruned() -> None:
    few = TreeRows((0, 1, 2, 3, 4, 5), (0,) * 6, (-1, 0, 1, 0, 3, 0))
    assert over_threshold(few, [1.0, 0.2, 0.2, 0.1, 0.1, 0.1], 0.9) == [0, 1, 2, 3]
    chain = TreeRows((0, 1, 2), (0,) * 3, (-1, 0, 1))
    assert over_threshold(chain, [1.0, 0.1, 0.1], 0.9) == [0, 1, 2]
    lone = TreeRows((0, 1, 2, 3), (0,) * 4, (-1, 0, 0, 0))
    assert over_threshold(lone, [1.0, 0.1, 0.2, 0.3], 0.9) == [0, 1, 2, 3]  # three rows would be left


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("safeguards", [True, False])
def test_what_goes_on_is_a_tree_in_order(seed: int, *, safeguards: bool) -> None:
    found, rows = grown(seed)
    dice = random.Random(seed)
    kept = over_threshold(rows, [dice.random() for _ in rows.nodes], dice.random(), safeguards=safeguards)
    assert kept == sorted(set(kept))
    assert kept[0] == 0
    assert all(rows.parents[row] in kept for row in kept if row)
    assert rows.only(kept) == depth_first(found, [rows.nodes[row] for row in kept])


def test_a_threshold_of_nothing_keeps_all_and_one_of_everything_keeps_the_safeguards() -> None:
    assert over_threshold(BRANCHES, edges(), 0.0, safeguards=False) == list(range(10))
    assert over_threshold(BRANCHES, edges(), 2.0, safeguards=False) == [0]
    assert len(over_threshold(BRANCHES, edges(), 2.0)) < 10


# --- as many as are worth it --------------------------------------------------------------------------------


def test_where_rows_cost_nothing_all_go_on() -> None:
    reach = [1.0, 0.5, 0.2, 0.3, 0.01, 0.2, 0.1, 0.05, 0.1, 0.001]
    assert most_worth(BRANCHES, reach, lambda _n, tokens: tokens) == list(range(10))


def test_rows_go_on_as_long_as_they_bring_more_than_they_take() -> None:
    reach = [1.0, 0.6, 0.05, 0.5, 0.4, 0.3, 0.02, 0.01, 0.04, 0.03]
    assert most_worth(BRANCHES, reach, lambda n, tokens: tokens / (1 + 0.2 * n)) == [0, 1, 3, 4, 5]


def test_the_root_goes_on_at_any_price() -> None:
    assert most_worth(BRANCHES, [1.0] + [0.0] * 9, lambda n, tokens: tokens / n) == [0]
