"""The flags that verbs share: names as in llama.cpp, a LEVER_ variable for each, help that teaches.

Ranges are checked where the settings are made (`lever.settings`, `lever.loader`), not here.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lever.errors import UsageError
from lever.settings import AUTO, CPU, NONE, SamplerSettings

if TYPE_CHECKING:
    from lever.grammar import Grammar
    from lever.llm import GenerationSettings
    from lever.loader import ModelSettings
    from lever.opening import Wanted

PROMPT, MEMORY, SAMPLING, OUTPUT = "Prompt", "Memory and speed", "Sampling", "Options"
INTERRUPTED = 130  # what a shell expects after Ctrl-C
SWITCH = ""  # in the place of a value's name
BATCH_SIZE, RING = 512, 3


class Layout(StrEnum):
    """How the kernels find the weights."""

    auto = "auto"
    repacked = "repacked"


class TreeAttention(StrEnum):
    """How the rows of a tree attend."""

    exact = "exact"
    masked = "masked"


class Prune(StrEnum):
    """Which rows of a tree go on behind a middle layer."""

    auto = "auto"
    paper = "paper"
    off = "off"


def variable(flag: str) -> str:
    """The environment variable of a flag: LEVER_TOP_K of --top-k."""
    return "LEVER_" + flag.removeprefix("--").replace("-", "_").upper()


def flag(panel: str, *names: str, value: str, help: str, **more: Any) -> Any:
    """An option that takes a `value`, or SWITCH for none; its variable is that of its first long name."""
    long_name = next(name for name in names if name.startswith("--"))
    more.setdefault("envvar", variable(long_name))
    return typer.Option(*names, metavar=value, help=help, rich_help_panel=panel, show_envvar=False, **more)


def _otherwise(text: str) -> str:
    """How help shows a default that depends on something."""
    return f"[dim]\\[default: {text}][/dim]"


def thread_count(asked: int | None) -> int:
    """Compute threads at most: what was asked for, or the performance cores."""
    from lever.machine import performance_cores

    return len(performance_cores()) if asked is None else asked


def model_settings(
    dram: str,
    threads: int | None,
    ring: int,
    *,
    pin: float | None = None,
    ctx_size: int | None = None,
    batch_size: int = BATCH_SIZE,
    tree_attention: TreeAttention = TreeAttention.exact,
    layout: Layout = Layout.auto,
    grammars: bool = False,
    device: str = CPU,
    draft_device: str = CPU,
) -> ModelSettings:
    """What the flags about memory and speed say; those that a verb has not are left as they are. Errors as there."""
    from lever.loader import ModelSettings
    from lever.memory import parse_size

    return ModelSettings(
        dram=parse_size(dram),
        pin_percent=pin,
        n_ctx=ctx_size,
        n_batch=batch_size,
        n_threads=thread_count(threads),
        n_slots=ring,
        tree_attention=tree_attention.value,
        layout=layout.value,
        grammars=grammars,
        device=device,
        draft_device=draft_device,
    )


def wanted(
    model: str,
    draft: str,
    *,
    no_draft: bool,
    no_image: bool,
    offline: bool,
    preset: str | None = None,
    layout: Layout = Layout.auto,
    predictor: str = AUTO,
    prune: Prune = Prune.auto,
) -> Wanted:
    """What the flags about the model and its draft say. For another layout than its own it is the file, no image."""
    from lever.opening import Wanted

    use_image = not no_image and layout is Layout.auto
    return Wanted(model, NONE if no_draft else draft, preset, use_image, offline, predictor, prune.value)


def generation_settings(
    *,
    max_tokens: int,
    seed: int,
    stops: Sequence[str],
    ignore_eos: bool,
    logit_bias: Sequence[str],
    constraint: Grammar | None = None,
    **sampling: Any,
) -> GenerationSettings:
    """What the flags about sampling say; `sampling` are those with the names of `SamplerSettings`. Errors as there."""
    from lever.llm import GenerationSettings

    return GenerationSettings(
        sampler=sampler_settings(seed, logit_bias, **sampling),
        max_new_tokens=None if max_tokens == -1 else max_tokens,
        stops=stops,
        ignore_eos=ignore_eos,
        constraint=constraint,
    )


def sampler_settings(seed: int, logit_bias: Sequence[str] = (), **sampling: Any) -> SamplerSettings:
    """How tokens are drawn; `sampling` as above. Errors as there."""
    bias = parse_logit_bias(logit_bias)
    return SamplerSettings(seed=secrets.randbits(32) if seed == -1 else seed, logit_bias=bias, **sampling)


def parse_logit_bias(items: Sequence[str]) -> dict[int, float]:
    """llama.cpp's `ID(+|-)BIAS`, for example 15043-inf."""
    bias = {}
    for item in items:
        match = re.fullmatch(r"(\d+)([+-](?:\d+\.?\d*|\.\d+|inf))", item.strip())
        if match is None:
            raise UsageError(f"logit-bias {item!r} is not ID(+|-)BIAS, such as 15043+1 or 15043-inf")
        bias[int(match[1])] = float(match[2])
    return bias


