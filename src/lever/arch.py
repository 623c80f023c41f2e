"""The shape of a model, from the header of its GGUF: which tensors, of which size, and how positions rotate.

Refuses what lever's graph cannot run, naming the feature. Builds no graph, reads no weights, knows no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast

from lever.errors import GGUFError, UnsupportedModel
from lever.gguf import F32, GGUF, IMAGE_CHECKSUMS, MATRIX_TYPES, TYPES, TensorInfo

NEOX = {"llama": False, "qwen2": True, "qwen3": True}  # which pairs RoPE turns; the keys are what lever runs

Scaling = Literal["none", "linear", "yarn"]


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions rotate queries and keys: the arguments of ggml_rope_ext."""

    dim: int  # leading elements of a head that rotate
    neox: bool  # pairs (i, i + dim/2) rather than (2i, 2i + 1)
    freq_base: float
    scaling: Scaling
    factor: float  # context is stretched by this much; 1 if scaling is "none"
    n_ctx_orig: int  # context before stretching
    attn_factor: float  # on top of the 1 + 0.1 ln(factor) that ggml itself applies for yarn
    beta_fast: float
    beta_slow: float

    @property
    def freq_scale(self) -> float:
        return 1.0 / self.factor

    @property
    def ext_factor(self) -> float:
        return 1.0 if self.scaling == "yarn" else 0.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything about a dense decoder that its graph depends on; equal in all layers."""

    architecture: str
    name: str
    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_vocab: int
    n_ctx_train: int
    norm_eps: float
    rope: Rope
    qk_norm: bool
    qkv_bias: bool
    attn_output_bias: bool
    tied_output: bool  # logits come from token_embd.weight
    has_rope_freqs: bool

    @property
    def n_embd_kv(self) -> int:
        """Length of one position's key row, and of its value row."""
        return self.head_dim * self.n_kv_heads

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> ModelConfig:
        """The config of a file all of whose tensors fit it; GGUFError or UnsupportedModel otherwise."""
        arch = gguf.architecture
        _refuse_unsupported(gguf, arch)
        n_layers = _layer_count(gguf, arch)
        n_embd = _positive(gguf, f"{arch}.embedding_length")
        n_heads = _same_in_all_layers(gguf, f"{arch}.attention.head_count", n_layers)
        head_dim = _head_dim(gguf, arch, n_embd, n_heads)
        n_ctx_train = _positive(gguf, f"{arch}.context_length")
        config = cls(
            architecture=arch,
            name=gguf.text("general.name", gguf.path.stem),
            n_layers=n_layers,
            n_embd=n_embd,
            n_ff=_same_in_all_layers(gguf, f"{arch}.feed_forward_length", n_layers),
            n_heads=n_heads,
            n_kv_heads=_same_in_all_layers(gguf, f"{arch}.attention.head_count_kv", n_layers, n_heads),
            head_dim=head_dim,
            n_vocab=_vocabulary_size(gguf, arch),
            n_ctx_train=n_ctx_train,
            norm_eps=_above_zero(gguf, f"{arch}.attention.layer_norm_rms_epsilon"),
            rope=_rope(gguf, arch, head_dim, n_ctx_train),
            qk_norm=arch == "qwen3",
            qkv_bias="blk.0.attn_q.bias" in gguf.tensors,
            attn_output_bias="blk.0.attn_output.bias" in gguf.tensors,
            tied_output="output.weight" not in gguf.tensors,
            has_rope_freqs=arch == "llama" and "rope_freqs.weight" in gguf.tensors,
        )
        _check_tensors(gguf, config)
        if n_heads % config.n_kv_heads:
            raise GGUFError(
                f"{gguf.path}: {arch}.attention.head_count {n_heads} is not a multiple of "
                f"head_count_kv {config.n_kv_heads}; the file is damaged"
            )
        return config


