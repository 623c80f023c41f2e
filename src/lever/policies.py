"""How a tree grows and which part of it is checked: presets, rows of one table on one code path.

A policy looks at the tree and at what things cost; it keeps no state and runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from lever import choice
from lever.errors import UsageError
from lever.tree import DraftTree

# Of a node that is reached, the share of its successors that lie among the draft's candidates and are worth a row.
MET = 0.85
DEPTH = 32  # edges below the root at most
UNLIKELY = 0.01  # to be reached: the draft's own time beside a pass is not worth less
STEPS = (1, 2, 4, 8)  # nodes of a draft step: between these, kernels take as long as for the next


class Costs(Protocol):
    """Seconds of a cycle's parts (`lever.cycle_cost`)."""

    @property
    def knows_passes(self) -> bool:
        """Whether anything is known of passes."""

    def pass_s(self, rows: int) -> float:
        """Of a pass over the target's layers."""

    def draft_s(self, nodes: int) -> float:
        """Of a draft step."""

    def hidden_s(self, nodes: int) -> float:
        """Of a draft step beside a pass."""

    def project_s(self, rows: int = 1) -> float:
        """Of the logits of so many rows at once."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy decides by."""

    tree: DraftTree
    cost: Costs
    spent_s: float  # on drafting, in this cycle
    most_rows: int  # of one pass
    room: int = DEPTH + 1  # tokens that may still come: a cycle gives one more than the depth that it reaches
    outcomes: Sequence[tuple[int, int]] = ()  # of the cycles before, in this answer: candidates checked, and accepted

    @property
    def depth(self) -> int:
        """Edges below the root at most."""
        return min(DEPTH, self.room - 1)

    def frontier(self) -> list[int]:
        """Nodes that may be expanded, those most likely reached first."""
        return [node for node in self.tree.frontier() if self.tree.depths[node] < self.depth]


Grow = Callable[[Situation], list[int]]  # nodes to expand next, in one draft step; none: the tree is large enough
Select = Callable[[Situation], list[int]]  # nodes that the target checks, the root and all parents among them


@dataclass(frozen=True, slots=True)
class Preset:
    """A way to decode."""

    name: str
    says: str
    grow: Grow
    select: Select
    meanwhile: Grow | None = None  # nodes to expand next while the target checks what was selected
    carry_over: bool = False  # what lives of a tree is the start of the next one
    prunes: bool = False  # thins passes where a predictor for the target is at hand
    adaptive: bool = False  # stops where guessing has not paid, and takes guesses from the text where they promise more

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
        inner = levels(now.tree, widths[: max(min(len(widths), now.depth) - 1, 0)])
        return [node for node in inner if not now.tree.expanded(node)]

    def select(now: Situation) -> list[int]:
        return levels(now.tree, widths[: now.depth])[: now.most_rows]

    return grow, select


def best_nodes(n: int) -> tuple[Grow, Select]:
    """The n nodes with the largest path probabilities: OPT-Tree."""

    def grow(now: Situation) -> list[int]:
        kept = now.tree.best(n)
        weakest = min(now.tree.reach[node] for node in kept) if len(kept) == n else 0.0
        open_ = [node for node in kept if not now.tree.expanded(node) and now.tree.depths[node] < now.depth]
        return [node for node in open_ if now.tree.reach[node] > weakest]

    def select(now: Situation) -> list[int]:
        return [node for node in now.tree.best(min(n, now.most_rows)) if now.tree.depths[node] <= now.depth]

    return grow, select


# --- gain and cost ------------------------------------------------------------------------------------------


def gain(tree: DraftTree, nodes: Sequence[int]) -> float:
    """Expected tokens of a cycle that checks these nodes, G in the paper: the root is the 1 that always comes."""
    return sum(tree.reach[node] for node in nodes)


def most_worth(now: Situation) -> list[int]:
    """The likeliest nodes, as many as give the most tokens a second: up to the knee they are free.

    The first pass of all is plain, to learn what one takes.
    """
    return likeliest(now, lambda n, tokens: _per_second(now, n, tokens))[0] if now.cost.knows_passes else [0]


def likeliest(now: Situation, rate_of: Callable[[int, float], float]) -> tuple[list[int], float]:
    """The likeliest nodes that a pass may check, as many as give the most tokens a second, and how many that is."""
    nodes = [node for node in range(len(now.tree)) if now.tree.depths[node] <= now.depth]
    return choice.likeliest(now.tree.reach, nodes, rate_of, now.most_rows)


def rate(now: Situation, nodes: Sequence[int]) -> float:
    """Tokens a second of a cycle that checks these nodes."""
    return _per_second(now, len(nodes), gain(now.tree, nodes))


def _per_second(now: Situation, n_rows: int, tokens: float) -> float:
    """Where nothing is known of a cycle's time, by its tokens alone."""
    seconds = now.spent_s + now.cost.pass_s(n_rows) + tokens * now.cost.project_s()
    return tokens / seconds if seconds else tokens


def grow_while_it_pays(now: Situation) -> list[int]:
    """Expand the likeliest nodes, as many in a step as pay best, while they add tokens faster than a cycle makes them.

    A node adds its successors that are worth a row.
    """
    tree, cost = now.tree, now.cost
    nodes = now.frontier()[: STEPS[-1]]
    if not nodes or not cost.knows_passes:
        return []
    kept = most_worth(now)
    now_rate = rate(now, kept)
    least = _worth_a_row(now, kept, now_rate)
    adds = [max(MET * tree.reach[node] - least, 0.0) for node in nodes]

    def pays(n: int) -> float:
        return sum(adds[:n]) - now_rate * cost.draft_s(n)

    n = max((n for n in STEPS if n <= len(nodes)), key=pays)
    return nodes[:n] if pays(n) > 0 and adds[0] > 0 else []


