"""The command line without a model: words, flags, variables, help, errors, and the models on disk."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from lever.cli import app, main
from lever.cli.console import Bar, NoteHandler, note, write, write_json
from lever.cli.options import parse_logit_bias, variable
from lever.cli.run import choose
from lever.cli.showing import guessing
from lever.errors import StorageError, UsageError
from lever.grammar import Grammar
from lever.models.cache import place_hash
from lever.stats import RunStats
from tests.lacking import needs

COMMAND: Any = typer.main.get_command(app)
VERBS = tuple(COMMAND.commands)
OF_ONE_CALL = {  # of one image or measurement, never of all
    "pack": {"--out", "--type", "--layout", "--verify", "--force"},
    "profile": {"--storage", "--quick", "--plot"},
    "bench": {"--presets", "--prompts", "--limit", "--rounds", "--peer", "--peer-cage", "--json", "--plot"},
    "train-predictor": {"--text", "--prompts", "--positions", "--layers", "--output"},
}
NO_VARIABLE = {"--help", "--version", "--install-completion", "--show-completion"}


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The only line on stderr."""
        assert self.err.count("\n") == 1
        assert self.err.endswith("\n")
        return self.err[:-1]


Lever = Callable[..., Ended]


@pytest.fixture
def lever(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Lever:
    """Run the command in this process: words, what stdin holds, variables."""
    for name in [name for name in os.environ if name.startswith("LEVER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LEVER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: str, stdin: str | None = "", **variables: str) -> Ended:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["lever", *words])
            patch.setattr(sys, "stdin", None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin.encode())))
            for name, value in variables.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main()
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, out, err)

    return run


def options_of(verb: str) -> list[Any]:
    return [p for p in COMMAND.commands[verb].params if p.param_type_name == "option"]


def flag_of(option: Any) -> str:
    return next(str(name) for name in option.opts if name.startswith("--"))


# --- help ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_fits_80_columns_and_cuts_no_word(lever: Lever, verb: str) -> None:
    shown = lever(*verb.split(), "--help")

    assert (shown.code, shown.err) == (0, "")
    assert max(len(line) for line in shown.out.splitlines()) <= 80
    assert "…" not in shown.out


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_shows_examples_as_lines_of_their_own(lever: Lever, verb: str) -> None:
    lines = [line.strip() for line in lever(verb, "-h").out.splitlines()]

    assert any(line.startswith(f"lever {verb}") for line in lines)


def test_help_of_run_shows_its_examples_whole(lever: Lever) -> None:
    lines = [line.strip() for line in lever("run", "-h").out.splitlines()]

    assert 'lever run demo "Why is the sky blue?"' in lines
    assert "cat notes.txt | lever run hf:owner/repo:Q4_K_M --json -s 42" in lines


def test_help_of_run_names_the_defaults(lever: Lever) -> None:
    text = " ".join(re.sub(r"[│\s]+", " ", lever("run", "--help").out).split())

    named = ["demo", "auto", "as many as fit", "the performance cores"]
    for default in [*named, 512, 3, -1, 0.8, 40, 0.95, 0.05, 1.0, 64, 0.0]:
        assert f"[default: {default}]" in text, default
    assert "[default: 4096, or what model and budget allow]" in text


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_names_every_flag_and_says_what_it_does(lever: Lever, verb: str) -> None:
    text = lever(verb, "-h").out

    for option in options_of(verb):
        assert option.help
        assert all(name in text for name in option.opts)
        assert "bool" not in text  # a switch has no type


def test_h_is_help_and_lever_alone_shows_it_too(lever: Lever) -> None:
    long, short, alone = lever("--help"), lever("-h"), lever()

    assert long.out.split() == short.out.split() == alone.out.split()
    assert (alone.code, alone.err) == (2, "")
    assert all(verb in alone.out for verb in VERBS)


def test_help_tells_exit_codes_and_variables(lever: Lever) -> None:
    text = " ".join(lever("-h").out.split())

    for code in ("0 ok", "1 run error", "2 usage", "3 does not fit", "4 bad or unsupported file", "5 I/O", "130"):
        assert code in text
    assert "LEVER_TOP_K" in text


