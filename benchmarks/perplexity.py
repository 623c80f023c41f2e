"""How well does a model predict a text? Its perplexity, and how far it is from that of other models, token by token.

    python -m benchmarks.perplexity demo --text FILE --make-text PROMPTS.jsonl
    python -m benchmarks.perplexity MODEL_OR_IMAGE... --text FILE [--tokens N] [--json FILE]
    python -m benchmarks.perplexity demo --pack q4_0 q4_0+output --text FILE

The text are answers to prompts, as token ids: those of the first model, drawn with a seed for each prompt. Answers are
scored, prompts are only read. `--pack` compares the first model with its images of these types, each made beside the
text, measured and deleted. Models that are compared must have the same vocabulary; one is in memory at a time.

Tokens of one answer are not independent, so standard errors are those of sums over answers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from lever import gguf as gguf_file
from lever.arch import ModelConfig
from lever.gguf import TYPES
from lever.llm import LLM, GenerationSettings
from lever.loader import LoadedModel, ModelSettings
from lever.memory import format_size, parse_size
from lever.model import Model
from lever.models import Silent, resolve
from lever.models.images import source_sha256
from lever.pack import PackSettings, pack
from lever.sample import logprob
from lever.settings import SamplerSettings

N_LOGITS = 32  # rows that are projected at once
TEMPERATURE = 0.7
ROUNDS = 9  # of single rows that are timed
PACK_BYTES = 1 << 30  # that packing may hold
IMAGES: Mapping[str, PackSettings] = {
    "keep": PackSettings(dram=PACK_BYTES),
    "q4_0": PackSettings(type="q4_0", dram=PACK_BYTES),
    "q4_0+output": PackSettings(type="q4_0", output="q4_0", dram=PACK_BYTES),
    "q4_0+embedding": PackSettings(type="q4_0", embedding="q4_0", dram=PACK_BYTES),
    "q4_0+output+embedding": PackSettings(type="q4_0", output="q4_0", embedding="q4_0", dram=PACK_BYTES),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids; those of `tokens` are scored."""

    prompt: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Scores:
    """What a model makes of every scored token."""

    logprobs: NDArray[np.float64]  # natural, of the token that is there
    greedy: NDArray[np.int64]  # the token that it would put there
    answers: NDArray[np.int64]  # which answer it stands in


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over tokens with its standard error."""

    mean: float
    error: float


@dataclass(frozen=True, slots=True)
class Difference:
    """One model against another, over the same tokens."""

    nll: Mean  # of this one minus of the other, paired
    greedy_differs: float  # share of positions


@dataclass(frozen=True, slots=True)
class Costs:
    """What a pass of a model takes when nothing, and when everything is in memory."""

    layers_bytes: int
    output_bytes: int
    layers_row_s: float  # one row on one thread
    output_row_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """One model."""

    name: str
    types: Mapping[str, str]  # of the matrices whose type is in question
    n_tokens: int
    nll: Mean
    perplexity: float
    against_first: Difference
    against_previous: Difference
    costs: Costs


# --- arithmetic ---------------------------------------------------------------------------------------------


def score(loaded: LoadedModel, answers: Sequence[Answer]) -> Scores:
    """Every token of the answers, each predicted from what stands before it."""
    found = [(*pair, number) for number, answer in enumerate(answers) for pair in _predictions(loaded, answer)]
    logprobs, greedy, numbers = zip(*found, strict=True)
    return Scores(np.array(logprobs), np.array(greedy), np.array(numbers))


def _predictions(loaded: LoadedModel, answer: Answer) -> Iterator[tuple[float, int]]:
    """Log-probability of each token of an answer, and the likeliest one there."""
    model, n_batch = loaded.model, loaded.shape.n_batch
    tokens = [*answer.prompt, *answer.tokens]
    model.kv.truncate(0)
    for start in range(0, len(tokens) - 1, n_batch):
        part = tokens[start : min(start + n_batch, len(tokens) - 1)]  # nothing comes after the last token
        model.forward(part)
        rows = range(len(part))[max(len(answer.prompt) - 1 - start, 0) :]
        for first in range(0, len(rows), loaded.shape.n_logits):
            chosen = rows[first : first + loaded.shape.n_logits]
            for row, logits in zip(chosen, model.project(chosen), strict=True):
                yield logprob(logits, tokens[start + row + 1]), int(logits.argmax())


def mean_of(values: NDArray[np.float64], answers: NDArray[np.int64]) -> Mean:
    """The mean over tokens; its error from how the sums over answers deviate (needs two answers at least)."""
    mean, n_answers = float(values.mean()), int(answers.max()) + 1
    sums = np.bincount(answers, values - mean, n_answers)
    return Mean(mean, math.sqrt(n_answers / (n_answers - 1) * float(sums @ sums)) / len(values))


def difference(a: Scores, b: Scores) -> Difference:
    """How much worse than `b` model `a` predicts; the noise that both share cancels out."""
    return Difference(mean_of(b.logprobs - a.logprobs, a.answers), float((a.greedy != b.greedy).mean()))


def costs(loaded: LoadedModel) -> Costs:
    """Bytes of a pass, and seconds of compute of one row where nothing is waited for."""
    model = loaded.model
    model.n_threads = 1
    model.kv.truncate(0)
    rounds = [_row_seconds(model) for _ in range(ROUNDS)]
    layers_s, output_s = (median(column) for column in zip(*rounds, strict=True))
    return Costs(loaded.units.layers_nbytes, loaded.units.projection_nbytes, layers_s, output_s)


def _row_seconds(model: Model) -> tuple[float, float]:
    layers_s, output_s = model.stats.layers_s, model.stats.projection_s
    model.forward([0])
    model.project([0])
    return model.stats.layers_s - layers_s, model.stats.projection_s - output_s


# --- the text -----------------------------------------------------------------------------------------------


def make_answers(path: Path, prompts: Sequence[str], n_tokens: int, settings: ModelSettings) -> list[Answer]:
    """A model's answers to prompts in its chat template, each drawn with the prompt's number as seed."""
    answers = []
    with LLM(path, settings) as llm:
        for seed, prompt in enumerate(prompts):
            tokens = llm.encode_chat([{"role": "user", "content": prompt}])
            sampler = SamplerSettings(temperature=TEMPERATURE, seed=seed)
            answer = llm.generate(tokens, GenerationSettings(sampler=sampler, max_new_tokens=n_tokens))
            for _ in answer:
                pass
            answers.append(Answer(tokens, answer.tokens))
            print(f"{seed + 1} of {len(prompts)}: {len(answer.tokens)} tokens", flush=True)
    return answers


def read_answers(path: Path, n_tokens: int | None) -> list[Answer]:
    """The text, cut after so many tokens of answers."""
    answers, left = [], n_tokens
    for item in json.loads(path.read_text()):
        tokens = item["tokens"][:left]
        left = None if left is None else left - len(tokens)
        if tokens:
            answers.append(Answer(item["prompt"], tokens))
    if len(answers) < 2:
        raise SystemExit(f"{path} has {len(answers)} answers within {n_tokens} tokens: an error needs two at least")
    return answers


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file with one JSON object a line."""
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