def _worth_a_row(now: Situation, kept: Sequence[int], tokens_per_s: float) -> float:
    """How likely a node must be beside those that are kept: likelier than the weakest, whose row it can take, or than
    what one row more costs, if a pass takes that.
    """
    weakest, n = min(now.tree.reach[node] for node in kept), len(kept)
    if n == now.most_rows:
        return weakest
    more_s = max(now.cost.pass_s(n + 1) - now.cost.pass_s(n), 0.0)
    return min(weakest, tokens_per_s * more_s)


def ahead(now: Situation) -> list[int]:
    """Of the likeliest nodes, as many in a step as are reached most often for its time. It costs the cycle nothing: the
    target computes meanwhile, and what is below the path that it takes is where the next cycle starts.
    """
    reach = now.tree.reach
    nodes = [node for node in now.frontier()[: STEPS[-1]] if reach[node] > UNLIKELY]
    if not nodes:
        return []

    def each_second(n: int) -> float:
        return sum(reach[node] for node in nodes[:n]) / (now.cost.hidden_s(n) or n)

    return nodes[: max((n for n in STEPS if n <= len(nodes)), key=each_second)]


# --- the paper ----------------------------------------------------------------------------------------------


def algorithm_1(now: Situation) -> list[int]:
    """The paper's greedy construction: insert the frontier's node with the largest b(v) / dC(v|T), until that ratio is
    not above G(T) / C_cycle(T).

    A node is inserted by running the draft on it, so T is what is expanded. dC is a draft step and one more row.
    """
    tree, cost = now.tree, now.cost
    inserted = expanded(now)
    nodes = now.frontier()
    if not nodes or not cost.knows_passes:
        return []
    cycle_s = now.spent_s + cost.pass_s(len(inserted))
    more_s = cost.draft_s(1) + max(cost.pass_s(len(inserted) + 1) - cost.pass_s(len(inserted)), 0.0)
    return nodes[:1] if tree.reach[nodes[0]] * cycle_s > gain(tree, inserted) * more_s else []


def expanded(now: Situation) -> list[int]:
    """The nodes that the draft was asked about; the root among them always."""
    nodes = range(1, len(now.tree))
    return [0, *(n for n in nodes if now.tree.expanded(n) and now.tree.depths[n] <= now.depth)][: now.most_rows]


# --- EdgeLLM ------------------------------------------------------------------------------------------------

FIRST_ALPHA, LEAST_ALPHA, MOST_ALPHA = 0.01, 1e-6, 0.5
CONFIDENT = 0.9  # of the probability of a node's successors, shared by as few branches as it takes
MOST_BRANCHES = 3


def alpha(outcomes: Sequence[tuple[int, int]]) -> float:
    """EdgeLLM's threshold of the running product of confidences: halved after a cycle that was accepted whole, else
    raised by what was wrong.
    """
    value = FIRST_ALPHA
    for checked, accepted in outcomes:
        if checked:
            value *= 0.5 if checked == accepted else 0.5 ** -((checked - accepted) / checked)
        value = min(max(value, LEAST_ALPHA), MOST_ALPHA)
    return value


def branches(now: Situation) -> list[int]:
    """The root and, below each node that is expanded, the fewer successors the surer the draft is of them; down to
    where the product of their probabilities falls below alpha.
    """
    tree, least, found = now.tree, alpha(now.outcomes), [0]
    for node in found:  # grows while it is walked
        total = 0.0
        for child in list(tree.children[node].values())[:MOST_BRANCHES]:
            if tree.reach[child] < least or tree.depths[child] > now.depth:
                break
            found.append(child)
            total += tree.reach[child] / tree.reach[node]
            if total >= CONFIDENT:
                break
    return found


def navigate(now: Situation) -> list[int]:
    """Expand the likeliest branch, one node in a step, until none is over the threshold."""
    open_ = [n for n in branches(now) if not now.tree.expanded(n) and now.tree.depths[n] < now.depth]
    return sorted(open_, key=lambda node: (-now.tree.reach[node], node))[:1] if now.cost.knows_passes else []


def likeliest_branches(now: Situation) -> list[int]:
    """As many of the branches as a pass takes: parents are likelier than their children."""
    return sorted(branches(now), key=lambda node: (-now.tree.reach[node], node))[: now.most_rows]


def go_on(now: Situation) -> list[int]:
    """Provisional generation: from the likeliest leaf on, one node in a step."""
    return now.frontier()[:1]


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            Preset("flash-ar", "one token per pass, no draft", nothing, only_root),
            Preset("chain-sd", "a chain of 8 drafted tokens", *by_levels([1] * 8)),
            Preset(
                "edgellm",
                "branches by confidence, an adaptive threshold, drafting on while the target verifies",
                navigate,
                likeliest_branches,
                meanwhile=go_on,
                carry_over=True,
            ),
            Preset("specinfer", "a fixed tree: widths 1 1 3 1 1 1 1 1 by depth", *by_levels([1, 1, 3, 1, 1, 1, 1, 1])),
            Preset("opt-tree", "the 26 nodes with the largest path probabilities", *best_nodes(26)),
            Preset(
                "lever-paper",
                "the paper's greedy tree by gain and cost, node by node",
                algorithm_1,
                expanded,
                prunes=True,
            ),
            Preset(
                "lever",
                "trees by gain and cost, rows up to the knee, carry-over, drafting beside a pass, text lookup",
                grow_while_it_pays,
                most_worth,
                meanwhile=ahead,
                carry_over=True,
                prunes=True,
                adaptive=True,
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
