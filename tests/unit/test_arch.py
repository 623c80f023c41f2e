"""The model config: what is read from a sound file, and what is refused and how."""

from __future__ import annotations

import ctypes
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lever import gguf
from lever.arch import ModelConfig, Rope, layer_tensors, other_tensors
from lever.errors import GGUFError, LeverError, UnsupportedModel
from lever.gguf import MATRIX_TYPES
from tests import reference, tiny
from tests.tiny import Fields, Tensor


def config_of(fields: Fields, directory: Path) -> ModelConfig:
    return ModelConfig.from_gguf(gguf.read(fields.write(directory / "model.gguf")))


def tiny_config(directory: Path, **shape: Any) -> ModelConfig:
    return config_of(tiny.tiny_fields(type="Q4_0", **shape), directory)


def refusal(fields: Fields, directory: Path, kind: type[LeverError]) -> str:
    """The message with which the model is refused: one line that names the file."""
    with pytest.raises(LeverError) as caught:
        config_of(fields, directory)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message.startswith(f"{directory / 'model.gguf'}: ")
    assert message.isprintable()
    return message


# --- sound models -------------------------------------------------------------------------------------------

PLAIN_ROPE = Rope(
    dim=64,
    neox=False,
    freq_base=10000.0,
    scaling="none",
    factor=1.0,
    n_ctx_orig=512,
    attn_factor=1.0,
    beta_fast=32.0,
    beta_slow=1.0,
)


def test_a_llama_is_read_whole(tmp_path: Path) -> None:
    assert tiny_config(tmp_path, rope_freqs=True) == ModelConfig(
        architecture="llama",
        name="tiny llama",
        n_layers=2,
        n_embd=256,
        n_ff=512,
        n_heads=4,
        n_kv_heads=2,
        head_dim=64,
        n_vocab=384,
        n_ctx_train=512,
        norm_eps=float(np.float32(1e-5)),
        rope=PLAIN_ROPE,
        qk_norm=False,
        qkv_bias=False,
        attn_output_bias=False,
        tied_output=False,
        has_rope_freqs=True,
    )


def test_qwen2_has_biases_and_neox_pairs(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, arch="qwen2")
    assert config.rope == replace(PLAIN_ROPE, neox=True)
    assert (config.qkv_bias, config.attn_output_bias, config.qk_norm) == (True, False, False)


def test_qwen3_norms_queries_and_keys(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, arch="qwen3", head_dim=128)
    assert config.rope == replace(PLAIN_ROPE, neox=True, dim=128)
    assert (config.qkv_bias, config.qk_norm, config.head_dim, config.n_embd_kv) == (False, True, 128, 256)


def test_a_llama_may_have_biases(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, bias=True)
    assert (config.qkv_bias, config.attn_output_bias) == (True, True)


def test_A22_without_output_weight_the_output_is_tied(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, tied=True)
    assert config.tied_output
    assert "output.weight" not in other_tensors(config)


def test_a_model_without_vocabulary_says_its_size(tmp_path: Path) -> None:
    assert tiny_config(tmp_path, tokenizer=False, n_vocab=96).n_vocab == 96


def test_the_name_of_the_file_stands_in_for_a_missing_name(tmp_path: Path) -> None:
    assert tiny_config(tmp_path, metadata={"general.name": None}).name == "model"


def test_head_count_kv_defaults_to_head_count(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, n_kv_heads=4, metadata={"llama.attention.head_count_kv": None})
    assert config.n_kv_heads == 4


@pytest.mark.parametrize("key", ["attention.head_count", "attention.head_count_kv", "feed_forward_length"])
def test_A23_a_scalar_and_an_array_mean_the_same(key: str, tmp_path: Path) -> None:
    scalar = tiny.tiny_fields(type="Q4_0")
    value = scalar.get(f"llama.{key}")
    array = tiny.tiny_fields(type="Q4_0", metadata={f"llama.{key}": [value, value]})
    assert config_of(array, tmp_path) == config_of(scalar, tmp_path)


