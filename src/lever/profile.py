"""Measures this machine with one model and its storage, and keeps what it found. Knows no words and draws nothing.

Everything is measured with the parts that run: reads by the store, layers by the model. A model of a few of the layers
stands for the whole, so that large models take no longer than small ones.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lever.arch import ModelConfig, layer_tensors
from lever.companion import TREE_ROWS, Companion
from lever.cost import (
    Conditions,
    Identity,
    Measured,
    PassTime,
    Profile,
    ReadRate,
    RowTime,
    Together,
    best_read,
    corrected,
    fewest_threads,
    read_bytes_per_s,
)
from lever.cycle_cost import CycleCost, Foretold
from lever.draft import Draft
from lever.errors import Cancelled, DoesNotFit, LeverError, ProfileError, StorageError
from lever.forecast import Cycle, Streamed, agreement, expected_cycle, foretell
from lever.ggml import load
from lever.gguf import GGUF
from lever.loader import LoadedModel, ModelSettings
from lever.machine import clock_hertz, cpu_model, filesystem_of, hottest_celsius, performance_cores
from lever.memory import MIB, drop_page_cache, format_size
from lever.model import Model
from lever.models.cache import PART_SUFFIX, home
from lever.owner import Owner
from lever.pages import PAGE, Pages, round_up
from lever.pair import PairProfile
from lever.policies import preset
from lever.stats import RunStats
from lever.tree import DraftTree
from lever.weights.image import KEY, Image
from lever.weights.plan import Plan, model_units
from lever.weights.reader import DirectFile
from lever.weights.store import BLOCK, DEPTH, Store
from lever.weights.units import Extent, Unit

log = logging.getLogger(__name__)

N_CTX = 256  # rows of the widest pass; attention over more slots takes longer, which is not measured
WORTH = 64 * MIB  # streamed in each pass: with less, a run has nothing to gain from a profile
ENOUGH_PASSES = 8  # of a run, to learn from it
ENOUGH_CYCLES = 4  # of a run with a draft, each of several tokens
SHORT_CONTEXT = 1024  # beyond, attention takes time that a profile does not know of
SHORT_S = 0.2  # a sample that takes less is taken twice in its turn
MANY_ROWS = 16  # more take so long in each layer that a few layers tell enough
LARGEST_FILE = 1 << 30  # written where a directory is measured
LEAST_FILE = 64 * MIB
DRAFT_TEXT = 32  # tokens behind which draft steps are measured
T = TypeVar("T")
Progress = Callable[[str], None]
Sampled = Mapping[tuple[int, int], list[float]]  # by rows and threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """How much is measured."""

    quick: bool
    reads: tuple[tuple[int, int], ...]  # block in bytes, and depth
    rounds: int  # in which everything has its turn, so that drift hits all alike
    read_bytes: int  # of one turn
    read_s: float  # or so long, where storage is slow
    rows: tuple[int, ...]  # through layers in memory
    logits: tuple[int, ...]  # rows through the projection
    together: tuple[int, ...]  # rows through layers that are streamed
    nodes: tuple[int, ...]  # of a draft step
    laps: int  # such passes in a row
    sample_bytes: int  # of the layers in memory: more than a processor's cache holds
    pass_bytes: int  # of the layers that are streamed
    enough_s: float  # of samples of one figure


QUICK = Scope(
    quick=True,
    reads=((2 * MIB, 2), (8 * MIB, 1), (BLOCK, DEPTH)),
    rounds=2,
    read_bytes=128 * MIB,
    read_s=0.15,
    rows=(1, 16),
    logits=(1,),
    together=(1, 16),
    nodes=(1, 2, 4),
    laps=2,
    sample_bytes=64 * MIB,
    pass_bytes=256 * MIB,
    enough_s=0.3,
)
FULL = Scope(
    quick=False,
    reads=tuple(itertools.product([MIB << power for power in range(5)], (1, 2, 4, 6))),
    rounds=3,
    read_bytes=192 * MIB,
    read_s=0.4,
    rows=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    logits=(1, 2, 4, 8),
    together=(1, 4, 16, 32),
    nodes=(1, 2, 4, 8, 16),
    laps=2,
    sample_bytes=192 * MIB,
    pass_bytes=768 * MIB,
    enough_s=1.0,
)


def identity_of(gguf: GGUF, config: ModelConfig, storage: Path | None = None) -> Identity:
    """What a profile of this model would be of; `storage` is where reads are measured instead of its own place."""
    place = filesystem_of(storage or gguf.path)
    image = Image.of(gguf)
    tensors = sorted((t.name, t.shape, t.type, t.file, t.offset) for t in gguf.tensors.values())
    shape = hashlib.sha256(repr((config.architecture, tensors)).encode()).hexdigest()[:20]
    return Identity(
        machine=f"{cpu_model()}, {len(performance_cores())} fast cores, ggml {load().version_text}",
        storage=f"{place.type} on {place.device}",
        model=shape,
        layout=image.layout if image is not None else "plain",
    )


def measure(
    gguf: GGUF,
    config: ModelConfig,
    settings: ModelSettings,
    scope: Scope,
    *,
    storage: Path | None = None,
    progress: Progress = lambda _what: None,
) -> Profile:
    """Measure reads, layers, and both at once, within `settings.dram`; DoesNotFit as for the model itself.

    With `storage`, a file or a directory, reads are those of that place, and what needs the model's file is left out.
    """
    units = model_units(gguf, config)
    layer_bytes = units.layers_nbytes // config.n_layers
    settings = replace(settings, layout="auto", start_threads=None)
    with ExitStack() as stack:
        files = gguf.files if storage is None else (stack.enter_context(_file_at(storage, progress)),)
        ring_bytes = settings.n_slots * _piece_bytes(layer_bytes)
        with _sample(gguf, config, settings, scope, ring_bytes) as sample:
            model = sample.model
            counts = thread_counts(sample.n_threads)
            _warm_up(model)
            before = _conditions()
            scale = layer_bytes * sample.config.n_layers / sample.plan.units.layers_nbytes
            layers = _layer_times(model, counts, scope, scale, progress)
            projections = _projection_times(model, counts, scope, progress)
            beside = None if sample.store.streamed else model
            reads, reason = _read_rates(files, layer_bytes, settings.n_slots, beside, scope, progress)
        profile = Profile(
            identity=identity_of(gguf, config, storage),
            date=datetime.now().isoformat(timespec="seconds"),
            quick=scope.quick,
            n_layers=config.n_layers,
            layer_bytes=layer_bytes,
            buffered_reason=reason,
            reads=reads,
            layers=layers,
            projections=projections,
            together=(),
            before=before,
        )
    if storage is None:
        profile = replace(profile, together=_together(gguf, config, settings, scope, profile, counts, progress))
    return replace(profile, after=_conditions())


def thread_counts(most: int) -> tuple[int, ...]:
    """The powers of two up to `most`, and itself."""
    return tuple(sorted({*(1 << power for power in range(most.bit_length())), most}))


def _conditions() -> Conditions:
    return Conditions(hottest_celsius(), clock_hertz(performance_cores()))


# --- models of a few layers ---------------------------------------------------------------------------------


def of_layers(gguf: GGUF, config: ModelConfig, n: int) -> tuple[GGUF, ModelConfig]:
    """The model that `n` layers of another one make, taken evenly from its depth: types may differ between layers."""
    names: dict[str, str] = {}
    for place in range(n):
        chosen = (2 * place + 1) * config.n_layers // (2 * n)
        names |= zip(layer_tensors(config, chosen), layer_tensors(config, place), strict=True)
    others = {name: tensor for name, tensor in gguf.tensors.items() if not name.startswith("blk.")}
    tensors = others | {new: replace(gguf.tensors[old], name=new) for old, new in names.items()}
    metadata = dict(gguf.metadata)
    repacked = f"{KEY}repacked"
    if repacked in metadata:
        kept = [name.decode() for name in gguf.strings(repacked)]
        metadata[repacked] = [names.get(name, name).encode() for name in kept if name in names or name in others]
    return replace(gguf, tensors=tensors, metadata=metadata), replace(config, n_layers=n)


def _sample(gguf: GGUF, config: ModelConfig, settings: ModelSettings, scope: Scope, ring_bytes: int) -> LoadedModel:
    """A few layers in memory, and room beside them for a ring; streamed where even one does not fit."""
    layer_bytes = model_units(gguf, config).layers_nbytes // config.n_layers
    settings = _short(settings, config, max(scope.rows), max(scope.logits))
    n = min(math.ceil(scope.sample_bytes / layer_bytes), config.n_layers)
    while n and settings.dram > ring_bytes:
        try:
            pinned = replace(settings, dram=settings.dram - ring_bytes, pin_percent=100)
            return LoadedModel(*of_layers(gguf, config, n), pinned)
        except DoesNotFit:
            n //= 2
    return LoadedModel(*of_layers(gguf, config, min(2, config.n_layers)), replace(settings, pin_percent=0))


def _short(settings: ModelSettings, config: ModelConfig, rows: int, logits: int) -> ModelSettings:
    """With a context for just so many rows."""
    n_ctx = min(N_CTX, config.n_ctx_train)
    return replace(settings, n_ctx=n_ctx, n_batch=min(rows, n_ctx), n_logits=logits)


def _warm_up(model: Model) -> None:
    for _ in range(2):
        _forward(model, [0])


def _forward(model: Model, tokens: Sequence[int]) -> None:
    """One pass that leaves nothing behind."""
    model.forward(tokens)
    model.kv.truncate(0)


def _first_layers(model: Model, tokens: Sequence[int], n: int) -> None:
    """A pass that is given up after `n` layers."""

    def stop(layer: int) -> None:
        if layer + 1 == n:
            raise Cancelled("these are enough")

    with suppress(Cancelled):
        model.forward(tokens, stop)
    model.kv.truncate(0)


# --- layers and projection ----------------------------------------------------------------------------------


def _layer_times(
    model: Model, counts: Sequence[int], scope: Scope, scale: float, progress: Progress
) -> tuple[RowTime, ...]:
    """Seconds of an average layer; `scale` is the share of its bytes in those of a layer of this model."""

    def once(rows: int) -> float:
        before = model.stats.layers_s
        n = min(max(MANY_ROWS * model.config.n_layers // rows, 2), model.config.n_layers)
        _first_layers(model, [0] * rows, n)
        return scale * (model.stats.layers_s - before) / n

    rows = [count for count in scope.rows if count <= model.shape.n_batch]
    sampled = _in_turns(model, rows, counts, scope, once, lambda r, t: progress(f"layers: {r} rows, {t} threads"))
    return tuple(RowTime(*key, Measured.of(samples)) for key, samples in sampled.items())


def _projection_times(model: Model, counts: Sequence[int], scope: Scope, progress: Progress) -> tuple[RowTime, ...]:
    model.forward([0] * min(max(scope.logits), model.shape.n_batch))

    def once(rows: int) -> float:
        before = model.stats.projection_s
        model.project([0] * rows)
        return model.stats.projection_s - before

    def tell(rows: int, threads: int) -> None:
        progress(f"output projection: {rows} rows, {threads} threads")

    once(1)  # the first takes longer, and where all take long it would be the only one
    sampled = _in_turns(model, scope.logits, counts, scope, once, tell)
    model.kv.truncate(0)
    return tuple(RowTime(*key, Measured.of(samples)) for key, samples in sampled.items())


def _in_turns(
    model: Model,
    rows: Sequence[int],
    counts: Sequence[int],
    scope: Scope,
    once: Callable[[int], float],
    tell: Callable[[int, int], None],
) -> Sampled:
    """Samples by rows and threads. Round by round; what takes long is not repeated as often."""
    sampled: dict[tuple[int, int], list[float]] = defaultdict(list)
    spent: dict[tuple[int, int], float] = defaultdict(float)
    for _ in range(scope.rounds):
        for key in itertools.product(rows, counts):
            if spent[key] >= scope.enough_s:
                continue
            tell(*key)
            model.n_threads = key[1]
            started = time.perf_counter()
            sampled[key].append(once(key[0]))
            if time.perf_counter() - started < SHORT_S:
                sampled[key].append(once(key[0]))
            spent[key] += time.perf_counter() - started
    return sampled


# --- reads --------------------------------------------------------------------------------------------------


class _Lent(Owner):
    """A slot's memory that outlives the store: touching fresh pages takes longer than reading into them."""

    def __init__(self, pages: Pages) -> None:
        self.address, self.nbytes, self._pages = pages.address, pages.nbytes, pages

    @property
    def bytes(self) -> NDArray[np.uint8]:
        return self._pages.bytes

    def close(self) -> None: ...


