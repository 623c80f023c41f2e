"""What all endpoints know, and the whole answers that each API gives in its own shape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lever.memory import release_unused
from lever.server.about import digest
from lever.server.refusals import api_error
from lever.server.streams import ClientGone, Inbox, unless_gone
from lever.server.worker import Done, Failed, Job, Piece, Worker

T = TypeVar("T")
NOBODY_READS = 499  # as nginx calls it: never sent


@dataclass(frozen=True)
class Service:
    """The worker, and what is said of its model."""

    worker: Worker
    names: tuple[str, ...]  # of the model; the first is the one that replies have
    ping_s: float = 15.0
    timeout_s: float = 600.0
    created: int = field(default_factory=lambda: int(time.time()))
    # Templates and tokenizers take their time with long texts: beside the event loop, and one by one.
    _encoding: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "lever-encode"))

    @cached_property
    def digest(self) -> str:
        """Of the model, once it is ready: the same for as long as it is served."""
        return digest(self.worker.served.llm)

    @property
    def fingerprint(self) -> str:
        """A short form of it."""
        return f"fp_{self.digest[:12]}"

    async def aside(self, work: Callable[[], T]) -> T:
        """Something that takes its time."""
        return await asyncio.get_running_loop().run_in_executor(self._encoding, _tidily, work)

    def close(self) -> None:
        """Give its thread back."""
        self._encoding.shutdown(wait=True)


def _tidily(work: Callable[[], T]) -> T:
    """A text is encoded with 400 bytes for each token: of one that is far too long, that must not stay ours."""
    try:
        return work()
    finally:
        release_unused()


class Whole(Protocol):
    """How a whole answer looks."""

    def whole(self, pieces: Sequence[Piece], done: Done) -> msgspec.Struct:
        """All of it."""


def service_of(http: Request) -> Service:
    """The one behind the application."""
    service: Service = http.app.state.service
    return service


def reply(document: msgspec.Struct | dict[str, Any]) -> Response:
    """JSON."""
    return Response(msgspec.json.encode(document), media_type="application/json")


async def whole_reply(http: Request, job: Job, inbox: Inbox, shape: Whole) -> Response:
    """The answer in one piece. The job is given up when the client goes away. Its error is raised as ApiError."""
    try:
        document = await unless_gone(http.receive, _whole(inbox, shape))
    except ClientGone:
        return Response(status_code=NOBODY_READS)
    finally:
        job.cancel()
    return reply(document)


async def _whole(inbox: Inbox, shape: Whole) -> msgspec.Struct:
    pieces: list[Piece] = []
    while True:
        event = await inbox.get()
        if isinstance(event, Piece):
            pieces.append(event)
        elif isinstance(event, Done):
            return shape.whole(pieces, event)
        elif isinstance(event, Failed):
            raise api_error(event.error) from event.error
