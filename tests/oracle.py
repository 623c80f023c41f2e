"""llama.cpp, through the package xllamacpp, as judge of what lever says of a model file. Knows nothing of lever."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp


class Oracle:
    """A llama.cpp server on a free port of this machine, with one model; it ends when the object is gone."""

    def __init__(self, model: Path, *, verbosity: int = -1) -> None:
        params: Any = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx, params.n_batch, params.n_parallel = 256, 32, 1
        params.warmup, params.fit_params, params.verbosity = False, False, verbosity
        params.no_extra_bufts = True  # no repacked copy of the weights
        self._server: Any = xllamacpp.Server(params)
        self._ask("/slots")  # answered by its loop: a server told to end before its loop has begun never ends

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        request = {"content": text, "add_special": add_special, "parse_special": parse_special}
        tokens: list[int] = self._post("/tokenize", request)["tokens"]
        return tokens

    def detokenize(self, tokens: list[int]) -> str:
        """The texts of all tokens, control tokens included, in one string."""
        text: str = self._post("/detokenize", {"tokens": tokens})["content"]
        return text

    def _post(self, path: str, body: object) -> Any:
        return self._ask(path, json.dumps(body).encode())

    def _ask(self, path: str, body: bytes | None = None) -> Any:
        url = self._server.listening_address + path
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        # A connection of its own: on a kept one each answer waits 40 ms for a delayed acknowledgement.
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
