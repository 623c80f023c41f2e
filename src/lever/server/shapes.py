"""An answer's pieces in the two shapes of OpenAI's API: a chat's, and a text's that goes on. Knows no HTTP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from lever.llm import TokenLogprobs
from lever.request import FinishReason
from lever.server.cycles import text_of
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


class Shape(ABC):
    """How an answer looks. The two differ in their types, and in what a choice is."""

    id_prefix: ClassVar[str]
    chunk: ClassVar[type[ChatChunk | CompletionChunk]]  # a part of a stream
    document: ClassVar[type[ChatCompletion | Completion]]  # all of it

    def __init__(self, head: Head, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self.head, self._tokenizer, self._wants_logprobs = head, tokenizer, logprobs

    def first(self) -> msgspec.Struct | None:
        """What a stream begins with."""
        return None

    def piece(self, piece: Piece) -> msgspec.Struct:
        """A part of a stream."""
        return self._part([self._part_of_choice(piece)])

    def last(self, done: Done) -> msgspec.Struct:
        """What ends the text of a stream."""
        return self._part([self._end_of_choice(done.finish_reason)], timings=timings_of(done.stats))

    def extra(self, **fields: Any) -> msgspec.Struct:
        """A part of a stream without text."""
        return self._part([], **fields)

    def whole(self, pieces: Sequence[Piece], done: Done) -> msgspec.Struct:
        """All of it."""
        text = "".join(piece.text for piece in pieces)
        return self.document(
            **self.head.fields,
            choices=[self._whole_choice(text, pieces, done.finish_reason)],
            usage=usage_of(done.stats),
            timings=timings_of(done.stats),
        )

    def _part(self, choices: list[Any], **fields: Any) -> msgspec.Struct:
        return self.chunk(**{**self.head.chunk_fields, **fields}, choices=choices)

    @abstractmethod
    def _part_of_choice(self, piece: Piece) -> msgspec.Struct: ...

    @abstractmethod
    def _end_of_choice(self, finish_reason: FinishReason) -> msgspec.Struct: ...

    @abstractmethod
    def _whole_choice(self, text: str, pieces: Sequence[Piece], finish_reason: FinishReason) -> Any: ...


class ChatShape(Shape):
    """POST /v1/chat/completions."""

    id_prefix, chunk, document = "chatcmpl", ChatChunk, ChatCompletion

    def first(self) -> msgspec.Struct:
        return self._part([ChatChunkChoice(Delta("assistant", ""))])

    def _part_of_choice(self, piece: Piece) -> ChatChunkChoice:
        return ChatChunkChoice(Delta(content=piece.text), self._logprobs([piece]))

    def _end_of_choice(self, finish_reason: FinishReason) -> ChatChunkChoice:
        return ChatChunkChoice(Delta(), finish_reason=finish_reason)

    def _whole_choice(self, text: str, pieces: Sequence[Piece], finish_reason: FinishReason) -> ChatChoice:
        return ChatChoice(ChatMessage(text), finish_reason, self._logprobs(pieces))

    def _logprobs(self, pieces: Sequence[Piece]) -> ChatLogprobs | None:
        if not self._wants_logprobs:
            return None
        return ChatLogprobs(content_logprobs(self._tokenizer, pieces))


class CompletionShape(Shape):
    """POST /v1/completions."""

    id_prefix, chunk, document = "cmpl", CompletionChunk, Completion

    def __init__(self, head: Head, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        super().__init__(head, tokenizer, logprobs=logprobs)
        self._decoder, self._offset = StreamDecoder(tokenizer), 0  # in characters, of the next token

    def _part_of_choice(self, piece: Piece) -> TextChoice:
        return TextChoice(piece.text, self._logprobs([piece]))

    def _end_of_choice(self, finish_reason: FinishReason) -> TextChoice:
        return TextChoice("", finish_reason=finish_reason)

    def _whole_choice(self, text: str, pieces: Sequence[Piece], finish_reason: FinishReason) -> TextChoice:
        return TextChoice(text, self._logprobs(pieces), finish_reason)

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


def finite(logprob: float) -> float:
    """A number that JSON has."""
    return max(logprob, LEAST_LOGPROB)
