"""`lever train-predictor`: what thins trees in the middle of a pass. Words in, a file and a table out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lever.cli import options as o
from lever.cli.console import bar, note, write_json, write_table
from lever.cli.run import DEFAULT_MODEL
from lever.errors import UsageError
from lever.settings import AUTO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from lever.predictor import Translator

TRAINING = "What it learns from"


def train_predictor(
    model: o.ModelArgument = DEFAULT_MODEL,
    draft: o.Draft = AUTO,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Learn from this text. May be given often. "
            "[dim]\\[default: the model's own answers to prompts of lever's][/dim]",
            rich_help_panel=TRAINING,
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Learn from the model's answers to these: one prompt a line.",
            rich_help_panel=TRAINING,
            show_default=False,
        ),
    ] = None,
    positions: Annotated[
        int, typer.Option("--positions", metavar="N", help="Tokens to learn from.", rich_help_panel=TRAINING, min=1)
    ] = 8_000,
    layers: Annotated[
        str,
        typer.Option(
            "--layers",
            metavar="A,B,...",
            help="Layers after which guesses may be dropped, counted from 0. auto: at half and at three quarters.",
            rich_help_panel=TRAINING,
        ),
    ] = AUTO,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Where to write it. [dim]\\[default: in the cache, where lever run finds it][/dim]",
            show_default=False,
        ),
    ] = None,
    dram: o.Dram = "auto",
    threads: o.ThreadCount = None,
    no_image: o.NoImage = False,
    json_output: o.Json = False,
    offline: o.Offline = False,
    quiet: o.Quiet = False,
) -> None:
    """Make a predictor for a model and its draft: what tells in the middle of a pass which guesses are not worth it.

    lever train-predictor demo
    lever train-predictor model.gguf --draft small.gguf --text book.txt -o predictor.gguf

    Takes some minutes; what was recorded by a run that was stopped is used by the next. lever run uses it by itself
    where that saves time. The text stays the same with any predictor.
    """
    from lever.training.make import make_predictor

    if text and prompts is not None:
        raise UsageError("give --text or --prompts, not both")
    settings = o.model_settings(dram, threads, o.RING)
    wanted = o.wanted(model, draft, no_draft=False, no_image=no_image, offline=offline, prune=o.Prune.off)
    with bar(quiet=quiet) as progress:
        made = make_predictor(
            wanted,
            settings,
            progress,
            texts=text or (),
            prompts=prompts,
            n_positions=positions,
            layers=parse_layers(layers),
            out=out,
        )
    if json_output:
        from dataclasses import asdict

        write_json({"path": str(made.path), "translators": [asdict(found) for found in made.translators]})
    else:
        write_table(_table(made.translators))
    if not quiet:
        note(f"kept in {made.path}")


def parse_layers(text: str) -> tuple[int, ...] | None:
    """Numbers with commas between them; None for auto."""
    if text == AUTO:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        raise UsageError(f"layers is {text!r}: it must be auto, or numbers of layers such as 13,17")
    return tuple(sorted(map(int, words)))


def _table(translators: Sequence[Translator]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("after layer", "draft", "lens", "translator", "both", "rows kept", "by draft alone"):
        table.add_column(name, justify="right", no_wrap=True)
    for found in translators:
        q = found.quality
        shares = (q.first_by_draft, q.first_by_lens, q.first_by_translator, q.first_by_both)
        kept = (q.kept_rows, q.kept_rows_by_draft)
        table.add_row(str(found.layer), *(f"{share:.3f}" for share in shares), *(f"{share:.2f}" for share in kept))
    return table
