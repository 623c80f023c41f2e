"""Who gets which bytes of the budget: decided before anything is allocated. Arithmetic only; opens nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lever.arch import ModelConfig, layer_tensors
from lever.gguf import GGUF
from lever.memory import does_not_fit
from lever.weights.store import MIN_SLOTS
from lever.weights.units import Unit, bands, unit

PROJECTION = "output projection"
PINNED, RING, SMALL = "pinned layers", "ring", "norms"


@dataclass(frozen=True, slots=True)
class ModelUnits:
    """A model's weights in streaming order: layers, bands of the output projection, then what is always pinned."""

    units: tuple[Unit, ...]
    layers: range  # indices of the layers
    projection: range  # indices of the bands
    small: int  # index of the unit with the final norm and the RoPE factors

    @property
    def projection_nbytes(self) -> int:
        """Bytes of the output projection."""
        return sum(self.units[index].nbytes for index in self.projection)

    @property
    def band_rows(self) -> tuple[int, ...]:
        """Tokens of the vocabulary in each band."""
        return tuple(self.units[index].places[0].tensor.shape[1] for index in self.projection)


def model_units(gguf: GGUF, config: ModelConfig) -> ModelUnits:
    """The units of a model. They depend on its file alone."""
    tensors = gguf.tensors
    layers = [
        unit(f"blk.{layer}", [tensors[name] for name in layer_tensors(config, layer)])
        for layer in range(config.n_layers)
    ]
    matrix = tensors["token_embd.weight" if config.tied_output else "output.weight"]
    projection = bands(matrix, max(layer.nbytes for layer in layers))
    names = ["output_norm.weight"] + ["rope_freqs.weight"] * config.has_rope_freqs
    small = unit("norms", [tensors[name] for name in names])
    n, m = len(layers), len(projection)
    return ModelUnits((*layers, *projection, small), range(n), range(n, n + m), n + m)


@dataclass(frozen=True, slots=True)
class Plan:
    """What stays in memory, what is streamed, and how many bytes each part of the process takes."""

    pinned: frozenset[int]  # indices of units
    n_slots: int  # of the ring; 0 when nothing is streamed
    parts: Mapping[str, int]  # bytes by name
    budget: int

    @property
    def total(self) -> int:
        """Planned bytes of the whole process."""
        return sum(self.parts.values())


def make_plan(
    units: ModelUnits,
    fixed: Mapping[str, int],
    budget: int,
    *,
    pin_percent: float | None = None,
    n_slots: int = MIN_SLOTS,
) -> Plan:
    """Spend `budget` bytes: the fixed parts, a ring, the projection, then as many layers as fit, evenly spread.

    `pin_percent` asks for that share of the layers, and the projection takes what is left. DoesNotFit when even the
    least does not fit.
    """
    fixed = {**fixed, SMALL: units.units[units.small].nbytes}
    if pin_percent is None:
        plans = (_plan(units, fixed, budget, n, n_slots) for n in range(len(units.layers), -1, -1))
        plan = next((plan for plan in plans if plan.pinned.issuperset(units.projection)), None)
        plan = plan or _plan(units, fixed, budget, 0, n_slots)
    else:
        plan = _plan(units, fixed, budget, round(len(units.layers) * pin_percent / 100), n_slots)
    if plan.total > budget:
        raise does_not_fit(plan.parts, budget)
    return plan


def evenly_spread(n_pinned: int, n: int) -> tuple[int, ...]:
    """`n_pinned` of n indices, as evenly as whole numbers allow, so that reads are never asked for in a burst."""
    return tuple((2 * i + 1) * n // (2 * n_pinned) for i in range(n_pinned))


def _plan(units: ModelUnits, fixed: Mapping[str, int], budget: int, n_pinned: int, n_slots: int) -> Plan:
    """The plan with `n_pinned` layers pinned, and the projection as far as it fits beside them."""
    layers = evenly_spread(n_pinned, len(units.layers))
    parts = {**fixed, PINNED: sum(units.units[i].nbytes for i in layers)}
    everything = {*units.layers, *units.projection}
    projection = set(units.projection)
    while True:
        streamed = everything - projection - set(layers)
        ring = n_slots * max((units.units[i].nbytes for i in streamed), default=0)
        parts[PROJECTION] = sum(units.units[i].nbytes for i in projection)
        parts[RING] = ring
        if sum(parts.values()) <= budget or not projection:
            pinned = frozenset({*layers, *projection, units.small})
            return Plan(pinned, n_slots if streamed else 0, dict(parts), budget)
        projection.remove(max(projection))
