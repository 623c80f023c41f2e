"""The draft: a small model that says what may follow, for any node of a tree. Decides nothing about the tree's growth.

Its cache holds the text and, behind it, the rows of expanded nodes in the order in which they came; a mask lets each
see its ancestors alone. Nothing here has to be exact: the target's own draw decides (`lever.engine`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lever.model import Model
from lever.tree import IN_TEXT, DraftTree, Rerooted

CANDIDATES = 8  # behind each node; more add rows that are hardly ever reached
LEAST_TEMPERATURE = 1e-4  # as good as none, and no quotient of logits by it overflows


class Draft:
    """A model and what it has read. The text is that of the target: `begin` catches up with it."""

    def __init__(self, model: Model, n_candidates: int = CANDIDATES) -> None:
        self.model = model
        self._n_candidates = n_candidates
        self._text: list[int] = []  # in the cache
        self._seen: list[list[int]] = []  # of each row behind the text: the rows that it sees, its own last

    @property
    def room(self) -> int:
        """Nodes that the next step can expand: as many as one pass takes, and as the cache has places for."""
        return min(self.model.shape.n_tree, self.model.shape.n_ctx - self.model.kv.length - len(self._seen))

    def begin(self, tree: DraftTree, text: Sequence[int], temperature: float) -> None:
        """Read what is new of the text, whose last token is the tree's root, and expand the root."""
        if tree.expanded(0):
            assert len(self._text) == len(text)
            return
        self._go_back_to(_common_prefix(self._text, text, len(text) - 1))
        n_batch = self.model.shape.n_batch
        for start in range(len(self._text), len(text), n_batch):
            part = text[start : start + n_batch]
            self.model.forward(part)
            self._text += part
        (found,) = self._candidates([len(part) - 1], temperature)
        tree.expand(0, IN_TEXT, found)

    def expand(self, tree: DraftTree, nodes: Sequence[int], temperature: float) -> None:
        """Ask what follows these nodes, in one pass; their parents are expanded."""
        first = len(self._seen)
        visible = np.zeros((len(nodes), first + len(nodes)), bool)
        for row, node in enumerate(nodes):
            parent = tree.parents[node]
            ancestors = self._seen[tree.slots[parent]] if parent else []
            self._seen.append([*ancestors, first + row])
            visible[row, self._seen[-1]] = True
        self.model.forward_nodes([tree.tokens[n] for n in nodes], first, [tree.depths[n] for n in nodes], visible)
        rows = range(len(nodes))
        for row, (node, found) in enumerate(zip(nodes, self._candidates(rows, temperature), strict=True)):
            tree.expand(node, first + row, found)

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

    def _candidates(self, rows: Sequence[int], temperature: float) -> list[list[tuple[int, float]]]:
        """The most probable tokens behind each row, with their probabilities."""
        found = []
        step = self.model.shape.n_logits
        for start in range(0, len(rows), step):
            for logits in self.model.project(rows[start : start + step]):
                found.append(likeliest(logits, self._n_candidates, temperature))
        return found


def likeliest(logits: NDArray[np.float32], n: int, temperature: float) -> list[tuple[int, float]]:
    """The n most probable tokens and their probabilities. A greedy target is met by the draft's plain softmax.

    None where logits are not finite: a draft that is damaged, or overflows at a token, must not end the target's text.
    """
    best = logits.max()
    if not np.isfinite(best):
        return []
    below_best = logits - best
    if temperature > 0:
        below_best /= np.float32(max(temperature, LEAST_TEMPERATURE))
    top = np.argpartition(below_best, -n)[-n:]
    top = top[np.argsort(-below_best[top], kind="stable")]
    shares = np.exp(below_best)
    total = float(shares.sum())
    return [(int(token), float(shares[token]) / total) for token in top]


def _common_prefix(a: Sequence[int], b: Sequence[int], most: int) -> int:
    n = min(len(a), most)
    return next((place for place in range(n) if a[place] != b[place]), n)
