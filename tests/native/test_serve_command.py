"""`lever serve` in a process of its own: what it says, how it ends, and that its text is that of `lever run`."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.command import Lever
from tests.fakes import wait_until

SLOW: dict[str, Any] = {"delay_s": 0.5}
WITHOUT = """
import sys
sys.modules["starlette"] = None
from lever.cli import main
main()
"""


class Process:
    """The command while it runs; its notes are read as they come."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.notes = ""

    def wait_for(self, pattern: str, seconds: float = 60.0) -> re.Match[str]:
        """The first place of it in what was said."""
        stderr, end = self._process.stderr, time.monotonic() + seconds
        assert stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stderr, selectors.EVENT_READ)
            while (found := re.search(pattern, self.notes)) is None:
                assert selector.select(max(end - time.monotonic(), 0)), self.notes
                part = os.read(stderr.fileno(), 1 << 16)
                assert part, self.notes
                self.notes += part.decode()
        return found

    def url(self) -> str:
        return self.wait_for(r"listening at (http://\S+),")[1]

    def end(self, number: signal.Signals | None = None) -> int:
        """Its exit code, after this signal."""
        if number is not None:
            self._process.send_signal(number)
        _, rest = self._process.communicate(timeout=60)
        self.notes += rest.decode()
        assert "Traceback" not in self.notes, self.notes
        return self._process.returncode

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


@contextmanager
def started(lever: Lever, *words: str | Path, device: dict[str, Any] | None = None) -> Iterator[Process]:
    with lever.started("serve", *words, "--port", "0", device=device) as process:
        yield Process(process)


