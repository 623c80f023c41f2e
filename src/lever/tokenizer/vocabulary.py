"""The vocabulary of a GGUF, checked: texts, types, special tokens, ends of turns. Encodes nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from lever.errors import TokenizerError
from lever.gguf import GGUF
from lever.tokenizer.spelling import byte_of_name

PREFIX = "tokenizer.ggml."


class Kind(IntEnum):
    """Values of `tokenizer.ggml.token_type`, from llama.h."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Subsets as bytes: `in` then costs least, and is asked for each token.
ENCODABLE = bytes((Kind.NORMAL, Kind.USER_DEFINED, Kind.BYTE))
SPECIAL = bytes((Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED))

# Metadata keys, and texts known to llama.cpp, of tokens that end a turn. Going on to padding, to another
# repository or to another file (fill-in-the-middle) is an end, too. U+FF5C and U+2581 are DeepSeek's.
END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
END_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <|endoftext|> <|end_of_text|> <|eom_id|> </s> <eos> <end_of_turn> "
    "<end_of_utterance> <EOT> _<EOT> [EOT] [EOS] <\uff5cend\u2581of\u2581sentence\uff5c> "
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> "
    "<|file_sep|>"
)
# Like those, control tokens whatever the file says. Files with wrong types are common, and as each text mixes
# letters and marks, no pre-tokenizer lets one come out of ordinary text.
CONTROL_TEXTS = (
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> \u2581<PRE> <|code_prefix|> "
    "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF> \u2581<SUF> <|code_suffix|> "
    "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> \u2581<MID> <|code_middle|>"
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Kept only while a tokenizer is built: the texts alone are 20 MB of Python objects."""

    where: Path
    texts: list[str]
    ids: dict[str, int]  # of every text that is not empty
    kinds: bytes  # a Kind for each id
    bos_id: int | None
    eos_id: int | None
    eog_ids: frozenset[int]

    def encodable(self) -> dict[str, int]:
        """The tokens that plain text may turn into."""
        return {text: token for text, token in self.ids.items() if self.kinds[token] in ENCODABLE}

    def others(self) -> dict[int, str]:
        """The texts of all other tokens."""
        return {token: self.texts[token] for token, kind in enumerate(self.kinds) if kind not in ENCODABLE}

    def special(self) -> list[tuple[str, int]]:
        """The tokens that are looked for before anything else, longest first."""
        found = [(text, token) for text, token in self.ids.items() if self.kinds[token] in SPECIAL]
        return sorted(found, key=lambda item: -len(item[0].encode()))


def read_vocabulary(gguf: GGUF, *, default_bos: int | None, default_eos: int | None) -> Vocabulary:
    """TokenizerError or GGUFError if the arrays do not fit together or an id lies outside them."""
    texts = _texts(gguf)
    ids = _ids(gguf.path, texts)
    kinds = _kinds(gguf, texts)
    for token in _find(f"{END_TEXTS} {CONTROL_TEXTS}", ids):
        kinds[token] = Kind.CONTROL
    eos = _special_id(gguf, "eos", len(texts), default_eos)
    ends = {eos, *(_special_id(gguf, name, len(texts)) for name in END_KEYS), *_find(END_TEXTS, ids)}
    return Vocabulary(
        where=gguf.path,
        texts=texts,
        ids=ids,
        kinds=bytes(kinds),
        bos_id=_special_id(gguf, "bos", len(texts), default_bos),
        eos_id=eos,
        eog_ids=frozenset(token for token in ends if token is not None),
    )


def read_scores(gguf: GGUF, n_vocab: int) -> list[float]:
    """The score of each token, which orders the merges of a llama-type vocabulary."""
    key = PREFIX + "scores"
    scores = gguf.reals(key)
    _check_length(gguf.path, key, len(scores), n_vocab)
    if not all(map(math.isfinite, scores)):
        raise TokenizerError(f"{gguf.path}: {key} holds a value that is not finite; convert the model again")
    return scores


def _texts(gguf: GGUF) -> list[str]:
    key = PREFIX + "tokens"
    texts: list[str] = []
    for token in gguf.strings(key):
        try:
            texts.append(token.decode())
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{gguf.path}: token {len(texts)} of {key} is not UTF-8: {token!r}") from error
    if not texts:
        raise TokenizerError(f"{gguf.path}: {key} is empty; convert the model again")
    return texts


def _ids(where: Path, texts: list[str]) -> dict[str, int]:
    # llama.cpp refuses duplicates, too: which of the two a text means would be a guess.
    ids: dict[str, int] = {}
    for token, text in enumerate(texts):
        if text and ids.setdefault(text, token) != token:
            raise TokenizerError(f"{where}: tokens {ids[text]} and {token} are both {text!r}; convert the model again")
    return ids


def _kinds(gguf: GGUF, texts: list[str]) -> bytearray:
    key = PREFIX + "token_type"
    values = gguf.integers(key, [Kind.NORMAL] * len(texts))
    _check_length(gguf.path, key, len(values), len(texts))
    unknown = set(values) - set(Kind)
    if unknown:
        raise TokenizerError(f"{gguf.path}: {key} holds {min(unknown)}, known are 0 to {max(Kind)}")
    kinds = bytearray(values)
    for token, text in enumerate(texts):
        if not text:
            kinds[token] = Kind.UNUSED
        elif kinds[token] == Kind.BYTE and byte_of_name(text) is None:
            raise TokenizerError(f"{gguf.path}: token {token} is of type byte but called {text!r}, not <0xNN>")
    return kinds


def _check_length(where: Path, key: str, length: int, n_vocab: int) -> None:
    if length != n_vocab:
        raise TokenizerError(f"{where}: {key} has {length} values for {n_vocab} tokens; convert the model again")


def _special_id(gguf: GGUF, name: str, n_vocab: int, default: int | None = None) -> int | None:
    key = f"{PREFIX}{name}_token_id"
    if key not in gguf.metadata:
        return default if default is not None and default < n_vocab else None
    token = gguf.integer(key)
    if not 0 <= token < n_vocab:
        raise TokenizerError(f"{gguf.path}: {key} is {token}, the vocabulary has {n_vocab} tokens")
    return token


def _find(texts: str, ids: dict[str, int]) -> list[int]:
    return [ids[text] for text in texts.split() if text in ids]
