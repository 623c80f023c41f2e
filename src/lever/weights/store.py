"""Units from flash to memory, always one step ahead. Reads in a circle; knows nothing of what a unit is for.

Reader threads fill the slots of a ring with the units that are not pinned, in their order, round and round, and wait
only while every slot is full, or after a read that failed. So storage stays busy while the caller computes, samples, or
waits for a person. There are several, so that reads are in flight while one that has ended waits for a core.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lever.errors import LeverError
from lever.owner import Owner
from lever.pages import Pages
from lever.weights.reader import DirectFile
from lever.weights.units import Extent, Unit

MIN_SLOTS = 3
# Bytes of one read, and reads in flight: what a virtual disk likes best while a thread computes beside.
# Measured with the demo, medians of five: 8 MiB x 2 1.56 GB/s, 4 MiB x 4 1.66, 4 MiB x 6 1.92, 16 MiB x 2 1.55, one
# thread reading and nothing else 1.80. `lever profile` finds what another machine likes.
BLOCK = 4 << 20
DEPTH = 6


class Memory(Protocol):
    """Page-aligned memory, whoever has allocated it."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def bytes(self) -> NDArray[np.uint8]: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class StoreStats:
    """Figures since the store was opened; bytes and seconds."""

    read_bytes: int = 0
    read_s: float = 0.0  # with at least one read in flight
    stall_s: float = 0.0  # that the caller waited for a unit


