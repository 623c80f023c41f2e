"""One request while it is answered: its text so far, how tokens are drawn, what is counted. Runs no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lever.errors import Cancelled, ContextOverflow, UsageError
from lever.figures import Trace
from lever.sample import top2_gap
from lever.stats import RunStats

# (logits of one row, tokens before it, position of the token to be drawn) -> token
Draw = Callable[[NDArray[np.float32], Sequence[int], int], int]
# tokens so far, the prompt's too -> whether the answer is whole without an end token
Complete = Callable[[Sequence[int]], bool]
# A gap between the two best logits under which sums in another order may draw another token (`near_ties`): twice the
# largest change of a gap that was seen on the demo (docs/log.md).
NEAR_TIE = 0.3
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Step:
    """One new token. `logits` [n_vocab] are those it was drawn from, valid until the next step."""

    token: int
    logits: NDArray[np.float32]
    finish_reason: FinishReason | None  # set on the last step


@dataclass(slots=True)
class Run:
    """One request while it is answered."""

    request: int
    tokens: list[int]  # prompt and answer
    draw: Draw
    complete: Complete
    end_tokens: frozenset[int]
    limit: int  # of tokens
    temperature: float
    stats: RunStats
    cancelled: Callable[[], bool]
    trace: Trace
    outcomes: list[tuple[int, int]] = field(default_factory=list)  # of its cycles: candidates checked, and accepted
    started: int = 0  # the place of the first token of this cycle
    drafted_s: float = 0.0  # in this cycle
    cycle_s: float = 0.0  # of its pass and projections
    trial: bool = False  # whether part of it had a number of threads for a trial: its time tells of that alone

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self.limit - len(self.tokens)

    def begin_cycle(self) -> None:
        """Count anew."""
        self.trace.begin()
        self.started, self.drafted_s, self.cycle_s, self.trial = len(self.tokens), 0.0, 0.0, False

    def stop_if_cancelled(self) -> None:
        """Cancelled, if the answer was given up."""
        if self.cancelled():
            raise Cancelled("the answer was given up")

    def step(self, logits: NDArray[np.float32], *, exact: bool) -> Step:
        """The next token, drawn by the request's own rule, at its place in the text.

        `exact`: whether these are the bits of plain decoding.
        """
        token = self.draw(logits, self.tokens, len(self.tokens))
        self.tokens.append(token)
        self.stats.new_tokens += 1
        if not exact:
            self.stats.exact = False
            self.stats.near_ties += top2_gap(logits) < NEAR_TIE
        return Step(token, logits, self._finish_reason(token))

    def _finish_reason(self, token: int) -> FinishReason | None:
        if token in self.end_tokens or self.complete(self.tokens):
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None


def check_prompt(prompt: Sequence[int], n_ctx: int) -> None:
    """UsageError for a prompt without tokens, ContextOverflow for one that leaves no room for a new token."""
    if not prompt:
        raise UsageError("the prompt is empty: there is nothing to go on from")
    if len(prompt) >= n_ctx:
        raise ContextOverflow(
            f"the prompt has {len(prompt)} tokens and the context {n_ctx}: shorten it or give more with -c"
        )
