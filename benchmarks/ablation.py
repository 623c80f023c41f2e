"""What each part of lever brings: from a bare tree, part after part, answer by answer in turn.

    python -m benchmarks.ablation demo --pin 0 --json OUT

From the bare tree on, each row adds to the one before; that with choices drafts beside a pass where it pays, no longer
beside each. The last one, where there is a predictor, is the preset itself. Seconds are of one cycle; storage is idle
while nothing is being read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lever.bench import Comparison, PresetWay, Prompt, RawReads, Request, compare, limited, read_prompts, settle
from lever.engine import Engine, Verified
from lever.guess import Guess
from lever.llm import LLM
from lever.loader import ModelSettings
from lever.machine import cpu_model
from lever.memory import parse_size
from lever.opening import Silent, Wanted, open_llm, prepare
from lever.policies import Preset, Situation, grow_while_it_pays, preset
from lever.request import Run
from lever.settings import SamplerSettings

LEVER = preset("lever")


def one_by_one(now: Situation) -> list[int]:
    """As `lever` grows a tree, one node in a draft step."""
    return grow_while_it_pays(now)[:1]


BARE = replace(
    LEVER, name="tree", grow=one_by_one, meanwhile=None, carry_over=False, prunes=False, adaptive=False
)  # of which the logits of all rows are made
ON_DEMAND = replace(BARE, name="+ projection on demand")
BATCHES = replace(ON_DEMAND, name="+ batch-aware drafting", grow=grow_while_it_pays)
CARRIED = replace(BATCHES, name="+ carry-over", carry_over=True)
BESIDE = replace(CARRIED, name="+ drafting beside each pass", meanwhile=LEVER.meanwhile)
CHOSEN = replace(CARRIED, name="+ text, choices", meanwhile=LEVER.meanwhile, adaptive=True)  # beside where it pays
PRUNED = replace(LEVER, name="+ pruning: lever")
PLAIN = preset("flash-ar")


class ProjectsAll(Engine):
    """Makes the logits of all rows of a pass, whether the walk reaches them or not."""

    def _verify(self, run: Run, guess: Guess) -> Verified:
        found = super()._verify(run, guess)
        self._n_rows = len(found.rows.nodes)
        return found

    def _project(self, run: Run, _path: Sequence[int]) -> dict[int, NDArray[np.float32]]:
        width, known = self._model.shape.n_logits, dict[int, NDArray[np.float32]]()
        for start in range(0, self._n_rows, width):
            some = super()._project(run, range(start, min(start + width, self._n_rows)))
            known |= {row: logits.copy() for row, logits in some.items()}  # the next ones take their place
        return known


class Way(PresetWay):
    """A preset, by an engine that makes all logits or those that are needed."""

    def __init__(self, llm: LLM, policy: Preset, request: Request) -> None:
        super().__init__(llm, policy, request, lambda: False)
        if policy is BARE:  # one of its own would not share the cache with the others
            self._engine.__class__ = ProjectsAll


@dataclass(frozen=True, slots=True)
class Row:
    """Of a way over all prompts."""

    name: str
    tokens_per_s: float
    tokens_per_cycle: float
    cycle_s: float
    draft_s: float  # in which nothing else was done
    draft_hidden_s: float  # beside passes
    project_s: float
    stall_s: float  # that the target waited for reads
    storage_idle: float  # share of the time
    pruned: float  # rows

    def line(self) -> str:
        """For people."""
        times = (self.cycle_s, self.draft_s, self.draft_hidden_s, self.project_s, self.stall_s)
        cells = " ".join(f"{1e3 * seconds:8.0f}" for seconds in times)
        speed = f"{self.tokens_per_s:8.2f} {self.tokens_per_cycle:8.2f}"
        return f"{self.name:30} {speed} {cells} {100 * self.storage_idle:8.0f} {self.pruned:8.1f}"


def rows(found: Comparison) -> list[Row]:
    """In the order of the ways."""
    return [_row(name, found) for name in found.ways]


def _row(name: str, found: Comparison) -> Row:
    answers = [result.answer.stats for result in found.results if result.way == name]

    def total(figure: str) -> float:
        return float(sum(getattr(stats, figure) for stats in answers))

    def each(figure: str) -> float:
        return total(figure) / total("cycles")

    tokens, seconds = total("new_tokens") - len(answers), total("decode_s")
    return Row(
        name,
        tokens_per_s=tokens / seconds,
        tokens_per_cycle=tokens / total("cycles"),
        cycle_s=each("decode_s"),
        draft_s=each("draft_s"),
        draft_hidden_s=each("draft_hidden_s"),
        project_s=each("project_s"),
        stall_s=each("stall_s"),
        storage_idle=max(1 - total("read_s") / seconds, 0.0),
        pruned=each("pruned"),
    )


def measure(args: argparse.Namespace) -> tuple[list[Row], Comparison, float]:
    """All ways in turn; SystemExit if one of them wrote another text."""
    prompts_of = limited(read_prompts(Path(args.prompts) if args.prompts else None), args.limit)
    request = Request(max_new_tokens=args.tokens, sampler=SamplerSettings(temperature=0.0, seed=0))
    settings = ModelSettings(dram=parse_size(args.dram), pin_percent=args.pin, n_ctx=1024, n_threads=args.threads)
    with open_llm(Wanted(args.model, args.draft, preset="lever", prune="auto"), settings, Silent()) as llm:
        tuning = prepare(llm, Silent())
        used = settings if tuning is None else tuning.settings
        policies = [PLAIN, BARE, ON_DEMAND, BATCHES, CARRIED, BESIDE, CHOSEN]
        if llm.prune == "off":
            print("without pruning: there is no predictor (lever train-predictor)")
        else:
            policies.append(PRUNED)
        ways = [Way(llm, policy, request) for policy in policies]
        prompts: list[tuple[Prompt, Sequence[int]]] = [
            (prompt, llm.encode_chat([{"role": "user", "content": prompt.text}])) for prompt in prompts_of
        ]
        found = Comparison([way.name for way in ways])
        store = llm.loaded.store
        with RawReads(llm.gguf.path, used.block, used.depth) as raw:

            def rate() -> float:
                settle(store.stats)
                return raw.bytes_per_s()

            compare(ways, prompts, found, rounds=args.rounds, read=ways[-1].read, raw_rate=rate, tell=print)
        if found.differences:
            raise SystemExit(str(found.differences[0]))
        return rows(found), found, store.bytes_per_pass


def main() -> None:
    """Words in, a table and a file out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--prompts", default="")
    parser.add_argument("--limit", type=int, default=1, help="prompts of each domain")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--pin", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dram", default="4GiB")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table, found, nbytes = measure(args)
    names = ("tokens/s", "a cycle", "ms cycle", "draft", "beside", "logits", "waits", "% idle", "pruned")
    print(f"\n{'':30} " + " ".join(f"{name:>8}" for name in names))
    for row in table:
        print(row.line())
    print(f"{nbytes / found.raw_read_bytes_per_s:.3f} s to read what a pass streams, by raw reads between the answers")
    if args.json:
        arguments = {name: str(value) for name, value in vars(args).items() if name != "json"}
        arguments |= {name: Path(arguments[name]).name for name in ("model", "draft", "prompts")}
        about = {"date": date.today().isoformat(), "cpu": cpu_model(), "arguments": arguments}
        figures = {"raw_read_bytes_per_s": found.raw_read_bytes_per_s, "bytes_per_pass": nbytes}
        args.json.write_text(json.dumps({**about, **figures, "rows": [asdict(row) for row in table]}, indent=1))


if __name__ == "__main__":
    main()
