"""Units from flash to memory: in a circle, ahead of the caller, right in any order, and through every failure."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lever.errors import StorageError
from lever.gguf import TensorInfo
from lever.pages import PAGE
from lever.weights.reader import DirectFile
from lever.weights.store import MIN_SLOTS, Store
from lever.weights.units import unit
from tests.fakes import FakeDevice, descriptors_of, reader_threads, wait_until

# Bytes of the units of a file, one behind the other. The last is no whole page, like the last tensor of a file.
SIZES = (3 * PAGE, PAGE, 5 * PAGE, 2 * PAGE, 4 * PAGE, PAGE + 100)
STARTS = tuple(sum(SIZES[:index]) for index in range(len(SIZES)))
N = len(SIZES)
BLOCK, DEPTH = 16 * PAGE, 2  # of one read in these tests, and reads in flight


@dataclass
class Flash:
    """A file of units, and what was written."""

    path: Path
    data: bytes
    sizes: Sequence[int]

    def open(self, device: FakeDevice | None = None, *, stopped: bool = False, **options: Any) -> Store:
        """A store of these units; `stopped`: its device waits in the first read."""
        starts = np.cumsum([0, *self.sizes])
        tensors = [
            TensorInfo(f"t{index}", (size // 4,), 0, 0, int(start), size)
            for index, (start, size) in enumerate(zip(starts, self.sizes, strict=False))
        ]
        files = [DirectFile(self.path, device or FakeDevice())]
        if device is not None:
            device.reads.clear()  # without the one that asked for O_DIRECT
            if stopped:
                device.gate.clear()
        options = {"block": BLOCK, "depth": DEPTH} | options
        return Store(files, [unit(f"unit {index}", [tensor]) for index, tensor in enumerate(tensors)], **options)

    def expected(self, index: int) -> bytes:
        start = sum(self.sizes[:index])
        return self.data[start : start + self.sizes[index]]

    def holds(self, address: int, index: int) -> bool:
        """Whether the bytes at an address are those of a unit."""
        return ctypes.string_at(address, self.sizes[index]) == self.expected(index)


def new_flash(path: Path, sizes: Sequence[int]) -> Flash:
    data = np.random.default_rng(0).bytes(sum(sizes))
    path.write_bytes(data)
    return Flash(path, data, sizes)


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Flash:
    return new_flash(tmp_path_factory.mktemp("flash") / "units.bin", SIZES)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Flash:
    """Units of several blocks, so that reading one can be given up half way."""
    return new_flash(tmp_path_factory.mktemp("flash") / "big.bin", (4 * BLOCK, PAGE, PAGE, PAGE))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test closes its store, and with it the thread."""
    yield
    assert not reader_threads()


def passes(flash: Flash, store: Store, count: int = 1) -> None:
    """Every unit in order, so many times, with the right bytes."""
    for _ in range(count):
        for index, address in store.stream(range(len(flash.sizes))):
            assert flash.holds(address, index)


# --- order and reading ahead --------------------------------------------------------------------------------


