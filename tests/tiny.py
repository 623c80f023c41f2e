"""TINY: small seeded GGUF files, written byte by byte with struct so that malformed ones can be made too.

`tiny_fields` gives the content in memory, to be edited by a test and written; `tiny_model` writes it at once.
Quantises with ggml itself. Knows nothing of lever.
"""

from __future__ import annotations

import ctypes
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import libggml  # type: ignore[import-untyped]  # the package has no types
import numpy as np
from numpy.typing import NDArray

# --- the bytes of a GGUF ------------------------------------------------------------------------------------

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)  # enum gguf_type
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?"}
CODES |= {U64: "Q", I64: "q", F64: "d"}


@dataclass(frozen=True)
class Typed:
    """A metadata value with its GGUF type; `kind` is the element type if the value is a list."""

    kind: int
    value: object


@dataclass(frozen=True)
class Raw:
    """The bytes of a metadata value, its type included, as they shall stand in the file."""

    bytes: bytes


@dataclass
class Tensor:
    name: str
    shape: tuple[int, ...]  # ggml order: length of a row first
    type: int
    data: bytes
    offset: int | None = None  # from the start of the data; None: where the one before ends, aligned


def encode_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def encode_value(value: object) -> bytes:
    """The type and bytes of a metadata value; the type of a plain Python value is the usual one."""
    if isinstance(value, Raw):
        return value.bytes
    if not isinstance(value, Typed):
        value = Typed(_usual_kind(value), value)
    if isinstance(value.value, list):
        elements = b"".join(_encode_scalar(value.kind, element) for element in value.value)
        return struct.pack("<IIQ", ARRAY, value.kind, len(value.value)) + elements
    return struct.pack("<I", value.kind) + _encode_scalar(value.kind, value.value)


def _usual_kind(value: object) -> int:
    if isinstance(value, list):
        kind = _usual_kind(value[0])
        return I32 if kind == U32 else kind
    kinds: dict[type, int] = {bool: BOOL, int: U32, float: F32, str: STRING, bytes: STRING}
    return kinds[type(value)]


def _encode_scalar(kind: int, value: object) -> bytes:
    if isinstance(value, str | bytes):
        return encode_string(value)
    return struct.pack("<" + CODES[kind], value)


@dataclass
class Fields:
    """All that stands in one GGUF file, in its order. Any of it may be made wrong before it is written."""

    metadata: list[tuple[str, object]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    n_tensors: int | None = None  # None: as many as there are
    n_keys: int | None = None

    def set(self, key: str, value: object) -> None:
        """Give `key` a value, where it stands or at the end; None removes it."""
        pairs = [(k, value if k == key else v) for k, v in self.metadata]
        if all(k != key for k, _ in pairs):
            pairs.append((key, value))
        self.metadata = [(k, v) for k, v in pairs if v is not None]

    def get(self, key: str) -> object:
        return dict(self.metadata)[key]

    def tensor(self, name: str) -> Tensor:
        return next(tensor for tensor in self.tensors if tensor.name == name)

    def header(self) -> bytes:
        """The file up to the padding before the data."""
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.metadata) if self.n_keys is None else self.n_keys
        parts = [self.magic, struct.pack("<IQQ", self.version, n_tensors, n_keys)]
        parts += [encode_string(key) + encode_value(value) for key, value in self.metadata]
        for tensor, offset in zip(self.tensors, self._offsets(), strict=True):
            dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
            parts.append(encode_string(tensor.name) + dims + struct.pack("<IQ", tensor.type, offset))
        return b"".join(parts)

    def _offsets(self) -> list[int]:
        offsets, end = [], 0
        for tensor in self.tensors:
            offsets.append(end if tensor.offset is None else tensor.offset)
            end = align(end + len(tensor.data), self.alignment)
        return offsets

    def encode(self, *, align_tail: bool = True) -> bytes:
        header = self.header()
        data = [tensor.data.ljust(align(len(tensor.data), self.alignment), b"\0") for tensor in self.tensors]
        if data and not align_tail:
            data[-1] = self.tensors[-1].data
        return b"".join([header.ljust(align(len(header), self.alignment), b"\0"), *data])

    def write(self, path: Path, *, align_tail: bool = True) -> Path:
        path.write_bytes(self.encode(align_tail=align_tail))
        return path


