"""What a cycle costs and guessing brings, learned while it runs: passes by rows, draft steps by nodes. Runs nothing.

Streaming hides compute and compute hides streaming, so rows are free up to the knee where both take as long.
"""

from __future__ import annotations

from bisect import bisect_left

WEIGHT = 0.3  # of a new observation against what was known
WIDER = 0.5  # share of a draft step that each node more is thought to add: with kernels for several rows, it is so
NEAR = 1.03  # times that differ by less are equal
PRIOR, KEPT = 4.0, 0.95  # nodes that a draft is believed for, and what is kept of those seen with each more
LEAST_TRUST = 0.01  # never nothing: a product of it must stay above zero, and be divided by
ENOUGH, LATER = 3, 0.8  # cycles before guessing is given up, and what is kept of those seen with each more
FIRST_PAUSE, LAST_PAUSE = 8, 256  # cycles without guessing, doubled each time that it still does not pay
FORGOTTEN = 16  # passes after which a number of threads, or a draft, that was not used is unknown again


class Average:
    """A moving average; None before the first observation."""

    def __init__(self) -> None:
        self.value: float | None = None

    def observe(self, seconds: float) -> None:
        """One more."""
        self.value = seconds if self.value is None else self.value + WEIGHT * (seconds - self.value)


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


class Reliability:
    """The paper's r: how often the target's token was among a node's candidates, against how often the draft said so.

    1 for a draft that is right about itself, or modest; its probabilities are multiplied by less when it promises too
    much. That keeps their order behind each node.
    """

    def __init__(self) -> None:
        self._promised, self._met = PRIOR, PRIOR

    @property
    def value(self) -> float:
        """Of a probability of the draft, the share to believe."""
        if self._met >= self._promised:  # both are 0 where nothing was promised for long
            return 1.0
        return max(self._met / self._promised, LEAST_TRUST)

    def observe(self, promised: float, met: bool) -> None:
        """A node's candidates had this probability together, by the draft; the target's token was among them or not."""
        self._promised = KEPT * self._promised + promised
        self._met = KEPT * self._met + met


class Worth:
    """Whether guessing ahead has paid, by what cycles took and brought. Where it has not, it pauses and tries again."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._n = 0
        self._pause, self._wait = FIRST_PAUSE, 0
        self._enough = ENOUGH

    @property
    def guessing(self) -> bool:
        """Whether the next cycle should guess."""
        return self._wait == 0

    @property
    def tokens_per_s(self) -> float | None:
        """Of cycles that guessed, the later ones counting more; None before there were any."""
        return self._tokens / self._seconds if self._seconds else None

    def observe(self, tokens: int, seconds: float, plain_s: float) -> None:
        """A cycle that guessed brought so many tokens in so long; a plain one takes `plain_s` for its one."""
        self._tokens = LATER * self._tokens + tokens
        self._seconds = LATER * self._seconds + seconds
        self._n += 1
        if self._n < self._enough:
            return
        if self._tokens * plain_s < self._seconds:
            self._wait, self._pause = self._pause, min(2 * self._pause, LAST_PAUSE)
            self._tokens, self._seconds, self._n, self._enough = 0.0, 0.0, 0, 1
        else:
            self._pause, self._enough = FIRST_PAUSE, ENOUGH

    def wait(self) -> None:
        """A cycle did not guess."""
        self._wait = max(self._wait - 1, 0)


class CycleCost:
    """Predicts the seconds of a cycle's parts from those before it, and how many threads a pass should have."""

    def __init__(self, n_threads: int = 1) -> None:
        self._compute: dict[int, RowTable] = {}  # by threads
        self._last: dict[int, int] = {}  # pass that had so many threads
        self._n_passes = 0
        self._most_threads = n_threads
        self._draft, self._last_draft = RowTable(WIDER), 0  # and the pass before it
        self._read, self._rest, self._project = Average(), Average(), RowTable(WIDER)
        self._passes: dict[int, tuple[int, float]] = {}  # by rows, as far as asked since the last one: threads, seconds

    @property
    def knows_passes(self) -> bool:
        """Whether there was one yet."""
        return self._read.value is not None

    def observe_pass(self, rows: int, seconds: float, compute_s: float, read_s: float, threads: int = 1) -> None:
        """A pass over the target's layers: its time, that inside ggml, and that with reads in flight."""
        self._n_passes += 1
        self._passes.clear()
        self._last[threads] = self._n_passes
        self._compute.setdefault(threads, RowTable()).observe(rows, compute_s)
        for other in [count for count, last in self._last.items() if self._n_passes - last > FORGOTTEN]:
            del self._compute[other], self._last[other]  # it may have been somebody else's fault: try again
        if self._n_passes - self._last_draft > FORGOTTEN:
            self._draft = RowTable(WIDER)  # nor is a draft that was too slow once given up for good
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

    def _with(self, rows: int, threads: int) -> float:
        return max(self._read.value or 0.0, self._compute_s(rows, threads))

    def _compute_s(self, rows: int, threads: int) -> float:
        """A number of threads that was never tried is taken to share the work of the nearest one evenly."""
        if not self._compute:
            return 0.0
        known = min(self._compute, key=lambda count: abs(count - threads))
        return self._compute[known].seconds(rows) * known / threads
