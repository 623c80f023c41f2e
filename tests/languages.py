"""Languages of bytes as plain expressions, judged one byte at a time: the slow twin of what a grammar allows.

Brzozowski's derivatives: what may follow a byte is an expression again, and it is NOTHING when nothing may. Knows
nothing of lever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any


@dataclass(frozen=True, eq=False)
class Language:
    """What is made of the functions below. No NOTHING is ever inside another one: all but NOTHING have a text."""

    kind: str
    parts: tuple[Any, ...] = ()

    @property
    def has_empty(self) -> bool:
        """Whether a text may end here."""
        if self.kind == "either":
            return any(part.has_empty for part in self.parts)
        if self.kind == "then":
            return all(part.has_empty for part in self.parts)
        return self.kind == "many"

    def after(self, text: bytes) -> Language:
        """What may follow these bytes."""
        return reduce(_after, text, self)


@cache
def _language(kind: str, *parts: Any) -> Language:
    """The only one of its kind and parts, so that equal ones are found at once."""
    return Language(kind, parts)


NOTHING = _language("either")
END = _language("then")


@cache
def _after(language: Language, byte: int) -> Language:
    parts = language.parts
    if language.kind == "byte":
        return END if byte in parts[0] else NOTHING
    if language.kind == "either":
        return either(*(_after(part, byte) for part in parts))
    if language.kind == "many":
        return then(_after(parts[0], byte), language)
    if not parts:
        return NOTHING
    first, rest = parts[0], then(*parts[1:])
    found = then(_after(first, byte), rest)
    return either(found, _after(rest, byte)) if first.has_empty else found


def byte_of(values: Iterable[int]) -> Language:
    return _language("byte", frozenset(values))


def either(*parts: Language) -> Language:
    flat: dict[Language, None] = {}
    for part in parts:
        flat |= dict.fromkeys(part.parts if part.kind == "either" else [part])
    return next(iter(flat)) if len(flat) == 1 else _language("either", *flat)


def then(*parts: Language) -> Language:
    if NOTHING in parts:
        return NOTHING
    flat = [inner for part in parts for inner in (part.parts if part.kind == "then" else [part])]
    return flat[0] if len(flat) == 1 else _language("then", *flat)


def many(part: Language) -> Language:
    return _language("many", part)


def maybe(part: Language) -> Language:
    return either(END, part)


def times(part: Language, least: int, most: int) -> Language:
    language = END
    for _ in range(most - least):
        language = maybe(then(part, language))
    return then(*[part] * least, language)


def text(value: str) -> Language:
    return then(*(byte_of([byte]) for byte in value.encode()))


def one_of(characters: str) -> Language:
    return either(*map(text, characters))


# --- JSON that fits a schema, of the few kinds of which the tests make schemas --------------------------------

DIGIT = one_of("0123456789")
BLANKS = maybe(either(text(" "), then(times(text("\n"), 1, 2), times(one_of(" \t"), 0, 20))))


def json_of(schema: Mapping[str, Any]) -> Language:
    """As lever promises it: properties in the schema's order, and blanks as llama.cpp allows them."""
    if "enum" in schema:
        return either(*(text(json.dumps(value, ensure_ascii=False)) for value in schema["enum"]))
    kinds: dict[str, Callable[[Mapping[str, Any]], Language]] = {
        "null": lambda _: text("null"),
        "boolean": lambda _: either(text("true"), text("false")),
        "integer": lambda _: then(maybe(text("-")), either(text("0"), then(one_of("123456789"), many(DIGIT)))),
        "string": _string,
        "array": _array,
        "object": _object,
    }
    return kinds[schema["type"]](schema)


def _string(schema: Mapping[str, Any]) -> Language:
    """Of a pattern `^[ab]{m,n}$`."""
    letters, _, bounds = schema["pattern"].removeprefix("^[").removesuffix("}$").partition("]{")
    least, most = map(int, bounds.split(","))
    return then(text('"'), times(one_of(letters), least, most), text('"'))


def _array(schema: Mapping[str, Any]) -> Language:
    item, least, most = json_of(schema["items"]), schema.get("minItems", 0), schema["maxItems"]
    if most == 0:
        return then(text("["), BLANKS, text("]"))
    more = then(BLANKS, text(","), BLANKS, item)
    items = then(item, times(more, max(least - 1, 0), most - 1), BLANKS)
    return then(text("["), BLANKS, items if least else maybe(items), text("]"))


def _object(schema: Mapping[str, Any]) -> Language:
    def members(names: list[str], started: bool) -> Language:
        if not names:
            return END
        first, *rest = names
        member = then(text(json.dumps(first)), BLANKS, text(":"), BLANKS, json_of(schema["properties"][first]))
        separator = then(text(","), BLANKS) if started else END
        with_it = then(separator, member, BLANKS, members(rest, True))
        return with_it if first in schema.get("required", ()) else either(with_it, members(rest, started))

    return then(text("{"), BLANKS, members(list(schema["properties"]), False), text("}"))
