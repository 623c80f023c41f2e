"""A profile or a comparison as a picture. Needs matplotlib, the extra `plots`; measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lever.bench import Row
from lever.cost import Profile, RowTime, best_read
from lever.errors import StorageError, UsageError
from lever.memory import format_size
from lever.pair import PairProfile
from lever.trace import Cycle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")


def require_matplotlib(path: Path) -> None:
    """UsageError unless a picture can be drawn into this file: to be asked before a minute of measuring."""
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"{path}: a plot ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}")
    if find_spec("matplotlib") is None:
        raise UsageError(
            "--plot needs the package matplotlib: install it with pip install 'lever-llm[plots]', "
            "or uv sync --extra plots in a checkout"
        )


def draw_profile(profile: Profile, path: Path, pair: PairProfile | None = None) -> None:
    """Read rates by block and depth, layer times by rows and threads with what a layer's reads take, draft steps."""
    n = 2 if pair is None else 3
    figure = _paper(5.5 * n, 4.5)
    axes = figure.subplots(1, n)
    _draw_reads(axes[0], profile)
    _draw_layers(axes[1], profile)
    if pair is not None:
        _draw_steps(axes[2], pair)
    figure.suptitle(f"{profile.identity.machine}; {profile.identity.storage}; {profile.date}", fontsize=9)
    _save(figure, path)


def draw_bench(rows: Sequence[Row], cycle: Cycle | None, path: Path) -> None:
    """Speed and tokens per cycle by preset and domain, and one cycle on the clock where there is one."""
    figure = _paper(11, 4.5 if cycle is None else 8)
    grid = figure.add_gridspec(1 if cycle is None else 3, 2, height_ratios=[1] if cycle is None else [4, 3, 2])
    speed, tokens = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    _draw_bars(speed, rows, "tokens_per_s", "tokens/s")
    _draw_bars(tokens, rows, "tokens_per_cycle", "tokens a cycle")
    figure.legend(*speed.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7)
    if cycle is not None:
        work = figure.add_subplot(grid[1, :])
        _draw_cycle(work, figure.add_subplot(grid[2, :], sharex=work), cycle)
    _save(figure, path)


def _paper(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise StorageError(f"cannot write the plot {path}: {error.strerror or error}") from error


def _draw_bars(axes: Axes, rows: Sequence[Row], figure: str, title: str) -> None:
    """A group of bars for each domain, a bar for each preset."""
    domains, presets = (list(dict.fromkeys(getattr(row, of) for row in rows)) for of in ("domain", "preset"))
    width = 0.8 / len(presets)
    for number, preset in enumerate(presets):
        chosen = [row for row in rows if row.preset == preset]
        places = [domains.index(row.domain) + (number - (len(presets) - 1) / 2) * width for row in chosen]
        bars = axes.bar(places, [getattr(row, figure) for row in chosen], width, label=preset)
        axes.bar_label(bars, fmt="%.1f", fontsize=6)
    axes.set_xticks(range(len(domains)), domains)
    axes.set(title=title)


def _draw_cycle(work: Axes, reads: Axes, cycle: Cycle) -> None:
    """What was at work when, and the rate of reads between any two marks."""
    lanes = {"project": 0, "layer": 1, "draft": 2}
    for what, lane in lanes.items():
        spans = []
        for mark in cycle.marks:
            if mark.what == what:
                seconds = mark.compute_s if what == "layer" else mark.end - mark.start
                spans.append((mark.end - seconds - cycle.started, seconds))
        if what == "draft":  # it begins by reading what is new of the text
            spans.insert(0, (0.0, cycle.marks[0].start - cycle.started))
        work.broken_barh(spans, (lane - 0.4, 0.8), color=f"C{lane}")
    work.set_xlim(left=0)
    work.set_ylim(-0.5, 2.5)
    work.set_yticks(list(lanes.values()), ["logits", "compute", "draft"])
    work.set(title=f"one cycle: {len(cycle.rows.nodes)} rows, {len(cycle.accepted) + 1} tokens")
    times = [mark.end - cycle.started for mark in cycle.marks]
    rates = [
        (b.read_bytes - a.read_bytes) / (b.end - a.end) / 1e9
        for a, b in zip(cycle.marks, cycle.marks[1:], strict=False)
    ]
    reads.stairs(rates, times, fill=True, color="C3")
    reads.set_ylim(bottom=0)
    reads.set(xlabel="seconds", ylabel="reads, GB/s")


def _draw_reads(axes: Axes, profile: Profile) -> None:
    blocks = sorted({rate.block for rate in profile.reads})
    for number, depth in enumerate(sorted({rate.depth for rate in profile.reads})):
        rates = sorted((r for r in profile.reads if r.depth == depth), key=lambda r: r.block)
        for what, style in (("idle", ":"), ("busy", "-")):
            points = [(rate.block, figure) for rate in rates if (figure := getattr(rate, what)) is not None]
            if not points:
                continue
            axes.errorbar(
                [block / 2**20 for block, _ in points],
                [figure.median / 1e9 for _, figure in points],
                [figure.median * figure.spread / 2e9 for _, figure in points],
                label=f"{depth} in flight{', beside compute' if what == 'busy' else ''}",
                color=f"C{number}",
                linestyle=style,
                marker="o",
                capsize=2,
            )
    best = best_read(profile)
    axes.plot(best.block / 2**20, best.rate.median / 1e9, "ko", markersize=12, fillstyle="none", label="best")
    axes.set_xscale("log", base=2)
    axes.set_xticks([block / 2**20 for block in blocks], [format_size(block) for block in blocks])
    axes.set_ylim(bottom=0)
    axes.set(xlabel="bytes of one read", ylabel="GB/s", title="reads past the page cache")
    axes.legend(fontsize=7)


def _draw_layers(axes: Axes, profile: Profile) -> None:
    _draw_times(axes, profile.layers)
    reads_ms = 1e3 * profile.layer_bytes / best_read(profile).rate.median
    axes.axhline(reads_ms, color="black", linestyle="--", label=f"reads of a layer, {reads_ms:.1f} ms")
    axes.set_yscale("log")
    axes.set(xlabel="rows", ylabel="ms", title="an average layer")
    axes.legend(fontsize=7)


def _draw_steps(axes: Axes, pair: PairProfile) -> None:
    _draw_times(axes, pair.steps)
    axes.set_yscale("log")
    axes.set(xlabel="nodes", ylabel="ms", title="a draft step")
    axes.legend(fontsize=7)


def _draw_times(axes: Axes, table: Sequence[RowTime]) -> None:
    """A line for each number of threads."""
    for threads in sorted({time.threads for time in table}):
        times = sorted((t for t in table if t.threads == threads), key=lambda t: t.rows)
        axes.errorbar(
            [time.rows for time in times],
            [1e3 * time.seconds.median for time in times],
            [500 * time.seconds.median * time.seconds.spread for time in times],
            label=f"{threads} thread{'s' * (threads > 1)}",
            marker="o",
            capsize=2,
        )
    rows = sorted({time.rows for time in table})
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [str(count) for count in rows])
