"""What a cycle costs, learned while it runs: passes by rows, draft steps by nodes, projections. Runs nothing itself.

Streaming hides compute and compute hides streaming, so rows are nearly free up to the knee where both take as long. A
profile may foretell all of it: then the first cycle is as well informed as the others, and what is seen corrects it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lever.cost import at_once
from lever.times import Average, Line, Scaled, Times, through

WIDER = 0.5  # share of a draft step that each node more is thought to add: with kernels for several rows, it is so
NEAR = 1.03  # times that differ by less are equal
FIRST_NODES = 2  # of a draft step, when its threads are chosen
BEARABLE = 1.5  # times as long as with the best number of threads: one that was foretold to take longer is not tried
FIRST_TRIAL, FIRST_PAUSE, LAST_PAUSE = 2, 16, 256  # passes before another number of threads is tried, and tried again
FORGOTTEN = 16  # passes after which a number of threads, or a draft, that was not used is unknown again


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """What a profile says of a cycle's parts before there was one, in seconds. Tables are by threads, then by rows."""

    compute: Mapping[int, Mapping[int, float]]  # of a pass over the target's layers
    read_s: float  # of such a pass
    rest_s: float  # that such a pass takes beyond the slower of both
    project: Mapping[int, float]  # of one row's logits, by threads
    draft: Mapping[int, Mapping[int, float]]  # of a draft step, by threads and nodes; empty where it was not measured


class Foresight:
    """What costs begin with, and go back to where what was seen is forgotten. With nothing foretold: nothing."""

    def __init__(self, foretold: Foretold | None) -> None:
        self._compute: Mapping[int, Mapping[int, float]] = {} if foretold is None else foretold.compute
        self._draft: Mapping[int, Mapping[int, float]] = {} if foretold is None else foretold.draft
        self.read_s = None if foretold is None else foretold.read_s
        self.rest_s = None if foretold is None else foretold.rest_s
        self._project: Mapping[int, float] = {} if foretold is None else foretold.project

    def compute(self, threads: int) -> Times:
        """Of passes with so many threads."""
        return Scaled(self._compute[threads]) if threads in self._compute else Line()

    def draft(self, threads: int) -> Times:
        """Of draft steps with so many threads."""
        return Scaled(self._draft[threads]) if threads in self._draft else Line(WIDER)

    def draft_threads(self, most: int) -> tuple[int, int]:
        """For draft steps: the fewest that are as good as the best, and the most that are worth a trial.

        One and `most` while nothing is known. Threads without a core of their own may take a hundred times as long, so
        that a single trial costs more than all steps of an answer.
        """
        return _best({n: through(line, FIRST_NODES) for n, line in self._draft.items()}, most)

    def project_threads(self, most: int) -> tuple[int, int]:
        """For projections, likewise."""
        return _best(self._project, most)

    def project_s(self, threads: int) -> float | None:
        """Of one row's logits."""
        return self._project.get(threads)

    def share(self, rows: int, threads: int, known: int) -> float:
        """How much longer a pass takes on so many threads than on a known number: evenly shared, if nothing is said."""
        if threads not in self._compute or known not in self._compute:
            return known / threads
        return through(self._compute[threads], rows) / through(self._compute[known], rows)


def _best(times: Mapping[int, float], most: int) -> tuple[int, int]:
    """Of numbers of threads up to `most`, by what was foretold: the fewest that are as good as the best, and the most
    that are worth a trial.
    """
    times = {threads: times[threads] for threads in sorted(times) if threads <= most}
    if not times:
        return 1, most
    best = min(times.values())
    good = [threads for threads, seconds in times.items() if seconds <= NEAR * best]
    bearable = [threads for threads, seconds in times.items() if seconds <= BEARABLE * best]
    return good[0], bearable[-1]


