"""From the word for a model to one that answers as fast as this machine lets it. Prints nothing."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from lever import gguf
from lever.arch import ModelConfig
from lever.cost import PassTime, Profile
from lever.cycle_cost import Foretold
from lever.errors import DoesNotFit, LeverError, StorageError
from lever.llm import LLM
from lever.loader import ModelSettings, Progress
from lever.memory import format_size, rss_bytes
from lever.models import cache, predictors, resolve
from lever.models.images import find_image, image_path, steady_sha256
from lever.pack import PackSettings, pack
from lever.pair import PairProfile
from lever.policies import preset as find_preset
from lever.profile import (
    QUICK,
    Scope,
    covers,
    covers_steps,
    expected_pass,
    foretold,
    identity_of,
    is_worth_it,
    keep,
    keep_pair,
    kept,
    kept_pair,
    learned,
    learned_pair,
    measure,
    measure_pair,
    tuned,
)
from lever.settings import AUTO, CPU, LOOKUP, NONE, Prune
from lever.stats import RunStats
from lever.weights.image import Image, pack_command
from lever.weights.plan import Plan

log = logging.getLogger(__name__)

AMPLE = 1 << 50  # bytes


class Told(cache.Progress, Protocol):
    """Told of what is done, one job at a time, and of what is worth a word."""

    jobs: int  # begun so far

    def start(self, total: int | None, what: str) -> None:
        """A job of `total` bytes begins; 0: of unknown size. None: a short one."""

    def tell(self, text: str) -> None:
        """How far a job is that has no bytes to count."""

    def note(self, text: str) -> None:
        """What somebody who waits may want to know."""


class Silent(cache.Silent):
    """Keeps it to itself; a `Told`."""

    jobs = 0

    def tell(self, text: str) -> None:
        """Nothing is shown."""

    def note(self, text: str) -> None:
        """Nothing is shown."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Where a model is, and the model that drafts for it, if the catalogue knows one."""

    path: Path
    draft: str | None


def open_path(reference: str, progress: Told, *, use_image: bool, offline: bool, device: str = CPU) -> Opened:
    """The model's file, fetched if need be, or its flash image where the cache has one for this machine's `device`."""
    resolved = resolve(reference, offline=offline, progress=progress)
    if resolved.notice and progress.jobs:  # it was brought here just now
        progress.note(f"{reference}: {resolved.notice}")
    image = _image(reference, resolved.path, progress, device) if use_image else None
    progress.start(None, f"opening {reference}")
    return Opened(image or resolved.path, resolved.draft)


def open_draft(reference: str, settings: ModelSettings, progress: Told, *, offline: bool) -> Path:
    """The draft's flash image, made now if the cache has none: all of it in Q4_0, since it cannot change the text, and
    as the kernels of this CPU want it, unless it is for another device.
    """
    resolved = resolve(reference, offline=offline, progress=progress)
    header = gguf.read(resolved.path)
    if Image.of(header) is not None:
        return resolved.path
    plain = settings.draft_device != CPU
    found = find_image(resolved.path, progress, draft=True, plain=plain)
    if found is not None and found.problem is None:
        return found.path
    progress.note(f"preparing the draft {reference}, once")
    path = image_path(resolved.path, draft=True, plain=plain)
    with cache.exclusive(path.stem, progress):
        pack(
            header,
            ModelConfig.from_gguf(header),
            path,
            PackSettings(
                type="q4_0",
                output="q4_0",
                layout="plain" if plain else "auto",
                dram=settings.dram,
                n_threads=settings.n_threads,
            ),
            name=reference,
            sha256=steady_sha256(resolved.path, progress),
            progress=progress,
        )
    return path


