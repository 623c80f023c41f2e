"""lever as a library: `from lever import LLM`. Sizes, models and settings by the words of the command line."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any, TypedDict, Unpack

from lever.grammar import Grammar
from lever.llm import Generation, GenerationSettings
from lever.loader import ModelSettings
from lever.machine import performance_cores
from lever.memory import parse_size
from lever.opening import Silent, Told, Wanted, learn, open_ready
from lever.owner import Owner
from lever.settings import AUTO, CPU, Prune, SamplerSettings

REQUEST = {  # options of an answer that are not about drawing, and their names in GenerationSettings
    "max_tokens": "max_new_tokens",
    "stop": "stops",
    "ignore_eos": "ignore_eos",
    "logprobs": "n_logprobs",
    "grammar": "constraint",
}

Messages = Sequence[Mapping[str, object]]  # {"role": "user", "content": "..."}


class Options(TypedDict, total=False):
    """Of one answer; what is not given is as for `lever run`."""

    max_tokens: int | None  # None: until the model ends or the context is full
    stop: Sequence[str]  # texts to end before
    ignore_eos: bool
    logprobs: int | None  # likeliest tokens to tell of at each place: `.logprobs` of the answer
    grammar: Grammar | None  # that the answer obeys: `lever.grammar.Grammar.from_json_schema({...})`
    seed: int | None  # None: drawn, and told in the stats
    temperature: float  # 0: always the likeliest token
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]


class LLM(Owner):
    """A model that answers, one request at a time; loaded when it is made.

        with LLM("demo", dram="900MiB") as llm:
            for piece in llm.stream("Why is the sky blue?", max_tokens=200):
                print(piece, end="", flush=True)

    Several can exist in one process; `dram` is what the whole process may hold, so each later one needs room for those
    before it as well. One that is not closed gives its memory back when the process ends.
    """

    def __init__(
        self,
        model: str | PathLike[str] = "demo",
        *,
        dram: str | int = "auto",
        draft: str | PathLike[str] = AUTO,
        preset: str | None = None,
        predictor: str | PathLike[str] = AUTO,
        prune: Prune = "auto",
        pin: float | None = None,
        n_ctx: int | None = None,
        n_threads: int | None = None,
        use_image: bool = True,
        use_profile: bool = True,
        grammars: bool = False,
        device: str = CPU,
        draft_device: str = CPU,
        offline: bool = False,
        progress: Told | None = None,
    ) -> None:
        """`model`: a path, hf:owner/repo[:QUANT] or a name such as demo. `dram`: bytes, "900MiB", "60%" or "auto".

        The rest is as the flags of `lever run`: `draft` is auto, none, lookup or a model. `grammars` keeps room for
        answers that obey one, some 50 MB; without it they need what happens to be left. `device` and `draft_device`
        compute the layers and the draft: cpu, rpc:HOST:PORT, or another that ggml has. `progress` is told of what
        takes long. Any of `lever.errors.LeverError`: UsageError, DoesNotFit, StorageError, DownloadError, GGUFError,
        DeviceLost.
        """
        told = progress if progress is not None else Silent()
        settings = ModelSettings(
            dram=dram if isinstance(dram, int) else parse_size(dram),
            pin_percent=pin,
            n_ctx=n_ctx,
            n_threads=n_threads if n_threads is not None else len(performance_cores()),
            grammars=grammars,
            device=device,
            draft_device=draft_device,
        )
        wanted = Wanted(fspath(model), fspath(draft), preset, use_image, offline, fspath(predictor), prune)
        self._newest: Generation | None = None
        try:
            self._llm, self._tuning = open_ready(wanted, settings, told, use_profile=use_profile)
        finally:
            told.finish()

    @property
    def n_ctx(self) -> int:
        """Tokens of prompt and answer together."""
        return self._llm.loaded.shape.n_ctx

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text as a prompt without a chat template."""
        return self._llm.encode_raw(text)

    def stream(self, prompt: str | Messages, *, raw: bool = False, **options: Unpack[Options]) -> Generation:
        """An answer: iterate for its text as it comes; `.text`, `.tokens`, `.stats`, `.cancel()` at any moment.

        A text is a user's question in the model's chat template, or, with `raw` or where the model has none, what to
        go on from. Starting another answer ends this one. UsageError, TemplateError or ContextOverflow for what cannot
        be answered.
        """
        self._learn()
        self._newest = self._llm.generate(self._encode(prompt, raw=raw), _settings(options))
        return self._newest

    def answer(self, prompt: str | Messages, *, raw: bool = False, **options: Unpack[Options]) -> Generation:
        """As `stream`, when it has come to its end."""
        generation = self.stream(prompt, raw=raw, **options)
        for _ in generation:
            pass
        return generation

    def close(self) -> None:
        """Give everything back. Safe to call twice."""
        self._learn()
        self._llm.close()

    def _encode(self, prompt: str | Messages, *, raw: bool) -> list[int]:
        if not isinstance(prompt, str):
            return self._llm.encode_chat(prompt)
        if raw or self._llm.template is None:
            return self._llm.encode_raw(prompt)
        return self._llm.encode_chat([{"role": "user", "content": prompt}])

    def _learn(self) -> None:
        """Correct what is known of this machine by the newest answer, if it came to its end."""
        if self._newest is not None and self._newest.finish_reason is not None and self._tuning is not None:
            learn(self._tuning, self._newest.stats)
        self._newest = None


def _settings(options: Options) -> GenerationSettings:
    """What is not said is as on the command line."""
    sampling: dict[str, Any] = dict(options)
    request = {name: sampling.pop(word) for word, name in REQUEST.items() if word in sampling}
    seed = sampling.pop("seed", None)
    sampler = SamplerSettings(seed=secrets.randbits(32) if seed is None else seed, **sampling)
    return GenerationSettings(sampler=sampler, **request)
