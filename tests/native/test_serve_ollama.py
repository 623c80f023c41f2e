"""Ollama's API on a real socket, with a tiny model: Ollama's own client, bytes of streams, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import ollama
import pytest

from lever.server.ollama import ELSEWHERE
from tests.fakes import FakeDevice, wait_until
from tests.native.test_run import Lever
from tests.serving import Serving, serving, with_keys
from tests.tiny import tiny_model

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello world"},
]
RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
FIGURES = {
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}
ENDLESS = {"num_predict": -1, "seed": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "qwen2.gguf", arch="qwen2")


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Serving]:
    with serving(model) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Serving) -> Iterator[Any]:
    with ollama.Client(served.url, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def lever(tmp_path_factory: pytest.TempPathFactory) -> Lever:
    return Lever(tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("bytecode"))


def chat(served: Serving, **more: Any) -> Any:
    """The reply to a chat, in one piece."""
    return served.ask("/api/chat", {"model": "tiny", "messages": MESSAGES, "stream": False, **more})


def generate(served: Serving, **more: Any) -> Any:
    """The reply to a prompt, in one piece."""
    return served.ask("/api/generate", {"model": "tiny", "prompt": "Hello", "stream": False, **more})


def lines_of(body: bytes) -> list[dict[str, Any]]:
    assert body.endswith(b"\n")
    return [json.loads(line) for line in body.split(b"\n")[:-1]]


def refusal_of(reply: Any, status: int = 400) -> str:
    """Its words; every refusal has this shape."""
    assert reply.status == status, reply.body
    assert reply.headers["Content-Type"] == "application/json"
    assert reply.json.keys() == {"error"}
    words: str = reply.json["error"]
    return words


# --- Ollama's client ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"seed": 7}, {"temperature": 0}, {"seed": 7, "stop": ["e"]}, {"seed": 7, "top_k": 3}]
)
def test_a_streamed_chat_is_the_whole_one(client: Any, options: dict[str, Any]) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "options": {"num_predict": 12, **options}}
    whole = client.chat(**asked)
    parts = list(client.chat(**asked, stream=True))

    assert whole.message.role == "assistant"
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {part.message.role for part in parts} == {"assistant"}
    assert parts[-1].done_reason == whole.done_reason


@pytest.mark.parametrize("more", [{}, {"raw": True}, {"system": "Be brief."}])
def test_a_streamed_answer_to_a_prompt_is_the_whole_one(client: Any, more: dict[str, Any]) -> None:
    asked = {"model": "tiny", "prompt": "Once upon", "options": {"num_predict": 12, "seed": 7}, **more}
    whole = client.generate(**asked)
    parts = list(client.generate(**asked, stream=True))

    assert "".join(part.response for part in parts) == whole.response
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_the_asynchronous_client_streams_the_same(served: Serving, client: Any) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "options": {"num_predict": 12, "seed": 7}}

    async def text() -> str:
        async with ollama.AsyncClient(served.url, timeout=60) as found:
            return "".join([part.message.content or "" async for part in await found.chat(**asked, stream=True)])

    assert asyncio.run(text()) == client.chat(**asked).message.content


def test_the_last_part_has_the_figures_and_no_other(client: Any) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    *parts, last = client.chat("tiny", MESSAGES, stream=True, options={"num_predict": 5, "temperature": 0})

    assert (last.done_reason, last.eval_count) == ("length", 5)
    assert last.prompt_eval_count > 10
    assert 0 < last.prompt_eval_duration <= last.total_duration
    assert 0 < last.eval_duration <= last.total_duration
    assert not any(name in part for part in parts for name in (*FIGURES, "done_reason"))
    times = [datetime.fromisoformat(part.created_at) for part in (*parts, last)]
    assert before < times[0] <= times[-1] < datetime.now(UTC) + timedelta(seconds=1)
    assert times == sorted(times)


def test_models_are_listed_shown_and_loaded(client: Any, served: Serving, model: Path) -> None:
    (listed,) = client.list().models
    (running,) = client.ps().models
    shown = client.show("tiny")

    assert listed.model == running.model == "tiny:latest"
    assert listed.size == model.stat().st_size
    assert listed.modified_at.timestamp() == pytest.approx(model.stat().st_mtime, abs=1)
    assert re.fullmatch("[0-9a-f]{64}", listed.digest)
    assert (listed.details.format, listed.details.family, listed.details.families) == ("gguf", "qwen2", ["qwen2"])
    assert running.size == served.llm.loaded.plan.total
    assert (running.size_vram, running.context_length) == (0, 512)
    assert running.expires_at > datetime.now(UTC) + timedelta(days=100 * 365)
    assert shown.template == served.llm.gguf.text("tokenizer.chat_template")
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo["qwen2.context_length"] == 512
    assert shown.modelinfo["general.architecture"] == "qwen2"
    assert shown.modelinfo["general.parameter_count"] > 1000
    assert shown.details == listed.details


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "qwen2.gguf", "qwen2.gguf:latest"])
def test_the_model_is_known_by_its_names_and_replies_repeat_them(client: Any, name: str) -> None:
    assert client.chat(name, MESSAGES, options={"num_predict": 1}).model == name
    assert client.generate(name, "Hello", options={"num_predict": 1}).model == name
    assert client.show(name).capabilities == ["completion"]


@pytest.mark.parametrize("name", ["llama3.2", "tiny:7b", ":latest"])
def test_another_model_is_not_found(client: Any, served: Serving, name: str) -> None:
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError) as caught:
            list(client.chat(name, MESSAGES, stream=stream))
        assert (caught.value.status_code, caught.value.error) == (404, f"model '{name}' not found")
    assert refusal_of(served.ask("/api/show", {"model": name}), 404) == f"model '{name}' not found"


def test_a_model_has_to_be_named(served: Serving) -> None:
    assert refusal_of(chat(served, model=""), 404) == "model '' not found"
    assert "missing required field `model`" in refusal_of(served.ask("/api/chat", {"messages": MESSAGES}))
    assert refusal_of(served.ask("/api/show", {})) == "model is required"


def test_the_version_is_told(served: Serving) -> None:
    assert re.match(r"\d+\.\d+", served.ask("/api/version").json["version"])


def test_nothing_to_answer_loads_the_model(client: Any) -> None:
    for stream in (False, True):
        chats = client.chat("tiny", [], stream=stream)
        texts = client.generate("tiny", keep_alive="5m", stream=stream)
        (chatted,), (text,) = ([*chats], [*texts]) if stream else ([chats], [texts])

        assert (chatted.done, chatted.done_reason, chatted.message.content) == (True, "load", "")
        assert (text.done, text.done_reason, text.response) == (True, "load", "")


def test_logprobs_are_told_alike_streamed_and_not(client: Any) -> None:
    asked = {
        "model": "tiny",
        "prompt": "Hello",
        "logprobs": True,
        "top_logprobs": 2,
        "options": {"num_predict": 5, "seed": 1},
    }
    whole = client.generate(**asked)
    parts = list(client.generate(**asked, stream=True))

    assert len(whole.logprobs) == 5
    assert [token for part in parts for token in part.logprobs or ()] == list(whole.logprobs)
    assert all(len(entry.top_logprobs) == 2 for entry in whole.logprobs)


# --- the same text as elsewhere -----------------------------------------------------------------------------

RUN = ["-n", "16", "-s", "42", "--top-p", "0.9", "--min-p", "0"]  # as Ollama draws


def test_text_is_that_of_lever_run_with_ollama_s_defaults(lever: Lever, model: Path, client: Any) -> None:
    options = {"num_predict": 16, "seed": 42}
    asked = lever.json("run", model, "Hello world", "--system", "Be brief.", *RUN)["text"]
    bare = lever.json("run", model, "Hello world", "--raw", *RUN)["text"]

    assert client.chat("tiny", MESSAGES, options=options).message.content == asked
    assert client.generate("tiny", "Hello world", system="Be brief.", options=options).response == asked
    assert client.generate("tiny", "Hello world", raw=True, options=options).response == bare


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 1.5}, ["--temp", "1.5"]),
        ({"top_k": 2}, ["--top-k", "2"]),
        ({"top_p": 0.3}, ["--top-p", "0.3"]),
        ({"min_p": 0.4}, ["--min-p", "0.4"]),
        ({"repeat_penalty": 1.8, "repeat_last_n": 8}, ["--repeat-penalty", "1.8", "--repeat-last-n", "8"]),
        ({"presence_penalty": 2.0, "repeat_last_n": -1}, ["--presence-penalty", "2", "--repeat-last-n", "-1"]),
        ({"frequency_penalty": 2.0}, ["--frequency-penalty", "2"]),
        ({"stop": "a"}, ["--stop", "a"]),
        ({"num_predict": 3}, ["-n", "3"]),
    ],
)
def test_each_option_is_that_of_lever_run(
    lever: Lever, model: Path, client: Any, options: dict[str, Any], words: list[str]
) -> None:
    expected = lever.json("run", model, "Hello world", "--raw", *RUN, *words)
    asked = {"num_predict": 16, "seed": 42, **options}
    reply = client.generate("tiny", "Hello world", raw=True, options=asked)

    assert reply.response == expected["text"]
    assert reply.done_reason == expected["finish_reason"]


def test_a_model_without_a_template_goes_on_from_the_prompt(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "bare.gguf", metadata={"tokenizer.chat_template": None})
    with serving(path) as served:
        options = {"seed": 1, "num_predict": 8}
        assert (
            generate(served, options=options).json["response"]
            == generate(served, raw=True, options=options).json["response"]
        )
        assert "no chat template" in refusal_of(generate(served, system="Be brief."))
        assert "no chat template" in refusal_of(chat(served))


# --- where answers end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("endless", [-1, -2])
def test_without_a_limit_an_answer_ends_by_itself_or_with_the_context(served: Serving, endless: int) -> None:
    reply = generate(served, raw=True, options={"num_predict": endless, "seed": 3}).json
    free = generate(served, raw=True, options={"seed": 3}).json

    assert reply["response"] == free["response"]
    assert reply["done_reason"] == "stop" or reply["prompt_eval_count"] + reply["eval_count"] == 512


def test_num_ctx_ends_an_answer_as_a_smaller_context_would(served: Serving) -> None:
    n_prompt = generate(served, options={"num_predict": 1}).json["prompt_eval_count"]
    reply = generate(served, options={"num_ctx": n_prompt + 4, "temperature": 0}).json

    assert (reply["eval_count"], reply["done_reason"]) == (4, "length")
    assert f"{n_prompt} tokens and num_ctx is {n_prompt}" in refusal_of(generate(served, options={"num_ctx": n_prompt}))


def test_more_context_than_there_is_is_refused_with_both_numbers(served: Serving) -> None:
    assert "num_ctx is 513, and the model is served with 512" in refusal_of(chat(served, options={"num_ctx": 513}))
    assert chat(served, options={"num_ctx": 512, "num_predict": 1}).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_K4_K5_a_prompt_as_long_as_the_context_is_refused_before_the_first_byte(served: Serving, stream: bool) -> None:
    words = refusal_of(generate(served, prompt="x " * 600, stream=stream))

    assert re.search(r"the prompt has \d+ tokens and the context 512", words)


# --- bytes of streams ---------------------------------------------------------------------------------------


def received(served: Serving, path: str, body: dict[str, Any]) -> tuple[bytes, bytes]:
    """Head and body of a reply in chunks."""
    with served.sent(path, body) as connection:
        raw = b""
        while not raw.endswith(b"\r\n0\r\n\r\n"):
            part = connection.recv(1 << 16)
            assert part, raw
            raw += part
    head, _, chunked = raw.partition(b"\r\n\r\n")
    parts = chunked.split(b"\r\n")
    assert [int(size, 16) for size in parts[:-2:2]] == [len(part) for part in parts[1:-1:2]]
    return head, b"".join(parts[1:-1:2])


def test_streams_are_lines_of_json_unless_it_says_otherwise(served: Serving) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "options": {"num_predict": 3, "temperature": 0}}
    head, body = received(served, "/api/chat", asked)
    *lines, last = lines_of(body)

    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-type: application/x-ndjson\r\n" in head.lower() + b"\r\n"
    assert all(line.keys() == {"model", "created_at", "message", "done"} for line in lines)
    assert all(RFC_3339.fullmatch(line["created_at"]) for line in (*lines, last))
    assert last.keys() == {"model", "created_at", "message", "done", "done_reason", *FIGURES}
    assert all(isinstance(last[name], int) for name in FIGURES)
    assert last["message"] == {"role": "assistant", "content": ""}


def test_a_whole_answer_is_one_document(served: Serving) -> None:
    reply = generate(served, options={"num_predict": 3, "temperature": 0})

    assert reply.headers["Content-Type"] == "application/json"
    assert reply.json.keys() == {"model", "created_at", "response", "done", "done_reason", *FIGURES}
    assert (reply.json["done"], reply.json["done_reason"], reply.json["eval_count"]) == (True, "length", 3)


def test_a_stream_says_by_empty_parts_that_it_lives_while_the_prompt_is_read(model: Path) -> None:
    with serving(model, ping_s=0.05) as served:
        served.device.gate.clear()
        body = {"model": "tiny", "prompt": "Hello", "options": {"num_predict": 3, "seed": 1}}
        with served.sent("/api/generate", body) as connection:
            raw = b""
            while raw.count(b'"response":""') < 3:
                raw += connection.recv(1 << 16)
            served.device.gate.set()
            while b'"done":true' not in raw:
                raw += connection.recv(1 << 16)

        assert raw.find(b'"done":true') > raw.find(b'"response":""')


def test_K5_an_error_after_the_first_byte_is_a_line(model: Path) -> None:
    with serving(model) as served, ollama.Client(served.url, timeout=60) as client:
        served.device.broken = range(1 << 40)
        body = generate(served, prompt="x " * 30, stream=True, options=ENDLESS).body
        *_, last = lines_of(body)
        assert last.keys() == {"error"}
        with pytest.raises(ollama.ResponseError):
            list(client.generate("tiny", "y " * 30, stream=True, options=ENDLESS))
        assert refusal_of(generate(served, prompt="z " * 30, options=ENDLESS), 500)
        served.device.broken = range(0)
        assert generate(served, options={"num_predict": 3}).status == 200  # the engine is sound


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


def test_unknown_options_are_ignored_and_told_of_once(served: Serving, caplog: pytest.LogCaptureFixture) -> None:
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
        wait_until(lambda: (job := served.worker._running) is not None and job.cancelled, seconds=30)
        served.device.gate.set()
        served.wait_for(running=False)

        assert served.worker.totals.new_tokens < 400
        assert generate(served, options={"num_predict": 3}).status == 200
