"""What is kept of a draft with its target: moving averages, and JSON that is refused when anything is wrong with it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lever.cost import DOUBT, WEIGHT, Identity, Measured, RowTime
from lever.errors import ProfileError
from lever.pair import ASSUMED, PairProfile, Shown

STEPS = (RowTime(1, 1, Measured(0.04)), RowTime(4, 1, Measured(0.06)), RowTime(1, 2, Measured(0.03)))


def pair(**more: Any) -> PairProfile:
    target, draft = (Identity("cpu", "disk", model, "repacked") for model in ("large", "small"))
    fixed: dict[str, Any] = {"target": target, "draft": draft, "date": "2026-01-01T00:00:00", "quick": False}
    return PairProfile(**fixed | {"steps": STEPS} | more)


def test_before_any_run_an_agreement_is_assumed_and_the_first_run_takes_its_place() -> None:
    assert pair().shown == Shown(0, ASSUMED, 1.0)
    assert pair().after(0.6, None).shown == Shown(1, 0.6, 1.0)


def test_later_runs_move_what_was_shown_by_their_weight() -> None:
    shown = pair().after(0.6, None).after(0.9, 1.5).shown

    assert shown.runs == 2
    assert shown.first == pytest.approx(0.6 + WEIGHT * 0.3)
    assert shown.seconds == pytest.approx(1.5**WEIGHT)


def test_runs_that_take_longer_than_foretold_bring_the_foretold_cycle_to_theirs() -> None:
    known = pair()
    for _ in range(20):
        known = known.after(0.8, 1.6)

    assert known.shown.seconds == pytest.approx(1.6, rel=1e-3)


@pytest.mark.parametrize("seconds", [0.01, 30.0])
def test_cycles_that_cannot_be_true_of_the_machine_leave_its_speed_alone(seconds: float) -> None:
    assert pair().after(0.7, seconds).shown == Shown(1, 0.7, 1.0)


@given(st.lists(st.tuples(st.floats(0, 1), st.none() | st.floats(1e-6, 1e6)), max_size=30))
def test_what_runs_show_stays_within_its_bounds(runs: list[tuple[float, float | None]]) -> None:
    known = pair()
    for first, seconds in runs:
        known = known.after(first, seconds)

    assert 0 <= known.shown.first <= 1
    assert 1 / DOUBT <= known.shown.seconds <= DOUBT
    assert PairProfile.from_json(known.to_json()) == known


def changed(change: Callable[[dict[str, Any]], Any]) -> str:
    document = json.loads(pair().to_json())
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is no JSON"),
        ("[]", "pair has not the fields of a PairProfile"),
        (changed(lambda d: d.update(version=0)), "it is of version 0"),
        (changed(lambda d: d.pop("steps")), "pair has not the fields"),
        (changed(lambda d: d.update(more=1)), "pair has not the fields"),
        (changed(lambda d: d.update(steps=[])), "steps is empty"),
        (changed(lambda d: d["steps"][0].update(rows=4)), "measured twice"),
        (changed(lambda d: d["steps"][0]["seconds"].update(median=math.nan)), "is no measurement"),
        (changed(lambda d: d["shown"].update(first=1.5)), "nothing that runs can show"),
        (changed(lambda d: d["shown"].update(runs=True)), "pair.shown.runs is True"),
        (changed(lambda d: d["shown"].update(seconds=99)), "nothing that runs can show"),
        (changed(lambda d: d["draft"].pop("model")), "pair.draft has not the fields of a Identity"),
    ],
)
def test_a_damaged_or_foreign_record_is_refused_with_a_reason(text: str, says: str) -> None:
    with pytest.raises(ProfileError, match=says):
        PairProfile.from_json(text)
