"""Text to token ids and back, with the vocabulary of a GGUF. Knows no chat template and no model.

The BPE itself is that of the Rust library `tokenizers`; what is around it (special tokens, blanks, bytes)
follows llama.cpp, so that ids are the same. Three things differ on purpose:
- a control, unused or byte token never comes out of plain text that spells it, not even by merges;
- a byte that is no part of a valid UTF-8 character (given as a surrogate escape) becomes the token of that
  byte, where llama.cpp reads U+FFFD;
- a gpt2-type file that names no bos or eos token has none, where llama.cpp takes token 11.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping

import tokenizers

from lever.errors import GGUFError, TokenizerError, UsageError
from lever.gguf import GGUF
from lever.tokenizer.engine import byte_level_engine, sentencepiece_engine
from lever.tokenizer.pre import PRE_TOKENIZERS, PreTokenizer
from lever.tokenizer.spelling import ByteLevel, SentencePiece, Spelling, byte_of_name
from lever.tokenizer.stream import StreamDecoder
from lever.tokenizer.vocabulary import PREFIX, Kind, Vocabulary, read_scores, read_vocabulary

__all__ = ["StreamDecoder", "Tokenizer"]

log = logging.getLogger(__name__)

DEFAULT_PRE = "default"
# The most that building takes, measured with vocabularies of 32 k to 152 k tokens; less than half of it is kept.
BYTES_PER_ENTRY = 300  # a token or a merge of a byte-level vocabulary
BYTES_PER_PIECE = 1000  # a token of a SentencePiece vocabulary, with the two merges or so that it is written as
ESCAPED_BYTES = re.compile("([\udc80-\udcff]+)")


class Tokenizer:
    """Built by `from_gguf`. Immutable, safe to share between threads."""

    n_vocab: int
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    add_eos: bool
    eog_ids: frozenset[int]  # every id that ends a turn
    longest: int  # characters of text that one token may stand for

    def __init__(
        self,
        vocabulary: Vocabulary,
        engine: tokenizers.Tokenizer,
        spelling: Spelling,
        *,
        add_bos: bool,
        add_eos: bool,
    ) -> None:
        self.n_vocab = len(vocabulary.texts)
        self.longest = max(map(len, vocabulary.texts))
        self.bos_id, self.eos_id, self.eog_ids = vocabulary.bos_id, vocabulary.eos_id, vocabulary.eog_ids
        self.add_bos, self.add_eos = add_bos, add_eos
        self._before = _wanted(vocabulary, "bos", vocabulary.bos_id, add_bos)
        self._after = _wanted(vocabulary, "eos", vocabulary.eos_id, add_eos)
        self._engine, self._spelling = engine, spelling
        self._kinds = vocabulary.kinds
        self._special = vocabulary.special()
        self._not_in_engine = vocabulary.others()
        self._byte_ids = [engine.token_to_id(spelling.byte(value)) for value in range(256)]
        self._has_all_bytes = None not in self._byte_ids

    @classmethod
    def from_gguf(cls, gguf: GGUF, *, pre: str | None = None) -> Tokenizer:
        """The tokenizer of a file; `pre` overrides its pre-tokenizer. TokenizerError if it cannot be used.

        The lists of tokens and merges in `gguf.metadata` are not needed afterwards.
        """
        try:
            model = gguf.text(PREFIX + "model")
            if model == "gpt2":
                return cls._byte_level(gguf, pre)
            if model == "llama":
                return cls._sentencepiece(gguf)
        except GGUFError as error:
            raise TokenizerError(str(error)) from error
        raise TokenizerError(f"{gguf.path}: has a tokenizer of type {model!r}, lever knows gpt2 and llama")

    @staticmethod
    def building_nbytes(gguf: GGUF) -> int:
        """Bytes that `from_gguf` takes beside the lists in `gguf.metadata`, about, before there is a tokenizer."""
        tokens, merges = (len(gguf.strings(PREFIX + key, [])) for key in ("tokens", "merges"))
        if gguf.text(PREFIX + "model", "") == "llama":
            return BYTES_PER_PIECE * tokens
        return BYTES_PER_ENTRY * (tokens + merges)

    @classmethod
    def _byte_level(cls, gguf: GGUF, pre_name: str | None) -> Tokenizer:
        pre = _pre_tokenizer(gguf, pre_name)
        vocabulary = read_vocabulary(gguf, default_bos=None, default_eos=None)
        engine = byte_level_engine(vocabulary, gguf.strings(PREFIX + "merges"), pre)
        return cls(
            vocabulary,
            engine,
            ByteLevel(),
            add_bos=gguf.flag(PREFIX + "add_bos_token", pre.add_bos),
            add_eos=gguf.flag(PREFIX + "add_eos_token", False),
        )

    @classmethod
    def _sentencepiece(cls, gguf: GGUF) -> Tokenizer:
        vocabulary = read_vocabulary(gguf, default_bos=1, default_eos=2)
        engine = sentencepiece_engine(vocabulary, read_scores(gguf, len(vocabulary.texts)))
        return cls(
            vocabulary,
            engine,
            SentencePiece(add_space_prefix=gguf.flag(PREFIX + "add_space_prefix", True)),
            add_bos=gguf.flag(PREFIX + "add_bos_token", True),
            add_eos=gguf.flag(PREFIX + "add_eos_token", False),
        )

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`; the text of a control token means that token only with `parse_special`.

        Bytes that are not UTF-8 may be given as surrogate escapes. UsageError for any other lone surrogate.
        """
        return self.encode_pieces([(text, parse_special)], add_special=add_special)

    def encode_pieces(self, pieces: Iterable[tuple[str, bool]], *, add_special: bool = True) -> list[int]:
        """Token ids of one text that is given in pieces, each with its own `parse_special`.

        Words and merges run across the borders of pieces; a special token that lies across one is not seen.
        """
        ids = list(self._before) if add_special else []
        starts = True
        for fragment in self._fragments(pieces):
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                ids += self._encode_plain(fragment, starts)
            starts = isinstance(fragment, int)
        return ids + self._after if add_special else ids

    def token_bytes(self, token: int) -> bytes:
        """What `token` adds to a text: nothing if it is a control, unknown or unused token."""
        kind, text = self._kind(token), self.token_text(token)
        if kind == Kind.NORMAL:
            return self._spelling.read(text)
        if kind == Kind.BYTE:
            return byte_of_name(text) or b""
        return text.encode() if kind == Kind.USER_DEFINED else b""

    def token_text(self, token: int) -> str:
        """How the vocabulary spells `token`."""
        self._kind(token)
        text = self._not_in_engine.get(token) or self._engine.id_to_token(token)
        return text or ""  # an empty text of the file is in neither

    def decode(self, ids: Iterable[int]) -> str:
        """The text of all tokens; each longest run of bytes that cannot be UTF-8 becomes one U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def is_control(self, token: int) -> bool:
        return self._kind(token) == Kind.CONTROL

    @functools.cached_property
    def control_texts(self) -> Mapping[str, int]:
        """Texts that mean a token only with `parse_special`, and their tokens."""
        return {text: token for text, token in self._special if self._kinds[token] != Kind.USER_DEFINED}

    def _kind(self, token: int) -> int:
        if not 0 <= token < self.n_vocab:
            raise UsageError(f"token {token} is outside the vocabulary of {self.n_vocab} tokens")
        return self._kinds[token]

    def _fragments(self, pieces: Iterable[tuple[str, bool]]) -> list[str | int]:
        """Plain texts, never two in a row, and the special tokens between them."""
        fragments: list[str | int] = []
        for text, parse_special in pieces:
            for fragment in self._cut(_escaped(text), parse_special):
                last = fragments[-1] if fragments else None
                if isinstance(fragment, str) and isinstance(last, str):
                    fragments[-1] = last + fragment
                else:
                    fragments.append(fragment)
        return fragments

    def _cut(self, text: str, parse_special: bool) -> list[str | int]:
        # Longest token first over the whole text, not leftmost first, as llama.cpp does.
        fragments: list[str | int] = [text] if text else []
        for special, token in self._special:
            if special in text and (parse_special or self._kinds[token] == Kind.USER_DEFINED):
                fragments = [part for fragment in fragments for part in _cut_at(special, token, fragment)]
        return fragments

    def _encode_plain(self, text: str, starts: bool) -> Iterator[int]:
        for index, part in enumerate(ESCAPED_BYTES.split(self._spelling.spell(text, starts=starts))):
            if index % 2:
                found = (self._byte_ids[byte] for byte in part.encode(errors="surrogateescape"))
                yield from (token for token in found if token is not None)
            elif part:
                ids = self._engine.encode(part, add_special_tokens=False).ids
                yield from ids if self._has_all_bytes else filter(self.n_vocab.__gt__, ids)


def _pre_tokenizer(gguf: GGUF, override: str | None) -> PreTokenizer:
    name = override or gguf.text(PREFIX + "pre", "")
    if not name:
        log.warning(
            "%s: names no pre-tokenizer (%spre), taking %r; answers may be worse, convert the model again",
            gguf.path,
            PREFIX,
            DEFAULT_PRE,
        )
        name = DEFAULT_PRE
    if name not in PRE_TOKENIZERS:
        known = " ".join(sorted(PRE_TOKENIZERS))
        raise TokenizerError(f"{gguf.path}: unknown pre-tokenizer {name!r}; override it by one of: {known}")
    return PRE_TOKENIZERS[name]


def _wanted(vocabulary: Vocabulary, name: str, token: int | None, wanted: bool) -> list[int]:
    if wanted and token is None:
        raise TokenizerError(f"{vocabulary.where}: {PREFIX}add_{name}_token is on, but there is no {name} token")
    return [token] if wanted and token is not None else []


def _escaped(text: str) -> str:
    """The text with surrogate escapes only for bytes that are no part of a character."""
    try:
        return text.encode(errors="surrogateescape").decode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        char = ord(text[error.start])
        raise UsageError(f"the text has a lone surrogate U+{char:04X} at character {error.start}") from None


def _cut_at(special: str, token: int, fragment: str | int) -> Iterator[str | int]:
    if isinstance(fragment, int):
        yield fragment
        return
    for index, part in enumerate(fragment.split(special)):
        if index:
            yield token
        if part:
            yield part
