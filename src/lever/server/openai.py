"""OpenAI's API: chats, and texts that go on. From a request to a job, from its events to a reply."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from lever.server import asked
from lever.server.cycles import CycleShown
from lever.server.refusals import api_error
from lever.server.replies import progress_of, usage_of
from lever.server.service import Service, service_of, whole_reply
from lever.server.shapes import ChatShape, CompletionShape, Head, Shape
from lever.server.streams import DONE, EVENTS, PING, Inbox, Stream, data, error
from lever.server.types import ChatRequest, CompletionRequest
from lever.server.worker import Done, Event, Job, Piece, Reading


async def chat(http: HTTPRequest) -> Response:
    """POST /v1/chat/completions."""
    service = service_of(http)
    llm = service.worker.served.llm
    request = asked.read(await http.body(), ChatRequest)
    head = _head(service, "chatcmpl", request)
    prompt = await service.aside(lambda: asked.chat_prompt(request, llm))
    shape = ChatShape(head, llm.tokenizer, logprobs=bool(request.logprobs))
    return await _reply(service, http, request, prompt, shape)


async def completions(http: HTTPRequest) -> Response:
    """POST /v1/completions."""
    service = service_of(http)
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
    settings = await service.aside(lambda: asked.generation_settings(request, llm))
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
        return Stream(
            EVENTS,
            job,
            inbox,
            _Rendered(shape),
            data(first) if first is not None else b"",
            ping=lambda: PING,
            ping_s=service.ping_s,
        )
    return await whole_reply(http, job, inbox, shape)


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