def test_help_and_completion_load_no_heavy_module() -> None:
    heavy = {"numpy", "jinja2", "tokenizers", "huggingface_hub", "prompt_toolkit"}
    code = (
        "import sys; from lever.cli import main\n"
        "try: main()\n"
        f"except SystemExit: print(sorted({heavy} & sys.modules.keys()))"
    )
    for words, variables in ((["-h"], {}), ([], {"_LEVER_COMPLETE": "complete_bash", "COMP_WORDS": "lever r"})):
        command = [sys.executable, "-c", code, *words]
        environment = {**os.environ, **variables, "COMP_CWORD": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.endswith("[]\n")


def test_version_tells_both_versions(lever: Lever) -> None:
    shown = lever("--version")

    assert shown.code == 0
    assert re.fullmatch(r"lever \d+\.\d+\.\d+ \(ggml 0\.20\.2 in \S+\)\n", shown.out)


# --- flags and variables ------------------------------------------------------------------------------------

VALUES = {
    "--model": "other",
    "--prompt": "a question",
    "--system": "be brief",
    "--raw": True,
    "--dram": "1GiB",
    "--pin": "25",
    "--ctx-size": "100",
    "--batch-size": "7",
    "--threads": "5",
    "--ring": "4",
    "--layout": "repacked",
    "--no-image": True,
    "--draft": "small.gguf",
    "--device": "vulkan0",
    "--draft-device": "rpc:host:50052",
    "--no-draft": True,
    "--preset": "chain-sd",
    "--tree-attention": "masked",
    "--no-profile": True,
    "--max-tokens": "9",
    "--seed": "42",
    "--temp": "0.5",
    "--top-k": "7",
    "--top-p": "0.5",
    "--min-p": "0.25",
    "--repeat-penalty": "1.5",
    "--repeat-last-n": "8",
    "--presence-penalty": "0.5",
    "--frequency-penalty": "0.25",
    "--logit-bias": "5+1",
    "--stop": "two words\n",
    "--ignore-eos": True,
    "--json-schema": '{"type": "boolean"}',
    "--grammar": 'root ::= "a"',
    "--json": True,
    "--predictor": "p.gguf",
    "--prune": "paper",
    "--offline": True,
    "--quiet": True,
}
DRAM = ["--dram", "2GiB"]


@pytest.fixture
def asked(lever: Lever, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sequence[Any]]:
    """What `lever run` would have asked of the model."""
    calls: list[Sequence[Any]] = []

    def answer(*arguments: Any) -> int:
        calls.append(arguments)
        return 0

    monkeypatch.setattr("lever.cli.answer.answer", answer)
    monkeypatch.setattr("secrets.randbits", lambda _bits: 4711)

    def run(*words: str, stdin: str = "from stdin", **variables: str) -> Sequence[Any]:
        ended = lever("run", *words, stdin=stdin, **variables)
        assert (ended.code, ended.out, ended.err) == (0, "", "")
        return calls.pop()

    return run


@pytest.mark.parametrize("flag", [flag_of(option) for option in options_of("run") if flag_of(option) != "--verbose"])
def test_a_flag_of_run_and_its_variable_say_the_same(
    asked: Callable[..., Sequence[Any]], tmp_path: Path, flag: str
) -> None:
    for name, content in (("prompt", "from a file"), ("schema", '{"type": "null"}'), ("grammar", 'root ::= "b"')):
        (tmp_path / name).write_text(content)
    if "schema" in flag or "grammar" in flag:
        needs("llguidance")
    files = {"--file": "prompt", "--json-schema-file": "schema", "--grammar-file": "grammar"}
    value = str(tmp_path / files[flag]) if flag in files else VALUES[flag]
    words, of_variable = ([flag], "1") if value is True else ([flag, str(value)], str(value))
    fixed = [] if flag == "--dram" else DRAM  # left alone, it depends on what is free now

    by_flag = asked(*fixed, *words)
    by_variable = asked(*fixed, **{variable(flag): of_variable})

    assert by_flag == by_variable != asked(*DRAM)


@pytest.mark.parametrize("verb", VERBS)
def test_every_flag_of_every_verb_has_its_variable(verb: str) -> None:
    for option in options_of(verb):
        flag = flag_of(option)
        if flag in NO_VARIABLE | {"--stop"}:  # LEVER_STOP is read as one text, see above
            continue
        if flag in OF_ONE_CALL.get(verb, ()):
            assert option.envvar is None
        else:
            assert option.envvar == variable(flag)


@pytest.mark.usefixtures("asked")
def test_verbose_is_a_flag_of_lever_and_of_run_and_a_variable(lever: Lever) -> None:
    logger = logging.getLogger("lever")
    for words, variables in ((["-v", "run"], {}), (["run", "-v"], {}), (["run"], {"LEVER_VERBOSE": "1"})):
        logger.setLevel(logging.NOTSET)
        assert lever(*words, "demo", "hi", **variables).code == 0
        assert logger.level == logging.INFO
    logger.setLevel(logging.NOTSET)


def test_a_variable_for_a_switch_may_say_no(asked: Callable[..., Sequence[Any]]) -> None:
    *_, output = asked(LEVER_JSON="0", LEVER_QUIET="false")

    assert not output.json
    assert not output.quiet


def test_an_empty_variable_is_none(asked: Callable[..., Sequence[Any]]) -> None:
    assert asked(*DRAM, LEVER_TEMP="", LEVER_STOP="", LEVER_PROMPT="") == asked(*DRAM)


def test_the_command_line_wins_over_variables(asked: Callable[..., Sequence[Any]]) -> None:
    question, _, request, _ = asked(
        "-p", "typed", "--temp", "0", LEVER_PROMPT="set", LEVER_TEMP="1", LEVER_FILE="/none"
    )

    assert (question.text, request.sampler.temperature) == ("typed", 0.0)


def test_the_sampling_defaults_are_those_of_llama_cpp(asked: Callable[..., Sequence[Any]]) -> None:
    sampler = asked()[2].sampler

    assert (sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p) == (0.8, 40, 0.95, 0.05)
    assert (sampler.repeat_penalty, sampler.repeat_last_n, sampler.seed) == (1.0, 64, 4711)


def test_stop_and_logit_bias_may_be_given_often(asked: Callable[..., Sequence[Any]]) -> None:
    request = asked("--stop", "a", "--stop", "b c", "-l", "1+2", "-l", "3-inf")[2]

    assert list(request.stops) == ["a", "b c"]
    assert dict(request.sampler.logit_bias) == {1: 2.0, 3: -float("inf")}


def test_minus_one_new_tokens_is_no_limit_and_zero_is_none_at_all(asked: Callable[..., Sequence[Any]]) -> None:
    assert [asked("-n", n)[2].max_new_tokens for n in ("-1", "0", "1")] == [None, 0, 1]


def test_a_schema_or_a_grammar_comes_in_words_or_from_a_file(
    asked: Callable[..., Sequence[Any]], tmp_path: Path
) -> None:
    needs("llguidance")
    schema, rules = '{"type": "array"}', 'root ::= "é"\n'
    (tmp_path / "schema").write_text(schema)
    (tmp_path / "rules").write_text(rules)
    for flag, text, name, same in (
        ("-j", schema, "schema", Grammar.from_json_schema(json.loads(schema))),
        ("--grammar", rules, "rules", Grammar.from_text(rules)),
    ):
        file_flag = {"-j": "-jf"}.get(flag, f"{flag}-file")
        for words in ((flag, text), (file_flag, str(tmp_path / name))):
            _, settings, request, _ = asked(*words)
            assert request.constraint == same
            assert settings.grammars
    _, settings, request, _ = asked()
    assert (settings.grammars, request.constraint) == (False, None)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("-j", "{}", "--grammar", "x"), 2, "use one of --json-schema and --grammar"),
        (("-j", "{"), 2, "is no JSON"),
        (("-j", '{"type": "thing"}'), 2, "cannot be used"),
        (("--grammar", "x ::= y"), 2, "no rule root"),
        (("--grammar", ""), 2, "no rule root"),
        (("-j", "{}", "--ignore-eos"), 2, "leave out --ignore-eos"),
        (("-jf", "/no/such"), 5, "cannot read the JSON schema from /no/such"),
        (("--grammar-file", "/no/such"), 5, "cannot read the grammar from /no/such"),
    ],
)
def test_a_constraint_that_makes_no_sense_is_refused_before_a_model_is_looked_for(
    lever: Lever, words: Sequence[str], code: int, says: str
) -> None:
    needs("llguidance")
    ended = lever("run", "nowhere.gguf", "Hello", *words)
    assert (ended.code, ended.out) == (code, "")
    assert says in ended.line


