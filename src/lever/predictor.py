"""The file of a predictor: translators from the hidden state behind a middle layer to what the last would make of it.

A GGUF of a kind of its own, small: for each of a few layers a matrix [n_embd, n_embd], and how its scores are weighed
against the draft's probabilities. It belongs to one model, and was fitted beside one draft. Reads and writes the file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lever import gguf as gguf_file
from lever import gguf_header
from lever.arch import ModelConfig
from lever.errors import GGUFError, StorageError, UsageError
from lever.gguf import F16, GGUF, TensorInfo
from lever.pages import round_up
from lever.prune import Mix

ARCHITECTURE = "lever-predictor"
VERSION = 1
KEY = "lever.predictor."


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What was found on text that was not fitted to: shares of positions, those included whose token is no candidate,
    and of rows. At first nothing is known.
    """

    positions: int = 0
    first_by_draft: float = 0.0  # the target's token is the likeliest candidate
    first_by_lens: float = 0.0  # by the hidden state as it is, through the output projection
    first_by_translator: float = 0.0
    first_by_both: float = 0.0  # by the mix
    kept_rows: float = 1.0  # of a tree, by the mix, where 95 % of what is accepted without pruning is kept
    kept_rows_by_draft: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Translator:
    """One layer's, without its matrix."""

    layer: int  # after which it is asked; the first is 0
    mix: Mix
    threshold: float  # of an edge by the translator alone: what the paper's rule prunes by
    quality: Quality


@dataclass(frozen=True, slots=True)
class Predictor:
    """What a file says of itself; matrices are read when they are wanted."""

    path: Path
    target: str  # SHA-256 of the model, or of the source of an image
    draft: str  # of the draft whose candidates it was fitted to; empty where there was none
    n_embd: int
    n_layers: int
    translators: tuple[Translator, ...]
    places: tuple[TensorInfo, ...]  # of their matrices

    @classmethod
    def read(cls, path: Path) -> Predictor:
        """GGUFError unless it is a whole one of this version."""
        gguf = gguf_file.read(path)
        if gguf.text("general.architecture") != ARCHITECTURE:
            raise GGUFError(f"{path} is no predictor: lever train-predictor makes one")
        if gguf.integer(f"{KEY}version") != VERSION:
            raise GGUFError(f"{path} is of another version: make it anew with lever train-predictor")
        n_embd, n_layers = gguf.integer(f"{KEY}n_embd"), gguf.integer(f"{KEY}n_layers")
        translators, places = [], []
        for layer in gguf.integers(f"{KEY}layers"):
            place = gguf.tensors.get(_matrix(layer))
            if place is None or place.shape != (n_embd, n_embd) or place.type != F16 or not 0 <= layer < n_layers - 1:
                raise GGUFError(f"{path}: its matrix of layer {layer} is missing or of another shape; make it anew")
            translators.append(_translator(gguf, layer))
            places.append(place)
        if not translators:
            raise GGUFError(f"{path} has no layers: make it anew with lever train-predictor")
        target, draft = gguf.text(f"{KEY}target"), gguf.text(f"{KEY}draft")
        return cls(path, target, draft, n_embd, n_layers, tuple(translators), tuple(places))

    def check(self, config: ModelConfig, target: str) -> None:
        """UsageError unless it was made for the model with this hash."""
        if self.target != target or (self.n_embd, self.n_layers) != (config.n_embd, config.n_layers):
            raise UsageError(f"{self.path} was made for another model: make one for this with lever train-predictor")

    @property
    def best(self) -> Translator:
        """The one that saves most: by the layers that are left behind it, and the rows that need not see them."""
        return max(self.translators, key=lambda t: (self.n_layers - 1 - t.layer) * (1 - t.quality.kept_rows))

    def read_matrix(self, translator: Translator, into: NDArray[np.float16]) -> None:
        """Into [n_embd, n_embd]: what is translated is its product with a hidden state. StorageError, GGUFError."""
        place = self.places[self.translators.index(translator)]
        try:
            with self.path.open("rb") as file:
                file.seek(place.offset)
                n = file.readinto(into.reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        if n != into.nbytes or not all(np.isfinite(row).all() for row in into):
            raise GGUFError(f"{self.path}: its matrix of layer {translator.layer} is damaged; make it anew")

    @staticmethod
    def matrix_nbytes(config: ModelConfig) -> int:
        """Bytes of a matrix."""
        return 2 * config.n_embd * config.n_embd


def write(
    path: Path,
    config: ModelConfig,
    *,
    target: str,
    draft: str,
    translators: Sequence[Translator],
    matrices: Sequence[NDArray[np.float16]],
) -> None:
    """Write a predictor; the file gets its name when it is whole. StorageError."""
    pairs = [
        ("general.architecture", gguf_header.text(ARCHITECTURE)),
        (f"{KEY}version", gguf_header.uint32(VERSION)),
        (f"{KEY}target", gguf_header.text(target)),
        (f"{KEY}draft", gguf_header.text(draft)),
        (f"{KEY}n_embd", gguf_header.uint32(config.n_embd)),
        (f"{KEY}n_layers", gguf_header.uint32(config.n_layers)),
        (f"{KEY}layers", gguf_header.uint32s([translator.layer for translator in translators])),
        *(pair for translator in translators for pair in _pairs(translator)),
    ]
    nbytes, alignment = Predictor.matrix_nbytes(config), gguf_header.ALIGNMENT

    def tensors(start: int) -> list[TensorInfo]:
        offsets = (start + n * round_up(nbytes, alignment) for n in range(len(translators)))
        return [
            TensorInfo(_matrix(translator.layer), (config.n_embd, config.n_embd), F16, 0, offset, nbytes)
            for translator, offset in zip(translators, offsets, strict=True)
        ]

    start = round_up(len(gguf_header.encoded(pairs, tensors(0), 0)), alignment)
    header = gguf_header.encoded(pairs, tensors(start), start)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(header.ljust(start, b"\0"))
            for matrix in matrices:
                file.write(matrix.tobytes().ljust(round_up(nbytes, alignment), b"\0"))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # it is gone, or was never there
            part.unlink()


def _matrix(layer: int) -> str:
    return f"predictor.{layer}.weight"


FIGURES = tuple(field.name for field in fields(Quality) if field.name != "positions")


def _pairs(translator: Translator) -> list[tuple[str, bytes]]:
    key, quality = f"{KEY}{translator.layer}.", translator.quality
    return [
        (f"{key}mix.score", gguf_header.real(translator.mix.score)),
        (f"{key}mix.draft", gguf_header.real(translator.mix.draft)),
        (f"{key}threshold", gguf_header.real(translator.threshold)),
        (f"{key}positions", gguf_header.uint32(quality.positions)),
        *((f"{key}{name}", gguf_header.real(getattr(quality, name))) for name in FIGURES),
    ]


def _translator(gguf: GGUF, layer: int) -> Translator:
    key = f"{KEY}{layer}."
    figures = {name: gguf.real(f"{key}{name}") for name in FIGURES}
    mix = Mix(gguf.real(f"{key}mix.score"), gguf.real(f"{key}mix.draft"))
    threshold = gguf.real(f"{key}threshold")
    shares_hold = all(0 <= share <= 1 for share in (*figures.values(), threshold))
    if not (shares_hold and 0 <= mix.score < math.inf and 0 <= mix.draft < math.inf):
        raise GGUFError(f"{gguf.path}: its figures of layer {layer} make no sense; make it anew")
    return Translator(
        layer=layer,
        mix=mix,
        threshold=threshold,
        quality=Quality(positions=gguf.integer(f"{key}positions"), **figures),
    )
