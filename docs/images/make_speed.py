"""Draws docs/images/speed.png from files of `lever bench --json`.

python docs/images/make_speed.py benchmarks/results/DATE-bench-*.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SHOWN = {"flash-ar": "#b9c9d6", "chain-sd": "#7fa8c4", "lever": "#1f6f9c"}


def main(paths: list[str]) -> None:
    """A panel for each file."""
    import matplotlib.pyplot as plt

    documents = [json.loads(Path(path).read_text()) for path in paths]
    figure, panels = plt.subplots(1, len(documents), figsize=(4.6 * len(documents), 2.9), layout="constrained")
    for axes, document in zip(panels, documents, strict=True):
        _draw(axes, document)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(SHOWN), frameon=False, fontsize=9)
    figure.savefig(Path(__file__).with_name("speed.png"), dpi=110)


def _draw(axes: Any, document: dict[str, Any]) -> None:
    speeds = {(row["preset"], row["domain"]): row["tokens_per_s"] for row in document["rows"]}
    domains = [domain for domain in dict.fromkeys(domain for _, domain in speeds) if domain != "all"]
    width = 0.8 / len(SHOWN)
    for number, (preset, color) in enumerate(SHOWN.items()):
        places = [n + (number - 1) * width for n in range(len(domains))]
        bars = axes.bar(places, [speeds[preset, domain] for domain in domains], width, label=preset, color=color)
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=1)
    settings = document["settings"]
    size = settings["bytes_per_pass"] / 1e9
    axes.set_xticks(range(len(domains)), domains)
    axes.set_ylabel("tokens per second")
    axes.set_title(f"{settings['model'].removesuffix('.gguf')}: {size:.1f} GB from flash in each pass", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main(sys.argv[1:])