def ask(url: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(url + path, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_text_over_the_api_is_that_of_lever_run_with_the_same_seed(lever: Lever, model: Path) -> None:
    expected = lever.json("run", model, "Hello, world", "-n", "16", "-s", "42")
    with started(lever, model, "--pin", "0") as process:
        url = process.url()
        process.wait_for(r"ready: qwen2.gguf answers at http://127.0.0.1:\d+\n")
        messages = [{"role": "user", "content": "Hello, world"}]
        status, reply = ask(url, "/v1/chat/completions", {"messages": messages, "max_tokens": 16, "seed": 42})
        code = process.end(signal.SIGINT)

    assert (status, code) == (200, 130)
    assert reply["choices"][0]["message"]["content"] == expected["text"]
    assert process.notes.count("\n") == 2


def test_sigterm_is_a_good_end(lever: Lever, model: Path) -> None:
    with started(lever, model) as process:
        process.wait_for("ready: ")
        assert process.end(signal.SIGTERM) == 0


def test_ctrl_c_ends_while_the_model_is_loaded(lever: Lever, model: Path) -> None:
    with started(lever, model, device=SLOW) as process:
        url = process.url()
        assert ask(url, "/health")[0] == 503
        assert process.end(signal.SIGINT) == 130


def test_killed_while_it_loads_it_can_be_started_again_and_says_the_same(lever: Lever, model: Path) -> None:
    """It had begun to load a draft as well, which it makes an image of, once."""
    words = (model, "--pin", "0", "--draft", model)
    with started(lever, *words, device={"delay_s": 30}) as process:
        url = process.url()
        wait_until(lambda: "loading the weights" in ask(url, "/health")[1]["error"]["message"], seconds=60)
        assert process.end(signal.SIGKILL) == -signal.SIGKILL

    expected = lever.json("run", model, "Hello, world", "-n", "16", "-s", "42", "--no-draft")
    with started(lever, *words) as process:
        url = process.url()
        process.wait_for("ready: ")
        body = {"messages": [{"role": "user", "content": "Hello, world"}], "max_tokens": 16, "seed": 42}
        status, reply = ask(url, "/v1/chat/completions", body)
        assert process.end(signal.SIGTERM) == 0

    assert (status, reply["choices"][0]["message"]["content"]) == (200, expected["text"])


def test_ctrl_c_ends_an_answer_within_a_layer(lever: Lever, model: Path) -> None:
    with started(lever, model, "--pin", "0", device={"delay_s": 0.05}) as process:
        url = process.url()
        process.wait_for("ready: ")
        host, _, port = url.removeprefix("http://").partition(":")
        body = b'{"prompt": "x", "max_tokens": 400, "ignore_eos": true, "stream": true}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(head + body)
            received = connection.recv(1 << 16)
            process.signal(signal.SIGINT)
            while part := connection.recv(1 << 16):
                received += part
        assert process.end() == 130

    assert b"event: error" in received
    assert received.count(b'"text"') < 400


def test_a_second_ctrl_c_ends_it_at_once(lever: Lever, model: Path) -> None:
    with started(lever, model, "--pin", "0", device={"delay_s": 30}) as process:
        url = process.url()
        wait_until(lambda: "loading the weights" in ask(url, "/health")[1]["error"]["message"], seconds=60)
        process.signal(signal.SIGINT)
        time.sleep(0.5)  # a thread sleeps in a read, so it cannot have ended
        assert process.end(signal.SIGINT) == 130


@pytest.mark.parametrize("flag", ["--timeout", "--sse-ping-interval"])
@pytest.mark.parametrize("seconds", ["nan", "inf"])
def test_seconds_that_are_no_number_are_refused(lever: Lever, model: Path, flag: str, seconds: str) -> None:
    done = lever("serve", model, flag, seconds)

    assert done.returncode == 2
    assert flag in done.stderr.decode()


def test_a_port_that_is_taken_is_one_line(lever: Lever, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = lever("serve", model, "--port", str(taken.getsockname()[1]))

    assert done.returncode == 1
    assert re.fullmatch(r"lever: cannot listen on 127.0.0.1:\d+: .*--port\n", done.stderr.decode())


@pytest.mark.parametrize(("words", "code"), [(["--dram", "10MiB"], 3), (["-c", "100000"], 2)])
def test_a_model_that_cannot_be_loaded_is_told_of_and_ends_it(
    lever: Lever, model: Path, words: list[str], code: int
) -> None:
    with started(lever, model, *words) as process:
        status, reply = ask(process.url(), "/health")
        while status == 503:
            status, reply = ask(process.url(), "/health")
        assert process.end() == code

    assert status == 500
    assert reply["error"]["code"] == "load_failed"
    assert process.notes.splitlines()[-1].startswith("lever: ")


def test_A2_a_damaged_model_ends_it(lever: Lever, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(b"GGUF")
    with started(lever, path) as process:
        assert process.end() == 4


def test_without_the_extra_it_names_what_to_install(lever: Lever, model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, "serve", model],
        env=lever.environment,
        capture_output=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 2
    assert re.fullmatch(r"lever: .*pip install 'lever-llm\[serve\]'\n", done.stderr.decode())


def test_keys_come_from_words_variables_and_files(lever: Lever, model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# mine\n\nfrom-file\n")
    lever.environment["LEVER_ALIAS"] = "named"
    with started(lever, model, "--api-key", "typed", "--api-key-file", tmp_path / "keys") as process:
        url = process.url()

        def status(key: str) -> int:
            code, reply = ask(url, "/v1/models", Authorization=f"Bearer {key}")
            if code == 200:
                assert reply["data"][0]["id"] == "named"
            return code

        assert [status(key) for key in ("typed", "from-file", "# mine", "other")] == [200, 200, 401, 401]
        process.end(signal.SIGTERM)
    assert "typed" not in process.notes


@pytest.mark.parametrize("content", ["", "# none\n"])
def test_a_file_without_a_key_is_refused(lever: Lever, model: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "keys").write_text(content)
    done = lever("serve", model, "--api-key-file", tmp_path / "keys")

    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)


def test_a_file_of_keys_that_cannot_be_read_is_refused(lever: Lever, model: Path, tmp_path: Path) -> None:
    done = lever("serve", model, "--api-key-file", tmp_path)

    assert (done.returncode, done.stderr.count(b"\n")) == (5, 1)


def test_listening_for_others_without_a_key_is_warned_of(lever: Lever, model: Path) -> None:
    with started(lever, model, "--host", "0.0.0.0") as process:
        process.wait_for("--api-key")
        process.wait_for("ready: ")
        process.end(signal.SIGTERM)
