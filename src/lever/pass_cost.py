"""What a pass over the target's layers takes, by rows and threads, learned while it runs. Runs nothing itself.

Streaming hides compute and compute hides streaming, so rows are nearly free up to the knee where both take as long. A
profile may foretell all of it: then the first pass is as well informed as the others, and what is seen corrects it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lever.cost import at_once
from lever.times import Average, Line, Scaled, Times, through

NEAR = 1.03  # times that differ by less are equal
FIRST_TRIAL, FIRST_PAUSE, LAST_PAUSE = 2, 16, 256  # passes before another number of threads is tried, and tried again
FORGOTTEN_PASSES = 16  # after which a number of threads that was not used is unknown again


@dataclass(frozen=True, slots=True)
class ForetoldPass:
    """What a profile says of passes, in seconds. compute: inside ggml, by threads, then by rows; `rest_s`: what a pass
    takes beyond the slower of reading and computing. With nothing foretold: nothing.
    """

    compute: Mapping[int, Mapping[int, float]]
    read_s: float | None = None
    rest_s: float | None = None

    def times(self, threads: int) -> Times:
        """Of computing with so many threads."""
        return Scaled(self.compute[threads]) if threads in self.compute else Line()

    def share(self, rows: int, threads: int, known: int) -> float:
        """How much longer a pass takes on so many threads than on a known number: evenly shared, if nothing is said."""
        if threads not in self.compute or known not in self.compute:
            return known / threads
        return through(self.compute[threads], rows) / through(self.compute[known], rows)


class PassCost:
    """Predicts the seconds of a pass from those before it, and how many threads it should have.

    What is `foretold` is corrected by what is seen, and comes back where that is forgotten.
    """

    def __init__(self, n_threads: int, foretold: ForetoldPass) -> None:
        self._foretold, self._most_threads = foretold, n_threads
        self._compute: dict[int, Times] = {}  # by threads
        self._last: dict[int, int] = {}  # pass that had so many threads
        self.n_passes = 0
        self._read, self._rest = Average(foretold.read_s), Average(foretold.rest_s)
        self._known: dict[int, tuple[int, float]] = {}  # by rows, as far as asked since the last one: threads, seconds
        self._wait, self._pause, self._trying = FIRST_TRIAL, FIRST_PAUSE, False

    @property
    def known(self) -> bool:
        """Whether there was one yet, or one was foretold."""
        return self._read.value is not None

    @property
    def trying(self) -> bool:
        """Whether the pass that comes has its number of threads for a trial, whose time tells of that alone."""
        return self._trying

    def waits_for_reads(self, rows: int) -> bool:
        """Whether a pass with so many rows does, so that a few more take no longer."""
        return self._read_s >= self._compute_s(rows, self.threads(rows))

    def observe(
        self,
        rows: int,
        seconds: float,
        compute_s: float,
        read_s: float,
        threads: int,
        whole: Mapping[int, float] | None,
    ) -> None:
        """A pass: its time, that inside ggml, and that with reads in flight.

        Of one that was thinned on its way, `whole` has the time inside ggml that all layers would have taken, by rows.
        """
        self.n_passes += 1
        self._known.clear()
        self._last[threads] = self.n_passes
        times = self._compute.setdefault(threads, self._foretold.times(threads))
        for n, of_all_layers_s in (whole or {rows: compute_s}).items():
            times.observe(n, of_all_layers_s)
        for other in [count for count, last in self._last.items() if self.n_passes - last > FORGOTTEN_PASSES]:
            del self._compute[other], self._last[other]  # it may have been somebody else's fault: try again
        self._read.observe(read_s)
        self._rest.observe(max(seconds - at_once(read_s, compute_s), 0.0))
        self._wait -= 1
        if self._trying:
            kept = self.threads(rows) == threads
            self._wait = FIRST_PAUSE if kept else self._pause
            self._pause = FIRST_PAUSE if kept else min(2 * self._pause, LAST_PAUSE)
            self._trying = False

    def suppose(self, rows: int, compute_s: float, read_s: float, threads: int) -> None:
        """A pass of another kind, before there was one of this: a first idea where nothing was foretold."""
        if not self.n_passes and self._foretold.read_s is None:
            self._compute.setdefault(threads, Line()).observe(rows, compute_s)
            self._last[threads] = 0
            self._read.observe(read_s)
            self._known.clear()

    def threads(self, rows: int) -> int:
        """For a pass with so many rows: the fewest that are as good as the best, since others want the cores too."""
        return self._found(rows)[0]

    def next_threads(self, rows: int) -> int:
        """For the next pass: as `threads`, and now and then another number, where compute is the limit.

        What was foretold, or seen once, may have been a bad moment's: only trying tells. Trials that fail come seldom.
        """
        best = self.threads(rows)
        if self._wait > 0 or self._most_threads == 1 or self._compute_s(rows, best) < self._read_s:
            return best
        self._trying = True
        return min(2 * best, self._most_threads) if best < self._most_threads else max(best // 2, 1)

    def seconds(self, rows: int) -> float:
        """Of a pass with so many rows: reading and computing at once, and what neither hides."""
        return self._found(rows)[1]

    def thinned_s(self, rows: int, kept: int, share: float) -> float:
        """Of a pass with so many rows, of which so many are kept behind this share of the layers."""
        threads = self.threads(rows)
        compute_s = share * self._compute_s(rows, threads) + (1 - share) * self._compute_s(kept, threads)
        return at_once(self._read_s, compute_s) + (self._rest.value or 0.0)

    @property
    def _read_s(self) -> float:
        return self._read.value or 0.0

    def _found(self, rows: int) -> tuple[int, float]:
        found = self._known.get(rows)
        if found is None:
            counts = sorted({*(1 << power for power in range(self._most_threads.bit_length())), self._most_threads})
            times = [at_once(self._read_s, self._compute_s(rows, count)) for count in counts]
            best = min(times)
            threads, seconds = next((c, s) for c, s in zip(counts, times, strict=True) if s <= NEAR * best)
            found = self._known[rows] = threads, seconds + (self._rest.value or 0.0)
        return found

    def _compute_s(self, rows: int, threads: int) -> float:
        """A number of threads that was never tried takes what the nearest one does, times what was foretold of both."""
        if not self._compute:
            return self._foretold.times(threads).seconds(rows)
        known = min(self._compute, key=lambda count: abs(count - threads))
        return self._compute[known].seconds(rows) * self._foretold.share(rows, threads, known)
