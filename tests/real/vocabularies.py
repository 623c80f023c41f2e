"""Vocabularies learned on the spot from the texts that they are tested with, as files that llama.cpp loads.

Merges are learned on whole texts, across blanks, digits and marks, so that each wrong cut of a pre-tokenizer shows
in the ids. Knows nothing of lever.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path

from tests import tiny

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>")
USER_DEFINED = ("<tool_call>", "</tool_call>", "<tool", "\n\n\n", "      ")
UNUSED = ("[UNUSED1]",)
WHOLE_WORDS = ("Hello", " Hello", "Straße", " Straße", "....")  # that no merge makes

PAIRS_PER_ROUND = 20


@cache
def learn_merges(texts: tuple[str, ...], count: int, banned: frozenset[str]) -> list[tuple[str, str]]:
    """The `count` pairs of neighbours that a BPE trainer would join, some of each round at once."""
    lines = [list(text) for text in texts]
    merges: list[tuple[str, str]] = []
    seen = set(banned)
    while len(merges) < count:
        pairs = Counter(pair for line in lines for pair in pairwise(line))
        ranked = sorted(pairs, key=lambda pair: (-pairs[pair], pair))
        fresh = [pair for pair in ranked if "".join(pair) not in seen][:PAIRS_PER_ROUND]
        if not fresh:
            return merges
        for pair in fresh:
            if "".join(pair) not in seen:
                seen.add("".join(pair))
                merges.append(pair)
                lines = [_join(line, pair) for line in lines]
    return merges


def _join(line: list[str], pair: tuple[str, str]) -> list[str]:
    joined: list[str] = []
    for symbol in line:
        if joined and (joined[-1], symbol) == pair:
            joined[-1] += symbol
        else:
            joined.append(symbol)
    return joined


def in_letters(text: str) -> str:
    """GPT-2's spelling of a text."""
    letters = tiny.byte_letters()
    return "".join(letters[byte] for byte in text.encode())


def byte_level(texts: Iterable[str], pre: str | None, *, merges: int = 500) -> dict[str, object]:
    """Metadata of a gpt2-type vocabulary."""
    banned = frozenset(map(in_letters, (*CONTROL, *USER_DEFINED, *UNUSED, *WHOLE_WORDS)))
    learned = learn_merges(tuple(map(in_letters, texts)), merges, banned)
    normal = [*tiny.byte_letters(), *map("".join, learned), *map(in_letters, WHOLE_WORDS)]
    tokens = [*CONTROL, *normal, *USER_DEFINED, *UNUSED]
    types = [tiny.CONTROL] * len(CONTROL) + [tiny.NORMAL] * len(normal)
    types += [tiny.USER_DEFINED] * len(USER_DEFINED) + [tiny.UNUSED] * len(UNUSED)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in learned],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentencepiece(
    texts: Iterable[str],
    *,
    merges: int = 500,
    pieces: Iterable[str] = (),
    more: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Metadata of a llama-type vocabulary: learned pieces, letters, and `pieces` as they are.

    NUL and characters outside the basic plane fall back to bytes.
    """
    control = ("<s>", "</s>")
    lines = tuple(re.sub("[^\x01-\uffff]", "", text.replace(" ", "▁")) for text in texts)
    # llama.cpp would join parts of control, byte and unused tokens to these tokens; lever, on purpose, does not.
    parts = {text[start:end] for text in ("<unk>", *control) for start in range(5) for end in range(start + 1, 6)}
    names = ("<unk>", *control, *(f"<0x{byte:02X}>" for byte in range(256)))
    clean = tuple(line for line in lines if not re.search("<[^<>]*>|<0x|UNUSED", line))
    learned = learn_merges(clean, merges, frozenset({*names, *USER_DEFINED, *UNUSED, *parts}))
    letters = sorted(set("".join(lines)))
    normal = [*map("".join, learned), *letters, *pieces]
    tokens = [*names, *normal, *USER_DEFINED, *UNUSED]
    types = [tiny.UNKNOWN, tiny.CONTROL, tiny.CONTROL] + [tiny.BYTE] * 256 + [tiny.NORMAL] * len(normal)
    types += [tiny.USER_DEFINED] * len(USER_DEFINED) + [tiny.UNUSED] * len(UNUSED)
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        **(more or {}),
    }


def write_model(path: Path, vocabulary: Mapping[str, object]) -> Path:
    """The smallest model that llama.cpp loads with this vocabulary."""
    tokens = vocabulary["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    fields = tiny.tiny_fields(
        tokenizer=False,
        metadata={key: value for key, value in vocabulary.items() if value is not None},
        n_vocab=len(tokens),
        n_layers=1,
        n_embd=32,
        n_ff=32,
        n_heads=1,
        n_kv_heads=1,
        type="F32",
    )
    return fields.write(path)
