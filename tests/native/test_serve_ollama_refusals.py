"""What Ollama's API refuses and in which words, who may ask it, and clients that go away. On a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest

from lever.server.ollama import ELSEWHERE
from tests.asking_ollama import MESSAGES, chat, generate, refusal_of
from tests.fakes import FakeDevice, wait_until
from tests.serving import Serving, read_until, serving, with_keys


@pytest.fixture(scope="module")
def client(served: Serving) -> Iterator[Any]:
    with ollama.Client(served.url, timeout=60) as found:
        yield found


# --- requests that are wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"seed": -2}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"num_predict": -3}, "num_predict"),
        ({"num_ctx": 0}, "num_ctx"),
        ({"stop": ["a", ""]}, "stop"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"repeat_last_n": -2}, "repeat_last_n"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"mirostat": 1}, "mirostat"),
        ({"tfs_z": 0.5}, "tfs_z"),
        ({"typical_p": 0.5}, "typical_p"),
    ],
)
def test_a_wrong_option_is_named(served: Serving, options: dict[str, Any], name: str) -> None:
    for stream in (False, True):
        assert name in refusal_of(chat(served, options=options, stream=stream))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"template": "{{ .Prompt }}"}, "template is not taken from requests"),
        ({"suffix": "end"}, '"tiny" does not support insert'),
        ({"images": ["aGVsbG8="]}, '"tiny" does not support images'),
        ({"context": [1, 2, 3]}, "context is not supported"),
        ({"raw": True, "system": "Be brief."}, "raw mode does not support template, system, or context"),
        ({"think": True}, '"tiny" does not support thinking'),
        ({"think": "high"}, '"tiny" does not support thinking'),
        ({"format": "yaml"}, "format"),
        ({"prompt": 1}, "prompt"),
        ({"stream": "no"}, "stream"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ],
)
def test_what_a_prompt_cannot_have_is_refused(served: Serving, more: dict[str, Any], words: str) -> None:
    assert words in refusal_of(generate(served, **more))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, '"tiny" does not support tools'),
        ({"think": True}, '"tiny" does not support thinking'),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, '"tiny" does not support images'),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": "Hello"}, "messages"),
    ],
)
def test_what_a_chat_cannot_have_is_refused(served: Serving, more: dict[str, Any], words: str) -> None:
    assert words in refusal_of(chat(served, **more))


def test_what_changes_nothing_is_taken(client: Any) -> None:
    more = {"think": False, "keep_alive": 0, "format": "", "tools": []}
    options = {"num_predict": 1, "mirostat": 0, "tfs_z": 1.0, "typical_p": 1.0, "num_thread": 4, "seed": -1}
    messages = [*MESSAGES, {"role": "assistant", "content": "", "thinking": "hm"}, {"role": "user", "content": "so?"}]

    assert client.chat("tiny", messages, options=options, **more).done
    assert client.generate("tiny", "Hello", "", system="", template="", options=options, think=False).done


def test_unknown_options_are_ignored_and_told_of_once(
    served: Serving, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lever.server.asked._told_of", set())  # whatever other tests have asked
    for value in (1, [2]):
        assert chat(served, options={"num_predict": 1, "brand_new": value}).status == 200
    assert caplog.text.count("brand_new") == 1


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b"{}", b'{"model": 1}'])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/show"])
def test_a_malformed_body_is_refused(served: Serving, path: str, body: bytes) -> None:
    refusal_of(served.ask(path, body, method="POST"))


@pytest.mark.parametrize("path", ELSEWHERE)
@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_what_else_ollama_does_is_not_implemented(served: Serving, path: str, method: str) -> None:
    assert path in refusal_of(served.ask(path, {"model": "tiny"}, method=method), 501)


def test_other_paths_and_methods_are_refused_in_its_shape(served: Serving) -> None:
    assert "/api/nothing" in refusal_of(served.ask("/api/nothing"), 404)
    assert "GET" in refusal_of(served.ask("/api/chat"), 405)


# --- who may ask, and clients that go away ------------------------------------------------------------------


def test_K11_hosts_origins_and_keys_are_those_of_the_server(model: Path) -> None:
    with serving(model, gates=with_keys("secret")) as served:
        with ollama.Client(served.url, headers={"Authorization": "Bearer secret"}) as client:
            assert client.chat("tiny", MESSAGES, options={"num_predict": 1}).done
        with ollama.Client(served.url) as stranger, pytest.raises(ollama.ResponseError) as caught:
            stranger.list()
        assert (caught.value.status_code, caught.value.error) == (401, "the API key is missing or wrong")
        for header in ({"Host": "evil.test"}, {"Origin": "https://evil.test"}):
            assert "evil.test" in refusal_of(served.ask("/api/tags", Authorization="Bearer secret", **header), 403)


def test_while_loading_nothing_is_loaded_and_nothing_answered(model: Path) -> None:
    device = FakeDevice()
    device.gate.clear()
    with serving(model, device=device, ready=False) as served:
        assert served.ask("/api/version").status == 200
        assert served.ask("/api/ps").json == {"models": []}
        reply = chat(served)
        assert "still being loaded" in refusal_of(reply, 503)
        assert int(reply.headers["Retry-After"]) > 0
        device.gate.set()
        wait_until(lambda: served.worker.state == "ready", seconds=30)
        assert served.ask("/api/ps").json["models"]


@pytest.mark.parametrize("stream", [False, True])
def test_K1_a_client_that_goes_away_ends_its_answer_and_makes_room(model: Path, stream: bool) -> None:
    body = {"model": "tiny", "prompt": "Hello", "stream": stream, "options": {"temperature": 0, "num_predict": 400}}
    with serving(model, queue=0) as served:
        served.device.gate.clear()
        with served.sent("/api/generate", body):
            served.wait_for(running=True)
            assert "waiting already" in refusal_of(generate(served, stream=stream), 429)
        wait_until(lambda: served.given_up, seconds=30)
        served.device.gate.set()
        served.wait_for(running=False)

        assert served.worker.totals.new_tokens < 400
        assert generate(served, options={"num_predict": 3}).status == 200


def test_K1_a_client_that_goes_away_while_lines_come_ends_its_answer(model: Path) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "options": {"temperature": 0, "num_predict": 400}}
    with serving(model, device=FakeDevice(delay_s=0.002)) as served:
        with served.sent("/api/chat", body) as connection:
            read_until(connection, lambda received: b'"done":false' in received)
            served.device.gate.clear()
            job = served.worker._running
        wait_until(lambda: served.given_up or not served.worker.running, seconds=30)  # by layers that were read ahead
        served.device.gate.set()
        served.wait_for(running=False)

        assert job is not None
        assert job.generation is not None
        assert (job.cancelled, job.generation.finish_reason) == (True, None)
        assert chat(served, options={"num_predict": 3}).status == 200
