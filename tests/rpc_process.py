"""`lever rpc-serve` in a process of its own, on a port of loopback that is free; and a device behind it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.command import SOURCES, notes_until

MAIN = "from lever.cli import main; main()"


@dataclass
class RPCServer:
    """Where it listens, and the process."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def name(self) -> str:
        return f"rpc:127.0.0.1:{self.port}"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


@contextmanager
def rpc_server(n_threads: int = 1) -> Iterator[RPCServer]:
    """A server that has said that it is ready, killed at the end."""
    port = free_port()
    words = ["rpc-serve", "--port", str(port), "-t", str(n_threads)]
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": SOURCES},
    )
    try:
        notes_until(process, "computes")
        yield RPCServer(port, process)
    finally:
        process.kill()
        process.communicate()
