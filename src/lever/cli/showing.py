"""An answer as it comes, and its figures, for every verb that shows one. Asks a model for nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import FrameType

from lever.cli.console import Bar, note, same_place, write, write_text
from lever.llm import LLM, Generation
from lever.memory import format_size
from lever.settings import CPU, LOOKUP
from lever.stats import RunStats

SLOW_TOKEN_S = 2.0  # a token that takes longer is worth a word before it is waited for
MOSTLY = 0.5  # of the passes without a guess: worth a word
MUCH = 1 << 24  # bytes sent to a device: more than rows and masks
SLOW_STORAGE = 300e6  # bytes per second: below are SD cards, hard disks and networks


class Waiting:
    """What is said until there is text: how far a prompt is read, and how long a token will take."""

    def __init__(self, llm: LLM, progress: Bar, *, quiet: bool) -> None:
        self._progress, self._n_tokens, self._n_read, self._what = progress, 0, 0, ""
        self._reads, self._per_pass = llm.loaded.store.stats, llm.loaded.store.bytes_per_pass
        self._warned = quiet

    def start(self, n_tokens: int) -> Callable[[int], None]:
        """So many tokens of a prompt are to be read; what is to be told of them."""
        self._n_tokens, self._n_read = n_tokens, 0
        self._what = f"reading the prompt, {_tokens(n_tokens)}"
        self._progress.start(None, self._what)
        return self._read

    def _read(self, n_tokens: int) -> None:
        """So many tokens more are through the layers."""
        self._n_read += n_tokens
        rate = self._reads.read_bytes / self._reads.read_s if self._reads.read_s else 0.0
        from_flash = f", {_rate(rate)}" if self._per_pass and rate else ""
        self._progress.tell(f"{self._what}: {min(100 * self._n_read // self._n_tokens, 100)} %{from_flash}")
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


def show(generation: Generation, progress: Bar, *, to_stdout: bool = True) -> None:
    """Stream the text to stdout, and a line break behind it."""
    pieces = iter(generation)
    try:
        first = next(pieces, "")
        progress.finish()
        if not (to_stdout and same_place()):  # there, the text is sign of life enough
            progress.start(None, "writing")
        for piece in chain([first], pieces):
            if to_stdout:
                write_text(piece)
            progress.tell(_speed(generation.stats))
    except BaseException:
        progress.finish()
        if to_stdout and generation.text:  # what comes next, an error or a shell's prompt, begins a line
            write("\n")
        raise
    progress.finish()
    if to_stdout:
        write("\n")


@contextmanager
def on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C does this once, and what it did before the next time. Where it is ignored it stays so.

    So a first one ends an answer between two layers, where everything is whole, and a second one all at once.
    """
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


def figures(stats: RunStats, bytes_per_pass: int) -> str:
    """One line: how fast, from where, in how much memory."""
    return "; ".join(
        (
            _speed(stats),
            *guessing(stats),
            *_other_bits(stats),
            f"prompt of {stats.prompt_tokens} in {stats.prefill_s:.1f} s",
            _reads(stats, bytes_per_pass),
            _kept(stats),
            f"peak {format_size(stats.peak_rss_bytes)} of {format_size(stats.dram_budget_bytes)}",
            f"context {stats.n_ctx}",
            f"seed {stats.seed}",
        )
    )


def short_figures(stats: RunStats) -> str:
    """One line for an answer in a conversation: how fast, and what of the prompt had to be read."""
    new = stats.prompt_tokens - stats.cached_tokens
    prompt = f"{new} of {stats.prompt_tokens} prompt tokens read in {stats.prefill_s:.1f} s"
    context = f"context {stats.prompt_tokens + stats.new_tokens} of {stats.n_ctx}"
    return "; ".join((_speed(stats), *guessing(stats), prompt, context))


def guessing(stats: RunStats) -> list[str]:
    """What guessing ahead has brought, or that it was left."""
    if stats.draft is None or not stats.cycles:
        return []
    plain = stats.plain_cycles / stats.cycles
    if plain > MOSTLY:
        why = "the text repeats nothing" if stats.draft == LOOKUP else "plain decoding is faster here"
        return [f"no guess in {100 * plain:.0f} % of the passes: {why}"]
    return [f"{stats.tokens_per_cycle:.1f} a pass with {stats.draft}{_pruned(stats)}"]


def _pruned(stats: RunStats) -> str:
    """How many guesses did not see all layers or, where a predictor is there, why all did."""
    if stats.pruned:
        return f", {100 * stats.pruned / stats.verified:.0f} % of its guesses pruned"
    return ", none of its guesses pruned: that would save no time" if stats.prune == "auto" and stats.verified else ""


def _speed(stats: RunStats) -> str:
    return _tokens(stats.new_tokens) + (f", {stats.tokens_per_s:.2f} a second" if stats.cycles else "")


def _other_bits(stats: RunStats) -> list[str]:
    if stats.exact:
        return []
    why = "masked trees" if stats.device == CPU else f"masked trees or sums of {stats.device}"
    return [f"{why}: not plain decoding's bits, {stats.near_ties} near ties"]


def _kept(stats: RunStats) -> str:
    kept = f"{100 * stats.pinned_share:.0f} % of the layers"
    if stats.device == CPU:
        return f"{kept} in DRAM"
    sent = f", {_rate(stats.upload_bytes / stats.upload_s)} to it" if stats.upload_bytes > MUCH else ""
    return f"{kept} kept on {stats.device}{sent}"


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
