"""Pruning while the target checks a tree: whether it pays, which rows begin a pass, which go on. Runs the scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lever.cycle_cost import CycleCost
from lever.model import Model, Thinning
from lever.policies import Situation, gain, likeliest, rate
from lever.predictor import Translator
from lever.prune import PAPER, Candidate, candidates, most_worth, over_threshold, weigh
from lever.scores import Scores
from lever.tree import DraftTree, TreeRows

FIRST_TOKENS = 0.95  # of the tokens that a cycle would bring, what is left where rows are pruned, at first
KEPT = 0.9  # of what is known of that, with each cycle more
PAYS = 1.02  # times as many tokens a second must be expected of a cycle with pruning
FORGOTTEN_CYCLES = 64  # without pruning, after which what those with it showed is unknown again

# (tree, rows of the pass, candidates behind them, their scores) -> rows that go on
Rule = Callable[[DraftTree, TreeRows, Sequence[Candidate], Sequence[float]], Sequence[int]]


def paper_rule(translator: Translator) -> Rule:
    """The paper's: edges by the predictor alone, against a threshold, with all safeguards."""

    def rule(tree: DraftTree, rows: TreeRows, found: Sequence[Candidate], scores: Sequence[float]) -> Sequence[int]:
        return over_threshold(rows, weigh(tree, rows, found, scores, PAPER).edge, translator.threshold)

    return rule


@dataclass(frozen=True, slots=True)
class Pruning:
    """What pruners are made of: they learn for themselves what pays."""

    scores: Scores
    translator: Translator
    rule: Rule | None = None  # None: as many rows go on as are worth it

    def pruner(self, model: Model, cost: CycleCost) -> Pruner:
        """A new one."""
        return Pruner(model, self.scores, self.translator, cost, self.rule)


class Pruner:
    """Thins passes behind one layer: always, by a rule; or where that is expected to bring more tokens a second, and
    then the rows go on that bring the most, by what is known of them by then.
    """

    def __init__(
        self, model: Model, scores: Scores, translator: Translator, cost: CycleCost, rule: Rule | None = None
    ) -> None:
        self._model, self._scores, self._cost, self._rule = model, scores, cost, rule
        self._translator = translator
        self.share = (translator.layer + 1) / model.config.n_layers  # of the layers that all rows go through
        self._score_s = 0.0
        self._rows, self._tokens = translator.quality.kept_rows, FIRST_TOKENS  # what goes on of both, as a share
        self._idle = 0

    @property
    def layer(self) -> int:
        """Behind which rows are looked at."""
        return self._translator.layer

    def select(self, now: Situation, nodes: list[int], *, widen: bool) -> tuple[list[int], bool]:
        """The nodes that begin a pass which would check `nodes` whole, and whether it shall be thinned.

        With `widen` they may be others, of the whole tree: more, of which some will not go on.
        """
        if not self._cost.knows_passes or len(now.tree) == 1:
            return nodes, False
        if self._rule is not None:
            return nodes, len(nodes) > 1

        def rate_of(n: int, tokens: float) -> float:
            return self._rate(now.spent_s, n, max(round(self._rows * n), 1), self._tokens * tokens)

        more, thinned_rate = likeliest(now, rate_of) if widen else (nodes, rate_of(len(nodes), gain(now.tree, nodes)))
        if len(more) > 1 and thinned_rate > PAYS * rate(now, nodes):
            self._idle = 0
            return more, True
        self._idle += 1
        if self._idle >= FORGOTTEN_CYCLES:
            self._forget()
        return nodes, False

    def thinned(self, tree: DraftTree, rows: TreeRows, spent_s: float) -> Thinned:
        """Of one pass, over these rows; `spent_s`: on drafting, in its cycle."""
        return Thinned(self, self._model, tree, rows, spent_s)

    def expected_s(self, n_rows: int) -> float:
        """Seconds that a pass over so many rows takes, of which as many go on as of late."""
        return self._cost.thinned_s(n_rows, max(round(self._rows * n_rows), 1), self.share) + self._score_s

    def survivors(self, tree: DraftTree, rows: TreeRows, spent_s: float) -> Sequence[int]:
        """The rows of a pass that go on, asked in the middle of it. `spent_s`: on drafting, in its cycle."""
        n, found = len(rows.nodes), candidates(tree, rows)
        pairs = [(candidate.parent, tree.tokens[candidate.node]) for candidate in found]
        scores = self._model.score(self._scores, n, pairs)
        if not np.isfinite(scores).all():  # a candidate that overflows is seen to at the end of the pass
            return range(n)
        if self._rule is not None:
            return self._rule(tree, rows, found, scores.tolist())
        reach = weigh(tree, rows, found, scores.tolist(), self._translator.mix).reach
        kept = most_worth(rows, reach, lambda k, tokens: self._rate(spent_s, n, k, tokens))
        self._rows = KEPT * self._rows + (1 - KEPT) * len(kept) / n
        self._tokens = KEPT * self._tokens + (1 - KEPT) * sum(reach[row] for row in kept) / sum(reach)
        return kept

    def took(self, score_s: float) -> None:
        """So long took the scores of a pass."""
        self._score_s = KEPT * self._score_s + (1 - KEPT) * score_s if self._score_s else score_s

    def _rate(self, spent_s: float, rows: int, kept: int, tokens: float) -> float:
        """Tokens a second of a cycle whose pass goes on with so many of its rows."""
        pass_s = self._cost.thinned_s(rows, kept, self.share) + self._score_s
        return tokens / (spent_s + pass_s + tokens * self._cost.project_s())

    def _forget(self) -> None:
        self._rows, self._tokens = self._translator.quality.kept_rows, FIRST_TOKENS
        self._score_s, self._idle = 0.0, 0


