"""What is read and held as one piece: a layer, or a band of rows of the output projection.

Turns the tensor directory of a GGUF into page-aligned file ranges and the places of tensors in memory. Opens no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lever.gguf import TYPES, TensorInfo
from lever.pages import PAGE, round_up

MERGE_GAP = 64 << 10  # bytes between two tensors that are cheaper read along than skipped


@dataclass(frozen=True, slots=True)
class Extent:
    """One range of a file in whole grains, and where it goes in the unit's memory."""

    file: int
    offset: int  # in the file, bytes, a multiple of the grain
    nbytes: int  # a multiple of the grain; the last one may reach past the end of the file
    needed: int  # bytes that must come, up to the end of the last tensor
    at: int  # in the unit's memory, bytes, a multiple of the grain


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in the unit's memory. Its address is congruent to its file offset modulo the grain."""

    tensor: TensorInfo
    at: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that come from flash together, in one slot."""

    name: str
    places: tuple[Place, ...]
    extents: tuple[Extent, ...]
    nbytes: int  # memory it takes; also the bytes one streamed pass reads for it


def unit(name: str, tensors: Sequence[TensorInfo], grain: int = PAGE) -> Unit:
    """The unit of `tensors`, whose ranges are merged where they lie next to each other in their file.

    Ranges are read in whole grains: a page, or a larger power of two where bytes can only be checked in blocks.
    """
    places: list[Place] = []
    extents: list[Extent] = []
    for tensor in sorted(tensors, key=lambda t: (t.file, t.offset)):
        end = tensor.offset + tensor.nbytes
        if extents and _adjoins(extents[-1], tensor):
            extents[-1] = _grown(extents[-1], end, grain)
        else:
            at = extents[-1].at + extents[-1].nbytes if extents else 0
            start = tensor.offset - tensor.offset % grain
            extents.append(_grown(Extent(tensor.file, start, 0, 0, at), end, grain))
        places.append(Place(tensor, extents[-1].at + tensor.offset - extents[-1].offset))
    return Unit(name, tuple(places), tuple(extents), sum(extent.nbytes for extent in extents))


def bands(tensor: TensorInfo, band_bytes: int, grain: int = PAGE, rows_multiple: int = 256) -> tuple[Unit, ...]:
    """The rows of a matrix [row length, rows] cut into units of about `band_bytes`.

    The cut depends on the file alone, never on the budget, so that each product is computed the same way always.
    """
    rows = tensor.shape[1]
    step = max(band_bytes // row_nbytes(tensor) // rows_multiple, 1) * rows_multiple
    firsts = range(0, rows, step)
    parts = (band(tensor, first, min(first + step, rows)) for first in firsts)
    return tuple(
        unit(f"{tensor.name}[{first}:{first + part.shape[1]}]", [part], grain)
        for first, part in zip(firsts, parts, strict=True)
    )


def row_nbytes(tensor: TensorInfo) -> int:
    """Bytes of one row of a matrix."""
    kind = TYPES[tensor.type]
    return tensor.shape[0] // kind.block * kind.nbytes


def band(tensor: TensorInfo, first: int, last: int) -> TensorInfo:
    """The rows `first` to `last` of a matrix, as a matrix of their own."""
    row_bytes = row_nbytes(tensor)
    return replace(
        tensor,
        shape=(tensor.shape[0], last - first),
        offset=tensor.offset + first * row_bytes,
        nbytes=(last - first) * row_bytes,
    )


def _adjoins(extent: Extent, tensor: TensorInfo) -> bool:
    return tensor.file == extent.file and tensor.offset <= extent.offset + extent.needed + MERGE_GAP


def _grown(extent: Extent, end: int, grain: int) -> Extent:
    needed = max(extent.needed, end - extent.offset)
    return replace(extent, nbytes=round_up(needed, grain), needed=needed)
