"""What does a tree's exact attention cost against one masked pass, and how often does the masked one change text?

    python -m benchmarks.tree_attention MODEL [--draft DRAFT --prompts FILE.jsonl] [--json FILE]

Passes, everything in DRAM: trees of several sizes and numbers of leaves behind contexts of several lengths. Exact and
masked ones take turns on the same model. All layers are alike, so the lower quartile of a layer, over layers and
rounds, times their number stands for a pass: others on the machine disturb some layers, and would disturb every pass. A
tree is a trunk with leaves spread over it, the shape that drafts give. The cache is zeros: what it holds costs no time.

Texts, streamed, if there are a draft and prompts (lines of JSON with "prompt"): greedy answers of the preset `lever` in
both ways. Logits are compared as long as the tokens before them are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import islice, pairwise, product
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lever.llm import LLM
from lever.loader import LoadedModel, ModelSettings
from lever.machine import performance_cores
from lever.memory import parse_size
from lever.models import resolve
from lever.request import NEAR_TIE
from lever.sample import top2_gap
from lever.settings import TreeAttention
from lever.stats import RunStats

CYCLE_S = 0.45  # a streamed cycle of the demo, to take shares of
BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0)


# --- passes -------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """What is timed."""

    threads: int
    rows: int
    leaves: int
    context: int


def tree(n_rows: int, n_leaves: int) -> list[int]:
    """Parents of a trunk that ends in a leaf and has the other leaves spread over it, depth-first."""
    trunk = n_rows - n_leaves + 1
    parents = list(range(-1, trunk - 1))
    places = [leaf * (trunk - 1) // max(n_leaves - 1, 1) for leaf in range(n_leaves - 1)]
    return parents + sorted(places, reverse=True)


def layer_seconds(loaded: LoadedModel, attention: TreeAttention, parents: Sequence[int], n_context: int) -> list[float]:
    """Of each layer of one pass, Python's share included."""
    model, laps = loaded.model, [0.0]
    model.kv.truncate(0)
    model.kv.length = n_context
    tokens = [100 + 7 * row for row in range(len(parents))]
    model.forward_tree(tokens, parents, lambda _layer: laps.append(time.perf_counter()), attention=attention)
    return [end - start for start, end in pairwise(laps[1:])]  # the first one has the embedding with it


