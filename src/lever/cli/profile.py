"""`lever profile`: what this machine takes for reads, layers and passes. Words in, a table out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lever.cli import options as o
from lever.cli.console import bar, note, printable, write_json, write_table
from lever.cli.run import DEFAULT_MODEL
from lever.settings import AUTO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Group
    from rich.table import Table

    from lever.cost import Measured, Profile
    from lever.pair import PairProfile


def profile(
    model: o.ModelArgument = DEFAULT_MODEL,
    storage: Annotated[
        Path | None,
        typer.Option(
            "--storage",
            metavar="PATH",
            help="Measure reads of this file, or of one that is written into this directory and deleted. "
            "[dim]\\[default: the model's own][/dim]",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", metavar=o.SWITCH, help="A few seconds instead of a minute.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw it, too: PNG, SVG or PDF by its ending.", show_default=False),
    ] = None,
    dram: o.Dram = "auto",
    threads: o.ThreadCount = None,
    ring: o.Ring = o.RING,
    no_image: o.NoImage = False,
    draft: o.Draft = AUTO,
    no_draft: o.NoDraft = False,
    json_output: o.Json = False,
    offline: o.Offline = False,
    quiet: o.Quiet = False,
) -> None:
    """Measure reads, layers, and both at once on this machine, and keep what was found for lever run and lever plan.

    lever profile demo
    lever profile model.gguf --plot profile.png
    lever profile demo --storage /mnt/card --quick

    The steps of the draft that goes with the model are measured as well, but not with --storage.
    Leave the machine alone meanwhile. Without a profile, lever run makes a quick one by itself.
    """
    from lever.cost import doubts
    from lever.opening import open_llm, steps_of
    from lever.plots import draw_profile, require_matplotlib
    from lever.profile import FULL, QUICK, identity_of, keep, keep_pair, measure

    if plot is not None:
        require_matplotlib(plot)
    settings = o.model_settings(dram, threads, ring)
    no_draft = no_draft or storage is not None
    wanted = o.wanted(model, draft, no_draft=no_draft, no_image=no_image, offline=offline)
    scope = QUICK if quick else FULL
    with bar(quiet=quiet) as progress, open_llm(wanted, settings, progress) as llm:
        llm.plan()  # refused now, if the model itself does not fit
        progress.start(None, "measuring")
        found = measure(
            llm.gguf,
            llm.config,
            settings,
            scope,
            storage=storage,
            progress=lambda what: progress.tell(f"measuring {what}"),
        )
        pair = steps_of(llm, scope, progress) if llm.companion is not None else None
        own = identity_of(llm.gguf, llm.config)
    if json_output:
        write_json(_document(found, pair))
    else:
        write_table(_tables(found, pair))
    for doubt in doubts(found):
        note(f"warning: {doubt}")
    if plot is not None:
        draw_profile(found, plot, pair)
    if storage is not None and found.identity == own:  # without passes, it is less than what may be kept
        note("not kept: the model itself is on this storage, and measured there without --storage")
        return
    kept = [keep(found), *([keep_pair(pair)] if pair is not None else [])]
    if not quiet:
        note(f"kept in {' and '.join(map(str, kept))}")


def _document(found: Profile, pair: PairProfile | None) -> dict[str, object]:
    from dataclasses import asdict

    from lever.cost import best_read, doubts

    best = best_read(found)
    return {
        **asdict(found),
        "best_read": {"block": best.block, "depth": best.depth},
        "draft": None if pair is None else asdict(pair),
        "warnings": doubts(found),
    }


def _tables(found: Profile, pair: PairProfile | None) -> Group:
    from rich.console import Group
    from rich.text import Text

    identity = found.identity
    where = f"{identity.machine}; {identity.storage}; {identity.layout} layout, {found.n_layers} layers"
    return Group(
        Text(printable(where)),
        "",
        _reads(found),
        "",
        _times(found),
        "",
        *_streams(found),
        *_steps(pair),
        Text(_limits(found)),
    )


def _reads(found: Profile) -> Table:
    from rich.table import Table

    from lever.cost import best_read
    from lever.memory import format_size

    table = Table("READS OF", "IN FLIGHT", "GB/s IDLE", "", "GB/s BUSY", "", "", box=None, pad_edge=False)
    _to_the_right(table, range(1, 6))
    best = best_read(found)
    for rate in found.reads:
        cells = (*_cells(rate.idle, 1e-9), *(_cells(rate.busy, 1e-9) if rate.busy is not None else ("", "")))
        table.add_row(format_size(rate.block), str(rate.depth), *cells, "best" * (rate == best))
    return table


def _times(found: Profile) -> Table:
    """Milliseconds by rows; a pair of columns for each number of threads: a layer, and the output projection."""
    from rich.table import Table

    counts = sorted({time.threads for time in found.layers})
    table = Table("ROWS", box=None, pad_edge=False)
    for count in counts:
        what = f", {count} thread{'s' * (count > 1)}"
        for heading in (f"ms A LAYER{what}", "", f"ms LOGITS{what}", ""):
            table.add_column(heading)
    _to_the_right(table, range(1 + 4 * len(counts)))
    layers = {(time.rows, time.threads): time.seconds for time in found.layers}
    logits = {(time.rows, time.threads): time.seconds for time in found.projections}
    for rows in sorted({time.rows for time in found.layers}):
        cells = [cell for count in counts for t in (layers, logits) for cell in _pair(t, (rows, count))]
        table.add_row(str(rows), *cells)
    return table


def _pair(times: Mapping[tuple[int, int], Measured], key: tuple[int, int]) -> Sequence[str]:
    return _cells(times[key], 1e3) if key in times else ("", "")


def _streams(found: Profile) -> Sequence[Table | str]:
    """Passes with everything streamed; nothing where that was not measured."""
    from rich.table import Table

    if not found.together:
        return ()
    headings = ("ROWS", "THREADS", "ms A PASS", "", "LAYERS", "GB/s READ", "", "ms A LAYER", "", "% LOST")
    table = Table(*headings, box=None, pad_edge=False)
    _to_the_right(table, range(len(headings)))
    for t in sorted(found.together, key=lambda t: (t.threads, t.rows)):
        cells = (*_cells(t.seconds, 1e3), str(t.n_layers), *_cells(t.read, 1e-9), *_cells(t.layer, 1e3))
        table.add_row(str(t.rows), str(t.threads), *cells, f"{100 * t.lost:.0f}")
    return table, ""


def _steps(pair: PairProfile | None) -> Sequence[Table | str]:
    """Milliseconds of draft steps by nodes and threads; nothing without a draft."""
    from rich.table import Table

    if pair is None:
        return ()
    counts = sorted({step.threads for step in pair.steps})
    table = Table("NODES", box=None, pad_edge=False)
    for count in counts:
        table.add_column(f"ms A DRAFT STEP, {count} thread{'s' * (count > 1)}")
        table.add_column("")
    _to_the_right(table, range(1 + 2 * len(counts)))
    steps = {(step.rows, step.threads): step.seconds for step in pair.steps}
    for nodes in sorted({step.rows for step in pair.steps}):
        table.add_row(str(nodes), *(cell for count in counts for cell in _pair(steps, (nodes, count))))
    return table, ""


def _limits(found: Profile) -> str:
    from lever.cost import fewest_threads

    most = max(time.threads for time in found.layers)
    whole = found.n_layers * found.layer_bytes
    time = fewest_threads(found, 1, whole, most)
    sides = f"reads {time.reads_s:.3f}, compute {time.compute_s:.3f} on {time.threads} thread{'s' * (time.threads > 1)}"
    return f"a token with all layers streamed: {time.seconds:.3f} s ({sides})"


def _to_the_right(table: Table, columns: range) -> None:
    for number in columns:
        table.columns[number].justify = "right"


def _cells(figure: Measured, unit: float) -> tuple[str, str]:
    """A figure and its spread."""
    return f"{figure.median * unit:.3g}", f"±{50 * figure.spread:.0f} %"
