"""Logits against the float64 reference, for every architecture, feature and type of weights.

Where the numbers differ, and by how much:

- Keys and values lie in the cache as F16, 11 bits each. With F32 weights nothing else is rounded to less than F32, so
  a reference that rounds these two alone must agree to about 2e-5: what is left are elements so near a border between
  two F16 numbers that F32 and float64 put them on different sides of it. Full float64 is off by 4e-4 to 1e-3.
- Products with quantised weights round activations to 8 bits first. The step is the largest element of a block over
  127; for normal elements that is 2.97 sigma in blocks of 256 and 2.25 in blocks of 32, and the error of a step is its
  length over sqrt(12): 0.7 % and 0.5 % of each product. BF16 keeps 8 bits of an activation: 2^-9 / sqrt(3) of it.
- F16 weights: activations keep 11 bits, and CPUs with F16 arithmetic also sum in it, in up to 16 steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lever.gguf import MATRIX_TYPES, TYPES
from lever.workspace import Block, Workspace
from tests import reference, tiny
from tests.models import TOKENS, Logits, relative_error, tiny_logits, tiny_of_type

F32_TOLERANCE = 2e-4  # ten times what is left, see above; for a reference with F16 keys and values
FLOAT64_TOLERANCE = 2e-3  # with F16 keys and values against none
FAR_TOLERANCE = 5e-4  # ggml turns F32 angles: at position 9000 they are good to about 9000 * 2^-24 = 5e-4 rad

YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
LINEAR = {"type": "linear", "factor": 4.0}

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "L1 llama with rope_freqs": {"rope_freqs": True},
    "L2 llama, linear": {"scaling": LINEAR},
    "L2 llama, linear by its old key": {"metadata": {"llama.rope.scale_linear": 4.0}},
    "L2 llama, yarn": {"scaling": YARN},
    "L2 llama, yarn with an attention factor": {"scaling": YARN | {"attn_factor": 1.5}},
    "L2 llama, yarn with other borders": {"scaling": YARN | {"yarn_beta_fast": 4.0, "yarn_beta_slow": 2.0}},
    "L2 qwen2, yarn": {"arch": "qwen2", "scaling": YARN},
    "llama, another base": {"metadata": {"llama.rope.freq_base": 500000.0}},
    "llama, half of each head turns": {"metadata": {"llama.rope.dimension_count": 32}},
    "llama, a large epsilon": {"metadata": {"llama.attention.layer_norm_rms_epsilon": 0.05}},
    "A22 llama, tied": {"tied": True},
    "llama, biases": {"bias": True},
    "llama, long heads": {"head_dim": 128},
    "llama, short heads": {"head_dim": 32},
    "llama, a key head each": {"n_kv_heads": 4},
    "llama, one key head for all": {"n_heads": 8, "n_kv_heads": 1},
    "A23 llama, per-layer arrays": {"metadata": {"llama.attention.head_count_kv": [2, 2]}},
    "qwen2": {"arch": "qwen2"},
    "qwen2, tied": {"arch": "qwen2", "tied": True},
    "qwen2, output bias too": {"arch": "qwen2", "bias": True},
    "qwen3": {"arch": "qwen3"},
    "qwen3, long heads, tied": {"arch": "qwen3", "head_dim": 128, "tied": True},
}


@pytest.fixture
def f16_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference rounds keys and values as the cache does, and nothing else."""
    attention = reference._attention

    def rounded(queries: reference.Array, keys: reference.Array, values: reference.Array) -> reference.Array:
        return attention(queries, as_f16(keys), as_f16(values))

    monkeypatch.setattr(reference, "_attention", rounded)


def as_f16(x: reference.Array) -> reference.Array:
    return x.astype(np.float32).astype(np.float16).astype(np.float64)


# --- formulas -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("f16_cache")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_architecture_and_feature_gives_the_reference(tmp_path: Path, shape: dict[str, Any]) -> None:
    """Where positions are scaled, 290 tokens, beyond the 128 that there were originally and 256 slots of the cache."""
    path = tiny.tiny_model(tmp_path / "tiny.gguf", type="F32", n_ff=256, **shape)
    tokens = TOKENS if {"scaling", "rope_freqs"} & set(shape) else TOKENS[:60]
    expected = reference.forward(path, tokens)
    found = tiny_logits(path, tokens)
    assert relative_error(found, expected) < F32_TOLERANCE
    assert relative_error(found[:1], expected[:1]) < F32_TOLERANCE  # nothing to attend to but itself
    assert relative_error(found[-1:], expected[-1:]) < 4 * F32_TOLERANCE


