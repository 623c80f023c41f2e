"""How near does plain decoding from flash come to the raw rate of the storage?

    python -m benchmarks.flash_ar [MODEL] [--json FILE]

Nothing is pinned but what the flag says. Raw sequential O_DIRECT reads of the model's own file and decoding take turns,
so that drift of the machine hits both alike; medians over the rounds. Leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median

from lever.llm import LLM
from lever.loader import ModelSettings
from lever.machine import performance_cores
from lever.memory import parse_size
from lever.models import resolve
from lever.pages import Pages
from lever.stats import RunStats
from lever.weights.reader import DirectFile
from lever.weights.store import BLOCK, DEPTH

PROMPT = "Explain how a steam engine works."


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of raw reads and one of decoding."""

    raw_bytes_per_s: float  # one read at a time
    deep_bytes_per_s: float  # as many as the store has in flight
    read_bytes_per_s: float
    pass_s: float
    compute_s: float  # of a pass
    python_share: float


def raw_read_bytes_per_s(path: Path, memory_bytes: int, nbytes: int, depth: int = 1) -> float:
    """O_DIRECT reads of `nbytes` and nothing else, `depth` at a time, round and round in a file and in memory.

    As many bytes as decoding reads: storage that is shared or warm gives more in a short burst than it keeps up.

    A single small buffer stays in the processor's cache and gives a rate that no one who wants the data elsewhere can
    have; so the ring's own size is what the store is compared with.
    """
    block = min(BLOCK, memory_bytes)
    n_blocks, n_slots = path.stat().st_size // block, memory_bytes // block

    def read(number: int) -> None:
        at = number % n_slots * block
        file.read(pages.bytes.data[at : at + block], number % n_blocks * block)

    with DirectFile(path) as file, Pages(memory_bytes) as pages, ThreadPoolExecutor(depth) as readers:
        started = time.perf_counter()
        for _ in readers.map(read, range(nbytes // block)):
            pass
        return nbytes // block * block / (time.perf_counter() - started)


def decode(llm: LLM, n_tokens: int) -> RunStats:
    """Greedy decoding of `n_tokens`; its figures."""
    stats = RunStats()
    steps = llm.engine.steps(
        llm.encode_chat([{"role": "user", "content": PROMPT}]),
        lambda logits, _history, _position: int(logits.argmax()),
        max_new_tokens=n_tokens,
        end_tokens=frozenset(),
        stats=stats,
    )
    for _ in steps:
        pass
    return stats


def measure(llm: LLM, path: Path, n_tokens: int) -> Round:
    """One round."""
    nbytes = llm.loaded.store.bytes_per_pass * n_tokens
    ring = llm.loaded.plan.parts["ring"]
    raw = raw_read_bytes_per_s(path, ring, nbytes)
    deep = raw_read_bytes_per_s(path, ring, nbytes, DEPTH)
    stats = decode(llm, n_tokens)
    return Round(
        raw,
        deep,
        stats.read_bytes_per_s,
        stats.decode_s / stats.cycles,
        (stats.verify_s + stats.project_s) / stats.cycles,
        stats.python_s / stats.decode_s,
    )


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--dram", default="2GiB")
    parser.add_argument("--pin", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ring", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(performance_cores()))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = resolve(args.model).path
    settings = ModelSettings(
        dram=parse_size(args.dram), pin_percent=args.pin, n_threads=args.threads, n_slots=args.ring
    )
    with LLM(path, settings, name=args.model) as llm:
        if not llm.loaded.store.streamed:
            raise SystemExit("nothing is streamed: give less with --pin")
        decode(llm, 4)
        rounds = [measure(llm, path, args.tokens) for _ in range(args.rounds)]
        store = llm.loaded.store
        summary = {name: median(getattr(r, name) for r in rounds) for name in asdict(rounds[0])}
        ratio = median(r.read_bytes_per_s / r.raw_bytes_per_s for r in rounds)
        bound_s = store.bytes_per_pass / summary["raw_bytes_per_s"]
        print(f"raw O_DIRECT   {summary['raw_bytes_per_s'] / 1e9:6.2f} GB/s")
        deep = median(r.read_bytes_per_s / r.deep_bytes_per_s for r in rounds)
        print(f"  {DEPTH} in flight  {summary['deep_bytes_per_s'] / 1e9:6.2f} GB/s")
        print(
            f"while decoding {summary['read_bytes_per_s'] / 1e9:6.2f} GB/s, {100 * ratio:.1f} % of raw, "
            f"{100 * deep:.1f} % of {DEPTH} in flight"
        )
        print(f"pass           {summary['pass_s']:6.3f} s, bound {bound_s:.3f} s, compute {summary['compute_s']:.3f} s")
        print(f"Python         {100 * summary['python_share']:6.2f} % of a pass")
        print(f"{store.bytes_per_pass} bytes a pass, direct {store.direct_io}, {store.stats}")
    if args.json:
        document = {
            "date": date.today().isoformat(),
            "machine": platform.machine(),
            "settings": {key: str(value) for key, value in vars(args).items()} | {"model": Path(args.model).name},
            "bytes_per_pass": store.bytes_per_pass,
            "bound_s": bound_s,
            "ratio_to_raw": ratio,
            "ratio_to_deep": deep,
            "median": summary,
            "rounds": [asdict(r) for r in rounds],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
