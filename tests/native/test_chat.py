"""`lever chat` in processes of its own, on tiny models: piped, and on a terminal that a test types on and looks at."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyte
import pytest

from tests.command import COMMAND, ON_A_DEVICE, Lever, interrupt, notes_until, one_line
from tests.tiny import tiny_model

MOST_S = 60.0  # that anything on a terminal may take
A = ("-l", "65+1000")  # an answer of nothing but A
UP, ALT_ENTER, CTRL_C, CTRL_D, TAB = "\x1b[A", "\x1b\r", "\x03", "\x04", "\t"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "qwen2.gguf", arch="qwen2")


class Terminal:
    """A terminal with a process on it: what is shown, and keys."""

    def __init__(self, ours: int, process: subprocess.Popen[bytes], columns: int, rows: int) -> None:
        self.process = process
        self.raw = b""
        self._ours, self._screen = ours, pyte.HistoryScreen(columns, rows, history=1000)
        self._stream = pyte.ByteStream(self._screen)

    @property
    def text(self) -> str:
        """What is shown now, without the blanks at the ends of lines and of the screen."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    def type(self, *keys: str) -> None:
        os.write(self._ours, "".join(keys).encode())

    def until(self, shown: str | Callable[[str], object]) -> str:
        """Wait for what a pattern finds, or what holds, in what is shown; that."""
        holds = shown if callable(shown) else re.compile(shown, re.MULTILINE).search
        end = time.monotonic() + MOST_S
        while not holds(self.text):
            assert time.monotonic() < end, f"no {shown!r} in:\n{self.text}"
            if not self._take(0.2):
                assert holds(self.text), f"it ended, and there is no {shown!r} in:\n{self.text}"
        return self.text

    def ended(self) -> int:
        """Wait for the process to end; its exit code."""
        end = time.monotonic() + MOST_S
        while self._take(0.2):
            assert time.monotonic() < end, f"it goes on:\n{self.text}"
        code = self.process.wait(MOST_S)
        assert "Traceback" not in self.raw.decode(errors="replace"), self.text
        return code

    def _take(self, seconds: float) -> bool:
        """Whatever is written within this time; whether more may come."""
        if not select.select([self._ours], [], [], seconds)[0]:
            return True
        try:
            part = os.read(self._ours, 1 << 16)
        except OSError:  # nobody has the other side open
            return False
        self.raw += part
        self._stream.feed(part)
        return bool(part)


