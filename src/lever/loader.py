"""From a model's file and a budget to a model that computes: the plan, the ledger, the memory. Knows no text."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from lever.arch import ModelConfig
from lever.errors import DoesNotFit, UsageError
from lever.ggml import Library, load
from lever.ggml.probe import row_multiple
from lever.gguf import GGUF, TensorInfo
from lever.kv_cache import kv_bytes
from lever.memory import Ledger, does_not_fit, release_unused, rss_bytes
from lever.model import Model
from lever.owner import Owner
from lever.sizing import compute_nbytes
from lever.weights.embedding import EmbeddingRows
from lever.weights.plan import PROJECTION, ModelUnits, Plan, make_plan, model_units
from lever.weights.reader import DirectFile
from lever.weights.store import MIN_SLOTS, Store
from lever.weights.tensors import RepackedWeights, StreamedWeights, Weights
from lever.workspace import GRAPH_ROWS, ModelShape, Workspace

MAX_THREADS = 512  # GGML_MAX_N_THREADS of ggml.h
DEFAULT_CTX = 4096  # positions, unless the model or the budget allow less
LEAST_CTX = 512  # what an automatic context is not cut below
PYTHON, KV_CACHE, BUFFERS = "Python", "KV cache", "rows and buffers"
# What the process grows by after the plan is made: stacks of threads, sampling over the vocabulary, small objects.
PYTHON_GROWTH = 6 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """How much of a model stays in memory, and how it is computed. None of it changes a bit of the text but `layout`.

    layout "plain" computes with the bytes as the file holds them, which streaming needs; "repacked" puts the whole
    model into memory in the layout of the fastest kernels, whose sums round differently.
    """

    dram: int  # bytes that the process may hold
    pin_percent: float | None = None  # share of the layers kept in memory; None: as many as fit
    n_ctx: int | None = None  # positions; None: what model and budget allow, 4096 at most
    n_batch: int = 512  # prompt tokens of one pass over the layers
    n_threads: int = 1
    n_slots: int = MIN_SLOTS  # units that the ring holds
    n_logits: int = 4  # rows whose logits are held at once
    layout: Literal["plain", "repacked"] = "plain"

    def __post_init__(self) -> None:
        """UsageError for what lies outside its range."""
        pin, ctx = self.pin_percent, self.n_ctx
        for name, value, sound, allowed in (
            ("dram", self.dram, self.dram > 0, "above 0 bytes"),
            ("pin", pin, pin is None or 0 <= pin <= 100, "0 to 100 percent"),
            ("ctx-size", ctx, ctx is None or ctx > 0, "at least 1"),
            ("batch-size", self.n_batch, self.n_batch > 0, "at least 1"),
            ("threads", self.n_threads, 0 < self.n_threads <= MAX_THREADS, f"1 to {MAX_THREADS}"),
            ("ring", self.n_slots, self.n_slots >= MIN_SLOTS, f"at least {MIN_SLOTS}"),
            ("n_logits", self.n_logits, self.n_logits > 0, "at least 1"),
        ):
            if not sound:
                raise UsageError(f"{name} is {value}: it must be {allowed}")
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
        ledger: Ledger | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Plan, then allocate. DoesNotFit, naming the parts, before anything large is read or allocated."""
        self.gguf = gguf
        self.config = config
        self.ggml = load()
        self.units = model_units(gguf, config)
        table = gguf.tensors["token_embd.weight"]
        self.shape, self.plan = plan(self.ggml, config, self.units, table, settings)
        self.n_threads = usable_threads(settings.n_threads, self.shape.row_multiple)
        self.ledger = ledger or Ledger(settings.dram)
        self._cleanup = ExitStack()
        with ExitStack() as stack:
            for part, nbytes in self.plan.parts.items():
                self.ledger.reserve(part, nbytes)
                stack.callback(self.ledger.release, part, nbytes)
            self.store, weights = self._open_weights(stack, settings, progress or Progress())
            self.model = self._open_model(stack, weights)
            self._cleanup = stack.pop_all()

    @property
    def n_pinned_layers(self) -> int:
        """Layers that stay in memory."""
        return sum(index in self.plan.pinned for index in self.units.layers)

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        self._cleanup.close()

    def _open_weights(self, stack: ExitStack, settings: ModelSettings, progress: Progress) -> tuple[Store, Weights]:
        """The store that passes read from, and the tensors. A repacked model needs no store once it is loaded."""
        units, plan = self.units.units, self.plan
        progress.start(sum(units[index].nbytes for index in plan.pinned))
        files = [stack.enter_context(DirectFile(path)) for path in self.gguf.files]
        if settings.layout == "repacked":
            with Store(files, units, (), settings.n_slots) as passing:
                repacked = RepackedWeights(self.ggml, passing, on_loaded=progress.advance)
            stack.callback(repacked.close)
            return stack.enter_context(Store((), ())), repacked
        store = stack.enter_context(Store(files, units, plan.pinned, plan.n_slots, on_pinned=progress.advance))
        weights = StreamedWeights(self.ggml, store)
        stack.callback(weights.close)
        return store, weights

    def _open_model(self, stack: ExitStack, weights: Weights) -> Model:
        table = self.gguf.tensors["token_embd.weight"]
        file = DirectFile(self.gguf.files[table.file])
        embedding = stack.enter_context(EmbeddingRows(file, table, GRAPH_ROWS))
        return stack.enter_context(
            Model(self.ggml, self.config, self.units, weights, embedding, self.shape, self.n_threads)
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
    ggml: Library, config: ModelConfig, units: ModelUnits, table: TensorInfo, settings: ModelSettings
) -> tuple[ModelShape, Plan]:
    """What fits in the budget. A context that was not asked for is halved until it does, down to 512 positions."""
    n_ctx = most_ctx(config, settings)
    if n_ctx > config.n_ctx_train:
        raise UsageError(f"a context of {n_ctx} is beyond the {config.n_ctx_train} that the model was trained for")
    types = {place.tensor.type for unit in units.units for place in unit.places}
    multiple = row_multiple(ggml, types, repacked=settings.layout == "repacked")
    release_unused()
    while True:
        shape = ModelShape(n_ctx, min(settings.n_batch, n_ctx), settings.n_logits, multiple)
        try:
            return shape, _plan_with(ggml, config, units, table, settings, shape)
        except DoesNotFit:
            if settings.n_ctx is not None or n_ctx // 2 < LEAST_CTX:
                raise
            n_ctx //= 2


def _plan_with(
    ggml: Library,
    config: ModelConfig,
    units: ModelUnits,
    table: TensorInfo,
    settings: ModelSettings,
    shape: ModelShape,
) -> Plan:
    fixed = {
        PYTHON: rss_bytes() + PYTHON_GROWTH,
        KV_CACHE: kv_bytes(config, shape.n_ctx),
        BUFFERS: Workspace.nbytes(config, shape)
        + EmbeddingRows.nbytes(table, GRAPH_ROWS)
        + compute_nbytes(ggml, config, units, shape, settings.n_threads),
    }
    if settings.layout == "repacked":
        # Everything passes through a ring on its way into the repacked buffers.
        ring = settings.n_slots * max(unit.nbytes for unit in units.units)
        plan = make_plan(units, {**fixed, "loading": ring}, settings.dram, pin_percent=100)
        if plan.n_slots:
            raise does_not_fit({**plan.parts, PROJECTION: units.projection_nbytes}, settings.dram)
        return plan
    return make_plan(units, fixed, settings.dram, pin_percent=settings.pin_percent, n_slots=settings.n_slots)
