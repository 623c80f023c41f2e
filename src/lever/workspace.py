"""The memory of a model beside weights and cache: hidden rows, inputs of graphs, logits. Allocated once."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lever.arch import ModelConfig
from lever.ggml import Context, Library
from lever.ggml.arrays import placed, shared
from lever.kv_cache import F16_BYTES, SLOT_MULTIPLE
from lever.owner import Owner
from lever.pages import round_up
from lever.settings import TreeAttention
from lever.transformer import F32_BYTES, Run
from lever.weights.embedding import EmbeddingRows

GRAPH_ROWS = 32  # rows of one graph: enough for the kernels' full rate, few enough for a small compute buffer


@dataclass(frozen=True, slots=True)
class ModelShape:
    """How large the memory of a model beside its weights is."""

    n_ctx: int  # positions of the KV cache
    n_batch: int = 512  # rows of one pass over the layers
    n_logits: int = 4  # rows whose logits are held at once
    n_tree: int = 0  # rows of a tree at most; 0: no trees
    n_steps: int = 0  # graphs of whole passes that are kept, of a model that is all in memory (`lever.steps`)
    row_multiple: int = 4  # graphs have a multiple of so many rows (`lever.ggml.probe`)
    tree_attention: TreeAttention = "exact"

    @property
    def n_slots(self) -> int:
        """Slots of the KV cache."""
        return round_up(self.n_ctx, SLOT_MULTIPLE)

    @property
    def n_nodes(self) -> int:
        """Rows of a tree that lie beside the slots of the cache; masked ones lie in slots behind the text."""
        return self.n_tree if self.tree_attention == "exact" else 0

    @property
    def graph_rows(self) -> int:
        """Rows of one graph at most. A tree is computed in one, a prompt in several."""
        return self.padded(max(min(GRAPH_ROWS, self.n_batch), self.n_tree))

    def padded(self, n_rows: int) -> int:
        """The number of rows that a graph for `n_rows` has."""
        return round_up(n_rows, self.row_multiple)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows `start` to `start + n` of a pass, computed as one graph of m rows.

    Row i sees the slots up to `slots[i]`, its own. Rows of a prompt go to consecutive ones; those of a tree, which has
    `runs`, share slots with rows of the same depth.
    """

    start: int
    n: int
    m: int
    slots: tuple[int, ...]
    n_kv: int  # slots that attention runs over
    runs: tuple[Run, ...] = ()
    positions: tuple[int, ...] | None = None  # of each row, where it is not its slot
    visible: NDArray[np.bool_] | None = None  # [n, slots] that each row sees, where it is not all up to its own


class Workspace(Owner):
    """Each part as a ggml tensor and, under `..._array`, as a NumPy array of the same memory."""

    def __init__(self, ggml: Library, config: ModelConfig, embedding: EmbeddingRows, shape: ModelShape) -> None:
        self._shown: Block | None = None
        n_rows, n_logits = _widths(shape)
        with ExitStack() as stack:
            self._context = stack.enter_context(Context(ggml, 8))
            rows = functools.partial(shared, ggml, self._context, stack)
            self.hidden, self.hidden_array = rows(np.float32, n_rows, config.n_embd)
            self.chosen, self.chosen_array = rows(np.float32, n_logits, config.n_embd)
            self.logits, self.logits_array = rows(np.float32, n_logits, config.n_vocab)
            self.mask, self._mask_array = rows(np.float16, shape.graph_rows, shape.n_slots)
            self.positions, positions = rows(np.int32, 1, shape.graph_rows)
            self.ids, ids = rows(np.int32, 1, shape.graph_rows)
            self.mixed = 0
            if shape.n_nodes:
                self.mixed, _ = rows(np.float32, shape.padded(shape.n_nodes), config.n_heads * config.head_dim)
            # The rows that `embedding` has loaded, as a matrix that GET_ROWS can take from.
            table, n_loaded, where = embedding.table, embedding.n_rows, (embedding.address, embedding.rows_nbytes)
            self.table = placed(ggml, self._context, stack, table.type, n_loaded, table.shape[0], *where)
            self._cleanup = stack.pop_all()
        self._positions_array, self.ids_array = positions[0], ids[0]

    @staticmethod
    def nbytes(config: ModelConfig, shape: ModelShape) -> int:
        """Bytes that a workspace takes, before there is one. (Positions and ids are a page each.)"""
        n_rows, n_logits = _widths(shape)
        floats = (n_rows + n_logits) * config.n_embd + n_logits * config.n_vocab
        floats += shape.padded(shape.n_nodes) * config.n_heads * config.head_dim
        return F32_BYTES * floats + F16_BYTES * shape.graph_rows * shape.n_slots

    def show(self, block: Block) -> None:
        """Positions and mask for the rows of a block: each sees the slots up to its own. Padding repeats the last."""
        if block is self._shown:
            return
        self._shown = None  # until all is in place: an interrupt must not leave a half of it behind
        padding = (0, block.m - block.n)
        self._positions_array[: block.m] = np.pad(block.positions or block.slots, padding, "edge")
        mask = self._mask_array.reshape(-1)[: block.m * block.n_kv].reshape(block.m, block.n_kv)
        mask.fill(-np.inf)
        if block.visible is None:
            for row, slot in enumerate(np.pad(block.slots, padding, "edge")):
                mask[row, : slot + 1] = 0
        else:
            mask[:, : block.visible.shape[1]][np.pad(block.visible, (padding, (0, 0)), "edge")] = 0
        self._shown = block

    def close(self) -> None:
        """Free the memory; tensors become invalid."""
        self._cleanup.close()


def _widths(shape: ModelShape) -> tuple[int, int]:
    """Rows of hidden states, and rows of logits."""
    return shape.padded(max(shape.n_batch, shape.n_tree)), shape.padded(shape.n_logits)