def _stop_in_environment() -> list[str]:
    """LEVER_STOP is one text with its spaces; typer would cut it at them."""
    text = os.environ.get(variable("--stop"))
    return [text] if text else []


def _speak_up(verbose: bool) -> None:
    if verbose:
        logging.getLogger("lever").setLevel(logging.INFO)


_MODEL = typer.Argument(metavar="MODEL", help="A GGUF file, hf:owner/repo[:QUANT], or a name such as demo.")
ModelArgument = Annotated[str, _MODEL]
ModelWord = Annotated[str | None, _MODEL]  # where there is a flag for it, too
ModelFlag = Annotated[
    str | None,
    flag(PROMPT, "-m", "--model", value="MODEL", help=f"The model, if not the first word. {_otherwise('demo')}"),
]
Prompt = Annotated[str | None, flag(PROMPT, "-p", "--prompt", value="TEXT", help="What to answer; - reads stdin.")]
PromptFile = Annotated[
    Path | None, flag(PROMPT, "-f", "--file", value="FILE", help="Read the prompt from this file; - is stdin.")
]
System = Annotated[str | None, flag(PROMPT, "-sys", "--system", value="TEXT", help="System message: how to answer.")]
Raw = Annotated[bool, flag(PROMPT, "--raw", value=SWITCH, help="No chat template: go on from the bare text.")]

Dram = Annotated[
    str,
    flag(
        MEMORY,
        "--dram",
        "--budget",
        value="SIZE",
        help="Memory for all that this process holds: 900MiB, 2G, 60% of what is free, or auto, which is 75% of it.",
    ),
]
Pin = Annotated[
    float | None,
    flag(
        MEMORY,
        "--pin",
        value="PERCENT",
        help=f"Share of the layers to keep in DRAM, 0 to 100. {_otherwise('as many as fit')}",
    ),
]
CtxSize = Annotated[
    int | None,
    flag(
        MEMORY,
        "-c",
        "--ctx-size",
        value="N",
        help=f"Tokens of prompt and answer together. {_otherwise('4096, or what model and budget allow')}",
    ),
]
BatchSize = Annotated[
    int, flag(MEMORY, "-b", "--batch-size", value="N", help="Prompt tokens of one pass over the layers.")
]
ThreadCount = Annotated[
    int | None,
    flag(MEMORY, "-t", "--threads", value="N", help=f"Compute threads at most. {_otherwise('the performance cores')}"),
]
Ring = Annotated[int, flag(MEMORY, "--ring", value="N", help="Layers that reading ahead may hold, 3 or more.")]
LayoutFlag = Annotated[
    Layout,
    flag(
        MEMORY,
        "--layout",
        value="LAYOUT",
        help="auto: as the file holds them. repacked: the whole model in DRAM as the fastest kernels want it, whose "
        "sums round differently; to stream it so, see lever pack.",
    ),
]

Draft = Annotated[
    str,
    flag(
        MEMORY,
        "-md",
        "--draft",
        value="MODEL",
        help="A small model of the same family that guesses ahead; the text stays the same. auto: the one that goes "
        "with the model, if it fits; lookup: none, guesses come from the text so far; none.",
    ),
]
NoDraft = Annotated[bool, flag(MEMORY, "--no-draft", value=SWITCH, help="Plain decoding: as --draft none.")]
PresetFlag = Annotated[
    str | None,
    flag(
        MEMORY,
        "--preset",
        value="NAME",
        help="How guesses are made and checked: lever, flash-ar (none), chain-sd, edgellm, specinfer, opt-tree, "
        "lever-paper. "
        f"{_otherwise('lever with a draft, flash-ar without')}",
    ),
]
TreeAttentionFlag = Annotated[
    TreeAttention,
    flag(
        MEMORY,
        "--tree-attention",
        value="WAY",
        help="exact: guesses are checked with the bits of plain decoding. masked: in fewer steps, faster with a long "
        "context, but sums run in another order: text may differ at near ties, which are counted.",
    ),
]
Device = Annotated[
    str,
    flag(
        MEMORY,
        "--device",
        value="DEVICE",
        help="What computes the layers: cpu, rpc:HOST:PORT (see lever rpc-serve), or another that lever doctor lists. "
        "Layers that are kept take its memory, not DRAM.",
    ),
]
DraftDevice = Annotated[
    str, flag(MEMORY, "--draft-device", value="DEVICE", help="What computes all of the draft, in its own memory.")
]
PredictorFlag = Annotated[
    str,
    flag(
        MEMORY,
        "--predictor",
        value="FILE",
        help="What tells in the middle of a pass which guesses are not worth the rest of it; the text stays the same. "
        "auto: the one that lever train-predictor has made for model and draft, if any; none.",
    ),
]
PruneFlag = Annotated[
    Prune,
    flag(
        MEMORY,
        "--prune",
        value="WAY",
        help="auto: guesses are dropped in the middle of a pass where that saves time. paper: by a threshold, in every "
        "pass. off: never.",
    ),
]
NoImage = Annotated[
    bool,
    flag(MEMORY, "--no-image", value=SWITCH, help="Leave the model's flash image alone (see lever pack)."),
]
NoProfile = Annotated[
    bool,
    flag(MEMORY, "--no-profile", value=SWITCH, help="Know nothing of this machine's speed (see lever profile)."),
]

