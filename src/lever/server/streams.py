"""From the engine's thread to a client: events in the event loop, bytes on the wire, clients that go away.

Knows bytes and events, not what a reply looks like.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lever.server.worker import Done, Event, Failed, Job

T = TypeVar("T")
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """Nobody is there to be answered."""


class Inbox:
    """A job's events, for the event loop in which this is made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events = asyncio.Queue[Event]()

    def put(self, event: Event) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def get(self) -> Event:
        """The next one, waited for."""
        return await self._events.get()


def data(document: msgspec.Struct) -> bytes:
    """An event without a name."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def error(document: msgspec.Struct) -> bytes:
    """The event that ends a stream which went wrong."""
    return b"event: error\n" + data(document)


def line(document: msgspec.Struct) -> bytes:
    """A document of a stream of them."""
    return msgspec.json.encode(document) + b"\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. ClientGone, with the work cancelled, when the client goes away before."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientGone
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # the one that counts was raised above


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Stream(Response):
    """A job's events as they come. The job is given up when the client goes away."""

    def __init__(
        self,
        media_type: str,
        job: Job,
        inbox: Inbox,
        render: Callable[[Event], Iterable[bytes]],
        beginning: bytes,
        *,
        ping: Callable[[], bytes],
        ping_s: float,
    ) -> None:
        """`render` makes of an event what is sent; `ping` says that it lives, when nothing was sent for `ping_s`."""
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._job, self._inbox, self._render = job, inbox, render
        self._beginning, self._ping, self._ping_s = beginning, ping, ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # as ASGI has it
        try:
            await unless_gone(receive, self._write(send))
        except ClientGone:
            pass  # nobody to tell
        finally:
            self._job.cancel()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._beginning, "more_body": True})
        event: Event | None = None
        quiet_until = self._now() + self._ping_s
        while not isinstance(event, Done | Failed):
            try:
                async with asyncio.timeout_at(quiet_until):
                    event = await self._inbox.get()
                chunk = b"".join(self._render(event))
            except TimeoutError:
                chunk = self._ping()
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            quiet_until = self._now() + self._ping_s
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
