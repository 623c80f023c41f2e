"""Bytes of a file through aligned reads: with O_DIRECT or without, from devices that come short, lie and fail."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from lever.errors import DamagedImage, StorageError
from lever.gguf import TensorInfo
from lever.pages import PAGE, Pages, round_up
from lever.weights.embedding import EmbeddingRows
from lever.weights.reader import CheckedFile, DirectFile, ReadInto, read_into
from tests.fakes import STALE, FakeDevice, descriptors_of
from tests.lacking import lacking

SHM = Path("/dev/shm")
BLOCK = 16 * PAGE
SIZES = (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 512, BLOCK, BLOCK + PAGE + 7, 2 * BLOCK + 1)


def new_file(folder: Path, size: int) -> Path:
    path = folder / f"{size}.bin"
    path.write_bytes(np.random.default_rng(size).bytes(size))
    return path


def contents(file: DirectFile, offset: int = 0, nbytes: int | None = None) -> bytes:
    """What `read` brings into a buffer for `nbytes` from `offset`; a byte that it does not bring is STALE."""
    wanted = file.size - offset if nbytes is None else nbytes
    with Pages(max(wanted, 1)) as pages:
        pages.bytes[:] = STALE
        count = file.read(pages.bytes.data[: round_up(wanted)], offset)
        return pages.bytes[: max(count, wanted)].tobytes()


def direct_works(path: Path) -> bool:
    """Whether this file can be read with O_DIRECT here, asked of the system without lever."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        with Pages(PAGE) as pages:
            os.preadv(fd, [pages.bytes.data], 0)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder of this machine's disk, and one in memory."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access(SHM, os.W_OK):
        lacking("this machine has no tmpfs at /dev/shm")
    with TemporaryDirectory(dir=SHM) as name:
        yield Path(name)


# --- direct or not ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_C1_bytes_are_those_of_the_file_and_the_mode_is_told(folder: Path, size: int) -> None:
    path = new_file(folder, size)
    with DirectFile(path) as file:
        (fd,) = descriptors_of(path)
        flagged = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        assert contents(file) == path.read_bytes()
        assert file.direct == flagged == direct_works(path)
        assert (file.reason is None) == file.direct
    assert not descriptors_of(path)


def test_C1_a_device_that_accepts_the_flag_and_refuses_reads_is_read_buffered(tmp_path: Path) -> None:
    path = new_file(tmp_path, BLOCK + 7)
    with DirectFile(path, FakeDevice(refuses_direct=True)) as file:
        assert contents(file) == path.read_bytes()
        assert not file.direct
        assert file.reason == "the file system accepts O_DIRECT but refuses its reads"
        assert len(descriptors_of(path)) == 1


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_C1_a_file_system_that_refuses_the_flag_is_read_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = new_file(tmp_path, BLOCK + 7)
    monkeypatch.setattr(os, "open", refusing_direct(os.open, code))
    with DirectFile(path) as file:
        assert contents(file) == path.read_bytes()
        assert file.reason == "the file system refuses O_DIRECT"


def test_a_system_without_the_flag_reads_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = new_file(tmp_path, PAGE + 7)
    monkeypatch.delattr(os, "O_DIRECT")
    with DirectFile(path) as file:
        assert contents(file) == path.read_bytes()
        assert file.reason == "this system has no O_DIRECT"


def test_a_system_without_hints_for_its_page_cache_reads_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_file(tmp_path, PAGE + 7)
    monkeypatch.delattr(os, "posix_fadvise")
    with DirectFile(path, FakeDevice(refuses_direct=True)) as file:
        assert contents(file) == path.read_bytes()
        assert not file.direct


def test_a_refusal_for_another_reason_is_no_cause_to_read_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_file(tmp_path, PAGE)
    monkeypatch.setattr(os, "open", refusing_direct(os.open, errno.EACCES))
    with pytest.raises(StorageError, match="Permission denied"):
        DirectFile(path)


def test_an_error_of_the_first_read_is_told_and_the_file_closed(tmp_path: Path) -> None:
    path = new_file(tmp_path, PAGE)
    with pytest.raises(StorageError, match=f"cannot read {path}: Input/output error"):
        DirectFile(path, FakeDevice(broken=range(1)))
    assert not descriptors_of(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"gone\.gguf: No such file") as caught:
        DirectFile(tmp_path / "gone.gguf")
    assert caught.value.exit_code == 5


