"""GGUF files of the Hugging Face hub: chosen by quantisation, fetched into the hub's own cache, checked.

Talks to the hub only through huggingface_hub (the extra `hub`, imported when first needed), which reads the
HF_* variables, keeps the cache and takes up what was cut. Nothing is ever copied out of that cache, and
nothing is deleted from it but by that library.
"""

from __future__ import annotations

import errno
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lever.errors import DownloadError, UsageError
from lever.models.cache import Progress, check_space, download_error, forget, is_whole

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, CachedRevisionInfo, HFCacheInfo

PREFIX = "hf:"
DEFAULT_QUANT = "Q4_K_M"

_REFERENCE = re.compile(r"hf:([\w.-]+/[\w.-]+)(?::([\w.-]+)|/([^:]+\.gguf))?", re.ASCII)
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.ASCII)
_NO_MODEL = re.compile(r"(^|/)mmproj|imatrix", re.IGNORECASE)  # GGUF files that hold no language model


@dataclass(frozen=True, slots=True)
class Reference:
    """What `hf:owner/repo`, `hf:owner/repo:QUANT` or `hf:owner/repo/file.gguf` asks for."""

    repo: str
    quant: str | None = None
    file: str | None = None


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model in the hub's cache: one file or the parts of a split one, in every revision that is held."""

    repo: str
    parts: tuple[str, ...]  # names in the repository
    path: Path  # of the first part, in the newest revision
    nbytes: int
    files: tuple[Path, ...]  # all of it, revision by revision

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.repo}/{self.parts[0]}"


@dataclass(frozen=True, slots=True)
class _Listed:
    """A file as the hub lists it; size and hash where it tells them."""

    name: str
    commit: str | None
    nbytes: int | None
    sha256: str | None


def parse(text: str) -> Reference:
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r}: write hf:owner/repo, hf:owner/repo:QUANT or hf:owner/repo/file.gguf")
    return Reference(match[1], match[2], match[3])


def fetch(text: str, *, offline: bool, progress: Progress) -> Path:
    """Path of the (first) file of a model in the hub's cache, fetched and checked as far as needed."""
    reference = parse(text)
    if find_spec("huggingface_hub") is None:
        raise DownloadError(
            f"{text} needs the package huggingface_hub: install it with pip install 'lever-llm[hub]', "
            "or uv sync --extra hub in a checkout"
        )
    from huggingface_hub import constants

    if offline or constants.HF_HUB_OFFLINE:
        return _fetch_offline(text, reference)
    with _errors_in_one_line(reference.repo):
        listed = _list(reference.repo)
        wanted = [listed[name] for name in _complete(reference.repo, choose(reference, listed))]
        to_fetch = sum(_bytes_to_fetch(reference.repo, file) for file in wanted)
        check_space(Path(constants.HF_HUB_CACHE), to_fetch)
        first, *_ = [_download(reference.repo, file, progress) for file in wanted]
    return first


def _fetch_offline(text: str, reference: Reference) -> Path:
    model = cached(reference)
    if model is None:
        raise DownloadError(f"{text} is not in the cache: fetch it without --offline and HF_HUB_OFFLINE first")
    _complete(model.repo, model.parts)
    _check_magic(model.path)
    return model.path


def choose(reference: Reference, names: Iterable[str]) -> tuple[str, ...]:
    """The files of the model that a reference means, split parts in order."""
    models = _models(name for name in names if name.endswith(".gguf"))
    if reference.file is None:
        models = [parts for parts in models if not _NO_MODEL.search(parts[0])]
        found = _of_quant(models, reference.quant)
    else:
        found = next((parts for parts in models if reference.file in parts), None)
    if found is None:
        offer = ", ".join(parts[0] for parts in models) or "no GGUF file of a language model"
        raise DownloadError(f"{reference.repo} has no {reference.file or reference.quant or 'model'}, it has {offer}")
    return found


def _models(names: Iterable[str]) -> list[tuple[str, ...]]:
    """File names grouped by model: all parts of a split one are together, in order."""
    models: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        models[_SPLIT.sub(r"-of-\2", name)].append(name)
    return [tuple(parts) for parts in models.values()]


