"""FAKEIO and SCRIPT: a storage device and a model that do what a test tells them. They hold no weights."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from lever.errors import StorageError
from lever.model import Model, ModelStats
from lever.pages import PAGE
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
