"""The draft against a plain forward pass: what it says of any node, whatever was accepted, drawn or asked before.

It is not exact (keys lie in another order), so probabilities are compared with a tolerance. A wrong ancestor, place or
position changes all of them. Weights are F32: beside quantised ones, activations jump from one step to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from lever.draft import NEAR, Draft, likeliest
from lever.errors import ContextOverflow
from lever.loader import LoadedModel
from lever.tree import NOT_EXPANDED, DraftTree, reroot
from tests import tiny
from tests.models import TOKENS, open_tiny, overflowing

TOLERANCE = 0.01  # of a probability
N_TREE = 12
OTHER = 377  # a token that is hardly ever among the candidates


class Plain:
    """The same model without trees: probabilities of the next token after a text."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self._text: list[int] = []

    def after(self, text: Sequence[int], temperature: float = 0.0) -> NDArray[np.float64]:
        pairs = zip(self._text, text[:-1], strict=False)
        n = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(self._text), len(text) - 1))
        self._model.kv.truncate(n)
        self._model.forward(text[n:])
        self._text = list(text)
        logits = self._model.project([len(text) - n - 1])[0].astype(np.float64)
        shares = np.exp((logits - logits.max()) / (temperature or 1.0))
        found: NDArray[np.float64] = shares / shares.sum()
        return found


class Drafting:
    """A draft, its tree and the text, which a plain model reads after it."""

    def __init__(self, models: tuple[LoadedModel, LoadedModel], temperature: float = 0.0) -> None:
        drafting, plain = models
        self.draft = Draft(drafting.model)
        self.plain = Plain(plain)
        self.text: list[int] = []
        self.tree = DraftTree.rooted_at(0)
        self.temperature = temperature

    def begin(self, text: Sequence[int]) -> None:
        self.text = list(text)
        self.tree = DraftTree.rooted_at(text[-1])
        self.catch_up()

    def catch_up(self) -> None:
        known = self.tree.expanded(0)
        self.draft.begin(self.tree, self.text, self.temperature)
        if not known:
            self.check(0)

    def expand(self, nodes: Sequence[int]) -> None:
        self.draft.expand(self.tree, nodes, self.temperature)
        for node in nodes:
            self.check(node)

    def follow(self, accepted: Sequence[int], token: int, *, carry_over: bool = True) -> None:
        found = reroot(self.tree, accepted, token, carry_over=carry_over)
        new_text = [*(self.tree.tokens[node] for node in accepted), token]
        self.draft.follow(found, new_text)
        self.text += new_text
        self.tree = found.tree

    def check(self, node: int) -> None:
        """The candidates behind a node are the likeliest tokens after its path, with their probabilities."""
        tree = self.tree
        shares = self.plain.after([*self.text, *(tree.tokens[at] for at in tree.path(node))], self.temperature)
        children = tree.children[node]
        found = np.array([tree.reach[child] / tree.reach[node] for child in children.values()])
        expected = shares[list(children)]
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=1e-9)
        assert len(children) == 8
        assert (np.diff(found) <= 0).all()
        assert expected.min() >= (1 - TOLERANCE) * np.delete(shares, list(children)).max()


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3, whole steps"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    shape: dict[str, dict[str, Any]] = {
        "llama": {"type": "F32", "rope_freqs": True},
        "qwen3": {"arch": "qwen3", "head_dim": 128, "type": "F32"},
    }
    path = tmp_path_factory.mktemp("draft") / "tiny.gguf"
    kind, _, whole = request.param.partition(", ")
    tiny.tiny_model(path, n_layers=3, n_ff=256, **shape[kind])
    n_steps = 2 if whole else 0  # so few that graphs are built anew again and again
    with open_tiny(path, n_tree=N_TREE, n_logits=4, n_batch=64, pin_percent=100, n_steps=n_steps) as drafting:  # noqa: SIM117
        with open_tiny(path, pin_percent=100) as plain:
            yield drafting, plain


# --- candidates ---------------------------------------------------------------------------------------------


def test_candidates_are_the_likeliest_tokens_with_the_softmax_of_all_of_them() -> None:
    logits = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15], np.float32))
    found = likeliest(logits, 3, 0.0)
    assert [token for token, _ in found] == [1, 3, 4]
    assert [share for _, share in found] == pytest.approx([0.4, 0.3, 0.15])


