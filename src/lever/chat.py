"""Chat templates: messages in, prompt text or token ids out. Runs no model and keeps no conversation.

Two strangers meet here. The template comes from a model file, which may be hostile: it runs in jinja2's immutable
sandbox, and what it may use, make and spend is bounded (`_Sandbox`). The messages come from a user, who must not
be able to write control tokens: those count only where the template wrote them (`_Controls`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from sys import getsizeof
from time import thread_time
from types import BuiltinMethodType, CodeType, MethodType, TracebackType
from typing import Any, Protocol

import jinja2
from jinja2 import nodes, pass_context, pass_environment
from jinja2.defaults import DEFAULT_FILTERS
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from lever.errors import TemplateError, UsageError
from lever.gguf import GGUF

KEY = "tokenizer.chat_template"
SEPARATOR = "\n"  # between the text parts of one message, as in llama.cpp
ROLES = frozenset(
    "system developer user assistant tool function model ipython observation environment".split()
)
MAX_SOURCE_CHARS = 256 << 10  # public templates reach about 30 k
MAX_DEPTH = 100  # of values inside messages
# What a template may make while it renders: a base, and a multiple of what it was given, because some templates
# build their text by appending to all that came before.
BASE_BYTES = 8 << 20
BYTES_PER_INPUT_BYTE = 256
MAX_INTEGER_BITS = 4096
MAX_SECONDS = 2.0  # of this thread's processor time; the public templates take milliseconds
TICKS_PER_LOOK = 16  # hooks passed between two looks at the clock, which cost as much as a hook
CHARACTERS = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))  # private use: of no meaning to anybody


class Vocabulary(Protocol):
    """What this module asks of a tokenizer."""

    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def add_bos(self) -> bool: ...
    @property
    def control_texts(self) -> Mapping[str, int]: ...
    def token_text(self, token: int, /) -> str: ...
    def encode(self, text: str, /, *, add_special: bool, parse_special: bool) -> list[int]: ...


class ChatTemplate:
    """A model's chat template, compiled once.

    Raises TemplateError for a template that does not compile, uses a feature that lever does not offer, or tries
    what a template must not; the message names the line. `now` is what `strftime_now` shows.
    """

    def __init__(
        self, source: str, *, bos_token: str, eos_token: str, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self._code = _compiled(source)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._now = now

    @classmethod
    def from_gguf(cls, gguf: GGUF, tokenizer: Vocabulary) -> ChatTemplate | None:
        """The template in the file; None if it has none."""
        if KEY not in gguf.metadata:
            return None
        bos, eos = (
            "" if token is None else tokenizer.token_text(token)
            for token in (tokenizer.bos_id, tokenizer.eos_id)
        )
        return cls(gguf.text(KEY), bos_token=bos, eos_token=eos)

    def render(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True, **kwargs: object
    ) -> str:
        """The prompt as text. `kwargs` (tools, documents, enable_thinking ...) are variables of the template.

        A leading system message that the template refuses or leaves out is put in front of the first user
        message. Raises TemplateError with the template's own words if it refuses the messages, UsageError if
        they are not messages of text.
        """
        chat = _checked_messages(messages)
        return self._fold_if_needed(chat, self._variables(kwargs, add_generation_prompt), mark="")

    def encode(
        self,
        tokenizer: Vocabulary,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> list[int]:
        """The prompt as ids, with one BOS at most; otherwise as `render`.

        Control tokens are those that the template wrote. Their text inside messages and `kwargs` is ordinary.
        """
        controls = _controls(tuple(tokenizer.control_texts.items()))
        chat = _checked_messages(messages)
        controls.check_roles(chat)
        given = self._variables(kwargs, add_generation_prompt)
        mark = _unused_character([*_strings(chat), *_strings(given)])
        broken = partial(controls.broken, mark=mark)
        marked = {**_mapped(kwargs, broken), **{name: given[name] for name in given if name not in kwargs}}
        text = self._fold_if_needed(_mapped(chat, broken), marked, mark)
        ids: list[int] = []
        for piece in controls.split(text):
            if isinstance(piece, int):
                ids.append(piece)
            elif plain := piece.replace(mark, ""):
                ids += tokenizer.encode(plain, add_special=False, parse_special=False)
        if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            ids.insert(0, tokenizer.bos_id)
        return ids
