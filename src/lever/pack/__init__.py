"""Writes the flash image of a model: bytes in streaming order and in the kernels' layout, a checksum for each block.

Works through the source in bands of rows, in memory that does not depend on the model's size. Knows nothing of where
images are kept (`lever.models.images`).
"""

from __future__ import annotations

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

__all__ = ["PackSettings", "pack", "verify"]

PYTHON_GROWTH = 16 << 20  # of the process while it packs: metadata once more, threads, small objects


def pack(
    gguf: GGUF, config: ModelConfig, out: Path, settings: PackSettings, *, name: str, sha256: str, progress: Progress
) -> int:
    """Write the image of a model at `out`; its bytes. All or nothing: a temporary name, synced, renamed.

    `name` is what a user calls the source, `sha256` its hash. DoesNotFit for a budget too small, StorageError for a
    disk that is full or fails; nothing is left behind then.
    """
    if Image.of(gguf) is not None:
        raise UsageError(f"{gguf.path} is a flash image already: pack its source, or check it with --verify")
    ggml = load()
    contents = contents_of(ggml, gguf, config, settings, name=name, sha256=sha256)
    total = contents.nbytes
    release_unused()
    ledger = Ledger(settings.dram, hints=("give more with --dram",))
    ledger.reserve("Python", rss_bytes() + PYTHON_GROWTH)
    ledger.reserve("bands of weights", Bands.nbytes(contents.entries))
    ledger.reserve("what is not written yet", Writer.nbytes(total))
    with ExitStack() as stack:
        writer = stack.enter_context(Writer(out, total))
        bands = stack.enter_context(Bands(ggml, gguf, contents.entries, settings.n_threads))
        progress.start(total, f"packing {name}")
        stack.callback(progress.finish)
        writer.write(contents.header)
        for entry in contents.entries:
            writer.pad_to(entry.offset)
            for data in bands.of(entry):
                writer.write(data)
                progress.advance(len(data))
        writer.pad_to(contents.checksums.offset)
        writer.write_checksums()
        writer.finish()
    return total


def verify(gguf: GGUF, image: Image, progress: Progress) -> None:
    """Read every block of an image; DamagedImage for the first that is not what was written."""
    with image.open(gguf) as file, Pages(64 * BLOCK) as pages:
        end = gguf.tensors[IMAGE_CHECKSUMS].offset
        progress.start(end, f"verifying {image.path.name}")
        try:
            for offset in range(0, end, pages.nbytes):
                nbytes = min(pages.nbytes, end - offset)
                file.read_exactly(pages.bytes.data[:nbytes], offset, nbytes)
                progress.advance(nbytes)
        finally:
            progress.finish()
