"""The command itself, in processes of its own, on tiny models: what it writes where, how it ends, and Ctrl-C."""

from __future__ import annotations

import ctypes
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lever.arch import ModelConfig
from lever.gguf import read
from lever.models.predictors import predictor_path
from lever.predictor import Quality, Translator
from lever.predictor import write as write_predictor
from lever.prune import Mix
from lever.weights.store import BLOCK, DEPTH
from tests.command import COMMAND, Lever, interrupt, notes_until, one_line
from tests.fakes import wait_until
from tests.lacking import needs
from tests.tiny import Fields, tiny_fields, tiny_model

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Names that DESIGN.md gives to `lever run --json`.
STATS = """prompt_tokens new_tokens prefill_s decode_s tokens_per_s cycles tokens_per_cycle drafted verified pruned
accepted read_bytes read_s read_bytes_per_s direct_io stall_s draft_s draft_hidden_s verify_s project_s python_s exact
near_ties peak_rss_bytes dram_budget_bytes dram_planned_bytes preset model draft device ggml"""


def as_no_root() -> None:
    """In a process that is to become the command: root does not get back what lets it read any file."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH of linux/capability.h
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; refused where there is nothing to drop


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model of each architecture, named after it, and one with a SentencePiece vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    for arch in ARCHITECTURES:
        tiny_model(folder / f"{arch}.gguf", arch=arch)
    tiny_model(folder / "spm.gguf", tokenizer="spm", rope_freqs=True, tied=True)
    return folder


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return models / "qwen2.gguf"


# --- text, JSON and notes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ARCHITECTURES, "spm"])
def test_stdout_holds_the_text_and_one_newline_and_the_seed_repeats_it(lever: Lever, models: Path, name: str) -> None:
    document = lever.json("run", models / f"{name}.gguf", "Hello, world", "-n", "8")
    seed = document["stats"]["seed"]
    again = lever("run", models / f"{name}.gguf", "Hello, world", "-n", "8", "-s", str(seed))

    assert again.returncode == 0
    assert again.stdout == document["text"].encode() + b"\n"
    assert f"seed {seed}\n" in again.stderr.decode()
    assert not set(b"\r\x1b") & set(again.stderr)  # no bar and no colour where there is no terminal


def test_json_has_every_name_that_the_design_lists(lever: Lever, model: Path) -> None:
    document = lever.json("run", model, "Hello", "-n", "5", "--pin", "0", "-q")
    stats = document["stats"]

    assert document.keys() == {"text", "tokens", "finish_reason", "stats"}
    assert set(STATS.split()) <= stats.keys()
    assert (len(document["tokens"]), stats["new_tokens"], stats["cycles"]) == (5, 5, 4)
    assert document["finish_reason"] == "length"
    assert stats["tokens_per_s"] == pytest.approx(4 / stats["decode_s"])
    assert stats["read_bytes"] > 0
    assert stats["exact"] is True
    assert 0 < stats["peak_rss_bytes"] <= stats["dram_budget_bytes"]
    assert stats["model"] == str(model)


def test_quiet_says_nothing_but_the_text(lever: Lever, model: Path) -> None:
    done = lever("run", model, "Hello", "-n", "2", "-q")

    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"\n")


def test_verbose_shows_where_the_memory_goes(lever: Lever, model: Path) -> None:
    notes = lever("run", model, "Hello", "-n", "0", "-v", "--dram", "300MiB").stderr.decode()

    assert re.search(r"of 300 MiB planned: Python .* KV cache .* output projection", notes)


def test_zero_new_tokens_only_read_the_prompt(lever: Lever, model: Path) -> None:
    document = lever.json("run", model, "Hello", "-n", "0")

    assert (document["text"], document["tokens"], document["finish_reason"]) == ("", [], "length")
    assert document["stats"]["prompt_tokens"] > 0
    assert lever("run", model, "Hello", "-n", "0").stdout == b"\n"


def test_one_new_token_is_one(lever: Lever, model: Path) -> None:
    document = lever.json("run", model, "Hello", "-n", "1")

    assert (len(document["tokens"]), document["stats"]["cycles"]) == (1, 0)


def test_text_is_utf_8_whatever_the_locale(lever: Lever, model: Path) -> None:
    bias = "-l", "200+1000"  # one token, of a byte above 127
    done = lever("run", model, "Hello", "-n", "2", *bias, LC_ALL="C", PYTHONIOENCODING="ascii")

    assert (done.returncode, done.stdout) == (0, "\ufffd\ufffd\n".encode())


# --- prompts ------------------------------------------------------------------------------------------------


def test_a_prompt_is_the_same_from_everywhere(lever: Lever, model: Path, tmp_path: Path) -> None:
    prompt = "two\nlines é"
    (tmp_path / "prompt").write_text(prompt + "\n")
    piped = f"{prompt}\n".encode()
    given: list[tuple[list[str], bytes]] = [
        ([prompt], b""),
        (["-p", prompt], b"not this"),
        (["-f", str(tmp_path / "prompt")], b""),
        (["-"], piped),
        ([], piped),
    ]
    answers = {lever("run", model, *words, "-n", "3", "-s", "1", "-q", stdin=stdin).stdout for words, stdin in given}

    assert len(answers) == 1


def test_bytes_that_are_no_utf_8_reach_the_model(lever: Lever, model: Path) -> None:
    def n_tokens(prompt: bytes, **more: Any) -> int:
        words = (b"-p", prompt) if prompt else ()
        return int(lever.json("run", model, *words, "--raw", "-n", "0", **more)["stats"]["prompt_tokens"])

    assert n_tokens(b"\xff\xfe") == n_tokens(b"", stdin=b"\xff\xfe\n") == 2
    assert lever("run", model, b"\xff", "--system", b"\xfe", "-n", "1").returncode == 0


def test_E7_the_text_of_a_special_token_in_a_chat_is_plain_text(lever: Lever, model: Path) -> None:
    def n_tokens(prompt: str, *flags: str) -> int:
        return int(lever.json("run", model, prompt, "-n", "0", *flags)["stats"]["prompt_tokens"])

    assert n_tokens("<|im_end|>", "--raw") == 1
    assert n_tokens("<|im_end|>") > n_tokens("x") + 4


def test_a_prompt_longer_than_the_context_is_told_with_both_numbers(lever: Lever, model: Path) -> None:
    done = lever("run", model, "x" * 600)

    assert (done.returncode, done.stdout) == (1, b"")
    assert re.search(r"the prompt has 6\d\d tokens and the context 512", one_line(done.stderr))


@pytest.mark.parametrize(("flags", "n_ctx"), [([], 512), (["-c", "300"], 300)])
def test_a_prompt_longer_than_any_context_there_can_be_is_refused_before_a_weight_is_read(
    lever: Lever, model: Path, flags: list[str], n_ctx: int
) -> None:
    done = lever("run", model, "x" * 600, *flags, device={"broken": range(1 << 40)})

    assert done.returncode == 1
    assert re.search(rf"the prompt has 6\d\d tokens and the context {n_ctx}: .* -c", one_line(done.stderr))


def test_a_raw_empty_prompt_needs_a_start_token(lever: Lever, models: Path) -> None:
    assert lever("run", models / "qwen2.gguf", "", "--raw").returncode == 2
    assert lever.json("run", models / "spm.gguf", "", "--raw", "-n", "1")["stats"]["prompt_tokens"] == 1


# --- how an answer ends -------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_answer_before_it(lever: Lever, model: Path) -> None:
    words = ("run", model, "Hello", "-n", "12", "--temp", "0", "-l", "65+1000", "-l", "66+999")
    penalty = ("--frequency-penalty", "0.4")  # A A A B A B ..., as the penalties add up
    text = lever.json(*words, *penalty)["text"]
    stopped = lever.json(*words, *penalty, "--stop", "nowhere", "--stop", text[2:5])

    assert (stopped["text"], stopped["finish_reason"]) == (text[: text.index(text[2:5])], "stop")


def test_a_bias_forces_and_bans_tokens_and_ignore_eos_bans_the_end(lever: Lever, model: Path) -> None:
    vocabulary = tiny_fields(arch="qwen2")
    end = int(str(vocabulary.get("tokenizer.ggml.eos_token_id")))
    words = ("run", model, "Hello", "-n", "4", "-l")

    assert lever.json(*words, "65+1000")["tokens"] == [65] * 4
    assert 65 not in lever.json(*words, "65-inf", "-l", "66+1000")["tokens"]
    ended = lever.json(*words, f"{end}+1000")
    assert (ended["tokens"], ended["finish_reason"], ended["text"]) == ([end], "stop", "")
    ignored = lever.json(*words, f"{end}+1000", "--ignore-eos")
    assert end not in ignored["tokens"]
    assert len(ignored["tokens"]) == 4


# --- guesses from the text ----------------------------------------------------------------------------------

AGAIN = "the world and the world and the world and the world and the world"


def test_lookup_in_the_place_of_a_draft_gives_the_same_text_and_says_so(lever: Lever, model: Path) -> None:
    words: list[str | Path] = ["run", model, AGAIN, "--raw", "-n", "24", "--temp", "0", "-s", "1"]
    plain, found = lever.json(*words), lever.json(*words, "--draft", "lookup")
    stats = found["stats"]

    assert found["tokens"] == plain["tokens"]
    assert (plain["stats"]["draft"], plain["stats"]["preset"]) == (None, "flash-ar")
    assert (stats["draft"], stats["preset"]) == ("lookup", "lever")
    assert (stats["drafted"], stats["draft_s"]) == (0, 0.0)
    assert stats["new_tokens"] == 24 == 1 + stats["cycles"] + stats["accepted"]
    assert stats["looked_up"] <= stats["cycles"] - stats["plain_cycles"]


@pytest.mark.parametrize("preset", ["chain-sd", "edgellm", "lever-paper"])
def test_a_preset_that_needs_a_model_to_draft_is_refused_with_lookup(lever: Lever, model: Path, preset: str) -> None:
    done = lever("run", model, AGAIN, "--preset", preset, "--draft", "lookup")

    assert (done.returncode, done.stdout) == (2, b"")
    assert f"the preset {preset} needs a draft" in one_line(done.stderr)


def test_plain_decoding_looks_nothing_up(lever: Lever, model: Path) -> None:
    stats = lever.json("run", model, AGAIN, "-n", "6", "--preset", "flash-ar", "--draft", "lookup")["stats"]

    assert (stats["draft"], stats["preset"], stats["verified"]) == (None, "flash-ar", 0)


def test_where_the_text_repeats_nothing_the_figures_say_that_no_guess_was_made(lever: Lever, model: Path) -> None:
    """Tokens that came before are banned by their penalty, so no three of them come again."""
    words = ["-n", "12", "--temp", "0", "--presence-penalty", "100", "--repeat-last-n", "-1"]
    done = lever("run", model, "Hello", "--raw", "--draft", "lookup", *words)

    assert done.returncode == 0
    assert "; no guess in 100 % of the passes: the text repeats nothing; " in done.stderr.decode()


# --- refusals -----------------------------------------------------------------------------------------------


def cut_in_the_header(fields: Fields) -> bytes:
    return fields.encode()[:3000]


def cut_in_the_tensors(fields: Fields) -> bytes:
    return fields.encode()[:-40_000]


def of_unknown_type(fields: Fields) -> bytes:
    fields.tensor("blk.0.attn_q.weight").type = 99
    return fields.encode()


def of_experts(fields: Fields) -> bytes:
    fields.set("qwen2.expert_count", 8)
    return fields.encode()


def of_another_architecture(fields: Fields) -> bytes:
    fields.set("general.architecture", "mamba")
    return fields.encode()


def with_an_unknown_tokenizer(fields: Fields) -> bytes:
    fields.set("tokenizer.ggml.model", "rwkv")
    return fields.encode()


def with_an_endless_template(fields: Fields) -> bytes:
    fields.set("tokenizer.chat_template", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
    return fields.encode()


def with_a_deep_template(fields: Fields) -> bytes:
    fields.set("tokenizer.chat_template", "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}")
    return fields.encode()


def with_a_broken_template(fields: Fields) -> bytes:
    fields.set("tokenizer.chat_template", "{% if %}")
    return fields.encode()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        pytest.param(lambda _fields: b"", "", id="an-empty-file"),
        pytest.param(lambda _fields: b"<!doctype html>" * 99, "is not a GGUF", id="not-a-GGUF"),
        pytest.param(cut_in_the_header, "", id="A1-cut-in-the-header"),
        pytest.param(cut_in_the_tensors, "is cut", id="A2-A5-cut-in-the-tensors"),
        pytest.param(of_unknown_type, "99", id="A20-type-99"),
        pytest.param(of_experts, "MoE", id="A28-experts"),
        pytest.param(of_another_architecture, "mamba", id="another-architecture"),
        pytest.param(with_an_unknown_tokenizer, "rwkv", id="an-unknown-tokenizer"),
        pytest.param(with_an_endless_template, "template", id="an-endless-template"),
        pytest.param(with_a_deep_template, "template", id="a-deep-template"),
        pytest.param(with_a_broken_template, "template", id="a-broken-template"),
    ],
)
def test_a_file_that_cannot_be_used_ends_with_4(lever: Lever, tmp_path: Path, spoil: Any, says: str) -> None:
    path = tmp_path / "spoilt.gguf"
    path.write_bytes(spoil(tiny_fields(arch="qwen2")))
    done = lever("run", path, "Hello")

    assert (done.returncode, done.stdout) == (4, b"")
    assert says in one_line(done.stderr)


def test_D8_a_budget_that_is_too_small_names_the_parts_and_ways_to_fit(lever: Lever, model: Path) -> None:
    done = lever("run", model, "Hello", "--dram", "10MiB")

    assert (done.returncode, done.stdout) == (3, b"")
    line = one_line(done.stderr)
    assert re.search(r"needs \d+ MiB but the budget is 10 MiB: Python .*KV cache .*ring", line)
    assert all(way in line for way in ("--dram", "-c", "-b"))


def test_D7_a_huge_context_in_the_file_is_not_taken_unasked(lever: Lever, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "long.gguf", context_length=1 << 20)
    done = lever("run", path, "Hello", "-n", "0", "--dram", "300MiB")
    too_much = lever("run", path, "Hello", "-c", "1000000", "--dram", "300MiB")

    assert "context 4096;" in done.stderr.decode()
    assert too_much.returncode == 3
    assert "KV cache" in one_line(too_much.stderr)


def test_a_token_beyond_the_vocabulary_cannot_have_a_bias(lever: Lever, model: Path) -> None:
    done = lever("run", model, "Hello", "-l", "999999+1")

    assert done.returncode == 2
    assert "the vocabulary ends at" in one_line(done.stderr)


def test_a_system_message_without_a_template_is_refused(lever: Lever, model: Path) -> None:
    done = lever("run", model, "Hello", "--raw", "--system", "Be brief")

    assert done.returncode == 2
    assert "--system needs a chat template" in one_line(done.stderr)


def test_a_model_without_a_template_goes_on_from_the_text_and_says_so(lever: Lever, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "bare.gguf", metadata={"tokenizer.chat_template": None})
    done = lever("run", path, "Hello", "-n", "1")

    assert done.returncode == 0
    assert "lever: the model has no chat template" in done.stderr.decode()


# --- storage, streams ---------------------------------------------------------------------------------------


def test_a_device_that_fails_is_told_with_file_and_byte(lever: Lever, model: Path) -> None:
    done = lever("run", model, "Hello", "--pin", "0", device={"broken": range(150_000, 1 << 20)})

    assert done.returncode == 5
    assert re.search(rf"reading {model} failed at byte \d{{6}}: Input/output error", done.stderr.decode())


def test_a_file_that_may_not_be_read_ends_with_5(lever: Lever, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "secret.gguf")
    path.chmod(0)
    done = lever("run", path, "Hello", before=as_no_root)

    assert done.returncode == 5
    assert "Permission denied" in one_line(done.stderr)


def test_J5_slow_storage_is_told_before_it_is_waited_for_and_progress_shows(lever: Lever, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "deep.gguf", n_layers=36)
    words = ("run", path, "x", "--raw", "-n", "0", "--pin", "0")
    expectation, *progress, _figures = lever(*words, device={"delay_s": 0.8}).stderr.decode().splitlines()

    assert re.fullmatch(r"each token reads .* MiB from flash, about \d+ s at \d MB/s: .*lever doctor", expectation)
    assert progress  # after five seconds, and then now and then
    assert all(re.fullmatch(r"reading the prompt, 1 token: \d+ %, \d+ MB/s", line) for line in progress)


def test_a_full_stdout_ends_with_one_line(lever: Lever, model: Path) -> None:
    for flags in ([], ["--json"]):
        with Path("/dev/full").open("wb") as full, lever.started("run", model, "x", "-q", *flags, stdout=full) as run:
            _, err = run.communicate(timeout=60)
        assert run.returncode == 5
        assert one_line(err) == "lever: cannot write to stdout: No space left on device\n"


def test_a_reader_that_goes_away_ends_it_quietly(lever: Lever, model: Path) -> None:
    with lever.started("run", model, "Hello", "--ignore-eos", "-q") as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_closed_streams_are_no_traceback(lever: Lever, model: Path) -> None:
    line = f"{COMMAND[0]} run {model} -n 1 -s 1"
    codes = {f"{line} Hello >&-": 5, f"{line} <&-": 2, f"{line} Hello 2>&-": 0, f"{line} Hello 2>/dev/full": 0}
    for command, code in codes.items():
        done = subprocess.run(command, shell=True, env=lever.environment, capture_output=True, timeout=60)
        assert done.returncode == code, command
        assert b"Traceback" not in done.stderr


# --- on a terminal ------------------------------------------------------------------------------------------


def on_a_terminal(lever: Lever, *words: str | Path, device: dict[str, Any]) -> tuple[bytes, bytes]:
    """stdout, which is a file, and what a terminal got from stderr."""
    ours, theirs = pty.openpty()
    with lever.started(*words, device=device, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while part := _read(ours):
            shown += part
        assert process.wait(timeout=60) == 0
        assert process.stdout is not None
        return process.stdout.read(), shown


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other side is closed
        return b""


def test_a_terminal_gets_a_line_that_lives_and_stdout_the_text_alone(
    lever: Lever, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    words = ("run", model, "x", "--raw", "-n", "4", "-l", "65+1000", "--pin", "0")
    out, shown = on_a_terminal(lever, *words, device={"delay_s": 0.15})

    assert out == b"AAAA\n"
    assert b"reading the prompt, " in shown
    assert b"3 tokens, " in shown  # how far the answer is that goes elsewhere
    assert not re.search(rb"\x1b\[[0-9;]*\b(3[0-7]|38|9[0-7])\b", shown)


# --- Ctrl-C -------------------------------------------------------------------------------------------------


def test_B2_ctrl_c_while_a_model_is_assembled_leaves_nothing(lever: Lever, tmp_path: Path) -> None:
    part = tmp_path / "home/models/demo.gguf.part"
    with lever.started("pull", "demo") as process:
        wait_until(lambda: part.exists() and part.stat().st_size > 0, seconds=60)
        out, err = interrupt(process)

    assert (process.returncode, out, err) == (130, b"", b"")
    assert list(part.parent.iterdir()) == []


def test_ctrl_c_while_weights_are_loaded_ends_at_once(lever: Lever, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "deep.gguf", n_layers=20)
    with lever.started("run", path, "Hello", "--pin", "100", device={"delay_s": 0.5}) as process:
        notes_until(process, "loading the weights: ")  # after five of about ten seconds
        out, err = interrupt(process)

    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_ctrl_c_while_the_prompt_is_read_prints_figures(lever: Lever, tmp_path: Path, flags: list[str]) -> None:
    path = tiny_model(tmp_path / "deep.gguf", n_layers=20)
    words: list[str | Path] = ["run", path, "x", "--raw", "--pin", "0", "-v", *flags]
    with lever.started(*words, device={"delay_s": 0.5}) as process:
        notes_until(process, "planned: ")  # all is ready, and the reads of a pass take ten seconds
        time.sleep(0.5)
        out, err = interrupt(process)

    assert process.returncode == 130
    assert "0 tokens; " in err.decode()
    if flags:
        document = json.loads(out)
        assert (document["text"], document["tokens"], document["finish_reason"]) == ("", [], None)
        assert document["stats"]["peak_rss_bytes"] > 0
    else:
        assert out == b"\n"


def test_ctrl_c_while_text_comes_keeps_it_and_prints_figures(lever: Lever, model: Path) -> None:
    words = ("run", model, "Hello", "-s", "5", "--ignore-eos")
    with lever.started(*words, "--pin", "0", device={"delay_s": 0.02}) as process:
        assert process.stdout is not None
        first = process.stdout.read(5)
        rest, err = interrupt(process)

    assert process.returncode == 130
    assert re.search(rb"\n?\d+ tokens, \d+\.\d+ a second; prompt of \d+ in .* seed 5\n$", err)
    assert (first + rest).endswith(b"\n")
    whole = lever(*words).stdout
    assert whole.startswith((first + rest)[:-1])
    assert len(whole) > len(first + rest)


def test_ctrl_c_shows_what_was_held_back_for_a_stop_string(lever: Lever, model: Path) -> None:
    words = ("run", model, "Hello", "-l", "65+1000", "--stop", "AAAB", "--pin", "0")  # A, for as long as it goes on
    with lever.started(*words, device={"delay_s": 0.02}) as process:
        assert process.stdout is not None
        first = process.stdout.read(5)
        rest, err = interrupt(process)
    n_tokens = re.match(r"\n?(\d+) tokens, ", err.decode())

    assert n_tokens is not None
    assert first + rest == b"A" * int(n_tokens[1]) + b"\n"


def test_a_second_ctrl_c_ends_at_once_and_the_line_too(lever: Lever, model: Path) -> None:
    words = ("run", model, "x", "--raw", "-l", "65+1000", "--pin", "0", "-q")
    with lever.started(*words, device={"delay_s": 0.3}) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)  # of the third of a second that a layer takes
        rest, err = interrupt(process)

    assert (process.returncode, first + rest, err) == (130, b"A\n", b"")


def test_ctrl_c_that_is_meant_for_others_changes_nothing(lever: Lever, model: Path) -> None:
    """A shell lets what it starts in the background ignore it."""
    ignoring = ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh", *lever._command({"delay_s": 0.02})]
    words = ["run", str(model), "Hello", "-l", "65+1000", "-n", "9", "--pin", "0", "-q"]
    with subprocess.Popen([*ignoring, *words], stdout=subprocess.PIPE, env=lever.environment) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()

    assert (process.returncode, first + rest) == (0, b"A" * 9 + b"\n")


# --- info ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ARCHITECTURES, "spm"])
def test_info_tells_shape_types_and_sizes(lever: Lever, models: Path, name: str) -> None:
    path = models / f"{name}.gguf"
    facts = lever.json("info", path)

    expected = {"layers": 2, "embedding_length": 256, "feed_forward_length": 512, "heads": 4, "kv_heads": 2}
    assert facts.items() >= expected.items()
    assert facts["architecture"] == (name if name in ARCHITECTURES else "llama")
    assert facts["bytes"] == path.stat().st_size
    assert facts["pass_bytes"] == facts["layers_bytes"] + facts["output_projection_bytes"]
    assert facts["tensor_types"].keys() == {"Q4_K", "F32"}
    assert facts["chat_template"] is True
    assert facts["tied_output"] is (name == "spm")
    shown = lever("info", path)
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert all(line == line.rstrip() for line in shown.stdout.decode().splitlines())
    assert re.search(r"^architecture +\w+$", shown.stdout.decode(), re.MULTILINE)


# --- plan and profile ---------------------------------------------------------------------------------------

# The command with a model that is too small for a profile to be worth it taken as worth it.
WORTH_IT = """
import sys
import lever.profile
from lever.cli import main
lever.profile.WORTH = 1
main()
"""


def profiles_of(lever: Lever) -> list[Path]:
    return sorted((Path(lever.environment["LEVER_HOME"]) / "profiles").glob("*"))


def worth_it(lever: Lever, *words: str | Path, script: str = WORTH_IT) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", script, *words]
    done = subprocess.run(command, env=lever.environment, capture_output=True, timeout=120, check=False)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr.decode()
    return done


def test_a_plan_is_what_a_run_does(lever: Lever, model: Path) -> None:
    flags = ("--pin", "50", "--dram", "400MiB", "-c", "300")
    planned = lever.json("plan", model, *flags, "--no-profile")
    stats = lever.json("run", model, "Hello", "-n", "3", *flags)["stats"]

    assert (planned["fits"], planned["n_ctx"], planned["presets"]) == (True, 300, [])
    assert planned["pinned_share"] == stats["pinned_share"]
    assert planned["dram_planned_bytes"] == sum(planned["parts"].values())
    assert planned["dram_planned_bytes"] == pytest.approx(stats["dram_planned_bytes"], abs=6 << 20)
    assert planned["dram_budget_bytes"] == stats["dram_budget_bytes"]
    assert planned["bytes_per_pass"] > 0
    assert profiles_of(lever) == []


def test_a_plan_without_a_profile_makes_a_quick_one_once(lever: Lever, model: Path) -> None:
    first = lever("plan", model, "--pin", "0", "--json")
    again = lever("plan", model, "--pin", "0", "--json")
    (preset,) = json.loads(again.stdout)["presets"]

    assert first.stderr.decode().startswith("measuring this machine with this model, once")
    assert again.stderr == b""
    assert len(profiles_of(lever)) == 1
    assert preset["preset"] == "flash-ar"
    assert preset["tokens_per_s"] == pytest.approx(1 / preset["pass_s"])
    assert preset["limit"] == ("reads" if preset["reads_s"] > preset["compute_s"] else "compute")
    assert json.loads(again.stdout)["profile"]["quick"] is True


def test_a_plan_is_a_table_for_people(lever: Lever, model: Path) -> None:
    shown = lever("plan", model, "--pin", "0", "--no-profile", "--dram", "300MiB")
    text = shown.stdout.decode()

    assert (shown.returncode, shown.stderr) == (0, b"")
    for part in ("Python", "KV cache", "rows and buffers", "pinned layers", "output projection", "ring"):
        assert re.search(rf"^{part} +[\d.]+ (B|KiB|MiB)$", text, re.MULTILINE), part
    assert re.search(r"^together +[\d.]+ MiB +of 300 MiB$", text, re.MULTILINE)
    assert re.search(r"^read in each pass +[\d.]+ \w+ +0 % of the layers stay in DRAM$", text, re.MULTILINE)


def test_what_more_memory_brings_is_told_where_it_brings_something(lever: Lever, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "wide.gguf", n_layers=6, n_ff=2048, type="F32")
    least = lever.json_of(3, "plan", path, "--dram", "10MiB")["dram_least_bytes"]  # by another process, a little larger
    tight = lever.json("plan", path, "--dram", str(least + (1 << 20)), "--no-profile")
    ample = lever.json("plan", path, "--dram", "2GiB", "--no-profile")

    assert tight["more_dram"]["bytes_per_pass"] < tight["bytes_per_pass"]
    assert tight["more_dram"]["pinned_share"] > tight["pinned_share"]
    assert (ample["more_dram"], ample["bytes_per_pass"]) == (None, 0)


def test_a_plan_that_does_not_fit_tells_the_least_that_would_and_ways(lever: Lever, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "wide.gguf", n_layers=12, n_ff=2048, type="F32", context_length=4096)
    greedy = ("-c", "4096", "--pin", "90")
    short = lever.json_of(3, "plan", path, "--dram", "10MiB", *greedy)
    ways = {way["way"]: way["dram_needed_bytes"] for way in short["ways"]}

    assert (short["fits"], short["dram_budget_bytes"]) == (False, 10 << 20)
    assert short["parts"]["KV cache"] > 0
    assert set(ways) == {
        "-c 512",
        "fewer layers pinned: no --pin",
        f"a smaller image: lever pack {path} --type q4_0",
    }
    ring = lever.json_of(3, "plan", path, "--dram", "10MiB", "--ring", "4")
    assert "--ring 3" in {way["way"] for way in ring["ways"]}
    assert all(nbytes is None or 0 < nbytes < short["dram_least_bytes"] for nbytes in ways.values())
    least = ("--dram", str(short["dram_least_bytes"]))
    assert lever("plan", path, *greedy, *least, "--no-profile").returncode == 0
    shown = lever("plan", path, *greedy, "--dram", "10MiB")
    assert shown.returncode == 3
    line = r"^it would fit +(\d+) MiB +with --dram \1MiB$"
    assert re.search(line, shown.stdout.decode(), re.MULTILINE)


def test_a_profile_is_shown_kept_and_drawn(lever: Lever, model: Path, tmp_path: Path) -> None:
    needs("matplotlib")
    found = lever.json("profile", model, "--quick", "--plot", tmp_path / "plot.png")
    (path,) = profiles_of(lever)

    kept = json.loads(path.read_text())
    assert {name: found[name] for name in kept} == kept
    assert found["best_read"].keys() == {"block", "depth"}
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_profile_is_a_table_for_people(lever: Lever, model: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(bytes(1 << 20))
    shown = lever("profile", model, "--quick", "--storage", tmp_path / "other")

    assert re.search(rf"^{BLOCK >> 20} MiB +{DEPTH} +[\d.e+]+ +±\d+ % ", shown.stdout.decode(), re.MULTILINE)
    assert "not kept: the model itself is on this storage" in shown.stderr.decode()
    assert profiles_of(lever) == []


def test_a_small_model_is_run_without_a_profile(lever: Lever, model: Path) -> None:
    assert lever("run", model, "Hello", "-n", "1", "--pin", "0").returncode == 0
    assert profiles_of(lever) == []


def test_a_run_makes_a_profile_once_says_so_in_a_line_and_corrects_it(lever: Lever, model: Path) -> None:
    words = ("run", model, "Hello", "-n", "12", "--ignore-eos", "-s", "1", "--pin", "0")
    without = worth_it(lever, *words, "--no-profile")
    assert profiles_of(lever) == []
    first, second = worth_it(lever, *words), worth_it(lever, *words, "-v")
    (path,) = profiles_of(lever)

    assert first.stdout == second.stdout == without.stdout
    assert [line for line in first.stderr.decode().splitlines() if "measuring this machine" in line]
    assert "measuring this machine" not in second.stderr.decode()
    assert re.search(r"lever: profile of .* threads to start with; a pass should take", second.stderr.decode())
    assert "of what the profile foretold; it is corrected" in second.stderr.decode()
    assert json.loads(path.read_text())["correction"]["runs"] == 2


def test_a_quiet_run_measures_without_a_word(lever: Lever, model: Path) -> None:
    done = worth_it(lever, "run", model, "Hello", "-n", "1", "--pin", "0", "-q")

    assert (done.stderr, len(profiles_of(lever))) == (b"", 1)


def test_a_damaged_profile_is_told_of_and_measured_anew(lever: Lever, model: Path) -> None:
    words = ("run", model, "Hello", "-n", "1", "--pin", "0")
    worth_it(lever, *words)
    (path,) = profiles_of(lever)
    path.write_text("{")
    told = worth_it(lever, *words).stderr.decode()

    assert f"not using the profile {path}: it is no JSON" in told
    assert json.loads(path.read_text())["quick"] is True


def test_a_profile_that_cannot_be_kept_does_not_end_a_run(lever: Lever, model: Path) -> None:
    home = Path(lever.environment["LEVER_HOME"])
    home.mkdir()
    (home / "profiles").touch()
    done = worth_it(lever, "run", model, "Hello", "-n", "1", "--pin", "0")

    assert "cannot keep the profile" in done.stderr.decode()


def test_ctrl_c_ends_a_profile_and_keeps_nothing(lever: Lever, model: Path) -> None:
    with lever.started("profile", model) as process:
        notes_until(process, "measuring ")  # after five of many seconds
        out, err = interrupt(process)

    assert (process.returncode, out, err) == (130, b"", b"")
    assert profiles_of(lever) == []


# --- a draft in plan and profile ----------------------------------------------------------------------------

# The command where the catalogue knows a draft for every model.
WITH_A_PARTNER = """
import dataclasses, sys
import lever.opening as opening
import lever.profile
from lever.cli import main
partner, resolve = sys.argv.pop(1), opening.resolve
opening.resolve = lambda *words, **more: dataclasses.replace(resolve(*words, **more), draft=partner)
lever.profile.WORTH = 1
main()
"""


@pytest.fixture(scope="module")
def partner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model once more, as a draft of its own."""
    return tiny_model(tmp_path_factory.mktemp("partner") / "partner.gguf", arch="qwen2")


