"""How many of the likeliest are worth their time: of nodes of a tree before a pass, of its rows in the middle of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def likeliest(
    reach: Sequence[float], places: Sequence[int], rate_of: Callable[[int, float], float], most: int | None = None
) -> tuple[list[int], float]:
    """The places with the largest chances of being reached, as many as give the most tokens a second, and how many that
    is: `rate_of(n, tokens)` for n of them, of which so many tokens are expected. The first is always among them.

    A parent is there before its children: it is never less likely, and where it is as likely, its place is lower.
    """
    order = sorted(places, key=lambda place: (-reach[place], place))[:most]
    best, best_rate, tokens = 1, 0.0, 0.0
    for n, place in enumerate(order, start=1):
        tokens += reach[place]
        tokens_per_s = rate_of(n, tokens)
        if tokens_per_s > best_rate:
            best, best_rate = n, tokens_per_s
    return order[:best], best_rate
