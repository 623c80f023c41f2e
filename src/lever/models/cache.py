"""Where models lie on disk, and which files are known to be whole. Fetches nothing."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import platformdirs

from lever.errors import DownloadError
from lever.memory import drop_page_cache, format_size

log = logging.getLogger(__name__)

BLOCK = 4 * 1024**2
PART_SUFFIX = ".part"  # of a file that is not whole yet


class Progress(Protocol):
    """Told how far a long job is; the command line draws bars from it."""

    def start(self, total: int, what: str) -> None:
        """A job of `total` bytes begins; 0 when the size is not known."""

    def advance(self, n: int) -> None:
        """So many bytes more are done; fewer (n < 0) when a download has to begin again."""

    def finish(self) -> None:
        """The job has ended, well or not."""


class Silent:
    """Progress for callers that show none."""

    def start(self, total: int | None, what: str) -> None: ...

    def advance(self, n: int) -> None: ...

    def finish(self) -> None: ...


def home() -> Path:
    """Directory of everything lever keeps: $LEVER_HOME, else the user's cache directory."""
    given = os.environ.get("LEVER_HOME")
    return Path(given).expanduser() if given else Path(platformdirs.user_cache_dir("lever"))


def models_dir() -> Path:
    return home() / "models"


@contextmanager
def exclusive(name: str, progress: Progress, what: str | None = None) -> Iterator[None]:
    """Hold the lock of one name, so that two processes do not fetch a model at once, or do `what` it is."""
    path = home() / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.start(0, f"waiting for another lever that {what or f'fetches {name}'}")
            fcntl.flock(file, fcntl.LOCK_EX)
            progress.finish()
        yield


def check_space(directory: Path, nbytes: int) -> None:
    """DownloadError when the disk of a directory, which need not exist yet, has less than nbytes free."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < nbytes:
        raise DownloadError(
            f"{directory}: {format_size(nbytes)} are needed and {format_size(free)} are free: "
            "free some space, or set LEVER_HOME (for hf: models HF_HOME) to a directory on another disk"
        )


def download_error(path: Path, error: OSError) -> DownloadError:
    """One line for a failed write or read below the cache directory."""
    hint = ": free some space, or set LEVER_HOME to another disk" if error.errno == errno.ENOSPC else ""
    return DownloadError(f"{error.filename or path}: {error.strerror or error}{hint}")


def sha256_of(path: Path, progress: Progress) -> str:
    """Hash of a file in bounded memory."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(BLOCK))
    progress.start(path.stat().st_size, f"checking {path.name}")
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                digest.update(block[:count])
                progress.advance(count)
            drop_page_cache(file.fileno())
    finally:
        progress.finish()
    return digest.hexdigest()


def is_whole(path: Path, sha256: str, progress: Progress) -> bool:
    """Whether a file has this hash. Hashed once; then size and times of change must be those remembered."""
    if _recall(path) == _identity(path, path.stat(), sha256):
        return True
    return _hashed(path, progress, wanted=sha256) == sha256


def known_sha256(path: Path, progress: Progress) -> str:
    """The hash of a file, remembered as long as its size and times of change stay."""
    record = _recall(path)
    if isinstance(record, dict) and isinstance(record.get("sha256"), str):
        known: str = record["sha256"]
        if record == _identity(path, path.stat(), known):
            return known
    return _hashed(path, progress)


def _hashed(path: Path, progress: Progress, wanted: str | None = None) -> str:
    """The hash of a file, which is remembered if it is what was wanted."""
    before = path.stat()  # what is written to it meanwhile makes the record void
    found = sha256_of(path, progress)
    if wanted in (None, found):
        try:
            remember(path, found, before)
        except OSError as error:
            log.warning("%s will be hashed again next time: %s", path, error.strerror or error)
    return found


def remember(path: Path, sha256: str, status: os.stat_result | None = None) -> None:
    """Note that a file, as it is now or was with this status, has this hash."""
    record = _record(path)
    record.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_identity(path, status or path.stat(), sha256))
    temporary = record.with_name(f"{record.name}.{os.getpid()}{PART_SUFFIX}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(record)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def forget(path: Path) -> None:
    _record(path).unlink(missing_ok=True)


def _recall(path: Path) -> object:
    try:
        found: object = json.loads(_record(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or damaged: the file is hashed again
        return None
    return found


def stamp(status: os.stat_result) -> dict[str, int]:
    """What changes when somebody writes to a file, or puts another in its place.

    The time of change of the inode is in it: that of the content can be set to anything, and copying tools do.
    """
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}


def _identity(path: Path, status: os.stat_result, sha256: str) -> dict[str, object]:
    return {"path": os.path.realpath(path), **stamp(status), "sha256": sha256}


def place_hash(path: Path) -> str:
    """Names the place of a file, links followed."""
    return hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()


def _record(path: Path) -> Path:
    return home() / "verified" / f"{place_hash(path)}.json"