def test_buffered_reads_leave_nothing_in_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advised = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _fd, *advice: advised.append(advice))
    with DirectFile(new_file(tmp_path, 3 * PAGE), FakeDevice(refuses_direct=True)) as file:
        contents(file, PAGE, PAGE)
        contents(file, 2 * PAGE, PAGE)
    assert advised[-2:] == [(PAGE, PAGE, os.POSIX_FADV_DONTNEED), (2 * PAGE, PAGE, os.POSIX_FADV_DONTNEED)]


def refusing_direct(real_open: Callable[..., int], code: int) -> Callable[..., int]:
    def fake(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real_open(path, flags, *mode)

    return fake


# --- short reads --------------------------------------------------------------------------------------------

SHORT = {
    "one MiB": (1 << 20,),
    "three pages": (3 * PAGE,),
    "not in whole pages": (5000, 3 * PAGE + 1, PAGE - 1),
    "less than a page": (512,),
    "one byte after a page": (PAGE + 1,),
    "one byte now and then": (1, BLOCK, 2, 3),
}


@pytest.mark.parametrize("counts", SHORT.values(), ids=SHORT.keys())
@pytest.mark.parametrize("size", [4 * PAGE, 5 * PAGE + 333, 300 * PAGE + 1])
def test_C2_A29_reads_that_come_short_are_continued(tmp_path: Path, counts: tuple[int, ...], size: int) -> None:
    path = new_file(tmp_path, size)
    with DirectFile(path, FakeDevice(at_most=counts)) as file:
        assert contents(file) == path.read_bytes()


@given(counts=st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=8), pages=st.integers(1, 6))
@settings(deadline=None)
def test_C2_short_reads_of_any_length_give_the_same_bytes(counts: list[int], pages: int) -> None:
    with TemporaryDirectory() as folder:
        path = new_file(Path(folder), pages * PAGE - 100)
        with DirectFile(path, FakeDevice(at_most=counts)) as file:
            assert contents(file) == path.read_bytes()


def test_C2_O_DIRECT_goes_on_at_whole_pages_after_a_short_read(tmp_path: Path) -> None:
    path = new_file(tmp_path, 40 * PAGE + 5)
    device = FakeDevice(at_most=(PAGE + 5, 9 * PAGE - 1), whole_pages=True)
    with DirectFile(path, device) as file:
        assert contents(file) == path.read_bytes()


@pytest.mark.parametrize("size", SIZES)
def test_a_device_that_takes_whole_pages_only_gives_the_end_of_any_file(tmp_path: Path, size: int) -> None:
    path = new_file(tmp_path, size)
    with DirectFile(path, FakeDevice(whole_pages=True)) as file:
        assert contents(file) == path.read_bytes()


def test_A29_a_read_beyond_what_linux_gives_at_once_is_continued(tmp_path: Path) -> None:
    """It gives 0x7ffff000 bytes, which is a whole number of pages."""
    path = new_file(tmp_path, 3 * BLOCK)
    device = FakeDevice(at_most=(BLOCK - PAGE,))
    with DirectFile(path, device) as file:
        assert contents(file) == path.read_bytes()
    assert [offset for offset, _ in device.reads[1:]] == [n * (BLOCK - PAGE) for n in range(4)]


def test_A29_bytes_behind_4_GiB_are_found(tmp_path: Path) -> None:
    path, far = tmp_path / "sparse.bin", (5 << 30) + PAGE
    with path.open("wb") as file:
        file.seek(far)
        file.write(b"far away")
    with DirectFile(path) as opened:
        assert contents(opened, far) == b"far away"
        assert contents(opened, far - PAGE, PAGE) == bytes(PAGE)


def test_signals_during_reads_change_nothing(tmp_path: Path) -> None:
    """Python itself calls again after EINTR (PEP 475), and goes on after its handler ran."""
    path, heard = new_file(tmp_path, 400 * BLOCK), []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        with interrupting_this_thread(), DirectFile(path) as file:
            found = contents(file)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(heard) > 1
    assert found == path.read_bytes()


@contextmanager
def interrupting_this_thread() -> Iterator[None]:
    """SIGUSR1 every half millisecond."""
    target, over = threading.get_ident(), threading.Event()

    def interrupt() -> None:
        while not over.wait(0.0005):
            signal.pthread_kill(target, signal.SIGUSR1)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# --- alignment ----------------------------------------------------------------------------------------------


