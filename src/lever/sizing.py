"""How much memory computing takes beside weights, cache and workspace: asked of ggml before there is any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from lever.arch import ModelConfig
from lever.ggml import Buffer, Context, GraphAllocator, Library
from lever.gguf import F16, F32, I32, I64
from lever.kv_cache import SLOT_MULTIPLE, LayerKV
from lever.pages import PAGE
from lever.transformer import (
    F32_BYTES,
    Rows,
    Run,
    Transformer,
    graph_nodes,
    graph_tensors,
    of_layer,
    step_nodes,
)
from lever.weights.plan import ModelUnits
from lever.weights.tensors import overlay
from lever.workspace import ModelShape


def compute_nbytes(
    ggml: Library,
    config: ModelConfig,
    units: ModelUnits,
    shape: ModelShape,
    n_threads: int,
    *,
    projection_only: bool = False,
) -> int:
    """Bytes of intermediate tensors, and of ggml's own work buffer; of the `projection_only`, where that is all."""
    graphs = wide_graphs(ggml, config, units, shape, projection_only=projection_only)
    with GraphAllocator(ggml) as allocator:
        intermediate = max(allocator.size_of(graph) for graph in graphs)
    if projection_only:
        return intermediate + F32_BYTES * shape.padded(shape.n_logits) * config.n_embd
    # The work buffer serves one operation at a time: rows of a product, converted to the type that the weights are
    # dotted with, or a row of scores for each thread of SOFT_MAX.
    converted = shape.graph_rows * max(config.n_ff, config.n_embd, config.n_heads * config.head_dim)
    return intermediate + F32_BYTES * max(converted, shape.n_slots * n_threads)


def wide_graphs(
    ggml: Library, config: ModelConfig, units: ModelUnits, shape: ModelShape, *, projection_only: bool = False
) -> Iterator[int]:
    """Every graph of as many rows as there can be: a layer for each length of context, a projection, a whole pass.

    A longer context does not always take more memory, so all are tried. They lie over addresses that are never read;
    each is valid until the next.
    """
    m, n_nodes, n_logits = shape.graph_rows, shape.n_nodes, shape.padded(shape.n_logits)
    n_slots, transformer = shape.n_slots, Transformer(ggml, config)
    with ExitStack() as stack:
        buffer = stack.enter_context(Buffer(ggml, PAGE, 1 << 46))
        inputs = stack.enter_context(Context(ggml, 12))
        context = stack.enter_context(Context(ggml, graph_tensors(n_nodes), graph_nodes(n_nodes)))
        places = [place for index in units.layers[0] for place in units.units[index].places]
        weights = overlay(ggml, places, PAGE, 1 << 46, stack)
        (matrix,) = overlay(ggml, units.units[units.projection[0]].places, PAGE, 1 << 46, stack).values()

        def tensor(kind: int, length: int, rows: int, owner: Context = inputs) -> int:
            return buffer.place(ggml.new_tensor_2d(owner.handle, kind, length, rows), PAGE)

        def vector(kind: int, length: int, owner: Context = inputs) -> int:
            return buffer.place(ggml.new_tensor_1d(owner.handle, kind, length), PAGE)

        hidden = tensor(F32, config.n_embd, m)
        positions = vector(I32, m)
        nodes = [tensor(F16, config.n_embd_kv, n_nodes) for _ in range(2 if n_nodes else 0)]
        kv = LayerKV(tensor(F16, config.n_embd_kv, n_slots), tensor(F16, n_slots, config.n_embd_kv), *nodes)
        mixed = tensor(F32, config.n_heads * config.head_dim, m)
        for n_kv in range(SLOT_MULTIPLE, n_slots + 1, SLOT_MULTIPLE) if not projection_only else ():
            context.reset()
            mask = tensor(F16, n_kv, m, context)
            rows = Rows(hidden, positions, mask, n=m, m=m, first_slot=0, n_kv=n_kv)
            yield transformer.layer(context, 0, weights, None, kv, n_slots, rows)
            for width in {n_nodes, 1} if n_nodes else ():
                context.reset()
                mask = tensor(F16, n_kv, m, context)
                runs = tuple(Run(row, width, 0, row, width) for row in range(0, n_nodes, width))
                rows = Rows(hidden, positions, mask, n_nodes, m, 0, n_kv, runs, mixed)
                yield transformer.layer(context, 0, weights, None, kv, n_slots, rows)
        context.reset()
        band = max(units.band_rows)
        chosen, logits = tensor(F32, config.n_embd, n_logits), tensor(F32, band, n_logits)
        yield transformer.project(context, chosen, matrix, logits)
        if shape.n_steps and not projection_only:
            n_whole = step_nodes(config.n_layers, len(units.projection))
            whole = stack.enter_context(Context(ggml, n_whole + 8, n_whole))
            slots = vector(I64, n_logits, whole), vector(I64, n_logits * config.n_embd_kv, whole)
            ids, mask = vector(I32, n_logits, whole), tensor(F16, n_slots, n_logits, whole)
            rows = Rows(0, ids, mask, n_logits, n_logits, 0, n_slots, (), 0, *slots)
            table, norm = tensor(F32, config.n_embd, n_logits, whole), vector(F32, config.n_embd, whole)
            layers, caches = [of_layer(weights, 0)] * config.n_layers, [kv] * config.n_layers
            bands = [(matrix, count) for count in units.band_rows if count == band]  # the last one may be smaller
            logits = tensor(F32, config.n_vocab, n_logits, whole)
            yield transformer.step(whole, table, ids, layers, None, caches, n_slots, rows, norm, bands, logits)
