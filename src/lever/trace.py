"""What a cycle was: its tree, what the target made of it, and when things were done. Measures and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lever.tree import DraftTree, TreeRows


@dataclass(frozen=True, slots=True)
class Mark:
    """A piece of work on the clock of `time.perf_counter`: a draft step, a layer of the target, a row's logits.

    Of a layer, `compute_s` is the end of it that was spent inside ggml; before that it waited for its bytes.
    `read_bytes` is the store's counter at `end`, so that two marks tell what was read between them.
    """

    what: Literal["draft", "layer", "project"]
    start: float
    end: float
    compute_s: float
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Cycle:
    """One pass of the target and the drafting before it. `accepted`: rows behind the root whose tokens became text;
    `pruned`: nodes that had a row in the lower layers alone.

    A tree of one row, or of none that was drafted, is plain decoding. The tree is the engine's own and must not be
    changed.
    """

    tree: DraftTree
    rows: TreeRows
    accepted: tuple[int, ...]
    drafted: int  # nodes that the draft was asked about
    started: float
    marks: tuple[Mark, ...]
    pruned: tuple[int, ...] = ()
