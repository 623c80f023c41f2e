"""Errors over HTTP: which status, and which words. Every one is JSON, in the shape of the API that was asked."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from lever.errors import Cancelled, ContextOverflow, TemplateError, UsageError
from lever.server.ollama_types import OllamaError
from lever.server.replies import ErrorBody, ErrorReply
from lever.server.worker import NotReady, QueueFull

INVALID, SERVER, UNAVAILABLE = "invalid_request_error", "server_error", "unavailable_error"
RETRY_AFTER_S = 5


class ApiError(Exception):
    """A request that is not answered; `status` and `body` are what its sender gets."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        numbers: tuple[int, int] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`numbers`: tokens of the prompt, and of the context that is too small for them."""
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        n_prompt_tokens, n_ctx = numbers or (UNSET, UNSET)
        self.body = ErrorReply(ErrorBody(message, type, param, code, n_prompt_tokens, n_ctx))

    def response(self, path: str) -> Response:
        """The whole reply to a request for this path: OpenAI's, but for Ollama's."""
        body = OllamaError(str(self)) if path.startswith("/api/") else self.body
        return Response(msgspec.json.encode(body), self.status, self.headers, "application/json")


def api_error(error: Exception) -> ApiError:
    """What the sender of a request is told of an error of lever.

    What is no fault of the request says no more than that: its words are for who started the server, and name files.
    """
    if isinstance(error, ApiError):
        return error
    retry = {"Retry-After": str(RETRY_AFTER_S)}
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), type="rate_limit_error", code="queue_full", headers=retry)
    if isinstance(error, NotReady | Cancelled):
        return ApiError(503, str(error), type=UNAVAILABLE, code="model_not_ready", headers=retry)
    if isinstance(error, UsageError | TemplateError | ContextOverflow):
        return ApiError(400, str(error))
    if isinstance(error, MemoryError):
        return ApiError(500, "the system gave no more memory", type=SERVER)
    return ApiError(500, "the request failed inside the server, which says why where it was started", type=SERVER)


def not_supported(message: str, param: str | None = None) -> ApiError:
    """For what exists elsewhere and not here."""
    return ApiError(501, message, type="not_supported_error", param=param, code="not_supported")


def overflow(n_prompt_tokens: int, n_ctx: int, *, counted: str = "") -> ApiError:
    """For a prompt that leaves no room for an answer. `counted`: how exactly its tokens were."""
    has = " ".join(filter(None, ("the prompt has", counted, str(n_prompt_tokens))))
    return ApiError(
        400,
        f"{has} tokens and the context {n_ctx}: shorten it, or serve with more by -c",
        type="exceed_context_size_error",
        code="context_length_exceeded",
        numbers=(n_prompt_tokens, n_ctx),
    )
