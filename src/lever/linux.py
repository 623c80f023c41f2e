"""What the Linux kernel tells this process of itself: its mounts and control groups. Judges none of it.

Every function takes the root of the file tree, so that tests can lay out the files of other machines.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo (proc(5))."""

    number: str  # "major:minor" of the block device; "0:n" when there is none
    root: str  # the directory of the file system that is mounted
    point: str
    type: str
    source: str
    options: frozenset[str]  # of the superblock; they name the controllers of a v1 hierarchy


def is_android(environ: Mapping[str, str] = os.environ) -> bool:
    """Android sets ANDROID_ROOT for every process, Termux its own version besides."""
    return "TERMUX_VERSION" in environ or "ANDROID_ROOT" in environ


def read_text(path: Path) -> str | None:
    """Text of a kernel file, None where this kernel or these rights do not offer it."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None


def below(root: Path, path: str) -> Path:
    """An absolute path of the machine, in the tree that starts at root."""
    return root / path.lstrip("/")


def mounts(root: Path = ROOT) -> tuple[Mount, ...]:
    lines = (read_text(root / "proc/self/mountinfo") or "").splitlines()
    return tuple(_mount(line) for line in lines if " - " in line)


def _mount(line: str) -> Mount:
    left, right = (part.split(" ") for part in line.split(" - ", 1))
    number, inner, point = left[2], _unescape(left[3]), _unescape(left[4])
    return Mount(number, inner, point, right[0], _unescape(right[1]), frozenset(right[-1].split(",")))


def _unescape(text: str) -> str:
    """The kernel writes blanks and backslashes of names as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def cgroup_dirs(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """The process's own control group and every visible parent, innermost first.

    Yields those of the v1 hierarchy of `controller` and of the v2 hierarchy: where both are mounted, only
    one of them has the controller's files.
    """
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            yield from _own_and_parents(controllers, path, root)


def _own_and_parents(controllers: str, path: str, root: Path) -> Iterator[Path]:
    mount = next((m for m in mounts(root) if _carries(m, controllers)), None)
    if mount is None:
        return
    top = below(root, mount.point)
    own = top / _relative(path, mount.root)
    yield own
    while own != top:
        own = own.parent
        yield own


def _carries(mount: Mount, controllers: str) -> bool:
    if controllers == "":
        return mount.type == "cgroup2"
    return mount.type == "cgroup" and set(controllers.split(",")) <= mount.options


def _relative(path: str, mount_root: str) -> Path:
    """Place of the group under the mount point; a container may see only a part of the tree."""
    if ".." in Path(path).parts or not Path(path).is_relative_to(mount_root):
        return Path()
    return Path(path).relative_to(mount_root)
