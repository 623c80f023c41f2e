"""The flags that verbs share: names as in llama.cpp, a LEVER_ variable for each, help that teaches."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

PROMPT, MEMORY, SAMPLING, OUTPUT = "Prompt", "Memory and speed", "Sampling", "Output and the rest"


class Layout(StrEnum):
    """How the kernels find the weights."""

    plain = "plain"
    repacked = "repacked"


def _flag(panel: str, *names: str, help: str, **more: Any) -> Any:
    """An option; its variable is LEVER_ and its first long name."""
    long_name = next(name for name in names if name.startswith("--"))
    variable = "LEVER_" + long_name.removeprefix("--").replace("-", "_").upper()
    return typer.Option(*names, envvar=variable, help=help, rich_help_panel=panel, **more)


ModelFlag = Annotated[
    str | None, _flag(PROMPT, "-m", "--model", help="The model, if not the first word. [dim]\\[default: demo][/dim]")
]
Prompt = Annotated[str | None, _flag(PROMPT, "-p", "--prompt", help="What to answer; - reads it from stdin.")]
PromptFile = Annotated[Path | None, _flag(PROMPT, "-f", "--file", help="Read the prompt from this file.")]
System = Annotated[str | None, _flag(PROMPT, "-sys", "--system", help="System message.")]
Raw = Annotated[bool, _flag(PROMPT, "--raw", help="No chat template: go on from the bare text.")]

Dram = Annotated[
    str,
    _flag(
        MEMORY,
        "--dram",
        "--budget",
        help="Memory for all that this process holds: 900MiB, 2G, 60% of what is free, or auto.",
    ),
]
Pin = Annotated[
    float | None,
    _flag(
        MEMORY,
        "--pin",
        min=0,
        max=100,
        metavar="PERCENT",
        help="Share of the layers to keep in DRAM. [dim]\\[default: as many as fit][/dim]",
    ),
]
CtxSize = Annotated[
    int | None,
    _flag(
        MEMORY,
        "-c",
        "--ctx-size",
        min=1,
        help="Tokens of prompt and answer together. [dim]\\[default: 4096, or less if model or budget ask][/dim]",
    ),
]
BatchSize = Annotated[
    int, _flag(MEMORY, "-b", "--batch-size", min=1, help="Prompt tokens of one pass over the layers.")
]
ThreadCount = Annotated[
    int | None,
    _flag(MEMORY, "-t", "--threads", min=1, help="Compute threads. [dim]\\[default: the performance cores][/dim]"),
]
Ring = Annotated[int, _flag(MEMORY, "--ring", min=3, help="Layers that the ring of reads holds.")]
LayoutFlag = Annotated[
    Layout,
    _flag(
        MEMORY,
        "--layout",
        help="repacked: the whole model in DRAM, in the layout of the fastest kernels (their sums round differently).",
    ),
]

MaxTokens = Annotated[
    int,
    _flag(
        SAMPLING,
        "-n",
        "--max-tokens",
        "--predict",
        min=-1,
        help="New tokens at most; -1: until the model ends or the context is full.",
    ),
]
Seed = Annotated[int, _flag(SAMPLING, "-s", "--seed", min=-1, help="Same seed, same text. -1: draw one and print it.")]
Temperature = Annotated[float, _flag(SAMPLING, "--temp", help="Randomness; 0 takes the likeliest token always.")]
TopK = Annotated[int, _flag(SAMPLING, "--top-k", help="Draw from so many likeliest tokens; 0: off.")]
TopP = Annotated[float, _flag(SAMPLING, "--top-p", help="Draw from the likeliest tokens of this share; 1: off.")]
MinP = Annotated[float, _flag(SAMPLING, "--min-p", help="Drop tokens under this share of the likeliest; 0: off.")]
RepeatPenalty = Annotated[float, _flag(SAMPLING, "--repeat-penalty", help="Weigh down what came before; 1: off.")]
RepeatLastN = Annotated[
    int, _flag(SAMPLING, "--repeat-last-n", min=-1, help="Tokens that penalties look back; 0: off, -1: all.")
]
PresencePenalty = Annotated[float, _flag(SAMPLING, "--presence-penalty", help="Off a token that was there; 0: off.")]
FrequencyPenalty = Annotated[
    float, _flag(SAMPLING, "--frequency-penalty", help="Off a token for each time it was there; 0: off.")
]
LogitBias = Annotated[
    list[str] | None,
    _flag(
        SAMPLING,
        "-l",
        "--logit-bias",
        metavar="ID(+|-)BIAS",
        help="Add to a token's logit: 15043+1, 15043-2.5, or 15043-inf to ban it. May be given often.",
    ),
]
Stop = Annotated[
    list[str] | None, _flag(SAMPLING, "--stop", metavar="TEXT", help="End before this text. May be given often.")
]
IgnoreEos = Annotated[bool, _flag(SAMPLING, "--ignore-eos", help="Never draw a token that ends the answer.")]

Json = Annotated[bool, _flag(OUTPUT, "--json", help="Print one JSON document on stdout, and no text.")]
Offline = Annotated[bool, _flag(OUTPUT, "--offline", help="Ask no server: use what is in the caches.")]
Quiet = Annotated[bool, _flag(OUTPUT, "-q", "--quiet", help="No figures and no progress.")]
