"""Units from flash to memory, always one step ahead. Reads in a circle; knows nothing of what a unit is for.

One reader thread fills the slots of a ring with the units that are not pinned, in their order, round and round, and
waits only while every slot is full, or after a read that failed. So storage stays busy while the caller computes,
samples, or waits for a person.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lever.errors import LeverError, StorageError
from lever.owner import Owner
from lever.pages import Pages
from lever.weights.reader import BLOCK, DirectFile
from lever.weights.units import Unit

MIN_SLOTS = 3


@dataclass(slots=True)
class StoreStats:
    """Figures since the store was opened; bytes and seconds. Written by one thread each."""

    read_bytes: int = 0  # by the reader thread
    read_s: float = 0.0  # that the reader thread spent inside reads
    stall_s: float = 0.0  # that the caller waited for a unit


@dataclass(slots=True)
class _Slot:
    pages: Pages
    unit: int = -1  # index of the unit it holds


@dataclass(slots=True)
class _Ring:
    """What both threads share, under one lock."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    free: deque[_Slot] = field(default_factory=deque)
    filled: deque[_Slot] = field(default_factory=deque)
    next_unit: int = 0  # position in the circle that the reader fills next
    epoch: int = 0  # a new one voids what the reader is doing
    failure: LeverError | None = None
    closed: bool = False


class Store(Owner):
    """The units of a model: some pinned in memory, the others streamed through `n_slots` slots.

    `hold(i)` gives the address of unit i, waiting for its bytes; `release` of that address gives the slot back to the
    reader. The reader assumes that units are asked for in order and in a circle; asking for another one is right, only
    slower. Not thread-safe: one caller. StorageError from `hold` leaves the store usable; the next `hold` reads anew.
    """

    def __init__(
        self,
        files: Sequence[DirectFile],
        units: Sequence[Unit],
        pinned: Collection[int] = (),
        n_slots: int = MIN_SLOTS,
        *,
        on_pinned: Callable[[int], None] = lambda _nbytes: None,
    ) -> None:
        self.units = tuple(units)
        self.stats = StoreStats()
        self._files = tuple(files)
        self._circle = [index for index in range(len(units)) if index not in pinned]
        self._place_in_circle = {unit: place for place, unit in enumerate(self._circle)}
        self._pinned: dict[int, Pages] = {}
        self._held: dict[int, _Slot] = {}  # by address
        self._ring = _Ring()
        self._thread: threading.Thread | None = None
        try:
            self._pin(pinned, on_pinned)
            if self._circle:
                self._open_ring(n_slots)
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
            with self._ring.changed:
                self._ring.free.append(slot)
                self._ring.changed.notify_all()

    def close(self) -> None:
        """Stop the reader, let go of all memory, close the files. Addresses become invalid. Safe to call twice."""
        with self._ring.changed:
            self._ring.closed = True
            self._ring.changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for slot in (*self._ring.free, *self._ring.filled, *self._held.values()):
            slot.pages.close()
        self._ring.filled.clear()
        for pages in self._pinned.values():
            pages.close()
        for file in self._files:
            file.close()

    def _pin(self, pinned: Collection[int], on_pinned: Callable[[int], None]) -> None:
        for index in sorted(pinned):
            pages = self._pinned[index] = Pages(self.units[index].nbytes)
            for _ in self._read_unit(index, pages):
                pass
            on_pinned(self.units[index].nbytes)

    def _open_ring(self, n_slots: int) -> None:
        assert n_slots >= MIN_SLOTS
        largest = max(self.units[index].nbytes for index in self._circle)
        for _ in range(n_slots):
            self._ring.free.append(_Slot(Pages(largest)))
        self._thread = threading.Thread(target=self._read_on, name="lever-reader", daemon=True)
        self._thread.start()

    # The caller's side

    def _take(self, index: int) -> int:
        ring = self._ring
        with ring.changed:
            if not self._is_coming(index):
                self._restart_at(index)
            while not ring.filled and ring.failure is None:
                assert not ring.closed, "the store is closed, or its reader died"
                ring.changed.wait()
            if not ring.filled:
                raise self._failure_at(index)
            slot = ring.filled[0]
            self._held[slot.pages.address] = slot
            ring.filled.popleft()
            return slot.pages.address

    def _is_coming(self, index: int) -> bool:
        """Whether the next slot to be handed out will hold this unit. What failed before it was asked for may not."""
        ring = self._ring
        if ring.filled:
            return ring.filled[0].unit == index
        return self._circle[ring.next_unit] == index and ring.failure is None

    def _failure_at(self, index: int) -> LeverError:
        """What kept the reader from this unit; it tries again meanwhile."""
        failure = self._ring.failure
        assert failure is not None
        self._restart_at(index)
        return failure

    def _restart_at(self, index: int) -> None:
        ring = self._ring
        while ring.filled:
            ring.free.append(ring.filled.popleft())
        ring.next_unit = self._place_in_circle[index]
        ring.epoch += 1
        ring.failure = None
        ring.changed.notify_all()

    # The reader's side

    def _read_on(self) -> None:
        try:
            self._read_in_a_circle()
        finally:  # whatever ended it: nobody shall wait for it
            with self._ring.changed:
                self._ring.closed = True
                self._ring.changed.notify_all()

    def _read_in_a_circle(self) -> None:
        ring = self._ring
        while True:
            with ring.changed:
                while not ring.closed and (not ring.free or ring.failure is not None):
                    ring.changed.wait()
                if ring.closed:
                    return
                slot = ring.free.popleft()
                epoch, slot.unit = ring.epoch, self._circle[ring.next_unit]
            failure = self._fill(slot, epoch)
            with ring.changed:
                if failure is not None and epoch == ring.epoch:
                    ring.failure = failure
                if failure is None and epoch == ring.epoch:
                    ring.filled.append(slot)
                    ring.next_unit = (ring.next_unit + 1) % len(self._circle)
                else:
                    ring.free.append(slot)
                ring.changed.notify_all()

    def _fill(self, slot: _Slot, epoch: int) -> LeverError | None:
        """Read the slot's unit; gives up between blocks when the epoch is over or the store closes."""
        started = time.perf_counter()
        try:
            for nbytes in self._read_unit(slot.unit, slot.pages):
                self.stats.read_bytes += nbytes
                if self._ring.closed or self._ring.epoch != epoch:
                    break
        except LeverError as error:
            return error
        finally:
            self.stats.read_s += time.perf_counter() - started
        return None

    def _read_unit(self, index: int, pages: Pages) -> Iterator[int]:
        """Read a unit's extents block by block; yields the bytes of each."""
        memory = pages.bytes.data
        unit = self.units[index]
        for extent in unit.extents:
            for done in range(0, extent.nbytes, BLOCK):
                nbytes = min(BLOCK, extent.nbytes - done)
                view = memory[extent.at + done : extent.at + done + nbytes]
                try:
                    self._files[extent.file].read_exactly(view, extent.offset + done, min(extent.needed - done, nbytes))
                except StorageError as error:
                    raise StorageError(f"{unit.name}: {error}") from error
                yield nbytes
