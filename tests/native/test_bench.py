"""`lever bench` in processes of its own, on tiny models: what it writes where, and how it ends."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lever.bench import Request
from lever.cage import NoCage, cage
from lever.errors import LeverError
from lever.peer import LlamaCpp, PeerModel
from lever.settings import SamplerSettings
from tests.command import Lever, interrupt, one_line
from tests.lacking import lacking, needs
from tests.tiny import tiny_model

PRESETS = ("flash-ar", "chain-sd", "lever")
QUICK = ("--no-profile", "-n", "6", "--pin", "0")

# The command with a preset whose text, or whose logits alone, are not those of the others from the third token on.
WRONGLY = """
import sys
from dataclasses import replace
from lever.bench import PresetWay
from lever.cli import main
what = sys.argv.pop(1)
right = PresetWay.answer
def answer(self, prompt):
    found = right(self, prompt)
    wrong = [*getattr(found, what)[:2], 0, *getattr(found, what)[3:]]
    return replace(found, **{what: tuple(wrong)}) if self.name == "chain-sd" else found
PresetWay.answer = answer
main()
"""


class WrongLever(Lever):
    @staticmethod
    def _command(_device: object) -> list[str]:
        return [sys.executable, "-c", WRONGLY, "tokens"]


class WrongLogitsLever(Lever):
    @staticmethod
    def _command(_device: object) -> list[str]:
        return [sys.executable, "-c", WRONGLY, "logits"]


@pytest.fixture
def cages() -> None:
    """A machine that has memory cages."""
    try:
        with cage(1 << 30):
            pass
    except NoCage as error:
        lacking(str(error))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft of its vocabulary, and two prompts of two domains; lever's home, where the draft is packed."""
    folder = tmp_path_factory.mktemp("bench")
    shape: dict[str, Any] = {"n_ff": 256, "type": "Q4_0"}
    tiny_model(folder / "target.gguf", n_layers=3, **shape)
    tiny_model(folder / "draft.gguf", n_layers=1, seed=3, **shape)
    prompts = [{"id": f"{domain}-1", "domain": domain, "prompt": f"A {domain}?"} for domain in ("code", "chat")]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    return folder


@pytest.fixture
def lever(folder: Path, bytecode: Path) -> Lever:
    return Lever(folder / "home", bytecode)


def words(folder: Path, *more: str | Path, presets: str = ",".join(PRESETS)) -> list[str | Path]:
    prompts: list[str | Path] = ["--prompts", folder / "prompts.jsonl"]
    return ["bench", folder / "target.gguf", "--draft", folder / "draft.gguf", "--presets", presets, *prompts, *more]


def test_json_on_stdout_has_rows_ratios_and_the_promise_and_names_no_folder(lever: Lever, folder: Path) -> None:
    done = lever(
        *words(
            folder, *QUICK, "--json", "-", "-q", "--rounds", "2", "-s", "-1", "--temp", "0.5", "--repeat-penalty", "1.3"
        )
    )

    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"\n") == 1
    assert str(folder).encode() not in done.stdout
    shown = json.loads(done.stdout)
    assert [(row["domain"], row["preset"]) for row in shown["rows"]] == [
        (domain, preset) for domain in ("code", "chat") for preset in PRESETS
    ]
    for row in shown["rows"]:
        assert (row["prompts"], row["new_tokens"]) == (2, 12)
        assert row["tokens_per_s"] == pytest.approx(10 / row["decode_s"])
        assert row["read_bytes_per_s"] > 0
        assert row["bound_s"] > 0
        assert (row["drafted"] > 0) <= (row["preset"] != "flash-ar")
    assert shown["rows"][1]["verified"] > 0  # the chain, whatever things cost
    assert set(shown["ratios"]) == {"lever/flash-ar", "lever/chain-sd", "chain-sd/flash-ar"}
    assert (shown["same_text"], shown["same_logits"], shown["interrupted"]) == (True, True, False)
    assert shown["raw_read_bytes_per_s"] > 0
    assert (shown["settings"]["temperature"], shown["settings"]["repeat_penalty"]) == (0.5, 1.3)
    settings = shown["settings"]
    assert (settings["model"], settings["draft"], settings["prompts"]) == ("target.gguf", "draft.gguf", "prompts.jsonl")
    assert settings["dram_planned_bytes"] <= settings["dram_budget_bytes"]
    assert max(row["peak_rss_bytes"] for row in shown["rows"]) <= settings["dram_planned_bytes"]
    assert len(shown["prompts"]) == 12


