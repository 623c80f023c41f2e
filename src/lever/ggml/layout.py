"""The kernels' own layout of a matrix: whether this CPU has one for a type, which, and how bytes get into it.

ggml interleaves the rows of a matrix in its repack buffer type; how, depends on the CPU. Never writes a type into that
buffer that it does not take: that ends the process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lever.errors import LibraryError
from lever.ggml.lib import Library
from lever.ggml.objects import Context, RepackedPages
from lever.gguf import F32, TYPES

ROW_GROUP = 64  # rows; a multiple of all that any kernel interleaves, so that groups are repacked independently


def new_tensor(ggml: Library, context: Context, kind: int, shape: Sequence[int]) -> int:
    """A vector or matrix without memory."""
    make = ggml.new_tensor_1d if len(shape) == 1 else ggml.new_tensor_2d
    tensor: int = make(context.handle, kind, *shape)
    return tensor


@functools.cache
def takes_repacked(ggml: Library, kind: int, shape: tuple[int, ...]) -> bool:
    """Whether this CPU multiplies a matrix of this type and shape in the repacked layout, in as many bytes.

    Asked of a product with a weight that already lies in a repack buffer.
    """
    if ggml.repack_buffer_type is None or len(shape) != 2:
        return False
    with Context(ggml, 1) as weight_context, Context(ggml, 2) as context:
        weight = new_tensor(ggml, weight_context, kind, (shape[0], shape[1]))
        nbytes = shape[0] // TYPES[kind].block * TYPES[kind].nbytes * shape[1]
        if ggml.backend_buft_get_alloc_size(ggml.repack_buffer_type, weight) != nbytes:
            return False
        buffer = ggml.backend_alloc_ctx_tensors_from_buft(weight_context.handle, ggml.repack_buffer_type)
        if not buffer:  # "no" would change the bits of whatever is then computed plainly
            raise LibraryError(f"ggml could not allocate a repack buffer for {TYPES[kind].name} {list(shape)}")
        try:
            rows = ggml.new_tensor_2d(context.handle, F32, shape[0], 4)
            product = ggml.mul_mat(context.handle, weight, rows)
            return bool(ggml.backend_dev_supports_op(ggml.cpu_device, product))
        finally:
            ggml.backend_buffer_free(buffer)


def repack(ggml: Library, kind: int, shape: tuple[int, int], rows: NDArray[np.uint8], into: RepackedPages) -> None:
    """Write a matrix of plain bytes at the start of `into` in the kernels' layout."""
    with Context(ggml, 1) as context:
        tensor = into.place(new_tensor(ggml, context, kind, shape), into.address)
        ggml.backend_tensor_set(tensor, rows.ctypes.data, 0, rows.nbytes)


@functools.cache
def fingerprint(ggml: Library, kind: int) -> str | None:
    """Names the layout of a type on this CPU by what it makes of two fixed matrices; None where it has none.

    Two, since kernels choose by the number of rows: a multiple of all that they interleave, and a multiple of 4 only.
    """
    info = TYPES[kind]
    length = max(info.block, 256)
    digest, taken = hashlib.sha256(), False
    for n_rows in (ROW_GROUP, ROW_GROUP - 4):
        shape, nbytes = (length, n_rows), n_rows * length // info.block * info.nbytes
        if not takes_repacked(ggml, kind, shape):
            digest.update(b"plain")
            continue
        taken = True
        data = np.frombuffer(hashlib.shake_128(info.name.encode()).digest(nbytes), np.uint8)
        with RepackedPages(ggml, nbytes) as pages:
            repack(ggml, kind, shape, data, pages)
            digest.update(ctypes.string_at(pages.address, nbytes))
    return digest.hexdigest()[:16] if taken else None
