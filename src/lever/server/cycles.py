"""What a cycle was, in a shape for people: the tree with its texts, and where the time went. Measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from lever.tokenizer import Tokenizer
from lever.trace import Cycle, Mark

State = Literal["root", "accepted", "checked", "pruned", "drafted"]


class Node(msgspec.Struct, frozen=True):
    """A token of the tree. "checked": the target has seen it and drew another; "pruned": the target had begun to look
    at it; "drafted": it never came so far.
    """

    text: str
    parent: int  # its place in the list; -1 for the root
    state: State
    reach: float  # the draft's probability that the text goes through it


class CycleShown(msgspec.Struct, frozen=True):
    """One cycle; seconds and bytes. Drafting beside the pass counts in `draft_s`, so parts may exceed `seconds`."""

    nodes: list[Node]
    new_tokens: int
    seconds: float
    draft_s: float
    wait_s: float  # of the target's layers, for their bytes
    compute_s: float  # of the target's layers
    project_s: float
    read_bytes: int


class Cycles:
    """Shows the cycles of one answer, one after the other; `read_bytes` is the store's counter before the first."""

    def __init__(self, text_of: Callable[[int], str], read_bytes: int) -> None:
        self._text_of, self._read_bytes = text_of, read_bytes

    def shown(self, cycle: Cycle) -> CycleShown:
        """A copy of what is worth showing: the tree itself lives on and changes."""
        layers = [mark for mark in cycle.marks if mark.what == "layer"]
        before = self._read_bytes
        self._read_bytes = max([before, *(mark.read_bytes for mark in cycle.marks)])
        compute_s = sum((mark.compute_s for mark in layers), 0.0)
        return CycleShown(
            nodes=self._nodes(cycle),
            new_tokens=len(cycle.accepted) + 1,
            seconds=max((mark.end for mark in cycle.marks), default=cycle.started) - cycle.started,
            draft_s=_seconds(mark for mark in cycle.marks if mark.what == "draft"),
            wait_s=max(_seconds(layers) - compute_s, 0.0),
            compute_s=compute_s,
            project_s=_seconds(mark for mark in cycle.marks if mark.what == "project"),
            read_bytes=self._read_bytes - before,
        )

    def _nodes(self, cycle: Cycle) -> list[Node]:
        tree, rows = cycle.tree, cycle.rows.nodes
        states: dict[int, State] = dict.fromkeys(rows, "checked")
        states |= dict.fromkeys(cycle.pruned, "pruned")
        states |= {rows[row]: "accepted" for row in cycle.accepted}
        states[0] = "root"
        return [
            Node(self._text_of(token), tree.parents[node], states.get(node, "drafted"), tree.reach[node])
            for node, token in enumerate(tree.tokens)
        ]


def text_of(tokenizer: Tokenizer, token: int) -> str:
    """What a token adds to the text; the name of one that adds nothing."""
    return tokenizer.decode([token]) or tokenizer.token_text(token)


def _seconds(marks: Iterable[Mark]) -> float:
    return sum((mark.end - mark.start for mark in marks), 0.0)