def align(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def write_splits(fields: Fields, path: Path, count: int) -> Path:
    """Write as `count` parts named after `path`; all metadata stands in the first, whose path is returned."""
    stem = path.name.removesuffix(".gguf")
    per_part = -(-len(fields.tensors) // count)
    paths = []
    for number in range(count):
        split: list[tuple[str, object]] = [
            ("split.no", Typed(U16, number)),
            ("split.count", Typed(U16, count)),
            ("split.tensors.count", Typed(I32, len(fields.tensors))),
        ]
        part = Fields(
            metadata=(fields.metadata if number == 0 else []) + split,
            tensors=fields.tensors[number * per_part : (number + 1) * per_part],
            version=fields.version,
            alignment=fields.alignment if number == 0 else 32,
        )
        paths.append(part.write(path.with_name(f"{stem}-{number + 1:05d}-of-{count:05d}.gguf")))
    return paths[0]


# --- numbers to blocks --------------------------------------------------------------------------------------

# Ids of enum ggml_type, of those types that a weight matrix may have.
TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11}
TYPE_IDS |= {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19}
TYPE_IDS |= {"IQ4_NL": 20, "IQ3_S": 21, "IQ2_S": 22, "IQ4_XS": 23, "IQ1_M": 29, "BF16": 30, "TQ1_0": 34}
TYPE_IDS |= {"TQ2_0": 35, "MXFP4": 39, "NVFP4": 40, "Q1_0": 41, "Q2_0": 42}


LIBRARIES = Path(libggml.__file__).parent / "lib"


@cache
def ggml() -> ctypes.CDLL:
    """ggml's base library with the few calls that fixtures need."""
    library = ctypes.CDLL(str(LIBRARIES / "libggml-base.so"))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    library.ggml_row_size.restype = ctypes.c_size_t
    library.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.ggml_type_size.restype = ctypes.c_size_t
    library.ggml_blck_size.restype = ctypes.c_int64
    library.ggml_type_name.restype = ctypes.c_char_p
    return library


def quantise(values: NDArray[np.float32], type_name: str) -> bytes:
    """The rows of `values` as blocks of a ggml type."""
    if type_name == "F32":
        return values.astype("<f4").tobytes()
    if type_name == "F16":
        return values.astype("<f2").tobytes()
    if type_name == "BF16":
        bits = values.astype("<f4").view("<u4").astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()  # to nearest, ties to even
    values = np.ascontiguousarray(np.atleast_2d(values), dtype=np.float32)
    rows, row = values.shape
    type_id = TYPE_IDS[type_name]
    blocks = ctypes.create_string_buffer(rows * ggml().ggml_row_size(type_id, row))
    # Some IQ types must have an importance matrix; all of them take one.
    importance = np.ones(row, np.float32)
    pointer = importance.ctypes.data if type_name.startswith("IQ") else None
    ggml().ggml_quantize_chunk(type_id, values.ctypes.data, blocks, 0, rows, row, pointer)
    return blocks.raw


def dequantise(blocks: bytes, type_name: str) -> NDArray[np.float32]:
    """The numbers in blocks of a ggml type, by ggml's own routine where they are quantised."""
    if type_name in ("F32", "F16"):
        return np.frombuffer(blocks, {"F32": "<f4", "F16": "<f2"}[type_name]).astype(np.float32)
    if type_name == "BF16":
        return (np.frombuffer(blocks, "<u2").astype("<u4") << 16).view("<f4").astype(np.float32)
    n_blocks = len(blocks) // ggml().ggml_type_size(TYPE_IDS[type_name])
    values = np.empty(n_blocks * ggml().ggml_blck_size(TYPE_IDS[type_name]), np.float32)
    family, _, variant = type_name.partition("_")
    name = f"{family.lower()}_{variant if variant == 'K' else variant.lower()}".rstrip("_")
    routine = getattr(ggml(), f"dequantize_row_{name}")
    routine.argtypes, routine.restype = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64], None
    routine(blocks, values.ctypes.data, values.size)
    return values


# ggml needs 2 to 20 seconds to set up its tables before it quantises the first row to one of these. Any bits
# are a sound block of theirs, so weights of these types are random bits under a scale.
SLOW_TO_QUANTISE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S")


