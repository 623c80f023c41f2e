"""Requests and replies as Ollama's API has them. Ranges and types of requests are checked while they are read.

What a request leaves out, or gives as null, is None. Durations are in nanoseconds.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from lever.server.replies import ContentLogprob
from lever.server.types import Likeliest, Sampling, Seed, Stop

DoneReason = Literal["stop", "length", "load"]


class OllamaOptions(Sampling, frozen=True, kw_only=True):
    """How an answer is drawn and where it ends."""

    num_ctx: Annotated[int, Meta(ge=1)] | None = None
    num_predict: Annotated[int, Meta(ge=-2)] | None = None  # -1 and -2: until the context is full
    seed: Seed | None = None
    stop: Stop | None = None
    # Taken as long as they are off.
    mirostat: Annotated[int, Meta(ge=0, le=0)] | None = None
    tfs_z: Annotated[float, Meta(ge=1, le=1)] | None = None
    typical_p: Annotated[float, Meta(ge=1, le=1)] | None = None


class _OllamaRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What both ways to ask have in common."""

    model: str
    stream: bool | None = None  # None: yes
    format: Literal["", "json"] | dict[str, Any] | None = None  # a dict is a JSON schema
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None  # the model stays, whatever it says
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None


class OllamaChatRequest(_OllamaRequest, frozen=True, kw_only=True):
    """POST /api/chat."""

    messages: list[OllamaMessage] | None = None  # none: whether the model is there
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(_OllamaRequest, frozen=True, kw_only=True):
    """POST /api/generate."""

    prompt: str | None = None  # none: whether the model is there
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    images: list[str] | None = None
    context: list[int] | None = None


OllamaRequest = OllamaChatRequest | OllamaGenerateRequest


class OllamaShowRequest(msgspec.Struct, frozen=True):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None  # as older clients call it


class OllamaError(msgspec.Struct, frozen=True):
    """Every reply that is not 200, and the line that ends a stream which went wrong."""

    error: str


class OllamaReply(msgspec.Struct, frozen=True, kw_only=True):
    """What lines of a stream and whole answers have in common; figures are on the last line only."""

    model: str
    created_at: datetime
    done: bool
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ContentLogprob] | UnsetType = UNSET


class OllamaAnswer(msgspec.Struct, frozen=True):
    """The message that answers, or a part of it."""

    role: Literal["assistant"]
    content: str


class OllamaChatReply(OllamaReply, frozen=True, kw_only=True):
    """An answer to a conversation, or a line of it."""

    message: OllamaAnswer


class OllamaGenerateReply(OllamaReply, frozen=True, kw_only=True):
    """An answer to a prompt, or a line of it."""

    response: str


class OllamaDetails(msgspec.Struct, frozen=True, kw_only=True):
    """A model in a few words."""

    parent_model: str = ""
    format: str = "gguf"
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in a list; `size` in bytes."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaStoredModel(OllamaModel, frozen=True, kw_only=True):
    """A model that can be asked."""

    modified_at: datetime


class OllamaRunningModel(OllamaModel, frozen=True, kw_only=True):
    """A model that is loaded; `size` is the memory that it takes."""

    expires_at: datetime
    size_vram: int
    context_length: int


class OllamaStoredModels(msgspec.Struct, frozen=True):
    """GET /api/tags."""

    models: list[OllamaStoredModel]


class OllamaRunningModels(msgspec.Struct, frozen=True):
    """GET /api/ps."""

    models: list[OllamaRunningModel]


class OllamaShowReply(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/show; lists of the vocabulary are null."""

    details: OllamaDetails
    model_info: dict[str, Any]
    template: str
    capabilities: list[str]
    modified_at: datetime


class OllamaVersion(msgspec.Struct, frozen=True):
    """GET /api/version."""

    version: str