def with_a_partner(lever: Lever, draft: Path, *words: str | Path) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", WITH_A_PARTNER, draft, *words]
    done = subprocess.run(command, env=lever.environment, capture_output=True, timeout=120, check=False)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr.decode()
    return done


def test_a_profile_has_the_steps_of_the_draft_and_keeps_them_beside(lever: Lever, model: Path, partner: Path) -> None:
    found = lever.json("profile", model, "--quick", "--draft", partner)
    whole, pair = sorted(profiles_of(lever), key=lambda path: len(path.name))

    assert pair.name.startswith(whole.stem)
    assert json.loads(pair.read_text()) == found["draft"]
    assert [(step["rows"], step["threads"]) for step in found["draft"]["steps"]] == [(1, 1), (2, 1), (4, 1)]
    assert lever.json("profile", model, "--quick", "--draft", partner, "--no-draft")["draft"] is None


def test_a_profile_shows_the_draft_that_goes_with_the_model(lever: Lever, model: Path, partner: Path) -> None:
    shown = with_a_partner(lever, partner, "profile", model, "--quick").stdout.decode()

    assert re.search(r"^NODES +ms A DRAFT STEP, 1 thread$", shown, re.MULTILINE)
    assert re.search(r"^ *4 +[\d.e+-]+ +±\d+ %$", shown, re.MULTILINE)


