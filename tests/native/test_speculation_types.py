"""Guesses change no bit, on other kinds of weights and models: from the text alone, and by a draft of random weights.

Beside `test_speculation`, which takes one model through everything that may happen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lever.draft import Draft
from lever.policies import PRESETS, preset
from tests import tiny
from tests.models import TOKENS, open_tiny
from tests.native.test_speculation import SAMPLERS, Answer, Answers, sampler

KINDS: dict[str, dict[str, Any]] = {
    "llama, F32, pinned": {"type": "F32", "rope_freqs": True},
    "qwen2, Q8_0, pinned": {"arch": "qwen2", "type": "Q8_0"},
    "qwen2, Q4_0, repacked": {"arch": "qwen2", "type": "Q4_0"},
    "qwen3, Q4_0": {"arch": "qwen3", "head_dim": 128, "type": "Q4_0", "tied": True},
    "llama, Q5_K": {"type": {"ffn_down": "Q6_K", "*": "Q5_K"}},
}
REPEATS = [*TOKENS[:40], *TOKENS[:20]]  # its end stands in it before
N = 14  # new tokens


class Kind:
    """A target for trees, the same one plain, and a draft that knows nothing of it."""

    def __init__(self, name: str, folder: Path, stack: ExitStack) -> None:
        shape: dict[str, Any] = {"n_layers": 2, "n_ff": 256, "n_vocab": 384} | KINDS[name]
        path = tiny.tiny_model(folder / "target.gguf", **shape)
        other = tiny.tiny_model(folder / "draft.gguf", **shape | {"n_layers": 1, "seed": 9})
        how: dict[str, Any] = {"layout": "repacked"} if "repacked" in name else {}
        how |= {"pin_percent": 100} if "pinned" in name else {}
        self.target = stack.enter_context(open_tiny(path, n_tree=26, n_logits=8, **how))
        self.plain = Answers(stack.enter_context(open_tiny(path, n_logits=1, **how)))
        self.draft = Draft(
            stack.enter_context(open_tiny(other, n_tree=26, n_logits=4, n_steps=3, **{**how, "pin_percent": 100})).model
        )
        self.known: dict[str, Answer] = {}

    def expected(self, name: str) -> Answer:
        if name not in self.known:
            self.known[name] = self.plain.to(REPEATS, sampler(name).draw, n=N)
        return self.known[name]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    with ExitStack() as stack:
        yield Kind(request.param, tmp_path_factory.mktemp("types"), stack)


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_preset_gives_the_bits_of_plain_decoding_with_a_draft_of_random_weights_and_with_none(
    kind: Kind, name: str
) -> None:
    draw, options = sampler(name).draw, {"n": N, "temperature": SAMPLERS[name]["temperature"]}
    for policy in PRESETS.values():
        draft = kind.draft if policy.drafts else None
        assert Answers(kind.target, draft, policy).to(REPEATS, draw, **options).same(kind.expected(name))
    assert Answers(kind.target, None, preset("lever")).to(REPEATS, draw, **options).same(kind.expected(name))


def test_guesses_from_the_text_are_checked_and_some_of_them_hold(kind: Kind) -> None:
    """A greedy tiny model soon says the same again and again, or it is made to by a draw that repeats the prompt."""
    cycle = TOKENS[:9]
    text = cycle * 3

    def again(_logits: Any, _history: Any, position: int) -> int:
        return cycle[position % 9]

    found = Answers(kind.target, None, preset("lever")).to(text, again, n=40)
    assert found.same(kind.plain.to(text, again, n=40))
    assert found.stats.looked_up > 0
    assert found.stats.accepted > 20
    assert (found.stats.drafted, found.stats.draft_s) == (0, 0.0)
