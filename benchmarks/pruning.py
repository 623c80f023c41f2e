"""What pruning behind a middle layer keeps, costs and brings: the paper's Figure 12, in more settings.

    python -m benchmarks.pruning demo --json OUT

Trees of a fixed size are first checked whole, with their scores remembered: so each rule can be asked afterwards what
it would have kept of the same trees, and with which threshold it keeps 95 % of what is accepted. Then each rule runs
with that threshold. Rows are counted behind the root.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lever import bench
from lever.bench import limited, read_prompts
from lever.companion import Companion
from lever.draft import Draft
from lever.engine import Engine
from lever.llm import LLM
from lever.loader import ModelSettings
from lever.memory import parse_size, rss_bytes
from lever.models import predictors
from lever.opening import Silent, Wanted, open_llm, prepare
from lever.policies import Preset, best_nodes, preset
from lever.predictor import Predictor, Translator
from lever.profile import of_layers
from lever.prune import DRAFT, PAPER, Mix, over_threshold, weigh
from lever.pruner import Pruning, Rule
from lever.sample import Sampler
from lever.scores import Scores
from lever.settings import SamplerSettings
from lever.stats import RunStats
from lever.trace import Cycle
from lever.training.trees import Checked, Kept, Watching, kept_by, tightest

ACCEPTED = 0.95
AUTO_OFF = "lever, auto", "lever, off"
PAPERS_ROWS = 0.48  # of the rows go on in the paper, with 95 % of what is accepted, in 12.2 % less time

ByThreshold = Callable[[float], Rule]


def by_edge(*, shadow: bool = True, safeguards: bool = True) -> ByThreshold:
    """The paper's rule, or what is left of it."""

    def at(threshold: float) -> Rule:
        def rule(tree: Any, rows: Any, found: Any, scores: Sequence[float]) -> Sequence[int]:
            edge = weigh(tree, rows, found, scores, PAPER, shadow=shadow).edge
            return over_threshold(rows, edge, threshold, safeguards=safeguards)

        return rule

    return at


def by_path(mix: Mix) -> ByThreshold:
    """Rows that are reached with less than a probability go."""

    def at(threshold: float) -> Rule:
        def rule(tree: Any, rows: Any, found: Any, scores: Sequence[float]) -> Sequence[int]:
            reach = weigh(tree, rows, found, scores, mix).reach
            return [row for row, chance in enumerate(reach) if chance >= threshold or not row]

        return rule

    return at


def columns(mix: Mix) -> Mapping[str, ByThreshold]:
    """Rules by name."""
    return {
        "draft alone": by_path(DRAFT),
        "paper": by_edge(),
        "paper, no shadow": by_edge(shadow=False),
        "paper, no safeguards": by_edge(safeguards=False),
        "combined": by_path(mix),
    }


@dataclass(frozen=True, slots=True)
class Offline:
    """Of a rule: the threshold that keeps 95 % of what is accepted, what it leaves then, and with 48 % of the rows."""

    threshold: float
    rows: float
    accepted: float
    accepted_at_papers_rows: float


def offline(checked: Sequence[Checked], rule: ByThreshold) -> Offline:
    """What a rule would have done to trees that went through whole."""

    def of(threshold: float) -> Callable[[Checked], Sequence[int]]:
        at = rule(threshold)
        return lambda tree: at(tree.tree, tree.rows, tree.found, tree.scores)

    threshold, kept = tightest(checked, of, ACCEPTED)
    return Offline(threshold, kept.rows, kept.accepted, at_rows(checked, of, PAPERS_ROWS).accepted)


def at_rows(
    checked: Sequence[Checked], rule: Callable[[float], Callable[[Checked], Sequence[int]]], share: float
) -> Kept:
    """What the mildest threshold keeps that leaves at most this share of the rows."""
    low, high = 1e-9, 1.0
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if kept_by(checked, rule(middle)).rows <= share else (middle, high)
    return kept_by(checked, rule(high))


@dataclass(frozen=True, slots=True)
class Online:
    """Of runs with a rule: shares and seconds; a pass's time is the median of those over trees."""

    rows: float
    tokens_per_cycle: float
    pass_s: float
    score_s: float
    tokens_per_s: float


