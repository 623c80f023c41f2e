"""Trees as they were checked, with scores of their candidates: what any rule would have pruned of them, and lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lever.prune import PAPER, Candidate, Edges, Mix, over_threshold, weigh
from lever.trace import Cycle
from lever.tree import DraftTree, TreeRows


@dataclass(frozen=True, slots=True)
class Checked:
    """A tree that went through a pass whole, the scores of its candidates, and the rows that were accepted."""

    tree: DraftTree
    rows: TreeRows
    found: Sequence[Candidate]
    scores: Sequence[float]
    accepted: Sequence[int]
    _edges: dict[Mix, Edges] = field(default_factory=dict, compare=False, repr=False)

    def edges(self, mix: Mix) -> Edges:
        """What the scores make of its edges. Remembered: rules ask again for each threshold."""
        if mix not in self._edges:
            self._edges[mix] = weigh(self.tree, self.rows, self.found, self.scores, mix)
        return self._edges[mix]


@dataclass(slots=True)
class Watching:
    """A rule that prunes nothing and remembers what it was asked; `cycle` is told what became of it."""

    checked: list[Checked] = field(default_factory=list)
    _asked: tuple[DraftTree, TreeRows, Sequence[Candidate], Sequence[float]] | None = None

    def rule(
        self, tree: DraftTree, rows: TreeRows, found: Sequence[Candidate], scores: Sequence[float]
    ) -> Sequence[int]:
        """All rows go on."""
        self._asked = (tree, rows, found, scores)
        return range(len(rows.nodes))

    def cycle(self, cycle: Cycle) -> None:
        """A cycle has ended."""
        if self._asked is not None:
            self.checked.append(Checked(*self._asked, cycle.accepted))
        self._asked = None


@dataclass(frozen=True, slots=True)
class Kept:
    """What a rule leaves, as shares: of rows behind the root, and of what is accepted without it. Of no rows it leaves
    all; where nothing is accepted without it, nothing shows that it does no harm.
    """

    rows: float
    accepted: float


def by_paper(threshold: float) -> Callable[[Checked], Sequence[int]]:
    """The paper's rule."""

    return lambda tree: over_threshold(tree.rows, tree.edges(PAPER).edge, threshold)


def by_reach(mix: Mix) -> Callable[[float], Callable[[Checked], Sequence[int]]]:
    """Rows that are reached with less than a probability go."""

    def at(threshold: float) -> Callable[[Checked], Sequence[int]]:
        return lambda tree: [row for row, chance in enumerate(tree.edges(mix).reach) if chance >= threshold or not row]

    return at


def kept_by(checked: Sequence[Checked], rule: Callable[[Checked], Sequence[int]]) -> Kept:
    """What a rule would have left of these trees. What is accepted goes as far as the first row that it prunes."""
    rows = accepted = kept_rows = kept_accepted = 0
    for tree in checked:
        kept = set(rule(tree))
        rows += len(tree.rows.nodes) - 1
        accepted += len(tree.accepted)
        kept_rows += len(kept) - 1
        for row in tree.accepted:
            if row not in kept:
                break
            kept_accepted += 1
    return Kept(kept_rows / rows if rows else 1.0, kept_accepted / max(accepted, 1))


def tightest(
    checked: Sequence[Checked], rule: Callable[[float], Callable[[Checked], Sequence[int]]], least: float
) -> tuple[float, Kept]:
    """The largest threshold of a rule that keeps at least this share of what is accepted, and what it leaves; 0, by
    which everything is kept, where there is none.

    Thresholds are probabilities. What is kept shrinks as they rise, but for trees that a rule refuses to prune: so a
    larger one may be there, that of what is returned holds.
    """
    low, high = 1e-9, 1.0
    best = 0.0, kept_by(checked, rule(0.0))
    for _ in range(30):
        middle = (low * high) ** 0.5
        found = kept_by(checked, rule(middle))
        if found.accepted >= least:
            low, best = middle, (middle, found)
        else:
            high = middle
    return best
