"""Keeps control tokens that a template wrote apart from the same text in a user's words. Tokenises nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from lever.chat.messages import Messages
from lever.errors import UsageError

ROLES = frozenset(
    ["assistant", "developer", "environment", "function", "ipython", "model", "observation", "system", "tool"]
) | {"user"}
CHARACTERS = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))  # private use: of no meaning to anybody


@lru_cache(maxsize=4)
def controls_of(texts: tuple[str, ...]) -> Controls:
    return Controls(texts)


class Controls:
    """Keeps control tokens that the template wrote apart from the same text in what the user wrote.

    Marks, a character that occurs nowhere else, go around the first character of each control text in the user's
    strings before the template sees them. The rendered text is cut at the marks; a control text that was marked
    then lies across a border, where the tokenizer sees none, and a piece of one character never counts as one.
    Strings without control text stay as they are, so templates can search, cut and compare them. A mark also goes
    where a string ends with the beginning of a control text or begins with the end of one, because the template
    might write the rest beside it.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = [text for text in texts if text]
        longest_first = sorted(self._texts, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # Control texts that are words ("sop") count only whole: half of the language ends with an s.
        self._beginnings = {t[:n] for t in self._texts if not t[0].isalnum() for n in range(1, len(t))}
        self._ends = {t[n:] for t in self._texts if not t[-1].isalnum() for n in range(1, len(t))}
        self._lengths = range(1, max(map(len, self._texts), default=1))

    def check_roles(self, messages: Messages) -> None:
        """Refuses an uncommon role that is part of a control text: some templates write `<|` + role + `|>`."""
        for role in {message["role"] for message in messages} - ROLES:
            if any(role in text and role != text for text in self._texts):
                raise UsageError(f"the role {role!r} is part of a control token: use {', '.join(sorted(ROLES))}")

    def broken(self, text: str, mark: str) -> str:
        """`text` with marks in each control text, and at an end where one might be completed."""
        cuts: set[int] = set()
        match = self._any.search(text)
        while match:
            cuts |= {match.start(), match.start() + 1}
            match = self._any.search(text, match.start() + 1)
        # Templates trim, so blanks at the ends are no protection.
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if any(text[max(start, end - n) : end] in self._beginnings for n in self._lengths):
            cuts.add(end)
        if any(text[start : start + n] in self._ends for n in self._lengths):
            cuts.add(start)
        edges = [0, *sorted(cuts), len(text)]
        return mark.join(text[a:b] for a, b in pairwise(edges)) if cuts else text


def unused_character(texts: Sequence[str]) -> str:
    """A private-use character that does not occur, nor its JSON escape, which `tojson` has to undo."""
    used, joined = set().union(*texts), "\n".join(texts)
    for character in map(chr, CHARACTERS):
        if character not in used and json.dumps(character)[1:-1] not in joined:
            return character
    raise UsageError("the messages use every private-use character there is")
