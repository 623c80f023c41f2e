"""Rows that are dropped in the middle of a pass: those that go on have the bits of plain decoding, and so has the text,
whatever rule, predictor and layer; scores are those of the output projection.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lever.draft import Draft
from lever.engine import Engine
from lever.loader import LoadedModel
from lever.model import Thinning
from lever.policies import Preset, best_nodes, preset
from lever.predictor import Quality, Translator
from lever.prune import Mix
from lever.pruner import Pruning, Rule, paper_rule
from lever.sample import Sampler
from lever.scores import Scores
from lever.settings import SamplerSettings
from lever.trace import Cycle
from tests import tiny
from tests.fakes import ScriptedDraft
from tests.models import TOKENS, open_tiny, overflowing, relative_error, same_bits
from tests.native.test_speculation import (
    AT_THE_BORDER,
    SAMPLERS,
    SHORT,
    Answer,
    Answers,
    Models,
    opened,
    sampler,
)
from tests.native.test_tree_pass import BUSHY, Tree, plain_logits, trees

N_TREE = 24
Fill = Callable[[NDArray[np.float16]], None]


def at_random(seed: int) -> Fill:
    def fill(into: NDArray[np.float16]) -> None:
        into[:] = np.random.default_rng(seed).normal(0, 0.1, into.shape)

    return fill


def translator(layer: int = 1, threshold: float = 0.2) -> Translator:
    return Translator(layer=layer, mix=Mix(1.0, 1.0), threshold=threshold, quality=Quality(kept_rows=0.5))


def dropping(seed: int, share: float = 0.4) -> Rule:
    """Any rows, with what is behind them."""
    dice = random.Random(seed)

    def rule(_tree: object, rows: Any, _found: object, _scores: object) -> Sequence[int]:
        kept = {0}
        for row in range(1, len(rows.parents)):
            if rows.parents[row] in kept and dice.random() > share:
                kept.add(row)
        return sorted(kept)

    return rule


# --- one pass -----------------------------------------------------------------------------------------------


def kept_of(tree: Tree, seed: int) -> list[int]:
    dice, kept = random.Random(seed), {0}
    for row in range(1, len(tree.parents)):
        if tree.parents[row] in kept and dice.random() < 0.6:
            kept.add(row)
    return sorted(kept)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = {"ffn_down": "Q6_K", "*": "Q4_K"}
    return tiny.tiny_model(tmp_path_factory.mktemp("thin") / "tiny.gguf", n_layers=3, n_ff=256, type=kinds)


@pytest.fixture(scope="module")
def both(path: Path) -> Iterator[tuple[LoadedModel, LoadedModel]]:
    with open_tiny(path, n_tree=N_TREE) as tree_model, open_tiny(path) as plain_model:
        for loaded in (tree_model, plain_model):
            loaded.model.forward(TOKENS[:30])
        yield tree_model, plain_model


@given(tree=trees(), layer=st.integers(0, 2), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_that_go_on_have_the_bits_of_plain_decoding_and_so_has_the_text_behind_them(
    both: tuple[LoadedModel, LoadedModel], tree: Tree, layer: int, seed: int
) -> None:
    thin, plain = both
    kept = kept_of(tree, seed)
    came = thin.model.forward_tree(tree.tokens, tree.parents, thinning=Thinning(layer, lambda: kept))
    assert list(came) == kept
    logits = thin.model.project(range(len(kept))).copy()
    assert same_bits(logits, plain_logits(plain, tree)[kept])

    length, deepest = thin.model.kv.length, max(kept, key=lambda row: len(tree.path(row)))
    path = tree.path(deepest)
    thin.model.keep([kept.index(row) for row in path])
    plain.model.forward([tree.tokens[row] for row in path])
    for loaded in both:
        loaded.model.forward([TOKENS[7]])
    assert same_bits(thin.model.project([0]), plain.model.project([0]))
    for loaded in both:
        loaded.model.kv.truncate(length)


def test_masked_rows_that_go_on_are_the_same_sums_in_another_order(path: Path) -> None:
    kept = [0, 1, 2, 3, 6, 8, 9, 11]
    with open_tiny(path, n_tree=N_TREE, tree_attention="masked") as thin, open_tiny(path) as plain:
        for loaded in (thin, plain):
            loaded.model.forward(TOKENS[:250])
        thin.model.forward_tree(BUSHY.tokens, BUSHY.parents, thinning=Thinning(0, lambda: kept))
        expected = plain_logits(plain, BUSHY)[kept]
        found = thin.model.project(range(len(kept))).copy()
        assert same_bits(found[:4], expected[:4])  # a path that lies where plain decoding has it
        assert relative_error(found, expected.astype(np.float64)) < 0.02
        thin.model.keep([0, 4, 5, 6])
        plain.model.forward([BUSHY.tokens[row] for row in (0, 6, 8, 9)])
        for loaded in (thin, plain):
            loaded.model.forward([TOKENS[7]])
        after = plain.model.project([0]).astype(np.float64)
        assert relative_error(thin.model.project([0]), after) < 0.02


def test_a_pass_that_fails_behind_the_layer_leaves_the_cache_as_it_was(path: Path) -> None:
    def stop(layer: int) -> None:
        if layer == 2:
            raise KeyboardInterrupt

    with open_tiny(path, n_tree=N_TREE) as thin, open_tiny(path) as plain:
        for loaded in (thin, plain):
            loaded.model.forward(TOKENS[:30])
        with pytest.raises(KeyboardInterrupt):
            thin.model.forward_tree(BUSHY.tokens, BUSHY.parents, stop, Thinning(0, lambda: [0, 1, 6]))
        came = thin.model.forward_tree(BUSHY.tokens, BUSHY.parents)
        assert list(came) == list(range(len(BUSHY.tokens)))
        assert same_bits(thin.model.project(came), plain_logits(plain, BUSHY))


# --- scores -------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pinned": {"pin_percent": 100},
    "repacked": {"layout": "repacked"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("n_vocab", [384, 600])
def test_scores_are_rows_of_the_projection_times_what_is_translated(
    tmp_path: Path, layout: str, kind: str, n_vocab: int
) -> None:
    """In bands of 256 tokens; the last one is smaller, and in 600 no multiple of what kernels interleave at most."""
    path = tiny.tiny_model(tmp_path / "m.gguf", n_vocab=n_vocab, n_ff=256, type={"output": kind, "*": "F32"})
    with open_tiny(path, n_tree=N_TREE, **LAYOUTS[layout]) as loaded:
        loaded.model.forward(TOKENS[:10])
        n_embd = loaded.config.n_embd
        logits = loaded.model.project(range(10)).copy()
        normed = loaded.model.normed(10).copy()
        states = loaded.model.hidden(10).copy()
        scale = normed / (states / np.sqrt((states**2).mean(axis=1, keepdims=True) + loaded.config.norm_eps))
        weights = np.median(scale, axis=0)  # those of the final norm

        def fill(into: NDArray[np.float16]) -> None:
            into[:] = np.diag(weights)

        pairs = [(row, token) for row in (0, 9, 4) for token in (0, 1, 15, 16, 255, 256, 300, n_vocab - 1)]
        with loaded.open_scores(fill) as scores:
            found = loaded.model.score(scores, 10, pairs)
            assert scores._allocator.nbytes <= 4 * 4 * n_embd * N_TREE
            assert Scores.nbytes(loaded.ggml, loaded.config, N_TREE) > scores._allocator.nbytes + 2 * n_embd**2
            many = [(row % 10, token % n_vocab) for row, token in enumerate(range(0, 3000, 7))]
            expected = np.array([logits[row, token] for row, token in many])
            assert relative_error(loaded.model.score(scores, 10, many), expected.astype(np.float64)) < 0.01
        expected = np.array([logits[row, token] for row, token in pairs])
        assert relative_error(found, expected.astype(np.float64)) < 0.01


# --- answers ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    with opened(tmp_path_factory.mktemp("pruning"), {"ffn_down": "Q6_K", "*": "Q4_K"}) as models:
        yield models


# Trees of one size whatever they cost, so that there is something to prune.
FIXED = replace(preset("opt-tree"), name="fixed", prunes=True)
LOPSIDED = replace(preset("specinfer"), name="lopsided", prunes=True)
POLICIES = {policy.name: policy for policy in (preset("lever"), preset("lever-paper"), FIXED, LOPSIDED)}


class Pruned(Answers):
    """As `Answers`, with a predictor."""

    def __init__(self, target: LoadedModel, draft: Draft, policy: Preset, pruning: Pruning) -> None:
        self.engine = Engine(target.model, target.store, 1, draft=draft, policy=policy, pruning=pruning)
        self.masked = target.shape.tree_attention == "masked"


@contextmanager
def pruned(
    models: Models, policy: Preset, kind: str, rule: Rule | None, layer: int = 1, seed: int = 0
) -> Iterator[Pruned]:
    with models.target.open_scores(at_random(seed)) as scores:
        yield Pruned(models.target, models.draft(kind), policy, Pruning(scores, translator(layer), rule))


RULES: dict[str, Rule | None] = {
    "as many as pay": None,
    "the paper's": paper_rule(translator()),
    "any": dropping(1),
    "nearly none": dropping(2, 0.95),
    "none": dropping(3, 1.0),
}


@pytest.mark.parametrize("kind", ["itself", "contrary"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SAMPLERS)
def test_text_and_logits_are_plain_decodings_whatever_is_pruned(
    models: Models, name: str, rule: str, policy: str, kind: str
) -> None:
    draw, temperature = sampler(name).draw, SAMPLERS[name]["temperature"]
    with pruned(models, POLICIES[policy], kind, RULES[rule]) as answers:
        for prompt in (AT_THE_BORDER, SHORT):
            expected = models.expected(prompt, draw)
            assert answers.to(prompt, draw, temperature=temperature).same(expected)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_nor_does_the_layer_or_the_predictor_matter(models: Models, layer: int, seed: int) -> None:
    for rule in (None, paper_rule(translator(threshold=0.3)), dropping(seed, 0.3)):
        with pruned(models, FIXED, "itself", rule, layer, seed) as answers:
            assert answers.to(SHORT, n=40).same(models.expected(SHORT, n=40))


def test_what_is_pruned_is_counted_and_told(models: Models) -> None:
    cycles: list[Cycle] = []
    with pruned(models, FIXED, "itself", dropping(5)) as answers:
        stats = answers.to(SHORT, n=40, on_cycle=cycles.append).stats
    assert stats.pruned == sum(len(cycle.pruned) for cycle in cycles) > 0
    assert stats.verified == sum(len(cycle.rows.nodes) - 1 + len(cycle.pruned) for cycle in cycles)
    assert 0 < stats.pruned_cycles <= stats.cycles - stats.plain_cycles
    assert stats.prune_s > 0
    for cycle in cycles:
        assert not {*cycle.pruned} & {*cycle.rows.nodes}


def test_what_is_pruned_and_then_drawn_is_emitted_and_ends_the_walk(models: Models) -> None:
    with pruned(models, FIXED, "itself", dropping(3, 1.0)) as answers:
        found = answers.to(SHORT, n=30)
    assert found.same(models.expected(SHORT, n=30))
    assert found.stats.accepted == 0
    assert found.stats.pruned == found.stats.verified > 0


def test_presets_that_do_not_prune_do_not(models: Models) -> None:
    with pruned(models, preset("opt-tree"), "itself", dropping(3, 1.0)) as answers:
        stats = answers.to(SHORT, n=30).stats
    assert stats.pruned == stats.pruned_cycles == 0


def test_a_token_that_overflows_does_not_spoil_the_others(tmp_path: Path) -> None:
    """Its scores are no numbers: nothing is pruned then, and the pass is made again without the tree."""
    path = overflowing(tmp_path / "m.gguf")
    with (
        open_tiny(path, n_tree=N_TREE) as target,
        open_tiny(path) as plain,
        open_tiny(path, n_tree=N_TREE, pin_percent=100) as itself,
        target.open_scores(at_random(1)) as scores,
    ):
        greedy = Sampler(SamplerSettings(seed=0, temperature=0.0), target.config.n_vocab)
        for rule in (None, paper_rule(translator(0))):
            answers = Pruned(target, Draft(itself.model), FIXED, Pruning(scores, translator(0), rule))
            found: Answer = answers.to(TOKENS[:12], greedy.draw, n=12)
            assert found.same(Answers(plain).to(TOKENS[:12], greedy.draw, n=12))


@pytest.mark.parametrize("tree_attention", ["exact", "masked"])
def test_a_leaf_that_overflows_does_not_spoil_the_plain_pass_behind_it(tmp_path: Path, tree_attention: str) -> None:
    """No candidate behind it is scored: with exact attention it is dropped like others, and leaves nothing behind."""
    path = overflowing(tmp_path / "m.gguf")

    def guess(text: Sequence[int]) -> list[tuple[int, float]]:
        """In every other cycle: 11, and behind it 11 or 7, which overflows."""
        depth = len(text) - len(draft.text)
        if len(draft.text) % 2 or depth > 1:
            return []
        return [(11, 0.5), (7, 0.4)] if depth else [(11, 0.9)]

    draft = ScriptedDraft(guess)
    policy = Preset("fixed", "", *best_nodes(4), prunes=True)
    with (
        open_tiny(path, n_tree=N_TREE, tree_attention=tree_attention) as target,
        open_tiny(path) as plain,
        target.open_scores(at_random(1)) as scores,
    ):
        greedy = Sampler(SamplerSettings(seed=0, temperature=0.0), target.config.n_vocab)
        answers = Pruned(target, draft.as_draft(), policy, Pruning(scores, translator(0), lambda *_: [0]))
        found: Answer = answers.to(TOKENS[:12], greedy.draw, n=12)
        assert found.stats.pruned > 0
        assert found.same(Answers(plain).to(TOKENS[:12], greedy.draw, n=12))


def test_masked_trees_can_be_pruned(models: Models) -> None:
    with (
        open_tiny(models.path, n_tree=N_TREE, tree_attention="masked") as target,
        target.open_scores(at_random(1)) as scores,
    ):
        pruning = Pruning(scores, translator(), dropping(4))
        answers = Pruned(target, models.draft("itself"), FIXED, pruning)
        found = answers.to(SHORT, n=40)
    assert found.tokens == models.expected(SHORT, n=40).tokens or found.stats.near_ties
    assert found.stats.pruned > 0
