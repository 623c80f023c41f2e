"""Requests as OpenAI's API has them, with llama-server's additions. Ranges and types are checked while they are read.

What a request leaves out, or gives as null, is None.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lever.llm import MOST_LOGPROBS

Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=-1)]  # -1: no limit
Text = Annotated[str, Meta(min_length=1)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Seed = Annotated[int, Meta(ge=-1)]  # -1: any
Stop = Text | Annotated[list[Text], Meta(max_length=64)]
Likeliest = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]  # tokens at a place


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn; the names are those of the sampler's settings."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Count | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    repeat_last_n: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """How an answer is streamed."""

    include_usage: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True):
    """The schema that an answer has to follow."""

    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """What an answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None  # beside json_object, as llama-server takes it


class Request(Sampling, frozen=True, kw_only=True):
    """What both ways to ask have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=1)] | None = None
    stop: Stop | None = None
    seed: Seed | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None

    ignore_eos: bool | None = None
    cache_prompt: bool | None = None  # it always is
    return_progress: bool | None = None
    return_cycles: bool | None = None


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a message; only text is read."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(Request, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


class CompletionRequest(Request, frozen=True, kw_only=True):
    """POST /v1/completions. Of several prompts in a list there may be one."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Likeliest | None = None
    best_of: Annotated[int, Meta(ge=1, le=1)] | None = None
    echo: bool | None = None
    suffix: str | None = None


class TokenizeRequest(msgspec.Struct, frozen=True):
    """POST /tokenize."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(msgspec.Struct, frozen=True):
    """POST /detokenize."""

    tokens: list[TokenId]


class TemplateRequest(msgspec.Struct, frozen=True):
    """POST /apply-template."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    add_generation_prompt: bool = True