def _piece_bytes(layer_bytes: int) -> int:
    return max(round_up(layer_bytes, MIB), 2 * MIB)


def _read_rates(
    files: Sequence[Path], layer_bytes: int, n_slots: int, model: Model | None, scope: Scope, progress: Progress
) -> tuple[tuple[ReadRate, ...], str | None]:
    """Rates by block and depth into memory of the ring's size, idle and beside `model`; why reads were buffered."""
    pieces = _pieces(files, _piece_bytes(layer_bytes))
    idle: dict[tuple[int, int], list[float]] = defaultdict(list)
    busy: dict[tuple[int, int], list[float]] = defaultdict(list)
    rng = np.random.default_rng()
    with ExitStack() as stack:
        ring = [_Lent(stack.enter_context(Pages(_piece_bytes(layer_bytes)))) for _ in range(n_slots)]

        def once(block: int, depth: int) -> float:
            start = int(rng.integers(len(pieces)))
            return _read_rate(files, [*pieces[start:], *pieces[:start]], block, depth, ring, scope)

        for _ in range(scope.rounds):
            for block, depth in scope.reads:
                progress(f"reads of {format_size(block)}, {depth} at a time")
                idle[block, depth].append(once(block, depth))
                if model is not None:
                    with _computing(model):
                        busy[block, depth].append(once(block, depth))
        reason = next((file.reason for file in _opened(stack, files) if file.reason), None)
    rates = (
        ReadRate(*key, Measured.of(samples), Measured.of(busy[key]) if key in busy else None)
        for key, samples in idle.items()
    )
    return tuple(rates), reason


