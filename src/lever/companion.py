"""A draft beside its target: whether it fits, and its place in the same budget. Knows no text and no tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lever import gguf as gguf_file
from lever.arch import ModelConfig
from lever.errors import UsageError
from lever.ggml import load
from lever.loader import PYTHON, LoadedModel, ModelSettings, Progress, most_ctx, plan
from lever.owner import Owner
from lever.weights.image import Image

PART = "draft"  # of the plan of its target
TREE_ROWS = 48  # of a pass over the target, at most
LOGITS = 8  # rows of a likely path that are projected at once
NODES = 128  # of a tree that the draft has expanded, at most
STEPS = 6  # graphs that it keeps: for one, two and four nodes, and as many at the border of two lengths of context
BATCH = 128  # tokens of a prompt that it reads at once


class Companion(Owner):
    """A small model, all of it in memory. `load` it before its target, whose plan has it as one part."""

    def __init__(self, path: Path, target: ModelConfig, settings: ModelSettings, vocabulary: Sequence[bytes]) -> None:
        """UsageError unless its vocabulary is that of its target, token by token."""
        gguf = gguf_file.read(path)
        self.config = ModelConfig.from_gguf(gguf)
        self._loaded: LoadedModel | None = None
        check_vocabulary(path, gguf.strings("tokenizer.ggml.tokens"), vocabulary)
        self.gguf = replace(
            gguf, metadata={k: v for k, v in gguf.metadata.items() if not isinstance(v, list) or k.startswith("lever.")}
        )
        n_ctx = min(most_ctx(target, settings) + NODES, self.config.n_ctx_train)
        self._settings = replace(
            settings,
            pin_percent=100,
            n_ctx=n_ctx,
            n_batch=BATCH,
            n_logits=8,
            n_tree=TREE_ROWS,
            n_steps=STEPS,
            tree_attention="masked",  # `forward_nodes` is all that a draft needs
            layout="auto" if Image.of(gguf) is not None else "repacked",
            grammars=False,
        )

    def nbytes(self, python: int) -> int:
        """Bytes that it takes; DoesNotFit if that alone is too much."""
        _, found = plan(load(), self.gguf, self.config, self._settings, python=python)
        return found.total - found.parts[PYTHON]

    def load(self, python: int, progress: Progress | None = None) -> LoadedModel:
        """The model in its place."""
        if self._loaded is None:
            self._loaded = LoadedModel(self.gguf, self.config, self._settings, python=python, progress=progress)
        return self._loaded

    def close(self) -> None:
        """Free it; it may be loaded again."""
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None


def check_vocabulary(path: Path, draft: Sequence[bytes], target: Sequence[bytes]) -> None:
    """UsageError, naming the first token that differs, unless both write the same text with the same ids."""
    differ = (n for n, (a, b) in enumerate(zip(draft, target, strict=False)) if a != b)
    first = next(differ, min(len(draft), len(target)) if len(draft) != len(target) else None)
    if first is not None:
        a, b = (
            repr(tokens[first].decode(errors="replace")) if first < len(tokens) else "nothing"
            for tokens in (draft, target)
        )
        raise UsageError(
            f"{path} cannot draft for this model: token {first} is {a} there and {b} here; "
            "give a draft of the same family, or --no-draft"
        )