def _image(reference: str, source: Path, progress: Told, device: str) -> Path | None:
    """The flash image of a model in the cache, if it may stand for it on this machine; either way it is told."""
    found = find_image(source, progress)
    if found is None:
        return None
    if found.problem is not None:
        log.warning(
            "not using the flash image of %s: %s %s; pack it anew: %s",
            reference,
            found.path,
            found.problem,
            found.mend(reference),
        )
        return None
    if device != CPU and found.image is not None and found.image.repacked:
        log.warning(
            "not using the flash image of %s: it is packed for this CPU, not for %s; a plain one is for both: %s",
            reference,
            device,
            pack_command(reference, found.image.type, "plain"),
        )
        return None
    progress.note(f"using the flash image of {reference} ({found.describe()}): {found.path}")
    return found.path


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model and what drafts for it, in words; how the words are looked up."""

    model: str
    draft: str = AUTO  # or LOOKUP, or NONE
    preset: str | None = None
    use_image: bool = True  # the model's flash image, where the cache has one
    offline: bool = False
    predictor: str = AUTO  # or NONE, or a path
    prune: Prune = "auto"


def open_llm(wanted: Wanted, settings: ModelSettings, progress: Told, *, ample: bool = False) -> LLM:
    """The model's header and tokenizer, with its draft if there is one that fits, and what prunes beside it.

    An `ample` one is opened whatever its budget: to see what it would take.
    """
    with ExitStack() as stack:
        llm = stack.enter_context(_open_models(wanted, replace(settings, dram=AMPLE) if ample else settings, progress))
        if wanted.prune != "off" and wanted.predictor != NONE:
            _find_predictor(llm, wanted, progress)
        stack.pop_all()
    return llm


def _open_models(wanted: Wanted, settings: ModelSettings, progress: Told) -> LLM:
    offline, device = wanted.offline, settings.device
    opened = open_path(wanted.model, progress, use_image=wanted.use_image, offline=offline, device=device)
    plain = wanted.draft == NONE or (wanted.preset is not None and not find_preset(wanted.preset).drafts)
    name = None if plain else opened.draft if wanted.draft == AUTO else wanted.draft
    if name == LOOKUP:
        return LLM(opened.path, settings, name=wanted.model, lookup=True, policy=wanted.preset)
    if name is None:
        return LLM(opened.path, settings, name=wanted.model, policy=wanted.preset)
    try:
        draft = open_draft(name, settings, progress, offline=wanted.offline)
        return LLM(opened.path, settings, name=wanted.model, draft=draft, draft_name=name, policy=wanted.preset)
    except (DoesNotFit, StorageError) as error:
        if wanted.draft != AUTO or wanted.preset is not None:
            raise
        llm = LLM(opened.path, settings, name=wanted.model)  # refused by itself, if that is too large as well
        without_draft(name, NO_ROOM if isinstance(error, DoesNotFit) else str(error))
        return llm


def _find_predictor(llm: LLM, wanted: Wanted, progress: Told) -> None:
    """Give it the predictor that was asked for, or the kept one; what was asked for and is of no use is told of."""
    named = wanted.predictor != AUTO
    if llm.settings.device != CPU:
        if named or wanted.prune == "paper":
            log.warning("not pruning: the middle of a pass is on %s, and scores are made here", llm.settings.device)
        return
    if llm.companion is None or not llm.policy.prunes:
        if named or wanted.prune == "paper":
            log.warning("not pruning: that takes a draft, and a preset that does: lever or lever-paper")
        return
    pair = llm.config, llm.gguf, llm.companion.gguf
    found = predictors.named(Path(wanted.predictor), *pair, progress) if named else predictors.kept(*pair, progress)
    if found is not None:
        llm.prune_with(found, wanted.prune, must=named)
    elif wanted.prune == "paper":
        log.warning("not pruning: there is no predictor for this model and draft: lever train-predictor makes one")


NO_ROOM = "the budget does not hold it as well"


def without_draft(name: str, why: str) -> None:
    """Say that a draft that nobody asked for by name is left out."""
    log.warning("going on without the draft %s: %s", name, why)


@dataclass(frozen=True, slots=True)
class Tuning:
    """What the profile of this machine makes of a plan."""

    profile: Profile
    plan: Plan
    settings: ModelSettings
    pair: PairProfile | None = None  # what is known of the draft

    @property
    def foretold(self) -> Foretold:
        """What the first cycle goes by."""
        return foretold(self.profile, self.pair, self.plan, self.settings.n_threads)

    @property
    def expected(self) -> PassTime:
        """Of a pass for one token."""
        return expected_pass(self.profile, self.plan, self.settings)


def open_ready(
    wanted: Wanted, settings: ModelSettings, progress: Told, *, use_profile: bool
) -> tuple[LLM, Tuning | None]:
    """As `open_llm` and then `prepare`; the model is closed where the second fails."""
    with ExitStack() as stack:
        llm = stack.enter_context(open_llm(wanted, settings, progress))
        tuning = prepare(llm, progress, use_profile=use_profile)
        stack.pop_all()
    return llm, tuning


def prepare(llm: LLM, progress: Told, *, use_profile: bool = True) -> Tuning | None:
    """Load it, as the profile of this machine has it; what is known then, None where nothing is, as of other devices.

    Errors as of `LLM.load`.
    """
    tuning = tune(llm, llm.settings, progress) if use_profile and llm.settings.all_on_cpu else None
    loading = Progress(lambda total: progress.start(total or None, "loading the weights"), progress.advance)
    plan = llm.load(loading, tuning.settings if tuning is not None else llm.settings).plan
    parts = ", ".join(f"{part} {format_size(nbytes)}" for part, nbytes in plan.parts.items() if nbytes)
    log.info("%s of %s planned: %s", format_size(plan.total), format_size(plan.budget), parts)
    if tuning is None:
        return None
    tuning = with_draft(llm, tuning, progress)
    llm.foretold = tuning.foretold
    return tuning


def tune(llm: LLM, settings: ModelSettings, progress: Told) -> Tuning | None:
    """Settings as the kept profile has them, or a quick one that is made now; None where it would not pay.

    A machine that cannot be measured is told of, and run as if nothing were known.
    """
    started = time.perf_counter()
    _, plan = llm.plan(settings)
    if not is_worth_it(plan):
        return None
    try:
        profile = find_profile(llm, settings, progress)
    except (DoesNotFit, StorageError) as error:
        log.warning("going on without a profile of this machine: %s", error)
        return None
    tuning = Tuning(profile, plan, tuned(profile, plan, settings))
    log.info(
        "profile of %s (%.2f s): reads of %s, %d at a time, %d threads to start with; a pass should take %.3f s",
        profile.date,
        time.perf_counter() - started,
        format_size(tuning.settings.block),
        tuning.settings.depth,
        tuning.expected.threads,
        tuning.expected.seconds,
    )
    return tuning


def find_profile(llm: LLM, settings: ModelSettings, progress: Told) -> Profile:
    """The kept profile of this machine and model, or a quick one, measured and kept now."""
    profile = kept(identity_of(llm.gguf, llm.config))
    if profile is not None and covers(profile, settings.n_threads):
        return profile
    progress.note("measuring this machine with this model, once, for a few seconds (lever profile does it thoroughly)")
    progress.start(None, "measuring")
    profile = measure(llm.gguf, llm.config, settings, QUICK, progress=lambda what: progress.tell(f"measuring {what}"))
    _keep(profile)
    return profile


def with_draft(llm: LLM, tuning: Tuning, progress: Told) -> Tuning:
    """With what is known of the draft of a model that is loaded. One that cannot be measured is told of."""
    try:
        return replace(tuning, pair=find_pair(llm, tuning.settings, progress))
    except LeverError as error:
        log.warning("nothing is known of the draft %s: %s", llm.draft_name, error)
        return tuning


def find_pair(llm: LLM, settings: ModelSettings, progress: Told) -> PairProfile | None:
    """What is kept of the draft with its target, or measured and kept now; None without a draft."""
    if llm.companion is None:
        return None
    pair = kept_pair(identity_of(llm.gguf, llm.config), llm.companion)
    if pair is not None and covers_steps(pair, settings.n_threads):
        return pair
    progress.note("measuring the draft, once, for a second (lever profile does it thoroughly)")
    pair = steps_of(llm, QUICK, progress)
    _keep(pair)
    return pair


def steps_of(llm: LLM, scope: Scope, progress: Told) -> PairProfile:
    """The draft's steps, measured; it is loaded if it is not."""
    assert llm.companion is not None
    progress.start(None, "measuring the draft")
    model = llm.companion.load(rss_bytes()).model
    return measure_pair(
        identity_of(llm.gguf, llm.config),
        llm.companion,
        model,
        scope,
        lambda what: progress.tell(f"measuring {what}"),
    )