def _pieces(files: Sequence[Path], nbytes: int) -> list[Unit]:
    """The files, cut into what is read as one."""
    pieces = []
    for number, path in enumerate(files):
        size = path.stat().st_size
        for start in range(0, size, nbytes):
            needed = min(nbytes, size - start)
            extent = Extent(number, start, round_up(needed, PAGE), needed, 0)
            pieces.append(Unit(f"{path} at {start}", (), (extent,), extent.nbytes))
    if not pieces:
        raise StorageError(f"{files[0]} is empty: there is nothing to read")
    return pieces


def _opened(stack: ExitStack, files: Sequence[Path]) -> list[DirectFile]:
    return [stack.enter_context(DirectFile(path)) for path in files]


def _read_rate(
    files: Sequence[Path], pieces: Sequence[Unit], block: int, depth: int, ring: Sequence[_Lent], scope: Scope
) -> float:
    """Bytes per second that a store delivers to somebody who takes each piece at once."""
    slots = iter(ring)
    with ExitStack() as stack:
        opened = _opened(stack, files)
        memory = lambda _nbytes: next(slots)  # noqa: E731  # shorter than a function of three lines
        store = stack.enter_context(Store(opened, pieces, (), len(ring), block=block, depth=depth, memory=memory))
        store.release(store.hold(0))  # the threads are under way
        started, before = time.perf_counter(), store.stats.read_bytes
        for index in itertools.chain(range(1, len(pieces)), itertools.cycle(range(len(pieces)))):
            store.release(store.hold(index))
            nbytes, seconds = store.stats.read_bytes - before, time.perf_counter() - started
            if nbytes >= scope.read_bytes or (seconds >= scope.read_s and nbytes):
                break
    return nbytes / seconds


