"""What an answer has to be, by `response_format`."""

from __future__ import annotations

from lever.llm import LLM
from lever.server.refusals import not_supported
from lever.server.types import ResponseFormat


def constraint_of(response_format: ResponseFormat | None, llm: LLM) -> None:  # noqa: ARG001
    """Nothing for text; an error with status 501 for what is not there yet."""
    if response_format is not None and response_format.type != "text":
        raise not_supported(
            f"response_format {response_format.type} needs the extra lever-llm[grammar]", "response_format"
        )
