"""What reads, layers and passes cost on one machine, from figures that were measured there. Measures nothing itself.

A pass reads its streamed bytes while it computes, so it takes about as long as the slower of the two:

    reads    streamed bytes / rate of the store while it is computed beside
    compute  layers * (layer + Python between layers) + output projection
    pass     (reads^6 + compute^6)^(1/6) * (1 + lost)

The sixth powers are a maximum with a round corner: a ring of few slots does not even out which side is late in which
layer, and where both take equally long a pass takes a tenth longer than either (measured, see docs/log.md). `lost` is
what a pass took beyond that in the profile. A layer takes longer when the store streams beside it, in proportion to
what it streams: its time lies between the one in memory and the one in a pass that streams all. Times between two
measured numbers of rows are on the straight line between them, and beyond the last on the last line.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from itertools import pairwise
from statistics import median, quantiles
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from lever.errors import ProfileError

VERSION = 1  # of the kept form; another one is measured anew
PAGE = 4096  # blocks of reads are a multiple of this
NEAR = 0.03  # figures that differ by this share are as good as equal
MOST_DOUBT = 0.08  # share of the best rate that is given up at most, where it varies
NOISY = 0.15  # spread of a figure that should not be relied on
NOISY_SHARE = 0.25  # of the figures: so many noisy ones are worth a word
HOTTER, SLOWER = 15.0, 0.9  # degrees, and share of the clock: what a machine that throttles shows
WEIGHT = 0.3  # of the newest run, in what runs have shown
SHARP = 6  # power of the mean of both sides, see above
DOUBT = 2.0  # a run that differs by more than this factor tells of something else than the machine
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure that was measured several times."""

    median: float
    spread: float = 0.0  # distance between the quartiles, as a share of the median

    def __post_init__(self) -> None:
        require(0 < self.median < math.inf and 0 <= self.spread < math.inf, f"{self} is no measurement")

    @classmethod
    def of(cls, samples: Sequence[float]) -> Measured:
        """Median and spread of samples above zero; times too short for the clock count as a nanosecond."""
        samples = [max(sample, 1e-9) for sample in samples]
        middle = median(samples)
        if len(samples) < 2:
            return cls(middle)
        low, _, high = quantiles(samples, n=4, method="inclusive")
        return cls(middle, (high - low) / middle)


@dataclass(frozen=True, slots=True)
class ReadRate:
    """Bytes per second of reads past the page cache, on an idle machine and while one thread computes beside."""

    block: int  # bytes of one read
    depth: int  # reads in flight
    idle: Measured
    busy: Measured | None  # None: there was no memory for a model beside the ring

    def __post_init__(self) -> None:
        require(0 < self.block <= 1 << 30 and self.block % PAGE == 0, f"reads of {self.block} bytes")
        require(0 < self.depth <= 64, f"{self.depth} reads in flight")

    @property
    def rate(self) -> Measured:
        """The one that passes see."""
        return self.busy or self.idle


@dataclass(frozen=True, slots=True)
class RowTime:
    """Seconds inside ggml for rows: through an average layer that is in memory, or for their logits."""

    rows: int
    threads: int
    seconds: Measured

    def __post_init__(self) -> None:
        require(self.rows > 0 and self.threads > 0, f"{self.rows} rows on {self.threads} threads")


@dataclass(frozen=True, slots=True)
class Together:
    """A pass over some layers while the store streams all of them: seconds inside it, and what they went to."""

    rows: int
    threads: int
    n_layers: int
    read_bytes: int
    seconds: Measured
    read: Measured  # bytes per second, while any read is in flight
    layer: Measured  # inside ggml, each
    projection: Measured  # inside ggml
    python: Measured  # outside ggml and outside waits, the whole pass

    def __post_init__(self) -> None:
        require(self.rows > 0 and self.threads > 0, f"{self.rows} rows on {self.threads} threads")
        require(self.n_layers > 0 and self.read_bytes > 0, "a pass over nothing")

    @property
    def compute_s(self) -> float:
        """What a pass that never waits would take."""
        return self.n_layers * self.layer.median + self.python.median + self.projection.median

    @property
    def lost(self) -> float:
        """Share that the pass took beyond what its sides explain."""
        return max(self.seconds.median / at_once(self.read_bytes / self.read.median, self.compute_s) - 1, 0.0)


