"""Models by the words a user gives: a path, a name of the catalogue, or hf:owner/repo. Opens no GGUF."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lever.errors import StorageError, UsageError
from lever.models import assemble, cache, catalogue, hub, images
from lever.models.cache import Progress, Silent

__all__ = ["CachedModel", "Progress", "ResolvedModel", "Silent", "list_models", "remove", "resolve"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is on disk now."""

    path: Path  # of the first part when it is split
    draft: str | None  # the model that drafts for it, as resolve() takes it
    name: str  # as the user wrote it
    notice: str | None = None  # what it is and under which licence, where known


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in one of the caches; its name is what resolve() and remove() take."""

    name: str
    path: Path
    bytes: int
    source: Literal["lever", "hub"]


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
    """What is in lever's cache and, of GGUF files, in the hub's."""
    own = [CachedModel(path.stem, path, path.lstat().st_size, "lever") for path in _own_files()]
    return own + [CachedModel(model.name, model.path, model.nbytes, "hub") for model in hub.cached_models()]


def _own_files() -> list[Path]:
    return sorted(cache.models_dir().glob("*.gguf"))


def remove(name: str) -> int:
    """Delete a listed model; the bytes freed. Only what list_models() shows can be deleted."""
    try:
        return _remove_from_hub(name) if name.startswith(hub.PREFIX) else _remove_own(name)
    except OSError as error:
        raise StorageError(f"{name} cannot be removed: {error.filename}: {error.strerror or error}") from error


def _remove_own(name: str) -> int:
    path = next((path for path in _own_files() if path.stem == name), None)
    if path is None:
        raise _not_cached(name)
    with cache.exclusive(name, Silent()):
        freed = path.lstat().st_size
        freed += images.remove_image(path)
        cache.forget(path)
        path.unlink()
    return freed


def _remove_from_hub(name: str) -> int:
    model = hub.cached(hub.parse(name))
    if model is None:
        raise _not_cached(name)
    return hub.remove(model.files)


def _not_cached(name: str) -> UsageError:
    return UsageError(f"no model {name!r} in the cache{_known(name, (m.name for m in list_models()))}")
