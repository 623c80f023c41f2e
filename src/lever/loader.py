"""From a model's file and a budget to a model that computes: the plan, the ledger, the memory. Knows no text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lever.arch import ModelConfig
from lever.errors import DoesNotFit, UnsupportedModel, UsageError
from lever.far_kv import far_kv_bytes
from lever.ggml import Library, load
from lever.ggml.devices import Cpu, Device, FarDevice
from lever.ggml.layout import takes_repacked
from lever.ggml.probe import ROW_MULTIPLES, row_multiple, row_multiple_on
from lever.gguf import GGUF, IMAGE_CHECKSUMS
from lever.grammar import nbytes as grammar_nbytes
from lever.kv_cache import kv_bytes
from lever.memory import Ledger, does_not_fit, release_unused, rss_bytes
from lever.model import Model
from lever.owner import Owner
from lever.pages import PAGE
from lever.scores import Scores
from lever.settings import CPU, TreeAttention
from lever.sizing import compute_nbytes
from lever.steps import Steps
from lever.weights.embedding import EmbeddingRows
from lever.weights.far import FarWeights
from lever.weights.image import Image
from lever.weights.plan import PINNED, PROJECTION, SMALL, Elsewhere, ModelUnits, Plan, make_plan, model_units
from lever.weights.reader import CheckedFile, DirectFile
from lever.weights.store import BLOCK, DEPTH, MIN_SLOTS, Store
from lever.weights.tensors import Arena, RepackedWeights, StreamedWeights, Weights
from lever.workspace import ModelShape, Workspace

MAX_THREADS = 512  # GGML_MAX_N_THREADS of ggml.h
DEFAULT_CTX = 4096  # positions, unless the model or the budget allow less
LEAST_CTX = 512  # what an automatic context is not cut below
PYTHON, KV_CACHE, BUFFERS, GRAMMAR = "Python", "KV cache", "rows and buffers", "grammar"
WAY = "way to the device"
# What the process grows by after the plan is made: stacks of threads, sampling over the vocabulary, small objects.
NOTHING_BESIDE: Mapping[str, int] = MappingProxyType({})
PYTHON_GROWTH = 6 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """How much of a model stays in memory, and how it is computed. None of it changes a bit of the text but `layout`
    and `tree_attention`, and a `device` whose sums are not the CPU's.

    layout "auto" computes with the bytes as the file holds them, be it a GGUF or a flash image; "repacked" puts a whole
    GGUF into memory in the layout of the fastest kernels, whose sums round differently. tree_attention "masked" saves
    time where contexts are long; rows of a tree are then no longer plain decoding's to the bit.
    """

    dram: int  # bytes that the process may hold
    pin_percent: float | None = None  # share of the layers kept in memory; None: as many as fit
    n_ctx: int | None = None  # positions; None: what model and budget allow, 4096 at most
    n_batch: int = 512  # prompt tokens of one pass over the layers
    n_threads: int = 1
    n_slots: int = MIN_SLOTS  # units that the ring holds
    n_logits: int = 4  # rows whose logits are held at once
    n_tree: int = 0  # rows of a tree that one pass checks; 0: no trees
    n_steps: int = 0  # graphs of whole passes that are kept, where all is in memory; 0: none
    n_moved: int = 0  # rows of the cache that move at once, where these may be more than a tree's
    tree_attention: TreeAttention = "exact"
    block: int = BLOCK  # bytes of one read
    depth: int = DEPTH  # reads in flight
    start_threads: int | None = None  # of the first passes for a token; None: one when anything is streamed
    layout: Literal["auto", "repacked"] = "auto"
    grammars: bool = False  # keep room for answers that obey one
    device: str = CPU  # where the layers are computed (`lever.ggml.devices`)
    draft_device: str = CPU  # and all of a draft

    @property
    def all_on_cpu(self) -> bool:
        """Whether nothing is computed elsewhere: what is known of this machine's speed says nothing of that."""
        return self.device == self.draft_device == CPU

    def __post_init__(self) -> None:
        """UsageError for what lies outside its range. Names of devices may be in any case."""
        for name in ("device", "draft_device"):
            object.__setattr__(self, name, getattr(self, name).lower())
        pin, ctx, start = self.pin_percent, self.n_ctx, self.start_threads
        for name, value, sound, allowed in (
            ("dram", self.dram, self.dram > 0, "above 0 bytes"),
            ("pin", pin, pin is None or 0 <= pin <= 100, "0 to 100 percent"),
            ("ctx-size", ctx, ctx is None or ctx > 0, "at least 1"),
            ("batch-size", self.n_batch, self.n_batch > 0, "at least 1"),
            ("threads", self.n_threads, 0 < self.n_threads <= MAX_THREADS, f"1 to {MAX_THREADS}"),
            ("ring", self.n_slots, self.n_slots >= MIN_SLOTS, f"at least {MIN_SLOTS}"),
            ("n_logits", self.n_logits, self.n_logits > 0, "at least 1"),
            ("block", self.block, self.block > 0 and self.block % PAGE == 0, f"a multiple of {PAGE} bytes"),
            ("depth", self.depth, self.depth > 0, "at least 1"),
            ("start_threads", start, start is None or start > 0, "at least 1"),
        ):
            if not sound:
                raise UsageError(f"{name} is {value}: it must be {allowed}")
        if self.n_steps and pin != 100:
            raise UsageError("whole passes are only kept of a model that is all in memory: pin 100")
        if self.layout == "repacked" and self.device != CPU:
            raise UsageError(f"the repacked layout is this CPU's: leave out --layout repacked with {self.device}")
        if self.layout == "repacked" and pin not in (None, 100):
            raise UsageError(f"the repacked layout keeps all layers in DRAM: leave out --pin {pin:g}")


