"""A chat: what is typed or piped in goes to a conversation or is a command; answers to stdout, the rest to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import TextIO

from lever.cli.console import Bar, bar, complain, note, stderr
from lever.cli.entry import MORE, PROMPT, Command, Message, entries, meaning
from lever.cli.options import INTERRUPTED
from lever.cli.showing import Waiting, figures, on_interrupt, short_figures, show
from lever.conversation import SETTINGS, Conversation, near, settings_to_dict, with_setting
from lever.errors import LeverError, StorageError, TemplateError, UsageError
from lever.llm import Generation, GenerationSettings
from lever.loader import ModelSettings
from lever.memory import format_size
from lever.models.cache import home
from lever.opening import Tuning, Wanted, learn, open_llm, prepare
from lever.settings import MAX_SEED
from lever.stats import RunStats

HISTORY = "chat-history"  # in lever's directory
SHORT_NAMES = {"temp": "temperature", "n": "max_tokens"}  # of settings, as the flags have them


@dataclass(frozen=True, slots=True)
class Setup:
    """How a chat is held."""

    system: str | None = None
    use_profile: bool = True  # what is known of this machine, and measured if nothing is
    keep_history: bool = True
    quiet: bool = False


def chat(wanted: Wanted, settings: ModelSettings, request: GenerationSettings, setup: Setup) -> int:
    """Answer until there is nothing more to answer; the exit code."""
    read = _reader(setup)  # before anything is planned: what it imports is of the budget
    with bar(quiet=setup.quiet) as progress, open_llm(wanted, settings, progress) as llm:
        if llm.template is None:
            raise TemplateError(f"{llm.name} has no chat template: lever run --raw goes on from a bare text")
        tuning = prepare(llm, progress, use_profile=setup.use_profile)
        progress.finish()
        talk = Chat(Conversation(llm, request, setup.system), tuning, progress, quiet=setup.quiet)
        return piped(talk) if read is None else typed(talk, read)


def _reader(setup: Setup) -> Callable[[], str] | None:
    """What reads an entry from the terminal, or None where there is none."""
    if sys.stdin is None or not sys.stdin.isatty():
        return None
    screen = next((stream for stream in (sys.stderr, sys.stdout) if stream is not None and stream.isatty()), None)
    if screen is None:
        return None
    if stderr.is_dumb_terminal:
        return partial(_read_plainly, screen)
    from lever.cli.prompting import Prompt

    history = home() / HISTORY if setup.keep_history else None
    return Prompt(screen, history, {f"/{name}": command.words for name, command in COMMANDS.items()}).read


def _read_plainly(screen: TextIO) -> str:
    """An entry from a terminal that edits lines by itself and can do no more. EOFError at the end."""

    def lines() -> Iterator[str]:
        for mark in chain([PROMPT], repeat(MORE)):
            screen.write(mark)
            screen.flush()
            line = _line()
            if not line:
                return
            yield _text(line)

    for entry in entries(lines()):
        return entry
    screen.write("\n")
    raise EOFError


def piped(talk: Chat) -> int:
    """Take entries from stdin, in lines. An error ends it, and Ctrl-C."""
    for entry in entries(map(_text, iter(_line, b""))):
        talk.take(entry)
        if talk.interrupted:
            return INTERRUPTED
        if talk.over:
            break
    return 0


def _line() -> bytes:
    """The next line of stdin as soon as it is there; nothing at its end."""
    if sys.stdin is None:
        raise StorageError("stdin is closed: there is nobody to chat with")
    try:
        return sys.stdin.buffer.readline()
    except OSError as error:
        raise StorageError(f"cannot read stdin: {error.strerror}") from error


def _text(line: bytes) -> str:
    """A line without its end; bytes that are not UTF-8 are kept as surrogate escapes."""
    return line.decode("utf-8", "surrogateescape").removesuffix("\n").removesuffix("\r")


def typed(talk: Chat, read: Callable[[], str]) -> int:
    """Take entries from a terminal, until EOFError or a second KeyboardInterrupt in a row. Errors of one are told, and
    it goes on.
    """
    llm = talk.conversation.llm
    talk.say(f"{llm.name}, context {talk.conversation.n_ctx}: /help shows what can be done, Ctrl-D ends the chat")
    warned = False
    while not talk.over:
        try:
            entry = read()
        except EOFError:
            break
        except KeyboardInterrupt:
            if warned:
                return INTERRUPTED
            warned = True
            note("Ctrl-C once more, or Ctrl-D, ends the chat")
            continue
        warned = False
        try:
            talk.take(entry)
        except LeverError as error:
            complain(str(error))
    return 0


class Chat:
    """A conversation and what can be done with it in words."""

    def __init__(self, conversation: Conversation, tuning: Tuning | None, progress: Bar, *, quiet: bool) -> None:
        self.conversation = conversation
        self.over = False
        self.interrupted = False  # the last answer, by Ctrl-C
        self._tuning, self._progress, self._quiet = tuning, progress, quiet
        self._waiting = Waiting(conversation.llm, progress, quiet=quiet)
        self._answer: Generation | None = None  # under way
        self._stats: RunStats | None = None  # of the last answer

    def say(self, text: str) -> None:
        """A line that may be left out."""
        if not self._quiet:
            note(text)

    def take(self, entry: str) -> None:
        """Answer a message, or do what a command says. LeverError when that cannot be."""
        self.interrupted = False
        match meaning(entry):
            case Message(text):
                self._show(self.conversation.asking(text, self._waiting.start))
            case Command(name, argument):
                if name not in COMMANDS:
                    words = [f"/{known}" for known in COMMANDS]
                    raise UsageError(f"there is no command /{name}{near(f'/{name}', words) or ': /help shows them'}")
                COMMANDS[name].act(self, argument.strip())

    def _show(self, asking: AbstractContextManager[Generation]) -> None:
        with on_interrupt(self._interrupt):
            with asking as self._answer:
                if self.interrupted:  # before there was anything to cancel
                    self._answer.cancel()
                show(self._answer, self._progress)
            answer, self._answer = self._answer, None
            self._stats = answer.stats
            if self._tuning is not None:
                learn(self._tuning, answer.stats)
        if answer.cancelled and not answer.text:  # nothing of it was kept
            self.say("nothing was answered: all is as it was before")
        else:
            cut = ["ended by max_tokens"] if answer.finish_reason == "length" and not self.conversation.is_full else []
            self.say("; ".join((short_figures(answer.stats), *cut)))
        if self.conversation.shortage is not None:
            note(self.conversation.shortage)

    def _interrupt(self) -> None:
        self.interrupted = True
        if self._answer is not None:
            self._answer.cancel()

    # Commands

    def help(self, _argument: str) -> None:
        for name, command in COMMANDS.items():
            note(f"{f'/{name} {command.takes}':<18} {command.help}")
        for line in KEYS:
            note(line)

    def reset(self, _argument: str) -> None:
        self.conversation.reset()
        self.say("the conversation begins anew")

    def save(self, argument: str) -> None:
        path = _path("save", argument)
        self.conversation.save(path)
        self.say(f"saved: {path}")

    def load(self, argument: str) -> None:
        path = _path("load", argument)
        model = self.conversation.load(path)
        turns = self.conversation.turns
        unanswered = bool(turns) and turns[-1]["role"] == "user"
        name = self.conversation.llm.name
        self.say(
            f"{len(turns)} messages from {path}"
            + (f", with {model} then and {name} now" if model not in (None, name) else "")
            + (": /regen answers the last one" if unanswered else "")
        )

    def system(self, argument: str) -> None:
        if argument:
            self.conversation.system = None if argument == NOTHING else argument
        system = self.conversation.system
        note("no system message but what the template has" if system is None else f"system: {system}")

    def stats(self, _argument: str) -> None:
        conversation, loaded = self.conversation, self.conversation.llm.loaded
        if self._stats is None:
            note("no answer yet")
        else:
            note(figures(self._stats, loaded.store.bytes_per_pass))
        note(f"context: {conversation.n_tokens} of {conversation.n_ctx} tokens, {len(conversation.turns)} messages")
        parts = ", ".join(f"{part} {format_size(nbytes)}" for part, nbytes in loaded.plan.parts.items() if nbytes)
        note(f"memory: {format_size(loaded.plan.total)} of {format_size(loaded.plan.budget)}: {parts}")

    def regen(self, _argument: str) -> None:
        conversation = self.conversation
        if conversation.turns and conversation.turns[-1]["role"] == "assistant":
            sampler = conversation.settings.sampler
            seed = sampler.seed + 1 if sampler.seed < MAX_SEED else 0
            conversation.settings = with_setting(conversation.settings, "seed", seed)
            self.say(f"seed {seed}" if sampler.temperature > 0 else "temperature is 0: any seed gives the same answer")
        self._show(conversation.asking_again(self._waiting.start))

    def set(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        name = name.replace("-", "_").strip("_")
        name = SHORT_NAMES.get(name, name)
        if value.strip():
            self.conversation.settings = with_setting(self.conversation.settings, name, _json(value.strip()))
        elif name and name not in SETTINGS:
            raise UsageError(f"there is no setting {name!r}{near(name, SETTINGS)}")
        values = settings_to_dict(self.conversation.settings)
        note(", ".join(f"{known} {json.dumps(values.get(known))}" for known in SETTINGS if known == name or not name))

    def exit(self, _argument: str) -> None:
        self.over = True


NOTHING = '""'  # for no system message


def _path(command: str, argument: str) -> Path:
    if not argument or "\0" in argument:
        raise UsageError(f"/{command} needs the name of a file")
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:  # ~nobody
        raise UsageError(f"/{command} {argument}: {error}") from error


def _json(text: str) -> object:
    """A value as JSON has it; anything else is a text."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value


