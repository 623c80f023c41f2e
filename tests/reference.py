"""REF: the forward pass of a dense model in NumPy float64, to compare with. Shares no arithmetic with lever.

Weights are read and turned into numbers by the `gguf` package. ggml rounds what this does not: activations to
8 bits before a product with quantised weights, keys and values to 16 bits in the cache. So compare with a
tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from lever.gguf import TYPES, TensorInfo, read
from tests.tiny import dequantise

Array = NDArray[np.float64]
Weight = Callable[[str], Array]  # rows of a tensor by name; of shape (rows, row) or (row,)


def forward(path: Path, tokens: Sequence[int], positions: Sequence[int] | None = None) -> Array:
    """Logits of shape (len(tokens), n_vocab); each token sees itself and those before it in the sequence.

    positions: how far each token's query and key are rotated, to look at far positions without a long text.
    By default 0, 1, 2 and so on.
    """
    metadata, weight, names = _load(path)
    arch = str(metadata["general.architecture"])
    n_heads = int(_number(metadata, f"{arch}.attention.head_count"))
    n_embd = int(_number(metadata, f"{arch}.embedding_length"))
    head_dim = int(_number(metadata, f"{arch}.attention.key_length", n_embd // n_heads))
    freqs = weight("rope_freqs.weight") if "rope_freqs.weight" in names else None
    turns = _rope_turns(metadata, arch, head_dim, freqs)
    cos_sin = turns(np.arange(len(tokens)) if positions is None else np.asarray(positions))
    eps = _number(metadata, f"{arch}.attention.layer_norm_rms_epsilon")

    def linear(x: Array, name: str) -> Array:
        product = x @ weight(f"{name}.weight").T
        return product + weight(f"{name}.bias") if f"{name}.bias" in names else product

    def norm(x: Array, name: str) -> Array:
        scale: Array = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
        return x * scale * weight(f"{name}.weight")

    def heads(x: Array, layer: str, which: str) -> Array:
        """Queries or keys of shape (heads, tokens, head_dim): normed if the model does that, then rotated."""
        split = linear(x, f"{layer}.attn_{which}").reshape(len(x), -1, head_dim)
        if f"{layer}.attn_{which}_norm.weight" in names:
            split = norm(split, f"{layer}.attn_{which}_norm")
        return _rotate(split.transpose(1, 0, 2), *cos_sin, neox=arch != "llama")

    x = weight("token_embd.weight")[list(tokens)]
    for number in range(int(_number(metadata, f"{arch}.block_count"))):
        layer = f"blk.{number}"
        y = norm(x, f"{layer}.attn_norm")
        values = linear(y, f"{layer}.attn_v").reshape(len(y), -1, head_dim).transpose(1, 0, 2)
        y = _attention(heads(y, layer, "q"), heads(y, layer, "k"), values)
        x = x + linear(y, f"{layer}.attn_output")
        y = norm(x, f"{layer}.ffn_norm")
        gate = linear(y, f"{layer}.ffn_gate")
        y = gate / (1 + np.exp(-gate)) * linear(y, f"{layer}.ffn_up")
        x = x + linear(y, f"{layer}.ffn_down")
    return linear(norm(x, "output_norm"), "output" if "output.weight" in names else "token_embd")


def _attention(queries: Array, keys: Array, values: Array) -> Array:
    """Causal attention of queries (heads, tokens, head_dim); keys and values may have fewer heads."""
    n_heads, n_tokens, head_dim = queries.shape
    group = n_heads // len(keys)
    scores = queries @ np.repeat(keys, group, axis=0).transpose(0, 2, 1) / math.sqrt(head_dim)
    scores[:, np.triu(np.ones((n_tokens, n_tokens), bool), k=1)] = -np.inf
    weights: Array = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: Array = weights @ np.repeat(values, group, axis=0)
    return mixed.transpose(1, 0, 2).reshape(n_tokens, -1)


# --- rotation -----------------------------------------------------------------------------------------------


def _rotate(x: Array, cos: Array, sin: Array, *, neox: bool) -> Array:
    """Turn pairs of the leading elements: (2i, 2i + 1), or (i, i + dim/2) the NeoX way."""
    half = cos.shape[-1]
    first = slice(0, half) if neox else slice(0, 2 * half, 2)
    second = slice(half, 2 * half) if neox else slice(1, 2 * half, 2)
    turned = x.copy()
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., first] * sin + x[..., second] * cos
    return turned


def _rope_turns(
    metadata: Mapping[str, object], arch: str, head_dim: int, freqs: Array | None
) -> Callable[[NDArray[np.int64]], tuple[Array, Array]]:
    """From positions to cosines and sines (tokens, dim/2). Formulas: rope_yarn in ggml's ops.cpp."""
    dim = int(_number(metadata, f"{arch}.rope.dimension_count", head_dim))
    base = _number(metadata, f"{arch}.rope.freq_base", 10000.0)
    scaling = metadata.get(f"{arch}.rope.scaling.type", "linear")
    linear_factor = _number(metadata, f"{arch}.rope.scale_linear", 1.0)
    factor = _number(metadata, f"{arch}.rope.scaling.factor", linear_factor) if scaling != "none" else 1.0
    magnitude = _number(metadata, f"{arch}.rope.scaling.attn_factor", 1.0)
    pairs = np.arange(dim // 2)
    freq = base ** (-2.0 * pairs / dim) / (1.0 if freqs is None else freqs)
    if scaling == "yarn":
        context = _number(metadata, f"{arch}.context_length")
        original = _number(metadata, f"{arch}.rope.scaling.original_context_length", context)

        def pair_that_turns(times: float) -> float:
            return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

        low = max(0, math.floor(pair_that_turns(_number(metadata, f"{arch}.rope.scaling.yarn_beta_fast", 32.0))))
        slow = _number(metadata, f"{arch}.rope.scaling.yarn_beta_slow", 1.0)
        high = min(dim - 1, math.ceil(pair_that_turns(slow)))
        kept = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)  # fast pairs keep their speed
        freq = freq / factor * (1 - kept) + freq * kept
        magnitude *= 1 + 0.1 * math.log(factor)
    else:
        freq = freq / factor

    def turns(positions: NDArray[np.int64]) -> tuple[Array, Array]:
        angles = np.outer(positions, freq)
        return np.cos(angles) * magnitude, np.sin(angles) * magnitude

    return turns


