"""Makes a predictor: records a target and its draft, fits a translator for each of a few layers, and looks at what each
would have pruned of real trees. What is recorded is kept until the end, so that a run that was stopped goes on.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lever.companion import TREE_ROWS
from lever.draft import Draft
from lever.engine import Engine
from lever.errors import StorageError, UsageError
from lever.loader import LoadedModel
from lever.memory import MIB
from lever.policies import Preset, best_nodes
from lever.predictor import Quality, Translator
from lever.prune import DRAFT
from lever.pruner import Pruning
from lever.sample import Sampler
from lever.settings import SamplerSettings
from lever.stats import RunStats
from lever.training.fit import (
    BATCH,
    Batch,
    Batches,
    Floats,
    LeastSquares,
    Whole,
    best_scale,
    distil,
    fit_mix,
    scores,
    share_first,
)
from lever.training.record import Record, Recorder
from lever.training.rows import OutputRows
from lever.training.trees import Checked, Watching, by_paper, by_reach, tightest

log = logging.getLogger(__name__)

HELD_OUT = 5  # of so many prompts, one is not fitted to
ROWS_BYTES = 96 * MIB  # of rows of the output projection
BESIDE = 192 * MIB  # batches and logits
LEAST_CHANCE = 1e-6
SEEDS_APART = 1000  # of two prompts; branches lie between
ACCEPTED = 0.95  # of what is accepted without pruning: what a rule must keep
WATCHED = 8  # answers, whose trees are looked at
MOST_OF_CONTEXT = 0.75  # that a prompt may take, so that there is room to answer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """How much is recorded, and for which layers."""

    layers: tuple[int, ...]  # after which a translator is asked; the first is 0
    n_positions: int = 8_000
    n_branches: int = 4  # answers to a prompt at once
    n_tokens: int = 32  # of each
    seed: int = 0
    whole: bool = True  # the divergence over the vocabulary, too

    def __post_init__(self) -> None:
        """UsageError for what lies outside its range."""
        for name, value in (("positions", self.n_positions), ("branches", self.n_branches), ("tokens", self.n_tokens)):
            if value < 1:
                raise UsageError(f"{name} is {value}: it must be at least 1")


def check(settings: TrainingSettings, n_layers: int, n_prompts: int) -> None:
    """UsageError where nothing can come of training."""
    if not settings.layers:
        raise UsageError(f"{n_layers} layers are too few: there is nothing to leave out behind any of them")
    for layer in settings.layers:
        if not 0 <= layer < n_layers - 1:
            raise UsageError(f"layer {layer}: there must be layers behind it, so it is 0 to {n_layers - 2}")
    if n_prompts < 2:
        raise UsageError("one text is too little: some of what is recorded is not fitted to, but looked at afterwards")


def default_layers(n_layers: int) -> tuple[int, ...]:
    """At the middle of the depth, and at three quarters of it."""
    return tuple(sorted({max(n_layers * quarter // 4 - 1, 0) for quarter in (2, 3)} - {n_layers - 1}))


def nbytes(n_embd: int, n_layers: int) -> int:
    """Bytes that training takes beside the models, for so many layers."""
    return 4 * n_embd * n_embd * (2 * n_layers + 8) + ROWS_BYTES + BESIDE


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft in their places, and the norm before the output projection, F32 [n_embd]."""

    target: LoadedModel
    draft: Draft
    norm: Floats
    end_tokens: frozenset[int]


