"""A model that computes: token ids in, hidden rows and logits out. Knows no text, no sampling and no draft."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lever.arch import ModelConfig
from lever.errors import LeverError
from lever.far_kv import FarKVCache
from lever.ggml import Context, Library
from lever.ggml.devices import Cpu, Device, FarDevice, Traffic
from lever.kv_cache import F16_BYTES, SLOT_MULTIPLE, KVCache
from lever.owner import Owner
from lever.pages import round_up
from lever.scores import Scores
from lever.settings import TreeAttention
from lever.sizing import wide_graphs
from lever.steps import Steps
from lever.transformer import F32_BYTES, I32_BYTES, Rows, Run, Transformer, graph_nodes, graph_tensors
from lever.weights.embedding import EmbeddingRows
from lever.weights.plan import ModelUnits
from lever.weights.tensors import Tensors, Weights
from lever.workspace import GRAPH_ROWS, Block, ModelShape, Workspace


@dataclass(slots=True)
class ModelStats:
    """Figures since the model was opened."""

    layers_s: float = 0.0  # inside ggml, embedding and layers
    scores_s: float = 0.0  # of rows in the middle of passes
    projection_s: float = 0.0  # inside ggml, final norm and output projection
    embedding_s: float = 0.0  # waiting for rows of the embedding table
    traffic: Traffic = field(default_factory=Traffic)  # with the device that computes


AfterLayer = Callable[[int], None]  # told of each layer that is done, while the next one is read


@dataclass(frozen=True, slots=True)
class Thinning:
    """Asked behind a layer which rows of a tree go on: in their order, the root and the parents of all among them."""

    layer: int
    choose: Callable[[], Sequence[int]]


class Model(Owner):
    """One transformer with its KV cache.

    `forward` appends rows to the cache and leaves their hidden states in place; `project` turns some of these into
    logits. Both give a row the same bits whatever is computed beside it and wherever its weights come from.
    """

    def __init__(
        self,
        ggml: Library,
        config: ModelConfig,
        units: ModelUnits,
        weights: Weights,
        embedding: EmbeddingRows,
        shape: ModelShape,
        n_threads: int,
        *,
        spin: bool = False,
        device: Device | None = None,
        head: Weights | None = None,
    ) -> None:
        """`n_threads` at most; they `spin` between graphs, where nothing is waited for, or sleep.

        `device` computes, None: the CPU, and `weights` are in its memory. With a `head`, whose weights are in this
        process's, the CPU projects.
        """
        self.config = config
        self.shape = shape
        cpu = Cpu(ggml)
        self._device = device if device is not None else cpu
        projecting = cpu if head is not None else self._device
        self.stats = ModelStats(traffic=self._device.traffic)
        self._ggml = ggml
        self._units = units
        self._weights, self._head = weights, head if head is not None else weights
        self._embedding = embedding
        self._transformer = Transformer(ggml, config)
        self._small = self._smalls(weights)
        self._output_norm = self._smalls(self._head)["output_norm.weight"]
        self._closed = False
        with ExitStack() as stack:
            self._backend = stack.enter_context(self._device.open_backend(n_threads, spin=spin))
            self.kv = stack.enter_context(self._open_kv())
            self._context = stack.enter_context(Context(ggml, graph_tensors(shape.n_nodes), graph_nodes(shape.n_nodes)))
            self._workspace = stack.enter_context(Workspace(ggml, config, embedding, shape, self._device, projecting))
            self._allocator = stack.enter_context(self._device.open_allocator())
            for graph in wide_graphs(ggml, config, units, shape):
                self._device.require(graph)
                self._allocator.reserve(graph)
            self._head_backend, self._head_allocator = self._backend, self._allocator
            if projecting is not self._device:
                self._head_backend = stack.enter_context(projecting.open_backend(n_threads))
                self._head_allocator = stack.enter_context(projecting.open_allocator())
                for graph in wide_graphs(ggml, config, units, shape, projection_only=True):
                    self._head_allocator.reserve(graph)
            self._steps = stack.enter_context(self._open_steps(weights)) if shape.n_steps else None
            self._cleanup = stack.pop_all()

    @property
    def device(self) -> str:
        """The name of what computes the layers."""
        return self._device.name

    @property
    def n_threads(self) -> int:
        """Threads of the next pass; any number gives the same bits."""
        return self._head_backend.n_threads

    @n_threads.setter
    def n_threads(self, count: int) -> None:
        self._backend.n_threads = self._head_backend.n_threads = count

    def forward(self, tokens: Sequence[int], after_layer: AfterLayer = lambda _layer: None) -> None:
        """One pass over the layers for up to n_batch tokens, which come behind those in the cache.

        `after_layer` is called with the number of each layer that is done, while the next one is read. ContextOverflow
        before anything is computed. An error in mid-pass leaves the cache at its old length.
        """
        assert 0 < len(tokens) <= self.shape.n_batch
        self._require_open()
        self.kv.require(len(tokens))
        self._pass(tokens, tuple(self._blocks(len(tokens))), after_layer)
        self.kv.length += len(tokens)

    def forward_tree(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        after_layer: AfterLayer = lambda _layer: None,
        thinning: Thinning | None = None,
        *,
        attention: TreeAttention | None = None,
    ) -> Sequence[int]:
        """One pass over the layers for a tree of up to n_tree tokens that comes behind the cache; the rows that came
        through it, which from then on are numbered 0, 1, 2.

        parents[i] is the row of token i's parent; row 0 is the root, whose parent is -1. Rows are in depth-first order:
        a parent lies on the path of the row before. The cache keeps its length until `keep` takes over those of a path.

        Attention is the model's own, unless it is made for "exact" and "masked" is asked for, for a comparison. Exact,
        it goes path by path, and each row has the bits that it has in a text that is its path. Masked, it is in one
        piece, over rows that lie behind the text in the order of the pass: the first rows, as long as each is the child
        of the one before, lie where plain decoding has them, and have its bits; the sums of the others have their terms
        in another order.
        """
        assert 0 < len(tokens) <= self.shape.n_tree
        self._require_open()
        exact = (attention or self.shape.tree_attention) == "exact"
        block, rows = self._paths_block if exact else self._masked_block, range(len(tokens))
        chosen: Sequence[int] = rows

        def thinned(layer: int) -> Sequence[Block] | None:
            nonlocal chosen
            if thinning is None or layer != thinning.layer:
                return None
            chosen = thinning.choose()
            if len(chosen) == len(rows):
                return None
            self._keep_hidden(len(rows), chosen)
            self.kv.compact(chosen, layer + 1)
            place = {row: number for number, row in enumerate(chosen)}
            return (block([place[parents[row]] if row else -1 for row in chosen]),)

        self._pass(tokens, (block(parents),), after_layer, thinned)
        return chosen

    @property
    def most_rows(self) -> int:
        """Rows that a tree may have now: masked ones take a slot each, and near the end of the context few are left."""
        room = self.shape.n_ctx - self.kv.length if self.shape.tree_attention == "masked" else self.shape.n_tree
        return max(min(self.shape.n_tree, room), 1)

    def keep(self, rows: Sequence[int]) -> None:
        """The rows of the accepted path, numbered as in the last `forward_tree`, become the text's next ones."""
        if self.shape.tree_attention == "exact":
            self.kv.keep(rows)
        else:
            self.kv.gather(rows, len(rows))
            self.kv.truncate(self.kv.length)  # nothing stays behind the text

    def forward_nodes(
        self,
        tokens: Sequence[int],
        first: int,
        depths: Sequence[int],
        visible: NDArray[np.bool_],
        after_layer: AfterLayer = lambda _layer: None,
    ) -> None:
        """One pass for up to n_tree tokens of a tree whose rows stay behind the text.

        The rows go to the places `first`, `first` + 1 and so on, counted from the end of the text; depths[i] is row i's
        distance from the text's last token. visible [n, first + n]: which of the rows behind the text each row sees,
        its own among them; all see the text. Not bit-equal to plain decoding: keys lie in another order.
        """
        assert 0 < len(tokens) <= self.shape.n_tree
        self._require_open()
        self._pass(tokens, (self._nodes_block(first, depths, visible),), after_layer)

    def step(
        self, tokens: Sequence[int], first: int, depths: Sequence[int], visible: NDArray[np.bool_]
    ) -> NDArray[np.float32]:
        """As `forward_nodes`, and the logits [len(tokens), n_vocab] of all rows, in one graph: of a model that has them
        (`ModelShape.n_steps`), for up to n_logits tokens. The next call overwrites the array.
        """
        assert self._steps is not None
        assert 0 < len(tokens) <= self.shape.n_logits
        self._require_open()
        block = self._nodes_block(first, depths, visible)
        self._load_ids(tokens, block)
        self.stats.layers_s += self._steps.run(block)
        logits: NDArray[np.float32] = self._workspace.logits.array[: len(tokens)]
        return logits

    def _nodes_block(self, first: int, depths: Sequence[int], visible: NDArray[np.bool_]) -> Block:
        n, length = len(depths), self.kv.length
        self.kv.require(first + n)
        slots = tuple(range(length + first, length + first + n))
        positions = tuple(length - 1 + depth for depth in depths)
        seen = np.concatenate([np.ones((n, length), bool), visible], axis=1)
        n_kv = round_up(length + first + n, SLOT_MULTIPLE)
        return Block(0, n, self.shape.padded(n), slots, n_kv, positions=positions, visible=seen)

    def _pass(
        self,
        tokens: Sequence[int],
        blocks: Sequence[Block],
        after_layer: AfterLayer,
        thinned: Callable[[int], Sequence[Block] | None] = lambda _layer: None,
    ) -> None:
        """All layers over blocks, which `thinned` may replace behind any of them."""
        for block in blocks:
            self._embed(tokens[block.start : block.start + block.n], block)
        # Closed at once when a layer fails, so that its slot is free before anybody looks at the error.
        with closing(self._weights.stream(self._units.layers)) as layers:
            for layer, weights in enumerate(layers):
                for block in blocks:
                    self._layer(layer, weights, block)
                self._wait(1)
                blocks = thinned(layer) or blocks
                after_layer(layer)
        self._wait(self.config.n_embd * sum(block.n for block in blocks))

    def _wait(self, n: int) -> None:
        """Until what was begun is done; the first n numbers of the hidden states are here then."""
        started = time.perf_counter()
        self._workspace.hidden.fetch(n)
        self.stats.layers_s += time.perf_counter() - started

    def _keep_hidden(self, n_rows: int, chosen: Sequence[int]) -> None:
        """Of the hidden states of n_rows rows these become the first ones."""
        hidden = self._workspace.hidden
        hidden.fetch(self.config.n_embd * n_rows)
        hidden.array[: len(chosen)] = hidden.array[list(chosen)]
        hidden.send(self.config.n_embd * len(chosen))

    def open_scores(self, fill: Callable[[NDArray[np.float16]], None], *, repacked: bool) -> Scores:
        """Scores of rows of trees by the translator that `fill` writes; the projection is in memory, `repacked` or not.

        Errors as of `Scores`; the caller closes it.
        """
        return Scores(
            self._ggml,
            self.config,
            self._units,
            self._head,
            self._head_backend,
            fill,
            self.shape.n_tree,
            repacked=repacked,
        )

    def score(self, scores: Scores, n_rows: int, pairs: Sequence[tuple[int, int]]) -> NDArray[np.float32]:
        """Of pairs of a row and a token, in the middle of a pass over so many rows."""
        started = time.perf_counter()
        found = scores.of(self._workspace.hidden.tensor, n_rows, pairs)
        self.stats.scores_s += time.perf_counter() - started
        return found

    def finite(self, n_rows: int) -> bool:
        """Whether the first rows of the last pass are numbers: a token that overflows spoils those beside it."""
        return bool(np.isfinite(self._workspace.hidden.array[:n_rows]).all())

    def project(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Logits [len(rows), n_vocab] of rows of the last `forward`, counted from its first token.

        The next call overwrites the array.
        """
        space = self._workspace
        m = self._choose(space.hidden.array, rows)
        chosen = self._begin(space.chosen.tensor, m)
        self.stats.projection_s += self._run_head(
            self._transformer.final_norm(self._context, chosen, self._output_norm)
        )
        return self._logits(len(rows), m)

    def logits_of(self, normed: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits [n, n_vocab] of up to n_logits rows as `normed` has them; the next call overwrites the array."""
        return self._logits(len(normed), self._choose(normed, range(len(normed))))

    def _choose(self, states: NDArray[np.float32], rows: Sequence[int]) -> int:
        """Put these rows of states where the projection takes them from, and the last again as often as its graph
        wants; how many there are then.
        """
        assert 0 < len(rows) <= self.shape.n_logits
        self._require_open()
        m = self.shape.padded(len(rows))
        chosen = self._workspace.chosen
        chosen.array[:m] = states[[*rows, *[rows[-1]] * (m - len(rows))]]
        chosen.send(m * self.config.n_embd)
        return m

    def _logits(self, n: int, m: int) -> NDArray[np.float32]:
        with closing(self._head.stream((band,) for band in self._units.projection)) as bands:
            self._project(bands, m)
        started = time.perf_counter()
        self._workspace.logits.fetch(n * self.config.n_vocab)
        self.stats.projection_s += time.perf_counter() - started
        logits: NDArray[np.float32] = self._workspace.logits.array[:n]
        return logits

    def _project(self, bands: Iterable[Tensors], m: int) -> None:
        """The chosen rows, normed, times each band of the projection, into the logits."""
        space, row, first = self._workspace, F32_BYTES * self.config.n_vocab, 0
        for weights, band in zip(bands, self._units.band_rows, strict=True):
            (matrix,) = weights.values()
            chosen = self._begin(space.chosen.tensor, m)
            part = self._ggml.view_2d(self._context.handle, space.logits.tensor, band, m, row, F32_BYTES * first)
            self.stats.projection_s += self._run_head(self._transformer.project(self._context, chosen, matrix, part))
            first += band

    def hidden(self, n_rows: int) -> NDArray[np.float32]:
        """Hidden states [n_rows, n_embd] of the first rows of the pass under way, between two of its layers."""
        self._workspace.hidden.fetch(n_rows * self.config.n_embd)
        states: NDArray[np.float32] = self._workspace.hidden.array[:n_rows]
        return states

    def normed(self, n_rows: int) -> NDArray[np.float32]:
        """The rows [n_rows, n_embd] that the last `project` multiplied: final hidden states after their norm."""
        self._workspace.chosen.fetch(n_rows * self.config.n_embd)
        rows: NDArray[np.float32] = self._workspace.chosen.array[:n_rows]
        return rows

    def close(self) -> None:
        """Free cache, workspace and graphs; weights and embedding are their owner's."""
        self._closed = True
        self._cleanup.close()

    def _smalls(self, weights: Weights) -> Tensors:
        """The final norm and the RoPE factors: pinned, so they stay valid."""
        return next(iter(weights.stream([(self._units.small,)])))

    def _open_kv(self) -> KVCache:
        shape = self.shape
        if isinstance(self._device, FarDevice):
            return FarKVCache(self._ggml, self.config, shape.n_ctx, shape.n_nodes, self._device, self._backend)
        return KVCache(self._ggml, self.config, shape.n_ctx, shape.n_nodes)

    def _open_steps(self, weights: Weights) -> Steps:
        return Steps(
            self._ggml,
            self.config,
            self._units,
            weights,
            self.shape,
            self._workspace,
            self.kv,
            self._device,
            self._backend,
            self._allocator,
            self._small,
        )

    def _require_open(self) -> None:
        if self._closed:
            raise LeverError("the model is closed: open it again to go on")

    def _blocks(self, n_rows: int) -> Iterator[Block]:
        for start in range(0, n_rows, GRAPH_ROWS):
            n = min(GRAPH_ROWS, n_rows - start)
            slot = self.kv.length + start
            slots = tuple(range(slot, slot + n))
            yield Block(start, n, self.shape.padded(n), slots, round_up(slot + n, SLOT_MULTIPLE))

    def _masked_block(self, parents: Sequence[int]) -> Block:
        return self._nodes_block(0, [depth + 1 for depth in tree_depths(parents)], ancestry(parents))

    def _paths_block(self, parents: Sequence[int]) -> Block:
        n, m = len(parents), self.shape.padded(len(parents))
        depths = tree_depths(parents)
        slots = tuple(self.kv.length + depth for depth in depths)
        starts = [row for row in range(n) if row == 0 or parents[row] != row - 1]
        runs = []
        for first, end in zip(starts, [*starts[1:], n], strict=True):
            width = self.shape.padded(end - first)
            runs.append(Run(first, end - first, slots[first], min(first, m - width), width))
        self.kv.require(max(slots) + 1 - self.kv.length)
        return Block(0, n, m, slots, round_up(max(slots) + 1, SLOT_MULTIPLE), tuple(runs))

    def _load_ids(self, tokens: Sequence[int], block: Block) -> None:
        """The tokens' rows of the embedding table, and which of them each row of the block is."""
        started = time.perf_counter()
        where = self._embedding.load(tokens)
        self.stats.embedding_s += time.perf_counter() - started
        ids, table = self._workspace.ids, self._workspace.table
        ids.array[0, : block.m] = np.pad(where, (0, block.m - block.n), "edge")
        ids.send(block.m)
        table.send((int(where.max()) + 1) * self._embedding.row_nbytes)

    def _embed(self, tokens: Sequence[int], block: Block) -> None:
        space = self._workspace
        self._load_ids(tokens, block)
        hidden = self._begin(space.hidden.tensor, block.m, block.start)
        ids = self._ggml.view_1d(self._context.handle, space.ids.tensor, block.m, 0)
        self.stats.layers_s += self._run(self._transformer.embed(self._context, space.table.tensor, ids, hidden))

    def _layer(self, layer: int, weights: Tensors, block: Block) -> None:
        space = self._workspace
        shown, ggml = space.show(block), self._ggml
        hidden, ctx = self._begin(space.hidden.tensor, block.m, block.start), self._context.handle
        mask = space.mask.tensor, block.n_kv, block.m, F16_BYTES * block.n_kv, space.mask_at(shown)
        rows = Rows(
            hidden=hidden,
            positions=ggml.view_1d(ctx, space.positions.tensor, block.m, I32_BYTES * shown),
            mask=ggml.view_2d(ctx, *mask),
            n=block.n,
            m=block.m,
            first_slot=block.slots[0],
            n_kv=block.n_kv,
            runs=block.runs,
            mixed=space.mixed,
        )
        freqs = self._small.get("rope_freqs.weight")
        kv = self.kv.layers[layer]
        self.stats.layers_s += self._run(
            self._transformer.layer(self._context, layer, weights, freqs, kv, self.kv.n_slots, rows)
        )

    def _begin(self, tensor: int, m: int, first: int = 0) -> int:
        """Forget the last graph; a view of m rows of hidden states in `tensor`, from row `first`."""
        self._context.reset()
        row = F32_BYTES * self.config.n_embd
        view: int = self._ggml.view_2d(self._context.handle, tensor, self.config.n_embd, m, row, first * row)
        return view

    def _run(self, graph: int) -> float:
        """Compute a graph; the seconds it took."""
        self._allocator.allocate(graph)
        started = time.perf_counter()
        self._backend.compute(graph)
        return time.perf_counter() - started

    def _run_head(self, graph: int) -> float:
        """As `_run`, where the projection is."""
        self._head_allocator.allocate(graph)
        started = time.perf_counter()
        self._head_backend.compute(graph)
        return time.perf_counter() - started


def tree_depths(parents: Sequence[int]) -> list[int]:
    """Edges from the root to each row of a tree in depth-first order: a parent lies on the path of the row before."""
    depths: list[int] = []
    path: list[int] = []  # rows from the root to the last one
    for row, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        assert path or (row == 0 and parent == -1), "the rows of a tree must come depth-first"
        path.append(row)
        depths.append(len(path) - 1)
    return depths


def ancestry(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Of each row of a tree, which rows are it or its ancestors: [n, n]. A parent comes before its children."""
    seen = np.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents[1:], start=1):
        seen[row] |= seen[parent]
    return seen