def test_tables_go_to_stdout_and_files_where_they_are_wanted(lever: Lever, folder: Path, tmp_path: Path) -> None:
    needs("matplotlib")
    files = ("--json", tmp_path / "bench.json", "--plot", tmp_path / "bench.svg")
    done = lever(*words(folder, *QUICK, *files, "--limit", "1"))
    table = done.stdout.decode()

    assert done.returncode == 0, done.stderr.decode()
    assert re.search(r"^DOMAIN +PRESET .*\ncode +flash-ar .*\n +chain-sd .*\n +lever .*\nchat ", table, re.MULTILINE)
    assert re.search(r"^ms A CYCLE +DRAFT +WAITING .*\nflash-ar .*\nchain-sd .*\nlever ", table, re.MULTILINE)
    assert "lever/flash-ar: " in table
    assert "the same text from the same logits as flash-ar: chain-sd, lever" in table
    assert json.loads((tmp_path / "bench.json").read_text())["same_text"]
    drawn = (tmp_path / "bench.svg").read_text()
    assert drawn.startswith("<?xml")
    assert 100_000 > len(drawn) > 10_000


def test_without_a_drafting_preset_no_draft_is_needed(lever: Lever, folder: Path) -> None:
    model, prompts = folder / "target.gguf", folder / "prompts.jsonl"
    done = lever("bench", model, "--prompts", prompts, "--presets", "flash-ar", *QUICK, "--json", "-")
    shown = json.loads(done.stdout)

    assert shown["settings"]["draft"] is None
    assert (shown["ratios"], shown["same_text"]) == ({}, True)


@pytest.mark.parametrize(("kind", "what"), [(WrongLever, "text"), (WrongLogitsLever, "logits")])
def test_a_preset_that_breaks_the_promise_ends_it_with_1_after_the_figures(
    folder: Path, bytecode: Path, kind: type[Lever], what: str
) -> None:
    done = kind(folder / "home", bytecode)(*words(folder, *QUICK, "--json", "-", "-q"))
    shown = json.loads(done.stdout)

    assert done.returncode == 1
    assert f"chain-sd and flash-ar differ in the {what} of prompt 'code-1' at new token 2 (2" in one_line(done.stderr)
    assert (shown["same_text"], shown["same_logits"]) == (what == "logits", what == "text")
    assert [one["prompt"] for one in shown["differences"]] == ["code-1", "chat-1"]


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_measured(lever: Lever, folder: Path) -> None:
    done = lever(*words(folder, *QUICK, "-c", "8", presets="flash-ar"))

    assert (done.returncode, done.stdout) == (1, b"")
    assert re.search(r"the prompt has \d+ tokens and the context 8", one_line(done.stderr))