def layer_tensors(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Names in the GGUF of one layer's tensors, in the order in which the layer uses them."""
    bias, norm = config.qkv_bias, config.qk_norm
    parts = (
        ("attn_norm.weight", True),
        ("attn_q.weight", True),
        ("attn_q.bias", bias),
        ("attn_k.weight", True),
        ("attn_k.bias", bias),
        ("attn_v.weight", True),
        ("attn_v.bias", bias),
        ("attn_q_norm.weight", norm),
        ("attn_k_norm.weight", norm),
        ("attn_output.weight", True),
        ("attn_output.bias", config.attn_output_bias),
        ("ffn_norm.weight", True),
        ("ffn_gate.weight", True),
        ("ffn_up.weight", True),
        ("ffn_down.weight", True),
    )
    return tuple(f"blk.{layer}.{part}" for part, present in parts if present)


def other_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Names in the GGUF of the tensors outside the layers, in the order in which a pass uses them."""
    names = ["token_embd.weight", "output_norm.weight"]
    if config.has_rope_freqs:
        names.insert(1, "rope_freqs.weight")
    if not config.tied_output:
        names.append("output.weight")
    return tuple(names)


# --- what lever does not run --------------------------------------------------------------------------------

# Key below the architecture's prefix, what a value in force means, values that are not in force.
FEATURES: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("attn_logit_softcapping", "soft-capped attention", (0,)),
    ("final_logit_softcapping", "soft-capped logits", (0,)),
    ("logit_scale", "scaled logits", (0, 1)),
    ("embedding_scale", "scaled embeddings", (0, 1)),
    ("residual_scale", "scaled residuals", (0, 1)),
    ("attention.clamp_kqv", "clamped queries, keys and values", (0,)),
    ("attention.max_alibi_bias", "ALiBi", (0,)),
    ("attention.output_scale", "scaled attention output", (0, 1)),
    ("attention.value_scale", "scaled attention values", (0, 1)),
    ("attention.temperature_scale", "attention temperature", (0,)),
    ("rope.scaling.alpha", "NTK-alpha RoPE scaling", (0,)),
    ("rope.scaling.yarn_log_multiplier", "YaRN with a log multiplier", (0,)),
    ("rope.scaling.yarn_ext_factor", "YaRN with another extrapolation factor", (-1, 1)),
    ("rope.scaling.yarn_attn_factor", "YaRN with its own attention factor", (0, 1)),
)


def _refuse_unsupported(gguf: GGUF, arch: str) -> None:
    routers = [name for name in gguf.tensors if "ffn_gate_inp" in name]
    if routers or gguf.metadata.get(f"{arch}.expert_count", 0):
        raise _unsupported(gguf, f"mixture of experts (MoE) of architecture {arch!r}")
    if arch not in NEOX:
        raise _unsupported(gguf, f"architecture {arch!r}")
    for key, feature, neutral in FEATURES:
        if gguf.real(f"{arch}.{key}", neutral[0]) not in neutral:
            raise _unsupported(gguf, f"{feature} ({arch}.{key})")
    if not gguf.flag(f"{arch}.attention.causal", True):
        raise _unsupported(gguf, f"attention that is not causal ({arch}.attention.causal)")
    if f"{arch}.rope.dimension_sections" in gguf.metadata:
        raise _unsupported(gguf, f"multi-axis RoPE ({arch}.rope.dimension_sections)")
    _refuse_sliding_window(gguf, arch)


def _refuse_sliding_window(gguf: GGUF, arch: str) -> None:
    key = f"{arch}.attention.sliding_window"
    if key not in gguf.metadata:
        return
    windows = gguf.integers(key) if isinstance(gguf.metadata[key], list) else [gguf.integer(key)]
    context = gguf.integer(f"{arch}.context_length")
    if any(0 < window < context for window in windows):  # a window over all of the context hides nothing
        raise _unsupported(gguf, f"sliding-window attention ({key})")


def _unsupported(gguf: GGUF, feature: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{gguf.path}: not supported: {feature}; lever runs dense models of architecture {', '.join(NEOX)}"
    )


# --- metadata -----------------------------------------------------------------------------------------------


def _positive(gguf: GGUF, key: str, default: int | None = None) -> int:
    value = gguf.integer(key, default)
    if value < 1:
        raise GGUFError(f"{gguf.path}: {key} is {value}, must be at least 1; the file is damaged")
    return value


def _above_zero(gguf: GGUF, key: str, default: float | None = None) -> float:
    value = gguf.real(key, default)
    if value <= 0:
        raise GGUFError(f"{gguf.path}: {key} is {value}, must be above 0; the file is damaged")
    return value


def _layer_count(gguf: GGUF, arch: str) -> int:
    """The number of layers, once each is seen to exist: nothing may grow with a number nobody checked."""
    n_layers = _positive(gguf, f"{arch}.block_count")
    for layer in range(n_layers):
        if f"blk.{layer}.attn_norm.weight" not in gguf.tensors:
            raise _missing(gguf, f"blk.{layer}.attn_norm.weight", f"{arch}.block_count is {n_layers}")
    return n_layers


def _same_in_all_layers(gguf: GGUF, key: str, n_layers: int, default: int | None = None) -> int:
    values = set(gguf.per_layer(key, n_layers, default))
    if len(values) > 1:
        raise _unsupported(gguf, f"another {key} from layer to layer")
    return values.pop()


def _head_dim(gguf: GGUF, arch: str, n_embd: int, n_heads: int) -> int:
    key, value = f"{arch}.attention.key_length", f"{arch}.attention.value_length"
    if n_heads < 1 or (key not in gguf.metadata and n_embd % n_heads):
        raise GGUFError(
            f"{gguf.path}: {arch}.attention.head_count is {n_heads}, which does not divide "
            f"{arch}.embedding_length {n_embd}; the file is damaged"
        )
    head_dim = _positive(gguf, key, n_embd // n_heads)
    if gguf.integer(value, n_embd // n_heads) != head_dim:
        raise _unsupported(gguf, f"values of another length than keys ({key}, {value})")
    scale = gguf.real(f"{arch}.attention.scale", 0.0)
    if scale and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-4):
        raise _unsupported(gguf, f"an attention scale of {scale:g} ({arch}.attention.scale)")
    return head_dim


def _vocabulary_size(gguf: GGUF, arch: str) -> int:
    if "tokenizer.ggml.tokens" in gguf.metadata:
        return len(gguf.strings("tokenizer.ggml.tokens"))
    return _positive(gguf, f"{arch}.vocab_size")


def _rope(gguf: GGUF, arch: str, head_dim: int, n_ctx_train: int) -> Rope:
    dim = gguf.integer(f"{arch}.rope.dimension_count", head_dim)
    if not 0 < dim <= head_dim or dim % 2:
        raise GGUFError(
            f"{gguf.path}: {arch}.rope.dimension_count is {dim}, must be even and at most {head_dim}, "
            f"the length of a head; the file is damaged"
        )
    # scale_linear is what files had before there were kinds of scaling.
    factor = gguf.real(f"{arch}.rope.scaling.factor", gguf.real(f"{arch}.rope.scale_linear", 0.0)) or 1.0
    scaling = gguf.text(f"{arch}.rope.scaling.type", "linear")
    if scaling not in ("none", "linear", "yarn"):
        raise _unsupported(gguf, f"RoPE scaling {scaling!r} ({arch}.rope.scaling.type)")
    if factor < 1.0:
        raise GGUFError(f"{gguf.path}: {arch}.rope.scaling.factor is {factor:g}, must be at least 1; get another file")
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        scaling, factor = "none", 1.0
    return Rope(
        dim=dim,
        neox=NEOX[arch],
        freq_base=_above_zero(gguf, f"{arch}.rope.freq_base", 10000.0),
        scaling=cast(Scaling, scaling),
        factor=factor,
        n_ctx_orig=_positive(gguf, f"{arch}.rope.scaling.original_context_length", n_ctx_train),
        attn_factor=_above_zero(gguf, f"{arch}.rope.scaling.attn_factor", 1.0),
        beta_fast=_above_zero(gguf, f"{arch}.rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=_above_zero(gguf, f"{arch}.rope.scaling.yarn_beta_slow", 1.0),
    )


# --- tensors ------------------------------------------------------------------------------------------------

# Shape of each tensor by names of sizes, in ggml order: length of a row first.
SHAPES = {
    "token_embd.weight": ("embd", "vocab"),
    "output_norm.weight": ("embd",),
    "output.weight": ("embd", "vocab"),
    "rope_freqs.weight": ("freqs",),
    "attn_norm.weight": ("embd",),
    "attn_q.weight": ("embd", "q"),
    "attn_q.bias": ("q",),
    "attn_k.weight": ("embd", "kv"),
    "attn_k.bias": ("kv",),
    "attn_v.weight": ("embd", "kv"),
    "attn_v.bias": ("kv",),
    "attn_q_norm.weight": ("head",),
    "attn_k_norm.weight": ("head",),
    "attn_output.weight": ("q", "embd"),
    "attn_output.bias": ("embd",),
    "ffn_norm.weight": ("embd",),
    "ffn_gate.weight": ("embd", "ff"),
    "ffn_up.weight": ("embd", "ff"),
    "ffn_down.weight": ("ff", "embd"),
}


def _sizes(config: ModelConfig) -> dict[str, tuple[int, str]]:
    """What each name in SHAPES stands for, and where it comes from."""
    heads, kv_heads, head_dim = config.n_heads, config.n_kv_heads, config.head_dim
    return {
        "embd": (config.n_embd, f"embedding_length {config.n_embd}"),
        "ff": (config.n_ff, f"feed_forward_length {config.n_ff}"),
        "vocab": (config.n_vocab, f"{config.n_vocab} tokens"),
        "head": (head_dim, f"attention.key_length {head_dim}"),
        "q": (heads * head_dim, f"attention.head_count {heads} of length {head_dim}"),
        "kv": (kv_heads * head_dim, f"attention.head_count_kv {kv_heads} of length {head_dim}"),
        "freqs": (config.rope.dim // 2, f"rope.dimension_count {config.rope.dim}"),
    }


def _names(config: ModelConfig) -> Iterator[str]:
    yield from other_tensors(config)
    for layer in range(config.n_layers):
        yield from layer_tensors(config, layer)


def _check_tensors(gguf: GGUF, config: ModelConfig) -> None:
    sizes = _sizes(config)
    names = dict.fromkeys(_names(config))
    for name in names:
        tensor = gguf.tensors.get(name)
        if tensor is None:
            raise _missing(gguf, name, f"{config.architecture} needs it")
        shape = SHAPES[name.split(".", 2)[2] if name.startswith("blk.") else name]
        if tensor.shape != tuple(sizes[size][0] for size in shape):
            wanted = ", ".join(sizes[size][1] for size in shape)
            raise GGUFError(
                f"{gguf.path}: tensor {name} has shape {tensor.shape}, but the metadata says {wanted}; "
                f"the file is damaged"
            )
        _check_type(gguf, tensor)
    # A tensor left out of the graph would change the text without a word.
    unused = next((name for name in gguf.tensors if name not in names and name != IMAGE_CHECKSUMS), None)
    if unused:
        raise _unsupported(gguf, f"tensor {unused} in architecture {config.architecture}")


def _check_type(gguf: GGUF, tensor: TensorInfo) -> None:
    allowed = MATRIX_TYPES if len(tensor.shape) == 2 else {F32}
    if tensor.type not in allowed:
        raise UnsupportedModel(
            f"{gguf.path}: not supported: tensor {tensor.name} of type {TYPES[tensor.type].name}; "
            f"get a file that has it as {', '.join(TYPES[type_id].name for type_id in sorted(allowed))}"
        )


def _missing(gguf: GGUF, name: str, why: str) -> GGUFError:
    return GGUFError(f"{gguf.path}: tensor {name} is missing ({why}); get a complete file of this model")
