"""`lever doctor`: what this machine gives lever to work with, and what to mend."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from lever.cli import options as o
from lever.cli.console import stderr, stdout
from lever.doctor import Report, examine
from lever.models import resolve

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Look at where this model lies, too.")
    ] = None,
    json_output: o.Json = False,
) -> None:
    """Look at ggml, this CPU, the storage and the memory, and say what to mend.

    Exit code: 0 all is well, 1 there are warnings, 2 there are problems.
    """
    path = resolve(model, offline=True).path if model else None
    with stderr.status("looking around") as status:
        report = examine(model=path, progress=lambda what: status.update(what))
    if json_output:
        print(json.dumps(report.to_dict()))  # noqa: T201 - the answer
    else:
        stdout.print(_table(report))
    raise typer.Exit(report.exit_code)


def _table(report: Report) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for finding in report.findings:
        value = Text(finding.value)
        if finding.advice:
            value.append(f"\n{finding.advice}", style="italic")
        table.add_row(Text(finding.level, STYLES[finding.level]), finding.name, value)
    return table
