"""Answers that obey a `response_format`, over the API and whatever guesses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from lever.loader import ModelSettings
from tests.lacking import needs
from tests.serving import SETTINGS, Serving, serving

needs("llguidance")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"wet": {"type": "boolean"}, "color": {"enum": ["red", "blue"]}},
    "required": ["wet", "color"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "water", "schema": SCHEMA, "strict": True}}


def is_water(text: str) -> bool:
    found = json.loads(text)
    return found.keys() == {"wet", "color"} and isinstance(found["wet"], bool) and found["color"] in ("red", "blue")


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_is_obeyed_streamed_and_whole(served: Serving, seed: int) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    ask: dict[str, Any] = {
        "model": "qwen2.gguf",
        "messages": [{"role": "user", "content": "Is water wet?"}],
        "response_format": FORMAT,
        "max_tokens": 300,
        "seed": seed,
    }
    whole = client.chat.completions.create(**ask).choices[0]
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**ask, stream=True)]

    assert is_water(whole.message.content or "")
    assert whole.finish_reason == "stop"
    assert "".join(pieces) == whole.message.content


def test_any_object_is_json(served: Serving) -> None:
    answer = served.chat(response_format={"type": "json_object"}, max_tokens=400, seed=2).json["choices"][0]
    text = answer["message"]["content"]
    assert text.lstrip().startswith("{")
    if answer["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


def test_an_object_may_bring_its_schema_as_llama_server_takes_it(served: Serving) -> None:
    answer = served.chat(response_format={"type": "json_object", "schema": SCHEMA}, max_tokens=300)
    assert is_water(answer.json["choices"][0]["message"]["content"])


def test_ollamas_format_is_obeyed(served: Serving) -> None:
    body = {"model": "qwen2.gguf", "prompt": "Is water wet?", "format": SCHEMA, "stream": False}
    assert is_water(served.ask("/api/generate", body).json["response"])


@pytest.mark.parametrize(
    "schema", [{"type": "strange"}, {"type": "integer", "minimum": 3, "maximum": 2}, {"$ref": "#/nowhere"}]
)
def test_a_schema_that_nothing_fits_is_refused_by_name_and_the_next_request_is_sound(
    served: Serving, schema: dict[str, Any]
) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    refused = served.chat(response_format=wanted)
    assert (refused.status, refused.json["error"]["param"]) == (400, "response_format")
    assert served.chat(max_tokens=2).status == 200


NO_ROOM = ModelSettings(dram=SETTINGS.dram, pin_percent=0)


@pytest.mark.parametrize("wanted", [FORMAT, {"type": "json_object"}, {"type": "json_object", "schema": SCHEMA}])
def test_without_the_library_a_schema_is_not_supported_and_what_to_install_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any]
) -> None:
    monkeypatch.setattr("lever.grammar.is_installed", lambda: False)
    with serving(model, settings=NO_ROOM) as bare:  # as `lever serve` starts it then
        refused = bare.chat(response_format=wanted)
        assert (refused.status, refused.error["code"]) == (501, "not_supported")
        assert refused.error["param"] == "response_format"
        assert "pip install 'lever-llm[grammar]'" in refused.error["message"]
        ollamas = bare.ask("/api/generate", {"model": "qwen2.gguf", "prompt": "x", "format": SCHEMA, "stream": False})
        assert ollamas.status == 501
        assert "pip install 'lever-llm[grammar]'" in ollamas.json["error"]
        assert bare.chat(response_format={"type": "text"}, max_tokens=2).status == 200


def test_a_server_without_room_for_schemas_says_so(model: Path) -> None:
    with serving(model, settings=NO_ROOM) as small:
        refused = small.chat(response_format=FORMAT)
        assert (refused.status, refused.json["error"]["code"]) == (501, "not_supported")
        assert small.chat(response_format={"type": "text"}, max_tokens=2).status == 200
