"""How a tree grows and which part of it is checked: presets, rows of one table on one code path.

A policy looks at the tree and at what things cost; it keeps no state and runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from lever.cycle_cost import CycleCost
from lever.errors import UsageError
from lever.tree import DraftTree

# Of a node that is reached, the share of its successors that lie among the draft's candidates and are worth a row.
MET = 0.85
DEPTH = 32  # edges below the root at most


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy decides by."""

    tree: DraftTree
    cost: CycleCost
    spent_s: float  # on drafting, in this cycle
    most_rows: int  # of one pass


Grow = Callable[[Situation], list[int]]  # nodes to expand next, in one draft step; none: the tree is large enough
Select = Callable[[Situation], list[int]]  # nodes that the target checks, the root and all parents among them


@dataclass(frozen=True, slots=True)
class Preset:
    """A way to decode."""

    name: str
    says: str
    grow: Grow
    select: Select
    carry_over: bool = False  # what lives of a tree is the start of the next one

    @property
    def drafts(self) -> bool:
        """Whether it needs a draft."""
        return self.grow is not nothing


def nothing(_now: Situation) -> list[int]:
    """No tree."""
    return []


def only_root(_now: Situation) -> list[int]:
    """Plain decoding."""
    return [0]


# --- fixed shapes -------------------------------------------------------------------------------------------


def levels(tree: DraftTree, widths: Sequence[int]) -> list[int]:
    """The root and, below each node of a level, as many of its likeliest children as the level's width."""
    found, level = [0], [0]
    for width in widths:
        level = [child for node in level for child in list(tree.children[node].values())[:width]]
        found += level
    return found


def by_levels(widths: Sequence[int]) -> tuple[Grow, Select]:
    """A fixed expansion by depth, a whole level in one draft step: SpecInfer, and with widths of 1 a chain."""

    def grow(now: Situation) -> list[int]:
        inner = levels(now.tree, widths[:-1])
        return [node for node in inner if not now.tree.expanded(node)]

    def select(now: Situation) -> list[int]:
        return levels(now.tree, widths)[: now.most_rows]

    return grow, select


def best_nodes(n: int) -> tuple[Grow, Select]:
    """The n nodes with the largest path probabilities: OPT-Tree."""

    def grow(now: Situation) -> list[int]:
        kept = now.tree.best(n)
        weakest = min(now.tree.reach[node] for node in kept) if len(kept) == n else 0.0
        open_ = [node for node in kept if not now.tree.expanded(node) and now.tree.depths[node] < DEPTH]
        return [node for node in open_ if now.tree.reach[node] > weakest]

    def select(now: Situation) -> list[int]:
        return now.tree.best(min(n, now.most_rows))

    return grow, select


# --- gain and cost ------------------------------------------------------------------------------------------


def gain(tree: DraftTree, nodes: Sequence[int]) -> float:
    """Expected tokens of a cycle that checks these nodes, G in the paper: the root is the 1 that always comes."""
    return sum(tree.reach[node] for node in nodes)


def most_worth(now: Situation) -> list[int]:
    """The likeliest nodes, as many as give the most tokens a second: up to the knee they are free.

    The first pass of all is plain, to learn what one takes.
    """
    if not now.cost.knows_passes:
        return [0]
    order = sorted(range(len(now.tree)), key=lambda node: (-now.tree.reach[node], node))
    best, best_rate, tokens = 1, 0.0, 0.0
    for n, node in enumerate(order[: now.most_rows], start=1):
        tokens += now.tree.reach[node]
        seconds = now.spent_s + now.cost.pass_s(n) + tokens * now.cost.project_s()
        rate = tokens / seconds if seconds else tokens
        if rate > best_rate:
            best, best_rate = n, rate
    return order[:best]


def grow_while_it_pays(batch: int) -> Grow:
    """Expand the likeliest nodes, `batch` in a step, while that adds tokens faster than a cycle makes them.

    A node adds its successors that are likelier than the weakest one that would be checked without them.
    """

    def grow(now: Situation) -> list[int]:
        tree, cost = now.tree, now.cost
        if not cost.knows_passes:
            return []
        nodes = [node for node in tree.frontier() if tree.depths[node] < DEPTH][:batch]
        if not nodes:
            return []
        kept = most_worth(now)
        full = len(kept) < len(tree)
        weakest = min(tree.reach[node] for node in kept) if full else 0.0
        adds = sum(max(MET * tree.reach[node] - weakest, 0.0) for node in nodes)
        tokens = gain(tree, kept)
        cycle_s = now.spent_s + cost.pass_s(len(kept)) + tokens * cost.project_s()
        return nodes if adds * cycle_s > tokens * cost.draft_s(len(nodes)) and adds > 0 else []

    return grow


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            Preset("flash-ar", "one token per pass, no draft", nothing, only_root),
            Preset("chain-sd", "a chain of 8 drafted tokens", *by_levels([1] * 8)),
            Preset("specinfer", "a fixed tree: widths 1 1 3 1 1 1 1 1 by depth", *by_levels([1, 1, 3, 1, 1, 1, 1, 1])),
            Preset("opt-tree", "the 26 nodes with the largest path probabilities", *best_nodes(26)),
            Preset(
                "lever",
                "two nodes per draft step while it pays, rows up to the knee, what lives of a tree is carried over",
                grow_while_it_pays(2),
                most_worth,
                carry_over=True,
            ),
        )
    }
)


def preset(name: str) -> Preset:
    """The preset of this name; UsageError with those there are."""
    found = PRESETS.get(name)
    if found is None:
        raise UsageError(f"no preset {name!r}: there are {', '.join(PRESETS)}")
    return found
