"""Text from tokens that come one by one: a character is given out when its last byte is there."""

from __future__ import annotations

import codecs
from typing import Protocol


class HasTokenBytes(Protocol):
    def token_bytes(self, token: int) -> bytes: ...


class StreamDecoder:
    """All that `feed` returned, then `flush`, is what `decode` gives for the same tokens."""

    def __init__(self, tokenizer: HasTokenBytes) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The characters that `token` completes; bytes that can be no part of one are U+FFFD."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was begun, else nothing."""
        return self._decoder.decode(b"", final=True)
