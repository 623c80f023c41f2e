"""The command line: words in, exit codes out. Text goes to stdout, everything else to stderr."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from lever.cli.console import complain
from lever.cli.doctor import doctor
from lever.cli.info import info
from lever.cli.library import list_, pull, rm
from lever.cli.run import run
from lever.errors import LeverError
from lever.ggml.lib import VERSION as GGML_VERSION
from lever.ggml.lib import find_directory

app = typer.Typer(
    name="lever",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit codes: 0 ok, 1 run error, 2 usage, 3 does not fit in memory, 4 bad or unsupported file, 5 I/O. "
    "Every flag can be set by a variable, named beside it.",
)
app.command("run")(run)
app.command("info")(info)
app.command("doctor")(doctor)
app.command("pull")(pull)
app.command("list")(list_)
app.command("rm")(rm)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lever {version('lever-llm')} (ggml {GGML_VERSION} in {find_directory()})")  # noqa: T201 - the answer
        raise typer.Exit


@app.callback()
def _lever(
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", envvar="LEVER_VERBOSE", help="Say more on stderr.")
    ] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Run a language model that is larger than memory, from flash, with the very same text.

    Start with [bold]lever run[/bold], which answers with a small demo model streamed from flash, or
    [bold]lever doctor[/bold], which looks at this machine.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="lever: %(message)s", stream=sys.stderr
    )


def main() -> None:
    """Entry point: errors become one line and an exit code."""
    try:
        app()
    except LeverError as error:
        complain(str(error))
        sys.exit(error.exit_code)
