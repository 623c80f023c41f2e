"""Stop strings in streamed text, against an oracle that sees the whole text at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lever.errors import UsageError
from lever.text import StopMatcher


def streamed(pieces: Sequence[str], stops: Sequence[str]) -> tuple[list[str], bool]:
    """What is shown for each piece, the flush last, and whether a stop was hit."""
    matcher = StopMatcher(stops)
    results = [matcher.feed(piece) for piece in pieces]
    return [*(text for text, _ in results), matcher.flush()], any(hit for _, hit in results)


def whole(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The oracle: the stop that ends first, of those the longest; all before it is shown."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


# Letters that overlap with themselves and each other; one to four bytes in UTF-8; a joined emoji.
ALPHABET = ["a", "b", "é", "…", "👍", "\n", "\u200d"]
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)


@settings(max_examples=500)
@given(text=st.text(ALPHABET, max_size=30), stops=STOPS, cuts=st.sets(st.integers(0, 30)))
def test_F8_however_the_text_is_cut_the_result_is_that_of_the_whole_text(
    text: str, stops: list[str], cuts: set[int]
) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    shown, hit = streamed([text[a:b] for a, b in pairwise(edges)], stops)
    assert ("".join(shown), hit) == whole(text, stops)


@settings(max_examples=250)
@given(text=st.text(ALPHABET, max_size=30), stops=STOPS)
def test_F5_what_is_held_back_is_exactly_the_longest_beginning_of_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for position, character in enumerate(text, 1):
        new, hit = matcher.feed(character)
        shown += new
        if hit:
            break
        beginnings = (stop[:n] for stop in stops for n in range(1, len(stop)))
        held = max((len(b) for b in beginnings if text[:position].endswith(b)), default=0)
        assert shown == text[: position - held]


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "hit"),
    [
        pytest.param(["Hi\nUser", ":", " no"], ["\nUser:"], ["Hi", "", "", ""], True, id="F4-over-two-pieces"),
        pytest.param(["Hi\nUser", " x"], ["\nUser:"], ["Hi", "\nUser x", ""], False, id="F4-false-alarm"),
        pytest.param(["a", "b", "c"], ["x" * 40], ["a", "b", "c", ""], False, id="F5-no-fixed-window"),
        pytest.param(["ab", "cx"], ["xyz"], ["ab", "c", "x"], False, id="F5-flush-gives-the-rest"),
        pytest.param(["END"], ["END"], ["", ""], True, id="F7-stop-is-all-there-is"),
        pytest.param(["one END two"], ["END"], ["one ", ""], True, id="F7-stop-and-what-follows-are-dropped"),
        pytest.param(["xab"], ["ab", "xab"], ["", ""], True, id="F8-same-end-the-longest"),
        pytest.param(["xabc"], ["xabc", "ab"], ["x", ""], True, id="F8-the-one-that-ends-first"),
        pytest.param(["a", "b", "…"], ["ab", "b…"], ["", "", "", ""], True, id="F8-overlapping"),
        pytest.param(["aab", "ac"], ["aac"], ["aab", "ac", ""], False, id="F8-fresh-start-after-a-miss"),
        pytest.param(["aa", "ab"], ["aab"], ["", "a", ""], True, id="F8-self-overlap"),
        pytest.param(["caf", "é!"], ["é"], ["caf", "", ""], True, id="F8-multibyte"),
        pytest.param(["anything"], [], ["anything", ""], False, id="no-stops"),
        pytest.param(["", ""], ["a"], ["", "", ""], False, id="no-text"),
    ],
)
def test_stops_in_a_stream(pieces: list[str], stops: list[str], shown: list[str], hit: bool) -> None:
    assert streamed(pieces, stops) == (shown, hit)


def test_F7_after_a_stop_nothing_comes_out_any_more() -> None:
    matcher = StopMatcher(["."])
    assert matcher.feed("Yes. No") == ("Yes", True)
    assert matcher.feed(" more") == ("", True)
    assert matcher.flush() == ""


def test_F7_a_stop_is_not_completed_across_the_end_of_the_prompt() -> None:
    # The prompt ended with "Us"; the matcher sees what came after.
    assert streamed(["er: hello"], ["User:"]) == (["er: hello", ""], False)


def test_E7_text_that_looks_like_a_control_token_stops_only_if_the_user_said_so() -> None:
    assert streamed(["ends with <|im_end|> they say"], []) == (["ends with <|im_end|> they say", ""], False)
    assert streamed(["ends with <|im_", "end|>"], ["<|im_end|>"]) == (["ends with ", "", ""], True)


def test_flush_gives_what_was_held_back_only_once() -> None:
    matcher = StopMatcher(["abc"])
    assert matcher.feed("ab") == ("", False)
    assert (matcher.flush(), matcher.flush()) == ("ab", "")


@pytest.mark.parametrize("stops", [[""], ["a", ""]])
def test_an_empty_stop_is_refused(stops: list[str]) -> None:
    with pytest.raises(UsageError, match="empty"):
        StopMatcher(stops)


def test_a_long_stop_and_a_long_text_are_no_trouble() -> None:
    stop = "a" * 1000 + "b"
    shown, hit = streamed(["a"] * 2000 + ["b"], [stop])
    assert ("".join(shown), hit) == ("a" * 1000, True)