class Bench:
    """One model, a draft and a predictor; answers with any rule."""

    def __init__(self, llm: LLM, draft: Draft, translator: Translator, scores: Scores, n_new: int) -> None:
        self._llm, self._draft, self._translator, self._scores, self._n_new = llm, draft, translator, scores, n_new
        self._texts: dict[tuple[int, ...], list[int]] = {}

    def watch(self, n_rows: int, prompts: Sequence[Sequence[int]]) -> list[Checked]:
        """Trees that went through whole."""
        watching = Watching()
        engine = self._engine(fixed(n_rows), watching.rule)
        for prompt in prompts:
            self._answer(engine, prompt, watching.cycle)
        return watching.checked

    def run(self, policy: Preset, rule: Rule | None, prompts: Sequence[Sequence[int]]) -> Online:
        """Answers with a rule; without one, as many rows as are worth it where the policy prunes at all."""
        return self._in_turn([self._engine(policy, rule)], prompts, 1)[0]

    def beside(self, policies: Sequence[Preset], prompts: Sequence[Sequence[int]], n_rounds: int) -> list[Online]:
        """Answers of several policies, prompt by prompt in turn."""
        first = self._engine(policies[0], None)
        return self._in_turn([first, *(first.beside(policy) for policy in policies[1:])], prompts, n_rounds)

    def _in_turn(self, engines: Sequence[Engine], prompts: Sequence[Sequence[int]], n_rounds: int) -> list[Online]:
        figures: list[list[RunStats]] = [[] for _ in engines]
        passes: list[list[float]] = [[] for _ in engines]
        for visit, prompt in enumerate([*prompts] * n_rounds):
            for place in bench.turns(len(engines), visit):
                figures[place].append(self._answer(engines[place], prompt, timed(passes[place])))
        return [online(*found) for found in zip(figures, passes, strict=True)]

    def _engine(self, policy: Preset, rule: Rule | None) -> Engine:
        loaded = self._llm.loaded
        return Engine(
            loaded.model,
            loaded.store,
            loaded.n_threads,
            loaded.start_threads,
            draft=self._draft,
            policy=policy,
            foretold=self._llm.foretold,
            pruning=Pruning(self._scores, self._translator, rule),
        )

    def _answer(self, engine: Engine, prompt: Sequence[int], on_cycle: Callable[[Cycle], None]) -> RunStats:
        """Figures of one answer; SystemExit if it is another text than before, for the same prompt."""
        stats = RunStats()
        steps = engine.steps(
            prompt,
            Sampler(SamplerSettings(seed=0, temperature=0.0), self._llm.config.n_vocab).draw,
            max_new_tokens=self._n_new,
            end_tokens=self._llm.tokenizer.eog_ids,
            stats=stats,
            on_cycle=on_cycle,
        )
        tokens = [step.token for step in steps]
        if self._texts.setdefault(tuple(prompt), tokens) != tokens:
            raise SystemExit(f"another text: {tokens} instead of {self._texts[tuple(prompt)]}")
        return stats


def timed(passes: list[float]) -> Callable[[Cycle], None]:
    """Notes the seconds of passes over trees."""

    def note(cycle: Cycle) -> None:
        layers = [mark for mark in cycle.marks if mark.what == "layer"]
        if len(cycle.rows.nodes) + len(cycle.pruned) > 1:
            passes.append(layers[-1].end - layers[0].start)

    return note


def online(stats: Sequence[RunStats], passes: Sequence[float]) -> Online:
    """Figures of several answers together."""

    def total(name: str) -> float:
        return float(sum(getattr(answer, name) for answer in stats))

    tokens = total("new_tokens") - len(stats)
    return Online(
        rows=1 - total("pruned") / max(total("verified"), 1),
        tokens_per_cycle=tokens / total("cycles"),
        pass_s=median(passes) if passes else 0.0,
        score_s=total("prune_s") / max(total("pruned_cycles"), 1),
        tokens_per_s=tokens / total("decode_s"),
    )


@contextmanager
def opened(args: argparse.Namespace, settings: ModelSettings) -> Iterator[tuple[Bench, LLM, Translator]]:
    """A bench of the model, loaded."""
    progress = Silent()
    wanted = Wanted(args.model, args.draft, preset="lever", prune="off")  # a predictor is opened here
    with ExitStack() as stack:
        llm = stack.enter_context(open_llm(wanted, settings, progress))
        companion = llm.companion
        assert companion is not None, "a draft is needed"
        predictor = predictor_of(args, llm, companion)
        if args.draft_layers:
            weaken(companion, args.draft_layers)
        prepare(llm, progress, use_profile=not args.draft_layers)
        draft = Draft(companion.load(rss_bytes()).model, n_vocab=companion.n_vocab)
        translator = next((t for t in predictor.translators if t.layer == args.layer), predictor.best)

        def fill(into: NDArray[np.float16]) -> None:
            predictor.read_matrix(translator, into)

        scores = stack.enter_context(llm.loaded.open_scores(fill))
        yield Bench(llm, draft, translator, scores, args.tokens), llm, translator


