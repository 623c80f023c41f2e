"""`lever doctor`: what this machine gives lever to work with, and what to mend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lever.cli import options as o
from lever.cli.console import bar, printable, write_json, write_table

if TYPE_CHECKING:
    from rich.table import Table

    from lever.doctor import Report

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
VERDICTS = ("all is well", "it works, with warnings", "there are problems to mend")


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Look at where this model lies, too.", show_default=False)
    ] = None,
    json_output: o.Json = False,
) -> None:
    """Look at ggml, this CPU, the storage and the memory, and say what to mend.

    lever doctor
    lever doctor model.gguf --json

    Exit code: 0 all is well, 1 there are warnings, 2 there are problems.
    """
    from lever.doctor import examine
    from lever.models import resolve

    path = resolve(model, offline=True).path if model else None
    with bar() as progress:
        report = examine(model=path, progress=lambda what: progress.start(None, f"looking at: {what}"))
    if json_output:
        write_json(report.to_dict())
    else:
        write_table(_table(report))
    raise typer.Exit(report.exit_code)


def _table(report: Report) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for finding in report.findings:
        value = Text(printable(finding.value))
        if finding.advice:
            value.append(f"\n{printable(finding.advice)}", style="italic")
        table.add_row(Text(finding.level, STYLES[finding.level]), finding.name, value)
    table.add_row()
    table.add_row("", "", VERDICTS[report.exit_code])
    return table
