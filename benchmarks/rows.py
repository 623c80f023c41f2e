"""What do more rows in a pass cost, streamed and computed?

    python -m benchmarks.rows MODEL... [--rows 1,16] [--threads 1,2] [--dram 2GiB] [--json FILE]

Passes of each number of rows over the same context take turns, on each model in turn; medians over the rounds. The last
layers' reads of one pass overlap with the next one's, as in decoding, so a pass is timed from end to end of a run of
equal passes. Compute is the time inside ggml.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from lever.llm import LLM
from lever.loader import LoadedModel, ModelSettings
from lever.machine import performance_cores
from lever.memory import parse_size
from lever.models import resolve

CONTEXT = 64  # tokens in the cache before each pass
PASSES = 3  # of one turn; one before them goes unmeasured


@dataclass(frozen=True, slots=True)
class Turn:
    """Figures of a pass, averaged over a run of equal ones."""

    pass_s: float
    compute_s: float
    read_bytes_per_s: float


def turn(loaded: LoadedModel, tokens: list[int], n_threads: int) -> Turn:
    """A few passes over these tokens behind the same context, with one projection each."""
    model, store = loaded.model, loaded.store

    def one_pass() -> None:
        model.kv.truncate(CONTEXT)
        model.forward(tokens)
        model.project([0])

    model.n_threads = n_threads
    one_pass()
    started, read, compute = time.perf_counter(), store.stats.read_bytes, model.stats.layers_s
    compute += model.stats.projection_s
    for _ in range(PASSES):
        one_pass()
    seconds = time.perf_counter() - started
    computed = model.stats.layers_s + model.stats.projection_s - compute
    return Turn(seconds / PASSES, computed / PASSES, (store.stats.read_bytes - read) / seconds)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rows", default="1,4,16,32")
    parser.add_argument("--threads", default=f"1,{len(performance_cores())}")
    parser.add_argument("--dram", default="2GiB")
    parser.add_argument("--pin", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    widths = [int(rows) for rows in args.rows.split(",")]
    threads = sorted({int(count) for count in args.threads.split(",")})
    rows = []
    for name in args.models:
        settings = ModelSettings(dram=parse_size(args.dram), pin_percent=args.pin, n_ctx=512, n_threads=max(threads))
        with LLM(resolve(name).path, settings) as llm:
            loaded = llm.loaded
            tokens = [100 + 7 * n for n in range(CONTEXT + max(widths))]
            loaded.model.forward(tokens[:CONTEXT])
            turns: dict[tuple[int, int], list[Turn]] = defaultdict(list)
            for _ in range(args.rounds):
                for count in threads:
                    for width in widths:
                        turns[count, width].append(turn(loaded, tokens[CONTEXT : CONTEXT + width], count))
            print(f"{name}: {loaded.layout}, {loaded.store.bytes_per_pass / 1e9:.3f} GB a pass")
            for (count, width), found in turns.items():
                row: dict[str, Any] = {
                    "model": Path(name).name,
                    "layout": loaded.layout,
                    "threads": count,
                    "rows": width,
                    "pass_s": median(t.pass_s for t in found),
                    "compute_s": median(t.compute_s for t in found),
                    "read_bytes_per_s": median(t.read_bytes_per_s for t in found),
                    "against_one_row": median(
                        t.pass_s / one.pass_s for t, one in zip(found, turns[count, widths[0]], strict=True)
                    ),
                }
                rows.append(row)
                print(
                    f"  {count} threads, {width:3} rows: pass {row['pass_s']:.3f} s, compute {row['compute_s']:.3f} s, "
                    f"{row['read_bytes_per_s'] / 1e9:.2f} GB/s, {row['against_one_row']:.3f} of one row"
                )
    if args.json:
        document = {
            "date": date.today().isoformat(),
            "settings": {k: str(v) for k, v in vars(args).items() if k != "models"},
        }
        args.json.write_text(json.dumps(document | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
