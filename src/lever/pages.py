"""Page-aligned anonymous memory with one owner. Knows nothing of what lies in it."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
from numpy.typing import NDArray

from lever.errors import DoesNotFit
from lever.owner import Owner

PAGE = max(mmap.PAGESIZE, 4096)  # O_DIRECT wants addresses, offsets and lengths in multiples of this


def round_up(nbytes: int, to: int = PAGE) -> int:
    """The next multiple of `to` at or above `nbytes`."""
    return -(-nbytes // to) * to


def advise_huge(address: int, nbytes: int) -> None:
    """Ask for huge pages: fewer of them for the kernel to pin in each direct read. A hint; not every kernel has any."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None and nbytes >= 2 << 20:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)


class Pages(Owner):
    """`nbytes` of zeroed private memory, resident from the start so that a plan cannot be wrong later.

    Address, as an integer, for ggml and O_DIRECT; `bytes` as a NumPy view for Python. The memory stays valid until
    `close`, which the owner calls after everything that points into it is gone.
    """

    def __init__(self, nbytes: int) -> None:
        assert nbytes > 0
        self.nbytes = round_up(nbytes)
        try:
            memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise DoesNotFit(
                f"the system refused {self.nbytes} bytes of memory ({error.strerror}): give less with --dram"
            ) from error
        self.bytes: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self.address: int = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        advise_huge(self.address, self.nbytes)
        self.bytes[::PAGE] = 0  # touches every page
        self._map: mmap.mmap | None = memory

    def close(self) -> None:
        """Let go of the memory: it goes back to the system with the last NumPy view of it. Safe to call twice."""
        self.bytes = np.empty(0, np.uint8)
        self._map = None
