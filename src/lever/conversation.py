"""A conversation: what was said, the next answer to it, and a file of both. Knows no terminal.

The engine keeps the rows of the last prompt and of the answer to it, so a next prompt that begins with their tokens is
read from there on. Only, the tokens that the tokenizer makes of an answer's text need not be those that were drawn: a
model may well write "hel" "lo". So a prompt takes the tokens of the one before, answer included, as far as both spell
the same (`spliced`), and what was drawn stays what it was. Where the template writes old turns otherwise than they were
(it trims an answer, or leaves its thoughts out), where bytes that are no characters had to be replaced, and in a
conversation from a file, which has texts alone, tokens are the tokenizer's from that place on, and are read anew.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from difflib import get_close_matches
from itertools import accumulate, takewhile
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from lever.chat.messages import checked_messages
from lever.errors import ContextOverflow, StorageError, UsageError
from lever.llm import LLM, Generation, GenerationSettings
from lever.settings import SAMPLING_NUMBERS
from lever.tokenizer import Tokenizer

log = logging.getLogger(__name__)

NEARLY_FULL = 0.9  # of the context: worth a word
SETTINGS = (*SAMPLING_NUMBERS, "max_tokens", "stop", "ignore_eos", "logit_bias")
ROLES = ("user", "assistant")  # of turns; a system message stands before them

# Is told how many tokens of a prompt are to be read, and gives what is told of them as they are.
OnPrompt = Callable[[int], Callable[[int], None]]


def _unheard(_n_tokens: int) -> Callable[[int], None]:
    """Where nobody listens."""
    return lambda _n_read: None


class Conversation:
    """What was said to a model and what it said. One answer at a time.

    `settings` are those of the next answer, `system` is the message before all turns, None for the template's own.
    """

    def __init__(self, llm: LLM, settings: GenerationSettings, system: str | None = None) -> None:
        self.llm, self.settings, self.system = llm, settings, system
        self.turns: list[dict[str, str]] = []  # each with its role and content
        self._tokens: list[int] = []  # of the last prompt and its answer

    @property
    def messages(self) -> list[dict[str, str]]:
        """All that is said, the system message first."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    @property
    def n_tokens(self) -> int:
        """Of the context, taken by the last prompt and its answer."""
        return len(self._tokens)

    @property
    def n_ctx(self) -> int:
        """Tokens that the context holds."""
        return self.llm.loaded.shape.n_ctx

    @property
    def is_full(self) -> bool:
        """Whether the context holds no other token."""
        return self.n_tokens >= self.n_ctx

    @property
    def shortage(self) -> str | None:
        """A line about a context that is full or nearly so, and what to do; None while there is room."""
        if self.n_tokens < NEARLY_FULL * self.n_ctx:
            return None
        how = "full" if self.is_full else "nearly full"
        return f"the context is {how}, {self.n_tokens} of {self.n_ctx} tokens: {WAYS_OUT}"

    def reset(self) -> None:
        """Forget all turns; the system message and the settings stay."""
        self.turns, self._tokens = [], []

    def asking(self, text: str, on_prompt: OnPrompt = _unheard) -> AbstractContextManager[Generation]:
        """The answer to `text`, to be iterated over inside. What has come of it at the end is the answer, also of one
        that was given up; where nothing has, all is as if nobody had asked.

        ContextOverflow when there is no room for an answer. TemplateError or UsageError when the template or the
        tokenizer refuses the text.
        """
        return self._answering([*self.turns, {"role": "user", "content": text}], on_prompt)

    def asking_again(self, on_prompt: OnPrompt = _unheard) -> AbstractContextManager[Generation]:
        """Another answer to the last message in the place of the one it has; otherwise as `asking`.

        UsageError before there is a message. The draws are those of before while the seed is.
        """
        turns = list(self.turns)
        while turns and turns[-1]["role"] != "user":
            turns.pop()
        if not turns:
            raise UsageError("there is no message yet that could be answered again")
        return self._answering(turns, on_prompt)

    @contextmanager
    def _answering(self, turns: list[dict[str, str]], on_prompt: OnPrompt) -> Iterator[Generation]:
        before, self.turns = self.turns, turns
        generation = None
        try:
            prompt, n_known = spliced(self._tokens, self.llm.encode_chat(self.messages), self.llm.tokenizer)
            if len(prompt) >= self.n_ctx:
                raise ContextOverflow(
                    f"the conversation has {len(prompt)} tokens and the context {self.n_ctx}: {WAYS_OUT}"
                )
            generation = self.llm.generate(prompt, self.settings, on_prompt(max(len(prompt) - n_known, 1)))
            yield generation
        finally:
            if generation is None or not (generation.text or generation.finish_reason == "stop"):
                self.turns = before
            else:
                self.turns = [*turns, {"role": "assistant", "content": generation.text}]
                self._tokens = [*prompt, *generation.tokens]

    # As a file

    def to_dict(self) -> dict[str, object]:
        """In the form of a request to OpenAI's chat completions, lever's own settings among it."""
        return {"model": self.llm.name, "messages": self.messages, **settings_to_dict(self.settings)}

    def save(self, path: Path) -> None:
        """Write it at once and whole; a file that is there must be a conversation. StorageError when that fails."""
        try:
            if path.exists():
                read_conversation(path)
        except UsageError as error:
            raise UsageError(f"{error}; nothing is written over it, take another name") from error
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
        _write(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def load(self, path: Path) -> str | None:
        """Take messages and settings from a file in their place; the name of the model it was with, if it says so.

        StorageError, or UsageError that says what is wrong; then all is as before.
        """
        document = read_conversation(path)
        settings = self.settings
        for name in SETTINGS:
            if name in document:
                with _in(path):
                    settings = with_setting(settings, name, document[name])
        unknown = sorted(document.keys() - {"model", "messages", *SETTINGS})
        if unknown:
            log.warning("%s: lever knows nothing of %s and leaves it out", path, ", ".join(unknown))
        messages = document["messages"]
        self.reset()
        self.settings = settings
        self.system = messages.pop(0)["content"] if messages[:1] and messages[0]["role"] == "system" else None
        self.turns = messages
        model = document.get("model")
        return model if isinstance(model, str) else None


WAYS_OUT = "/reset begins anew, and a larger -c holds more"


def spliced(old: Sequence[int], new: Sequence[int], tokenizer: Tokenizer) -> tuple[list[int], int]:
    """`new`, with the tokens of `old` for what both spell in the same way at their beginnings; how many these are.

    Tokens that add nothing to a text, such as control tokens, are equal only to themselves. What follows begins where
    `new` has a border between tokens, so it is cut as the tokenizer cuts it.
    """
    same = _common(_spelling(old, tokenizer), _spelling(new, tokenizer))
    borders = {end: n for n, end in _borders(old, tokenizer) if end <= same}
    n_new, n_old = max((n, borders[end]) for n, end in _borders(new, tokenizer) if end in borders)
    return [*old[:n_old], *new[n_new:]], n_old


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many numbers both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _spelling(tokens: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    return [letter for token in tokens for letter in _letters(token, tokenizer)]


def _borders(tokens: Sequence[int], tokenizer: Tokenizer) -> Iterator[tuple[int, int]]:
    """After how many tokens which length is reached."""
    return enumerate(accumulate((len(_letters(token, tokenizer)) for token in tokens), initial=0))


def _letters(token: int, tokenizer: Tokenizer) -> Sequence[int]:
    """The bytes of a token, or a letter of its own where it has none."""
    return tokenizer.token_bytes(token) or (256 + token,)


# --- settings by name ---------------------------------------------------------------------------------------


def settings_to_dict(settings: GenerationSettings) -> dict[str, object]:
    """As JSON has them, by the names of `with_setting`; what is off by being absent is left out."""
    sampler = settings.sampler
    found: dict[str, object] = {name: getattr(sampler, name) for name in SAMPLING_NUMBERS}
    if settings.max_new_tokens is not None:
        found["max_tokens"] = settings.max_new_tokens
    if settings.stops:
        found["stop"] = list(settings.stops)
    if settings.ignore_eos:
        found["ignore_eos"] = True
    if sampler.logit_bias:  # JSON knows no infinity: false bans a token, as in llama.cpp
        bias = sampler.logit_bias.items()
        found["logit_bias"] = {str(token): False if value == -math.inf else value for token, value in bias}
    return found


def with_setting(settings: GenerationSettings, name: str, value: object) -> GenerationSettings:
    """With one of SETTINGS as JSON has it; null or -1 for max_tokens is no limit. UsageError says what is wrong."""
    if SAMPLING_NUMBERS.get(name) is float:
        return _with_sampler(settings, name, _number(name, value))
    if SAMPLING_NUMBERS.get(name) is int:
        return _with_sampler(settings, name, _checked(name, value, int, "a whole number"))
    if name == "max_tokens":
        limit = None if value is None else _checked(name, value, int, "a whole number")
        return replace(settings, max_new_tokens=None if limit == -1 else limit)
    if name == "ignore_eos":
        return replace(settings, ignore_eos=_checked(name, value, bool, "true or false"))
    if name == "stop":
        stops = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise UsageError(f"stop is {value!r}: it must be a text or a list of texts")
        return replace(settings, stops=stops)
    if name == "logit_bias":
        return _with_sampler(settings, name, _bias(value))
    raise UsageError(f"there is no setting {name!r}{near(name, SETTINGS)}")


def near(word: str, words: Sequence[str]) -> str:
    """A question after an error: whether another word was meant. Empty where none is like it."""
    found = get_close_matches(word, words, n=1)
    return f": did you mean {found[0]}?" if found else ""


def _with_sampler(settings: GenerationSettings, name: str, value: object) -> GenerationSettings:
    changed: dict[str, Any] = {name: value}
    return replace(settings, sampler=replace(settings.sampler, **changed))


def _checked(name: str, value: object, kind: Any, what: str) -> Any:
    # For Python, true is a number.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UsageError(f"{name} is {value!r}: it must be {what}")
    return value


def _number(name: str, value: object) -> float:
    try:
        return float(_checked(name, value, (int, float), "a number"))
    except OverflowError:
        raise UsageError(f"{name} is {value}: it must be a number that is not as large") from None


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict) or not all(re.fullmatch("[0-9]{1,9}", token) for token in value):
        raise UsageError(f"logit_bias is {value!r}: it must have a number for each token's id")
    return {
        int(token): -math.inf if number is False else _number(f"logit_bias {token}", number)
        for token, number in value.items()
    }


# --- files --------------------------------------------------------------------------------------------------


def read_conversation(path: Path) -> dict[str, Any]:
    """What a file of a conversation holds, its messages checked and of text alone. Errors as of `load`."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is no conversation: it is no JSON") from None
    if not isinstance(document, dict) or not isinstance(document.get("messages"), list):
        raise UsageError(f"{path} is no conversation: it has no list of messages")
    with _in(path):
        return {**document, "messages": _turns(document["messages"])}


@contextmanager
def _in(path: Path) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _turns(messages: Sequence[object]) -> list[dict[str, str]]:
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(f"message {number} has no role and content")
        if message.get("role") not in (ROLES if number else ("system", *ROLES)):
            raise UsageError(
                f"message {number} is of the role {message.get('role')!r}: lever keeps user and assistant, "
                "and system as the first"
            )
        more = sorted(str(name) for name, value in message.items() if value and name not in ("role", "content", "name"))
        if more:
            raise UsageError(f"message {number} has {', '.join(more)}: lever keeps text alone")
    checked = checked_messages(messages) if messages else []  # type: ignore[arg-type]  # all are mappings
    return [{"role": message["role"], "content": message["content"]} for message in checked]


def _write(path: Path, text: str) -> None:
    """Under another name, synced, renamed: the name never holds less than all."""
    target = path.resolve()  # a link stays one
    temporary = None
    try:
        with NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            with suppress(OSError):  # it has its name by now, or is not wanted
                temporary.unlink()