@contextmanager
def chatting(
    lever: Lever,
    *words: str | Path,
    device: dict[str, Any] | None = None,
    columns: int = 100,
    rows: int = 40,
    ready: bool = True,
    streams: tuple[str, ...] = ("stdin", "stdout", "stderr"),
    **variables: str,
) -> Iterator[Terminal]:
    """`lever chat` on a terminal that it has to itself, from its first prompt on."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    command = COMMAND if device is None else [sys.executable, "-c", ON_A_DEVICE, repr(device)]
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(
        [*command, "chat", *words],
        env=lever.environment | {"TERM": "xterm-256color"} | variables,
        preexec_fn=take_terminal,
        **given | dict.fromkeys(streams, theirs),
    )
    os.close(theirs)
    try:
        terminal = Terminal(ours, process, columns, rows)
        if ready:
            terminal.until(r"^>$")
        yield terminal
    finally:
        process.kill()
        process.communicate()
        os.close(ours)


def prompts(n: int) -> Callable[[str], bool]:
    """Whether so many entries were asked for, and nothing is written below the last."""
    return lambda shown: len(re.findall(r"^>", shown, re.MULTILINE)) >= n and shown.endswith("\n>")


# --- piped --------------------------------------------------------------------------------------------------


def test_each_line_of_stdin_is_a_message_and_gets_an_answer(lever: Lever, model: Path) -> None:
    done = lever("chat", model, *A, "-n", "3", stdin=b"Hello\n\nWorld\n")

    assert (done.returncode, done.stdout) == (0, b"AAA\nAAA\n")
    first, second = done.stderr.decode().splitlines()
    assert re.fullmatch(r"3 tokens, .* a second; (\d+) of \1 prompt tokens read in .*; context \d+ of 512; .*", first)
    n_read, n_prompt = map(int, re.findall(r"; (\d+) of (\d+) prompt", second)[0])
    assert n_read < n_prompt  # what was said before is not read again


def test_the_first_answer_is_that_of_lever_run(lever: Lever, model: Path) -> None:
    flags = ("-n", "20", "-s", "7", "-sys", "Be brief.", "-q")

    assert lever("chat", model, *flags, stdin=b"Hello").stdout == lever("run", model, "Hello", *flags).stdout


def test_quiet_says_nothing_but_answers(lever: Lever, model: Path) -> None:
    done = lever("chat", model, *A, "-n", "2", "-q", stdin=b"/set temp 0.5\nHello\n/reset\nHello\n")

    assert (done.stdout, done.stderr) == (b"AA\nAA\n", b"temperature 0.5\n")


def test_lines_go_on_after_a_backslash_and_inside_quotes(lever: Lever, model: Path, tmp_path: Path) -> None:
    lines = 'one\\\ntwo\n"""\n/three\n\nfour\\\nfive"""\n/system a\\\nb\n/* six\nMotörhead\udcff\n/save chat.json\n'
    lines = lines.replace("chat.json", str(tmp_path / "chat.json"))
    done = lever("chat", model, *A, "-n", "1", "-q", stdin=lines.encode(errors="surrogateescape"))
    messages = json.loads((tmp_path / "chat.json").read_bytes())["messages"]

    assert done.returncode == 0
    said = [message["content"] for message in messages if message["role"] != "assistant"]
    assert said == ["a\nb", "one\ntwo", "/three\n\nfour\\\nfive", "/* six", "Motörhead\udcff"]


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("/ste", 2, "there is no command /ste: did you mean /set?"),
        ("/frobnicate", 2, "there is no command /frobnicate: /help shows them"),
        ("/set temprature 1", 2, "there is no setting 'temprature': did you mean temperature?"),
        ("/set temp hot", 2, "temperature is 'hot': it must be a number"),
        ("/set seed -1", 2, "seed is -1"),
        ("/save", 2, "/save needs the name of a file"),
        ("/load /nowhere/chat.json", 5, "cannot read /nowhere/chat.json"),
        ("/regen", 2, "no message yet"),
        ("x" * 600, 1, "tokens and the context 512: /reset begins anew"),
    ],
)
def test_what_fails_in_a_pipe_ends_it_with_one_line(lever: Lever, model: Path, line: str, code: int, says: str) -> None:
    done = lever("chat", model, "-n", "1", stdin=f"{line}\nHello\n".encode())

    assert (done.returncode, done.stdout) == (code, b"")
    assert says in one_line(done.stderr)


def test_exit_ends_a_pipe_before_its_end(lever: Lever, model: Path) -> None:
    done = lever("chat", model, *A, "-n", "1", "-q", stdin=b"/exit\nHello\n")

    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_an_answer_comes_before_the_next_line_does(lever: Lever, model: Path) -> None:
    command = [*COMMAND, "chat", str(model), *A, "-n", "2", "-q"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=lever.environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(2):
            process.stdin.write(b"Hello\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"AA\n"
        process.stdin.close()
        assert process.wait(MOST_S) == 0


def test_ctrl_c_in_a_pipe_ends_it_with_the_answer_so_far(lever: Lever, model: Path, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("Hello\nHello\n")
    command = [*Lever._command({"delay_s": 0.02}), "chat", str(model), *A, "--pin", "0", "-q"]
    with (
        (tmp_path / "lines").open() as lines,
        subprocess.Popen(
            command,
            stdin=lines,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=lever.environment,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process,
    ):
        assert process.stdout is not None
        first = process.stdout.read(3)
        rest, err = interrupt(process)

    assert (process.returncode, err) == (130, b"")
    assert re.fullmatch(rb"A+\n", first + rest)


def test_a_model_without_a_template_cannot_chat(lever: Lever, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "bare.gguf", metadata={"tokenizer.chat_template": None})
    done = lever("chat", path, stdin=b"Hello\n")

    assert done.returncode == 4
    assert "has no chat template: lever run --raw" in one_line(done.stderr)


def test_the_model_may_be_given_once(lever: Lever, model: Path) -> None:
    assert "the model is given twice" in one_line(lever("chat", model, "-m", model).stderr)
    assert lever("chat", *A, "-n", "1", "-q", stdin=b"Hello", LEVER_MODEL=str(model)).stdout == b"A\n"


def test_closed_streams_are_no_traceback(lever: Lever, model: Path) -> None:
    line = f"{COMMAND[0]} chat {model} -n 1 -s 1"
    codes = {f"{line} <&-": 5, f"echo Hello | {line} >&-": 5, f"echo Hello | {line} 2>&-": 0}
    for command, code in codes.items():
        done = subprocess.run(command, shell=True, env=lever.environment, capture_output=True, timeout=60)
        assert done.returncode == code, command
        assert b"Traceback" not in done.stderr


# --- on a terminal ------------------------------------------------------------------------------------------


def test_a_chat_answers_shows_figures_and_ends_with_ctrl_d(lever: Lever, model: Path) -> None:
    with chatting(lever, model, *A, "-n", "3") as terminal:
        assert f"{model}, context 512: /help shows what can be done" in terminal.text.replace("\n", "")
        terminal.type("Hello\r")
        shown = terminal.until(prompts(2))
        assert re.search(r"^> Hello\nAAA\n3 tokens, .* a second; .*context \d+ of 512", shown, re.MULTILINE)
        terminal.type(CTRL_D)
        assert terminal.ended() == 0


def test_a_quiet_chat_shows_prompts_and_answers(lever: Lever, model: Path) -> None:
    with chatting(lever, model, *A, "-n", "3", "-q") as terminal:
        terminal.type("Hello\r")
        assert terminal.until(prompts(2)) == "> Hello\nAAA\n>"
        terminal.type("/exit\r")
        assert terminal.ended() == 0


def test_errors_are_told_and_the_chat_goes_on(lever: Lever, model: Path) -> None:
    with chatting(lever, model, *A, "-n", "1") as terminal:
        terminal.type("/ste\r")
        terminal.until(r"lever: there is no command /ste: did you mean /set\?")
        terminal.type("x" * 600, "\r")
        terminal.until(r"lever: the conversation has 6\d\d tokens and the context 512: /reset begins anew")
        terminal.type("/load /nowhere\r")
        terminal.until("lever: cannot read /nowhere: No such file")
        terminal.type("Hello\r")
        terminal.until(r"^> Hello\nA$")


def test_several_lines_by_backslash_alt_enter_quotes_and_paste(lever: Lever, model: Path, tmp_path: Path) -> None:
    with chatting(lever, model, *A, "-n", "1", "-q") as terminal:
        terminal.type("one\\\rtwo\r")
        terminal.until(r"^> one\n\. two\nA\n>$")
        terminal.type("three", ALT_ENTER, "four\r")
        terminal.until(r"^> three\n\. four\nA\n>$")
        terminal.type('"""\rfive\r\r/six"""\r')
        terminal.until(r'^> """\n\. five\n\.\n\. /six"""\nA\n>$')
        terminal.type("\x1b[200~seven\\\neight\x1b[201~", "\r")
        terminal.until(r"^> seven\\\n\. eight\nA\n>$")
        terminal.type(f"/save {tmp_path}/chat.json\r/exit\r")
        assert terminal.ended() == 0

    messages = json.loads((tmp_path / "chat.json").read_bytes())["messages"]
    said = [message["content"] for message in messages if message["role"] == "user"]
    assert said == ["one\ntwo", "three\nfour", "five\n\n/six", "seven\\\neight"]


def test_history_is_kept_for_its_owner_from_chat_to_chat(lever: Lever, model: Path, tmp_path: Path) -> None:
    history = tmp_path / "home/chat-history"
    with chatting(lever, model, *A, "-n", "1", "-q") as terminal:
        terminal.type("remember me\r")
        terminal.until(prompts(2))
        terminal.type(CTRL_D)
        assert terminal.ended() == 0
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    with chatting(lever, model, *A, "-n", "1", "-q") as terminal:
        terminal.type(UP)
        terminal.until(r"^> remember me$")
    before = history.read_bytes()
    with chatting(lever, model, *A, "-n", "1", "-q", "--no-history") as terminal:
        terminal.type("secret\r")
        terminal.until(prompts(2))
        terminal.type(UP)
        terminal.until(r"\n> secret$")  # in this chat it is there
        terminal.type("\r", CTRL_D)
        assert terminal.ended() == 0
    assert history.read_bytes() == before


def test_a_history_that_cannot_be_kept_is_told_of(lever: Lever, model: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/chat-history").mkdir()
    with chatting(lever, model, *A, "-n", "1") as terminal:
        terminal.until("what is typed is not kept: .*directory")
        terminal.type("Hello\r")
        terminal.until(r"^> Hello\nA$")


def test_tab_completes_commands_settings_and_files(lever: Lever, model: Path, tmp_path: Path) -> None:
    (tmp_path / "saved-chat.json").write_text('{"messages": []}')
    with chatting(lever, model, "-q") as terminal:
        terminal.type("/he", TAB)
        terminal.until(r"^> /help$")
        terminal.type(CTRL_C, "/set tem", TAB)
        terminal.until(r"^> /set temperature$")
        terminal.type(CTRL_C, f"/load {tmp_path}/saved", TAB, "\r")
        terminal.until(prompts(4))
        terminal.type("/re", TAB)
        terminal.until(r"/reset\s+/regen|/regen\s+/reset")


def test_a_conversation_is_saved_loaded_and_gone_on_with(lever: Lever, model: Path, tmp_path: Path) -> None:
    flags = (model, "-n", "8", "-s", "3", "-q")
    file = tmp_path / "chat.json"
    with chatting(lever, *flags) as terminal:
        terminal.type('/set temperature 0\r/set logit_bias {"65": 1000}\r/system Be brief.\r')
        terminal.until(prompts(4))
        terminal.type("Hello\r")
        terminal.until(r"^> Hello\nAAAAAAAA\n>$")
        terminal.type(f"/save {file}\r", "/exit\r")
        assert terminal.ended() == 0
    with chatting(lever, *flags) as terminal:
        terminal.type(f"/load {file}\r/set\r")
        terminal.until(r"temperature 0\.0,(.|\n)*logit_bias\s{\"65\":\s1000\.0}")
        terminal.type("/system\r")
        terminal.until(r"^system: Be brief\.")
        terminal.type("more\r")
        terminal.until(r"^> more\nAAAAAAAA\n>$")
        terminal.type(f"/save {file}\r", "/exit\r")
        assert terminal.ended() == 0

    roles = [message["role"] for message in json.loads(file.read_bytes())["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]


def test_regen_answers_again_with_another_seed(lever: Lever, model: Path) -> None:
    words: tuple[str | Path, ...] = ("-n", "6", "--temp", "2", "-l", "65+900", "-l", "66+900", "-l", "67+900")
    with chatting(lever, model, *words, "-s", "3") as terminal:
        terminal.type("Hello\r")
        first = terminal.until(prompts(2))
        terminal.type("/regen\r")
        second = terminal.until(prompts(3))
        assert "\nseed 4\n" in second
    both = re.findall(r"^[ABC]{6}$", second, re.MULTILINE)
    assert both[:1] == re.findall(r"^[ABC]{6}$", first, re.MULTILINE)
    assert [both[1]] == lever("run", model, "Hello", *words, "-s", "4", "-q").stdout.decode().split()


def test_help_stats_and_reset_say_what_they_are_for(lever: Lever, model: Path) -> None:
    with chatting(lever, model, *A, "-n", "1") as terminal:
        terminal.type("/help\r")
        shown = terminal.until(prompts(2))
        for command in ("help", "reset", "save FILE", "load FILE", "system TEXT", "stats", "regen", "exit"):
            assert re.search(rf"^/{command}  +\w", shown, re.MULTILINE), command
        terminal.type("/stats\r")
        terminal.until(r"^no answer yet\ncontext: 0 of 512 tokens, 0 messages\nmemory: .* of .*: Python ")
        terminal.type("Hello\r")
        terminal.until(prompts(4))
        terminal.type("/stats\r")
        terminal.until(r"^1 token; prompt of \d+ in(.|\n)*seed \d+\ncontext: \d+ of 512 tokens, 2 messages")
        terminal.type("/reset\r", "/stats\r")
        terminal.until("the conversation begins anew")
        terminal.until("context: 0 of 512 tokens, 0 messages")


def test_a_context_that_is_full_is_told_of(lever: Lever, model: Path) -> None:
    with chatting(lever, model, *A, "-c", "64") as terminal:
        terminal.type("Hello\r")
        terminal.until(r"the context is full, 64 of 64 tokens: /reset begins anew, and a larger -c holds more")
        terminal.type("and?\r")
        terminal.until(r"lever: the conversation has 8\d tokens and the context 64: /reset")
        terminal.type("/reset\r")
        terminal.until("begins anew\n>$")


# --- Ctrl-C -------------------------------------------------------------------------------------------------


def test_ctrl_c_while_text_comes_keeps_it_and_asks_again(lever: Lever, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    with chatting(lever, model, *A, "--pin", "0", device={"delay_s": 0.02}) as terminal:
        terminal.type("Hello\r")
        terminal.until("^AAA")
        terminal.type(CTRL_C)
        shown = terminal.until(prompts(2))
        assert re.search(r"^A+(\^C)?\n\d+ tokens, ", shown, re.MULTILINE)
        terminal.type(f"/save {file}\r", CTRL_D)
        assert terminal.ended() == 0

    user, assistant = json.loads(file.read_bytes())["messages"]
    assert user == {"role": "user", "content": "Hello"}
    assert re.fullmatch("A+", assistant["content"])


def test_ctrl_c_while_the_prompt_is_read_takes_the_message_back(lever: Lever, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "deep.gguf", n_layers=20)
    with chatting(lever, path, "--pin", "0", "--no-profile", device={"delay_s": 0.3}) as terminal:
        terminal.type("Hello\r")
        terminal.until("reading the prompt, ")
        terminal.type(CTRL_C)
        terminal.until("nothing was answered: all is as it was before\n>$")
        terminal.type(f"/save {tmp_path}/chat.json\r", CTRL_D)
        assert terminal.ended() == 0
    assert json.loads((tmp_path / "chat.json").read_bytes())["messages"] == []


def test_a_second_ctrl_c_while_an_answer_comes_ends_the_chat(lever: Lever, model: Path) -> None:
    with chatting(lever, model, *A, "--pin", "0", "--no-profile", device={"delay_s": 0.3}) as terminal:
        terminal.type("Hello\r")
        terminal.until("^A")
        terminal.type(CTRL_C)
        time.sleep(0.05)  # of the third of a second that a layer takes
        terminal.type(CTRL_C)
        assert terminal.ended() == 130


def test_ctrl_c_gives_up_what_is_typed_and_at_an_empty_prompt_warns_before_it_ends(lever: Lever, model: Path) -> None:
    warning = "Ctrl-C once more, or Ctrl-D, ends the chat"
    with chatting(lever, model, *A, "-n", "1", "-q") as terminal:
        terminal.type("given up", CTRL_C)
        assert terminal.until(prompts(2)) == "> given up\n>"
        terminal.type(CTRL_C)
        terminal.until(rf"{warning}\n>$")
        terminal.type("Hello\r")
        terminal.until(r"^> Hello\nA\n>$")
        terminal.type(CTRL_C)
        terminal.until(lambda shown: shown.count(warning) == 2 and shown.endswith("\n>"))
        terminal.type("x", CTRL_C)
        terminal.until(r"^> x\n>$")
        terminal.type(CTRL_C)
        terminal.until(lambda shown: shown.count(warning) == 3 and shown.endswith("\n>"))
        terminal.type(CTRL_C)
        assert terminal.ended() == 130


def test_ctrl_c_while_weights_are_loaded_ends_at_once(lever: Lever, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "deep.gguf", n_layers=20)
    words = ("chat", path, "--pin", "100")
    with lever.started(*words, device={"delay_s": 0.5}) as process:
        notes_until(process, "loading the weights: ")
        out, err = interrupt(process)

    assert (process.returncode, out, err) == (130, b"", b"")


# --- other terminals ----------------------------------------------------------------------------------------


def test_control_characters_of_an_answer_cannot_move_the_terminal(lever: Lever, model: Path) -> None:
    escape = ("-l", f"{0x1B}+1000", "-n", "2")
    with chatting(lever, model, *escape, "-q") as terminal:
        terminal.type("Hello\r")
        assert terminal.until(prompts(2)) == "> Hello\n\\x1b\\x1b\n>"
    assert lever("chat", model, *escape, "-q", stdin=b"Hello").stdout == b"\x1b\x1b\n"  # elsewhere it is what it is


def test_answers_go_to_stdout_and_all_else_to_the_terminal(lever: Lever, model: Path) -> None:
    with chatting(lever, model, *A, "-n", "3", streams=("stdin", "stderr")) as terminal:
        terminal.type("Hello\r")
        terminal.until(r"^> Hello\n3 tokens")
        terminal.type(CTRL_D)
        assert terminal.ended() == 0
        assert terminal.process.stdout is not None
        assert terminal.process.stdout.read() == b"AAA\n"


def test_a_terminal_for_stdout_alone_is_typed_on_as_well(lever: Lever, model: Path) -> None:
    with chatting(lever, model, *A, "-n", "3", streams=("stdin", "stdout")) as terminal:
        terminal.type("Hello\r")
        terminal.until(r"^> Hello\nAAA\n>$")
        terminal.type(CTRL_D)
        assert terminal.ended() == 0
        assert terminal.process.stderr is not None
        assert b"3 tokens, " in terminal.process.stderr.read()


def test_without_a_terminal_to_draw_on_each_line_typed_is_a_message(lever: Lever, model: Path) -> None:
    with chatting(lever, model, *A, "-n", "3", "-q", streams=("stdin",), ready=False) as terminal:
        terminal.type("Hello\n", CTRL_D)
        out, err = terminal.process.communicate(timeout=MOST_S)
    assert (terminal.process.returncode, out, err) == (0, b"AAA\n", b"")


def test_a_dumb_terminal_gets_no_control_sequence(lever: Lever, model: Path, tmp_path: Path) -> None:
    with chatting(lever, model, *A, "-n", "1", TERM="dumb") as terminal:
        terminal.type("one\\\n")
        terminal.until(r"^> one\\\n\.$")
        terminal.type("two\n")
        terminal.until(r"^\. two\nA\n1 token; ")
        terminal.type(CTRL_C)
        terminal.until(r"ends the chat\n>$")
        terminal.type(f"/save {tmp_path}/chat.json\n")
        terminal.until("^saved: ")
        terminal.type(CTRL_D)
        assert terminal.ended() == 0
        assert b"\x1b" not in terminal.raw
    assert json.loads((tmp_path / "chat.json").read_bytes())["messages"][0]["content"] == "one\ntwo"


def test_no_color_is_heeded(lever: Lever, model: Path) -> None:
    with chatting(lever, model, *A, "-n", "1", NO_COLOR="1") as terminal:
        terminal.type("Hello\r/ste\r")
        terminal.until("did you mean")
        assert not re.search(rb"\x1b\[[0-9;]*\b(3[0-7]|38|4[0-7]|48|9[0-7])\b[0-9;]*m", terminal.raw)


def test_a_narrow_terminal_breaks_lines_and_loses_nothing(lever: Lever, model: Path) -> None:
    with chatting(lever, model, *A, "-n", "30", columns=20, rows=60) as terminal:
        terminal.type("Hello, my dear old friend\r")
        shown = terminal.until(prompts(2))
        assert "> Hello, my dear old" in shown
        assert re.search(r"^A{20}\nA{10}\n30 tokens, ", shown, re.MULTILINE)
