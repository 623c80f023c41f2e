"""The promise of draft trees: tokens and logits are bit for bit those of plain decoding.

Whatever the preset, the draft, the sampler, the end of the text, and whatever was given up or failed before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lever.cycle_cost import CycleCost
from lever.draft import Draft
from lever.engine import Engine
from lever.errors import Cancelled, LeverError, StorageError
from lever.loader import LoadedModel
from lever.policies import PRESETS, Preset, Situation, best_nodes, preset
from lever.request import Draw, Step
from lever.sample import Sampler, top2_gap
from lever.settings import SamplerSettings
from lever.stats import RunStats
from tests import tiny
from tests.fakes import FakeDevice, whims
from tests.models import TOKENS, Logits, open_tiny, overflowing, relative_error, same_bits

N_TREE = 26
SHORT = TOKENS[:20]
AT_THE_BORDER = TOKENS[:250]  # the answer crosses 256 slots, and so do trees
NO_END: frozenset[int] = frozenset()


class Contrary(Draft):
    """Its first choice is always wrong where the right one is its own: the two likeliest tokens change places."""

    def _likeliest(self, logits: NDArray[np.float32], temperature: float) -> list[tuple[int, float]]:
        (first, p), (second, q), *others = super()._likeliest(logits, temperature)
        return [(second, p), (first, q), *others]


class Damaged(Draft):
    """Its weights are broken: it says nothing of any node."""

    def _likeliest(self, logits: NDArray[np.float32], temperature: float) -> list[tuple[int, float]]:
        return super()._likeliest(np.full_like(logits, np.nan), temperature)


ALWAYS_AHEAD = replace(preset("lever"), name="always ahead", adaptive=False)  # drafting on beside every pass
POLICIES = [*(PRESETS[name] for name in PRESETS), ALWAYS_AHEAD, *(whims(seed) for seed in range(2))]
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7, "top_k": 8},
    "hot with penalties": {"temperature": 1.5, "repeat_penalty": 1.3, "repeat_last_n": -1, "frequency_penalty": 0.2},
}


@lru_cache
def sampler(name: str, seed: int = 5) -> Sampler:
    return Sampler(SamplerSettings(seed=seed, **SAMPLERS[name]), N_VOCAB)


N_VOCAB = 384


@dataclass
class Answer:
    """All that came, and its figures."""

    tokens: list[int]
    logits: Logits
    reasons: list[str | None]
    stats: RunStats

    def same(self, other: Answer) -> bool:
        return self.tokens == other.tokens and same_bits(self.logits, other.logits) and self.reasons == other.reasons


class Answers:
    """One engine, asked again and again."""

    def __init__(self, target: LoadedModel, draft: Draft | None = None, policy: Preset | None = None) -> None:
        self.engine = Engine(target.model, target.store, 1, draft=draft, policy=policy)
        self.masked = target.shape.tree_attention == "masked"

    def steps(
        self,
        prompt: Sequence[int],
        draw: Draw | None = None,
        *,
        n: int | None = 24,
        end: frozenset[int] = NO_END,
        stats: RunStats | None = None,
        temperature: float = 0.0,
        **options: Any,
    ) -> Iterator[Step]:
        return self.engine.steps(
            prompt,
            draw or sampler("greedy").draw,
            max_new_tokens=n,
            end_tokens=end,
            stats=stats or RunStats(),
            temperature=temperature,
            **options,
        )

    def to(self, prompt: Sequence[int], draw: Draw | None = None, **options: Any) -> Answer:
        stats = RunStats()
        tokens: list[int] = []
        logits: list[Logits] = []
        reasons: list[str | None] = []
        for step in self.steps(prompt, draw, stats=stats, **options):
            tokens.append(step.token)
            logits.append(step.logits.copy())
            reasons.append(step.finish_reason)
            assert stats.new_tokens == len(tokens) == 1 + stats.cycles + stats.accepted
            assert stats.exact or self.masked
        assert reasons[:-1] == [None] * (len(reasons) - 1)
        assert stats.accepted <= stats.verified
        return Answer(tokens, np.stack(logits), reasons, stats)


@dataclass
class Models:
    """A target twice, for trees and plain; drafts of its vocabulary: itself and another one."""

    path: Path
    target: LoadedModel
    plain: LoadedModel
    itself: LoadedModel
    other: LoadedModel
    known: dict[Any, Answer] = field(default_factory=dict)

    def draft(self, kind: str) -> Draft:
        kinds = {"itself": Draft, "another": Draft, "contrary": Contrary, "damaged": Damaged}
        return kinds[kind](self.other.model if kind == "another" else self.itself.model)

    def answers(self, policy: Preset, kind: str = "itself") -> Answers:
        return Answers(self.target, self.draft(kind), policy)

    def expected(
        self, prompt: Sequence[int], draw: Draw | None = None, n: int = 24, end: frozenset[int] = NO_END
    ) -> Answer:
        """By an engine without a draft that was never asked before."""
        key = (tuple(prompt), draw, n, end)
        if key not in self.known:
            self.known[key] = Answers(self.plain).to(prompt, draw, n=n, end=end)
        return self.known[key]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    with opened(tmp_path_factory.mktemp("speculation"), {"ffn_down": "Q6_K", "*": "Q4_K"}) as models:
        yield models


@contextmanager
def opened(folder: Path, weights: str | dict[str, str], **target: Any) -> Iterator[Models]:
    """Models with such weights; settings of the target that checks trees."""
    shape: dict[str, Any] = {"n_layers": 3, "n_ff": 256, "n_vocab": N_VOCAB, "type": weights}
    path = tiny.tiny_model(folder / "target.gguf", **shape)
    other = tiny.tiny_model(folder / "draft.gguf", **shape | {"n_layers": 1, "seed": 3, "type": "Q8_0"})
    with ExitStack() as stack:
        pinned: dict[str, Any] = {"pin_percent": 100, "n_tree": N_TREE, "n_logits": 4, "n_steps": 3}
        yield Models(
            path,
            stack.enter_context(open_tiny(path, n_tree=N_TREE, n_logits=1, **target)),
            stack.enter_context(open_tiny(path, n_logits=1)),
            stack.enter_context(open_tiny(path, **pinned)),
            stack.enter_context(open_tiny(other, **pinned)),
        )


# --- equal to plain decoding --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["itself", "another", "contrary", "damaged"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("name", SAMPLERS)
def test_I2_I14_I16_every_preset_and_draft_gives_the_bits_of_plain_decoding(
    models: Models, name: str, policy: Preset, kind: str
) -> None:
    draw, temperature = sampler(name).draw, SAMPLERS[name]["temperature"]
    answers = models.answers(policy, kind)
    for prompt in (AT_THE_BORDER, SHORT):
        expected = models.expected(prompt, draw)
        assert answers.to(prompt, draw, temperature=temperature).same(expected)


@pytest.mark.parametrize("name", [name for name in PRESETS if PRESETS[name].drafts])
def test_a_draft_that_is_the_target_is_accepted_and_one_that_is_not_is_not(models: Models, name: str) -> None:
    """So that the tests above walk both ways: along whole paths and nowhere."""
    good, bad = (with_dear_passes(models.answers(preset(name), kind)) for kind in ("itself", "another"))
    assert good.tokens_per_cycle > (1.3 if name == "edgellm" else 2)  # which goes by probabilities, here small ones
    assert bad.tokens_per_cycle < good.tokens_per_cycle


class DearPasses(CycleCost):
    """A pass takes a thousand draft steps: no preset has a reason to draft little."""

    knows_passes = True

    def pass_s(self, rows: int) -> float:
        return 1.0 + rows / 1000

    def draft_s(self, nodes: int) -> float:
        return nodes / 1000


def with_dear_passes(answers: Answers) -> RunStats:
    """Figures where the engine believes so."""
    answers.engine._cost = answers.engine._guesser.cost = DearPasses()
    return answers.to(SHORT, n=60).stats


def test_a_first_choice_that_is_wrong_is_made_good_by_a_second_one(models: Models) -> None:
    chain = models.answers(preset("chain-sd"), "contrary").to(SHORT, n=40).stats
    tree = models.answers(preset("opt-tree"), "contrary").to(SHORT, n=40).stats
    assert chain.accepted <= 2  # near ties, where the draft's own sums differ
    assert chain.verified == 8 * chain.cycles or chain.verified > 7 * (chain.cycles - 2)
    assert tree.accepted > 5


@pytest.mark.parametrize("seed", range(3))
def test_I1_text_of_a_seed_does_not_depend_on_the_draft(models: Models, seed: int) -> None:
    draw = sampler("warm", seed).draw
    found = [models.answers(policy).to(SHORT, draw, n=16, temperature=0.7).tokens for policy in POLICIES[1:5]]
    assert found == [models.expected(SHORT, draw, n=16).tokens] * 4
    assert found[0] != models.expected(SHORT, sampler("warm", seed + 9).draw, n=16).tokens


# --- endings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [preset("chain-sd"), preset("opt-tree"), whims(9)], ids=lambda policy: policy.name)
def test_any_limit_of_new_tokens_is_kept(models: Models, policy: Preset) -> None:
    answers, whole = models.answers(policy), models.expected(SHORT, n=14)
    for n in range(1, 15):
        found = answers.to(SHORT, n=n)
        assert found.tokens == whole.tokens[:n]
        assert same_bits(found.logits, whole.logits[:n])
        assert found.reasons[-1] == "length"


@pytest.mark.parametrize("policy", [preset("chain-sd"), preset("specinfer"), preset("lever")], ids=lambda p: p.name)
def test_an_end_token_in_mid_path_is_the_last_step(models: Models, policy: Preset) -> None:
    draw = sampler("hot with penalties").draw
    whole = models.expected(SHORT, draw, n=14)
    answers = models.answers(policy)
    for token in whole.tokens:
        found = answers.to(SHORT, draw, n=14, end=frozenset({token}), temperature=1.5)
        expected = models.expected(SHORT, draw, n=14, end=frozenset({token}))
        assert expected.reasons[-1] == "stop" or token == whole.tokens[-1]
        assert found.same(expected)


@pytest.mark.parametrize("policy", POLICIES[1:6], ids=lambda policy: policy.name)
@pytest.mark.parametrize("n_prompt", [60, 92, 99])
def test_K4_a_full_context_ends_the_answer_as_plainly(models: Models, policy: Preset, n_prompt: int) -> None:
    with open_tiny(models.path, n_tree=N_TREE, n_ctx=100) as target:
        answers = Answers(target, models.draft("itself"), policy)
        with open_tiny(models.path, n_ctx=100) as plain:
            expected = Answers(plain).to(TOKENS[:n_prompt], n=None)
        found = answers.to(TOKENS[:n_prompt], n=None)
        assert found.same(expected)
        assert found.reasons[-1] == "length"
        assert len(found.tokens) == 100 - n_prompt


@pytest.mark.parametrize("policy", POLICIES[1:6], ids=lambda policy: policy.name)
def test_I10_a_draft_with_less_context_than_the_target_helps_as_far_as_it_goes(models: Models, policy: Preset) -> None:
    with open_tiny(models.path, n_tree=N_TREE, n_ctx=40, pin_percent=100) as drafting:
        answers = Answers(models.target, Draft(drafting.model), policy)
        for prompt in (TOKENS[:28], TOKENS[:60]):
            found = answers.to(prompt, n=20)
            assert found.same(models.expected(prompt, n=20))
    assert found.stats.verified == 0


@pytest.mark.parametrize("n_tree", [1, 2, 5])
def test_presets_that_want_more_rows_than_a_pass_takes_do_with_them(models: Models, n_tree: int) -> None:
    with open_tiny(models.path, n_tree=n_tree) as target, open_tiny(models.path, n_tree=n_tree) as drafting:
        for name in PRESETS:
            found = Answers(target, Draft(drafting.model), preset(name)).to(SHORT, n=16)
            assert found.same(models.expected(SHORT, n=16))


# --- one answer after another -------------------------------------------------------------------------------

A, B = TOKENS[:40], [*TOKENS[:25], *TOKENS[100:110]]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_K14_an_answer_does_not_depend_on_the_one_before(models: Models, policy: Preset) -> None:
    answers = models.answers(policy)
    for prompt in (A, B, A, A):
        assert answers.to(prompt).same(models.expected(prompt))


@pytest.mark.parametrize("kind", ["itself", "another"])
def test_engines_beside_each_other_give_the_same_bits_in_any_order_and_share_what_is_cached(
    models: Models, kind: str
) -> None:
    answers, first = models.answers(preset("chain-sd"), kind), True
    engines = [answers.engine, *(answers.engine.beside(policy) for policy in POLICIES)]
    for prompt, order in ((A, engines), (B, engines[::-1]), (A, engines)):
        for place, answers.engine in enumerate(order):
            found = answers.to(prompt)
            assert found.same(models.expected(prompt))
            assert found.stats.cached_tokens == (len(prompt) - 1 if place else 0 if first else 25)
            first = False


def test_an_answer_of_one_engine_ends_that_of_another_beside_it(models: Models) -> None:
    answers = models.answers(preset("lever"))
    stale = answers.steps(A)
    next(stale)
    answers.engine = answers.engine.beside(preset("flash-ar"))
    assert answers.to(B).same(models.expected(B))
    with pytest.raises(LeverError, match="one at a time"):
        next(stale)
    assert answers.to(B).same(models.expected(B))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_I5_a_conversation_goes_on_from_what_was_accepted(models: Models, policy: Preset) -> None:
    answers, text, known = models.answers(policy), list(SHORT), 0
    for turn in range(3):
        found = answers.to(text, n=12)
        assert found.same(models.expected(text, n=12))
        assert found.stats.cached_tokens == known
        known = len(text) + len(found.tokens) - 1  # the last token was never a row
        text += [*found.tokens, *TOKENS[50 * turn : 50 * turn + 3]]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("n_taken", [1, 2, 4])
def test_I7_an_answer_given_up_in_mid_walk_leaves_all_sound(models: Models, policy: Preset, n_taken: int) -> None:
    answers = models.answers(policy)
    steps = answers.steps(A)
    given_up = [next(steps).token for _ in range(n_taken)]
    steps.close()  # type: ignore[attr-defined]  # a generator
    expected = models.expected(A)
    assert given_up == expected.tokens[:n_taken]
    found = answers.to(A)
    assert found.same(expected)
    going_on = [*A, *expected.tokens[:n_taken], 17]
    assert answers.to(going_on).same(models.expected(going_on))
    assert answers.to(B).same(models.expected(B))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("n_taken", [1, 3])
def test_an_answer_that_another_one_replaced_cannot_go_on_and_spoils_nothing(
    models: Models, policy: Preset, n_taken: int
) -> None:
    """Neither by going on in the middle of a walk, nor by being forgotten long after."""
    answers = models.answers(policy)
    expected = models.expected(B, n=8)
    going_on = [*B, *expected.tokens]

    def replaced() -> Iterator[Step]:
        steps = answers.steps(A)
        for _ in range(n_taken):
            next(steps)
        assert answers.to(B, n=8).same(expected)
        return steps

    with pytest.raises(LeverError, match="one at a time"):
        next(replaced())
    assert answers.to(going_on).same(models.expected(going_on))

    replaced().close()  # type: ignore[attr-defined]  # a generator
    a = models.expected(A).tokens
    for follows in (a[n_taken - 1], a[0]):
        text = [*going_on, follows]
        assert answers.to([*text, 5]).same(models.expected([*text, 5]))


def test_an_answer_that_is_forgotten_while_another_one_comes_changes_nothing(models: Models) -> None:
    for policy in POLICIES:
        answers = models.answers(policy)
        old = answers.steps(A)
        for _ in range(3):
            next(old)
        new = answers.steps(B)
        found = [next(new).token for _ in range(3)]
        old.close()  # type: ignore[attr-defined]  # a generator
        found += [step.token for step in new]
        assert found == models.expected(B).tokens


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_K2_an_answer_that_was_cancelled_anywhere_leaves_all_sound(models: Models, policy: Preset) -> None:
    answers, expected = models.answers(policy), models.expected(A)
    for n_asked in (1, 5, 8):
        asked = iter(range(n_asked))
        with pytest.raises(Cancelled):
            for _ in answers.steps(A, n=400, cancelled=lambda asked=asked: next(asked, None) is None):
                pass
        assert answers.to(A).same(expected)


# --- failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("part", ["a layer", "the projection"])
def test_I20_after_a_pass_that_failed_all_is_sound(models: Models, policy: Preset, part: str) -> None:
    device = FakeDevice()
    with open_tiny(models.path, n_tree=N_TREE, n_logits=1, device=device, stream_projection=True) as target:
        unit = 1 if part == "a layer" else target.units.projection[0]
        (extent,) = target.store.units[unit].extents
        answers = Answers(target, models.draft("itself"), policy)
        for n_before in (1, 3):
            expected = models.expected(A, n=40)
            steps = answers.steps(A, n=200)
            tokens = [next(steps).token for _ in range(n_before)]
            device.broken = range(extent.offset, extent.offset + extent.nbytes)
            with pytest.raises(StorageError, match="Input/output error"):
                tokens += [step.token for step in steps]
            device.broken = range(0)
            n = min(len(tokens), 40)
            assert tokens[:n] == expected.tokens[:n]
            assert answers.to(A, n=40).same(expected)


@pytest.mark.parametrize("policy", POLICIES[1:], ids=lambda policy: policy.name)
def test_I20_after_a_draft_that_failed_all_is_sound(models: Models, policy: Preset) -> None:
    draft = models.draft("itself")
    answers = Answers(models.target, draft, policy)
    answers.engine._cost = answers.engine._guesser.cost = DearPasses()  # so that it is asked often enough
    expected = models.expected(A)
    for n_passes in (0, 1, 2, 5):
        with pytest.MonkeyPatch.context() as patch:
            fail_after(patch, draft, n_passes)
            with pytest.raises(StorageError, match="scripted"):
                answers.to(A, n=400)
        assert answers.to(A).same(expected)


def fail_after(patch: pytest.MonkeyPatch, draft: Draft, n_passes: int) -> None:
    """The draft's model breaks in the middle of a pass, layer by layer or whole."""
    model, passes = draft.model, iter(range(n_passes))
    assert model._steps is not None
    real_layer, real_run = model._layer, model._steps.run

    def layer(number: int, *rest: Any) -> None:
        if number == 1 and next(passes, None) is None:
            raise StorageError("scripted")
        real_layer(number, *rest)

    def run(block: Any) -> float:
        if next(passes, None) is None:
            raise StorageError("scripted")
        return real_run(block)

    patch.setattr(model, "_layer", layer)
    patch.setattr(model._steps, "run", run)


