"""Scores of tokens for rows in the middle of a pass: a row's hidden state, translated to what the last layer would make
of it, times the token's row of the output projection.

That projection is in memory, and only rows of it are touched that somebody asks for. Where its bytes are in the
kernels' own layout, rows lie interleaved, so a few that lie together are multiplied and one product is taken.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from lever.arch import ModelConfig
from lever.errors import UnsupportedModel
from lever.ggml import Backend, Context, GraphAllocator, Library
from lever.ggml.arrays import shared
from lever.ggml.layout import takes_repacked
from lever.owner import Owner
from lever.pages import round_up
from lever.transformer import F32_BYTES
from lever.weights.plan import ModelUnits
from lever.weights.tensors import Weights
from lever.weights.units import row_nbytes

GROUP = 16  # rows that lie together: a multiple of all that kernels interleave
PAIRS = 128  # of one graph
NODES = 8 + 5 * PAIRS


class Scores(Owner):
    """One translator of a model whose output projection is in memory."""

    def __init__(
        self,
        ggml: Library,
        config: ModelConfig,
        units: ModelUnits,
        weights: Weights,
        backend: Backend,
        fill: Callable[[NDArray[np.float16]], None],
        n_rows: int,
        *,
        repacked: bool,
    ) -> None:
        """For `n_rows` rows at most; `fill` writes the matrix [n_embd, n_embd] that translates. `repacked`: how the
        projection lies.

        UnsupportedModel where this CPU cannot multiply a few of its rows alone.
        """
        self._ggml, self._config, self._backend = ggml, config, backend
        self._bands = [next(iter(found.values())) for found in weights.stream((band,) for band in units.projection)]
        self._ends = list(accumulate(units.band_rows))
        table = units.units[units.projection[0]].places[0].tensor
        self._group, self._row_nbytes = GROUP if repacked else 1, row_nbytes(table)
        if repacked and not takes_repacked(ggml, table.type, (config.n_embd, GROUP)):
            raise UnsupportedModel("this CPU does not multiply single rows of this output projection")
        n_embd = config.n_embd
        with ExitStack() as stack:
            self._inputs = stack.enter_context(Context(ggml, 3))
            self._context = stack.enter_context(Context(ggml, NODES, NODES))
            self._allocator = stack.enter_context(GraphAllocator(ggml))
            array = functools.partial(shared, ggml, self._inputs, stack)
            self._matrix, matrix = array(np.float16, n_embd, n_embd)
            fill(matrix)
            self._translated, _ = array(np.float32, n_rows, n_embd)
            self._products, self._found = array(np.float32, PAIRS, self._group)
            self._allocator.reserve(self._translation(self._translated, n_rows))  # nothing here is larger
            self._cleanup = stack.pop_all()

    @staticmethod
    def nbytes(ggml: Library, config: ModelConfig, n_rows: int) -> int:
        """Bytes that it takes, before there is one."""
        rows = round_up(F32_BYTES * config.n_embd * n_rows)
        with Context(ggml, NODES, NODES) as context:
            # What is translated, its norm and its product, and rows as ggml converts them to the matrix's type.
            return round_up(2 * config.n_embd**2) + 4 * rows + round_up(F32_BYTES * GROUP * PAIRS) + context.nbytes

    def of(self, hidden: int, n_rows: int, pairs: Sequence[tuple[int, int]]) -> NDArray[np.float32]:
        """Logits [len(pairs)] of pairs of a row and a token. hidden: F32 [n_embd, at least n_rows]."""
        self._run(self._translation(hidden, n_rows))
        scores = np.empty(len(pairs), np.float32)
        for start in range(0, len(pairs), PAIRS):
            part = pairs[start : start + PAIRS]
            self._context.reset()
            graph = self._context.new_graph()
            within = [self._product(graph, place, row, token) for place, (row, token) in enumerate(part)]
            self._run(graph)
            scores[start : start + len(part)] = self._found[np.arange(len(part)), within]
        return scores

    def close(self) -> None:
        """Free the memory."""
        self._found = np.empty((0, 0), np.float32)
        self._cleanup.close()

    def _translation(self, hidden: int, n_rows: int) -> int:
        """The graph that translates the first rows of hidden states, normed so that their length does not matter."""
        ggml, n_embd = self._ggml, self._config.n_embd
        self._context.reset()
        ctx, row = self._context.handle, F32_BYTES * n_embd
        graph = self._context.new_graph()
        rows = ggml.rms_norm(ctx, ggml.view_2d(ctx, hidden, n_embd, n_rows, row, 0), self._config.norm_eps)
        place = ggml.view_2d(ctx, self._translated, n_embd, n_rows, row, 0)
        ggml.build_forward_expand(graph, ggml.cpy(ctx, ggml.mul_mat(ctx, self._matrix, rows), place))
        return graph

    def _product(self, graph: int, place: int, row: int, token: int) -> int:
        """Put a translated row times a token's row of the projection into the graph; which of its products that is."""
        ggml, ctx, n_embd, group = self._ggml, self._context.handle, self._config.n_embd, self._group
        band = bisect_right(self._ends, token)
        first, end = self._ends[band - 1] if band else 0, self._ends[band]
        start = min((token - first) // group * group, end - first - group)
        at = start * self._row_nbytes
        together = ggml.view_2d(ctx, self._bands[band], n_embd, group, self._row_nbytes, at)
        translated = ggml.view_2d(ctx, self._translated, n_embd, 1, F32_BYTES * n_embd, F32_BYTES * n_embd * row)
        to = ggml.view_2d(ctx, self._products, group, 1, F32_BYTES * group, F32_BYTES * group * place)
        ggml.build_forward_expand(graph, ggml.cpy(ctx, ggml.mul_mat(ctx, together, translated), to))
        return token - first - start

    def _run(self, graph: int) -> None:
        self._allocator.allocate(graph)
        self._backend.compute(graph)
