"""Tiny models opened and asked for their logits, for tests that compare bits or numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from lever.arch import ModelConfig
from lever.gguf import read
from lever.loader import LoadedModel, ModelSettings
from lever.weights.plan import ModelUnits, Plan, make_plan
from lever.weights.reader import ReadInto, read_into
from tests import tiny

N_TOKENS = 290  # beyond 256, where attention goes over more slots
# Of 16 kinds only: each distinct one of a pass is a read of its embedding.
TOKENS = [int(token) for token in 10 + 15 * np.random.default_rng(1).integers(0, 16, N_TOKENS)]

Logits = NDArray[np.float32]


def tiny_of_type(path: Path, kind: str) -> Path:
    """A small model whose queries and FFN outputs are of one type, and the embedding and output where that is quick."""
    slow = kind.startswith(("IQ3", "IQ4"))  # ggml takes a second to quantise a whole model to these
    parts = ("attn_q", "ffn_down") if slow else ("attn_q", "ffn_down", "token_embd", "output")
    return tiny.tiny_model(path, n_ff=256, type=dict.fromkeys(parts, kind) | {"*": "F32"})


@contextmanager
def open_tiny(
    path: Path, *, device: ReadInto = read_into, stream_projection: bool = False, **settings: Any
) -> Iterator[LoadedModel]:
    """A loaded model with memory to spare, so that settings alone decide what is pinned; read through `device`."""
    gguf = read(path)
    pin_percent = None if settings.get("layout") == "repacked" else 0
    defaults = {"dram": 1 << 40, "n_ctx": 512, "n_logits": 32, "pin_percent": pin_percent}
    chosen = ModelSettings(**defaults | settings)
    with ExitStack() as stack:
        stack.enter_context(mock.patch("lever.weights.reader.read_into", device))
        if stream_projection:
            stack.enter_context(mock.patch("lever.loader.make_plan", plan_without_projection))
        loaded = LoadedModel(gguf, ModelConfig.from_gguf(gguf), chosen)
    with loaded:
        yield loaded


def plan_without_projection(units: ModelUnits, *rest: Any, n_slots: int, **options: Any) -> Plan:
    """What a budget gives that has room for the layers asked for and not for the projection."""
    plan = make_plan(units, *rest, n_slots=n_slots, **options)
    return replace(plan, pinned=plan.pinned.difference(plan.units.projection), n_slots=n_slots)


def logits_of(loaded: LoadedModel, tokens: Sequence[int]) -> Logits:
    """Logits [len(tokens), n_vocab] of the rows that `tokens` append to the cache."""
    model, parts = loaded.model, []
    for start in range(0, len(tokens), loaded.shape.n_batch):
        part = tokens[start : start + loaded.shape.n_batch]
        model.forward(part)
        for row in range(0, len(part), loaded.shape.n_logits):
            rows = range(row, min(row + loaded.shape.n_logits, len(part)))
            parts.append(model.project(rows).copy())
    return np.concatenate(parts)


def tiny_logits(path: Path, tokens: Sequence[int] = TOKENS, **settings: Any) -> Logits:
    """Logits of every token of a fresh model."""
    with open_tiny(path, **settings) as loaded:
        return logits_of(loaded, tokens)


def same_bits(a: Logits, b: Logits) -> bool:
    """Whether two arrays are equal bit for bit: signs of zeros too, and no NaN anywhere."""
    return bool(np.isfinite(a).all()) and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def relative_error(found: Logits, expected: NDArray[np.float64]) -> float:
    """Root mean square of the difference over that of what is expected."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def overflowing(path: Path) -> Path:
    """A model that has values beyond the largest number of F16 at token 7 alone."""
    fields = tiny.tiny_fields(n_ff=256, type="F32")
    embedding = np.frombuffer(fields.tensor("token_embd.weight").data, np.float32).reshape(-1, 256).copy()
    embedding[:, 0] = 0
    embedding[7] = np.eye(256, dtype=np.float32)[0]
    fields.tensor("token_embd.weight").data = embedding.tobytes()
    values = np.frombuffer(fields.tensor("blk.0.attn_v.weight").data, np.float32).reshape(-1, 256).copy()
    values[:, 0] = 1e5
    fields.tensor("blk.0.attn_v.weight").data = values.tobytes()
    return fields.write(path)