@dataclass(frozen=True, slots=True)
class _Command:
    act: Callable[[Chat, str], None]
    help: str
    takes: str = ""
    words: tuple[str, ...] | None = ()  # that may follow; None: names of files


COMMANDS = {
    "help": _Command(Chat.help, "these lines"),
    "reset": _Command(Chat.reset, "forget what was said; the system message and the settings stay"),
    "save": _Command(Chat.save, "write the conversation and its settings, as JSON", "FILE", None),
    "load": _Command(Chat.load, "go on with a conversation from a file", "FILE", None),
    "system": _Command(Chat.system, f"how to answer from now on; {NOTHING}: nothing said; alone: show it", "TEXT"),
    "stats": _Command(Chat.stats, "all figures of the last answer, context and memory"),
    "regen": _Command(Chat.regen, "another answer to the last message, with another seed"),
    "set": _Command(Chat.set, "sampling from now on; alone: show it", "NAME VALUE", SETTINGS),
    "exit": _Command(Chat.exit, "end the chat, as Ctrl-D does"),
}
KEYS = (
    "Several lines: Alt-Enter, or a backslash at the end of a line.",
    'Or """ before and behind: so a message may begin with a slash, too.',
    "Ctrl-C ends an answer, or gives up what is typed; twice, it ends the chat.",
)