@dataclass(frozen=True, slots=True)
class Conditions:
    """The hottest sensor and the mean clock of the cores that compute; None where the system does not tell."""

    celsius: float | None = None
    hertz: float | None = None


@dataclass(frozen=True, slots=True)
class Correction:
    """What runs have shown of passes for one token, as shares of what the figures said: moving averages."""

    runs: int = 0
    seconds: float = 1.0  # of a pass, once the rate below is taken into account
    read: float = 1.0  # the rate of reads

    def __post_init__(self) -> None:
        sound = all(1 / DOUBT <= share <= DOUBT for share in (self.seconds, self.read))
        require(self.runs >= 0 and sound, f"{self} is no correction")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a profile is of. Another machine, storage, shape of model or layout has another one."""

    machine: str  # CPU, its cores, and ggml
    storage: str  # device and file system
    model: str  # hash of the shapes, types and places of its tensors
    layout: str  # of its bytes: "plain" or "repacked"

    @property
    def key(self) -> str:
        """A name for files."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:20]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything that was measured, and when. Tables are never empty but `together`, which needs the model's file."""

    identity: Identity
    date: str  # ISO 8601
    quick: bool  # few points, few repetitions
    n_layers: int
    layer_bytes: int  # of an average layer
    buffered_reason: str | None  # why reads went through the page cache
    reads: tuple[ReadRate, ...]
    layers: tuple[RowTime, ...]
    projections: tuple[RowTime, ...]
    together: tuple[Together, ...]
    before: Conditions = field(default_factory=Conditions)
    after: Conditions = field(default_factory=Conditions)
    correction: Correction = field(default_factory=Correction)
    version: int = VERSION

    def __post_init__(self) -> None:
        require(self.version == VERSION, f"it is of version {self.version}, this lever keeps {VERSION}")
        require(self.n_layers > 0 and self.layer_bytes > 0, "a model without layers")
        for name in ("reads", "layers", "projections"):
            require(bool(getattr(self, name)), f"{name} is empty")
        reads = [(rate.block, rate.depth) for rate in self.reads]
        times = [[(t.rows, t.threads) for t in table] for table in (self.layers, self.projections, self.together)]
        for keys in (reads, *times):
            require(len(set(keys)) == len(keys), "the same was measured twice")

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """ProfileError for anything that `to_json` of this version did not write."""
        return from_json(cls, text, VERSION, "profile")


def require(holds: bool, otherwise: str) -> None:
    """ProfileError unless it holds."""
    if not holds:
        raise ProfileError(otherwise)


