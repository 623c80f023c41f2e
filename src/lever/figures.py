"""Times and figures of an answer while it comes: laps, stats, marks. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from lever.ggml.devices import Traffic
from lever.model import Model
from lever.stats import RunStats
from lever.trace import Cycle, Mark
from lever.tree import DraftTree, TreeRows
from lever.weights.store import Store


class Clock:
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


class Trace:
    """Marks of the cycle under way, kept where somebody wants to be told of it."""

    def __init__(self, model: Model, store: Store, on_cycle: Callable[[Cycle], None] | None) -> None:
        self.drafted = 0
        self._model, self._store, self._on_cycle = model, store, on_cycle
        self._marks: list[Mark] = []
        self._started = self._lap = self._compute_s = 0.0

    @property
    def _computed_s(self) -> float:
        return self._model.stats.layers_s + self._model.stats.scores_s

    def begin(self) -> None:
        """A cycle begins."""
        self._marks, self.drafted = [], 0
        self._started = self.lap()

    def lap(self) -> float:
        """The time, from which the next layer counts."""
        self._lap, self._compute_s = time.perf_counter(), self._computed_s
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
            self.mark("layer", self._lap, self._computed_s - self._compute_s)
            self.lap()

    def end(self, tree: DraftTree, rows: TreeRows, accepted: Sequence[int], pruned: Sequence[int]) -> None:
        """The cycle has ended."""
        if self._on_cycle is not None:
            marks = tuple(self._marks)
            self._on_cycle(Cycle(tree, rows, tuple(accepted), self.drafted, self._started, marks, tuple(pruned)))


class Figures:
    """Brings the stats of a run up to date, from counters that go on from run to run."""

    def __init__(self, model: Model, store: Store, stats: RunStats, draft: Model | None = None) -> None:
        self._model, self._store, self._stats, self._draft = model, store, stats, draft
        self._before = self._now()

    def update(self) -> None:
        """Take what has happened since the decode phase began."""
        s = self._stats
        s.decode_s, s.verify_s, s.project_s, s.stall_s, s.read_s, read_bytes, sending_s, of_draft_s, sent, got = (
            now - before for now, before in zip(self._now(), self._before, strict=True)
        )
        s.read_bytes, s.upload_bytes, s.upload_s = int(read_bytes), int(sent), sending_s + of_draft_s
        s.download_bytes = int(got)
        s.python_s = s.decode_s - s.verify_s - s.project_s - s.stall_s - s.draft_s - sending_s

    def _now(self) -> tuple[float, ...]:
        model, store = self._model.stats, self._store.stats
        of_draft = self._draft.stats.traffic if self._draft is not None else Traffic()
        return (
            time.perf_counter(),
            model.layers_s + model.scores_s,
            model.projection_s,
            store.stall_s + model.embedding_s,
            store.read_s,
            store.read_bytes,
            model.traffic.upload_s,
            of_draft.upload_s,
            model.traffic.upload_bytes + of_draft.upload_bytes,
            model.traffic.download_bytes + of_draft.download_bytes,
        )
