"""Prompts that cannot fit, and what replies must not tell: with a tiny model, on a real socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.serving import Serving, serving
from tests.tiny import tiny_model

TOO_LONG = "0" * 200_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TOO_LONG}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": TOO_LONG}]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 512}),
        ("/apply-template", {"messages": [{"role": "user", "content": TOO_LONG}]}),
        ("/tokenize", {"content": TOO_LONG}),
        ("/api/generate", {"model": "tiny", "prompt": TOO_LONG, "raw": True}),
    ],
)
def test_K4_what_cannot_fit_is_refused_before_its_tokens_are_counted(
    served: Serving, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.llm.tokenizer, "encode_pieces", lambda *_, **__: pytest.fail("they were"))
    reply = served.ask(path, body)

    assert reply.status == 400
    assert "at least" in reply.body.decode()


def test_no_token_is_longer_than_the_longest(served: Serving) -> None:
    tokenizer = served.llm.tokenizer
    texts = [tokenizer.decode([token]) or tokenizer.token_text(token) for token in range(tokenizer.n_vocab)]

    assert 0 < max(map(len, texts)) <= tokenizer.longest


def test_a_prompt_that_may_fit_is_counted(served: Serving) -> None:
    error = served.ask("/v1/completions", {"prompt": "0" * 600}).error

    assert error["n_prompt_tokens"] == 600
    assert "at least" not in error["message"]


@pytest.mark.parametrize("n_characters", [5, 600])
def test_what_encoding_took_is_given_back(served: Serving, n_characters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[bool] = []
    monkeypatch.setattr("lever.server.service.release_unused", lambda: given_back.append(True))
    served.ask("/v1/completions", {"prompt": "0" * n_characters, "max_tokens": 1})

    assert given_back


def test_replies_name_no_folder_of_this_machine(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "bare.gguf", arch="qwen2", metadata={"tokenizer.chat_template": None})
    with serving(path, alias=None, draft=path, draft_name=str(path), name=str(path)) as served:
        replies = [served.ask(path) for path in ("/props", "/v1/models", "/api/tags", "/api/ps")]
        replies += [served.chat(), served.ask("/v1/completions", {"prompt": "x", "max_tokens": 1})]
        replies += [served.ask("/apply-template", {"messages": [{"role": "user", "content": "x"}]})]
        replies += [served.ask("/api/show", {"model": "bare.gguf"})]

        assert [reply.status for reply in replies] == [200, 200, 200, 200, 400, 200, 400, 200]
        assert replies[0].json["draft"] == "bare.gguf"
        assert not any(str(tmp_path) in reply.body.decode() for reply in replies)
