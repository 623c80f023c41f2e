"""The memory of a model beside weights and cache: hidden rows, inputs of graphs, logits. Allocated once."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lever.arch import ModelConfig
from lever.ggml import Context, Library
from lever.ggml.devices import Device
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
    """Each part as a matrix for ggml and NumPy (`lever.ggml.arrays`): rows under way where layers are computed, chosen
    ones and logits where the output projection is.
    """

    def __init__(
        self,
        ggml: Library,
        config: ModelConfig,
        embedding: EmbeddingRows,
        shape: ModelShape,
        device: Device,
        projecting: Device,
    ) -> None:
        self._n_slots = shape.n_slots
        # Elsewhere there is a mask for each block of a pass, so that it is sent once and not once for each layer.
        self._keeps_blocks = not device.on_host
        self._shown: dict[int, Block] = {}  # by the row of mask and positions that they begin at
        n_rows, n_logits = _widths(shape)
        n_shown = max(n_rows, shape.graph_rows) if self._keeps_blocks else shape.graph_rows
        with ExitStack() as stack:
            self._context = stack.enter_context(Context(ggml, 8))
            rows = functools.partial(device.matrix, self._context, stack)
            chosen_rows = functools.partial(projecting.matrix, self._context, stack)
            self.hidden = rows(np.float32, n_rows, config.n_embd)
            self.chosen = chosen_rows(np.float32, n_logits, config.n_embd)
            self.logits = chosen_rows(np.float32, n_logits, config.n_vocab)
            self.mask = rows(np.float16, n_shown, shape.n_slots)
            self.positions = rows(np.int32, 1, n_shown)
            self.ids = rows(np.int32, 1, shape.graph_rows)
            self.mixed = 0
            if shape.n_nodes:
                n_mixed, width = shape.padded(shape.n_nodes), config.n_heads * config.head_dim
                self.mixed = rows(np.float32, n_mixed, width).tensor
            # The rows that `embedding` has loaded, as a matrix that GET_ROWS can take from.
            table = embedding.table
            self.table = device.over(self._context, stack, table.type, embedding.n_rows, table.shape[0], embedding.rows)
            self._cleanup = stack.pop_all()

    @staticmethod
    def nbytes(config: ModelConfig, shape: ModelShape, *, on_host: bool = True) -> int:
        """Bytes that a workspace takes, before there is one. (Positions and ids are a page each.)

        Not `on_host`, it takes as much here as on the device.
        """
        n_rows, n_logits = _widths(shape)
        floats = (n_rows + n_logits) * config.n_embd + n_logits * config.n_vocab
        floats += shape.padded(shape.n_nodes) * config.n_heads * config.head_dim
        n_shown = shape.graph_rows if on_host else max(n_rows, shape.graph_rows)
        return F32_BYTES * floats + F16_BYTES * n_shown * shape.n_slots

    def show(self, block: Block) -> int:
        """Positions and mask for the rows of a block: each sees the slots up to its own. Padding repeats the last.

        They begin at the row that is returned.
        """
        row = block.start if self._keeps_blocks else 0
        if self._shown.get(row) is block:
            return row
        self._shown.pop(row, None)  # until all is in place: an interrupt must not leave a half of it behind
        padding = (0, block.m - block.n)
        self.positions.array[0, row : row + block.m] = np.pad(block.positions or block.slots, padding, "edge")
        at = row * self._n_slots
        mask = self.mask.array.reshape(-1)[at : at + block.m * block.n_kv].reshape(block.m, block.n_kv)
        mask.fill(-np.inf)
        if block.visible is None:
            for place, slot in enumerate(np.pad(block.slots, padding, "edge")):
                mask[place, : slot + 1] = 0
        else:
            mask[:, : block.visible.shape[1]][np.pad(block.visible, (padding, (0, 0)), "edge")] = 0
        self.positions.send(block.m, row)
        self.mask.send(block.m * block.n_kv, at)
        self._shown[row] = block
        return row

    def mask_at(self, row: int) -> int:
        """Where the mask begins that is shown at a row: bytes."""
        return F16_BYTES * row * self._n_slots

    def close(self) -> None:
        """Free the memory; tensors become invalid."""
        self._cleanup.close()


def _widths(shape: ModelShape) -> tuple[int, int]:
    """Rows of hidden states, and rows of logits."""
    return shape.padded(max(shape.n_batch, shape.n_tree)), shape.padded(shape.n_logits)
