"""Tokens in, tokens out: prefill, then a tree of drafted tokens per pass over the target. Knows ids, never text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lever.cycle_cost import CycleCost
from lever.draft import Draft
from lever.errors import Cancelled, ContextOverflow, LeverError, UsageError
from lever.model import Model
from lever.policies import Preset, Situation, preset
from lever.sample import top2_gap
from lever.stats import RunStats
from lever.threads import ThreadChooser
from lever.trace import Cycle, Mark
from lever.tree import DraftTree, TreeRows, depth_first, reroot
from lever.weights.store import Store

# (logits of one row, tokens before it, position of the token to be drawn) -> token
Draw = Callable[[NDArray[np.float32], Sequence[int], int], int]
# A gap between the two best logits under which sums in another order may draw another token (`near_ties`): twice the
# largest change of a gap that was seen on the demo (docs/log.md).
NEAR_TIE = 0.3
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Step:
    """One new token. `logits` [n_vocab] are those it was drawn from, valid until the next step."""

    token: int
    logits: NDArray[np.float32]
    finish_reason: FinishReason | None  # set on the last step


class Engine:
    """Generates with a target and, where there is one, a draft. The tokens whose rows are in the KV cache are kept, and
    a prompt that starts with them goes on from there. Neither that nor the draft changes a bit of what follows.
    """

    def __init__(
        self,
        model: Model,
        store: Store,
        n_threads: int,
        start_threads: int | None = None,
        *,
        draft: Draft | None = None,
        policy: Preset | None = None,
    ) -> None:
        """With `n_threads` at most; `start_threads` is what the first passes for a token get."""
        self._model = model
        self._store = store
        self._draft = draft
        self._policy = policy or preset("flash-ar" if draft is None else "lever")
        self._cost = CycleCost(n_threads)
        self._layer_threads = ThreadChooser(n_threads, n_threads)
        # Streaming starts with one thread: it nearly always keeps up, and leaves the rest of the machine alone.
        start = start_threads or (1 if store.streamed else n_threads)
        self._pass_threads = ThreadChooser(start, n_threads)
        self._draft_threads = ThreadChooser(1, n_threads)
        self._cached: list[int] = []
        self._request = 0  # the newest one; the model has one KV cache, so older ones cannot go on

    def steps(
        self,
        prompt: Sequence[int],
        draw: Draw,
        *,
        max_new_tokens: int | None,
        end_tokens: frozenset[int],
        stats: RunStats,
        temperature: float = 0.0,
        on_prefill: Callable[[int], None] = lambda _n_tokens: None,
        cancelled: Callable[[], bool] = lambda: False,
        on_cycle: Callable[[Cycle], None] | None = None,
    ) -> Iterator[Step]:
        """New tokens one by one, until an end token, `max_new_tokens` or a full context.

        `draw` decides every token; `temperature` is what it draws at, for the draft to guess by. `on_prefill` is told
        of prompt tokens as they are read. `cancelled` is asked after each layer; once it says yes, Cancelled is raised
        and the engine is ready for another prompt. `on_cycle` is told of each cycle that has ended: it costs a little
        time, so none is recorded without it. ContextOverflow when the prompt leaves no room for a new token.
        LeverError when it is gone on with after another prompt was begun.
        """
        check_prompt(prompt, self._model.shape.n_ctx)
        self._request += 1
        tokens = list(prompt)
        logits = self._prefill(prompt, stats, on_prefill, cancelled)
        if max_new_tokens == 0:
            return
        n_ctx = self._model.shape.n_ctx
        limit = n_ctx if max_new_tokens is None else min(n_ctx, len(prompt) + max_new_tokens)
        trace = _Trace(self._model, self._store, on_cycle)
        run = _Run(self._request, tokens, draw, end_tokens, limit, temperature, stats, cancelled, trace)
        figures = _Figures(self._model, self._store, stats)
        step = run.step(logits, exact=self._model.kv.in_order)
        figures.update()
        yield step
        tree = DraftTree.rooted_at(step.token)
        while step.finish_reason is None:
            self._only_newest(run)
            trace.begin()
            self._grow(run, tree)
            rows = self._verify(run, tree)
            accepted: list[int] = []
            try:
                for step, row in self._walk(run, rows):
                    if row:
                        accepted.append(row)
                    figures.update()
                    yield step
            finally:  # also when nobody wants the rest: the cache agrees with the text
                if run.request == self._request:  # else it holds another one by now
                    self._keep(rows, accepted)
            trace.end(tree, rows, accepted)
            if run.request == self._request:
                tree = self._rerooted(run, tree, [rows.nodes[row] for row in accepted])

    def _only_newest(self, run: _Run) -> None:
        if run.request != self._request:
            raise LeverError("another answer has been started since: one at a time")

    # One cycle: grow, verify, walk, keep, reroot

    def _grow(self, run: _Run, tree: DraftTree) -> None:
        """Draft while the policy says that it pays."""
        draft, started = self._draft, time.perf_counter()
        if draft is None or not self._policy.drafts or len(run.tokens) > draft.model.shape.n_ctx:
            return
        room = run.limit - len(run.tokens)  # edges below the root that can still become text
        draft.begin(tree, run.tokens, run.temperature)
        while nodes := self._policy.grow(self._situation(tree, time.perf_counter() - started)):
            nodes = [node for node in nodes if tree.depths[node] < room][: draft.room]
            if not nodes:
                break
            before, trial = run.trace.lap(), self._draft_threads.trying
            draft.model.n_threads = self._draft_threads.count
            draft.expand(tree, nodes, run.temperature)
            seconds = run.trace.mark("draft", before) - before
            self._draft_threads.observe(seconds / len(nodes), 0.0)
            if not trial:
                self._cost.observe_draft(len(nodes), seconds)
            run.stats.drafted += len(nodes)
            run.trace.drafted += len(nodes)
            _stop_if(run.cancelled)
        run.drafted_s = time.perf_counter() - started
        run.stats.draft_s += run.drafted_s

    def _verify(self, run: _Run, tree: DraftTree) -> TreeRows:
        """One pass of the target over the nodes that are worth it."""
        rows = depth_first(tree, self._policy.select(self._situation(tree, run.drafted_s)))
        clock, model, store = _Clock(self._store), self._model, self._store
        compute_s, read_s = model.stats.layers_s, store.stats.read_s
        plain = not self._policy.drafts
        model.n_threads = self._pass_threads.count if plain else self._cost.threads(len(rows.nodes))

        def after_layer(_layer: int) -> None:
            run.trace.layer()
            _stop_if(run.cancelled)

        run.trace.lap()
        if len(rows.nodes) == 1:
            model.forward(rows.tokens, after_layer)
        else:
            model.forward_tree(rows.tokens, rows.parents, after_layer)
        seconds, stall_s = clock.lap()
        if plain:
            self._pass_threads.observe(seconds, stall_s)
        compute_s, read_s = model.stats.layers_s - compute_s, store.stats.read_s - read_s
        self._cost.observe_pass(len(rows.nodes), seconds, compute_s, read_s, model.n_threads)
        run.stats.cycles += 1
        run.stats.verified += len(rows.nodes) - 1
        if len(rows.nodes) > 1 and not model.finite(len(rows.nodes)):
            # Keys or values of a candidate overflowed: masked, they still make sums of other rows that are no numbers.
            model.kv.truncate(model.kv.length)  # they may lie behind the text
            rows = depth_first(tree, [0])
            model.forward(rows.tokens, after_layer)
        return rows

    def _walk(self, run: _Run, rows: TreeRows) -> Iterator[tuple[Step, int]]:
        """The target's own tokens along the tree, each with the row it was drawn behind (0: the root's).

        Logits are made for the rows that the walk reaches, and no others.
        """
        row = 0
        while True:
            started = run.trace.lap()
            logits: NDArray[np.float32] = self._model.project([row])[0]
            self._cost.observe_project(run.trace.mark("project", started) - started)
            step = run.step(logits, exact=self._exact(rows, row))
            yield step, row
            if step.finish_reason is not None:
                return
            self._only_newest(run)
            children = (r for r, parent in enumerate(rows.parents) if parent == row)
            child = next((r for r in children if rows.tokens[r] == step.token), None)
            if child is None:
                return
            run.stats.accepted += 1
            row = child

    def _exact(self, rows: TreeRows, row: int) -> bool:
        """Whether this row has the bits of plain decoding: of masked ones, those whose path is the first rows."""
        if self._model.shape.tree_attention == "exact":
            return True
        return self._model.kv.in_order and rows.parents[: row + 1] == tuple(range(-1, row))

    def _keep(self, rows: TreeRows, accepted: Sequence[int]) -> None:
        """The root and the accepted rows are in the cache now; a single row is there already."""
        path = [0, *accepted]
        if len(rows.nodes) > 1:
            self._model.keep(path)
        self._cached.extend(rows.tokens[row] for row in path)

    def _rerooted(self, run: _Run, tree: DraftTree, accepted: Sequence[int]) -> DraftTree:
        """The tree of the next cycle: what lives on of this one, or its root alone."""
        token = run.tokens[-1]
        if self._draft is None or not self._policy.drafts:
            return DraftTree.rooted_at(token)
        rerooted = reroot(tree, accepted, token, carry_over=self._policy.carry_over)
        self._draft.follow(rerooted, [*(tree.tokens[node] for node in accepted), token])
        return rerooted.tree

    def _situation(self, tree: DraftTree, spent_s: float) -> Situation:
        return Situation(tree, self._cost, spent_s, self._model.most_rows)

    def _prefill(
        self,
        prompt: Sequence[int],
        stats: RunStats,
        on_prefill: Callable[[int], None],
        cancelled: Callable[[], bool],
    ) -> NDArray[np.float32]:
        """Rows for the part of the prompt that is not cached; the logits after its last token."""
        started = time.perf_counter()
        n_cached = min(_common_prefix(self._cached, prompt), len(prompt) - 1)
        del self._cached[n_cached:]  # first: at no moment may it hold more than the cache
        self._model.kv.truncate(n_cached)
        stats.prompt_tokens, stats.cached_tokens = len(prompt), n_cached
        n_batch = self._model.shape.n_batch
        for start in range(n_cached, len(prompt), n_batch):
            part = prompt[start : start + n_batch]
            self._wide_pass(part, on_prefill, cancelled)
        logits: NDArray[np.float32] = self._model.project([len(part) - 1])[0]
        stats.prefill_s = time.perf_counter() - started
        return logits

    def _wide_pass(
        self, tokens: Sequence[int], on_prefill: Callable[[int], None], cancelled: Callable[[], bool]
    ) -> None:
        """One pass for a part of the prompt; after each layer its share of the tokens counts as read."""
        n_layers, n_rows = self._model.config.n_layers, len(tokens)
        clock = _Clock(self._store)
        self._model.n_threads = self._layer_threads.count

        def after_layer(layer: int) -> None:
            seconds, stall_s = clock.lap()
            self._layer_threads.observe(seconds / n_rows, stall_s / n_rows)  # parts of a prompt differ in length
            self._model.n_threads = self._layer_threads.count
            on_prefill(n_rows * (layer + 1) // n_layers - n_rows * layer // n_layers)
            _stop_if(cancelled)

        self._model.forward(tokens, after_layer)
        self._cached.extend(tokens)


@dataclass(slots=True)
class _Run:
    """One request while it is answered."""

    request: int
    tokens: list[int]  # prompt and answer
    draw: Draw
    end_tokens: frozenset[int]
    limit: int  # of tokens
    temperature: float
    stats: RunStats
    cancelled: Callable[[], bool]
    trace: _Trace
    drafted_s: float = 0.0  # in this cycle

    def step(self, logits: NDArray[np.float32], *, exact: bool) -> Step:
        """The next token, drawn by the request's own rule, at its place in the text.

        `exact`: whether these are the bits of plain decoding.
        """
        token = self.draw(logits, self.tokens, len(self.tokens))
        self.tokens.append(token)
        self.stats.new_tokens += 1
        if not exact:
            self.stats.exact = False
            self.stats.near_ties += top2_gap(logits) < NEAR_TIE
        return Step(token, logits, _finish_reason(token, len(self.tokens), self.end_tokens, self.limit))


def check_prompt(prompt: Sequence[int], n_ctx: int) -> None:
    """UsageError for a prompt without tokens, ContextOverflow for one that leaves no room for a new token."""
    if not prompt:
        raise UsageError("the prompt is empty: there is nothing to go on from")
    if len(prompt) >= n_ctx:
        raise ContextOverflow(
            f"the prompt has {len(prompt)} tokens and the context {n_ctx}: shorten it or give more with -c"
        )


class _Clock:
    """Time, and time spent waiting for reads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last = self._now()

    def lap(self) -> tuple[float, float]:
        """Seconds, and seconds of waiting, since the last lap."""
        now = self._now()
        (seconds, stalled), self._last = ((now[0] - self._last[0], now[1] - self._last[1]), now)
        return seconds, stalled

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), self._store.stats.stall_s


