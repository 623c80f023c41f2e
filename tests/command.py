"""The command in processes of its own, as users start it, and Ctrl-C; on a storage device that a test describes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
SOURCES = os.pathsep.join((str(ROOT / "src"), str(ROOT)))  # those beside these tests, whatever is installed
COMMAND = [str(Path(sys.executable).with_name("lever"))]

# The command on a storage device that a test describes, as the arguments of a FakeDevice.
ON_A_DEVICE = """
import functools, sys
import lever.loader
from lever.cli import main
from tests.fakes import FakeDevice
device = FakeDevice(**eval(sys.argv.pop(1)))
lever.loader.DirectFile = functools.partial(lever.loader.DirectFile, read=device)
main()
"""


class Lever:
    """Runs the command: words, what stdin holds, variables."""

    def __init__(self, home: Path, bytecode: Path) -> None:
        theirs = ("LEVER_", "FORCE_COLOR", "COLUMNS", "PYTHONDONTWRITEBYTECODE")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
        self.environment |= {"LEVER_HOME": str(home), "LEVER_THREADS": "1", "PYTHONPATH": SOURCES}
        self.environment["PYTHONPYCACHEPREFIX"] = str(bytecode)  # compiled once, not for each process

    def __call__(
        self,
        *words: str | bytes | Path,
        stdin: bytes = b"",
        device: dict[str, Any] | None = None,
        before: Callable[[], None] | None = None,
        **more: str,
    ) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(
            [*self._command(device), *words],
            input=stdin,
            env=self.environment | more,
            capture_output=True,
            timeout=120,
            check=False,
            preexec_fn=before,
        )
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        return done

    def json(self, *words: str | bytes | Path, **more: Any) -> dict[str, Any]:
        return self.json_of(0, *words, **more)

    def json_of(self, code: int, *words: str | bytes | Path, **more: Any) -> dict[str, Any]:
        done = self(*words, "--json", **more)
        assert done.returncode == code, done.stderr.decode()
        assert done.stdout.count(b"\n") == 1
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    @contextmanager
    def started(
        self,
        *words: str | Path,
        device: dict[str, Any] | None = None,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """The command while it runs."""
        process = subprocess.Popen(
            [*self._command(device), *words],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=self.environment,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # it may be ignored around the tests
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    @staticmethod
    def _command(device: dict[str, Any] | None) -> list[str]:
        return COMMAND if device is None else [sys.executable, "-c", ON_A_DEVICE, repr(device)]


def interrupt(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Press Ctrl-C; what came on stdout and stderr until the end, which must come soon."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert b"Traceback" not in err, err.decode()
    return out or b"", err or b""


def one_line(stderr: bytes) -> str:
    text = stderr.decode()
    assert text.count("\n") == 1, text
    assert text.startswith("lever: ")
    return text


def notes_until(process: subprocess.Popen[bytes], text: str) -> None:
    """Read stderr until a line has `text`."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line.decode():
            return
    raise AssertionError(f"it ended before {text!r}")
