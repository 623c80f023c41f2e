"""From typed lines to what is meant: a message, or a command with its argument. Reads no terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PROMPT, MORE = "> ", ". "  # shown before the first line of an entry and the others
QUOTES = '"""'
COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)  # so a path, a comment in code and the like are messages


@dataclass(frozen=True, slots=True)
class Message:
    """What is said to the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """What is asked of the chat."""

    name: str
    argument: str


def meaning(entry: str) -> Message | Command | None:
    """What an entry is: a message in quotes, a command, a message; None for blanks."""
    text = entry.strip()
    if text.startswith(QUOTES):  # perhaps open, at the end of all lines
        return Message(text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n"))
    found = COMMAND.fullmatch(text)
    if found is not None:
        return Command(found[1], found[2] or "")
    return Message(entry) if text else None


def is_open(entry: str) -> bool:
    """Whether it begins a message in quotes that has not ended."""
    text = entry.strip()
    return text.startswith(QUOTES) and (len(text) < 2 * len(QUOTES) or not text.endswith(QUOTES))


def entries(lines: Iterable[str]) -> Iterator[str]:
    """Entries from lines without their ends: a line each, but one that ends in a backslash goes on in the next, and
    quotes go on to their end, or that of the lines.
    """
    begun = ""
    for line in lines:
        entry = begun + line
        if is_open(entry):
            begun = f"{entry}\n"
        elif line.endswith("\\") and not entry.strip().startswith(QUOTES):
            begun = f"{entry[:-1]}\n"
        else:
            begun = ""
            yield entry
    if begun:
        yield begun.removesuffix("\n")