def test_A26_alignment_changes_no_logit(tmp_path: Path) -> None:
    plain, wide = (
        tiny.tiny_model(tmp_path / f"{alignment}.gguf", type="Q4_0", alignment=alignment) for alignment in (32, 4096)
    )
    assert ModelConfig.from_gguf(gguf.read(plain)) == ModelConfig.from_gguf(gguf.read(wide))
    assert np.array_equal(reference.forward(plain, [1, 2, 3]), reference.forward(wide, [1, 2, 3]))


def test_a_split_model_has_the_config_of_the_whole(tmp_path: Path) -> None:
    parts = tiny.tiny_model(tmp_path / "parts.gguf", type="Q4_0", splits=3)
    assert ModelConfig.from_gguf(gguf.read(parts)) == tiny_config(tmp_path)


@pytest.mark.parametrize(
    "shape",
    [{}, {"bias": True}, {"arch": "qwen2", "tied": True}, {"arch": "qwen3"}, {"rope_freqs": True}],
    ids=str,
)
def test_the_listed_tensors_are_those_of_the_file(shape: dict[str, Any], tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="Q4_0", **shape)
    config = config_of(fields, tmp_path)
    names = [*other_tensors(config), *layer_tensors(config, 0), *layer_tensors(config, 1)]
    assert sorted(names) == sorted(tensor.name for tensor in fields.tensors)


def test_the_tensors_of_a_layer_come_in_the_order_of_their_use(tmp_path: Path) -> None:
    parts = [name.removeprefix("blk.1.") for name in layer_tensors(tiny_config(tmp_path, arch="qwen3"), 1)]
    assert parts == [
        "attn_norm.weight",
        "attn_q.weight",
        "attn_k.weight",
        "attn_v.weight",
        "attn_q_norm.weight",
        "attn_k_norm.weight",
        "attn_output.weight",
        "ffn_norm.weight",
        "ffn_gate.weight",
        "ffn_up.weight",
        "ffn_down.weight",
    ]


# --- rope ---------------------------------------------------------------------------------------------------


def test_linear_scaling_is_read(tmp_path: Path) -> None:
    rope = tiny_config(tmp_path, scaling={"type": "linear", "factor": 4.0}).rope
    assert rope == replace(PLAIN_ROPE, scaling="linear", factor=4.0)
    assert (rope.freq_scale, rope.ext_factor) == (0.25, 0.0)


@pytest.mark.parametrize("key", ["rope.scale_linear", "rope.scaling.factor"])
def test_a_factor_without_a_type_is_linear(key: str, tmp_path: Path) -> None:
    rope = tiny_config(tmp_path, metadata={f"llama.{key}": 2.0}).rope
    assert rope == replace(PLAIN_ROPE, scaling="linear", factor=2.0)


@pytest.mark.parametrize(
    "scaling",
    [{"type": "none", "factor": 4.0}, {"type": "linear", "factor": 1.0}, {"type": "linear", "factor": 0.0}],
    ids=str,
)
def test_scaling_that_scales_nothing_is_none(scaling: dict[str, object], tmp_path: Path) -> None:
    assert tiny_config(tmp_path, scaling=scaling).rope == PLAIN_ROPE


def test_L2_yarn_is_read_with_its_attention_factor_and_betas(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128, "attn_factor": 1.5}
    rope = tiny_config(tmp_path, scaling=scaling | {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}).rope
    assert rope == Rope(
        dim=64,
        neox=False,
        freq_base=10000.0,
        scaling="yarn",
        factor=4.0,
        n_ctx_orig=128,
        attn_factor=1.5,
        beta_fast=16.0,
        beta_slow=2.0,
    )
    assert (rope.freq_scale, rope.ext_factor) == (0.25, 1.0)


