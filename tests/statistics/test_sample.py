"""The tokens drawn have the distribution that the settings describe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lever.sample import Sampler, uniform
from lever.settings import SamplerSettings

N_DRAWS = 10_000
Z = 4.7534  # of a normal variable: one in a million lies above
LOGITS = np.array([1.2, -0.3, 0.8, 0.8, -2.0, 0.1, -1.0, 0.5], dtype=np.float32)
OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def chi_square(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    total = sum(counts)
    return sum((n - total * p) ** 2 / (total * p) for n, p in zip(counts, probabilities, strict=True))


def limit(degrees: int) -> float:
    """What a chi-square of so many degrees exceeds once in a million (Wilson and Hilferty's approximation)."""
    return float(degrees * (1 - 2 / (9 * degrees) + Z * math.sqrt(2 / (9 * degrees))) ** 3)


def softmax(tokens: Sequence[int], temperature: float) -> dict[int, float]:
    weights = {token: math.exp(float(LOGITS[token]) / temperature) for token in tokens}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


@pytest.mark.parametrize("given", [{}, {"temperature": 0.3}, {"temperature": 1.7}, {"top_k": 4}])
def test_H5_draws_over_positions_follow_the_softmax(given: dict[str, Any]) -> None:
    """Chi-square of 10,000 draws; false alarm 1e-6, once and for all, as the seed is fixed."""
    settings = SamplerSettings(**{"seed": 11, **OFF, **given})
    order = sorted(range(len(LOGITS)), key=lambda token: (-LOGITS[token], token))
    expected = softmax(order[: settings.top_k or None], settings.temperature)
    sampler = Sampler(settings, len(LOGITS))
    drawn = [sampler.draw(LOGITS, [], position) for position in range(N_DRAWS)]
    counts = [drawn.count(token) for token in expected]
    assert sum(counts) == N_DRAWS
    assert chi_square(counts, list(expected.values())) < limit(len(expected) - 1)


def test_H5_draws_over_seeds_follow_the_softmax() -> None:
    """Chi-square of 10,000 draws at one position; false alarm 1e-6, once and for all."""
    samplers = (Sampler(SamplerSettings(**OFF, seed=seed), len(LOGITS)) for seed in range(N_DRAWS))
    drawn = [sampler.draw(LOGITS, [], 5) for sampler in samplers]
    expected = softmax(range(len(LOGITS)), 1.0)
    counts = [drawn.count(token) for token in expected]
    assert chi_square(counts, list(expected.values())) < limit(len(expected) - 1)


@pytest.mark.parametrize(("seeds", "positions"), [(0, 1), (1, 0), (1, 1)])
def test_I19_neighbouring_draws_are_independent(seeds: int, positions: int) -> None:
    """Chi-square of 10,000 pairs of neighbours over 8 x 8 cells; false alarm 1e-6, once and for all."""
    cells = np.zeros((8, 8), dtype=int)
    for n in range(N_DRAWS):
        seed, position = n % 100, n // 100
        first, second = uniform(seed, position), uniform(seed + seeds, position + positions)
        cells[int(first * 8), int(second * 8)] += 1
    assert chi_square(cells.ravel().tolist(), [1 / 64] * 64) < limit(63)
