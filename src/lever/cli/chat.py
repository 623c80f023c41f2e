"""`lever chat`: a conversation, typed on a terminal or piped in line by line. Words in, settings out."""

from __future__ import annotations

import typer

from lever.cli import options as o
from lever.cli.run import choose_model, typed_flags
from lever.settings import AUTO, CPU


def chat(
    context: typer.Context,
    first: o.ModelWord = None,
    model: o.ModelFlag = None,
    system: o.System = None,
    dram: o.Dram = "auto",
    pin: o.Pin = None,
    ctx_size: o.CtxSize = None,
    batch_size: o.BatchSize = o.BATCH_SIZE,
    threads: o.ThreadCount = None,
    ring: o.Ring = o.RING,
    layout: o.LayoutFlag = o.Layout.auto,
    no_image: o.NoImage = False,
    no_profile: o.NoProfile = False,
    draft: o.Draft = AUTO,
    no_draft: o.NoDraft = False,
    preset: o.PresetFlag = None,
    tree_attention: o.TreeAttentionFlag = o.TreeAttention.exact,
    device: o.Device = CPU,
    draft_device: o.DraftDevice = CPU,
    predictor: o.PredictorFlag = AUTO,
    prune: o.PruneFlag = o.Prune.auto,
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
    *,
    stop: o.Stop,
    ignore_eos: o.IgnoreEos = False,
    offline: o.Offline = False,
    no_history: o.NoHistory = False,
    quiet: o.Quiet = False,
    _verbose: o.Verbose = False,
) -> None:
    """Chat with a model whose layers stay on storage, under a memory budget.

    lever chat demo
    lever chat model.gguf -sys "Answer in one sentence." --dram 900MiB
    printf '%s\\n' "My name is Ada." "What is my name?" | lever chat -q

    On a terminal /help shows commands and keys. Where stdin is something else, each line is a message or
    a command; the first that fails ends it. Answers go to stdout, the rest to stderr.
    """
    from lever.cli.chatting import Setup
    from lever.cli.chatting import chat as talk

    reference = choose_model(first, model, typed_flags(context, "model"))
    settings = o.model_settings(
        dram,
        threads,
        ring,
        pin=pin,
        ctx_size=ctx_size,
        batch_size=batch_size,
        tree_attention=tree_attention,
        layout=layout,
        device=device,
        draft_device=draft_device,
    )
    request = o.generation_settings(
        max_tokens=max_tokens,
        seed=seed,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        repeat_last_n=repeat_last_n,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias or (),
        stops=stop,
        ignore_eos=ignore_eos,
    )
    wanted = o.wanted(
        reference,
        draft,
        no_draft=no_draft,
        no_image=no_image,
        offline=offline,
        preset=preset,
        layout=layout,
        predictor=predictor,
        prune=prune,
    )
    setup = Setup(system, use_profile=not no_profile, keep_history=not no_history, quiet=quiet)
    raise typer.Exit(talk(wanted, settings, request, setup))