MaxTokens = Annotated[
    int,
    flag(
        SAMPLING,
        "-n",
        "--max-tokens",
        "--predict",
        value="N",
        help="New tokens at most. -1: until the model ends or the context is full; 0: only read the prompt.",
    ),
]
Seed = Annotated[
    int, flag(SAMPLING, "-s", "--seed", value="N", help="Same seed, same text. -1: draw one and print it.")
]
Temperature = Annotated[float, flag(SAMPLING, "--temp", value="X", help="Randomness. 0: always the likeliest token.")]
TopK = Annotated[int, flag(SAMPLING, "--top-k", value="N", help="Draw from the N likeliest tokens. 0: off.")]
TopP = Annotated[
    float, flag(SAMPLING, "--top-p", value="X", help="Draw from the likeliest with this probability. 1: off.")
]
MinP = Annotated[float, flag(SAMPLING, "--min-p", value="X", help="Drop what is under X times the likeliest. 0: off.")]
RepeatPenalty = Annotated[
    float, flag(SAMPLING, "--repeat-penalty", value="X", help="Divides what recent tokens score. 1: off.")
]
RepeatLastN = Annotated[
    int, flag(SAMPLING, "--repeat-last-n", value="N", help="Tokens that count as recent. 0: off, -1: all.")
]
PresencePenalty = Annotated[
    float, flag(SAMPLING, "--presence-penalty", value="X", help="Taken off each recent token. 0: off.")
]
FrequencyPenalty = Annotated[
    float, flag(SAMPLING, "--frequency-penalty", value="X", help="Taken off once per occurrence. 0: off.")
]
LogitBias = Annotated[
    list[str] | None,
    flag(
        SAMPLING,
        "-l",
        "--logit-bias",
        value="ID±BIAS",
        help="Add to a token's logit: 15043+1, 15043-2.5, or 15043-inf to ban it. May be given often.",
    ),
]
Stop = Annotated[
    list[str],
    flag(
        SAMPLING,
        "--stop",
        value="TEXT",
        help="End before this text. May be given often.",
        envvar=None,
        default_factory=_stop_in_environment,
        show_default=False,
    ),
]
IgnoreEos = Annotated[
    bool, flag(SAMPLING, "--ignore-eos", value=SWITCH, help="Never draw a token that ends the answer.")
]
JsonSchema = Annotated[
    str | None,
    flag(
        SAMPLING,
        "-j",
        "--json-schema",
        value="JSON",
        help="Answer in JSON that fits this schema; {} is any JSON. Properties come in its order.",
    ),
]
JsonSchemaFile = Annotated[
    Path | None, flag(SAMPLING, "-jf", "--json-schema-file", value="FILE", help="Read the JSON schema from this file.")
]
GrammarText = Annotated[
    str | None,
    flag(
        SAMPLING,
        "--grammar",
        value="TEXT",
        help="Answer as the rule root of this grammar says, in llama.cpp's notation (GBNF).",
    ),
]
GrammarFile = Annotated[
    Path | None, flag(SAMPLING, "--grammar-file", value="FILE", help="Read the grammar from this file.")
]

NoHistory = Annotated[
    bool, flag(OUTPUT, "--no-history", value=SWITCH, help="Neither keep what is typed here nor offer what was before.")
]
Json = Annotated[bool, flag(OUTPUT, "--json", value=SWITCH, help="Print one JSON document on stdout instead of text.")]
Offline = Annotated[bool, flag(OUTPUT, "--offline", value=SWITCH, help="Ask no server: use what is in the caches.")]
Quiet = Annotated[bool, flag(OUTPUT, "-q", "--quiet", value=SWITCH, help="No figures and no progress on stderr.")]
Verbose = Annotated[
    bool,
    flag(
        OUTPUT, "-v", "--verbose", value=SWITCH, help="Say more on stderr: where the memory goes.", callback=_speak_up
    ),
]
