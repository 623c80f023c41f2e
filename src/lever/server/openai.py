"""OpenAI's API: chats, and texts that go on. From a request to a job, from its events to a reply."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from lever.server import asked
from lever.server.about import fingerprint
from lever.server.cycles import CycleShown
from lever.server.refusals import api_error
from lever.server.replies import progress_of, usage_of
from lever.server.shapes import ChatShape, CompletionShape, Head, Shape
from lever.server.streams import DONE, ClientGone, EventStream, Inbox, data, error, unless_gone
from lever.server.types import ChatRequest, CompletionRequest
from lever.server.worker import Done, Event, Failed, Job, Piece, Reading, Worker

T = TypeVar("T")
NOBODY_READS = 499  # as nginx calls it: never sent


@dataclass(frozen=True)
class Service:
    """What all endpoints know."""

    worker: Worker
    names: tuple[str, ...]  # of the model; the first is the one that replies have
    ping_s: float = 15.0
    timeout_s: float = 600.0
    created: int = field(default_factory=lambda: int(time.time()))
    # Templates and tokenizers take their time with long texts: beside the event loop, and one by one.
    _encoding: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "lever-encode"))

    @cached_property
    def fingerprint(self) -> str:
        """Of the model, once it is ready."""
        return fingerprint(self.worker.served.llm)

    async def aside(self, work: Callable[[], T]) -> T:
        """Something that takes its time."""
        return await asyncio.get_running_loop().run_in_executor(self._encoding, work)

    def close(self) -> None:
        """Give its thread back."""
        self._encoding.shutdown(wait=True)


async def chat(http: HTTPRequest) -> Response:
    """POST /v1/chat/completions."""
    service: Service = http.app.state.service
    llm = service.worker.served.llm
    request = asked.read(await http.body(), ChatRequest)
    head = _head(service, "chatcmpl", request)
    prompt = await service.aside(lambda: asked.chat_prompt(request, llm))
    shape = ChatShape(head, llm.tokenizer, logprobs=bool(request.logprobs))
    return await _reply(service, http, request, prompt, shape)


async def completions(http: HTTPRequest) -> Response:
    """POST /v1/completions."""
    service: Service = http.app.state.service
    llm = service.worker.served.llm
    request = asked.read(await http.body(), CompletionRequest)
    head = _head(service, "cmpl", request)
    prompt = await service.aside(lambda: asked.completion_prompt(request, llm))
    shape = CompletionShape(head, llm.tokenizer, logprobs=request.logprobs is not None)
    return await _reply(service, http, request, prompt, shape)


def _head(service: Service, prefix: str, request: ChatRequest | CompletionRequest) -> Head:
    asked.check_model(request.model, service.names)
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    return Head(
        f"{prefix}-{secrets.token_hex(12)}", int(time.time()), service.names[0], service.fingerprint, include_usage
    )


async def _reply(
    service: Service,
    http: HTTPRequest,
    request: ChatRequest | CompletionRequest,
    prompt: Sequence[int],
    shape: Shape,
) -> Response:
    """All errors that can be known are raised before the first byte is sent."""
    llm = service.worker.served.llm
    asked.check_length(prompt, llm)
    settings = asked.generation_settings(request, llm)
    inbox = Inbox()
    job = Job(
        prompt=prompt,
        settings=settings,
        tell=inbox.put,
        readings=bool(request.stream and request.return_progress),
        cycles=bool(request.stream and request.return_cycles),
    )
    service.worker.submit(job)
    if request.stream:
        first = shape.first()
        return EventStream(
            job,
            inbox,
            _Rendered(shape),
            data(first) if first is not None else b"",
            ping_s=service.ping_s,
            timeout_s=service.timeout_s,
        )
    try:
        document = await unless_gone(http.receive, _whole(inbox, shape))
    except ClientGone:
        return Response(status_code=NOBODY_READS)
    finally:
        job.cancel()
    return Response(msgspec.json.encode(document), media_type="application/json")


async def _whole(inbox: Inbox, shape: Shape) -> msgspec.Struct:
    pieces: list[Piece] = []
    while True:
        event = await inbox.get()
        if isinstance(event, Piece):
            pieces.append(event)
        elif isinstance(event, Done):
            return shape.whole(pieces, event)
        elif isinstance(event, Failed):
            raise api_error(event.error) from event.error


@dataclass(frozen=True)
class _Rendered:
    """Events as the bytes of a stream."""

    shape: Shape

    def __call__(self, event: Event) -> Iterator[bytes]:
        shape = self.shape
        if isinstance(event, Piece):
            yield data(shape.piece(event))
        elif isinstance(event, Reading):
            yield data(shape.extra(prompt_progress=progress_of(event)))
        elif isinstance(event, CycleShown):
            yield data(shape.extra(cycle=event))
        elif isinstance(event, Done):
            yield data(shape.last(event))
            if shape.head.include_usage:
                yield data(shape.extra(usage=usage_of(event.stats)))
            yield DONE
        else:
            yield error(api_error(event.error).body)
