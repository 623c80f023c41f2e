"""`lever run`: one prompt, one answer, streamed to stdout; one line of figures to stderr. Words in, settings out."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lever.cli import options as o
from lever.cli.console import read_stdin
from lever.errors import StorageError, UsageError
from lever.settings import AUTO, CPU

if TYPE_CHECKING:
    from lever.grammar import Grammar

DEFAULT_MODEL = "demo"
STDIN = "-"


def run(
    context: typer.Context,
    first: o.ModelWord = None,
    second: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to answer, in quotes; - reads it from stdin.")
    ] = None,
    model: o.ModelFlag = None,
    prompt: o.Prompt = None,
    file: o.PromptFile = None,
    system: o.System = None,
    raw: o.Raw = False,
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
    json_schema: o.JsonSchema = None,
    json_schema_file: o.JsonSchemaFile = None,
    grammar: o.GrammarText = None,
    grammar_file: o.GrammarFile = None,
    json_output: o.Json = False,
    offline: o.Offline = False,
    quiet: o.Quiet = False,
    _verbose: o.Verbose = False,
) -> None:
    """Answer one prompt with a model whose layers stay on storage, under a memory budget.

    lever run demo "Why is the sky blue?"
    lever run model.gguf "Write a haiku." --dram 900MiB --temp 0
    cat notes.txt | lever run hf:owner/repo:Q4_K_M --json -s 42
    lever run demo "Is water wet?" --grammar 'root ::= "yes" | "no"'

    The answer goes to stdout, figures go to stderr. Without MODEL it is the demo;
    without PROMPT, -p and -f the prompt is read from stdin.
    """
    from lever.cli.answer import Output, Question, answer

    on_line = typed_flags(context, "model", "prompt", "file")
    reference, source = choose(first, second, model, prompt, file, typed=on_line)
    constraint = parse_constraint(json_schema, json_schema_file, grammar, grammar_file)
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
        grammars=constraint is not None,
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
        constraint=constraint,
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
    question = Question(wanted, read_prompt(source), system, raw=raw, use_profile=not no_profile)
    raise typer.Exit(answer(question, settings, request, Output(json_output, quiet)))


def parse_constraint(
    json_schema: str | None, json_schema_file: Path | None, grammar: str | None, grammar_file: Path | None
) -> Grammar | None:
    """What the answer must obey; None if none of these is given, UsageError if several are."""
    flags = {
        "--json-schema": json_schema,
        "--json-schema-file": json_schema_file,
        "--grammar": grammar,
        "--grammar-file": grammar_file,
    }
    given = [flag for flag, value in flags.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"an answer obeys one schema or grammar: use one of {' and '.join(given)}")
    if not given:
        return None
    from lever.grammar import Grammar

    if json_schema_file is not None:
        json_schema = _read(json_schema_file, "JSON schema")
    if grammar_file is not None:
        grammar = _read(grammar_file, "grammar")
    return Grammar.from_json_schema(json_schema) if json_schema is not None else Grammar.from_text(grammar or "")


def typed_flags(context: typer.Context, *names: str) -> frozenset[str]:
    """Which of these flags stand on the command line, and not in a variable."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return frozenset(name for name, source in sources.items() if source and source.name == "COMMANDLINE")


def choose(
    first: str | None,
    second: str | None,
    model: str | None,
    prompt: str | None,
    file: Path | None,
    typed: Collection[str] = (),
) -> tuple[str, str | Path | None]:
    """The model and where the prompt is, from two words and three flags; `typed` names those not from variables.

    A single word is the prompt where the model is known otherwise. What is typed wins over variables.
    """
    flags = [value for name, value in (("prompt", prompt), ("file", file)) if name in typed]
    if second is None and ("model" in typed or (model is not None and not flags)):
        first, second = None, first
    reference = choose_model(first, model, typed)
    prompts = [value for value in (second, *flags) if value is not None]
    prompts = prompts or [value for value in (prompt, file) if value is not None]
    if len(prompts) > 1:
        raise UsageError("the prompt is given twice: use one of PROMPT, -p and -f")
    if first is not None and not prompts and any(map(str.isspace, first)) and not Path(first).exists():
        raise UsageError(f"{first!r} is no model: name one before the prompt, or give the prompt with -p")
    return reference, prompts[0] if prompts else None


def choose_model(word: str | None, flag: str | None, typed: Collection[str]) -> str:
    """The model, from a word and a flag; `typed` has "model" where the flag is not from a variable."""
    if word is not None and "model" in typed:
        raise UsageError("the model is given twice: use one of MODEL and -m")
    return next((name for name in (word, flag) if name is not None), DEFAULT_MODEL)


def read_prompt(source: str | Path | None) -> str:
    """A text is itself; a file or stdin (for nothing, too) is its content, without the line break at its end.

    Bytes that are not UTF-8 are kept as surrogate escapes.
    """
    if source is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError('no prompt: give one in quotes, such as lever run demo "Why is the sky blue?", or - for stdin')
    if source is None or str(source) == STDIN:
        return read_stdin().removesuffix("\n")
    return source if isinstance(source, str) else _read(source, "prompt").removesuffix("\n")


def _read(path: Path, what: str) -> str:
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise StorageError(f"cannot read the {what} from {path}: {error.strerror}") from error
