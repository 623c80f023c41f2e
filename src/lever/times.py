"""Seconds by number of rows, learned from what pieces of work took. Knows nothing of the work.

One observation says little: on a machine that others use, too, the same work takes twice as long now and then. So a
line is learned, not a table: what one more row takes must not depend on which numbers of rows met a bad moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Protocol

WEIGHT = 0.3  # of a new observation against what was known
KEPT = 0.9  # of the weight of those seen, with each more
SPREAD = 0.25  # variance of the numbers of rows seen from which on a slope is known
ENOUGH = 8  # observations, of different numbers of rows: worth more than what was foretold
CREDIBLE = 3.0  # times what was expected: what took longer counts as that


class Average:
    """A moving average. Before the first observation, which takes its place, it is what was foretold, or None."""

    def __init__(self, foretold: float | None = None) -> None:
        self.value = foretold
        self._seen = False

    def observe(self, seconds: float) -> None:
        """One more."""
        known = self.value if self._seen else None
        self.value, self._seen = seconds if known is None else known + WEIGHT * (seconds - known), True


class Times(Protocol):
    """What is known of one kind of work."""

    def observe(self, rows: int, seconds: float) -> None:
        """So many rows took so long."""

    def seconds(self, rows: int) -> float:
        """What so many rows will take; 0 while nothing is known."""


class Line:
    """A line by least squares, the later observations counting more; neither it nor its slope is below zero.

    One row stands apart, since kernels take it apart: it is on no line with others. While one number of rows was seen,
    `beyond` is the share of what proportion says that more rows add: under 1, what is cheap to try is tried sooner.
    """

    def __init__(self, beyond: float = 1.0) -> None:
        self._beyond = beyond
        self._weight = self._rows = self._seconds = 0.0  # their sum, and means
        self._square = self._product = 0.0  # weighted sums of deviations from the means
        self._slope: float | None = None
        self._one = Average()
        self.n_seen = 0

    @property
    def knows_one(self) -> bool:
        """Whether one row was seen."""
        return self._one.value is not None

    @property
    def knows_slope(self) -> bool:
        """Whether different numbers of rows were seen."""
        return self._slope is not None

    def observe(self, rows: int, seconds: float) -> None:
        """So many rows took so long."""
        if self.knows_one if rows == 1 else self._weight:
            seconds = min(seconds, CREDIBLE * self.seconds(rows))
        self.n_seen += 1
        if rows == 1:
            self._one.observe(seconds)
            return
        self._weight = KEPT * self._weight + 1.0
        off_rows, off_seconds = rows - self._rows, seconds - self._seconds
        self._rows += off_rows / self._weight
        self._seconds += off_seconds / self._weight
        self._square = KEPT * self._square + off_rows * (rows - self._rows)
        self._product = KEPT * self._product + off_rows * (seconds - self._seconds)
        if self._square > SPREAD * self._weight:
            self._slope = self._product / self._square

    def seconds(self, rows: int) -> float:
        """What so many rows will take; 0 while nothing is known."""
        one = self._one.value
        if not self._weight:
            return 0.0 if one is None else one * (1 + self._beyond * (rows - 1))
        if rows == 1 and one is not None:
            return one
        in_proportion, slope = self._seconds / self._rows, self._slope
        if slope is None:
            slope = self._beyond * in_proportion if one is None else (self._seconds - one) / (self._rows - 1)
        return max(self._seconds + min(max(slope, 0.0), in_proportion) * (rows - self._rows), one or 0.0)


class Scaled:
    """What was foretold, times how much longer it took so far: the shape is the profile's, the level what is seen.

    Until enough was seen for a shape of its own: then it is that `Line`.
    """

    def __init__(self, foretold: Mapping[int, float]) -> None:
        self._foretold, self._level, self._line = foretold, Average(), Line()

    def observe(self, rows: int, seconds: float) -> None:
        """So many rows took so long."""
        seconds = min(seconds, CREDIBLE * self.seconds(rows))
        self._level.observe(seconds / through(self._foretold, rows))
        self._line.observe(rows, seconds)

    def seconds(self, rows: int) -> float:
        """What so many rows will take."""
        if self._line.n_seen >= ENOUGH and (self._line.knows_one if rows == 1 else self._line.knows_slope):
            return self._line.seconds(rows)
        return through(self._foretold, rows) * (1.0 if self._level.value is None else self._level.value)


def through(points: Mapping[int, float], rows: int) -> float:
    """The value at `rows` of lines through these points; in proportion before the first, on the last line beyond."""
    known = sorted(points)
    place = bisect_left(known, rows)
    if place == 0:
        return points[known[0]] * rows / known[0]
    if len(known) == 1:
        return points[known[0]] * rows / known[0]
    above = min(place, len(known) - 1)
    (x0, y0), (x1, y1) = ((known[n], points[known[n]]) for n in (above - 1, above))
    more = y1 - y0 if rows <= x1 else max(y1 - y0, 0.0)
    return y1 + more / (x1 - x0) * (rows - x1)
