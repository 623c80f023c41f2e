"""Guesses from the text itself, against a search that tries every place, and how far they are believed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lever.lookup import (
    BUCKETS,
    LEAST_MATCH,
    MOST_MATCH,
    MOST_TOKENS,
    PRIORS,
    WINDOW,
    Match,
    Record,
    find,
    tree_of,
)


def tried_everywhere(text: Sequence[int], window: int = WINDOW) -> Match | None:
    """Slow and plain: each place of the text, each length."""
    text = list(text)[-window:]
    for length in range(min(MOST_MATCH, len(text) - 1), LEAST_MATCH - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                return Match(length, in_circles(text[end:]))
    return None


def in_circles(tokens: Sequence[int]) -> tuple[int, ...]:
    """As if a text that ends with these went on as it did, token by token."""
    text = list(tokens)
    for _ in range(MOST_TOKENS):
        text.append(text[-len(tokens)])
    return tuple(text[:MOST_TOKENS])


# --- matches ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1), max_size=60) | st.lists(st.integers(0, 4), max_size=80))
def test_a_match_is_the_longest_and_of_such_the_latest(text: list[int]) -> None:
    assert find(text) == tried_everywhere(text)


@given(period=st.lists(st.integers(0, 3), min_size=1, max_size=30), times=st.integers(1, 5), extra=st.integers(0, 30))
def test_a_text_that_repeats_itself_is_matched_as_by_the_slow_search(period: list[int], times: int, extra: int) -> None:
    text = period * times + period[:extra]
    assert find(text) == tried_everywhere(text)


@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=60), window=st.integers(1, 40))
def test_only_the_last_tokens_of_a_text_are_searched(text: list[int], window: int) -> None:
    with mock.patch("lever.lookup.WINDOW", window):
        assert find(text) == tried_everywhere(text, window)


def test_what_lies_before_the_window_is_never_found() -> None:
    rng = random.Random(1)
    seen_once = [rng.randrange(1 << 30) for _ in range(WINDOW - 3)]
    text = [1, 2, 3, *seen_once, 1, 2, 3]
    assert find(text) is None
    match = find([1, 2, 3, *seen_once[6:], 1, 2, 3])
    assert match == Match(3, tuple(seen_once[6 : 6 + MOST_TOKENS]))


@pytest.mark.parametrize("text", [[], [1], [1, 1], [1, 1, 1], [1, 2, 1, 2], [1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 5, 6, 7]])
def test_what_stood_there_for_less_than_three_tokens_is_no_match(text: list[int]) -> None:
    assert find(text) is None


def test_a_match_may_lie_over_itself() -> None:
    """Of "ababab" the last four tokens stand there two places before, and then came "ab": so it may go on."""
    assert find([1, 2, 1, 2, 1, 2]) == Match(4, (1, 2) * 12)
    assert find([1, 1, 1, 1]) == Match(3, (1,) * MOST_TOKENS)
    assert find([5] * 40) == Match(MOST_MATCH, (5,) * MOST_TOKENS)


@given(st.lists(st.integers(0, 2), min_size=4, max_size=40))
def test_a_guess_that_holds_is_what_is_guessed_next(text: list[int]) -> None:
    """Each token of it is the first of the guess from the text with those before it, while the match grows longer."""
    match = find(text)
    for n, token in enumerate(match.tokens if match is not None else ()):
        assert match is not None
        following = find([*text, *match.tokens[:n]])
        assert following is not None
        if match.length + n <= MOST_MATCH:
            assert following.length >= match.length + n
        if following.length == match.length + n:
            assert following.tokens[0] == token


def test_of_matches_as_long_as_each_other_the_latest_says_what_follows() -> None:
    assert find([1, 2, 3, 40, 1, 2, 3, 50, 60, 1, 2, 3]) == Match(3, in_circles([50, 60, 1, 2, 3]))
    assert find([9, 1, 2, 3, 40, 8, 1, 2, 3, 50, 9, 1, 2, 3]) == Match(4, in_circles([40, 8, 1, 2, 3, 50, 9, 1, 2, 3]))


def test_a_match_is_not_followed_further_than_it_may_be() -> None:
    """Beyond so many tokens, a longer match is no better than the latest one."""
    long = list(range(100, 100 + MOST_MATCH))
    assert find([7, *long, 1, 8, *long, 2, 7, *long]) == Match(MOST_MATCH, in_circles([2, 7, *long]))
    text = [1, 2, 3, *range(200, 260), 1, 2, 3]
    assert find(text) == Match(3, tuple(range(200, 200 + MOST_TOKENS)))


# --- how far they hold --------------------------------------------------------------------------------------


def a_match(*tokens: int, length: int = 3) -> Match:
    return Match(length, tokens)


def test_before_anything_was_seen_longer_matches_are_believed_more() -> None:
    record = Record()
    assert [record.share(length) for length in BUCKETS] == pytest.approx(PRIORS)
    assert list(PRIORS) == sorted(PRIORS)


def test_lengths_are_told_apart_by_bucket() -> None:
    record = Record()
    for _ in range(20):
        record.observe(a_match(1, 2, 3, length=5), [1, 2, 3])
        record.observe(a_match(1, 2, 3, length=9), [7])
    shares = {length: record.share(length) for length in range(LEAST_MATCH, MOST_MATCH + 1)}
    assert BUCKETS == (3, 4, 6, 9, 16)
    assert shares[3] == PRIORS[0]
    assert shares[4] == shares[5] > 0.9
    assert {shares[length] for length in (6, 7, 8)} == {PRIORS[2]}
    assert {shares[length] for length in range(9, 16)} == {shares[9]}
    assert shares[9] < 0.2


@pytest.mark.parametrize(
    ("followed", "held", "judged"),
    [
        ([1, 2, 3, 4, 5], 4, 4),  # the fifth was not guessed
        ([1, 2, 3, 4], 4, 4),
        ([1, 2], 2, 2),  # the text ended there: of the others nothing is known
        ([9], 0, 1),
        ([1, 2, 9, 4], 2, 3),  # what stands behind a wrong one is not judged, whatever it is
        ([], 0, 0),
    ],
)
def test_guessed_tokens_count_up_to_the_first_wrong_one(followed: list[int], held: int, judged: int) -> None:
    found, expected = Record(), Record()
    found.observe(a_match(1, 2, 3, 4), followed)
    for n in range(judged):  # one by one, without forgetting between them
        with mock.patch("lever.lookup.FORGET", 0.98 if n == 0 else 1.0):
            expected.observe(a_match(1), [1 if n < held else 2])
    assert found.share(3) == pytest.approx(expected.share(3))


def test_a_share_is_that_of_what_held_and_forgets_what_was_long_ago() -> None:
    record = Record()
    for _ in range(400):
        record.observe(a_match(1, 2), [1, 3])
    assert record.share(3) == pytest.approx(0.5, abs=0.01)
    for _ in range(60):
        record.observe(a_match(1, 2), [1, 2])
    assert record.share(3) > 0.8


@given(st.lists(st.booleans(), max_size=200))
def test_a_share_is_always_a_probability(held: list[bool]) -> None:
    record = Record()
    for right in held:
        record.observe(a_match(1), [1 if right else 2])
    assert 0 < record.share(3) <= 1


# --- trees --------------------------------------------------------------------------------------------------


def test_a_match_is_a_chain_that_no_draft_has_seen() -> None:
    tree = tree_of(a_match(7, 7, 8), root=5, share=0.5)
    assert tree.tokens == [5, 7, 7, 8]
    assert tree.parents == [-1, 0, 1, 2]
    assert tree.depths == [0, 1, 2, 3]
    assert tree.reach == [1.0, 0.5, 0.25, 0.125]
    assert not any(tree.expanded(node) for node in range(4))
    assert tree.children == [{7: 1}, {7: 2}, {8: 3}, {}]
