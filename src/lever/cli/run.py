"""`lever run`: one prompt, one answer, streamed to stdout; one line of figures to stderr."""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lever.cli import options as o
from lever.cli.console import Bar, bar, note, read_stdin
from lever.errors import UsageError
from lever.llm import LLM, Generation, GenerationSettings
from lever.loader import ModelSettings, Progress
from lever.machine import performance_cores
from lever.memory import format_size, parse_size
from lever.models import resolve
from lever.settings import SamplerSettings
from lever.stats import RunStats

INTERRUPTED = 130  # what a shell expects after Ctrl-C
DEFAULT_MODEL = "demo"


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [PROMPT]",
            help="A GGUF's path, hf:owner/repo[:QUANT] or a name such as demo; and what to answer.",
        ),
    ] = None,
    model: o.ModelFlag = None,
    prompt: o.Prompt = None,
    file: o.PromptFile = None,
    system: o.System = None,
    raw: o.Raw = False,
    dram: o.Dram = "auto",
    pin: o.Pin = None,
    ctx_size: o.CtxSize = None,
    batch_size: o.BatchSize = 512,
    threads: o.ThreadCount = None,
    ring: o.Ring = 3,
    layout: o.LayoutFlag = o.Layout.plain,
    max_tokens: o.MaxTokens = -1,
    seed: o.Seed = -1,
    temperature: o.Temperature = 0.8,
    top_k: o.TopK = 40,
    top_p: o.TopP = 0.95,
    min_p: o.MinP = 0.05,
    repeat_penalty: o.RepeatPenalty = 1.0,
    repeat_last_n: o.RepeatLastN = 64,
    presence_penalty: o.PresencePenalty = 0.0,
    frequency_penalty: o.FrequencyPenalty = 0.0,
    logit_bias: o.LogitBias = None,
    stop: o.Stop = None,
    ignore_eos: o.IgnoreEos = False,
    json_output: o.Json = False,
    offline: o.Offline = False,
    quiet: o.Quiet = False,
) -> None:
    """Answer one prompt with a model whose layers stay on storage, under a memory budget.

    [dim]lever run -p "Why is the sky blue?"[/dim]

    [dim]lever run model.gguf "Write a haiku." --dram 900MiB --temp 0[/dim]

    [dim]cat notes.txt | lever run hf:owner/repo:Q4_K_M -p - --json[/dim]
    """
    reference, text = _model_and_prompt(words or [], model, prompt, file)
    settings = ModelSettings(
        dram=parse_size(dram),
        pin_percent=pin,
        n_ctx=ctx_size,
        n_batch=batch_size,
        n_threads=threads or len(performance_cores()),
        n_slots=ring,
        layout=layout.value,
    )
    request = GenerationSettings(
        sampler=SamplerSettings(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            repeat_last_n=repeat_last_n,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=parse_logit_bias(logit_bias or []),
            seed=secrets.randbits(32) if seed == -1 else seed,
        ),
        max_new_tokens=None if max_tokens == -1 else max_tokens,
        stops=stop or [],
        ignore_eos=ignore_eos,
    )
    with bar() as progress:
        shown = None if quiet else progress
        resolved = resolve(reference, offline=offline, progress=shown)
        with LLM(resolved.path, settings, name=reference, progress=_loading(shown)) as llm:
            generation = _start(llm, text, system, raw, request, shown)
            interrupted = _write(generation, to_stdout=not json_output, shown=shown)
            figures = None if quiet else _figures(generation.stats)
    if json_output:
        print(json.dumps(_document(generation), ensure_ascii=False))  # noqa: T201 - the answer
    if figures:
        note(figures)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def parse_logit_bias(items: Sequence[str]) -> dict[int, float]:
    """llama.cpp's `ID(+|-)BIAS`, for example 15043-inf."""
    bias = {}
    for item in items:
        match = re.fullmatch(r"(\d+)([+-](?:\d+\.?\d*|\.\d+|inf))", item.strip())
        if match is None:
            raise UsageError(f"logit-bias {item!r} is not ID(+|-)BIAS, such as 15043+1 or 15043-inf")
        bias[int(match[1])] = float(match[2])
    return bias


def _model_and_prompt(
    words: Sequence[str], model: str | None, prompt: str | None, file: Path | None
) -> tuple[str, str]:
    """Two words are MODEL and PROMPT; one is the model, or the prompt when the model is given by flag."""
    if len(words) > 2:
        raise UsageError(f"{words[2]!r} is one word too many: put the prompt in quotes")
    by_word = words[-1] if len(words) == 2 or (words and model) else None
    reference = words[0] if words and by_word is not words[0] else model or DEFAULT_MODEL
    given = [source for source in (by_word, prompt, file) if source is not None]
    if len(given) > 1:
        raise UsageError("the prompt is given twice: use one of PROMPT, -p and -f")
    if file is not None:
        return reference, _read(file)
    text = by_word if prompt is None else prompt
    if text is None and sys.stdin.isatty():
        raise UsageError('no prompt: give one in quotes, such as lever run -p "Why is the sky blue?", or - for stdin')
    return reference, read_stdin() if text is None or text == "-" else text


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise UsageError(f"cannot read the prompt from {file}: {error.strerror}") from error


def _loading(shown: Bar | None) -> Progress | None:
    if shown is None:
        return None
    return Progress(lambda total: shown.start(total, "loading"), shown.advance)


def _start(
    llm: LLM, text: str, system: str | None, raw: bool, request: GenerationSettings, shown: Bar | None
) -> Generation:
    """Encode the prompt and start; nothing is computed before the first iteration."""
    if raw or llm.template is None:
        if system is not None:
            raise UsageError("--system needs a chat template: leave it out, or leave out --raw")
        if not raw:
            note("the model has no chat template: going on from the bare text")
        ids = llm.encode_raw(text)
    else:
        messages = [{"role": "system", "content": system}] if system is not None else []
        ids = llm.encode_chat([*messages, {"role": "user", "content": text}])
    if shown is None:
        return llm.generate(ids, request)
    shown.start(len(ids), "reading the prompt")
    return llm.generate(ids, request, shown.advance)


def _write(generation: Generation, *, to_stdout: bool, shown: Bar | None) -> bool:
    """Stream the text to stdout; whether Ctrl-C ended it."""
    interrupted = False
    try:
        for piece in generation:
            if shown is not None:
                shown.finish()
            if to_stdout:
                sys.stdout.write(piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        interrupted = True
    if to_stdout:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return interrupted


def _document(generation: Generation) -> dict[str, object]:
    return {
        "text": generation.text,
        "tokens": generation.tokens,
        "finish_reason": generation.finish_reason,
        "stats": generation.stats.to_dict(),
    }


def _figures(stats: RunStats) -> str:
    """One line: how fast, from where, in how much memory."""
    reads = "everything in DRAM"
    if stats.read_bytes:
        per_cycle = format_size(stats.read_bytes // max(stats.cycles, 1))
        how = "" if stats.direct_io else " (through the page cache: no O_DIRECT here)"
        reads = f"{per_cycle} a pass from flash at {stats.read_bytes_per_s / 1e9:.2f} GB/s{how}"
    return (
        f"{stats.new_tokens} tokens, {stats.tokens_per_s:.2f} a second; prompt of {stats.prompt_tokens} in "
        f"{stats.prefill_s:.1f} s; {reads}; {stats.pinned_layers} of {stats.layers} layers in DRAM; "
        f"peak {format_size(stats.peak_rss_bytes)} of {format_size(stats.dram_budget_bytes)}; "
        f"context {stats.n_ctx}; seed {stats.seed}"
    )