def test_C4_a_buffer_that_is_not_aligned_is_refused(tmp_path: Path) -> None:
    with DirectFile(new_file(tmp_path, 4 * PAGE)) as file, Pages(4 * PAGE) as pages:
        view = pages.bytes.data
        for wrong in (view[64 : 64 + PAGE], view[: PAGE - 64], memoryview(bytearray(2 * PAGE))[1 : PAGE + 1]):
            with pytest.raises(AssertionError):
                file.read(wrong, 0)
        with pytest.raises(AssertionError):
            file.read(view[:PAGE], 512)


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, BLOCK + 1])
def test_C4_pages_are_aligned_whole_and_zero(nbytes: int) -> None:
    with Pages(nbytes) as pages:
        assert pages.address % PAGE == 0
        assert pages.address == pages.bytes.ctypes.data
        assert pages.nbytes == len(pages.bytes) == round_up(nbytes)
        assert not pages.bytes.any()


@pytest.mark.parametrize("offset", [0, 32, PAGE - 32, 7 * PAGE + 96])
def test_C4_rows_of_an_embedding_come_through_whole_pages(tmp_path: Path, offset: int) -> None:
    """Rows of 200 floats lie across pages as they please."""
    rows = np.random.default_rng(0).standard_normal((50, 200)).astype(np.float32)
    path = tmp_path / "table.bin"
    path.write_bytes(bytes(offset) + rows.tobytes())
    table = TensorInfo("token_embd.weight", (200, 50), 0, 0, offset, rows.nbytes)
    device = FakeDevice(whole_pages=True)
    embedding = EmbeddingRows(DirectFile(path, device), table, 8)
    tokens = [49, 0, 3, 49, 7, 3, 0, 48]
    device.reads.clear()
    where = embedding.load(tokens)
    loaded = np.frombuffer(embedding._rows.bytes[: 8 * 800].tobytes(), np.float32).reshape(8, 200)
    assert np.array_equal(loaded[where], rows[tokens])
    assert len(device.reads) == 5  # distinct tokens
    embedding.close()
    assert not descriptors_of(path)


# --- failures -----------------------------------------------------------------------------------------------


def test_C10_EIO_names_the_file_and_the_byte_and_passes_when_the_device_is_well_again(tmp_path: Path) -> None:
    path = new_file(tmp_path, 4 * BLOCK)
    device = FakeDevice(broken=range(2 * BLOCK, 3 * BLOCK), at_most=(BLOCK,))
    with DirectFile(path, device) as file:
        with pytest.raises(StorageError, match=f"reading {path} failed at byte {2 * BLOCK}: Input/output") as caught:
            contents(file)
        assert caught.value.exit_code == 5
        assert "\n" not in str(caught.value)
        device.broken = range(0)
        assert contents(file) == path.read_bytes()


@pytest.mark.parametrize("whole_pages", [False, True], ids=["lenient", "strict"])
@pytest.mark.parametrize("left", [0, PAGE, 5 * PAGE, 5 * PAGE + 333])
def test_C10_a_file_cut_while_in_use_is_an_error(tmp_path: Path, left: int, whole_pages: bool) -> None:
    path = new_file(tmp_path, 8 * PAGE)
    device = FakeDevice(whole_pages=whole_pages)
    with DirectFile(path, device) as file, Pages(8 * PAGE) as pages:
        device.ends_at = left
        with pytest.raises(StorageError) as caught:
            file.read_exactly(pages.bytes.data, 0, 7 * PAGE)
    assert str(path) in str(caught.value)
    assert f"byte {left}" in str(caught.value)
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("read", [read_into, FakeDevice(whole_pages=True)], ids=["as it is", "strict"])
@pytest.mark.parametrize("left", [0, PAGE, 5 * PAGE, 5 * PAGE + 333])
def test_C10_a_file_cut_on_the_disk_is_an_error_that_says_what_was_expected(
    folder: Path, left: int, read: ReadInto
) -> None:
    path = new_file(folder, 8 * PAGE)
    with DirectFile(path, read) as file, Pages(8 * PAGE) as pages:
        os.truncate(path, left)
        wanted = rf"{path} ended at byte {left} where {7 * PAGE} was expected: was it replaced or cut"
        with pytest.raises(StorageError, match=wanted):
            file.read_exactly(pages.bytes.data, 0, 7 * PAGE)


def test_C10_a_refusal_by_a_device_whose_file_is_whole_is_told_as_it_is(tmp_path: Path) -> None:
    path = new_file(tmp_path, 4 * PAGE)
    device = FakeDevice()
    with DirectFile(path, device) as file:
        device.refuses_direct = True
        with pytest.raises(StorageError, match=f"reading {path} failed at byte 0: Invalid argument"):
            contents(file)


