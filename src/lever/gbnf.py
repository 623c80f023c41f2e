"""Grammars as llama.cpp writes them (GBNF), put into the notation of the library that follows them. Text to text.

Each character becomes a symbol of its own: that library reads the longest symbol that fits, and would not find the
two of `a ::= b b`, `b ::= "x"+` in "xx".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from lever.errors import UsageError

ROOT = "root"
MOST_IN_CLASS = 1000  # characters; each costs the library a kilobyte
MOST_PARENTHESES = 20  # in each other; the library refuses more than 30
# Rules in each other. Its time for an error in the innermost of a chain grows with the cube of this, and its stack with
# it; what people write is under ten.
MOST_RULES_DEEP = 100

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|\#[^\r\n]*)
    | (?P<newline>\r\n?|\n)
    | (?P<define>::=)
    | (?P<name>[A-Za-z0-9_-]+)
    | (?P<literal>"(?:[^"\\]|\\.)*")
    | (?P<class>\[(?:[^\]\\]|\\.)*\])
    | (?P<any>\.)
    | (?P<repeat>[*+?]|\{\s*\d{1,9}\s*(?:,\s*(?:\d{1,9})?\s*)?\})
    | (?P<mark>[|()])""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"""\\x([0-9A-Fa-f]{2}) | \\u([0-9A-Fa-f]{4}) | \\U([0-9A-Fa-f]{8}) | \\([trn\\"\[\]]) | ([^\\])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPED = {"t": "\t", "r": "\r", "n": "\n"}
ESCAPES = r"\t \r \n \\ \" \[ \] \xHH \uHHHH \UHHHHHHHH"


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


def to_lark(text: str) -> str:
    """The same language in Lark's notation; UsageError, with the line, for what is no grammar."""
    reader = _Reader(list(_tokens(text)))
    rules = dict(reader.rules())
    if ROOT not in rules:
        raise UsageError(f"the grammar has no rule {ROOT}: that is where it starts")
    _check_references(reader.references)
    names = {name: "start" if name == ROOT else f"r{number}" for number, name in enumerate(rules)}
    return "\n".join(f"{names[name]}: {_NAME.sub(lambda m: names[m[1]], body)}" for name, body in rules.items())


_NAME = re.compile("<([^>]*)>")  # how a body refers to a rule until all have their names


def _tokens(text: str) -> Iterator[_Token]:
    """All but blanks, and those ends of lines that end no rule: in parentheses, and where something must follow."""
    at, line, depth, before = 0, 1, 0, "newline"
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise UsageError(f"line {line} of the grammar: {text[at : at + 20]!r} is not understood")
        kind, word = str(match.lastgroup), match[0]
        depth += (word == "(") - (word == ")") if kind == "mark" else 0
        goes_on = depth > 0 or before in ("newline", "define", "|")
        if kind != "space" and not (kind == "newline" and goes_on):
            yield _Token(kind, word, line)
            before = word if kind == "mark" else kind
        at, line = match.end(), line + word.count("\n")


class _Reader:
    """Reads rules one by one. Bodies are in Lark's notation, with `<name>` for other rules."""

    def __init__(self, tokens: list[_Token]) -> None:
        self.references: dict[str, list[str]] = {}  # names that a rule's body has, by rule
        self._tokens = [*tokens, _Token("newline", "the end", tokens[-1].line if tokens else 1)]
        self._at = 0
        self._depth = 0

    def rules(self) -> Iterator[tuple[str, str]]:
        """Names and bodies."""
        while self._at < len(self._tokens) - 1:
            name = self._take("name", "the name of a rule").text
            if name in self.references:
                raise self._error(f"the rule {name} is there twice")
            self.references[name] = []
            self._take("define", "::=")
            yield name, self._alternatives(name)
            self._take("newline", "the end of the line")

    def _alternatives(self, rule: str) -> str:
        found = [self._sequence(rule)]
        while self._next.text == "|":
            self._at += 1
            found.append(self._sequence(rule))
        return " | ".join(found)

    def _sequence(self, rule: str) -> str:
        found = []
        while self._next.kind != "newline" and self._next.text not in ("|", ")"):
            item = self._item(rule)
            if self._next.kind == "repeat":
                item += self._repeat()
            found.append(item)
        return " ".join(found) or '""'

    def _item(self, rule: str) -> str:
        token = self._next
        self._at += 1
        if token.kind == "name":
            self.references[rule].append(token.text)
            return f"<{token.text}>"
        if token.kind == "literal":
            characters = [f"/{_escaped(char)}/" for _, char in self._characters(token)]
            return f"({' '.join(characters)})" if characters else '""'
        if token.kind == "class":
            return self._class(token)
        if token.kind == "any":
            return "/(?s:.)/"
        if token.text == "(":
            return self._group(rule)
        self._at -= 1
        raise self._error("a name, a text in quotes, a class such as [a-z], or ( is missing")

    def _group(self, rule: str) -> str:
        self._depth += 1
        if self._depth > MOST_PARENTHESES:
            raise self._error(f"more than {MOST_PARENTHESES} parentheses in each other: give parts names")
        body = self._alternatives(rule)
        if self._next.text != ")":
            raise self._error(") is missing")
        self._at += 1
        self._depth -= 1
        return f"({body})"

    def _repeat(self) -> str:
        token = self._take("repeat", "a repetition")
        numbers = re.findall(r"\d+", token.text)
        if len(numbers) == 2 and int(numbers[0]) > int(numbers[1]):
            raise self._error("it is no range", token)
        return re.sub(r"\s", "", token.text)

    def _class(self, token: _Token) -> str:
        inverted = token.text.startswith("[^")
        found = self._characters(token, start=2 if inverted else 1)
        if len(found) > MOST_IN_CLASS:
            raise self._error(f"more than {MOST_IN_CLASS} characters between [ and ]: use ranges", token)
        parts, at = [], 0
        while at < len(found):
            # An escaped minus stands for itself, and so does one at either end.
            is_range = at + 2 < len(found) and found[at + 1][0] == "-"
            low, high = found[at][1], found[at + 2 if is_range else at][1]
            if low > high:
                raise self._error(f"{low}-{high} is no range", token)
            parts.append(_escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}")
            at += 3 if is_range else 1
        if not parts:
            raise self._error("it holds no character", token)
        return f"/[{'^' * inverted}{''.join(parts)}]/"

    def _characters(self, token: _Token, start: int = 1) -> list[tuple[str, str]]:
        """What stands between the marks at both ends: how it is spelled, and the character."""
        found, at, end = [], start, len(token.text) - 1
        while at < end:
            match = _CHARACTER.match(token.text, at, end)
            if match is None:
                raise self._error(f"{token.text[at : at + 10]!r} is none of {ESCAPES}", token)
            code, escape, plain = match[1] or match[2] or match[3], match[4], match[5]
            number = int(code, 16) if code else ord(plain or _ESCAPED.get(escape, escape))
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise self._error(f"U+{number:04X} is no character", token)
            found.append((match[0], chr(number)))
            at = match.end()
        return found

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self, kind: str, what: str) -> _Token:
        token = self._next
        if token.kind != kind:
            raise self._error(f"{what} is missing")
        self._at += 1
        return token

    def _error(self, what: str, token: _Token | None = None) -> UsageError:
        token = token or self._next
        return UsageError(f"line {token.line} of the grammar, at {token.text.strip()[:40] or 'its end'}: {what}")


def _escaped(char: str) -> str:
    """A character in a regular expression."""
    return f"\\x{{{ord(char):x}}}"


def _check_references(references: dict[str, list[str]]) -> None:
    """UsageError for names of no rule, and for rules too deep in each other, as they are come upon from the root."""
    for name, found in references.items():
        for other in found:
            if other not in references:
                raise UsageError(f"the rule {name} of the grammar refers to {other}, which it has not")
    seen, path = {ROOT}, [iter(references[ROOT])]
    while path:
        deeper = next((name for name in path[-1] if name not in seen), None)
        if deeper is None:
            path.pop()
            continue
        seen.add(deeper)
        path.append(iter(references[deeper]))
        if len(path) > MOST_RULES_DEEP:
            raise UsageError(f"more than {MOST_RULES_DEEP} rules of the grammar lie in each other, down to {deeper}")
