"""Listens, serves until somebody has enough, and gives everything back. Knows no endpoint."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from lever.errors import LeverError
from lever.server.worker import Worker

LAST_WORDS_S = 3.0  # for replies to end in, before connections are cut
FAILED_S = 1.0  # for which a failure to load is told over HTTP
MOST_MS = 2**31 - 1  # that a socket's timeout may be


def listen(host: str, port: int) -> socket.socket:
    """A socket there; port 0 is any. LeverError if it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise LeverError(f"cannot listen on {host}: {error.strerror or error}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise LeverError(f"cannot listen on {host}:{port}: {error.strerror}; choose another one with --port") from error
    return listening


def url_of(listening: socket.socket) -> str:
    """Where it can be reached."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: Starlette, worker: Worker, listening: socket.socket, on_listening: Callable[[], None], *, timeout_s: float
) -> int | None:
    """Until a signal, whose number is returned, or until the worker has failed: then its error is raised."""
    server = Server(app, worker, timeout_s=timeout_s)
    with _signals(server.handle_exit):
        asyncio.run(server.until_the_end(listening, on_listening))
    if worker.error is not None:
        raise worker.error
    return server.signal


@contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM go to the handler. Where one is ignored it stays so: there it is meant for others."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, other in before.items():
        if other != signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, other in before.items():
            signal.signal(number, other)


class Connection(H11Protocol):
    """Given up when its client takes longer than `timeout_s` to say what it wants, or takes nothing that it is sent."""

    def __init__(self, *args: Any, timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timeout_s = timeout_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        # Left to the kernel: it knows what was taken, also of what waits in its buffers after the reply is complete.
        milliseconds = int(min(1e3 * self._timeout_s, MOST_MS))
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._wait_for_headers()

    def _wait_for_headers(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self._timeout_s, self.timeout_keep_alive_handler)


class Server(uvicorn.Server):
    """An application and the worker behind it."""

    def __init__(self, app: Starlette, worker: Worker, *, timeout_s: float) -> None:
        """`timeout_s`: as `Connection` has it."""
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Connection, timeout_s=timeout_s),  # type: ignore[arg-type]  # made like a class
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",  # what strangers send is not worth a line each
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=int(LAST_WORDS_S),
            )
        )
        self.signal: int | None = None
        self._worker = worker

    async def until_the_end(self, listening: socket.socket, on_listening: Callable[[], None]) -> None:
        """Serve until `stop`, a signal, or a model that could not be loaded; the worker has ended then."""
        self._worker.start()
        watching = asyncio.ensure_future(self._watch(on_listening))
        try:
            await self.serve([listening])
        finally:
            watching.cancel()
            # Jobs hand their events to this loop: it has to be there until they have ended.
            self._worker.stop()
            await asyncio.to_thread(self._worker.join)

    async def _watch(self, on_listening: Callable[[], None]) -> None:
        while not self.started:
            await asyncio.sleep(0.01)
        on_listening()
        while self._worker.state != "failed":
            await asyncio.sleep(0.1)
        await asyncio.sleep(FAILED_S)
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are taken for longer than this: until the model is given back."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # as signal has it
        """End answers within a layer, and then the server; the second time at once."""
        if self.signal is not None:
            os._exit(128 + sig)
        self.signal = sig
        self.stop()

    def stop(self) -> None:
        """From any thread."""
        self.should_exit = True
        self._worker.stop()
