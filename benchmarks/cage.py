"""lever against llama.cpp by mmap, both in the same memory cage, in turn.

    python -m benchmarks.cage [MODEL] [--limit 1000MB] [--rounds 5] [--json FILE]

Needs root (control groups). Greedy, decode phase only, the same prompt and number of tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import date
from pathlib import Path
from statistics import median

from tests.cage import run_caged

from lever.memory import format_size, parse_size
from lever.models import resolve

PROMPT = "Explain how a steam engine works."


def lever(path: Path, limit: int, n_tokens: int) -> float:
    """Tokens per second of `lever run` with a budget of 95 % of the cage."""
    command = [sys.executable, "-m", "lever", "run", str(path), "--raw", "-p", PROMPT, "--json", "-q", "-c", "1024"]
    command += ["-n", str(n_tokens), "--temp", "0", "--ignore-eos", "--dram", str(limit * 95 // 100)]
    document = json.loads(_run(command, limit, path))
    return float(document["stats"]["tokens_per_s"])


def llama_cpp(path: Path, limit: int, n_tokens: int) -> float:
    """Tokens per second of llama.cpp, with the file mapped."""
    command = [sys.executable, "-m", "benchmarks.llama_cpp", str(path), "-p", PROMPT, "-n", str(n_tokens)]
    return float(json.loads(_run(command, limit, path))["tokens_per_s"])


def _run(command: list[str], limit: int, path: Path) -> str:
    _drop_page_cache(path)
    caged = run_caged(command, limit, timeout_s=600)
    if caged.process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {caged.process.returncode}: {caged.process.stderr[-500:]}")
    return caged.process.stdout


def _drop_page_cache(path: Path) -> None:
    """What is cached already is charged to nobody in the cage, and would be memory beyond its limit."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def main() -> None:
    """Measure in turn, print medians and their ratio, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--limit", default="1000MB")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path, limit = resolve(args.model).path, parse_size(args.limit)
    ours, theirs = [], []
    for _ in range(args.rounds):
        ours.append(lever(path, limit, args.tokens))
        theirs.append(llama_cpp(path, limit, args.tokens))
    ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
    print(f"cage of {format_size(limit)}: lever {median(ours):.2f} tokens/s, llama.cpp by mmap {median(theirs):.2f}")
    print(f"ratio {ratio:.2f} (median of {args.rounds} pairs)")
    if args.json:
        figures = {"lever": ours, "llama.cpp": theirs, "ratio": ratio}
        document = {"date": date.today().isoformat(), "limit": limit, **figures}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