@pytest.mark.parametrize("scaling", ["longrope", "dynamic", "su", "\x1b[2J"])
def test_L1_an_unknown_kind_of_scaling_is_refused(scaling: str, tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="Q4_0", scaling={"type": scaling, "factor": 4.0})
    message = refusal(fields, tmp_path, UnsupportedModel)
    assert f"RoPE scaling {scaling!r} (llama.rope.scaling.type)" in message


def test_part_of_a_head_may_rotate(tmp_path: Path) -> None:
    assert tiny_config(tmp_path, metadata={"llama.rope.dimension_count": 32}).rope.dim == 32


@pytest.mark.parametrize("dim", [0, 33, 66])
def test_a_head_cannot_rotate_more_than_it_has(dim: int, tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="Q4_0", metadata={"llama.rope.dimension_count": dim})
    assert f"llama.rope.dimension_count is {dim}" in refusal(fields, tmp_path, GGUFError)


# --- what lever does not run --------------------------------------------------------------------------------


def test_A28_a_mixture_of_experts_is_unsupported_not_corrupt(tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="Q4_0", metadata={"llama.expert_count": 8})
    message = refusal(fields, tmp_path, UnsupportedModel)
    assert "not supported: mixture of experts (MoE)" in message
    assert UnsupportedModel.exit_code == 4


def test_A28_a_mixture_of_experts_is_known_by_its_router(tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="Q4_0")
    fields.tensors.append(Tensor("blk.0.ffn_gate_inp.weight", (256, 8), 0, bytes(256 * 8 * 4)))
    assert "mixture of experts (MoE)" in refusal(fields, tmp_path, UnsupportedModel)


def test_A28_an_architecture_of_experts_is_named_as_such(tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="Q4_0", metadata={"general.architecture": "qwen2moe"})
    fields.set("qwen2moe.expert_count", 60)
    message = refusal(fields, tmp_path, UnsupportedModel)
    assert "mixture of experts (MoE) of architecture 'qwen2moe'" in message


@pytest.mark.parametrize("arch", ["gemma3", "phi3", "bert", "lever.gemma3", "", "\x1b[2J"])
def test_A28_another_architecture_is_named_with_those_that_run(arch: str, tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="Q4_0", metadata={"general.architecture": arch})
    message = refusal(fields, tmp_path, UnsupportedModel)
    assert f"architecture {arch.removeprefix('lever.')!r}" in message  # which a flash image has before it
    assert "llama, qwen2, qwen3" in message


FEATURES = [
    ("attention.sliding_window", 128, "sliding-window attention"),
    ("attention.sliding_window", [0, 128], "sliding-window attention"),
    ("attn_logit_softcapping", 50.0, "soft-capped attention"),
    ("final_logit_softcapping", 30.0, "soft-capped logits"),
    ("logit_scale", 0.125, "scaled logits"),
    ("embedding_scale", 12.0, "scaled embeddings"),
    ("residual_scale", 0.22, "scaled residuals"),
    ("attention.scale", 0.5, "attention scale of 0.5"),
    ("attention.scale", -0.125, "attention scale of -0.125"),
    ("attention.clamp_kqv", 8.0, "clamped queries"),
    ("attention.max_alibi_bias", 8.0, "ALiBi"),
    ("attention.causal", False, "attention that is not causal"),
    ("attention.value_length", 32, "values of another length than keys"),
    ("attention.head_count", [4, 2], "another llama.attention.head_count from layer to layer"),
    ("attention.head_count_kv", [2, 1], "another llama.attention.head_count_kv from layer to layer"),
    ("feed_forward_length", [512, 256], "another llama.feed_forward_length from layer to layer"),
    ("rope.dimension_sections", [16, 24, 24], "multi-axis RoPE"),
    ("rope.scaling.yarn_log_multiplier", 0.1, "YaRN with a log multiplier"),
]