class CycleCost:
    """Predicts the seconds of a cycle's parts from those before it, and how many threads a pass should have.

    What is `foretold` is corrected by what is seen. Without it the first pass of all is plain, to learn what one takes.
    """

    def __init__(self, n_threads: int = 1, foretold: Foretold | None = None) -> None:
        self._foresight = Foresight(foretold)
        self._compute: dict[int, Times] = {}  # by threads
        self._last: dict[int, int] = {}  # pass that had so many threads
        self._n_passes, self._knows_plain = 0, foretold is not None
        self._most_threads = n_threads
        self._draft, self._last_draft = self._new_draft_table(), 0  # and the pass before it
        self._read, self._rest = Average(self._foresight.read_s), Average(self._foresight.rest_s)
        self._passes: dict[int, tuple[int, float]] = {}  # by rows, as far as asked since the last one: threads, seconds
        self._wait, self._pause, self._trying = FIRST_TRIAL, FIRST_PAUSE, False
        self._project, self._reading = Line(WIDER), Average()
        project_s = self._foresight.project_s(self.project_threads[0])
        if project_s is not None:
            self._project.observe(1, project_s)

    @property
    def draft_threads(self) -> tuple[int, int]:
        """For the first draft steps, and the most for any."""
        return self._foresight.draft_threads(self._most_threads)

    @property
    def project_threads(self) -> tuple[int, int]:
        """For the first projections, and the most for any."""
        return self._foresight.project_threads(self._most_threads)

    @property
    def knows_passes(self) -> bool:
        """Whether there was one yet, or one was foretold."""
        return self._read.value is not None

    @property
    def waits_for_reads(self) -> bool:
        """Whether a plain pass does, so that a few rows more take no longer."""
        return self.waits_for_reads_of(1)

    def waits_for_reads_of(self, rows: int) -> bool:
        """Likewise a pass with so many rows."""
        return (self._read.value or 0.0) >= self._compute_s(rows, self.threads(rows))

    @property
    def must_be_plain(self) -> bool:
        """Whether nobody knows what a plain pass takes where it may be faster than guessing: where it does not wait for
        reads, which take as long whatever is guessed.
        """
        return not self._knows_plain and not self.waits_for_reads

    @property
    def trying(self) -> bool:
        """Whether the pass that comes has its number of threads for a trial, whose time tells of that alone."""
        return self._trying

    def observe_pass(
        self,
        rows: int,
        seconds: float,
        compute_s: float,
        read_s: float,
        threads: int = 1,
        whole: Mapping[int, float] | None = None,
    ) -> None:
        """A pass over the target's layers: its time, that inside ggml, and that with reads in flight.

        Of one that was thinned on its way, `whole` has the time inside ggml that all layers would have taken, by rows.
        """
        self._n_passes += 1
        self._knows_plain |= rows == 1
        self._passes.clear()
        self._last[threads] = self._n_passes
        times = self._compute.setdefault(threads, self._foresight.compute(threads))
        for n, of_all_layers_s in (whole or {rows: compute_s}).items():
            times.observe(n, of_all_layers_s)
        for other in [count for count, last in self._last.items() if self._n_passes - last > FORGOTTEN]:
            del self._compute[other], self._last[other]  # it may have been somebody else's fault: try again
        if self._n_passes - self._last_draft > FORGOTTEN:
            self._draft = self._new_draft_table()  # nor is a draft that was too slow once given up for good
        self._read.observe(read_s)
        self._rest.observe(max(seconds - at_once(read_s, compute_s), 0.0))
        self._wait -= 1
        if self._trying:
            kept = self.threads(rows) == threads
            self._wait = FIRST_PAUSE if kept else self._pause
            self._pause = FIRST_PAUSE if kept else min(2 * self._pause, LAST_PAUSE)
            self._trying = False

    def observe_prefill(self, rows: int, compute_s: float, read_s: float, threads: int) -> None:
        """A pass for a part of the prompt, before any for a token: a first idea of both where nothing was foretold."""
        if not self._n_passes and self._foresight.read_s is None:
            self._compute.setdefault(threads, Line()).observe(rows, compute_s)
            self._last[threads] = 0
            self._read.observe(read_s)
            self._passes.clear()

    def observe_draft(self, nodes: int, seconds: float) -> None:
        """A draft step."""
        self._last_draft = self._n_passes
        self._draft.observe(nodes, seconds)

    def observe_reading(self, tokens: int, seconds: float) -> None:
        """The draft has read so many tokens that it did not say itself."""
        self._reading.observe(seconds / tokens)

    def observe_project(self, rows: int, seconds: float) -> None:
        """So many rows through the output projection."""
        self._project.observe(rows, seconds)

    def threads(self, rows: int) -> int:
        """For a pass with so many rows: the fewest that are as good as the best, since others want the cores too."""
        return self._pass(rows)[0]

    def next_threads(self, rows: int) -> int:
        """For the next pass: as `threads`, and now and then another number, where compute is the limit.

        What was foretold, or seen once, may have been a bad moment's: only trying tells. Trials that fail come seldom.
        """
        best = self.threads(rows)
        if self._wait > 0 or self._most_threads == 1 or self._compute_s(rows, best) < (self._read.value or 0.0):
            return best
        self._trying = True
        return min(2 * best, self._most_threads) if best < self._most_threads else max(best // 2, 1)

    def pass_s(self, rows: int) -> float:
        """Of a pass with so many rows: reading and computing at once, and what neither hides."""
        return self._pass(rows)[1]

    def thinned_s(self, rows: int, kept: int, share: float) -> float:
        """Of a pass with so many rows, of which so many are kept behind this share of the layers."""
        threads = self.threads(rows)
        compute_s = share * self._compute_s(rows, threads) + (1 - share) * self._compute_s(kept, threads)
        return at_once(self._read.value or 0.0, compute_s) + (self._rest.value or 0.0)

    def draft_s(self, nodes: int) -> float:
        """Of a draft step that expands so many nodes."""
        return self._draft.seconds(nodes)

    def reading_s(self, tokens: int = 1) -> float:
        """Of so many tokens that the draft has to read, many at once."""
        return tokens * (self._reading.value or 0.0)

    def project_s(self, rows: int = 1) -> float:
        """Of the logits of so many rows at once."""
        return self._project.seconds(rows)

    def _pass(self, rows: int) -> tuple[int, float]:
        found = self._passes.get(rows)
        if found is None:
            counts = sorted({*(1 << power for power in range(self._most_threads.bit_length())), self._most_threads})
            times = [self._with(rows, count) for count in counts]
            best = min(times)
            threads, seconds = next((c, s) for c, s in zip(counts, times, strict=True) if s <= NEAR * best)
            found = self._passes[rows] = threads, seconds + (self._rest.value or 0.0)
        return found

    def _new_draft_table(self) -> Times:
        return self._foresight.draft(self.draft_threads[0])

    def _with(self, rows: int, threads: int) -> float:
        return at_once(self._read.value or 0.0, self._compute_s(rows, threads))

    def _compute_s(self, rows: int, threads: int) -> float:
        """A number of threads that was never tried takes what the nearest one does, times what was foretold of both."""
        if not self._compute:
            return self._foresight.compute(threads).seconds(rows)
        known = min(self._compute, key=lambda count: abs(count - threads))
        return self._compute[known].seconds(rows) * self._foresight.share(rows, threads, known)
