"""What a predictor is fitted to: hidden states of a target behind middle layers and the last, and a draft's candidates.

The text is the target's own: several answers to a prompt at once, branches behind it in one KV cache, the first greedy
and the others drawn. So no corpus is needed; one that is given is read instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from lever.draft import CANDIDATES, Draft
from lever.errors import StorageError
from lever.model import Model
from lever.sample import Sampler
from lever.settings import SamplerSettings

NOTHING = -1  # in the place of a candidate
TEMPERATURES = (0.6, 0.8, 1.0)  # of branches behind the first, which is greedy, in turn


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """n positions. `hidden` by layer and `final`, F16 [n, n_embd]: states normed to a mean square of 1, and as the
    output projection gets them. `best` [n]: the target's likeliest token. `tokens` and `chances` [n, CANDIDATES]: the
    draft's candidates and their probabilities.
    """

    hidden: Mapping[int, NDArray[np.float16]]
    final: NDArray[np.float16]
    best: NDArray[np.int32]
    tokens: NDArray[np.int32]
    chances: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.best)

    def save(self, path: Path) -> None:
        """Write it; the file gets its name when it is whole."""
        part = path.with_name(path.name + ".part")
        with part.open("wb") as file:
            arrays: dict[str, Any] = {f"hidden.{layer}": states for layer, states in self.hidden.items()}
            arrays |= {"final": self.final, "best": self.best, "tokens": self.tokens, "chances": self.chances}
            np.savez(file, **arrays)
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Record:
        """What `save` wrote; StorageError where that is not there any more."""
        try:
            with np.load(path) as found:
                hidden = {int(name[7:]): found[name] for name in found.files if name.startswith("hidden.")}
                return cls(hidden, found["final"], found["best"], found["tokens"], found["chances"])
        except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
            raise StorageError(f"{path} cannot be read: {error}") from error


class Recorder:
    """Records a target and a draft; both are loaded, and nothing else uses them meanwhile."""

    def __init__(self, target: Model, draft: Draft, layers: Sequence[int], end_tokens: frozenset[int]) -> None:
        self._target, self._draft, self._layers, self._end_tokens = target, draft, layers, end_tokens

    def answers(
        self,
        prompt: Sequence[int],
        n_branches: int,
        n_tokens: int,
        seed: int,
        after_step: Callable[[int], None] = lambda _n_positions: None,
    ) -> Record:
        """Answers to a prompt, of up to so many tokens each; `after_step` is told of all positions so far."""
        model = self._target
        room = model.shape.n_ctx - len(prompt)
        model.kv.truncate(0)
        draws = [_sampler(seed + n, _temperature(n), model.config.n_vocab).draw for n in range(n_branches)]
        logits = self._read(prompt)
        branches = [[draw(logits, prompt, len(prompt))] for draw in draws]
        seen: list[list[int]] = [[] for _ in branches]  # rows behind the prompt
        growing, found, rows = list(range(n_branches)), _Found(self._layers), list[int]()  # rows: of which branch
        for _ in range(n_tokens):
            growing = [n for n in growing if branches[n][-1] not in self._end_tokens]
            first = len(rows)
            if not growing or first + len(growing) > room:
                break
            rows += growing
            visible = np.zeros((len(growing), len(rows)), bool)
            for row, n in enumerate(growing):
                seen[n].append(first + row)
                visible[row, seen[n]] = True
            tokens, depths = [branches[n][-1] for n in growing], [len(seen[n]) for n in growing]
            model.forward_nodes(tokens, first, depths, visible, found.seeing(model, len(growing)))
            for n, logits in zip(growing, found.project(model, len(growing)), strict=True):
                branches[n].append(draws[n](logits, [*prompt, *branches[n]], len(prompt) + len(branches[n])))
            after_step(len(rows))
        model.kv.truncate(0)
        behind = [
            iter(list(self._draft.along([*prompt, *branch[: len(own)]], len(prompt))))
            for branch, own in zip(branches, seen, strict=True)
        ]
        return found.record([next(behind[n]) for n in rows], model.config.n_embd)

    def text(self, tokens: Sequence[int]) -> Record:
        """Behind each token of a text that fits in the context."""
        model, found = self._target, _Found(self._layers)
        model.kv.truncate(0)
        n_batch = model.shape.n_batch
        for start in range(0, len(tokens), n_batch):
            part = tokens[start : start + n_batch]
            model.forward(part, found.seeing(model, len(part)))
            for _ in found.project(model, len(part)):
                pass
        model.kv.truncate(0)
        return found.record(list(self._draft.along(tokens, 0)), model.config.n_embd)

    def _read(self, prompt: Sequence[int]) -> NDArray[np.float32]:
        n_batch = self._target.shape.n_batch
        for start in range(0, len(prompt), n_batch):
            part = prompt[start : start + n_batch]
            self._target.forward(part)
        logits: NDArray[np.float32] = self._target.project([len(part) - 1])[0].copy()
        return logits


class _Found:
    """States of passes, as they come."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._hidden: dict[int, list[NDArray[np.float16]]] = {layer: [] for layer in layers}
        self._final: list[NDArray[np.float16]] = []
        self._best: list[int] = []

    def seeing(self, model: Model, n: int) -> Callable[[int], None]:
        """Takes the states of so many rows behind each layer that it is told of."""

        def see(layer: int) -> None:
            if layer in self._hidden:
                states = model.hidden(n)
                length = np.sqrt(np.mean(np.square(states), axis=1, keepdims=True) + model.config.norm_eps)
                self._hidden[layer].append((states / length).astype(np.float16))

        return see

    def project(self, model: Model, n: int) -> list[NDArray[np.float32]]:
        """The pass is done; logits of its rows."""
        found, width = [], model.shape.n_logits
        for start in range(0, n, width):
            rows = range(start, min(start + width, n))
            logits = model.project(rows).copy()
            self._final.append(model.normed(len(rows)).astype(np.float16))
            self._best += logits.argmax(axis=1).tolist()
            found += list(logits)
        return found

    def record(self, candidates: Sequence[Sequence[tuple[int, float]]], n_embd: int) -> Record:
        """All of it, perhaps nothing, with the draft's candidates of each position."""
        tokens = np.full((len(candidates), CANDIDATES), NOTHING, np.int32)
        chances = np.zeros((len(candidates), CANDIDATES), np.float32)
        for position, behind in enumerate(candidates):
            for place, (token, chance) in enumerate(behind):
                tokens[position, place], chances[position, place] = token, chance
        none = np.empty((0, n_embd), np.float16)
        hidden = {layer: np.concatenate([none, *states]) for layer, states in self._hidden.items()}
        return Record(hidden, np.concatenate([none, *self._final]), np.asarray(self._best, np.int32), tokens, chances)


def _temperature(branch: int) -> float:
    return TEMPERATURES[(branch - 1) % len(TEMPERATURES)] if branch else 0.0


def _sampler(seed: int, temperature: float, n_vocab: int) -> Sampler:
    return Sampler(SamplerSettings(seed=seed, temperature=temperature), n_vocab)