@dataclass(slots=True)
class _Slot:
    memory: Memory
    unit: int = -1  # index of the unit it holds, or will hold
    pieces: Sequence[_Piece] = ()  # of that unit
    begun: int = 0  # pieces that are read or being read
    ended: int = 0  # pieces that are there
    in_flight: int = 0
    failure: LeverError | None = None
    void: bool = False  # given up: free once nothing is in flight

    @property
    def full(self) -> bool:
        return self.ended == len(self.pieces)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One read: at most a block of an extent."""

    view: memoryview
    file: int
    offset: int
    needed: int


class _Ring:
    """What the threads share, under one lock."""

    def __init__(self) -> None:
        lock = threading.Lock()
        self.work = threading.Condition(lock)  # there may be something to read
        self.ready = threading.Condition(lock)  # there may be a unit to hand out
        self.free: deque[_Slot] = deque()
        self.coming: deque[_Slot] = deque()  # in the order of the circle; all but the last few are full
        self.next_unit = 0  # position in the circle that the next free slot is for
        self.failed = False  # a slot has a failure: no new reads until the caller has seen it
        self.in_flight = 0
        self.busy_since = 0.0
        self.closed = False


class Store(Owner):
    """The units of a model: some pinned in memory, the others streamed through `n_slots` slots.

    `hold(i)` gives the address of unit i, waiting for its bytes; `release` of that address gives the slot back to the
    readers. They assume that units are asked for in order and in a circle; asking for another one is right, only
    slower. Not thread-safe: one caller. An error from `hold` leaves the store usable; the next `hold` reads anew.
    Units that are `elsewhere` are neither read nor held.
    """

    def __init__(
        self,
        files: Sequence[DirectFile],
        units: Sequence[Unit],
        pinned: Collection[int] = (),
        n_slots: int = MIN_SLOTS,
        *,
        block: int = BLOCK,
        depth: int = DEPTH,
        memory: Callable[[int], Memory] = Pages,
        on_pinned: Callable[[int], None] = lambda _nbytes: None,
        elsewhere: Collection[int] = (),
    ) -> None:
        self.units = tuple(units)
        self.stats = StoreStats()
        self._files = tuple(files)
        self._block = block
        self._memory = memory
        self._circle = [index for index in range(len(units)) if index not in pinned and index not in elsewhere]
        self._place_in_circle = {unit: place for place, unit in enumerate(self._circle)}
        self._pinned: dict[int, Memory] = {}
        self._held: dict[int, _Slot] = {}  # by address
        self._pieces: dict[tuple[int, int], Sequence[_Piece]] = {}  # by unit and address: cut once
        self._ring = _Ring()
        self._threads: list[threading.Thread] = []
        try:
            self._pin(pinned, on_pinned)
            if self._circle:
                self._open_ring(n_slots, depth)
        except BaseException:
            self.close()
            raise

    @property
    def pinned(self) -> tuple[int, ...]:
        """Indices of the units that stay in memory."""
        return tuple(sorted(self._pinned))

    @property
    def streamed(self) -> tuple[int, ...]:
        """Indices of the units that come from flash in every pass."""
        return tuple(self._circle)

    @property
    def bytes_per_pass(self) -> int:
        """Bytes that one pass over all units reads."""
        return sum(self.units[index].nbytes for index in self._circle)

    @property
    def direct_io(self) -> bool:
        """Whether every file is read past the page cache."""
        return self.buffered_reason is None

    @property
    def buffered_reason(self) -> str | None:
        """Why reads go through the page cache; None when they go past it."""
        return next((file.reason for file in self._files if file.reason), None)

    def stream(self, indices: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Each unit in turn with its address, valid until the next step of the iteration."""
        for index in indices:
            address = self.hold(index)
            try:
                yield index, address
            finally:
                self.release(address)

    def hold(self, index: int) -> int:
        """The address of a unit, once its bytes are there; pair with `release`."""
        if index in self._pinned:
            return self._pinned[index].address
        started = time.perf_counter()
        address = self._take(index)
        self.stats.stall_s += time.perf_counter() - started
        return address

    def release(self, address: int) -> None:
        """The unit that was held at this address is not needed any more in this pass."""
        slot = self._held.pop(address, None)
        if slot is not None:
            with self._ring.work:
                self._ring.free.append(slot)
                self._ring.work.notify()

    def close(self) -> None:
        """Stop the readers, let go of all memory, close the files. Addresses become invalid. Safe to call twice."""
        ring = self._ring
        with ring.work:
            ring.closed = True
            ring.work.notify_all()
            ring.ready.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._pieces.clear()
        slots = (*ring.free, *ring.coming, *self._held.values())
        ring.free.clear()
        ring.coming.clear()
        for slot in slots:
            slot.pieces = ()
            slot.memory.close()
        for memory in self._pinned.values():
            memory.close()
        for file in self._files:
            file.close()

    def _pin(self, pinned: Collection[int], on_pinned: Callable[[int], None]) -> None:
        for index in sorted(pinned):
            memory = self._pinned[index] = self._memory(self.units[index].nbytes)
            for piece in self._cut(index, memory):
                self._read(index, piece)
            on_pinned(self.units[index].nbytes)

    def _open_ring(self, n_slots: int, depth: int) -> None:
        assert n_slots >= MIN_SLOTS
        largest = max(self.units[index].nbytes for index in self._circle)
        for _ in range(n_slots):
            self._ring.free.append(_Slot(self._memory(largest)))
        for number in range(depth):
            thread = threading.Thread(target=self._read_on, name=f"lever-reader-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _cut(self, index: int, memory: Memory) -> Sequence[_Piece]:
        """The reads that bring a unit into this memory."""
        view = memory.bytes.data
        return [
            _Piece(
                view[extent.at + done : extent.at + done + nbytes],
                extent.file,
                extent.offset + done,
                min(extent.needed - done, nbytes),
            )
            for extent in self.units[index].extents
            for done, nbytes in _blocks(extent, self._block)
        ]

    def _read(self, index: int, piece: _Piece) -> None:
        try:
            self._files[piece.file].read_exactly(piece.view, piece.offset, piece.needed)
        except LeverError as error:
            raise type(error)(f"{self.units[index].name}: {error}") from error

    # The caller's side

    def _take(self, index: int) -> int:
        ring = self._ring
        with ring.ready:
            if not self._is_coming(index):
                self._restart_at(index)
            while not (ring.coming and (ring.coming[0].full or ring.coming[0].failure)):
                assert not ring.closed, "the store is closed, or its reader died"
                ring.ready.wait()
            slot = ring.coming[0]
            if slot.failure is not None:
                self._restart_at(index)  # the readers try again meanwhile
                raise slot.failure
            self._held[slot.memory.address] = slot
            ring.coming.popleft()
            return slot.memory.address

    def _is_coming(self, index: int) -> bool:
        """Whether the next slot to be handed out will hold this unit. What failed before it was asked for may not."""
        ring = self._ring
        if ring.coming:
            return ring.coming[0].unit == index and ring.coming[0].failure is None
        return self._circle[ring.next_unit] == index

    def _restart_at(self, index: int) -> None:
        ring = self._ring
        while ring.coming:
            slot = ring.coming.popleft()
            slot.void = slot.in_flight > 0  # then the last of its reads frees it
            if not slot.void:
                ring.free.append(slot)
        ring.next_unit = self._place_in_circle[index]
        ring.failed = False
        ring.work.notify_all()

    # The readers' side

    def _read_on(self) -> None:
        try:
            while (task := self._next_task()) is not None:
                slot, piece = task
                failure: LeverError | None = None
                try:
                    self._read(slot.unit, piece)
                except LeverError as error:
                    failure = error
                self._ended(slot, piece, failure)
        finally:  # whatever ended it: nobody shall wait for it
            with self._ring.ready:
                self._ring.closed = True
                self._ring.ready.notify_all()
                self._ring.work.notify_all()

    def _next_task(self) -> tuple[_Slot, _Piece] | None:
        """The next piece of the circle and where it goes, waiting for room; None when the store closes."""
        ring = self._ring
        with ring.work:
            while not ring.closed:
                slot = self._slot_to_fill()
                if slot is not None:
                    piece = slot.pieces[slot.begun]
                    slot.begun += 1
                    slot.in_flight += 1
                    if ring.in_flight == 0:
                        ring.busy_since = time.perf_counter()
                    ring.in_flight += 1
                    ring.work.notify()  # the next piece is for another thread
                    return slot, piece
                ring.work.wait()
        return None

    def _slot_to_fill(self) -> _Slot | None:
        ring = self._ring
        if ring.failed:
            return None
        if ring.coming and ring.coming[-1].begun < len(ring.coming[-1].pieces):
            return ring.coming[-1]
        if not ring.free:
            return None
        slot = ring.free.popleft()
        unit = self._circle[ring.next_unit]
        key = (unit, slot.memory.address)
        if key not in self._pieces:
            self._pieces[key] = self._cut(unit, slot.memory)
        slot.unit, slot.pieces, slot.begun, slot.ended, slot.failure = unit, self._pieces[key], 0, 0, None
        ring.coming.append(slot)
        ring.next_unit = (ring.next_unit + 1) % len(self._circle)
        return slot

    def _ended(self, slot: _Slot, piece: _Piece, failure: LeverError | None) -> None:
        ring = self._ring
        with ring.ready:
            slot.in_flight -= 1
            ring.in_flight -= 1
            now = time.perf_counter()
            self.stats.read_s += now - ring.busy_since
            ring.busy_since = now  # reads that overlap may go on for minutes: the figure is right at every end of one
            if failure is None:
                self.stats.read_bytes += len(piece.view)
            if slot.void:
                if slot.in_flight == 0:
                    slot.void = False
                    ring.free.append(slot)
                    ring.work.notify_all()
                return
            if failure is None:
                slot.ended += 1
            else:
                slot.failure, ring.failed = failure, True
            if failure is not None or slot.full:
                ring.ready.notify()


def _blocks(extent: Extent, block: int) -> Iterator[tuple[int, int]]:
    """Start in the extent and bytes of each of its reads."""
    for done in range(0, extent.nbytes, block):
        yield done, min(block, extent.nbytes - done)
