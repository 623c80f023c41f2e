"""Memory: amounts in words, what the machine has left, and the ledger of a budget. Allocates nothing."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from lever.errors import DoesNotFit, StorageError, UsageError
from lever.linux import ROOT, cgroup_dirs, is_android, read_text

MIB = 1024**2
AUTO_PERCENT = 75
AUTO_PERCENT_ANDROID = 40  # Android ends apps that hold about half of the memory
WAYS_TO_FIT = (
    "give more with --dram",
    "shorten the context with -c",
    "read the prompt in smaller parts with -b",
)

_STATUS = Path("/proc/self/status")
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(%|[kmgt]?(?:ib|b)?)")


def parse_size(text: str, total: int | None = None) -> int:
    """Bytes meant by `900MiB`, `2G`, `60%`, `auto` or a plain number of bytes.

    K, M, G, T and KiB .. TiB count in 1024s ("900M" is 900 MiB, as in llama.cpp and the cgroup tools), KB ..
    TB in 1000s. Case does not matter. A percentage and `auto` are shares of `total`, which is the available
    memory if not given: `auto` takes 75 % of it, on Android 40 %.
    """
    words = text.strip().lower()
    if words == "auto":
        words = f"{AUTO_PERCENT_ANDROID if is_android() else AUTO_PERCENT}%"
    match = _SIZE.fullmatch(words)
    if match is None:
        raise UsageError(f"{text!r} is not an amount of memory: write it like 900MiB, 2G, 60% or auto")
    number, unit = Fraction(match[1]), match[2]
    if unit == "%" and number > 100:
        raise UsageError(f"{text!r} is more memory than there is: give at most 100%")
    nbytes = int(number * _unit_bytes(unit, total))
    if nbytes == 0:
        raise UsageError(f"{text!r} is no memory at all: write it like 900MiB, 2G, 60% or auto")
    return nbytes


def _unit_bytes(unit: str, total: int | None) -> Fraction:
    if unit == "%":
        return Fraction(available_memory().available if total is None else total, 100)
    if unit in ("", "b"):
        return Fraction(1)
    base = 1000 if unit.endswith("b") and not unit.endswith("ib") else 1024
    return Fraction(base ** ("kmgt".index(unit[0]) + 1))


def format_size(nbytes: int) -> str:
    """About three digits in a unit of 1024s: 512 B, 90 MiB, 1.54 GiB."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 999.5:
            break
        value, unit = value / 1024, larger
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    number = f"{value:.{digits}f}"
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Bytes; the control group is the one of the process's own and its parents that leaves the least."""

    mem_total: int
    mem_available: int
    cgroup_limit: int | None  # None: no group limits this process
    cgroup_used: int  # what the group holds and cannot give back, page cache left out

    @property
    def available(self) -> int:
        """What may still be allocated before the machine or a control group is out of memory."""
        if self.cgroup_limit is None:
            return self.mem_available
        return max(0, min(self.mem_available, self.cgroup_limit - self.cgroup_used))


def available_memory(root: Path = ROOT) -> MemoryLimits:
    """Memory of the machine (/proc/meminfo) and the tightest control group, v1 or v2, around this process.

    Raises StorageError when /proc/meminfo cannot be read. A control group whose files cannot be read counts
    as no limit: Android hides them from apps.
    """
    total, available = (_kilobytes(root / "proc/meminfo", name) for name in ("MemTotal", "MemAvailable"))
    groups = [group for path in cgroup_dirs("memory", root) if (group := _group(path)) is not None]
    # v1 says "no limit" by a huge number; a limit above the machine's memory is none either way.
    limited = [(limit, used) for limit, used in groups if limit < total]
    if not limited:
        return MemoryLimits(total, available, None, 0)
    limit, used = min(limited, key=lambda group: group[0] - group[1])
    return MemoryLimits(total, available, limit, used)


def _group(directory: Path) -> tuple[int, int] | None:
    """Limit of one control group and what it holds for good; None without a limit.

    memory.high counts as a limit: above it the kernel slows the process down until nothing moves.
    """
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = [limit for name in names if (limit := _number(directory / name)) is not None]
    if not limits:
        return None
    used = _number(directory / "memory.current") or _number(directory / "memory.usage_in_bytes") or 0
    return min(limits), max(0, used - _reclaimable(directory))


