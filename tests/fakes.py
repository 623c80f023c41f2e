"""FAKEIO and SCRIPT: a storage device and a model that do what a test tells them. They hold no weights."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from lever.draft import Draft
from lever.errors import StorageError
from lever.model import Model, ModelStats, Thinning
from lever.pages import PAGE
from lever.policies import Preset, Situation
from lever.tree import IN_TEXT, DraftTree, Rerooted
from lever.weights.store import Store, StoreStats
from lever.workspace import ModelShape

N_VOCAB, LAYER_S = 32, 2.0**-20  # of a scripted model; sums of these seconds are exact
STALE = 0xEE  # what a device leaves in the part of a buffer that it did not fill


@dataclass
class FakeDevice:
    """A `read_into` for DirectFile. Told nothing, it gives the bytes of the file, whatever the mode it was opened in.

    What a call did not bring is spoilt, so that nothing can pass for data that never came.
    """

    at_most: Sequence[int] = (1 << 62,)  # bytes that the calls bring, in turn and in a circle
    refuses_direct: bool = False  # EINVAL from descriptors opened with O_DIRECT: FUSE, some SD cards
    whole_pages: bool = False  # EINVAL for an offset, address or length that is not in whole pages: a strict O_DIRECT
    ends_at: int | None = None  # the file was cut to this length after it was opened
    delay_s: float = 0.0
    broken: range = range(0)  # EIO for a call that begins in this range of the file
    crash: Exception | None = None  # a bug in a driver of ours: raised as it is
    gate: threading.Event = field(default_factory=threading.Event)  # calls wait until it is set
    reads: list[tuple[int, int]] = field(default_factory=list)  # offset and wanted bytes of each call

    def __post_init__(self) -> None:
        self.gate.set()
        self._counts = cycle(self.at_most)

    def __call__(self, fd: int, view: memoryview, offset: int) -> int:
        self.reads.append((offset, len(view)))
        self.gate.wait()
        if self.delay_s:
            time.sleep(self.delay_s)
        self._refuse(fd, view, offset)
        count = self._fill(fd, view[: next(self._counts)], offset)
        view[count:] = bytes([STALE]) * (len(view) - count)
        return count

    def _refuse(self, fd: int, view: memoryview, offset: int) -> None:
        if self.crash is not None:
            raise self.crash
        if self.refuses_direct and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        if self.whole_pages and (offset % PAGE or address % PAGE or len(view) % PAGE):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if offset in self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _fill(self, fd: int, view: memoryview, offset: int) -> int:
        if self.ends_at is not None:
            view = view[: max(self.ends_at - offset, 0)]
        # A descriptor of its own, without O_DIRECT, that takes any offset and length.
        with Path(f"/proc/self/fd/{fd}").open("rb") as file:
            return os.preadv(file.fileno(), [view], offset)


def wait_until(happened: Callable[[], bool], seconds: float = 10.0) -> None:
    """Return as soon as it has; an error after so many seconds."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)


def reader_threads() -> list[threading.Thread]:
    """The store's threads that are alive."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("lever-reader")]


def descriptors_of(path: Path) -> list[int]:
    """Descriptors of this process that are open on a file."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            if link.samefile(path):
                found.append(int(link.name))
        except OSError:  # the descriptor that lists the folder is gone by now; others are no files
            continue
    return found


class ScriptedStore:
    """In the place of a Store, for its figures alone."""

    def __init__(self) -> None:
        self.streamed = (0, 1, 2)
        self.stats = StoreStats()

    def as_store(self) -> Store:
        return cast(Store, self)


class ScriptedModel:
    """In the place of a Model: `forward` notes what it is given, and row r of a prompt wants `script[r]` next.

    Its KV cache is the list `rows`. The wanted token of the vocabulary has a logit of 1, the others 0. Every layer
    takes LAYER_S of compute and 100 bytes from the store; every projection as long.
    """

    def __init__(self, script: Sequence[int], *, n_ctx: int = 64, n_batch: int = 4, n_layers: int = 3) -> None:
        self.config = SimpleNamespace(n_layers=n_layers)
        self.shape = ModelShape(n_ctx, n_batch)
        self.stats = ModelStats()
        self.store = ScriptedStore()
        self.script = script
        self.rows: list[int] = []
        self.passes: list[list[int]] = []
        self.threads: list[int] = []  # of each pass, and of each projection
        self.projection_threads: list[int] = []
        self.n_threads = 0
        self.fails_at: int | None = None  # the number of a layer: a pass ends there

    @property
    def kv(self) -> ScriptedModel:
        return self

    most_rows, in_order = 1, True  # no trees

    def truncate(self, length: int) -> None:
        assert length <= len(self.rows)
        del self.rows[length:]

    def forward(self, tokens: Sequence[int], after_layer: Callable[[int], None] = lambda _layer: None) -> None:
        assert 0 < len(tokens) <= self.shape.n_batch
        assert len(self.rows) + len(tokens) <= self.shape.n_ctx
        for layer in range(self.config.n_layers):
            if layer == self.fails_at:
                raise StorageError("scripted")
            self.store.stats.read_bytes += 100
            self.stats.layers_s += LAYER_S
            after_layer(layer)
        self.passes.append(list(tokens))
        self.threads.append(self.n_threads)
        self.rows += tokens

    def project(self, rows: Sequence[int]) -> NDArray[np.float32]:
        first = len(self.rows) - len(self.passes[-1])
        self.projection_threads.append(self.n_threads)
        logits = np.zeros((len(rows), N_VOCAB), np.float32)
        for place, row in enumerate(rows):
            logits[place, self.script[first + row]] = 1.0
        self.stats.projection_s += LAYER_S
        return logits

    def as_model(self) -> Model:
        return cast(Model, self)


