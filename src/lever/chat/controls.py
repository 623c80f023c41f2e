"""Keeps control tokens that a template wrote apart from the same text in a user's words. Tokenises nothing.

Marks, a character that occurs nowhere else, go around the first character of each control text in the user's
strings before the template sees them. The rendered text is cut at the marks. A control text that was marked then
lies across a border, where the tokenizer sees none, and a piece of one character never counts as one. Strings
without control text stay as they are, so templates can search, cut and compare them. A mark also goes where a
string ends with the beginning of a control text or begins with the end of one, because the template might write
the rest beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

from lever.errors import UsageError

# Roles that a template may put into the middle of a control token, `<|` + role + `|>`.
ROLES = ("assistant", "developer", "function", "ipython", "model", "observation", "system", "tool", "user")
MARKS = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))  # private use: characters that mean nothing


@lru_cache(maxsize=4)
def controls_of(texts: tuple[str, ...]) -> Controls:
    """One `Controls` per vocabulary: it takes milliseconds to make."""
    return Controls(texts)


class Controls:
    """The control texts of a vocabulary, made ready to be found and broken."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = sorted(filter(None, texts), key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")
        # Control texts that are words ("sop") count only whole: half of the language ends with an s.
        self._beginnings = {t[:n] for t in self._texts if not t[0].isalnum() for n in range(1, len(t))}
        self._ends = {t[n:] for t in self._texts if not t[-1].isalnum() for n in range(1, len(t))}
        self._lengths = range(1, len(self._texts[0]) if self._texts else 1)

    def check_roles(self, roles: Iterable[str]) -> None:
        """UsageError for an uncommon role that lies inside a control text, such as `endoftext`."""
        for role in set(roles).difference(ROLES):
            if any(role in text[1:-1] for text in self._texts):
                raise UsageError(f"the role {role!r} is part of a control token: use {', '.join(ROLES)}")

    def broken(self, text: str, mark: str) -> str:
        """`text` with marks in each control text, and at an end where one might be completed."""
        cuts = set(self._open_ends(text))
        match = self._any.search(text)
        while match:
            cuts |= {match.start(), match.start() + 1}
            match = self._any.search(text, match.start() + 1)
        edges = [0, *sorted(cuts), len(text)]
        return mark.join(text[a:b] for a, b in pairwise(edges)) if cuts else text

    def _open_ends(self, text: str) -> Iterator[int]:
        # Templates trim, so blanks around the text are no protection.
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if any(text[max(start, end - n) : end] in self._beginnings for n in self._lengths):
            yield end
        if any(text[start : start + n] in self._ends for n in self._lengths):
            yield start


def unused_character(texts: Sequence[str]) -> str:
    """A private-use character that occurs in none of `texts`, nor does its JSON escape."""
    used: set[str] = set().union(*texts)
    joined = "\n".join(texts)
    for character in map(chr, MARKS):
        if character not in used and json.dumps(character)[1:-1] not in joined:
            return character
    raise UsageError("the messages use every private-use character there is: leave some out")
