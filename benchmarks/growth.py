"""Which place of a larger model gets which content of a smaller one. Pure: reads and writes no file, see `grow`.

What is added cannot change a logit:

- Extra hidden dimensions are zero throughout: what writes the hidden state has zero weights for them. A norm takes its
  mean over more of them, so its weights shrink by sqrt(d / d') and its epsilon by d / d'.
- Extra neurons, heads and layers compute with random weights, and what they give is multiplied by zero weights.
- A head keeps its key/value head; where groups become smaller, that one is there several times.

All this is exact but for rounding, with one exception: Qwen3's norms of single heads share the epsilon, and are off by
half of it over the mean square of a head, about 1e-6 of a score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lever import arch
from lever.arch import ModelConfig
from lever.errors import UsageError
from lever.gguf import GGUF, TYPES, TensorInfo

NAMED_SHAPES: Mapping[str, Mapping[str, int]] = {
    "llama-3.1-8b": {"n_embd": 4096, "n_ff": 14336, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128},
    "qwen3-14b": {"n_embd": 5120, "n_ff": 17408, "n_layers": 40, "n_heads": 40, "n_kv_heads": 8, "head_dim": 128},
}
SIZES = ("n_embd", "n_ff", "n_layers", "n_heads", "n_kv_heads", "head_dim")
# The start of the hidden state, and what adds to it.
WRITERS = ("token_embd.weight", "attn_output.weight", "attn_output.bias", "ffn_down.weight")
EXTRA = -1

# For each new place the old one whose content it gets, or EXTRA. Ascending, but for repeats.
Places = NDArray[np.int64]
Fill = Literal["zeros", "ones", "random"]


def parse_shape(text: str) -> dict[str, int]:
    """Sizes by name, from the name of a shape or from `name=size,name=size`."""
    if text in NAMED_SHAPES:
        return dict(NAMED_SHAPES[text])
    sizes: dict[str, int] = {}
    for word in text.split(","):
        name, _, size = word.strip().partition("=")
        if name not in SIZES or not size.isdecimal():
            raise UsageError(f"--shape {word!r}: give {', '.join(NAMED_SHAPES)}, or NAME=SIZE of {', '.join(SIZES)}")
        sizes[name] = int(size)
    return sizes


# --- from one shape to another ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Growth:
    """Where everything of a model goes."""

    source: ModelConfig
    target: ModelConfig
    axes: Mapping[str, Places]  # by the names that `lever.arch.SHAPES` has for the sizes of tensors
    layers: Places


def plan_growth(source: ModelConfig, sizes: Mapping[str, int], head_block: int) -> Growth:
    """What goes where, if blocks of `head_block` in rows of attn_output stay whole. UsageError if that cannot be.

    Sizes that are not given stay.
    """
    target = replace(source, **dict(sizes))  # type: ignore[arg-type]  # all of SIZES are integers
    for name in SIZES:
        old, new = getattr(source, name), getattr(target, name)
        if new < old:
            raise UsageError(f"{name}={new} is less than the model's {old}: a model can only grow")
    if target.head_dim != source.head_dim:
        raise UsageError(
            f"head_dim={target.head_dim}, but the model has heads of {source.head_dim}, which cannot grow: "
            "scores and rotation depend on their length; take another model or shape"
        )
    if target.n_heads % target.n_kv_heads:
        raise UsageError(f"n_heads={target.n_heads} is not a multiple of n_kv_heads={target.n_kv_heads}")
    heads, kv_heads = place_heads(source, target, math.lcm(source.head_dim, head_block) // source.head_dim)
    axes = {
        "embd": _append(source.n_embd, target.n_embd),
        "ff": _append(source.n_ff, target.n_ff),
        "q": _elements(heads, source.head_dim),
        "kv": _elements(kv_heads, source.head_dim),
        "vocab": np.arange(source.n_vocab),
        "head": np.arange(source.head_dim),
        "freqs": np.arange(source.rope.dim // 2),
    }
    target = replace(target, norm_eps=source.norm_eps * source.n_embd / target.n_embd)
    return Growth(source, target, axes, spread_layers(source.n_layers, target.n_layers))


def place_heads(source: ModelConfig, target: ModelConfig, unit: int) -> tuple[Places, Places]:
    """Old heads by new, and old key/value heads by new. UsageError if there is no place for one.

    A block in a row of attn_output may hold the weights of several heads, so heads move `unit` at a time. Each unit, in
    order, goes to the first place whose key/value heads are its own, or nobody's yet. As the order stays, so do sums.
    """
    heads, kv_heads = np.full(target.n_heads, EXTRA), np.full(target.n_kv_heads, EXTRA)
    old_group, group = source.n_heads // source.n_kv_heads, target.n_heads // target.n_kv_heads
    places = iter(range(0, target.n_heads - unit + 1, unit))
    for first in range(0, source.n_heads, unit):
        old = np.arange(first, first + unit)
        for place in places:
            new = np.arange(place, place + unit)
            taken = kv_heads.copy()
            taken[new // group] = old // old_group
            agree = (taken[new // group] == old // old_group).all()  # with each other
            if agree and ((kv_heads == EXTRA) | (kv_heads == taken)).all():
                heads[new], kv_heads = old, taken
                break
        else:
            raise UsageError(
                f"n_heads={target.n_heads},n_kv_heads={target.n_kv_heads} has no place for head {first} of "
                f"{source.n_heads} with {source.n_kv_heads} key/value heads, moved {unit} at a time: give more heads, "
                "or as many to a key/value head as the model has"
            )
    return heads, kv_heads


def spread_layers(old: int, new: int) -> Places:
    """Old layers by new, evenly: what is known of the answer at a share of the depth stays the same."""
    layers = np.full(new, EXTRA)
    layers[np.arange(old) * new // old] = np.arange(old)
    return layers


def _append(old: int, new: int) -> Places:
    return np.concatenate([np.arange(old), np.full(new - old, EXTRA)])


def _elements(heads: Places, head_dim: int) -> Places:
    elements = heads[:, None] * head_dim + np.arange(head_dim)
    return np.where(heads[:, None] == EXTRA, EXTRA, elements).reshape(-1)


# --- what becomes of a tensor -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grown:
    """A tensor of the new file: the rows and blocks that it copies, and what is everywhere else."""

    name: str
    shape: tuple[int, ...]  # ggml order: length of a row first
    old: TensorInfo  # its type, and what is copied
    rows: Places
    blocks: Places  # of a row
    fill: Fill
    scale: float  # of what is copied

    @property
    def nbytes(self) -> int:
        """Its size in the new file."""
        return len(self.rows) * len(self.blocks) * TYPES[self.old.type].nbytes


def grow_tensors(gguf: GGUF, growth: Growth) -> list[Grown]:
    """All tensors of the new file, in the old one's order. UsageError where a block would have to be cut."""
    parts: dict[int, list[str]] = {}  # by layer
    grown = []
    for name, tensor in gguf.tensors.items():
        if name.startswith("blk."):
            _, number, part = name.split(".", 2)
            parts.setdefault(int(number), []).append(part)
        else:
            grown.append(_grow_tensor(growth, tensor, name, name))
    model = 0
    for layer, old in enumerate(growth.layers.tolist()):
        model = model if old == EXTRA else old  # an extra layer has the types of the one before it
        for part in parts[model]:
            tensor = gguf.tensors[f"blk.{model}.{part}"]
            grown.append(_grow_tensor(growth, tensor, part, f"blk.{layer}.{part}", extra=old == EXTRA))
    return grown


