"""A profile as a picture. Needs matplotlib, the extra `plots`; measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lever.cost import Profile, RowTime, best_read
from lever.errors import StorageError, UsageError
from lever.memory import format_size
from lever.pair import PairProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    n = 2 if pair is None else 3
    figure = Figure(figsize=(5.5 * n, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, n)
    _draw_reads(axes[0], profile)
    _draw_layers(axes[1], profile)
    if pair is not None:
        _draw_steps(axes[2], pair)
    figure.suptitle(f"{profile.identity.machine}; {profile.identity.storage}; {profile.date}", fontsize=9)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise StorageError(f"cannot write the plot {path}: {error.strerror or error}") from error


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
