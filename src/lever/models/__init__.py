"""Models by the words a user gives: a path, a name of the catalogue, or hf:owner/repo. Opens no GGUF."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lever.errors import StorageError, UsageError
from lever.models import assemble, cache, catalogue, hub, images, predictors
from lever.models.cache import Progress, Silent

__all__ = ["CachedModel", "Progress", "Removed", "ResolvedModel", "Silent", "list_models", "remove", "resolve"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is on disk now."""

    path: Path  # of the first part when it is split
    draft: str | None  # the model that drafts for it, as resolve() takes it
    name: str  # as the user wrote it
    notice: str | None = None  # what it is and under which licence, where known


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in one of the caches, or a flash image there whose model is elsewhere; remove() takes its name."""

    name: str
    path: Path
    bytes: int
    source: Literal["lever", "hub", "image"]
    images: tuple[Path, ...] = ()  # its flash images: to write text with, and to draft with
    image_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Removed:
    """Bytes that were freed, of a model, of its flash images, and of predictors for it or beside it as a draft."""

    bytes: int
    image_bytes: int = 0
    predictor_bytes: int = 0

    @property
    def total(self) -> int:
        return self.bytes + self.image_bytes + self.predictor_bytes


def resolve(ref: str, *, offline: bool = False, progress: Progress | None = None) -> ResolvedModel:
    """The file that a MODEL word means, brought into the cache first if need be.

    A path is whatever exists as a file, ends in .gguf or has a separator, and is not looked at here. Raises
    UsageError for an unknown name, DownloadError when the model cannot be fetched. `offline` takes what is in
    the hub's cache and asks nobody.
    """
    progress = progress or Silent()
    if ref.startswith(hub.PREFIX):
        return ResolvedModel(hub.fetch(ref, offline=offline, progress=progress), None, ref)
    if Path(ref).is_file() or ref.endswith(".gguf") or os.sep in ref:
        return ResolvedModel(Path(ref), None, ref)
    entry = catalogue.CATALOGUE.get(ref)
    if entry is None:
        forms = "; or give the path of a .gguf file, or hf:owner/repo[:QUANT]"
        raise UsageError(f"no model {ref!r}{_known(ref, catalogue.CATALOGUE)}{forms}")
    return ResolvedModel(assemble.assembled(entry, progress), entry.draft, ref, entry.notice)


def _known(word: str, names: Iterable[str]) -> str:
    names = list(names)
    near = difflib.get_close_matches(word, names, 1)
    return (f", did you mean {near[0]}?" if near else ":") + f" known: {', '.join(names) or 'none'}"


def list_models() -> list[CachedModel]:
    """What is in lever's cache and, of GGUF files, in the hub's; then images of models that are in neither."""
    models = [_listed(path.stem, path, path.lstat().st_size, "lever") for path in _own_files()]
    models += [_listed(model.name, model.path, model.nbytes, "hub") for model in hub.cached_models()]
    rest = sorted(set(images.cached_images()) - {image for model in models for image in model.images})
    return models + [CachedModel(images.name_of(path), path, path.lstat().st_size, "image") for path in rest]


def _listed(name: str, path: Path, nbytes: int, source: Literal["lever", "hub"]) -> CachedModel:
    found = images.images_of(path)
    return CachedModel(name, path, nbytes, source, found, sum(image.stat().st_size for image in found))


def _own_files() -> list[Path]:
    return sorted(cache.models_dir().glob("*.gguf"))


def remove(name: str) -> Removed:
    """Delete a listed model and its flash images. Only what list_models() shows can be deleted."""
    try:
        if name.startswith(hub.PREFIX):
            return _remove_from_hub(name)
        path = next((path for path in _own_files() if path.stem == name), None)
        return _remove_lone_image(name) if path is None else _remove_own(path)
    except OSError as error:
        raise StorageError(f"{name} cannot be removed: {error.filename}: {error.strerror or error}") from error


def _remove_own(path: Path) -> Removed:
    with cache.exclusive(path.stem, Silent()):
        predictor_bytes = predictors.remove_predictors([path])  # first: the model's hash tells which
        nbytes, image_bytes = path.lstat().st_size, images.remove_images(path)
        cache.forget(path)
        path.unlink()
    return Removed(nbytes, image_bytes, predictor_bytes)


def _remove_lone_image(name: str) -> Removed:
    image = next((model for model in list_models() if (model.source, model.name) == ("image", name)), None)
    if image is None:
        raise _not_cached(name)
    image.path.unlink()
    return Removed(0, image.bytes)


def _remove_from_hub(name: str) -> Removed:
    model = hub.cached(hub.parse(name))
    if model is None:
        raise _not_cached(name)
    predictor_bytes = predictors.remove_predictors(model.files)
    image_bytes = sum(images.remove_images(file) for file in model.files)  # while the links tell which
    return Removed(hub.remove(model.files), image_bytes, predictor_bytes)


def _not_cached(name: str) -> UsageError:
    return UsageError(f"no model {name!r} in the cache{_known(name, (m.name for m in list_models()))}")
