"""OpenAI's API: chats, and texts that go on. From a request to a job, from its events to a reply."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from lever.llm import LLM
from lever.server import asked
from lever.server.cycles import CycleShown
from lever.server.refusals import api_error
from lever.server.replies import progress_of, usage_of
from lever.server.service import Service, service_of, whole_reply
from lever.server.shapes import ChatShape, CompletionShape, Head, Shape
from lever.server.streams import DONE, EVENTS, PING, Inbox, Stream, data, error
from lever.server.types import ChatRequest, CompletionRequest, Request
from lever.server.worker import Done, Event, Job, Piece, Reading

R = TypeVar("R", ChatRequest, CompletionRequest)


async def chat(http: HTTPRequest) -> Response:
    """POST /v1/chat/completions."""
    return await _answer(http, ChatRequest, asked.chat_prompt, ChatShape)


async def completions(http: HTTPRequest) -> Response:
    """POST /v1/completions."""
    return await _answer(http, CompletionRequest, asked.completion_prompt, CompletionShape)


async def _answer(
    http: HTTPRequest, kind: type[R], prompt_of: Callable[[R, LLM], list[int]], shape_of: type[Shape]
) -> Response:
    """All errors that can be known are raised before the first byte is sent."""
    service = service_of(http)
    llm = service.worker.served.llm
    request = asked.read(await http.body(), kind)
    asked.check_model(request.model, service.names)
    prompt, settings = await service.aside(lambda: (prompt_of(request, llm), asked.generation_settings(request, llm)))
    head = _head(service, shape_of.id_prefix, request)
    shape = shape_of(head, llm.tokenizer, logprobs=settings.n_logprobs is not None)
    inbox = Inbox()
    job = Job(
        prompt=prompt,
        settings=settings,
        tell=inbox.put,
        readings=bool(request.stream and request.return_progress),
        cycles=bool(request.stream and request.return_cycles),
    )
    service.worker.submit(job)
    if not request.stream:
        return await whole_reply(http, job, inbox, shape)
    first = shape.first()
    return Stream(
        EVENTS,
        job,
        inbox,
        partial(_rendered, shape),
        data(first) if first is not None else b"",
        ping=lambda: PING,
        ping_s=service.ping_s,
    )


def _head(service: Service, id_prefix: str, request: Request) -> Head:
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    return Head(
        f"{id_prefix}-{secrets.token_hex(12)}", int(time.time()), service.names[0], service.fingerprint, include_usage
    )


def _rendered(shape: Shape, event: Event) -> Iterator[bytes]:
    """An event as the bytes of a stream."""
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
