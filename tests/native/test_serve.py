"""The server's replies on a real socket, with a tiny model: OpenAI's client, bytes of streams, wrong requests."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from lever.errors import LeverError
from lever.server.app import ELSEWHERE
from lever.server.listen import listen
from tests.fakes import FakeDevice, wait_until
from tests.serving import Serving, read_until, serving
from tests.tiny import tiny_model

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello world"}]


@pytest.fixture(scope="module")
def client(served: Serving) -> Iterator[Any]:
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60, _strict_response_validation=True
    ) as found:
        yield found


@pytest.fixture(scope="module")
def lenient(served: Serving) -> Iterator[Any]:
    """As people have it. The strict one refuses the null finish_reason of a completion's chunks, OpenAI's own too."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def of(served: Serving, **more: Any) -> Any:
    """The error of a chat that is refused with 400."""
    reply = served.chat(**more)
    assert reply.status == 400, reply.body
    return reply.error


# --- OpenAI's client ----------------------------------------------------------------------------------------


def test_G7_a_chat_is_read_by_the_strict_client(client: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8, seed=1)

    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.refusal is None
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.system_fingerprint.startswith("fp_")
    assert answer.model == "tiny"


@pytest.mark.parametrize("more", [{}, {"stop": ["e"]}, {"temperature": 0}, {"logprobs": True, "top_logprobs": 3}])
def test_a_streamed_chat_is_the_whole_one(client: Any, more: dict[str, Any]) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "seed": 7, **more}
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]

    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.finish_reason]
    assert [chunk.delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    if "logprobs" in more:
        told = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
        assert told == whole.logprobs.content


@pytest.mark.parametrize("more", [{}, {"logprobs": 3}])
def test_a_streamed_completion_is_the_whole_one(client: Any, lenient: Any, more: dict[str, Any]) -> None:
    asked = {"model": "tiny", "prompt": "Once upon", "max_tokens": 12, "seed": 7, **more}
    whole = client.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in lenient.completions.create(**asked, stream=True)]

    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].finish_reason == whole.finish_reason == "length"
    if more:
        assert [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.tokens] == whole.logprobs.tokens
        offsets = [offset for chunk in chunks if chunk.logprobs for offset in chunk.logprobs.text_offset]
        assert offsets == whole.logprobs.text_offset


def test_a_completion_without_a_limit_has_16_tokens(client: Any) -> None:
    answer = client.completions.create(model="tiny", prompt="Once", seed=7, extra_body={"ignore_eos": True})

    assert answer.usage.completion_tokens == 16


def test_a_prompt_of_token_ids_is_the_text_that_they_spell(client: Any, served: Serving) -> None:
    ids = served.llm.encode_raw("Hello world")
    texts = {
        client.completions.create(model="tiny", prompt=prompt, seed=7).choices[0].text
        for prompt in ("Hello world", ["Hello world"], ids, [ids])
    }

    assert len(texts) == 1


def test_models_are_listed_and_found_by_their_names(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert client.models.retrieve("qwen2.gguf").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_another_model_is_not_found(served: Serving) -> None:
    reply = served.chat(model="gpt-other")

    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")


def test_K10_logprobs_are_of_the_raw_softmax_with_bytes_and_one_for_each_token(client: Any) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 5}
    greedy = client.chat.completions.create(**asked, temperature=0).choices[0]
    found = greedy.logprobs.content

    assert len(found) == 6
    assert b"".join(bytes(entry.bytes) for entry in found).decode(errors="replace") == greedy.message.content
    for entry in found:
        assert len(entry.top_logprobs) == 5
        assert entry.logprob == entry.top_logprobs[0].logprob  # the likeliest was drawn
    # They are told before any filter: another temperature, and one candidate, change nothing at the first place.
    filtered = client.chat.completions.create(**asked, temperature=2, extra_body={"top_k": 1}).choices[0]
    assert filtered.logprobs.content[0] == found[0]


def test_F4_F7_a_stop_string_ends_the_text_and_is_no_part_of_it(client: Any) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "seed": 3}
    text = client.chat.completions.create(**asked).choices[0].message.content
    stop = text[5:8]
    short = client.chat.completions.create(**asked, stop=[stop]).choices[0]

    assert short.message.content == text[: text.find(stop)]
    assert short.finish_reason == "stop"


