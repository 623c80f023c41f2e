"""Fitting a translator: the closed form, gradients of both divergences, when it ends, and the mix with the draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lever.prune import DRAFT, Mix
from lever.training import fit
from lever.training.fit import (
    PATIENCE,
    RIDGES,
    SCALES,
    Batch,
    LeastSquares,
    Whole,
    best_scale,
    distil,
    divergence,
    fit_mix,
    held_out_loss,
    log_softmax,
    scores,
    share_first,
)

N_EMBD, N_VOCAB = 6, 20
Array = Any  # in double precision, where those of lever are in single


def positions(n: int, k: int = 5, seed: int = 0, a: Array | None = None) -> Batch:
    """In double precision, of a target whose final states are A x, or any. Of every third candidates are missing, of
    the last position all are, and what stands in the place of their rows is large.
    """
    dice = np.random.default_rng(seed)
    table = np.random.default_rng(99).normal(size=(N_VOCAB, N_EMBD))
    x: Array = dice.normal(size=(n, N_EMBD))
    z: Array = dice.normal(size=(n, N_EMBD)) if a is None else x @ a.T
    tokens = np.array([dice.permutation(N_VOCAB)[:k] for _ in range(n)])
    there = np.ones((n, k), bool)
    there[::3, 3:] = False
    there[-1] = False
    return Batch(
        x=x,
        z=z,
        rows=np.where(there[:, :, None], table[tokens], 1e3),
        there=there,
        log_chances=np.log(dice.random((n, k))),
        best=np.zeros(n, np.int64),
    )


def slope(loss: Callable[[Array], float], a: Array, step: float = 1e-5) -> Array:
    """The gradient of a loss at A by finite differences."""
    found = np.zeros_like(a)
    for at in np.ndindex(a.shape):
        more, less = a.copy(), a.copy()
        more[at] += step
        less[at] -= step
        found[at] = (loss(more) - loss(less)) / (2 * step)
    return found


def any_matrix(seed: int = 5) -> Array:
    return np.random.default_rng(seed).normal(size=(N_EMBD, N_EMBD))


# --- least squares ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", range(len(RIDGES)))
def test_the_closed_form_is_a_ridge_towards_the_lens_and_the_best_ridge_wins(chosen: int) -> None:
    """NumPy's own least squares, in double precision, of the positions and of rows that pull to the lens."""
    dice = np.random.default_rng(1)
    x, z = dice.normal(size=(40, N_EMBD)), dice.normal(size=(40, N_EMBD))
    lens = dice.normal(size=N_EMBD)
    losses = iter([1.0 if place == chosen else 2.0 for place in range(len(RIDGES))])

    least = LeastSquares(lens.astype(np.float32))
    for part in range(0, 40, 16):
        least.add(x[part : part + 16].astype(np.float32), z[part : part + 16].astype(np.float32))
    found = least.solve(lambda _a: next(losses))

    pull = np.sqrt(RIDGES[chosen] * np.median(np.linalg.eigvalsh(x.T @ x)))
    away = np.linalg.lstsq(
        np.vstack([x, pull * np.eye(N_EMBD)]), np.vstack([z - lens * x, np.zeros((N_EMBD, N_EMBD))]), rcond=None
    )[0].T
    np.testing.assert_allclose(found, np.diag(lens) + away, rtol=1e-3, atol=1e-4)


def test_fewer_positions_than_elements_leave_the_rest_to_the_lens() -> None:
    lens = np.arange(1, N_EMBD + 1, dtype=np.float32)
    nothing = LeastSquares(lens)
    np.testing.assert_array_equal(nothing.solve(lambda _a: 0.0), np.diag(lens))

    one = LeastSquares(lens)
    x = np.eye(N_EMBD, dtype=np.float32)[:1]
    one.add(x, 7 * x)
    found = one.solve(lambda _a: 0.0)
    assert lens[0] < found[0, 0] < 7
    np.testing.assert_allclose(found[:, 1:], np.diag(lens)[:, 1:], atol=1e-5)


# --- divergences --------------------------------------------------------------------------------------------


def test_the_divergence_is_that_of_two_softmaxes_over_the_candidates_that_are_there() -> None:
    batch, a = positions(7), any_matrix()
    expected = 0.0
    for x, z, rows, there in zip(batch.x, batch.z, batch.rows, batch.there, strict=True):
        if there.any():
            p, q = (np.exp(rows[there] @ state) for state in (z, a @ x))
            p, q = p / p.sum(), q / q.sum()
            expected += float((p * np.log(p / q)).sum())
    assert expected > 1
    assert divergence(batch, a)[0] == pytest.approx(expected)


