"""`lever info`: what a model file holds and what lever would do with it. Reads the header only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lever.cli import options as o
from lever.cli.console import bar, printable, write_json, write_table
from lever.cli.run import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.table import Table

    from lever.arch import ModelConfig
    from lever.gguf import GGUF
    from lever.weights.image import Image
    from lever.weights.plan import ModelUnits


def info(
    model: o.ModelArgument = DEFAULT_MODEL,
    json_output: o.Json = False,
    offline: o.Offline = False,
) -> None:
    """Show a model's shape, types and sizes, and what a pass over it reads; of a flash image, what it says of itself.

    lever info demo
    lever info model.gguf --json
    """
    from lever import gguf as gguf_file
    from lever.arch import ModelConfig
    from lever.models import resolve
    from lever.pages import PAGE
    from lever.weights.image import Image
    from lever.weights.plan import model_units
    from lever.weights.reader import CheckedFile

    with bar() as progress:
        path = resolve(model, offline=offline, progress=progress).path
    gguf = gguf_file.read(path)
    config = ModelConfig.from_gguf(gguf)
    image = Image.of(gguf)
    units = model_units(gguf, config, CheckedFile.grain if image is not None else PAGE)
    facts = _facts(gguf, config, units) | {"image": _image_facts(gguf, image) if image is not None else None}
    if json_output:
        write_json(facts)
    else:
        write_table(_table(facts))


def _facts(gguf: GGUF, config: ModelConfig, units: ModelUnits) -> dict[str, object]:
    from collections import Counter

    from lever.gguf import IMAGE_CHECKSUMS, TYPES
    from lever.kv_cache import kv_bytes

    layers = [sum(units.units[index].nbytes for index in layer) for layer in units.layers]
    types = Counter(TYPES[t.type].name for t in gguf.tensors.values() if t.name != IMAGE_CHECKSUMS)
    return {
        "path": str(gguf.path),
        "files": len(gguf.files),
        "bytes": gguf.size,
        "gguf_version": gguf.version,
        "name": config.name,
        "architecture": config.architecture,
        "layers": config.n_layers,
        "embedding_length": config.n_embd,
        "feed_forward_length": config.n_ff,
        "heads": config.n_heads,
        "kv_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.n_vocab,
        "context_trained": config.n_ctx_train,
        "rope_scaling": config.rope.scaling,
        "tied_output": config.tied_output,
        "tensor_types": dict(types.most_common()),
        "layer_bytes": {"smallest": min(layers), "largest": max(layers)},
        "layers_bytes": sum(layers),
        "output_projection_bytes": units.projection_nbytes,
        "pass_bytes": sum(layers) + units.projection_nbytes,  # when nothing is kept in memory
        "kv_bytes_per_1024_tokens": kv_bytes(config, 1024),
        "tokenizer": gguf.text("tokenizer.ggml.model", ""),
        "pre_tokenizer": gguf.text("tokenizer.ggml.pre", ""),
        "chat_template": bool(gguf.text("tokenizer.chat_template", "")),
    }


def _image_facts(gguf: GGUF, image: Image) -> dict[str, object]:
    """What a flash image says of itself, and whether it is of use here."""
    from lever.ggml import load

    hindrance = image.hindrance(gguf, load())
    return {
        "version": image.version,
        "type": image.type,
        "layout": image.layout,
        "ggml": image.ggml,
        "source": image.source_name,
        "source_bytes": image.source_bytes,
        "source_sha256": image.source_sha256,
        "runs_here": hindrance is None,
        "hindrance": hindrance,
    }


def _table(facts: dict[str, object]) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    image = facts["image"]
    rows = {name: value for name, value in facts.items() if name != "image"}
    if isinstance(image, dict):
        rows |= {f"image {name}": value for name, value in image.items() if value is not None}
    for name, value in rows.items():
        table.add_row(name.replace("bytes", "size").replace("_", " "), printable(_readable(name, value)))
    return table


def _readable(name: str, value: object) -> str:
    from lever.memory import format_size

    if isinstance(value, dict):
        return ", ".join(f"{key} {_readable(name, part)}" for key, part in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_size(value) if isinstance(value, int) and "bytes" in name else str(value)