@pytest.mark.parametrize(("temperature", "share"), [(-1.0, 0.6), (0.0, 0.6), (1.0, 0.6), (0.5, 9 / 13), (1e5, 0.5)])
def test_candidates_are_as_likely_as_they_are_at_the_temperature_of_the_draw(temperature: float, share: float) -> None:
    ((token, found),) = likeliest(np.log(np.array([0.4, 0.6], np.float32)), 1, temperature)
    assert token == 1
    assert found == pytest.approx(share, rel=1e-4)


@pytest.mark.parametrize("temperature", [1e-6, 1e-37, 1e-40, 1e-300])
def test_at_the_smallest_temperatures_the_likeliest_token_is_certain(temperature: float) -> None:
    """The others are not at all likely: no candidates."""
    assert likeliest(np.array([50.0, 70.0, 69.0, -30.0], np.float32), 3, temperature) == [(1, 1.0)]


def test_a_banned_token_is_never_likely() -> None:
    found = likeliest(np.array([1.0, -np.inf, 2.0, -np.inf], np.float32), 3, 0.7)
    assert [token for token, _ in found] == [2, 0]


def test_what_is_far_below_the_best_is_no_candidate() -> None:
    logits = np.array([0.0, 12.5, 1.0, 12.5 - NEAR, 12.5 - NEAR + 0.1, 2.0], np.float32)
    assert [token for token, _ in likeliest(logits, 8, 0.0)] == [1, 5, 2, 4]
    assert [token for token, _ in likeliest(logits, 2, 0.0)] == [1, 5]
    assert [token for token, _ in likeliest(logits, 8, 2.0)] == [1, 5, 2, 4, 3, 0]  # nearer, where the draw is warmer
    assert [token for token, _ in likeliest(logits, 8, 0.1)] == [1]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_row_that_is_not_finite_says_nothing(wrong: float) -> None:
    """A draft may be damaged, or overflow at one token: the target's text must go on."""
    logits = np.zeros(16, np.float32)
    logits[3] = wrong
    assert likeliest(logits, 4, 0.0) == []
    assert likeliest(np.full(16, -np.inf, np.float32), 4, 1.0) == []


# --- growth -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_before", [1, 20, 63, 64, 65, 250])
def test_a_chain_and_its_siblings_are_those_of_plain_passes(models: Any, n_before: int) -> None:
    """250: the tree crosses the border of 256 slots."""
    run = Drafting(models)
    run.begin(TOKENS[:n_before])
    for _ in range(10):
        run.expand([len(run.tree) - 8])  # the likeliest behind the last one
    run.expand(run.tree.frontier()[:N_TREE])


def test_a_level_is_expanded_at_once_and_parents_may_be_of_any_step(models: Any) -> None:
    run = Drafting(models, temperature=0.7)
    run.begin(TOKENS[:30])
    run.expand([1, 2, 3])
    first, second = run.tree.children[1], run.tree.children[3]
    run.expand([*list(second.values())[:2], 4, *list(first.values())[:3]])
    run.expand(run.tree.frontier()[:N_TREE])


def test_room_is_what_a_step_may_expand(models: Any) -> None:
    """What one pass takes, and at the end what the context leaves: 512 positions."""
    run = Drafting(models)
    run.begin(TOKENS[:20])
    assert run.draft.room == N_TREE
    run.begin((TOKENS * 2)[:509])
    assert run.draft.room == 3
    run.expand([1])
    assert run.draft.room == 2
    run.expand([2, 9])
    assert run.draft.room == 0
    with pytest.raises(ContextOverflow):
        run.draft.expand(run.tree, [3], 0.0)


# --- following the text -------------------------------------------------------------------------------------


def test_after_a_path_the_tree_below_it_lives_on(models: Any) -> None:
    run = Drafting(models)
    run.begin(TOKENS[:250])
    a = 1
    run.expand([a, 2])
    b = next(iter(run.tree.children[a].values()))
    run.expand([b, 3])
    c = next(iter(run.tree.children[b].values()))
    run.expand([c, 4])
    token = run.tree.tokens[b]
    run.follow([a], token)
    assert run.tree.expanded(0)
    assert len(run.tree) == 1 + 8 + 8
    run.catch_up()
    run.expand(run.tree.frontier()[:5])
    run.follow([], OTHER)
    assert run.draft.model.kv.length == len(run.text) - 1
    run.catch_up()
    run.expand([1, 2])