def test_its_gradient_is_that_of_finite_differences() -> None:
    batch, a = positions(7), any_matrix()
    np.testing.assert_allclose(
        divergence(batch, a)[1], slope(lambda a: divergence(batch, a)[0], a), rtol=1e-5, atol=1e-6
    )


def test_positions_without_candidates_say_nothing() -> None:
    batch, a = positions(1), any_matrix()
    assert not batch.there.any()
    loss, gradient = divergence(batch, a)
    assert loss == 0
    assert not gradient.any()
    assert np.isneginf(scores(batch, batch.z)).all()


def test_in_single_precision_it_stays_there() -> None:
    batch, a = positions(7), any_matrix().astype(np.float32)
    single = {name: getattr(batch, name).astype(np.float32) for name in ("x", "z", "rows")}
    small = replace(batch, **single)
    loss, gradient = divergence(small, a)
    assert scores(small, small.x).dtype == gradient.dtype == np.float32
    assert loss == pytest.approx(divergence(batch, a)[0], rel=1e-4)


def whole(table: Array, missing: tuple[int, ...] = ()) -> Whole:
    def rows(tokens: NDArray[np.int32]) -> tuple[Array, NDArray[np.bool_]]:
        there = ~np.isin(tokens, missing)
        return np.where(there[:, :, None], table[tokens], 1e3), there

    return Whole(lambda states: states @ table.T, rows)


@pytest.mark.parametrize("n", [3, 8, 19])
def test_the_divergence_over_the_vocabulary_has_the_gradient_of_finite_differences(n: int) -> None:
    """Whatever part of the positions is held at once."""
    dice = np.random.default_rng(4)
    table, a = dice.normal(size=(N_VOCAB, N_EMBD)), any_matrix()
    x, z = dice.normal(size=(2, n, N_EMBD))
    over_all = whole(table)
    loss, gradient = over_all.divergence(x, z, a)
    p, q = (np.exp(log_softmax(states @ table.T)) for states in (z, x @ a.T))
    assert loss == pytest.approx((p * np.log(p / q)).sum())
    np.testing.assert_allclose(gradient, slope(lambda a: over_all.divergence(x, z, a)[0], a), rtol=1e-5, atol=1e-6)


def test_of_a_large_vocabulary_those_tokens_count_that_differ_most_and_have_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fit, "DIFFERENT", 4)
    dice = np.random.default_rng(4)
    table, a = dice.normal(size=(N_VOCAB, N_EMBD)), any_matrix()
    x, z = dice.normal(size=(2, 11, N_EMBD))
    p, q = (np.exp(log_softmax(states @ table.T)) for states in (z, x @ a.T))
    most = np.argsort(-np.abs(q - p), axis=1)[:, :4]
    missing = tuple(most[:, 1].tolist())
    expected = np.zeros((N_EMBD, N_EMBD))
    for position, tokens in enumerate(most):
        for token in set(tokens.tolist()) - {*missing}:
            expected += np.outer((q - p)[position, token] * table[token], x[position])
    np.testing.assert_allclose(whole(table, missing).divergence(x, z, a)[1], expected)


# --- scale ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.5, 2.0, 20.0])
def test_what_is_too_sure_or_not_sure_enough_is_scaled(factor: float) -> None:
    true = 0.3 * any_matrix()
    scale, loss = best_scale(batches(range(4), true), factor * true)
    assert scale == pytest.approx(1 / factor, rel=0.13)  # as near as those that are tried
    assert loss < 0.05


def test_of_what_knows_nothing_little_is_believed() -> None:
    held_out = batches(range(4), any_matrix())
    scale, loss = best_scale(held_out, any_matrix(seed=6))
    assert scale == min(SCALES)
    alike = held_out_loss(held_out, np.zeros((N_EMBD, N_EMBD), np.float32))
    assert loss == pytest.approx(alike, rel=0.1)


# --- going down ---------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps so long that a few of them lead somewhere."""
    monkeypatch.setattr(fit, "RATE", 0.02)


def batches(seeds: range, a: Array | None) -> Callable[[], Iterator[Batch]]:
    return lambda: (positions(60, seed=seed, a=a) for seed in seeds)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("with_whole", [True, False])
def test_where_there_is_a_translator_it_is_approached_on_what_was_not_fitted_to(*, with_whole: bool) -> None:
    true, start = any_matrix(), any_matrix(seed=6)
    train, held_out = batches(range(10), true), batches(range(10, 12), true)
    table = np.random.default_rng(99).normal(size=(N_VOCAB, N_EMBD))
    told: list[float] = []
    found = distil(start, train, held_out, whole(table) if with_whole else None, lambda _epoch, loss: told.append(loss))
    assert held_out_loss(held_out, found) == pytest.approx(min(told))
    assert min(told) < 0.2 * held_out_loss(held_out, start)
    assert min(told) == told[-1] or len(told) <= fit.MOST_EPOCHS


