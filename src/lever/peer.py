"""Another program to compare with: llama.cpp in a process of its own, maybe in a memory cage. Decides nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from urllib.parse import urlsplit

from lever import gguf
from lever.bench import Answer, Request
from lever.cage import Cage, cage
from lever.errors import LeverError, UsageError
from lever.memory import drop_page_cache, peak_rss_bytes
from lever.owner import Owner
from lever.stats import RunStats
from lever.weights.image import Image

LLAMA_CPP = "llama.cpp"
DRAFT_ROOM = 64  # positions of its context beyond text: what its draft guesses
END_S = 10.0


@dataclass(frozen=True, slots=True)
class PeerModel:
    """Files that it can read, and how much of this machine it gets."""

    path: Path
    draft: Path | None
    n_ctx: int
    n_threads: int


def require_llama_cpp() -> None:
    """UsageError without its package."""
    if find_spec("xllamacpp") is None:
        raise UsageError(
            "--peer llama.cpp needs the package xllamacpp: install it with pip install 'lever-llm[bench]', "
            "or uv sync --extra bench in a checkout"
        )


def require_gguf(path: Path) -> None:
    """UsageError for a flash image, which no other program reads."""
    if Image.of(gguf.read(path)) is not None:
        raise UsageError(f"{path} is a flash image, which llama.cpp cannot read: give the GGUF that it was packed from")


class LlamaCpp(Owner):
    """A server that has loaded the model: all of it in memory, or by mmap in a cage of `limit_bytes`."""

    ours = False

    def __init__(self, name: str, model: PeerModel, request: Request, limit_bytes: int | None = None) -> None:
        """Start it; `wait` until it is loaded. NoCage where there can be none."""
        self.name = name
        self._request = request
        self._address = ""
        with ExitStack() as stack:
            self._cage = stack.enter_context(cage(limit_bytes)) if limit_bytes is not None else None
            self._said = stack.enter_context(TemporaryFile())
            self._process = _start(_command(model, self._cage), self._said)
            stack.callback(self._end)
            self._cleanup = stack.pop_all()

    def wait(self) -> None:
        """Until it is loaded. LeverError when it ends by itself."""
        assert self._process.stdout is not None
        self._address = urlsplit(self._process.stdout.readline().decode().strip()).netloc
        if not self._address:
            raise self._ended()

    def answer(self, prompt: Sequence[int]) -> Answer:
        """Its own count and time of the decode phase; without a draft a pass is a token."""
        sampler = self._request.sampler
        found = self._ask(
            {
                "prompt": list(prompt),
                "n_predict": self._request.max_new_tokens,
                "temperature": sampler.temperature,
                "seed": sampler.seed & 0xFFFFFFFF,
                "top_k": sampler.top_k,
                "top_p": sampler.top_p,
                "min_p": sampler.min_p,
                "repeat_penalty": sampler.repeat_penalty,
                "repeat_last_n": sampler.repeat_last_n,
                "presence_penalty": sampler.presence_penalty,
                "frequency_penalty": sampler.frequency_penalty,
                "cache_prompt": False,
                "return_tokens": True,
            }
        )
        timings, n_tokens = found["timings"], found["timings"]["predicted_n"]
        drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        stats = RunStats(
            prompt_tokens=len(prompt),
            new_tokens=n_tokens,
            prefill_s=timings["prompt_ms"] / 1e3,
            decode_s=timings["predicted_ms"] / 1e3,
            cycles=max(n_tokens - 1 - accepted, 0),
            drafted=drafted,
            verified=drafted,
            accepted=accepted,
            peak_rss_bytes=peak_rss_bytes(Path(f"/proc/{self._process.pid}/status")),
            preset=self.name,
        )
        return Answer(tuple(found["tokens"]), stats)

    def kill(self) -> None:
        """End it now: whoever waits for its answer gets an error. May be called from a signal handler."""
        self._process.kill()

    def close(self) -> None:
        """End it and take its cage away. Safe to call twice."""
        self._cleanup.close()

    def _ask(self, body: dict[str, object]) -> Any:
        connection = HTTPConnection(self._address)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            found = json.load(response)
        except (OSError, HTTPException, ValueError) as error:
            raise self._ended() from error
        finally:
            connection.close()
        if response.status != 200 or "timings" not in found:
            raise LeverError(f"{self.name} refuses the prompt: {json.dumps(found)[:300]}")
        return found

    def _ended(self) -> LeverError:
        """Why it is gone."""
        try:
            code = f"ended with {self._process.wait(END_S)}"
        except subprocess.TimeoutExpired:
            code = "does not answer"
        if self._cage is not None and self._cage.oom_kills:
            return LeverError(f"{self.name} was ended for want of memory: give it more with --peer-cage")
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return LeverError(f"{self.name} {code}: {last[:300]}")

    def _end(self) -> None:
        with self._process:  # closes the pipes and waits
            self._process.kill()


def _command(model: PeerModel, held: Cage | None) -> list[str | Path]:
    command: list[str | Path] = [sys.executable, "-m", "lever.llama_cpp", model.path]
    command += ["-c", str(model.n_ctx), "-t", str(model.n_threads)]
    if model.draft is not None:
        command += ["--draft", model.draft]
    if held is None:
        return command
    for path in filter(None, (model.path, model.draft)):
        _drop_from_page_cache(path)
    return held.command([*command, "--mmap"])


def _drop_from_page_cache(path: Path) -> None:
    """What is cached already is charged to nobody in the cage, and would be memory beyond its limit."""
    for file in gguf.read(path).files:
        fd = os.open(file, os.O_RDONLY)
        try:
            drop_page_cache(fd)
        finally:
            os.close(fd)


def _start(command: Sequence[str | Path], said: Any) -> subprocess.Popen[bytes]:
    """The server, asleep between requests, and out of the reach of a Ctrl-C that is meant for us."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        start_new_session=True,
    )
