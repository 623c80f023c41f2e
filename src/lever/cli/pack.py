"""`lever pack`: make the flash image of a model. Words in, a path out."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from lever.cli import options as o
from lever.cli.console import Bar, bar, note, write
from lever.cli.run import DEFAULT_MODEL
from lever.errors import StorageError, UsageError

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
    model: o.ModelArgument = DEFAULT_MODEL,
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
    from lever.memory import parse_size
    from lever.models import resolve
    from lever.pack import PackSettings

    settings = PackSettings(
        type=type_.value,
        layout=layout.value,
        dram=parse_size(dram),
        n_threads=o.thread_count(threads),
    )
    with bar(quiet=quiet) as progress, _leaving_in_order():
        source = resolve(model, offline=offline, progress=progress).path
        if verify and out is None and not force and _is_image(source):
            path = source
        else:
            path = _packed(model, source, out, settings, progress, force=force, verify=verify, quiet=quiet)
        if verify:
            _verify(path, progress, quiet=quiet)
    write(f"{path}\n")


@contextmanager
def _leaving_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like Ctrl-C, so that no half of an image is left; a second one ends at once."""

    def leave(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)  # what a shell makes of it

    caught = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]  # nohup ignores
    for number in caught:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


def _is_image(path: Path) -> bool:
    from lever import gguf as gguf_file
    from lever.weights.image import Image

    return Image.of(gguf_file.read(path)) is not None


def _packed(
    name: str,
    source: Path,
    out: Path | None,
    settings: PackSettings,
    progress: Bar,
    *,
    force: bool,
    verify: bool,
    quiet: bool,
) -> Path:
    """The image at its place, made now unless it is there already."""
    from lever import gguf as gguf_file
    from lever.arch import ModelConfig
    from lever.memory import format_size
    from lever.models.cache import exclusive, place_hash
    from lever.models.images import image_path, steady_sha256
    from lever.pack import pack as write_image
    from lever.pack import refuse_image, refuse_place

    path = image_path(source) if out is None else Path(os.path.realpath(out))
    if out is not None and not path.parent.is_dir():
        raise StorageError(f"{out}: there is no directory {path.parent}: make it, or choose another place with -o")
    with exclusive(f"image-{place_hash(path)[:12]}", progress, f"packs {name}"):
        sha256 = steady_sha256(source, progress)  # before its header is read
        gguf = gguf_file.read(source)
        refuse_image(gguf)
        refuse_place(path, gguf)
        if path.exists() and not force:
            if out is not None:
                raise UsageError(f"{out} is there already: write it anew with --force")
            if _is_done(name, source, settings, progress, verify=verify, quiet=quiet):
                return path
        if out is None:
            path.parent.mkdir(parents=True, exist_ok=True)
        config = ModelConfig.from_gguf(gguf)
        called = str(source.absolute()) if source == Path(name) else name  # from wherever it will be packed again
        nbytes = write_image(gguf, config, path, settings, name=called, sha256=sha256, progress=progress)
    if not quiet:
        note(f"packed {name} into {format_size(nbytes)}")
    return path if out is None else out


def _is_done(name: str, source: Path, settings: PackSettings, progress: Bar, *, verify: bool, quiet: bool) -> bool:
    """Whether the cache has just this image. UsageError for another one, which somebody may want.

    One that is of no use is not in the way, unless it is to be verified and damaged.
    """
    from lever.models.images import find_image

    found = find_image(source, progress)
    if found is not None and found.error is not None and verify:
        raise found.error
    if found is None or found.image is None or found.problem is not None:
        if found is not None:
            note(f"{found.path} {found.problem}: packing it anew")
        return False
    if (found.image.type, found.image.wanted_layout) != (settings.type, settings.layout):
        raise UsageError(f"{found.path} is there already ({found.describe()}): write it anew with --force")
    if not quiet:
        note(f"{name} is packed already ({found.describe()}): --force does it again")
    return True


def _verify(path: Path, progress: Bar, *, quiet: bool) -> None:
    from lever import gguf as gguf_file
    from lever.ggml import load
    from lever.pack import verify
    from lever.weights.image import Image

    gguf = gguf_file.read(path)
    image = Image.of(gguf)
    assert image is not None
    verify(gguf, image, progress)
    if not quiet:
        note(f"{path} is whole: {image.describe()}")
    image.check(gguf, load())