@pytest.mark.parametrize("way", ["exact", "masked"])
@pytest.mark.parametrize("policy", POLICIES[1:], ids=lambda policy: policy.name)
def test_a_candidate_at_which_the_target_overflows_spoils_no_row_beside_it(
    tmp_path: Path, policy: Preset, way: str
) -> None:
    """Its keys and values are not finite. Masked or behind others they still make sums that are no numbers."""

    class Spoiler(Draft):
        """Says token 7 where a choice of its own was: the third, or in a chain the first."""

        def _likeliest(self, logits: NDArray[np.float32], temperature: float) -> list[tuple[int, float]]:
            found = super()._likeliest(logits, temperature)
            place = 0 if policy.name == "chain-sd" else 2
            return [*found[:place], (7, found[place][1]), *found[place + 1 :]] if found else []

    path = overflowing(tmp_path / "tiny.gguf")
    settings: dict[str, Any] = {"pin_percent": 100, "n_tree": N_TREE}
    prompt = [token for token in TOKENS if token != 7][:20]
    with ExitStack() as stack:
        target = stack.enter_context(open_tiny(path, tree_attention=way, **settings))
        drafting, plain = (stack.enter_context(open_tiny(path, **more)) for more in (settings, {}))
        expected = Answers(plain).to(prompt, without_7)
        found = Answers(target, Spoiler(drafting.model), policy).to(prompt, without_7)
        assert found.same(expected) if found.stats.exact else agree(found, expected)


