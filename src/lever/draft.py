"""The draft: a small model that says what may follow, for any node of a tree. Decides nothing about the tree's growth.

Its cache holds the text and, behind it, the rows of expanded nodes in the order in which they came; a mask lets each
see its ancestors alone. Nothing here has to be exact: the target's own draw decides (`lever.engine`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lever.model import Model
from lever.tree import IN_TEXT, DraftTree, Rerooted

CANDIDATES = 8  # behind each node; more add rows that are hardly ever reached
NEAR = 12.0  # logits below the best: what is further off is never worth a row
COUNTED = 16.0  # logits below the best: 150 000 tokens further off have a share of 0.017 together at most
STAND_IN = 0  # for a token that the draft does not have
LEAST_TEMPERATURE = 1e-4  # as good as none, and no quotient of logits by it overflows


class Draft:
    """A model and what it has read. The text is that of the target: `begin` catches up with it.

    Of both vocabularies the first `n_vocab` tokens are the same, None: all. What else the target writes, the draft
    reads as another token; what else it knows itself, it never says.
    """

    def __init__(self, model: Model, n_candidates: int = CANDIDATES, *, n_vocab: int | None = None) -> None:
        self.model = model
        self._n_vocab = model.config.n_vocab if n_vocab is None else n_vocab
        self._n_candidates = n_candidates
        self._most_in_step = model.shape.n_logits if model.shape.n_steps else 0  # more nodes go layer by layer
        self._text: list[int] = []  # in the cache
        self._seen: list[list[int]] = []  # of each row behind the text: the rows that it sees, its own last

    @property
    def room(self) -> int:
        """Nodes that the next step can expand: as many as one pass takes, and as the cache has places for."""
        return min(self.model.shape.n_tree, self.model.shape.n_ctx - self.model.kv.length - len(self._seen))

    def behind(self, text: Sequence[int]) -> int:
        """How many of its last tokens it has to read."""
        return len(text) - _common_prefix(self._text, text, len(text) - 1)

    def read(self, text: Sequence[int], after_part: Callable[[], None] = lambda: None) -> None:
        """Read a text, all of it, in parts; what was read before and stands in it is kept."""
        self._go_back_to(_common_prefix(self._text, text, len(text)))
        n_batch = self.model.shape.n_batch
        for start in range(len(self._text), len(text), n_batch):
            part = text[start : start + n_batch]
            self.model.forward(self._readable(part))
            self._text += part
            after_part()

    def begin(self, tree: DraftTree, text: Sequence[int], temperature: float, trust: float = 1.0) -> None:
        """Read what is new of the text, whose last token is the tree's root, and expand the root.

        Its probabilities are multiplied by `trust`.
        """
        if tree.expanded(0):
            assert len(self._text) == len(text)
            return
        self._go_back_to(_common_prefix(self._text, text, len(text) - 1))
        n_batch, n_step = self.model.shape.n_batch, self._most_in_step
        while (n := len(text) - len(self._text)) > n_step:
            part = text[len(self._text) : len(self._text) + n_batch]
            self.model.forward(self._readable(part))
            self._text += part
        if n:
            logits = self.model.step(self._readable(text[-n:]), 0, range(1, n + 1), np.tri(n, dtype=bool))[n - 1]
            self.model.kv.gather(range(n), n)
            self._text += text[-n:]
        else:
            (logits,) = self.model.project([len(part) - 1])
        tree.expand(0, IN_TEXT, self._candidates(logits, temperature, trust))

    def expand(self, tree: DraftTree, nodes: Sequence[int], temperature: float, trust: float = 1.0) -> None:
        """Ask what follows these nodes, in one pass; their parents are expanded."""
        first = len(self._seen)
        visible = np.zeros((len(nodes), first + len(nodes)), bool)
        for row, node in enumerate(nodes):
            parent = tree.parents[node]
            ancestors = self._seen[tree.slots[parent]] if parent else []
            self._seen.append([*ancestors, first + row])
            visible[row, self._seen[-1]] = True
        tokens, depths = [tree.tokens[node] for node in nodes], [tree.depths[node] for node in nodes]
        for row, (node, logits) in enumerate(zip(nodes, self._logits(tokens, first, depths, visible), strict=True)):
            tree.expand(node, first + row, self._candidates(logits, temperature, trust))

    def along(self, text: Sequence[int], start: int) -> Iterator[list[tuple[int, float]]]:
        """What may follow each token of a text in turn, from the one at `start` on: tokens and their probabilities."""
        self.read(text[:start])
        n_batch, n_logits = self.model.shape.n_batch, self.model.shape.n_logits
        for first in range(start, len(text), n_batch):
            part = text[first : first + n_batch]
            self.model.forward(self._readable(part))
            self._text += part
            for row in range(0, len(part), n_logits):
                for logits in self.model.project(range(row, min(row + n_logits, len(part)))):
                    yield self._likeliest(logits, 0.0)

    def follow(self, rerooted: Rerooted, new_text: Sequence[int]) -> None:
        """The target has gone on: `new_text` tokens, of which the draft has seen the first few."""
        slots = [*rerooted.text_slots, *rerooted.tree_slots]
        n_text = len(rerooted.text_slots)
        self.model.kv.gather(slots, n_text)
        self._text += new_text[:n_text]
        place = {slot: number for number, slot in enumerate(rerooted.tree_slots)}
        self._seen = [[place[slot] for slot in self._seen[old] if slot in place] for old in rerooted.tree_slots]

    def _go_back_to(self, length: int) -> None:
        """Forget the tree, and the text behind its first tokens."""
        self._seen.clear()
        del self._text[length:]
        self.model.kv.truncate(length)

    def _logits(
        self, tokens: Sequence[int], first: int, depths: Sequence[int], visible: NDArray[np.bool_]
    ) -> Iterator[NDArray[np.float32]]:
        """Logits behind each of these nodes in turn, as of `Model.forward_nodes`."""
        if len(tokens) <= self._most_in_step:
            yield from self.model.step(tokens, first, depths, visible)
            return
        self.model.forward_nodes(tokens, first, depths, visible)
        width = self.model.shape.n_logits
        for start in range(0, len(tokens), width):
            yield from self.model.project(range(start, min(start + width, len(tokens))))

    def _readable(self, tokens: Sequence[int]) -> Sequence[int]:
        return [token if token < self._n_vocab else STAND_IN for token in tokens]

    def _candidates(self, logits: NDArray[np.float32], temperature: float, trust: float) -> list[tuple[int, float]]:
        return [(token, trust * probability) for token, probability in self._likeliest(logits, temperature)]

    def _likeliest(self, logits: NDArray[np.float32], temperature: float) -> list[tuple[int, float]]:
        return likeliest(logits[: self._n_vocab], self._n_candidates, temperature)


def likeliest(logits: NDArray[np.float32], n: int, temperature: float) -> list[tuple[int, float]]:
    """The n most probable tokens, or as many as are at all likely, and their probabilities. A greedy target is met by
    the draft's plain softmax.

    None where logits are not finite: a draft that is damaged, or overflows at a token, must not end the target's text.
    """
    best = logits.max()
    if not np.isfinite(best):
        return []
    warmth = max(temperature, LEAST_TEMPERATURE) if temperature > 0 else 1.0
    # Of the whole vocabulary only this is asked: what it leaves out adds less than two hundredths to the sum below.
    near = np.flatnonzero(logits > best - np.float32(COUNTED * warmth))
    below_best = (logits[near] - best) / np.float32(warmth)
    shares = np.exp(below_best)
    total = float(shares.sum())
    top = np.argpartition(below_best, -n)[-n:] if len(near) > n else np.arange(len(near))
    top = top[np.argsort(-below_best[top], kind="stable")]
    return [(int(near[at]), float(shares[at]) / total) for at in top if below_best[at] > -NEAR]


def _common_prefix(a: Sequence[int], b: Sequence[int], most: int) -> int:
    n = min(len(a), most)
    return next((place for place in range(n) if a[place] != b[place]), n)
