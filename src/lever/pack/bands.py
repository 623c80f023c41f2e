"""Weights from the source's bytes to the image's, band by band: read, requantised, repacked. Writes no file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from lever.ggml import Backend, Buffer, Context, Library
from lever.ggml.layout import ROW_GROUP, new_tensor, repack
from lever.ggml.objects import RepackedPages
from lever.gguf import F32, GGUF, TYPES, TensorInfo
from lever.owner import Owner
from lever.pack.contents import BLOCK, Entry
from lever.pages import Pages, round_up
from lever.weights.reader import DirectFile
from lever.weights.units import band

BAND_ELEMENTS = 1 << 21  # weights that are converted at once


class Bands(Owner):
    """Reads the source's tensors in bands of rows and turns each into the image's bytes."""

    def __init__(self, ggml: Library, gguf: GGUF, entries: Sequence[Entry], n_threads: int) -> None:
        self._ggml = ggml
        with ExitStack() as stack:
            self._files = [stack.enter_context(DirectFile(path)) for path in gguf.files]
            self._backend = stack.enter_context(Backend(ggml, n_threads))
            sizes = _sizes(entries)
            self._source, self._wide, self._out = (stack.enter_context(Pages(nbytes)) for nbytes in sizes[:3])
            self._repacked = stack.enter_context(RepackedPages(ggml, sizes[3])) if sizes[3] else None
            self._stack = stack.pop_all()

    @staticmethod
    def nbytes(entries: Sequence[Entry]) -> int:
        """Bytes that it takes, before there is one."""
        return sum(_sizes(entries))

    def close(self) -> None:
        """Free the buffers and close the source."""
        self._stack.close()

    def of(self, entry: Entry) -> Iterator[memoryview]:
        """The bytes of a tensor as they stand in the image, each piece valid until the next."""
        if len(entry.source.shape) == 1:
            yield self._read(entry.source).data
            return
        for part in _row_bands(entry.source):
            data = self._converted(self._read(part), part, entry.kind)
            if entry.repacked:
                assert self._repacked is not None
                repack(self._ggml, entry.kind, (part.shape[0], part.shape[1]), data, self._repacked)
                data = self._repacked.bytes[: data.nbytes]
            yield data.data

    def _read(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        file = self._files[tensor.file]
        lead = tensor.offset % file.grain
        span = self._source.bytes.data[: round_up(lead + tensor.nbytes, file.grain)]
        file.read_exactly(span, tensor.offset - lead, lead + tensor.nbytes)
        return self._source.bytes[lead : lead + tensor.nbytes]

    def _converted(self, data: NDArray[np.uint8], part: TensorInfo, kind: int) -> NDArray[np.uint8]:
        """The same rows in another type, by way of F32, through ggml's own conversions."""
        if kind == part.type:
            return data
        info = TYPES[kind]
        nbytes = part.shape[0] * part.shape[1] // info.block * info.nbytes
        with ExitStack() as stack:
            context = stack.enter_context(Context(self._ggml, 5, 4))

            def placed(kind: int, address: int, nbytes: int) -> int:
                buffer = stack.enter_context(Buffer(self._ggml, address, nbytes))
                return buffer.place(new_tensor(self._ggml, context, kind, part.shape), address)

            tensor = placed(part.type, data.ctypes.data, data.nbytes)
            wide = placed(F32, self._wide.address, self._wide.nbytes)
            narrow = placed(kind, self._out.address, self._out.nbytes)
            graph = context.new_graph()
            wide = self._ggml.cpy(context.handle, tensor, wide)
            self._ggml.build_forward_expand(graph, self._ggml.cpy(context.handle, wide, narrow))
            self._backend.compute(graph)
        return self._out.bytes[:nbytes]


def _row_bands(tensor: TensorInfo) -> Iterator[TensorInfo]:
    length, rows = tensor.shape
    step = max(BAND_ELEMENTS // length // ROW_GROUP, 1) * ROW_GROUP
    for first in range(0, rows, step):
        yield band(tensor, first, min(first + step, rows))


def _sizes(entries: Sequence[Entry]) -> tuple[int, int, int, int]:
    """Bytes of the buffers for a band: as read, in F32, in another type, repacked."""
    read = wide = out = packed = 1
    for entry in entries:
        if len(entry.source.shape) == 1:
            read = max(read, entry.source.nbytes)
            continue
        part = next(_row_bands(entry.source))
        info, n = TYPES[entry.kind], part.shape[0] * part.shape[1]
        read = max(read, part.nbytes)
        if entry.kind != entry.source.type:
            wide, out = max(wide, 4 * n), max(out, n // info.block * info.nbytes)
        if entry.repacked:
            packed = max(packed, n // info.block * info.nbytes)
    return round_up(read, BLOCK) + BLOCK, round_up(wide), round_up(out), round_up(packed) if packed > 1 else 0
