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

HOPED = 1.0  # draft steps that it is thought to save before it was tried
FORGOTTEN_CYCLES = 64  # without it, after which what those with it showed is unknown again
PASSES_WITHOUT_A_STEP = 16  # after which it is thought that steps may be shorter than they seemed


class Ahead:
    """Drafting beside passes. What survives of it saves the next cycle draft steps; the pass may have a core less."""

    def __init__(self, draft: Draft, grow: Grow, cost: CycleCost, *, always: bool) -> None:
        """`grow` says which nodes are next; with `always` nobody asks whether it pays."""
        self._draft, self._grow, self._cost, self._always = draft, grow, cost, always
        self._saved = Average()
        self._idle = self._without_a_step = 0
        self._expanded: list[int] = []  # beside the pass of this cycle
        self._done = 0.0  # of the pass, as a share

    def begin(self) -> None:
        """A cycle begins, which so far is thought of without, or with it where nobody asks."""
        self._expanded.clear()
        self._cost.beside = self._always

    def choose(self, now: Situation, select: Select) -> list[int]:
        """The nodes for the pass that comes, by the way that brings more tokens a second: with all threads, or with a
        draft beside them, if that has something to do. From then on `CycleCost.beside` says which.
        """
        nodes = select(now)
        if self._always or not self._cost.knows_passes or not self._nodes(now):
            return nodes
        alone = self._rate(now, nodes, 0.0)
        self._cost.beside = True
        if self._cost.knows_passes:
            saved_s = self._saved.value if self._saved.value is not None else HOPED * self._cost.draft_s(1)
            with_it = select(now)
            if self._rate(now, with_it, saved_s) > alone:
                self._idle = 0
                return with_it
        self._cost.beside = False
        self._idle += 1
        if self._idle >= FORGOTTEN_CYCLES:
            self._saved, self._idle = Average(), 0
            self._cost.forget_beside()
        return nodes

    def _nodes(self, now: Situation) -> list[int]:
        """What the next step beside a pass would be."""
        return self._grow(now)[: self._draft.room]

    def _rate(self, now: Situation, nodes: Sequence[int], saved_s: float) -> float:
        """Tokens a second of the cycle that checks these nodes, by what passes cost as `CycleCost.beside` has it."""
        tokens = gain(now.tree, nodes)
        seconds = now.spent_s + self._cost.pass_s(len(nodes)) + tokens * self._cost.project_s()
        return tokens / max(seconds - saved_s, seconds / 2)

    def layer_done(self, share: float) -> None:
        """So much of the pass is done."""
        self._done = share

    @contextmanager
    def going_on(self, run: Run, now: Situation, trust: float, pass_s: float) -> Iterator[None]:
        """Grow the tree on a thread of its own until what is in here has ended, a pass that should take so long."""
        stop = threading.Event()
        self._draft.model.n_threads, self._done = self._cost.hidden_threads, 0.0

        def go_on() -> None:
            started = time.perf_counter()
            while not stop.is_set() and (nodes := self._nodes(now)):
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
        self._without_a_step = 0 if self._expanded else self._without_a_step + 1
        if self._without_a_step >= PASSES_WITHOUT_A_STEP:
            self._cost.forget_beside()
            self._without_a_step = 0

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
