"""What the user sees beside the text: notes, errors and progress on stderr. Bars only on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False)

QUIET_S = 5.0  # between lines of progress where there is no terminal


def note(text: str) -> None:
    """One line on stderr."""
    stderr.print(text, markup=False, style="dim", soft_wrap=True)


def complain(text: str) -> None:
    """One line that says what went wrong."""
    stderr.print("lever: ", end="", style="bold red")
    stderr.print(text, markup=False, soft_wrap=True)


class Bar:
    """A bar on a terminal; elsewhere a line every few seconds, so that a log shows life. One at a time.

    Has the shape of `lever.models.Progress`. Nothing is shown of what takes less than about a second.
    """

    def __init__(self, unit: str = "bytes") -> None:
        self._unit = unit
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._done, self._total, self._what = 0, 0, ""
        self._last_line = 0.0

    def start(self, total: int, what: str) -> None:
        """Begin a piece of work of `total` units."""
        self.finish()
        self._done, self._total, self._what, self._last_line = 0, total, what, time.monotonic()
        if stderr.is_terminal:
            count = [DownloadColumn(binary_units=True)] if self._unit == "bytes" else []
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                *count,
                TimeRemainingColumn(),
                console=stderr,
                transient=True,
            )
            self._task = self._progress.add_task(what, total=total)
            self._progress.start()

    def advance(self, n: int) -> None:
        """So many units more are done."""
        self._done += n
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, n)
        elif time.monotonic() - self._last_line > QUIET_S:
            self._last_line = time.monotonic()
            note(f"{self._what}: {100 * self._done // max(self._total, 1)} %")

    def finish(self) -> None:
        """Take the bar away. Safe to call without one."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


@contextmanager
def bar(unit: str = "bytes") -> Iterator[Bar]:
    """A bar that is gone afterwards, whatever happens."""
    shown = Bar(unit)
    try:
        yield shown
    finally:
        shown.finish()


def read_stdin() -> str:
    """Everything on stdin; invalid bytes are kept as surrogate escapes."""
    return sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
