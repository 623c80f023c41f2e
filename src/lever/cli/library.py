"""`lever pull`, `lever list`, `lever rm`: the models on this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

from lever.cli import options as o
from lever.cli.console import bar, note, stdout
from lever.cli.run import DEFAULT_MODEL
from lever.memory import format_size
from lever.models import list_models, remove, resolve


def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="hf:owner/repo[:QUANT] or a name such as demo.")] = (
        DEFAULT_MODEL
    ),
    offline: o.Offline = False,
) -> None:
    """Bring a model into the cache, with the small model that drafts for it where there is one."""
    with bar() as progress:
        wanted: str | None = model
        while wanted is not None:
            resolved = resolve(wanted, offline=offline, progress=progress)
            progress.finish()
            if resolved.notice:
                note(resolved.notice)
            print(resolved.path)  # noqa: T201 - the answer
            wanted = resolved.draft


def list_(json_output: o.Json = False) -> None:
    """List the models in lever's cache and in the hub's."""
    models = list_models()
    if json_output:
        facts = [{"name": m.name, "path": str(m.path), "bytes": m.bytes, "source": m.source} for m in models]
        print(json.dumps(facts, ensure_ascii=False))  # noqa: T201 - the answer
        return
    if not models:
        note("no models yet: lever pull demo, or lever pull hf:owner/repo")
        return
    table = Table("NAME", "SIZE", "SOURCE", "PATH", box=None, pad_edge=False)
    for m in models:
        table.add_row(m.name, format_size(m.bytes), m.source, str(m.path))
    stdout.print(table, soft_wrap=True)


def rm(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names as `lever list` shows them.")],
) -> None:
    """Delete models from the caches; never a file elsewhere."""
    for model in models:
        note(f"removed {model}, {format_size(remove(model))} freed")
