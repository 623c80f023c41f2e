"""What stands in an image, and where: tensors in the order in which passes use them, and the header. Writes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from lever import gguf_header
from lever.arch import ModelConfig, layer_tensors
from lever.errors import StorageError, UsageError
from lever.ggml import Library
from lever.ggml.layout import fingerprint, takes_repacked
from lever.gguf import GGUF, IMAGE_CHECKSUMS, IMAGE_PREFIX, TYPES, TensorInfo
from lever.loader import MAX_THREADS
from lever.pages import round_up
from lever.weights.image import KEY, TYPE_IDS, VERSION
from lever.weights.reader import CheckedFile

BLOCK = CheckedFile.BLOCK_BYTES
Q4_0, I64 = TYPE_IDS["Q4_0"], TYPE_IDS["I64"]
ALIGNMENT = 64

Type = Literal["keep", "q4_0"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSettings:
    """What an image holds.

    type "keep" copies each matrix in its own type; "q4_0" requantises the matrices of the layers, which is nearly all
    that a pass reads. The output projection and the embedding keep theirs: see docs/log.md for what that is worth.
    layout "auto" writes each matrix as the fastest kernels of this CPU want it; "plain" runs on every CPU.
    """

    type: Type = "keep"  # of the layers
    output: Type = "keep"
    embedding: Type = "keep"
    layout: Literal["auto", "plain"] = "auto"
    dram: int  # bytes that the process may hold
    n_threads: int = 1

    def __post_init__(self) -> None:
        """UsageError for what lies outside its range."""
        if not 0 < self.n_threads <= MAX_THREADS:
            raise UsageError(f"threads is {self.n_threads}: it must be 1 to {MAX_THREADS}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the image, and where it comes from."""

    source: TensorInfo
    name: str
    kind: int
    repacked: bool
    offset: int = 0  # in the image's file

    @property
    def tensor(self) -> TensorInfo:
        """As it lies in the image."""
        info = TYPES[self.kind]
        nbytes = int(np.prod(self.source.shape)) // info.block * info.nbytes
        return TensorInfo(self.name, self.source.shape, self.kind, 0, self.offset, nbytes)


@dataclass(frozen=True, slots=True)
class Contents:
    """The whole file: the bytes of its header, then entries at their offsets, the checksums last."""

    header: bytes
    entries: tuple[Entry, ...]
    checksums: Entry

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.checksums.offset + self.checksums.tensor.nbytes


def _groups(ggml: Library, gguf: GGUF, config: ModelConfig, settings: PackSettings) -> Iterator[list[Entry]]:
    """Tensors in the order in which passes use them, in groups that are read together.

    The vectors of a layer come first: what stays in memory of a layer are its last tensors, and those shall be large.
    """

    def entry(name: str, wanted: Type = "keep", *, plain: bool = False, called: str | None = None) -> Entry:
        source = gguf.tensors[name]
        kind = _type_of(source, wanted)
        repacked = settings.layout == "auto" and not plain and takes_repacked(ggml, kind, source.shape)
        return Entry(source, called or name, kind, repacked)

    for layer in range(config.n_layers):
        tensors = [gguf.tensors[name] for name in layer_tensors(config, layer)]
        group = [entry(tensor.name) for tensor in tensors if len(tensor.shape) == 1]
        yield group + [entry(tensor.name, settings.type) for tensor in tensors if len(tensor.shape) == 2]
    table = entry("token_embd.weight", settings.embedding, plain=True)  # its rows are read one by one
    matrix = "token_embd.weight" if config.tied_output else "output.weight"
    projection = entry(matrix, settings.output, called="output.weight")
    if not config.tied_output or projection.repacked or projection.kind != table.kind:
        yield [projection]
    yield [entry(name) for name in ("output_norm.weight", "rope_freqs.weight") if name in gguf.tensors]
    yield [table]


def _type_of(tensor: TensorInfo, wanted: Type) -> int:
    fits = tensor.shape[0] % TYPES[Q4_0].block == 0
    return Q4_0 if wanted == "q4_0" and fits else tensor.type


def contents_of(
    ggml: Library, gguf: GGUF, config: ModelConfig, settings: PackSettings, *, name: str, sha256: str
) -> Contents:
    """The image of a model, called `name`, whose files have this hash."""
    groups = list(_groups(ggml, gguf, config, settings))
    entries = [entry for group in groups for entry in group]
    pairs = [*_metadata(ggml, gguf, settings, name, sha256), *_layouts(ggml, entries)]
    checksums = Entry(TensorInfo(IMAGE_CHECKSUMS, (1,), I64, 0, 0, 0), IMAGE_CHECKSUMS, I64, False)
    size = len(_header(pairs, [*entries, checksums], 0))
    end, placed = size, []
    for group in groups:
        end = round_up(end, BLOCK)
        for entry in group:
            end = round_up(end, ALIGNMENT)
            placed.append(replace(entry, offset=end))
            end += entry.tensor.nbytes
    end = round_up(end, BLOCK)
    source = replace(checksums.source, shape=(end // BLOCK + 1,))
    checksums = replace(checksums, source=source, offset=end)
    header = _header(pairs, [*placed, checksums], round_up(size, ALIGNMENT))
    return Contents(header, tuple(placed), checksums)


def _metadata(ggml: Library, gguf: GGUF, settings: PackSettings, name: str, sha256: str) -> list[tuple[str, bytes]]:
    """Keys and their encoded values: those of the source byte for byte, then the image's own."""
    changed = {"general.architecture", "general.alignment", "split.no", "split.count", "split.tensors.count"}
    places = {key: at for key, at in gguf.places.items() if key not in changed and not key.startswith(KEY)}
    values = _read_places(gguf.files[0], list(places.values()))
    return [
        ("general.architecture", gguf_header.text(IMAGE_PREFIX + gguf.architecture)),
        ("general.alignment", gguf_header.uint32(ALIGNMENT)),
        *zip(places, values, strict=True),
        (f"{KEY}version", gguf_header.uint32(VERSION)),
        (f"{KEY}type", gguf_header.text(settings.type)),
        (f"{KEY}layout", gguf_header.text(settings.layout)),
        (f"{KEY}ggml", gguf_header.text(ggml.version_text)),
        (f"{KEY}source.name", gguf_header.text(name)),
        (f"{KEY}source.bytes", gguf_header.uint64(gguf.size)),
        (f"{KEY}source.sha256", gguf_header.text(sha256)),
    ]


def _read_places(path: Path, places: Sequence[range]) -> list[bytes]:
    values = []
    try:
        with path.open("rb") as file:
            for place in places:
                file.seek(place.start)
                values.append(file.read(len(place)))
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror or error}") from error
    return values


def _layouts(ggml: Library, entries: Sequence[Entry]) -> list[tuple[str, bytes]]:
    """Which tensors are repacked, and what the layout of their types is."""
    repacked = [entry for entry in entries if entry.repacked]
    kinds = sorted({entry.kind for entry in repacked})
    return [
        (f"{KEY}layouts", gguf_header.texts([f"{TYPES[kind].name}={fingerprint(ggml, kind)}" for kind in kinds])),
        (f"{KEY}repacked", gguf_header.texts([entry.name for entry in repacked])),
    ]


def _header(pairs: Sequence[tuple[str, bytes]], entries: Sequence[Entry], start: int) -> bytes:
    return gguf_header.encoded(pairs, [entry.tensor for entry in entries], start)
