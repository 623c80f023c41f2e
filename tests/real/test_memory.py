"""The budget, kept: `lever run` on the demo target, as a process of its own, in a memory cage where it matters.

MB are 10^6 bytes, as --dram reads them. Page cache counts as the cage's when a process in it brings the pages.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lever.models import resolve
from tests.cage import caged_or_skipped

pytestmark = pytest.mark.real

MB, MIB = 10**6, 1 << 20
BUDGETS = [420 * MB, 600 * MB, 800 * MB, 1000 * MB]
PROMPT = "What is a lever? Answer in one sentence."
LEVER = "from lever.cli import main; main()"
PLAIN = ("--no-image", "--no-draft", "--no-profile")  # whatever the caches of this machine hold
# At its end the process says on stdout how much it held at most: it may end before there are figures.
LEVER_AND_PEAK = f"import atexit, lever.memory as m; atexit.register(lambda: print(m.peak_rss_bytes())); {LEVER}"


def command(*flags: str, code: str = LEVER) -> list[str]:
    return [sys.executable, "-c", code, "run", "demo", PROMPT, "--temp", "0", *PLAIN, *flags]


@dataclass(frozen=True)
class Run:
    """One answer of `lever run --json`."""

    tokens: list[int]
    stats: dict[str, Any]
    stderr: str


def caged_run(budget: int) -> Run:
    """An answer of twelve tokens, in a cage of the budget and a twentieth."""
    caged = caged_or_skipped(command("--dram", str(budget), "--json", "-n", "12"), budget + budget // 20)
    assert caged.oom_kills == 0, "the cage's limit killed it"
    assert caged.process.returncode == 0, caged.process.stderr
    return _run(caged.process)


def _run(process: subprocess.CompletedProcess[str]) -> Run:
    document = json.loads(process.stdout)
    return Run(document["tokens"], document["stats"], process.stderr)


def model_file() -> Path:
    return resolve("demo").path


@functools.cache
def cold_run(budget: int) -> Run:
    """With no page of the model in the page cache."""
    with model_file().open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return caged_run(budget)


@functools.cache
def warm_run(budget: int) -> Run:
    """With all of the model in the page cache."""
    with model_file().open("rb", buffering=0) as file:
        while file.read(4 * MIB):
            pass
    return caged_run(budget)


in_each_budget = pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: f"{budget // MB}MB")


@in_each_budget
def test_D1_a_run_survives_a_cage_of_its_budget_and_a_twentieth(budget: int) -> None:
    assert len(cold_run(budget).tokens) == 12


@in_each_budget
def test_D1_D5_the_peak_is_the_planned_one_within_a_twentieth_and_the_plan_within_the_budget(budget: int) -> None:
    stats = cold_run(budget).stats
    assert stats["peak_rss_bytes"] == pytest.approx(stats["dram_planned_bytes"], rel=0.05)
    assert stats["peak_rss_bytes"] <= budget
    assert stats["dram_planned_bytes"] <= stats["dram_budget_bytes"] == budget


def test_the_text_is_the_same_in_every_budget_and_the_layers_in_memory_are_more_in_a_larger_one() -> None:
    runs = [cold_run(budget) for budget in BUDGETS]
    assert len({tuple(run.tokens) for run in runs}) == 1
    pinned = [run.stats["pinned_share"] for run in runs]
    assert pinned == sorted(set(pinned))


def test_D1_a_page_cache_that_holds_the_model_changes_neither_the_memory_nor_the_text() -> None:
    run = warm_run(BUDGETS[0])
    assert run.tokens == cold_run(BUDGETS[0]).tokens
    assert run.stats["peak_rss_bytes"] == pytest.approx(run.stats["dram_planned_bytes"], rel=0.05)


def test_D7_a_context_that_nobody_asked_for_is_cut_to_what_fits_and_told() -> None:
    process = subprocess.run(
        command("--dram", "320MiB", "--json", "-n", "2"), capture_output=True, text=True, check=True
    )
    run = _run(process)
    n_ctx = run.stats["n_ctx"]
    assert 512 <= n_ctx < 4096
    assert f"context {n_ctx}" in run.stderr
    assert run.stats["peak_rss_bytes"] <= run.stats["dram_planned_bytes"] <= 320 * MIB


# What does not fit


@dataclass(frozen=True)
class Refusal:
    """How a run ended that was not started."""

    exit_code: int
    message: str
    peak_bytes: int
    seconds: float


def refusal(*flags: str) -> Refusal:
    started = time.monotonic()
    process = subprocess.run(command(*flags, code=LEVER_AND_PEAK), capture_output=True, text=True, check=False)
    return Refusal(process.returncode, process.stderr, int(process.stdout), time.monotonic() - started)


@pytest.mark.parametrize(
    ("flags", "needed", "named"),
    [
        pytest.param(["--dram", "100MiB"], "but the budget is 100 MiB", "ring 85.8 MiB", id="D8"),
        pytest.param(["--dram", "600MiB", "-c", "32768"], "but the budget is 600 MiB", "KV cache 896 MiB", id="D7"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_parts_before_anything_large_is_read(
    flags: list[str], needed: str, named: str
) -> None:
    refused = refusal(*flags)
    assert refused.exit_code == 3
    assert len(refused.message.splitlines()) == 1
    for words in (needed, named, "Python", "KV cache", "rows and buffers", "ring", "give more with --dram", ", or "):
        assert words in refused.message
    assert refused.peak_bytes < 110 * MIB  # Python and the header; the tokenizer takes 89 MiB while it is built
    assert refused.seconds < 20


@pytest.mark.parametrize("mib", [70, 100, 133])
def test_D8_what_does_not_fit_is_refused_in_a_cage_that_could_not_hold_the_tokenizer(mib: int) -> None:
    budget = mib * MIB
    caged = caged_or_skipped(command("--dram", str(budget)), budget + budget // 20)
    assert (caged.process.returncode, caged.oom_kills) == (3, 0)
    assert "ring 85.8 MiB" in caged.process.stderr
