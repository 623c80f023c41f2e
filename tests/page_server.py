"""What `lever serve` answers to its page, as a test tells it: without a model, and each pause is the test's own."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lever.server.page import page

Chunk = dict[str, Any]
Step = Chunk | str | threading.Event  # a chunk of the stream; raw text; a pause until the event is set

PROPS: Chunk = {
    "model": "target-8b-q4_0.gguf",
    "draft": "/models/draft-0.5b-q4_0.gguf",
    "preset": "lever",
    "n_ctx": 4096,
    "memory": {
        "budget": 900 << 20,
        "planned": 616 << 20,
        "parts": {"Python": 120 << 20, "KV cache": 112 << 20, "draft": 300 << 20, "ring": 84 << 20, "projection": 0},
    },
    "bytes_per_pass": 740_000_000,
    "plain_pass_s": 0.5,
    "version": "0.0",
}


def says(text: str) -> Chunk:
    """A chunk with a piece of the answer."""
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


def ends(reason: str = "stop", tokens_per_s: float = 10.0) -> Chunk:
    """The chunk with the reason why it ended, and the figures."""
    timings = {
        "prompt_n": 9,
        "predicted_n": 12,
        "predicted_per_second": tokens_per_s,
        "draft_n": 9,
        "draft_n_accepted": 4,
    }
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}], "timings": timings}


def node(text: str, parent: int, state: str, reach: float = 0.5) -> Chunk:
    """A token of a tree."""
    return {"text": text, "parent": parent, "state": state, "reach": reach}


def cycle(*nodes: Chunk, new_tokens: int = 1, seconds: float = 0.5, read_bytes: int = 740_000_000) -> Chunk:
    """The chunk of one cycle; without nodes, of plain decoding."""
    parts = {"draft_s": 0.1, "wait_s": 0.05, "compute_s": 0.25, "project_s": 0.02}
    tree = list(nodes) or [node("the", -1, "root", 1.0)]
    return {
        "choices": [],
        "cycle": {"nodes": tree, "new_tokens": new_tokens, "seconds": seconds, "read_bytes": read_bytes, **parts},
    }


class PageServer:
    """Gives the page, and to each question the next of `answers`: the steps of a stream, or a refusal as it is."""

    def __init__(self) -> None:
        self.answers: deque[Sequence[Step] | Response] = deque()
        self.asked: list[Chunk] = []  # bodies of the questions
        self.left = threading.Event()  # set when the page goes away in the middle of an answer
        self.loading: str | None = None  # what /health says while it is set
        self.key: str | None = None
        self.props = dict(PROPS)
        self.url = ""

    def app(self) -> Starlette:
        """The server as an application."""
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/health", self._health),
                Route("/props", self._props),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _page(self, _request: Request) -> Response:
        return Response(page().body, media_type="text/html", headers={"Content-Security-Policy": page().policy})

    async def _health(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok"}) if self.loading is None else refuses(503, self.loading)

    async def _props(self, request: Request) -> Response:
        return JSONResponse(self.props) if self._allowed(request) else refuses(401, "a key is missing")

    async def _chat(self, request: Request) -> Response:
        if not self._allowed(request):
            return refuses(401, "a key is missing")
        self.asked.append(await request.json())
        answer = self.answers.popleft()
        if isinstance(answer, Response):
            return answer
        return StreamingResponse(self._stream(answer), media_type="text/event-stream")

    def _allowed(self, request: Request) -> bool:
        return self.key is None or request.headers.get("Authorization") == f"Bearer {self.key}"

    async def _stream(self, steps: Sequence[Step]) -> AsyncIterator[str]:
        try:
            for step in steps:
                while isinstance(step, threading.Event) and not step.is_set():
                    await asyncio.sleep(0.01)
                if isinstance(step, dict):
                    yield f"data: {json.dumps(step)}\n\n"
                elif isinstance(step, str):
                    yield step
        except asyncio.CancelledError:  # which is what starlette makes of a page that goes away
            self.left.set()
            raise


DONE = "data: [DONE]\n\n"


def refuses(status: int, message: str, headers: dict[str, str] | None = None, **more: Any) -> Response:
    """An error as lever serve gives it."""
    return JSONResponse({"error": {"message": message, **more}}, status, headers)


@contextmanager
def serving(server: PageServer) -> Iterator[PageServer]:
    """The server on a port of the loopback, in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server.url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        runner = uvicorn.Server(uvicorn.Config(server.app(), log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield server
        finally:
            runner.should_exit = True
            thread.join(timeout=30)
            assert not thread.is_alive()
