"""A tree in one pass: every row has the bits of plain decoding along its path, and what is kept is the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lever.errors import ContextOverflow, StorageError
from lever.loader import LoadedModel
from lever.model import tree_depths
from tests import tiny
from tests.fakes import FakeDevice
from tests.models import TOKENS, Logits, logits_of, open_tiny, same_bits, tiny_logits

N_TREE = 24
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"rope_freqs": True, "type": "F32"},
    "qwen2": {"arch": "qwen2", "type": {"ffn_down": "Q6_K", "*": "Q4_K"}},
    "qwen3": {"arch": "qwen3", "head_dim": 128, "type": "Q4_0"},
}


@dataclass(frozen=True)
class Tree:
    """Tokens and the rows of their parents, depth-first; row 0 is the root."""

    tokens: Sequence[int]
    parents: Sequence[int]

    def path(self, row: int) -> list[int]:
        """Rows from the root to this one."""
        return [*self.path(self.parents[row]), row] if row else [0]


@st.composite
def trees(draw: st.DrawFn, most: int = N_TREE) -> Tree:
    """Each row is the child of one on the path of the row before."""
    parents, path = [-1], [0]
    for row in range(1, draw(st.integers(1, most))):
        keep = draw(st.integers(1, len(path)))
        parents.append(path[keep - 1])
        path = [*path[:keep], row]
    tokens = draw(st.lists(st.sampled_from(TOKENS[:40]), min_size=len(parents), max_size=len(parents)))
    return Tree(tokens, parents)


BUSHY = Tree(TOKENS[:12], [-1, 0, 1, 2, 1, 4, 0, 6, 6, 8, 9, 0])


@pytest.fixture(scope="module", params=SHAPES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = SHAPES[request.param]
    return tiny.tiny_model(
        tmp_path_factory.mktemp("tree") / "tiny.gguf", n_layers=3, n_ff=256, context_length=2048, **shape
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_model(tmp_path_factory.mktemp("tree") / "llama.gguf", n_layers=3, n_ff=256)


def tree_logits(loaded: LoadedModel, tree: Tree) -> Logits:
    """Logits of every row of one pass."""
    loaded.model.forward_tree(tree.tokens, tree.parents)
    rows = range(len(tree.tokens))
    parts = [loaded.model.project(rows[at : at + 32]).copy() for at in range(0, len(rows), 32)]
    return np.concatenate(parts)


def plain_logits(loaded: LoadedModel, tree: Tree) -> Logits:
    """Of every row by plain decoding: token by token along its path, from the same context."""
    length = loaded.model.kv.length
    rows = []
    for row in range(len(tree.tokens)):
        for ancestor in tree.path(row):
            loaded.model.forward([tree.tokens[ancestor]])
        rows.append(loaded.model.project([0])[0].copy())
        loaded.model.kv.truncate(length)
    return np.array(rows)


@pytest.mark.parametrize("n_context", [0, 1, 250, 290], ids=lambda n: f"{n} before")
def test_every_row_has_the_bits_of_plain_decoding_along_its_path(path: Path, n_context: int) -> None:
    """250: the tree crosses the border of 256 slots, and its shallow rows have more of them than in plain decoding."""
    context = TOKENS[:n_context]
    with open_tiny(path, n_tree=N_TREE) as tree_model, open_tiny(path) as plain_model:
        for loaded in (tree_model, plain_model):
            if context:
                logits_of(loaded, context)
        assert same_bits(tree_logits(tree_model, BUSHY), plain_logits(plain_model, BUSHY))


@given(tree=trees())
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tree_is_exact(models: tuple[LoadedModel, LoadedModel], tree: Tree) -> None:
    tree_model, plain_model = models
    assert same_bits(tree_logits(tree_model, tree), plain_logits(plain_model, tree))


@pytest.fixture(scope="module")
def models(llama: Path) -> Any:
    with open_tiny(llama, n_tree=N_TREE) as tree_model, open_tiny(llama) as plain_model:
        for loaded in (tree_model, plain_model):
            logits_of(loaded, TOKENS[:30])
        yield tree_model, plain_model


@pytest.mark.parametrize("settings", [{"n_threads": 2}, {"layout": "repacked"}, {"pin_percent": 100}, {"n_batch": 3}])
def test_no_setting_changes_a_bit_of_a_tree(path: Path, settings: dict[str, Any]) -> None:
    layout = {key: value for key, value in settings.items() if key == "layout"}
    with open_tiny(path, **layout) as plain_model:
        logits_of(plain_model, TOKENS[:20])
        expected = plain_logits(plain_model, BUSHY)
    with open_tiny(path, n_tree=N_TREE, **settings) as loaded:
        logits_of(loaded, TOKENS[:20])
        assert same_bits(tree_logits(loaded, BUSHY), expected)


@pytest.mark.parametrize("row", [0, 3, 5, 10, 11])
def test_what_is_kept_of_a_tree_is_the_text(path: Path, row: int) -> None:
    """And what is not kept leaves no trace, in the next tree and in plain decoding."""
    before, after = TOKENS[:250], TOKENS[30:45]
    kept = BUSHY.path(row)
    with open_tiny(path, n_tree=N_TREE) as loaded:
        logits_of(loaded, before)
        loaded.model.forward_tree(BUSHY.tokens, BUSHY.parents)
        loaded.model.kv.keep(kept)
        assert loaded.model.kv.length == 250 + len(kept)
        tree = tree_logits(loaded, BUSHY)
        found = logits_of(loaded, after)
    text = [*before, *(BUSHY.tokens[kept_row] for kept_row in kept)]
    expected = tiny_logits(path, [*text, *after])
    assert same_bits(found, expected[len(text) :])
    with open_tiny(path) as plain_model:
        logits_of(plain_model, text)
        assert same_bits(tree, plain_logits(plain_model, BUSHY))


def test_a_tree_that_was_given_up_leaves_the_cache_as_it_was(llama: Path) -> None:
    device = FakeDevice()
    with open_tiny(llama, n_tree=N_TREE, device=device, pin_percent=0) as loaded:
        logits_of(loaded, TOKENS[:9])
        expected = tree_logits(loaded, BUSHY)
        (extent,) = loaded.store.units[1].extents
        device.broken = range(extent.offset, extent.offset + extent.nbytes)
        with pytest.raises(StorageError):
            three_passes(loaded)  # what was read ahead is still good
        device.broken = range(0)
        assert loaded.model.kv.length == 9
        assert same_bits(tree_logits(loaded, BUSHY), expected)


def three_passes(loaded: LoadedModel) -> None:
    for _ in range(3):
        loaded.model.forward_tree(BUSHY.tokens, BUSHY.parents)


def test_a_tree_that_does_not_fit_is_an_overflow_before_anything_is_computed(llama: Path) -> None:
    with open_tiny(llama, n_tree=N_TREE, n_ctx=256) as loaded:
        logits_of(loaded, TOKENS[:252])
        loaded.model.forward_tree([1, 2, 3, 4], [-1, 0, 1, 2])
        with pytest.raises(ContextOverflow):
            loaded.model.forward_tree([1, 2, 3, 4, 5], [-1, 0, 1, 2, 3])
        loaded.model.forward_tree([1, 2, 3, 4, 5], [-1, 0, 1, 2, 2])  # as deep as the one that fits


@pytest.mark.parametrize("parents", [[0], [-1, -1], [-1, 0, 0, 1], [-1, 1], [-1, 0, 5]])
def test_rows_that_are_not_depth_first_are_our_own_mistake(parents: list[int]) -> None:
    with pytest.raises(AssertionError, match="depth-first"):
        tree_depths(parents)


def test_depths_are_edges_from_the_root() -> None:
    assert tree_depths(BUSHY.parents) == [0, 1, 2, 3, 2, 3, 1, 2, 2, 3, 4, 1]


@pytest.mark.parametrize("n_tree", [1, 7, 32, 64])
def test_D5_what_trees_take_is_planned(llama: Path, n_tree: int) -> None:
    with open_tiny(llama, n_tree=n_tree, n_ctx=300) as loaded:
        model, parts = loaded.model, loaded.plan.parts
        assert model.kv.nbytes - parts["KV cache"] < 4096
        planned = model._allocator.nbytes
        chain = Tree([5] * n_tree, [-1, *range(n_tree - 1)])
        star = Tree([5] * n_tree, [-1] + [0] * (n_tree - 1))
        for tree in (chain, star):
            tree_logits(loaded, tree)
        assert model._allocator.nbytes == planned  # nothing grew while computing
