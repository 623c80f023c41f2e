"""What the user sees: answers on stdout, notes, errors and progress on stderr. Bars only on a terminal."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from typing import TYPE_CHECKING

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from lever.errors import StorageError

if TYPE_CHECKING:  # takes a while to import, and is not needed without a terminal
    from rich.progress import Progress

stderr = Console(stderr=True, highlight=False, emoji=False)
stdout = Console()  # asked about the terminal only: `write` writes

NOBODY_READS = 141  # what a shell makes of a program whose reader went away (128 + SIGPIPE)
FIRST_LINE_S, LINES_APART_S = 5.0, 60.0  # without a terminal: lines come after 5, 10, 20 s ... and then every minute
UNBROKEN = 1 << 14  # columns
# What a terminal obeys, tabs and line breaks excepted: C0, DEL, C1, and what overrides the direction of text.
MOVES = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069]")


def write(text: str) -> None:
    """Text on stdout, at once. StorageError when it cannot be written; ends quietly when nobody reads it."""
    if sys.stdout is None:
        raise StorageError("stdout is closed: give the answer a place to go")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would be tried again, and complained about, at the end of Python.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(NOBODY_READS) from None
        raise StorageError(f"cannot write to stdout: {error.strerror}") from error


def write_text(text: str) -> None:
    """Text of a model on stdout, at once; nothing in it moves the cursor of a terminal or turns its lines around."""
    write(MOVES.sub(lambda found: _spelled(found[0]), text) if sys.stdout is not None and sys.stdout.isatty() else text)


def write_json(document: object) -> None:
    """One JSON document on one line; bytes of a path that are not UTF-8 as JSON's own escapes."""
    write(json.dumps(document, ensure_ascii=False).encode("utf-8", "backslashreplace").decode() + "\n")


def write_table(table: RenderableType, *, wrap: bool = True) -> None:
    """A table; broken to the width of a terminal if there is one and `wrap`."""
    width = stdout.width if wrap and stdout.is_terminal else UNBROKEN
    paper = StringIO()
    Console(file=paper, width=width, force_terminal=stdout.is_terminal, highlight=False, emoji=False).print(table)
    write("".join(f"{line.rstrip()}\n" for line in paper.getvalue().splitlines()))


def printable(text: str) -> str:
    """Text from a file or a user with its control characters spelled out: one line, and harmless to a terminal."""
    return "".join(c if c.isprintable() else _spelled(c) for c in text)


def _spelled(character: str) -> str:
    return character.encode("unicode_escape").decode()


def note(text: str) -> None:
    """One line on stderr; a terminal gets it broken between words."""
    _say(Text(printable(text), "dim"))


def complain(text: str) -> None:
    """One line that says what went wrong."""
    _say(Text.assemble(("lever: ", "bold red"), printable(text)))


def _say(text: Text) -> None:
    with suppress(OSError):  # where stderr cannot be written, there is nobody to tell
        stderr.print(text, soft_wrap=not on_terminal())


def on_terminal() -> bool:
    """Whether stderr is a terminal that can move its cursor; colours may be forced, bars are not."""
    return sys.stderr is not None and sys.stderr.isatty() and not stderr.is_dumb_terminal


def same_place() -> bool:
    """Whether stdout and stderr end in the same terminal, file or pipe, where one would tear the other."""
    if sys.stdout is None or sys.stderr is None:
        return False
    return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())


class NoteHandler(logging.Handler):
    """Log records as notes, so that they do not tear a bar; what nobody foresaw with the way that led there."""

    def emit(self, record: logging.LogRecord) -> None:
        note(f"lever: {record.getMessage().rstrip()}")
        if record.exc_info is not None:
            for line in "".join(traceback.format_exception(record.exc_info[1])).splitlines():
                note(line)


class Bar:
    """A bar on a terminal; elsewhere a line now and then, so that a log shows life. One job at a time.

    Has the shape of `lever.opening.Told`.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.jobs = 0  # begun so far
        self._quiet = quiet
        self._live: Progress | None = None
        self._what, self._total, self._done = "", 0, 0
        self._started, self._next_line = 0.0, math.inf

    def start(self, total: int | None, what: str) -> None:
        """Begin a job of `total` bytes; 0: of unknown size. None: a short one, not worth a line in a log."""
        self.finish()
        self.jobs += 1
        self._what, self._total, self._done = what, total or 0, 0
        self._started = time.monotonic()
        self._next_line = self._started + FIRST_LINE_S
        if self._quiet:
            return
        if on_terminal():
            self._live = _progress(measured=bool(total))
            self._live.add_task(printable(what), total=total or None)
            self._live.start()
        elif total == 0:
            note(what)

    def advance(self, n: int) -> None:
        """So many bytes more are done."""
        self._done += n
        if self._live is not None:
            self._live.advance(self._live.task_ids[0], n)
        elif self._total:
            self._line(f"{self._what}: {100 * self._done // self._total} %")

    def tell(self, text: str) -> None:
        """Say how far a job is that has no bytes to count."""
        if self._live is not None:
            self._live.update(self._live.task_ids[0], description=printable(text))
        else:
            self._line(text)

    def note(self, text: str) -> None:
        """One line of its own, if anything is to be shown."""
        if not self._quiet:
            note(text)

    def finish(self) -> None:
        """Take the bar away, and say no more. Safe to call without one."""
        self._next_line = math.inf
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, text: str) -> None:
        now = time.monotonic()
        if not self._quiet and now >= self._next_line:
            self._next_line = now + min(now - self._started, LINES_APART_S)
            note(text)


def _progress(*, measured: bool) -> Progress:
    """A line that is gone afterwards: with a bar, or with a sign of life alone."""
    from rich import progress as p
    from rich.table import Column

    name = p.TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns: list[p.ProgressColumn] = [p.SpinnerColumn(), name, p.TimeElapsedColumn()]
    if measured:
        columns = [name, p.BarColumn(bar_width=None), p.TaskProgressColumn(), p.DownloadColumn(binary_units=True)]
        columns += [p.TransferSpeedColumn(), p.TimeRemainingColumn()]
    return p.Progress(
        *columns,
        console=stderr,
        transient=True,
        expand=measured,
        redirect_stdout=False,  # it would take the answer to stderr
        redirect_stderr=False,
    )


@contextmanager
def bar(*, quiet: bool = False) -> Iterator[Bar]:
    """A bar that is gone afterwards, whatever happens."""
    shown = Bar(quiet=quiet)
    try:
        yield shown
    finally:
        shown.finish()


def read_stdin() -> str:
    """Everything on stdin; invalid bytes are kept as surrogate escapes."""
    if sys.stdin is None:
        raise StorageError("stdin is closed: give the prompt with -p or -f")
    if sys.stdin.isatty():
        note("type the prompt, then Ctrl-D on a line of its own")
    try:
        return sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise StorageError(f"cannot read the prompt from stdin: {error.strerror}") from error
