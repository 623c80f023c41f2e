"""Keys and values of the rows that a model has seen. Knows where they lie, not how they are computed."""

from __future__ import annotations

from collections.abc import Sequence
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
        self.length = 0
        self._written = 0  # slots that may hold something
        self._moved: int | None = None  # the first row of the text that was computed in another slot
        width, n_layers = config.n_embd_kv, config.n_layers
        with ExitStack() as stack:
            self._pages = stack.enter_context(Pages(kv_bytes(config, n_ctx, n_nodes)))
            self._buffer = stack.enter_context(Buffer(ggml, self._pages.address, self._pages.nbytes))
            self._context = stack.enter_context(Context(ggml, 4 * n_layers))
            place = _Places(ggml, self._context, self._buffer, self._pages)
            slots = [(width, self.n_slots), (self.n_slots, width)]
            nodes = [(width, n_nodes)] * 2 if n_nodes else []
            self.layers = tuple(LayerKV(*(place.tensor(*shape) for shape in slots + nodes)) for _ in range(n_layers))
            self._cleanup = stack.pop_all()
        halves = self._pages.bytes[: kv_bytes(config, n_ctx, n_nodes)].view(np.float16).reshape(n_layers, -1)
        ends = np.cumsum([width * self.n_slots, width * self.n_slots, width * n_nodes])
        keys, values, node_keys, node_values = np.split(halves, ends, axis=1)
        self._keys = keys.reshape(n_layers, self.n_slots, width)
        self._values = values.reshape(n_layers, width, self.n_slots)
        self._node_keys = node_keys.reshape(n_layers, n_nodes, width)
        self._node_values = node_values.reshape(n_layers, n_nodes, width)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._pages.nbytes

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
        self._keys[:, self.length : end] = self._node_keys[:, rows]
        self._values[:, :, self.length : end] = self._node_values[:, rows].transpose(0, 2, 1)
        self._written = max(self._written, end)
        self.length = end

    def gather(self, slots: Sequence[int], n_text: int) -> None:
        """Of the rows behind the text, numbered from its end, keep these, in order; the first n_text are text now."""
        assert n_text <= len(slots)
        chosen, end = self.length + np.asarray(slots, int), self.length + len(slots)
        self._keys[:, self.length : end] = self._keys[:, chosen]
        self._values[:, :, self.length : end] = self._values[:, :, chosen]
        if self._moved is None:
            self._moved = next((self.length + n for n in range(n_text) if slots[n] != n), None)
        self.length += n_text

    def compact(self, rows: Sequence[int], n_layers: int) -> None:
        """Only these rows of the tree go on: in the first layers, which have them all, they move to the front."""
        chosen, n = list(rows), len(rows)
        if self.n_nodes:
            self._node_keys[:n_layers, :n] = self._node_keys[:n_layers, chosen]
            self._node_values[:n_layers, :n] = self._node_values[:n_layers, chosen]
            return
        behind = [self.length + row for row in chosen]
        self._keys[:n_layers, self.length : self.length + n] = self._keys[:n_layers, behind]
        self._values[:n_layers, :, self.length : self.length + n] = self._values[:n_layers, :, behind]

    def truncate(self, length: int) -> None:
        """Keep only the first `length` rows. What lies behind them becomes zeros.

        It is masked, and finite values would add exact zeros too; but those of a prompt that overflowed are not finite,
        and zero times infinity is not zero.
        """
        assert 0 <= length <= self.length
        self.length = length
        self._keys[:, length : self._written] = 0
        self._values[:, :, length : self._written] = 0
        self._written = length
        if self._moved is not None and length <= self._moved:
            self._moved = None

    def close(self) -> None:
        """Free the memory; tensors become invalid."""
        self._keys = self._values = self._node_keys = self._node_values = np.empty((0, 0, 0), np.float16)
        self._cleanup.close()


class _Places:
    """Gives out the memory of a cache, tensor after tensor."""

    def __init__(self, ggml: Library, context: Context, buffer: Buffer, pages: Pages) -> None:
        self._ggml, self._context, self._buffer = ggml, context, buffer
        self._next = pages.address

    def tensor(self, length: int, rows: int) -> int:
        """F16 [length, rows]."""
        tensor: int = self._ggml.new_tensor_2d(self._context.handle, F16, length, rows)
        self._buffer.place(tensor, self._next)
        self._next += F16_BYTES * length * rows
        return tensor
