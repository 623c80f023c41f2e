"""Rows of the embedding table, read from flash one by one as tokens need them. The table itself is never held."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from lever.gguf import TensorInfo
from lever.owner import Owner
from lever.pages import Pages, round_up
from lever.weights.reader import DirectFile
from lever.weights.units import row_nbytes


class EmbeddingRows(Owner):
    """Memory for `n_rows` rows in the type of the file, and the reads that fill it."""

    def __init__(self, file: DirectFile, table: TensorInfo, n_rows: int) -> None:
        """The file is its own from now on, and closed with it."""
        self.table = table
        self.n_rows = n_rows
        self._row_bytes = row_nbytes(table)
        with ExitStack() as stack:
            self._file = stack.enter_context(file)
            self._rows = stack.enter_context(Pages(n_rows * self._row_bytes))
            self._scratch = stack.enter_context(Pages(round_up(self._row_bytes, file.grain) + file.grain))
            self._cleanup = stack.pop_all()

    @property
    def rows(self) -> Pages:
        """Where what `load` read lies, row behind row without gaps."""
        return self._rows

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row."""
        return self._row_bytes

    @staticmethod
    def nbytes(table: TensorInfo, n_rows: int, grain: int) -> int:
        """Bytes that it takes, before there is one."""
        return round_up(n_rows * row_nbytes(table)) + round_up(row_nbytes(table), grain) + grain

    def load(self, tokens: Sequence[int]) -> NDArray[np.int32]:
        """Read the rows of `tokens`, each distinct one once; returns which loaded row each token has.

        IndexError for a token that has none: other bytes of the file would make a row as well.
        """
        distinct, where = np.unique(np.asarray(tokens), return_inverse=True)
        if not 0 <= distinct[0] <= distinct[-1] < self.table.shape[1]:
            raise IndexError(f"tokens {distinct[0]} to {distinct[-1]}: the embedding has {self.table.shape[1]} rows")
        for place, token in enumerate(distinct):
            self._read_row(int(token), place * self._row_bytes)
        return where.astype(np.int32)

    def close(self) -> None:
        """Free the memory and close the file."""
        self._cleanup.close()

    def _read_row(self, token: int, at: int) -> None:
        start = self.table.offset + token * self._row_bytes
        lead = start % self._file.grain
        span = self._scratch.bytes.data[: round_up(lead + self._row_bytes, self._file.grain)]
        self._file.read_exactly(span, start - lead, lead + self._row_bytes)
        self._rows.bytes[at : at + self._row_bytes] = self._scratch.bytes[lead : lead + self._row_bytes]
