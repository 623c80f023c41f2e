"""How far a draft is believed, and when guessing is left and tried again: by cycles that are written down."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lever.worth import CREDIT, FIRST_PAUSE, HOPEFUL, LAST_PAUSE, LEAST_TRUST, MOST_LOSS, TRY, Reliability, Worth

# --- reliability --------------------------------------------------------------------------------------------


def reliability_after(promised: float, met: float, n: int = 400, start: Reliability | None = None) -> Reliability:
    """A draft whose candidates have one probability by its own word, and another in truth: evenly spread."""
    found, total = start or Reliability(), 0.0
    for _ in range(n):
        total += met
        found.observe(promised, total >= 1)
        total -= total >= 1
    return found


def test_a_draft_is_believed_before_anything_was_seen() -> None:
    assert Reliability().value == 1.0


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 1.0])
def test_an_honest_draft_is_believed_however_much_it_knows(share: float) -> None:
    assert reliability_after(share, share).value == pytest.approx(1.0, abs=0.15)


def test_a_modest_draft_is_not_believed_more_than_it_says() -> None:
    assert reliability_after(0.3, 0.9).value == 1.0


@pytest.mark.parametrize(("promised", "met"), [(0.9, 0.3), (1.0, 0.5), (0.8, 0.2)])
def test_a_boaster_is_believed_as_far_as_it_was_right(promised: float, met: float) -> None:
    assert reliability_after(promised, met).value == pytest.approx(met / promised, rel=0.2)


def test_a_boaster_that_has_become_honest_is_believed_again() -> None:
    boaster = reliability_after(1.0, 0.0, 50)
    assert boaster.value < 0.1
    assert reliability_after(0.9, 0.9, 60, boaster).value > 0.9


def test_a_draft_that_was_never_right_keeps_a_way_back() -> None:
    """At nothing, no candidate would ever be worth a row, and there would be nothing to divide by."""
    never = reliability_after(1.0, 0.0, 20_000)
    assert never.value == LEAST_TRUST > 0


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=60))
def test_what_is_believed_is_a_share(seen: list[tuple[float, bool]]) -> None:
    found = Reliability()
    for promised, met in seen:
        found.observe(promised, met)
        assert LEAST_TRUST <= found.value <= 1


# --- worth --------------------------------------------------------------------------------------------------


class Cycles:
    """Cycles one after another, as the engine has them; which of them guessed."""

    def __init__(self) -> None:
        self.worth = Worth()
        self.guessed: list[bool] = []

    def run(self, n: int, *, tokens: int, seconds: float, plain_s: float = 1.0) -> Cycles:
        for _ in range(n):
            self.guessed.append(self.worth.guessing)
            if self.worth.guessing:
                self.worth.observe(tokens, seconds, plain_s)
            else:
                self.worth.wait()
        return self

    @property
    def pauses(self) -> list[int]:
        """Lengths of the runs of cycles without a guess, the last one too."""
        runs = "".join(".x"[not guessed] for guessed in self.guessed).split(".")
        return [len(run) for run in runs if run]


def test_guessing_that_pays_goes_on() -> None:
    cycles = Cycles().run(200, tokens=3, seconds=2.0)
    assert all(cycles.guessed)
    assert cycles.worth.tokens_per_s == pytest.approx(1.5)


def test_guessing_that_does_not_pay_pauses_after_a_few_cycles_and_for_longer_each_time() -> None:
    cycles = Cycles().run(1000, tokens=1, seconds=2.0)  # each loses one plain pass
    enough = int(MOST_LOSS) + 1
    assert cycles.guessed[: enough + 1] == [True] * enough + [False]
    doubled = [FIRST_PAUSE << n for n in range(6)]
    assert cycles.pauses[:-1] == [*doubled, LAST_PAUSE]
    assert sum(cycles.guessed) == enough + len(doubled) + 1  # one for each try


def test_the_less_a_cycle_loses_the_more_of_them_are_tried() -> None:
    tried = [Cycles().run(40, tokens=1, seconds=1 + loss).guessed.index(False) for loss in (1.0, 0.75, 0.25)]
    assert tried == [2, 3, 7]


def test_one_cycle_alone_is_no_reason_to_pause_however_long_it_took() -> None:
    """Something else may have taken the processor for a moment."""
    cycles = Cycles().run(1, tokens=1, seconds=50.0).run(20, tokens=4, seconds=2.0)
    assert all(cycles.guessed)


def test_what_was_gained_before_may_be_lost_again() -> None:
    cycles = Cycles().run(50, tokens=4, seconds=2.0).run(30, tokens=1, seconds=2.0)
    assert cycles.guessed.index(False) == 50 + int(CREDIT + MOST_LOSS) + 1


def test_a_try_must_be_cheap_beside_what_was_plain_since() -> None:
    worth = Worth()
    assert worth.can_afford(100.0, hopeful=False)  # it has not lost yet
    for _ in range(2):
        worth.observe(1, 3.0, 1.0)
    while not worth.guessing:
        worth.wait()
    for hopeful, share in ((False, TRY), (True, HOPEFUL)):
        assert worth.can_afford(share * FIRST_PAUSE, hopeful=hopeful)
        assert not worth.can_afford(share * FIRST_PAUSE + 0.01, hopeful=hopeful)
    worth.observe(9, 1.0, 1.0)
    assert worth.can_afford(100.0, hopeful=False)


def test_one_bad_cycle_among_good_ones_is_no_reason_to_pause() -> None:
    cycles = Cycles()
    for _ in range(20):
        cycles.run(4, tokens=4, seconds=2.0).run(1, tokens=1, seconds=2.0)
    assert all(cycles.guessed)


def test_after_a_pause_guessing_that_pays_goes_on_and_the_next_pause_is_short_again() -> None:
    cycles = Cycles().run(80, tokens=1, seconds=2.0)
    assert cycles.pauses[:2] == [FIRST_PAUSE, 2 * FIRST_PAUSE]
    while not cycles.worth.guessing:
        cycles.worth.wait()
    cycles.guessed.clear()
    cycles.run(30, tokens=4, seconds=2.0)
    assert all(cycles.guessed)
    cycles.run(60, tokens=1, seconds=2.0)
    assert cycles.pauses[0] == FIRST_PAUSE


def test_what_guessing_brought_is_unknown_before_there_was_any() -> None:
    worth = Worth()
    assert worth.guessing
    assert worth.tokens_per_s is None
    worth.wait()
    assert worth.guessing


def test_guessing_that_pays_on_the_whole_is_hardly_ever_left() -> None:
    """Cycles of one to eight tokens, as long as two plain ones. By chance a few in a row bring one each."""
    rng, guessed = random.Random(1), 0
    for _ in range(50):
        cycles = Cycles()
        for _ in range(300):
            cycles.run(1, tokens=rng.randint(1, 8), seconds=2.0)
        guessed += sum(cycles.guessed)
    assert guessed > 0.97 * 50 * 300
