"""What is known of a draft with its target: its steps, and what runs of both have shown. Measures nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace

from lever.cost import DOUBT, WEIGHT, Identity, RowTime, bounded, credible, from_json, require

VERSION = 1  # of the kept form; another one is measured anew
ASSUMED = 0.83  # first guesses that are right, before a run has shown it: the demo pair in chats


@dataclass(frozen=True, slots=True)
class Shown:
    """Moving averages over runs: the share of the draft's first guesses that are right, as far as tokens per cycle
    tell, and seconds of cycles as a share of what was foretold.
    """

    runs: int = 0
    first: float = ASSUMED
    seconds: float = 1.0

    def __post_init__(self) -> None:
        sound = 0 <= self.first <= 1 and 1 / DOUBT <= self.seconds <= DOUBT
        require(self.runs >= 0 and sound, f"{self} is nothing that runs can show")

    def after(self, first: float, seconds: float | None) -> Shown:
        """After one more run; `seconds` is None where that run cannot tell."""
        new = first if not self.runs else self.first + WEIGHT * (first - self.first)
        slower = 1.0 if seconds is None else credible(seconds / self.seconds)
        return Shown(self.runs + 1, new, bounded(self.seconds * slower**WEIGHT))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairProfile:
    """A draft beside its target on one machine. Steps are draft steps, by nodes (as rows) and threads."""

    target: Identity
    draft: Identity
    date: str  # ISO 8601
    quick: bool  # few points, few repetitions
    steps: tuple[RowTime, ...]
    shown: Shown = field(default_factory=Shown)
    version: int = VERSION

    def __post_init__(self) -> None:
        require(self.version == VERSION, f"it is of version {self.version}, this lever keeps {VERSION}")
        require(bool(self.steps), "steps is empty")
        keys = [(step.rows, step.threads) for step in self.steps]
        require(len(set(keys)) == len(keys), "the same was measured twice")

    def after(self, first: float, seconds: float | None) -> PairProfile:
        """What is known after one more run, see `Shown`."""
        return replace(self, shown=self.shown.after(first, seconds))

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PairProfile:
        """ProfileError for anything that `to_json` of this version did not write."""
        return from_json(cls, text, VERSION, "pair")
