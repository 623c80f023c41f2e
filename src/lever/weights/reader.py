"""Reads of a file straight into page-aligned memory, past the page cache. Knows nothing of models."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from lever.errors import DamagedImage, StorageError
from lever.memory import drop_page_cache, expect_sequential_reads
from lever.owner import Owner
from lever.pages import PAGE, Pages, round_up

# preadv with one buffer; replaced in tests by readers that fail.
ReadInto = Callable[[int, memoryview, int], int]


def read_into(fd: int, view: memoryview, offset: int) -> int:
    """One preadv(2) at `offset`; how many bytes came, 0 at the end of the file."""
    return os.preadv(fd, [view], offset)


class DirectFile(Owner):
    """One open file for aligned reads with O_DIRECT, or buffered where the file system refuses it.

    `direct` says which, `reason` why not; both reach the user through the figures of a run. A buffered file drops what
    it has read from the page cache, so that the memory it uses stays what the budget says. Several threads may read.
    """

    grain = PAGE  # offsets and lengths of reads are multiples of this

    def __init__(self, path: Path, read: ReadInto | None = None) -> None:
        self.path = path
        self._read = read = read or read_into
        self._fd = -1
        self.reason: str | None = None
        try:
            self._fd, self.reason = _open(path, read)
            self.size = os.fstat(self._fd).st_size
        except OSError as error:
            self.close()
            raise StorageError(f"cannot read {path}: {error.strerror or error}") from error

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self.reason is None

    def read(self, view: memoryview, offset: int) -> int:
        """Fill `view`, page-aligned, a multiple of the grain long like `offset`; stops early only at the file's end.

        Returns the bytes that came. Short reads are continued: an interrupted or capped read is not the end.
        StorageError for what the device reports, with file and offset.
        """
        assert offset % self.grain == 0
        assert len(view) % self.grain == 0
        assert ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE == 0
        wanted = min(len(view), self.size - offset)  # not a byte beyond the end: some devices refuse to say "none"
        done = 0
        while done < wanted:
            try:
                count = self._read(self._fd, view[done:], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and self._was_cut():
                    break  # a strict device does not go on in mid-page, where the file ends now
                what = error.strerror or str(error)
                raise StorageError(f"reading {self.path} failed at byte {offset + done}: {what}") from error
            if count == 0:
                break
            done = _resume_at(done, count, wanted)
        if not self.direct:
            drop_page_cache(self._fd, offset, len(view))
        return done

    def read_exactly(self, view: memoryview, offset: int, needed: int) -> None:
        """As `read`, but at least `needed` bytes must come; StorageError when the file has become shorter."""
        count = self.read(view, offset)
        if count < needed:
            raise StorageError(
                f"{self.path} ended at byte {offset + count} where {offset + needed} was expected: "
                "was it replaced or cut while in use? Start again, or fetch the file anew"
            )

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _was_cut(self) -> bool:
        """Whether the file has become shorter since it was opened."""
        try:
            return os.fstat(self._fd).st_size < self.size
        except OSError:  # a network that is gone does not tell
            return False


class CheckedFile(DirectFile):
    """A file whose blocks have checksums: each is checked when it first comes, and then trusted while it stays open.

    Block i is the bytes [i * BLOCK_BYTES, (i + 1) * BLOCK_BYTES) of the file and `checksums[i]` their XXH3-64. `mend`
    is the command that makes the file anew.
    """

    BLOCK_BYTES = 64 << 10
    grain = BLOCK_BYTES

    def __init__(self, path: Path, checksums: NDArray[np.uint64], read: ReadInto | None = None, *, mend: str) -> None:
        super().__init__(path, read)
        self._checksums = checksums
        self._mend = mend
        self._trusted = np.zeros(len(checksums), bool)

    def read(self, view: memoryview, offset: int) -> int:
        """As `DirectFile.read`; DamagedImage for a block that is not what was written, with block and file."""
        done = super().read(view, offset)
        first = offset // self.BLOCK_BYTES
        for block in range(first, first + done // self.BLOCK_BYTES):
            if not self._trusted[block]:
                self._check(block, view[(block - first) * self.BLOCK_BYTES :][: self.BLOCK_BYTES])
        return done

    def check(self, end: int, pages: Pages, on_checked: Callable[[int], None] = lambda _nbytes: None) -> None:
        """Read the blocks up to byte `end` by way of `pages`; DamagedImage for one that is not what was written."""
        for offset in range(0, end, pages.nbytes):
            nbytes = min(pages.nbytes, round_up(end, self.grain) - offset)
            self.read_exactly(pages.bytes.data[:nbytes], offset, nbytes)
            on_checked(nbytes)

    def _check(self, block: int, data: memoryview) -> None:
        if xxhash.xxh3_64_intdigest(data) != self._checksums[block]:
            start = block * self.BLOCK_BYTES
            raise DamagedImage(
                f"{self.path} is damaged: block {block} (bytes {start} to {start + self.BLOCK_BYTES}) is not what was "
                f"written; look after the storage if it happens again, and pack it again: {self._mend}"
            )
        self._trusted[block] = True


def _resume_at(done: int, count: int, end: int) -> int:
    """Where to read on after `count` bytes came at `done`: O_DIRECT goes on at whole pages only.

    A part of a page is read again, except at the end of the file, where nothing more will come.
    """
    reached = done + count
    if reached >= end:
        return reached
    aligned = reached - reached % PAGE
    return aligned if aligned > done else reached


def _open(path: Path, read: ReadInto) -> tuple[int, str | None]:
    """The descriptor, and why it is not direct (None when it is): asked of this very file by one small read.

    Android's shared storage, FUSE, tmpfs and some SD cards accept the flag and refuse the first read.
    """
    direct_flag = getattr(os, "O_DIRECT", None)
    if direct_flag is None:
        return _open_buffered(path), "this system has no O_DIRECT"
    page = Pages(PAGE)  # before there is a descriptor that its failure would lose
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | direct_flag)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return _open_buffered(path), "the file system refuses O_DIRECT"
    try:
        with page:
            read(fd, page.bytes.data, 0)
    except OSError as error:
        os.close(fd)
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return _open_buffered(path), "the file system accepts O_DIRECT but refuses its reads"
    return fd, None


def _open_buffered(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    expect_sequential_reads(fd)
    return fd
