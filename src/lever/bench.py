"""Ways to decode, compared: they answer the same prompts in turn; figures by domain, and whether all wrote the same.

Knows no command line, prints and draws nothing.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Protocol

import xxhash

from lever.engine import Engine
from lever.errors import StorageError, UsageError
from lever.llm import LLM
from lever.memory import peak_rss_bytes
from lever.owner import Owner
from lever.pages import Pages
from lever.policies import Preset
from lever.sample import Sampler
from lever.settings import SamplerSettings
from lever.stats import RunStats
from lever.trace import Cycle
from lever.weights.reader import DirectFile
from lever.weights.store import StoreStats

PLAIN, OURS = "flash-ar", "lever"  # presets that all others are compared with
ALL = "all"  # in the place of a domain
IN_RAM = " in RAM"  # how the name of another program ends that has all it wants; not said where it is a measure
RAW_BYTES = 64 << 20  # of memory to read into: what stays in the processor's cache gives a rate that nobody else has
RAW_S = 0.25
SETTLED_S = 0.1  # without a piece read: a store has come to rest


# --- prompts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked, and what kind of text that makes."""

    id: str
    domain: str
    text: str


def read_prompts(path: Path | None = None) -> list[Prompt]:
    """The prompts of a JSONL file; without one, a dozen of lever's own.

    UsageError, with the number of the line, for one that is not an object with the texts id, domain and prompt.
    """
    if path is None:
        return _parsed("lever's own prompts", (resources.files("lever") / "data" / "bench.jsonl").read_bytes())
    try:
        return _parsed(str(path), path.read_bytes())
    except OSError as error:
        raise StorageError(f"cannot read the prompts from {path}: {error.strerror or error}") from error


def limited(prompts: Sequence[Prompt], most: int) -> list[Prompt]:
    """The first few of each domain."""
    counts: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        counts[prompt.domain] = counts.get(prompt.domain, 0) + 1
        if counts[prompt.domain] <= most:
            kept.append(prompt)
    return kept


def _parsed(name: str, data: bytes) -> list[Prompt]:
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        prompt = _prompt(f"{name}, line {number}", line)
        if prompt.id in prompts:
            raise UsageError(f"{name}, line {number}: the id {prompt.id!r} is taken by a line before it")
        prompts[prompt.id] = prompt
    if not prompts:
        raise UsageError(f"{name} holds no prompt: give one JSON object a line, with id, domain and prompt")
    return list(prompts.values())


def _prompt(where: str, line: bytes) -> Prompt:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:  # of which UnicodeDecodeError is one
        raise UsageError(f"{where} is not JSON: {error}") from error
    fields = found if isinstance(found, dict) else {}
    texts = [text for key in ("id", "domain", "prompt") if isinstance(text := fields.get(key), str) and text.strip()]
    if len(texts) < 3:
        raise UsageError(f"{where} is no object with the texts id, domain and prompt")
    if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):
        raise UsageError(f"{where} has half of a character: JSON writes one beyond \\uffff as two of its escapes")
    return Prompt(*texts)


# --- ways to decode -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """What a way made of a prompt. `logits`: XXH3-64 of the bits that each token was drawn from, if they are known."""

    tokens: tuple[int, ...]
    stats: RunStats
    logits: tuple[int, ...] = ()


class Way(Protocol):
    """Something that answers prompts. One that is not `ours` promises no bits, and tells little of its cycles."""

    name: str
    ours: bool

    def answer(self, prompt: Sequence[int]) -> Answer:
        """To tokens. Errors as in `lever.errors`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The same for all prompts and ways."""

    max_new_tokens: int
    sampler: SamplerSettings


