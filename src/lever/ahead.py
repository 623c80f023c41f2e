"""The draft beside a pass: while the target checks a tree, it grows for the next cycle. Decides whether that pays."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from lever.cycle_cost import CycleCost
from lever.draft import Draft
from lever.policies import MET, Grow, Select, Situation, gain
from lever.request import Run
from lever.times import Average
from lever.tree import DraftTree

PAYS = 1.0  # times as many tokens a second must be expected of a cycle with it, and more
HOPED = 1.0  # draft steps that it is thought to save before it was tried
FORGOTTEN = 64  # cycles without it, after which what it saved is unknown again


class Ahead:
    """Drafting beside passes. What survives of it saves the next cycle draft steps; the pass may have a core less."""

    def __init__(self, draft: Draft, grow: Grow, cost: CycleCost, *, always: bool) -> None:
        """`grow` says which nodes are next; with `always` nobody asks whether it pays."""
        self._draft, self._grow, self._cost, self._always = draft, grow, cost, always
        self._saved = Average()
        self._idle = 0
        self._expanded: list[int] = []  # beside the pass of this cycle
        self._done = 0.0  # of the pass, as a share

    def begin(self) -> None:
        """A cycle begins, which so far is thought of without, or with it where nobody asks."""
        self._expanded.clear()
        self._cost.beside = self._always

    def decide(self, now: Situation, select: Select) -> None:
        """Whether the pass that comes, over what is selected of the tree, shall have a draft beside it."""
        if self._always or not self._cost.knows_passes:
            return
        saved_s = self._saved.value if self._saved.value is not None else HOPED * self._cost.draft_s(1)
        alone = self._rate(now, select, 0.0)
        self._cost.beside = True
        if self._rate(now, select, saved_s) > PAYS * alone:
            self._idle = 0
            return
        self._cost.beside = False
        self._idle += 1
        if self._idle >= FORGOTTEN:
            self._saved, self._idle = Average(), 0

    def _rate(self, now: Situation, select: Select, saved_s: float) -> float:
        """Tokens a second of the cycle, by what passes cost as `CycleCost.beside` has it."""
        nodes = select(now)
        tokens = gain(now.tree, nodes)
        seconds = now.spent_s + self._cost.pass_s(len(nodes)) + tokens * self._cost.project_s()
        return tokens / max(seconds - saved_s, seconds / 2)

    def layer_done(self, share: float) -> None:
        """So much of the pass is done."""
        self._done = share

    @contextmanager
    def going_on(self, run: Run, now: Situation, trust: float, n_rows: int) -> Iterator[None]:
        """Grow the tree on a thread of its own until what is in here has ended, a pass over so many rows."""
        stop, pass_s = threading.Event(), self._cost.pass_s(n_rows)
        self._draft.model.n_threads, self._done = self._cost.hidden_threads, 0.0

        def go_on() -> None:
            started = time.perf_counter()
            while not stop.is_set() and (nodes := self._grow(now)[: self._draft.room]):
                before = time.perf_counter()
                if self._cost.hidden_s(len(nodes)) > (1 - self._done) * pass_s:
                    break  # the cycle would wait for it
                self._draft.expand(now.tree, nodes, run.temperature, trust)
                self._cost.observe_hidden(len(nodes), time.perf_counter() - before)
                self._expanded += nodes
                run.stats.drafted += len(nodes)
            run.stats.draft_hidden_s += time.perf_counter() - started

        with ThreadPoolExecutor(1, "lever-draft") as pool:
            going_on = pool.submit(go_on)
            try:
                yield
            finally:
                stop.set()
        going_on.result()

    def learn(self, tree: DraftTree, accepted: Sequence[int], token: int, tokens_per_s: float | None) -> None:
        """The target has gone along these nodes and drawn `token` behind them: what survives saves draft steps, one for
        each level; but no more than what the nodes bring is worth at so many tokens a second.
        """
        if not self._cost.beside:
            return
        root = tree.children[accepted[-1] if accepted else 0].get(token)
        levels: dict[int, list[int]] = {}
        for node in self._expanded:
            if root is not None and _behind(tree, node, root):
                levels.setdefault(tree.depths[node], []).append(node)
        saved_s = 0.0
        for nodes in levels.values():
            brings = MET * sum(tree.reach[node] for node in nodes) / (tree.reach[root or 0] or 1.0)
            step_s = self._cost.draft_s(len(nodes))
            saved_s += min(step_s, brings / tokens_per_s) if tokens_per_s else step_s
        self._saved.observe(saved_s)


def _behind(tree: DraftTree, node: int, root: int) -> bool:
    """Whether a node is `root` or below it. A parent has a lower number than its children."""
    while node > root:
        node = tree.parents[node]
    return node == root
