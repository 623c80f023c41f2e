"""`lever pack`: make the flash image of a model. Words in, a path out."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lever.cli import options as o
from lever.cli.console import Bar, bar, note, write
from lever.cli.run import DEFAULT_MODEL
from lever.errors import UsageError

if TYPE_CHECKING:
    from lever.pack import PackSettings


class Type(StrEnum):
    """What matrices are stored as."""

    keep = "keep"
    q4_0 = "q4_0"


class ImageLayout(StrEnum):
    """How the kernels find them."""

    auto = "auto"
    plain = "plain"


def pack(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A GGUF file, hf:owner/repo[:QUANT], or a name such as demo.")
    ] = DEFAULT_MODEL,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="Where to write it. [dim]\\[default: lever's cache][/dim]"),
    ] = None,
    type_: Annotated[
        Type,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="keep: the types of the source. q4_0: requantise the layers to Q4_0, which fast kernels like best; "
            "this changes the text.",
        ),
    ] = Type.keep,
    layout: Annotated[
        ImageLayout,
        typer.Option(
            "--layout",
            metavar="LAYOUT",
            help="auto: as the fastest kernels of this CPU want it. plain: for every CPU.",
        ),
    ] = ImageLayout.auto,
    verify: Annotated[
        bool, typer.Option("--verify", metavar=o.SWITCH, help="Read all of it and check it; MODEL may be an image.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", metavar=o.SWITCH, help="Write anew what is there already.")] = False,
    dram: o.Dram = "auto",
    threads: o.ThreadCount = None,
    offline: o.Offline = False,
    quiet: o.Quiet = False,
) -> None:
    """Make the flash image of a model: bytes in the order and layout in which they are streamed, with checksums.

    lever pack demo --type q4_0
    lever pack model.gguf -o /mnt/nvme/model.image.gguf
    lever pack /mnt/nvme/model.image.gguf --verify

    lever run uses the image in the cache by itself; its path goes to stdout.
    """
    from lever.machine import performance_cores
    from lever.memory import parse_size
    from lever.models import resolve
    from lever.pack import PackSettings

    settings = PackSettings(
        type=type_.value,
        layout=layout.value,
        dram=parse_size(dram),
        n_threads=len(performance_cores()) if threads is None else threads,
    )
    with bar(quiet=quiet) as progress:
        source = resolve(model, offline=offline, progress=progress).path
        path = _packed(model, source, out, settings, progress, force=force, verify=verify)
        if verify:
            _verify(path, progress)
    write(f"{path}\n")


def _packed(
    name: str, source: Path, out: Path | None, settings: PackSettings, progress: Bar, *, force: bool, verify: bool
) -> Path:
    """The image at its place, made now unless it is there already."""
    from lever import gguf as gguf_file
    from lever.arch import ModelConfig
    from lever.memory import format_size
    from lever.models.cache import exclusive
    from lever.models.images import find_image, image_path, source_sha256
    from lever.pack import pack as write_image
    from lever.weights.image import Image

    gguf = gguf_file.read(source)
    if verify and Image.of(gguf) is not None:
        return source
    path = image_path(source) if out is None else out
    with exclusive(path.stem, progress):
        if path.exists() and not force:
            found = find_image(source, progress) if out is None else None
            image = found.image if found is not None else None
            if image is None or (image.type, image.wanted_layout) != (settings.type, settings.layout):
                what = f" ({image.describe()})" if image is not None else ""
                raise UsageError(f"{path} is there already{what}: write it anew with --force")
            note(f"{name} is packed already ({image.describe()}): --force does it again")
            return path
        config = ModelConfig.from_gguf(gguf)
        sha256 = source_sha256(gguf.files, progress)
        nbytes = write_image(gguf, config, path, settings, name=name, sha256=sha256, progress=progress)
    note(f"packed {name} into {format_size(nbytes)}")
    return path


def _verify(path: Path, progress: Bar) -> None:
    from lever import gguf as gguf_file
    from lever.ggml import load
    from lever.pack import verify
    from lever.weights.image import Image

    gguf = gguf_file.read(path)
    image = Image.of(gguf)
    assert image is not None
    verify(gguf, image, progress)
    image.check(gguf, load())
    note(f"{path} is whole: {image.describe()}")