def without_7(logits: NDArray[np.float32], _history: Sequence[int], _position: int) -> int:
    assert np.isfinite(logits).all()
    logits = logits.copy()
    logits[7] = -np.inf
    return int(np.argmax(logits))


# --- figures ------------------------------------------------------------------------------------------------


def test_figures_of_a_chain_add_up(models: Models) -> None:
    """24 tokens: the first is of the prompt; each pass gives one more than it accepts."""
    stats = models.answers(preset("chain-sd")).to(SHORT, n=24).stats
    assert stats.new_tokens == 24 == 1 + stats.cycles + stats.accepted
    assert stats.tokens_per_cycle == 23 / stats.cycles
    assert stats.verified <= 8 * stats.cycles
    assert stats.drafted <= 7 * stats.cycles
    assert 0 < stats.draft_s < stats.decode_s
    parts = stats.verify_s + stats.project_s + stats.stall_s + stats.draft_s + stats.python_s
    assert parts == pytest.approx(stats.decode_s)


def test_figures_of_a_tree_count_rows_and_draft_steps(models: Models) -> None:
    checked, asked = [], []
    grow, select = best_nodes(12)

    def counted_grow(now: Situation) -> list[int]:
        asked.append(grow(now))
        return asked[-1]

    def counted_select(now: Situation) -> list[int]:
        checked.append(select(now))
        return checked[-1]

    policy = Preset("counted", "", counted_grow, counted_select)
    stats = models.answers(policy).to(SHORT, n=100).stats
    assert stats.cycles == len(checked)
    assert stats.verified == sum(len(nodes) - 1 for nodes in checked)
    at_the_end = 12 * 2  # where a step leaves out nodes that can no longer become text
    assert sum(map(len, asked)) - at_the_end <= stats.drafted <= sum(map(len, asked))


