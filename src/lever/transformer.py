"""The graphs of a dense transformer: embed, one layer, project. Computes nothing itself and keeps no state.

Every operation here gives a row the same bits whatever other rows are beside it, as long as graphs have the multiple of
rows that `lever.ggml.probe` found; attention is MUL_MAT, SOFT_MAX_EXT, MUL_MAT for that reason, never the fused kernel,
which tiles rows and splits the context by threads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lever.arch import ModelConfig
from lever.ggml import Context, Library
from lever.gguf import F32
from lever.kv_cache import F16_BYTES, LayerKV

F32_BYTES, I32_BYTES = 4, 4
NODES = 64  # more than any graph here has, but for the runs of a tree
RUN_NODES = 20  # more than a run of a tree adds


def graph_nodes(n_runs: int) -> int:
    """Nodes that a graph with so many runs may have."""
    return NODES + RUN_NODES * n_runs


def graph_tensors(n_runs: int) -> int:
    """Tensors: nodes, and the views and inputs that are not nodes."""
    return 2 * graph_nodes(n_runs)


def step_nodes(n_layers: int, n_bands: int) -> int:
    """Nodes, and tensors, that the graph of a whole pass may have."""
    return NODES * (n_layers + 1) + 4 * n_bands


def of_layer(weights: Mapping[str, int], layer: int) -> dict[str, int]:
    """A layer's weights by their names without its number."""
    prefix = f"blk.{layer}."
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items()}


ROPE_NORMAL, ROPE_NEOX = 0, 2  # GGML_ROPE_TYPE_* of ggml.h


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `first` to `first + n` of a tree, each the parent of the next; their keys lie from `slot` on.

    They are computed together with the rows around them, `start` to `start + m`, where that makes a multiple.
    """

    first: int
    n: int
    slot: int
    start: int
    m: int


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one graph: where they lie and what they may see.

    hidden: F32 [n_embd, m], read and overwritten; positions: I32 [m]; mask: F16 [n_kv, m], 0 or -inf. The first n
    rows are real, the others fill up the multiple; the real ones go to the slots from `first_slot` on; attention runs
    over the slots 0 to n_kv - 1.

    Rows of a tree have `runs`, depth-first, and `mixed`, F32 [n_heads * head_dim, m], for what attention gives.

    Where a graph is kept for steps at other places, `key_places`, I64 [n], and `value_places`, I64 [n * n_embd_kv], say
    where keys and values go: rows of the keys, numbers of the values.
    """

    hidden: int
    positions: int
    mask: int
    n: int
    m: int
    first_slot: int
    n_kv: int
    runs: tuple[Run, ...] = ()
    mixed: int = 0
    key_places: int = 0
    value_places: int = 0


