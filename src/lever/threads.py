"""How many threads a pass gets: as few as keep up with the storage. Decided from what passes took, nothing else."""

from __future__ import annotations

STARVED = 0.05  # of a pass spent waiting for reads: under it, compute is the limit and more threads may help
IDLE = 0.5  # of a pass spent waiting for reads: over it, fewer threads would do
GAIN = 0.95  # more threads are kept when a pass takes at most this share of the time
SLACK = 1.02  # fewer threads are kept when a pass takes at most this share
RETRY_PASSES = 16  # between two trials


class ThreadChooser:
    """Threads for passes of a few rows, whose weights are streamed.

    Compute threads that wait for each other spin, and take the processor from the thread that reads; so a pass that is
    bound by reads is *slower* with more of them. One pass is tried with twice or half as many when the last one says
    that this may help. The bits of a row do not depend on it.
    """

    def __init__(self, start: int, most: int) -> None:
        assert 1 <= start <= most
        self.count = start  # for the next pass
        self._most = most
        self._kept, self._kept_s = start, 0.0
        self._wait = 1  # passes until a trial may come; the first pass of all is never typical

    def observe(self, seconds: float, stall_s: float) -> None:
        """A pass with `count` threads took so long, of which it waited so long for reads."""
        if self.count != self._kept:
            limit = GAIN if self.count > self._kept else SLACK
            if seconds <= limit * self._kept_s:
                self._kept = self.count
            else:
                self._wait = RETRY_PASSES
        if self.count == self._kept:
            self._kept_s = seconds
        self.count = self._kept
        self._wait -= 1
        if self._wait < 0:
            self.count = self._worth_trying(stall_s / seconds)

    def _worth_trying(self, stall_share: float) -> int:
        if stall_share < STARVED:
            return min(2 * self._kept, self._most)
        return max(self._kept // 2, 1) if stall_share > IDLE else self._kept
