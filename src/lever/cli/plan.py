"""`lever plan`: where the memory would go, how fast it would be, and what would change that. Loads no weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lever.cli import options as o
from lever.cli.console import bar, printable, write_json, write_table
from lever.cli.run import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.table import Table

    from lever.planner import Outlook, Shortage


def plan(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A GGUF file, hf:owner/repo[:QUANT], or a name such as demo."),
    ] = DEFAULT_MODEL,
    dram: o.Dram = "auto",
    pin: o.Pin = None,
    ctx_size: o.CtxSize = None,
    batch_size: o.BatchSize = 512,
    threads: o.ThreadCount = None,
    ring: o.Ring = 3,
    no_image: o.NoImage = False,
    no_profile: o.NoProfile = False,
    json_output: o.Json = False,
    offline: o.Offline = False,
    quiet: o.Quiet = False,
) -> None:
    """Show what lever run would hold in memory, read in each pass, and reach in tokens per second.

    lever plan demo --dram 900MiB
    lever plan model.gguf --dram 2G -c 8192 --json

    Speed is foretold from the profile of this machine (see lever profile); without one, a quick one is made.
    Exit code: 0 it fits, 3 it does not.
    """
    from dataclasses import replace

    from lever.cli.opening import find_profile, open_path
    from lever.errors import DoesNotFit
    from lever.llm import LLM
    from lever.loader import ModelSettings
    from lever.memory import parse_size
    from lever.planner import outlook, shortage

    settings = ModelSettings(
        dram=parse_size(dram),
        pin_percent=pin,
        n_ctx=ctx_size,
        n_batch=batch_size,
        n_threads=o.thread_count(threads),
        n_slots=ring,
    )
    with bar(quiet=quiet) as progress:
        path = open_path(model, progress, use_image=not no_image, offline=offline, quiet=quiet).path
        # A model that does not fit is refused when it is opened; here it is told what would be needed.
        with LLM(path, replace(settings, dram=AMPLE), name=model) as llm:
            progress.start(None, "planning")
            try:
                llm.plan(settings)
            except DoesNotFit as error:
                found: Outlook | Shortage = shortage(llm, settings, error)
            else:
                profile = None if no_profile else find_profile(llm, settings, progress, quiet=quiet)
                progress.start(None, "planning")
                found = outlook(llm, settings, profile)
    if json_output:
        write_json({"model": model, "path": str(path), **found.to_dict()})
    else:
        write_table(_table(found))
    raise typer.Exit(0 if found.fits else DoesNotFit.exit_code)


AMPLE = 1 << 50  # bytes


def _table(found: Outlook | Shortage) -> Table:
    from rich.table import Table

    from lever.memory import format_size

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column()
    for part, nbytes in found.parts.items():
        table.add_row(part, format_size(nbytes))
    table.add_row("together", format_size(sum(found.parts.values())), f"of {format_size(found.budget)}")
    table.add_row()
    for name, value, remark in found.lines():
        table.add_row(name, value, printable(remark))
    return table
