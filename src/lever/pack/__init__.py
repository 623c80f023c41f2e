"""Writes the flash image of a model: bytes in streaming order and in the kernels' layout, a checksum for each block.

Works through the source in bands of rows, in memory that does not depend on the model's size. Knows nothing of where
images are kept (`lever.models.images`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from lever.arch import ModelConfig
from lever.errors import UsageError
from lever.ggml import load
from lever.gguf import GGUF, IMAGE_CHECKSUMS
from lever.memory import Ledger, release_unused, rss_bytes
from lever.models.cache import Progress
from lever.pack.bands import Bands
from lever.pack.contents import BLOCK, PackSettings, contents_of
from lever.pack.writer import Writer
from lever.pages import Pages
from lever.weights.image import Image

__all__ = ["PackSettings", "pack", "refuse_image", "refuse_place", "verify"]

PYTHON_GROWTH = 16 << 20  # of the process while it packs: metadata once more, threads, small objects


def pack(
    gguf: GGUF,
    config: ModelConfig,
    out: Path,
    settings: PackSettings,
    *,
    name: str,
    sha256: Callable[[], str],
    progress: Progress,
) -> int:
    """Write the image of a model at `out`; its bytes. All or nothing: a temporary name, synced, renamed.

    `name` is what a user calls the source, `sha256` gives its hash: asked for once it is known that there is room, and
    again at the end, when it raises if the source has changed. The caller sees to it that nobody else writes `out`.
    UsageError for a place that no image may have, DoesNotFit for a budget too small, StorageError for a disk that is
    full or fails; nothing is left behind then.
    """
    refuse_image(gguf)
    refuse_place(out, gguf)
    ggml = load()
    contents = contents_of(ggml, gguf, config, settings, name=name, sha256="0" * 64)
    total = contents.nbytes
    release_unused()
    ledger = Ledger(settings.dram, hints=("give more with --dram",))
    ledger.reserve("Python", rss_bytes() + PYTHON_GROWTH)
    ledger.reserve("bands of weights", Bands.nbytes(contents.entries))
    ledger.reserve("what is not written yet", Writer.nbytes(total))
    with ExitStack() as stack:
        writer = stack.enter_context(Writer(out, total))
        contents = contents_of(ggml, gguf, config, settings, name=name, sha256=sha256())
        assert contents.nbytes == total
        bands = stack.enter_context(Bands(ggml, gguf, contents.entries, settings.n_threads))
        progress.start(total, f"packing {gguf.path.name}")
        stack.callback(progress.finish)
        writer.write(contents.header)
        for entry in contents.entries:
            writer.pad_to(entry.offset)
            for data in bands.of(entry):
                writer.write(data)
                progress.advance(len(data))
        writer.pad_to(contents.checksums.offset)
        writer.write_checksums()
        sha256()
        writer.finish()
    return total


def refuse_image(gguf: GGUF) -> None:
    """UsageError for a model that is an image itself."""
    if Image.of(gguf) is not None:
        raise UsageError(f"{gguf.path} is a flash image already: pack its source, or check it with --verify alone")


def refuse_place(out: Path, gguf: GGUF) -> None:
    """UsageError where an image would take the place of its source, or of something that is no file."""
    if not out.exists():
        return
    if any(out.samefile(file) for file in gguf.files):
        raise UsageError(f"{out} is the model itself, which an image cannot replace: choose another place with -o")
    if not out.is_file():
        raise UsageError(f"{out} is {'a directory' if out.is_dir() else 'no file'}: give the name of a file with -o")


def verify(gguf: GGUF, image: Image, progress: Progress) -> None:
    """Read every block of an image; DamagedImage for the first that is not what was written."""
    with image.open(gguf) as file, Pages(64 * BLOCK) as pages:
        end = gguf.tensors[IMAGE_CHECKSUMS].offset
        progress.start(end, f"verifying {image.path.name}")
        try:
            file.check(end, pages, progress.advance)
        finally:
            progress.finish()