def test_a_new_prompt_keeps_what_it_shares_and_forgets_the_tree(models: Any) -> None:
    run = Drafting(models)
    run.begin(TOKENS[:100])
    run.expand([1, 2])
    run.begin([*TOKENS[:60], 7, 8, 9])
    run.expand([3, 1])
    run.begin(TOKENS[:60])  # a prefix of what is there
    run.expand([1])
    run.begin(TOKENS[:60])  # the same again
    run.expand([2])


def test_the_draft_agrees_with_a_plain_model_whatever_happens(models: Any) -> None:
    class Machine(RuleBasedStateMachine):
        @initialize(n=st.integers(1, 40), temperature=st.sampled_from([0.0, 0.6]))
        def start(self, n: int, temperature: float) -> None:
            self.run = Drafting(models, temperature)
            self.run.begin(TOKENS[:n])

        @precondition(lambda self: self.run.tree.frontier())
        @rule(data=st.data())
        def expand(self, data: st.DataObject) -> None:
            likeliest = self.run.tree.frontier()[:40]
            self.run.expand(data.draw(st.lists(st.sampled_from(likeliest), min_size=1, max_size=4, unique=True)))

        @rule(data=st.data(), carry_over=st.booleans())
        def follow(self, data: st.DataObject, carry_over: bool) -> None:
            tree, node = self.run.tree, 0
            accepted: list[int] = []
            inner = [child for child in range(len(tree)) if tree.expanded(child)]
            while len(tree.children[node]) and data.draw(st.integers(0, 3)):
                children = list(tree.children[node].values())
                likely = [child for child in children if child in inner] or children
                node = data.draw(st.sampled_from(likely if data.draw(st.booleans()) else children))
                accepted.append(node)
            known = [tree.tokens[child] for child in tree.children[node].values()]
            self.run.follow(accepted, data.draw(st.sampled_from([*known, OTHER])), carry_over=carry_over)
            self.run.catch_up()

        @rule(keep=st.integers(0, 60), more=st.lists(st.sampled_from(TOKENS[:40]), min_size=1, max_size=5))
        def ask_anew(self, keep: int, more: list[int]) -> None:
            self.run.begin([*self.run.text[:keep], *more])

        @invariant()
        def the_cache_holds_the_text(self) -> None:
            if not hasattr(self, "run"):
                return
            draft, run = self.run.draft, self.run
            assert draft._text == run.text
            assert draft.model.kv.length == len(run.text)
            inner = [slot for slot in run.tree.slots if slot >= 0]
            assert sorted(inner) == list(range(len(draft._seen)))

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=20, stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_every_node_that_lives_on_knows_its_ancestors(models: Any) -> None:
    """Those that became text are seen by all; the others are seen by slot."""
    run = Drafting(models)
    run.begin(TOKENS[:10])
    for _ in range(4):
        run.expand(run.tree.frontier()[:3])
    run.follow([], run.tree.tokens[1])
    tree, seen = run.tree, run.draft._seen
    for node, slot in enumerate(tree.slots):
        if node and slot != NOT_EXPANDED:
            assert seen[slot] == [tree.slots[ancestor] for ancestor in tree.path(node)]


def test_a_token_at_which_the_draft_overflows_ends_a_branch_and_is_forgotten_with_it(tmp_path: Path) -> None:
    path = overflowing(tmp_path / "tiny.gguf")
    with open_tiny(path, n_tree=N_TREE, pin_percent=100) as drafting, open_tiny(path, pin_percent=100) as plain:
        text = [token for token in TOKENS if token != 7][:20]
        draft, tree = Draft(drafting.model), DraftTree.rooted_at(text[-1])
        draft.begin(tree, text, 0.0)
        tree.tokens[3] = 7  # as if it had been guessed
        draft.expand(tree, [3], 0.0)
        assert tree.expanded(3)
        assert tree.children[3] == {}
        run = Drafting((drafting, plain))
        run.draft = draft
        run.begin([*text, TOKENS[30]])
        run.expand([1, 2])
