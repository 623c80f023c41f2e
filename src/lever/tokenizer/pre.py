r"""How each `tokenizer.ggml.pre` cuts text into the words that BPE works on. Knows no vocabulary.

Names, cuts and defaults are those of llama.cpp's llama-vocab.cpp. The patterns are in Oniguruma's syntax and
give the same cuts as the published ones, with possessive quantifiers (`++`) where nothing can be given back:
a plain `\s*[\r\n]+` keeps one way back per blank, and some MiB of blanks then end in a panic of the engine.
What is a letter or a number is told by the engine's Unicode (16 in tokenizers 0.23). llama.cpp's tables are older:
next to the 4,382 letters and numbers of Unicode 16 words may be cut elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Patterns used one after the other, each on the pieces of the one before; matches and gaps are words."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False  # when the file does not say


BLANKS = r"\s+(?!\S)|\s+"  # the last blank before a word belongs to the word

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|" + BLANKS


def _cased(digits: str) -> str:
    """The llama-3 shape: contractions in any case, a mark may lead a word, marks keep their line ends."""
    contraction = r"'(?:[sdmtSDMT]|[lL][lL]|[vV][eE]|[rR][eE])"
    word = r"[^\r\n\p{L}\p{N}]?\p{L}++"
    marks = r" ?[^\s\p{L}\p{N}]++[\r\n]*+"
    lines = r"(?:[^\S\r\n]*+[\r\n]++)++"
    return "|".join((contraction, word, digits, marks, lines, BLANKS))


THREE_DIGITS = _cased(r"\p{N}{1,3}")
ONE_DIGIT = _cased(r"\p{N}")

# Family, and the names in files that mean it.
_FAMILIES: tuple[tuple[PreTokenizer, str], ...] = (
    (
        PreTokenizer((THREE_DIGITS,), ignore_merges=True, add_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (PreTokenizer((THREE_DIGITS,)), "smaug-bpe dbrx"),
    (
        PreTokenizer((ONE_DIGIT,)),
        "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan kormo f2llmv2 solar-open grok-2",
    ),
    (
        PreTokenizer((r"\p{N}", GPT2)),
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    ),
    (
        PreTokenizer((GPT2,)),
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat mellum a.x-4.0 modern-bert "
        "jina-es jina-de jina-v2-es jina-v2-de",
    ),
    (PreTokenizer((r"[\p{P}$+<=>^~|]++", GPT2, r"\p{N}++", r"[0-9]{3}")), "default"),
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {name: family for family, names in _FAMILIES for name in names.split()}
)
