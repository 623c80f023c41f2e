"""Flash images in the cache: where the image of a model is kept, and whether it is still that of the model.

Looks at headers only; whether this CPU computes with an image is asked where it is loaded.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lever import gguf as gguf_file
from lever.errors import LeverError, StorageError
from lever.models.cache import Progress, home, known_sha256
from lever.weights.image import Image


@dataclass(frozen=True, slots=True)
class Found:
    """What the cache has for a model: an image, or why the one that is there cannot stand for it."""

    path: Path
    image: Image | None
    problem: str | None = None


def image_path(source: Path) -> Path:
    """Where the image of a file is kept, whether there is one or not."""
    place = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:12]
    stem = re.sub(r"[^\w.-]+", "_", source.stem)[:80]
    return home() / "images" / f"{stem}-{place}.gguf"


def find_image(source: Path, progress: Progress) -> Found | None:
    """The image of a model in the cache; None where there is none. A model that was changed is hashed anew."""
    path = image_path(source)
    if not path.is_file():
        return None
    try:
        gguf = gguf_file.read(path)
        image = Image.of(gguf)
    except LeverError as error:
        return Found(path, None, str(error))
    if image is None:
        return Found(path, None, f"{path} is no flash image")
    files = gguf_file.part_paths(source)
    try:
        same_size = image.source_bytes == sum(file.stat().st_size for file in files)
        if same_size and image.source_sha256 == source_sha256(files, progress):
            return Found(path, image)
    except OSError as error:
        raise StorageError(f"{error.filename or source}: {error.strerror or error}") from error
    return Found(path, None, f"{path} was made from another version of {source}")


def source_sha256(files: Sequence[Path], progress: Progress) -> str:
    """The hash that names a model: that of its file or, of a split one, that of the hashes of its parts in order."""
    hashes = [known_sha256(path, progress) for path in files]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def remove_image(source: Path) -> int:
    """Delete the image of a model; the bytes freed."""
    path = image_path(source)
    if not path.is_file():
        return 0
    freed = path.stat().st_size
    path.unlink()
    return freed