# --- the file -----------------------------------------------------------------------------------------------


def _number(metadata: Mapping[str, object], key: str, default: float | None = None) -> float:
    value = metadata.get(key, default)
    value = value[0] if isinstance(value, list) else value
    assert isinstance(value, int | float), key
    return float(value)


def _load(path: Path) -> tuple[Mapping[str, object], Weight, frozenset[str]]:
    """Metadata, weights in float64, and names of tensors, of all parts of a model."""
    header = read(path)
    if any(tensor.type > 35 for tensor in header.tensors.values()):
        # gguf 0.17.1 refuses files with MXFP4, NVFP4, Q1_0 or Q2_0. Of those, lever's reader says where the
        # blocks lie, and ggml's own routine makes numbers of them.
        return header.metadata, _by_ggml(header.files, header.tensors), frozenset(header.tensors)
    readers = [GGUFReader(file) for file in header.files]
    metadata = {key: field.contents() for key, field in readers[0].fields.items() if field.types}
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}

    def weight(name: str) -> Array:
        return np.asarray(dequantize(tensors[name].data, tensors[name].tensor_type), np.float64)

    return metadata, weight, frozenset(tensors)


def _by_ggml(files: Sequence[Path], tensors: Mapping[str, TensorInfo]) -> Weight:
    def weight(name: str) -> Array:
        tensor = tensors[name]
        raw = files[tensor.file].read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        values = dequantise(raw, TYPES[tensor.type].name)
        return values.astype(np.float64).reshape(tensor.shape[::-1])

    return weight