class FakeClock:
    """A clock that stands still until it is told that something took so long."""

    def __init__(self) -> None:
        self.now = 0.0

    def took(self, seconds: float) -> None:
        self.now += seconds

    @contextmanager
    def on_the_wall(self) -> Iterator[FakeClock]:
        """What the engine goes by."""
        here = SimpleNamespace(perf_counter=lambda: self.now)
        with (
            mock.patch("lever.engine.time", here),
            mock.patch("lever.guess.time", here),
            mock.patch("lever.figures.time", here),
        ):
            yield self


Language = Callable[[Sequence[int]], int]  # the text so far -> the token that follows


class ScriptedTarget:
    """In the place of a Model with trees: what follows a row is what its language says of the path to it.

    Its KV cache is the list `rows`; the wanted token has a logit of 1, the others 0. A pass streams for `read_s` and
    computes `row_s` for each row, whichever takes longer; logits of n rows take project_s(n).
    """

    def __init__(
        self,
        language: Language,
        clock: FakeClock | None = None,
        *,
        n_ctx: int = 1 << 12,
        n_tree: int = 48,
        n_logits: int = 8,
        read_s: float = 1.0,
        row_s: float = 0.01,
        project_s: Callable[[int], float] = lambda n: 0.01 * n,
    ) -> None:
        self.config = SimpleNamespace(n_layers=3)
        self.shape = ModelShape(n_ctx, 64, n_logits, n_tree)
        self.stats = ModelStats()
        self.store = ScriptedStore()
        self.n_threads, self.device = 0, "cpu"
        self.rows: list[int] = []
        self.passes: list[int] = []  # rows of each
        self.projected: list[int] = []  # rows of each
        self.before_pass: Callable[[], None] = lambda: None
        self.before_project: Callable[[], None] = lambda: None
        self.fails = False  # in the middle of the next pass
        self._language, self._clock = language, clock or FakeClock()
        self._read_s, self._row_s, self._project_s = read_s, row_s, project_s
        self._paths: list[list[int]] = []  # text up to each row of the last pass
        self.in_order, self.most_rows = True, n_tree

    @property
    def kv(self) -> ScriptedTarget:
        return self

    def truncate(self, length: int) -> None:
        assert length <= len(self.rows)
        del self.rows[length:]

    def keep(self, rows: Sequence[int]) -> None:
        kept = self._paths[rows[-1]]
        assert len(kept) == len(self.rows) + len(rows), "the rows of a path are kept, all of them"
        assert kept[: len(self.rows)] == self.rows
        self.rows = list(kept)

    def finite(self, _n_rows: int) -> bool:
        return True

    def forward(self, tokens: Sequence[int], after_layer: Callable[[int], None] = lambda _layer: None) -> None:
        assert 0 < len(tokens) <= self.shape.n_batch
        assert len(self.rows) + len(tokens) <= self.shape.n_ctx
        self._pass(len(tokens), after_layer)
        self._paths = [[*self.rows, *tokens[: n + 1]] for n in range(len(tokens))]
        self.rows += tokens

    def forward_tree(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        after_layer: Callable[[int], None] = lambda _layer: None,
        thinning: Thinning | None = None,
    ) -> None:
        assert thinning is None
        assert 1 < len(tokens) <= self.shape.n_tree
        self._pass(len(tokens), after_layer)
        self._paths = []
        for token, parent in zip(tokens, parents, strict=True):
            self._paths.append([*(self._paths[parent] if parent >= 0 else self.rows), token])
        assert max(map(len, self._paths)) <= self.shape.n_ctx

    def _pass(self, n_rows: int, after_layer: Callable[[int], None]) -> None:
        self.before_pass()
        compute_s = self._row_s * n_rows
        for layer in range(3):
            if self.fails and layer == 1:
                raise StorageError("the target failed")
            self._clock.took(max(self._read_s, compute_s) / 3)
            self.stats.layers_s += compute_s / 3
            self.store.stats.read_s += self._read_s / 3
            self.store.stats.stall_s += max(self._read_s - compute_s, 0.0) / 3
            after_layer(layer)
        self.passes.append(n_rows)

    def project(self, rows: Sequence[int]) -> NDArray[np.float32]:
        self.before_project()
        assert 0 < len(rows) <= self.shape.n_logits
        logits = np.zeros((len(rows), N_VOCAB), np.float32)
        for place, row in enumerate(rows):
            logits[place, self._language(self._paths[row])] = 1.0
        self.projected.append(len(rows))
        self._clock.took(self._project_s(len(rows)))
        self.stats.projection_s += self._project_s(len(rows))
        return logits

    def as_model(self) -> Model:
        return cast(Model, self)


