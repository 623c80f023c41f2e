"""A draft beside its target: whether it fits, and its place in the same budget. Knows no text and no tree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lever import gguf as gguf_file
from lever.arch import ModelConfig
from lever.errors import UsageError
from lever.ggml import load
from lever.ggml.devices import Devices
from lever.gguf import GGUF
from lever.loader import PYTHON, LoadedModel, ModelSettings, Progress, most_ctx, plan
from lever.owner import Owner
from lever.tokenizer.vocabulary import Kind
from lever.weights.image import Image

PART = "draft"  # of the plan of its target
TREE_ROWS = 48  # of a pass over the target, at most
LOGITS = 8  # rows of a likely path that are projected at once
NODES = 128  # of a tree that the draft has expanded, at most
STEPS = 6  # graphs that it keeps: for one, two and four nodes, and as many at the border of two lengths of context
BATCH = 128  # tokens of a prompt that it reads at once


class Companion(Owner):
    """A small model, all of it in memory, this process's or that of the device that computes it. `load` it before its
    target, whose plan has it as one part.
    """

    def __init__(
        self, path: Path, target: ModelConfig, settings: ModelSettings, target_file: GGUF, devices: Devices
    ) -> None:
        """UsageError unless its vocabulary is that of its target, token by token; the header of the latter is whole.

        Errors of its device as of `Devices.open`; who gives the devices keeps them open.
        """
        gguf = gguf_file.read(path)
        self.config = ModelConfig.from_gguf(gguf)
        self._loaded: LoadedModel | None = None
        self.n_vocab = shared_vocabulary(gguf, target_file)  # tokens that both have
        self.gguf = replace(
            gguf, metadata={k: v for k, v in gguf.metadata.items() if not isinstance(v, list) or k.startswith("lever.")}
        )
        self.device = devices.open(settings.draft_device)
        as_file = Image.of(gguf) is not None or not self.device.on_host
        n_ctx = min(most_ctx(target, settings) + NODES, self.config.n_ctx_train)
        self._settings = replace(
            settings,
            pin_percent=100,
            n_ctx=n_ctx,
            n_batch=BATCH,
            n_logits=8,
            n_tree=TREE_ROWS,
            n_steps=STEPS,
            n_moved=NODES,
            tree_attention="masked",  # `forward_nodes` is all that a draft needs
            layout="auto" if as_file else "repacked",
            grammars=False,
            device=self.device.name,
        )

    def nbytes(self, python: int) -> int:
        """Bytes that it takes; DoesNotFit if that alone is too much."""
        _, found = plan(load(), self.gguf, self.config, self._settings, python=python, device=self.device)
        return found.total - found.parts[PYTHON]

    def load(self, python: int, progress: Progress | None = None) -> LoadedModel:
        """The model in its place."""
        if self._loaded is None:
            self._loaded = LoadedModel(
                self.gguf, self.config, self._settings, python=python, device=self.device, progress=progress
            )
        return self._loaded

    def close(self) -> None:
        """Free it; it may be loaded again."""
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None


def shared_vocabulary(draft: GGUF, target: GGUF) -> int:
    """How many tokens both have. Models of one family are padded to different lengths: what one has more than the other
    must be unused. UsageError, naming the first token that differs, unless both write the same text with the same ids.
    """
    tokens = [gguf.strings("tokenizer.ggml.tokens") for gguf in (draft, target)]
    n_shared = min(map(len, tokens))
    differ = (n for n, (a, b) in enumerate(zip(*tokens, strict=False)) if a != b)
    first = next(differ, None)
    if first is None:
        used = (_first_used(gguf, n_shared) for gguf in (draft, target))
        first = next((token for token in used if token is not None), None)
    if first is None:
        return n_shared
    there, here = (repr(texts[first].decode(errors="replace")) if first < len(texts) else "nothing" for texts in tokens)
    raise UsageError(
        f"{draft.path} cannot draft for this model: token {first} is {there} there and {here} here; "
        "give a draft of the same family, or --no-draft"
    )


def _first_used(gguf: GGUF, start: int) -> int | None:
    """The first token from there on that is not marked as unused."""
    n_vocab = len(gguf.strings("tokenizer.ggml.tokens"))
    kinds = gguf.integers("tokenizer.ggml.token_type", [Kind.NORMAL] * n_vocab)
    return next((token for token in range(start, n_vocab) if kinds[token : token + 1] != [Kind.UNUSED]), None)