def random_blocks(rng: np.random.Generator, n_elements: int, type_name: str, std: float) -> bytes:
    """Blocks of one of the types above, whose numbers have about this standard deviation."""
    nbytes = ggml().ggml_type_size(TYPE_IDS[type_name])
    blocks = rng.integers(0, 256, (n_elements // 256, nbytes), np.uint8)
    _set_scale(blocks, type_name, 1.0)
    _set_scale(blocks, type_name, std / float(dequantise(blocks.tobytes(), type_name).std()))
    return blocks.tobytes()


def _set_scale(blocks: NDArray[np.uint8], type_name: str, scale: float) -> None:
    raw = np.array([scale], "<f2")
    if type_name != "IQ1_M":
        blocks[:, :2] = raw.view(np.uint8)
        return
    # The scale's four nibbles are the top nibbles of the last four 16-bit words.
    words = blocks[:, -8:].copy().view("<u2")
    nibbles = raw.view("<u2") >> np.array([0, 4, 8, 12], "<u2") & 15
    blocks[:, -8:] = (words & 0x0FFF | nibbles << 12).view(np.uint8)


@lru_cache(maxsize=512)
def random_weights(name: str, shape: tuple[int, ...], type_name: str, seed: int) -> bytes:
    """Random weights that depend on nothing but these arguments, of a size that keeps activations near 1."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if type_name in SLOW_TO_QUANTISE:
        return random_blocks(rng, math.prod(shape), type_name, 1 / math.sqrt(shape[0]))
    values = rng.standard_normal(shape[::-1])
    if name == "rope_freqs.weight":
        values = np.linspace(1.0, 8.0, shape[0])  # as Llama 3.1: fast pairs stay, slow ones turn 8 times slower
    elif name.endswith("norm.weight"):
        values = 1.0 + 0.1 * values
    elif name.endswith("bias"):
        values *= 0.1
    else:
        values /= np.sqrt(shape[0])
    return quantise(values.astype(np.float32), type_name)


# --- vocabularies -------------------------------------------------------------------------------------------

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # enum llama_token_type

# Tokens of more than one letter, each merged from left to right.
WORDS = """
Ġthe Ġthis Ġand Ġa Ġin Ġto Ġof Ġis Ġnot Ġhello Ġworld Ġ= he hello her ing er re on at en or es ed an all
def self return user assistant system 's () == 00 12 ĠĠĠĠ ĊĊ ãģĤ ðŁĺ Ã© ĠÐ
"""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_letters() -> list[str]:
    """GPT-2's spelling of each byte as one printable letter."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def bpe_merges() -> list[str]:
    merges: dict[str, None] = {}  # a set in order
    for word in WORDS.split():
        merges |= dict.fromkeys(f"{word[:end]} {word[end]}" for end in range(1, len(word)))
    return list(merges)


def bpe_vocabulary(n_vocab: int | None) -> dict[str, object]:
    """Metadata of a byte-level BPE tokenizer with ChatML, padded with unused tokens up to `n_vocab`."""
    merges = bpe_merges()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = byte_letters() + [merge.replace(" ", "") for merge in merges] + control
    types = [NORMAL] * (len(tokens) - len(control)) + [CONTROL] * len(control)
    first = tokens.index(control[0])
    _pad(tokens, types, n_vocab)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + 2,
        "tokenizer.ggml.padding_token_id": first,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }


SPM_WORDS = "▁t he ▁the in re on er at ▁a ou ▁s ▁w is it en or es ▁c nd ▁o ing ▁of ▁to ▁and ll ell hell lo ▁h ▁hell"


def spm_vocabulary(n_vocab: int | None) -> dict[str, object]:
    """Metadata of a SentencePiece tokenizer with byte fallback, padded with unused tokens up to `n_vocab`."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?'\"()-+=é漢字"]
    pieces = SPM_WORDS.split() + letters
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces)
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    _pad(tokens, types, n_vocab)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores + [-1e4] * (len(tokens) - len(scores)),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.chat_template": CHATML,
    }


def _pad(tokens: list[str], types: list[int], n_vocab: int | None) -> None:
    wanted = align(len(tokens), 64) if n_vocab is None else n_vocab
    assert wanted >= len(tokens), f"the vocabulary has {len(tokens)} tokens"
    types += [UNUSED] * (wanted - len(tokens))
    tokens += [f"[PAD{number}]" for number in range(len(tokens), wanted)]


# --- models -------------------------------------------------------------------------------------------------

Arch = Literal["llama", "qwen2", "qwen3"]


def tiny_fields(
    *,
    arch: Arch = "llama",
    n_layers: int = 2,
    n_embd: int = 256,
    n_ff: int = 512,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int | None = None,
    n_vocab: int | None = None,
    type: str | Mapping[str, str] = "Q4_K",
    rope_freqs: bool = False,
    tied: bool = False,
    bias: bool | None = None,
    seed: int = 0,
    alignment: int = 32,
    context_length: int = 512,
    scaling: Mapping[str, object] | None = None,
    metadata: Mapping[str, object] | None = None,
    tokenizer: Literal["bpe", "spm"] | bool = True,
) -> Fields:
    """A small random model. The same seed gives the same weights whatever else differs.

    type: of all matrices, or by tensor name, by kind ("attn_q", "token_embd") and "*" for the rest.
    n_vocab: None rounds the vocabulary up to 64. bias: None is what the architecture usually has; True gives
    attn_output one as well. scaling: keys below `rope.scaling.`. metadata: whole keys; None removes one.
    tokenizer: True is "bpe", False leaves the vocabulary out.
    """
    dim = n_embd // n_heads if head_dim is None else head_dim
    vocabulary: dict[str, object] = {}
    if tokenizer:
        vocabulary = spm_vocabulary(n_vocab) if tokenizer == "spm" else bpe_vocabulary(n_vocab)
    tokens = vocabulary.get("tokenizer.ggml.tokens")
    n_rows = len(tokens) if isinstance(tokens, list) else (n_vocab or 384)
    keys: dict[str, object] = {
        "general.architecture": arch,
        "general.name": f"tiny {arch}",
        f"{arch}.block_count": n_layers,
        f"{arch}.context_length": context_length,
        f"{arch}.embedding_length": n_embd,
        f"{arch}.feed_forward_length": n_ff,
        f"{arch}.attention.head_count": n_heads,
        f"{arch}.attention.head_count_kv": n_kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.vocab_size": n_rows,
    }
    if head_dim is not None or arch == "qwen3":
        keys |= {f"{arch}.attention.key_length": dim, f"{arch}.attention.value_length": dim}
    if alignment != 32:
        keys["general.alignment"] = alignment
    keys |= {f"{arch}.rope.scaling.{key}": value for key, value in (scaling or {}).items()}
    fields = Fields(metadata=[*keys.items(), *vocabulary.items()], alignment=alignment)
    for key, value in (metadata or {}).items():
        fields.set(key, value)

    biases = ("qkv" if arch == "qwen2" else "") if bias is None else ("qkvo" if bias else "")
    shapes = _shapes(n_layers, n_embd, n_ff, n_heads * dim, n_kv_heads * dim, n_rows, biases)
    if arch == "qwen3":
        shapes |= {f"blk.{layer}.attn_{x}_norm.weight": (dim,) for layer in range(n_layers) for x in "qk"}
    if tied:
        del shapes["output.weight"]
    if rope_freqs:
        shapes["rope_freqs.weight"] = (dim // 2,)
    for name, shape in shapes.items():
        type_name = _type_of(name, len(shape), type)
        fields.tensors.append(Tensor(name, shape, TYPE_IDS[type_name], random_weights(name, shape, type_name, seed)))
    return fields


def _shapes(
    n_layers: int, n_embd: int, n_ff: int, n_q: int, n_kv: int, n_vocab: int, biases: str
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_embd, n_vocab)}
    layer = {
        "attn_norm.weight": (n_embd,),
        "attn_q.weight": (n_embd, n_q),
        "attn_k.weight": (n_embd, n_kv),
        "attn_v.weight": (n_embd, n_kv),
        "attn_output.weight": (n_q, n_embd),
        "ffn_norm.weight": (n_embd,),
        "ffn_gate.weight": (n_embd, n_ff),
        "ffn_up.weight": (n_embd, n_ff),
        "ffn_down.weight": (n_ff, n_embd),
    }
    names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
    layer |= {f"{names[letter]}.bias": layer[f"{names[letter]}.weight"][1:] for letter in biases}
    for number in range(n_layers):
        shapes |= {f"blk.{number}.{part}": shape for part, shape in layer.items()}
    return shapes | {"output_norm.weight": (n_embd,), "output.weight": (n_embd, n_vocab)}


def _type_of(name: str, n_dims: int, types: str | Mapping[str, str]) -> str:
    if isinstance(types, str):
        types = {"*": types}
    if name in types:
        return types[name]
    if n_dims == 1:
        return "F32"
    kind = name.split(".")[-2]
    return types.get(kind, types["*"])


def tiny_model(path: Path, *, splits: int = 1, align_tail: bool = True, **shape: Any) -> Path:
    """Write `tiny_fields(**shape)`; the path to give to a reader, which is part one if `splits` > 1."""
    fields = tiny_fields(**shape)
    if splits > 1:
        return write_splits(fields, path, splits)
    return fields.write(path, align_tail=align_tail)