def passes(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of figures for each thread count, tree and context."""
    n_tree, contexts, n_threads = max(args.rows), args.contexts, args.threads
    cases = [Case(*case) for case in product(n_threads, args.rows, args.leaves, contexts) if case[2] < case[1]]
    settings = ModelSettings(
        dram=parse_size(args.dram),
        pin_percent=100,
        n_ctx=max(contexts) + n_tree,
        n_threads=max(n_threads),
        n_tree=n_tree,
    )
    found: dict[tuple[Case, str], list[float]] = defaultdict(list)
    with LLM(resolve(args.model).path, settings) as llm:
        loaded, model = llm.loaded, llm.loaded.model
        ways: list[TreeAttention] = ["exact", "masked"]
        layer_seconds(loaded, "exact", tree(4, 2), min(contexts))  # goes unmeasured
        for number in range(args.rounds):
            for case in cases:
                model.n_threads = case.threads
                for attention in ways[:: -1 if number % 2 else 1]:
                    parents = tree(case.rows, case.leaves)
                    found[case, attention] += layer_seconds(loaded, attention, parents, case.context)
            print(f"round {number + 1} of {args.rounds}", flush=True)
        n_layers = model.config.n_layers
    return [summary(case, n_layers, found[case, "exact"], found[case, "masked"]) for case in cases]


def summary(case: Case, n_layers: int, exact: Sequence[float], masked: Sequence[float]) -> dict[str, Any]:
    """Seconds of a pass as so many times a layer's lower quartile, printed on the way."""
    exact_s, masked_s = n_layers * quantiles(exact)[0], n_layers * quantiles(masked)[0]
    extra_s = exact_s - masked_s
    print(
        f"{case.threads} threads, {case.rows:2} rows, {case.leaves:2} leaves, context {case.context:4}: "
        f"exact {1e3 * exact_s:6.1f} ms, masked {1e3 * masked_s:6.1f} ms, {1e3 * extra_s:+6.1f} ms: "
        f"{100 * extra_s / CYCLE_S:+5.1f} % of {CYCLE_S} s, {100 * extra_s / masked_s:+5.1f} % of the pass"
    )
    return case._asdict() | {
        "exact_s": exact_s,
        "masked_s": masked_s,
        "extra_s": extra_s,
        "exact_quartiles_s": [n_layers * quartile for quartile in quantiles(exact)],
        "masked_quartiles_s": [n_layers * quartile for quartile in quantiles(masked)],
        "of_streamed_cycle": extra_s / CYCLE_S,
        "of_masked_pass": extra_s / masked_s,
    }


# --- texts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of one greedy answer, the logits they were drawn from, and the figures."""

    tokens: list[int]
    logits: list[NDArray[np.float32]]
    stats: RunStats


def answers(args: argparse.Namespace, attention: TreeAttention) -> Iterator[Answer]:
    """Of all prompts, in one way."""
    settings = ModelSettings(
        dram=parse_size(args.dram),
        pin_percent=0,
        n_ctx=2048,
        n_threads=max(args.threads),
        tree_attention=attention,
    )
    with LLM(resolve(args.model).path, settings, draft=args.draft, policy="lever") as llm:
        for prompt in prompts(args):
            answer = Answer([], [], RunStats())
            steps = llm.engine.steps(
                llm.encode_chat([{"role": "user", "content": prompt}]),
                lambda logits, _history, _position: int(logits.argmax()),
                max_new_tokens=args.tokens,
                end_tokens=llm.tokenizer.eog_ids,
                stats=answer.stats,
            )
            for step in steps:
                answer.tokens.append(step.token)
                answer.logits.append(step.logits.copy())
            yield answer


def prompts(args: argparse.Namespace) -> list[str]:
    """The first ones of each domain in turn, where lines name one."""
    with args.prompts.open() as lines:
        found = [json.loads(line) for line in lines]
    place: dict[str, int] = {}
    order = []
    for number, line in enumerate(found):
        domain = line.get("domain", "")
        place[domain] = place.get(domain, -1) + 1
        order.append((place[domain], number))
    return [str(found[number]["prompt"]) for _, number in islice(sorted(order), args.n_prompts)]


def comparison(exact: Answer, masked: Answer) -> dict[str, Any]:
    """How two answers to the same prompt differ."""
    pairs = list(zip(exact.tokens, masked.tokens, strict=False))
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
    differs = exact.tokens != masked.tokens
    compared = min(same + 1, len(pairs))  # the first ones that differ had the same tokens before them
    logits = list(zip(exact.logits[:compared], masked.logits[:compared], strict=True))
    gaps = [(top2_gap(a), top2_gap(b)) for a, b in logits]
    return {
        "tokens": len(exact.tokens),
        "same_tokens": same,
        "differs": differs,
        "gap_where_it_differs": gaps[same][0] if differs and same < len(pairs) else None,
        "largest_logit_difference": max(float(np.abs(a - b).max()) for a, b in logits),
        "largest_gap_difference": max(abs(a - b) for a, b in gaps),
        "compared": compared,
        "not_bit_equal": sum(not np.array_equal(a, b) for a, b in logits),
        "gaps_under": {str(bound): sum(gap < bound for gap, _ in gaps) for bound in BOUNDS},
        "exact": masked.stats.exact,
        "near_ties": masked.stats.near_ties,
        "cycles": masked.stats.cycles,
        "verified": masked.stats.verified,
    }


def texts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per prompt."""
    both = zip(list(answers(args, "exact")), answers(args, "masked"), strict=True)
    rows = [comparison(exact, masked) for exact, masked in both]
    for number, row in enumerate(rows):
        print(f"prompt {number}: {row}")
    n_tokens, n_same, n_ties = (sum(row[name] for row in rows) for name in ("tokens", "same_tokens", "near_ties"))
    print(
        f"{sum(row['differs'] for row in rows)} of {len(rows)} answers differ, {n_tokens - n_same} of {n_tokens} "
        f"tokens from the first difference on; near ties (gap under {NEAR_TIE}): {n_ties}"
    )
    return rows


def numbers(text: str) -> list[int]:
    """1,2,3"""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--rows", type=numbers, default="16,26")
    parser.add_argument("--leaves", type=numbers, default="1,4,10,16")
    parser.add_argument("--contexts", type=numbers, default="256,1024,4096")
    parser.add_argument("--threads", type=numbers, default=",".join(map(str, sorted({1, len(performance_cores())}))))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dram", default="4GiB")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--n-prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if (args.draft is None) != (args.prompts is None):
        parser.error("texts need both --draft and --prompts")
    document: dict[str, Any] = {
        "date": date.today().isoformat(),
        "settings": {name: Path(v).name if isinstance(v, Path) else str(v) for name, v in vars(args).items()}
        | {"model": Path(args.model).name},
        "load_average": os.getloadavg(),  # before we begin: what others do on the machine
        "near_tie": NEAR_TIE,
        "cycle_s": CYCLE_S,
        "passes": passes(args) if args.rounds else [],
        "texts": texts(args) if args.prompts else [],
    }
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