@pytest.mark.usefixtures("quick")
def test_it_ends_where_the_held_out_loss_only_rises_and_gives_back_what_it_had() -> None:
    start, told = any_matrix(), list[float]()
    before = start.copy()
    found = distil(
        start,
        batches(range(4), any_matrix(seed=8)),
        batches(range(10, 12), start),  # of which the start is the truth
        after_epoch=lambda _epoch, loss: told.append(loss),
    )
    assert len(told) == PATIENCE
    assert 0 < told[0] < told[1]
    np.testing.assert_array_equal(found, before)
    np.testing.assert_array_equal(start, before)


@pytest.mark.usefixtures("quick")
def test_the_best_epoch_is_given_back_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([5.0, 4.0, 3.0, 3.5, 3.2])  # of the start, and of four epochs
    seen: list[Array] = []

    def scripted(_batches: object, a: Array) -> float:
        seen.append(a.copy())
        return next(losses)

    monkeypatch.setattr(fit, "held_out_loss", scripted)
    train = batches(range(4), any_matrix())
    found = distil(any_matrix(seed=6), train, train)
    assert len(seen) == 5
    assert all((a != b).any() for a, b in pairwise(seen))
    np.testing.assert_array_equal(found, seen[2])


def test_the_loss_of_nothing_is_nothing() -> None:
    assert held_out_loss(lambda: iter([]), any_matrix()) == 0


# --- the mix ------------------------------------------------------------------------------------------------


def drawn(score: float, draft: float, n: int = 8000, k: int = 6) -> tuple[Array, Array, Array, Array]:
    """Logits, logarithms of chances, what is there, and tokens drawn by the two with these exponents."""
    dice = np.random.default_rng(2)
    logits = dice.normal(0, 2, (n, k))
    chances: Array = dice.normal(0, 2, (n, k))
    log_chances = log_softmax(chances)
    there = dice.random((n, k)) < 0.8
    there[:, 0] = True
    weights = np.exp(np.where(there, score * logits + draft * log_chances, -np.inf))
    shares = (weights / weights.sum(axis=1, keepdims=True)).cumsum(axis=1)
    best = (shares < dice.random((n, 1))).sum(axis=1)
    return np.where(there, logits, -np.inf), log_chances, there, best


@pytest.mark.parametrize(("score", "draft"), [(0.7, 0.4), (0.1, 1.2), (1.5, 0.0)])
def test_exponents_are_found_again_in_what_was_drawn_by_them(score: float, draft: float) -> None:
    """Their standard error is about 0.015; the dice are the same in each run."""
    found = fit_mix(*drawn(score, draft))
    assert (found.score, found.draft) == pytest.approx((score, draft), abs=0.06)


def test_positions_whose_token_is_no_candidate_count_for_nothing() -> None:
    logits, log_chances, there, best = drawn(0.7, 0.4)
    some = slice(0, 3000)
    known = fit_mix(logits[some], log_chances[some], there[some], best[some])
    best[3000:], there[3000:] = -1, False
    assert fit_mix(logits, log_chances, there, best) == known


def test_what_misleads_has_no_say_and_the_other_is_fitted_without_it() -> None:
    logits, log_chances, there, best = drawn(-0.4, 0.8)
    found = fit_mix(logits, log_chances, there, best)
    without = fit_mix(np.where(there, 0.0, -np.inf), log_chances, there, best)
    assert found.score == 0
    assert found.draft == pytest.approx(without.draft, abs=1e-4)
    assert 0.3 < found.draft < 0.8


def test_where_nothing_is_known_the_draft_is_believed() -> None:
    logits, log_chances, there, best = drawn(1.0, 1.0, n=4)
    assert fit_mix(logits, log_chances, there, np.full_like(best, -1)) == DRAFT
    assert fit_mix(logits[:0], log_chances[:0], there[:0], best[:0]) == DRAFT


def test_a_mix_that_is_always_right_ends_as_numbers() -> None:
    """The likelihood grows without end."""
    logits = np.array([[3.0, 1.0], [4.0, 1.0]])
    found = fit_mix(logits, np.log(np.array([[0.6, 0.4]] * 2)), np.ones((2, 2), bool), np.zeros(2, np.int64))
    assert isinstance(found, Mix)
    assert 1 < found.score < 100
    assert 0 <= found.draft < 100


def test_the_share_that_comes_first_is_of_all_positions() -> None:
    logits = np.array([[1, 2], [2, 1], [5, -np.inf], [-np.inf, -np.inf]], np.float32)
    assert share_first(logits, np.array([1, 1, 0, -1])) == 0.5
    assert share_first(logits[:0], np.array([], np.int64)) == 0