class PresetWay:
    """A preset, by an engine of its own beside the others on one model."""

    ours = True

    def __init__(
        self, llm: LLM, policy: Preset, request: Request, cancelled: Callable[[], bool], *, traced: bool = False
    ) -> None:
        self.name = policy.name
        self.drafts = policy.drafts
        self.cycles: list[Cycle] = []  # of the newest answer, if traced
        self._engine: Engine = llm.engine.beside(policy)
        self._draw = Sampler(request.sampler, llm.config.n_vocab).draw
        self._request, self._end_tokens, self._cancelled = request, llm.tokenizer.eog_ids, cancelled
        self._on_cycle = self.cycles.append if traced else None

    def answer(self, prompt: Sequence[int]) -> Answer:
        """With the bits of every token."""
        self.cycles.clear()
        return self._answer(prompt, self._request.max_new_tokens)

    def read(self, prompt: Sequence[int]) -> None:
        """Have target and draft read a prompt, so that no answer counted later has to: two tokens, for the draft is
        asked first when there is one.
        """
        self._answer(prompt, 2 if self.drafts else 0)

    def _answer(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        stats, tokens, logits = RunStats(), [], []
        for step in self._engine.steps(
            prompt,
            self._draw,
            max_new_tokens=max_new_tokens,
            end_tokens=self._end_tokens,
            stats=stats,
            temperature=self._request.sampler.temperature,
            cancelled=self._cancelled,
            on_cycle=self._on_cycle,
        ):
            tokens.append(step.token)
            logits.append(xxhash.xxh3_64_intdigest(step.logits.data))
        stats.peak_rss_bytes = peak_rss_bytes()
        return Answer(tuple(tokens), stats, tuple(logits))


class RawReads(Owner):
    """Reads of a file past the page cache and nothing else, round and round in it and in memory of RAW_BYTES."""

    def __init__(self, path: Path, block: int, depth: int) -> None:
        self._block, self._depth = block, depth
        self._numbers = itertools.count()
        with ExitStack() as stack:
            self._file = stack.enter_context(DirectFile(path))
            self._pages = stack.enter_context(Pages(max(RAW_BYTES, block)))
            self._readers = stack.enter_context(ThreadPoolExecutor(depth, "lever-raw"))
            self._cleanup = stack.pop_all()

    def bytes_per_s(self, seconds: float = RAW_S) -> float:
        """The rate of a moment, `depth` reads in flight."""
        started = time.perf_counter()

        def read_on(_reader: int) -> int:
            done = self._read(next(self._numbers))
            while time.perf_counter() < started + seconds:
                done += self._read(next(self._numbers))
            return done

        return sum(self._readers.map(read_on, range(self._depth))) / (time.perf_counter() - started)

    def close(self) -> None:
        """Give memory and file back. Safe to call twice."""
        self._cleanup.close()

    def _read(self, number: int) -> int:
        at = number % (self._pages.nbytes // self._block) * self._block
        n_blocks = max(self._file.size // self._block, 1)
        return self._file.read(self._pages.bytes.data[at : at + self._block], number % n_blocks * self._block)


def settle(stats: StoreStats) -> None:
    """Wait until a store has read ahead as far as it can: before, it shares the storage with whoever reads beside."""
    before = -1
    while stats.read_bytes != before:
        before = stats.read_bytes
        time.sleep(SETTLED_S)


# --- in turn ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """An answer, and to what."""

    prompt: Prompt
    round: int
    way: str
    ours: bool
    answer: Answer


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer leaves that of the reference: new tokens are counted from 0; None where they never differ."""

    prompt: str
    preset: str
    reference: str
    token: int | None
    logits: int | None

    def __str__(self) -> str:
        what, place = ("text", self.token) if self.token is not None else ("logits", self.logits)
        return f"{self.preset} and {self.reference} differ in the {what} of prompt {self.prompt!r} at new token {place}"


@dataclass(slots=True)
class Comparison:
    """What was found so far: the answers of prompts that every way has answered, and rates of raw reads between."""

    ways: Sequence[str]
    results: list[Result] = field(default_factory=list)
    raw_rates: list[float] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def raw_read_bytes_per_s(self) -> float:
        """The median; 0 before the first."""
        return median(self.raw_rates) if self.raw_rates else 0.0

    @property
    def ours(self) -> list[str]:
        """Those that promise the same bits, the one that the others are held against first."""
        names = list(dict.fromkeys(result.way for result in self.results if result.ours))
        return sorted(names, key=lambda name: name != PLAIN)

    def add(self, results: Sequence[Result]) -> None:
        """The answers of all ways to one prompt, and where ours are not the same."""
        by_way = {result.way: result for result in results}
        self.results += [by_way[name] for name in self.ways]
        reference, *others = (by_way[name] for name in self.ours)
        found = (difference(reference, other) for other in others)
        self.differences += [one for one in found if one is not None]


def turns(n_ways: int, visit: int) -> list[int]:
    """The order of ways at a prompt: another one is the first each time, so that none always has the quiet start."""
    return [(visit + place) % n_ways for place in range(n_ways)]


def compare(
    ways: Sequence[Way],
    prompts: Sequence[tuple[Prompt, Sequence[int]]],
    found: Comparison,
    *,
    rounds: int,
    read: Callable[[Sequence[int]], None],
    raw_rate: Callable[[], float],
    tell: Callable[[str], None],
) -> None:
    """Let every way answer every prompt, prompt by prompt, with a moment of raw reads before each answer.

    `read` a prompt before the first of them. What ends it, Cancelled or another error, leaves whole prompts in `found`.
    """
    visits = [(number, *prompt) for number in range(rounds) for prompt in prompts]
    for visit, (number, prompt, ids) in enumerate(visits):
        tell(f"reading {prompt.id}, {visit + 1} of {len(visits)}")
        read(ids)
        results = []
        for way in (ways[index] for index in turns(len(ways), visit)):
            found.raw_rates.append(raw_rate())
            tell(f"{way.name} on {prompt.id}, {visit + 1} of {len(visits)}")
            results.append(Result(prompt, number, way.name, way.ours, way.answer(ids)))
        found.add(results)


def difference(reference: Result, other: Result) -> Difference | None:
    """The first places where two answers are not the same."""
    a, b = reference.answer, other.answer
    token, logits = _first_apart(a.tokens, b.tokens), _first_apart(a.logits, b.logits)
    if token is None and logits is None:
        return None
    return Difference(other.prompt.id, other.way, reference.way, token, logits)


def _first_apart(a: Sequence[int], b: Sequence[int]) -> int | None:
    differ = (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, None if len(a) == len(b) else min(len(a), len(b)))


# --- figures ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A way in a domain. Tokens a second over all its answers; seconds and counts from cycle_s on are of one cycle.

    `bound_s` is what no cycle can be shorter than: the larger of its streamed bytes at the rate of raw reads and of
    the target's measured compute. None: another program does not tell.
    """

    preset: str
    domain: str
    prompts: int  # answers: a prompt counts once a round
    new_tokens: int
    decode_s: float
    cycles: int
    tokens_per_s: float  # without the first token of an answer, which belongs to its prompt
    tokens_per_cycle: float
    peak_rss_bytes: int
    cycle_s: float
    drafted: float
    verified: float
    accepted: float
    pruned: float = 0.0
    bound_s: float | None = None
    read_bytes_per_s: float | None = None
    draft_s: float | None = None
    draft_hidden_s: float | None = None
    stall_s: float | None = None
    verify_s: float | None = None
    project_s: float | None = None
    python_s: float | None = None


def rows(found: Comparison, bytes_per_pass: int, *, by_domain: bool = True) -> list[Row]:
    """Domain by domain in the order of the prompts, and in each the ways in theirs; or each way over all prompts."""
    domains: list[str | None] = list(dict.fromkeys(result.prompt.domain for result in found.results))
    table = []
    for domain in domains if by_domain else [None]:
        for name in found.ways:
            chosen = [r for r in found.results if r.way == name and domain in (None, r.prompt.domain)]
            if chosen:
                table.append(_row(domain or ALL, chosen, bytes_per_pass, found.raw_read_bytes_per_s))
    return table


def _row(domain: str, results: Sequence[Result], bytes_per_pass: int, raw_rate: float) -> Row:
    def total(name: str) -> float:
        return float(sum(getattr(result.answer.stats, name) for result in results))

    def share(of: float, by: float) -> float:
        return of / by if by else 0.0

    cycles, decode_s = int(total("cycles")), total("decode_s")
    counted = total("new_tokens") - len(results)  # the first of each answer belongs to its prompt
    parts = ("draft_s", "draft_hidden_s", "stall_s", "verify_s", "project_s", "python_s")
    told: dict[str, float] = {}
    if results[0].ours:
        told = {name: share(total(name), cycles) for name in parts}
        told["read_bytes_per_s"] = share(total("read_bytes"), decode_s)
        told["bound_s"] = max(share(bytes_per_pass, raw_rate), told["verify_s"] + told["project_s"])
    return Row(
        preset=results[0].way,
        domain=domain,
        prompts=len(results),
        new_tokens=int(total("new_tokens")),
        decode_s=decode_s,
        cycles=cycles,
        tokens_per_s=share(counted, decode_s),
        tokens_per_cycle=share(counted, cycles),
        peak_rss_bytes=max(result.answer.stats.peak_rss_bytes for result in results),
        cycle_s=share(decode_s, cycles),
        drafted=share(total("drafted"), cycles),
        verified=share(total("verified"), cycles),
        accepted=share(total("accepted"), cycles),
        pruned=share(total("pruned"), cycles),
        **told,
    )


def ratios(table: Sequence[Row]) -> dict[str, float]:
    """How many times as fast one way is as another, as "a/b": the geometric mean over the domains that both have.

    Of the preset lever to every other way, and of every way to flash-ar.
    """
    speeds: dict[str, dict[str, float]] = {}
    for row in table:
        if row.tokens_per_s > 0:
            speeds.setdefault(row.preset, {})[row.domain] = row.tokens_per_s
    pairs = [(OURS, name) for name in speeds if name != OURS and OURS in speeds]
    pairs += [(name, PLAIN) for name in speeds if name not in (OURS, PLAIN) and PLAIN in speeds]
    means = {pair: _mean_ratio(*(speeds[name] for name in pair)) for pair in pairs}
    return {"/".join(n.removesuffix(IN_RAM) for n in pair): mean for pair, mean in means.items() if mean is not None}


def _mean_ratio(a: Mapping[str, float], b: Mapping[str, float]) -> float | None:
    logs = [math.log(a[domain] / b[domain]) for domain in a if domain in b]
    return math.exp(sum(logs) / len(logs)) if logs else None


def typical(cycles: Sequence[Cycle]) -> Cycle | None:
    """The cycle of median length, None where there is none."""
    ordered = sorted(cycles, key=lambda cycle: cycle.marks[-1].end - cycle.started)
    return ordered[len(ordered) // 2] if ordered else None


def document(found: Comparison, bytes_per_pass: int) -> dict[str, object]:
    """What was found, for JSON."""
    table = rows(found, bytes_per_pass)
    return {
        "raw_read_bytes_per_s": found.raw_read_bytes_per_s,
        "rows": [asdict(row) for row in table],
        "totals": [asdict(row) for row in rows(found, bytes_per_pass, by_domain=False)],
        "ratios": ratios(table),
        "same_text": all(one.token is None for one in found.differences),
        "same_logits": all(one.logits is None for one in found.differences),
        "differences": [asdict(one) for one in found.differences],
        "prompts": list(_by_prompt(found)),
    }


def _by_prompt(found: Comparison) -> Iterator[dict[str, object]]:
    """Each answer; `same_tokens`: how many of its first tokens are those of the reference."""
    first = next(iter(found.ours), None)
    names = ("new_tokens", "decode_s", "tokens_per_s", "tokens_per_cycle", "cycles", "drafted", "verified", "accepted")
    for result in found.results:
        stats = result.answer.stats
        figures = {name: getattr(stats, name) for name in ("prompt_tokens", *names)}
        place = {"id": result.prompt.id, "domain": result.prompt.domain, "round": result.round}
        reference = next(r for r in found.results if (r.prompt, r.round, r.way) == (result.prompt, result.round, first))
        apart = _first_apart(reference.answer.tokens, result.answer.tokens)
        same = len(result.answer.tokens) if apart is None else apart
        yield {**place, "preset": result.way, **figures, "same_tokens": same}