@pytest.mark.parametrize("item", ["", "5", "5=1", "a+1", "5+x", "-5+1", "5+1,6+1"])
def test_a_bad_logit_bias_is_refused(item: str) -> None:
    with pytest.raises(UsageError, match="is not ID"):
        parse_logit_bias([item])


# --- the model and the prompt -------------------------------------------------------------------------------

F = Path("file")
SET: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("words", "flags", "typed", "chosen"),
    [
        ((None, None), (None, None, None), SET, ("demo", None)),
        (("a.gguf", None), (None, None, None), SET, ("a.gguf", None)),
        (("a.gguf", "hi"), (None, None, None), SET, ("a.gguf", "hi")),
        (("a.gguf", "-"), (None, None, None), SET, ("a.gguf", "-")),
        (("hi", None), ("a.gguf", None, None), ["model"], ("a.gguf", "hi")),
        (("hi there", None), ("a.gguf", None, None), SET, ("a.gguf", "hi there")),
        (("a.gguf", None), (None, "hi", None), ["prompt"], ("a.gguf", "hi")),
        (("a.gguf", None), (None, None, F), ["file"], ("a.gguf", F)),
        (("a.gguf", None), (None, "hi", None), SET, ("a.gguf", "hi")),
        (("a.gguf", None), ("b.gguf", "hi", None), ["prompt"], ("a.gguf", "hi")),
        (("a.gguf", "hi"), ("b.gguf", "ho", F), SET, ("a.gguf", "hi")),
        ((None, None), ("b.gguf", "ho", F), ["file"], ("b.gguf", F)),
        ((None, None), (None, "", None), ["prompt"], ("demo", "")),
    ],
)
def test_words_flags_and_variables_name_model_and_prompt(
    words: tuple[Any, Any], flags: tuple[Any, Any, Any], typed: Sequence[str], chosen: tuple[Any, Any]
) -> None:
    assert choose(*words, *flags, typed) == chosen


