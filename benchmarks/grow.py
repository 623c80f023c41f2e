"""A larger model that says the same: a target of real size with real text, for measurements.

    python -m benchmarks.grow SRC OUT --shape llama-3.1-8b [--seed N] [--force]
    python -m benchmarks.grow SRC OUT --shape n_embd=4096,n_ff=14336,n_layers=32,n_heads=32,n_kv_heads=8

What a shape does not name stays as in SRC; how it works is told in `benchmarks.growth`. Blocks are copied as they are
and nothing is quantised again. Weights that have no effect are random, and zero weights are random bits under a scale
of zero where their type has one, so that neither storage nor kernels have it easier than with a real model.

llama.cpp loads what lever loads, but for one thing: its qwen2 wants n_heads times head_dim to be n_embd.
"""

from __future__ import annotations

import argparse
import functools
import math
import mmap
import os
import shutil
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from tests import tiny

from benchmarks.growth import EXTRA, Fill, Grown, Growth, grow_tensors, parse_shape, plan_growth
from lever.arch import ModelConfig
from lever.errors import LeverError, StorageError, UsageError
from lever.gguf import ARRAY, GGUF, NUMBERS, STRING, TYPES, U64, read
from lever.memory import drop_page_cache, format_size
from lever.models import Progress, Silent, resolve
from lever.models.cache import PART_SUFFIX

BAND_BYTES = 8 << 20  # of a tensor made at once; making it takes a few times as much
POOL = 4096  # different random blocks of one type
STD = 0.03  # of random weights: products are near 1, and far from what F16 cannot hold

Blocks = NDArray[np.void]  # one element is the bytes of one block


def grow(
    source: Path,
    target: Path,
    sizes: Mapping[str, int],
    *,
    seed: int = 0,
    force: bool = False,
    progress: Progress | None = None,
    band_nbytes: int = BAND_BYTES,
) -> None:
    """Write the model at `source` in another shape to `target`, whole or not at all.

    UsageError where the shape cannot hold the model, StorageError where the disk cannot hold the file.
    """
    if target.exists() and not force:
        raise UsageError(f"{target} exists: give another name, or --force")
    gguf = read(source)
    outputs = [TYPES[tensor.type] for name, tensor in gguf.tensors.items() if name.endswith("attn_output.weight")]
    growth = plan_growth(ModelConfig.from_gguf(gguf), sizes, math.lcm(*(kind.block for kind in outputs)))
    tensors = grow_tensors(gguf, growth)
    header = make_header(gguf, growth, tensors)
    nbytes = len(header) + sum(tiny.align(tensor.nbytes, gguf.alignment) for tensor in tensors)
    _check_space(target, nbytes)
    progress = progress or Silent()
    progress.start(sum(tensor.nbytes for tensor in tensors), f"growing {source.name}")
    try:
        with ExitStack() as stack:
            file = stack.enter_context(_replacing(target))
            files = [stack.enter_context(path.open("rb")) for path in gguf.files]
            file.write(header)
            for tensor in tensors:
                for band in make_bands(tensor, files[tensor.old.file], seed, band_nbytes):
                    file.write(band.data)
                    progress.advance(band.nbytes)
                file.write(bytes(-tensor.nbytes % gguf.alignment))
    finally:
        progress.finish()


@contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    """A file that has the name `target` once it is whole and on the disk, and is gone if anything goes wrong."""
    temporary = target.with_name(target.name + PART_SUFFIX)
    try:
        file = temporary.open("xb")
    except FileExistsError:
        raise StorageError(f"{temporary} exists: another run writes it, or one was killed; delete it") from None
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            drop_page_cache(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _check_space(target: Path, nbytes: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < nbytes:
        raise StorageError(f"{target}: {format_size(nbytes)} are needed and {format_size(free)} are free: free some")


# --- tensors ------------------------------------------------------------------------------------------------


def make_bands(tensor: Grown, file: BinaryIO, seed: int, band_nbytes: int) -> Iterator[Blocks]:
    """The content of a tensor, some whole rows at a time: blocks [rows, blocks of a row]."""
    pool = make_pool(tensor.old.type, tensor.fill, seed)
    rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    n_blocks = len(tensor.blocks)
    n_rows = max(1, band_nbytes // (n_blocks * pool.itemsize))
    columns = np.flatnonzero(tensor.blocks != EXTRA)
    for start in range(0, len(tensor.rows), n_rows):
        rows = tensor.rows[start : start + n_rows]
        band = pool[rng.integers(len(pool), size=(len(rows), n_blocks), dtype=np.uint16)]
        kept = np.flatnonzero(rows != EXTRA)
        if kept.size:
            first = int(rows[kept[0]])
            old = _read_rows(tensor, file, first, int(rows[kept[-1]]) + 1)
            band[np.ix_(kept, columns)] = old[np.ix_(rows[kept] - first, tensor.blocks[columns])]
        yield band


def _read_rows(tensor: Grown, file: BinaryIO, first: int, end: int) -> Blocks:
    old, kind = tensor.old, TYPES[tensor.old.type]
    n_blocks = old.shape[0] // kind.block
    row_nbytes = n_blocks * kind.nbytes
    file.seek(old.offset + first * row_nbytes)
    raw = file.read((end - first) * row_nbytes)
    if len(raw) < (end - first) * row_nbytes:
        raise StorageError(f"{file.name}: ends within {old.name}: it changed while it was read, try again")
    if tensor.scale != 1.0:  # a norm, which is F32 always
        raw = (np.frombuffer(raw, "<f4") * np.float64(tensor.scale)).astype("<f4").tobytes()
    return np.frombuffer(raw, f"V{kind.nbytes}").reshape(end - first, n_blocks)


@functools.cache
def make_pool(kind: int, fill: Fill, seed: int) -> Blocks:
    """Blocks of one type to fill places with; all values finite, and those of zeros exactly zero."""
    info, rng = TYPES[kind], np.random.default_rng([seed, kind])
    if fill == "ones":
        raw = tiny.quantise(np.ones(info.block, np.float32), info.name)
    elif info.name in tiny.SLOW_TO_QUANTISE:
        raw = tiny.random_blocks(rng, POOL * info.block, info.name, STD)
    else:
        raw = tiny.quantise(STD * rng.standard_normal((POOL, info.block), np.float32), info.name)
    blocks = np.frombuffer(bytearray(raw), np.uint8).reshape(-1, info.nbytes)
    if fill == "zeros":
        blocks[:, :4] = blocks[:, -8:] = 0  # where the scales are, in most types
        if tiny.dequantise(blocks.tobytes(), info.name).any():
            blocks[:] = 0
    values = tiny.dequantise(blocks.tobytes(), info.name)
    assert np.isfinite(values).all(), f"{info.name} has no random blocks"
    assert fill != "zeros" or not values.any(), f"{info.name} has no blocks of zeros"
    return blocks.view(f"V{info.nbytes}").reshape(-1)


# --- the header ---------------------------------------------------------------------------------------------


def make_header(gguf: GGUF, growth: Growth, tensors: Sequence[Grown]) -> bytes:
    """All before the data: metadata as in the old file but for the shape, and where each tensor will lie."""
    fields = tiny.Fields(read_metadata(gguf.files[0]), alignment=gguf.alignment)
    for key, value in changed_metadata(gguf, growth).items():
        fields.set(key, value)
    end = 0
    for tensor in tensors:
        fields.tensors.append(tiny.Tensor(tensor.name, tensor.shape, tensor.old.type, b"", end))
        end = tiny.align(end + tensor.nbytes, gguf.alignment)
    header = fields.header()
    return header.ljust(tiny.align(len(header), gguf.alignment), b"\0")


def changed_metadata(gguf: GGUF, growth: Growth) -> dict[str, object]:
    """Keys to be set; None removes one, as parts of a split model become one file."""
    target, prefix = growth.target, growth.target.architecture
    keys: dict[str, object] = dict.fromkeys(key for key in gguf.metadata if key.startswith("split."))
    keys |= {
        "general.name": f"{target.name}, grown",
        f"{prefix}.block_count": target.n_layers,
        f"{prefix}.embedding_length": target.n_embd,
        f"{prefix}.feed_forward_length": target.n_ff,
        f"{prefix}.attention.head_count": target.n_heads,
        f"{prefix}.attention.head_count_kv": target.n_kv_heads,
        f"{prefix}.attention.layer_norm_rms_epsilon": target.norm_eps,
    }
    if target.head_dim * target.n_heads != target.n_embd:  # else these follow from the others if absent
        keys |= {f"{prefix}.attention.{which}_length": target.head_dim for which in ("key", "value")}
    return keys


def read_metadata(path: Path) -> list[tuple[str, object]]:
    """Every key with the bytes of its value, from a file that `lever.gguf.read` has found sound."""
    pairs: list[tuple[str, object]] = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        at = 24  # behind magic, version, numbers of tensors and keys
        for _ in range(U64.unpack_from(raw, 16)[0]):
            key_end = at + 8 + U64.unpack_from(raw, at)[0]
            value_end = _value_end(raw, key_end)
            pairs.append((raw[at + 8 : key_end].decode(), tiny.Raw(raw[key_end:value_end])))
            at = value_end
    return pairs


def _value_end(raw: mmap.mmap, at: int) -> int:
    (kind,), count, at = struct.unpack_from("<I", raw, at), 1, at + 4
    if kind == ARRAY:
        (kind, count), at = struct.unpack_from("<IQ", raw, at), at + 12
    if kind != STRING:
        return at + count * struct.calcsize("<" + NUMBERS[kind])
    for _ in range(count):
        at += 8 + U64.unpack_from(raw, at)[0]
    return at


# --- the command --------------------------------------------------------------------------------------------


class Percent:
    """Progress on a terminal."""

    def start(self, total: int, what: str) -> None:
        self._total, self._what, self._done = total, what, 0

    def advance(self, n: int) -> None:
        self._done += n
        print(f"\r{self._what}: {100 * self._done // max(self._total, 1)} %", end="", file=sys.stderr, flush=True)

    def finish(self) -> None:
        print(file=sys.stderr)


def main(words: Sequence[str] | None = None) -> None:
    """Grow a model, and say how large it is now."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("target", metavar="OUT", type=Path)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="replace OUT")
    args = parser.parse_args(words)
    progress = Percent() if sys.stderr.isatty() else Silent()
    try:
        sizes, path = parse_shape(args.shape), resolve(args.source, progress=progress).path
        grow(path, args.target, sizes, seed=args.seed, force=args.force, progress=progress)
    except (LeverError, OSError) as error:
        raise SystemExit(f"grow: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(f"{args.target}: {format_size(args.target.stat().st_size)}")


if __name__ == "__main__":
    main()