def predictor_of(args: argparse.Namespace, llm: LLM, companion: Companion) -> Predictor:
    """The one that is named, or the kept one."""
    if args.predictor:
        return Predictor.read(Path(args.predictor))
    found = predictors.kept(llm.config, llm.gguf, companion.gguf, Silent())
    assert found is not None, "no predictor: make one with lever train-predictor"
    return found


def weaken(companion: Companion, n_layers: int) -> None:
    """Leave a draft so many of its layers, the first and the last ones most of all."""
    companion.gguf, companion.config = of_layers(companion.gguf, companion.config, n_layers)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All settings, all rules."""
    prompts_of = limited(read_prompts(Path(args.prompts) if args.prompts else None), args.limit)
    base = ModelSettings(dram=parse_size(args.dram), n_ctx=1024, n_tree=max(args.rows, default=0))
    found: dict[str, Any] = {}
    for name, settings in (
        ("all pinned, one thread", replace(base, pin_percent=100, n_threads=1)),
        ("all streamed, two threads", replace(base, pin_percent=0, n_threads=2)),
    ):
        if args.only and args.only not in name:
            continue
        with opened(args, settings) as (ours, llm, translator):
            prompts = [llm.encode_chat([{"role": "user", "content": prompt.text}]) for prompt in prompts_of]
            found[f"{name}, lever"] = auto(ours, prompts, args.rounds)
            for n_rows in args.rows:
                started = time.perf_counter()
                found[f"{name}, {n_rows} rows"] = rules(ours, translator, n_rows, prompts)
                print(f"({time.perf_counter() - started:.0f} s)", flush=True)
    return found


def rules(ours: Bench, translator: Translator, n_rows: int, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """One setting: what each rule would have done, and what it does."""
    checked = ours.watch(n_rows, prompts)
    whole = ours.run(replace(fixed(n_rows), prunes=False), None, prompts)
    found: dict[str, Any] = {"none": asdict(whole)}
    print(f"\n{n_rows} rows: {len(checked)} trees, layer {translator.layer}, {translator.mix}")
    print(f"{'rule':22} kept at 95 %  accepted at 48 %   rows  tokens  pass ms  score ms  tokens/s")
    print(f"{'none':22} {'':12}  {'':16} {_line(whole)}", flush=True)
    for name, rule in columns(translator.mix).items():
        known = offline(checked, rule)
        seen = ours.run(fixed(n_rows), rule(known.threshold), prompts)
        found[name] = {"offline": asdict(known), **asdict(seen)}
        print(f"{name:22} {known.rows:12.3f}  {known.accepted_at_papers_rows:16.3f} {_line(seen)}", flush=True)
    return found


def auto(ours: Bench, prompts: Sequence[Sequence[int]], n_rounds: int) -> dict[str, Any]:
    """The preset `lever` with and without pruning."""
    lever = preset("lever")
    both = ours.beside([lever, replace(lever, prunes=False)], prompts, n_rounds)
    for name, seen in zip(AUTO_OFF, both, strict=True):
        print(f"{name:22} {'':12}  {'':16} {_line(seen)}", flush=True)
    return {name: asdict(seen) for name, seen in zip(AUTO_OFF, both, strict=True)}


def fixed(n_rows: int) -> Preset:
    """Trees of one size."""
    return Preset("fixed", "", *best_nodes(n_rows), prunes=True)


def _line(seen: Online) -> str:
    return (
        f"{seen.rows:6.3f} {seen.tokens_per_cycle:7.2f} {1e3 * seen.pass_s:8.0f} {1e3 * seen.score_s:9.1f} "
        f"{seen.tokens_per_s:9.2f}"
    )


def main() -> None:
    """Words in, a table and a file out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--draft-layers", type=int, default=0, help="a weaker draft: so many of its layers")
    parser.add_argument("--predictor", default="", help="its file, if not the kept one")
    parser.add_argument("--layer", type=int, default=-1, help="behind which rows are pruned, if not the best one")
    parser.add_argument("--rows", type=int, nargs="*", default=[32, 64], help="of trees of a fixed size; none: no such")
    parser.add_argument("--rounds", type=int, default=3, help="of the preset lever with and without pruning")
    parser.add_argument("--prompts", default="")
    parser.add_argument("--limit", type=int, default=1, help="prompts of each domain")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--only", default="", help="settings whose name has this")
    parser.add_argument("--dram", default="4GiB")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure(args)
    if args.json:
        args.json.write_text(json.dumps({"arguments": {k: str(v) for k, v in vars(args).items()}, **found}, indent=1))


if __name__ == "__main__":
    main()
