"""`lever plan`: where the memory would go, how fast it would be, and what would change that. Loads no weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from lever.cli import options as o
from lever.cli.console import bar, printable, write_json, write_table
from lever.cli.run import DEFAULT_MODEL
from lever.settings import AUTO, CPU

if TYPE_CHECKING:
    from rich.table import Table

    from lever.cli.console import Bar
    from lever.llm import LLM
    from lever.loader import ModelSettings
    from lever.opening import Wanted
    from lever.planner import Outlook, Shortage


def plan(
    model: o.ModelArgument = DEFAULT_MODEL,
    dram: o.Dram = "auto",
    pin: o.Pin = None,
    ctx_size: o.CtxSize = None,
    batch_size: o.BatchSize = o.BATCH_SIZE,
    threads: o.ThreadCount = None,
    ring: o.Ring = o.RING,
    no_image: o.NoImage = False,
    no_profile: o.NoProfile = False,
    draft: o.Draft = AUTO,
    no_draft: o.NoDraft = False,
    device: o.Device = CPU,
    draft_device: o.DraftDevice = CPU,
    predictor: o.PredictorFlag = AUTO,
    prune: o.PruneFlag = o.Prune.auto,
    json_output: o.Json = False,
    offline: o.Offline = False,
    quiet: o.Quiet = False,
) -> None:
    """Show what lever run would hold in memory, read in each pass, and reach in tokens per second.

    lever plan demo --dram 900MiB
    lever plan model.gguf --dram 2G -c 8192 --json
    lever plan model.gguf --draft small.gguf

    Speed is foretold from the profile of this machine (see lever profile); without one, a quick one is made. With a
    draft, tokens per cycle are those that runs have shown, or as said. Of other devices nothing is foretold.
    Exit code: 0 it fits, 3 it does not.
    """
    from lever.errors import DoesNotFit
    from lever.opening import open_llm

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
    wanted = o.wanted(
        model, draft, no_draft=no_draft, no_image=no_image, offline=offline, predictor=predictor, prune=prune
    )
    # A model that does not fit is refused when it is opened; here it is told what would be needed.
    with bar(quiet=quiet) as progress, open_llm(wanted, settings, progress, ample=True) as llm:
        path = llm.gguf.path
        found = _planned(llm, settings, progress, wanted, use_profile=not no_profile)
    if json_output:
        write_json({"model": model, "path": str(path), **found.to_dict()})
    else:
        write_table(_table(found, device))
    raise typer.Exit(0 if found.fits else DoesNotFit.exit_code)


def _planned(
    llm: LLM, settings: ModelSettings, progress: Bar, wanted: Wanted, *, use_profile: bool
) -> Outlook | Shortage:
    """The run, or why there is none. A draft that nobody named is left out where it has no room, as in a run."""
    from lever.errors import DoesNotFit
    from lever.opening import NO_ROOM, find_pair, find_profile, without_draft
    from lever.planner import fits, outlook, shortage

    progress.start(None, "planning")
    with_draft = llm.companion is not None
    if with_draft and wanted.draft == AUTO and not fits(llm, settings, draft=True):
        with_draft = False
        without_draft(llm.draft_name or "", NO_ROOM)
    try:
        llm.plan(settings, draft=with_draft)
    except DoesNotFit as error:
        if not error.parts:  # another device has too little memory, which no budget mends
            raise
        return shortage(llm, settings, error, draft=with_draft)
    profile = pair = None
    if use_profile and settings.all_on_cpu:
        profile = find_profile(llm, settings, progress)
        if with_draft and llm.companion is not None:
            pair = find_pair(llm, settings, progress)
            llm.companion.close()  # the plan counts the memory in use
    progress.start(None, "planning")
    return outlook(llm, settings, profile, pair, draft=with_draft)


def _table(found: Outlook | Shortage, device: str) -> Table:
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
    for part, nbytes in found.elsewhere.items():
        table.add_row(part, format_size(nbytes), f"on {device}")
    if found.elsewhere:
        table.add_row()
    for name, value, remark in found.lines():
        table.add_row(name, value, printable(remark))
    return table
