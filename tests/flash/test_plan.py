"""Who gets which bytes of a budget. Arithmetic over units that are sizes and names only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lever.arch import ModelConfig
from lever.errors import DoesNotFit
from lever.gguf import read
from lever.loader import LoadedModel, ModelSettings
from lever.pages import PAGE, round_up
from lever.weights.plan import PINNED, PROJECTION, RING, SMALL, ModelUnits, evenly_spread, make_plan
from lever.weights.units import Unit
from tests import tiny
from tests.fakes import wait_until
from tests.models import open_tiny

MIB = 1 << 20
FIXED = {"Python": 60 * MIB, "KV cache": 20 * MIB}


def units_of(layers: Sequence[int], projection: Sequence[int], small: int = PAGE) -> ModelUnits:
    """A model whose units have these sizes."""
    sizes = [*layers, *projection, small]
    n, m = len(layers), len(projection)
    units = tuple(Unit(str(index), (), (), nbytes) for index, nbytes in enumerate(sizes))
    return ModelUnits(units, range(n), range(n, n + m), n + m)


def ring_of(units: ModelUnits, pinned: Collection[int], n_slots: int) -> int:
    """What the ring must take: so many times the largest unit that is not pinned."""
    streamed = [unit.nbytes for index, unit in enumerate(units.units) if index not in pinned]
    return n_slots * max(streamed, default=0)


MODEL = units_of([10 * MIB] * 8, [9 * MIB, 9 * MIB, 3 * MIB])
LEAST = sum(FIXED.values()) + PAGE + 30 * MIB
MOST = sum(FIXED.values()) + PAGE + 80 * MIB + 21 * MIB

sizes = st.integers(1, 64).map(lambda pages: pages * PAGE)
models = st.builds(units_of, st.lists(sizes, min_size=1, max_size=12), st.lists(sizes, min_size=1, max_size=5), sizes)


@dataclass(frozen=True)
class Case:
    """A model, a ring, and a budget that holds at least the ring and the norms."""

    units: ModelUnits
    n_slots: int
    budget: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    units, n_slots = draw(models), draw(st.integers(3, 6))
    nbytes = [unit.nbytes for unit in units.units]
    least = n_slots * max(nbytes[:-1]) + nbytes[-1]
    return Case(units, n_slots, least + draw(st.integers(0, sum(nbytes))))


@given(case=cases(), percent=st.one_of(st.none(), st.floats(0, 100)))
def test_a_plan_is_never_above_its_budget_and_its_parts_are_what_it_pins(case: Case, percent: float | None) -> None:
    units, fixed = case.units, {"Python": 7 * PAGE}
    budget = case.budget + 7 * PAGE
    try:
        plan = make_plan(units, fixed, budget, pin_percent=percent, n_slots=case.n_slots)
    except DoesNotFit:
        assert percent  # it may be too much to ask; without, there is always a plan
        return
    layers = [index for index in units.layers if index in plan.pinned]
    bands = [index for index in units.projection if index in plan.pinned]
    assert plan.total <= plan.budget == budget
    assert plan.parts == {
        **fixed,
        SMALL: units.units[units.small].nbytes,
        PINNED: sum(units.units[index].nbytes for index in layers),
        PROJECTION: sum(units.units[index].nbytes for index in bands),
        RING: ring_of(units, plan.pinned, case.n_slots),
    }
    assert units.small in plan.pinned
    assert plan.n_slots == (case.n_slots if plan.parts[RING] else 0)


@given(case=cases(), more=st.integers(0, 300 * PAGE))
def test_more_budget_never_pins_fewer_layers_or_less_of_the_projection(case: Case, more: int) -> None:
    small = make_plan(case.units, {}, case.budget, n_slots=case.n_slots)
    large = make_plan(case.units, {}, case.budget + more, n_slots=case.n_slots)
    for part in (case.units.layers, case.units.projection):
        assert len(small.pinned.intersection(part)) <= len(large.pinned.intersection(part))


@given(case=cases())
def test_no_layer_more_would_have_fitted(case: Case) -> None:
    units = case.units
    n = len(make_plan(units, {}, case.budget, n_slots=case.n_slots).pinned.intersection(units.layers))
    if n < len(units.layers):
        pinned = {*evenly_spread(n + 1, len(units.layers)), *units.projection, units.small}
        held = sum(units.units[index].nbytes for index in pinned)
        assert held + ring_of(units, pinned, case.n_slots) > case.budget


@given(n=st.integers(1, 128), share=st.floats(0, 1))
def test_pinned_layers_are_spread_as_evenly_as_whole_numbers_allow(n: int, share: float) -> None:
    n_pinned = round(share * n)
    chosen = evenly_spread(n_pinned, n)
    assert len(set(chosen)) == n_pinned
    assert all(0 <= index < n for index in chosen)
    if n_pinned:
        # From one pinned layer to the next, round the circle: pass follows pass.
        steps = [b - a for a, b in pairwise([*chosen, chosen[0] + n])]
        assert max(steps) - min(steps) <= 1


@pytest.mark.parametrize(
    ("budget", "n_layers", "n_bands"),
    [
        (LEAST, 0, 0),
        (LEAST + 9 * MIB, 0, 1),
        (LEAST + 21 * MIB, 0, 3),
        (LEAST + 40 * MIB, 1, 3),
        (LEAST + 41 * MIB, 2, 3),
        (MOST, 8, 3),
    ],
)
def test_the_projection_comes_first_then_layers(budget: int, n_layers: int, n_bands: int) -> None:
    plan = make_plan(MODEL, FIXED, budget)
    assert len(plan.pinned.intersection(MODEL.layers)) == n_layers
    assert len(plan.pinned.intersection(MODEL.projection)) == n_bands


def test_all_pinned_needs_no_ring() -> None:
    plan = make_plan(MODEL, FIXED, MOST)
    assert plan.pinned == frozenset(range(len(MODEL.units)))
    assert (plan.n_slots, plan.parts[RING], plan.total) == (0, 0, MOST)
    assert make_plan(MODEL, FIXED, MOST - 1).n_slots == 3


@pytest.mark.parametrize(("percent", "n_layers"), [(0, 0), (30, 2), (50, 4), (60, 5), (100, 8)])
def test_a_share_of_the_layers_is_pinned_when_asked_for(percent: float, n_layers: int) -> None:
    plan = make_plan(MODEL, FIXED, 1 << 40, pin_percent=percent)
    assert len(plan.pinned.intersection(MODEL.layers)) == n_layers
    assert plan.pinned.issuperset(MODEL.projection)


def test_D8_a_budget_too_small_is_refused_with_its_parts_and_ways_to_fit() -> None:
    with pytest.raises(DoesNotFit) as caught:
        make_plan(MODEL, FIXED, LEAST - 1)
    message = str(caught.value)
    assert "needs 111 MiB but the budget is 110 MiB" in message
    for words in ("Python 60 MiB", "KV cache 20 MiB", "ring 30 MiB", "norms 4 KiB", "--dram", "-c"):
        assert words in message
    assert "\n" not in message
    assert caught.value.exit_code == 3


def test_D8_a_share_that_does_not_fit_is_refused_rather_than_cut() -> None:
    with pytest.raises(DoesNotFit, match="pinned layers 50 MiB"):
        make_plan(MODEL, FIXED, LEAST + 49 * MIB, pin_percent=60)


def test_D8_a_model_is_refused_before_a_byte_of_it_is_allocated(tmp_path: Path) -> None:
    gguf = read(tiny.tiny_model(tmp_path / "tiny.gguf"))
    with pytest.raises(DoesNotFit, match=r"Python .* KV cache .* rows and buffers .* ring"):
        LoadedModel(gguf, ModelConfig.from_gguf(gguf), ModelSettings(dram=10 * MIB))


@pytest.mark.parametrize(("n_ctx", "n_batch"), [(256, 1), (300, 7), (512, 512), (2048, 64)])
def test_D5_what_a_model_allocates_is_what_was_planned(tmp_path: Path, n_ctx: int, n_batch: int) -> None:
    path = tiny.tiny_model(tmp_path / "tiny.gguf", context_length=2048)
    with open_tiny(path, n_ctx=n_ctx, n_batch=n_batch) as loaded:
        model, parts = loaded.model, loaded.plan.parts
        assert parts["KV cache"] == model.kv.nbytes
        space = model._workspace
        arrays = (space.hidden_array, space.chosen_array, space.logits_array, space._mask_array)
        rows = sum(round_up(array.nbytes) for array in arrays) + 2 * PAGE  # a page of positions, one of ids
        embedding = model._embedding._rows.nbytes + model._embedding._scratch.nbytes
        buffers = rows + embedding + model._allocator.nbytes
        ring = loaded.store._ring
        wait_until(lambda: len(ring.filled) == 3)
        assert parts["ring"] == sum(slot.pages.nbytes for slot in ring.filled)
    # Beside these, ggml's work buffer, which it allocates itself: at most rows of n_ff floats for these shapes.
    assert buffers - 8 * PAGE <= parts["rows and buffers"] <= buffers + 32 * 512 * 4


def test_the_ledger_holds_what_was_planned_until_the_model_is_closed(tmp_path: Path) -> None:
    path = tiny.tiny_model(tmp_path / "tiny.gguf")
    with open_tiny(path, dram=1 << 30, pin_percent=None) as loaded:
        assert loaded.ledger.parts == loaded.plan.parts
        assert loaded.ledger.used == loaded.plan.total
    assert loaded.ledger.used == 0
