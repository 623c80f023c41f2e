"""The draft tree: how it grows, which rows a pass gets of it, and what lives on when the text has gone along a path."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lever.model import tree_depths
from lever.tree import IN_TEXT, NOT_EXPANDED, DraftTree, Rerooted, TreeRows, depth_first, reroot

Path = tuple[int, ...]  # of tokens behind the root

# Probabilities of candidates, likeliest first: certain ones, ties and impossible ones too.
SHARES: tuple[list[float], ...] = (
    [1.0],
    [1.0, 0.0],
    [0.5, 0.5],
    [0.6, 0.3, 0.1],
    [0.25, 0.25, 0.25, 0.25],
    [0.9, 0.05, 1e-30],
    [0.0, 0.0],
    [],
)


def sample_tree() -> DraftTree:
    """Root 9; behind it 1 (0.7) and 2 (0.3); behind 1: 2 (0.5) and 3 (0.4); behind 2: 1 (1.0); behind 1 2: 5 (0.5)."""
    tree = DraftTree.rooted_at(9)
    tree.expand(0, IN_TEXT, [(1, 0.7), (2, 0.3)])
    tree.expand(1, 0, [(2, 0.5), (3, 0.4)])
    tree.expand(2, 1, [(1, 1.0)])
    tree.expand(3, 2, [(5, 0.5)])
    return tree


@st.composite
def grown(draw: st.DrawFn) -> DraftTree:
    """A tree after some draft steps; slots are given in the order of expansion, as a draft does."""
    tree = DraftTree.rooted_at(draw(st.integers(0, 5)))
    for step in range(draw(st.integers(0, 12))):
        frontier = tree.frontier()
        if not frontier:
            break
        node = frontier[draw(st.integers(0, len(frontier) - 1))] if step else 0
        shares = draw(st.sampled_from(SHARES))
        tokens = draw(st.permutations(range(6)))
        tree.expand(node, step - 1 if step else IN_TEXT, zip(tokens, shares, strict=False))
    return tree


@st.composite
def grown_with_a_walk(draw: st.DrawFn) -> tuple[DraftTree, list[int], int]:
    """A tree, a path down it, and what was drawn at its end: a child, or a token that is none."""
    tree = draw(grown())
    accepted: list[int] = []
    node = 0
    while len(tree.children[node]) and draw(st.booleans()):
        node = draw(st.sampled_from(sorted(tree.children[node].values())))
        accepted.append(node)
    return tree, accepted, draw(st.integers(0, 6))


def tokens_to(tree: DraftTree, node: int) -> Path:
    """By parents alone."""
    return (*tokens_to(tree, tree.parents[node]), tree.tokens[node]) if node else ()


def by_path(tree: DraftTree) -> dict[Path, int]:
    return {tokens_to(tree, node): node for node in range(len(tree))}


# --- growth -------------------------------------------------------------------------------------------------


def test_a_new_tree_is_its_root_alone_and_may_be_expanded() -> None:
    tree = DraftTree.rooted_at(9)
    assert (len(tree), tree.tokens, tree.parents, tree.reach) == (1, [9], [-1], [1.0])
    assert not tree.expanded(0)
    assert tree.frontier() == [0]
    assert tree.path(0) == []
    assert tree.best(5) == [0]


def test_expanding_adds_candidates_behind_a_node() -> None:
    tree = sample_tree()
    assert tree.tokens == [9, 1, 2, 2, 3, 1, 5]
    assert tree.parents == [-1, 0, 0, 1, 1, 2, 3]
    assert tree.depths == [0, 1, 1, 2, 2, 2, 3]
    assert tree.reach == pytest.approx([1, 0.7, 0.3, 0.35, 0.28, 0.3, 0.175])
    assert tree.slots == [IN_TEXT, 0, 1, 2, NOT_EXPANDED, NOT_EXPANDED, NOT_EXPANDED]
    assert tree.path(6) == [1, 3, 6]
    assert [list(children) for children in tree.children] == [[1, 2], [2, 3], [1], [5], [], [], []]


def test_the_frontier_is_what_was_not_asked_about_likeliest_first() -> None:
    assert sample_tree().frontier() == [5, 4, 6]


def test_a_node_without_candidates_is_expanded_all_the_same() -> None:
    tree = DraftTree.rooted_at(9)
    tree.expand(0, IN_TEXT, [])
    assert tree.expanded(0)
    assert tree.frontier() == []
    assert tree.best(3) == [0]


def test_a_node_is_expanded_once() -> None:
    with pytest.raises(AssertionError):
        sample_tree().expand(1, 3, [(1, 1.0)])


def test_new_trees_share_nothing() -> None:
    one, other = DraftTree.rooted_at(1), DraftTree.rooted_at(1)
    one.expand(0, IN_TEXT, [(2, 1.0)])
    assert other == DraftTree.rooted_at(1)


@given(tree=grown())
def test_every_way_of_naming_a_node_agrees(tree: DraftTree) -> None:
    assert len(by_path(tree)) == len(tree)
    for node in range(1, len(tree)):
        assert tree.children[tree.parents[node]][tree.tokens[node]] == node
        assert tuple(tree.tokens[at] for at in tree.path(node)) == tokens_to(tree, node)
        assert tree.depths[node] == len(tree.path(node))
        assert tree.reach[node] <= tree.reach[tree.parents[node]]
    assert sum(len(children) for children in tree.children) == len(tree) - 1


@given(tree=grown(), n=st.integers(1, 30))
def test_the_best_nodes_are_the_likeliest_and_have_their_parents(tree: DraftTree, n: int) -> None:
    best = tree.best(n)
    assert len(best) == len(set(best)) == min(n, len(tree))
    assert best == sorted(best)
    assert {tree.parents[node] for node in best[1:]} <= set(best)
    left_out = set(range(len(tree))) - set(best)
    assert min(tree.reach[node] for node in best) >= max((tree.reach[node] for node in left_out), default=0.0)


# --- rows of a pass -----------------------------------------------------------------------------------------


def test_rows_are_depth_first_likelier_children_first() -> None:
    rows = depth_first(sample_tree(), range(7))
    assert rows.nodes == (0, 1, 3, 6, 4, 2, 5)
    assert rows.tokens == (9, 1, 2, 5, 3, 2, 1)
    assert rows.parents == (-1, 0, 1, 2, 1, 0, 5)


def test_rows_are_of_the_chosen_nodes_alone_in_any_order() -> None:
    rows = depth_first(sample_tree(), [5, 0, 2, 1])
    assert rows.nodes == (0, 1, 2, 5)
    assert rows.parents == (-1, 0, 0, 2)
    assert depth_first(sample_tree(), [0]).nodes == (0,)


@pytest.mark.parametrize("chosen", [[0, 3], [0, 1, 6], [0, 1, 2, 3, 4, 5, 99]])
def test_a_node_without_its_parent_is_our_own_mistake(chosen: list[int]) -> None:
    with pytest.raises(AssertionError, match="without its parent"):
        depth_first(sample_tree(), chosen)


@given(tree=grown(), data=st.data())
def test_any_set_that_is_closed_under_parents_gives_rows_that_a_pass_takes(
    tree: DraftTree, data: st.DataObject
) -> None:
    picked = data.draw(st.sets(st.integers(0, len(tree) - 1)))
    chosen = {0}.union(*([node, *tree.path(node)] for node in picked))
    rows = depth_first(tree, chosen)
    assert len(rows.nodes) == len(chosen)
    assert set(rows.nodes) == chosen
    assert rows.tokens == tuple(tree.tokens[node] for node in rows.nodes)
    assert tree_depths(rows.parents) == [tree.depths[node] for node in rows.nodes]
    for row, parent in enumerate(rows.parents):
        assert parent == -1 if row == 0 else rows.nodes[parent] == tree.parents[rows.nodes[row]]
    for parent in range(len(rows.nodes)):
        siblings = [tree.reach[node] for node in rows.nodes[1:] if tree.parents[node] == rows.nodes[parent]]
        assert siblings == sorted(siblings, reverse=True)


def test_rows_that_go_on_alone_are_numbered_anew() -> None:
    rows = depth_first(sample_tree(), range(7))
    assert rows.only([0, 1, 4, 5, 6]) == TreeRows((0, 1, 4, 2, 5), (9, 1, 3, 2, 1), (-1, 0, 1, 0, 3))
    assert rows.only([0]) == depth_first(sample_tree(), [0])
    assert rows.only(range(7)) == rows


@given(tree=grown(), data=st.data())
def test_rows_that_go_on_are_those_of_a_pass_without_the_others(tree: DraftTree, data: st.DataObject) -> None:
    rows = depth_first(tree, range(len(tree)))
    picked = data.draw(st.sets(st.integers(0, len(tree) - 1)))
    chosen = {0}.union(*([node, *tree.path(node)] for node in picked))
    kept = [row for row, node in enumerate(rows.nodes) if node in chosen]
    assert rows.only(kept) == depth_first(tree, chosen)


# --- a new root ---------------------------------------------------------------------------------------------


def test_what_lies_below_the_drawn_token_lives_on() -> None:
    found = reroot(sample_tree(), [], 1)
    tree = found.tree
    assert (found.text_slots, found.tree_slots) == ([0], [2])
    assert tree.tokens == [1, 2, 3, 5]
    assert tree.parents == [-1, 0, 0, 1]
    assert tree.reach == pytest.approx([1, 0.5, 0.4, 0.25])
    assert tree.slots == [IN_TEXT, 0, NOT_EXPANDED, NOT_EXPANDED]


@pytest.mark.parametrize(
    ("accepted", "token", "text_slots"),
    [
        ([], 7, []),  # no child of the root
        ([1], 7, [0]),  # no child of node 1
        ([1], 1, [0]),  # somewhere in the tree, but not there
        ([1, 4], 5, [0]),  # behind a leaf that was never asked about
        ([2, 5], 2, [1]),
        ([1, 3, 6], 8, [0, 2]),
    ],
)
def test_a_token_that_is_not_there_starts_anew_and_the_text_keeps_its_slots(
    accepted: list[int], token: int, text_slots: list[int]
) -> None:
    assert reroot(sample_tree(), accepted, token) == Rerooted(DraftTree.rooted_at(token), text_slots, [])


def test_a_root_that_was_never_asked_about_is_a_frontier_again() -> None:
    found = reroot(sample_tree(), [1], 3)
    assert found == Rerooted(DraftTree.rooted_at(3), [0], [])
    assert found.tree.frontier() == [0]


def test_a_tree_that_was_never_grown_gives_a_root() -> None:
    assert reroot(DraftTree.rooted_at(1), [], 2) == Rerooted(DraftTree.rooted_at(2), [], [])


def test_below_a_token_that_was_thought_impossible_all_is() -> None:
    tree = DraftTree.rooted_at(9)
    tree.expand(0, IN_TEXT, [(1, 1.0), (2, 0.0)])
    tree.expand(2, 0, [(3, 0.8), (4, 0.2)])
    found = reroot(tree, [], 2).tree
    assert found.reach == [1.0, 0.0, 0.0]
    assert found.best(2) == [0, 1]


@given(case=grown_with_a_walk())
def test_the_new_tree_is_exactly_the_old_one_below_the_drawn_token(case: tuple[DraftTree, list[int], int]) -> None:
    tree, accepted, token = case
    found = reroot(tree, accepted, token)
    new, old_nodes = found.tree, by_path(tree)
    prefix = (*(tree.tokens[node] for node in accepted), token)
    below = {path[len(prefix) :]: node for path, node in old_nodes.items() if path[: len(prefix)] == prefix}
    new_nodes = by_path(new)
    assert new_nodes.keys() == below.keys() | {()}
    assert new.tokens[0] == token
    for path, node in new_nodes.items():
        assert new.depths[node] == len(path)
        assert new.parents[node] == (new_nodes[path[:-1]] if path else -1)
        if path:
            root, old = below[()], below[path]
            relative = tree.reach[old] / tree.reach[root] if tree.reach[root] else 0.0
            assert new.reach[node] == relative
            assert list(new.children[node]) == list(tree.children[old])  # likeliest first still
            assert new.expanded(node) == tree.expanded(old)
            if new.expanded(node):
                assert found.tree_slots[new.slots[node]] == tree.slots[old]
    assert new.reach[0] == 1.0
    check_slots(tree, accepted, found, below.get(()))


def check_slots(tree: DraftTree, accepted: Sequence[int], found: Rerooted, root: int | None) -> None:
    """Each slot is of the text or of the tree, once; the text's come in its order."""
    walked = accepted if root is None else [*accepted, root]
    assert found.text_slots == [tree.slots[node] for node in walked if tree.slots[node] != NOT_EXPANDED]
    assert sorted(slot for slot in found.tree.slots if slot >= 0) == list(range(len(found.tree_slots)))
    kept = found.text_slots + found.tree_slots
    assert len(kept) == len(set(kept))
    root_is_text = root is not None and tree.expanded(root)
    assert found.tree.slots[0] == (IN_TEXT if root_is_text else NOT_EXPANDED)


@given(case=grown_with_a_walk())
def test_without_carry_over_only_the_root_lives_and_the_text_keeps_its_slots(
    case: tuple[DraftTree, list[int], int],
) -> None:
    tree, accepted, token = case
    found = reroot(tree, accepted, token, carry_over=False)
    text_slots = [tree.slots[node] for node in accepted if tree.expanded(node)]
    assert found == Rerooted(DraftTree.rooted_at(token), text_slots, [])


@given(case=grown_with_a_walk())
def test_the_old_tree_is_left_as_it_was(case: tuple[DraftTree, list[int], int]) -> None:
    tree, accepted, token = case
    before = by_path(tree), list(tree.reach), list(tree.slots)
    found = reroot(tree, accepted, token).tree
    if not found.expanded(0):
        found.expand(0, IN_TEXT, [(5, 0.5)])
    assert (by_path(tree), tree.reach, tree.slots) == before