@contextmanager
def _computing(model: Model) -> Iterator[None]:
    """One thread computes pass after pass as long as the block runs."""
    model.n_threads = 1
    stop, failures = threading.Event(), []

    def work() -> None:
        try:
            while not stop.is_set():
                _forward(model, [0])
        except LeverError as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="lever-profile", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


@contextmanager
def _file_at(storage: Path, progress: Progress) -> Iterator[Path]:
    """The file itself, or one that is written into a directory and deleted."""
    if storage.is_file():
        yield storage
        return
    try:
        nbytes = min(LARGEST_FILE, shutil.disk_usage(storage).free // 2)
        if nbytes < LEAST_FILE:
            raise StorageError(f"{storage} has no room for a file of {format_size(LEAST_FILE)}: free some space there")
        progress(f"writing {format_size(nbytes)} to {storage}")
        with NamedTemporaryFile(dir=storage, prefix=".lever-profile-", buffering=0) as file:
            rng = np.random.default_rng()  # bytes that no storage compresses
            while file.tell() < nbytes:
                file.write(rng.bytes(4 * MIB))
            os.fsync(file.fileno())
            drop_page_cache(file.fileno())
            yield Path(file.name)
    except OSError as error:
        raise StorageError(f"cannot measure reads at {storage}: {error.strerror or error}") from error


# --- both at once -------------------------------------------------------------------------------------------


def _together(
    gguf: GGUF,
    config: ModelConfig,
    settings: ModelSettings,
    scope: Scope,
    profile: Profile,
    counts: Sequence[int],
    progress: Progress,
) -> tuple[Together, ...]:
    """Passes over layers that are all streamed, read in the way that is best here."""
    n = min(max(round(scope.pass_bytes / profile.layer_bytes), 3), config.n_layers)
    rate = best_read(profile)
    streamed = replace(
        _short(settings, config, max(scope.together), 1), pin_percent=0, block=rate.block, depth=rate.depth
    )
    with LoadedModel(*of_layers(gguf, config, n), streamed) as loaded:
        progress("passes, the first")
        _lap(loaded, 1)  # checks the blocks of a flash image
        laps: dict[tuple[int, int], list[_Lap]] = defaultdict(list)
        rows = [count for count in scope.together if count <= loaded.shape.n_batch]
        counts = [count for count in counts if _pays(profile.layers, count)]
        for _, n_threads, n_rows in itertools.product(range(scope.rounds - 1), counts, rows):
            progress(f"passes: {n_rows} rows, {n_threads} threads")
            loaded.model.n_threads = n_threads
            laps[n_rows, n_threads] += [_lap(loaded, n_rows) for _ in range(scope.laps)]
        return tuple(_from_laps(*key, n, found) for key, found in laps.items())


def _pays(layers: Sequence[RowTime], threads: int) -> bool:
    """Whether so many threads are faster than one at anything. Threads without a core of their own take far longer."""
    alone = {time.rows: time.seconds.median for time in layers if time.threads == 1}
    return threads == 1 or any(t.seconds.median < alone[t.rows] for t in layers if t.threads == threads)


@dataclass(frozen=True, slots=True)
class _Lap:
    """One pass: seconds and bytes."""

    seconds: float
    layers_s: float
    projection_s: float
    waiting_s: float
    read_s: float
    read_bytes: int

    def since(self, before: _Lap) -> _Lap:
        return _Lap(
            self.seconds - before.seconds,
            self.layers_s - before.layers_s,
            self.projection_s - before.projection_s,
            self.waiting_s - before.waiting_s,
            self.read_s - before.read_s,
            self.read_bytes - before.read_bytes,
        )

    @property
    def python_s(self) -> float:
        return self.seconds - self.layers_s - self.projection_s - self.waiting_s


def _lap(loaded: LoadedModel, n_rows: int) -> _Lap:
    model, reads = loaded.model, loaded.store.stats
    figures = model.stats

    def now() -> _Lap:
        waiting_s = reads.stall_s + figures.embedding_s
        clock = time.perf_counter()
        return _Lap(clock, figures.layers_s, figures.projection_s, waiting_s, reads.read_s, reads.read_bytes)

    before = now()
    model.forward([token % model.config.n_vocab for token in range(n_rows)])
    model.project([n_rows - 1])
    model.kv.truncate(0)
    return now().since(before)


def _from_laps(rows: int, threads: int, n_layers: int, laps: Sequence[_Lap]) -> Together:
    reading = [lap for lap in laps if lap.read_s > 0]
    return Together(
        rows,
        threads,
        n_layers,
        read_bytes=max(int(median(lap.read_bytes for lap in laps)), 1),
        seconds=Measured.of([lap.seconds for lap in laps]),
        read=Measured.of([lap.read_bytes / lap.read_s for lap in reading]),
        layer=Measured.of([lap.layers_s / n_layers for lap in laps]),
        projection=Measured.of([lap.projection_s for lap in laps]),
        python=Measured.of([lap.python_s for lap in laps]),
    )


# --- draft steps --------------------------------------------------------------------------------------------


def draft_steps(model: Model, scope: Scope, progress: Progress = lambda _what: None) -> tuple[RowTime, ...]:
    """Seconds of draft steps by nodes and threads: forward, logits and candidates. LeverError for a broken draft.

    Threads that do not pay for the smallest step are not tried on others: without cores of their own, they take long.
    """
    most = model.n_threads
    counts, growing = thread_counts(most), _Growing(Draft(model))
    smallest, *others = [n for n in scope.nodes if n <= model.shape.n_tree]

    def measured(nodes: Sequence[int], counts: Sequence[int]) -> list[RowTime]:
        sampled = _in_turns(
            model, nodes, counts, scope, growing.once, lambda n, t: progress(f"the draft: {n} nodes, {t} threads")
        )
        return [RowTime(*key, Measured.of(samples)) for key, samples in sampled.items()]

    try:
        growing.once(smallest)  # the first pass of all takes longer
        steps = measured([smallest], counts)
        return (*steps, *measured(others, [count for count in counts if _pays(steps, count)]))
    finally:
        model.n_threads = most
        model.kv.truncate(0)


class _Growing:
    """A tree behind a short text that grows by steps, and is begun anew when the draft has no room for more."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._text = [token % draft.model.config.n_vocab for token in range(DRAFT_TEXT)]
        self._begin()

    def once(self, n: int) -> float:
        """Seconds of a step that expands so many nodes."""
        if self._draft.room < n:
            self._begin()
        while len(self._tree.frontier()) < n:
            self._expand(1)
        started = time.perf_counter()
        self._expand(n)
        return time.perf_counter() - started

    def _begin(self) -> None:
        self._tree = DraftTree.rooted_at(self._text[-1])
        self._draft.begin(self._tree, self._text, 0.0)

    def _expand(self, n: int) -> None:
        nodes = self._tree.frontier()[:n]
        if not nodes:
            raise LeverError("the draft guesses nothing: its logits are no numbers; fetch it anew, or --no-draft")
        self._draft.expand(self._tree, nodes, 0.0)


def measure_pair(target: Identity, companion: Companion, model: Model, scope: Scope, progress: Progress) -> PairProfile:
    """The steps of a draft that is loaded; what runs have shown of the pair stays as it was kept."""
    draft = identity_of(companion.gguf, companion.config)
    steps = draft_steps(model, scope, progress)
    date = datetime.now().isoformat(timespec="seconds")
    found = PairProfile(target=target, draft=draft, date=date, quick=scope.quick, steps=steps)
    before = kept_pair(target, companion)
    return found if before is None else replace(found, shown=before.shown)


# --- keeping ------------------------------------------------------------------------------------------------


def profile_path(identity: Identity) -> Path:
    """Where the profile of this is kept, whether there is one or not."""
    return home() / "profiles" / f"{identity.key}.json"


def kept(identity: Identity) -> Profile | None:
    """The profile that was kept; None without one. One that cannot be used is told of and counts as none."""
    return _read(profile_path(identity), Profile.from_json, lambda profile: profile.identity == identity)


def keep(profile: Profile) -> Path:
    """Write it where `kept` finds it, at once and whole; StorageError when that fails."""
    return _write(profile_path(profile.identity), profile.to_json())


def pair_path(target: Identity, draft: Identity) -> Path:
    """Where is kept what is known of a draft with its target, whether there is anything or not."""
    return home() / "profiles" / f"{target.key}-{draft.key}.json"


def kept_pair(target: Identity, companion: Companion) -> PairProfile | None:
    """What was kept of this pair; as `kept`."""
    draft = identity_of(companion.gguf, companion.config)
    return _read(
        pair_path(target, draft), PairProfile.from_json, lambda pair: (pair.target, pair.draft) == (target, draft)
    )


def keep_pair(pair: PairProfile) -> Path:
    """Write it where `kept_pair` finds it; as `keep`."""
    return _write(pair_path(pair.target, pair.draft), pair.to_json())


def _read(path: Path, parse: Callable[[str], T], is_it: Callable[[T], bool]) -> T | None:
    try:
        found = parse(path.read_text(encoding="utf-8"))
        if not is_it(found):
            raise ProfileError("it is of something else")
    except FileNotFoundError:
        return None
    except (ProfileError, OSError, UnicodeDecodeError) as error:
        log.warning("not using the profile %s: %s", path, error)
        return None
    return found


def _write(path: Path, text: str) -> Path:
    temporary = path.with_name(f"{path.name}.{os.getpid()}{PART_SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise StorageError(f"cannot keep the profile {path}: {error.strerror or error}") from error
    return path


# --- uses ---------------------------------------------------------------------------------------------------


def is_worth_it(plan: Plan) -> bool:
    """Whether a run after this plan streams so much that knowing the machine pays."""
    return plan.bytes_per_pass >= WORTH


def covers(profile: Profile, n_threads: int) -> bool:
    """Whether it tells of that many threads; a full one is not given up for a quick one."""
    return not profile.quick or n_threads <= max(time.threads for time in profile.layers)


def covers_steps(pair: PairProfile, n_threads: int) -> bool:
    """As `covers`, for a draft; its kernels may want a power of two."""
    return not pair.quick or 1 << (n_threads.bit_length() - 1) <= max(step.threads for step in pair.steps)


def tuned(profile: Profile, plan: Plan, settings: ModelSettings) -> ModelSettings:
    """The settings with the reads, and the threads to start with, that are best here."""
    rate = best_read(profile)
    return replace(
        settings, block=rate.block, depth=rate.depth, start_threads=expected_pass(profile, plan, settings).threads
    )


def expected_pass(profile: Profile, plan: Plan, settings: ModelSettings) -> PassTime:
    """What a pass for one token will take after this plan."""
    return fewest_threads(profile, 1, plan.bytes_per_pass, settings.n_threads)


def learned(profile: Profile, plan: Plan, settings: ModelSettings, stats: RunStats) -> Profile | None:
    """The profile as a run has corrected it; None when the run was too short, or too long, to tell."""
    context = stats.prompt_tokens + stats.new_tokens
    if stats.cycles < ENOUGH_PASSES or context > SHORT_CONTEXT or not stats.read_s:
        return None
    expected = expected_pass(profile, plan, settings)
    rate = read_bytes_per_s(profile, 1, expected.threads)
    return corrected(profile, stats.decode_s / stats.cycles, stats.read_bytes / stats.read_s, expected, rate)


def foretold(profile: Profile, pair: PairProfile | None, plan: Plan, n_threads: int) -> Foretold:
    """What is known beforehand of the cycles of a run after this plan."""
    units = plan.units
    projection = sum(units.units[index].nbytes for index in units.projection if index not in plan.pinned)
    streamed = Streamed(plan.bytes_per_pass - projection, projection)
    steps = pair.steps if pair is not None else ()
    return foretell(profile, streamed, steps, thread_counts(n_threads), TREE_ROWS)


def drafted_cycle(profile: Profile, pair: PairProfile, plan: Plan, n_threads: int) -> Cycle:
    """What a cycle of the preset `lever` will be after this plan, were runs not to show it slower or faster."""
    cost = CycleCost(n_threads, foretold(profile, pair, plan, n_threads))
    return expected_cycle(preset("lever"), cost, pair.shown.first, TREE_ROWS)


def learned_pair(
    profile: Profile, pair: PairProfile, plan: Plan, n_threads: int, stats: RunStats
) -> PairProfile | None:
    """What is known of the pair after a run of the preset `lever`; None when the run was too short to tell, or its
    passes were thinned: of whole ones it says nothing then.
    """
    if stats.cycles < ENOUGH_CYCLES or not stats.verified or stats.pruned:
        return None
    first = agreement(stats.tokens_per_cycle, 1 + stats.verified / stats.cycles)
    known = replace(pair, shown=replace(pair.shown, first=first))
    short = stats.prompt_tokens + stats.new_tokens <= SHORT_CONTEXT
    seconds = stats.decode_s / stats.cycles / drafted_cycle(profile, known, plan, n_threads).seconds if short else None
    return pair.after(first, seconds)
