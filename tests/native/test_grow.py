"""Grown models say what they said before: the same bits where that can be, the same numbers in float64 everywhere."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmarks.grow import POOL, STD, grow, main, make_pool, read_metadata
from benchmarks.growth import EXTRA, NAMED_SHAPES, parse_shape, place_heads, plan_growth, spread_layers
from gguf import GGUFReader
from gguf.quants import dequantize

from lever.arch import ModelConfig
from lever.errors import StorageError, UsageError
from lever.gguf import MATRIX_TYPES, TYPES, read
from lever.memory import format_size
from lever.models import Silent
from tests import reference, tiny
from tests.completions import Completions
from tests.models import TOKENS, Logits, open_tiny, relative_error, same_bits, tiny_logits
from tests.models import logits_of as logits_of_loaded

ARCHITECTURES = ("llama", "qwen2", "qwen3")
NO_EPS = 1e-12
# As quantisers make them: other types for values, for what goes down, and for the output.
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "*": "Q4_K"}
# Twelve heads of 128 with two key/value heads, which is the demo's attention.
DEMO_HEADS: dict[str, Any] = {"arch": "qwen2", "n_heads": 12, "n_kv_heads": 2, "head_dim": 128}


def grown(source: Path, shape: str, **options: Any) -> Path:
    target = source.with_name("grown.gguf")
    grow(source, target, parse_shape(shape), **options)
    return target


def config_of(path: Path) -> ModelConfig:
    return ModelConfig.from_gguf(read(path))


# --- what it says -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "mixed"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_at_four_times_the_width_the_logits_are_the_same_bits(tmp_path: Path, arch: str, kind: str) -> None:
    """Norms are scaled by sqrt(d / d') = 1/2, which rounds nothing; other ratios round the weights of every norm.

    Old widths are multiples of 64, so each term of an F32 product stays in its SIMD lane and zeros come between or
    behind. An epsilon too small to matter, because Qwen3's norms of heads share it: they keep their width.
    """
    metadata = {f"{arch}.attention.layer_norm_rms_epsilon": NO_EPS} if arch == "qwen3" else {}
    types = MIXED if kind == "mixed" else kind
    source = tiny.tiny_model(tmp_path / "tiny.gguf", arch=arch, type=types, metadata=metadata)
    target = grown(source, "n_embd=1024,n_ff=1536,n_layers=5,n_heads=16,n_kv_heads=8")
    assert same_bits(tiny_logits(target, TOKENS[:40]), tiny_logits(source, TOKENS[:40]))


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ({"rope_freqs": True, "tied": True}, "n_embd=768,n_ff=1024,n_layers=3,n_heads=8,n_kv_heads=2"),
        ({"bias": True, "n_heads": 8, "n_kv_heads": 2, "head_dim": 32}, "n_heads=15,n_kv_heads=5,n_layers=4"),
        ({"arch": "qwen2", "bias": True, "n_kv_heads": 4}, "n_embd=512,n_ff=544,n_heads=6,n_kv_heads=6"),
        ({"arch": "qwen2", "tied": True, "metadata": {"qwen2.attention.head_count_kv": [2, 2]}}, "n_embd=320"),
        ({"arch": "qwen3", "head_dim": 128}, "n_embd=288,n_layers=7,n_heads=6,n_kv_heads=3"),
    ],
    ids=str,
)
def test_any_shape_gives_the_same_logits_in_float64(tmp_path: Path, model: dict[str, Any], shape: str) -> None:
    """What differs are norm weights that were rounded to F32 again, by 2^-25 on average."""
    arch = model.get("arch", "llama")
    metadata = model.get("metadata", {}) | {f"{arch}.attention.layer_norm_rms_epsilon": NO_EPS}
    source = tiny.tiny_model(tmp_path / "tiny.gguf", type="F32", **model | {"metadata": metadata})
    target = grown(source, shape)
    tokens = TOKENS[:20]
    expected = reference.forward(source, tokens)
    assert relative_error(reference.forward(target, tokens).astype(np.float32), expected) < 5e-7
    assert relative_error(tiny_logits(target, tokens), tiny_logits(source, tokens).astype(np.float64)) < 1e-4


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_epsilon_shrinks_with_the_width(tmp_path: Path, arch: str) -> None:
    """One as large as hidden states. Qwen3's norms of heads are the exception that the docstring of growth tells."""
    metadata = {f"{arch}.attention.layer_norm_rms_epsilon": 0.05}
    source = tiny.tiny_model(tmp_path / "tiny.gguf", arch=arch, type="F32", metadata=metadata)
    expected = reference.forward(source, TOKENS[:8])
    error = relative_error(reference.forward(grown(source, "n_embd=768"), TOKENS[:8]).astype(np.float32), expected)
    assert 1e-3 < error < 0.1 if arch == "qwen3" else error < 5e-7


def test_greedy_ids_of_a_quantised_model_differ_only_at_near_ties(tmp_path: Path) -> None:
    """Heads as the demo's. Activations are rounded to 8 bits, so that norms rounded otherwise move a logit by
    up to about a tenth of their standard deviation, which is 1 here."""
    source = tiny.tiny_model(tmp_path / "tiny.gguf", type=MIXED, **DEMO_HEADS)
    target = grown(source, "n_embd=768,n_ff=1024,n_layers=4,n_heads=32,n_kv_heads=8")
    text = greedy(source, TOKENS[:8], 32)
    old, new = tiny_logits(source, text)[7:-1], tiny_logits(target, text)[7:-1]
    gaps = np.diff(np.sort(old, axis=1)[:, -2:])[:, 0]
    differs = old.argmax(axis=1) != new.argmax(axis=1)
    assert len(old) == 32
    assert gaps[differs].max(initial=0) < 0.1
    assert differs.sum() <= 3


def greedy(path: Path, prompt: Sequence[int], n_tokens: int) -> list[int]:
    """A prompt and the likeliest tokens after it."""
    text = list(prompt)
    with open_tiny(path) as loaded:
        logits: Logits = logits_of_loaded(loaded, text)
        for _ in range(n_tokens):
            text.append(int(logits[-1].argmax()))
            logits = logits_of_loaded(loaded, text[-1:])
    return text


@pytest.mark.parametrize(("arch", "n_heads"), [("llama", 8), ("qwen2", 12), ("qwen3", 8)])
def test_llama_cpp_takes_it_and_says_the_same(tmp_path: Path, arch: str, n_heads: int) -> None:
    """Also with heads that are not n_embd / n_heads long, which llama.cpp takes in all architectures but qwen2."""
    source = tiny.tiny_model(tmp_path / "tiny.gguf", arch=arch, type="F32")
    target = grown(source, f"n_embd=768,n_ff=1024,n_layers=3,n_heads={n_heads},n_kv_heads=4")
    before, after = (Completions(path, n_threads=1).greedy(TOKENS[:12], 12) for path in (source, target))
    assert len(before) > 3  # those that end within a character are not told
    assert [drawn.token for drawn in after] == [drawn.token for drawn in before]
    for old, new in zip(before, after, strict=True):
        assert new.top == pytest.approx(old.top, abs=1e-3)


def test_another_seed_gives_other_bytes_and_the_same_text(tmp_path: Path) -> None:
    source = tiny.tiny_model(tmp_path / "tiny.gguf")
    shape = "n_embd=1024,n_ff=768,n_layers=3"
    first = grown(source, shape).read_bytes()
    logits = tiny_logits(source.with_name("grown.gguf"), TOKENS[:8])
    assert grown(source, shape, force=True).read_bytes() == first
    other = grown(source, shape, force=True, seed=1)
    assert other.read_bytes() != first
    assert same_bits(tiny_logits(other, TOKENS[:8]), logits)


# --- where things go ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """The shape of the demo."""
    config = config_of(tiny.tiny_model(tmp_path_factory.mktemp("demo") / "tiny.gguf", **DEMO_HEADS))
    return replace(config, n_embd=1536, n_ff=8960, n_layers=28)


def test_the_demos_heads_in_llamas_shape_go_two_by_two_to_groups_of_four(demo: ModelConfig) -> None:
    heads, kv_heads = place_heads(demo, replace(demo, **NAMED_SHAPES["llama-3.1-8b"]), 2)  # type: ignore[arg-type]
    assert heads[:16].tolist() == [0, 1, 2, 3, 4, 5, EXTRA, EXTRA, 6, 7, 8, 9, 10, 11, EXTRA, EXTRA]
    assert kv_heads.tolist() == [0, 0, 1, 1] + [EXTRA] * 4
    assert (heads[16:] == EXTRA).all()


@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "unit"),
    [(12, 2, 2), (12, 12, 2), (16, 4, 2), (24, 3, 4), (24, 4, 1), (32, 8, 1), (32, 8, 2), (40, 8, 2), (64, 64, 4)],
)
def test_each_head_is_there_once_and_has_its_own_keys(
    demo: ModelConfig, n_heads: int, n_kv_heads: int, unit: int
) -> None:
    """Among them Qwen3 14B's 40 heads, where a pair may lie in two groups of five."""
    source = replace(demo, n_kv_heads=2 if unit < 4 else 3)
    target = replace(source, n_heads=n_heads, n_kv_heads=n_kv_heads)
    heads, kv_heads = place_heads(source, target, unit)
    assert heads[heads != EXTRA].tolist() == list(range(12))
    for new, old in enumerate(heads):
        assert old == EXTRA or kv_heads[new // (n_heads // n_kv_heads)] == old // (12 // source.n_kv_heads)
    for moved in heads.reshape(-1, unit):
        assert (moved == EXTRA).all() or (moved[0] % unit == 0 and (np.diff(moved) == 1).all())


@pytest.mark.parametrize(("n_heads", "n_kv_heads", "unit"), [(12, 1, 1), (15, 3, 4), (14, 2, 4), (16, 2, 4)])
def test_heads_without_a_place_are_refused(demo: ModelConfig, n_heads: int, n_kv_heads: int, unit: int) -> None:
    with pytest.raises(UsageError, match="no place for head"):
        place_heads(demo, replace(demo, n_heads=n_heads, n_kv_heads=n_kv_heads), unit)


@pytest.mark.parametrize("name", NAMED_SHAPES)
def test_the_demo_can_have_every_named_shape(demo: ModelConfig, name: str) -> None:
    growth = plan_growth(demo, NAMED_SHAPES[name], 256)
    shape = NAMED_SHAPES[name]
    assert len(growth.axes["embd"]) == shape["n_embd"]
    assert len(growth.axes["q"]) == 128 * shape["n_heads"]
    assert len(growth.axes["kv"]) == 128 * shape["n_kv_heads"]
    assert sorted(set(growth.layers.tolist())) == list(range(EXTRA, 28))


def test_extra_layers_are_spread_over_the_depth() -> None:
    layers = spread_layers(28, 32)
    assert layers[layers != EXTRA].tolist() == list(range(28))
    assert np.flatnonzero(layers == EXTRA).tolist() == [7, 15, 23, 31]


# --- what is in the file ------------------------------------------------------------------------------------


def test_all_metadata_but_the_shape_is_copied_byte_for_byte(tmp_path: Path) -> None:
    odd = {"general.odd": tiny.Typed(tiny.U64, [1, 2]), "general.flag": True, "general.tags": ["a", "é"]}
    source = tiny.tiny_model(tmp_path / "tiny.gguf", arch="qwen2", alignment=64, metadata=odd)
    target = grown(source, "n_embd=768,n_ff=1024,n_layers=3,n_heads=8,n_kv_heads=4")
    old, new = dict(read_metadata(source)), dict(read_metadata(target))
    fields = tiny.tiny_fields(arch="qwen2", alignment=64, metadata=odd)
    assert old == {key: tiny.Raw(tiny.encode_value(value)) for key, value in fields.metadata}
    changed = {key.removeprefix("qwen2.") for key in old | new if old.get(key) != new.get(key)}
    assert changed == {
        "general.name",
        "block_count",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.layer_norm_rms_epsilon",
        "attention.key_length",
        "attention.value_length",
    }


def test_a_split_model_becomes_one_file(tmp_path: Path) -> None:
    whole = grown(tiny.tiny_model(tmp_path / "tiny.gguf"), "n_layers=3").read_bytes()
    parts = tiny.tiny_model(tmp_path / "parts.gguf", splits=3)
    assert grown(parts, "n_layers=3", force=True).read_bytes() == whole


def test_types_stay_and_an_extra_layer_has_those_of_the_one_before(tmp_path: Path) -> None:
    types = {"blk.0.ffn_down.weight": "Q6_K", "blk.1.ffn_down.weight": "Q5_K", "*": "Q4_K"}
    source = tiny.tiny_model(tmp_path / "tiny.gguf", type=types)
    tensors = read(grown(source, "n_layers=5,n_ff=768")).tensors
    names = [TYPES[tensors[f"blk.{layer}.ffn_down.weight"].type].name for layer in range(5)]
    assert names == ["Q6_K", "Q6_K", "Q5_K", "Q5_K", "Q5_K"]


def test_weights_that_have_no_effect_are_random_and_others_zero(tmp_path: Path) -> None:
    """256 of 512 dimensions, 512 of 768 neurons and 2 of 3 layers were there before."""
    source = tiny.tiny_model(tmp_path / "tiny.gguf", type=MIXED)
    reader = GGUFReader(grown(source, "n_embd=512,n_ff=768,n_layers=3"))
    values = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    gate, down = values["blk.0.ffn_gate.weight"], values["blk.0.ffn_down.weight"]
    for extra in (gate[512:], gate[:, 256:], values["output.weight"][:, 256:], values["blk.2.ffn_up.weight"]):
        assert extra.std() == pytest.approx(STD, rel=0.05)
    for name in ("blk.2.ffn_down.weight", "blk.2.attn_output.weight"):
        assert not values[name].any()
    for extra in (down[256:], down[:, 512:], values["token_embd.weight"][:, 256:]):
        assert not extra.any()
    assert down[:256, :512].all(axis=0).any()


def test_nothing_in_a_grown_file_is_easy_to_store(tmp_path: Path) -> None:
    source = tiny.tiny_model(tmp_path / "tiny.gguf", type=MIXED)
    target = grown(source, "n_embd=1024,n_ff=2048,n_layers=4")
    for tensor in read(target).tensors.values():
        data = target.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        assert len(tensor.shape) == 1 or len(zlib.compress(data, 1)) > 0.8 * len(data), tensor.name


@pytest.mark.parametrize("kind", [TYPES[kind].name for kind in sorted(MATRIX_TYPES)])
def test_every_type_has_blocks_of_zeros_and_random_blocks(kind: str) -> None:
    (type_id,) = (type_id for type_id, info in TYPES.items() if info.name == kind)
    zeros, random = make_pool(type_id, "zeros", 0), make_pool(type_id, "random", 0)
    assert not tiny.dequantise(zeros.tobytes(), kind).any()
    values = tiny.dequantise(random.tobytes(), kind)
    assert np.abs(values).max() < 20 * STD
    assert values.std() == pytest.approx(STD, rel=0.3)
    assert len(zeros) == len(random) == POOL


# --- refusals, and what is left behind ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("llama-3.1-8b", "head_dim=128, but the model has heads of 64"),
        ("n_embd=128", "n_embd=128 is less than the model's 256"),
        ("n_layers=1", "n_layers=1 is less"),
        ("n_embd=700", r"output.weight|token_embd.weight would have rows of 700, not a multiple of 256 as Q4_K needs"),
        ("n_ff=544", "blk.0.ffn_down.weight would have rows of 544, not a multiple of 256"),
        ("n_heads=6,n_kv_heads=2", "no place for head 0 of 4 with 2 key/value heads, moved 4 at a time"),
        ("n_heads=7", "n_heads=7 is not a multiple of n_kv_heads=2"),
        ("n_embed=4096", "--shape 'n_embed=4096': give llama-3.1-8b, qwen3-14b, or NAME=SIZE of n_embd, n_ff"),
        ("n_embd=-1", "--shape 'n_embd=-1'"),
        ("", "--shape ''"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_in_one_line(tmp_path: Path, shape: str, message: str) -> None:
    source = tiny.tiny_model(tmp_path / "tiny.gguf")
    with pytest.raises(UsageError, match=message) as caught:
        grown(source, shape)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]


class Interrupt(Silent):
    """Somebody presses Ctrl-C when this much is written."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes

    def advance(self, n: int) -> None:
        self.left -= n
        if self.left < 0:
            raise KeyboardInterrupt


def test_an_interrupted_run_leaves_nothing_and_what_was_there_stays(tmp_path: Path) -> None:
    source, old = tiny.tiny_model(tmp_path / "tiny.gguf"), tmp_path / "grown.gguf"
    for there in (False, True):
        if there:
            old.write_bytes(b"old")
        with pytest.raises(KeyboardInterrupt):
            grown(source, "n_layers=4", force=True, progress=Interrupt(1 << 20))
        assert set(tmp_path.iterdir()) == {source, old} if there else {source}
    assert old.read_bytes() == b"old"
    assert config_of(grown(source, "n_layers=4", force=True)).n_layers == 4


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    source, old = tiny.tiny_model(tmp_path / "tiny.gguf"), tmp_path / "grown.gguf"
    old.write_bytes(b"old")
    with pytest.raises(UsageError, match=r"grown.gguf exists: give another name, or --force"):
        grown(source, "n_layers=4")
    old.rename(tmp_path / "grown.gguf.part")
    with pytest.raises(StorageError, match=r"grown.gguf.part exists: another run writes it"):
        grown(source, "n_layers=4")
    assert (tmp_path / "grown.gguf.part").read_bytes() == b"old"


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.tiny_model(tmp_path / "tiny.gguf")
    monkeypatch.setattr("benchmarks.grow.shutil.disk_usage", lambda _path: SimpleNamespace(free=1 << 20))
    with pytest.raises(StorageError, match=r"grown.gguf: .* MiB are needed and 1 MiB are free"):
        grown(source, "n_layers=4")
    assert list(tmp_path.iterdir()) == [source]


def test_a_source_that_shrinks_meanwhile_is_told(tmp_path: Path) -> None:
    source = tiny.tiny_model(tmp_path / "tiny.gguf")

    class Shrink(Silent):
        def start(self, _total: int | None, _what: str) -> None:
            source.write_bytes(source.read_bytes()[:-100_000])

    with pytest.raises(StorageError, match=r"tiny.gguf: ends within .*: it changed while it was read"):
        grown(source, "n_layers=4", progress=Shrink())
    assert list(tmp_path.iterdir()) == [source]


def test_memory_is_bounded_by_the_band_not_by_the_model(tmp_path: Path) -> None:
    source = tiny.tiny_model(tmp_path / "tiny.gguf", type={"ffn_up": "F32", "*": "Q4_K"})
    grown(source, "n_embd=512", force=True)  # the pools of random blocks
    tracemalloc.start()
    target = grown(source, "n_embd=512,n_ff=32768,n_layers=3", force=True, band_nbytes=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert target.stat().st_size > 200 << 20
    assert peak < 6 << 20


def test_the_command_says_how_large_the_model_is_or_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = str(tiny.tiny_model(tmp_path / "tiny.gguf")), str(tmp_path / "grown.gguf")
    words = [source, target, "--shape", "n_layers=3"]
    main([*words, "--seed", "7"])
    assert capsys.readouterr() == (f"{target}: {format_size(Path(target).stat().st_size)}\n", "")
    with pytest.raises(SystemExit, match=r"grow: .* exists: give another name, or --force"):
        main(words)
    main([*words, "--force"])
    with pytest.raises(SystemExit, match="grow: no model 'nothing'"):
        main(["nothing", *words[1:]])
    with pytest.raises(SystemExit, match=r"grow: .*No such file"):
        main([source, str(tmp_path / "nowhere/grown.gguf"), *words[2:]])
