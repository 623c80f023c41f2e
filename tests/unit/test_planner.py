"""What a plan says of pruning, in words and as JSON."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lever.planner import PruningOutlook
from lever.pruner import PAYS

PAYING = PruningOutlook(layer=13, rows=48, kept=0.574, gain=1.123, limit="compute")


def test_pruning_that_pays_is_told_with_what_it_brings() -> None:
    assert PAYING.pays
    assert PAYING.line() == ("pruning", "+12.3 %", "behind layer 13, 57 % of 48 rows bring 95 % of the tokens")


@pytest.mark.parametrize(
    ("limit", "why"), [("reads", "reads are the limit of the pass"), ("compute", "-5.0 % in speed")]
)
def test_pruning_that_does_not_pay_is_told_with_the_reason(limit: str, why: str) -> None:
    losing = replace(PAYING, gain=0.95, limit=limit)
    assert not losing.pays
    assert losing.line() == (
        "pruning",
        "not used",
        f"behind layer 13, 57 % of 48 rows bring 95 % of the tokens: {why}",
    )


def test_a_plan_and_a_run_have_one_measure_of_what_pays() -> None:
    assert not replace(PAYING, gain=PAYS).pays
    assert replace(PAYING, gain=PAYS + 1e-6).pays


def test_all_of_it_is_in_the_document() -> None:
    assert PAYING.to_dict() == {
        "layer": 13,
        "rows": 48,
        "kept": 0.574,
        "gain": 1.123,
        "limit": "compute",
        "pays": True,
    }
