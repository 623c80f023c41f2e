"""Chat templates: messages in, prompt text or token ids out. Runs no model and keeps no conversation.

Two strangers meet here. The template comes from a model file, which may be hostile: it runs in a sandbox, and
what it may use, make and spend is bounded (`sandbox`). The messages come from a user, who must not be able to
write control tokens: those count only where the template wrote them (`controls`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Protocol

import jinja2

from lever.chat.controls import controls_of, unused_character
from lever.chat.messages import Messages, checked_messages, mapped, strings, template_variables
from lever.chat.sandbox import Refusal, compiled, rendered
from lever.errors import TemplateError
from lever.gguf import GGUF

__all__ = ["ChatTemplate"]

KEY = "tokenizer.chat_template"


class Vocabulary(Protocol):
    """What this module asks of a tokenizer."""

    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def add_bos(self) -> bool: ...
    @property
    def control_texts(self) -> Mapping[str, int]: ...  # all that parse_special adds to what plain text can mean
    def token_text(self, token: int, /) -> str: ...
    def encode_pieces(self, pieces: Iterable[tuple[str, bool]], /, *, add_special: bool) -> list[int]: ...


class ChatTemplate:
    """A model's chat template, compiled once.

    Raises TemplateError for a template that does not compile, uses a feature that lever does not offer, or tries
    what a template must not; the message names the line. `now` is what `strftime_now` shows.
    """

    def __init__(
        self, source: str, *, bos_token: str, eos_token: str, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self._code = compiled(source)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._now = now

    @classmethod
    def from_gguf(cls, gguf: GGUF, tokenizer: Vocabulary) -> ChatTemplate | None:
        """The template in the file; None if it has none."""
        if KEY not in gguf.metadata:
            return None
        bos, eos = (
            "" if token is None else tokenizer.token_text(token) for token in (tokenizer.bos_id, tokenizer.eos_id)
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
        return self._fold_if_needed(checked_messages(messages), template_variables(kwargs, add_generation_prompt))

    def encode(
        self,
        tokenizer: Vocabulary,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> list[int]:
        """The prompt as ids, with exactly one BOS if the model wants one; otherwise as `render`.

        Control tokens are those that the template wrote. Their text inside messages and `kwargs` is ordinary.
        """
        controls = controls_of(tuple(tokenizer.control_texts))
        chat, given = checked_messages(messages), template_variables(kwargs, add_generation_prompt)
        controls.check_roles(chat)
        mark = unused_character([*strings(chat), *strings(given)])
        broken = partial(controls.broken, mark=mark)
        text = self._fold_if_needed(mapped(chat, broken), mapped(given, broken), mark)
        # No special token is seen across a border of pieces, but ordinary text is tokenised as if uncut.
        pieces = ((piece, len(piece) > 1) for piece in text.split(mark))
        ids = tokenizer.encode_pieces(pieces, add_special=False)
        if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            ids.insert(0, tokenizer.bos_id)
        return ids

    def _fold_if_needed(self, messages: Messages, variables: Mapping[str, object], mark: str = "") -> str:
        folded = _folded(messages)
        if folded is None:
            return self._rendered(messages, variables, mark)
        system, refusal, text = str(messages[0]["content"]).strip(), None, ""
        try:
            text = self._rendered(messages, variables, mark)
        except Refusal as error:
            refusal = error
        if refusal is None and system in text:
            return text
        try:
            second = self._rendered(folded, variables, mark)
        except Refusal as error:
            second, refusal = "", refusal or error
        if system in second:
            return second
        if refusal is not None:
            raise refusal
        return text

    def _rendered(self, messages: Messages, variables: Mapping[str, object], mark: str) -> str:
        context = {**variables, **self._tokens, "messages": messages}
        sandbox = Sandbox(BASE_BYTES + BYTES_PER_INPUT_BYTE * weight(context), mark, self._now)
        template = jinja2.Template.from_code(sandbox, self._code, sandbox.make_globals(None))
        try:
            return template.render(context)
        except _FAULTS as error:
            raise TemplateError(f"the model's chat template{_line(error)}: {_one_line(error)}") from error


def _folded(messages: Messages) -> Messages | None:
    """The messages with a leading system message put in front of the first user message, if that can be."""
    system, *rest = messages
    first = next((number for number, message in enumerate(rest) if message["role"] == "user"), None)
    if system["role"] not in ("system", "developer") or first is None:
        return None
    content = "\n\n".join(text for text in (system["content"], rest[first]["content"]) if text)
    return [*rest[:first], {**rest[first], "content": content}, *rest[first + 1 :]]
