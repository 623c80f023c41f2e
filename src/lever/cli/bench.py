"""`lever bench`: presets, and llama.cpp, on the same prompts. Words in, settings out."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from lever.cli import options as o
from lever.cli.run import DEFAULT_MODEL, STDIN
from lever.errors import UsageError
from lever.settings import AUTO, CPU

COMPARING = "What is compared"
DEFAULT_PRESETS = "flash-ar,chain-sd,lever"


class Peer(StrEnum):
    """Other programs."""

    llama_cpp = "llama.cpp"


def _option(*names: str, value: str, help: str, panel: str = COMPARING, **more: Any) -> Any:
    """Of one comparison, never of all: without a variable."""
    return typer.Option(*names, metavar=value, help=help, rich_help_panel=panel, **more)


def bench(
    model: o.ModelArgument = DEFAULT_MODEL,
    presets: Annotated[
        str, _option("--presets", value="A,B,...", help="Names as for lever run --preset.")
    ] = DEFAULT_PRESETS,
    prompts: Annotated[
        Path | None,
        _option(
            "--prompts",
            value="FILE",
            help='JSON lines {"id", "domain", "prompt"}. [dim]\\[default: a dozen of lever\'s own: code, math, '
            "chat][/dim]",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None, _option("--limit", value="N", help="Prompts of each domain at most.", min=1, show_default=False)
    ] = None,
    rounds: Annotated[int, _option("--rounds", value="N", help="How often all is asked.", min=1)] = 1,
    peer: Annotated[
        Peer | None,
        _option(
            "--peer",
            value="NAME",
            help="Another program, on the same prompts: llama.cpp with all in RAM (extra bench).",
            show_default=False,
        ),
    ] = None,
    peer_cage: Annotated[
        str | None,
        _option(
            "--peer-cage",
            value="SIZE",
            help="llama.cpp also by mmap in a memory cage of this size, with the draft: 1000MB. Needs root.",
            show_default=False,
        ),
    ] = None,
    dram: o.Dram = "auto",
    pin: o.Pin = None,
    ctx_size: o.CtxSize = None,
    batch_size: o.BatchSize = o.BATCH_SIZE,
    threads: o.ThreadCount = None,
    ring: o.Ring = o.RING,
    no_image: o.NoImage = False,
    no_profile: o.NoProfile = False,
    draft: o.Draft = AUTO,
    device: o.Device = CPU,
    draft_device: o.DraftDevice = CPU,
    predictor: o.PredictorFlag = AUTO,
    prune: o.PruneFlag = o.Prune.auto,
    max_tokens: o.MaxTokens = 128,
    seed: o.Seed = 0,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 40,
    top_p: o.TopP = 0.95,
    min_p: o.MinP = 0.05,
    repeat_penalty: o.RepeatPenalty = 1.0,
    repeat_last_n: o.RepeatLastN = 64,
    presence_penalty: o.PresencePenalty = 0.0,
    frequency_penalty: o.FrequencyPenalty = 0.0,
    json_file: Annotated[
        Path | None,
        _option(
            "--json",
            value="FILE",
            help="Write all figures into this file, too; -: on stdout, and no table.",
            panel=o.OUTPUT,
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        _option(
            "--plot",
            value="FILE",
            help="Draw it, too: PNG, SVG or PDF by its ending (extra plots).",
            panel=o.OUTPUT,
            show_default=False,
        ),
    ] = None,
    offline: o.Offline = False,
    quiet: o.Quiet = False,
    _verbose: o.Verbose = False,
) -> None:
    """Compare presets: the same prompts on the same model and draft, in turn, and whether the text stays the same.

    lever bench demo
    lever bench model.gguf --presets flash-ar,lever --limit 1 -n 32
    lever bench demo --peer llama.cpp --json bench.json --plot bench.png

    Only the time after the first token counts. Leave the machine alone meanwhile. Ends with 1 if a preset
    writes another text, or makes other logits, than the first one.
    """
    from lever.bench import Request, limited, read_prompts
    from lever.cli.comparing import Asked, Cage, Output, compare
    from lever.memory import parse_size

    if max_tokens < 2:
        raise UsageError(f"max-tokens is {max_tokens}: to measure speed it must be at least 2")
    if peer_cage is not None and peer is None:
        raise UsageError("--peer-cage is a cage for another program: name it with --peer")
    found = read_prompts(prompts)
    asked = Asked(
        model=model,
        presets=parse_presets(presets),
        prompts=limited(found, limit) if limit is not None else found,
        prompts_name=prompts.name if prompts is not None else "lever's own",
        rounds=rounds,
        draft=draft,
        predictor=predictor,
        prune=prune.value,
        use_image=not no_image,
        use_profile=not no_profile,
        peer=peer is not None,
        cage=Cage(words=peer_cage, nbytes=parse_size(peer_cage)) if peer_cage is not None else None,
    )
    settings = o.model_settings(
        dram,
        threads,
        ring,
        pin=pin,
        ctx_size=ctx_size,
        batch_size=batch_size,
        device=device,
        draft_device=draft_device,
    )
    sampler = o.sampler_settings(
        seed,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        repeat_last_n=repeat_last_n,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )
    output = Output(json=json_file, to_stdout=str(json_file) == STDIN, plot=plot, offline=offline, quiet=quiet)
    raise typer.Exit(compare(asked, settings, Request(max_new_tokens=max_tokens, sampler=sampler), output))


def parse_presets(text: str) -> list[str]:
    """Names with commas between them; UsageError for one that is none, or is there twice."""
    from lever.policies import preset

    names = [preset(name.strip()).name for name in text.split(",")]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"the preset {twice} is given twice")
    return names
