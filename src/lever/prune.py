"""Which rows of a tree go on behind a middle layer: what scores seen there make of the draft's probabilities, and what
is kept of the tree by them. Arithmetic on plain data; computes no score and knows no time.

Section 2 of the paper. A row's candidates are the draft's, whether they are rows themselves or not: those that are not
stand in the denominator alone ("shadow" candidates), so that an only child is not certain for being alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from lever.choice import likeliest
from lever.tree import DraftTree, TreeRows

LEAST_ROWS, LEAST_LEAVES = 4, 2  # that the paper's rule may leave of a tree; it is not pruned otherwise
NEAR_ROOT, ITS_CHILDREN = 1, 2  # edges from the root, and children that are kept of each node so near
LEAST = 1e-30  # stands for a probability of nothing, whose logarithm there is none


@dataclass(frozen=True, slots=True)
class Mix:
    """Exponents of a candidate's two probabilities, by the predictor and by the draft, whose product is normalised over
    the candidates. `PAPER` has the predictor alone.
    """

    score: float
    draft: float


PAPER, DRAFT = Mix(1.0, 0.0), Mix(0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the draft says may follow a row: a node of the tree, and the row that it has in the pass, if any."""

    parent: int  # row
    node: int
    row: int | None


def candidates(tree: DraftTree, rows: TreeRows) -> list[Candidate]:
    """The candidates behind each row that has a child among the rows, in order of rows; of others nothing hangs on."""
    row_of = {node: row for row, node in enumerate(rows.nodes)}
    inner = sorted(set(rows.parents[1:]))
    return [
        Candidate(row, child, row_of.get(child)) for row in inner for child in tree.children[rows.nodes[row]].values()
    ]


@dataclass(frozen=True, slots=True)
class Edges:
    """Of each row, the root first: the probability of the edge to it among the candidates behind its parent, and that
    of the whole path. Both are 1 for the root.
    """

    edge: Sequence[float]
    reach: Sequence[float]


def weigh(
    tree: DraftTree,
    rows: TreeRows,
    found: Sequence[Candidate],
    scores: Sequence[float],
    mix: Mix,
    *,
    shadow: bool = True,
) -> Edges:
    """What scores make of a tree's edges: scores[i], a logit, is that of found[i], which are `candidates(tree, rows)`.

    A path has the probability of its edges, and at each step that of the target's token being a candidate at all, as
    the draft has it. Without `shadow`, candidates that are no rows do not count.
    """
    edge, reach = [1.0] * len(rows.nodes), [1.0] * len(rows.nodes)
    for parent, group in groupby(zip(found, scores, strict=True), key=lambda pair: pair[0].parent):
        of_row = [pair for pair in group if shadow or pair[0].row is not None]
        above = max(tree.reach[rows.nodes[parent]], LEAST)
        chances = [tree.reach[candidate.node] / above for candidate, _ in of_row]
        logits = [
            mix.score * score + mix.draft * math.log(max(chance, LEAST))
            for (_, score), chance in zip(of_row, chances, strict=True)
        ]
        best, mass = max(logits), min(sum(chances), 1.0)
        weights = [math.exp(logit - best) for logit in logits]
        for (candidate, _), weight in zip(of_row, weights, strict=True):
            if candidate.row is not None:
                edge[candidate.row] = weight / sum(weights)
                reach[candidate.row] = mass * edge[candidate.row]
    for row, parent in enumerate(rows.parents[1:], start=1):  # a parent comes before its children
        reach[row] *= reach[parent]
    return Edges(edge, reach)


def over_threshold(rows: TreeRows, edge: Sequence[float], threshold: float, *, safeguards: bool = True) -> list[int]:
    """The rows that go on by the paper's rule: those whose edge is not under the threshold.

    Safeguards: with a row go its ancestors; the backbone is kept, the best child of each node from the root down to a
    leaf, and so are the best children of nodes near the root; all rows are, where too few rows or leaves would be left.
    Without safeguards, what is under the threshold goes with all that is behind it.
    """
    n, kept = len(rows.parents), {0}
    if not safeguards:
        for row in range(1, n):  # parents come first
            if edge[row] >= threshold and rows.parents[row] in kept:
                kept.add(row)
        return sorted(kept)
    children, depths = _children(rows), _depths(rows)
    kept.update(row for row in range(1, n) if edge[row] >= threshold)
    row = 0
    while children[row]:
        row = max(children[row], key=lambda child: (edge[child], -child))
        kept.add(row)
    for near in (row for row in range(n) if depths[row] < NEAR_ROOT):
        kept.update(sorted(children[near], key=lambda child: (-edge[child], child))[:ITS_CHILDREN])
    for row in range(n - 1, 0, -1):
        if row in kept:
            kept.add(rows.parents[row])
    if len(kept) < min(LEAST_ROWS, n) or _leaves(rows, kept) < min(LEAST_LEAVES, _leaves(rows, set(range(n)))):
        return list(range(n))
    return sorted(kept)


def most_worth(rows: TreeRows, reach: Sequence[float], rate_of: Callable[[int, float], float]) -> list[int]:
    """The likeliest rows, as many as give the most tokens a second: `rate_of(n, tokens)` for n rows that go on, of
    which so many tokens are expected.
    """
    return sorted(likeliest(reach, range(len(rows.parents)), rate_of)[0])


def _children(rows: TreeRows) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in rows.parents]
    for row, parent in enumerate(rows.parents[1:], start=1):
        found[parent].append(row)
    return found


def _depths(rows: TreeRows) -> list[int]:
    depths = [0] * len(rows.parents)
    for row, parent in enumerate(rows.parents[1:], start=1):
        depths[row] = depths[parent] + 1
    return depths


def _leaves(rows: TreeRows, kept: Collection[int]) -> int:
    return len(set(kept) - {rows.parents[row] for row in kept})