def _number(path: Path) -> int | None:
    text = (read_text(path) or "").strip()
    return int(text) if text.isdigit() else None  # v2 writes "max" for no limit


def _reclaimable(directory: Path) -> int:
    """Bytes the kernel takes back under pressure; v1 calls the figure of the whole subtree total_*."""
    stat = dict(line.split() for line in (read_text(directory / "memory.stat") or "").splitlines())
    kinds = ("active_file", "inactive_file", "slab_reclaimable")
    return sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in kinds)


def _kilobytes(path: Path, name: str) -> int:
    """Bytes of a `Name:  123 kB` line."""
    for line in (read_text(path) or "").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.removesuffix("kB")) * 1024
    raise StorageError(f"{path} does not tell {name}: give --dram as a fixed amount, such as 900MiB")


def rss_bytes(status: Path = _STATUS) -> int:
    """Memory that this process holds now."""
    return _kilobytes(status, "VmRSS")


def peak_rss_bytes(status: Path = _STATUS) -> int:
    """The most that this process has held. Not ru_maxrss, which starts at the parent's peak after an exec."""
    return _kilobytes(status, "VmHWM")


def release_unused() -> None:
    """Give back to the system what the C library keeps of freed memory, so that it does not count as in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, bionic and musl keep less
    if trim is not None:
        trim(0)


def drop_page_cache(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Give back what is cached of a file, 0 bytes meaning up to its end: in a memory cage it counts as ours."""
    _advise(fd, "POSIX_FADV_DONTNEED", offset, nbytes)


def expect_sequential_reads(fd: int) -> None:
    """Let the kernel read further ahead in this file than it would."""
    _advise(fd, "POSIX_FADV_SEQUENTIAL")


def _advise(fd: int, advice: str, offset: int = 0, nbytes: int = 0) -> None:
    if hasattr(os, "posix_fadvise"):  # not on every platform; only a hint where it is
        os.posix_fadvise(fd, offset, nbytes, getattr(os, advice))


def does_not_fit(parts: Mapping[str, int], budget: int, hints: Sequence[str] = WAYS_TO_FIT) -> DoesNotFit:
    """The error for parts (bytes by name) that together exceed the budget."""
    need, have = -(-sum(parts.values()) // MIB), budget // MIB  # rounded apart, so that they never read equal
    listed = ", ".join(f"{part} {format_size(nbytes)}" for part, nbytes in parts.items() if nbytes)
    ways = ", ".join(hints[:-1]) + (", or " if len(hints) > 1 else "") + hints[-1]
    return DoesNotFit(f"needs {need} MiB but the budget is {have} MiB: {listed}; {ways}", parts)


class Ledger:
    """Who holds how much of a budget. Owners reserve before they allocate and release after they free."""

    def __init__(self, budget: int, hints: Sequence[str] = WAYS_TO_FIT) -> None:
        self.budget = budget
        self._hints = hints
        self._parts: dict[str, int] = {}
        self._lock = threading.Lock()

    def reserve(self, part: str, nbytes: int) -> None:
        """Book bytes for a part; DoesNotFit, and nothing booked, when they exceed what is free."""
        assert nbytes >= 0
        with self._lock:
            wanted = {**self._parts, part: self._parts.get(part, 0) + nbytes}
            if sum(wanted.values()) > self.budget:
                raise does_not_fit(wanted, self.budget, self._hints)
            self._parts = wanted

    def release(self, part: str, nbytes: int) -> None:
        with self._lock:
            left = self._parts.get(part, 0) - nbytes
            assert nbytes >= 0
            assert left >= 0, f"{part} gives back more than it reserved"
            self._parts = {**self._parts, part: left}

    @contextmanager
    def holding(self, part: str, nbytes: int) -> Iterator[None]:
        """Reserve for as long as the block runs."""
        self.reserve(part, nbytes)
        try:
            yield
        finally:
            self.release(part, nbytes)

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes by part, in the order in which the parts first came."""
        return dict(self._parts)

    @property
    def used(self) -> int:
        return sum(self._parts.values())

    @property
    def free(self) -> int:
        return self.budget - self.used