class Transformer:
    """Builds graphs in a context that the caller owns and resets."""

    def __init__(self, ggml: Library, config: ModelConfig) -> None:
        self._ggml = ggml
        self._config = config

    def embed(self, context: Context, table: int, ids: int, hidden: int) -> int:
        """Rows `ids` (I32 [m]) of `table` (any type, [n_embd, rows]), as F32, into `hidden` (F32 [n_embd, m])."""
        ggml, ctx = self._ggml, context.handle
        graph = context.new_graph()
        ggml.build_forward_expand(graph, ggml.cpy(ctx, ggml.get_rows(ctx, table, ids), hidden))
        return graph

    def layer(
        self,
        context: Context,
        layer: int,
        weights: Mapping[str, int],
        rope_freqs: int | None,
        kv: LayerKV,
        n_slots: int,
        rows: Rows,
    ) -> int:
        """One layer over `rows`: their keys and values into the cache, then hidden states in place."""
        graph = context.new_graph()
        x = self._layer(context.handle, graph, of_layer(weights, layer), rope_freqs, kv, n_slots, rows.hidden, rows)
        self._ggml.build_forward_expand(graph, self._ggml.cpy(context.handle, x, rows.hidden))
        return graph

    def step(
        self,
        context: Context,
        table: int,
        ids: int,
        layers: Sequence[Mapping[str, int]],
        rope_freqs: int | None,
        kv: Sequence[LayerKV],
        n_slots: int,
        rows: Rows,
        norm: int,
        bands: Sequence[tuple[int, int]],
        logits: int,
    ) -> int:
        """A whole pass in one graph: embed, all layers, and the logits of all rows, F32 [n_vocab, m].

        `layers`: weights as of `of_layer`; `bands`: of the output projection, each [n_embd, tokens], and its tokens.
        `rows.hidden` is not used. The graph may be computed again and again, with other ids, positions, places, masks.
        """
        ggml, ctx = self._ggml, context.handle
        graph = context.new_graph()
        x = ggml.get_rows(ctx, table, ids)
        for weights, cache in zip(layers, kv, strict=True):
            x = self._layer(ctx, graph, weights, rope_freqs, cache, n_slots, x, rows)
        x, first, row = self._norm(ctx, x, norm), 0, F32_BYTES * self._config.n_vocab
        for band, n_tokens in bands:
            product = ggml.mul_mat(ctx, band, x)
            place = ggml.view_2d(ctx, logits, n_tokens, rows.m, row, F32_BYTES * first)
            ggml.build_forward_expand(graph, ggml.cpy(ctx, product, place))
            first += n_tokens
        return graph

    def _layer(
        self,
        ctx: int,
        graph: int,
        w: Mapping[str, int],
        rope_freqs: int | None,
        kv: LayerKV,
        n_slots: int,
        hidden: int,
        rows: Rows,
    ) -> int:
        """Hidden states [n_embd, m] after a layer, from those before it."""
        ggml = self._ggml
        x = self._norm(ctx, hidden, w["attn_norm.weight"])
        queries, keys, values = self._heads(ctx, w, rope_freqs, x, rows)
        if rows.runs:
            x = self._tree_attention(ctx, graph, kv, n_slots, queries, keys, values, rows)
        else:
            self._store(ctx, graph, kv, n_slots, keys, values, rows)
            x = self._attend(ctx, *self._wide(ctx, kv, n_slots, rows.n_kv), queries, rows.mask, rows.m)
        x = self._linear(ctx, w, "attn_output", x)
        residual = ggml.add(ctx, x, hidden)
        x = self._norm(ctx, residual, w["ffn_norm.weight"])
        x = ggml.swiglu_split(ctx, self._linear(ctx, w, "ffn_gate", x), self._linear(ctx, w, "ffn_up", x))
        after: int = ggml.add(ctx, self._linear(ctx, w, "ffn_down", x), residual)
        return after

    def final_norm(self, context: Context, hidden: int, weight: int) -> int:
        """The norm before the output projection: F32 [n_embd, m], in place."""
        graph = context.new_graph()
        x = self._norm(context.handle, hidden, weight)
        self._ggml.build_forward_expand(graph, self._ggml.cpy(context.handle, x, hidden))
        return graph

    def project(self, context: Context, normed: int, matrix: int, logits: int) -> int:
        """Logits of a band of the vocabulary: [n_embd, band] times [n_embd, m] into `logits`, F32 [band, m]."""
        graph = context.new_graph()
        product = self._ggml.mul_mat(context.handle, matrix, normed)
        self._ggml.build_forward_expand(graph, self._ggml.cpy(context.handle, product, logits))
        return graph

    def _heads(
        self, ctx: int, w: Mapping[str, int], rope_freqs: int | None, x: int, rows: Rows
    ) -> tuple[int, int, int]:
        """Queries [head_dim, n_heads, m], keys [head_dim, n_kv_heads, m], values [n_embd_kv, m]."""
        ggml, c = self._ggml, self._config
        queries = ggml.reshape_3d(ctx, self._linear(ctx, w, "attn_q", x), c.head_dim, c.n_heads, rows.m)
        keys = ggml.reshape_3d(ctx, self._linear(ctx, w, "attn_k", x), c.head_dim, c.n_kv_heads, rows.m)
        values = self._linear(ctx, w, "attn_v", x)
        if c.qk_norm:
            queries = self._norm(ctx, queries, w["attn_q_norm.weight"])
            keys = self._norm(ctx, keys, w["attn_k_norm.weight"])
        return (
            self._rope(ctx, queries, rope_freqs, rows.positions),
            self._rope(ctx, keys, rope_freqs, rows.positions),
            values,
        )

    def _store(self, ctx: int, graph: int, kv: LayerKV, n_slots: int, keys: int, values: int, rows: Rows) -> None:
        """Keys and values of the real rows into their slots, before anything reads the cache."""
        ggml, width = self._ggml, self._config.n_embd_kv
        key_row, value_row = F16_BYTES * width, F16_BYTES * n_slots
        new_keys = ggml.view_2d(ctx, keys, width, rows.n, F32_BYTES * width, 0)
        if rows.key_places:
            ggml.build_forward_expand(graph, ggml.set_rows(ctx, kv.keys, new_keys, rows.key_places))
            new_values = ggml.view_2d(ctx, values, 1, width * rows.n, F32_BYTES, 0)
            each_value = ggml.reshape_2d(ctx, kv.values, 1, n_slots * width)
            ggml.build_forward_expand(graph, ggml.set_rows(ctx, each_value, new_values, rows.value_places))
            return
        key_slots = ggml.view_2d(ctx, kv.keys, width, rows.n, key_row, rows.first_slot * key_row)
        ggml.build_forward_expand(graph, ggml.cpy(ctx, new_keys, key_slots))
        new_values = ggml.view_2d(ctx, values, width, rows.n, F32_BYTES * width, 0)
        value_slots = ggml.view_2d(ctx, kv.values, rows.n, width, value_row, rows.first_slot * F16_BYTES)
        ggml.build_forward_expand(graph, ggml.cpy(ctx, ggml.transpose(ctx, new_values), value_slots))

    def _tree_attention(
        self, ctx: int, graph: int, kv: LayerKV, n_slots: int, queries: int, keys: int, values: int, rows: Rows
    ) -> int:
        """Attention of the rows of a tree: path by path, each row over the slots of plain decoding.

        A sum over slots depends on where a term sits, so the keys of a path must lie behind the context in the order of
        the text. Runs come depth-first: each overwrites the slots from its own on, and those before hold its ancestors.
        Returns [n_heads * head_dim, m].
        """
        ggml, c = self._ggml, self._config
        width, head = c.n_embd_kv, c.head_dim
        node_row = F16_BYTES * width
        for new, nodes in ((keys, kv.node_keys), (values, kv.node_values)):
            real = ggml.view_2d(ctx, new, width, rows.n, F32_BYTES * width, 0)
            ggml.build_forward_expand(graph, ggml.cpy(ctx, real, ggml.view_2d(ctx, nodes, width, rows.n, node_row, 0)))
        wide_keys, wide_values = self._wide(ctx, kv, n_slots, rows.n_kv)
        slot_row, mixed_row = F32_BYTES * head, F32_BYTES * head * c.n_heads
        slots_row = F32_BYTES * rows.n_kv
        for run in rows.runs:
            shape, at = (head, run.n, c.n_kv_heads), run.first * node_row
            source = ggml.view_3d(ctx, kv.node_keys, *shape, node_row, F16_BYTES * head, at)
            target = ggml.view_3d(ctx, wide_keys, *shape, slot_row, slot_row * rows.n_kv, run.slot * slot_row)
            ggml.build_forward_expand(graph, ggml.cpy(ctx, source, target))
            source = ggml.view_3d(ctx, kv.node_values, *shape, node_row, F16_BYTES * head, at)
            target = ggml.view_3d(
                ctx, wide_values, run.n, head, c.n_kv_heads, slots_row, slots_row * head, run.slot * F32_BYTES
            )
            ggml.build_forward_expand(graph, ggml.cpy(ctx, ggml.permute(ctx, source, 1, 0, 2, 3), target))
            of_run = ggml.view_3d(ctx, queries, head, c.n_heads, run.m, slot_row, mixed_row, run.start * mixed_row)
            mask_row = F16_BYTES * rows.n_kv
            mask = ggml.view_2d(ctx, rows.mask, rows.n_kv, run.m, mask_row, run.start * mask_row)
            joined = self._attend(ctx, wide_keys, wide_values, of_run, mask, run.m)
            part = ggml.view_2d(ctx, joined, head * c.n_heads, run.n, mixed_row, (run.first - run.start) * mixed_row)
            place = ggml.view_2d(ctx, rows.mixed, head * c.n_heads, run.n, mixed_row, run.first * mixed_row)
            ggml.build_forward_expand(graph, ggml.cpy(ctx, part, place))
        together: int = ggml.view_2d(ctx, rows.mixed, head * c.n_heads, rows.m, mixed_row, 0)
        return together

    def _wide(self, ctx: int, kv: LayerKV, n_slots: int, n_kv: int) -> tuple[int, int]:
        """Keys [head_dim, n_kv, n_kv_heads] and values [n_kv, head_dim, n_kv_heads] of the first slots, as F32.

        Widened, since ggml's F16 products sum in F16 on CPUs that compute in it (AVX512-FP16, Armv8.2 fp16): scores of
        real models overflow there, and what does not has three digits.
        """
        ggml, c = self._ggml, self._config
        key_row, value_row = F16_BYTES * c.n_embd_kv, F16_BYTES * n_slots
        keys = ggml.view_3d(ctx, kv.keys, c.head_dim, n_kv, c.n_kv_heads, key_row, F16_BYTES * c.head_dim, 0)
        values = ggml.view_3d(ctx, kv.values, n_kv, c.head_dim, c.n_kv_heads, value_row, value_row * c.head_dim, 0)
        return ggml.cast(ctx, keys, F32), ggml.cast(ctx, values, F32)

    def _attend(self, ctx: int, keys: int, values: int, queries: int, mask: int, m: int) -> int:
        """Attention of m rows over the slots that their mask shows: [n_heads * head_dim, m]."""
        ggml, c = self._ggml, self._config
        queries = ggml.permute(ctx, queries, 0, 2, 1, 3)
        scores = ggml.mul_mat(ctx, keys, queries)  # [n_kv, m, n_heads]
        shares = ggml.soft_max_ext(ctx, scores, mask, 1.0 / math.sqrt(c.head_dim), 0.0)
        mixed = ggml.mul_mat(ctx, values, shares)  # [head_dim, m, n_heads]
        joined: int = ggml.cont_2d(ctx, ggml.permute(ctx, mixed, 0, 2, 1, 3), c.head_dim * c.n_heads, m)
        return joined

    def _rope(self, ctx: int, x: int, rope_freqs: int | None, positions: int) -> int:
        rope = self._config.rope
        rotated: int = self._ggml.rope_ext(
            ctx,
            x,
            positions,
            rope_freqs,
            rope.dim,
            ROPE_NEOX if rope.neox else ROPE_NORMAL,
            rope.n_ctx_orig,
            rope.freq_base,
            rope.freq_scale,
            rope.ext_factor,
            rope.attn_factor,
            rope.beta_fast,
            rope.beta_slow,
        )
        return rotated

    def _linear(self, ctx: int, w: Mapping[str, int], name: str, x: int) -> int:
        product: int = self._ggml.mul_mat(ctx, w[f"{name}.weight"], x)
        bias = w.get(f"{name}.bias")
        if bias is not None:
            product = self._ggml.add(ctx, product, bias)
        return product

    def _norm(self, ctx: int, x: int, weight: int) -> int:
        normed: int = self._ggml.mul(ctx, self._ggml.rms_norm(ctx, x, self._config.norm_eps), weight)
        return normed
