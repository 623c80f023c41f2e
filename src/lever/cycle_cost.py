"""What a cycle costs, learned while it runs: passes by rows, draft steps by nodes, projections. Runs nothing itself.

Streaming hides compute and compute hides streaming, so rows are free up to the knee where both take as long. A profile
may foretell all of it: then the first cycle is as well informed as the others, and what is seen corrects the profile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

WEIGHT = 0.3  # of a new observation against what was known
WIDER = 0.5  # share of a draft step that each node more is thought to add: with kernels for several rows, it is so
NEAR = 1.03  # times that differ by less are equal
FIRST_NODES = 2  # of a draft step, when its threads are chosen
BEARABLE = 1.5  # times as long as with the best number of threads: one that was foretold to take longer is not tried
FORGOTTEN = 16  # passes after which a number of threads, or a draft, that was not used is unknown again


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """What a profile says of a cycle's parts before there was one, in seconds. Tables are by threads, then by rows."""

    compute: Mapping[int, Mapping[int, float]]  # of a pass over the target's layers
    read_s: float  # of such a pass
    rest_s: float  # that such a pass takes beyond the slower of both
    project: Mapping[int, float]  # of one row's logits, by threads
    draft: Mapping[int, Mapping[int, float]]  # of a draft step, by threads and nodes; empty where it was not measured


class Average:
    """A moving average. Before the first observation, which takes its place, it is what was foretold, or None."""

    def __init__(self, foretold: float | None = None) -> None:
        self.value = foretold
        self._seen = False

    def observe(self, seconds: float) -> None:
        """One more."""
        known = self.value if self._seen else None
        self.value, self._seen = seconds if known is None else known + WEIGHT * (seconds - known), True


class RowTable:
    """Seconds by number of rows: a moving average for each number seen, lines between them.

    Outside of what was seen, time is taken to go in proportion. Beyond the most rows that is more than it does: so a
    larger tree is tried only where even that would pay, and what it took is known then. `beyond` is the share of what
    proportion says that more rows add: under 1, what is cheap to try is tried sooner.
    """

    def __init__(self, beyond: float = 1.0) -> None:
        self._seen: dict[int, Average] = {}
        self._beyond = beyond

    def observe(self, rows: int, seconds: float) -> None:
        """So many rows took so long."""
        self._seen.setdefault(rows, Average()).observe(seconds)

    def seconds(self, rows: int) -> float:
        """What so many rows will take; 0 while nothing is known."""
        if not self._seen:
            return 0.0
        known = sorted(self._seen)
        place = bisect_left(known, rows)
        if place < len(known) and known[place] == rows:
            return self._at(rows)
        if place == 0:
            return self._at(known[0]) * rows / known[0]
        if place == len(known):
            return self._at(known[-1]) * (1 + self._beyond * (rows / known[-1] - 1))
        below = known[place - 1]
        above = known[place]
        share = (rows - below) / (above - below)
        return self._at(below) + share * (self._at(above) - self._at(below))

    def _at(self, rows: int) -> float:
        value = self._seen[rows].value
        assert value is not None
        return value


class ForetoldTable(RowTable):
    """Seconds by number of rows where something was foretold: the shape is that of the profile, the level what is seen.

    A number of rows that was seen takes what was seen. Any other takes what was foretold, times how much longer the
    numbers next to it took than they were foretold to; before there are any, what was foretold.
    """

    def __init__(self, foretold: Mapping[int, float]) -> None:
        super().__init__()
        self._foretold, self._ratios = line_through(foretold), RowTable()

    def observe(self, rows: int, seconds: float) -> None:
        """So many rows took so long."""
        super().observe(rows, seconds)
        self._ratios.observe(rows, seconds / self._foretold.seconds(rows))

    def seconds(self, rows: int) -> float:
        """What so many rows will take."""
        return self._foretold.seconds(rows) * self.level(rows)

    def level(self, rows: int) -> float:
        """How much longer so many rows take than was foretold."""
        if not self._seen:
            return 1.0
        return self._ratios.seconds(min(max(rows, min(self._seen)), max(self._seen)))


def line_through(points: Mapping[int, float]) -> RowTable:
    """A table that has seen each of these once."""
    table = RowTable()
    for rows, seconds in points.items():
        table.observe(rows, seconds)
    return table