def expected_gain(
    cost: CycleCost, translator: Translator, n_layers: int, spent_s: float, rows: int, tokens: float
) -> float:
    """How many times as many tokens a second a cycle is thought to bring whose pass is thinned as the translator's
    figures have it; below PAYS it will not be.
    """
    kept, share = max(round(translator.quality.kept_rows * rows), 1), (translator.layer + 1) / n_layers
    whole_s = spent_s + cost.pass_s(rows) + tokens * cost.project_s()
    fewer = FIRST_TOKENS * tokens
    thinned_s = spent_s + cost.thinned_s(rows, kept, share) + fewer * cost.project_s()
    return (fewer / thinned_s) / (tokens / whole_s)


class Thinned:
    """One pass that a pruner thins, from its start to what is known at its end: the rows that went on, and the seconds
    that it took to choose them.
    """

    def __init__(self, pruner: Pruner, model: Model, tree: DraftTree, rows: TreeRows, spent_s: float) -> None:
        self.kept: Sequence[int] = range(len(rows.nodes))
        self.score_s = 0.0
        self.expected_s = pruner.expected_s(len(rows.nodes))
        self.thinning = Thinning(pruner.layer, self._choose)
        self._pruner, self._model, self._tree, self._rows, self._spent_s = pruner, model, tree, rows, spent_s
        self._began_s, self._below_s = model.stats.layers_s, 0.0

    def whole(self, compute_s: float) -> Mapping[int, float]:
        """Seconds inside ggml that all layers would have taken for all rows, and for those that went on."""
        n, share = len(self._rows.nodes), self._pruner.share
        if len(self.kept) == n:
            return {n: compute_s}
        return {n: self._below_s / share, len(self.kept): (compute_s - self._below_s) / (1 - share)}

    @property
    def pruned(self) -> list[int]:
        """Nodes whose rows did not go on."""
        kept = set(self.kept)
        return [node for row, node in enumerate(self._rows.nodes) if row not in kept]

    def _choose(self) -> Sequence[int]:
        started = time.perf_counter()
        self._below_s = self._model.stats.layers_s - self._began_s
        self.kept = self._pruner.survivors(self._tree, self._rows, self._spent_s)
        self.score_s = time.perf_counter() - started
        self._pruner.took(self.score_s)
        return self.kept
