"""The line that is typed into: keys, history and completion on a terminal, by prompt-toolkit. Knows no meaning."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.defaults import create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle

from lever.cli.entry import MORE, PROMPT, is_open

log = logging.getLogger(__name__)

PATHS = None  # in the place of a command's words: names of files


class Prompt:
    """Entries as they are typed, one after the other."""

    def __init__(self, screen: TextIO, history: Path | None, commands: Mapping[str, Sequence[str] | None]) -> None:
        """On the terminal `screen`. `commands` are offered when Tab is pressed, each with the words that may follow.

        What was typed is kept in the file `history`, that of others too, where it is given.
        """
        output = create_output(screen)
        if isinstance(output, Vt100_Output):
            output.enable_cpr = False  # not every terminal answers, and nothing here needs to know where the cursor is
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=MORE,
            complete_style=CompleteStyle.READLINE_LIKE,
            completer=_Words(commands),
            history=_history(history),
            key_bindings=_keys(),
            enable_suspend=True,
            output=output,
        )

    def read(self) -> str:
        """The next entry, empty if Ctrl-C gave one up; KeyboardInterrupt if there was none. EOFError for Ctrl-D."""
        return self._session.prompt()


def _keys() -> KeyBindings:
    keys = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)

    @keys.add("enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.newline(copy_margin=False)
        elif _goes_on(buffer):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c", filter=typing)
    @keys.add("<sigint>")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.app.exit(result="", style="class:aborting")
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys


def _goes_on(buffer: Buffer) -> bool:
    return buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\")


class _Words(Completer):
    """Completes commands and what may follow them."""

    def __init__(self, commands: Mapping[str, Sequence[str] | None]) -> None:
        self._commands = commands
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        command, space, word = document.text_before_cursor.partition(" ")
        if not space:
            yield from _beginning_with(command, self._commands)
        elif command in self._commands:
            words = self._commands[command]
            if words is PATHS:
                yield from self._paths.get_completions(Document(word), complete_event)
            else:
                yield from _beginning_with(word, words)


def _beginning_with(typed: str, words: Iterable[str]) -> Iterable[Completion]:
    return (Completion(word, -len(typed)) for word in words if typed and word.startswith(typed))


class _Kept(FileHistory):
    """In a file for its owner's eyes; one that can no longer be written is told of."""

    def store_string(self, string: str) -> None:
        try:
            super().store_string(string)
        except OSError as error:
            log.warning("what was typed is not kept: %s", error)


def _history(path: Path | None) -> History:
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        path.chmod(0o600)
    except OSError as error:
        log.warning("what is typed is not kept: %s", error)
        return InMemoryHistory()
    return _Kept(path)