def test_F7_a_stop_string_is_not_looked_for_in_the_prompt(served: Serving) -> None:
    asked: dict[str, Any] = {"max_tokens": 12, "seed": 3}
    text = served.chat("Hello world", **asked).json["choices"][0]["message"]["content"]

    assert served.chat("Hello world", **asked, stop="Hello wor").json["choices"][0]["message"]["content"] == text
    first = served.chat("Hello world", **asked, stop=text[0]).json["choices"][0]
    assert (first["message"]["content"], first["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize("temperature", [0, 1])
def test_K10_logprobs_are_the_same_with_guesses(served: Serving, model: Path, temperature: float) -> None:
    asked: dict[str, Any] = {"max_tokens": 40, "seed": 3, "logprobs": True, "top_logprobs": 5}
    asked |= {"text": "a b c a b c a b c", "temperature": temperature}
    with serving(model, draft=model, draft_name="itself", policy="chain-sd") as guessing:
        guessed = guessing.chat(**asked).json["choices"]
        assert guessing.worker.totals.verified > 0

    assert served.chat(**asked).json["choices"] == guessed


# --- bytes of streams ---------------------------------------------------------------------------------------


def test_K7_the_stream_ends_with_done_and_nothing_after(served: Serving) -> None:
    with served.asked(max_tokens=3, stream=True) as connection:
        received = read_until(connection, lambda so_far: so_far.endswith(b"0\r\n\r\n"))
    head, _, body = received.partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-type: text/event-stream; charset=utf-8\r\n" in head.lower() + b"\r\n"
    assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert body.count(b"[DONE]") == 1
    assert b"\r" not in b"".join(line for line in body.split(b"\r\n") if line.startswith(b"data"))


def test_K8_usage_comes_only_when_it_is_asked_for(served: Serving) -> None:
    without = served.chat(max_tokens=3, stream=True).events
    with_it = served.chat(max_tokens=3, stream=True, stream_options={"include_usage": True}).events

    assert not any("usage" in event for event in without)
    assert with_it[-1]["choices"] == []
    assert with_it[-1]["usage"]["completion_tokens"] == 3
    assert [event["usage"] for event in with_it[:-1]] == [None] * (len(with_it) - 1)
    assert with_it[-2]["choices"][0]["finish_reason"] == "length"
    assert with_it[-2]["timings"]["predicted_n"] == 3


def test_progress_and_cycles_come_when_they_are_asked_for(served: Serving) -> None:
    events = served.chat("a new text", max_tokens=4, stream=True, return_progress=True, return_cycles=True).events
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    cycles = [event["cycle"] for event in events if "cycle" in event]

    assert progress[-1]["processed"] == progress[-1]["total"]
    assert progress[-1].keys() == {"total", "cache", "processed", "time_ms"}
    assert [cycle["new_tokens"] for cycle in cycles] == [1, 1, 1]
    assert all(cycle["nodes"][0]["state"] == "root" for cycle in cycles)
    assert sum(cycle["read_bytes"] for cycle in cycles) > 0
    assert not any(
        {"prompt_progress", "cycle"} & event.keys() for event in served.chat(max_tokens=4, stream=True).events
    )


def test_the_tree_of_a_cycle_is_shown_with_what_became_of_it(model: Path) -> None:
    with serving(model, draft=model, draft_name="itself", policy="specinfer") as served:
        reply = served.chat("a b c a b c a b c", max_tokens=40, temperature=0, stream=True, return_cycles=True)
        whole = served.chat("a b c a b c a b c", max_tokens=40, temperature=0)
        shown = [event["cycle"] for event in reply.events if "cycle" in event]

        text = "".join(event["choices"][0]["delta"].get("content", "") for event in reply.events if event["choices"])
        assert text == whole.json["choices"][0]["message"]["content"]
        assert any(len(cycle["nodes"]) > 1 for cycle in shown)
        for cycle in shown:
            states = [node["state"] for node in cycle["nodes"]]
            assert states.count("accepted") == cycle["new_tokens"] - 1
            assert all(node["parent"] < number for number, node in enumerate(cycle["nodes"]))
        assert sum(cycle["new_tokens"] for cycle in shown) == reply.events[-1]["timings"]["predicted_n"] - 1


def test_a_stream_says_that_it_lives_while_the_prompt_is_read(model: Path) -> None:
    with serving(model, ping_s=0.05) as served:
        served.device.gate.clear()
        with served.asked(stream=True, max_tokens=2) as connection:
            received = read_until(connection, lambda so_far: so_far.count(b": ping\n\n") >= 3)
            served.device.gate.set()
            received = read_until(connection, lambda so_far: b"[DONE]" in so_far, received)

        assert received.find(b'"role":"assistant"') < received.find(b": ping")


def test_K5_an_error_after_the_first_byte_is_an_event_and_names_no_file(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(model) as served:
        served.device.broken = range(1 << 40)
        body = served.chat("x " * 30, stream=True, max_tokens=200).body

        name, line, *_ = body.decode().split("\n\n")[-2].split("\n")
        assert str(model.parent) not in body.decode()
        assert f"an answer failed: reading {model} " in caplog.text
        assert name == "event: error"
        assert json.loads(line.removeprefix("data: "))["error"]["type"] == "server_error"
        assert b"[DONE]" not in body
        served.device.broken = range(0)
        assert served.chat(max_tokens=3).status == 200  # the engine is sound


# --- requests that are wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 2}, "n"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"seed": -2}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ],
)
def test_a_wrong_field_is_named(served: Serving, more: dict[str, Any], param: str) -> None:
    error = of(served, **more)

    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b'{"messages": 1}', b'{"messages": "\\ud800"}', b"[" * 100_000, b"{}"]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_a_malformed_body_is_refused(served: Serving, path: str, body: bytes) -> None:
    reply = served.ask(path, body, method="POST")

    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")


def test_unknown_fields_are_ignored_and_told_of_once(
    served: Serving, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lever.server.asked._told_of", set())  # whatever other tests have asked
    unknown: list[dict[str, Any]] = [{"brand new": 1}, {"brand new": [2]}]
    answers = [served.chat(max_tokens=3, seed=1, **more) for more in unknown]

    assert {reply.status for reply in answers} == {200}
    assert caplog.text.count("brand new") == 1


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tools"),
    ],
)
def test_what_is_not_there_says_so(served: Serving, more: dict[str, Any], param: str) -> None:
    reply = served.chat(**more)

    assert (reply.status, reply.error["param"]) == (501, param)