def test_a_plan_with_a_draft_is_what_a_run_does(lever: Lever, model: Path, partner: Path) -> None:
    flags = ("--pin", "0", "--dram", "400MiB", "-c", "300", "--draft", partner)
    planned = lever.json("plan", model, *flags)
    stats = lever.json("run", model, "Hello", "-n", "3", *flags)["stats"]
    plain, drafted = planned["presets"]

    assert planned["parts"]["draft"] == planned["draft"]["bytes"] > 0
    assert planned["dram_planned_bytes"] == pytest.approx(stats["dram_planned_bytes"], abs=6 << 20)
    assert (plain["preset"], drafted["preset"]) == ("flash-ar", "lever")
    assert drafted["tokens_per_s"] == pytest.approx(drafted["tokens_per_cycle"] / drafted["cycle_s"])
    assert drafted["cycle_s"] == pytest.approx(drafted["pass_s"] + drafted["draft_s"] + drafted["project_s"])
    assert (drafted["first_guesses_right"], drafted["shown_by_runs"]) == (0.83, 0)
    ratio = drafted["tokens_per_s"] / plain["tokens_per_s"]
    assert planned["draft"]["times_as_fast_as_pinned_layers"] == pytest.approx(ratio)


def test_a_plan_says_what_it_assumes_and_what_the_memory_of_the_draft_would_be_better_for(
    lever: Lever, model: Path, partner: Path
) -> None:
    shown = lever("plan", model, "--pin", "0", "--draft", partner, COLUMNS="400").stdout.decode()

    assert re.search(r"^draft +[\d.]+ MiB$", shown, re.MULTILINE)
    assert re.search(r"^flash-ar +[\d.]+ tokens/s .*with layers in the draft's memory$", shown, re.MULTILINE)
    assert re.search(r"^lever +[\d.]+ tokens/s +[\d.]+ tokens in .*; assuming that 83 % of first guesses are right$",
                     shown, re.MULTILINE)  # fmt: skip
    assert re.search(
        r"^memory of the draft +[\d.]+ MiB +(serves best as it is|would serve better)", shown, re.MULTILINE
    )


