"""How a vocabulary spells text: by an alphabet for bytes, or with `▁` for blanks. Knows no ids."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, Protocol

BYTE_NAME = re.compile("<0x([0-9A-Fa-f]{2})>")  # how a token of type byte is called


def byte_of_name(name: str) -> bytes | None:
    """The byte that `<0xNN>` means."""
    match = BYTE_NAME.fullmatch(name)
    return bytes.fromhex(match[1]) if match else None


class Spelling(Protocol):
    def spell(self, text: str, *, starts: bool) -> str:
        """Plain text as the merges expect it; `starts` if nothing or a special token comes before."""

    def read(self, piece: str) -> bytes:
        """The bytes that an ordinary token of this spelling stands for."""

    def byte(self, value: int) -> str:
        """The token of a single byte."""


def _alphabet() -> tuple[str, ...]:
    """GPT-2's character for each byte: itself where it prints, the others from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


class ByteLevel:
    """gpt2-type vocabularies. The engine writes the alphabet itself, so `spell` has nothing to do."""

    ALPHABET = _alphabet()
    BYTES: ClassVar[Mapping[str, int]] = {char: byte for byte, char in enumerate(ALPHABET)}

    def spell(self, text: str, *, starts: bool) -> str:  # noqa: ARG002 - a position means nothing here
        return text

    def read(self, piece: str) -> bytes:
        try:
            return bytes([self.BYTES[char] for char in piece])
        except KeyError:  # an added token whose type says "normal": it is written as it reads
            return piece.encode()

    def byte(self, value: int) -> str:
        return self.ALPHABET[value]


class SentencePiece:
    """llama-type vocabularies: a blank is `▁`; one is put before what follows nothing or a special token."""

    BLANK = "▁"

    def __init__(self, *, add_space_prefix: bool) -> None:
        self._prefix = self.BLANK if add_space_prefix else ""

    def spell(self, text: str, *, starts: bool) -> str:
        return (self._prefix if starts else "") + text.replace(" ", self.BLANK)

    def read(self, piece: str) -> bytes:
        return piece.replace(self.BLANK, " ").encode()

    def byte(self, value: int) -> str:
        return f"<0x{value:02X}>"