@pytest.mark.parametrize(
    ("words", "flags", "typed", "says"),
    [
        (("a", "hi"), ("b", None, None), ["model"], "the model is given twice"),
        (("a", "hi"), (None, "ho", None), ["prompt"], "the prompt is given twice"),
        ((None, None), (None, "ho", F), ["prompt", "file"], "the prompt is given twice"),
        ((None, None), (None, "ho", F), SET, "the prompt is given twice"),
        (("Why is that?", None), (None, None, None), SET, "'Why is that\\?' is no model"),
    ],
)
def test_what_is_given_twice_or_in_the_wrong_place_is_refused(
    words: tuple[Any, Any], flags: tuple[Any, Any, Any], typed: Sequence[str], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        choose(*words, *flags, typed)


@pytest.mark.parametrize("words", [["-"], ["-p", "-"], ["-f", "-"], []])
def test_stdin_is_a_prompt_without_the_line_break_at_its_end(
    asked: Callable[..., Sequence[Any]], words: list[str]
) -> None:
    model = ["-m", "demo"] if words == ["-"] else []
    assert asked(*model, *words, stdin="two\nlines\n\n")[0].text == "two\nlines\n"


def test_a_file_with_bytes_that_are_no_utf_8_is_a_prompt(asked: Callable[..., Sequence[Any]], tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")

    assert asked("-f", str(tmp_path / "latin"))[0].text == "caf\udce9"


# --- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--bogus"], 2, "No such option: --bogus"),
        (["bogus"], 2, "No such command 'bogus'"),
        (["rum"], 2, "Did you mean 'rm', 'run'"),
        (["run", "--bogus"], 2, "No such option: --bogus"),
        (["run", "demo", "Why", "not?"], 2, "unexpected extra argument"),
        (["run", "demo", "hi", "-n"], 2, "'-n' requires an argument"),
        (["run", "demo", "hi", "-n", "many"], 2, "valid integer"),
        (["run", "demo", "hi", "-n", "-2"], 2, "max-tokens is -2"),
        (["run", "demo", "hi", "-t", "0"], 2, "threads is 0"),
        (["run", "demo", "hi", "-c", "0"], 2, "ctx-size is 0"),
        (["run", "demo", "hi", "-b", "0"], 2, "batch-size is 0"),
        (["run", "demo", "hi", "--ring", "2"], 2, "ring is 2"),
        (["run", "demo", "hi", "--pin", "101"], 2, "pin is 101"),
        (["run", "demo", "hi", "--pin", "nan"], 2, "pin is nan"),
        (["run", "demo", "hi", "--temp", "nan"], 2, "temperature is nan"),
        (["run", "demo", "hi", "--top-p", "-1"], 2, "top_p is -1"),
        (["run", "demo", "hi", "-s", "-2"], 2, "seed is -2"),
        (["run", "demo", "hi", "-s", str(2**64)], 2, "seed is"),
        (["run", "demo", "hi", "--dram", "much"], 2, "'much' is not an amount of memory"),
        (["run", "demo", "hi", "--dram", "0"], 2, "no memory at all"),
        (["run", "demo", "hi", "--layout", "odd"], 2, "'odd' is not one of"),
        (["run", "demo", "hi", "--tree-attention", "odd"], 2, "'odd' is not one of"),
        (["run", "demo", "hi", "--stop", ""], 2, "a stop string is empty"),
        (["run", "demo", "hi", "-l", "7"], 2, "'7' is not ID"),
        (["run", "demo", "hi", "-l", "7+inf"], 2, "finite number or -inf"),
        (["run", "demo", ""], 2, "the prompt is empty"),
        (["run", "demo"], 2, "the prompt is empty"),
        (["run", "dmeo", "hi"], 2, "did you mean demo?"),
        (["run", "demo", "-f", "/none"], 5, "/none: No such file"),
        (["run", "demo", "-f", "/tmp"], 5, "/tmp: Is a directory"),
        (["run", "/none.gguf", "hi"], 5, "/none.gguf: cannot be read: No such file"),
        (["run", "/", "hi"], 5, "/: is not a regular file"),
        (["info", "none.gguf"], 5, "none.gguf: cannot be read"),
        (["plan", "none.gguf"], 5, "none.gguf: cannot be read"),
        (["plan", "none.gguf", "--pin", "101"], 2, "pin is 101"),
        (["plan", "dmeo"], 2, "did you mean demo?"),
        (["profile", "none.gguf"], 5, "none.gguf: cannot be read"),
        (["profile", "none.gguf", "--ring", "2"], 2, "ring is 2"),
        (["profile", "none.gguf", "--plot", "plot.txt"], 2, "plot.txt: a plot ends in .png, .svg or .pdf"),
        (["bench", "none.gguf", "--presets", "flash-ar"], 5, "none.gguf: cannot be read"),
        (["bench", "none.gguf"], 2, "the preset lever needs a draft: give a model with --draft"),
        (["bench", "demo", "--presets", "lever,leaver"], 2, "no preset 'leaver': there are flash-ar"),
        (["bench", "demo", "--presets", "lever,lever"], 2, "the preset lever is given twice"),
        (["bench", "demo", "-n", "1"], 2, "max-tokens is 1: to measure speed it must be at least 2"),
        (["bench", "demo", "-n", "-1"], 2, "max-tokens is -1"),
        (["bench", "demo", "--limit", "0"], 2, "should be greater than or equal to 1"),
        (["bench", "demo", "--rounds", "0"], 2, "should be greater than or equal to 1"),
        (["bench", "demo", "--prompts", "/none"], 5, "cannot read the prompts from /none: No such file"),
        (["bench", "demo", "--json", "/none/x.json"], 5, "cannot write to /none/x.json"),
        (["bench", "demo", "--json", "/tmp"], 5, "cannot write to /tmp"),
        (["bench", "demo", "--plot", "plot.txt"], 2, "plot.txt: a plot ends in .png, .svg or .pdf"),
        (["bench", "demo", "--peer", "other"], 2, "'other' is not"),
        (["bench", "demo", "--peer-cage", "1GB"], 2, "name it with --peer"),
        (["bench", "demo", "--peer", "llama.cpp", "--peer-cage", "big"], 2, "'big' is not an amount of memory"),
        (["bench", "demo", "--dram", "10MiB"], 3, "raw reads alone take 64 MiB"),
        (["pack", "none.gguf"], 5, "none.gguf: cannot be read"),
        (["pack", "none.gguf", "--verify"], 5, "none.gguf: cannot be read"),
        (["pack", "/"], 5, "/: is not a regular file"),
        (["pack", "demo", "--type", "q9"], 2, "'q9' is not one of"),
        (["pack", "demo", "--layout", "repacked"], 2, "'repacked' is not one of"),
        (["pack", "demo", "-t", "0"], 2, "threads is 0"),
        (["pack", "demo", "-t", "513"], 2, "threads is 513"),
        (["pull", "./none.gguf"], 5, "no such file"),
        (["pull", "hf:one-word"], 2, "write hf:owner/repo"),
        (["rm"], 2, "Missing argument 'MODEL'"),
        (["rm", "demo"], 2, "no model 'demo' in the cache"),
        (["doctor", "dmeo"], 2, "did you mean demo?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_is_one_line_and_an_exit_code(lever: Lever, words: list[str], code: int, says: str) -> None:
    ended = lever(*words)

    assert (ended.code, ended.out) == (code, "")
    assert ended.line.startswith("lever: ")
    assert says in ended.line


def test_a_plot_without_its_package_names_the_extra(lever: Lever, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lever.plots.find_spec", lambda _name: None)
    ended = lever("profile", "none.gguf", "--plot", "plot.png")

    assert ended.code == 2
    assert "pip install 'lever-llm[plots]'" in ended.line


def test_a_peer_without_its_package_names_the_extra(lever: Lever, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lever.peer.find_spec", lambda _name: None)
    ended = lever("bench", "none.gguf", "--peer", "llama.cpp")

    assert ended.code == 2
    assert "pip install 'lever-llm[bench]'" in ended.line


def test_a_usage_error_points_at_the_help_of_its_verb(lever: Lever) -> None:
    assert lever("info", "--bogus").line.endswith("(see lever info -h)")


@pytest.mark.parametrize(("name", "value"), [("LEVER_TEMP", "hot"), ("LEVER_RAW", "perhaps"), ("LEVER_LAYOUT", "odd")])
def test_a_bad_variable_is_named(lever: Lever, name: str, value: str) -> None:
    ended = lever("run", "demo", "hi", **{name: value})

    assert ended.code == 2
    assert ended.line.startswith(f"lever: {name}: ")


def test_without_stdin_and_prompt_an_example_is_shown(lever: Lever) -> None:
    ended = lever("run", "demo", stdin=None)

    assert ended.code == 2
    assert 'lever run demo "Why is the sky blue?"' in ended.line


def test_a_closed_stdin_that_is_asked_for_is_an_io_error(lever: Lever) -> None:
    ended = lever("run", "demo", "-", stdin=None)

    assert ended.code == 5
    assert "stdin is closed" in ended.line


def test_control_characters_of_a_name_do_not_reach_the_terminal(lever: Lever) -> None:
    ended = lever("run", "\x1b[31m:smile:\n\udcff.gguf", "hi")

    assert ended.line.startswith("lever: \\x1b[31m:smile:\\n\\udcff.gguf: ")


@pytest.mark.parametrize(
    ("error", "code"), [(OSError(12, "Cannot allocate memory"), 5), (MemoryError(), 3), (KeyboardInterrupt(), 130)]
)
def test_what_the_system_says_is_no_traceback(
    lever: Lever, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("lever.models.list_models", fail)
    ended = lever("list")

    assert (ended.code, ended.out) == (code, "")
    assert ended.err.count("\n") == (code != 130)


# --- the models on this machine -----------------------------------------------------------------------------


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    models = tmp_path / "home/models"
    models.mkdir(parents=True)
    (models / "small.gguf").write_bytes(b"GGUF" + bytes(1020))
    (models / f"{'long' * 30}.gguf").write_bytes(bytes(3 << 20))
    (models / "half.gguf.part").write_bytes(bytes(9))
    image = tmp_path / f"home/images/small-{place_hash(models / 'small.gguf')[:12]}.gguf"
    image.parent.mkdir()
    image.write_bytes(bytes(2048))
    return models


def test_list_shows_whole_models_one_a_line(lever: Lever, cached: Path) -> None:
    shown = lever("list")
    heading, *rows = shown.out.splitlines()

    assert (shown.code, shown.err) == (0, "")
    assert heading.split() == ["NAME", "SIZE", "IMAGE", "SOURCE", "PATH"]
    assert [row.split()[:-1] for row in rows] == [
        ["long" * 30, "3", "MiB", "-", "lever"],
        ["small", "1", "KiB", "2", "KiB", "lever"],
    ]
    assert all(row.endswith(".gguf") and str(cached) in row for row in rows)


def test_list_is_json_on_request(lever: Lever, cached: Path) -> None:
    small = {"name": "small", "path": str(cached / "small.gguf"), "bytes": 1024, "source": "lever"}
    (image,) = (cached.parent / "images").iterdir()
    small |= {"images": [str(image)], "image_bytes": 2048}

    assert small in json.loads(lever("list", "--json").out)
    assert small in json.loads(lever("list", LEVER_JSON="1").out)


def test_an_empty_list_says_how_to_fill_it(lever: Lever) -> None:
    ended = lever("list")

    assert (ended.code, ended.out) == (0, "")
    assert "lever pull demo" in ended.line
    assert lever("list", "--json").out == "[]\n"


def test_rm_deletes_what_it_is_told_and_nothing_else(lever: Lever, cached: Path) -> None:
    assert lever("rm", "small").line == "removed small and its flash images, 3 KiB freed"
    assert list((cached.parent / "images").iterdir()) == []
    assert sorted(path.name for path in cached.iterdir()) == ["half.gguf.part", f"{'long' * 30}.gguf"]
    assert lever("rm", "../home/models/half.gguf.part").code == 2


def test_pull_of_a_path_that_is_there_names_it(lever: Lever, cached: Path) -> None:
    path = str(cached / "small.gguf")

    assert lever("pull", path) == Ended(0, f"{path}\n", "")


def test_pull_brings_the_pair_and_tells_the_licence(
    lever: Lever, monkeypatch: pytest.MonkeyPatch, cached: Path
) -> None:
    monkeypatch.setattr("lever.models.assemble.assembled", lambda entry, _progress: cached / f"{entry.name}.gguf")
    for name in ("demo", "demo-draft"):
        (cached / f"{name}.gguf").touch()
    ended = lever("pull")

    assert ended.out == f"{cached}/demo.gguf\n{cached}/demo-draft.gguf\n"
    assert [line.partition(":")[0] for line in ended.err.splitlines()] == ["demo", "demo-draft"]
    assert all("Apache-2.0" in line for line in ended.err.splitlines())


# --- what is written, and where -----------------------------------------------------------------------------


def test_notes_are_lines_without_markup_colour_or_breaks(capfd: pytest.CaptureFixture[str]) -> None:
    note("[bold]x[/bold] " + "word " * 50 + "end")

    out, err = capfd.readouterr()
    assert (out, err) == ("", "[bold]x[/bold] " + "word " * 50 + "end\n")


def test_json_is_utf_8_whatever_a_path_holds(capfd: pytest.CaptureFixture[str]) -> None:
    write_json({"path": "\udcff", "text": "é漢"})

    out = capfd.readouterr().out
    assert out == '{"path": "\\udcff", "text": "é漢"}\n'
    assert json.loads(out)["path"] == "\udcff"


def test_a_logged_failure_is_told_with_the_way_that_led_there(capfd: pytest.CaptureFixture[str]) -> None:
    log = logging.Logger("nobody's")
    log.addHandler(NoteHandler())
    try:
        raise KeyError("left out")
    except KeyError:
        log.exception("an answer failed")

    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "lever: an answer failed"
    assert "in test_a_logged_failure" in "".join(lines)
    assert lines[-1] == "KeyError: 'left out'"


def test_a_closed_stdout_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)

    with pytest.raises(StorageError, match="stdout is closed"):
        write("text")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds; tests set it."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_without_a_terminal_a_long_job_says_so_in_ever_fewer_lines(
    capfd: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    bar = Bar()
    bar.start(400, "fetching")
    said = []
    for second in range(400):
        clock[0] = float(second)
        bar.advance(1)
        if capfd.readouterr().err:
            said.append(second)

    assert said == [5, 10, 20, 40, 80, 140, 200, 260, 320, 380]


def test_a_line_of_progress_tells_the_share(capfd: pytest.CaptureFixture[str], clock: list[float]) -> None:
    bar = Bar()
    bar.start(200, "fetching")
    clock[0] = 6.0
    bar.advance(50)
    bar.finish()
    clock[0] = 60.0
    bar.tell("too late")

    assert capfd.readouterr() == ("", "fetching: 25 %\n")


def test_a_job_of_unknown_size_is_told_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    Bar().start(0, "waiting for another lever")

    assert capfd.readouterr().err == "waiting for another lever\n"


def test_a_quiet_bar_says_nothing(capfd: pytest.CaptureFixture[str], clock: list[float]) -> None:
    bar = Bar(quiet=True)
    bar.start(0, "waiting")
    bar.start(100, "fetching")
    clock[0] = 100.0
    bar.advance(1)
    bar.tell("still here")

    assert capfd.readouterr() == ("", "")


# --- the line of figures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stats", "says"),
    [
        (RunStats(new_tokens=41, cycles=10, draft="demo:draft"), ["4.0 a pass with demo:draft"]),
        (RunStats(new_tokens=41, cycles=10, plain_cycles=5, draft="lookup"), ["4.0 a pass with lookup"]),
        (
            RunStats(new_tokens=13, cycles=10, plain_cycles=8, draft="demo:draft"),
            ["no guess in 80 % of the passes: plain decoding is faster here"],
        ),
        (
            RunStats(new_tokens=13, cycles=10, plain_cycles=10, draft="lookup"),
            ["no guess in 100 % of the passes: the text repeats nothing"],
        ),
        (
            RunStats(new_tokens=41, cycles=10, verified=80, pruned=20, draft="demo:draft"),
            ["4.0 a pass with demo:draft, 25 % of its guesses pruned"],
        ),
        (
            RunStats(new_tokens=41, cycles=10, verified=80, pruned_cycles=4, draft="demo:draft"),
            ["4.0 a pass with demo:draft"],
        ),
        (
            RunStats(new_tokens=41, cycles=10, verified=80, pruned_cycles=4, prune="auto", draft="demo:draft"),
            ["4.0 a pass with demo:draft, none of its guesses pruned: that would save no time"],
        ),
        (
            RunStats(new_tokens=41, cycles=10, verified=80, prune="paper", draft="demo:draft"),
            ["4.0 a pass with demo:draft"],
        ),
        (RunStats(new_tokens=11, cycles=10, plain_cycles=10), []),  # nobody wanted any
        (RunStats(new_tokens=1, draft="demo:draft"), []),  # no pass
    ],
)
def test_figures_tell_what_guessing_brought_or_that_it_was_left(stats: RunStats, says: list[str]) -> None:
    assert guessing(stats) == says
