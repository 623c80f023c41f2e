"""Tokens in, tokens out: prefill, then a tree of drafted tokens per pass over the target. Knows ids, never text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lever.cycle_cost import CycleCost, Foretold
from lever.draft import Draft
from lever.errors import LeverError
from lever.figures import Clock, Figures, Trace
from lever.guess import Guess, Guesser
from lever.model import Model
from lever.policies import Preset, preset
from lever.pruner import Pruning
from lever.request import Complete, Draw, Run, Step, check_prompt
from lever.settings import CPU
from lever.stats import RunStats
from lever.threads import ThreadChooser, relative
from lever.trace import Cycle
from lever.tree import DraftTree, TreeRows, depth_first
from lever.weights.store import Store


@dataclass(frozen=True, slots=True)
class Verified:
    """The rows that came through a pass, nodes that were pruned on its way, and whether its rows lie as a tree's."""

    rows: TreeRows
    pruned: Sequence[int] = ()
    as_tree: bool = False


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
        pruning: Pruning | None = None,
    ) -> None:
        """With `n_threads` at most; `start_threads` is what the first passes for a token get.

        A policy that drafts does so from the text alone where there is no draft, if it is one that looks there.
        `foretold` are the costs of a cycle as far as they are known beforehand. Passes are thinned with `pruning` for
        policies that do so.
        """
        self._model = model
        self._store = store
        self._draft = draft
        self._policy = policy or preset("flash-ar" if draft is None else "lever")
        self._threads = n_threads, start_threads
        self._foretold, self._pruning = foretold, pruning
        self._cost = CycleCost(n_threads, foretold, threads_beside=_threads_beside(model, draft, n_threads))
        self._layer_threads = ThreadChooser(n_threads, n_threads)
        # Streaming starts with one thread: it nearly always keeps up, and leaves the rest of the machine alone.
        start = start_threads or (1 if store.streamed else n_threads)
        self._pass_threads = ThreadChooser(start, n_threads)
        self._project_threads = ThreadChooser(*self._cost.project_threads)
        self._guesser = Guesser(
            draft,
            self._policy,
            self._cost,
            lambda: model.most_rows,
            self._layer_threads,
            pruning.pruner(model, self._cost) if pruning is not None else None,
        )
        self._cached: list[int] = []
        # The newest one, in a list that engines beside each other share: with one KV cache, older ones cannot go on.
        self._requests = [0]

    def beside(self, policy: Preset) -> Engine:
        """Another engine with the same model, draft and KV cache. It learns for itself what things cost; an answer of
        either ends that of the other.
        """
        other = Engine(
            self._model,
            self._store,
            *self._threads,
            draft=self._draft,
            policy=policy,
            foretold=self._foretold,
            pruning=self._pruning,
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
        complete: Complete = lambda _tokens: False,
        on_prefill: Callable[[int], None] = lambda _n_tokens: None,
        cancelled: Callable[[], bool] = lambda: False,
        on_cycle: Callable[[Cycle], None] | None = None,
    ) -> Iterator[Step]:
        """New tokens one by one, until an end token, a `complete` text, `max_new_tokens` or a full context.

        `draw` decides every token; `temperature` is what it draws at, for the draft to guess by. `on_prefill` is told
        of prompt tokens as they are read. `cancelled` is asked after each layer; once it says yes, Cancelled is raised
        and the engine is ready for another prompt. `on_cycle` is told of each cycle that has ended: it costs a little
        time, so none is recorded without it. ContextOverflow when the prompt leaves no room for a new token.
        LeverError when it is gone on with after another prompt was begun.
        """
        check_prompt(prompt, self._model.shape.n_ctx)
        self._requests[0] += 1
        n_ctx = self._model.shape.n_ctx
        limit = n_ctx if max_new_tokens is None else min(n_ctx, len(prompt) + max_new_tokens)
        trace = Trace(self._model, self._store, on_cycle)
        run = Run(
            self._requests[0], list(prompt), draw, complete, end_tokens, limit, temperature, stats, cancelled, trace
        )
        logits = self._prefill(run, on_prefill)
        if max_new_tokens == 0:
            return
        if run.room > 2:
            self._guesser.read(run)
        figures = Figures(self._model, self._store, stats, self._draft.model if self._draft is not None else None)
        step = run.step(logits, exact=self._model.kv.in_order)
        figures.update()
        yield step
        tree = DraftTree.rooted_at(step.token)
        while step.finish_reason is None:
            self._only_newest(run)
            run.begin_cycle()
            guess = self._guesser.guess(run, tree)
            verified = self._verify(run, guess)
            rows, accepted = verified.rows, list[int]()
            try:
                for step, row in self._walk(run, guess, rows):
                    if row:
                        accepted.append(row)
                    figures.update()
                    yield step
            finally:  # also when nobody wants the rest: the cache agrees with the text
                if run.request == self._requests[0]:  # else it holds another one by now
                    self._keep(verified, accepted)
            trace.end(guess.tree, rows, accepted, verified.pruned)
            self._guesser.learn(run, guess, len(rows.nodes))
            if run.request == self._requests[0]:
                tree = self._guesser.rerooted(run, guess, [rows.nodes[row] for row in accepted])

    def _only_newest(self, run: Run) -> None:
        if run.request != self._requests[0]:
            raise LeverError("another answer has been started since: one at a time")

    # One cycle: guess (`lever.guess`), verify, walk, keep, learn, reroot

    def _verify(self, run: Run, guess: Guess) -> Verified:
        """One pass of the target over the nodes that are worth it."""
        rows, thinned = self._guesser.select(run, guess)
        clock, model, store = Clock(self._store), self._model, self._store
        compute_s, read_s = model.stats.layers_s, store.stats.read_s
        plain = not self._policy.drafts
        model.n_threads = self._pass_threads.count if plain else self._cost.next_threads(len(rows.nodes))
        run.trial |= self._cost.trying

        def after_layer(layer: int) -> None:
            self._guesser.layer_done(layer, model.config.n_layers)
            run.trace.layer()
            run.stop_if_cancelled()

        run.trace.lap()
        with self._guesser.going_on(run, guess, rows, thinned):
            if len(rows.nodes) == 1:
                model.forward(rows.tokens, after_layer)
            else:
                model.forward_tree(rows.tokens, rows.parents, after_layer, thinned.thinning if thinned else None)
        seconds, stall_s = clock.lap()
        run.cycle_s += seconds
        if plain:
            self._pass_threads.observe(seconds, stall_s)
        compute_s, read_s = model.stats.layers_s - compute_s, store.stats.read_s - read_s
        n, verified, whole = len(rows.nodes), Verified(rows, as_tree=len(rows.nodes) > 1), None
        if thinned is not None:
            seconds, whole = seconds - thinned.score_s, thinned.whole(compute_s)
            verified = Verified(rows.only(thinned.kept), thinned.pruned, as_tree=True)
            run.stats.pruned_cycles += 1
            run.stats.prune_s += thinned.score_s
        self._cost.observe_pass(n, seconds, compute_s, read_s, model.n_threads, whole)
        run.stats.cycles += 1
        run.stats.verified += n - 1
        run.stats.plain_cycles += n == 1
        if verified.as_tree and not model.finite(len(verified.rows.nodes)):
            # Keys or values of a candidate overflowed: masked, they still make sums of other rows that are no numbers.
            model.kv.truncate(model.kv.length)  # they may lie behind the text
            root = depth_first(guess.tree, [0])
            model.forward(root.tokens, after_layer)
            return Verified(root)
        run.stats.pruned += len(verified.pruned)
        return verified

    def _walk(self, run: Run, guess: Guess, rows: TreeRows) -> Iterator[tuple[Step, int]]:
        """The target's own tokens along the tree, each with the row it was drawn behind (0: the root's).

        Logits are made for rows that the walk reaches, and for those that it will so probably reach that it saves time.
        """
        row, known = 0, dict[int, NDArray[np.float32]]()
        while True:
            if row not in known:
                known = self._project(run, self._likely_path(guess.tree, rows, row))
            logits = known[row]
            step = run.step(logits, exact=self._exact(rows, row))
            self._guesser.judge(guess, rows.nodes[row], step.token)
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

    def _project(self, run: Run, path: Sequence[int]) -> dict[int, NDArray[np.float32]]:
        """Logits of these rows."""
        started, trial = run.trace.lap(), self._project_threads.trying
        self._model.n_threads = self._project_threads.count
        logits = self._model.project(path)
        seconds = run.trace.mark("project", started) - started
        self._project_threads.observe(relative(seconds, self._cost.project_s(len(path))), 0.0)
        if not trial:
            self._cost.observe_project(len(path), seconds)
        run.cycle_s += seconds
        return dict(zip(path, logits, strict=True))

    def _keep(self, verified: Verified, accepted: Sequence[int]) -> None:
        """The root and the accepted rows are in the cache now; a row that was no tree's is there already."""
        path = [0, *accepted]
        if verified.as_tree:
            self._model.keep(path)
        self._cached.extend(verified.rows.tokens[row] for row in path)

    def _prefill(self, run: Run, on_prefill: Callable[[int], None]) -> NDArray[np.float32]:
        """Rows for the part of the prompt that is not cached; the logits after its last token."""
        started, prompt = time.perf_counter(), run.tokens
        n_cached = min(_common_prefix(self._cached, prompt), len(prompt) - 1)
        del self._cached[n_cached:]  # first: at no moment may it hold more than the cache
        self._model.kv.truncate(n_cached)
        run.stats.prompt_tokens, run.stats.cached_tokens = len(prompt), n_cached
        n_batch = self._model.shape.n_batch
        for start in range(n_cached, len(prompt), n_batch):
            part = prompt[start : start + n_batch]
            self._wide_pass(run, part, on_prefill)
        logits: NDArray[np.float32] = self._model.project([len(part) - 1])[0]
        run.stats.prefill_s = time.perf_counter() - started
        return logits

    def _wide_pass(self, run: Run, tokens: Sequence[int], on_prefill: Callable[[int], None]) -> None:
        """One pass for a part of the prompt; after each layer its share of the tokens counts as read."""
        n_layers, n_rows = self._model.config.n_layers, len(tokens)
        clock, compute_s, read_s = Clock(self._store), self._model.stats.layers_s, self._store.stats.read_s
        n_threads = self._model.n_threads = self._layer_threads.count

        def after_layer(layer: int) -> None:
            seconds, stall_s = clock.lap()
            self._layer_threads.observe(seconds / n_rows, stall_s / n_rows)  # parts of a prompt differ in length
            self._model.n_threads = self._layer_threads.count
            on_prefill(n_rows * (layer + 1) // n_layers - n_rows * layer // n_layers)
            run.stop_if_cancelled()

        self._model.forward(tokens, after_layer)
        self._cached.extend(tokens)
        if n_threads == self._model.n_threads:
            compute_s, read_s = self._model.stats.layers_s - compute_s, self._store.stats.read_s - read_s
            self._cost.observe_prefill(n_rows, compute_s, read_s, n_threads)


def _threads_beside(model: Model, draft: Draft | None, n_threads: int) -> int:
    """Threads that a pass may have while the draft computes: all of them where that has a device of its own; and none
    where both are on one that is not the CPU, which does one thing after the other.
    """
    if draft is None or draft.model.device != model.device:
        return n_threads
    return n_threads - 1 if model.device == CPU else 0


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))