def test_figures_without_a_draft_are_those_of_plain_decoding(models: Models) -> None:
    stats = models.expected(SHORT, n=10).stats
    assert (stats.cycles, stats.drafted, stats.verified, stats.accepted, stats.draft_s) == (9, 0, 0, 0, 0.0)
    assert stats.tokens_per_cycle == 1.0


# --- masked trees: the same text but at near ties ------------------------------------------------------------

ROUNDING = 2e-4  # relative, of the logits of a row: see test_tree_pass
TIE = 1e-3  # a gap between the two best logits that rounding does not close: logits go up to 5
ALL, NONE = float("inf"), 0.0  # bounds of near ties


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """Weights in F32: without 8-bit activations differences are small, and what is wrong is seen."""
    with opened(tmp_path_factory.mktemp("masked"), "F32", tree_attention="masked") as models:
        yield models


def agree(found: Answer, expected: Answer) -> int:
    """Assert that an answer is the expected one up to the first near tie; how many tokens were compared."""
    for n, (token, logits) in enumerate(zip(found.tokens, found.logits, strict=True)):
        assert relative_error(logits, expected.logits[n].astype(np.float64)) < ROUNDING
        if token != expected.tokens[n]:
            assert not found.stats.exact
            assert top2_gap(expected.logits[n]) < TIE
            return n + 1
    assert found.reasons == expected.reasons
    if found.stats.exact:
        assert found.same(expected)
    return len(found.tokens)


