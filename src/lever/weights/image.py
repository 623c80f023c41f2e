"""The flash image of a model: what stands in its header, and whether this machine can compute with its bytes.

An image is a GGUF whose layers lie in streaming order, whose matrices are in the kernels' own layout, and whose last
tensor holds a checksum for each block before it. Its architecture is prefixed, so that other programs refuse it. Reads
headers and checksums only; `lever.pack` writes images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from lever.errors import DamagedImage, GGUFError, UnsupportedModel
from lever.ggml import Library
from lever.ggml.layout import fingerprint, takes_repacked
from lever.gguf import GGUF, IMAGE_CHECKSUMS, IMAGE_PREFIX, TYPES
from lever.pages import Pages
from lever.weights.reader import CheckedFile, DirectFile

VERSION = 1
KEY = f"{IMAGE_PREFIX}image."  # what the names of an image's own metadata begin with
TYPE_IDS = {info.name: kind for kind, info in TYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What the header of an image says of it."""

    path: Path
    version: int
    type: str  # "keep", or what matrices were requantised to
    wanted_layout: str  # "auto" or "plain", as it was asked for
    layouts: Mapping[int, str]  # fingerprint of the layout of each repacked type
    repacked: frozenset[str]  # names of the tensors in it
    ggml: str  # version that wrote it
    source_name: str
    source_bytes: int
    source_sha256: str

    @classmethod
    def of(cls, gguf: GGUF) -> Image | None:
        """The image that a file is, None for an ordinary GGUF. UnsupportedModel for another version."""
        if not gguf.text("general.architecture").startswith(IMAGE_PREFIX):
            return None
        version = gguf.integer(f"{KEY}version")
        source = gguf.text(f"{KEY}source.name", "its source")
        if version != VERSION:
            raise UnsupportedModel(
                f"{gguf.path}: is a flash image of version {version}, this lever reads {VERSION}; {_mend(source)}"
            )
        return cls(
            path=gguf.path,
            version=version,
            type=gguf.text(f"{KEY}type"),
            wanted_layout=gguf.text(f"{KEY}layout"),
            layouts=dict(_layout(gguf.path, entry) for entry in gguf.strings(f"{KEY}layouts")),
            repacked=frozenset(name.decode() for name in gguf.strings(f"{KEY}repacked")),
            ggml=gguf.text(f"{KEY}ggml"),
            source_name=source,
            source_bytes=gguf.integer(f"{KEY}source.bytes"),
            source_sha256=gguf.text(f"{KEY}source.sha256"),
        )

    @property
    def layout(self) -> str:
        """ "repacked" where any matrix is."""
        return "repacked" if self.repacked else "plain"

    def describe(self) -> str:
        """For people: Q4_0, repacked."""
        return f"{'types of its source' if self.type == 'keep' else self.type.upper()}, {self.layout}"

    def check(self, gguf: GGUF, ggml: Library) -> None:
        """UnsupportedModel unless this CPU, with this ggml, computes with these bytes."""
        for name in self.repacked:
            tensor = gguf.tensors.get(name)
            if tensor is None or tensor.type not in self.layouts:
                raise GGUFError(f"{self.path}: says that {name} is repacked, and has none; {_mend(self.source_name)}")
            if not takes_repacked(ggml, tensor.type, tensor.shape):
                raise self._foreign(tensor.type)
        for kind, print_ in self.layouts.items():
            if fingerprint(ggml, kind) != print_:
                raise self._foreign(kind)

    def _foreign(self, kind: int) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.path}: its {TYPES[kind].name} weights are in the layout of another kind of CPU or ggml "
            f"(written with {self.ggml}); {_mend(self.source_name)}"
        )

    def open(self, gguf: GGUF) -> CheckedFile:
        """The image's file for checked reads."""
        return CheckedFile(self.path, read_checksums(gguf))


def read_checksums(gguf: GGUF) -> NDArray[np.uint64]:
    """The checksum of each block before the checksums. DamagedImage unless they have the one of their own."""
    tensor = gguf.tensors.get(IMAGE_CHECKSUMS)
    n_blocks = tensor.offset // CheckedFile.BLOCK_BYTES if tensor is not None else -1
    if tensor is None or tensor.nbytes != 8 * (n_blocks + 1) or tensor.offset % CheckedFile.BLOCK_BYTES:
        raise GGUFError(f"{gguf.path}: is a flash image without its checksums; pack it again with lever pack --force")
    with DirectFile(gguf.path) as file, Pages(tensor.nbytes) as pages:
        file.read_exactly(pages.bytes.data, tensor.offset, tensor.nbytes)
        values = pages.bytes[: tensor.nbytes].copy().view(np.uint64)
    if xxhash.xxh3_64_intdigest(values[:-1].data) != values[-1]:
        raise DamagedImage(f"{gguf.path}: its checksums are damaged; pack it again with lever pack --force")
    return values[:-1]


def _layout(path: Path, entry: bytes) -> tuple[int, str]:
    name, _, print_ = entry.decode(errors="replace").partition("=")
    if name not in TYPE_IDS or not print_:
        raise GGUFError(f"{path}: {KEY}layouts names {entry[:40]!r}, which is no layout")
    return TYPE_IDS[name], print_


def _mend(source: str) -> str:
    return f"pack it here: lever pack {source} --force"
