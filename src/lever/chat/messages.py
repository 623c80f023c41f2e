"""Checks what a caller gives as chat messages and makes plain text, dicts and lists of it. Knows no template."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lever.errors import UsageError

SEPARATOR = "\n"  # between the text parts of one message, as in llama.cpp
MAX_DEPTH = 100  # of values inside messages

Messages = list[dict[str, Any]]


def checked_messages(messages: Sequence[Mapping[str, object]]) -> Messages:
    if not messages:
        raise UsageError("there are no messages: give at least one")
    return [_checked_message(f"message {number}", message) for number, message in enumerate(messages)]


def _checked_message(where: str, message: Mapping[str, object]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UsageError(f"{where} has no role: give system, user, assistant or tool")
    # As in JSON APIs, null means absent.
    plain = {name: mapped(value, str) for name, value in message.items() if value is not None}
    return {**plain, "content": _content(where, message.get("content"))}


def _content(where: str, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise UsageError(f"the content of {where} is neither text nor a list of parts")
    return SEPARATOR.join(_part_text(where, part) for part in content)


def _part_text(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text":
        raise UsageError(f"{where} has a part of type {kind!r}: lever reads text only")
    if not isinstance(text, str):
        raise UsageError(f"{where} has a part of type 'text' without a text")
    return text




def template_variables(kwargs: Mapping[str, object], add_generation_prompt: bool) -> dict[str, Any]:
    reserved = {"messages", "bos_token", "eos_token"} & kwargs.keys()
    if reserved:
        raise UsageError(f"{min(reserved)!r} is set by lever and cannot be given to the chat template")
    # tools and documents are always there, as in the reference renderer
    defaults = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
    return {**defaults, **mapped(dict(kwargs), str)}


def mapped(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """A copy in plain dicts and lists, with `change` applied to every string, keys included."""
    if depth > MAX_DEPTH:
        raise UsageError(f"messages or tools are nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {mapped(k, change): mapped(v, change, depth + 1) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [mapped(item, change, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise UsageError(f"messages or tools hold a {type(value).__name__}: give what JSON can hold")


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in [*value, *(value.values() if isinstance(value, dict) else ())]:
            yield from strings(item)
