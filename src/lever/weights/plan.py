"""Who gets which bytes of the budget: decided before anything is allocated. Arithmetic only; opens nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import neg

from lever.arch import ModelConfig, layer_tensors
from lever.errors import DoesNotFit
from lever.gguf import GGUF
from lever.memory import does_not_fit, format_size
from lever.pages import PAGE
from lever.weights.store import MIN_SLOTS
from lever.weights.units import Unit, bands, unit

PROJECTION = "output projection"
PINNED, RING, SMALL = "pinned layers", "ring", "norms"
ON_ITS_WAY = "layer under way"  # on another device
SHARES = 512  # of the layers' bytes that are tried, from all to none


@dataclass(frozen=True, slots=True)
class ModelUnits:
    """A model's weights in streaming order: layers, bands of the output projection, then what is always pinned.

    A layer is one unit, or two: what is streamed, and what stays in memory.
    """

    units: tuple[Unit, ...]
    layers: tuple[tuple[int, ...], ...]  # indices of the units of each layer
    projection: range  # indices of the bands
    small: int  # index of the unit with the final norm and the RoPE factors
    grain: int = PAGE  # what is read is a multiple of this

    @property
    def layers_nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(self.units[index].nbytes for layer in self.layers for index in layer)

    @property
    def projection_nbytes(self) -> int:
        """Bytes of the output projection."""
        return sum(self.units[index].nbytes for index in self.projection)

    @property
    def band_rows(self) -> tuple[int, ...]:
        """Tokens of the vocabulary in each band."""
        return tuple(self.units[index].places[0].tensor.shape[1] for index in self.projection)


def model_units(gguf: GGUF, config: ModelConfig, grain: int = PAGE) -> ModelUnits:
    """The units of a model, each layer in one. They depend on its file alone."""
    tensors = gguf.tensors
    layers = [
        unit(f"blk.{layer}", [tensors[name] for name in layer_tensors(config, layer)], grain)
        for layer in range(config.n_layers)
    ]
    matrix = tensors["token_embd.weight" if config.tied_output else "output.weight"]
    projection = bands(matrix, max(layer.nbytes for layer in layers), grain)
    names = ["output_norm.weight"] + ["rope_freqs.weight"] * config.has_rope_freqs
    small = unit("norms", [tensors[name] for name in names], grain)
    return _in_order([(layer,) for layer in layers], projection, small, grain)


def _in_order(layers: Sequence[tuple[Unit, ...]], projection: Sequence[Unit], small: Unit, grain: int) -> ModelUnits:
    ends = [0]
    for parts in layers:
        ends.append(ends[-1] + len(parts))
    n, m = ends[-1], len(projection)
    units = (*(part for parts in layers for part in parts), *projection, small)
    indices = tuple(tuple(range(a, b)) for a, b in pairwise(ends))
    return ModelUnits(units, indices, range(n, n + m), n + m, grain)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A device with memory of its own, which the layers go to."""

    name: str
    free: int | None  # bytes; None: it does not say
    fixed: Mapping[str, int]  # bytes by name of everything there but weights

    def require(self, parts: Mapping[str, int]) -> None:
        """DoesNotFit for more than is free: without parts, which are those of the budget."""
        if not self.fits(parts):
            listed = ", ".join(f"{part} {format_size(nbytes)}" for part, nbytes in parts.items() if nbytes)
            need, have = format_size(sum(parts.values())), format_size(self.free or 0)
            raise DoesNotFit(f"needs {need} of the device {self.name}, which has {have} free: {listed}")

    def fits(self, parts: Mapping[str, int]) -> bool:
        """Whether it has so much."""
        return self.free is None or sum(parts.values()) <= self.free


@dataclass(frozen=True, slots=True)
class Plan:
    """What stays in memory, what is streamed, and how many bytes each part of the process takes."""

    units: ModelUnits  # layers cut where their pinned part begins
    pinned: frozenset[int]  # indices of units
    n_slots: int  # of the ring; 0 when nothing is streamed
    parts: Mapping[str, int]  # bytes by name
    budget: int
    elsewhere: Mapping[str, int] = field(default_factory=dict)  # bytes by name in the memory of another device

    @property
    def total(self) -> int:
        """Planned bytes of the whole process."""
        return sum(self.parts.values())

    @property
    def bytes_per_pass(self) -> int:
        """Bytes that a pass over all layers and the projection reads."""
        return sum(unit.nbytes for index, unit in enumerate(self.units.units) if index not in self.pinned)

    @property
    def pinned_share(self) -> float:
        """Share of the layers' bytes that stay in memory, 0 to 1."""
        return (self.parts.get(PINNED, 0) + self.elsewhere.get(PINNED, 0)) / self.units.layers_nbytes


