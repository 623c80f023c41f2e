"""ggml's own RPC server in this process: what `rpc:HOST:PORT` reaches. Knows no model.

Its protocol has no authentication and no encryption, and whoever speaks it reads and writes this process's memory.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Callable

from lever.errors import LeverError, LibraryError, UsageError
from lever.ggml import Library

POLL_S = 0.01


def address_of(host: str) -> str:
    """The IPv4 address of a name, which is what ggml's server takes. UsageError where there is none."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"{host} is no address of this machine that ggml can listen on (IPv4): {error}") from error
    return str(found[0][4][0])


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address."""
    return ipaddress.ip_address(address).is_loopback


def serve(ggml: Library, address: str, port: int, n_threads: int, ready: Callable[[], None]) -> None:
    """Compute for one client after another until SIGINT or SIGTERM ends the process, with status 0.

    `ready` is called when it takes connections. LeverError where that address and port cannot be listened on. Call it
    from the main thread. What the server prints goes to stderr.
    """
    if not ggml.has_rpc:
        raise LibraryError(f"ggml in {ggml.directory} is built without RPC (GGML_RPC=ON): there is nothing to serve")
    _try(address, port)
    os.dup2(2, 1)  # ggml's server tells of each client by printf
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))  # nothing stops the server's loop, and nothing is to be saved
    device = ctypes.c_void_p(ggml.cpu_device)
    endpoint = f"{address}:{port}".encode()
    thread = threading.Thread(
        target=lambda: ggml.backend_rpc_start_server(endpoint, None, n_threads, 1, ctypes.byref(device)),
        name="lever-rpc-server",
        daemon=True,
    )
    thread.start()
    if _takes_connections(thread, address, port):
        ready()
    thread.join()
    raise LeverError(f"ggml's RPC server at {address}:{port} has ended")


def _takes_connections(thread: threading.Thread, address: str, port: int) -> bool:
    """Wait until a server that begins takes one; False if it ends before. This one is a client that goes at once."""
    while thread.is_alive():
        try:
            socket.create_connection((address, port)).close()
        except ConnectionRefusedError:
            thread.join(POLL_S)
        else:
            return True
    return False


def _try(address: str, port: int) -> None:
    """LeverError unless the port is free: ggml's server only says that it could not."""
    try:
        with socket.create_server((address, port)):
            pass
    except OSError as error:
        raise LeverError(f"cannot listen on {address}:{port}: {error.strerror or error}") from error