@pytest.mark.parametrize(("key", "value", "feature"), FEATURES)
def test_A28_I8_a_feature_in_force_is_refused_by_name(key: str, value: object, feature: str, tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="Q4_0", metadata={f"llama.{key}": value})
    message = refusal(fields, tmp_path, UnsupportedModel)
    assert f"not supported: {feature}" in message or f"not supported: an {feature}" in message
    assert f"llama.{key}" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 0),
        ("attention.sliding_window", 0),
        ("attention.sliding_window", 512),  # as long as the context
        ("attn_logit_softcapping", 0.0),
        ("logit_scale", 1.0),
        ("attention.scale", 0.125),  # what it is anyway, 1 / sqrt(64)
        ("attention.causal", True),
        ("attention.key_length", 64),
    ],
)
def test_a_feature_that_is_not_in_force_changes_nothing(key: str, value: object, tmp_path: Path) -> None:
    assert tiny_config(tmp_path, metadata={f"llama.{key}": value}) == tiny_config(tmp_path)


@pytest.mark.parametrize("name", ["blk.1.attn_sinks.weight", "rope_factors_long.weight", "blk.2.ffn_up.bias"])
def test_a_tensor_that_the_graph_would_leave_out_is_refused(name: str, tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="Q4_0")
    fields.tensors.append(Tensor(name, (32,), 0, bytes(128)))
    assert f"tensor {name} in architecture llama" in refusal(fields, tmp_path, UnsupportedModel)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_rope_freqs_belong_to_llama_alone(arch: Any, tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="Q4_0", arch=arch, rope_freqs=True)
    assert "tensor rope_freqs.weight" in refusal(fields, tmp_path, UnsupportedModel)


# --- types --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Q4_0", "BF16", "IQ1_M", "TQ2_0", "MXFP4", "Q1_0"])
def test_every_multiplied_type_is_taken(kind: str, tmp_path: Path) -> None:
    assert config_of(tiny.tiny_fields(type=kind), tmp_path) == tiny_config(tmp_path)


def test_the_multiplied_types_are_those_with_a_dot_product_in_ggml() -> None:
    """struct ggml_type_traits_cpu begins with two pointers, from_float and vec_dot."""
    library = ctypes.CDLL(str(tiny.LIBRARIES / "libggml-cpu.so"))
    library.ggml_get_type_traits_cpu.restype = ctypes.POINTER(ctypes.c_void_p * 2)
    with_dot = {kind for kind in gguf.TYPES if library.ggml_get_type_traits_cpu(kind).contents[1]}
    assert with_dot == MATRIX_TYPES
    assert with_dot == set(tiny.TYPE_IDS.values())


@pytest.mark.parametrize(("type_id", "name"), [(9, "Q8_1"), (15, "Q8_K"), (24, "I8"), (28, "F64")])
def test_A20_a_known_type_that_nothing_multiplies_is_refused(type_id: int, name: str, tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="Q4_0")
    tensor = fields.tensor("blk.1.ffn_up.weight")
    info = gguf.TYPES[type_id]
    tensor.type, tensor.data = type_id, bytes(256 * 512 // info.block * info.nbytes)
    message = refusal(fields, tmp_path, UnsupportedModel)
    assert f"tensor blk.1.ffn_up.weight of type {name}" in message
    assert "F32, F16, Q4_0" in message
    assert "Q8_1," not in message


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "blk.1.attn_k.bias", "output_norm.weight"])
def test_norms_and_biases_are_f32(name: str, tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type={"*": "Q4_0", name: "F16"}, arch="qwen2")
    message = refusal(fields, tmp_path, UnsupportedModel)
    assert f"tensor {name} of type F16; get a file that has it as F32" in message


# --- damaged models -----------------------------------------------------------------------------------------


def test_A14_a_block_count_beyond_the_tensors_names_the_first_missing(tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="Q4_0", metadata={"llama.block_count": 10_000})
    assert "tensor blk.2.attn_norm.weight is missing" in refusal(fields, tmp_path, GGUFError)


