"""One command in a memory cage, for tests and benchmarks of what lever holds."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lever.cage import NoCage, cage
from tests.lacking import lacking


@dataclass(frozen=True)
class Caged:
    """How a command ended, and the most that its group held: anonymous memory, page cache, kernel memory."""

    process: subprocess.CompletedProcess[str]
    peak_bytes: int | None  # None: a v2 kernel before 5.19, which does not tell
    oom_kills: int


def run_caged(command: Sequence[str | Path], limit_bytes: int, *, timeout_s: float = 240.0) -> Caged:
    """Run a command that may hold `limit_bytes`, its stdout and stderr as text. NoCage where that cannot be done."""
    with cage(limit_bytes) as held:
        process = subprocess.run(held.command(command), capture_output=True, text=True, timeout=timeout_s, check=False)
        return Caged(process, held.peak_bytes, held.oom_kills)


def caged_or_skipped(command: Sequence[str | Path], limit_bytes: int, *, timeout_s: float = 240.0) -> Caged:
    """As `run_caged`; where there are no cages the test is skipped, but not where everything has to be proved."""
    try:
        return run_caged(command, limit_bytes, timeout_s=timeout_s)
    except NoCage as error:
        lacking(str(error))
