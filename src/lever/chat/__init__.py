"""Chat templates: messages in, prompt text or token ids out. Runs no model and keeps no conversation.

Two strangers meet here. The template comes from a model file, which may be hostile: what it may use, make and
spend is bounded (`sandbox`). The messages come from a user, who must not be able to write control tokens: those
count only where the template wrote them (`controls`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Protocol

from lever.chat.controls import controls_of, unused_character
from lever.chat.messages import Messages, checked_messages, folded, mapped, strings, template_variables
from lever.chat.sandbox import Refusal, compiled, rendered
from lever.gguf import GGUF

__all__ = ["ChatTemplate", "Vocabulary"]

KEY = "tokenizer.chat_template"


class Vocabulary(Protocol):
    """What this package asks of a tokenizer."""

    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def add_bos(self) -> bool: ...
    @property
    def control_texts(self) -> Mapping[str, int]:
        """Every text that `parse_special` turns into a token and plain text never does."""
        ...

    def token_text(self, token: int, /) -> str: ...
    def encode_pieces(self, pieces: Iterable[tuple[str, bool]], /, *, add_special: bool) -> list[int]:
        """Ids of one text in pieces, each with its `parse_special`; no special token lies across a border."""
        ...


class ChatTemplate:
    """The chat template of a model, compiled once.

    Raises TemplateError for one that does not compile or uses a feature that lever does not offer; the message
    names the line. `now` is the time that the template's `strftime_now` shows.
    """

    def __init__(
        self, source: str, *, bos_token: str, eos_token: str, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self._source, self._code = source, compiled(source)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._now = now

    @classmethod
    def from_gguf(cls, gguf: GGUF, tokenizer: Vocabulary) -> ChatTemplate | None:
        """The template in the file; None if it has none."""
        if KEY not in gguf.metadata:
            return None
        ends = (tokenizer.bos_id, tokenizer.eos_id)
        bos, eos = ("" if token is None else tokenizer.token_text(token) for token in ends)
        return cls(gguf.text(KEY), bos_token=bos, eos_token=eos)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        """The prompt as text. `kwargs` (tools, documents, enable_thinking ...) are variables of the template.

        A leading system message that the template refuses or leaves out is put in front of the first user
        message. Raises TemplateError with the template's own words if it refuses the messages, or for a fault in
        it, and UsageError if the messages are not of text.
        """
        variables = template_variables(kwargs, add_generation_prompt)
        return self._folding(checked_messages(messages), variables)

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
        chat, variables = checked_messages(messages), template_variables(kwargs, add_generation_prompt)
        controls = controls_of(tuple(tokenizer.control_texts))
        controls.check_roles(message["role"] for message in chat)
        mark = unused_character([self._source, *strings(chat), *strings(variables)])
        broken = partial(controls.broken, mark=mark)
        text = self._folding(mapped(chat, broken), mapped(variables, broken), mark)
        pieces = ((piece, len(piece) > 1) for piece in text.split(mark))
        ids = tokenizer.encode_pieces(pieces, add_special=False)
        if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            ids.insert(0, tokenizer.bos_id)
        return ids

    def _folding(self, messages: Messages, variables: Mapping[str, Any], mark: str = "") -> str:
        """The text of the messages, or of `folded` ones if only so the system message gets into it."""
        text, instead, system = self._tried(messages, variables, mark), folded(messages), messages[0]["content"]
        if instead is not None and (isinstance(text, Refusal) or system.strip() not in text):
            second = self._tried(instead, variables, mark)
            if isinstance(second, str) and system.strip() in second:
                return second
        if isinstance(text, Refusal):
            raise text
        return text

    def _tried(self, messages: Messages, variables: Mapping[str, Any], mark: str) -> str | Refusal:
        context = {**variables, **self._tokens, "messages": messages}
        try:
            return rendered(self._code, context, mark=mark, now=self._now)
        except Refusal as refusal:
            return refusal
