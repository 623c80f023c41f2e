"""Requests to Ollama's API of a server that a test has started."""

from __future__ import annotations

import json
from typing import Any

from tests.serving import Reply, Serving

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello world"},
]
FIGURES = {
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}


def chat(served: Serving, **more: Any) -> Reply:
    """The reply to a chat, in one piece."""
    return served.ask("/api/chat", {"model": "tiny", "messages": MESSAGES, "stream": False, **more})


def generate(served: Serving, **more: Any) -> Reply:
    """The reply to a prompt, in one piece."""
    return served.ask("/api/generate", {"model": "tiny", "prompt": "Hello", "stream": False, **more})


def lines_of(body: bytes) -> list[dict[str, Any]]:
    assert body.endswith(b"\n")
    return [json.loads(line) for line in body.split(b"\n")[:-1]]


def refusal_of(reply: Reply, status: int = 400) -> str:
    """Its words; every refusal has this shape."""
    assert reply.status == status, reply.body
    assert reply.headers["Content-Type"] == "application/json"
    assert reply.json.keys() == {"error"}
    words: str = reply.json["error"]
    return words
