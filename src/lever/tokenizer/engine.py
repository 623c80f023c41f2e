"""Builds the Rust tokenizer of a vocabulary: merges, ranks, pre-tokenizer. Knows no special tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers

from lever.errors import TokenizerError
from lever.tokenizer.pre import PreTokenizer
from lever.tokenizer.spelling import SentencePiece
from lever.tokenizer.vocabulary import Kind, Vocabulary

# Stands for a byte that has no token, so that its neighbours are not joined. No text can spell it: it has a blank.
UNKNOWN = "no token"


def byte_level_engine(vocabulary: Vocabulary, merges: list[bytes], pre: PreTokenizer) -> tokenizers.Tokenizer:
    """BPE by the file's list of merges, on words cut by `pre`. A byte without a token becomes id n_vocab."""
    tokens = vocabulary.encodable()
    pairs = list(_pairs(vocabulary, merges, tokens))
    tokens[UNKNOWN] = len(vocabulary.texts)
    bpe = models.BPE(vocab=tokens, merges=pairs, unk_token=UNKNOWN, ignore_merges=pre.ignore_merges)
    engine = tokenizers.Tokenizer(bpe)
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns]
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = pre_tokenizers.Sequence([*cuts, alphabet])
    return engine


def _pairs(vocabulary: Vocabulary, merges: list[bytes], tokens: dict[str, int]) -> Iterator[tuple[str, str]]:
    """The merges, without those that would make a control or unused token out of plain text."""
    texts = vocabulary.texts
    for rank, merge in enumerate(merges):
        left, _, right = merge.decode(errors="replace").partition(" ")
        if left in tokens and right in tokens and left + right in tokens:
            yield texts[tokens[left]], texts[tokens[right]]  # the strings there are, not two more per merge
        elif not {left, right, left + right} <= vocabulary.ids.keys():
            raise TokenizerError(
                f"{vocabulary.where}: merge {rank}, {merge!r}, does not join two tokens into a third; "
                f"convert the model again"
            )


def sentencepiece_engine(vocabulary: Vocabulary, scores: list[float]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: of all neighbours that form a token, those with the best score are joined first.

    Written as ranked merges: every way to cut a token into two tokens is a merge, ranked by the token's score.
    Of equal scores the leftmost pair would be first; only runs of blanks have equal scores in real vocabularies,
    and for runs the longest token first comes to the same.
    """
    tokens = vocabulary.encodable()
    _check_bytes(vocabulary.where, tokens)
    joinable = {text for text, token in tokens.items() if vocabulary.kinds[token] != Kind.BYTE}
    ranked = sorted(joinable, key=lambda text: (-scores[tokens[text]], -len(text), tokens[text]))
    pairs = [pair for text in ranked for pair in _halves(text, joinable)]
    return tokenizers.Tokenizer(models.BPE(vocab=tokens, merges=pairs, byte_fallback=True))


def _halves(text: str, joinable: set[str]) -> Iterator[tuple[str, str]]:
    cuts = ((text[:at], text[at:]) for at in range(1, len(text)))
    return ((left, right) for left, right in cuts if left in joinable and right in joinable)


def _check_bytes(where: Path, tokens: dict[str, int]) -> None:
    spelling = SentencePiece(add_space_prefix=False)
    missing = next((spelling.byte(value) for value in range(256) if spelling.byte(value) not in tokens), None)
    if missing:
        raise TokenizerError(f"{where}: the vocabulary has no token {missing}; convert the model again")
