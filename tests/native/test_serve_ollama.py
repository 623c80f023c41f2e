"""Ollama's API on a real socket, with a tiny model: Ollama's own client, bytes of streams, the text of `lever run`."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import ollama
import pytest

from lever.server.types import JsonSchema, ResponseFormat
from tests.asking_ollama import FIGURES, MESSAGES, chat, generate, lines_of, refusal_of
from tests.command import Lever
from tests.serving import Serving, read_until, serving
from tests.tiny import tiny_model

RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")


@pytest.fixture(scope="module")
def client(served: Serving) -> Iterator[Any]:
    with ollama.Client(served.url, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def lever(tmp_path_factory: pytest.TempPathFactory) -> Lever:
    return Lever(tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("bytecode"))


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
    without = client.generate("tiny", "Hello world", raw=True, options={"num_predict": 16, "seed": 42})

    assert reply.response == expected["text"] != without.response
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


def test_with_no_tokens_to_predict_the_prompt_is_read(served: Serving) -> None:
    reply = generate(served, options={"num_predict": 0}).json

    assert (reply["response"], reply["eval_count"], reply["done_reason"]) == ("", 0, "length")


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        (None, None),
        ("", None),
        ("json", ResponseFormat("json_object")),
        ({"type": "integer"}, ResponseFormat("json_schema", JsonSchema(schema={"type": "integer"}))),
    ],
)
def test_a_format_becomes_the_constraint_that_the_same_response_format_is(
    served: Serving, monkeypatch: pytest.MonkeyPatch, given: Any, becomes: ResponseFormat | None
) -> None:
    seen: list[ResponseFormat | None] = []
    monkeypatch.setattr("lever.server.asked.constraint_of", lambda wanted, _llm: seen.append(wanted))
    for ask in (chat, generate):
        assert ask(served, format=given, options={"num_predict": 1}).status == 200

    assert seen == [becomes] * 2


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


def rest_of(connection: socket.socket, raw: bytes = b"") -> tuple[bytes, bytes]:
    """Head and body of a reply in chunks, of which this much is read."""
    raw = read_until(connection, lambda so_far: so_far.endswith(b"\r\n0\r\n\r\n"), raw)
    head, _, chunked = raw.partition(b"\r\n\r\n")
    parts = chunked.split(b"\r\n")
    assert [int(size, 16) for size in parts[:-2:2]] == [len(part) for part in parts[1:-1:2]]
    return head, b"".join(parts[1:-1:2])


def test_streams_are_lines_of_json_unless_it_says_otherwise(served: Serving) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "options": {"num_predict": 3, "temperature": 0}}
    with served.sent("/api/chat", asked) as connection:
        head, body = rest_of(connection)
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
            raw = read_until(connection, lambda so_far: so_far.count(b'"response":""') >= 3)
            served.device.gate.set()
            _, stream = rest_of(connection, raw)

        text = "".join(line["response"] for line in lines_of(stream))
        assert text == generate(served, options={"num_predict": 3, "seed": 1}).json["response"]


def test_K5_an_error_after_the_first_byte_is_a_line(model: Path) -> None:
    with serving(model) as served, ollama.Client(served.url, timeout=60) as client:
        served.device.broken = range(1 << 40)
        body = generate(served, prompt="x " * 30, stream=True, options={"seed": 3}).body
        *_, last = lines_of(body)
        assert last.keys() == {"error"}
        with pytest.raises(ollama.ResponseError):
            list(client.generate("tiny", "y " * 30, stream=True, options={"seed": 3}))
        assert refusal_of(generate(served, prompt="z " * 30, options={"seed": 3}), 500)
        served.device.broken = range(0)
        assert generate(served, options={"num_predict": 3}).status == 200  # the engine is sound