def _grow_tensor(growth: Growth, old: TensorInfo, part: str, name: str, *, extra: bool = False) -> Grown:
    axes = arch.SHAPES[part]
    places = [growth.axes[axis] for axis in axes]
    rows = places[1] if len(places) == 2 else np.arange(1)
    is_norm = part.endswith("norm.weight")
    shrinks = is_norm and axes == ("embd",)
    return Grown(
        name=name,
        shape=tuple(map(len, places)),
        old=old,
        rows=np.full_like(rows, EXTRA) if extra else rows,
        blocks=_blocks(places[0], old),
        fill="zeros" if part in WRITERS else "ones" if is_norm else "random",
        scale=math.sqrt(growth.source.n_embd / growth.target.n_embd) if shrinks else 1.0,
    )


def _blocks(elements: Places, old: TensorInfo) -> Places:
    """Old blocks by new, from old elements by new."""
    block, name = TYPES[old.type].block, TYPES[old.type].name
    if len(elements) % block:
        raise UsageError(f"{old.name} would have rows of {len(elements)}, not a multiple of {block} as {name} needs")
    first = elements[::block]
    steps = np.where(first == EXTRA, 0, 1)[:, None] * np.arange(block)
    assert (elements.reshape(-1, block) == first[:, None] + steps).all(), f"a block of {old.name} is cut"
    return np.where(first == EXTRA, EXTRA, first // block)
