"""The flash image of a model: what stands in its header, and whether this machine can compute with its bytes.

An image is a GGUF whose layers lie in streaming order, whose matrices are in the kernels' own layout, and whose last
tensor holds a checksum for each block before it. Its architecture is prefixed, so that other programs refuse it. Reads
headers and checksums only; `lever.pack` writes images.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
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
    source_name: str
    type: str = "keep"  # or what the layers were requantised to
    wanted_layout: str = "auto"  # or "plain", as it was asked for
    layouts: Mapping[int, str] = field(default_factory=dict)  # fingerprint of the layout of each repacked type
    repacked: frozenset[str] = frozenset()  # names of the tensors in it
    ggml: str = ""  # version that wrote it
    source_bytes: int = 0
    source_sha256: str = ""

    @classmethod
    def of(cls, gguf: GGUF) -> Image | None:
        """The image that a file is, None for an ordinary GGUF. One of another version is not looked into further."""
        if not gguf.text("general.architecture").startswith(IMAGE_PREFIX):
            return None
        version = gguf.integer(f"{KEY}version")
        source = gguf.text(f"{KEY}source.name", "its source")
        if version != VERSION:
            return cls(path=gguf.path, version=version, source_name=source)
        return cls(
            path=gguf.path,
            version=version,
            source_name=source,
            type=gguf.text(f"{KEY}type"),
            wanted_layout=gguf.text(f"{KEY}layout"),
            layouts=dict(_layout(gguf.path, entry) for entry in gguf.strings(f"{KEY}layouts")),
            repacked=frozenset(name.decode(errors="replace") for name in gguf.strings(f"{KEY}repacked")),
            ggml=gguf.text(f"{KEY}ggml"),
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

    def mend(self) -> str:
        """The command that makes this very file anew."""
        return pack_command(self.source_name, self.type, self.wanted_layout, self.path)

    def hindrance(self, gguf: GGUF, ggml: Library) -> str | None:
        """Why this lever, on this CPU and with this ggml, does not compute with these bytes; None if it does."""
        if self.version != VERSION:
            return self._other_version
        for name in self.repacked:
            tensor = gguf.tensors.get(name)
            if tensor is None or tensor.type not in self.layouts:
                return f"is damaged: it says that {name} is repacked, and does not say how"
            if not takes_repacked(ggml, tensor.type, tensor.shape):
                return self._foreign(tensor.type)
        foreign = (kind for kind in self.layouts if fingerprint(ggml, kind) != self.layouts[kind])
        return next((self._foreign(kind) for kind in foreign), None)

    @property
    def _other_version(self) -> str:
        return f"is a flash image of version {self.version}, this lever reads {VERSION}"

    def _foreign(self, kind: int) -> str:
        name = TYPES[kind].name
        return f"has {name} weights in the layout of another kind of CPU or ggml (written with {self.ggml})"

    def check(self, gguf: GGUF, ggml: Library) -> None:
        """UnsupportedModel, with the command that mends it, where there is a hindrance; DamagedImage for its header."""
        problem = self.hindrance(gguf, ggml)
        if problem is not None:
            raise self._refusal(problem)
        self.check_header(gguf)

    def _refusal(self, problem: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.path}: {problem}; pack it here: {self.mend()}")

    def check_header(self, gguf: GGUF) -> None:
        """DamagedImage unless the blocks of the header, which was read without looking, have their checksums."""
        with self.open(gguf) as file, Pages(4 * CheckedFile.BLOCK_BYTES) as pages:
            file.check(min(tensor.offset for tensor in gguf.tensors.values()), pages)

    def open(self, gguf: GGUF) -> CheckedFile:
        """The image's file for checked reads; UnsupportedModel for one of another version."""
        if self.version != VERSION:
            raise self._refusal(self._other_version)
        return CheckedFile(self.path, read_checksums(gguf, self), mend=self.mend())


def pack_command(source: str, type_: str = "keep", layout: str = "auto", out: Path | None = None) -> str:
    """The words of `lever pack` that write an image anew, by default the one in the cache."""
    flags = [("--type", type_)] * (type_ != "keep") + [("--layout", layout)] * (layout != "auto")
    flags += [("-o", str(out))] * (out is not None)
    return shlex.join(["lever", "pack", source, "--force", *chain.from_iterable(flags)])


def read_checksums(gguf: GGUF, image: Image) -> NDArray[np.uint64]:
    """The checksum of each block before the checksums. DamagedImage unless they have the one of their own."""
    tensor = gguf.tensors.get(IMAGE_CHECKSUMS)
    n_blocks = tensor.offset // CheckedFile.BLOCK_BYTES if tensor is not None else -1
    if tensor is None or tensor.nbytes != 8 * (n_blocks + 1) or tensor.offset % CheckedFile.BLOCK_BYTES:
        raise GGUFError(f"{gguf.path}: is a flash image without its checksums; pack it again: {image.mend()}")
    with DirectFile(gguf.path) as file, Pages(tensor.nbytes) as pages:
        file.read_exactly(pages.bytes.data, tensor.offset, tensor.nbytes)
        values = pages.bytes[: tensor.nbytes].copy().view(np.uint64)
    if xxhash.xxh3_64_intdigest(values[:-1].data) != values[-1]:
        raise DamagedImage(f"{gguf.path}: its checksums are damaged; pack it again: {image.mend()}")
    return values[:-1]


def _layout(path: Path, entry: bytes) -> tuple[int, str]:
    name, _, print_ = entry.decode(errors="replace").partition("=")
    if name not in TYPE_IDS or not print_:
        raise GGUFError(f"{path}: {KEY}layouts names {entry[:40]!r}, which is no layout")
    return TYPE_IDS[name], print_