def test_ctrl_c_writes_what_all_presets_have_answered(lever: Lever, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    slowly = words(folder, *QUICK, "--rounds", "1000", "--json", path, "--no-image")
    with lever.started(*slowly) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "on code-1" in line.decode() or "on chat-1" in line.decode():  # after five seconds
                break
        out, err = interrupt(process)
    shown = json.loads(path.read_text())

    assert (process.returncode, err) == (130, b"")
    assert b"flash-ar" in out
    assert shown["interrupted"]
    assert 0 < len(shown["prompts"]) < 3000
    assert len(shown["prompts"]) % 3 == 0


# --- another program ----------------------------------------------------------------------------------------


def test_llama_cpp_answers_the_same_prompts_in_ram(lever: Lever, folder: Path) -> None:
    needs("xllamacpp")
    done = lever(*words(folder, *QUICK, "--limit", "1", "--json", "-", "--peer", "llama.cpp", presets="flash-ar"))
    assert done.returncode == 0, done.stderr.decode()
    shown = json.loads(done.stdout)
    theirs = [row for row in shown["rows"] if row["preset"] == "llama.cpp in RAM"]

    assert [(row["domain"], row["prompts"], row["new_tokens"]) for row in theirs] == [("code", 1, 6), ("chat", 1, 6)]
    assert all(row["bound_s"] is None and row["tokens_per_cycle"] == 1 for row in theirs)
    assert set(shown["ratios"]) == {"llama.cpp/flash-ar"}
    # F16 keys and values, sums in another order: the first token of a random model is not always the same.
    assert max(p["same_tokens"] for p in shown["prompts"] if p["preset"] == "llama.cpp in RAM") > 0


@pytest.mark.usefixtures("cages")
def test_llama_cpp_drafts_in_a_cage(lever: Lever, folder: Path) -> None:
    needs("xllamacpp")
    caged = ("--peer", "llama.cpp", "--peer-cage", "300MB")
    done = lever(*words(folder, *QUICK, "--limit", "1", "--json", "-", "-q", *caged, presets="chain-sd"))
    assert done.returncode == 0, done.stderr.decode()
    shown = json.loads(done.stdout)
    theirs = [row for row in shown["rows"] if row["preset"] == "llama.cpp in 300MB with draft"]

    assert [row["new_tokens"] for row in theirs] == [6, 6]
    assert sum(row["drafted"] for row in theirs) > 0
    assert all(0 < row["peak_rss_bytes"] < 300e6 for row in theirs)


@pytest.mark.usefixtures("cages")
def test_a_cage_that_is_too_small_is_told_and_what_is_measured_is_not_lost(lever: Lever, folder: Path) -> None:
    needs("xllamacpp")
    done = lever(*words(folder, *QUICK, "--json", "-", "-q", "--peer", "llama.cpp", "--peer-cage", "8MB"))

    assert done.returncode == 1
    assert "was ended for want of memory: give it more with --peer-cage" in done.stderr.decode()
    assert json.loads(done.stdout)["prompts"] == []


def test_a_server_that_is_killed_answers_with_one_line(folder: Path) -> None:
    needs("xllamacpp")
    request = Request(max_new_tokens=4, sampler=SamplerSettings(temperature=0.0, seed=1))
    with LlamaCpp("llama.cpp", PeerModel(folder / "target.gguf", None, 256, 1), request) as peer:
        peer.wait()
        assert len(peer.answer([1, 2, 3]).tokens) == 4
        peer.kill()
        with pytest.raises(LeverError, match=r"^llama.cpp ended with -9: "):
            peer.answer([1, 2, 3])


def test_a_file_that_llama_cpp_cannot_load_is_told(tmp_path: Path) -> None:
    needs("xllamacpp")
    (tmp_path / "no.gguf").write_bytes(b"GGUF")
    request = Request(max_new_tokens=4, sampler=SamplerSettings(temperature=0.0, seed=1))
    peer = LlamaCpp("llama.cpp", PeerModel(tmp_path / "no.gguf", None, 256, 1), request)
    with peer, pytest.raises(LeverError, match=r"^llama.cpp ended with 1: "):
        peer.wait()


def test_llama_cpp_is_not_given_a_flash_image(lever: Lever, folder: Path, tmp_path: Path) -> None:
    image = tmp_path / "image.gguf"
    assert lever("pack", folder / "target.gguf", "-o", image, "-q").returncode == 0
    prompts = folder / "prompts.jsonl"
    done = lever("bench", image, "--presets", "flash-ar", "--prompts", prompts, *QUICK, "-q", "--peer", "llama.cpp")

    assert done.returncode == 2
    assert "is a flash image, which llama.cpp cannot read" in done.stderr.decode()
