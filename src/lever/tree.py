"""The draft tree: what may follow the text, as plain arrays. Grows where it is told to; knows no model and no cost.

Node 0 is the root: the last token of the text, whose row the target has not computed yet. Every other node is a
candidate for the place behind its parent. A node is *expanded* when the draft has been asked what follows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

NOT_EXPANDED, IN_TEXT = -1, -2  # in the place of a slot


@dataclass(slots=True)
class DraftTree:
    """Node i is token `tokens[i]` behind `parents[i]`, at `depths[i]` edges from the root.

    `reach[i]`: the probability that the target's text goes through it, by the draft's own probabilities along its path
    (equation 2 of the paper). `slots[i]`: where its keys lie in the draft's cache, counted from the end of the text;
    NOT_EXPANDED before there are any, IN_TEXT for a root that the draft has taken into its text.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    reach: list[float] = field(default_factory=lambda: [1.0])
    slots: list[int] = field(default_factory=lambda: [NOT_EXPANDED])
    children: list[dict[int, int]] = field(default_factory=lambda: [{}])  # node by token, most probable first

    @classmethod
    def rooted_at(cls, token: int) -> DraftTree:
        """A tree of one node."""
        return cls([token])

    def __len__(self) -> int:
        return len(self.tokens)

    def expanded(self, node: int) -> bool:
        """Whether the candidates behind this node are known."""
        return self.slots[node] != NOT_EXPANDED

    def expand(self, node: int, slot: int, candidates: Iterable[tuple[int, float]]) -> None:
        """Add what the draft says may follow a node: tokens and their probabilities, most probable first."""
        assert not self.expanded(node)
        self.slots[node] = slot
        for token, probability in candidates:
            self.add(node, token, probability)

    def add(self, node: int, token: int, probability: float) -> None:
        """Add one candidate behind a node."""
        self.children[node][token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(node)
        self.depths.append(self.depths[node] + 1)
        self.reach.append(self.reach[node] * probability)
        self.slots.append(NOT_EXPANDED)
        self.children.append({})

    def frontier(self) -> list[int]:
        """Nodes that may be expanded, those most likely reached first."""
        nodes = [node for node, slot in enumerate(self.slots) if slot == NOT_EXPANDED]
        return sorted(nodes, key=lambda node: (-self.reach[node], node))

    def path(self, node: int) -> list[int]:
        """Nodes from the first behind the root to this one."""
        found: list[int] = []
        while node:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def best(self, n: int) -> list[int]:
        """The root and the n - 1 nodes most likely reached. A parent is never less likely than its child, so that every
        node's parent is among them.
        """
        nodes = sorted(range(len(self)), key=lambda node: (-self.reach[node], node))
        return sorted(nodes[:n])


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Nodes of a tree in the order of a pass over the target: depth-first, so that each path lies together."""

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # rows; -1 for the root

    def only(self, kept: Sequence[int]) -> TreeRows:
        """These rows alone, in their order: the root and every row's parent are among them."""
        place = {row: number for number, row in enumerate(kept)}
        return TreeRows(
            tuple(self.nodes[row] for row in kept),
            tuple(self.tokens[row] for row in kept),
            tuple(place[self.parents[row]] if row else -1 for row in kept),
        )


def depth_first(tree: DraftTree, chosen: Iterable[int]) -> TreeRows:
    """The rows of these nodes, which have the root and every node's parent among them.

    Likelier children come first: what the text most probably is, is one run of rows.
    """
    wanted = set(chosen)
    rows: dict[int, int] = {}
    stack = [0]
    while stack:
        node = stack.pop()
        rows[node] = len(rows)
        stack += [child for child in reversed(tree.children[node].values()) if child in wanted]
    assert rows.keys() == wanted, "a node without its parent"
    nodes = tuple(rows)
    parents = tuple(rows[tree.parents[node]] if node else -1 for node in nodes)
    return TreeRows(nodes, tuple(tree.tokens[node] for node in nodes), parents)


@dataclass(frozen=True, slots=True)
class Rerooted:
    """A tree after the target has gone along a path of it and drawn one more token, its root.

    `text_slots`: the draft's slots, in the old tree, of what is text now, the root included if the draft has seen it.
    `tree_slots`: those of the nodes that live on; in the new tree they are numbered 0, 1, 2 in this order.
    """

    tree: DraftTree
    text_slots: list[int]
    tree_slots: list[int]


def reroot(tree: DraftTree, accepted: Sequence[int], token: int, *, carry_over: bool = True) -> Rerooted:
    """What lives on when the target has gone along `accepted` (nodes behind the root) and drawn `token` after them.

    Without `carry_over` it is the token alone, and what the draft has seen of the text.
    """
    last = accepted[-1] if accepted else 0
    text_slots = [tree.slots[node] for node in accepted if tree.expanded(node)]
    new, tree_slots = DraftTree.rooted_at(token), list[int]()
    root = tree.children[last].get(token) if carry_over else None
    if root is None:
        return Rerooted(new, text_slots, [])
    if tree.expanded(root):
        text_slots.append(tree.slots[root])
        new.slots[0] = IN_TEXT
    walk = [(root, 0)]  # old and new number; grows while it is walked, so that parents come before their children
    for old, parent in walk:
        for child_token, child in tree.children[old].items():
            walk.append((child, len(new)))
            new.children[parent][child_token] = len(new)
            new.tokens.append(child_token)
            new.parents.append(parent)
            new.depths.append(new.depths[parent] + 1)
            new.reach.append(tree.reach[child] / tree.reach[root] if tree.reach[root] else 0.0)
            new.slots.append(len(tree_slots) if tree.expanded(child) else NOT_EXPANDED)
            new.children.append({})
            if tree.expanded(child):
                tree_slots.append(tree.slots[child])
    return Rerooted(new, text_slots, tree_slots)
