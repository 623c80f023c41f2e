"""Whether a draft is to be believed, and whether guessing ahead pays, by what cycles have shown. Runs nothing."""

from __future__ import annotations

PRIOR, KEPT = 4.0, 0.95  # nodes that a draft is believed for, and what is kept of those seen with each more
LEAST_TRUST = 0.01  # never nothing: a product of it must stay above zero, and be divided by
MOST_LOSS, CREDIT = 1.5, 4.0  # plain passes that guessing may lose at first, and that it can have gained before
AT_ONCE = 1.0  # that one cycle can lose: where something else takes the processor, a moment tells nothing
TRY = 0.03  # of the time without guessing: what a try may cost before it brings anything
HOPEFUL = 0.15  # likewise, where passes wait for reads: guesses are nearly free there, so it was a bad moment that lost
LATER = 0.8  # what is kept of cycles seen with each more
FIRST_PAUSE, LAST_PAUSE = 8, 256  # cycles without guessing, doubled each time that it still does not pay


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
    """Whether guessing ahead pays, by what cycles took and brought. Where it has lost, it pauses and tries again.

    What cycles lose and gain, in plain passes, is added up. At first a loss of MOST_LOSS is enough to pause, later a
    credit of CREDIT at most is lost before; a try after a pause must not lose at all.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._loss = 0.0  # below zero: a credit
        self._pause, self._wait = FIRST_PAUSE, 0
        self._skipped = 0

    @property
    def guessing(self) -> bool:
        """Whether the next cycle should guess."""
        return self._wait == 0

    @property
    def tokens_per_s(self) -> float | None:
        """Of cycles that guessed, the later ones counting more; None before there were any."""
        return self._tokens / self._seconds if self._seconds else None

    def can_afford(self, passes: float, *, hopeful: bool) -> bool:
        """Whether a try may cost so many plain passes before it brings anything: a small share of those without a guess
        since the last one, a larger one where it is `hopeful`. Always, where guessing has not lost.
        """
        return self._loss < MOST_LOSS or passes <= (HOPEFUL if hopeful else TRY) * self._skipped

    def observe(self, tokens: int, seconds: float, plain_s: float) -> None:
        """A cycle that guessed brought so many tokens in so long; a plain one takes `plain_s` for its one."""
        self._tokens = LATER * self._tokens + tokens
        self._seconds = LATER * self._seconds + seconds
        lost = min(seconds / plain_s - tokens, AT_ONCE) if plain_s else 0.0
        self._loss = max(self._loss + lost, -CREDIT)
        if self._loss > MOST_LOSS:
            self._wait, self._pause = self._pause, min(2 * self._pause, LAST_PAUSE)
            self._tokens = self._seconds = 0.0
            self._loss, self._skipped = MOST_LOSS, 0
        elif self._loss <= 0:
            self._pause = FIRST_PAUSE

    def wait(self) -> None:
        """A cycle did not guess."""
        self._wait = max(self._wait - 1, 0)
        self._skipped += 1
