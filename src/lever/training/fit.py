"""Fits a translator: by least squares in closed form, then by the paper's two divergences from what the target says.

x: hidden states behind a middle layer, normed; z: final ones, as the output projection gets them. A translator A takes
x to A x, near z. NumPy alone; knows no model and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lever.prune import DRAFT, Mix

Floats = NDArray[np.float32]

RIDGES = (0.3, 3.0, 30.0, 300.0)  # tried, times the median variance of x along a direction: a few have nearly all of it
SCALES = tuple(0.02 * 1.25**n for n in range(22))  # of scores, tried: 0.02 to 2.2
BATCH = 256  # positions of a step
RATE, DECAY_1, DECAY_2 = 1e-4, 0.9, 0.999  # of Adam
MOST_EPOCHS, PATIENCE = 8, 2  # epochs; those without a better held-out loss before it ends
WHOLE_EACH, WHOLE_BATCH = 4, 32  # steps for one on the whole vocabulary, and its positions
WHOLE_AT_ONCE = 8  # of these, whose logits and probabilities are held
CANDIDATES_WEIGHT = 1.0  # lambda in the paper: of the candidates' divergence beside that over the vocabulary
DIFFERENT = 128  # tokens of a position whose probabilities differ most: the rest of a gradient is nothing
NEWTON_STEPS, LONGEST_STEP, NEAR = 30, 0.5, 1e-5  # of each exponent
STEADY = 1e-3  # of the curvature: there is none where nothing is known
NO_LOGIT = np.float32(-np.inf)  # of a candidate that is none
LEAST_RIDGE = 1e-3  # times the mean variance, where half of all directions have none
TINY = 1e-30


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Positions. rows [n, k, n_embd]: the candidates' rows of the output projection; there: whether there is one."""

    x: Floats
    z: Floats
    rows: Floats
    there: NDArray[np.bool_]
    log_chances: Floats  # [n, k], of the draft
    best: NDArray[np.int64]  # the place among the candidates of the target's token, -1: it is none of them

    def __len__(self) -> int:
        return len(self.x)


Batches = Callable[[], Iterator[Batch]]


class LeastSquares:
    """A in closed form, with a ridge towards the lens: the hidden state as it is, times the final norm's weights."""

    def __init__(self, lens: Floats) -> None:
        self._lens, n = lens, len(lens)
        self._xx, self._zx = np.zeros((n, n), np.float32), np.zeros((n, n), np.float32)

    def add(self, x: Floats, z: Floats) -> None:
        """Take in positions."""
        self._xx += x.T @ x
        self._zx += (z - self._lens * x).T @ x

    def solve(self, loss: Callable[[Floats], float]) -> Floats:
        """The A of the ridge with the smallest loss."""
        values, vectors = np.linalg.eigh(self._xx)
        turned = self._zx @ vectors
        scale = max(float(np.median(values)), LEAST_RIDGE * float(values.mean()), TINY)
        best, best_loss = np.diag(self._lens), np.inf
        for ridge in RIDGES:
            a: Floats = (turned / (np.maximum(values, 0) + ridge * scale)).astype(np.float32) @ vectors.T
            a[np.diag_indices_from(a)] += self._lens
            found = loss(a)
            if found < best_loss:
                best, best_loss = a, found
        return best


class Adam:
    """Steps down a gradient."""

    def __init__(self, a: Floats) -> None:
        self.a = a
        self._mean, self._square, self._n = np.zeros_like(a), np.zeros_like(a), 0

    def step(self, gradient: Floats) -> None:
        """One."""
        self._n += 1
        self._mean += (1 - DECAY_1) * (gradient - self._mean)
        self._square += (1 - DECAY_2) * (gradient * gradient - self._square)
        mean, square = self._mean / (1 - DECAY_1**self._n), self._square / (1 - DECAY_2**self._n)
        self.a -= RATE * mean / (np.sqrt(square) + 1e-8)


def scores(batch: Batch, states: Floats) -> Floats:
    """Logits [n, k] of the candidates, -inf where there is none."""
    found: Floats = np.where(batch.there, np.einsum("nkd,nd->nk", batch.rows, states), NO_LOGIT)
    return found


def log_softmax(logits: Floats) -> Floats:
    """Along the last axis."""
    below = logits - logits.max(axis=-1, keepdims=True)
    found: Floats = below - np.log(np.exp(below).sum(axis=-1, keepdims=True))
    return found


def divergence(batch: Batch, a: Floats) -> tuple[float, Floats]:
    """KL divergence over the candidates of what the target says from what A says, summed, and its gradient."""
    there = batch.there
    theirs, ours = log_softmax_there(batch, batch.z), log_softmax_there(batch, batch.x @ a.T)
    p, q = np.exp(theirs) * there, np.exp(ours) * there
    loss = float((p * np.subtract(theirs, ours, out=np.zeros_like(p), where=there)).sum())
    return loss, np.einsum("nk,nkd->nd", q - p, batch.rows).T @ batch.x


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """The vocabulary, for a few positions: `logits` of states as the projection gets them, `rows` of tokens [n, k].

    `rows` gives their rows [n, k, n_embd], and which it has.
    """

    logits: Callable[[Floats], Floats]
    rows: Callable[[NDArray[np.int32]], tuple[Floats, NDArray[np.bool_]]]

    def divergence(self, x: Floats, z: Floats, a: Floats) -> tuple[float, Floats]:
        """KL divergence over the vocabulary, summed, and its gradient by the tokens where both differ most."""
        loss, gradient = 0.0, np.zeros_like(a)
        for start in range(0, len(x), WHOLE_AT_ONCE):
            at = slice(start, start + WHOLE_AT_ONCE)
            theirs, ours = log_softmax(self.logits(z[at])), log_softmax(self.logits(x[at] @ a.T))
            p, difference = np.exp(theirs), np.exp(ours)
            loss += float((p * (theirs - ours)).sum())
            difference -= p
            n = min(DIFFERENT, difference.shape[1])
            most = np.argpartition(-np.abs(difference), n - 1, axis=1)[:, :n]
            rows, there = self.rows(most.astype(np.int32))
            weights = np.take_along_axis(difference, most, axis=1) * there
            gradient += np.einsum("nk,nkd->nd", weights, rows).T @ x[at]
        return loss, gradient


