"""The cycle of guessing and checking, over a scripted target and draft on a clock that does what it is told.

What comes is the target's text whatever is guessed; here is what is counted and kept, what is tried, and what is left.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lever.engine import Engine
from lever.errors import Cancelled, StorageError
from lever.lookup import MOST_TOKENS
from lever.policies import PRESETS, Preset, preset
from lever.request import Step
from lever.stats import RunStats
from lever.trace import Cycle
from tests.fakes import FakeClock, Language, ScriptedDraft, ScriptedTarget, wait_until, whims

PROMPT = [1, 2, 3, 4, 5]
END = 31
NO_END: frozenset[int] = frozenset()
DRAFTING = [name for name in PRESETS if PRESETS[name].drafts]
Guess = Callable[[Sequence[int]], list[tuple[int, float]]]


# --- languages and guesses ----------------------------------------------------------------------------------


def free(seed: int, n_words: int = 30) -> Language:
    """Each text goes on as it likes, and the same each time."""
    return lambda text: random.Random(f"{seed} {len(text)} {list(text[-6:])}").randrange(n_words)


def periodic(text: Sequence[int]) -> int:
    """Says the same seven tokens for ever."""
    return 10 + len(text) % 7


def teasing(text: Sequence[int]) -> int:
    """Three tokens that came before, then one that never came behind them: what was said there is always wrong."""
    turn, place = divmod(len(text), 4)
    return 10 + place if place < 3 else 13 + turn % 17


def knowing(language: Language, right: float, seed: int = 0) -> Guess:
    """A draft whose first choice is right so often, by its own word too; its others are wrong."""

    def guess(text: Sequence[int]) -> list[tuple[int, float]]:
        token = language(text)
        first = token if random.Random(f"{seed} {len(text)} {list(text[-6:])}").random() < right else (token + 1) % 30
        others = [(first + n) % 30 for n in (2, 3, 4)]
        return [(first, right), *((other, (1 - right) / 4) for other in others)]

    return guess


def boasting(language: Language) -> Guess:
    """Always sure, always wrong."""
    return lambda text: [((language(text) + 1) % 30, 1.0)]


@dataclass
class Run:
    """An engine over scripted models, and what its last answer was."""

    language: Language
    policy: Preset
    guess: Guess | None = None
    target_options: dict[str, Any] = field(default_factory=dict)
    draft_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.target = ScriptedTarget(self.language, self.clock, **self.target_options)
        self.draft = None if self.guess is None else ScriptedDraft(self.guess, self.clock, **self.draft_options)
        self.engine = Engine(
            self.target.as_model(),
            self.target.store.as_store(),
            1,
            draft=None if self.draft is None else self.draft.as_draft(),
            policy=self.policy,
        )
        self.stats = RunStats()
        self.cycles: list[Cycle] = []

    def steps(self, n: int | None, end: frozenset[int] = NO_END, **options: Any) -> Iterator[Step]:
        self.stats = RunStats()
        self.cycles.clear()
        self.target.passes.clear()
        return self.engine.steps(
            options.pop("prompt", PROMPT),
            greedy,
            max_new_tokens=n,
            end_tokens=end,
            stats=self.stats,
            on_cycle=self.cycles.append,
            **options,
        )

    def answer(self, n: int | None, end: frozenset[int] = NO_END, **options: Any) -> list[int]:
        """The tokens of an answer, each counted when it comes."""
        tokens = []
        with self.clock.on_the_wall():
            for step in self.steps(n, end, **options):
                tokens.append(step.token)
                assert self.stats.new_tokens == len(tokens) == 1 + self.stats.cycles + self.stats.accepted
        return tokens

    @property
    def drafted_cycles(self) -> list[int]:
        """The numbers of the cycles in which the draft was asked anything."""
        return [n for n, cycle in enumerate(self.cycles) if cycle.tree.expanded(0)]


def greedy(logits: NDArray[np.float32], _history: Sequence[int], _position: int) -> int:
    return int(np.argmax(logits))


def plainly(language: Language, n: int, end: frozenset[int] = NO_END, prompt: Sequence[int] = PROMPT) -> list[int]:
    """What a language says, token by token."""
    text = list(prompt)
    while len(text) < len(prompt) + n and (len(text) == len(prompt) or text[-1] not in end):
        text.append(language(text))
    return text[len(prompt) :]


def policies() -> st.SearchStrategy[Preset]:
    return st.sampled_from([*PRESETS.values()]) | st.integers(0, 10**6).map(whims)


# --- what comes, what is counted, what is kept --------------------------------------------------------------


@given(
    policy=policies(),
    seed=st.integers(0, 10**6),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    n=st.integers(1, 40),
    end=st.frozensets(st.integers(0, 29), max_size=2),
    words=st.sampled_from([3, 30]),
    n_logits=st.sampled_from([1, 8]),
)
@settings(deadline=None, max_examples=150)
def test_an_answer_is_the_targets_text_to_its_end_and_nothing_behind_it_is_kept(
    policy: Preset, seed: int, right: float, n: int, end: frozenset[int], words: int, n_logits: int
) -> None:
    """An end in the middle of an accepted run, too; and a second answer goes on from the rows of the first."""
    language = free(seed, words)
    run = Run(language, policy, knowing(language, right, seed), {"n_logits": n_logits})
    for prompt in (PROMPT, [*PROMPT, *plainly(language, n, end), 7]):
        expected = plainly(language, n, end, prompt)
        known = len(run.target.rows)
        assert run.answer(n, end, prompt=prompt) == expected
        assert run.stats.cached_tokens == known
        assert run.target.rows == [*prompt, *expected[:-1]]
        assert run.engine._cached == run.target.rows
        add_up(run, n)


def add_up(run: Run, n: int) -> None:
    stats, cycles = run.stats, run.cycles
    assert stats.cycles == len(cycles)
    assert [len(cycle.rows.nodes) for cycle in cycles] == run.target.passes[1:]  # the first is the prompt's
    assert stats.plain_cycles == sum(len(cycle.rows.nodes) == 1 for cycle in cycles)
    assert stats.looked_up == sum(len(c.rows.nodes) > 1 and not c.tree.expanded(0) for c in cycles)
    assert stats.verified == sum(len(cycle.rows.nodes) - 1 for cycle in cycles)
    assert stats.accepted == sum(len(cycle.accepted) for cycle in cycles)
    if run.policy.name == "whims":  # which does not care how much may still come
        return
    room = n - 1
    for cycle in cycles:
        assert max(cycle.tree.depths[node] for node in cycle.rows.nodes) <= room - 1
        room -= 1 + len(cycle.accepted)


@given(policy=policies(), seed=st.integers(0, 10**6), n_taken=st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_an_answer_that_is_not_wanted_any_more_keeps_what_was_taken_of_it(
    policy: Preset, seed: int, n_taken: int
) -> None:
    """So it is with a stop string: whoever reads the text ends it in the middle of an accepted run."""
    language = free(seed, 5)
    run = Run(language, policy, knowing(language, 0.9, seed))
    with run.clock.on_the_wall():
        steps = run.steps(30)
        taken = [next(steps).token for _ in range(n_taken)]
        steps.close()  # type: ignore[attr-defined]  # a generator
    assert taken == plainly(language, n_taken)
    assert run.stats.new_tokens == n_taken == 1 + run.stats.cycles + run.stats.accepted
    assert run.target.rows == run.engine._cached == [*PROMPT, *taken[:-1]]
    assert run.answer(30) == plainly(language, 30)


@given(policy=policies(), seed=st.integers(0, 10**6), n_ctx=st.integers(6, 20), draft_ctx=st.integers(1, 24))
@settings(deadline=None, max_examples=60)
def test_a_full_context_ends_the_answer_and_a_draft_with_less_helps_as_far_as_it_goes(
    policy: Preset, seed: int, n_ctx: int, draft_ctx: int
) -> None:
    if policy.name == "whims":
        policy = preset("lever")
    language = free(seed)
    run = Run(language, policy, knowing(language, 0.9, seed), {"n_ctx": n_ctx}, {"n_ctx": draft_ctx})
    assert run.answer(None) == plainly(language, n_ctx - len(PROMPT))
    assert run.target.rows == [*PROMPT, *plainly(language, n_ctx - len(PROMPT))][:-1]


# --- guesses from the text ----------------------------------------------------------------------------------


@pytest.mark.parametrize("guess", [None, knowing(periodic, 0.3)], ids=["no draft", "a poor draft"])
def test_a_text_that_repeats_itself_is_guessed_from_what_was_said(guess: Guess | None) -> None:
    run = Run(periodic, preset("lever"), guess, draft_options={"step_s": 0.2})
    assert run.answer(200) == plainly(periodic, 200)
    assert run.stats.looked_up > 5
    later = run.cycles[len(run.cycles) // 2 :]
    assert np.mean([1 + len(cycle.accepted) for cycle in later]) > 0.5 * MOST_TOKENS
    assert run.stats.cycles < 40


def test_only_a_preset_that_looks_there_guesses_from_the_text() -> None:
    for name in PRESETS:
        run = Run(periodic, preset(name))
        assert run.answer(60) == plainly(periodic, 60)
        assert (run.stats.looked_up > 0) == (name == "lever")
        assert (run.stats.verified > 0) == (name == "lever")


def test_a_draft_that_knows_what_comes_is_asked_although_the_text_repeats_itself() -> None:
    """It costs next to nothing, and guesses as far as the pass takes rows."""
    run = Run(periodic, preset("lever"), knowing(periodic, 1.0), draft_options={"step_s": 1e-6})
    assert run.answer(200) == plainly(periodic, 200)
    assert len(run.drafted_cycles) >= 1
    assert run.stats.cycles < 20


@pytest.mark.parametrize("row_s", [0.01, 1.0], ids=["free rows", "dear rows"])
@pytest.mark.parametrize("language", [teasing, free(3)], ids=["teasing", "free"])
def test_guesses_from_a_text_that_does_not_repeat_itself_lose_nothing(language: Language, row_s: float) -> None:
    """Under the knee they are free; beyond it they are soon left."""
    options = {"row_s": row_s}
    plain, lever = Run(language, preset("flash-ar"), None, options), Run(language, preset("lever"), None, options)
    assert plain.answer(200) == lever.answer(200) == plainly(language, 200)
    assert lever.clock.now <= 1.1 * plain.clock.now


@pytest.mark.parametrize("row_s", [0.01, 0.4, 1.0])
@pytest.mark.parametrize("right", [0.0, 0.5])
def test_a_cycle_counts_as_looked_up_if_it_checked_what_the_text_says(row_s: float, right: float) -> None:
    """Not if it looked and found nothing worth a row, even before it has learned that guessing does not pay."""
    for n_prompt in range(8, 12):
        prompt = plainly(teasing, n_prompt, prompt=[0])
        run = Run(teasing, preset("lever"), knowing(teasing, right), {"row_s": row_s, "read_s": 0.5}, {"step_s": 0.3})
        assert run.answer(60, prompt=prompt) == plainly(teasing, 60, prompt=prompt)
        add_up(run, 60)


# --- projection ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTING)
@pytest.mark.parametrize("right", [0.8, 1.0])
def test_rows_that_are_projected_together_have_each_its_own_logits(name: str, right: float) -> None:
    """One projection takes as long for eight as for one, so that likely paths are projected at once."""
    language = free(4)
    run = Run(language, preset(name), knowing(language, right), {"project_s": lambda _n: 0.5})
    with run.clock.on_the_wall():
        steps = list(run.steps(80))
    text = list(PROMPT)
    for step in steps:
        assert step.token == language(text)
        assert step.logits.sum() == step.logits[language(text)] == 1.0
        text.append(step.token)
    assert max(run.target.projected) > 1
    assert len(run.target.projected) < len(steps)


@pytest.mark.parametrize("name", DRAFTING)
def test_rows_are_projected_one_by_one_where_more_take_longer_in_proportion(name: str) -> None:
    """It is tried, since that cannot be known before; then never more than the walk reaches."""
    language = free(5)
    run = Run(language, preset(name), knowing(language, 0.7), {"project_s": lambda n: 0.1 * n})
    run.answer(100)
    assert sum(run.target.projected) <= 100 + 20


def test_a_model_that_holds_the_logits_of_one_row_projects_one_by_one() -> None:
    language = free(6)
    run = Run(language, preset("chain-sd"), knowing(language, 1.0), {"n_logits": 1, "project_s": lambda _n: 0.5})
    assert run.answer(50) == plainly(language, 50)
    assert set(run.target.projected) == {1}
    assert len(run.target.projected) == 50


# --- not speculating ----------------------------------------------------------------------------------------


def test_a_dear_draft_that_is_sure_and_wrong_is_left_and_tried_again_later() -> None:
    language = free(7)
    run = Run(language, preset("lever"), boasting(language), draft_options={"step_s": 0.5})
    plain = Run(language, preset("flash-ar"))
    assert run.answer(400) == plain.answer(400) == plainly(language, 400)
    assert len(run.drafted_cycles) <= 12
    assert run.drafted_cycles[-1] > 200
    assert run.stats.plain_cycles >= run.stats.cycles - 12
    assert run.clock.now < 1.05 * plain.clock.now


def test_a_draft_that_would_have_to_read_much_is_not_tried_again() -> None:
    """A fifth of a plain pass for each token that came without it: every try would cost as much as that share."""
    language = free(7)
    run = Run(language, preset("lever"), boasting(language), draft_options={"step_s": 0.5, "read_s": 0.2})
    plain = Run(language, preset("flash-ar"))
    assert run.answer(400) == plain.answer(400)
    assert len(run.drafted_cycles) <= 3  # of which the last one shows what reading takes
    assert run.clock.now < 1.03 * plain.clock.now


def test_a_draft_that_has_become_right_is_used_again() -> None:
    """As where a text comes to what it knows: after 150 tokens of nonsense."""
    language = free(8)
    wrong, right = boasting(language), knowing(language, 1.0)
    run = Run(
        language,
        preset("lever"),
        lambda text: wrong(text) if len(text) < 150 else right(text),
        draft_options={"step_s": 0.05},
    )
    assert run.answer(600) == plainly(language, 600)
    late = run.cycles[-10:]
    assert all(cycle.tree.expanded(0) for cycle in late)
    assert np.mean([1 + len(cycle.accepted) for cycle in late]) > 4


def test_a_fixed_preset_drafts_on_whatever_it_brings() -> None:
    """Baselines do as their papers say."""
    language = free(9)
    for name in ("chain-sd", "specinfer", "opt-tree"):
        run = Run(language, preset(name), boasting(language), draft_options={"step_s": 2.0})
        run.answer(50)
        assert len(run.drafted_cycles) >= run.stats.cycles - 1


# --- drafting beside the pass -------------------------------------------------------------------------------


def edgellm(language: Language) -> tuple[Run, ScriptedDraft]:
    """On a real clock: time passes in both threads."""
    run = Run(language, preset("edgellm"), knowing(language, 0.9))
    assert run.draft is not None
    return run, run.draft


def beside() -> bool:
    return threading.current_thread() is not threading.main_thread()


def test_what_is_drafted_beside_a_pass_is_counted_as_hidden_and_is_the_next_cycles_start() -> None:
    """Every pass but that of the prompt lasts until two steps were made beside it."""
    language = free(10)
    run, draft = edgellm(language)

    def last() -> None:
        enough = draft.n_beside + 2
        wait_until(lambda: not run.target.rows or not draft.text or draft.n_beside >= enough)

    run.target.before_pass = last
    tokens = [step.token for step in run.steps(40)]
    assert tokens == plainly(language, 40)
    assert draft.n_beside >= 2 * (run.stats.cycles - 1)
    assert run.stats.drafted >= draft.n_beside
    assert run.stats.draft_hidden_s > 0
    assert draft.n_begun > draft.n_first > 0


def test_drafting_beside_a_pass_has_ended_before_anything_else_begins() -> None:
    """A step that is under way when the pass ends is waited for: logits, draws and books come after it."""
    language = free(11)
    run, draft = edgellm(language)
    begun, ended, seen = threading.Event(), threading.Event(), []

    def slowly() -> None:
        if beside():
            begun.set()
            ended.wait(10)
            time.sleep(0.005)  # so long the engine waits for it

    def before_pass() -> None:
        ended.clear()
        if draft.text and run.target.rows:
            assert begun.wait(10)

    def after_layer() -> bool:
        begun.clear()
        ended.set()
        return False

    draft.before_step, run.target.before_pass = slowly, before_pass
    run.target.before_project = lambda: seen.append(draft.in_step)
    assert [step.token for step in run.steps(12, cancelled=after_layer)] == plainly(language, 12)
    assert draft.n_beside > 0
    assert not any(seen)


@pytest.mark.parametrize("name", ["edgellm", "lever"])
def test_a_draft_that_fails_is_the_error_and_the_engine_is_sound_after_it(name: str) -> None:
    language = free(12)
    run = Run(language, preset(name), knowing(language, 0.9))
    draft = run.draft
    assert draft is not None

    def fail() -> None:
        raise StorageError("the draft failed")

    for n_before in (1, 4):
        steps = run.steps(60)
        taken = [next(steps).token for _ in range(n_before)]
        draft.before_step = fail
        with pytest.raises(StorageError, match="the draft failed"):
            taken.extend(step.token for step in steps)
        draft.before_step = lambda: None
        assert taken == plainly(language, len(taken))
        assert run.answer(30) == plainly(language, 30)


def test_a_target_that_fails_while_the_draft_goes_on_is_the_error() -> None:
    language = free(13)
    run, draft = edgellm(language)
    steps = run.steps(60)
    taken = [next(steps).token for _ in range(5)]
    run.target.fails = True
    with pytest.raises(StorageError, match="the target failed"):
        taken.extend(step.token for step in steps)
    run.target.fails = False
    assert not draft.in_step
    assert run.answer(30) == plainly(language, 30)


def test_an_answer_given_up_in_a_pass_ends_the_drafting_beside_it() -> None:
    language = free(14)
    run, draft = edgellm(language)
    for n_asked in range(3, 30, 4):
        asked = iter(range(n_asked))
        with pytest.raises(Cancelled):
            list(run.steps(60, cancelled=lambda asked=asked: next(asked, None) is None))
        assert not draft.in_step
        assert run.answer(20) == plainly(language, 20)


# --- the prompt ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTING)
def test_the_draft_reads_the_prompt_before_the_first_token_and_that_is_prefill(name: str) -> None:
    language = free(15)
    run = Run(language, preset(name), knowing(language, 0.9), draft_options={"read_s": 0.05})
    assert run.draft is not None
    with run.clock.on_the_wall():
        steps = run.steps(20)
        next(steps)
        assert run.draft.text == PROMPT
        assert (run.draft.n_begun, run.stats.draft_s, run.stats.decode_s) == (0, 0.0, 0.0)
        assert run.stats.prefill_s == pytest.approx(1.0 + 0.01 + 0.05 * len(PROMPT))
        list(steps)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_draft_does_not_read_a_prompt_that_it_can_not_help_with(n: int) -> None:
    """With two tokens, no cycle has room for a guess that is right and a token behind it."""
    language = free(16)
    run = Run(language, preset("lever"), knowing(language, 0.9))
    assert run.answer(n) == plainly(language, n) if n else run.steps(0) is not None
    assert run.draft is not None
    assert run.draft.text == []


def test_an_answer_given_up_while_the_draft_reads_the_prompt_ends_there() -> None:
    language = free(17)
    run = Run(language, preset("lever"), knowing(language, 0.9))
    draft = run.draft
    assert draft is not None
    with pytest.raises(Cancelled):
        list(run.steps(20, cancelled=lambda: draft.text == PROMPT[:2]))
    assert draft.text == PROMPT[:2]
    assert run.target.rows == PROMPT
    assert run.answer(20) == plainly(language, 20)
    assert run.stats.cached_tokens == len(PROMPT) - 1
