"""Tokens in, tokens out: prefill, then one token per pass over the target's layers. Knows ids, never text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lever.errors import Cancelled, ContextOverflow, LeverError, UsageError
from lever.model import Model
from lever.stats import RunStats
from lever.threads import ThreadChooser
from lever.weights.store import Store

# (logits of one row, tokens before it, position of the token to be drawn) -> token
Draw = Callable[[NDArray[np.float32], Sequence[int], int], int]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Step:
    """One new token. `logits` [n_vocab] are those it was drawn from, valid until the next step."""

    token: int
    logits: NDArray[np.float32]
    finish_reason: FinishReason | None  # set on the last step


class Engine:
    """Generates with one model. The tokens whose rows are in the KV cache are kept, and a prompt that starts with
    them goes on from there; that changes no bit of what follows.
    """

    def __init__(self, model: Model, store: Store, n_threads: int, start_threads: int | None = None) -> None:
        """With `n_threads` at most; `start_threads` is what the first passes for a token get."""
        self._model = model
        self._store = store
        self._layer_threads = ThreadChooser(n_threads, n_threads)
        # Streaming starts with one thread: it nearly always keeps up, and leaves the rest of the machine alone.
        start = start_threads or (1 if store.streamed else n_threads)
        self._pass_threads = ThreadChooser(start, n_threads)
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
        on_prefill: Callable[[int], None] = lambda _n_tokens: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[Step]:
        """New tokens one by one, until an end token, `max_new_tokens` or a full context.

        `on_prefill` is told of prompt tokens as they are read. `cancelled` is asked after each layer; once it says yes,
        Cancelled is raised and the engine is ready for another prompt. ContextOverflow when the prompt leaves no room
        for a new token. LeverError when it is gone on with after another prompt was begun.
        """
        self._check(prompt)
        self._request += 1
        request = self._request
        tokens = list(prompt)
        logits = self._prefill(prompt, stats, on_prefill, cancelled)
        if max_new_tokens == 0:
            return
        n_ctx = self._model.shape.n_ctx
        limit = n_ctx if max_new_tokens is None else min(n_ctx, len(prompt) + max_new_tokens)
        figures = _Figures(self._model, self._store, stats)
        while True:
            token = draw(logits, tokens, len(tokens))
            tokens.append(token)
            stats.new_tokens += 1
            figures.update()
            reason = _finish_reason(token, len(tokens), end_tokens, limit)
            yield Step(token, logits, reason)
            if reason is not None:
                return
            if request != self._request:
                raise LeverError("another answer has been started since: one at a time")
            logits = self._cycle(token, cancelled)
            stats.cycles += 1

    def _check(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise UsageError("the prompt is empty: there is nothing to go on from")
        n_ctx = self._model.shape.n_ctx
        if len(prompt) >= n_ctx:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens and the context {n_ctx}: shorten it or give more with -c"
            )

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

    def _cycle(self, token: int, cancelled: Callable[[], bool]) -> NDArray[np.float32]:
        """One pass for one token; the logits after it."""
        clock = _Clock(self._store)
        self._model.n_threads = self._pass_threads.count
        self._model.forward([token], lambda _layer: _stop_if(cancelled))
        self._cached.append(token)
        logits: NDArray[np.float32] = self._model.project([0])[0]
        self._pass_threads.observe(*clock.lap())
        return logits


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
        s.python_s = s.decode_s - s.verify_s - s.project_s - s.stall_s

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
