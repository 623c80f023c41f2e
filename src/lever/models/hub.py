"""GGUF files of the Hugging Face hub: chosen by quantisation, fetched into the hub's own cache, checked.

Talks to the hub only through huggingface_hub (the extra `hub`, imported when first needed), which reads the
HF_* variables, keeps the cache and resumes what was cut. Nothing is ever copied out of that cache.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lever.errors import DownloadError, UsageError
from lever.models.cache import Progress, check_space, forget, is_whole

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, HFCacheInfo

PREFIX = "hf:"
DEFAULT_QUANT = "Q4_K_M"

_REFERENCE = re.compile(r"hf:([\w.-]+/[\w.-]+)(?::([\w.-]+)|/([^:]+\.gguf))?", re.ASCII)
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_NO_MODEL = re.compile(r"(^|/)mmproj|imatrix", re.IGNORECASE)  # GGUF files that hold no language model


@dataclass(frozen=True, slots=True)
class Reference:
    """What `hf:owner/repo`, `hf:owner/repo:QUANT` or `hf:owner/repo/file.gguf` asks for."""

    repo: str
    quant: str | None = None
    file: str | None = None


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the hub lists it; size and hash where it tells them."""

    name: str
    nbytes: int | None
    sha256: str | None


@dataclass(frozen=True, slots=True)
class CachedGGUF:
    """A model in the hub's cache: one file, or all parts of a split one, in every revision held."""

    name: str  # hf:owner/repo/file.gguf
    path: Path
    nbytes: int
    files: tuple[CachedFileInfo, ...]


def parse(text: str) -> Reference:
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r}: write hf:owner/repo, hf:owner/repo:QUANT or hf:owner/repo/file.gguf")
    return Reference(match[1], match[2], match[3])


def fetch(text: str, *, offline: bool, progress: Progress) -> Path:
    """Path of the (first) file of a model in the hub's cache, fetched and checked as far as needed."""
    reference = parse(text)
    _require_library()
    from huggingface_hub import constants

    if offline or constants.HF_HUB_OFFLINE:
        return _fetch_offline(text, reference)
    with _errors_in_one_line(reference.repo):
        listed = _list(reference.repo)
        wanted = [listed[name] for name in choose(reference, list(listed))]
        check_space(Path(constants.HF_HUB_CACHE), sum(_bytes_to_fetch(reference.repo, file) for file in wanted))
        return [_download(reference.repo, file, progress) for file in wanted][0]


def _fetch_offline(text: str, reference: Reference) -> Path:
    snapshot = _snapshot(reference.repo)
    if not snapshot:
        raise DownloadError(f"{text} is not in the cache: fetch it without --offline (and HF_HUB_OFFLINE) first")
    first = snapshot[choose(reference, list(snapshot))[0]]
    _check_magic(first)
    return first


def choose(reference: Reference, names: Sequence[str]) -> tuple[str, ...]:
    """The files of the model that a reference means, split parts in order."""
    models = _by_model(name for name in names if name.endswith(".gguf"))
    if reference.file is not None:
        model = next((parts for parts in models if reference.file in parts), None)
    else:
        models = [parts for parts in models if not _NO_MODEL.search(parts[0])]
        model = _by_quant(models, reference.quant)
    if model is None:
        offer = ", ".join(parts[0] for parts in models) or "no GGUF file"
        raise DownloadError(f"{reference.repo} has no {reference.file or reference.quant or 'model'}: it has {offer}")
    _check_complete(reference.repo, model)
    return model


def _by_model(names: Collection[str] | Iterator[str]) -> list[tuple[str, ...]]:
    models: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        models[_SPLIT.sub(r"-of-\2", name)].append(name)
    return [tuple(parts) for parts in models.values()]


def _by_quant(models: Sequence[tuple[str, ...]], quant: str | None) -> tuple[str, ...] | None:
    """The model of this quantisation, shortest name first; without one asked for, the usual one or any."""
    word = re.compile(rf"(^|[-._/]){re.escape(quant or DEFAULT_QUANT)}([-./]|$)", re.IGNORECASE)
    matches = sorted((parts for parts in models if word.search(parts[0])), key=lambda parts: len(parts[0]))
    if not matches and quant is None:
        return next(iter(models), None)
    return next(iter(matches), None)


def _check_complete(repo: str, parts: tuple[str, ...]) -> None:
    split = _SPLIT.search(parts[0])
    if split is None:
        return
    expected = {_SPLIT.sub(f"-{n:05}-of-{split[2]}.gguf", parts[0]) for n in range(1, int(split[2]) + 1)}
    if missing := sorted(expected - set(parts)):
        raise DownloadError(f"{repo} lacks {len(missing)} part(s) of the model: {', '.join(missing[:3])}")


def _list(repo: str) -> dict[str, RemoteFile]:
    from huggingface_hub import HfApi, constants

    try:
        info = HfApi(endpoint=constants.ENDPOINT).model_info(repo, files_metadata=True)
    except (ValueError, KeyError, TypeError) as error:  # not JSON, or JSON of another kind
        raise DownloadError(
            f"{constants.ENDPOINT} does not answer like a model hub for {repo} ({_first_line(error)}): "
            "is a proxy or a login page in between, or HF_ENDPOINT wrong?"
        ) from error
    files = info.siblings or []
    return {f.rfilename: RemoteFile(f.rfilename, f.size, f.lfs.sha256 if f.lfs else None) for f in files}


def _bytes_to_fetch(repo: str, file: RemoteFile) -> int:
    from huggingface_hub import try_to_load_from_cache

    cached = isinstance(try_to_load_from_cache(repo, file.name), str)
    return 0 if cached else file.nbytes or 0


def _download(repo: str, file: RemoteFile, progress: Progress) -> Path:
    """One file into the cache, or out of it when the hub's ETag is that of the copy there; then checked.

    A file that fails its check leaves the cache, so that the next call fetches it anew.
    """
    from huggingface_hub import hf_hub_download

    path = Path(hf_hub_download(repo, file.name, tqdm_class=_bar(progress)))
    try:
        _check_magic(path)
        _check_content(path, file, progress)
    except DownloadError:
        delete([found for found in _scan() if path.parent in {f.file_path.parent for f in found.files}], {path})
        raise
    return path


def _check_magic(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(64)
    if head[:4] == b"GGUF":
        return
    got = "HTML" if head.lstrip().lower().startswith((b"<!doctype", b"<html")) else repr(head[:4])[1:]
    raise DownloadError(f"{path.name} is not a GGUF (got {got}); is the repository gated? set HF_TOKEN")


def _check_content(path: Path, file: RemoteFile, progress: Progress) -> None:
    nbytes = path.stat().st_size
    if file.nbytes is not None and nbytes != file.nbytes:
        raise DownloadError(f"{file.name} has {nbytes} bytes where the hub lists {file.nbytes}: fetch it again")
    if file.sha256 is not None and not is_whole(path, file.sha256, progress):
        raise DownloadError(f"{file.name} is damaged (its SHA-256 is not the hub's): fetch it again")