class Foresight:
    """What costs begin with, and go back to where what was seen is forgotten. With nothing foretold: nothing."""

    def __init__(self, foretold: Foretold | None) -> None:
        self._compute: Mapping[int, Mapping[int, float]] = {} if foretold is None else foretold.compute
        self._draft: Mapping[int, Mapping[int, float]] = {} if foretold is None else foretold.draft
        self._lines = {threads: line_through(points) for threads, points in self._compute.items()}
        self.read_s = None if foretold is None else foretold.read_s
        self.rest_s = None if foretold is None else foretold.rest_s
        self._project: Mapping[int, float] = {} if foretold is None else foretold.project

    def compute(self, threads: int) -> RowTable:
        """Of passes with so many threads."""
        return ForetoldTable(self._compute[threads]) if threads in self._compute else RowTable()

    def draft(self, threads: int) -> RowTable:
        """Of draft steps with so many threads."""
        return ForetoldTable(self._draft[threads]) if threads in self._draft else RowTable(WIDER)

    def draft_threads(self, most: int) -> tuple[int, int]:
        """For draft steps: the fewest that are as good as the best, and the most that are worth a trial.

        One and `most` while nothing is known. Threads without a core of their own may take a hundred times as long, so
        that a single trial costs more than all steps of an answer.
        """
        lines = {threads: line_through(points) for threads, points in sorted(self._draft.items()) if threads <= most}
        if not lines:
            return 1, most
        times = {threads: line.seconds(FIRST_NODES) for threads, line in lines.items()}
        best = min(times.values())
        good = [threads for threads, seconds in times.items() if seconds <= NEAR * best]
        bearable = [threads for threads, seconds in times.items() if seconds <= BEARABLE * best]
        return good[0], bearable[-1]

    def project_s(self, threads: int) -> float | None:
        """Of one row's logits."""
        return self._project.get(threads)

    def share(self, rows: int, threads: int, known: int) -> float:
        """How much longer a pass takes on so many threads than on a known number: evenly shared, if nothing is said."""
        if threads not in self._lines or known not in self._lines:
            return known / threads
        return self._lines[threads].seconds(rows) / self._lines[known].seconds(rows)


class CycleCost:
    """Predicts the seconds of a cycle's parts from those before it, and how many threads a pass should have.

    What is `foretold` is corrected by what is seen. Without it the first pass of all is plain, to learn what one takes.
    """

    def __init__(self, n_threads: int = 1, foretold: Foretold | None = None) -> None:
        self._foresight = Foresight(foretold)
        self._compute: dict[int, RowTable] = {}  # by threads
        self._last: dict[int, int] = {}  # pass that had so many threads
        self._n_passes = 0
        self._most_threads = n_threads
        self._draft, self._last_draft = self._new_draft_table(), 0  # and the pass before it
        self._read, self._rest = Average(self._foresight.read_s), Average(self._foresight.rest_s)
        self._passes: dict[int, tuple[int, float]] = {}  # by rows, as far as asked since the last one: threads, seconds
        self._project = RowTable(WIDER)
        project_s = self._foresight.project_s(self.threads(1))
        if project_s is not None:
            self._project.observe(1, project_s)

    @property
    def draft_threads(self) -> tuple[int, int]:
        """For the first draft steps, and the most for any."""
        return self._foresight.draft_threads(self._most_threads)

    @property
    def knows_passes(self) -> bool:
        """Whether there was one yet, or one was foretold."""
        return self._read.value is not None

    def observe_pass(self, rows: int, seconds: float, compute_s: float, read_s: float, threads: int = 1) -> None:
        """A pass over the target's layers: its time, that inside ggml, and that with reads in flight."""
        self._n_passes += 1
        self._passes.clear()
        self._last[threads] = self._n_passes
        self._compute.setdefault(threads, self._foresight.compute(threads)).observe(rows, compute_s)
        for other in [count for count, last in self._last.items() if self._n_passes - last > FORGOTTEN]:
            del self._compute[other], self._last[other]  # it may have been somebody else's fault: try again
        if self._n_passes - self._last_draft > FORGOTTEN:
            self._draft = self._new_draft_table()  # nor is a draft that was too slow once given up for good
        self._read.observe(read_s)
        self._rest.observe(max(seconds - max(compute_s, read_s), 0.0))

    def observe_prefill(self, rows: int, compute_s: float, read_s: float, threads: int) -> None:
        """A pass for a part of the prompt, before any for a token: a first idea of both."""
        if not self._n_passes:
            self._compute.setdefault(threads, RowTable()).observe(rows, compute_s)
            self._last[threads] = 0
            self._read.observe(read_s)
            self._passes.clear()

    def observe_draft(self, nodes: int, seconds: float) -> None:
        """A draft step."""
        self._last_draft = self._n_passes
        self._draft.observe(nodes, seconds)

    def observe_project(self, rows: int, seconds: float) -> None:
        """So many rows through the output projection."""
        self._project.observe(rows, seconds)

    def threads(self, rows: int) -> int:
        """For a pass with so many rows: the fewest that are as good as the best, since others want the cores too."""
        return self._pass(rows)[0]

    def pass_s(self, rows: int) -> float:
        """Of a pass with so many rows: the slower of reading and computing, and what neither hides."""
        return self._pass(rows)[1]

    def draft_s(self, nodes: int) -> float:
        """Of a draft step that expands so many nodes."""
        return self._draft.seconds(nodes)

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

    def _new_draft_table(self) -> RowTable:
        return self._foresight.draft(self.draft_threads[0])

    def _with(self, rows: int, threads: int) -> float:
        return max(self._read.value or 0.0, self._compute_s(rows, threads))

    def _compute_s(self, rows: int, threads: int) -> float:
        """A number of threads that was never tried takes what the nearest one does, times what was foretold of both."""
        if not self._compute:
            return self._foresight.compute(threads).seconds(rows)
        known = min(self._compute, key=lambda count: abs(count - threads))
        return self._compute[known].seconds(rows) * self._foresight.share(rows, threads, known)