class _Trace:
    """Marks of the cycle under way, kept where somebody wants to be told of it."""

    def __init__(self, model: Model, store: Store, on_cycle: Callable[[Cycle], None] | None) -> None:
        self.drafted = 0
        self._model, self._store, self._on_cycle = model, store, on_cycle
        self._marks: list[Mark] = []
        self._started = self._lap = self._compute_s = 0.0

    def begin(self) -> None:
        """A cycle begins."""
        self._marks, self.drafted = [], 0
        self._started = self.lap()

    def lap(self) -> float:
        """The time, from which the next layer counts."""
        self._lap, self._compute_s = time.perf_counter(), self._model.stats.layers_s
        return self._lap

    def mark(self, what: Literal["draft", "layer", "project"], start: float, compute_s: float = 0.0) -> float:
        """Something has been done since `start`; the time."""
        now = time.perf_counter()
        if self._on_cycle is not None:
            self._marks.append(Mark(what, start, now, compute_s, self._store.stats.read_bytes))
        return now

    def layer(self) -> None:
        """The target has done a layer."""
        if self._on_cycle is not None:
            self.mark("layer", self._lap, self._model.stats.layers_s - self._compute_s)
            self.lap()

    def end(self, tree: DraftTree, rows: TreeRows, accepted: Sequence[int]) -> None:
        """The cycle has ended."""
        if self._on_cycle is not None:
            self._on_cycle(Cycle(tree, rows, tuple(accepted), self.drafted, self._started, tuple(self._marks)))


class _Figures:
    """Brings the stats of a run up to date, from counters that go on from run to run."""

    def __init__(self, model: Model, store: Store, stats: RunStats) -> None:
        self._model, self._store, self._stats = model, store, stats
        self._before = self._now()

    def update(self) -> None:
        """Take what has happened since the decode phase began."""
        s = self._stats
        s.decode_s, s.verify_s, s.project_s, s.stall_s, s.read_s, read_bytes = (
            now - before for now, before in zip(self._now(), self._before, strict=True)
        )
        s.read_bytes = int(read_bytes)
        s.python_s = s.decode_s - s.verify_s - s.project_s - s.stall_s - s.draft_s

    def _now(self) -> tuple[float, ...]:
        model, store = self._model.stats, self._store.stats
        return (
            time.perf_counter(),
            model.layers_s,
            model.projection_s,
            store.stall_s + model.embedding_s,
            store.read_s,
            store.read_bytes,
        )


def _stop_if(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise Cancelled("the answer was given up")


def _finish_reason(token: int, n_tokens: int, end_tokens: frozenset[int], limit: int) -> FinishReason | None:
    if token in end_tokens:
        return "stop"
    return "length" if n_tokens >= limit else None


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))
