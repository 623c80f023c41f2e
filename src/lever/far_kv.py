"""A KV cache in the memory of another device, where graphs of copies move rows. As `KVCache` to who uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from lever.arch import ModelConfig
from lever.ggml import Backend, Context, Library
from lever.ggml.devices import FarDevice
from lever.gguf import F16
from lever.kv_cache import F16_BYTES, KVCache, kv_bytes
from lever.pages import round_up

CLEARED = 32  # slots that become zeros by one copy
COPY_NODES = 5  # of a copy: source, perhaps turned, what it is copied to meanwhile, target, and the second copy

ALIGNMENT = 256  # bytes, at most, that copies of rows on their way begin at a multiple of

Make = Callable[[int], int]  # a tensor of a context


def far_kv_bytes(config: ModelConfig, n_ctx: int, n_nodes: int = 0, most_moved: int = 0) -> int:
    """Bytes of the device that a cache takes in all, when so many rows may move at once: as `kv_bytes`, the zeros that
    clear it, and a copy of the keys and values that move.
    """
    row = F16_BYTES * config.n_embd_kv * config.n_layers
    return round_up(kv_bytes(config, n_ctx, n_nodes)) + CLEARED * row + 2 * most_moved * round_up(row, ALIGNMENT)


class FarKVCache(KVCache):
    """Rows that follow each other move together, and in all layers at once, which lie at equal distances."""

    def __init__(
        self, ggml: Library, config: ModelConfig, n_ctx: int, n_nodes: int, device: FarDevice, backend: Backend
    ) -> None:
        self._ggml, self._device, self._backend = ggml, device, backend
        super().__init__(ggml, config, n_ctx, n_nodes)

    def _allocate(self, ggml: Library, stack: ExitStack) -> None:
        self._memory = stack.enter_context(self._device.allocate(self.nbytes))
        self.layers = self._placed(ggml, self._memory.place)
        self._all = self._memory.place(ggml.new_tensor_1d(self._context.handle, F16, self.nbytes // F16_BYTES))
        n_zeros = CLEARED * self._width * self._n_layers
        zeros = stack.enter_context(self._device.allocate(F16_BYTES * n_zeros))
        self._zeros = zeros.place(ggml.new_tensor_1d(self._context.handle, F16, n_zeros))
        self._allocator = stack.enter_context(self._device.open_allocator())
        slots, nodes = (F16_BYTES * self._width * n for n in (self.n_slots, self.n_nodes))
        self._values_at, self._node_keys_at, self._node_values_at = slots, 2 * slots, 2 * slots + nodes

    def _take_nodes(self, rows: Sequence[int]) -> None:
        copies = []
        for row, place, n in _runs(rows):
            slot = self.length + place
            copies.append((self._rows(self._node_keys_at, row, n), self._rows(0, slot, n)))
            copies.append((self._turned(self._rows(self._node_values_at, row, n)), self._columns(slot, n)))
        self._copy(copies)

    def _move_slots(self, rows: Sequence[int], n_layers: int) -> None:
        copies = []
        for row, place, n in _runs(rows):
            if row != place:
                source, target = self.length + row, self.length + place
                copies.append((self._rows(0, source, n, n_layers), self._rows(0, target, n, n_layers)))
                copies.append((self._columns(source, n, n_layers), self._columns(target, n, n_layers)))
        self._copy(copies)

    def _move_nodes(self, rows: Sequence[int], n_layers: int) -> None:
        self._copy(
            [
                (self._rows(start, row, n, n_layers), self._rows(start, place, n, n_layers))
                for start in (self._node_keys_at, self._node_values_at)
                for row, place, n in _runs(rows)
                if row != place
            ]
        )

    def _clear(self, first: int, end: int) -> None:
        if first == 0:
            self._memory.clear()
            return
        parts = [(slot, min(CLEARED, end - slot)) for slot in range(first, end, CLEARED)]
        views = [view for slot, n in parts for view in (self._rows(0, slot, n), self._columns(slot, n))]
        if not views:
            return
        with Context(self._ggml, 3 * len(views), 3 * len(views)) as context:
            graph, ctx = context.new_graph(), context.handle
            for view in views:
                target = view(ctx)
                zeros = self._ggml.view_1d(ctx, self._zeros, self._ggml.nelements(target), 0)
                self._ggml.build_forward_expand(graph, self._ggml.cpy(ctx, zeros, target))
            self._compute(graph)

    def _rows(self, start: int, row: int, n: int, n_layers: int | None = None) -> Make:
        """Rows of keys, or of nodes' keys or values, that lie `start` bytes behind a layer's: [width, n, layers]."""
        row_nbytes = F16_BYTES * self._width
        strides = row_nbytes, self._layer_nbytes, start + row * row_nbytes
        return lambda ctx: self._ggml.view_3d(ctx, self._all, self._width, n, n_layers or self._n_layers, *strides)

    def _columns(self, slot: int, n: int, n_layers: int | None = None) -> Make:
        """Values of slots: [n, width, layers]."""
        strides = F16_BYTES * self.n_slots, self._layer_nbytes, self._values_at + F16_BYTES * slot
        return lambda ctx: self._ggml.view_3d(ctx, self._all, n, self._width, n_layers or self._n_layers, *strides)

    def _turned(self, make: Make) -> Make:
        """Rows as columns."""
        return lambda ctx: self._ggml.permute(ctx, make(ctx), 1, 0, 2, 3)

    def _copy(self, copies: Sequence[tuple[Make, Make]]) -> None:
        """All sources are read before anything is written."""
        if not copies:
            return
        ggml, n = self._ggml, COPY_NODES * len(copies)
        with Context(ggml, n, n) as context:
            graph = context.new_graph()
            held = [ggml.cont(context.handle, source(context.handle)) for source, _ in copies]
            for source in held:
                ggml.build_forward_expand(graph, source)
            for source, (_, target) in zip(held, copies, strict=True):
                ggml.build_forward_expand(graph, ggml.cpy(context.handle, source, target(context.handle)))
            self._compute(graph)

    def _compute(self, graph: int) -> None:
        self._allocator.allocate(graph)
        self._backend.compute(graph)

    def close(self) -> None:
        """Free the memory; tensors become invalid."""
        self._cleanup.close()


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Rows that follow each other: the first one, the place of that among all, and how many they are."""
    start = 0
    for place in range(1, len(rows) + 1):
        if place == len(rows) or rows[place] != rows[place - 1] + 1:
            yield rows[start], start, place - start
            start = place