def train(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    settings: TrainingSettings,
    work: Path,
    tell: Callable[[str], None],
    *,
    texts: bool = False,
) -> list[tuple[Translator, NDArray[np.float16]]]:
    """A translator and its matrix for each layer. `work`: the folder of what is recorded, which its caller deletes.

    `prompts` are answered or, with `texts`, read as they are. UsageError as of `check`, and where they give too little;
    StorageError.
    """
    check(settings, pair.target.config.n_layers, len(prompts))
    if not pair.target.projection_in_memory:
        raise UsageError("the output projection is not kept in memory, and the predictor needs it: give more --dram")
    # First what may be refused, then what takes minutes.
    with OutputRows(pair.target, ROWS_BYTES // (2 * pair.target.config.n_embd)) as rows:
        recorded = _record(pair, prompts, settings, work, tell, texts=texts)
        fitted = [_fit(pair, recorded, layer, rows, settings, tell) for layer in settings.layers]
    most = int(MOST_OF_CONTEXT * pair.target.shape.n_ctx)
    watched = [prompt[:most] for number, prompt in enumerate(prompts) if _is_held_out(number)][:WATCHED]
    found = []
    for translator, matrix in fitted:
        tell(f"layer {translator.layer}: looking at trees")
        found.append((_looked_at(translator, _watch(pair, translator, matrix, watched, settings)), matrix))
    return found


def _is_held_out(number: int) -> bool:
    """Whether a prompt is not fitted to."""
    return number % HELD_OUT == 0


# --- what is recorded ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recorded:
    """Files of records, by what they are for. Answers to one prompt are all on one side."""

    fitted_to: list[Path] = field(default_factory=list)
    held_out: list[Path] = field(default_factory=list)


def _record(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    settings: TrainingSettings,
    work: Path,
    tell: Callable[[str], None],
    *,
    texts: bool,
) -> Recorded:
    """As many positions as are wanted, prompts in turn, texts once. Files that are there are taken as they are."""
    recorder = Recorder(pair.target.model, pair.draft, settings.layers, pair.end_tokens)
    recorded, n = Recorded(), 0
    try:
        work.mkdir(parents=True, exist_ok=True)
        for number, prompt in enumerate(itertools.cycle(prompts)):
            is_first = number < len(prompts)
            if n >= settings.n_positions or not (is_first or (n and not texts)):
                break
            path = work / f"{number:05}-{_key(pair, prompt, settings, texts=texts)}.npz"
            record = _kept(path)
            if record is None:
                tell_more = functools.partial(_tell_positions, tell, settings.n_positions, n)
                tell_more(0)
                seed = settings.seed + SEEDS_APART * number
                record = (
                    recorder.text(prompt)
                    if texts
                    else recorder.answers(prompt, settings.n_branches, settings.n_tokens, seed, tell_more)
                )
                record.save(path)
            n += len(record)
            if len(record):
                side = recorded.held_out if _is_held_out(number % len(prompts)) else recorded.fitted_to
                side.append(path)
    except OSError as error:
        raise StorageError(f"{work}: cannot be written: {error.strerror or error}") from error
    if not (recorded.fitted_to and recorded.held_out):
        raise UsageError(
            f"{n} positions are too few: some are not fitted to, but looked at afterwards; ask for more, of more texts"
        )
    return recorded


def _kept(path: Path) -> Record | None:
    """What a run that was stopped has recorded; None if it has not, or if that is damaged, which is told."""
    try:
        return Record.load(path) if path.exists() else None
    except StorageError as error:
        log.warning("recording anew: %s", error)
        return None


def _tell_positions(tell: Callable[[str], None], wanted: int, before: int, more: int) -> None:
    tell(f"recording: {min(before + more, wanted)} of {wanted} positions")


def _key(pair: Pair, prompt: Sequence[int], settings: TrainingSettings, *, texts: bool) -> str:
    """Names all that a record depends on beside target and draft."""
    image = pair.target.image
    how = (texts, settings.layers, settings.n_branches, settings.n_tokens, settings.seed)
    what = (list(prompt), how, pair.target.layout, image.describe() if image is not None else None)
    return hashlib.sha256(repr(what).encode()).hexdigest()[:12]


# --- one layer ----------------------------------------------------------------------------------------------


def _fit(
    pair: Pair,
    recorded: Recorded,
    layer: int,
    rows: OutputRows,
    settings: TrainingSettings,
    tell: Callable[[str], None],
) -> tuple[Translator, NDArray[np.float16]]:
    dice = np.random.default_rng(settings.seed)

    def fitted_to() -> Iterator[Batch]:
        for number in dice.permutation(len(recorded.fitted_to)):
            yield from _batches(Record.load(recorded.fitted_to[number]), layer, rows, dice)

    def held_out() -> Iterator[Batch]:
        for path in recorded.held_out:
            yield from _batches(Record.load(path), layer, rows)

    tell(f"layer {layer}: least squares")
    least = LeastSquares(pair.norm)
    for path in recorded.fitted_to:
        record = Record.load(path)
        least.add(record.hidden[layer].astype(np.float32), record.final.astype(np.float32))
    a = least.solve(lambda a: best_scale(held_out, a)[1])
    a *= np.float32(best_scale(held_out, a)[0])
    del least
    whole = Whole(lambda states: _logits(pair, states), lambda tokens: _rows_of(rows, tokens))
    a = distil(
        a,
        fitted_to,
        held_out,
        whole if settings.whole else None,
        lambda epoch, loss: tell(f"layer {layer}: epoch {epoch + 1}, held-out divergence {loss:.4f}"),
    )
    matrix = a.astype(np.float16)
    return _judged(layer, held_out, matrix.astype(np.float32), pair.norm), matrix


def _batches(record: Record, layer: int, rows: OutputRows, order: np.random.Generator | None = None) -> Iterator[Batch]:
    """A record in pieces, in its order or in any."""
    n = len(record)
    chosen = np.arange(n) if order is None else order.permutation(n)
    for start in range(0, n, BATCH):
        at = chosen[start : start + BATCH]
        tokens = record.tokens[at]
        places = rows.places(tokens)
        there = places >= 0
        is_best = (tokens == record.best[at][:, None]) & there
        yield Batch(
            x=record.hidden[layer][at].astype(np.float32),
            z=record.final[at].astype(np.float32),
            rows=rows.at(places),
            there=there,
            log_chances=np.log(np.maximum(record.chances[at], LEAST_CHANCE)),
            best=np.where(is_best.any(axis=1), is_best.argmax(axis=1), -1),
        )


def _rows_of(rows: OutputRows, tokens: NDArray[np.int32]) -> tuple[Floats, NDArray[np.bool_]]:
    places = rows.places(tokens)
    return rows.at(places), places >= 0


def _logits(pair: Pair, states: Floats) -> Floats:
    model = pair.target.model
    width = model.shape.n_logits
    return np.concatenate(
        [model.logits_of(states[start : start + width]).copy() for start in range(0, len(states), width)]
    )


def _judged(layer: int, held_out: Batches, a: Floats, norm: Floats) -> Translator:
    """What a translator is worth on what it was not fitted to: the mix is fitted to half of that, the rest is told."""
    found = [
        (batch.there, batch.best, batch.log_chances, scores(batch, batch.x * norm), scores(batch, batch.x @ a.T))
        for batch in held_out()
    ]
    there, best, drafts, lens, ours = (np.concatenate(parts) for parts in zip(*found, strict=True))
    half = len(best) // 2
    mix = fit_mix(ours[:half], drafts[:half], there[:half], best[:half])
    there, best, drafts, lens, ours = (part[half:] for part in (there, best, drafts, lens, ours))
    both = mix.score * np.where(there, ours, 0) + mix.draft * drafts
    first_by_draft, first_by_both = (share_first(np.where(there, logits, -np.inf), best) for logits in (drafts, both))
    quality = Quality(
        positions=len(best),
        first_by_draft=first_by_draft,
        first_by_lens=share_first(lens, best),
        first_by_translator=share_first(ours, best),
        first_by_both=first_by_both,
    )
    return Translator(layer=layer, mix=mix, threshold=0.0, quality=quality)


# --- trees --------------------------------------------------------------------------------------------------


def _watch(
    pair: Pair,
    translator: Translator,
    matrix: NDArray[np.float16],
    prompts: Sequence[Sequence[int]],
    settings: TrainingSettings,
) -> list[Checked]:
    """Trees of greedy answers, as large as a pass takes, with their scores."""
    watching, target = Watching(), pair.target

    def fill(into: NDArray[np.float16]) -> None:
        into[:] = matrix

    policy = Preset("watched", "", *best_nodes(TREE_ROWS), prunes=True)
    with target.open_scores(fill) as found:
        pruning = Pruning(found, translator, watching.rule)
        engine = Engine(target.model, target.store, target.n_threads, draft=pair.draft, policy=policy, pruning=pruning)
        greedy = Sampler(SamplerSettings(seed=0, temperature=0.0), target.config.n_vocab)
        for prompt in prompts:
            for _ in engine.steps(
                prompt,
                greedy.draw,
                max_new_tokens=2 * settings.n_tokens,
                end_tokens=pair.end_tokens,
                stats=RunStats(),
                on_cycle=watching.cycle,
            ):
                pass
    return watching.checked


def _looked_at(translator: Translator, trees: Sequence[Checked]) -> Translator:
    """With the threshold of the paper's rule, and what is left of trees by path probabilities."""
    threshold, _ = tightest(trees, by_paper, ACCEPTED)
    kept = tightest(trees, by_reach(translator.mix), ACCEPTED)[1]
    by_draft = tightest(trees, by_reach(DRAFT), ACCEPTED)[1]
    quality = replace(translator.quality, kept_rows=kept.rows, kept_rows_by_draft=by_draft.rows)
    return replace(translator, threshold=threshold, quality=quality)