@pytest.mark.parametrize("kind", ["itself", "another", "contrary", "damaged"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_masked_trees_give_the_text_of_plain_decoding_but_at_near_ties(
    masked: Models, policy: Preset, kind: str
) -> None:
    answers = masked.answers(policy, kind)
    for prompt in (AT_THE_BORDER, SHORT):
        assert agree(answers.to(prompt), masked.expected(prompt)) > 12


@pytest.mark.parametrize("name", ["chain-sd", "flash-ar"])
@pytest.mark.parametrize("kind", ["itself", "contrary"])
def test_a_masked_tree_of_one_path_is_exact(masked: Models, name: str, kind: str) -> None:
    found = masked.answers(preset(name), kind).to(AT_THE_BORDER)
    assert (found.stats.exact, found.stats.near_ties) == (True, 0)
    assert found.same(masked.expected(AT_THE_BORDER))


def test_what_a_masked_branch_gave_is_told_and_counted(masked: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right choices are second ones: the text leaves the first path."""
    for bound in (ALL, NONE, 0.05):
        monkeypatch.setattr("lever.request.NEAR_TIE", bound)
        found = masked.answers(preset("opt-tree"), "contrary").to(SHORT)
        same = map(same_bits, found.logits, masked.expected(SHORT).logits)
        first = next((n for n, is_same in enumerate(same) if not is_same), 24)
        gaps = [top2_gap(logits) for logits in found.logits]
        assert not found.stats.exact
        least, most = (sum(gap < bound for gap in gaps[start:]) for start in (first, 1))
        assert least <= found.stats.near_ties <= most
        assert (bound == NONE) == (most == 0)


def test_near_ties_are_counted_in_masked_trees_alone(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lever.request.NEAR_TIE", ALL)
    stats = models.answers(preset("opt-tree"), "contrary").to(SHORT).stats
    assert stats.accepted > 0
    assert (stats.exact, stats.near_ties) == (True, 0)


def test_an_answer_that_goes_on_from_masked_rows_is_not_exact_and_a_new_one_is(
    masked: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lever.request.NEAR_TIE", ALL)
    answers = masked.answers(preset("opt-tree"), "contrary")
    found = answers.to(SHORT)
    going_on = answers.to([*SHORT, *found.tokens, 17], n=1)
    assert going_on.stats.cached_tokens > len(SHORT)
    assert (going_on.stats.exact, going_on.stats.near_ties) == (False, 1)
    afresh = answers.to(SHORT, n=1)
    assert (afresh.stats.exact, afresh.stats.near_ties) == (True, 0)
    assert afresh.same(masked.expected(SHORT, n=1))


@pytest.mark.parametrize("policy", POLICIES[1:], ids=lambda policy: policy.name)
@pytest.mark.parametrize("n_prompt", [60, 92, 99])
def test_K4_masked_trees_end_at_a_full_context(masked: Models, policy: Preset, n_prompt: int) -> None:
    with open_tiny(masked.path, n_tree=N_TREE, n_ctx=100, tree_attention="masked") as target:
        found = Answers(target, masked.draft("itself"), policy).to(TOKENS[:n_prompt], n=None)
        assert target.model.kv.length == 99
    with open_tiny(masked.path, n_ctx=100) as plain:
        agree(found, Answers(plain).to(TOKENS[:n_prompt], n=None))
    assert found.reasons[-1] == "length"
    assert len(found.tokens) == 100 - n_prompt


@pytest.mark.parametrize("policy", POLICIES[1:], ids=lambda policy: policy.name)
@pytest.mark.parametrize("end", ["given up", "cancelled"])
def test_a_masked_answer_that_ends_early_leaves_all_sound(masked: Models, policy: Preset, end: str) -> None:
    answers, expected = masked.answers(policy, "contrary"), masked.expected(A)
    for n in (1, 2, 5):
        if end == "given up":
            steps = answers.steps(A)
            for _ in range(n):
                next(steps)
            steps.close()  # type: ignore[attr-defined]  # a generator
        else:
            asked = iter(range(n + 3))
            with pytest.raises(Cancelled):
                for _ in answers.steps(A, n=400, cancelled=lambda asked=asked: next(asked, None) is None):
                    pass
        agree(answers.to(A), expected)
        assert answers.to(B, n=1).same(masked.expected(B, n=1))
        going_on = [*B, *masked.expected(B, n=1).tokens]
        agree(answers.to(going_on), masked.expected(going_on))