def held_out_loss(batches: Batches, a: Floats) -> float:
    """Divergence over the candidates, a position."""
    total, n = 0.0, 0
    for batch in batches():
        total += divergence(batch, a)[0]
        n += len(batch)
    return total / max(n, 1)


def best_scale(batches: Batches, a: Floats) -> tuple[float, float]:
    """The factor of A with which it says most nearly what the target says of the candidates, and the divergence then.

    Least squares make A too sure of itself: what it does not know of z still has a product with every row.
    """
    found = [(batch.there, log_softmax_there(batch, batch.z), scores(batch, batch.x @ a.T)) for batch in batches()]
    there, theirs, ours = (np.concatenate(parts) for parts in zip(*found, strict=True))
    p, n = np.exp(theirs) * there, len(there)

    def loss(scale: float) -> float:
        said = log_softmax(np.where(there, scale * np.where(there, ours, 0), NO_LOGIT))
        return float((p * np.subtract(theirs, said, out=np.zeros_like(p), where=there)).sum()) / n

    known = there.any(axis=1)
    there, theirs, ours, p = there[known], theirs[known], ours[known], p[known]
    losses = [loss(scale) for scale in SCALES]
    best = int(np.argmin(losses))
    return SCALES[best], losses[best]


def log_softmax_there(batch: Batch, states: Floats) -> Floats:
    """Logarithms of what states say of the candidates that are there; of positions without any, nothing of use."""
    any_there = batch.there.any(axis=1, keepdims=True)
    return log_softmax(np.where(any_there, scores(batch, states), np.float32(0)))


def distil(
    a: Floats,
    train: Batches,
    held_out: Batches,
    whole: Whole | None = None,
    after_epoch: Callable[[int, float], None] = lambda _epoch, _loss: None,
) -> Floats:
    """Go on from A by the paper's loss: the divergence over the vocabulary, of some positions, and over candidates.

    Ends when the held-out loss does not fall any more; gives the best A of all epochs.
    """
    best, best_loss, since = a.copy(), held_out_loss(held_out, a), 0
    adam, n_steps = Adam(a.copy()), 0
    for epoch in range(MOST_EPOCHS):
        for batch in train():
            gradient: Floats = (CANDIDATES_WEIGHT / len(batch)) * divergence(batch, adam.a)[1]
            if whole is not None and n_steps % WHOLE_EACH == 0:
                few = slice(0, WHOLE_BATCH)
                gradient += whole.divergence(batch.x[few], batch.z[few], adam.a)[1] / len(batch.x[few])
            adam.step(gradient)
            n_steps += 1
        loss = held_out_loss(held_out, adam.a)
        after_epoch(epoch, loss)
        since += 1
        if loss < best_loss:
            best, best_loss, since = adam.a.copy(), loss, 0
        if since >= PATIENCE:
            break
    return best


def fit_mix(logits: Floats, log_chances: Floats, there: NDArray[np.bool_], best: NDArray[np.int64]) -> Mix:
    """The exponents that make the target's tokens likeliest: of candidates [n, k] with their logits and the logarithms
    of the draft's chances, where they are there, and the place of the target's token, -1 where it is none of them. The
    draft's alone, where nothing is known.
    """
    known = best >= 0
    if not known.any():
        return DRAFT
    features = np.stack([logits[known], log_chances[known]], axis=2).astype(np.float64)
    features[~there[known]] = 0
    exponents = _likeliest_exponents(features, there[known], best[known])
    if min(exponents) < 0:  # one of them misleads: the other alone
        alone = exponents >= 0
        exponents = np.zeros(2)
        exponents[alone] = _likeliest_exponents(features[:, :, alone], there[known], best[known])
    return Mix(*map(float, np.maximum(exponents, 0)))


def _likeliest_exponents(
    features: NDArray[np.float64], there: NDArray[np.bool_], best: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The weights [m] of features [n, k, m] that make what is best likeliest. By Newton's method: the likelihood is
    concave. Where it grows without end, what so many steps reach.
    """
    m = features.shape[2]
    weights, target = np.ones(m), features[np.arange(len(features)), best]
    for _ in range(NEWTON_STEPS):
        logits = np.where(there, features @ weights, -np.inf)
        q = np.exp(logits - logits.max(axis=1, keepdims=True))
        q /= q.sum(axis=1, keepdims=True)
        mean = np.einsum("nk,nkf->nf", q, features)
        gradient = (target - mean).sum(axis=0)
        spread = np.einsum("nk,nkf,nkg->fg", q, features, features) - mean.T @ mean
        step = np.linalg.solve(spread + STEADY * np.eye(m), gradient)
        weights += np.clip(step, -LONGEST_STEP, LONGEST_STEP)
        if np.abs(step).max(initial=0.0) < NEAR:
            break
    return weights


def share_first(logits: Floats, best: NDArray[np.int64]) -> float:
    """Of all positions, the share whose target token is the candidate with the largest logit; 0 of none."""
    return float((logits.argmax(axis=1) == best).mean()) if len(best) else 0.0
