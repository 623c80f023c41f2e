"""Who gets which bytes of a budget. Arithmetic over units that are sizes and names only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lever.arch import ModelConfig
from lever.errors import DoesNotFit
from lever.gguf import F32, TensorInfo, read
from lever.loader import LoadedModel, ModelSettings
from lever.pages import PAGE, round_up
from lever.weights.plan import PINNED, PROJECTION, RING, SMALL, ModelUnits, Plan, make_plan
from lever.weights.units import unit
from tests import tiny
from tests.fakes import wait_until
from tests.models import open_tiny

MIB = 1 << 20
FIXED = {"Python": 60 * MIB, "KV cache": 20 * MIB}


def units_of(layers: Sequence[Sequence[int]], projection: Sequence[int], small: int = PAGE) -> ModelUnits:
    """A model whose layers have tensors of these sizes, whole pages, one behind the other in a file."""
    n_tensors, end = 0, 0

    def tensor(nbytes: int) -> TensorInfo:
        nonlocal n_tensors, end
        n_tensors, end = n_tensors + 1, end + nbytes
        return TensorInfo(f"t{n_tensors}", (nbytes // 4,), F32, 0, end - nbytes, nbytes)

    whole = [unit(f"blk.{n}", [tensor(nbytes) for nbytes in sizes]) for n, sizes in enumerate(layers)]
    bands = [unit("band", [tensor(nbytes)]) for nbytes in projection]
    units = (*whole, *bands, unit("norms", [tensor(small)]))
    n, m = len(whole), len(bands)
    return ModelUnits(units, tuple((layer,) for layer in range(n)), range(n, n + m), n + m)


MODEL = units_of([[1 * MIB, 2 * MIB, 3 * MIB, 4 * MIB]] * 8, [9 * MIB, 9 * MIB, 3 * MIB])
LEAST = sum(FIXED.values()) + PAGE + 30 * MIB
MOST = sum(FIXED.values()) + PAGE + 80 * MIB + 21 * MIB

sizes = st.integers(1, 64).map(lambda pages: pages * PAGE)


@st.composite
def models(draw: st.DrawFn) -> ModelUnits:
    n_layers, n_tensors = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    layers = [draw(st.lists(sizes, min_size=n_tensors, max_size=n_tensors)) for _ in range(n_layers)]
    return units_of(layers, draw(st.lists(sizes, min_size=1, max_size=5)), draw(sizes))


@dataclass(frozen=True)
class Case:
    """A model, a ring, and a budget that holds at least the ring and the norms."""

    units: ModelUnits
    n_slots: int
    budget: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    units, n_slots = draw(models()), draw(st.integers(3, 6))
    nbytes = [unit.nbytes for unit in units.units]
    least = n_slots * max(nbytes[:-1]) + nbytes[-1]
    return Case(units, n_slots, least + draw(st.integers(0, sum(nbytes))))


def pinned_bytes(plan: Plan, indices: Iterable[int]) -> int:
    return sum(plan.units.units[index].nbytes for index in indices if index in plan.pinned)


@given(case=cases(), percent=st.one_of(st.none(), st.floats(0, 100)))
@settings(deadline=None)
def test_a_plan_is_never_above_its_budget_and_its_parts_are_what_it_pins(case: Case, percent: float | None) -> None:
    fixed = {"Python": 7 * PAGE}
    budget = case.budget + 7 * PAGE
    try:
        plan = make_plan(case.units, fixed, budget, pin_percent=percent, n_slots=case.n_slots)
    except DoesNotFit:
        assert percent  # it may be too much to ask; without, there is always a plan
        return
    units = plan.units
    streamed = [unit.nbytes for index, unit in enumerate(units.units) if index not in plan.pinned]
    assert plan.total <= plan.budget == budget
    assert plan.parts == {
        **fixed,
        SMALL: units.units[units.small].nbytes,
        PINNED: pinned_bytes(plan, chain(*units.layers)),
        PROJECTION: pinned_bytes(plan, units.projection),
        RING: case.n_slots * max(streamed, default=0),
    }
    assert units.small in plan.pinned
    assert plan.n_slots == (case.n_slots if streamed else 0)
    assert plan.bytes_per_pass == sum(streamed)


@given(case=cases(), percent=st.floats(0, 100))
@settings(deadline=None)
def test_a_cut_model_has_the_tensors_of_the_whole_one(case: Case, percent: float) -> None:
    plan = make_plan(case.units, {}, 1 << 40, pin_percent=percent, n_slots=case.n_slots)
    whole = [[place.tensor for place in case.units.units[index].places] for (index,) in case.units.layers]
    cut = [[place.tensor for i in layer for place in plan.units.units[i].places] for layer in plan.units.layers]
    assert cut == whole
    for layer in plan.units.layers:
        assert len(layer) <= 2
        assert [index in plan.pinned for index in layer] in ([True], [False], [False, True])


@given(case=cases(), percent=st.floats(0, 100))
@settings(deadline=None)
def test_every_layer_keeps_the_same_share_as_nearly_as_whole_tensors_allow(case: Case, percent: float) -> None:
    """Up to any layer, what is kept is what was asked for but for less than one layer, the largest so far."""
    plan = make_plan(case.units, {}, 1 << 40, pin_percent=percent, n_slots=case.n_slots)
    asked = kept = largest = 0.0
    for layer, (index,) in zip(plan.units.layers, case.units.layers, strict=True):
        nbytes = case.units.units[index].nbytes
        asked, largest = asked + percent / 100 * nbytes, max(largest, nbytes)
        kept += pinned_bytes(plan, layer)
        assert kept <= asked + 1e-6 * asked
        assert asked - kept < largest


@given(case=cases(), more=st.integers(0, 300 * PAGE))
@settings(deadline=None)
def test_more_budget_never_reads_more(case: Case, more: int) -> None:
    small = make_plan(case.units, {}, case.budget, n_slots=case.n_slots)
    large = make_plan(case.units, {}, case.budget + more, n_slots=case.n_slots)
    assert large.bytes_per_pass <= small.bytes_per_pass


@pytest.mark.parametrize(
    ("budget", "n_bands"), [(LEAST, 0), (LEAST + 9 * MIB, 1), (LEAST + 20 * MIB, 2), (LEAST + 21 * MIB, 3), (MOST, 3)]
)
def test_the_projection_comes_before_layers(budget: int, n_bands: int) -> None:
    plan = make_plan(MODEL, FIXED, budget)
    assert len(plan.pinned.intersection(plan.units.projection)) == n_bands
    if n_bands < 3:
        assert plan.pinned_share == 0


@pytest.mark.parametrize("more", range(0, 80 * MIB, 3 * MIB))
def test_little_of_a_budget_is_left_over(more: int) -> None:
    """Less than the tensor that is next, while there is a layer to keep."""
    plan = make_plan(MODEL, FIXED, LEAST + 21 * MIB + more)
    assert plan.budget - plan.total < 4 * MIB or plan.pinned_share == 1


def test_a_ring_is_as_small_as_what_is_streamed() -> None:
    plan = make_plan(MODEL, FIXED, 1 << 40, pin_percent=40)
    assert (plan.parts[RING], plan.parts[PINNED]) == (18 * MIB, 32 * MIB)


def test_all_pinned_needs_no_ring() -> None:
    plan = make_plan(MODEL, FIXED, MOST)
    assert plan.pinned == frozenset(range(len(MODEL.units)))
    assert (plan.n_slots, plan.parts[RING], plan.total) == (0, 0, MOST)
    assert make_plan(MODEL, FIXED, MOST - 1).n_slots == 3


@pytest.mark.parametrize(("percent", "mib"), [(0, 0), (30, 24), (50, 40), (60, 48), (100, 80)])
def test_a_share_of_the_layers_is_pinned_when_asked_for(percent: float, mib: int) -> None:
    plan = make_plan(MODEL, FIXED, 1 << 40, pin_percent=percent)
    assert mib - 4 < plan.parts[PINNED] / MIB <= mib
    assert plan.pinned.issuperset(plan.units.projection)


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
        make_plan(MODEL, FIXED, LEAST + 29 * MIB, pin_percent=62.5)


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
        arrays = [part.array for part in (space.hidden, space.chosen, space.logits, space.mask)]
        rows = sum(round_up(array.nbytes) for array in arrays) + 2 * PAGE  # a page of positions, one of ids
        embedding = model._embedding._rows.nbytes + model._embedding._scratch.nbytes
        buffers = rows + embedding + model._allocator.nbytes
        ring = loaded.store._ring
        wait_until(lambda: len(ring.coming) == 3)
        assert parts["ring"] == sum(slot.memory.nbytes for slot in ring.coming)
    # Beside these, ggml's work buffer, which it allocates itself: at most rows of n_ff floats for these shapes.
    assert buffers - 8 * PAGE <= parts["rows and buffers"] <= buffers + 32 * 512 * 4


def test_the_ledger_holds_what_was_planned_until_the_model_is_closed(tmp_path: Path) -> None:
    path = tiny.tiny_model(tmp_path / "tiny.gguf")
    with open_tiny(path, dram=1 << 30, pin_percent=None) as loaded:
        assert loaded.ledger.parts == loaded.plan.parts
        assert loaded.ledger.used == loaded.plan.total
    assert loaded.ledger.used == 0
