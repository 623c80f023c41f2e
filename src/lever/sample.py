"""Draws a token from logits. Keeps nothing between draws, and knows neither text nor models.

The steps and their order are those of llama.cpp's default chain: logit bias, penalties, top-k, top-p, min-p,
temperature, draw. What a constraint forbids is out before the first of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lever.errors import LeverError, UsageError
from lever.settings import SamplerSettings

# float32 as a model gives them, float64 once a bias or a penalty was applied
Logits = NDArray[np.float32] | NDArray[np.float64]
Ids = NDArray[np.intp]

GROUP = 64  # logits of which only the maximum is looked at while searching for the largest ones


class Constraint(Protocol):
    """What may be drawn. It says the same of the same tokens, whatever it was asked before."""

    def allowed(self, tokens: Sequence[int]) -> NDArray[np.bool_]:
        """Which tokens [n_vocab] may follow these, the prompt's too; one that ends the answer only where it may."""

    def complete(self, tokens: Sequence[int]) -> bool:
        """Whether nothing may follow but an end."""


class Sampler:
    """The sampler of one request: `draw` depends on its arguments, the settings and the constraint, on nothing else."""

    def __init__(self, settings: SamplerSettings, n_vocab: int, constraint: Constraint | None = None) -> None:
        outside = [token for token in settings.logit_bias if token >= n_vocab]
        if outside:
            raise UsageError(f"logit_bias names token {outside[0]}: the vocabulary ends at {n_vocab - 1}")
        self.settings = settings
        self.n_vocab = n_vocab
        self.constraint = constraint

    def complete(self, tokens: Sequence[int]) -> bool:
        """Whether the answer has ended with these tokens, the prompt's too, and no other could be drawn."""
        return self.constraint is not None and self.constraint.complete(tokens)

    def draw(self, logits: NDArray[np.float32], history: Sequence[int], position: int) -> int:
        """The token at `position`, from its logits [n_vocab] and all tokens before it, the prompt's too.

        Raises LeverError if a logit is NaN or +inf, or if no token is left to draw.
        """
        assert logits.shape == (self.n_vocab,)
        _best(logits, f" at position {position}")
        after = "--logit-bias and penalties"
        if self.constraint is not None:
            logits = np.where(self.constraint.allowed(history), logits, np.float32(-np.inf))
            after = f"the grammar, {after}"
        adjusted = _penalise(_bias(logits, self.settings), history, self.settings)
        best = _best(adjusted, f" at position {position}, after {after}")
        if self.settings.temperature <= 0:
            return int(np.argmax(adjusted))  # the first, so the lowest id, of equal ones
        ids, kept = _candidates(adjusted, best, self.settings)
        with np.errstate(over="ignore"):  # a tiny temperature: -inf, that is probability 0
            weights = np.exp((kept - best) / self.settings.temperature)
        point = uniform(self.settings.seed, position) * float(weights.sum())
        return int(ids[_leading(kept, weights, point)[-1]])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for (seed, position): the first output of Philox 4x64 under that key."""
    key = np.array([seed, position], dtype=np.uint64)
    return int(np.random.Philox(key=key).random_raw() >> 11) * 2.0**-53


def top_logprobs(logits: NDArray[np.float32], n: int) -> list[tuple[int, float]]:
    """The `n` likeliest tokens with their natural log-probabilities, from the softmax of the raw logits."""
    tokens = _top(logits, n)
    return list(zip(tokens.tolist(), _logprobs(logits, tokens), strict=True))


def logprob(logits: NDArray[np.float32], token: int) -> float:
    """Natural log-probability of `token`, from the softmax of the raw logits."""
    return _logprobs(logits, np.array([token]))[0]


def top2_gap(logits: NDArray[np.float32]) -> float:
    """By how much the best logit exceeds the second best; small at a near tie."""
    second, best = np.partition(logits, -2)[-2:]
    return float(best) - float(second)


def _best(logits: Logits, place: str = "") -> float:
    """The largest logit. NumPy's max is NaN if any is: one pass finds all that cannot be drawn from."""
    best = float(logits.max())
    if math.isfinite(best):
        return best
    if best == -math.inf:
        raise LeverError(f"no token is left to draw{place}: all logits are -inf")
    raise LeverError(f"a logit is {best}{place}: are the weights damaged? Check the file against its hash")


def _bias(logits: Logits, settings: SamplerSettings) -> Logits:
    if not settings.logit_bias:
        return logits
    biased = logits.astype(np.float64)
    for token, bias in settings.logit_bias.items():
        biased[token] += bias
    return biased


def _penalise(logits: Logits, history: Sequence[int], settings: SamplerSettings) -> Logits:
    last_n, repeat = settings.repeat_last_n, settings.repeat_penalty
    presence, frequency = settings.presence_penalty, settings.frequency_penalty
    recent = history if last_n < 0 else history[len(history) - min(last_n, len(history)) :]
    if len(recent) == 0 or (repeat == 1 and presence == 0 and frequency == 0):
        return logits
    counts = Counter(recent)
    tokens = np.fromiter(counts.keys(), dtype=np.int64)
    count = np.fromiter(counts.values(), dtype=np.float64)
    penalised = logits.astype(np.float64)
    seen = penalised[tokens]
    penalised[tokens] = np.where(seen > 0, seen / repeat, seen * repeat) - count * frequency - presence
    return penalised


def _candidates(logits: Logits, best: float, settings: SamplerSettings) -> tuple[Ids, NDArray[np.float64]]:
    """Ids and logits of the tokens that top-k, top-p and min-p leave; at least the best one."""
    ids = _top(logits, settings.top_k) if 0 < settings.top_k < len(logits) else np.arange(len(logits))
    kept = logits[ids].astype(np.float64)
    weights = np.exp(kept - best)
    # Banned tokens weigh nothing. Top-p and min-p keep beginnings of the same order: either may go first.
    inside = np.flatnonzero(weights >= max(settings.min_p, math.ulp(0.0)))
    if settings.top_p < 1:
        inside = inside[_leading(kept[inside], weights[inside], settings.top_p * float(weights.sum()))]
    return ids[inside], kept[inside]


def _leading(values: NDArray[np.float64], weights: NDArray[np.float64], mass: float) -> Ids:
    """Indices of the largest values, best first, the fewest whose weights add up to `mass`; else all."""
    for k in (256, 4096, len(values)):  # mostly the first few hold it: sort no more than needed
        order = _top(values, k)
        cumulative = np.cumsum(weights[order])
        if cumulative[-1] >= mass:
            break
    return order[: 1 + int(np.searchsorted(cumulative, mass))]


def _top(values: Logits, k: int) -> Ids:
    """Indices of the `k` largest, best first; of equal ones the lowest indices. All if there are fewer."""
    k = min(k, len(values))
    # The k-th largest maximum of groups is at most the k-th largest value, and found much faster.
    maxima = values[: len(values) // GROUP * GROUP].reshape(GROUP, -1).max(axis=0)
    pool = maxima if len(maxima) > k else values
    bound = np.partition(pool, -k)[-k]
    found = np.flatnonzero(values > bound)
    if len(found) < k:  # the first of those at the bound, which are nearly all where few may be drawn
        found = np.concatenate([found, np.flatnonzero(values == bound)[: k - len(found)]])
    return found[np.argsort(-values[found], kind="stable")][:k]  # found in ascending order: equal ones by index


def _logprobs(logits: NDArray[np.float32], tokens: Ids) -> list[float]:
    below_best = logits.astype(np.float64) - _best(logits)
    return [float(value) for value in below_best[tokens] - math.log(float(np.exp(below_best).sum()))]
