"""A memory cage: a control group with a limit that counts page cache in and swap out. Runs nothing itself.

Works with control groups v1, v2 and the hybrid of both; needs root.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from lever.errors import LeverError

_NUMBERS = count()


class NoCage(LeverError):
    """This machine does not let us make a control group with a memory limit; the message says why."""


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


@dataclass(frozen=True, slots=True)
class Cage:
    """A control group that processes may enter."""

    directory: Path
    _version: _Version

    def command(self, command: Sequence[str | Path]) -> list[str | Path]:
        """The command that runs another one in the cage."""
        # The shell enters the group and becomes the command, so that every page of it is charged there.
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', self.directory / "cgroup.procs", *command]

    @property
    def peak_bytes(self) -> int | None:
        """The most it has held: anonymous memory, page cache, kernel memory. None: v2 before 5.19 does not tell."""
        peak = self.directory / self._version.peak
        return int(peak.read_text()) if peak.exists() else None

    @property
    def oom_kills(self) -> int:
        """How many processes were ended for want of memory."""
        kills = dict(line.split() for line in (self.directory / self._version.kills).read_text().splitlines())
        return int(kills.get("oom_kill", 0))


@contextmanager
def cage(limit_bytes: int) -> Iterator[Cage]:
    """A cage while the block runs; all that enters it must have ended by then. NoCage where that cannot be done."""
    top, version = _hierarchy()
    group = top / f"lever-cage-{os.getpid()}-{next(_NUMBERS)}"
    try:
        group.mkdir()
    except OSError as error:
        raise NoCage(f"{group} cannot be made: {error.strerror}; root may") from error
    try:
        _limit(group, version, limit_bytes)
        yield Cage(group, version)
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
