"""The bytes of a GGUF header, for files that lever writes itself."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from lever.gguf import TensorInfo

GGUF_VERSION = 3
ALIGNMENT = 32  # of tensors, what GGUF has without `general.alignment`
UINT32, FLOAT32, STRING, ARRAY, UINT64 = 4, 6, 8, 9, 10  # enum gguf_metadata_value_type of gguf.h


def encoded(pairs: Sequence[tuple[str, bytes]], tensors: Sequence[TensorInfo], start: int) -> bytes:
    """The header of a file whose data begins at `start`: keys with their encoded values, and tensors at offsets of the
    file.
    """
    parts = [b"GGUF", struct.pack("<IQQ", GGUF_VERSION, len(tensors), len(pairs))]
    parts += [_string(key) + value for key, value in pairs]
    for tensor in tensors:
        n = len(tensor.shape)
        place = struct.pack(f"<I{n}QIQ", n, *tensor.shape, tensor.type, max(tensor.offset - start, 0))
        parts.append(_string(tensor.name) + place)
    return b"".join(parts)


def uint32(value: int) -> bytes:
    """A value with its type, as it stands behind a key."""
    return struct.pack("<II", UINT32, value)


def uint32s(values: Sequence[int]) -> bytes:
    """Likewise, a list."""
    return struct.pack(f"<IIQ{len(values)}I", ARRAY, UINT32, len(values), *values)


def uint64(value: int) -> bytes:
    """Likewise."""
    return struct.pack("<IQ", UINT64, value)


def real(value: float) -> bytes:
    """Likewise, in single precision."""
    return struct.pack("<If", FLOAT32, value)


def text(value: str) -> bytes:
    """Likewise."""
    return struct.pack("<I", STRING) + _string(value)


def texts(values: Sequence[str]) -> bytes:
    """Likewise, a list."""
    return struct.pack("<IIQ", ARRAY, STRING, len(values)) + b"".join(map(_string, values))


def _string(value: str) -> bytes:
    raw = value.encode(errors="backslashreplace")  # bytes of a file's name may be no UTF-8
    return struct.pack("<Q", len(raw)) + raw
