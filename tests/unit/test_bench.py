"""Comparing ways to decode, with ways that are scripts: turns, figures, ratios, and what is told of a difference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lever.bench import (
    IN_RAM,
    Answer,
    Comparison,
    Prompt,
    RawReads,
    Result,
    compare,
    document,
    limited,
    ratios,
    read_prompts,
    rows,
    turns,
    typical,
)
from lever.cli.bench import parse_presets
from lever.errors import Cancelled, StorageError, UsageError
from lever.stats import RunStats
from lever.trace import Cycle, Mark
from lever.tree import DraftTree, TreeRows

BYTES_PER_PASS = 1000
RAW = 2000.0  # bytes per second, so that the reads of a pass take half a second
CODE, MATH, CHAT = (Prompt(f"{domain}-1", domain, "text") for domain in ("code", "math", "chat"))
# Names that DESIGN.md gives to the rows of `lever bench --json`.
ROW = "preset domain prompts new_tokens tokens_per_s tokens_per_cycle cycle_s bound_s read_bytes_per_s peak_rss_bytes"


def stats(new_tokens: int = 11, decode_s: float = 5.0, **more: Any) -> RunStats:
    return RunStats(new_tokens=new_tokens, decode_s=decode_s, cycles=more.pop("cycles", new_tokens - 1), **more)


class Script:
    """Answers every prompt with the same."""

    def __init__(
        self,
        name: str,
        figures: RunStats | None = None,
        *,
        ours: bool = True,
        tokens: Sequence[int] = (1, 2, 3),
        logits: Sequence[int] = (7, 8, 9),
        log: list[str] | None = None,
        fails_at: int | None = None,
    ) -> None:
        self.name, self.ours = name, ours
        self._answer = Answer(tuple(tokens), figures or stats(), tuple(logits) if ours else ())
        self._log, self._fails_at, self._n = log if log is not None else [], fails_at, 0

    def answer(self, prompt: Sequence[int]) -> Answer:
        if self._n == self._fails_at:
            raise Cancelled("scripted")
        self._n += 1
        self._log.append(f"{self.name} {prompt[0]}")
        return self._answer


def compared(
    *ways: Script, prompts: Sequence[Prompt] = (CODE, MATH), rounds: int = 1, log: list[str] | None = None
) -> Comparison:
    found = Comparison([way.name for way in ways])
    log = log if log is not None else []
    run(found, ways, prompts, rounds, log)
    return found


def run(found: Comparison, ways: Sequence[Script], prompts: Sequence[Prompt], rounds: int, log: list[str]) -> None:
    def raw_rate() -> float:
        log.append("raw")
        return RAW

    compare(
        ways,
        [(prompt, [number]) for number, prompt in enumerate(prompts)],
        found,
        rounds=rounds,
        read=lambda ids: log.append(f"read {ids[0]}"),
        raw_rate=raw_rate,
        tell=lambda _text: None,
    )


def result(way: str, domain: str, figures: RunStats) -> Result:
    return Result(Prompt(domain, domain, "text"), 0, way, True, Answer((1,), figures))


# --- in turn ------------------------------------------------------------------------------------------------


def test_ways_take_turns_prompt_by_prompt_another_first_each_time_with_raw_reads_before_each() -> None:
    log: list[str] = []
    compared(Script("a", log=log), Script("b", log=log), prompts=(CODE, MATH, CHAT), log=log)

    visits = " ".join(log).split("read ")[1:]
    assert visits == ["0 raw a 0 raw b 0 ", "1 raw b 1 raw a 1 ", "2 raw a 2 raw b 2"]


def test_in_as_many_visits_as_ways_each_has_had_each_place() -> None:
    orders = [turns(3, visit) for visit in range(3)]

    assert [sorted(order) for order in orders] == [[0, 1, 2]] * 3
    assert [sorted(places) for places in zip(*orders, strict=True)] == [[0, 1, 2]] * 3


def test_rounds_ask_all_again_and_results_are_in_the_order_of_the_ways() -> None:
    found = compared(Script("a"), Script("b"), rounds=2)

    assert [(r.round, r.prompt.id, r.way) for r in found.results] == [
        (number, prompt, way) for number in (0, 1) for prompt in ("code-1", "math-1") for way in "ab"
    ]
    assert len(found.raw_rates) == 8


def test_what_ends_it_leaves_the_prompts_that_all_have_answered() -> None:
    ways = (Script("a"), Script("b", fails_at=1))
    found = Comparison(["a", "b"])
    with pytest.raises(Cancelled):
        run(found, ways, (CODE, MATH, CHAT), 1, [])

    assert [(r.prompt.id, r.way) for r in found.results] == [("code-1", "a"), ("code-1", "b")]
    assert document(found, BYTES_PER_PASS)["rows"]


# --- the promise --------------------------------------------------------------------------------------------


def test_equal_answers_differ_nowhere() -> None:
    found = compared(Script("lever"), Script("flash-ar"))
    shown = document(found, BYTES_PER_PASS)

    assert (shown["same_text"], shown["same_logits"], shown["differences"]) == (True, True, [])
    assert found.ours == ["flash-ar", "lever"]  # the first is what the others are held against


@pytest.mark.parametrize(
    ("tokens", "logits", "token", "place"),
    [
        ((1, 2, 4), (7, 8, 9), 2, None),
        ((1, 2, 3), (7, 0, 0), None, 1),
        ((1, 5, 3), (7, 8, 0), 1, 2),
        ((1, 2), (7, 8), 2, 2),
        ((1, 2, 3, 4), (7, 8, 9, 9), 3, 3),
    ],
)
def test_the_first_difference_of_text_and_of_logits_is_told_with_its_place(
    tokens: Sequence[int], logits: Sequence[int], token: int | None, place: int | None
) -> None:
    found = compared(Script("lever", tokens=tokens, logits=logits), Script("flash-ar"), prompts=(CODE,))
    shown: Any = document(found, BYTES_PER_PASS)

    assert shown["differences"] == [
        {"prompt": "code-1", "preset": "lever", "reference": "flash-ar", "token": token, "logits": place}
    ]
    assert (shown["same_text"], shown["same_logits"]) == (token is None, place is None)
    what, where = ("text", token) if token is not None else ("logits", place)
    says = f"lever and flash-ar differ in the {what} of prompt 'code-1' at new token {where}"
    assert str(found.differences[0]) == says


def test_without_plain_decoding_the_first_preset_is_the_reference() -> None:
    found = compared(Script("chain-sd"), Script("lever", tokens=(9,)), prompts=(CODE,))

    assert [(d.preset, d.reference) for d in found.differences] == [("lever", "chain-sd")]


def test_another_program_is_held_to_no_bits_but_how_far_it_agrees_is_told() -> None:
    found = compared(Script("flash-ar"), Script("llama.cpp", ours=False, tokens=(1, 2, 9)), prompts=(CODE,))
    shown: Any = document(found, BYTES_PER_PASS)

    assert found.differences == []
    assert [prompt["same_tokens"] for prompt in shown["prompts"]] == [3, 2]


# --- figures ------------------------------------------------------------------------------------------------


def test_a_rate_of_a_domain_is_all_tokens_by_all_seconds_and_parts_are_of_a_cycle() -> None:
    found = Comparison(["lever"], raw_rates=[RAW])
    first = stats(11, 2.0, cycles=2, draft_s=0.5, stall_s=0.4, verify_s=0.6, project_s=0.2, python_s=0.3, drafted=12)
    found.results = [result("lever", "code", first), result("lever", "code", stats(21, 8.0, cycles=8, read_bytes=500))]
    (row,) = rows(found, BYTES_PER_PASS)

    assert (row.prompts, row.new_tokens, row.cycles) == (2, 32, 10)
    assert (row.tokens_per_s, row.tokens_per_cycle, row.cycle_s) == (3.0, 3.0, 1.0)  # not the mean of 5 and 2.5
    assert (row.draft_s, row.stall_s, row.verify_s) == pytest.approx((0.05, 0.04, 0.06))
    assert (row.project_s, row.python_s, row.drafted) == pytest.approx((0.02, 0.03, 1.2))
    assert row.read_bytes_per_s == 50


@pytest.mark.parametrize(("compute_s", "bound_s"), [(0.1, 0.5), (0.9, 0.9)])
def test_the_bound_is_reads_at_the_raw_rate_or_the_compute_that_was_measured(compute_s: float, bound_s: float) -> None:
    found = Comparison(["flash-ar"], raw_rates=[RAW / 9, RAW, RAW * 9])
    whole = stats(11, 20.0, verify_s=8 * compute_s, project_s=2 * compute_s)
    found.results = [result("flash-ar", "code", whole)]

    assert rows(found, BYTES_PER_PASS)[0].bound_s == pytest.approx(bound_s)


def test_of_a_model_in_memory_and_of_an_answer_of_one_token_there_are_figures_too() -> None:
    found = Comparison(["flash-ar"])
    found.results = [result("flash-ar", "code", RunStats(new_tokens=1))]
    (row,) = rows(found, 0)

    assert (row.tokens_per_s, row.tokens_per_cycle, row.cycle_s, row.bound_s) == (0, 0, 0, 0)
    assert ratios([row]) == {}


def test_rows_come_by_domain_and_totals_over_all_even_where_a_domain_is_called_so() -> None:
    prompts = (CODE, Prompt("x", "all", "text"), Prompt("code-2", "code", "text"))
    found = compared(Script("a"), Script("b"), prompts=prompts)

    table, totals = rows(found, BYTES_PER_PASS), rows(found, BYTES_PER_PASS, by_domain=False)
    assert [(row.domain, row.preset, row.prompts) for row in table] == [
        ("code", "a", 2),
        ("code", "b", 2),
        ("all", "a", 1),
        ("all", "b", 1),
    ]
    assert [(row.domain, row.preset, row.prompts) for row in totals] == [("all", "a", 3), ("all", "b", 3)]


def test_ratios_are_geometric_means_over_domains_of_lever_to_all_and_of_all_to_plain_decoding() -> None:
    peer = f"llama.cpp{IN_RAM}"
    found = Comparison(["flash-ar", "chain-sd", "lever", peer])
    for domain, speeds in {"code": (1, 4, 8, 2), "chat": (1, 1, 2, 2)}.items():
        for way, speed in zip(found.ways, speeds, strict=True):
            found.results.append(result(way, domain, stats(11, 10 / speed)))

    assert ratios(rows(found, BYTES_PER_PASS)) == pytest.approx(
        {
            "lever/flash-ar": 4.0,
            "lever/chain-sd": 2.0,
            "lever/llama.cpp": 2.0,
            "chain-sd/flash-ar": 2.0,
            "llama.cpp/flash-ar": 2.0,
        }
    )


def test_json_has_every_name_that_the_design_lists_and_nothing_that_json_cannot_hold() -> None:
    found = compared(Script("flash-ar"), Script("lever"), Script("llama.cpp", ours=False))
    shown: Any = json.loads(json.dumps(document(found, BYTES_PER_PASS)))

    assert {"raw_read_bytes_per_s", "rows", "ratios"} <= shown.keys()
    assert all(set(ROW.split()) <= row.keys() for row in shown["rows"])
    assert [row["bound_s"] is None for row in shown["rows"]] == [False, False, True] * 2
    assert shown["raw_read_bytes_per_s"] == RAW


def test_a_typical_cycle_is_the_one_of_median_length() -> None:
    def cycle(seconds: float) -> Cycle:
        mark = Mark("layer", 0.0, 10 + seconds, 0.0, 0)
        return Cycle(DraftTree.rooted_at(1), TreeRows((0,), (1,), (-1,)), (), 0, 10.0, (mark,))

    cycles = [cycle(seconds) for seconds in (3, 9, 1, 2, 4)]
    assert typical(cycles) is cycles[0]
    assert typical([]) is None


# --- raw reads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [100, 1 << 20])
def test_raw_reads_of_any_file_have_a_rate(tmp_path: Path, nbytes: int) -> None:
    (tmp_path / "file").write_bytes(bytes(nbytes))
    with RawReads(tmp_path / "file", block=1 << 16, depth=2) as raw:
        assert raw.bytes_per_s(0.0) > 0
        assert raw.bytes_per_s(0.02) > 0


# --- prompts ------------------------------------------------------------------------------------------------


def line(**fields: object) -> str:
    return json.dumps({"id": "a", "domain": "code", "prompt": "Why?", **fields})


def test_prompts_of_our_own_are_a_dozen_in_three_domains_in_turn() -> None:
    prompts = read_prompts()

    assert [prompt.domain for prompt in prompts] == ["code", "math", "chat"] * 4
    assert len({prompt.text for prompt in prompts}) == 12


def test_prompts_of_a_file_are_read_with_blank_lines_and_other_keys_ignored(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{line(answer=42)}\r\n\n{line(id='b', prompt='é')}\n", encoding="utf-8")

    assert read_prompts(path) == [Prompt("a", "code", "Why?"), Prompt("b", "code", "é")]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (f"{line()}\n{{\n", "line 2 is not JSON"),
        (f"{line()}\n\n[1]\n", "line 3 is no object with the texts id, domain and prompt"),
        (line(id=7), "line 1 is no object with the texts"),
        (line(prompt=" "), "line 1 is no object with the texts"),
        ('{"id": "a", "prompt": "Why?"}', "line 1 is no object with the texts"),
        (f"{line()}\n{line()}", "line 2: the id 'a' is taken"),
        ("[" * 100_000, "line 1 is not JSON"),
        ('{"id": "a", "domain": "chat", "prompt": "\\ud800"}', "line 1 has half of a character"),
        ("\n \n", "holds no prompt"),
        (b"\xff\xfe{}".decode("latin-1"), "line 1 is not JSON"),
    ],
)
def test_a_malformed_file_of_prompts_is_refused_with_the_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content.encode("latin-1"))

    with pytest.raises(UsageError, match=says) as raised:
        read_prompts(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_a_file_of_prompts_that_cannot_be_read_is_an_io_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot read the prompts from .*: Is a directory"):
        read_prompts(tmp_path)


def test_a_limit_holds_for_each_domain() -> None:
    assert [prompt.id for prompt in limited(read_prompts(), 1)] == ["code-1", "math-1", "chat-1"]
    assert len(limited(read_prompts(), 99)) == 12


def test_presets_are_names_with_commas_between_them() -> None:
    assert parse_presets("lever, flash-ar") == ["lever", "flash-ar"]
    with pytest.raises(UsageError, match="lever is given twice"):
        parse_presets("lever,flash-ar,lever")
    with pytest.raises(UsageError, match="no preset ''"):
        parse_presets("lever,")