def test_units_are_read_in_a_circle_each_once_a_pass(flash: Flash) -> None:
    device = FakeDevice()
    with flash.open(device, depth=1) as store:
        passes(flash, store, 3)
        wait_until(lambda: len(device.reads) == 3 * N + MIN_SLOTS)
    assert [offset for offset, _ in device.reads] == [STARTS[turn % N] // PAGE * PAGE for turn in range(3 * N + 3)]


@pytest.mark.parametrize("n_slots", [3, 4, 5, 9])
def test_the_reader_fills_the_ring_while_nobody_asks_and_then_stops(flash: Flash, n_slots: int) -> None:
    device = FakeDevice()
    with flash.open(device, n_slots=n_slots) as store:
        wait_until(lambda: len(device.reads) == n_slots)
        with pytest.raises(AssertionError, match="did not happen"):
            wait_until(lambda: len(device.reads) > n_slots, seconds=0.05)
        address = store.hold(0)
        with pytest.raises(AssertionError, match="did not happen"):
            wait_until(lambda: len(device.reads) > n_slots, seconds=0.05)
        store.release(address)
        wait_until(lambda: len(device.reads) == n_slots + 1)


def test_a_pass_over_what_was_read_ahead_waits_for_nothing(flash: Flash) -> None:
    device = FakeDevice()
    with flash.open(device, n_slots=N) as store:
        wait_until(lambda: len(device.reads) == N)
        device.gate.clear()  # not a byte more
        wait_until(lambda: store.stats.read_bytes == store.bytes_per_pass)
        passes(flash, store)
        device.gate.set()


def test_what_is_held_is_not_overwritten(flash: Flash) -> None:
    with flash.open(n_slots=3) as store:
        first = store.hold(0)
        second = store.hold(1)
        for index in (2, 3, 4, 5, 0, 1, 2):
            store.release(store.hold(index))
        assert flash.holds(first, 0)
        assert flash.holds(second, 1)
        store.release(first)
        store.release(second)


@pytest.mark.parametrize("sizes", [(PAGE,), (PAGE, 3 * PAGE)], ids=["one", "two"])
def test_fewer_units_than_slots_come_round_too(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    flash = new_flash(tmp_path / "few.bin", sizes)
    with flash.open() as store:
        passes(flash, store, 5)


# --- any order ----------------------------------------------------------------------------------------------


@given(
    asked=st.lists(st.integers(0, N - 1), max_size=40),
    pinned=st.sets(st.integers(0, N - 1)),
    n_slots=st.integers(3, 5),
    counts=st.lists(st.integers(PAGE - 9, 3 * PAGE), min_size=1, max_size=3),
)
@settings(deadline=None, max_examples=60)
def test_any_order_of_asking_gives_the_right_bytes(
    flash: Flash, asked: list[int], pinned: set[int], n_slots: int, counts: list[int]
) -> None:
    with flash.open(FakeDevice(at_most=counts), pinned=pinned, n_slots=n_slots) as store:
        for index, address in store.stream(asked):
            assert flash.holds(address, index)


@given(
    asked=st.lists(st.tuples(st.integers(0, N - 1), st.integers(0, 2)), max_size=40),
    n_slots=st.integers(4, 6),
)
@settings(deadline=None, max_examples=60)
def test_any_order_of_asking_and_giving_back_keeps_what_is_held(
    flash: Flash, asked: list[tuple[int, int]], n_slots: int
) -> None:
    """Up to three units are held at once, the same one twice as well, and looked at when they are given back."""
    with flash.open(n_slots=n_slots) as store:
        held: list[tuple[int, int]] = []
        for index, which in asked:
            held.append((index, store.hold(index)))
            if len(held) == 3:
                held_index, address = held.pop(which)
                assert flash.holds(address, held_index)
                store.release(address)
        for index, address in held:
            assert flash.holds(address, index)
            store.release(address)


@given(lengths=st.lists(st.integers(0, N), max_size=8))
@settings(deadline=None, max_examples=30)
def test_passes_given_up_on_the_way_change_nothing(flash: Flash, lengths: list[int]) -> None:
    with flash.open() as store:
        for length in lengths:
            for index, address in store.stream(range(N)):
                assert flash.holds(address, index)
                if index == length:
                    break
        passes(flash, store)


def test_a_pass_that_failed_in_the_caller_leaves_no_slot_to_the_next(flash: Flash) -> None:
    """The failed pass lives on in the traceback; when it goes, it gives back its own slot and no other."""
    with flash.open() as store:
        with pytest.raises(ZeroDivisionError) as caught:
            raise_in_the_middle_of(store.stream(range(N)), index=2)
        address = next(address for index, address in store.stream([2]))
        store.release(address)
        units: Any = store.stream(range(N))
        for _ in range(3):
            index, address = next(units)
        del caught
        gc.collect()  # the failed pass ends here
        for _ in range(4):
            store.release(store.hold(5))
        assert (index, flash.holds(address, 2)) == (2, True)
        units.close()
        passes(flash, store, 2)


def raise_in_the_middle_of(units: Iterator[tuple[int, int]], index: int) -> None:
    for at, _ in units:
        if at == index:
            raise ZeroDivisionError


def test_another_unit_asked_for_in_mid_read_ends_the_read_at_the_next_block(big: Flash) -> None:
    """What is in flight ends, nothing more of that unit is begun."""
    device = FakeDevice()
    with big.open(device, stopped=True) as store:
        wait_until(lambda: len(device.reads) == DEPTH)
        held: list[int] = []
        asking = threading.Thread(target=lambda: held.append(store.hold(2)))
        asking.start()
        wait_until(lambda: not store._ring.coming)  # it is being waited for
        device.gate.set()
        asking.join()
        assert big.holds(held[0], 2)
        store.release(held[0])
        offsets = [offset for offset, _ in device.reads]
        assert sorted(offsets[:DEPTH]) == [0, BLOCK]
        assert offsets[DEPTH] == 4 * BLOCK + PAGE
        passes(big, store)


@given(depth=st.integers(1, 4), block=st.sampled_from([PAGE, 2 * PAGE, BLOCK]), n_slots=st.integers(3, 5))
@settings(deadline=None, max_examples=20)
def test_any_number_of_reads_in_flight_and_any_block_brings_the_same(
    flash: Flash, depth: int, block: int, n_slots: int
) -> None:
    with flash.open(FakeDevice(delay_s=0.0001), depth=depth, block=block, n_slots=n_slots) as store:
        passes(flash, store, 2)


# --- pinned units -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [{0}, {5}, {1, 3, 4}, {0, 1, 2, 3, 4}])
def test_pinned_units_are_read_once_and_never_again(flash: Flash, pinned: set[int]) -> None:
    device = FakeDevice()
    told: list[int] = []
    with flash.open(device, pinned=pinned, on_pinned=told.append) as store:
        assert store.pinned == tuple(sorted(pinned))
        assert store.streamed == tuple(index for index in range(N) if index not in pinned)
        passes(flash, store, 4)
    offsets = [offset for offset, _ in device.reads]
    assert all(offsets.count(STARTS[index]) == 1 for index in pinned)
    assert told == [store.units[index].nbytes for index in sorted(pinned)]


def test_a_store_with_everything_pinned_has_no_thread(flash: Flash) -> None:
    device = FakeDevice()
    with flash.open(device, pinned=range(N), n_slots=0) as store:
        assert not reader_threads()
        passes(flash, store, 3)
        assert (store.bytes_per_pass, store.stats.read_bytes, store.stats.stall_s) == (0, 0, 0)
    assert len(device.reads) == N


def test_pinned_units_come_in_any_number_of_short_reads(flash: Flash) -> None:
    with flash.open(FakeDevice(at_most=(700, PAGE + 1)), pinned=range(N)) as store:
        passes(flash, store)


# --- failures -----------------------------------------------------------------------------------------------


def test_C10_an_error_of_the_reader_reaches_the_caller_and_is_forgotten_after(flash: Flash) -> None:
    device = FakeDevice(broken=range(STARTS[2], STARTS[3]))
    with flash.open(device) as store:
        for _ in range(2):
            wanted = f"unit 2: reading {flash.path} failed at byte {STARTS[2]}: Input/output error"
            with pytest.raises(StorageError, match=wanted) as caught:
                passes(flash, store)
            assert caught.value.exit_code == 5
        device.broken = range(0)
        passes(flash, store, 2)


def test_C10_units_before_the_broken_one_are_given_out_all_the_same(flash: Flash) -> None:
    device = FakeDevice(broken=range(STARTS[2], STARTS[3]))
    with flash.open(device, n_slots=4) as store:
        wait_until(lambda: len(device.reads) == 3)
        for index, address in store.stream([0, 1]):
            assert flash.holds(address, index)
        with pytest.raises(StorageError, match="unit 2"):
            store.hold(2)


@pytest.mark.parametrize("index", [0, 2])
def test_C10_what_failed_before_it_was_asked_for_is_tried_again(flash: Flash, index: int) -> None:
    """Also what failed a second time after the caller was told: a device may be ill for a while."""
    device = FakeDevice()
    with flash.open(device, stopped=True) as store:
        device.broken = range(STARTS[index], STARTS[index] + 1)
        device.gate.set()
        with pytest.raises(StorageError):
            store.hold(index)
        wait_until(lambda: [offset for offset, _ in device.reads].count(STARTS[index]) >= 2)
        device.broken = range(0)
        address = store.hold(index)
        assert flash.holds(address, index)
        store.release(address)


def test_C10_a_file_cut_while_streaming_is_an_error_until_it_is_whole_again(flash: Flash) -> None:
    device = FakeDevice()
    with flash.open(device) as store:
        passes(flash, store)
        device.ends_at = cut = STARTS[4] + PAGE
        with pytest.raises(StorageError, match=f"unit 4: .* ended at byte {cut} where {STARTS[5]} was expected"):
            passes(flash, store, 2)  # the first may have been read ahead
        device.ends_at = None
        passes(flash, store)


def test_C10_an_error_while_pinning_leaves_no_thread_and_no_open_file(flash: Flash) -> None:
    with pytest.raises(StorageError, match="unit 3"):
        flash.open(FakeDevice(broken=range(STARTS[3], STARTS[4])), pinned=[0, 3])
    assert not reader_threads()
    assert not descriptors_of(flash.path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_reader_that_died_of_a_bug(flash: Flash) -> None:
    device = FakeDevice()
    with flash.open(device) as store:
        device.crash = RuntimeError("a bug")
        with pytest.raises(AssertionError, match="its reader died"):
            passes(flash, store, 2)


# --- closing ------------------------------------------------------------------------------------------------


def test_closing_in_mid_read_waits_for_one_block_at_most(big: Flash) -> None:
    device = FakeDevice()
    store = big.open(device, stopped=True)
    wait_until(lambda: len(device.reads) == DEPTH)
    closing = threading.Thread(target=store.close)
    closing.start()
    wait_until(lambda: store._ring.closed)
    device.gate.set()
    closing.join()
    assert not reader_threads()
    assert len(device.reads) == DEPTH
    assert not descriptors_of(big.path)


def test_closing_with_units_held_and_twice_is_safe(flash: Flash) -> None:
    store = flash.open(pinned=[1])
    store.hold(0)
    store.hold(1)
    units: Any = store.stream([2, 3])
    next(units)
    store.close()
    store.close()
    units.close()
    assert not reader_threads()
    assert not descriptors_of(flash.path)


def test_a_closed_store_is_not_waited_for(flash: Flash) -> None:
    store = flash.open()
    store.close()
    for index in (0, 3):
        with pytest.raises(AssertionError, match="the store is closed"):
            store.hold(index)


# --- figures ------------------------------------------------------------------------------------------------


def test_figures_add_up(flash: Flash) -> None:
    device = FakeDevice(delay_s=0.002)
    with flash.open(device, pinned=[1]) as store:
        assert store.bytes_per_pass == sum(whole.nbytes for whole in store.units) - PAGE
        passes(flash, store, 3)
        wait_until(lambda: len(device.reads) == 1 + 3 * (N - 1) + MIN_SLOTS)
        wait_until(lambda: store.stats.read_bytes == sum(nbytes for _, nbytes in device.reads[1:]))
        calls = len(device.reads) - 1
        assert 0.002 * calls <= DEPTH * store.stats.read_s


def test_waiting_for_a_unit_counts_as_stall(flash: Flash) -> None:
    device = FakeDevice()
    with flash.open(device, stopped=True) as store:
        started = time.perf_counter()
        threading.Timer(0.2, device.gate.set).start()
        store.release(store.hold(0))
        assert 0.05 < store.stats.stall_s <= time.perf_counter() - started


def test_direct_io_is_told_for_all_files_together(flash: Flash, tmp_path: Path) -> None:
    other = new_flash(tmp_path / "other.bin", (PAGE,))
    whole = unit("u", [TensorInfo("t", (PAGE // 4,), 0, 0, 0, PAGE)])
    for refuses in (False, True):
        files = [DirectFile(flash.path), DirectFile(other.path, FakeDevice(refuses_direct=refuses))]
        with Store(files, [whole], pinned=[0], n_slots=0) as store:
            assert store.direct_io == (files[0].direct and not refuses)


def test_time_inside_reads_is_counted_while_others_are_under_way(flash: Flash) -> None:
    """Two in flight may keep the device busy for minutes, and its rate is asked for meanwhile."""

    class Stuck(FakeDevice):
        def __call__(self, fd: int, view: memoryview, offset: int) -> int:
            if offset == STARTS[1] // PAGE * PAGE:
                self.gate.wait()
            elif offset == 0:
                time.sleep(0.02)
            return FakeDevice(reads=self.reads)(fd, view, offset)

    device = Stuck()
    with flash.open(device, depth=2) as store:
        device.gate.clear()
        store.release(store.hold(0))
        wait_until(lambda: store.stats.read_s > 0)
        device.gate.set()
