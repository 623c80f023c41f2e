"""Keys and values of the rows that a model has seen. Knows where they lie, not how they are computed."""

from __future__ import annotations

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
    """Tensors of one layer. keys: F16 [n_embd_kv, n_slots]; values, transposed: F16 [n_slots, n_embd_kv]."""

    keys: int
    values: int


def kv_bytes(config: ModelConfig, n_ctx: int) -> int:
    """Bytes of a cache for `n_ctx` positions."""
    return 2 * F16_BYTES * config.n_layers * config.n_embd_kv * round_up(n_ctx, SLOT_MULTIPLE)


class KVCache(Owner):
    """`n_ctx` positions for every layer, all zero at first; `length` of them are in use.

    A pass writes its rows behind `length` and moves `length` only when it is complete, so a failed pass leaves the
    cache as it was.
    """

    def __init__(self, ggml: Library, config: ModelConfig, n_ctx: int) -> None:
        self.n_ctx = n_ctx
        self.n_slots = round_up(n_ctx, SLOT_MULTIPLE)
        self.length = 0
        self._written = 0  # slots that may hold something
        half = F16_BYTES * config.n_embd_kv * self.n_slots
        with ExitStack() as stack:
            self._pages = stack.enter_context(Pages(kv_bytes(config, n_ctx)))
            self._buffer = stack.enter_context(Buffer(ggml, self._pages.address, self._pages.nbytes))
            self._context = stack.enter_context(Context(ggml, 2 * config.n_layers))
            self.layers = tuple(
                LayerKV(
                    self._tensor(ggml, config.n_embd_kv, self.n_slots, 2 * layer * half),
                    self._tensor(ggml, self.n_slots, config.n_embd_kv, (2 * layer + 1) * half),
                )
                for layer in range(config.n_layers)
            )
            self._cleanup = stack.pop_all()
        halves = self._pages.bytes[: 2 * config.n_layers * half].view(np.float16).reshape(config.n_layers, 2, -1)
        self._keys = halves[:, 0].reshape(config.n_layers, self.n_slots, config.n_embd_kv)
        self._values = halves[:, 1].reshape(config.n_layers, config.n_embd_kv, self.n_slots)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._pages.nbytes

    def require(self, n_rows: int) -> None:
        """Make ready for `n_rows` more rows; ContextOverflow unless they fit."""
        if self.length + n_rows > self.n_ctx:
            raise ContextOverflow(
                f"{self.length + n_rows} tokens do not fit in a context of {self.n_ctx}: "
                "shorten the prompt or give more with -c"
            )
        self._written = max(self._written, self.length + n_rows)

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

    def close(self) -> None:
        """Free the memory; tensors become invalid."""
        self._keys = self._values = np.empty((0, 0, 0), np.float16)
        self._cleanup.close()

    def _tensor(self, ggml: Library, length: int, rows: int, at: int) -> int:
        tensor: int = ggml.new_tensor_2d(self._context.handle, F16, length, rows)
        return self._buffer.place(tensor, self._pages.address + at)
