"""Writes docs/commands.md: every verb and flag, from the command line itself.

    python docs/make_commands.py

`tests/unit/test_docs.py` says when it has to be run again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from lever.cli import app

HEAD = """# Commands

Made from `--help` by `docs/make_commands.py`: every verb with its flags, their variables and defaults. Text goes to
stdout, everything else to stderr. The command line wins over a variable. A flag that may be given often has its
variable split at blanks, but for `LEVER_STOP`, which is one text.
"""
TAG = re.compile(r"(?<!\\)\[/?[a-z]+\]")


def document() -> str:
    """The whole file."""
    root: Any = typer.main.get_command(app)
    verbs = [line for name, verb in root.commands.items() for line in _verb(name, verb)]
    codes = _plain(root.epilog).split("\n\n")[0].replace("\n", " ")
    return "\n".join([HEAD, codes, *verbs]) + "\n"


def _verb(name: str, verb: Any) -> Iterator[str]:
    arguments = [p for p in verb.params if p.param_type_name == "argument"]
    options = [p for p in verb.params if p.param_type_name == "option" and not p.hidden]
    words = " ".join(_word(p) for p in arguments)
    yield ""
    yield f"## lever {name}"
    yield ""
    yield f"`lever {name} {words} [flags]`".replace("  ", " ")
    yield ""
    yield from _help(verb.help)
    rows = [_argument(p) for p in arguments if p.help] + [_option(p) for p in options]
    if rows:
        yield "| flag | variable | what it does |"
        yield "|---|---|---|"
        yield from rows


def _word(argument: Any) -> str:
    word = f"{argument.metavar}{'...' * (argument.nargs == -1)}"
    return word if argument.required else f"[{word}]"


def _help(text: str) -> Iterator[str]:
    """Paragraphs; those of commands alone are code."""
    for paragraph in _plain(text).strip().split("\n\n"):
        lines = [line.strip() for line in paragraph.splitlines()]
        is_code = any(line.startswith("lever ") for line in lines) and all("lever " in line for line in lines)
        yield from ["```", *lines, "```"] if is_code else lines
        yield ""


def _argument(parameter: Any) -> str:
    return f"| `{parameter.metavar or parameter.name.upper()}` | | {_cell(parameter.help)} |"


def _option(parameter: Any) -> str:
    value = f" {parameter.metavar}" if parameter.metavar else ""
    names = ", ".join(f"`{name}{value if name.startswith('--') else ''}`" for name in parameter.opts)
    variable = f"`{parameter.envvar}`" if parameter.envvar else ""
    return f"| {names} | {variable} | {_cell(parameter.help)}{_default(parameter)} |"


def _default(parameter: Any) -> str:
    if not parameter.show_default or not parameter.metavar or parameter.default in (None, "", [], ()):
        return ""
    return f" (default: {getattr(parameter.default, 'value', parameter.default)})"


def _cell(text: str | None) -> str:
    return " ".join(_plain(text or "").split()).replace("|", "\\|")


def _plain(text: str) -> str:
    """Without the marks of the terminal."""
    return re.sub(r"\\\[(default: .*?)\]", r"(\1)", TAG.sub("", text)).replace("\\[", "[")


if __name__ == "__main__":
    Path(__file__).with_name("commands.md").write_text(document())
