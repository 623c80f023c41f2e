"""lever: language models larger than memory, from flash, with the very same text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lever.api import LLM

__all__ = ["LLM"]


def __getattr__(name: str) -> object:
    """`LLM` is loaded when it is asked for, so that the command line, which starts here too, is quick."""
    if name == "LLM":
        from lever.api import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
