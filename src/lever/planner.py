"""What a run would hold, read and take, and what would change that: plans beside a profile. Loads no weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from lever.cost import PassTime, Profile
from lever.errors import DoesNotFit
from lever.gguf import MATRIX_TYPES, TYPES
from lever.llm import LLM
from lever.loader import LEAST_CTX, ModelSettings
from lever.memory import MIB, format_size
from lever.pages import round_up
from lever.profile import expected_pass
from lever.weights.image import Image
from lever.weights.plan import Plan

PRESET = "flash-ar"
MORE = 100_000_000  # bytes of memory whose worth is told
LEAST_BATCH = 32
SEARCH = 64  # steps of a MiB: what this process grows by between two plans
Line = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Speed:
    """A preset, and what a pass of it takes."""

    preset: str
    tokens_per_pass: float
    time: PassTime

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_pass / self.time.seconds

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
        threads = f"{t.threads} thread{'s' * (t.threads > 1)}"
        remark = f"{t.seconds:.3f} s a pass: reads {t.reads_s:.3f}, compute {t.compute_s:.3f} on {threads}"
        return (
            self.preset,
            f"{self.tokens_per_s:.2f} tokens/s",
            f"{remark}; {t.limit} are the limit".replace("compute are", "compute is"),
        )


@dataclass(frozen=True, slots=True)
class Gain:
    """What more memory would bring."""

    nbytes: int
    bytes_per_pass: int
    pinned_share: float
    speeds: tuple[Speed, ...]


@dataclass(frozen=True, slots=True)
class Outlook:
    """A run that fits."""

    plan: Plan
    n_ctx: int
    image: str | None
    speeds: tuple[Speed, ...]  # empty without a profile
    gain: Gain | None  # None when nothing is left to gain
    profile: Profile | None

    fits = True

    @property
    def parts(self) -> Mapping[str, int]:
        return self.plan.parts

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
            "n_ctx": self.n_ctx,
            "image": self.image,
            "pinned_share": self.plan.pinned_share,
            "bytes_per_pass": self.plan.bytes_per_pass,
            "presets": [speed.to_dict() for speed in self.speeds],
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

    def lines(self) -> Iterator[Line]:
        """For people: a name, a figure, a remark."""
        layers = f"{100 * self.plan.pinned_share:.0f} % of the layers stay in DRAM"
        yield "read in each pass", format_size(self.plan.bytes_per_pass), layers
        yield "context", str(self.n_ctx), "tokens"
        if self.image is not None:
            yield "flash image", self.image, ""
        for speed in self.speeds:
            yield speed.line()
        if self.gain is not None:
            yield f"{self.gain.nbytes / 1e6:.0f} MB more", *_gained(self.speeds, self.gain)
        if self.profile is not None:
            kind, runs = "quick" if self.profile.quick else "full", self.profile.correction.runs
            yield "profile", kind, f"of {self.profile.date}, corrected by {runs} run{'s' * (runs != 1)}"


def _gained(speeds: tuple[Speed, ...], gain: Gain) -> tuple[str, str]:
    reads = f"{format_size(gain.bytes_per_pass)} in each pass, {100 * gain.pinned_share:.0f} % of the layers in DRAM"
    if not speeds:
        return "", reads
    return f"{100 * (gain.speeds[0].tokens_per_s / speeds[0].tokens_per_s - 1):+.1f} %", reads


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


def outlook(llm: LLM, settings: ModelSettings, profile: Profile | None) -> Outlook:
    """A run with these settings; DoesNotFit when there can be none."""
    shape, plan = llm.plan(settings)
    image = Image.of(llm.gguf)
    return Outlook(
        plan,
        shape.n_ctx,
        image.describe() if image is not None else None,
        _speeds(profile, plan, settings),
        _gain(llm, replace(settings, n_ctx=shape.n_ctx), plan, profile),
        profile,
    )


def _speeds(profile: Profile | None, plan: Plan, settings: ModelSettings) -> tuple[Speed, ...]:
    return () if profile is None else (Speed(PRESET, 1.0, expected_pass(profile, plan, settings)),)


def _gain(llm: LLM, settings: ModelSettings, before: Plan, profile: Profile | None) -> Gain | None:
    """What more memory for the same context would bring; None when all is in memory, or may not be."""
    _, after = llm.plan(replace(settings, dram=settings.dram + MORE))
    if after.bytes_per_pass == before.bytes_per_pass:
        return None
    return Gain(MORE, after.bytes_per_pass, after.pinned_share, _speeds(profile, after, settings))


def shortage(llm: LLM, settings: ModelSettings, error: DoesNotFit) -> Shortage:
    """What these settings, which `error` refused, need at least, and ways to need less."""
    return Shortage(error.parts, settings.dram, _least(llm, settings, sum(error.parts.values())), _ways(llm, settings))


def _least(llm: LLM, settings: ModelSettings, start: int) -> int:
    """The least budget, in whole MiB, for which there is a plan."""
    budgets = (round_up(start, MIB) + step * MIB for step in range(SEARCH))
    return next((budget for budget in budgets if _fits(llm, replace(settings, dram=budget))), start + SEARCH * MIB)


def _fits(llm: LLM, settings: ModelSettings) -> bool:
    try:
        llm.plan(settings)
    except DoesNotFit:
        return False
    return True


def _ways(llm: LLM, settings: ModelSettings) -> tuple[Way, ...]:
    """Smaller settings, each by itself, with what it would take; those that bring nothing are left out."""
    need = _need(llm, settings)
    changes = {
        f"-c {LEAST_CTX}": replace(settings, n_ctx=min(LEAST_CTX, llm.config.n_ctx_train)),
        f"-b {LEAST_BATCH}": replace(settings, n_batch=min(LEAST_BATCH, settings.n_batch)),
        "fewer layers pinned: no --pin": replace(settings, pin_percent=None),
        "--ring 3": replace(settings, n_slots=3),
    }
    totals = {words: _need(llm, changed) for words, changed in changes.items()}
    ways = [Way(words, total) for words, total in totals.items() if total + MIB < need]
    if Image.of(llm.gguf) is None and _q4_0_is_smaller(llm):
        ways.append(Way(f"a smaller image: lever pack {llm.name} --type q4_0", None))
    return tuple(ways)


def _need(llm: LLM, settings: ModelSettings) -> int:
    """Bytes of the least plan."""
    try:
        _, plan = llm.plan(replace(settings, dram=1))
    except DoesNotFit as error:
        return sum(error.parts.values())
    return plan.total


def _q4_0_is_smaller(llm: LLM) -> bool:
    """Whether layers in Q4_0 would take clearly less: its blocks hold 32 weights in 18 bytes."""
    matrices = [t for t in llm.gguf.tensors.values() if t.name.startswith("blk.") and t.type in MATRIX_TYPES]
    weights = sum(t.nbytes // TYPES[t.type].nbytes * TYPES[t.type].block for t in matrices if len(t.shape) == 2)
    return sum(t.nbytes for t in matrices if len(t.shape) == 2) > 1.03 * weights * 18 / 32
