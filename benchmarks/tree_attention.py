"""What does a tree's exact attention cost against one masked pass, and how often does the masked one change text?

    python -m benchmarks.tree_attention MODEL [--draft DRAFT --prompts FILE.jsonl] [--json FILE]

Passes, everything in DRAM: trees of several sizes and numbers of leaves behind contexts of several lengths. Exact and
masked ones take turns on the same model; medians of each, and of the differences within a turn. A tree is a trunk with
leaves spread over it, the shape that drafts give. The cache is zeros: what it holds costs no time.

Texts, streamed, if there are a draft and prompts (lines of JSON with "prompt"): greedy answers of the preset `lever` in
both ways. Logits are compared as long as the tokens before them are equal.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lever.engine import NEAR_TIE
from lever.llm import LLM
from lever.loader import LoadedModel, ModelSettings
from lever.machine import performance_cores
from lever.memory import parse_size
from lever.models import resolve
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


@dataclass(frozen=True, slots=True)
class Turn:
    """One pass in each way: seconds, and those inside ggml."""

    exact_s: float
    masked_s: float
    exact_compute_s: float
    masked_compute_s: float


def turn(loaded: LoadedModel, parents: Sequence[int], n_context: int, masked_first: bool) -> Turn:
    """Both ways, one after the other."""
    model, tokens = loaded.model, [100 + 7 * row for row in range(len(parents))]
    found: dict[str, tuple[float, float]] = {}
    ways = [("exact", model.forward_paths), ("masked", model.forward_masked)]
    for name, forward in reversed(ways) if masked_first else ways:
        model.kv.truncate(0)
        model.kv.length = n_context
        started, compute = time.perf_counter(), model.stats.layers_s
        forward(tokens, parents)
        found[name] = (time.perf_counter() - started, model.stats.layers_s - compute)
    (exact_s, exact_compute_s), (masked_s, masked_compute_s) = found["exact"], found["masked"]
    return Turn(exact_s, masked_s, exact_compute_s, masked_compute_s)


def passes(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of figures for each thread count, tree and context."""
    contexts, shapes = numbers(args.contexts), [(r, n) for r in numbers(args.rows) for n in numbers(args.leaves)]
    n_tree = max(numbers(args.rows))
    n_threads = numbers(args.threads)
    settings = ModelSettings(
        dram=parse_size(args.dram),
        pin_percent=100,
        n_ctx=max(contexts) + n_tree,
        n_threads=max(n_threads),
        n_tree=n_tree,
    )
    cases = [Case(t, r, n, c) for t in n_threads for r, n in shapes if n < r for c in contexts]
    turns: dict[Case, list[Turn]] = {case: [] for case in cases}
    with LLM(resolve(args.model).path, settings) as llm:
        turn(llm.loaded, tree(4, 2), min(contexts), masked_first=False)  # goes unmeasured
        for number in range(args.rounds):
            for case in cases:
                llm.loaded.model.n_threads = case.threads
                parents = tree(case.rows, case.leaves)
                turns[case].append(turn(llm.loaded, parents, case.context, masked_first=bool(number % 2)))
    return [summary(case, found) for case, found in turns.items()]


def summary(case: Case, turns: Sequence[Turn]) -> dict[str, Any]:
    """Medians of one case, printed on the way."""
    medians = {name: median(getattr(t, name) for t in turns) for name in asdict(turns[0])}
    extra_s = median(t.exact_s - t.masked_s for t in turns)
    shares = {"of_streamed_cycle": extra_s / CYCLE_S, "of_masked_pass": extra_s / medians["masked_s"]}
    print(
        f"{case.threads} threads, {case.rows:2} rows, {case.leaves:2} leaves, context {case.context:4}: "
        f"exact {1e3 * medians['exact_s']:6.1f} ms, masked {1e3 * medians['masked_s']:6.1f} ms, "
        f"{1e3 * extra_s:+6.1f} ms: {100 * shares['of_streamed_cycle']:+5.1f} % of {CYCLE_S} s, "
        f"{100 * shares['of_masked_pass']:+5.1f} % of the pass"
    )
    return case._asdict() | medians | {"extra_s": extra_s} | shares


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
        n_threads=max(numbers(args.threads)),
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
    parser.add_argument("--rows", default="16,26")
    parser.add_argument("--leaves", default="1,4,10,16")
    parser.add_argument("--contexts", default="256,1024,4096")
    parser.add_argument("--threads", default=",".join(map(str, sorted({1, len(performance_cores())}))))
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
        "near_tie": NEAR_TIE,
        "cycle_s": CYCLE_S,
        "passes": passes(args) if args.rounds else [],
        "texts": texts(args) if args.prompts else [],
    }
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
