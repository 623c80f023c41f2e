"""How many threads compute gets, decided from what its pieces took. Knows nothing of what is computed."""

from __future__ import annotations

STARVED = 0.05  # of the time spent waiting for reads: under it, compute is the limit
IDLE = 0.5  # of the time spent waiting for reads: over it, fewer threads would do
GAIN = 0.95  # more threads are kept when they take at most this share of the time
SLACK = 1.02  # fewer threads are kept when they take at most this share
FIRST_TRIAL, LAST_PAUSE = 2, 256  # observations before the first trial, and between two when trials keep failing


class ThreadChooser:
    """Threads for pieces of work of one kind: passes of a few rows, or layers of many.

    ggml's compute threads spin when they wait for each other. They take the processor from the thread that reads, so a
    pass that is bound by reads is *slower* with more of them; and where something else uses the cores, two threads can
    take many times as long as one. So one piece of work is now and then given twice or half as many, and the number is
    kept if that was better. The bits of a row do not depend on it.
    """

    def __init__(self, start: int, most: int) -> None:
        assert 1 <= start <= most
        self.count = start  # for the next piece of work
        self._most = most
        self._kept, self._kept_s = start, 0.0
        self._wait, self._pause = FIRST_TRIAL, 8 * FIRST_TRIAL

    @property
    def trying(self) -> bool:
        """Whether the next piece of work is a trial, whose time tells nothing of what such work usually takes."""
        return self.count != self._kept

    def observe(self, seconds: float, stall_s: float) -> None:
        """A piece of work with `count` threads took so long, of which it waited so long for reads."""
        if self.count != self._kept:
            self._judge(seconds)
        else:
            self._kept_s = seconds
        self.count = self._kept
        self._wait -= 1
        if self._wait <= 0:
            self.count = self._worth_trying(stall_s / seconds)

    def _judge(self, seconds: float) -> None:
        """A trial has ended: keep its number of threads, or wait longer before the next."""
        limit = GAIN if self.count > self._kept else SLACK
        if seconds <= limit * self._kept_s:
            self._kept, self._kept_s = self.count, seconds
            self._wait, self._pause = FIRST_TRIAL, 8 * FIRST_TRIAL
        else:
            self._wait = self._pause
            self._pause = min(2 * self._pause, LAST_PAUSE)

    def _worth_trying(self, stall_share: float) -> int:
        if stall_share < STARVED and self._kept < self._most:
            return min(2 * self._kept, self._most)
        if stall_share > IDLE or stall_share < STARVED:  # at the most threads: they may be in each other's way
            return max(self._kept // 2, 1)
        return self._kept


def relative(seconds: float, expected: float) -> float:
    """How long something took against what was expected, so that pieces of different size can be compared."""
    return seconds / expected if expected else 1.0
