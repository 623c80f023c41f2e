"""Rows of the output projection as numbers, read from the file as tokens are asked for, and kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from lever.errors import UsageError
from lever.ggml import Backend, Context, GraphAllocator
from lever.ggml.arrays import placed, shared
from lever.loader import LoadedModel
from lever.owner import Owner
from lever.transformer import Transformer
from lever.weights.embedding import EmbeddingRows
from lever.weights.reader import DirectFile

AT_ONCE = 256


class OutputRows(Owner):
    """A table that grows to `most` rows; F16 [n, n_embd]."""

    def __init__(self, loaded: LoadedModel, most: int) -> None:
        """UsageError where the projection lies in the kernels' own layout in the file."""
        config, image, ggml = loaded.config, loaded.image, loaded.ggml
        name = "token_embd.weight" if config.tied_output else "output.weight"
        if image is not None and name in image.repacked:
            raise UsageError("the output projection of this flash image cannot be read row by row: use --no-image")
        table = loaded.gguf.tensors[name]
        file = image.open(loaded.gguf) if image is not None else DirectFile(loaded.gguf.files[table.file])
        self._ggml, self._transformer = ggml, Transformer(ggml, config)
        self._places: dict[int, int] = {}
        self._table = np.zeros((most, config.n_embd), np.float16)
        with ExitStack() as stack:
            self._rows = stack.enter_context(EmbeddingRows(file, table, AT_ONCE))
            self._backend = stack.enter_context(Backend(ggml, 1))
            self._allocator = stack.enter_context(GraphAllocator(ggml))
            inputs = stack.enter_context(Context(ggml, 3))
            self._context = stack.enter_context(Context(ggml, 8, 8))
            where = self._rows.rows.address, self._rows.rows.nbytes
            self._quantised = placed(ggml, inputs, stack, table.type, AT_ONCE, config.n_embd, *where)
            self._found, self._array = shared(ggml, inputs, stack, np.float32, AT_ONCE, config.n_embd)
            self._ids, ids = shared(ggml, inputs, stack, np.int32, 1, AT_ONCE)
            ids[:] = np.arange(AT_ONCE)
            self._cleanup = stack.pop_all()

    @property
    def room(self) -> int:
        """Rows that the table can still take."""
        return len(self._table) - len(self._places)

    def places(self, tokens: NDArray[np.int32]) -> NDArray[np.int64]:
        """The row of the table that each token has, in their shape; -1 for tokens below 0, or without room."""
        missing = [token for token in np.unique(tokens).tolist() if token >= 0 and token not in self._places]
        missing = missing[: self.room]
        for start in range(0, len(missing), AT_ONCE):
            self._read(missing[start : start + AT_ONCE])
        found = [self._places.get(token, -1) for token in tokens.reshape(-1).tolist()]
        return np.asarray(found, np.int64).reshape(tokens.shape)

    def at(self, places: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows at places, [..., n_embd]; some row where there is none."""
        return self._table[places].astype(np.float32)

    def close(self) -> None:
        """Free it."""
        self._array = np.empty((0, 0), np.float32)
        self._cleanup.close()

    def _read(self, tokens: Sequence[int]) -> None:
        where = self._rows.load(tokens)
        self._context.reset()
        ids = self._ggml.view_1d(self._context.handle, self._ids, AT_ONCE, 0)
        graph = self._transformer.embed(self._context, self._quantised, ids, self._found)
        self._allocator.allocate(graph)
        self._backend.compute(graph)
        first = len(self._places)
        self._table[first : first + len(tokens)] = self._array[where]
        self._places |= {token: first + n for n, token in enumerate(tokens)}
