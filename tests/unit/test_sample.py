"""Drawing a token, against the plain definition of each step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lever.errors import LeverError, UsageError
from lever.sample import Sampler, logprob, top2_gap, top_logprobs, uniform
from lever.settings import SamplerSettings

OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def floats(*values: float) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def draws(logits: NDArray[np.float32], history: Sequence[int] = (), positions: int = 300, **given: Any) -> set[int]:
    """The tokens that come up at many positions, with every step off that is not given."""
    sampler = Sampler(SamplerSettings(**{"seed": 7, **OFF, **given}), len(logits))
    return {sampler.draw(logits, history, position) for position in range(positions)}


# --- the slow twin: each step as its definition says, one token at a time -------------------------------------

PHILOX_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
PHILOX_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox 4x64 with 10 rounds, after Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = PHILOX_MULTIPLIERS[0] * c0, PHILOX_MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (b >> 64) ^ c1 ^ k0, b % 2**64, (a >> 64) ^ c3 ^ k1, a % 2**64
        k0, k1 = (k0 + PHILOX_STEPS[0]) % 2**64, (k1 + PHILOX_STEPS[1]) % 2**64
    return c0, c1, c2, c3


def slow_uniform(seed: int, position: int) -> float:
    return (philox((1, 0, 0, 0), (seed, position))[0] >> 11) / 2**53


def slow_candidates(
    logits: Sequence[float], history: Sequence[int], s: SamplerSettings
) -> tuple[list[int], dict[int, float]]:
    values = {token: float(logit) + s.logit_bias.get(token, 0.0) for token, logit in enumerate(logits)}
    recent = list(history if s.repeat_last_n == -1 else history[::-1][: s.repeat_last_n])
    for token in set(recent):
        count = recent.count(token)
        values[token] *= s.repeat_penalty if values[token] <= 0 else 1 / s.repeat_penalty
        values[token] -= count * s.frequency_penalty + s.presence_penalty
    order = sorted(values, key=lambda token: (-values[token], token))
    if s.temperature <= 0:
        return order[:1], values
    if s.top_k > 0:
        order = order[: s.top_k]
    weights = [math.exp(values[token] - values[order[0]]) for token in order]
    if s.top_p < 1:
        enough = (n for n in range(1, len(order)) if math.fsum(weights[:n]) >= s.top_p * math.fsum(weights))
        order = order[: next(enough, len(order))]
    least = math.log(s.min_p) if s.min_p > 0 else -math.inf
    best = values[order[0]]
    return [token for token in order if -math.inf < values[token] >= best + least - 1e-12], values


def slow_draw(logits: Sequence[float], history: Sequence[int], position: int, s: SamplerSettings) -> int:
    order, values = slow_candidates(logits, history, s)
    weights = [math.exp((values[token] - values[order[0]]) / max(s.temperature, 1e-9)) for token in order]
    point = slow_uniform(s.seed, position) * math.fsum(weights)
    inside = (token for n, token in enumerate(order, 1) if math.fsum(weights[:n]) >= point)
    return next(inside, order[-1])


def test_the_slow_philox_gives_the_published_vectors() -> None:
    # kat_vectors of the Random123 library
    zeros = (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B)
    ones = (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0)
    assert philox((0, 0, 0, 0), (0, 0)) == zeros
    assert philox((2**64 - 1,) * 4, (2**64 - 1,) * 2) == ones


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40))
def test_H5_the_random_number_is_philox_under_seed_and_position(seed: int, position: int) -> None:
    assert uniform(seed, position) == slow_uniform(seed, position)


SETTINGS = st.builds(
    SamplerSettings,
    temperature=st.sampled_from([0.0, 0.1, 0.8, 1.0, 1.7]),
    top_k=st.integers(-1, 30),
    top_p=st.one_of(st.just(1.0), st.floats(0.011, 1.009)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0011, 0.4)),
    repeat_penalty=st.sampled_from([1.0, 1.1, 0.9, 2.0]),
    repeat_last_n=st.integers(-1, 12),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.25]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    logit_bias=st.dictionaries(st.integers(0, 11), st.sampled_from([-math.inf, -1.5, 0.5, 100.0]), max_size=3),
    seed=st.integers(0, 2**64 - 1),
)
# Few distinct values, so that ties are common; irregular ones, so that a sum does not meet a limit exactly.
LOGITS = st.lists(st.sampled_from([-math.inf, -3.7, -1.13, 0.0, 0.77, 1.31, 4.19]), min_size=12, max_size=24)


@settings(max_examples=250, deadline=None)
@given(logits=LOGITS, history=st.lists(st.integers(0, 11), max_size=20), position=st.integers(0, 9999), s=SETTINGS)
def test_a_draw_equals_the_slow_twin(
    logits: list[float], history: list[int], position: int, s: SamplerSettings
) -> None:
    raw = floats(*logits, 1.0)  # one token is neither banned nor seen
    assert Sampler(s, len(raw)).draw(raw, history, position) == slow_draw(raw.tolist(), history, position, s)


@pytest.mark.parametrize("given_", [{}, {"top_k": 0}, {"top_k": 0, "min_p": 0.0}, OFF, {"repeat_penalty": 1.3}])
def test_a_draw_from_a_large_vocabulary_equals_the_slow_twin(given_: dict[str, Any]) -> None:
    logits = (np.random.default_rng(5).standard_normal(6000) * 4).astype(np.float32)
    logits[::7] = logits[3]  # ties
    s = SamplerSettings(seed=3, **given_)
    sampler, history = Sampler(s, len(logits)), [1, 2, 3, 3, 5999]
    for position in range(3):
        assert sampler.draw(logits, history, position) == slow_draw(logits.tolist(), history, position, s)


# --- greedy ---------------------------------------------------------------------------------------------------


def test_H1_temperature_0_takes_the_best_and_of_equal_ones_the_lowest_id() -> None:
    assert draws(floats(1, 3, 3, -2, 3), temperature=0) == {1}
    assert draws(floats(1, 3, 3.0000002, -2, 3), temperature=-1.0) == {2}


def test_H1_temperature_0_does_not_depend_on_seed_or_filters() -> None:
    logits = np.random.default_rng(1).standard_normal(500).astype(np.float32)
    best = int(np.argmax(logits))
    for seed in (0, 1, 2**64 - 1):
        assert draws(logits, positions=5, temperature=0, seed=seed, top_k=3, top_p=0.1, min_p=0.9) == {best}


def test_H1_temperature_0_applies_bias_and_penalties() -> None:
    logits = floats(1, 3, 2.9)
    assert draws(logits, temperature=0, logit_bias={0: 5.0}) == {0}
    assert draws(logits, temperature=0, logit_bias={1: -math.inf}) == {2}
    assert draws(logits, history=[1], temperature=0, repeat_penalty=1.1) == {2}
    assert draws(logits, history=[1, 1], temperature=0, frequency_penalty=0.06) == {2}


# --- each step alone changes what it should ---------------------------------------------------------------------

SLOPE = floats(2, 1.5, 1, 0.5, 0, -0.5)


def test_H4_with_every_step_off_a_token_is_still_drawn() -> None:
    assert draws(SLOPE) == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("top_k", [0, -1, 6, 7, 10**9])
def test_H2_top_k_of_0_or_less_or_beyond_the_vocabulary_is_off(top_k: int) -> None:
    assert draws(SLOPE, top_k=top_k) == {0, 1, 2, 3, 4, 5}


def test_H7_top_k_keeps_the_best_and_of_equal_ones_the_lowest_ids() -> None:
    assert draws(SLOPE, top_k=2) == {0, 1}
    assert draws(floats(0, 1, 1, 5, 1, 1), top_k=3) == {1, 2, 3}
    assert draws(floats(*[1.0] * 1000), top_k=4) == {0, 1, 2, 3}


def test_H7_top_p_keeps_the_shortest_beginning_that_holds_p() -> None:
    half = floats(math.log(0.5), math.log(0.3), math.log(0.15), math.log(0.05))
    assert draws(half, top_p=0.4) == {0}
    assert draws(half, top_p=0.6) == {0, 1}
    assert draws(half, top_p=0.9) == {0, 1, 2}
    assert draws(half, top_p=0) == {0}
    assert draws(half, top_p=1) == draws(half, top_p=2) == {0, 1, 2, 3}
    assert draws(floats(1, 1, 1, 1), top_p=0.5) == {0, 1}


def test_H7_top_p_counts_what_top_k_left() -> None:
    tenths = floats(*map(math.log, [0.2, 0.2, 0.2, 0.2, 0.2]))
    assert draws(tenths, top_p=0.35) == {0, 1}
    assert draws(tenths, top_k=2, top_p=0.35) == {0}


def test_H7_min_p_is_relative_to_the_best() -> None:
    assert draws(SLOPE, min_p=0.5) == {0, 1}  # exp(-0.5) = 0.61, exp(-1) = 0.37
    assert draws(floats(2, 2, 1.99), min_p=1) == {0, 1}
    assert draws(SLOPE, min_p=-1) == {0, 1, 2, 3, 4, 5}


def test_H7_the_temperature_comes_after_the_filters() -> None:
    assert draws(SLOPE, min_p=0.5, temperature=100.0) == {0, 1}
    assert draws(SLOPE, temperature=0.01) == {0}
    assert draws(SLOPE, temperature=1e-308) == {0}


def test_H7_the_repeat_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    assert draws(floats(4, 3.9, -50), [0], temperature=0, repeat_penalty=1.1) == {1}
    assert draws(floats(-4, -4.1, -50), [0], temperature=0, repeat_penalty=1.1) == {1}
    assert draws(floats(0, -0.1, -50), [0], temperature=0, repeat_penalty=9.0) == {0}


def test_H7_frequency_counts_occurrences_and_presence_does_not() -> None:
    logits = floats(5, 4.5, 0)
    assert draws(logits, [0], temperature=0, frequency_penalty=0.3) == {0}
    assert draws(logits, [0, 0], temperature=0, frequency_penalty=0.3) == {1}
    assert draws(logits, [0, 0], temperature=0, presence_penalty=0.3) == {0}
    assert draws(logits, [0], temperature=0, presence_penalty=0.6) == {1}


def test_H7_penalties_look_at_the_last_tokens_only() -> None:
    logits, history = floats(5, 4.9, 0), [0, 2, 2, 2]
    for last_n, first in ((0, 0), (3, 0), (4, 1), (64, 1), (-1, 1)):
        assert draws(logits, history, temperature=0, repeat_penalty=2.0, repeat_last_n=last_n) == {first}


def test_H7_the_bias_comes_before_the_penalties() -> None:
    # 1 + 3 halved is 2; had the bias come later, 1 halved plus 3 would be 3.5
    assert draws(floats(1, 2.5), [0], temperature=0, logit_bias={0: 3.0}, repeat_penalty=2.0) == {1}


def test_H7_a_banned_token_never_comes_up() -> None:
    assert draws(SLOPE, logit_bias={0: -math.inf, 3: -math.inf}) == {1, 2, 4, 5}
    assert draws(floats(-math.inf, 1, -math.inf)) == {1}


# --- a pure function --------------------------------------------------------------------------------------------


def test_H5_the_same_seed_gives_the_same_tokens_and_another_one_does_not() -> None:
    logits = np.zeros(1000, dtype=np.float32)

    def tokens(seed: int) -> list[int]:
        sampler = Sampler(SamplerSettings(seed=seed, **OFF), len(logits))
        return [sampler.draw(logits, [], position) for position in range(20)]

    assert tokens(42) == tokens(42)
    assert tokens(42) != tokens(43)
    assert len(set(tokens(42))) > 10


def test_I19_a_draw_leaves_nothing_behind_and_changes_no_argument() -> None:
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((8, 300)).astype(np.float32)
    history = [int(token) for token in rng.integers(0, 300, 8)]
    given_: dict[str, Any] = {"presence_penalty": 1.0, "repeat_penalty": 1.2, "logit_bias": {3: 2.0}}
    sampler = Sampler(SamplerSettings(seed=9, **given_), 300)
    kept = rows.copy()

    def token(position: int) -> int:
        return sampler.draw(rows[position], history[:position], position)

    forwards = [token(position) for position in range(8)]
    backwards = [token(position) for position in reversed(range(8))]
    assert forwards == backwards[::-1]
    assert np.array_equal(rows, kept)
    assert dict(sampler.settings.logit_bias) == {3: 2.0}


# --- what cannot be drawn from ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_damaged_logits_are_an_error_that_names_the_position(value: float, temperature: float) -> None:
    sampler = Sampler(SamplerSettings(seed=1, temperature=temperature, logit_bias={1: -math.inf}), 3)
    with pytest.raises(LeverError, match=r"position 17.*damaged"):
        sampler.draw(floats(1, value, 2), [], 17)


def test_no_token_left_is_an_error_that_names_the_position() -> None:
    with pytest.raises(LeverError, match="position 3"):
        Sampler(SamplerSettings(seed=1), 2).draw(floats(-math.inf, -math.inf), [], 3)
    banned = SamplerSettings(seed=1, logit_bias={0: -math.inf, 1: -math.inf})
    with pytest.raises(LeverError, match=r"position 3.*logit-bias"):
        Sampler(banned, 2).draw(floats(1, 2), [], 3)


def test_a_bias_for_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match=r"token 10.*ends at 9"):
        Sampler(SamplerSettings(seed=1, logit_bias={10: 1.0}), 10)


# --- log-probabilities --------------------------------------------------------------------------------------------


@given(LOGITS)
def test_log_probabilities_are_those_of_the_raw_softmax(logits: list[float]) -> None:
    raw = floats(*logits, 0.5)
    log_total = math.log(math.fsum(math.exp(value) for value in raw.tolist()))
    order = sorted(range(len(raw)), key=lambda token: (-raw[token], token))
    top = top_logprobs(raw, 5)
    assert [token for token, _ in top] == order[:5]
    assert [value for _, value in top] == pytest.approx([float(raw[token]) - log_total for token in order[:5]])
    assert logprob(raw, order[-1]) == pytest.approx(float(raw[order[-1]]) - log_total)


def test_asking_for_more_log_probabilities_than_tokens_gives_all_and_for_none_gives_none() -> None:
    assert [token for token, _ in top_logprobs(floats(1, 3, 2), 20)] == [1, 2, 0]
    assert top_logprobs(floats(1, 3, 2), 0) == []


def test_log_probabilities_of_large_logits_do_not_overflow() -> None:
    assert logprob(floats(3e38, 3e38), 0) == pytest.approx(-math.log(2))


def test_damaged_logits_have_no_log_probabilities() -> None:
    with pytest.raises(LeverError, match="damaged"):
        top_logprobs(floats(1, math.nan), 1)


def test_the_gap_is_between_the_two_best() -> None:
    assert top2_gap(floats(1, 5, -3, 4.75)) == 0.25
    assert top2_gap(floats(5, 1, 5)) == 0
    assert top2_gap(floats(-math.inf, 1)) == math.inf


# --- cost ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_", [{}, {"repeat_penalty": 1.1}, {"temperature": 0.0}])
def test_a_draw_from_152_k_tokens_takes_less_than_2_ms(given_: dict[str, Any]) -> None:
    logits = (np.random.default_rng(0).standard_normal(151_936) * 3).astype(np.float32)
    sampler = Sampler(SamplerSettings(seed=1, **given_), len(logits))
    best = math.inf
    for position in range(50):
        start = time.perf_counter()
        sampler.draw(logits, range(1000), position)
        best = min(best, time.perf_counter() - start)
    assert best < 0.002


# --- a constraint ---------------------------------------------------------------------------------------------


class Only:
    """Allows these tokens, whatever came before."""

    def __init__(self, *tokens: int, n_vocab: int = 5) -> None:
        self.mask = np.isin(np.arange(n_vocab), tokens)

    def allowed(self, _tokens: Sequence[int]) -> NDArray[np.bool_]:
        return self.mask

    def complete(self, tokens: Sequence[int]) -> bool:
        return len(tokens) > 2


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_p": 0.01},
        {"min_p": 0.9},
        {"logit_bias": {0: 1e6}},
        {"repeat_penalty": 100.0},
        {"presence_penalty": -1e6},
        {"frequency_penalty": -1e6},
    ],
)
def test_H7_no_step_brings_back_what_the_constraint_forbids(given: dict[str, Any]) -> None:
    """Nor does it count in any of them: of two that are allowed alike, both come up."""
    sampler = Sampler(SamplerSettings(**{"seed": 7, **OFF, **given}), 5, Only(2, 4))
    logits = floats(9.0, 8.0, 1.0, 7.0, 1.0)
    found = {sampler.draw(logits, [0, 0, 1, 3], position) for position in range(200)}
    assert found == ({2} if given in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.01}) else {2, 4})


def test_H7_a_constraint_that_allows_all_changes_no_draw() -> None:
    rng = np.random.default_rng(3)
    for settings_ in (SamplerSettings(seed=1), SamplerSettings(seed=1, temperature=0, repeat_penalty=1.2)):
        free, bound = (Sampler(settings_, 300, c) for c in (None, Only(*range(300), n_vocab=300)))
        for position in range(100):
            logits = rng.standard_normal(300).astype(np.float32)
            assert free.draw(logits, [1, 2], position) == bound.draw(logits, [1, 2], position)


def test_a_constraint_and_bans_that_leave_nothing_are_told() -> None:
    sampler = Sampler(SamplerSettings(seed=1, logit_bias={2: -math.inf}), 5, Only(2))
    with pytest.raises(LeverError, match="no token is left to draw at position 9, after the grammar, --logit-bias"):
        sampler.draw(floats(1, 2, 3, 4, 5), [], 9)


def test_an_answer_is_complete_when_the_constraint_says_so_and_never_without_one() -> None:
    assert [Sampler(SamplerSettings(seed=1), 5, Only(1)).complete([0] * n) for n in (2, 3)] == [False, True]
    assert not Sampler(SamplerSettings(seed=1), 5).complete([0] * 3)
