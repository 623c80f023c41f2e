"""Does this ggml, on this CPU, compute what lever relies on? Small products against float64, and rows against rows.

Exact speculation stands on one property: a row of a product has the same bits whatever rows are beside it. Some kernels
have it only when the number of rows is a multiple of 2 or 4. Which, is measured here rather than believed, for each
type that a model has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lever.errors import LibraryError
from lever.ggml.devices import Cpu, Device, FarDevice
from lever.ggml.lib import Library
from lever.ggml.objects import Context
from lever.gguf import BF16, F16, F32, I32, MATRIX_TYPES, TYPES
from lever.owner import Owner

_NARROW: Mapping[int, Callable[[NDArray[np.float32]], NDArray[np.generic]]] = {
    F32: lambda values: values,
    F16: lambda values: values.astype(np.float16),
    BF16: lambda values: (values.view(np.uint32) >> 16).astype(np.uint16),
}
LENGTHS = (512, 2048)  # of the rows of the small matrices: multiples of every block length
N_WEIGHTS = 64  # their number of rows: a multiple of every repacked group
WIDTH = 32  # products of 1 to 32 rows are compared, which is what a graph of the model may have
# Kernels that need company take two rows at a time, but only where every share of the work is even: ggml cuts more than
# 16 rows into equal parts, and those of a multiple of 4 are.
ROW_MULTIPLES = (1, 4)
CANDIDATES = 1024  # random blocks, of which the sane ones are used
# Error over |w| |x|. Activations rounded to 8 bits give about 1e-3, a wrong kernel 1 / sqrt(length), above 0.02.
MAX_ERROR = 2e-3


@dataclass(frozen=True, slots=True)
class Probe:
    """What one type does in one layout."""

    type_name: str
    layout: str  # "plain" or "repacked"
    error: float  # largest error of a product over the lengths of its vectors
    row_multiple: int | None  # products of a multiple of so many rows are row-invariant; None: not even those of 4

    @property
    def row_invariant(self) -> bool:
        """Whether a row can be given the same bits whatever rows are beside it."""
        return self.row_multiple is not None

    @property
    def sound(self) -> bool:
        """Whether lever may use this type in this layout."""
        return self.error < MAX_ERROR and self.row_invariant


def row_multiple(ggml: Library, plain: Iterable[int], repacked: Iterable[int] = ()) -> int:
    """The number of rows that every product of a model with these types must have a multiple of.

    `plain` types are multiplied as a file holds them, `repacked` ones in that layout where they have it. LibraryError
    unless each multiplies correctly and some multiple makes it row-invariant. The F32 of attention counts as a type of
    every model.
    """
    multiple = 1
    wanted = [(kind, False) for kind in sorted({*plain, F32})] + [(kind, True) for kind in sorted(set(repacked))]
    for kind, in_layout in wanted:
        found = probe(ggml, kind, repacked=in_layout)
        if found is None and not in_layout:
            raise LibraryError(f"ggml in {ggml.directory} multiplies no weights of type {TYPES[kind].name}")
        if found is None:
            continue
        if not found.sound or found.row_multiple is None:
            raise LibraryError(
                f"ggml in {ggml.directory} fails its self-test for {found.type_name} ({found}): "
                "see `lever doctor`, and install libggml-python again for this CPU"
            )
        multiple = max(multiple, found.row_multiple)
    return multiple


def largest_row_multiple(ggml: Library) -> int:
    """The number of rows that products of any type, as files hold it, should have a multiple of, where that helps."""
    found = (probe(ggml, kind) for kind in MATRIX_TYPES)
    return max(one.row_multiple or 1 for one in found if one is not None)


def type_name(ggml: Library, kind: int) -> str:
    """ggml's own name of a type, in capitals as files write it."""
    name: bytes = ggml.type_name(kind)
    return name.decode().upper()