@dataclass(frozen=True, slots=True)
class Progress:
    """Called while pinned weights are read: the bytes of all, then of each piece that has come."""

    start: Callable[[int], None] = lambda _total: None
    advance: Callable[[int], None] = lambda _nbytes: None


class LoadedModel(Owner):
    """A model in its place, with what was decided about it. Close it to give everything back."""

    def __init__(
        self,
        gguf: GGUF,
        config: ModelConfig,
        settings: ModelSettings,
        *,
        beside: Mapping[str, int] = NOTHING_BESIDE,
        python: int | None = None,
        device: Device | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Plan, then allocate. DoesNotFit, naming the parts, before anything large is read or allocated.

        `beside`, `python` and `device` as in `plan`; who gives a device keeps it open.
        """
        self.gguf = gguf
        self.config = config
        self.ggml = load()
        self.device = device if device is not None else Cpu(self.ggml)
        self.image = Image.of(gguf)
        if self.image is not None:
            self.image.check(gguf, self.ggml)
        self.shape, self.plan = plan(self.ggml, gguf, config, settings, beside, python, device)
        self.units = self.plan.units
        self._repacked = settings.layout == "repacked"
        self.n_threads = usable_threads(settings.n_threads, self.shape.row_multiple)
        start = settings.start_threads or (1 if self.plan.bytes_per_pass else self.n_threads)
        self.start_threads = usable_threads(min(start, self.n_threads), self.shape.row_multiple)
        self.ledger = Ledger(settings.dram)
        self._cleanup = ExitStack()
        with ExitStack() as stack:
            for part, nbytes in self.plan.parts.items():
                self.ledger.reserve(part, nbytes)
                stack.callback(self.ledger.release, part, nbytes)
            if isinstance(self.device, FarDevice):
                opened = self._open_far_weights(stack, self.device, settings, progress or Progress())
            else:
                opened = (*self._open_weights(stack, settings, progress or Progress()), None)
            self.store, weights, head = opened
            self.model = self._open_model(stack, weights, head)
            self._cleanup = stack.pop_all()

    @property
    def layout(self) -> str:
        """What the kernels find: "plain" or "repacked"."""
        return self.image.layout if self.image is not None else "repacked" if self._repacked else "plain"

    @property
    def row_invariant(self) -> bool:
        """Whether a row's bits do not depend on those beside it, which the CPU's never do: another device's may."""
        if not isinstance(self.device, FarDevice):
            return True
        return row_multiple_on(self.ggml, self.device, _plain_types(self.gguf)) is not None

    @property
    def projection_in_memory(self) -> bool:
        """Whether the output projection is never streamed."""
        return self.plan.pinned.issuperset(self.units.projection)

    def open_scores(self, fill: Callable[[NDArray[np.float16]], None]) -> Scores:
        """Scores by the translator that `fill` writes (`lever.scores`), of a model whose projection is in memory.

        The caller closes them before the model, and has reserved their bytes.
        """
        table = self.units.units[self.units.projection[0]].places[0].tensor
        if self.image is not None:
            return self.model.open_scores(fill, repacked=table.name in self.image.repacked)
        return self.model.open_scores(
            fill, repacked=self._repacked and takes_repacked(self.ggml, table.type, table.shape)
        )

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        self._cleanup.close()

    def _open_weights(self, stack: ExitStack, settings: ModelSettings, progress: Progress) -> tuple[Store, Weights]:
        """The store that passes read from, and the tensors. A repacked model needs no store once it is loaded."""
        units, plan = self.units.units, self.plan
        progress.start(sum(units[index].nbytes for index in plan.pinned))
        files = [stack.enter_context(file) for file in self._open_files()]
        if self._repacked:
            with Store(files, units, (), settings.n_slots) as passing:
                repacked = RepackedWeights(self.ggml, passing, on_loaded=progress.advance)
            stack.callback(repacked.close)
            return stack.enter_context(Store((), ())), repacked
        return self._open_store(stack, files, settings, plan.pinned, (), progress.advance)

    def _open_store(
        self,
        stack: ExitStack,
        files: Sequence[DirectFile],
        settings: ModelSettings,
        pinned: Collection[int],
        elsewhere: Collection[int],
        on_pinned: Callable[[int], None],
    ) -> tuple[Store, StreamedWeights]:
        """What streams all units that are not `elsewhere`, and its tensors."""
        arena = Arena(self.ggml, self.image.repacked if self.image is not None else ())
        store = stack.enter_context(
            Store(
                files,
                self.units.units,
                pinned,
                self.plan.n_slots,
                block=settings.block,
                depth=settings.depth,
                memory=arena.allocate,
                on_pinned=on_pinned,
                elsewhere=elsewhere,
            )
        )
        weights = StreamedWeights(store, arena)
        stack.callback(weights.close)
        return store, weights

    def _open_far_weights(
        self, stack: ExitStack, device: FarDevice, settings: ModelSettings, progress: Progress
    ) -> tuple[Store, Weights, Weights | None]:
        """The store that passes read from, the tensors of the device, and those of the projection where the CPU has it.

        What is kept on the device goes there through a ring of its own, which is gone before the other one is made.
        """
        units, plan = self.units.units, self.plan
        projected_there = bool(settings.n_steps)
        here = set[int]() if projected_there else set(self.units.projection)
        kept = [index for index in range(len(units)) if index in plan.pinned and index not in here]
        progress.start(sum(units[index].nbytes for index in plan.pinned))
        weights = FarWeights(self.ggml, device, units, kept, without=here)
        stack.callback(weights.close)
        with ExitStack() as loading:
            files = [loading.enter_context(file) for file in self._open_files()]
            ring = Store(files, [units[index] for index in kept], (), settings.n_slots, block=settings.block)
            weights.load(loading.enter_context(ring), kept, progress.advance)
        if projected_there:
            return stack.enter_context(Store((), ())), weights, None
        files = [stack.enter_context(file) for file in self._open_files()]
        pinned = [index for index in plan.pinned if index in here or index == self.units.small]
        elsewhere = [index for index in kept if index != self.units.small]
        store, head = self._open_store(stack, files, settings, pinned, elsewhere, progress.advance)
        weights.stream_from(store)
        return store, weights, head

    def _open_files(self) -> list[DirectFile]:
        if self.image is not None:
            return [self.image.open(self.gguf)]
        return [DirectFile(path) for path in self.gguf.files]

    def _open_model(self, stack: ExitStack, weights: Weights, head: Weights | None) -> Model:
        table = self.gguf.tensors["token_embd.weight"]
        file = self.image.open(self.gguf) if self.image is not None else DirectFile(self.gguf.files[table.file])
        embedding = stack.enter_context(EmbeddingRows(file, table, self.shape.graph_rows))
        return stack.enter_context(
            Model(
                self.ggml,
                self.config,
                self.units,
                weights,
                embedding,
                self.shape,
                self.n_threads,
                spin=not (self.store.streamed or self.shape.n_tree),  # with trees, another model wants the cores
                device=self.device,
                head=head,
            )
        )


def usable_threads(n_threads: int, row_multiple: int) -> int:
    """How many threads keep rows invariant: any number, or a power of two where kernels take two rows at a time.

    Those kernels fall back to single rows, which round differently, in a share of the weights that is odd; ggml gives
    each thread an equal share of the rows of a small matrix.
    """
    return n_threads if row_multiple == 1 else 1 << (n_threads.bit_length() - 1)


def most_ctx(config: ModelConfig, settings: ModelSettings) -> int:
    """Positions asked for; if none were, those that the budget may cut."""
    return settings.n_ctx or min(DEFAULT_CTX, config.n_ctx_train)


def plan(
    ggml: Library,
    gguf: GGUF,
    config: ModelConfig,
    settings: ModelSettings,
    beside: Mapping[str, int] = NOTHING_BESIDE,
    python: int | None = None,
    device: Device | None = None,
) -> tuple[ModelShape, Plan]:
    """What fits in the budget. A context that was not asked for is halved until it does, down to 512 positions.

    `beside`: bytes, by name, of what else of this process has its share of the budget; `python`: what the process held
    before any of that, if not now. `device`: what computes the layers, if not the CPU; it has memory of its own, and
    UnsupportedModel is raised for an image that is made for this CPU.
    """
    image, repacked = Image.of(gguf), settings.layout == "repacked"
    far = device if isinstance(device, FarDevice) else None
    if image is not None and repacked:
        raise UsageError(f"{gguf.path} is a flash image and has its layout: leave out --layout")
    n_ctx = most_ctx(config, settings)
    if n_ctx > config.n_ctx_train:
        raise UsageError(f"a context of {n_ctx} is beyond the {config.n_ctx_train} that the model was trained for")
    in_layout = image.repacked if image is not None else gguf.tensors if repacked else ()
    multiple = row_multiple(
        ggml,
        {t.type for t in gguf.tensors.values() if repacked or t.name not in {*in_layout, IMAGE_CHECKSUMS}},
        {gguf.tensors[name].type for name in in_layout},
    )
    if far is not None:
        if image is not None and image.repacked:
            raise UnsupportedModel(
                f"{gguf.path} is packed for this CPU, and {far.name} computes with plain weights: pack it with "
                "lever pack --layout plain, or leave the image aside with --no-image"
            )
        # Where no multiple does it, the most that is tried is the closest to it; that is told (`row_invariant`).
        multiple = max(multiple, row_multiple_on(ggml, far, _plain_types(gguf)) or max(ROW_MULTIPLES))
    units = model_units(gguf, config, CheckedFile.grain if image is not None else PAGE)
    release_unused()
    while True:
        n_batch, trees = min(settings.n_batch, n_ctx), settings.tree_attention
        shape = ModelShape(n_ctx, n_batch, settings.n_logits, settings.n_tree, settings.n_steps, multiple, trees)
        fixed = {PYTHON: (rss_bytes() if python is None else python) + PYTHON_GROWTH, **beside}
        fixed |= _fixed_parts(ggml, gguf, config, units, settings, shape, far)
        elsewhere = _elsewhere(ggml, gguf, config, units, settings, shape, far) if far is not None else None
        try:
            if repacked or settings.n_steps:
                return shape, _resident_plan(units, fixed, settings, elsewhere)
            pin, n_slots = settings.pin_percent, settings.n_slots
            return shape, make_plan(units, fixed, settings.dram, pin_percent=pin, n_slots=n_slots, elsewhere=elsewhere)
        except DoesNotFit:
            if settings.n_ctx is not None or n_ctx // 2 < LEAST_CTX:
                raise
            n_ctx //= 2


def _plain_types(gguf: GGUF) -> set[int]:
    """Types of a model as its file holds them."""
    return {tensor.type for name, tensor in gguf.tensors.items() if name != IMAGE_CHECKSUMS}


def _elsewhere(
    ggml: Library,
    gguf: GGUF,
    config: ModelConfig,
    units: ModelUnits,
    settings: ModelSettings,
    shape: ModelShape,
    device: FarDevice,
) -> Elsewhere:
    """Bytes of everything but weights in the memory of a device, and what it has."""
    rows = _rows_nbytes(ggml, gguf, config, units, shape, on_host=False)
    fixed = {
        KV_CACHE: far_kv_bytes(config, shape.n_ctx, shape.n_nodes, max(shape.n_tree, settings.n_moved)),
        BUFFERS: rows + compute_nbytes(ggml, config, units, shape, 1),
    }
    return Elsewhere(device.name, device.way.free_bytes(), fixed)


def _fixed_parts(
    ggml: Library,
    gguf: GGUF,
    config: ModelConfig,
    units: ModelUnits,
    settings: ModelSettings,
    shape: ModelShape,
    far: FarDevice | None,
) -> dict[str, int]:
    """Bytes of everything but Python and weights. With a `far` device the KV cache is there, and rows are here too; the
    CPU has no more to compute than the projection, and of whole passes not even that.
    """
    checksums = gguf.tensors.get(IMAGE_CHECKSUMS)
    on_host = far is None
    rows = _rows_nbytes(ggml, gguf, config, units, shape, on_host=on_host)
    n_threads, all_there = settings.n_threads, far is not None and shape.n_steps > 0
    computing = 0 if all_there else compute_nbytes(ggml, config, units, shape, n_threads, projection_only=not on_host)
    return {
        KV_CACHE: kv_bytes(config, shape.n_ctx, shape.n_nodes) if on_host else 0,
        BUFFERS: rows + computing + (2 * checksums.nbytes if checksums is not None else 0),
        **({WAY: far.way.nbytes} if far is not None and far.way.nbytes else {}),
        **({GRAMMAR: grammar_nbytes(config.n_vocab)} if settings.grammars else {}),
    }


def _rows_nbytes(
    ggml: Library, gguf: GGUF, config: ModelConfig, units: ModelUnits, shape: ModelShape, *, on_host: bool
) -> int:
    """Bytes of rows under way, of loaded rows of the embedding, and of kept passes: here, and as much on a device."""
    embedding = EmbeddingRows.nbytes(gguf.tensors["token_embd.weight"], shape.graph_rows, units.grain)
    steps = Steps.nbytes(ggml, config, units, shape) if shape.n_steps else 0
    return Workspace.nbytes(config, shape, on_host=on_host) + embedding + steps


def _resident_plan(
    units: ModelUnits, fixed: Mapping[str, int], settings: ModelSettings, elsewhere: Elsewhere | None
) -> Plan:
    """Everything in memory, here or `elsewhere`; it goes through a ring on its way to where ggml has allocated it."""
    passes = settings.layout == "repacked" or elsewhere is not None
    ring = settings.n_slots * max(unit.nbytes for unit in units.units) if passes else 0
    small = units.units[units.small].nbytes
    weights = {SMALL: small, PINNED: units.layers_nbytes, PROJECTION: units.projection_nbytes}
    there = {**elsewhere.fixed, **weights} if elsewhere is not None else {}
    parts = {**fixed, "loading": ring, **(weights if elsewhere is None else {})}
    if sum(parts.values()) > settings.dram:
        raise does_not_fit(parts, settings.dram)
    if elsewhere is not None:
        elsewhere.require(there)
    return Plan(units, frozenset(range(len(units.units))), 0, parts, settings.dram, there)