def with_a_predictor(lever: Lever, model: Path, draft: Path) -> Path:
    """One in the cache that says of all candidates the same."""
    target, beside = (sha256(path.read_bytes()).hexdigest() for path in (model, draft))
    quality = Quality(kept_rows=0.5)
    translator = Translator(layer=0, mix=Mix(1.0, 1.0), threshold=0.2, quality=quality)
    path = Path(lever.environment["LEVER_HOME"]) / "predictors" / predictor_path(target, beside).name
    config = ModelConfig.from_gguf(read(model))
    matrix = np.zeros((config.n_embd, config.n_embd), np.float16)
    write_predictor(path, config, target=target, draft=beside, translators=[translator], matrices=[matrix])
    return path


def test_a_plan_says_what_pruning_would_bring_or_why_it_is_not_used(lever: Lever, model: Path, partner: Path) -> None:
    path = with_a_predictor(lever, model, partner)
    flags = ("--pin", "0", "--draft", partner)
    planned = lever.json("plan", model, *flags)
    stats = lever.json("run", model, "Hello", "-n", "3", *flags)["stats"]
    shown = lever("plan", model, *flags, COLUMNS="400").stdout.decode()

    pruning = planned["pruning"]
    assert (pruning["layer"], pruning["kept"]) == (0, 0.5)
    assert pruning["rows"] == planned["presets"][1]["rows"]
    assert pruning["pays"] == (pruning["gain"] > 1.02)
    assert re.search(r"^pruning +(\+[\d.]+ %|not used) +behind layer 0, 50 % of \d+ rows", shown, re.MULTILINE)
    assert (stats["prune"], stats["predictor"]) == ("auto", str(path))
    assert planned["parts"]["predictor"] > 0
    assert planned["dram_planned_bytes"] == pytest.approx(stats["dram_planned_bytes"], abs=6 << 20)


