"""An answer's pieces in the two shapes of OpenAI's API: a chat's, and a text's that goes on. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from lever.llm import TokenLogprobs
from lever.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChunk,
    ContentLogprob,
    Delta,
    TextChoice,
    TextLogprobs,
    TokenLogprob,
    Usage,
    timings_of,
    usage_of,
)
from lever.server.worker import Done, Piece
from lever.tokenizer import StreamDecoder, Tokenizer

LEAST_LOGPROB = -9999.0  # in the place of minus infinity, which JSON has not


class Head(msgspec.Struct, frozen=True):
    """What all parts of an answer have in common."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    include_usage: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("id", "created", "model", "system_fingerprint")}

    @property
    def chunk_fields(self) -> dict[str, Any]:
        usage: Usage | None | UnsetType = None if self.include_usage else UNSET
        return {**self.fields, "usage": usage}


class Shape(Protocol):
    """How an answer looks."""

    head: Head

    def first(self) -> msgspec.Struct | None:
        """What a stream begins with."""

    def piece(self, piece: Piece) -> msgspec.Struct:
        """A part of a stream."""

    def last(self, done: Done) -> msgspec.Struct:
        """What ends the text of a stream."""

    def extra(self, **fields: Any) -> msgspec.Struct:
        """A part of a stream without text."""

    def whole(self, pieces: Sequence[Piece], done: Done) -> msgspec.Struct:
        """All of it."""


class ChatShape:
    """POST /v1/chat/completions."""

    def __init__(self, head: Head, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self.head, self._tokenizer, self._wants_logprobs = head, tokenizer, logprobs

    def first(self) -> ChatChunk:
        return self._chunk(ChatChunkChoice(Delta("assistant", "")))

    def piece(self, piece: Piece) -> ChatChunk:
        return self._chunk(ChatChunkChoice(Delta(content=piece.text), self._logprobs([piece])))

    def last(self, done: Done) -> ChatChunk:
        choice = ChatChunkChoice(Delta(), finish_reason=done.finish_reason)
        return msgspec.structs.replace(self._chunk(choice), timings=timings_of(done.stats))

    def extra(self, **fields: Any) -> ChatChunk:
        return ChatChunk(**{**self.head.chunk_fields, **fields}, choices=[])

    def whole(self, pieces: Sequence[Piece], done: Done) -> ChatCompletion:
        message = ChatMessage("".join(piece.text for piece in pieces))
        return ChatCompletion(
            **self.head.fields,
            choices=[ChatChoice(message, done.finish_reason, self._logprobs(pieces))],
            usage=usage_of(done.stats),
            timings=timings_of(done.stats),
        )

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(**self.head.chunk_fields, choices=[choice])

    def _logprobs(self, pieces: Sequence[Piece]) -> ChatLogprobs | None:
        if not self._wants_logprobs:
            return None
        return ChatLogprobs(content_logprobs(self._tokenizer, pieces))


class CompletionShape:
    """POST /v1/completions."""

    def __init__(self, head: Head, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self.head, self._tokenizer, self._wants_logprobs = head, tokenizer, logprobs
        self._decoder, self._offset = StreamDecoder(tokenizer), 0  # in characters, of the next token

    def first(self) -> None:
        return None

    def piece(self, piece: Piece) -> CompletionChunk:
        return self._chunk(TextChoice(piece.text, self._logprobs([piece])))

    def last(self, done: Done) -> CompletionChunk:
        choice = TextChoice("", finish_reason=done.finish_reason)
        return msgspec.structs.replace(self._chunk(choice), timings=timings_of(done.stats))

    def extra(self, **fields: Any) -> CompletionChunk:
        return CompletionChunk(**{**self.head.chunk_fields, **fields}, choices=[])

    def whole(self, pieces: Sequence[Piece], done: Done) -> Completion:
        text = "".join(piece.text for piece in pieces)
        return Completion(
            **self.head.fields,
            choices=[TextChoice(text, self._logprobs(pieces), done.finish_reason)],
            usage=usage_of(done.stats),
            timings=timings_of(done.stats),
        )

    def _chunk(self, choice: TextChoice) -> CompletionChunk:
        return CompletionChunk(**self.head.chunk_fields, choices=[choice])

    def _logprobs(self, pieces: Sequence[Piece]) -> TextLogprobs | None:
        if not self._wants_logprobs:
            return None
        found, offsets = [token for piece in pieces for token in piece.logprobs], list[int]()
        for at in found:
            offsets.append(self._offset)
            self._offset += len(self._decoder.feed(at.token))
        return TextLogprobs(
            [text_of(self._tokenizer, at.token) for at in found],
            [finite(at.logprob) for at in found],
            [{text_of(self._tokenizer, token): finite(value) for token, value in reversed(at.top)} for at in found],
            offsets,
        )


def content_logprobs(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> list[ContentLogprob]:
    """One entry for each token of the pieces."""

    def entry(token: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(text_of(tokenizer, token), finite(logprob), list(tokenizer.token_bytes(token)))

    def content(at: TokenLogprobs) -> ContentLogprob:
        own = entry(at.token, at.logprob)
        return ContentLogprob(own.token, own.logprob, own.bytes, [entry(*pair) for pair in at.top])

    return [content(token) for piece in pieces for token in piece.logprobs]


def text_of(tokenizer: Tokenizer, token: int) -> str:
    """What a token adds to the text; the name of one that adds nothing."""
    return tokenizer.decode([token]) or tokenizer.token_text(token)


def finite(logprob: float) -> float:
    """A number that JSON has."""
    return max(logprob, LEAST_LOGPROB)
