"""A memory cage: one command in a control group of its own, with a limit that counts page cache in and swap out.

Works with control groups v1, v2 and the hybrid of both; needs root. Knows nothing of lever.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

_NUMBERS = count()


class NoCage(Exception):
    """This machine does not let us make a control group with a memory limit; the message says why."""


@dataclass(frozen=True)
class Caged:
    """How a command ended, and the most that its group held: anonymous memory, page cache, kernel memory."""

    process: subprocess.CompletedProcess[str]
    peak_bytes: int | None  # None: a v2 kernel before 5.19, which does not tell
    oom_kills: int


@dataclass(frozen=True)
class _Version:
    """Names of the files of one version of control groups."""

    limit: str
    swap: str  # not there on a kernel without swap accounting
    swap_counts_memory: bool  # whether the swap limit is one of memory and swap together
    peak: str
    kills: str  # a file with a line "oom_kill N"


_V1 = _Version(
    "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", True, "memory.max_usage_in_bytes", "memory.oom_control"
)
_V2 = _Version("memory.max", "memory.swap.max", False, "memory.peak", "memory.events")


def run_caged(command: Sequence[str | Path], limit_bytes: int, *, timeout_s: float = 240.0) -> Caged:
    """Run a command that may hold `limit_bytes`, its stdout and stderr as text. NoCage where that cannot be done."""
    with _group(limit_bytes) as (group, version):
        # The shell enters the group and becomes the command, so that every page of it is charged there.
        enter = 'echo $$ > "$0" && exec "$@"'
        process = subprocess.run(
            ["/bin/sh", "-c", enter, group / "cgroup.procs", *command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        peak = group / version.peak
        kills = dict(line.split() for line in (group / version.kills).read_text().splitlines())
        return Caged(process, int(peak.read_text()) if peak.exists() else None, int(kills.get("oom_kill", 0)))


def caged_or_skipped(command: Sequence[str | Path], limit_bytes: int, *, timeout_s: float = 240.0) -> Caged:
    """As `run_caged`; where there are no cages the test is skipped, but not where everything has to be proved."""
    try:
        return run_caged(command, limit_bytes, timeout_s=timeout_s)
    except NoCage as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@contextmanager
def _group(limit_bytes: int) -> Iterator[tuple[Path, _Version]]:
    top, version = _hierarchy()
    group = top / f"lever-cage-{os.getpid()}-{next(_NUMBERS)}"
    try:
        group.mkdir()
    except OSError as error:
        raise NoCage(f"{group} cannot be made: {error.strerror}; root may") from error
    try:
        _limit(group, version, limit_bytes)
        yield group, version
    finally:
        _remove(group)


def _hierarchy() -> tuple[Path, _Version]:
    """Where groups with a memory limit are made."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for _, point, kind, options, *_ in mounts:
        if kind == "cgroup" and "memory" in options.split(","):
            return Path(point), _V1
    for _, point, kind, *_ in mounts:
        if kind == "cgroup2" and "memory" in (Path(point) / "cgroup.controllers").read_text().split():
            return _delegating(Path(point)), _V2
    raise NoCage("no control groups with a memory controller are mounted")


def _delegating(top: Path) -> Path:
    """A v2 group whose children have the memory controller."""
    control = top / "cgroup.subtree_control"
    if "memory" not in control.read_text().split():
        try:
            control.write_text("+memory")
        except OSError as error:
            raise NoCage(f"{control} does not take +memory: {error.strerror}") from error
    return top


def _limit(group: Path, version: _Version, limit_bytes: int) -> None:
    try:
        (group / version.limit).write_text(str(limit_bytes))
        if (group / version.swap).exists():
            (group / version.swap).write_text(str(limit_bytes if version.swap_counts_memory else 0))
    except OSError as error:
        raise NoCage(f"{group} takes no limit: {error.strerror}") from error


def _remove(group: Path) -> None:
    """A group can go when its last process is gone, which the kernel may notice a little late."""
    for _ in range(100):
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.02)
    group.rmdir()