def test_nothing_may_be_asked_for_in_words_that_mean_nothing(served: Serving) -> None:
    more: dict[str, Any] = {
        "tools": [],
        "tool_choice": None,
        "response_format": {"type": "text"},
        "stop": None,
        "logit_bias": {},
    }
    assert served.chat(max_tokens=1, user="me", cache_prompt=True, temperature=None, **more).status == 200


@pytest.mark.parametrize("content", ["Hello", [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}], None])
def test_G5_content_is_text_or_parts_or_null(served: Serving, content: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content, "tool_calls": None}]
    messages.append({"role": "user", "content": content})

    assert served.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).status == 200


def test_G5_an_image_is_refused(served: Serving) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    error = of(served, messages=[{"role": "user", "content": parts}])

    assert error["param"] == "messages"
    assert "image_url" in error["message"]


def test_G2_a_template_that_refuses_is_a_400_in_its_own_words(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    path = tiny_model(tmp_path / "strict.gguf", metadata={"tokenizer.chat_template": template})
    with serving(path) as served:
        error = of(served, messages=[{"role": "tool", "content": "x"}])

        assert "no tools here" in error["message"]
        assert served.chat(max_tokens=1).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_K4_K5_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(served: Serving, stream: bool) -> None:
    error = of(served, text="x " * 600, stream=stream)

    assert (error["type"], error["code"]) == ("exceed_context_size_error", "context_length_exceeded")
    assert error["n_prompt_tokens"] >= error["n_ctx"] == 512


def test_K4_a_prompt_that_leaves_room_for_one_token_gets_one(served: Serving) -> None:
    ids = [served.llm.encode_raw("x")[0]] * 511
    reply = served.ask("/v1/completions", {"prompt": ids, "max_tokens": 10, "ignore_eos": True}).json

    assert reply["usage"]["completion_tokens"] == 1
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", ELSEWHERE)
def test_endpoints_of_others_are_not_implemented(served: Serving, path: str) -> None:
    assert served.ask(path, {}).status == 501


def test_other_paths_and_methods_are_refused_in_json(served: Serving) -> None:
    assert (served.ask("/nothing").status, served.ask("/nothing").error["type"]) == (404, "invalid_request_error")
    reply = served.ask("/v1/chat/completions")
    assert (reply.status, reply.headers["Allow"]) == (405, "POST")
    assert "GET" in reply.error["message"]


# --- the rest -----------------------------------------------------------------------------------------------


def test_tokens_and_text_go_both_ways(served: Serving) -> None:
    ids = served.ask("/tokenize", {"content": "Hello world é"}).json["tokens"]
    pieces = served.ask("/tokenize", {"content": "Hello world é", "with_pieces": True}).json["tokens"]

    assert ids == served.llm.tokenizer.encode("Hello world é", add_special=False, parse_special=True)
    assert served.ask("/detokenize", {"tokens": ids}).json == {"content": "Hello world é"}
    assert [piece["id"] for piece in pieces] == ids
    assert served.ask("/detokenize", {"tokens": [10**6]}).error["param"] == "tokens"


def test_the_template_is_applied(served: Serving) -> None:
    prompt = served.ask("/apply-template", {"messages": MESSAGES}).json["prompt"]

    assert prompt.endswith("<|im_start|>user\nHello world<|im_end|>\n<|im_start|>assistant\n")


def test_props_tell_of_model_memory_and_storage(served: Serving) -> None:
    props = served.ask("/props").json

    assert props["model"] == "tiny"
    assert props["memory"]["planned"] == sum(props["memory"]["parts"].values()) <= props["memory"]["budget"]
    assert props["bytes_per_pass"] > 0
    assert (props["draft"], props["preset"]) == (None, "flash-ar")


def test_metrics_count_what_was_done(model: Path) -> None:
    with serving(model) as served:
        usage = served.chat(max_tokens=5, temperature=0, ignore_eos=True).json["usage"]
        text = served.ask("/metrics").body.decode()

        assert "lever:tokens_predicted_total 5.0\n" in text
        assert f"lever:prompt_tokens_total {usage['prompt_tokens']}.0\n" in text
        assert 'lever:resident_bytes{part="KV cache"}' in text
        assert "lever:requests_processing 0.0\n" in text
    with serving(model, metrics=False) as served:
        assert served.ask("/metrics").status == 501


def test_health_is_503_while_loading_and_then_200(model: Path) -> None:
    device = FakeDevice()
    device.gate.clear()
    with serving(model, device=device, ready=False) as served:
        for path in ("/health", "/v1/health"):
            assert (served.ask(path).status, served.ask(path).error["code"]) == (503, "model_not_ready")
        assert served.chat().headers["Retry-After"]
        assert served.ask("/v1/models").json["data"][0]["meta"] is None
        device.gate.set()
        wait_until(lambda: served.worker.state == "ready", seconds=30)
        assert served.ask("/health").json == {"status": "ok"}


def test_the_page_fetches_nothing_from_elsewhere(served: Serving) -> None:
    reply = served.ask("/")

    assert reply.headers["Content-Type"].startswith("text/html")
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "http" not in policy


def test_K13_the_fingerprint_changes_with_the_variant(served: Serving, tmp_path: Path) -> None:
    first = served.chat(max_tokens=1).json["system_fingerprint"]
    other = tiny_model(tmp_path / "other.gguf", arch="qwen2", seed=1)
    with serving(other) as second:
        assert second.chat(max_tokens=1).json["system_fingerprint"] != first
    assert served.chat(max_tokens=1).json["system_fingerprint"] == first


def test_one_connection_may_ask_often(served: Serving) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    body = json.dumps({"messages": MESSAGES, "max_tokens": 2, "stream": True})
    for _ in range(3):
        connection.request("POST", "/v1/chat/completions", body)
        assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")
    connection.close()


def test_a_port_is_only_ours_once(served: Serving) -> None:
    with pytest.raises(LeverError, match="--port"):
        listen("127.0.0.1", served.port)
    with socket.create_connection(("127.0.0.1", served.port), timeout=10):
        pass
