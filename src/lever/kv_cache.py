"""Keys and values of the rows that a model has seen. Knows where they lie, not how they are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from lever.arch import ModelConfig
from lever.errors import ContextOverflow
from lever.ggml import Buffer, Context, Library
from lever.gguf import F16
from lever.owner import Owner
from lever.pages import Pages, round_up

F16_BYTES = 2
# Attention runs over a multiple of this many slots: the kernels' lanes then see each slot at the same place whatever
# the length, and the slots behind the context add exact zeros (they are finite and masked).
SLOT_MULTIPLE = 256


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Tensors of one layer. keys: F16 [n_embd_kv, n_slots]; values, transposed: F16 [n_slots, n_embd_kv].

    node_keys and node_values: F16 [n_embd_kv, n_nodes], rows of a tree that are not in the text yet; 0 without trees.
    """

    keys: int
    values: int
    node_keys: int = 0
    node_values: int = 0


def kv_bytes(config: ModelConfig, n_ctx: int, n_nodes: int = 0) -> int:
    """Bytes of a cache for `n_ctx` positions and a tree of `n_nodes` rows."""
    return 2 * F16_BYTES * config.n_layers * config.n_embd_kv * (round_up(n_ctx, SLOT_MULTIPLE) + n_nodes)


class KVCache(Owner):
    """`n_ctx` positions for every layer, all zero at first; `length` of them are in use.

    A pass writes its rows behind `length` and moves `length` only when it is complete, so a failed pass leaves the
    cache as it was. The rows of a tree lie beside the slots, in the order of the pass, until `keep` moves those of the
    accepted path behind `length`.
    """

    def __init__(self, ggml: Library, config: ModelConfig, n_ctx: int, n_nodes: int = 0) -> None:
        self.n_ctx = n_ctx
        self.n_nodes = n_nodes
        self.n_slots = round_up(n_ctx, SLOT_MULTIPLE)
        self.nbytes = round_up(kv_bytes(config, n_ctx, n_nodes))  # held
        self.length = 0
        self.layers: tuple[LayerKV, ...] = ()
        self._width, self._n_layers = config.n_embd_kv, config.n_layers
        self._written = 0  # slots that may hold something
        self._moved: int | None = None  # the first row of the text that was computed in another slot
        with ExitStack() as stack:
            self._context = stack.enter_context(Context(ggml, 4 * config.n_layers + 2))
            self._allocate(ggml, stack)
            self._cleanup = stack.pop_all()

    def _allocate(self, ggml: Library, stack: ExitStack) -> None:
        """Make the tensors, over memory that the stack owns."""
        pages = stack.enter_context(Pages(self.nbytes))
        buffer = stack.enter_context(Buffer(ggml, pages.address, pages.nbytes))
        self.layers = self._placed(ggml, lambda tensor, at: buffer.place(tensor, pages.address + at))
        width, n_slots, n_nodes, n_layers = self._width, self.n_slots, self.n_nodes, self._n_layers
        halves = pages.bytes[: n_layers * self._layer_nbytes].view(np.float16).reshape(n_layers, -1)
        ends = np.cumsum([width * n_slots, width * n_slots, width * n_nodes])
        keys, values, node_keys, node_values = np.split(halves, ends, axis=1)
        self._keys = keys.reshape(n_layers, n_slots, width)
        self._values = values.reshape(n_layers, width, n_slots)
        self._node_keys = node_keys.reshape(n_layers, n_nodes, width)
        self._node_values = node_values.reshape(n_layers, n_nodes, width)

    @property
    def _layer_nbytes(self) -> int:
        return 2 * F16_BYTES * self._width * (self.n_slots + self.n_nodes)

    def _placed(self, ggml: Library, place: Callable[[int, int], int]) -> tuple[LayerKV, ...]:
        """Tensors of all layers, one behind the other; `place` gives one its data, so many bytes from the start."""
        width, layers, at = self._width, [], 0
        slots = [(width, self.n_slots), (self.n_slots, width)]
        nodes = [(width, self.n_nodes)] * 2 if self.n_nodes else []
        for _ in range(self._n_layers):
            tensors = []
            for shape in slots + nodes:
                tensors.append(place(ggml.new_tensor_2d(self._context.handle, F16, *shape), at))
                at += F16_BYTES * shape[0] * shape[1]
            layers.append(LayerKV(*tensors))
        return tuple(layers)

    @property
    def in_order(self) -> bool:
        """Whether all rows were computed where they lie. Else they and what follows differ from plain decoding's."""
        return self._moved is None

    def require(self, n_rows: int) -> None:
        """Make ready for `n_rows` more rows; ContextOverflow unless they fit."""
        if self.length + n_rows > self.n_ctx:
            raise ContextOverflow(
                f"{self.length + n_rows} tokens do not fit in a context of {self.n_ctx}: "
                "shorten the prompt or give more with -c"
            )
        self._written = max(self._written, self.length + n_rows)

    def keep(self, rows: Sequence[int]) -> None:
        """The rows of the accepted path, numbered as in the last tree pass, become the text's next ones."""
        assert self.length + len(rows) <= self.n_ctx
        end = self.length + len(rows)
        self._take_nodes(rows)
        self._written = max(self._written, end)
        self.length = end

    def gather(self, slots: Sequence[int], n_text: int) -> None:
        """Of the rows behind the text, numbered from its end, keep these, in order; the first n_text are text now."""
        assert n_text <= len(slots)
        self._move_slots(slots, len(self.layers))
        if self._moved is None:
            self._moved = next((self.length + n for n in range(n_text) if slots[n] != n), None)
        self.length += n_text

    def compact(self, rows: Sequence[int], n_layers: int) -> None:
        """Only these rows of the tree go on: in the first layers, which have them all, they move to the front."""
        if self.n_nodes:
            self._move_nodes(rows, n_layers)
        else:
            self._move_slots(rows, n_layers)

    def truncate(self, length: int) -> None:
        """Keep only the first `length` rows. What lies behind them becomes zeros.

        It is masked, and finite values would add exact zeros too; but those of a prompt that overflowed are not finite,
        and zero times infinity is not zero.
        """
        assert 0 <= length <= self.length
        self.length = length
        self._clear(length, self._written)
        self._written = length
        if self._moved is not None and length <= self._moved:
            self._moved = None

    # Where rows lie, and how they get elsewhere (`lever.far_kv` has another way)

    def _take_nodes(self, rows: Sequence[int]) -> None:
        """Rows of the tree, as text, into the slots behind the text."""
        slots = slice(self.length, self.length + len(rows))
        self._keys[:, slots] = self._node_keys[:, rows]
        self._values[:, :, slots] = self._node_values[:, rows].transpose(0, 2, 1)

    def _move_slots(self, rows: Sequence[int], n_layers: int) -> None:
        """Rows behind the text to the first places there, in the first layers."""
        chosen, slots = self.length + np.asarray(rows, int), slice(self.length, self.length + len(rows))
        self._keys[:n_layers, slots] = self._keys[:n_layers, chosen]
        self._values[:n_layers, :, slots] = self._values[:n_layers, :, chosen]

    def _move_nodes(self, rows: Sequence[int], n_layers: int) -> None:
        """Rows of the tree to the first places there, in the first layers."""
        chosen, n = list(rows), len(rows)
        self._node_keys[:n_layers, :n] = self._node_keys[:n_layers, chosen]
        self._node_values[:n_layers, :n] = self._node_values[:n_layers, chosen]

    def _clear(self, first: int, end: int) -> None:
        """Slots become zeros, in all layers."""
        self._keys[:, first:end] = 0
        self._values[:, :, first:end] = 0

    def close(self) -> None:
        """Free the memory; tensors become invalid."""
        self._keys = self._values = self._node_keys = self._node_values = np.empty((0, 0, 0), np.float16)
        self._cleanup.close()