@functools.cache
def probe(ggml: Library, kind: int, repacked: bool = False) -> Probe | None:
    """Multiply a small random matrix of this type; None where ggml does not have it in this layout."""
    buffer_type = ggml.repack_buffer_type if repacked else ggml.backend_cpu_buffer_type()
    if buffer_type is None:
        return None
    return _probe(ggml, Cpu(ggml), kind, buffer_type, "repacked" if repacked else "plain")


def probe_on(ggml: Library, device: FarDevice, kind: int) -> Probe | None:
    """As `probe`, of matrices in the memory of another device, which computes; None where it has no such product."""
    if kind not in device.way.probes:
        device.way.probes[kind] = _probe(ggml, device, kind, device.buffer_type, "plain")
    found: Probe | None = device.way.probes[kind]
    return found


def row_multiple_on(ggml: Library, device: FarDevice, kinds: Iterable[int]) -> int | None:
    """As `row_multiple`, of a device; None where no multiple makes it row-invariant. LibraryError for products that are
    wrong, or that it has not.
    """
    multiple: int | None = 1
    for kind in sorted({*kinds, F32}):
        found = probe_on(ggml, device, kind)
        if found is None:
            raise LibraryError(f"the device {device.name} multiplies no weights of type {TYPES[kind].name}")
        if not found.error < MAX_ERROR:
            raise LibraryError(f"the device {device.name} fails the self-test for {found.type_name} ({found})")
        multiple = None if None in (multiple, found.row_multiple) else max(multiple or 0, found.row_multiple or 0)
    return multiple


def _probe(ggml: Library, device: Device, kind: int, buffer_type: int, layout: str) -> Probe | None:
    if kind not in MATRIX_TYPES:  # asked whether it multiplies others, ggml says yes, and aborts
        return None
    results = [_compare(ggml, device, kind, buffer_type, length) for length in LENGTHS]
    if None in results:
        return None
    found = [result for result in results if result is not None]
    multiples = [multiple for _, multiple in found]
    return Probe(
        type_name(ggml, kind),
        layout,
        max(error for error, _ in found),
        None if None in multiples else max(multiple for multiple in multiples if multiple is not None),
    )


def _compare(
    ggml: Library, device: Device, kind: int, buffer_type: int, length: int
) -> tuple[float, int | None] | None:
    """Error and row multiple of products with a matrix of rows of this length; None where ggml has none."""
    rng = np.random.default_rng(kind)
    rows = rng.standard_normal((WIDTH, length), np.float32)
    with (
        _plain(ggml, kind, length, N_WEIGHTS) as plain,
        _Weight(ggml, device, kind, length, N_WEIGHTS, buffer_type) as matrix,
    ):
        if not matrix.multiplies():
            return None
        data = _random_rows(ggml, kind, length, rng)
        plain.write(data)
        matrix.write(data)
        weights = plain.dequantised().astype(np.float64)
        widest = matrix.multiply(rows)
        same = [_same_bits(matrix, rows, widest, width) for width in range(1, WIDTH + 1)]
    scale = np.linalg.norm(rows, axis=1)[:, None] * np.linalg.norm(weights, axis=1)
    error = float(np.max(np.abs(widest - rows.astype(np.float64) @ weights.T) / scale))
    return error, next((multiple for multiple in ROW_MULTIPLES if all(same[multiple - 1 :: multiple])), None)


def _plain(ggml: Library, kind: int, length: int, n: int) -> _Weight:
    """A matrix for the CPU, in the layout of files."""
    return _Weight(ggml, Cpu(ggml), kind, length, n, ggml.backend_cpu_buffer_type())


def _same_bits(matrix: _Weight, rows: NDArray[np.float32], widest: NDArray[np.float32], width: int) -> bool:
    """Whether products of `width` rows are those of all rows together, where the rows have other places."""
    return np.array_equal(matrix.multiply(rows[-width:]), widest[-width:])