def test_a_plan_without_a_predictor_or_a_draft_says_nothing_of_pruning(
    lever: Lever, model: Path, partner: Path
) -> None:
    assert lever.json("plan", model, "--pin", "0", "--draft", partner)["pruning"] is None
    with_a_predictor(lever, model, partner)
    assert lever.json("plan", model, "--pin", "0", "--no-draft")["pruning"] is None


def test_runs_show_a_plan_how_often_the_draft_is_right(lever: Lever, model: Path, partner: Path) -> None:
    """The draft is the target itself in another type. It is taken to cost nothing, so that it pays on any machine."""
    flags = ("--pin", "0", "--draft", partner)
    ask = ("run", model, "Hello", *flags, "-n", "300", "--ignore-eos", "--temp", "0", "-v")
    free = WORTH_IT.replace(
        "main()", "import lever.cycle_cost\nlever.cycle_cost.CycleCost.draft_s = lambda *_: 0.0\nmain()"
    )
    without = worth_it(lever, *ask, "--no-draft")
    first, second = (worth_it(lever, *ask, script=free) for _ in range(2))

    assert first.stdout == second.stdout == without.stdout
    assert "measuring the draft, once" in first.stderr.decode()
    assert "measuring" not in second.stderr.decode()
    assert "a cycle: as if" in second.stderr.decode()
    drafted = lever.json("plan", model, *flags)["presets"][1]
    assert drafted["shown_by_runs"] == 2
    assert drafted["first_guesses_right"] != 0.83
    shown = lever("plan", model, *flags, COLUMNS="400").stdout.decode()
    assert re.search(r"; \d+ % of first guesses were right in 2 runs$", shown, re.MULTILINE)


