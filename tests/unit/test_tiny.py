"""The fixtures themselves, against what others make of them: llama.cpp, the gguf package, and ggml."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xllamacpp
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from tests import reference, tiny

TOKENS = [int(token) for token in np.random.default_rng(1).integers(5, 250, 60)]
LETTER = 40  # a token that is a whole character: llama.cpp gives no figures for others


def llama_cpp_log_probabilities(path: Path, tokens: list[int], n_vocab: int) -> NDArray[np.float64]:
    """What llama.cpp says of the token after `tokens`."""
    params: Any = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 512, 1, 2
    params.warmup, params.fit_params, params.verbosity = False, False, -1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    request = {"prompt": tokens, "temperature": 0, "n_predict": 1, "n_probs": n_vocab}
    request["logit_bias"] = [[LETTER, 1000]]  # chooses the token, leaves the probabilities as they are
    answer: Any = xllamacpp.Server(params).handle_completions(request)
    answer = json.loads(answer) if isinstance(answer, str) else answer
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return np.array([entry["logprob"] for entry in sorted(top, key=lambda entry: entry["id"])])


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max()
    normed: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return normed


YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 128}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with rope_freqs": {"rope_freqs": True},
    "llama with biases": {"bias": True},
    "llama with long heads": {"head_dim": 128},
    "llama without grouped heads": {"n_kv_heads": 4},
    "llama with spm": {"tokenizer": "spm"},
    "tied": {"tied": True},
    "qwen2": {"arch": "qwen2"},
    "qwen3": {"arch": "qwen3"},
    "qwen3 with long heads": {"arch": "qwen3", "head_dim": 128},
    "linear": {"scaling": {"type": "linear", "factor": 4.0}},
    "linear, old key": {"metadata": {"llama.rope.scale_linear": 4.0}},
    "yarn": {"scaling": YARN},
    "yarn with attention factor": {"scaling": YARN | {"attn_factor": 1.5}},
    "yarn, qwen2": {"arch": "qwen2", "scaling": YARN},
    "per-layer arrays": {"metadata": {"llama.attention.head_count_kv": [2, 2]}},
    "alignment 4096": {"alignment": 4096},
    "no padding at the end": {"align_tail": False},
    "three parts": {"splits": 3},
}


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS.keys())
def test_llama_cpp_and_the_reference_agree_on_every_kind_of_tiny_model(tmp_path: Path, shape: dict[str, Any]) -> None:
    """llama.cpp rounds keys and values to 16 bits, hence 0.01; log-probabilities spread over about 7."""
    path = tiny.tiny_model(tmp_path / "tiny.gguf", type="F32", **shape)
    expected = log_softmax(reference.forward(path, TOKENS)[-1])
    found = llama_cpp_log_probabilities(path, TOKENS, len(expected))
    assert np.abs(found - expected).max() < 0.01


@pytest.mark.parametrize("kind", tiny.TYPE_IDS)
def test_llama_cpp_and_the_reference_agree_on_every_type(tmp_path: Path, kind: str) -> None:
    """llama.cpp also rounds activations to 8 bits, hence 0.2."""
    quick = kind.startswith(("IQ3", "IQ4"))  # ggml takes a second for all matrices
    types = {"attn_q": kind, "ffn_down": kind, "*": "F32"} if quick else {"*": kind}
    path = tiny.tiny_model(tmp_path / "tiny.gguf", type=types)
    expected = log_softmax(reference.forward(path, TOKENS)[-1])
    found = llama_cpp_log_probabilities(path, TOKENS, len(expected))
    assert np.abs(found - expected).max() < 0.2


@pytest.mark.parametrize(
    "shape",
    [
        {"rope_freqs": True},
        {"scaling": {"type": "linear", "factor": 4.0}},
        {"scaling": YARN},
        {"scaling": YARN | {"attn_factor": 1.5}},
        {"bias": True},
        {"arch": "qwen3"},
    ],
    ids=str,
)
def test_every_feature_changes_the_logits_by_more_than_the_tolerance(tmp_path: Path, shape: dict[str, Any]) -> None:
    plain = reference.forward(tiny.tiny_model(tmp_path / "plain.gguf", type="F32"), TOKENS)[-1]
    other = reference.forward(tiny.tiny_model(tmp_path / "other.gguf", type="F32", **shape), TOKENS)[-1]
    assert np.abs(other - plain).max() > 0.1


def test_positions_rotate_as_a_longer_text_would(tmp_path: Path) -> None:
    """Attention sees only differences of positions, so a shift of all changes nothing, a stretch does."""
    path = tiny.tiny_model(tmp_path / "tiny.gguf", type="F32", rope_freqs=True)
    plain = reference.forward(path, TOKENS)
    shifted = reference.forward(path, TOKENS, range(9000, 9000 + len(TOKENS)))
    stretched = reference.forward(path, TOKENS, range(0, 100 * len(TOKENS), 100))
    assert np.abs(shifted - plain).max() < 1e-9
    assert np.abs(stretched - plain).max() > 0.1


def test_the_gguf_package_reads_what_was_written(tmp_path: Path) -> None:
    fields = tiny.tiny_fields(arch="qwen3", type={"attn_q": "Q6_K", "*": "Q4_0"}, alignment=64)
    reader = GGUFReader(fields.write(tmp_path / "tiny.gguf"))
    assert [tensor.name for tensor in reader.tensors] == [tensor.name for tensor in fields.tensors]
    for found, written in zip(reader.tensors, fields.tensors, strict=True):
        assert tuple(int(size) for size in found.shape) == written.shape
        assert found.tensor_type == written.type
        assert found.data.tobytes() == written.data
    for key, value in fields.metadata:
        contents = reader.fields[key].contents()
        assert contents == pytest.approx(value) if isinstance(value, float) else contents == value


@pytest.mark.parametrize("kind", [kind for kind, number in tiny.TYPE_IDS.items() if 2 <= number < 36])
def test_the_gguf_package_finds_the_same_numbers_in_the_blocks(kind: str) -> None:
    blocks = tiny.random_weights("blk.0.ffn_up.weight", (256, 16), kind, 0)
    expected = dequantize(np.frombuffer(blocks, np.uint8).reshape(16, -1), GGMLQuantizationType[kind])
    assert np.allclose(tiny.dequantise(blocks, kind), expected.ravel(), atol=1e-7)


@pytest.mark.parametrize("kind", tiny.TYPE_IDS)
def test_weights_of_every_type_are_spread_as_the_row_length_asks(kind: str) -> None:
    blocks = tiny.random_weights("blk.0.ffn_up.weight", (512, 64), kind, 0)
    values = tiny.dequantise(blocks, kind)
    assert np.isfinite(values).all()
    assert values.std() * np.sqrt(512) == pytest.approx(1.0, abs=0.25)


def test_bfloat16_rounds_as_the_gguf_package_does() -> None:
    values = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    assert tiny.quantise(values, "BF16") == quantize(values, GGMLQuantizationType.BF16).tobytes()


def test_the_seed_alone_decides_the_weights() -> None:
    plain, tied = tiny.tiny_fields(type="F32"), tiny.tiny_fields(type="F32", tied=True, rope_freqs=True)
    other = tiny.tiny_fields(type="F32", seed=1)
    name = "blk.1.ffn_down.weight"
    assert plain.tensor(name).data == tied.tensor(name).data
    assert plain.tensor(name).data != other.tensor(name).data
    assert plain.tensor(name).data != plain.tensor("blk.0.ffn_down.weight").data


def test_edits_stand_in_the_file(tmp_path: Path) -> None:
    fields = tiny.tiny_fields(metadata={"general.name": None, "llama.context_length": 77})
    fields.set("general.author", "nobody")
    reader = GGUFReader(fields.write(tmp_path / "tiny.gguf"))
    assert "general.name" not in reader.fields
    assert reader.fields["llama.context_length"].contents() == 77
    assert reader.fields["general.author"].contents() == "nobody"
