"""A whole pass as one kept graph, bit for bit against the same pass layer by layer, in the memory that was planned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lever.arch import ModelConfig
from lever.errors import ContextOverflow, DoesNotFit, LeverError, UsageError
from lever.ggml import load
from lever.gguf import read
from lever.loader import PYTHON, LoadedModel, ModelSettings, plan
from lever.model import Model
from lever.sizing import compute_nbytes
from tests import tiny
from tests.models import TOKENS, Logits, open_tiny, same_bits

N_LOGITS = 8
SHAPES: dict[str, dict[str, Any]] = {
    "llama, F32": {"type": "F32"},
    "llama, Q8_0, rope_freqs": {"type": "Q8_0", "rope_freqs": True},
    "llama, Q4_K, tied": {"type": "Q4_K", "tied": True},
    "qwen2, Q4_0": {"arch": "qwen2", "type": "Q4_0"},
    "qwen2, Q4_0, repacked": {"arch": "qwen2", "type": "Q4_0"},
    "qwen3, Q8_0": {"arch": "qwen3", "head_dim": 128, "type": "Q8_0"},
    "qwen3, Q4_K, repacked": {"arch": "qwen3", "head_dim": 128, "type": {"ffn_down": "Q6_K", "*": "Q4_K"}},
}


def open_whole(path: Path, name: str = "", **settings: Any) -> Any:
    defaults = {"n_tree": 12, "n_logits": N_LOGITS, "n_batch": 64, "n_steps": 3, "pin_percent": 100}
    layout = "repacked" if "repacked" in name else "auto"
    return open_tiny(path, **defaults | {"layout": layout} | settings)


@pytest.fixture(scope="module", params=SHAPES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    path = tmp_path_factory.mktemp("steps") / "tiny.gguf"
    tiny.tiny_model(path, n_layers=2, n_ff=256, **SHAPES[request.param])
    with open_whole(path, request.param) as found:
        yield found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("steps") / "tiny.gguf"
    return tiny.tiny_model(path, n_layers=2, n_ff=256, type="Q8_0", context_length=2048)


class Nodes:
    """A tree behind a text, grown at random: what a draft asks for, both ways."""

    def __init__(self, model: Model, n_text: int, seed: int = 0) -> None:
        self.model, self.rng = model, np.random.default_rng(seed)
        self.seen: list[list[int]] = []
        self.depths: list[int] = []
        model.kv.truncate(0)
        text = (TOKENS * 4)[:n_text]
        for start in range(0, n_text, model.shape.n_batch):
            model.forward(text[start : start + model.shape.n_batch])

    def more(self, n: int) -> tuple[list[int], int, list[int], np.ndarray[Any, Any]]:
        """The arguments of a step for n nodes, each behind one that is there, or behind the text."""
        first = len(self.seen)
        visible = np.zeros((n, first + n), bool)
        for row in range(n):
            parent = int(self.rng.integers(-1, first))
            self.seen.append([*(self.seen[parent] if parent >= 0 else []), first + row])
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 1)
            visible[row, self.seen[-1]] = True
        return self.rng.integers(0, 300, n).tolist(), first, self.depths[first:], visible


def layer_by_layer(model: Model, *step: Any) -> Logits:
    model.forward_nodes(*step)
    return model.project(range(len(step[0]))).copy()


def keys_and_values(model: Model) -> tuple[Any, Any]:
    return model.kv._keys.copy(), model.kv._values.copy()


# --- the same bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_text", [1, 30, 245])
def test_a_step_has_the_bits_of_the_pass_layer_by_layer(loaded: LoadedModel, n_text: int) -> None:
    """Logits, and keys and values for the steps after it; 245: the tree crosses the border of 256 slots."""
    model = loaded.model
    nodes = Nodes(model, n_text)
    for n in (1, 2, N_LOGITS, 4, 1, 3, 7, 5, 6):
        step = nodes.more(n)
        expected = layer_by_layer(model, *step)
        cache = keys_and_values(model)
        first = model.kv.length + step[1]
        model.kv._keys[:, first : first + n] = 0
        model.kv._values[:, :, first : first + n] = 0
        found = model.step(*step)
        assert found.shape == (n, model.config.n_vocab)
        assert same_bits(found, expected)
        assert all(np.array_equal(a, b) for a, b in zip(keys_and_values(model), cache, strict=True))


def test_steps_and_layered_passes_may_take_turns(loaded: LoadedModel) -> None:
    """They compute in the same memory, one after another."""
    model = loaded.model
    nodes = Nodes(model, 40, seed=1)
    step = nodes.more(2)
    first = model.step(*step).copy()
    for n in (1, 4, 2):
        model.forward(TOKENS[60 : 60 + 33])
        last = model.project([32]).copy()
        model.kv.truncate(40)
        model.step(*nodes_again(step, n))
        model.forward(TOKENS[60 : 60 + 33])
        assert same_bits(model.project([32]), last)
        model.kv.truncate(40)
        assert same_bits(model.step(*step), first)


def nodes_again(step: Any, n: int) -> Any:
    """A step for n nodes that see only themselves and the text."""
    return [step[0][0]] * n, 0, [1] * n, np.eye(n, dtype=bool)


@pytest.mark.parametrize("n_steps", [1, 2, 16])
def test_graphs_that_were_given_up_are_built_anew(small: Path, n_steps: int) -> None:
    """Eight numbers of rows, two lengths of context; asked for in an order that no cache of few can keep up with."""
    with open_whole(small, n_steps=n_steps, n_ctx=1024) as loaded:
        model = loaded.model
        known: dict[tuple[int, int], Logits] = {}
        for n_text in (20, 300, 20):
            Nodes(model, n_text)
            for n in (*range(1, N_LOGITS + 1), 1, N_LOGITS, 2):
                step = nodes_again([[50 + n]], n)
                found = model.step(*step).copy()
                expected = known.setdefault((n_text, n), found)
                assert same_bits(found, expected)
                assert same_bits(layer_by_layer(model, *step), expected)
        assert model._steps is not None
        assert len(model._steps._graphs) == min(n_steps, 2 * N_LOGITS)


def test_any_number_of_threads_gives_the_same_bits(small: Path) -> None:
    with open_whole(small, n_threads=2) as loaded:
        model = loaded.model
        step = Nodes(model, 50).more(4)
        model.n_threads = 1
        one = model.step(*step).copy()
        model.n_threads = 2
        assert same_bits(model.step(*step), one)


# --- memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("n_ctx", [256, 300, 1024])
def test_steps_of_any_width_at_any_length_of_context_take_no_more_memory_than_was_planned(
    tmp_path: Path, arch: tiny.Arch, n_ctx: int
) -> None:
    path = tiny.tiny_model(tmp_path / "tiny.gguf", n_ff=256, arch=arch, type="Q8_0", context_length=2048)
    with open_whole(path, n_ctx=n_ctx, n_steps=40) as loaded:
        model, allocator = loaded.model, loaded.model._allocator
        planned = compute_nbytes(loaded.ggml, loaded.config, loaded.units, loaded.shape, 1)
        at_first = allocator.nbytes
        assert 0 < at_first <= planned
        Nodes(model, 1)
        for n_text in range(100, n_ctx - N_LOGITS + 1, 128):
            while model.kv.length < n_text:
                model.forward(TOKENS[: min(64, n_text - model.kv.length)])
            for n in range(1, N_LOGITS + 1):
                model.step(*nodes_again([[7]], n))
            layer_by_layer(model, *nodes_again([[9]], N_LOGITS))
        assert allocator.nbytes == at_first


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pin", [None, 0, 50, 99.9])
def test_whole_passes_need_a_model_that_is_all_in_memory(pin: float | None) -> None:
    with pytest.raises(UsageError, match="all in memory: pin 100"):
        ModelSettings(dram=1 << 30, n_steps=1, pin_percent=pin)


def test_a_budget_that_would_stream_the_projection_is_refused_where_whole_passes_are_wanted(tmp_path: Path) -> None:
    """Their graphs are kept, so that they would read from a ring whose slots hold other weights by then."""
    path = tiny.tiny_model(tmp_path / "tiny.gguf", n_ff=256, type="F32", n_vocab=16384)
    gguf, config = read(path), ModelConfig.from_gguf(read(path))
    wanted: dict[str, Any] = {"n_ctx": 256, "n_tree": 8, "pin_percent": 100}

    def planned(dram: int, n_steps: int) -> Any:
        return plan(load(), gguf, config, ModelSettings(dram=dram, n_steps=n_steps, **wanted), python=0)[1]

    whole = planned(1 << 40, 2)
    assert whole.bytes_per_pass == 0
    assert whole.total < 40 << 20
    assert planned(whole.total, 2).bytes_per_pass == 0
    assert planned(whole.total - (4 << 20), 0).bytes_per_pass > 0  # layer by layer, that may be streamed
    for less in (1, 4 << 20, 8 << 20):
        with pytest.raises(DoesNotFit, match="output projection") as caught:
            planned(whole.total - less, 2)
        assert caught.value.parts[PYTHON] > 0


def test_a_step_beyond_the_context_is_refused_and_the_next_one_is_right(small: Path) -> None:
    with open_whole(small, n_ctx=256) as loaded:
        model = loaded.model
        Nodes(model, 253)
        expected = model.step(*nodes_again([[7]], 3)).copy()
        with pytest.raises(ContextOverflow, match="257 tokens do not fit"):
            model.step(*nodes_again([[7]], 4))
        assert same_bits(model.step(*nodes_again([[7]], 3)), expected)
        assert model.kv.length == 253


def test_a_step_of_a_closed_model_is_refused(small: Path) -> None:
    with open_whole(small) as loaded:
        model = loaded.model
        Nodes(model, 5)
    with pytest.raises(LeverError, match="the model is closed"):
        model.step(*nodes_again([[7]], 1))
