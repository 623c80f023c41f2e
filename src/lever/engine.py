"""Tokens in, tokens out: prefill, then a tree of drafted tokens per pass over the target. Knows ids, never text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lever.cycle_cost import CycleCost, Foretold
from lever.draft import Draft
from lever.errors import Cancelled, ContextOverflow, LeverError, UsageError
from lever.figures import Clock, Figures, Trace
from lever.lookup import Match, Record, find, tree_of
from lever.model import Model
from lever.policies import Preset, Situation, most_worth, preset, rate
from lever.sample import top2_gap
from lever.stats import RunStats
from lever.threads import ThreadChooser
from lever.trace import Cycle
from lever.tree import DraftTree, TreeRows, depth_first, reroot
from lever.weights.store import Store
from lever.worth import Reliability, Worth

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
        foretold: Foretold | None = None,
    ) -> None:
        """With `n_threads` at most; `start_threads` is what the first passes for a token get.

        A policy that drafts does so from the text alone where there is no draft, if it is one that looks there.
        `foretold` are the costs of a cycle as far as they are known beforehand.
        """
        self._model = model
        self._store = store
        self._draft = draft
        self._policy = policy or preset("flash-ar" if draft is None else "lever")
        self._threads = n_threads, start_threads
        self._foretold = foretold
        # Where the draft goes on beside a pass, it has a core to itself.
        beside = draft is not None and self._policy.meanwhile is not None
        self._cost = CycleCost(max(n_threads - beside, 1), foretold)
        self._worth, self._reliability, self._matches = Worth(), Reliability(), Record()
        self._layer_threads = ThreadChooser(n_threads, n_threads)
        # Streaming starts with one thread: it nearly always keeps up, and leaves the rest of the machine alone.
        start = start_threads or (1 if store.streamed else n_threads)
        self._pass_threads = ThreadChooser(start, n_threads)
        self._draft_threads = ThreadChooser(*self._cost.draft_threads)
        self._project_threads = ThreadChooser(*self._cost.project_threads)
        self._cached: list[int] = []
        # The newest one, in a list that engines beside each other share: with one KV cache, older ones cannot go on.
        self._requests = [0]

    def beside(self, policy: Preset) -> Engine:
        """Another engine with the same model, draft and KV cache. It learns for itself what things cost; an answer of
        either ends that of the other.
        """
        other = Engine(
            self._model, self._store, *self._threads, draft=self._draft, policy=policy, foretold=self._foretold
        )
        other._cached, other._requests = self._cached, self._requests
        return other

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
        self._requests[0] += 1
        tokens = list(prompt)
        logits = self._prefill(prompt, stats, on_prefill, cancelled)
        if max_new_tokens == 0:
            return
        n_ctx = self._model.shape.n_ctx
        limit = n_ctx if max_new_tokens is None else min(n_ctx, len(prompt) + max_new_tokens)
        trace = Trace(self._model, self._store, on_cycle)
        run = _Run(self._requests[0], tokens, draw, end_tokens, limit, temperature, stats, cancelled, trace)
        if run.room > 2:
            self._read_by_draft(run)
        figures = Figures(self._model, self._store, stats)
        step = run.step(logits, exact=self._model.kv.in_order)
        figures.update()
        yield step
        tree = DraftTree.rooted_at(step.token)
        while step.finish_reason is None:
            self._only_newest(run)
            run.begin_cycle()
            match = find(run.tokens) if self._policy.adaptive else None
            tree, looked_up = self._guess(run, tree, match)
            rows = self._verify(run, tree)
            accepted: list[int] = []
            try:
                for step, row in self._walk(run, tree, rows, drafted=not looked_up):
                    if row:
                        accepted.append(row)
                    figures.update()
                    yield step
            finally:  # also when nobody wants the rest: the cache agrees with the text
                if run.request == self._requests[0]:  # else it holds another one by now
                    self._keep(rows, accepted)
            trace.end(tree, rows, accepted)
            self._learn(run, rows, match, looked_up=looked_up)
            if run.request == self._requests[0]:
                tree = self._rerooted(run, tree, [rows.nodes[row] for row in accepted], looked_up=looked_up)

    def _only_newest(self, run: _Run) -> None:
        if run.request != self._requests[0]:
            raise LeverError("another answer has been started since: one at a time")

    # One cycle: guess, verify, walk, keep, learn, reroot

    def _guess(self, run: _Run, tree: DraftTree, match: Match | None) -> tuple[DraftTree, bool]:
        """What may follow: the tree as the draft has grown it, or what the text itself says, where that promises more.
        The second says whether it is the text's.
        """
        if self._policy.adaptive and self._cost.must_be_plain:
            return DraftTree.rooted_at(run.tokens[-1]), False
        if match is not None:
            chain = tree_of(match, run.tokens[-1], self._matches.share(match.length))
            if self._promises_more(run, chain):
                return chain, True
        if self._draft is not None and self._policy.drafts and run.room > 1:
            if self._worth_drafting(run, self._draft):
                self._grow(run, tree, self._draft)
            else:
                self._worth.wait()
                return DraftTree.rooted_at(run.tokens[-1]), False
        return tree, False

    def _worth_drafting(self, run: _Run, draft: Draft) -> bool:
        """Whether it has paid so far, or is worth another try: for which the draft has to read what it missed."""
        if not self._policy.adaptive:
            return True
        passes = self._cost.reading_s(draft.behind(run.tokens)) / (self._cost.pass_s(1) or 1.0)
        return self._worth.guessing and self._worth.can_afford(passes)

    def _promises_more(self, run: _Run, chain: DraftTree) -> bool:
        """Whether a chain from the text brings more tokens a second than what would be done without it."""
        now, cost = self._situation(run, chain), self._cost
        if not cost.knows_passes:
            return False
        nodes = most_worth(now)
        promised = rate(now, nodes)
        if len(nodes) == 1:
            return False
        if self._draft is None or not self._worth.guessing:
            return promised > rate(now, [0])
        drafted = self._worth.tokens_per_s
        if drafted is None:
            return False
        return 1 / (1 / promised + cost.reading_s()) > drafted  # the draft will have to read what it did not say

    def _grow(self, run: _Run, tree: DraftTree, draft: Draft) -> None:
        """Draft while the policy says that it pays."""
        if len(run.tokens) > draft.model.shape.n_ctx:
            return
        started, trust = time.perf_counter(), self._reliability.value
        behind = draft.behind(run.tokens)
        reads = behind > draft.model.shape.n_logits  # what was no guess of its own
        draft.model.n_threads = (self._layer_threads if reads else self._draft_threads).count
        draft.begin(tree, run.tokens, run.temperature, trust)
        if reads:  # all but the root, which is a step like others
            step_s = self._cost.draft_s(1)
            self._cost.observe_reading(behind - 1, max(time.perf_counter() - started - step_s, 0.0))
        while True:
            run.drafted_s = time.perf_counter() - started
            nodes = self._policy.grow(self._situation(run, tree))[: draft.room]
            if not nodes:
                break
            before, trial = run.trace.lap(), self._draft_threads.trying
            draft.model.n_threads = self._draft_threads.count
            draft.expand(tree, nodes, run.temperature, trust)
            seconds = run.trace.mark("draft", before) - before
            self._draft_threads.observe(_relative(seconds, self._cost.draft_s(len(nodes))), 0.0)
            if not trial:
                self._cost.observe_draft(len(nodes), seconds)
            run.stats.drafted += len(nodes)
            run.trace.drafted += len(nodes)
            _stop_if(run.cancelled)
        run.stats.draft_s += run.drafted_s

    def _verify(self, run: _Run, tree: DraftTree) -> TreeRows:
        """One pass of the target over the nodes that are worth it."""
        rows = depth_first(tree, self._policy.select(self._situation(run, tree)))
        clock, model, store = Clock(self._store), self._model, self._store
        compute_s, read_s = model.stats.layers_s, store.stats.read_s
        plain = not self._policy.drafts
        model.n_threads = self._pass_threads.count if plain else self._cost.next_threads(len(rows.nodes))

        def after_layer(_layer: int) -> None:
            run.trace.layer()
            _stop_if(run.cancelled)

        run.trace.lap()
        with self._drafting_on(run, tree):
            if len(rows.nodes) == 1:
                model.forward(rows.tokens, after_layer)
            else:
                model.forward_tree(rows.tokens, rows.parents, after_layer)
        seconds, stall_s = clock.lap()
        run.cycle_s += seconds
        if plain:
            self._pass_threads.observe(seconds, stall_s)
        compute_s, read_s = model.stats.layers_s - compute_s, store.stats.read_s - read_s
        self._cost.observe_pass(len(rows.nodes), seconds, compute_s, read_s, model.n_threads)
        run.stats.cycles += 1
        run.stats.verified += len(rows.nodes) - 1
        run.stats.plain_cycles += len(rows.nodes) == 1
        if len(rows.nodes) > 1 and not model.finite(len(rows.nodes)):
            # Keys or values of a candidate overflowed: masked, they still make sums of other rows that are no numbers.
            model.kv.truncate(model.kv.length)  # they may lie behind the text
            rows = depth_first(tree, [0])
            model.forward(rows.tokens, after_layer)
        return rows

    @contextmanager
    def _drafting_on(self, run: _Run, tree: DraftTree) -> Iterator[None]:
        """Let the draft go on beside a pass, where the policy says so: what survives is the next cycle's start."""
        draft, more = self._draft, self._policy.meanwhile
        if draft is None or more is None or not tree.expanded(0):
            yield
            return
        stop, now, trust = threading.Event(), self._situation(run, tree), self._reliability.value
        draft.model.n_threads = 1

        def go_on() -> None:
            started = time.perf_counter()
            while not stop.is_set() and (nodes := more(now)[: draft.room]):
                draft.expand(tree, nodes, run.temperature, trust)
                run.stats.drafted += len(nodes)
            run.stats.draft_hidden_s += time.perf_counter() - started

        with ThreadPoolExecutor(1, "lever-draft") as pool:
            going_on = pool.submit(go_on)
            try:
                yield
            finally:
                stop.set()
        going_on.result()

    def _walk(self, run: _Run, tree: DraftTree, rows: TreeRows, *, drafted: bool) -> Iterator[tuple[Step, int]]:
        """The target's own tokens along the tree, each with the row it was drawn behind (0: the root's).

        Logits are made for rows that the walk reaches, and for those that it will so probably reach that it saves time.
        """
        row, known = 0, dict[int, NDArray[np.float32]]()
        while True:
            if row not in known:
                known = self._project(run, self._likely_path(tree, rows, row))
            logits = known[row]
            step = run.step(logits, exact=self._exact(rows, row))
            if drafted:
                self._judge(tree, rows.nodes[row], step.token)
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

    def _likely_path(self, tree: DraftTree, rows: TreeRows, row: int) -> list[int]:
        """A row, and those behind it along the likeliest path that are better projected at once with it."""
        cost, path, reach = self._cost, [row], tree.reach[rows.nodes[row]]
        best, best_saved, expected = 1, 0.0, 1.0
        while len(path) < self._model.shape.n_logits and reach:
            children = [r for r in range(path[-1] + 1, len(rows.nodes)) if rows.parents[r] == path[-1]]
            if not children:
                break
            path.append(max(children, key=lambda r: tree.reach[rows.nodes[r]]))
            expected += tree.reach[rows.nodes[path[-1]]] / reach
            saved = expected * cost.project_s(1) - cost.project_s(len(path))
            if saved > best_saved:
                best, best_saved = len(path), saved
        return path[:best]

    def _project(self, run: _Run, path: Sequence[int]) -> dict[int, NDArray[np.float32]]:
        """Logits of these rows."""
        started, trial = run.trace.lap(), self._project_threads.trying
        self._model.n_threads = self._project_threads.count
        logits = self._model.project(path)
        seconds = run.trace.mark("project", started) - started
        self._project_threads.observe(_relative(seconds, self._cost.project_s(len(path))), 0.0)
        if not trial:
            self._cost.observe_project(len(path), seconds)
        run.cycle_s += seconds
        return dict(zip(path, logits, strict=True))

    def _judge(self, tree: DraftTree, node: int, token: int) -> None:
        """The target's token behind a node, against what the draft said."""
        if tree.children[node] and tree.reach[node]:
            promised = sum(tree.reach[child] for child in tree.children[node].values()) / tree.reach[node]
            self._reliability.observe(promised / self._reliability.value, token in tree.children[node])

    def _keep(self, rows: TreeRows, accepted: Sequence[int]) -> None:
        """The root and the accepted rows are in the cache now; a single row is there already."""
        path = [0, *accepted]
        if len(rows.nodes) > 1:
            self._model.keep(path)
        self._cached.extend(rows.tokens[row] for row in path)

    def _learn(self, run: _Run, rows: TreeRows, match: Match | None, *, looked_up: bool) -> None:
        """What the cycle tells of the next ones."""
        new = run.tokens[run.started :]
        run.outcomes.append((len(rows.nodes) - 1, len(new) - 1))
        run.stats.looked_up += looked_up
        if match is not None:
            self._matches.observe(match, new)
        if not looked_up and run.drafted_s:
            plain_s = self._cost.pass_s(1) + self._cost.project_s()
            self._worth.observe(len(new), run.drafted_s + run.cycle_s, plain_s)

    def _rerooted(self, run: _Run, tree: DraftTree, accepted: Sequence[int], *, looked_up: bool) -> DraftTree:
        """The tree of the next cycle: what lives on of this one, or its root alone."""
        token = run.tokens[-1]
        if self._draft is None or looked_up or not tree.expanded(0):
            return DraftTree.rooted_at(token)
        rerooted = reroot(tree, accepted, token, carry_over=self._policy.carry_over)
        self._draft.follow(rerooted, [*(tree.tokens[node] for node in accepted), token])
        return rerooted.tree

    def _situation(self, run: _Run, tree: DraftTree) -> Situation:
        return Situation(tree, self._cost, run.drafted_s, self._model.most_rows, run.room, run.outcomes)

    def _read_by_draft(self, run: _Run) -> None:
        """The prompt, before the first cycle needs it."""
        draft = self._draft
        if draft is None or not self._policy.drafts or len(run.tokens) >= draft.model.shape.n_ctx:
            return
        if not self._worth_drafting(run, draft):
            return
        started, behind = time.perf_counter(), draft.behind(run.tokens)
        draft.model.n_threads = self._layer_threads.count
        draft.read(run.tokens, lambda: _stop_if(run.cancelled))
        seconds = time.perf_counter() - started
        if behind > draft.model.shape.n_logits:
            self._cost.observe_reading(behind, seconds)
        run.stats.prefill_s += seconds

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
        clock, compute_s, read_s = Clock(self._store), self._model.stats.layers_s, self._store.stats.read_s
        n_threads = self._model.n_threads = self._layer_threads.count

        def after_layer(layer: int) -> None:
            seconds, stall_s = clock.lap()
            self._layer_threads.observe(seconds / n_rows, stall_s / n_rows)  # parts of a prompt differ in length
            self._model.n_threads = self._layer_threads.count
            on_prefill(n_rows * (layer + 1) // n_layers - n_rows * layer // n_layers)
            _stop_if(cancelled)

        self._model.forward(tokens, after_layer)
        self._cached.extend(tokens)
        if n_threads == self._model.n_threads:
            compute_s, read_s = self._model.stats.layers_s - compute_s, self._store.stats.read_s - read_s
            self._cost.observe_prefill(n_rows, compute_s, read_s, n_threads)


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
    trace: Trace
    outcomes: list[tuple[int, int]] = field(default_factory=list)  # of its cycles: candidates checked, and accepted
    started: int = 0  # the place of the first token of this cycle
    drafted_s: float = 0.0  # in this cycle
    cycle_s: float = 0.0  # of its pass and projections

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self.limit - len(self.tokens)

    def begin_cycle(self) -> None:
        """Count anew."""
        self.trace.begin()
        self.started, self.drafted_s, self.cycle_s = len(self.tokens), 0.0, 0.0

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


def _relative(seconds: float, expected: float) -> float:
    """How long something took against what was expected, so that pieces of different size can be compared."""
    return seconds / expected if expected else 1.0


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
