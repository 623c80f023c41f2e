"""`lever serve` inside this process, on a real socket, with storage that a test may hold up."""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lever.llm import LLM
from lever.loader import ModelSettings
from lever.opening import Silent, Told
from lever.server.app import Gates, make_app
from lever.server.guard import allowed_hosts
from lever.server.listen import Server, listen
from lever.server.service import Service
from lever.server.worker import Served, Worker
from lever.weights.reader import DirectFile
from tests.fakes import FakeDevice, wait_until

SETTINGS = ModelSettings(dram=4 << 30, pin_percent=0, grammars=True)
GATES = Gates(hosts=allowed_hosts("127.0.0.1"))


@dataclass
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.body)
        return document

    @property
    def error(self) -> dict[str, Any]:
        """What it says that is wrong; every error has this shape."""
        error: dict[str, Any] = self.json["error"]
        assert error.keys() >= {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[dict[str, Any]]:
        """The documents of a stream, without its end."""
        blocks = self.body.decode().split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""]
        return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2] if not block.startswith(":")]


@dataclass
class Serving:
    """A server that listens, and the model behind it."""

    port: int
    worker: Worker
    device: FakeDevice
    server: Server
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def llm(self) -> LLM:
        return self.worker.served.llm

    @property
    def given_up(self) -> bool:
        """Whether what runs has been given up."""
        running = self.worker._running
        return running is not None and running.cancelled

    def ask(self, path: str, body: Any = None, *, method: str | None = None, **headers: str) -> Reply:
        """One request of its own connection: a GET without a body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            raw = body if isinstance(body, bytes) or body is None else json.dumps(body)
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method or ("GET" if body is None else "POST"), path, raw, named)
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read())
        finally:
            connection.close()

    def chat(self, text: str = "Hello", **more: Any) -> Reply:
        return self.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more})

    def asked(self, text: str = "Hello", **more: Any) -> AbstractContextManager[socket.socket]:
        """A chat that is asked for and not read."""
        return self.sent("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more})

    @contextmanager
    def sent(self, path: str, body: Any) -> Iterator[socket.socket]:
        """A request whose reply is not read."""
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(head.encode() + raw)
            yield connection

    def wait_for(self, *, running: bool, waiting: int = 0) -> None:
        """Until the worker is so busy."""
        wait_until(lambda: (self.worker.running, self.worker.waiting) == (running, waiting), seconds=30)


@contextmanager
def serving(
    path: Path,
    *,
    settings: ModelSettings = SETTINGS,
    queue: int = 8,
    gates: Gates = GATES,
    ping_s: float = 15.0,
    timeout_s: float = 60.0,
    metrics: bool = True,
    alias: str | None = "tiny",
    device: FakeDevice | None = None,
    ready: bool = True,
    send_buffer: int | None = None,
    **more: Any,
) -> Iterator[Serving]:
    """A model that is served; `more` is what LLM takes. Ends with the block.

    `send_buffer`: bytes that the kernel holds of what a client has not taken; None: as it likes.
    """
    device = device or FakeDevice()
    on_device = pytest.MonkeyPatch()
    on_device.setattr("lever.loader.DirectFile", functools.partial(DirectFile, read=device))

    def open_model(told: Told) -> Served:
        told.start(None, "loading")
        llm = LLM(path, settings, **more)
        llm.load()
        return Served(llm)

    worker = Worker(open_model, Silent(), n_waiting=queue)
    service = Service(worker, tuple(name for name in (alias, path.name) if name), ping_s, timeout_s)
    server = Server(make_app(service, gates, with_metrics=metrics), worker, timeout_s=timeout_s)
    listening = listen("127.0.0.1", 0)
    if send_buffer is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port = listening.getsockname()[1]
    up = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(server.until_the_end(listening, up.set)))
    thread.start()
    try:
        assert up.wait(30)
        if ready:
            wait_until(lambda: worker.state != "loading", seconds=30)
        yield Serving(port, worker, device, server, thread)
    finally:
        device.gate.set()
        server.stop()
        thread.join(30)
        service.close()
        on_device.undo()
        assert not thread.is_alive()


def with_keys(*keys: str) -> Gates:
    return replace(GATES, keys=keys)


def read_until(connection: socket.socket, enough: Callable[[bytes], bool], raw: bytes = b"") -> bytes:
    """What comes until it is enough, with what is read already."""
    while not enough(raw):
        part = connection.recv(1 << 16)
        assert part, raw
        raw += part
    return raw