def test_a_named_draft_that_does_not_fit_is_a_part_and_leaving_it_out_a_way(
    lever: Lever, model: Path, partner: Path
) -> None:
    short = lever.json_of(3, "plan", model, "--dram", "10MiB", "--draft", partner)
    alone = lever.json_of(3, "plan", model, "--dram", "10MiB")
    ways = {way["way"]: way["dram_needed_bytes"] for way in short["ways"]}

    assert short["parts"]["draft"] > 0
    assert ways["--no-draft"] < short["dram_least_bytes"]
    assert "--no-draft" not in {way["way"] for way in alone["ways"]}
    least = ("--dram", str(short["dram_least_bytes"] + (4 << 20)))
    assert lever("plan", model, "--draft", partner, *least, "--no-profile").returncode == 0


def test_a_draft_that_nobody_named_is_left_out_of_a_plan_where_it_has_no_room(
    lever: Lever, model: Path, tmp_path: Path
) -> None:
    large = tiny_model(tmp_path / "large.gguf", arch="qwen2", n_layers=12, n_ff=2048)
    alone = lever.json_of(3, "plan", model, "--dram", "10MiB")
    flags = ("--dram", str(alone["dram_least_bytes"] + (4 << 20)), "--no-profile", "--json")
    ample = with_a_partner(lever, large, "plan", model, "--dram", "1GiB", "--no-profile", "--json")
    tight = with_a_partner(lever, large, "plan", model, *flags)

    assert "draft" in json.loads(ample.stdout)["parts"]
    assert "draft" not in json.loads(tight.stdout)["parts"]
    assert json.loads(tight.stdout)["draft"] is None
    assert f"going on without the draft {large}: the budget does not hold it as well" in tight.stderr.decode()


def test_a_draft_that_cannot_be_measured_does_not_end_a_run(lever: Lever, model: Path, partner: Path) -> None:
    mute = "import lever.draft\nlever.draft.Draft._likeliest = lambda _self, _logits, _t: []\nmain()"
    words = ("run", model, "Hello", "-n", "4", "--pin", "0", "--temp", "0")
    done = worth_it(lever, *words, "--draft", partner, script=WORTH_IT.replace("main()", mute))

    assert f"nothing is known of the draft {partner}: the draft guesses nothing" in done.stderr.decode()
    assert done.stdout == worth_it(lever, *words).stdout