def from_json(kind: type[T], text: str, version: int, name: str) -> T:
    """What was kept as JSON; ProfileError unless it is exactly of this kind and version."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ProfileError(f"it is no JSON ({error})") from error
    if isinstance(value, dict) and value.get("version") != version:
        raise ProfileError(f"it is of version {value.get('version')!r}, this lever keeps {version}")
    return _parsed(kind, value, name)


def _parsed(kind: type[T], value: Any, where: str) -> T:
    """A value of JSON as one of our types, with exactly their fields."""
    found: Any
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        names = {f.name for f in fields(kind)}
        require(isinstance(value, dict) and set(value) == names, f"{where} has not the fields of a {kind.__name__}")
        found = kind(**{name: _parsed(hints[name], value[name], f"{where}.{name}") for name in names})
    elif get_origin(kind) is tuple:
        require(isinstance(value, list), f"{where} is no list")
        found = tuple(_parsed(get_args(kind)[0], item, f"{where}[{place}]") for place, item in enumerate(value))
    elif get_args(kind):  # something or None
        found = None if value is None else _parsed(_other_than_none(kind), value, where)
    else:
        number = kind is float and type(value) is int  # true is no number
        require(type(value) is kind or number, f"{where} is {value!r}")
        found = float(value) if number else value
    return found  # type: ignore[no-any-return]  # of the kind that was asked for, by the branches above


def _other_than_none(kind: Any) -> Any:
    (other,) = (member for member in get_args(kind) if member is not NoneType)
    return other


# --- reads --------------------------------------------------------------------------------------------------


def best_read(profile: Profile) -> ReadRate:
    """The least in flight that cannot be told from the best rate, of two such the smaller block.

    More in flight than needed makes the row of the embedding that a pass begins with wait longer.
    """
    best = max((rate.rate for rate in profile.reads), key=lambda rate: rate.median)
    doubt = min(max(best.spread, NEAR), MOST_DOUBT)
    near = [rate for rate in profile.reads if rate.rate.median >= (1 - doubt) * best.median]
    return min(near, key=lambda rate: (rate.block * rate.depth, rate.block))


def read_bytes_per_s(profile: Profile, rows: int, threads: int) -> float:
    """What the store delivers while so many rows are computed by so many threads."""
    beside = _of_threads(profile.together, threads)
    if not beside:
        return best_read(profile).rate.median * profile.correction.read
    return _between([(t.rows, t.read.median) for t in beside], rows, beyond=_level) * profile.correction.read


# --- compute ------------------------------------------------------------------------------------------------


def layer_seconds(profile: Profile, rows: int, threads: int, streamed: float = 0.0) -> float:
    """Seconds of an average layer inside ggml, when this share of the model's bytes streams beside it."""
    in_memory = _between([(t.rows, t.seconds.median) for t in _of_threads(profile.layers, threads)], rows)
    beside = _of_threads(profile.together, threads)
    if not beside:
        return in_memory
    with_reads = _between([(t.rows, t.layer.median) for t in beside], rows)
    return in_memory + min(streamed, 1.0) * max(with_reads - in_memory, 0.0)


def projection_seconds(profile: Profile, rows: int, threads: int) -> float:
    """Seconds for the logits of rows inside ggml."""
    return _between([(t.rows, t.seconds.median) for t in _of_threads(profile.projections, threads)], rows)


def compute_seconds(profile: Profile, rows: int, threads: int, streamed: float = 0.0) -> float:
    """Seconds of a pass for `rows`, and the logits of one, that never waits for a read."""
    beside = _of_threads(profile.together, threads)
    python = _between([(t.rows, t.python.median / t.n_layers) for t in beside], rows) if beside else 0.0
    layer = layer_seconds(profile, rows, threads, streamed)
    return profile.n_layers * (layer + python) + projection_seconds(profile, 1, threads)


# --- passes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds of a pass: of its reads, of its compute, and of both at once."""

    rows: int
    threads: int
    reads_s: float
    compute_s: float
    seconds: float

    @property
    def limit(self) -> Literal["reads", "compute"]:
        """The side that a pass waits for."""
        return "reads" if self.reads_s > self.compute_s else "compute"


def pass_time(profile: Profile, rows: int, threads: int, streamed_bytes: int) -> PassTime:
    """A pass that streams so many bytes, the bands of a projection included, with a number of threads."""
    share = streamed_bytes / (profile.n_layers * profile.layer_bytes)
    reads_s = streamed_bytes / read_bytes_per_s(profile, rows, threads)
    compute_s = compute_seconds(profile, rows, threads, share)
    beside = _of_threads(profile.together, threads)
    lost = _between([(t.rows, t.lost) for t in beside], rows, beyond=_level) if beside and streamed_bytes else 0.0
    seconds = at_once(reads_s, compute_s) * (1 + lost) * profile.correction.seconds
    return PassTime(rows, threads, reads_s, compute_s, seconds)


def at_once(reads_s: float, compute_s: float) -> float:
    """Seconds of reads and compute that go on side by side and wait for each other."""
    longer, shorter = max(reads_s, compute_s), min(reads_s, compute_s)
    if not longer:
        return 0.0
    return float(longer * (1 + (shorter / longer) ** SHARP) ** (1 / SHARP))


