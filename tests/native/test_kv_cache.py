"""Keys and values that are kept, dropped and refused, and the memory they lie in."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lever.arch import ModelConfig
from lever.errors import ContextOverflow
from lever.ggml import load
from lever.gguf import read
from lever.kv_cache import SLOT_MULTIPLE, KVCache, kv_bytes
from tests import tiny
from tests.models import TOKENS, logits_of, open_tiny, same_bits, tiny_logits


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_model(tmp_path_factory.mktemp("kv") / "tiny.gguf", n_ff=256)


@pytest.fixture(scope="module")
def config(path: Path) -> ModelConfig:
    return ModelConfig.from_gguf(read(path))


def memory_of(tensor: int) -> tuple[int, int]:
    """Address and bytes, as ggml itself sees them; lever has no need of these calls."""
    library, pointer = tiny.ggml(), ctypes.c_void_p
    library.ggml_get_data.restype, library.ggml_get_data.argtypes = pointer, [pointer]
    library.ggml_nbytes.restype, library.ggml_nbytes.argtypes = ctypes.c_size_t, [pointer]
    return library.ggml_get_data(tensor), library.ggml_nbytes(tensor)


@pytest.fixture
def cache(config: ModelConfig) -> Iterator[KVCache]:
    cache = KVCache(load(), config, n_ctx=300)
    yield cache
    cache.close()


@pytest.mark.parametrize(("n_ctx", "n_slots"), [(1, 256), (256, 256), (257, 512), (300, 512), (4096, 4096)])
def test_slots_are_the_context_rounded_up(config: ModelConfig, n_ctx: int, n_slots: int) -> None:
    cache = KVCache(load(), config, n_ctx)
    assert (cache.n_ctx, cache.n_slots, n_slots % SLOT_MULTIPLE) == (n_ctx, n_slots, 0)
    assert cache.nbytes == kv_bytes(config, n_ctx) == 2 * 2 * 2 * 128 * n_slots  # K and V, F16, layers, elements
    cache.close()


def test_all_of_it_is_zero_at_first_and_each_tensor_has_its_own(cache: KVCache, config: ModelConfig) -> None:
    ends = []
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    for tensor in tensors:
        address, nbytes = memory_of(tensor)
        assert nbytes == 2 * config.n_embd_kv * cache.n_slots
        assert ctypes.string_at(address, nbytes) == bytes(nbytes)
        ends.append((address, address + nbytes))
    assert all(before[1] <= after[0] for before, after in pairwise(ends))
    assert ends[-1][1] - ends[0][0] <= cache.nbytes


def test_K4_what_fills_the_context_exactly_fits_and_one_row_more_does_not(cache: KVCache) -> None:
    cache.require(300)
    with pytest.raises(ContextOverflow, match=r"301 tokens do not fit in a context of 300: .* -c"):
        cache.require(301)
    cache.length = 299
    cache.require(1)
    with pytest.raises(ContextOverflow, match="302 tokens do not fit in a context of 300"):
        cache.require(3)


def test_truncating_keeps_the_first_rows_and_nothing_else_is_possible(cache: KVCache) -> None:
    cache.length = 50
    cache.truncate(50)
    cache.truncate(20)
    assert cache.length == 20
    for length in (21, -1):
        with pytest.raises(AssertionError):
            cache.truncate(length)
    cache.truncate(0)
    assert cache.length == 0


def test_what_is_cut_off_becomes_zeros_in_every_layer_and_what_is_kept_stays(cache: KVCache) -> None:
    """Not finite values of a failed or truncated prompt would poison the sums of later ones."""
    cache.require(50)
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            address, nbytes = memory_of(tensor)
            ctypes.memset(address, 0x7C, nbytes)
    cache.length = 30
    cache.truncate(20)
    for layer in cache.layers:
        keys = np.frombuffer(ctypes.string_at(*memory_of(layer.keys)), np.uint16)
        values = np.frombuffer(ctypes.string_at(*memory_of(layer.values)), np.uint16)
        for by_slot in (keys.reshape(cache.n_slots, -1), values.reshape(-1, cache.n_slots).T):
            assert (by_slot[:20] == 0x7C7C).all()
            assert not by_slot[20:50].any()


def numbered(cache: KVCache) -> None:
    """Slot s of a layer holds s everywhere; row r of a tree 1000 + r."""
    cache._keys[:] = np.arange(cache.n_slots)[:, None]
    cache._values[:] = np.arange(cache.n_slots)
    cache._node_keys[:] = cache._node_values[:] = 1000 + np.arange(cache.n_nodes)[:, None]


def held_by_layer(cache: KVCache, n: int) -> Iterator[list[float]]:
    """What the first n slots of each layer hold: keys and values, in every element, as ggml finds them."""
    for layer in cache.layers:
        keys = np.frombuffer(ctypes.string_at(*memory_of(layer.keys)), np.float16).reshape(cache.n_slots, -1)
        values = np.frombuffer(ctypes.string_at(*memory_of(layer.values)), np.float16).reshape(-1, cache.n_slots)
        found: list[float] = keys[:n, 0].tolist()
        assert (keys[:n] == np.array(found)[:, None]).all()
        assert (values[:, :n] == np.array(found)).all()
        yield found


def held(cache: KVCache, n: int) -> list[float]:
    """Likewise, where every layer holds the same."""
    first, *others = held_by_layer(cache, n)
    assert all(other == first for other in others)
    return first


def test_rows_of_a_tree_are_kept_in_the_order_of_the_path(config: ModelConfig) -> None:
    with KVCache(load(), config, n_ctx=300, n_nodes=8) as cache:
        numbered(cache)
        cache.length = 3
        cache.keep([0, 2, 7])
        assert cache.length == 6
        assert held(cache, 8) == [0, 1, 2, 1000, 1002, 1007, 6, 7]
        cache.truncate(4)
        assert held(cache, 6) == [0, 1, 2, 1000, 0, 0]
        cache.length = 299
        with pytest.raises(AssertionError):
            cache.keep([0, 1])


@pytest.mark.parametrize(
    ("slots", "n_text", "expected"),
    [
        ([], 0, [10, 11, 12, 13, 14]),
        ([0, 1], 2, [10, 11, 12, 13, 14]),
        ([3, 1, 0], 1, [13, 11, 10, 13, 14]),  # what is read is what was there before
        ([1, 4, 2], 2, [11, 14, 12, 13, 14]),
    ],
)
def test_rows_behind_the_text_are_gathered_in_any_order(
    cache: KVCache, slots: list[int], n_text: int, expected: list[float]
) -> None:
    cache.require(20)
    numbered(cache)
    cache.length = 10
    cache.gather(slots, n_text)
    assert cache.length == 10 + n_text
    assert held(cache, 15) == [*range(10), *expected]


def test_rows_that_were_moved_into_the_text_are_told_until_they_are_cut_off(cache: KVCache) -> None:
    cache.require(20)
    cache.gather([0, 1, 5, 4], 2)  # what moves behind the text is not text
    assert cache.in_order
    cache.gather([0, 2, 3], 3)
    assert (cache.length, cache.in_order) == (5, False)
    cache.gather([0, 1, 3], 3)
    cache.truncate(6)
    assert not cache.in_order
    cache.truncate(4)
    assert not cache.in_order
    cache.truncate(3)
    assert cache.in_order


def test_rows_of_a_tree_that_go_on_move_to_the_front_of_the_layers_that_have_them_all(config: ModelConfig) -> None:
    with KVCache(load(), config, n_ctx=300, n_nodes=8) as cache:
        numbered(cache)
        cache.length = 3
        cache.compact([0, 2, 3, 7], 1)
        assert cache.length == 3
        cache.keep([0, 1, 3])
        assert list(held_by_layer(cache, 7)) == [
            [0, 1, 2, 1000, 1002, 1007, 6],
            [0, 1, 2, 1000, 1001, 1003, 6],  # its rows are written when they are few
        ]


def test_masked_rows_that_go_on_move_to_the_front_behind_the_text(cache: KVCache) -> None:
    cache.require(18)
    numbered(cache)
    cache.length = 10
    cache.compact([0, 2, 3, 7], 1)
    assert cache.length == 10
    assert list(held_by_layer(cache, 15)) == [[*range(10), 10, 12, 13, 17, 14], [*range(15)]]
    cache.gather([0, 1], 2)
    cache.truncate(cache.length)
    assert cache.in_order  # they lie where they lay in the layers above
    assert list(held_by_layer(cache, 18)) == [[*range(10), 10, 12, *[0] * 6], [*range(12), *[0] * 6]]


@pytest.mark.parametrize("n_nodes", [8, 0], ids=["exact", "masked"])
def test_where_all_rows_go_on_nothing_moves(config: ModelConfig, n_nodes: int) -> None:
    with KVCache(load(), config, n_ctx=300, n_nodes=n_nodes) as cache:
        cache.require(18)
        numbered(cache)
        cache.length = 10
        cache.compact(range(8), 2)
        assert held(cache, 20) == [*range(20)]
        if n_nodes:
            cache.keep(range(8))
            assert held(cache, 20) == [*range(10), *range(1000, 1008), 18, 19]


def test_closing_twice_is_safe(config: ModelConfig) -> None:
    cache = KVCache(load(), config, 256)
    cache.close()
    cache.close()


# --- in a model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_ctx", [32, 256, 290])
def test_K4_a_prompt_that_fills_the_context_exactly_is_computed(path: Path, n_ctx: int) -> None:
    expected = tiny_logits(path, TOKENS[:n_ctx])
    with open_tiny(path, n_ctx=n_ctx) as loaded:
        assert same_bits(logits_of(loaded, TOKENS[:n_ctx]), expected)
        assert loaded.model.kv.length == n_ctx


def test_K4_an_overflow_is_refused_before_anything_is_computed(path: Path) -> None:
    with open_tiny(path, n_ctx=100, n_batch=64) as loaded:
        head = logits_of(loaded, TOKENS[:60])
        with pytest.raises(ContextOverflow, match="101 tokens do not fit in a context of 100"):
            loaded.model.forward(TOKENS[60:101])
        assert loaded.model.kv.length == 60
        tail = logits_of(loaded, TOKENS[60:100])
        with pytest.raises(ContextOverflow):
            loaded.model.forward(TOKENS[:1])
        assert same_bits(np.concatenate([head, tail]), tiny_logits(path, TOKENS[:100]))


def test_the_last_slot_is_used_after_a_rollback_too(path: Path) -> None:
    with open_tiny(path, n_ctx=256) as loaded:
        logits_of(loaded, TOKENS[:256])
        loaded.model.kv.truncate(255)
        found = logits_of(loaded, TOKENS[255:256])
    assert same_bits(found, tiny_logits(path, TOKENS[:256])[-1:])
