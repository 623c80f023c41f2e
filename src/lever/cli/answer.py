"""One answer as it comes: text or JSON on stdout, its progress and figures on stderr. Parses no words."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from types import FrameType

from lever.cli.console import Bar, bar, note, same_place, write, write_json
from lever.cli.options import INTERRUPTED
from lever.errors import UsageError
from lever.llm import LLM, Generation, GenerationSettings
from lever.loader import ModelSettings
from lever.memory import format_size
from lever.opening import Wanted, learn, open_llm, prepare
from lever.settings import AUTO, LOOKUP
from lever.stats import RunStats

log = logging.getLogger(__name__)

SLOW_TOKEN_S = 2.0  # a token that takes longer is worth a word before it is waited for
MOSTLY = 0.5  # of the passes without a guess: worth a word
SLOW_STORAGE = 300e6  # bytes per second: below are SD cards, hard disks and networks


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of which model."""

    model: str
    text: str
    system: str | None = None
    raw: bool = False  # no chat template
    use_image: bool = True  # the model's flash image, where the cache has one
    use_profile: bool = True  # what is known of this machine, and measured if nothing is
    draft: str = AUTO  # a small model that guesses ahead; or NONE
    preset: str | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """How the answer is shown."""

    json: bool = False
    quiet: bool = False
    offline: bool = False


def answer(question: Question, settings: ModelSettings, request: GenerationSettings, output: Output) -> int:
    """Print the answer; the exit code."""
    if not question.text and not question.raw:
        raise UsageError("the prompt is empty: there is nothing to answer")
    wanted = Wanted(question.model, question.draft, question.preset, question.use_image, output.offline)
    with bar(quiet=output.quiet) as progress, open_llm(wanted, settings, progress) as llm:
        prompt = _encode(llm, question)
        llm.check(prompt)  # before anything large is read
        tuning = prepare(llm, progress, use_profile=question.use_profile)
        waiting = _Waiting(llm, len(prompt), progress, quiet=output.quiet)
        generation = llm.generate(prompt, request, waiting.read)
        interrupted = _show(generation, progress, to_stdout=not output.json)
        figures = _figures(generation.stats, llm.loaded.store.bytes_per_pass)
    if tuning is not None:
        learn(tuning, generation.stats)
    if output.json:
        write_json(_document(generation))
    if not output.quiet:
        note(figures)
    return INTERRUPTED if interrupted else 0


def _encode(llm: LLM, question: Question) -> list[int]:
    if not question.raw and llm.template is not None:
        system = [{"role": "system", "content": question.system}] if question.system is not None else []
        return llm.encode_chat([*system, {"role": "user", "content": question.text}])
    if question.system is not None:
        raise UsageError("--system needs a chat template: leave it out, or leave out --raw")
    if not question.raw:
        log.warning("the model has no chat template: going on from the bare text")
    return llm.encode_raw(question.text)


class _Waiting:
    """What is said until there is text: how far the prompt is read, and how long a token will take."""

    def __init__(self, llm: LLM, n_tokens: int, progress: Bar, *, quiet: bool) -> None:
        self._progress, self._n_tokens, self._n_read = progress, n_tokens, 0
        self._reads, self._per_pass = llm.loaded.store.stats, llm.loaded.store.bytes_per_pass
        self._what = f"reading the prompt, {_tokens(n_tokens)}"
        self._warned = quiet
        progress.start(None, self._what)

    def read(self, n_tokens: int) -> None:
        """So many tokens more are through the layers."""
        self._n_read += n_tokens
        rate = self._reads.read_bytes / self._reads.read_s if self._reads.read_s else 0.0
        from_flash = f", {_rate(rate)}" if self._per_pass and rate else ""
        self._progress.tell(f"{self._what}: {100 * self._n_read // self._n_tokens} %{from_flash}")
        if self._per_pass and rate and not self._warned:
            self._warn(rate)

    def _warn(self, rate: float) -> None:
        """Once, when tokens will be slow."""
        seconds = self._per_pass / rate
        if seconds > SLOW_TOKEN_S:
            self._warned = True
            advice = "this storage is slow, see lever doctor" if rate < SLOW_STORAGE else "more --dram reads less"
            note(
                f"each token reads {format_size(self._per_pass)} from flash, about {seconds:.0f} s "
                f"at {_rate(rate)}: {advice}"
            )


def _show(generation: Generation, progress: Bar, *, to_stdout: bool) -> bool:
    """Stream the text to stdout; whether Ctrl-C ended it.

    Ctrl-C ends the answer between two layers, where everything is whole; a second one ends the program at once.
    """
    pieces = iter(generation)
    try:
        with on_interrupt(generation.cancel):
            first = next(pieces, "")
            progress.finish()
            if not (to_stdout and same_place()):  # there, the text is sign of life enough
                progress.start(None, "writing")
            for piece in chain([first], pieces):
                if to_stdout:
                    write(piece)
                progress.tell(_speed(generation.stats))
    except BaseException:
        if to_stdout and generation.text:  # what comes next, an error or a shell's prompt, begins a line
            write("\n")
        raise
    progress.finish()
    if to_stdout:
        write("\n")
    return generation.cancelled


@contextmanager
def on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C does this once, and what it did before the next time. Where it is ignored it stays so."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:  # in the background of a script, say, where it is meant for others
        yield
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        act()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _document(generation: Generation) -> dict[str, object]:
    return {
        "text": generation.text,
        "tokens": generation.tokens,
        "finish_reason": generation.finish_reason,  # null after Ctrl-C
        "stats": generation.stats.to_dict(),
    }


def _figures(stats: RunStats, bytes_per_pass: int) -> str:
    """One line: how fast, from where, in how much memory."""
    return "; ".join(
        (
            _speed(stats),
            *_guessing(stats),
            *([f"masked trees: not plain decoding's bits, {stats.near_ties} near ties"] if not stats.exact else []),
            f"prompt of {stats.prompt_tokens} in {stats.prefill_s:.1f} s",
            _reads(stats, bytes_per_pass),
            f"{100 * stats.pinned_share:.0f} % of the layers in DRAM",
            f"peak {format_size(stats.peak_rss_bytes)} of {format_size(stats.dram_budget_bytes)}",
            f"context {stats.n_ctx}",
            f"seed {stats.seed}",
        )
    )


def _guessing(stats: RunStats) -> list[str]:
    """What guessing ahead has brought, or that it was left."""
    if stats.draft is None or not stats.cycles:
        return []
    plain = stats.plain_cycles / stats.cycles
    if plain > MOSTLY:
        why = "the text repeats nothing" if stats.draft == LOOKUP else "plain decoding is faster here"
        return [f"no guess in {100 * plain:.0f} % of the passes: {why}"]
    return [f"{stats.tokens_per_cycle:.1f} a pass with {stats.draft}"]


def _speed(stats: RunStats) -> str:
    return _tokens(stats.new_tokens) + (f", {stats.tokens_per_s:.2f} a second" if stats.cycles else "")


def _reads(stats: RunStats, bytes_per_pass: int) -> str:
    if not bytes_per_pass:
        return "nothing streamed"
    rate = f" at {_rate(stats.read_bytes_per_s)}" if stats.cycles else ""
    how = f" (through the page cache: {stats.buffered_reason})" if stats.buffered_reason else ""
    return f"{format_size(bytes_per_pass)} a pass from flash{rate}{how}"


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count != 1)}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"