def _random_rows(ggml: Library, kind: int, length: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """N_WEIGHTS rows in a type's own bytes, from random blocks whose values are of a sane size.

    Any bytes are a block of a quantised type, so no quantiser is needed: those of some types take many seconds.
    """
    block = ggml.blck_size(kind)
    if block == 1:
        values = rng.standard_normal((N_WEIGHTS, length), np.float32)
        return np.ascontiguousarray(_NARROW[kind](values)).view(np.uint8)
    blocks = rng.integers(0, 256, (CANDIDATES, ggml.type_size(kind)), np.uint8)
    with _plain(ggml, kind, block, CANDIDATES) as candidates:
        candidates.write(blocks)
        largest = np.abs(candidates.dequantised()).max(axis=1)
    sane = blocks[np.isfinite(largest) & (largest > 0.01) & (largest < 100)]
    return rng.choice(sane, (N_WEIGHTS, length // block)).reshape(N_WEIGHTS, -1)


class _Weight(Owner):
    """A matrix [n, length] of one type, in memory that ggml allocated in a given buffer type; and what it computes."""

    def __init__(self, ggml: Library, device: Device, kind: int, length: int, n: int, buffer_type: int) -> None:
        self._ggml, self._device = ggml, device
        self._length, self._n = length, n
        with ExitStack() as stack:
            context = stack.enter_context(Context(ggml, 1))
            self._backend = stack.enter_context(device.open_backend(1))
            self._tensor: int = ggml.new_tensor_2d(context.handle, kind, length, n)
            stack.enter_context(device.hold(context, buffer_type))
            # One for all graphs, the widest first: another device is asked about memory once, not for each of them.
            self._allocator = stack.enter_context(device.open_allocator())
            self._cleanup = stack.pop_all()

    def multiplies(self) -> bool:
        """Whether the CPU says that it multiplies this matrix where it lies.

        To be asked before `write`: a repack buffer that does not take the type ends the process when written to.
        """
        with Context(self._ggml, 2) as context:
            rows = self._ggml.new_tensor_2d(context.handle, F32, self._length, WIDTH)
            product = self._ggml.mul_mat(context.handle, self._tensor, rows)
            return bool(self._ggml.backend_dev_supports_op(self._device.handle, product))

    def write(self, data: NDArray[np.uint8]) -> None:
        """Put the type's bytes in place."""
        data = np.ascontiguousarray(data)
        self._device.send(self._tensor, data.ctypes.data, data.nbytes)

    def dequantised(self) -> NDArray[np.float32]:
        """The weights that the type's bytes stand for."""
        with Context(self._ggml, 4, 4) as context:
            ids = self._ggml.new_tensor_1d(context.handle, I32, self._n)
            rows = self._ggml.get_rows(context.handle, self._tensor, ids)
            return self._run(context, rows, ids, np.arange(self._n, dtype=np.int32), (self._n, self._length))

    def multiply(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Products [rows, n] of rows [rows, length]."""
        with Context(self._ggml, 4, 4) as context:
            inputs = self._ggml.new_tensor_2d(context.handle, F32, self._length, len(rows))
            product = self._ggml.mul_mat(context.handle, self._tensor, inputs)
            return self._run(context, product, inputs, np.ascontiguousarray(rows), (len(rows), self._n))

    def _run(
        self, context: Context, result: int, tensor: int, inputs: NDArray[np.generic], shape: tuple[int, int]
    ) -> NDArray[np.float32]:
        graph = context.new_graph()
        self._ggml.set_input(tensor)
        self._ggml.build_forward_expand(graph, result)
        out = np.empty(shape, np.float32)
        self._allocator.allocate(graph)
        self._device.send(tensor, inputs.ctypes.data, inputs.nbytes)
        self._backend.compute(graph)
        self._device.fetch(result, out.ctypes.data, out.nbytes)
        return out

    def close(self) -> None:
        self._cleanup.close()