# --- the command --------------------------------------------------------------------------------------------


def measure(path: Path, answers: Sequence[Answer], settings: ModelSettings) -> tuple[Scores, Costs, dict[str, str]]:
    """One model: loaded, asked, closed."""
    gguf = gguf_file.read(path)
    parts = ("blk.0.ffn_up.weight", "output.weight", "token_embd.weight")
    types = {name: TYPES[gguf.tensors[name].type].name for name in parts if name in gguf.tensors}
    with LoadedModel(gguf, ModelConfig.from_gguf(gguf), settings) as loaded:
        return score(loaded, answers), costs(loaded), types


@contextmanager
def image_of(source: Path, kind: str, where: Path) -> Iterator[Path]:
    """The image of a model for as long as the block runs."""
    gguf = gguf_file.read(source)
    with TemporaryDirectory(dir=where) as folder:
        path, sha256 = Path(folder) / "image.gguf", source_sha256(gguf.files, Silent())
        pack(
            gguf,
            ModelConfig.from_gguf(gguf),
            path,
            IMAGES[kind],
            name=source.name,
            sha256=lambda: sha256,
            progress=Silent(),
        )
        yield path


def paths_of(models: Sequence[str], images: Sequence[str], where: Path) -> Iterator[tuple[str, Path]]:
    """Names and files, each valid until the next."""
    for model in models:
        yield model, resolve(model).path
    for kind in images:
        with image_of(resolve(models[0]).path, kind, where) as path:
            yield f"{models[0]}, image {kind}", path


