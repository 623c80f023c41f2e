"""What a run would hold, read and take, and what would change that: plans beside a profile. Loads no weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import ClassVar

from lever.companion import PART
from lever.cost import PassTime, Profile
from lever.cycle_cost import CycleCost
from lever.errors import DoesNotFit
from lever.forecast import Cycle
from lever.gguf import MATRIX_TYPES, TYPES
from lever.llm import LLM, NO_ROOM_TO_PRUNE, PREDICTOR
from lever.loader import LEAST_CTX, ModelSettings
from lever.memory import MIB, format_size
from lever.pages import round_up
from lever.pair import PairProfile, Shown
from lever.profile import drafted_cycle, expected_pass, foretold
from lever.pruner import PAYS, expected_gain
from lever.weights.image import Image
from lever.weights.plan import Plan

PLAIN, DRAFTED = "flash-ar", "lever"  # presets
READS = "reads"
MORE = 100_000_000  # bytes of memory whose worth is told
LEAST_BATCH = 32
SEARCH = 64  # steps of a MiB: what this process grows by between two plans
Line = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Speed:
    """Plain decoding: a pass is a token."""

    time: PassTime
    instead: bool  # of a draft, whose memory keeps layers then
    preset = PLAIN

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.time.seconds

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "preset": self.preset,
            "tokens_per_s": self.tokens_per_s,
            "pass_s": self.time.seconds,
            "reads_s": self.time.reads_s,
            "compute_s": self.time.compute_s,
            "limit": self.time.limit,
            "threads": self.time.threads,
        }

    def line(self) -> Line:
        """For people."""
        t = self.time
        remark = f"{t.seconds:.3f} s a pass: reads {t.reads_s:.3f}, compute {t.compute_s:.3f} on {_threads(t.threads)}"
        limit = f"{t.limit} are the limit".replace("compute are", "compute is")
        instead = "; with layers in the draft's memory" * self.instead
        return self.preset, f"{self.tokens_per_s:.2f} tokens/s", f"{remark}; {limit}{instead}"


@dataclass(frozen=True, slots=True)
class DraftedSpeed:
    """With a draft: what a cycle is, and what runs have shown of such cycles."""

    cycle: Cycle
    shown: Shown
    preset = DRAFTED

    @property
    def seconds(self) -> float:
        """Of a cycle."""
        return self.cycle.seconds * self.shown.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.cycle.tokens / self.seconds

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "preset": self.preset,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_cycle": self.cycle.tokens,
            "cycle_s": self.seconds,
            "pass_s": self.cycle.pass_s,
            "draft_s": self.cycle.draft_s,
            "project_s": self.cycle.project_s,
            "rows": self.cycle.rows,
            "draft_steps": self.cycle.steps,
            "threads": self.cycle.threads,
            "first_guesses_right": self.shown.first,
            "shown_by_runs": self.shown.runs,  # 0: assumed
            "cycle_s_over_foretold": self.shown.seconds,
        }

    def line(self) -> Line:
        """For people."""
        c, shown = self.cycle, self.shown
        first, runs = f"{100 * shown.first:.0f} % of first guesses", f"{shown.runs} run{'s' * (shown.runs != 1)}"
        why = f"{first} were right in {runs}" if shown.runs else f"assuming that {first} are right"
        parts = (
            f"pass of {c.rows} rows {c.pass_s:.3f} on {_threads(c.threads)}, draft {c.draft_s:.3f} in {c.steps} steps"
        )
        remark = f"{c.tokens:.1f} tokens in {self.seconds:.3f} s a cycle: {parts}, logits {c.project_s:.3f}; {why}"
        return self.preset, f"{self.tokens_per_s:.2f} tokens/s", remark


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


Speeds = tuple[Speed | DraftedSpeed, ...]


@dataclass(frozen=True, slots=True)
class Gain:
    """What more memory would bring."""

    nbytes: int
    bytes_per_pass: int
    pinned_share: float
    speeds: Speeds


@dataclass(frozen=True, slots=True)
class PruningOutlook:
    """What dropping rows behind a middle layer would bring to a cycle of `rows` rows."""

    layer: int
    rows: int
    kept: float  # of them, as a share, with 95 % of the tokens
    gain: float  # times as many tokens a second
    limit: str  # of the pass

    @property
    def pays(self) -> bool:
        return self.gain > PAYS

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "pays": self.pays}

    def line(self) -> Line:
        """For people."""
        what = f"behind layer {self.layer}, {100 * self.kept:.0f} % of {self.rows} rows bring 95 % of the tokens"
        if self.pays:
            return "pruning", f"{100 * (self.gain - 1):+.1f} %", what
        why = "reads are the limit of the pass" if self.limit == READS else f"{100 * (self.gain - 1):+.1f} % in speed"
        return "pruning", "not used", f"{what}: {why}"


@dataclass(frozen=True, slots=True)
class Outlook:
    """A run that fits."""

    plan: Plan
    n_ctx: int
    image: str | None
    speeds: Speeds  # empty without a profile
    gain: Gain | None  # None when nothing is left to gain
    profile: Profile | None
    draft: str | None = None  # that guesses ahead
    pruning: PruningOutlook | None = None  # None without a predictor, or a profile
    no_pruning: str | None = None  # why a predictor that is there would be left out

    fits = True

    @property
    def parts(self) -> Mapping[str, int]:
        return self.plan.parts

    @property
    def elsewhere(self) -> Mapping[str, int]:
        """Bytes by name in the memory of another device."""
        return self.plan.elsewhere

    @property
    def budget(self) -> int:
        return self.plan.budget

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        gain, profile = self.gain, self.profile
        return {
            "fits": True,
            "dram_budget_bytes": self.budget,
            "dram_planned_bytes": self.plan.total,
            "parts": dict(self.parts),
            "elsewhere": dict(self.elsewhere),
            "n_ctx": self.n_ctx,
            "image": self.image,
            "pinned_share": self.plan.pinned_share,
            "bytes_per_pass": self.plan.bytes_per_pass,
            "draft": self.draft
            and {"name": self.draft, "bytes": self.parts[PART], "times_as_fast_as_pinned_layers": self.draft_ratio},
            "presets": [speed.to_dict() for speed in self.speeds],
            "pruning": self.pruning and self.pruning.to_dict(),
            "no_pruning": self.no_pruning,
            "more_dram": gain
            and {
                "bytes": gain.nbytes,
                "pinned_share": gain.pinned_share,
                "bytes_per_pass": gain.bytes_per_pass,
                "presets": [speed.to_dict() for speed in gain.speeds],
            },
            "profile": profile
            and {"date": profile.date, "quick": profile.quick, "correction": asdict(profile.correction)},
        }

    @property
    def draft_ratio(self) -> float | None:
        """How many times as fast the draft is as layers that are kept in its memory; None where it is not known."""
        speed = {speed.preset: speed.tokens_per_s for speed in self.speeds}
        return speed[DRAFTED] / speed[PLAIN] if DRAFTED in speed else None

    def lines(self) -> Iterator[Line]:
        """For people: a name, a figure, a remark."""
        where = "on their device" if self.elsewhere else "in DRAM"
        layers = f"{100 * self.plan.pinned_share:.0f} % of the layers stay {where}"
        yield "read in each pass", format_size(self.plan.bytes_per_pass), layers
        yield "context", str(self.n_ctx), "tokens"
        if self.image is not None:
            yield "flash image", self.image, ""
        for speed in self.speeds:
            yield speed.line()
        if self.pruning is not None:
            yield self.pruning.line()
        if self.no_pruning is not None:
            yield "pruning", "not used", self.no_pruning
        if self.draft_ratio is not None:
            yield "memory of the draft", format_size(self.parts[PART]), _better_use(self.draft_ratio)
        if self.gain is not None:
            yield f"{self.gain.nbytes / 1e6:.0f} MB more", *_gained(self.speeds, self.gain)
        if self.profile is not None:
            kind, runs = "quick" if self.profile.quick else "full", self.profile.correction.runs
            yield "profile", kind, f"of {self.profile.date}, corrected by {runs} run{'s' * (runs != 1)}"


def _better_use(ratio: float) -> str:
    if ratio >= 1:
        return f"serves best as it is: {ratio:.1f} times as fast as layers kept there"
    return f"would serve better as layers kept there, {1 / ratio:.1f} times as fast: --no-draft"


def _gained(speeds: Speeds, gain: Gain) -> tuple[str, str]:
    """By the fastest way with and without; the others in the remark."""
    reads = f"{format_size(gain.bytes_per_pass)} in each pass, {100 * gain.pinned_share:.0f} % of the layers in DRAM"
    if not speeds:
        return "", reads
    ratios = [
        f"{100 * (more.tokens_per_s / now.tokens_per_s - 1):+.1f} % {now.preset}"
        for now, more in zip(speeds, gain.speeds, strict=True)
    ]
    best = max(speed.tokens_per_s for speed in gain.speeds) / max(speed.tokens_per_s for speed in speeds)
    return f"{100 * (best - 1):+.1f} %", "; ".join([*ratios * (len(ratios) > 1), reads])


@dataclass(frozen=True, slots=True)
class Way:
    """A way to fit, and the bytes that all parts together would take."""

    words: str
    total: int | None  # None where it is not known before it is done


@dataclass(frozen=True, slots=True)
class Shortage:
    """A run that does not fit: what it takes at least, and what would make that less."""

    parts: Mapping[str, int]
    budget: int
    least: int  # bytes of a budget that would do, all else left as it is
    ways: tuple[Way, ...]

    fits = False
    elsewhere: ClassVar[Mapping[str, int]] = MappingProxyType({})  # not what is short

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "fits": False,
            "dram_budget_bytes": self.budget,
            "dram_least_bytes": self.least,
            "parts": dict(self.parts),
            "ways": [{"way": way.words, "dram_needed_bytes": way.total} for way in self.ways],
        }

    def lines(self) -> Iterator[Line]:
        """For people."""
        yield "it would fit", format_size(self.least), f"with --dram {self.least // MIB}MiB"
        for way in self.ways:
            yield "or", format_size(way.total) if way.total is not None else "less", f"with {way.words}"


def outlook(
    llm: LLM,
    settings: ModelSettings,
    profile: Profile | None,
    pair: PairProfile | None = None,
    *,
    draft: bool = True,
) -> Outlook:
    """A run with these settings, with the model's draft or without; DoesNotFit when there can be none."""
    shape, plan = llm.plan(settings, draft=draft)
    image = Image.of(llm.gguf)
    asked = _Asked(llm, replace(settings, n_ctx=shape.n_ctx), profile, pair if draft else None, draft)
    return Outlook(
        plan,
        shape.n_ctx,
        image.describe() if image is not None else None,
        asked.speeds(plan),
        _gain(asked, plan),
        profile,
        llm.draft_name if draft else None,
        asked.pruning(plan),
        NO_ROOM_TO_PRUNE if draft and llm.translator is not None and PREDICTOR not in plan.parts else None,
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """Which run is looked at, and what is known of it."""

    llm: LLM
    settings: ModelSettings
    profile: Profile | None
    pair: PairProfile | None
    draft: bool

    def speeds(self, plan: Plan, more: int = 0) -> Speeds:
        """Of both presets after this plan; plain decoding is without the draft, whose memory then keeps layers."""
        profile, pair, settings = self.profile, self.pair, replace(self.settings, dram=self.settings.dram + more)
        if profile is None:
            return ()
        if pair is None:
            return (Speed(expected_pass(profile, plan, settings), instead=False),)
        _, alone = self.llm.plan(settings, draft=False)
        return (
            Speed(expected_pass(profile, alone, settings), instead=True),
            DraftedSpeed(drafted_cycle(profile, pair, plan, settings.n_threads), pair.shown),
        )

    def pruning(self, plan: Plan) -> PruningOutlook | None:
        """Of the cycles of this plan."""
        profile, pair, translator = self.profile, self.pair, self.llm.translator
        if profile is None or pair is None or translator is None or PREDICTOR not in plan.parts:
            return None
        n = self.settings.n_threads
        cost, cycle = CycleCost(n, foretold(profile, pair, plan, n)), drafted_cycle(profile, pair, plan, n)
        layers, rows = self.llm.config.n_layers, cycle.rows
        if rows == 1:
            return None
        gain = expected_gain(cost, translator, layers, cycle.draft_s, rows, cycle.tokens)
        limit = READS if cost.waits_for_reads_of(rows) else "compute"
        return PruningOutlook(translator.layer, rows, translator.quality.kept_rows, gain, limit)


def _gain(asked: _Asked, before: Plan) -> Gain | None:
    """What more memory for the same context would bring; None when all is in memory, or may not be."""
    _, after = asked.llm.plan(replace(asked.settings, dram=asked.settings.dram + MORE), draft=asked.draft)
    if after.bytes_per_pass == before.bytes_per_pass:
        return None
    return Gain(MORE, after.bytes_per_pass, after.pinned_share, asked.speeds(after, MORE))


def shortage(llm: LLM, settings: ModelSettings, error: DoesNotFit, *, draft: bool = True) -> Shortage:
    """What these settings, which `error` refused, need at least, and ways to need less; with the draft or without."""
    least = _least(llm, settings, sum(error.parts.values()), draft)
    return Shortage(error.parts, settings.dram, least, _ways(llm, settings, draft))


def _least(llm: LLM, settings: ModelSettings, start: int, draft: bool) -> int:
    """The least budget for which there is a plan, in whole MiB, and one more: the next process may hold a little more
    before it plans.
    """
    budgets = (round_up(start, MIB) + step * MIB for step in range(SEARCH))
    fitting = (budget for budget in budgets if fits(llm, replace(settings, dram=budget), draft=draft))
    return next(fitting, start + SEARCH * MIB) + MIB


def fits(llm: LLM, settings: ModelSettings, *, draft: bool) -> bool:
    """Whether there is a plan, with the model's draft or without."""
    try:
        llm.plan(settings, draft=draft)
    except DoesNotFit:
        return False
    return True


def _ways(llm: LLM, settings: ModelSettings, draft: bool) -> tuple[Way, ...]:
    """Smaller settings, each by itself, with what it would take; those that bring nothing are left out."""
    need = _need(llm, settings, draft)
    changes = {
        f"-c {LEAST_CTX}": replace(settings, n_ctx=min(LEAST_CTX, llm.config.n_ctx_train)),
        f"-b {LEAST_BATCH}": replace(settings, n_batch=min(LEAST_BATCH, settings.n_batch)),
        "fewer layers pinned: no --pin": replace(settings, pin_percent=None),
        "--ring 3": replace(settings, n_slots=3),
    }
    totals = {words: _need(llm, changed, draft) for words, changed in changes.items()}
    if draft and llm.companion is not None:
        totals["--no-draft"] = _need(llm, settings, draft=False)
    ways = [Way(words, total) for words, total in totals.items() if total + MIB < need]
    if Image.of(llm.gguf) is None and _q4_0_is_smaller(llm):
        ways.append(Way(f"a smaller image: lever pack {llm.name} --type q4_0", None))
    return tuple(ways)


def _need(llm: LLM, settings: ModelSettings, draft: bool) -> int:
    """Bytes of the least plan."""
    try:
        _, plan = llm.plan(replace(settings, dram=1), draft=draft)
    except DoesNotFit as error:
        return sum(error.parts.values())
    return plan.total


def _q4_0_is_smaller(llm: LLM) -> bool:
    """Whether layers in Q4_0 would take clearly less: its blocks hold 32 weights in 18 bytes."""
    matrices = [t for t in llm.gguf.tensors.values() if t.name.startswith("blk.") and t.type in MATRIX_TYPES]
    weights = sum(t.nbytes // TYPES[t.type].nbytes * TYPES[t.type].block for t in matrices if len(t.shape) == 2)
    return sum(t.nbytes for t in matrices if len(t.shape) == 2) > 1.03 * weights * 18 / 32
