"""The command line: words in, exit codes out. Text goes to stdout, everything else to stderr.

What the verbs do is imported when they do it, so that help and completion come at once.
"""

from __future__ import annotations

import logging
import sys
from io import TextIOWrapper
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from lever.cli import options as o
from lever.cli.bench import bench
from lever.cli.chat import chat
from lever.cli.console import NoteHandler, complain, write
from lever.cli.doctor import doctor
from lever.cli.info import info
from lever.cli.library import list_, pull, rm
from lever.cli.pack import pack
from lever.cli.plan import plan
from lever.cli.profile import profile
from lever.cli.rpc_serve import rpc_serve
from lever.cli.run import run
from lever.cli.serve import serve
from lever.cli.train_predictor import train_predictor
from lever.errors import DoesNotFit, LeverError, StorageError, UsageError

VARIABLES = "Each flag has a variable: --top-k is LEVER_TOP_K. The command line wins over it."


class _Verb(TyperCommand):
    """Its --help shows no type, like other switches."""

    def get_help_option(self, ctx: Any) -> TyperOption | None:
        return _switch(super().get_help_option(ctx))


class _Verbs(TyperGroup):
    def get_help_option(self, ctx: Any) -> TyperOption | None:
        return _switch(super().get_help_option(ctx))


def _switch(option: TyperOption | None) -> TyperOption | None:
    if option is not None:
        option.metavar = o.SWITCH
    return option


app = typer.Typer(
    name="lever",
    cls=_Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 1 run error, 2 usage, 3 does not fit in memory,\n"
    f"4 bad or unsupported file, 5 I/O, 130 stopped by Ctrl-C.\n\n{VARIABLES}",
)
app.command("run", cls=_Verb, epilog=VARIABLES)(run)
app.command("chat", cls=_Verb, epilog=VARIABLES)(chat)
app.command("serve", cls=_Verb, epilog=VARIABLES)(serve)
app.command("rpc-serve", cls=_Verb, epilog=VARIABLES)(rpc_serve)
app.command("plan", cls=_Verb)(plan)
app.command("bench", cls=_Verb, epilog=VARIABLES)(bench)
app.command("profile", cls=_Verb)(profile)
app.command("pack", cls=_Verb)(pack)
app.command("train-predictor", cls=_Verb)(train_predictor)
app.command("info", cls=_Verb)(info)
app.command("doctor", cls=_Verb)(doctor)
app.command("pull", cls=_Verb)(pull)
app.command("list", cls=_Verb)(list_)
app.command("rm", cls=_Verb)(rm)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from lever.ggml.lib import VERSION, find_directory

        write(f"lever {version('lever-llm')} (ggml {VERSION} in {find_directory()})\n")
        raise typer.Exit


@app.callback()
def _lever(
    _verbose: o.Verbose = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, metavar=o.SWITCH, help="Print versions and exit."
        ),
    ] = False,
) -> None:
    """Run a language model that is larger than memory, from flash, with the very same text.

    [bold]lever run[/bold] answers with a small demo model that is streamed from flash.
    [bold]lever doctor[/bold] looks at this machine and says what to mend.
    """


def main() -> None:
    """Entry point: errors become one line and an exit code."""
    if sys.stdout is not None:
        # UTF-8 whatever the locale, and the bytes of a path as they are.
        cast(TextIOWrapper, sys.stdout).reconfigure(encoding="utf-8", errors="surrogateescape")
    logging.basicConfig(handlers=[NoteHandler()])
    sys.exit(_exit_code())


def _exit_code() -> int:
    try:
        return app(standalone_mode=False, prog_name="lever") or 0
    except typer.TyperException as error:
        return _complain(UsageError(_usage(error)))
    except LeverError as error:
        return _complain(error)
    except OSError as error:
        return _complain(StorageError(f"{error.filename or 'I/O'}: {error.strerror or error}"))
    except MemoryError:
        return _complain(DoesNotFit("the system gave no more memory: lower --dram, or close other programs"))
    except KeyboardInterrupt:
        return o.INTERRUPTED


def _complain(error: LeverError) -> int:
    if str(error):
        complain(str(error))
    return error.exit_code


def _usage(error: typer.TyperException) -> str:
    """What typer says, in one line that names the variable if the value came from there. Empty after help."""
    text = " ".join(error.format_message().split())
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if not text or context is None:
        return text
    if parameter is not None and _is_from_environment(context, parameter.name):
        text = f"{parameter.envvar}: {text}"
    return f"{text.rstrip('.')} (see {context.command_path} -h)"


def _is_from_environment(context: Any, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "ENVIRONMENT"
