"""Reads the header of a GGUF file: metadata and where each tensor lies. Knows no model, reads no weights.

The file is taken as hostile: every count and length is compared with the size of the file and with a fixed
limit before anything is allocated for it, and offsets are Python integers, which do not wrap.
"""

from __future__ import annotations

import math
import re
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar

from lever.errors import GGUFError, StorageError, UnsupportedModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

MAX_HEADER_BYTES = 128 << 20  # a vocabulary of 262 k with its merges takes about 20 MiB
MAX_ARRAY_ELEMENTS = 1 << 22  # over all arrays of one file; the same vocabulary has 1.3 million
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_KEY_BYTES = 64 << 10
MAX_NAME_BYTES = 64  # GGML_MAX_NAME
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_ELEMENTS = 1 << 40

CHUNK_BYTES = 256 << 10  # the last read goes past the header by less than this
MIN_KEY_VALUE_BYTES = 8 + 1 + 4 + 1  # length, one byte of key, type, one byte of value
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # length, one byte of name, number of dims, one dim, type, offset
MAX_NAMES_SHOWN = 8

SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class TypeInfo:
    """A ggml tensor type: `nbytes` bytes hold one block of `block` elements of a row."""

    name: str
    block: int
    nbytes: int


F32, F16, I32, I64, BF16 = 0, 1, 26, 27, 30
# Ids from enum ggml_type in ggml.h, sizes from the block structs in ggml-common.h, both of ggml 0.20.2.
# Ids 4, 5, 31 to 33 and 36 to 38 were withdrawn and may not appear in a file.
TYPES: Mapping[int, TypeInfo] = MappingProxyType(
    {
        0: TypeInfo("F32", 1, 4),
        1: TypeInfo("F16", 1, 2),
        2: TypeInfo("Q4_0", 32, 18),
        3: TypeInfo("Q4_1", 32, 20),
        6: TypeInfo("Q5_0", 32, 22),
        7: TypeInfo("Q5_1", 32, 24),
        8: TypeInfo("Q8_0", 32, 34),
        9: TypeInfo("Q8_1", 32, 36),
        10: TypeInfo("Q2_K", 256, 84),
        11: TypeInfo("Q3_K", 256, 110),
        12: TypeInfo("Q4_K", 256, 144),
        13: TypeInfo("Q5_K", 256, 176),
        14: TypeInfo("Q6_K", 256, 210),
        15: TypeInfo("Q8_K", 256, 292),
        16: TypeInfo("IQ2_XXS", 256, 66),
        17: TypeInfo("IQ2_XS", 256, 74),
        18: TypeInfo("IQ3_XXS", 256, 98),
        19: TypeInfo("IQ1_S", 256, 50),
        20: TypeInfo("IQ4_NL", 32, 18),
        21: TypeInfo("IQ3_S", 256, 110),
        22: TypeInfo("IQ2_S", 256, 82),
        23: TypeInfo("IQ4_XS", 256, 136),
        24: TypeInfo("I8", 1, 1),
        25: TypeInfo("I16", 1, 2),
        26: TypeInfo("I32", 1, 4),
        27: TypeInfo("I64", 1, 8),
        28: TypeInfo("F64", 1, 8),
        29: TypeInfo("IQ1_M", 256, 56),
        30: TypeInfo("BF16", 1, 2),
        34: TypeInfo("TQ1_0", 256, 54),
        35: TypeInfo("TQ2_0", 256, 66),
        39: TypeInfo("MXFP4", 32, 17),
        40: TypeInfo("NVFP4", 64, 36),
        41: TypeInfo("Q1_0", 128, 18),
        42: TypeInfo("Q2_0", 64, 18),
    }
)
# Types with a `vec_dot` in type_traits_cpu of ggml 0.20.2 (ggml-cpu.c): those that mul_mat takes as weights.
MATRIX_TYPES = frozenset(TYPES) - {
    9,  # Q8_1: activations only
    15,  # Q8_K: activations only
    24,  # I8
    25,  # I16
    26,  # I32
    27,  # I64
    28,  # F64
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: bytes [offset, offset + nbytes) of `GGUF.files[file]`."""

    name: str
    shape: tuple[int, ...]  # ggml order: length of a row first
    type: int  # key of TYPES
    file: int
    offset: int
    nbytes: int


# Before the architecture of a flash image (`lever.weights.image`), whose bytes other readers must not take for weights.
IMAGE_PREFIX = "lever."
IMAGE_CHECKSUMS = "lever.checksums"  # the one tensor of an image that its source does not have

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GGUF:
    """The header of a model, of all its parts if it is split. Elements of string arrays stay bytes."""

    path: Path  # as the user gave it
    files: tuple[Path, ...]  # all parts, in order
    size: int  # bytes of all files
    version: int
    alignment: int
    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]
    places: Mapping[str, range] = field(default_factory=dict)  # of type and value of each key, bytes of the first file

    @property
    def architecture(self) -> str:
        """Of the model; a flash image has that of its source."""
        return self.text("general.architecture").removeprefix(IMAGE_PREFIX)

    def integer(self, key: str, default: int | None = None) -> int:
        """The integer at `key`; GGUFError if it is of another type, or missing with no default."""
        return self._get(key, default, "an integer", _as_integer)

    def real(self, key: str, default: float | None = None) -> float:
        """The finite number at `key`; GGUFError if it is of another type, or missing with no default."""
        return self._get(key, default, "a finite number", _as_real)

    def text(self, key: str, default: str | None = None) -> str:
        """The string at `key`; GGUFError if it is of another type, or missing with no default."""
        return self._get(key, default, "a string", lambda value: value if isinstance(value, str) else None)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """The boolean at `key`; GGUFError if it is of another type, or missing with no default."""
        return self._get(key, default, "a boolean", lambda value: value if isinstance(value, bool) else None)

    def integers(self, key: str, default: list[int] | None = None) -> list[int]:
        """The array of integers at `key`; GGUFError if it is of another type, or missing with no default."""
        return self._get(key, default, "an array of integers", _as_list_of(int))

    def reals(self, key: str, default: list[float] | None = None) -> list[float]:
        """The array of floats at `key`; GGUFError if it is of another type, or missing with no default."""
        return self._get(key, default, "an array of floats", _as_list_of(float))

    def strings(self, key: str, default: list[bytes] | None = None) -> list[bytes]:
        """The array of strings at `key`; GGUFError if it is of another type, or missing with no default."""
        return self._get(key, default, "an array of strings", _as_list_of(bytes))

    def per_layer(self, key: str, n_layers: int, default: int | None = None) -> tuple[int, ...]:
        """One integer for each layer, from a scalar that holds for all or an array of `n_layers` values."""
        if not isinstance(self.metadata.get(key), list):
            return (self.integer(key, default),) * n_layers
        values = tuple(self.integers(key))
        if len(values) != n_layers:
            raise GGUFError(f"{self.path}: {key} has {len(values)} values for {n_layers} layers; the file is damaged")
        return values

    def _get(self, key: str, default: T | None, wanted: str, convert: Callable[[object], T | None]) -> T:
        if key not in self.metadata:
            if default is None:
                raise GGUFError(f"{self.path}: metadata key {key} is missing; get a complete file")
            return default
        value = self.metadata[key]
        converted = convert(value)
        if converted is None:
            raise GGUFError(f"{self.path}: metadata key {key} must be {wanted}, not {_describe(value)}")
        return converted


def _as_integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _as_real(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _as_list_of(kind: type[T]) -> Callable[[object], list[T] | None]:
    # An array in a file has one element type, so its first element speaks for all. A bool is not an int here.
    def convert(value: object) -> list[T] | None:
        return value if isinstance(value, list) and (not value or type(value[0]) is kind) else None

    return convert


def _describe(value: object) -> str:
    if isinstance(value, list):
        return f"an array of {len(value)} {type(value[0]).__name__}" if value else "an empty array"
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."


def read(path: Path | str) -> GGUF:
    """Read the header of a model; any part of a split model stands for all of it.

    GGUFError: damaged, cut, or not a GGUF. UnsupportedModel: a version, byte order or tensor type that is
    not known here. StorageError: the file cannot be read.
    """
    path = Path(path)
    try:
        return _gguf(path, _read_all(path))
    except OSError as error:
        raise StorageError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error


def part_paths(path: Path) -> tuple[Path, ...]:
    """All files of a model, by the name of any of them; opens none."""
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    return tuple(_part_names(path, match["stem"], int(match["count"])))


def _part_names(path: Path, stem: str, count: int) -> list[Path]:
    return [path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]


def _read_all(path: Path) -> list[_File]:
    given = _read_file(path)
    if given.split_count <= 1:
        return [given]
    _refuse_joined(given)
    return _read_parts(given, _part_paths(path, given.split_count))


# --- splits -----------------------------------------------------------------------------------------------


def _part_paths(path: Path, count: int) -> list[Path]:
    """Paths of all parts, next to the path as given: a link of a cache points at a file of another name."""
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        wanted = f"NAME-00001-of-{count:05d}.gguf"
        raise GGUFError(
            f"{path}: is one of {count} parts of a split model, but its name does not say so; "
            f"keep all parts in one directory under their names, {wanted} and so on"
        )
    paths = _part_names(path, match["stem"], count)
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        shown = ", ".join(missing[:MAX_NAMES_SHOWN])
        more = f" and {len(missing) - MAX_NAMES_SHOWN} more" if len(missing) > MAX_NAMES_SHOWN else ""
        raise GGUFError(
            f"{path}: is one of {count} parts of a split model; missing in {path.parent}: {shown}{more}; "
            f"download them next to it"
        )
    return paths


def _read_parts(given: _File, paths: list[Path]) -> list[_File]:
    parts = [given if path == given.path else _read_file(path) for path in paths]
    for index, part in enumerate(parts):
        _refuse_joined(part)
        number, count = part.metadata.get("split.no"), part.split_count
        if number != index or count != len(parts):
            raise GGUFError(
                f"{part.path}: says that it is part {number} (from 0) of {count}, its name says part {index} "
                f"of {len(parts)}; give the parts the names they were published under"
            )
    return parts


def _refuse_joined(part: _File) -> None:
    """Parts glued together with `cat` show the magic of the second where the first ends."""
    for end in {part.data_end, _align(part.data_end, part.alignment)}:
        if end + len(MAGIC) <= part.size and _read_at(part.path, end, len(MAGIC)) == MAGIC:
            raise GGUFError(
                f"{part.path}: parts of a split model were joined, another GGUF starts at byte {end}; "
                f"keep the parts as published and give the first, NAME-00001-of-{part.split_count:05d}.gguf"
            )


def _read_at(path: Path, offset: int, nbytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(nbytes)


def _gguf(path: Path, parts: list[_File]) -> GGUF:
    tensors: dict[str, TensorInfo] = {}
    for index, part in enumerate(parts):
        for tensor in part.tensors:
            if tensor.name in tensors:
                raise GGUFError(f"{part.path}: tensor {tensor.name} appears twice; the file is damaged")
            tensors[tensor.name] = replace(tensor, file=index)
    first = parts[0]
    total = first.metadata.get("split.tensors.count")
    if len(parts) > 1 and isinstance(total, int) and total != len(tensors):
        raise GGUFError(
            f"{path}: its {len(parts)} parts hold {len(tensors)} tensors, not {total} as part one says; "
            f"download all parts again"
        )
    return GGUF(
        path=path,
        files=tuple(part.path for part in parts),
        size=sum(part.size for part in parts),
        version=first.version,
        alignment=first.alignment,
        metadata=MappingProxyType(first.metadata),
        tensors=MappingProxyType(tensors),
        places=MappingProxyType(first.places),
    )


# --- one file ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    size: int
    version: int
    alignment: int
    metadata: dict[str, object]
    places: dict[str, range]
    tensors: list[TensorInfo]
    data_end: int  # where the last tensor, or the header if there is none, ends

    @property
    def split_count(self) -> int:
        count = self.metadata.get("split.count", 1)
        return count if isinstance(count, int) else 1


class Readable(Protocol):
    """What the reader asks of an open file. May return less than asked for; b"" only at the end."""

    def read(self, size: int, /) -> bytes | None: ...


def _read_file(path: Path) -> _File:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise StorageError(f"{path}: is not a regular file; give the path of a .gguf file")
    with path.open("rb", buffering=0) as file:
        return _parse(path, file, status.st_size)


def _parse(path: Path, file: Readable, size: int) -> _File:
    header = _Header(path, file, size)
    version = _check_magic_and_version(header)
    n_tensors = header.count("number of tensors", MIN_TENSOR_BYTES, MAX_TENSORS)
    n_keys = header.count("number of metadata keys", MIN_KEY_VALUE_BYTES, MAX_KEYS)
    metadata, places = _read_metadata(header, n_keys)
    alignment = _check_alignment(header, metadata)
    tensors = [_read_tensor(header) for _ in range(n_tensors)]
    start = _align(header.offset, alignment)
    tensors = [replace(tensor, offset=start + tensor.offset) for tensor in tensors]
    _check_places(header, tensors, start, alignment)
    end = max((tensor.offset + tensor.nbytes for tensor in tensors), default=header.offset)
    return _File(path, size, version, alignment, metadata, places, tensors, end)


def _check_magic_and_version(header: _Header) -> int:
    magic = header.take(len(MAGIC), "the magic")
    if magic != MAGIC:
        raise GGUFError(f"{header.path}: is not a GGUF file, it starts with {magic!r}; give a .gguf file")
    raw = header.take(4, "the version")
    version = int.from_bytes(raw, "little")
    if version in VERSIONS:
        return version
    if int.from_bytes(raw, "big") in VERSIONS:
        raise UnsupportedModel(f"{header.path}: is a big-endian GGUF; get the usual little-endian file")
    raise UnsupportedModel(
        f"{header.path}: has GGUF version {version}, lever reads 2 and 3; get a current file of this model"
    )


def _read_metadata(header: _Header, n_keys: int) -> tuple[dict[str, object], dict[str, range]]:
    """Values, and the bytes of the file that they take with their types."""
    metadata: dict[str, object] = {}
    places: dict[str, range] = {}
    for _ in range(n_keys):
        key = header.name("a metadata key", MAX_KEY_BYTES)
        if key in metadata:
            raise header.error(f"metadata key {key} appears twice")
        start = header.offset
        metadata[key] = header.value(key)
        places[key] = range(start, header.offset)
    return metadata, places


def _check_alignment(header: _Header, metadata: Mapping[str, object]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise header.error(f"general.alignment is {_describe(alignment)}, not a power of two of at least 8")
    return alignment


def _read_tensor(header: _Header) -> TensorInfo:
    """One entry of the directory; its offset still counts from the start of the data."""
    name = header.name("a tensor name", MAX_NAME_BYTES)
    n_dims = header.integer("I", f"the number of dimensions of {name}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise header.error(f"tensor {name} has {n_dims} dimensions, not 1 to {MAX_DIMS}")
    shape = tuple(header.integer("Q", f"the shape of {name}") for _ in range(n_dims))
    elements = math.prod(shape)
    if not 1 <= elements <= MAX_ELEMENTS:
        raise header.error(f"tensor {name} has shape {shape}, which is not a size that a tensor can have")
    type_id = header.integer("I", f"the type of {name}")
    info = TYPES.get(type_id)
    if info is None:
        raise _unknown_type(header.path, name, type_id)
    if shape[0] % info.block:
        raise header.error(f"tensor {name} has rows of {shape[0]}, not a multiple of {info.block} ({info.name})")
    offset = header.integer("Q", f"the offset of {name}")
    return TensorInfo(name, shape, type_id, 0, offset, elements // info.block * info.nbytes)


def _unknown_type(path: Path, name: str, type_id: int) -> UnsupportedModel:
    known = ", ".join(info.name for info in TYPES.values())
    return UnsupportedModel(
        f"{path}: tensor {name} has type {type_id}, which ggml 0.20.2 does not know; "
        f"get the model in one of these: {known}"
    )


def _check_places(header: _Header, tensors: list[TensorInfo], start: int, alignment: int) -> None:
    """Refuse tensors outside the file, unaligned, or on top of each other. Padding at the end is optional."""
    previous, previous_end = "", start
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        end = tensor.offset + tensor.nbytes
        if (tensor.offset - start) % alignment:
            raise header.error(f"tensor {tensor.name} lies at byte {tensor.offset}, not aligned to {alignment}")
        if tensor.offset < previous_end:
            raise header.error(f"tensors {previous} and {tensor.name} overlap at byte {tensor.offset}")
        if end > header.size:
            raise GGUFError(
                f"{header.path}: is cut: tensor {tensor.name} lies at bytes {tensor.offset} to {end}, "
                f"but the file ends at {header.size}; download it again"
            )
        previous, previous_end = tensor.name, end


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


# Value types of GGUF: id -> struct code. 7 is a bool, 8 a string, 9 an array.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9
U64 = struct.Struct("<Q")


class _Header:
    """A forward reader over the start of a file that never asks for more than the file has."""

    def __init__(self, path: Path, file: Readable, size: int) -> None:
        self.path = path
        self.size = size
        self._file = file
        self._buffer = b""
        self._pos = 0  # in the buffer
        self._base = 0  # offset in the file of the buffer's first byte
        self._elements_left = MAX_ARRAY_ELEMENTS

    @property
    def offset(self) -> int:
        return self._base + self._pos

    def error(self, what: str) -> GGUFError:
        return GGUFError(f"{self.path}: {what} (before byte {self.offset}); it is damaged, get it again")

    def take(self, nbytes: int, what: str) -> bytes:
        self._need(nbytes, what)
        self._pos += nbytes
        return self._buffer[self._pos - nbytes : self._pos]

    def integer(self, code: str, what: str) -> int:
        return int.from_bytes(self.take(struct.calcsize("<" + code), what), "little")

    def count(self, what: str, bytes_each: int, limit: int) -> int:
        """A number of things that each take at least `bytes_each` bytes of what is left of the file."""
        count = self.integer("Q", f"the {what}")
        left = min(self.size, MAX_HEADER_BYTES) - self.offset
        most = min(left // bytes_each, limit)
        if count > most:
            raise self.error(f"the {what} is {count}, more than the {most} that there can be")
        return count

    def text(self, what: str, limit: int) -> str:
        nbytes = self.integer("Q", f"the length of {what}")
        if nbytes > limit:
            raise self.error(f"{what} is {nbytes} bytes long, more than {limit}")
        return self.take(nbytes, what).decode(errors="replace")

    def name(self, what: str, limit: int) -> str:
        """A string that may be shown in a message: not empty, nothing that moves a terminal's cursor."""
        name = self.text(what, limit)
        if not name or not name.isprintable():
            raise self.error(f"{what} is {name[:40]!r}, which cannot be a name")
        return name

    def value(self, key: str) -> object:
        kind = self.integer("I", f"the type of {key}")
        if kind == STRING:
            return self.text(f"the value of {key}", MAX_HEADER_BYTES)
        if kind == ARRAY:
            return self._array(key)
        return self._numbers(key, kind, 1)[0]

    def _array(self, key: str) -> list[object]:
        kind = self.integer("I", f"the element type of {key}")
        if kind == ARRAY:
            raise self.error(f"{key} is an array of arrays")
        size = 8 if kind == STRING else self._number_size(key, kind)
        count = self.count(f"number of elements of {key}", size, self._elements_left)
        self._elements_left -= count
        return self._strings(key, count) if kind == STRING else self._numbers(key, kind, count)

    def _number_size(self, key: str, kind: int) -> int:
        if kind not in NUMBERS:
            raise self.error(f"{key} has value type {kind}, which GGUF does not define")
        return struct.calcsize("<" + NUMBERS[kind])

    def _numbers(self, key: str, kind: int, count: int) -> list[object]:
        size = self._number_size(key, kind)
        raw = self.take(size * count, f"the value of {key}")
        if kind == BOOL and any(byte > 1 for byte in raw):
            raise self.error(f"{key} is a boolean that is neither 0 nor 1")
        return list(struct.unpack(f"<{count}{NUMBERS[kind]}", raw))

    def _strings(self, key: str, count: int) -> list[object]:
        # The one hot loop: 300 k strings in a usual vocabulary. The state of the buffer is kept in locals.
        what = f"a string of {key}"
        strings: list[object] = []
        buffer, pos, end = self._buffer, self._pos, len(self._buffer)
        for _ in range(count):
            if end - pos < 8:
                buffer, pos, end = self._refill(pos, 8, what)
            (nbytes,) = U64.unpack_from(buffer, pos)
            pos += 8
            if end - pos < nbytes:
                buffer, pos, end = self._refill(pos, nbytes, what)
            strings.append(buffer[pos : pos + nbytes])
            pos += nbytes
        self._pos = pos
        return strings

    def _refill(self, pos: int, nbytes: int, what: str) -> tuple[bytes, int, int]:
        self._pos = pos
        self._need(nbytes, what)
        return self._buffer, self._pos, len(self._buffer)

    def _need(self, nbytes: int, what: str) -> None:
        """Have the next `nbytes` bytes in the buffer. Loops: one read may return less than asked for."""
        have = len(self._buffer) - self._pos
        if have >= nbytes:
            return
        if self.offset + nbytes > self.size:
            raise GGUFError(
                f"{self.path}: {what} should lie at bytes {self.offset} to {self.offset + nbytes}, "
                f"but the file ends at {self.size}; it is cut or damaged, download it again"
            )
        if self.offset + nbytes > MAX_HEADER_BYTES:
            raise self.error(f"{what} needs {nbytes} bytes, a header may have {MAX_HEADER_BYTES}")
        pieces = [self._buffer[self._pos :]]
        while have < nbytes:
            room = min(self.size, MAX_HEADER_BYTES) - self.offset - have
            piece = self._file.read(min(max(CHUNK_BYTES, nbytes - have), room))
            if not piece:
                raise StorageError(
                    f"{self.path}: reading stopped at byte {self.offset + have} of {self.size}; "
                    f"the file changed while it was read, try again"
                )
            pieces.append(piece)
            have += len(piece)
        self._base, self._pos, self._buffer = self.offset, 0, b"".join(pieces)
