"""`lever pull`, `lever list`, `lever rm`: the models on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lever.cli import options as o
from lever.cli.console import bar, note, printable, write, write_json, write_table
from lever.cli.run import DEFAULT_MODEL
from lever.errors import StorageError

if TYPE_CHECKING:
    from lever.models import CachedModel


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
    """List the models in lever's cache and in the hub's, with their flash images.

    lever list
    lever list --json
    """
    from rich.table import Table

    from lever.memory import format_size
    from lever.models import list_models

    models = list_models()
    if json_output:
        write_json([_document(model) for model in models])
        return
    if not models:
        note("no models yet: lever pull demo, or lever pull hf:owner/repo")
        return
    table = Table("NAME", "SIZE", "IMAGE", "SOURCE", "PATH", box=None, pad_edge=False)
    for m in models:
        image = format_size(m.image_bytes) if m.images else "-"
        table.add_row(printable(m.name), format_size(m.bytes), image, m.source, printable(str(m.path)))
    write_table(table, wrap=False)


def _document(model: CachedModel) -> dict[str, object]:
    document = {"name": model.name, "path": str(model.path), "bytes": model.bytes, "source": model.source}
    return document | {"images": [str(image) for image in model.images], "image_bytes": model.image_bytes}


def rm(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="Names as lever list shows them.")],
) -> None:
    """Delete models, their flash images and their predictors from the caches; never a file elsewhere.

    lever rm demo demo-draft
    """
    from lever.memory import format_size
    from lever.models import remove

    for model in models:
        removed = remove(model)
        images = ["its flash images"] * bool(removed.image_bytes and removed.bytes)
        what = [model, *images, *["its predictors"] * bool(removed.predictor_bytes)]
        named = " and ".join([", ".join(what[:-1]), what[-1]] if len(what) > 1 else what)
        note(f"removed {named}, {format_size(removed.total)} freed")