class ScriptedDraft:
    """In the place of a Draft: its candidates behind a text are `guess(text)`; a step takes `step_s`, a token of the
    text that it has to read `read_s`.

    It keeps books as a draft does, and finds an engine out that mixes up what has become of its tree.
    """

    def __init__(
        self,
        guess: Callable[[Sequence[int]], list[tuple[int, float]]],
        clock: FakeClock | None = None,
        *,
        step_s: float = 0.01,
        read_s: float = 0.0001,
        n_ctx: int = 1 << 12,
        room: int = 26,
    ) -> None:
        shape = ModelShape(n_ctx, 64, 8, room)
        self.model = SimpleNamespace(shape=shape, n_threads=0, device="cpu", stats=ModelStats())
        self.room = room
        self.text: list[int] = []
        self.n_begun = self.n_first = self.n_steps = self.n_beside = 0  # n_first: begun with a tree of its root alone
        self.in_step = False
        self.before_step: Callable[[], None] = lambda: None
        self._guess, self._clock, self._step_s, self._read_s = guess, clock or FakeClock(), step_s, read_s
        self._paths: list[tuple[int, ...]] = []  # of each slot

    def read(self, text: Sequence[int], after_part: Callable[[], None] = lambda: None) -> None:
        self._paths.clear()
        self._clock.took(self._read_s * self.behind(text))
        self.text = list(text[:2])
        after_part()
        self.text = list(text)
        after_part()

    def behind(self, text: Sequence[int]) -> int:
        return len(text) - len(self.text)

    def begin(self, tree: DraftTree, text: Sequence[int], _temperature: float, trust: float = 1.0) -> None:
        self.n_begun += 1
        assert tree.tokens[0] == text[-1]
        if tree.expanded(0):
            assert self.text == text
            return
        self.n_first += 1
        self._clock.took(self._read_s * self.behind(text))
        self._paths.clear()
        self.text = list(text)
        tree.expand(0, IN_TEXT, self._candidates((), trust))
        self._took_a_step()

    def expand(self, tree: DraftTree, nodes: Sequence[int], _temperature: float, trust: float = 1.0) -> None:
        self.in_step = True
        self.before_step()
        assert 0 < len(nodes) <= self.room
        for node in nodes:
            path = tuple(tree.tokens[at] for at in tree.path(node))
            parent = tree.parents[node]
            assert parent == 0 or self._paths[tree.slots[parent]] == path[:-1]
            tree.expand(node, len(self._paths), self._candidates(path, trust))
            self._paths.append(path)
        self._took_a_step()
        self.in_step = False

    def follow(self, rerooted: Rerooted, new_text: Sequence[int]) -> None:
        n = len(rerooted.text_slots)
        assert [self._paths[slot] for slot in rerooted.text_slots] == [tuple(new_text[: k + 1]) for k in range(n)]
        self.text += new_text[:n]
        living = [self._paths[slot] for slot in rerooted.tree_slots]
        assert all(path[: len(new_text)] == tuple(new_text) for path in living)
        self._paths = [path[len(new_text) :] for path in living]

    def _candidates(self, path: tuple[int, ...], trust: float) -> list[tuple[int, float]]:
        return [(token, trust * share) for token, share in self._guess([*self.text, *path])]

    def _took_a_step(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.n_steps += 1
            self._clock.took(self._step_s)
        else:
            self.n_beside += 1  # at no time that would not have passed anyway

    def as_draft(self) -> Draft:
        return cast(Draft, self)


def whims(seed: int) -> Preset:
    """Grows and checks at random: every shape that the engine must be able to take."""
    rng = random.Random(seed)

    def grow(now: Situation) -> list[int]:
        nodes = [node for node in now.tree.frontier()[:12] if rng.random() < 0.5]
        return nodes if rng.random() < 0.8 else []

    def select(now: Situation) -> list[int]:
        chosen = [0]
        for node in range(1, len(now.tree)):
            if len(chosen) < now.most_rows and now.tree.parents[node] in chosen and rng.random() < 0.6:
                chosen.append(node)
        rng.shuffle(chosen)
        return chosen

    return Preset("whims", "at random", grow, select, carry_over=rng.random() < 0.7)


class Recorder:
    """Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.jobs: list[str] = []
        self.total = self.done = self.finished = 0
        self.told = threading.Event()

    def start(self, total: int, what: str) -> None:
        self.total, self.done = total, 0
        self.jobs.append(what)
        self.told.set()

    def advance(self, n: int) -> None:
        self.done += n

    def finish(self) -> None:
        self.finished += 1
