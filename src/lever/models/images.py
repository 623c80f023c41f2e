"""Flash images in the cache: where the image of a model is kept, and whether it may stand for the model.

Reads headers only.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lever import gguf as gguf_file
from lever.errors import LeverError, ModelError, StorageError, UnsupportedModel
from lever.ggml import load
from lever.gguf import GGUF
from lever.models.cache import Progress, home, known_sha256, place_hash, stamp
from lever.weights.image import Image, pack_command

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """What the cache has for a model: an image, and what keeps it from standing for the model, if anything."""

    path: Path
    image: Image | None  # None: its header tells nothing
    problem: str | None = None  # follows the path in a sentence
    error: LeverError | None = None  # what came when it was read, if that is the problem

    def describe(self) -> str:
        """For people."""
        return self.image.describe() if self.image is not None else "unreadable"

    def mend(self, model: str) -> str:
        """The command that packs the model anew, as it was packed."""
        if self.image is None:
            return pack_command(model)
        return pack_command(model, self.image.type, self.image.wanted_layout)


def images_dir() -> Path:
    return home() / "images"


def image_path(source: Path, *, draft: bool = False, plain: bool = False) -> Path:
    """Where the image of a model is kept, whether there is one or not; links and parts of a model lead to one place.

    That of a `draft` has a place of its own: it is made unasked and in another type, so it may not stand for the model
    where that writes the text. So has a `plain` one of a draft, for another device than this CPU.
    """
    first = gguf_file.part_paths(source)[0]
    stem = re.sub(r"[^\w.-]+", "_", Path(os.path.realpath(first)).stem, flags=re.ASCII)[:80]
    folder = images_dir() / ("plain-drafts" if plain else "drafts") if draft else images_dir()
    return folder / f"{stem}-{place_hash(first)[:12]}.gguf"


def cached_images() -> list[Path]:
    """All images in the cache."""
    return sorted(images_dir().rglob("*.gguf"))


def name_of(image: Path) -> str:
    """What an image in the cache is called where its model is elsewhere."""
    return str(image.relative_to(images_dir()).with_suffix(""))


def images_of(source: Path) -> tuple[Path, ...]:
    """The images of a model in the cache: to write text with, and to draft with."""
    paths = image_path(source), image_path(source, draft=True), image_path(source, draft=True, plain=True)
    return tuple(path for path in paths if path.is_file())


def find_image(source: Path, progress: Progress, *, draft: bool = False, plain: bool = False) -> Found | None:
    """The image of a model in the cache; None where there is none. A model that was changed is hashed anew."""
    path = image_path(source, draft=draft, plain=plain)
    if not path.is_file():
        return None
    image: Image | None = None
    try:
        gguf = gguf_file.read(path)
        image = Image.of(gguf)
        if image is None:
            return Found(path, None, "is no flash image")
        problem = image.hindrance(gguf, load())
        if problem is None:
            image.check_header(gguf)
    except LeverError as error:
        log.info("%s", error)
        return Found(path, image, _in_short(error), error)
    if problem is None and not _is_made_from(image, source, progress):
        problem = f"was made from another version of {source}"
    return Found(path, image, problem)


def _in_short(error: LeverError) -> str:
    """What is wrong with an image that could not be read: its errors say how to mend a model, not an image."""
    if isinstance(error, UnsupportedModel):
        return "is of another version of lever"
    return "is damaged" if isinstance(error, ModelError) else "cannot be read"


def _is_made_from(image: Image, source: Path, progress: Progress) -> bool:
    files = gguf_file.part_paths(source)
    try:
        same_size = image.source_bytes == sum(file.stat().st_size for file in files)
        return same_size and image.source_sha256 == source_sha256(files, progress)
    except OSError as error:
        raise StorageError(f"{error.filename or source}: {error.strerror or error}") from error


def source_sha256(files: Sequence[Path], progress: Progress) -> str:
    """The hash that names a model: that of its file or, of a split one, that of the hashes of its parts in order."""
    hashes = [known_sha256(path, progress) for path in files]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def model_sha256(gguf: GGUF, progress: Progress) -> str:
    """The hash that names a model; a flash image has that of its source."""
    image = Image.of(gguf)
    return image.source_sha256 if image is not None else source_sha256(gguf.files, progress)


def steady_sha256(source: Path, progress: Progress) -> Callable[[], str]:
    """A function that gives `source_sha256` of a model; StorageError if it has been written to since this call."""
    files = gguf_file.part_paths(source)

    def stamps() -> list[dict[str, int] | None]:
        return [stamp(file.stat()) if file.exists() else None for file in files]

    before = stamps()
    hashed = functools.cache(lambda: source_sha256(files, progress))

    def sha256() -> str:
        found = hashed() if stamps() == before else ""
        if stamps() != before:
            raise StorageError(f"{source} changed while it was packed: try again")
        return found

    return sha256


def remove_images(source: Path) -> int:
    """Delete the images of a model; the bytes freed."""
    freed = 0
    for path in images_of(source):
        freed += path.stat().st_size
        path.unlink()
    return freed
