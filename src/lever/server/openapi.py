"""The API's description, made of the types that requests are read with."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec

from lever.server import ollama_types as o
from lever.server import replies as r
from lever.server import types as t
from lever.server.streams import EVENTS, LINES

REF = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class Operation:
    """What a path does: what it takes, gives, and refuses with."""

    path: str
    method: str
    summary: str
    reply: type[msgspec.Struct] | None = None  # None: text, or an object of no fixed shape
    request: type[msgspec.Struct] | None = None
    chunk: type[msgspec.Struct] | None = None  # of a stream
    stream: str = EVENTS
    media: str = "application/json"
    refusals: tuple[int, ...] = ()
    error: type[msgspec.Struct] = r.ErrorReply


ASKED = (400, 404, 413, 429, 500, 501, 503)
OPERATIONS = (
    Operation(
        "/v1/chat/completions", "post", "Answer a conversation", r.ChatCompletion, t.ChatRequest, r.ChatChunk,
        refusals=ASKED,
    ),
    Operation(
        "/v1/completions", "post", "Go on from a text", r.Completion, t.CompletionRequest, r.CompletionChunk,
        refusals=ASKED,
    ),
    Operation("/v1/models", "get", "The models that are served", r.ModelList),
    Operation("/v1/models/{id}", "get", "One of them", r.ModelCard, refusals=(404,)),
    Operation("/health", "get", "Whether the model is ready", r.Health, refusals=(500, 503)),
    Operation("/v1/health", "get", "Whether the model is ready", r.Health, refusals=(500, 503)),
    Operation("/props", "get", "The model, its memory and its storage", refusals=(503,)),
    Operation("/metrics", "get", "Figures for Prometheus", media="text/plain", refusals=(501,)),
    Operation("/tokenize", "post", "Tokens of a text", r.Tokens, t.TokenizeRequest, refusals=(400, 413, 503)),
    Operation("/detokenize", "post", "Text of tokens", r.Content, t.DetokenizeRequest, refusals=(400, 413, 503)),
    Operation(
        "/apply-template", "post", "The prompt of a conversation", r.Prompt, t.TemplateRequest, refusals=(400, 413, 503)
    ),
    Operation(
        "/api/chat", "post", "Answer a conversation, as Ollama", o.OllamaChatReply, o.OllamaChatRequest,
        o.OllamaChatReply, LINES, refusals=ASKED, error=o.OllamaError,
    ),
    Operation(
        "/api/generate", "post", "Answer a prompt, as Ollama", o.OllamaGenerateReply, o.OllamaGenerateRequest,
        o.OllamaGenerateReply, LINES, refusals=ASKED, error=o.OllamaError,
    ),
    Operation(
        "/api/tags", "get", "The models that are served, as Ollama", o.OllamaStoredModels, refusals=(503,),
        error=o.OllamaError,
    ),
    Operation("/api/ps", "get", "The models that are loaded", o.OllamaRunningModels, error=o.OllamaError),
    Operation(
        "/api/show", "post", "One of them in detail", o.OllamaShowReply, o.OllamaShowRequest,
        refusals=(400, 404, 413, 503), error=o.OllamaError,
    ),
    Operation("/api/version", "get", "Which lever this is", o.OllamaVersion, error=o.OllamaError),
    Operation("/openapi.json", "get", "This description"),
    Operation("/", "get", "A page to chat with the model", media="text/html"),
)  # fmt: skip


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    kinds = {kind for op in OPERATIONS for kind in (op.reply, op.request, op.chunk, op.error) if kind is not None}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=REF)
    by_kind = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "lever",
            "version": version("lever-llm"),
            "description": "A language model that is larger than memory, from flash.",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _described(operation: Operation, schemas: dict[type[msgspec.Struct], Any]) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media: {"schema": _schema(operation, schemas)}}
    if operation.chunk is not None:
        content[operation.stream] = {"x-data": schemas[operation.chunk]}  # a schema would be that of the whole text
    refusals = sorted({401, 403, *operation.refusals})
    error = {"application/json": {"schema": schemas[operation.error]}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path.replace('/', '_')}",
        "responses": {
            "200": {"description": operation.summary, "content": content},
            **{str(status): {"description": "Why not", "content": error} for status in refusals},
        },
    }
    if operation.request is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas[operation.request]}},
        }
    if "{id}" in operation.path:
        described["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return described


def _schema(operation: Operation, schemas: dict[type[msgspec.Struct], Any]) -> dict[str, Any]:
    if operation.reply is not None:
        schema: dict[str, Any] = schemas[operation.reply]
        return schema
    return {"type": "object" if operation.media == "application/json" else "string"}