def fewest_threads(profile: Profile, rows: int, streamed_bytes: int, most: int) -> PassTime:
    """The pass with the fewest threads that is about as fast as with any number up to `most`.

    So a pass that waits for reads gets one thread as long as its compute stays under its reads: more would take the
    processor from the threads that read.
    """
    measured = sorted({t.threads for t in profile.layers})
    counts = [count for count in measured if count <= most] or measured[:1]
    times = [pass_time(profile, rows, count, streamed_bytes) for count in counts]
    best = min(time.seconds for time in times)
    return next(time for time in times if time.seconds <= (1 + NEAR) * best)


def corrected(profile: Profile, seconds: float, read_bytes_per_s: float, expected: PassTime, rate: float) -> Profile:
    """The profile after a run whose passes for one token took `seconds`, where `expected` and `rate` were foretold.

    The rate of reads counts where they were the limit: elsewhere the store mostly waits.
    """
    old = profile.correction
    faster = credible(read_bytes_per_s / rate) if expected.limit == "reads" else 1.0
    slower = credible(seconds / (expected.seconds / faster))  # than what that rate explains
    new = Correction(old.runs + 1, bounded(old.seconds * slower**WEIGHT), bounded(old.read * faster**WEIGHT))
    return replace(profile, correction=new)


def credible(share: float) -> float:
    """How far a run was off what was foretold; 1 when that cannot be true of the machine."""
    return share if 1 / DOUBT <= share <= DOUBT else 1.0


def bounded(share: float) -> float:
    """Within what is kept of a correction."""
    return min(max(share, 1 / DOUBT), DOUBT)


# --- doubts -------------------------------------------------------------------------------------------------


def doubts(profile: Profile) -> list[str]:
    """Why the figures may not hold, for people; empty when there is no reason."""
    found = []
    spreads = [figure.spread for figure in _figures(profile)]
    noisy = sum(spread > NOISY for spread in spreads)
    if noisy > NOISY_SHARE * len(spreads):
        found.append(
            f"{noisy} of {len(spreads)} figures vary by more than {100 * NOISY:.0f} %: "
            "something else uses this machine; measure again when it is quiet"
        )
    before, after = profile.before, profile.after
    if before.hertz and after.hertz and after.hertz < SLOWER * before.hertz:
        found.append(f"the clock fell from {before.hertz / 1e9:.2f} to {after.hertz / 1e9:.2f} GHz: it throttles")
    if before.celsius is not None and after.celsius is not None and after.celsius >= before.celsius + HOTTER:
        found.append(f"it grew hotter, from {before.celsius:.0f} to {after.celsius:.0f} °C: long runs may be slower")
    if profile.buffered_reason is not None:
        found.append(f"reads went through the page cache ({profile.buffered_reason}): their rates may be too high")
    return found


def _figures(profile: Profile) -> list[Measured]:
    reads = [figure for rate in profile.reads for figure in (rate.idle, rate.busy) if figure is not None]
    times = [time.seconds for table in (profile.layers, profile.projections, profile.together) for time in table]
    return reads + times


# --- lines --------------------------------------------------------------------------------------------------


def _of_threads(table: Sequence[Any], threads: int) -> list[Any]:
    """The rows of a table for this number of threads, or for the nearest smaller one that was measured."""
    counts = sorted({row.threads for row in table})
    nearest = max((count for count in counts if count <= threads), default=counts[0] if counts else 0)
    return [row for row in table if row.threads == nearest]


Line = tuple[float, float]


def _rising(last: Sequence[Line], x: float) -> float:
    """Beyond the last point: on the line through the last two, never falling; through zero when there is one only."""
    (x0, y0), (x1, y1) = last if len(last) == 2 else ((0.0, 0.0), last[0])
    return y1 + max(y1 - y0, 0.0) / (x1 - x0) * (x - x1)


def _level(last: Sequence[Line], _x: float) -> float:
    """Beyond the last point: as there."""
    return last[-1][1]


def _between(points: Sequence[Line], x: float, beyond: Callable[[Sequence[Line], float], float] = _rising) -> float:
    """Piecewise linear through points; before the first one as there."""
    points = sorted(points)
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return beyond(points[-2:], x)
