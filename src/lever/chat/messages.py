"""Checks chat messages and makes plain text, dicts and lists of them. Knows no template and no tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lever.errors import UsageError

SEPARATOR = "\n"  # between the text parts of one message, as in llama.cpp
MAX_DEPTH = 100  # of values inside messages
RESERVED = frozenset(["messages", "bos_token", "eos_token"])

Messages = list[dict[str, Any]]


def checked_messages(messages: Sequence[Mapping[str, object]]) -> Messages:
    """The messages with their content as text; UsageError if one has no role or holds anything but text."""
    if not messages:
        raise UsageError("there are no messages: give at least one")
    return [_checked(f"message {number}", message) for number, message in enumerate(messages)]


def template_variables(given: Mapping[str, object], add_generation_prompt: bool) -> dict[str, Any]:
    """All that a template may ask for besides messages and tokens, `given` by the caller or not."""
    reserved = sorted(RESERVED & given.keys())
    if reserved:
        raise UsageError(f"{reserved[0]!r} is set by lever and cannot be given to the chat template")
    # The reference renderer always passes tools and documents, so templates test them for none.
    defaults = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
    return {**defaults, **mapped(given, str)}


def folded(messages: Messages) -> Messages | None:
    """The messages with a leading system message put in front of the first user message, if that can be."""
    system, *rest = messages
    first = next((number for number, message in enumerate(rest) if message["role"] == "user"), None)
    if system["role"] not in ("system", "developer") or first is None:
        return None
    content = "\n\n".join(text for text in (system["content"], rest[first]["content"]) if text)
    return [*rest[:first], {**rest[first], "content": content}, *rest[first + 1 :]]


def mapped(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """A copy of `value` in plain dicts and lists, with every string, keys too, changed by `change`."""
    if depth > MAX_DEPTH:
        raise UsageError(f"messages or tools are nested more than {MAX_DEPTH} deep")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {mapped(k, change): mapped(v, change, depth + 1) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [mapped(item, change, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise UsageError(f"messages or tools hold a {type(value).__name__}: give only what JSON can hold")


def strings(value: Any) -> Iterator[str]:
    """Every string in `value`, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value:
            yield from strings(item)
    if isinstance(value, dict):
        for item in value.values():
            yield from strings(item)


def _checked(where: str, message: Mapping[str, object]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UsageError(f"{where} has no role: give system, user, assistant or tool")
    # null means absent, as in the APIs that messages come from
    present = {name: value for name, value in message.items() if value is not None}
    return {**mapped(present | {"content": ""}, str), "content": _content(where, message.get("content"))}


def _content(where: str, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise UsageError(f"the content of {where} is neither text nor a list of parts")
    return SEPARATOR.join(_part_text(where, part) for part in content)


def _part_text(where: str, part: object) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
    if kind != "text":
        raise UsageError(f"{where} has a part of type {kind!r}: lever reads only text")
    if not isinstance(text, str):
        raise UsageError(f"{where} has a part of type 'text' without a text")
    return text