def make_plan(
    units: ModelUnits,
    fixed: Mapping[str, int],
    budget: int,
    *,
    pin_percent: float | None = None,
    n_slots: int = MIN_SLOTS,
    elsewhere: Elsewhere | None = None,
) -> Plan:
    """Spend `budget` bytes: the fixed parts, a ring, the projection, then as much of the layers as fits.

    Each layer keeps about the same share, so that every layer's reads take as long as the next one's; what is kept are
    whole tensors, the last ones of a layer in its file. `pin_percent` asks for a share of the layers' bytes, and the
    projection takes what is left. What is kept of layers that are computed `elsewhere` takes that device's memory, and
    none of the budget. DoesNotFit when even the least does not fit.
    """
    fixed = {**fixed, SMALL: units.units[units.small].nbytes}
    cuts = _Cuts(units)

    def spend(share: float) -> _Way:
        return _spend(cuts, fixed, budget, cuts.at(share), n_slots, elsewhere)

    def fits(way: _Way) -> bool:
        there = elsewhere is None or elsewhere.fits(way.elsewhere)
        return there and sum(way.parts.values()) <= budget

    if pin_percent is None:
        ways = [spend(share / SHARES) for share in range(SHARES + 1)]
        fitting = [way for way in ways if fits(way)] or ways[:1]
        # The projection first: a pass may need it more than once. Then the fewest bytes to read.
        way = min(fitting, key=lambda way: (-way.n_bands, -way.pinned))
    else:
        way = spend(pin_percent / 100)
    if sum(way.parts.values()) > budget:
        raise does_not_fit(way.parts, budget)
    if elsewhere is not None:
        elsewhere.require(way.elsewhere)
    cut = _cut(units, way.cuts)
    pinned = {layer[-1] for layer, n in zip(cut.layers, way.cuts, strict=True) if n < cuts.n_tensors}
    pinned |= {*cut.projection[: way.n_bands], cut.small}
    streams = len(pinned) < len(cut.units)
    return Plan(cut, frozenset(pinned), n_slots if streams else 0, way.parts, budget, way.elsewhere)


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to spend the budget: tensors that each layer streams, bands of the projection that stay."""

    cuts: tuple[int, ...]
    n_bands: int
    pinned: int  # bytes of the layers
    parts: Mapping[str, int]
    elsewhere: Mapping[str, int]


def _spend(
    cuts: _Cuts,
    fixed: Mapping[str, int],
    budget: int,
    streamed: tuple[int, ...],
    n_slots: int,
    elsewhere: Elsewhere | None,
) -> _Way:
    """With these cuts, and the projection as far as it fits beside them."""
    largest_part, pinned = cuts.sizes(streamed)
    bands = [cuts.units.units[index].nbytes for index in cuts.units.projection]
    there: Mapping[str, int] = {}
    in_ring, pinned_here = largest_part, pinned
    if elsewhere is not None:
        there = {**elsewhere.fixed, SMALL: fixed[SMALL], PINNED: pinned, ON_ITS_WAY: largest_part}
        in_ring, pinned_here = cuts.largest, 0  # what is kept there goes through a ring as well
    for n_bands in range(len(bands), -1, -1):
        ring = n_slots * max(in_ring, *bands[n_bands:], 0)
        parts = {**fixed, PINNED: pinned_here, PROJECTION: sum(bands[:n_bands]), RING: ring}
        if sum(parts.values()) <= budget:
            break
    return _Way(streamed, n_bands, pinned, parts, there)


class _Cuts:
    """Where layers can be cut: before each of their tensors, in the order of their file."""

    def __init__(self, units: ModelUnits) -> None:
        self.units = units
        layers = [units.units[index] for (index,) in units.layers]
        self.n_tensors = len(layers[0].places)
        self._nbytes = [layer.nbytes for layer in layers]
        self.largest = max(self._nbytes)  # bytes of a whole layer
        self._streamed = [[0, *(_part(layer, 0, n, units.grain).nbytes for n in self._range())] for layer in layers]
        self._pinned = [
            [*(_part(layer, n - 1, None, units.grain).nbytes for n in self._range()), 0] for layer in layers
        ]

    def at(self, share: float) -> tuple[int, ...]:
        """The number of tensors that each layer streams, when up to this share of all bytes before it is kept."""
        cuts, total, kept = [], 0, 0
        for nbytes, pinned in zip(self._nbytes, self._pinned, strict=True):
            total += nbytes
            room = total - kept if share >= 1 else share * total - kept
            cuts.append(bisect_left(pinned, -room, key=neg))  # the first that is small enough: sizes fall
            kept += pinned[cuts[-1]]
        return tuple(cuts)

    def sizes(self, cuts: tuple[int, ...]) -> tuple[int, int]:
        """Bytes of the largest streamed part of a layer, and of all pinned parts together."""
        streamed = max(sizes[n] for sizes, n in zip(self._streamed, cuts, strict=True))
        return streamed, sum(sizes[n] for sizes, n in zip(self._pinned, cuts, strict=True))

    def _range(self) -> range:
        return range(1, self.n_tensors + 1)


def _cut(units: ModelUnits, cuts: tuple[int, ...]) -> ModelUnits:
    """The same model with its layers cut."""
    layers = []
    for (index,), n in zip(units.layers, cuts, strict=True):
        layer = units.units[index]
        ends = ((0, n), (n, len(layer.places)))
        layers.append(tuple(_part(layer, a, b, units.grain) for a, b in ends if a < b))
    projection = [units.units[index] for index in units.projection]
    return _in_order(layers, projection, units.units[units.small], units.grain)


def _part(layer: Unit, first: int, last: int | None, grain: int) -> Unit:
    return unit(layer.name, [place.tensor for place in layer.places[first:last]], grain)
