"""lever against llama.cpp by mmap, each in a memory cage of the same size, in turn, prompt by prompt.

    python -m benchmarks.cage [MODEL] [--limit 1000MB] [--draft NAME|none] [--prompts FILE] [-n 64] [--json FILE]

Needs root (control groups). Greedy, decode phase only, both with the same draft, on as many threads as lever takes.
Each answer is that of a process of its own, so that neither has anything in memory from the one before.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from tests.cage import run_caged

from lever.bench import Prompt, Request, limited, read_prompts
from lever.llm import LLM
from lever.loader import ModelSettings
from lever.machine import performance_cores
from lever.memory import format_size, parse_size
from lever.models import resolve
from lever.peer import DRAFT_ROOM, LLAMA_CPP, LlamaCpp, PeerModel
from lever.settings import SamplerSettings

N_CTX = 1024
OF_CAGE = 0.95  # that lever is told it may take


def lever(args: argparse.Namespace, prompt: Prompt, limit: int) -> dict[str, Any]:
    """Figures of `lever run` in a cage."""
    command = [sys.executable, "-m", "lever", "run", args.model, prompt.text, "--json", "-q", "-c", str(N_CTX)]
    command += ["-n", str(args.n), "--temp", "0", "--dram", str(int(limit * OF_CAGE)), "--draft", args.draft]
    caged = run_caged(command, limit, timeout_s=900)
    if caged.process.returncode != 0:
        raise SystemExit(f"lever ended with {caged.process.returncode}: {caged.process.stderr[-500:]}")
    figures: dict[str, Any] = json.loads(caged.process.stdout)["stats"]
    return figures


def llama_cpp(model: PeerModel, prompt: Sequence[int], n_tokens: int, limit: int) -> dict[str, object]:
    """Figures of llama.cpp in a cage, the files mapped."""
    request = Request(max_new_tokens=n_tokens, sampler=SamplerSettings(temperature=0.0, seed=0))
    with LlamaCpp(LLAMA_CPP, model, request, limit) as peer:
        peer.wait()
        return peer.answer(prompt).stats.to_dict()


def main() -> None:
    """Measure in turn, print a line for each prompt and the ratio, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--limit", default="1000MB")
    parser.add_argument("--draft", default="demo-draft")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--per-domain", type=int, default=1)
    parser.add_argument("-n", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    limit = parse_size(args.limit)
    draft = None if args.draft == "none" else resolve(args.draft).path
    peer = PeerModel(resolve(args.model).path, draft, N_CTX + DRAFT_ROOM, len(performance_cores()))
    results: list[dict[str, Any]] = []
    with LLM(peer.path, ModelSettings(dram=limit)) as llm:
        for prompt in limited(read_prompts(args.prompts), args.per_domain):
            ids = llm.encode_chat([{"role": "user", "content": prompt.text}])
            found = {"lever": lever(args, prompt, limit), LLAMA_CPP: llama_cpp(peer, ids, args.n, limit)}
            if any(figures["prompt_tokens"] != len(ids) for figures in found.values()):
                raise SystemExit(f"{prompt.id}: not the same prompt")
            results.append({"prompt": prompt.id, "domain": prompt.domain, **found})
            speeds = ", ".join(f"{name} {figures['tokens_per_s']:.2f} tokens/s" for name, figures in found.items())
            print(f"{prompt.id}: {speeds}", flush=True)
    ratio = geometric_mean(r["lever"]["tokens_per_s"] / r[LLAMA_CPP]["tokens_per_s"] for r in results)
    print(f"cage of {format_size(limit)}, draft {args.draft}: lever / llama.cpp {ratio:.2f} (geometric mean)")
    if args.json:
        about = {"date": date.today().isoformat(), "model": args.model, "draft": args.draft, "limit": limit}
        document = {**about, "n": args.n, "ratio": ratio, "results": results}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
