"""`lever rpc-serve`: this machine computes for another one's lever. Words in, a server out."""

from __future__ import annotations

from typing import Annotated

from lever.cli import options as o
from lever.cli.console import note
from lever.errors import UsageError

SERVER = "Server"
HOST, PORT = "127.0.0.1", 50052  # the port of ggml's own rpc-server


def rpc_serve(
    host: Annotated[
        str, o.flag(SERVER, "--host", value="HOST", help="Address to listen on, of this machine alone by default.")
    ] = HOST,
    port: Annotated[int, o.flag(SERVER, "--port", value="N", help="Port to listen on.", min=1, max=65535)] = PORT,
    threads: o.ThreadCount = None,
    allow_remote: Annotated[
        bool,
        o.flag(
            SERVER,
            "--allow-remote",
            value=o.SWITCH,
            help="Listen where other machines reach it, unprotected: whoever does can use this process's memory.",
        ),
    ] = False,
    quiet: o.Quiet = False,
) -> None:
    """Compute for lever elsewhere, which names this machine as --device or --draft-device rpc:HOST:PORT.

    lever rpc-serve
    lever rpc-serve --host 192.168.1.20 --allow-remote -t 8

    It is ggml's RPC server: one client at a time, no authentication, no encryption.
    Ctrl-C ends it.
    """
    from lever.ggml import load
    from lever.ggml.probe import largest_row_multiple
    from lever.loader import usable_threads
    from lever.rpc_server import address_of, is_loopback, serve

    address = address_of(host)
    if not is_loopback(address):
        if not allow_remote:
            raise UsageError(
                f"{host} is reached by other machines, and the protocol protects nothing: "
                "say --allow-remote if all of them may use this process's memory"
            )
        note(
            "warning: no authentication and no encryption: anybody who reaches "
            f"{address}:{port} can read and write this process's memory"
        )
    n_threads = usable_threads(o.thread_count(threads), largest_row_multiple(load()))
    serve(load(), address, port, n_threads, lambda: None if quiet else note(f"rpc:{address}:{port} computes"))
