"""Replies in the shape that OpenAI's clients read, with llama-server's additions; made of figures, not of a model."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from lever.request import FinishReason
from lever.server.cycles import CycleShown
from lever.server.worker import Reading
from lever.stats import RunStats


class CachedTokens(msgspec.Struct, frozen=True):
    """Of the prompt, found in the KV cache."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Timings(msgspec.Struct, frozen=True):
    """Figures of an answer under llama-server's names, then lever's own. Milliseconds; bytes."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int
    cycles: int
    tokens_per_cycle: float
    read_bytes: int
    read_bytes_per_second: float
    peak_rss_bytes: int
    seed: int


class PromptProgress(msgspec.Struct, frozen=True):
    """How far a prompt is read: `processed` of `total` tokens, cached ones among them, after so many milliseconds."""

    total: int
    cache: int
    processed: int
    time_ms: int


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token and its natural log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct, frozen=True):
    """A token of the answer, and the likeliest ones at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """One entry for each token that was delivered."""

    content: list[ContentLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """The same, as completions have it."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ChatMessage(msgspec.Struct, frozen=True):
    """The answer."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class Delta(msgspec.Struct, frozen=True):
    """What a chunk adds to the answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """The only choice."""

    message: ChatMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None
    index: int = 0


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """Its next part."""

    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    index: int = 0


class TextChoice(msgspec.Struct, frozen=True):
    """The text that goes on from a prompt, or its next part."""

    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None
    index: int = 0


class _Reply(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    system_fingerprint: str
    timings: Timings | UnsetType = UNSET


class _Chunk(_Reply, frozen=True, kw_only=True):
    usage: Usage | None | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    cycle: CycleShown | UnsetType = UNSET


class ChatCompletion(_Reply, frozen=True, kw_only=True):
    """A whole answer."""

    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class ChatChunk(_Chunk, frozen=True, kw_only=True):
    """A part of an answer that is streamed."""

    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class Completion(_Reply, frozen=True, kw_only=True):
    """A whole text."""

    choices: list[TextChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"


class CompletionChunk(_Chunk, frozen=True, kw_only=True):
    """A part of a text that is streamed."""

    choices: list[TextChoice]
    object: Literal["text_completion"] = "text_completion"


class ModelCard(msgspec.Struct, frozen=True):
    """The model that is served; `meta` once it is loaded."""

    id: str
    created: int
    meta: dict[str, Any] | None = None
    object: Literal["model"] = "model"
    owned_by: str = "lever"


class ModelList(msgspec.Struct, frozen=True):
    """The models that are served: one."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Health(msgspec.Struct, frozen=True):
    """The model is there."""

    status: Literal["ok"] = "ok"


class TokenPiece(msgspec.Struct, frozen=True):
    """A token and its text, or its bytes where they are no text alone."""

    id: int
    piece: str | list[int]


class Tokens(msgspec.Struct, frozen=True):
    """Of a text."""

    tokens: list[int | TokenPiece]


class Content(msgspec.Struct, frozen=True):
    """Of tokens."""

    content: str


class Prompt(msgspec.Struct, frozen=True):
    """Of messages."""

    prompt: str


class ErrorBody(msgspec.Struct, frozen=True):
    """What went wrong; the two numbers where the context is too small."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    n_prompt_tokens: int | UnsetType = UNSET
    n_ctx: int | UnsetType = UNSET


class ErrorReply(msgspec.Struct, frozen=True):
    """Every reply that is not 200."""

    error: ErrorBody


def usage_of(stats: RunStats) -> Usage:
    """What an answer has used."""
    return Usage(
        stats.prompt_tokens,
        stats.new_tokens,
        stats.prompt_tokens + stats.new_tokens,
        CachedTokens(stats.cached_tokens),
    )


def timings_of(stats: RunStats) -> Timings:
    """The first token comes out of the prompt's passes; what is predicted counts from the second, as does the time."""
    read, predicted = stats.prompt_tokens - stats.cached_tokens, max(stats.new_tokens - 1, 0)
    return Timings(
        cache_n=stats.cached_tokens,
        prompt_n=read,
        prompt_ms=1e3 * stats.prefill_s,
        prompt_per_token_ms=1e3 * _ratio(stats.prefill_s, read),
        prompt_per_second=_ratio(read, stats.prefill_s),
        predicted_n=stats.new_tokens,
        predicted_ms=1e3 * stats.decode_s,
        predicted_per_token_ms=1e3 * _ratio(stats.decode_s, predicted),
        predicted_per_second=stats.tokens_per_s,
        draft_n=stats.verified,
        draft_n_accepted=stats.accepted,
        cycles=stats.cycles,
        tokens_per_cycle=stats.tokens_per_cycle,
        read_bytes=stats.read_bytes,
        read_bytes_per_second=stats.read_bytes_per_s,
        peak_rss_bytes=stats.peak_rss_bytes,
        seed=stats.seed,
    )


def progress_of(reading: Reading) -> PromptProgress:
    """How far a prompt is read."""
    return PromptProgress(reading.total, reading.cached, reading.processed, round(1e3 * reading.seconds))


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
