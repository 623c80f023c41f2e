"""A file written from its start to its end that hashes its blocks and gets its name when it is whole."""

from __future__ import annotations

import errno
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from lever.errors import StorageError
from lever.memory import drop_page_cache, format_size
from lever.models.cache import PART_SUFFIX
from lever.owner import Owner
from lever.weights.reader import CheckedFile

BLOCK = CheckedFile.BLOCK_BYTES
SYNC_BYTES = 64 << 20  # written, then synced and dropped from the page cache: what is dirty counts as ours


class Writer(Owner):
    """A file that is written from its start to its end, hashing as it goes, and gets its name when it is whole."""

    def __init__(self, out: Path, total: int) -> None:
        """StorageError when the disk has no room for `total` bytes, or does not take a file there.

        What processes that were killed have left of the same file is deleted first.
        """
        _remove_left_parts(out)
        _require_space(out, total)
        self._out = out
        self._part = out.with_name(f"{out.name}.{os.getpid()}{PART_SUFFIX}")
        self._hashes = np.zeros(total // BLOCK + 1, np.uint64)
        self._n_hashes = 0
        self._hash = xxhash.xxh3_64()
        self._in_block = 0  # bytes of the current block that are hashed
        self._at = self._unsynced = 0
        self._finished = False
        try:
            self._part.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._part.open("wb", buffering=0)
        except OSError as error:
            raise self._failure(error) from error

    @staticmethod
    def nbytes(total: int) -> int:
        """Bytes that it takes: the checksums, and what the system holds until it is synced."""
        return 8 * (total // BLOCK + 1) + SYNC_BYTES

    def close(self) -> None:
        """Close it; what is not finished is deleted."""
        self._file.close()
        if not self._finished:
            with suppress(FileNotFoundError):
                self._part.unlink()

    def write(self, data: bytes | memoryview) -> None:
        """Append; StorageError when the disk does not take it."""
        view = memoryview(data).cast("B")
        self._write(view)
        while view:
            piece = view[: BLOCK - self._in_block]
            self._hash.update(piece)
            self._in_block += len(piece)
            if self._in_block == BLOCK:
                self._hashes[self._n_hashes] = self._hash.intdigest()
                self._n_hashes, self._in_block = self._n_hashes + 1, 0
                self._hash.reset()
            view = view[len(piece) :]

    def pad_to(self, offset: int) -> None:
        """Zeros up to this offset."""
        assert offset >= self._at
        self.write(bytes(offset - self._at))

    def write_checksums(self) -> None:
        """The checksums of all blocks so far, and one of theirs."""
        assert self._in_block == 0
        hashes = self._hashes[: self._n_hashes].astype("<u8")
        own = xxhash.xxh3_64_intdigest(hashes.data)
        self._write(memoryview(np.append(hashes, np.array([own], "<u8")).tobytes()))

    def finish(self) -> None:
        """Sync, and give the file its name."""
        try:
            os.fsync(self._file.fileno())
            drop_page_cache(self._file.fileno())
            self._part.replace(self._out)
            self._finished = True
            directory = os.open(self._out.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise self._failure(error) from error

    def _write(self, view: memoryview) -> None:
        try:
            done = 0
            while done < len(view):
                done += self._file.write(view[done:]) or 0
            self._at += len(view)
            self._unsynced += len(view)
            if self._unsynced >= SYNC_BYTES:
                os.fdatasync(self._file.fileno())
                drop_page_cache(self._file.fileno())
                self._unsynced = 0
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> StorageError:
        space = "free some space, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return StorageError(
            f"{self._out} cannot be written: {error.strerror or error}: {space}choose another place with -o"
        )


def _remove_left_parts(out: Path) -> None:
    name = re.compile(rf"{re.escape(out.name)}\.\d+{re.escape(PART_SUFFIX)}")
    with suppress(OSError):  # writing there will tell
        for path in [path for path in out.parent.iterdir() if name.fullmatch(path.name)]:
            path.unlink()


def _require_space(out: Path, total: int) -> None:
    existing = next(path for path in (out.parent, *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < total:
        raise StorageError(
            f"{out}: {format_size(total)} are needed and {format_size(free)} are free: "
            "free some space, or choose another place with -o"
        )
