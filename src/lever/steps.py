"""Whole passes of a model that is all in memory, as one graph each: what a draft does dozens of times a second.

Building a graph takes as long as a small model computes for a row, so graphs are kept. Where keys, values and positions
belong stands in their inputs; only the number of rows and the slots that attention runs over make another graph.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np

from lever.arch import ModelConfig
from lever.ggml import Backend, Context, GraphAllocator, Library
from lever.ggml.devices import Device
from lever.kv_cache import F16_BYTES, KVCache
from lever.owner import Owner
from lever.pages import round_up
from lever.transformer import Rows, Transformer, of_layer, step_nodes
from lever.weights.plan import ModelUnits
from lever.weights.tensors import Weights
from lever.workspace import Block, ModelShape, Workspace

I64_BYTES = 8
Key = tuple[int, int]  # rows, and slots of attention


class Steps(Owner):
    """Kept graphs of whole passes of up to `n_logits` rows, each with the logits of all its rows."""

    def __init__(
        self,
        ggml: Library,
        config: ModelConfig,
        units: ModelUnits,
        weights: Weights,
        shape: ModelShape,
        workspace: Workspace,
        kv: KVCache,
        device: Device,
        backend: Backend,
        allocator: GraphAllocator,
        small: Mapping[str, int],
    ) -> None:
        """`weights` are all in the device's memory, so that their tensors stay valid; all else is the model's."""
        self._ggml, self._config, self._shape = ggml, config, shape
        self._workspace, self._kv = workspace, kv
        self._backend, self._allocator, self._small = backend, allocator, small
        self._transformer = Transformer(ggml, config)
        self._layers = [of_layer(found, layer) for layer, found in enumerate(weights.stream(units.layers))]
        matrices = [next(iter(found.values())) for found in weights.stream((band,) for band in units.projection)]
        self._bands = list(zip(matrices, units.band_rows, strict=True))
        self._graphs: OrderedDict[Key, tuple[Context, int]] = OrderedDict()  # the least recently used one first
        self._allocated = allocator.nbytes
        width, n = config.n_embd_kv, shape.n_logits
        with ExitStack() as stack:
            self._inputs = stack.enter_context(Context(ggml, 2))
            self._keys = device.matrix(self._inputs, stack, np.int64, 1, n)
            self._values = device.matrix(self._inputs, stack, np.int64, 1, n * width)
            n_nodes = step_nodes(config.n_layers, len(self._bands))
            self._free = [stack.enter_context(Context(ggml, n_nodes, n_nodes)) for _ in range(shape.n_steps)]
            self._cleanup = stack.pop_all()

    @staticmethod
    def nbytes(ggml: Library, config: ModelConfig, units: ModelUnits, shape: ModelShape) -> int:
        """Bytes that it takes, before there is one."""
        n_nodes = step_nodes(config.n_layers, len(units.projection))
        with Context(ggml, n_nodes, n_nodes) as context:
            return shape.n_steps * context.nbytes + _places_nbytes(config, shape)

    def run(self, block: Block) -> float:
        """Compute the rows of a block, whose ids are in the workspace already; the seconds it took.

        Their keys and values are in the cache then, and their logits in the workspace.
        """
        n = block.n
        assert n <= self._shape.n_logits
        slots = np.asarray(block.slots, np.int64)
        self._keys.array[0, :n] = slots
        width = self._config.n_embd_kv
        values = self._values.array[0, : n * width].reshape(n, width)
        np.add(slots[:, None], self._kv.n_slots * np.arange(width), out=values)
        self._keys.send(n)
        self._values.send(n * width)
        self._workspace.show(block)
        graph = self._graph(block)
        started = time.perf_counter()
        self._backend.compute(graph)
        self._workspace.logits.fetch(n * self._config.n_vocab)
        return time.perf_counter() - started

    def _graph(self, block: Block) -> int:
        """The kept one, or one that is built in the place of the one that was not used for longest."""
        if self._allocator.nbytes != self._allocated:  # its memory has moved, and what lay in it is lost
            self._forget()
        key = (block.n, block.n_kv)
        found = self._graphs.pop(key, None)
        if found is None:
            context = self._free.pop() if self._free else self._graphs.popitem(last=False)[1][0]
            context.reset()
            try:
                found = context, self._build(context, block)
            except BaseException:
                self._free.append(context)
                raise
        self._graphs[key] = found
        return found[1]

    def _build(self, context: Context, block: Block) -> int:
        ggml, space, n, m = self._ggml, self._workspace, block.n, block.m
        handle, width = context.handle, self._config.n_embd_kv
        rows = Rows(
            hidden=0,
            positions=ggml.view_1d(handle, space.positions.tensor, m, 0),
            mask=ggml.view_2d(handle, space.mask.tensor, block.n_kv, m, F16_BYTES * block.n_kv, 0),
            n=n,
            m=m,
            first_slot=0,
            n_kv=block.n_kv,
            key_places=ggml.view_1d(handle, self._keys.tensor, n, 0),
            value_places=ggml.view_1d(handle, self._values.tensor, n * width, 0),
        )
        graph = self._transformer.step(
            context,
            space.table.tensor,
            ggml.view_1d(handle, space.ids.tensor, m, 0),
            self._layers,
            self._small.get("rope_freqs.weight"),
            self._kv.layers,
            self._kv.n_slots,
            rows,
            self._small["output_norm.weight"],
            self._bands,
            space.logits.tensor,
        )
        self._allocator.allocate(graph)
        if self._allocator.nbytes != self._allocated:
            self._forget()
        return graph

    def _forget(self) -> None:
        self._allocated = self._allocator.nbytes
        self._free += [context for context, _ in self._graphs.values()]
        self._graphs.clear()

    def close(self) -> None:
        """Free the graphs."""
        self._graphs.clear()
        self._cleanup.close()


def _places_nbytes(config: ModelConfig, shape: ModelShape) -> int:
    n = shape.n_logits
    return round_up(I64_BYTES * n) + round_up(I64_BYTES * n * config.n_embd_kv)
