"""Matrices that ggml and NumPy share: a tensor, and an array over the same memory."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lever.ggml.lib import Library
from lever.ggml.objects import Buffer, Context
from lever.gguf import F16, F32, I32, I64
from lever.pages import Pages

KINDS = {np.dtype(np.float16): F16, np.dtype(np.float32): F32, np.dtype(np.int32): I32, np.dtype(np.int64): I64}


class Matrix:
    """A tensor [length, rows] and an array [rows, length], here of the same memory.

    What computes may have memory of its own (`lever.ggml.devices`): who writes the array says `send`, who reads it
    `fetch`, of so many elements.
    """

    def __init__(self, tensor: int, array: NDArray[Any]) -> None:
        self.tensor, self.array = tensor, array

    def send(self, n: int, start: int = 0) -> None:
        """What computes shall see n elements of the array: here it does anyway."""

    def fetch(self, n: int) -> None:
        """The array shall show the tensor's first n elements, once they are computed: here it does anyway."""


def shared(
    ggml: Library, context: Context, stack: ExitStack, dtype: DTypeLike, rows: int, length: int
) -> tuple[int, NDArray[Any]]:
    """A tensor [length, rows] of the context and the array [rows, length] over it, both zero; the stack owns the
    memory.
    """
    kind, nbytes = KINDS[np.dtype(dtype)], rows * length * np.dtype(dtype).itemsize
    pages = stack.enter_context(Pages(nbytes))
    tensor = placed(ggml, context, stack, kind, rows, length, pages.address, pages.nbytes)
    return tensor, pages.bytes[:nbytes].view(dtype).reshape(rows, length)


def placed(
    ggml: Library, context: Context, stack: ExitStack, kind: int, rows: int, length: int, address: int, nbytes: int
) -> int:
    """A tensor [length, rows] of the context at the start of memory of somebody's."""
    buffer = stack.enter_context(Buffer(ggml, address, nbytes))
    return buffer.place(ggml.new_tensor_2d(context.handle, kind, length, rows), address)
