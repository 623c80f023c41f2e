"""Guesses from the text itself: what followed the last tokens when they stood there before. Needs no model.

Code that restates its prompt, summaries and forms repeat themselves for dozens of tokens; a chain of these is free to
make. How far such a guess holds is learned by how long the match was, also from cycles that did not use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lever.tree import DraftTree

LEAST_MATCH = 3  # tokens; two stand together by chance too often
MOST_MATCH = 24
MOST_TOKENS = 24  # of a guess
WINDOW = 1 << 14  # tokens of the text that are searched, the last ones
# Lengths of a match that are told apart, and the share of guessed tokens that hold, as if PRIOR_WEIGHT had been seen.
# Answers of the demo to code, arithmetic, chat: .63 to .90 after 3 tokens, .74 to .98 after 9; code after 16: .99.
BUCKETS = (3, 4, 6, 9, 16)
PRIORS, PRIOR_WEIGHT = (0.7, 0.75, 0.8, 0.8, 0.95), 4.0
FORGET = 0.98  # of what was seen, with each guess that is judged


@dataclass(frozen=True, slots=True)
class Match:
    """The last `length` tokens of a text stand in it before; `tokens` came then, in the order of that time, and come
    again where the text ends before there are enough.
    """

    length: int
    tokens: tuple[int, ...]


def find(text: Sequence[int]) -> Match | None:
    """The longest match, of such the latest; None where there is none of LEAST_MATCH tokens."""
    tokens = np.asarray(text[-WINDOW:], np.int64)
    n = len(tokens)
    if n <= LEAST_MATCH:
        return None
    ends = np.arange(LEAST_MATCH, n)  # a match ends before each of these
    length = 0
    while length < MOST_MATCH:
        longer = ends[(ends > length) & (tokens[ends - 1 - length] == tokens[n - 1 - length])]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if length < LEAST_MATCH:
        return None
    end = int(ends[-1])
    followed = tokens[
        end : end + MOST_TOKENS
    ]  # few where a text repeats itself often: the latest match is near its end
    return Match(length, tuple(int(token) for token in np.resize(followed, MOST_TOKENS)))


class Record:
    """How often the tokens of a match were right, by its length."""

    def __init__(self) -> None:
        self._held = [prior * PRIOR_WEIGHT for prior in PRIORS]
        self._judged = [PRIOR_WEIGHT] * len(BUCKETS)

    def observe(self, match: Match, followed: Sequence[int]) -> None:
        """These tokens came. Guessed ones count up to the first that was wrong."""
        pairs = list(zip(match.tokens, followed, strict=False))
        held = next((n for n, (guess, token) in enumerate(pairs) if guess != token), len(pairs))
        place = _bucket(match.length)
        self._held[place] = FORGET * self._held[place] + held
        self._judged[place] = FORGET * self._judged[place] + min(held + 1, len(pairs))

    def share(self, length: int) -> float:
        """The probability that the next token of such a match is right, when those before it were."""
        place = _bucket(length)
        return self._held[place] / self._judged[place]


def tree_of(match: Match, root: int, share: float) -> DraftTree:
    """The chain of a match behind the last token of the text. No draft has seen any of it."""
    tree = DraftTree.rooted_at(root)
    for node, token in enumerate(match.tokens):
        tree.add(node, token, share)
    return tree


def _bucket(length: int) -> int:
    return max(place for place, least in enumerate(BUCKETS) if length >= least)
