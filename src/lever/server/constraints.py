"""What an answer has to be, by `response_format`."""

from __future__ import annotations

import msgspec

from lever.errors import MissingExtra, UsageError
from lever.grammar import Grammar
from lever.grammar import constraint_of as grammar_of
from lever.llm import LLM
from lever.loader import GRAMMAR
from lever.server.refusals import ApiError, not_supported
from lever.server.types import ResponseFormat


def constraint_of(response_format: ResponseFormat | None, llm: LLM) -> Grammar | None:
    """None for text. ApiError for what is no schema (400), and where there is no library or no room for it (501)."""
    if response_format is None or response_format.type == "text":
        return None
    try:
        if response_format.type == "json_object" and response_format.schema is not None:
            grammar: Grammar | None = Grammar.from_json_schema(response_format.schema)
        else:
            grammar = grammar_of(msgspec.to_builtins(response_format))
    except MissingExtra as error:
        raise not_supported(str(error), "response_format") from error
    except UsageError as error:
        raise ApiError(400, str(error), param="response_format", code="invalid_value") from error
    if GRAMMAR not in llm.loaded.plan.parts:
        raise not_supported("this server keeps no room for schemas: start it without --no-grammars", "response_format")
    return grammar
