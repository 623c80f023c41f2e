"""A part of Ollama's API: chats, texts that go on, and what is said of the model. From a request to a job and back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lever.llm import LLM
from lever.server import asked, ollama_asked
from lever.server.ollama_about import running, shown, stored
from lever.server.ollama_types import (
    OllamaAnswer,
    OllamaChatReply,
    OllamaChatRequest,
    OllamaError,
    OllamaGenerateReply,
    OllamaGenerateRequest,
    OllamaReply,
    OllamaRequest,
    OllamaRunningModels,
    OllamaShowRequest,
    OllamaStoredModels,
    OllamaVersion,
)
from lever.server.refusals import ApiError, api_error
from lever.server.service import Service, reply, service_of, whole_reply
from lever.server.shapes import content_logprobs
from lever.server.streams import LINES, Inbox, Stream, line
from lever.server.worker import Done, Event, Failed, Job, NotReady, Piece
from lever.stats import RunStats

# What Ollama does besides.
ELSEWHERE = (
    "/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/embed", "/api/embeddings",
    "/api/blobs/{digest}",
)  # fmt: skip


async def chat(http: Request) -> Response:
    """POST /api/chat."""
    return await _answer(http, OllamaChatRequest)


async def generate(http: Request) -> Response:
    """POST /api/generate."""
    return await _answer(http, OllamaGenerateRequest)


async def tags(http: Request) -> Response:
    """GET /api/tags."""
    service = service_of(http)
    return reply(OllamaStoredModels([stored(service.names[0], service.digest, service.worker.served.llm)]))


async def ps(http: Request) -> Response:
    """GET /api/ps."""
    service = service_of(http)
    try:
        return reply(OllamaRunningModels([running(service.names[0], service.digest, service.worker.served.llm)]))
    except NotReady:
        return reply(OllamaRunningModels([]))


async def show(http: Request) -> Response:
    """POST /api/show."""
    service = service_of(http)
    request = asked.read(await http.body(), OllamaShowRequest)
    model = request.model or request.name
    if not model:
        raise ApiError(400, "model is required")
    ollama_asked.check_model(model, service.names)
    return reply(shown(service.worker.served.llm))


async def tell_version(_http: Request) -> Response:
    """GET /api/version: lever's own."""
    return reply(OllamaVersion(version("lever-llm")))


ROUTES = (
    Route("/api/chat", chat, methods=["POST"]),
    Route("/api/generate", generate, methods=["POST"]),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/tags", tags),
    Route("/api/ps", ps),
    Route("/api/version", tell_version),
)


async def _answer(http: Request, kind: type[OllamaRequest]) -> Response:
    """All errors that can be known are raised before the first byte is sent."""
    service = service_of(http)
    llm = service.worker.served.llm
    request = ollama_asked.read(await http.body(), kind, service.names)
    ollama_asked.check(request, llm)
    shape = _Shape(request, llm)
    if ollama_asked.is_load(request):
        return reply(shape.loaded())
    prompt, settings = await service.aside(lambda: ollama_asked.prompt_and_settings(request, llm))
    inbox = Inbox()
    job = Job(prompt=prompt, settings=settings, tell=inbox.put)
    service.worker.submit(job)
    if request.stream is False:
        return await whole_reply(http, job, inbox, shape)
    return _streamed(service, job, inbox, shape)


def _streamed(service: Service, job: Job, inbox: Inbox, shape: _Shape) -> Stream:
    return Stream(
        LINES,
        job,
        inbox,
        shape.lines,
        b"",
        ping=lambda: line(shape.part("")),
        ping_s=service.ping_s,
    )


@dataclass(frozen=True)
class _Shape:
    """An answer's pieces as lines, or as one document."""

    request: OllamaRequest
    llm: LLM
    started_ns: int = field(default_factory=time.monotonic_ns)

    def lines(self, event: Event) -> Iterator[bytes]:
        """An event as the bytes of a stream."""
        if isinstance(event, Piece):
            yield line(self.part(event.text, **self._logprobs([event])))
        elif isinstance(event, Done):
            yield line(self._end("", event))
        elif isinstance(event, Failed):
            yield line(OllamaError(str(api_error(event.error))))

    def part(self, text: str, **fields: Any) -> OllamaReply:
        """Text of which more follows."""
        return self._reply(text, done=False, **fields)

    def whole(self, pieces: Sequence[Piece], done: Done) -> OllamaReply:
        """All of it."""
        return self._end("".join(piece.text for piece in pieces), done, **self._logprobs(pieces))

    def loaded(self) -> OllamaReply:
        """That the model is there."""
        return self._reply("", done=True, done_reason="load")

    def _end(self, text: str, done: Done, **fields: Any) -> OllamaReply:
        total = time.monotonic_ns() - self.started_ns
        figures = _figures(done.stats)
        return self._reply(text, done=True, done_reason=done.finish_reason, total_duration=total, **figures, **fields)

    def _reply(self, text: str, **fields: Any) -> OllamaReply:
        common = {"model": self.request.model, "created_at": datetime.now(UTC), **fields}
        if isinstance(self.request, OllamaChatRequest):
            return OllamaChatReply(**common, message=OllamaAnswer("assistant", text))
        return OllamaGenerateReply(**common, response=text)

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {"logprobs": content_logprobs(self.llm.tokenizer, pieces)} if self.request.logprobs else {}


def _figures(stats: RunStats) -> dict[str, int]:
    """Tokens and nanoseconds; the model was there already. The first token comes out of the prompt's passes."""
    return {
        "load_duration": 0,
        "prompt_eval_count": stats.prompt_tokens,
        "prompt_eval_duration": round(1e9 * stats.prefill_s),
        "eval_count": stats.new_tokens,
        "eval_duration": round(1e9 * stats.decode_s),
    }
