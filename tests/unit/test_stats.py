"""The figures of a run: those that are derived, and the names that other tools read."""

from __future__ import annotations

import json

import pytest

from lever.stats import RunStats

# Names that DESIGN gives to `stats` of `lever run --json`.
NAMES = """
prompt_tokens new_tokens prefill_s decode_s tokens_per_s cycles tokens_per_cycle drafted verified pruned accepted
read_bytes read_s read_bytes_per_s direct_io stall_s draft_s draft_hidden_s verify_s project_s python_s exact
near_ties peak_rss_bytes dram_budget_bytes dram_planned_bytes preset model draft device ggml
"""


def test_every_figure_that_other_tools_read_is_there_and_json() -> None:
    figures = RunStats().to_dict()
    assert set(NAMES.split()) <= set(figures)
    assert json.loads(json.dumps(figures)) == figures


def test_rates_are_of_the_decode_phase_to_which_the_first_token_does_not_belong() -> None:
    stats = RunStats(new_tokens=9, cycles=4, decode_s=2.0, prefill_s=100.0, read_bytes=6000)
    assert stats.tokens_per_s == 4.0
    assert stats.tokens_per_cycle == 2.0
    assert stats.read_bytes_per_s == 3000.0
    assert stats.to_dict()["tokens_per_s"] == 4.0


@pytest.mark.parametrize("new_tokens", [0, 1])
def test_an_answer_of_no_cycle_has_no_rates(new_tokens: int) -> None:
    stats = RunStats(new_tokens=new_tokens)
    assert (stats.tokens_per_s, stats.tokens_per_cycle, stats.read_bytes_per_s) == (0.0, 0.0, 0.0)


def test_a_figure_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError):
        RunStats(tokens=3)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        RunStats().tokens = 3  # type: ignore[attr-defined]