def _of_quant(models: list[tuple[str, ...]], quant: str | None) -> tuple[str, ...] | None:
    """The model of a quantisation, shortest name first; without one asked for, the usual one or else any."""
    word = re.compile(rf"(^|[-._/]){re.escape(quant or DEFAULT_QUANT)}([-./]|$)", re.IGNORECASE)
    matches = [parts for parts in models if word.search(parts[0])] or (models if quant is None else [])
    return min(matches, key=lambda parts: len(parts[0]), default=None)


def _complete(repo: str, parts: tuple[str, ...]) -> tuple[str, ...]:
    split = _SPLIT.search(parts[0])
    if split is not None and len(parts) < int(split[2]):
        numbers = range(1, int(split[2]) + 1)
        expected = (_SPLIT.sub(f"-{number:05}-of-{split[2]}.gguf", parts[0]) for number in numbers)
        missing = ", ".join(islice((name for name in expected if name not in parts), 5))
        raise DownloadError(f"{repo} has {len(parts)} of the {split[2]} parts of the model, it lacks {missing}")
    return parts


def _list(repo: str) -> Mapping[str, _Listed]:
    from huggingface_hub import HfApi, constants

    try:
        info = HfApi(endpoint=constants.ENDPOINT).model_info(repo, files_metadata=True)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise DownloadError(
            f"{constants.ENDPOINT} does not answer like a model hub for {repo}: "
            "is a proxy or login page in between, or HF_ENDPOINT wrong?"
        ) from error
    files = (
        _Listed(file.rfilename, info.sha, file.size, file.lfs.sha256 if file.lfs else None)
        for file in info.siblings or ()
    )
    return {file.name: file for file in files}


def _bytes_to_fetch(repo: str, file: _Listed) -> int:
    from huggingface_hub import try_to_load_from_cache

    return 0 if isinstance(try_to_load_from_cache(repo, file.name), str) else file.nbytes or 0


def _download(repo: str, file: _Listed, progress: Progress) -> Path:
    """One file into the cache, or out of it when the hub's ETag is that of the copy there; then checked.

    A file that fails its check leaves the cache, so that the next call fetches it anew.
    """
    from huggingface_hub import hf_hub_download

    path = Path(hf_hub_download(repo, file.name, tqdm_class=_bar(progress, f"fetching {file.name}")))
    if file.commit is not None and file.commit not in path.parts:
        # The library takes an older copy when the hub falls silent, and the newest when it changes meanwhile.
        raise DownloadError(f"{repo} changed or could not be reached while {file.name} was fetched: try again")
    try:
        _check_magic(path)
        _check_content(path, file, progress)
    except DownloadError:
        remove(_sharing(path))
        raise
    return path


def _check_magic(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"GGUF"):
        return
    got = "HTML" if head.lstrip().lower().startswith((b"<!doctype", b"<html")) else repr(head[:4])[1:]
    raise DownloadError(f"{path.name} is not a GGUF (got {got}); is the repository gated? set HF_TOKEN")


def _check_content(path: Path, file: _Listed, progress: Progress) -> None:
    nbytes = path.stat().st_size
    if file.nbytes is not None and nbytes != file.nbytes:
        raise DownloadError(f"{file.name} came with {nbytes} bytes, the hub lists {file.nbytes}: fetch it again")
    if file.sha256 is not None and not is_whole(path, file.sha256, progress):
        raise DownloadError(f"{file.name} came damaged, its SHA-256 is not the hub's: fetch it again")


def _bar(progress: Progress, what: str) -> type[Any]:
    """Our progress in the shape of tqdm, as far as huggingface_hub uses it."""

    class Bar:
        def __init__(self, *, total: int | None = None, **_: object) -> None:
            progress.start(total or 0, what)

        def update(self, n: float | None = 1) -> None:
            progress.advance(int(n or 0))

        def close(self) -> None:
            progress.finish()

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        # hf_xet tells apart what came and what is written; a class with these methods gets a single bar.
        def update_transfer(self, n: float) -> None: ...

        def set_transfer_postfix_str(self, *_: object, **__: object) -> None: ...

        def set_postfix_str(self, *_: object, **__: object) -> None: ...

    return Bar


