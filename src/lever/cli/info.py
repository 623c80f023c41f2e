"""`lever info`: what a model file holds and what lever would do with it. Reads the header only."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated

import typer
from rich.table import Table

from lever import gguf as gguf_file
from lever.arch import ModelConfig
from lever.cli import options as o
from lever.cli.console import bar, stdout
from lever.cli.run import DEFAULT_MODEL
from lever.gguf import GGUF, TYPES
from lever.kv_cache import kv_bytes
from lever.memory import format_size
from lever.models import resolve
from lever.weights.plan import ModelUnits, model_units


def info(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for run.")] = DEFAULT_MODEL,
    json_output: o.Json = False,
    offline: o.Offline = False,
) -> None:
    """Show a model's shape, types and sizes, and what a pass over it reads."""
    with bar() as progress:
        path = resolve(model, offline=offline, progress=progress).path
    gguf = gguf_file.read(path)
    config = ModelConfig.from_gguf(gguf)
    facts = _facts(gguf, config, model_units(gguf, config))
    if json_output:
        print(json.dumps(facts, ensure_ascii=False))  # noqa: T201 - the answer
    else:
        stdout.print(_table(facts))


def _facts(gguf: GGUF, config: ModelConfig, units: ModelUnits) -> dict[str, object]:
    layers = [units.units[index].nbytes for index in units.layers]
    types = Counter(TYPES[tensor.type].name for tensor in gguf.tensors.values())
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
        "kv_bytes_per_1024_tokens": kv_bytes(config, 1024),
        "tokenizer": gguf.text("tokenizer.ggml.model", ""),
        "pre_tokenizer": gguf.text("tokenizer.ggml.pre", ""),
        "chat_template": bool(gguf.text("tokenizer.chat_template", "")),
    }


def _table(facts: dict[str, object]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), _readable(name, value), style=None)
    return table


def _readable(name: str, value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_readable(name, part)}" for key, part in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_size(value) if isinstance(value, int) and "bytes" in name else str(value)