def test_the_f16_cache_is_the_largest_error_of_a_f32_model(tmp_path: Path) -> None:
    path = tiny.tiny_model(tmp_path / "tiny.gguf", type="F32", rope_freqs=True)
    error = relative_error(tiny_logits(path), reference.forward(path, TOKENS))
    assert F32_TOLERANCE < error < FLOAT64_TOLERANCE


# --- positions ----------------------------------------------------------------------------------------------

FAR = [*range(8), *range(100, 108), *range(513, 521), *range(4090, 4098), *range(9000, 9008)]


@pytest.fixture
def far_positions(monkeypatch: pytest.MonkeyPatch) -> Sequence[int]:
    """Token i of a model is turned as if it stood at FAR[i]; what it sees stays the same."""
    show = Workspace.show

    def show_far(self: Workspace, block: Block) -> int:
        row = show(self, block)
        slots = np.pad(block.slots, (0, block.m - block.n), "edge")
        self.positions.array[0, : block.m] = np.array(FAR)[slots]
        return row

    monkeypatch.setattr(Workspace, "show", show_far)
    return FAR


@pytest.mark.usefixtures("f16_cache")
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"rope_freqs": True},
        {"rope_freqs": True, "scaling": LINEAR},
        {"scaling": LINEAR},
        {"scaling": YARN},
        {"arch": "qwen2", "scaling": YARN | {"attn_factor": 1.5}},
        {"arch": "qwen3"},
    ],
    ids=str,
)
def test_L1_positions_0_100_and_9000_turn_as_in_the_reference(
    tmp_path: Path, far_positions: Sequence[int], shape: dict[str, Any]
) -> None:
    path = tiny.tiny_model(tmp_path / "tiny.gguf", type="F32", n_ff=256, **shape)
    tokens = TOKENS[: len(far_positions)]
    expected = reference.forward(path, tokens, far_positions)
    found = tiny_logits(path, tokens)
    assert relative_error(found, expected) < FAR_TOLERANCE
    # The table of frequencies matters where it is said to: far away, and hardly at the start.
    near = reference.forward(path, tokens)
    assert relative_error(found, near) > 1000 * FAR_TOLERANCE


# --- types --------------------------------------------------------------------------------------------------

N_PRODUCTS = 15  # one behind the other: 7 of each layer, and the output's


def rounding(kind: str) -> float:
    """What one product with weights of this type loses, relative to its length."""
    if kind == "F32":
        return 2.0**-24
    if kind == "F16":
        return 2.0**-11 * math.sqrt(16)
    if kind == "BF16":
        return 2.0**-9 / math.sqrt(3)
    block = next(info.block for info in TYPES.values() if info.name == kind)
    return (2.97 if block == 256 else 2.25) / 127 / math.sqrt(12)


@pytest.mark.usefixtures("f16_cache")
@pytest.mark.parametrize("kind", [TYPES[kind].name for kind in sorted(MATRIX_TYPES)])
def test_every_type_is_as_near_to_the_reference_as_its_rounding_allows(tmp_path: Path, kind: str) -> None:
    """Independent errors add up as squares; twice that, since not every activation is as tame as a normal one."""
    path = tiny_of_type(tmp_path / "tiny.gguf", kind)
    tokens = TOKENS[:35]
    error = relative_error(tiny_logits(path, tokens), reference.forward(path, tokens))
    assert error < max(2 * math.sqrt(N_PRODUCTS) * rounding(kind), F32_TOLERANCE)


def test_a_mixed_file_is_near_to_the_reference(tmp_path: Path) -> None:
    """As quantisers make them: other types for values, for what goes down, and for the output."""
    types = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "token_embd": "Q4_K", "*": "Q4_K"}
    path = tiny.tiny_model(tmp_path / "tiny.gguf", rope_freqs=True, type=types)
    error = relative_error(tiny_logits(path), reference.forward(path, TOKENS))
    assert error < 2 * math.sqrt(N_PRODUCTS) * rounding("Q4_K")


# --- the tests themselves -----------------------------------------------------------------------------------


def test_the_tolerances_would_see_a_wrong_row(tmp_path: Path) -> None:
    path = tiny.tiny_model(tmp_path / "tiny.gguf", type="F32", n_ff=256)
    expected: NDArray[np.float64] = reference.forward(path, TOKENS)
    found: Logits = expected.astype(np.float32)
    assert relative_error(found, expected) < 1e-7
    found[200] = found[201]
    assert relative_error(found, expected) > 100 * F32_TOLERANCE