def learn(tuning: Tuning, stats: RunStats) -> None:
    """Correct what is kept of the machine, or of the draft, by what a run took and brought."""
    if stats.verified:
        _learn_pair(tuning, stats)
    else:  # the profile speaks of passes for one token
        _learn_passes(tuning, stats)


def _learn_pair(tuning: Tuning, stats: RunStats) -> None:
    pair = tuning.pair
    if pair is None or stats.preset != "lever":
        return
    after = learned_pair(tuning.profile, pair, tuning.plan, tuning.settings.n_threads, stats)
    if after is not None:
        _keep(after)
        log.info(
            "%.2f tokens a cycle: as if %.0f %% of first guesses were right; cycles take %.2f of what was foretold",
            stats.tokens_per_cycle,
            100 * after.shown.first,
            after.shown.seconds,
        )


def _learn_passes(tuning: Tuning, stats: RunStats) -> None:
    started = time.perf_counter()
    profile = learned(tuning.profile, tuning.plan, tuning.settings, stats)
    if profile is not None:
        _keep(profile)
        log.info(
            "passes took %.3f s, %.2f of what the profile foretold; it is corrected (%.3f s)",
            stats.decode_s / stats.cycles,
            stats.decode_s / stats.cycles / tuning.expected.seconds,
            time.perf_counter() - started,
        )


def _keep(found: Profile | PairProfile) -> None:
    try:
        if isinstance(found, Profile):
            keep(found)
        else:
            keep_pair(found)
    except LeverError as error:
        log.warning("%s", error)
