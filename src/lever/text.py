"""Finds the user's stop strings in streamed output. Knows neither tokens nor the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from lever.errors import UsageError


class StopMatcher:
    """Passes text through until a stop string is complete; the stop and all that follows are dropped.

    The stop that completes first wins; of several that complete at the same character, the longest. What has
    been shown never depends on how the text was cut into pieces. Held back is only the longest end of the
    text that may still become a stop.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise UsageError("a stop string is empty, which would stop at once: leave it out")
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is now safe to show, and whether a stop was hit (then, and ever after)."""
        if self._stopped:
            return "", True
        text = self._held + text
        # The first occurrence of each stop is the one that ends first. (end, start): the longer one is first.
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        self._stopped = bool(matches)
        shown = min(matches)[1] if matches else len(text) - self._pending(text)
        self._held = "" if matches else text[shown:]
        return text[:shown], self._stopped

    def flush(self) -> str:
        """What was held back, once no more text will come."""
        held, self._held = self._held, ""
        return held

    def _pending(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop."""
        return max((_overlap(text, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
