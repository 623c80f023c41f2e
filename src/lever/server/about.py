"""What is said of the model that is served: its card, its fingerprint, and all that was decided about it."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lever.llm import LLM
from lever.server.replies import ModelCard
from lever.server.worker import Served


def names_of(reference: str, alias: str | None) -> tuple[str, ...]:
    """What requests may call the model; the first is what replies call it, and has no folder of this machine."""
    return tuple(dict.fromkeys(name for name in (alias, short(reference), reference) if name))


def short(reference: str) -> str:
    """Without the folder where it lies."""
    return reference if reference.startswith("hf:") else Path(reference).name


def digest(llm: LLM) -> str:
    """Differs where text may: with the model, its weights' layout, the way of attention, ggml and lever.

    Made of what is known without reading the whole model, so it is not the SHA-256 of its file.
    """
    loaded = llm.loaded
    files = [(path.stat().st_size, path.stat().st_mtime_ns) for path in llm.gguf.files]
    tensors = sorted((t.name, t.shape, t.type) for t in llm.gguf.tensors.values())
    variant = (loaded.layout, loaded.shape.tree_attention, loaded.ggml.version_text, version("lever-llm"))
    return hashlib.sha256(repr((files, llm.config, tensors, variant)).encode()).hexdigest()


def card(name: str, created: int, served: Served | None) -> ModelCard:
    """As /v1/models has it."""
    if served is None:
        return ModelCard(name, created)
    config, gguf = served.llm.config, served.llm.gguf
    meta = {
        "n_vocab": config.n_vocab,
        "n_ctx": served.llm.loaded.shape.n_ctx,
        "n_ctx_train": config.n_ctx_train,
        "architecture": config.architecture,
        "size": sum(tensor.nbytes for tensor in gguf.tensors.values()),
    }
    return ModelCard(name, created, meta)


def props(name: str, fingerprint: str, served: Served) -> dict[str, Any]:
    """Bytes and seconds; `plain_pass_s` is None where nothing is foretold."""
    llm, tuning = served.llm, served.tuning
    loaded, plan = llm.loaded, llm.loaded.plan
    return {
        "model": name,
        "architecture": llm.config.architecture,
        "n_ctx": loaded.shape.n_ctx,
        "n_vocab": llm.config.n_vocab,
        "memory": {"budget": plan.budget, "planned": plan.total, "parts": dict(plan.parts)},
        "bytes_per_pass": plan.bytes_per_pass,
        "pinned_share": plan.pinned_share,
        "direct_io": loaded.store.direct_io,
        "buffered_reason": loaded.store.buffered_reason,
        "layout": loaded.layout,
        "image": loaded.image.describe() if loaded.image is not None else None,
        "draft": short(llm.draft_name) if llm.draft_name is not None else None,
        "preset": llm.policy.name,
        "plain_pass_s": tuning.expected.seconds if tuning is not None else None,
        "threads": loaded.n_threads,
        "chat_template": llm.template is not None,
        "system_fingerprint": fingerprint,
        "version": version("lever-llm"),
        "ggml": loaded.ggml.version_text,
    }
