"""From the word for a model to its file, and to what is known of this machine with it. Prints notes only."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from lever import gguf
from lever.arch import ModelConfig
from lever.cli.console import Bar, note
from lever.cost import PassTime, Profile
from lever.errors import DoesNotFit, LeverError, StorageError
from lever.llm import LLM
from lever.loader import ModelSettings
from lever.memory import format_size
from lever.models import resolve
from lever.models.cache import exclusive
from lever.models.images import find_image, image_path, steady_sha256
from lever.pack import PackSettings, pack
from lever.profile import QUICK, covers, expected_pass, identity_of, is_worth_it, keep, kept, learned, measure, tuned
from lever.stats import RunStats
from lever.weights.image import Image
from lever.weights.plan import Plan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """Where a model is, and the model that drafts for it, if the catalogue knows one."""

    path: Path
    draft: str | None


def open_path(reference: str, progress: Bar, *, use_image: bool, offline: bool, quiet: bool) -> Opened:
    """The model's file, fetched if need be, or its flash image where the cache has one for this machine."""
    resolved = resolve(reference, offline=offline, progress=progress)
    if resolved.notice and progress.jobs and not quiet:  # it was brought here just now
        note(f"{reference}: {resolved.notice}")
    image = _image(reference, resolved.path, progress, quiet=quiet) if use_image else None
    progress.start(None, f"opening {reference}")
    return Opened(image or resolved.path, resolved.draft)


def open_draft(reference: str, settings: ModelSettings, progress: Bar, *, offline: bool, quiet: bool) -> Path:
    """The draft's flash image, made now if the cache has none: all of it in Q4_0, since it cannot change the text."""
    resolved = resolve(reference, offline=offline, progress=progress)
    header = gguf.read(resolved.path)
    if Image.of(header) is not None:
        return resolved.path
    found = find_image(resolved.path, progress)
    if found is not None and found.problem is None:
        return found.path
    if not quiet:
        note(f"preparing the draft {reference}, once")
    path = image_path(resolved.path)
    with exclusive(path.stem, progress):
        pack(
            header,
            ModelConfig.from_gguf(header),
            path,
            PackSettings(type="q4_0", output="q4_0", dram=settings.dram, n_threads=settings.n_threads),
            name=reference,
            sha256=steady_sha256(resolved.path, progress),
            progress=progress,
        )
    return path


def _image(reference: str, source: Path, progress: Bar, *, quiet: bool) -> Path | None:
    """The flash image of a model in the cache, if it may stand for it on this machine; either way it is told."""
    found = find_image(source, progress)
    if found is None:
        return None
    if found.problem is not None:
        note(
            f"not using the flash image of {reference}: {found.path} {found.problem}; "
            f"pack it anew: {found.mend(reference)}"
        )
        return None
    if not quiet:
        note(f"using the flash image of {reference} ({found.describe()}): {found.path}")
    return found.path


@dataclass(frozen=True, slots=True)
class Tuning:
    """What the profile of this machine makes of a plan."""

    profile: Profile
    plan: Plan
    settings: ModelSettings

    @property
    def expected(self) -> PassTime:
        """Of a pass for one token."""
        return expected_pass(self.profile, self.plan, self.settings)


def tune(llm: LLM, settings: ModelSettings, progress: Bar, *, quiet: bool) -> Tuning | None:
    """Settings as the kept profile has them, or a quick one that is made now; None where it would not pay.

    A machine that cannot be measured is told of, and run as if nothing were known.
    """
    started = time.perf_counter()
    _, plan = llm.plan(settings)
    if not is_worth_it(plan):
        return None
    try:
        profile = find_profile(llm, settings, progress, quiet=quiet)
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


def find_profile(llm: LLM, settings: ModelSettings, progress: Bar, *, quiet: bool) -> Profile:
    """The kept profile of this machine and model, or a quick one, measured and kept now."""
    profile = kept(identity_of(llm.gguf, llm.config))
    if profile is not None and covers(profile, settings.n_threads):
        return profile
    if not quiet:
        note("measuring this machine with this model, once, for a few seconds (lever profile does it thoroughly)")
    progress.start(None, "measuring")
    profile = measure(llm.gguf, llm.config, settings, QUICK, progress=lambda what: progress.tell(f"measuring {what}"))
    _keep(profile)
    return profile


def learn(tuning: Tuning, stats: RunStats) -> None:
    """Correct the kept profile by what a run took."""
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


def _keep(profile: Profile) -> None:
    try:
        keep(profile)
    except LeverError as error:
        log.warning("%s", error)