@contextmanager
def _errors_in_one_line(repo: str) -> Iterator[None]:
    from huggingface_hub import constants, errors

    # The root of the HTTP client's errors, whichever client this release is built on.
    transport_error: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    try:
        yield
    except errors.GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{repo}"
        raise DownloadError(f"{repo} is gated: accept its terms at {page}, then set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(f"{repo} does not exist or is private: check the name, or set HF_TOKEN") from error
    except errors.LocalEntryNotFoundError as error:
        raise DownloadError(_unreachable(constants.ENDPOINT, error.__cause__ or error)) from error
    except errors.EntryNotFoundError as error:
        raise DownloadError(f"{repo} lists a file that it does not have: {_first_line(error)}") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        hint = "set HF_TOKEN to a token that may read it" if status in (401, 403) else "try again later"
        raise DownloadError(f"{constants.ENDPOINT} refused {repo} (HTTP {status}): {hint}") from error
    except transport_error as error:
        raise DownloadError(_unreachable(constants.ENDPOINT, error)) from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise download_error(Path(constants.HF_HUB_CACHE), error) from error
        raise DownloadError(f"{repo} could not be fetched: {_first_line(error)}") from error
    except (ValueError, RuntimeError) as error:  # the library's own checks; hf_xet
        raise DownloadError(f"{repo} could not be fetched: {_first_line(error)}") from error


def _unreachable(endpoint: str, error: BaseException) -> str:
    return (
        f"{endpoint} cannot be reached ({_first_line(error)}): check the connection and HF_ENDPOINT, "
        "or use --offline for a model that is in the cache"
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def cached_models() -> list[HubModel]:
    """Every model in the hub's cache; none when huggingface_hub is not installed."""
    if find_spec("huggingface_hub") is None:
        return []
    return [model for repo in _repos() for model in _models_of(repo)]


def cached(reference: Reference) -> HubModel | None:
    """The model in the hub's cache that a reference means; None when nothing of the repository is there."""
    models = [model for model in cached_models() if model.repo == reference.repo]
    if not models:
        return None
    parts = choose(reference, (part for model in models for part in model.parts))
    return next(model for model in models if model.parts == parts)


def _models_of(repo: CachedRepoInfo) -> list[HubModel]:
    snapshots = [_files_of(revision) for revision in _newest_first(repo)]
    names = {name for files in snapshots for name in files if name.endswith(".gguf")}
    return [_hub_model(repo.repo_id, parts, snapshots) for parts in _models(names)]


def _hub_model(repo: str, parts: tuple[str, ...], snapshots: list[Mapping[str, CachedFileInfo]]) -> HubModel:
    files = [snapshot[name] for name in parts for snapshot in snapshots if name in snapshot]
    sizes = {file.blob_path: file.size_on_disk for file in files}  # revisions share what did not change
    return HubModel(repo, parts, files[0].file_path, sum(sizes.values()), tuple(f.file_path for f in files))


def _newest_first(repo: CachedRepoInfo) -> list[CachedRevisionInfo]:
    """Revisions of a repository, the one that the hub last called main in front."""
    return sorted(repo.revisions, key=lambda r: ("main" in r.refs, r.last_modified), reverse=True)


def _files_of(revision: CachedRevisionInfo) -> Mapping[str, CachedFileInfo]:
    return {file.file_path.relative_to(revision.snapshot_path).as_posix(): file for file in revision.files}


def _scan() -> HFCacheInfo | None:
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None


def _repos() -> list[CachedRepoInfo]:
    info = _scan()
    found = [repo for repo in info.repos if repo.repo_type == "model"] if info else []
    return sorted(found, key=lambda repo: repo.repo_id)


def remove(paths: Iterable[Path]) -> int:
    """Delete files from the hub's cache; the bytes freed."""
    info, doomed = _scan(), set(paths)
    if info is None:
        return 0
    everything = (file for repo in info.repos for revision in repo.revisions for file in revision.files)
    files = [file for file in everything if file.file_path in doomed]
    for file in files:
        forget(file.file_path)
    strategy = info.delete_files(*files)
    strategy.execute()
    return strategy.expected_freed_size


def _sharing(path: Path) -> list[Path]:
    """The files of the cache that have the very content of this one: it may be in several revisions."""
    paths = [file for model in cached_models() for file in model.files]
    return [other for other in paths if other.resolve() == path.resolve()]