def test_A14_a_huge_block_count_costs_neither_time_nor_memory(tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="Q4_0", metadata={"llama.block_count": 2**32 - 1})
    header = gguf.read(fields.write(tmp_path / "model.gguf"))
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises(GGUFError, match=r"blk\.2\.attn_norm\.weight is missing"):
            ModelConfig.from_gguf(header)
        assert time.perf_counter() - start < 1.0
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "name",
    [
        "token_embd.weight",
        "output_norm.weight",
        "blk.0.attn_norm.weight",
        "blk.0.ffn_gate.weight",
        "blk.1.attn_v.bias",
        "blk.1.ffn_down.weight",
    ],
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="Q4_0", arch="qwen2")
    fields.tensors.remove(fields.tensor(name))
    assert f"tensor {name} is missing" in refusal(fields, tmp_path, GGUFError)


def test_a_missing_norm_of_queries_is_named(tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="Q4_0", arch="qwen3")
    fields.tensors.remove(fields.tensor("blk.1.attn_q_norm.weight"))
    assert "tensor blk.1.attn_q_norm.weight is missing" in refusal(fields, tmp_path, GGUFError)


@pytest.mark.parametrize(
    ("key", "value", "tensor", "says"),
    [
        ("attention.head_count_kv", 0, "blk.0.attn_k.weight", "attention.head_count_kv 0 of length 64"),
        ("attention.head_count_kv", 1, "blk.0.attn_k.weight", "attention.head_count_kv 1 of length 64"),
        ("attention.head_count", 8, "blk.0.attn_k.weight", "attention.head_count_kv 2 of length 32"),
        ("embedding_length", 512, "token_embd.weight", "embedding_length 512"),
        ("feed_forward_length", 256, "blk.0.ffn_gate.weight", "feed_forward_length 256"),
        ("rope.dimension_count", 32, "rope_freqs.weight", "rope.dimension_count 32"),
    ],
)
def test_A25_metadata_and_shapes_that_disagree_are_both_named(
    key: str, value: int, tensor: str, says: str, tmp_path: Path
) -> None:
    rope_freqs = tensor == "rope_freqs.weight"
    fields = tiny.tiny_fields(type="Q4_0", rope_freqs=rope_freqs, metadata={f"llama.{key}": value})
    message = refusal(fields, tmp_path, GGUFError)
    assert f"tensor {tensor} has shape" in message
    assert says in message


def test_A25_a_vocabulary_of_another_length_than_the_embedding_is_refused(tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="Q4_0")
    tokens = fields.get("tokenizer.ggml.tokens")
    assert isinstance(tokens, list)
    fields.set("tokenizer.ggml.tokens", tokens[:-1])
    message = refusal(fields, tmp_path, GGUFError)
    assert "token_embd.weight has shape (256, 384)" in message
    assert "383 tokens" in message


def test_heads_come_in_whole_groups(tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="Q4_0", n_heads=4, n_kv_heads=3)
    assert "is not a multiple of head_count_kv 3" in refusal(fields, tmp_path, GGUFError)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0),
        ("embedding_length", 0),
        ("context_length", 0),
        ("attention.head_count", 0),
        ("attention.head_count", 3),
        ("attention.key_length", 0),
        ("attention.layer_norm_rms_epsilon", 0.0),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("rope.freq_base", 0.0),
        ("rope.scaling.factor", -4.0),
        ("rope.scaling.original_context_length", 0),
        ("block_count", "2"),
        ("rope.freq_base", "10000"),
        ("context_length", None),
        ("attention.layer_norm_rms_epsilon", None),
    ],
)
def test_a_senseless_value_is_named(key: str, value: object, tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="Q4_0", metadata={f"llama.{key}": value})
    assert f"llama.{key}" in refusal(fields, tmp_path, GGUFError)


def test_a_file_without_an_architecture_is_refused(tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="Q4_0", metadata={"general.architecture": None})
    assert "general.architecture is missing" in refusal(fields, tmp_path, GGUFError)
