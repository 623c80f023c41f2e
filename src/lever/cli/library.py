"""`lever pull`, `lever list`, `lever rm`: the models on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from lever.cli import options as o
from lever.cli.console import bar, note, printable, write, write_json, write_table
from lever.cli.run import DEFAULT_MODEL
from lever.errors import StorageError


def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="hf:owner/repo[:QUANT], or a name such as demo.")] = (
        DEFAULT_MODEL
    ),
    offline: o.Offline = False,
) -> None:
    """Bring a model into the cache, with the small model that drafts for it if it has one.

    lever pull demo
    lever pull hf:owner/repo:Q4_K_M

    The path of each file goes to stdout.
    """
    from lever.models import resolve

    with bar() as progress:
        wanted: str | None = model
        while wanted is not None:
            resolved = resolve(wanted, offline=offline, progress=progress)
            progress.finish()
            if not resolved.path.is_file():
                raise StorageError(f"{resolved.path} is a path, and there is no such file")
            if resolved.notice:
                note(f"{resolved.name}: {resolved.notice}")
            write(f"{resolved.path}\n")
            wanted = resolved.draft


def list_(json_output: o.Json = False) -> None:
    """List the models in lever's cache and in the hub's.

    lever list
    lever list --json
    """
    from rich.table import Table

    from lever.memory import format_size
    from lever.models import list_models

    models = list_models()
    if json_output:
        write_json([{"name": m.name, "path": str(m.path), "bytes": m.bytes, "source": m.source} for m in models])
        return
    if not models:
        note("no models yet: lever pull demo, or lever pull hf:owner/repo")
        return
    table = Table("NAME", "SIZE", "SOURCE", "PATH", box=None, pad_edge=False)
    for m in models:
        table.add_row(printable(m.name), format_size(m.bytes), m.source, printable(str(m.path)))
    write_table(table, wrap=False)


def rm(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="Names as lever list shows them.")],
) -> None:
    """Delete models from the caches; never a file elsewhere.

    lever rm demo demo-draft
    """
    from lever.memory import format_size
    from lever.models import remove

    for model in models:
        note(f"removed {model}, {format_size(remove(model))} freed")
