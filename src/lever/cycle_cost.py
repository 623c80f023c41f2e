"""What a cycle costs, learned while it runs: passes by rows, draft steps by nodes, projections. Runs nothing itself.

A profile may foretell all of it: then the first cycle is as well informed as the others, and what is seen corrects it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lever.pass_cost import NEAR, ForetoldPass, PassCost
from lever.times import Average, Line, Scaled, Times, through

WIDER = 0.5  # share of a draft step that each node more is thought to add: with kernels for several rows, it is so
FIRST_NODES = 2  # of a draft step, when its threads are chosen
BEARABLE = 1.5  # times as long as with the best number of threads: one that was foretold to take longer is not tried
FORGOTTEN_PASSES = 16  # after which a draft that was not used is unknown again


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
        self._draft: Mapping[int, Mapping[int, float]] = {} if foretold is None else foretold.draft
        self._project: Mapping[int, float] = {} if foretold is None else foretold.project
        self.a_pass = (
            ForetoldPass({}) if foretold is None else ForetoldPass(foretold.compute, foretold.read_s, foretold.rest_s)
        )

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
    `beside`: the draft goes on while the target computes; such passes are known apart. They have `threads_beside` at
    most: fewer where the draft takes a core of theirs, none at all where one has to wait for the other.
    """

    def __init__(
        self, n_threads: int = 1, foretold: Foretold | None = None, *, threads_beside: int | None = None
    ) -> None:
        self.beside = False
        self._threads_beside = n_threads - 1 if threads_beside is None else threads_beside
        self._foresight = Foresight(foretold)
        self._alone, self._shared = PassCost(n_threads, self._foresight.a_pass), self._new_shared()
        self._knows_plain = foretold is not None
        self._most_threads = n_threads
        self._n_passes = 0
        self._draft, self._last_draft = self._new_draft_table(), 0  # and the pass before it
        self._hidden = self._new_hidden()
        self._project, self._reading = Line(WIDER), Average()
        project_s = self._foresight.project_s(self.project_threads[0])
        if project_s is not None:
            self._project.observe(1, project_s)

    @property
    def has_room(self) -> bool:
        """Whether the draft can compute beside a pass."""
        return self._threads_beside > 0

    @property
    def hidden_threads(self) -> int:
        """For draft steps beside a pass."""
        return 1 if self._threads_beside < self._most_threads else self.draft_threads[0]

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
        return self._passes.known

    @property
    def waits_for_reads(self) -> bool:
        """Whether a plain pass does, so that a few rows more take no longer."""
        return self.waits_for_reads_of(1)

    def waits_for_reads_of(self, rows: int) -> bool:
        """Likewise a pass with so many rows."""
        return self._passes.waits_for_reads(rows)

    @property
    def must_be_plain(self) -> bool:
        """Whether nobody knows what a plain pass takes where it may be faster than guessing: where it does not wait for
        reads, which take as long whatever is guessed.
        """
        return not self._knows_plain and not self.waits_for_reads

    @property
    def trying(self) -> bool:
        """Whether the pass that comes has its number of threads for a trial, whose time tells of that alone."""
        return self._passes.trying

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
        self._passes.observe(rows, seconds, compute_s, read_s, threads, whole)
        for passes in (self._alone, self._shared):
            passes.suppose(rows, compute_s, read_s, threads)
        if self._n_passes - self._last_draft > FORGOTTEN_PASSES:
            self._draft = self._new_draft_table()  # a draft that was too slow once is not given up for good

    def observe_prefill(self, rows: int, compute_s: float, read_s: float, threads: int) -> None:
        """A pass for a part of the prompt: a first idea where nothing was foretold."""
        for passes in (self._alone, self._shared):
            passes.suppose(rows, compute_s, read_s, threads)

    def observe_draft(self, nodes: int, seconds: float) -> None:
        """A draft step."""
        self._last_draft = self._n_passes
        self._draft.observe(nodes, seconds)

    def observe_hidden(self, nodes: int, seconds: float) -> None:
        """A draft step beside a pass."""
        self._hidden.observe(nodes, seconds)

    def forget_beside(self) -> None:
        """What passes with a draft beside them showed, and its steps there, is unknown again: it may have been a bad
        moment's, and what is not done shows nothing new.
        """
        self._shared, self._hidden = self._new_shared(), self._new_hidden()

    def observe_reading(self, tokens: int, seconds: float) -> None:
        """The draft has read so many tokens that it did not say itself."""
        self._reading.observe(seconds / tokens)

    def observe_project(self, rows: int, seconds: float) -> None:
        """So many rows through the output projection."""
        self._project.observe(rows, seconds)

    def threads(self, rows: int) -> int:
        """For a pass with so many rows: the fewest that are as good as the best, since others want the cores too."""
        return self._passes.threads(rows)

    def next_threads(self, rows: int) -> int:
        """For the next pass: as `threads`, and now and then another number, where compute is the limit."""
        return self._passes.next_threads(rows)

    def pass_s(self, rows: int) -> float:
        """Of a pass with so many rows: reading and computing at once, and what neither hides."""
        return self._passes.seconds(rows)

    def alone_s(self, rows: int) -> float:
        """Likewise, had nothing gone on beside it."""
        return self._alone.seconds(rows)

    def thinned_s(self, rows: int, kept: int, share: float) -> float:
        """Of a pass with so many rows, of which so many are kept behind this share of the layers."""
        return self._passes.thinned_s(rows, kept, share)

    def draft_s(self, nodes: int) -> float:
        """Of a draft step that expands so many nodes."""
        return self._draft.seconds(nodes)

    def hidden_s(self, nodes: int) -> float:
        """Of a draft step beside a pass."""
        return self._hidden.seconds(nodes)

    def reading_s(self, tokens: int = 1) -> float:
        """Of so many tokens that the draft has to read, many at once."""
        return tokens * (self._reading.value or 0.0)

    def project_s(self, rows: int = 1) -> float:
        """Of the logits of so many rows at once."""
        return self._project.seconds(rows)

    @property
    def _passes(self) -> PassCost:
        return self._shared if self.beside else self._alone

    def _new_shared(self) -> PassCost:
        return PassCost(max(self._threads_beside, 1), self._foresight.a_pass)

    def _new_hidden(self) -> Times:
        return self._foresight.draft(self.hidden_threads)

    def _new_draft_table(self) -> Times:
        return self._foresight.draft(self.draft_threads[0])