def compare(paths: Iterator[tuple[str, Path]], answers: Sequence[Answer], settings: ModelSettings) -> Iterator[Report]:
    """A report of each model as soon as it is measured."""
    first = previous = None
    for name, path in paths:
        scores, cost, types = measure(path, answers, settings)
        first, previous = first or scores, previous or scores
        nll = mean_of(-scores.logprobs, scores.answers)
        differences = difference(scores, first), difference(scores, previous)
        yield Report(name, types, len(scores.greedy), nll, math.exp(nll.mean), *differences, cost)
        previous = scores


def show(report: Report) -> None:
    """Some lines for people."""
    nll, cost = report.nll, report.costs
    print(f"{report.name} ({', '.join(report.types.values())})")
    print(f"  {report.n_tokens} tokens, nll {nll.mean:.4f} ± {nll.error:.4f}, perplexity {report.perplexity:.4f}")
    for name, other in (("first", report.against_first), ("previous", report.against_previous)):
        print(
            f"  against the {name}: nll {other.nll.mean:+.4f} ± {other.nll.error:.4f}, "
            f"greedy differs at {100 * other.greedy_differs:.2f} %"
        )
    total = cost.layers_bytes + cost.output_bytes
    print(f"  a pass reads {format_size(total)}, of which the output {format_size(cost.output_bytes)}")
    print(f"  one row on one thread: layers {1e3 * cost.layers_row_s:.1f} ms, output {1e3 * cost.output_row_s:.1f} ms")


def main() -> None:
    """Make the text if asked to, measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL_OR_IMAGE")
    parser.add_argument("--pack", nargs="+", choices=IMAGES, default=[], metavar="TYPE", help=", ".join(IMAGES))
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--make-text", type=Path, metavar="PROMPTS", help="write --text, and measure nothing")
    parser.add_argument("--answer-tokens", type=int, default=350)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--dram", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dram = parse_size(args.dram)
    if args.make_text:
        settings = ModelSettings(dram=dram, n_threads=args.threads)
        prompts = read_prompts(args.make_text)
        made = make_answers(resolve(args.models[0]).path, prompts, args.answer_tokens, settings)
        args.text.write_text(json.dumps([asdict(answer) for answer in made]))
        return
    answers = read_answers(args.text, args.tokens)
    n_ctx = max(len(answer.prompt) + len(answer.tokens) for answer in answers)
    settings = ModelSettings(dram=dram, n_threads=args.threads, n_ctx=n_ctx, n_logits=N_LOGITS)
    reports = []
    for report in compare(paths_of(args.models, args.pack, args.text.parent), answers, settings):
        show(report)
        reports.append(report)
    if args.json:
        document = {
            "date": date.today().isoformat(),
            "machine": platform.machine(),
            "settings": {key: str(value) for key, value in vars(args).items()},
            "text": {"answers": len(answers), "sha256": hashlib.sha256(args.text.read_bytes()).hexdigest()},
            "models": [asdict(report) for report in reports],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