def test_bytes_that_nobody_needs_may_be_missing(tmp_path: Path) -> None:
    """The last page of a file is asked for in whole, whatever the file has of it."""
    path = new_file(tmp_path, PAGE + 10)
    with DirectFile(path) as file, Pages(2 * PAGE) as pages:
        file.read_exactly(pages.bytes.data, 0, PAGE + 10)
        with pytest.raises(StorageError, match=f"ended at byte {PAGE + 10} where {PAGE + 11} was"):
            file.read_exactly(pages.bytes.data, 0, PAGE + 11)


def test_closing_twice_is_safe(tmp_path: Path) -> None:
    path = new_file(tmp_path, PAGE)
    file = DirectFile(path)
    file.close()
    file.close()
    assert not descriptors_of(path)


def test_one_read_tells_what_came_and_nothing_at_the_end(tmp_path: Path) -> None:
    path = new_file(tmp_path, PAGE)
    fd = os.open(path, os.O_RDONLY)
    view = memoryview(bytearray(PAGE))
    assert read_into(fd, view, 0) == PAGE
    assert read_into(fd, view, PAGE) == 0
    os.close(fd)
    assert bytes(view) == path.read_bytes()


# --- checksums ----------------------------------------------------------------------------------------------

CHECKED = CheckedFile.BLOCK_BYTES


def checked(path: Path, device: FakeDevice | None = None) -> CheckedFile:
    """A file with the checksums of what it holds now."""
    data = path.read_bytes()
    blocks = [data[start : start + CHECKED] for start in range(0, len(data), CHECKED)]
    sums = np.array([xxhash.xxh3_64_intdigest(block) for block in blocks], np.uint64)
    return CheckedFile(path, sums, device or FakeDevice(), mend="lever pack this --force")


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("offset", [0, CHECKED - 1, CHECKED, 3 * CHECKED + 77])
def test_a_flipped_bit_is_found_on_the_first_read_with_block_and_file(tmp_path: Path, offset: int) -> None:
    path = new_file(tmp_path, 4 * CHECKED)
    with checked(path) as file:
        flip(path, offset)
        block = offset // CHECKED
        wanted = (
            f"{path} is damaged: block {block} .bytes {block * CHECKED} to {(block + 1) * CHECKED}.*lever pack this"
        )
        for _ in range(2):  # it stays damaged
            with pytest.raises(DamagedImage, match=wanted) as caught:
                contents(file)
        assert caught.value.exit_code == 4
        flip(path, offset)
        assert contents(file) == path.read_bytes()


def test_only_the_blocks_of_a_read_are_checked(tmp_path: Path) -> None:
    path = new_file(tmp_path, 4 * CHECKED)
    with checked(path) as file:
        flip(path, 2 * CHECKED)
        contents(file, 0, 2 * CHECKED)
        contents(file, 3 * CHECKED, CHECKED)
        with pytest.raises(DamagedImage, match="block 2 "):
            contents(file, CHECKED, 2 * CHECKED)


def test_all_blocks_up_to_a_byte_are_checked_in_whatever_pieces(tmp_path: Path) -> None:
    path = new_file(tmp_path, 4 * CHECKED)
    for n_blocks in (1, 2, 3):
        with checked(path) as file, Pages(n_blocks * CHECKED) as pages:
            done: list[int] = []
            file.check(2 * CHECKED + 1, pages, done.append)
            assert sum(done) == 3 * CHECKED
            flip(path, 3 * CHECKED)
            file.check(3 * CHECKED, pages)
            with pytest.raises(DamagedImage, match="block 3 "):
                file.check(3 * CHECKED + 1, pages)
            flip(path, 3 * CHECKED)


def test_a_block_that_was_right_once_is_not_checked_again(tmp_path: Path) -> None:
    """Hashing costs a processor that compute wants; flash does not rot between two passes."""
    path = new_file(tmp_path, 2 * CHECKED)
    with checked(path) as file:
        contents(file, 0, CHECKED)
        flip(path, 5)
        contents(file, 0, CHECKED)


def test_short_reads_are_checked_as_a_whole(tmp_path: Path) -> None:
    path = new_file(tmp_path, 3 * CHECKED)
    with checked(path, FakeDevice(at_most=(9999, PAGE))) as file:
        assert contents(file) == path.read_bytes()
