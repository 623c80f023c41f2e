"""What real models say, against llama.cpp: the same tokens, with the same log-probabilities.

Products with quantised weights round activations to 8 bits, so that a difference in the last digit of a sum grows
within a few layers to the size of that rounding. On llama.cpp's own kernels, where nothing differs, everything that
lever decides is judged to the last digit; so are lever's kernels on weights that are not quantised. On lever's kernels
and quantised weights, the two may differ by what the rounding makes, and no more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from lever import gguf
from lever.arch import ModelConfig
from lever.chat import ChatTemplate
from lever.engine import Engine
from lever.ggml.lib import Library
from lever.gguf import GGUF, TYPES
from lever.llm import LLM, GenerationSettings
from lever.loader import LoadedModel, ModelSettings
from lever.models import resolve
from lever.sample import Sampler, top_logprobs
from lever.settings import SamplerSettings
from lever.stats import RunStats
from lever.tokenizer import Tokenizer
from tests.completions import Completions, Drawn, ggml_library, ggml_version
from tests.models import Logits, same_bits
from tests.tiny import Fields, Tensor, dequantise

pytestmark = pytest.mark.real

N_TOKENS = 64
QUESTIONS = {
    "code": "Write a Python function that returns the n-th Fibonacci number without recursion, and explain each line.",
    "math": "A train leaves at 9:15 and travels 210 km at 84 km/h. When does it arrive? Show each step.",
    "chat": "My neighbour plays loud music every night. How can I talk to him about it without a fight?",
    "list": "List ten things to take on a hike of two days in the mountains, each with one short reason.",
    "translation": "Translate each word into German, French and Spanish, as a table: apple, bridge, cloud, door, "
    "evening, forest, garden, house, island, journey.",
}
CONTINUATION = "The river had been rising for three days when the mayor finally rang the bell. At first nobody"
PROMPTS = [*QUESTIONS, "continuation"]

# Natural log-probabilities. On equal kernels; the last digit of a float32 makes less than 0.001 of it.
EXACT = 0.02
# llama.cpp rounds queries and shares of attention to 16 bits, lever does not. Seen: 0.020.
HALF = 0.04
# What 8-bit activations make of it. Seen over all models: 0.15 root mean square, 0.006 in the mean, and tokens that
# differ where the gap is 0.30 in one of the two engines. Of llama.cpp with and without flash attention: 0.15 and 0.24.
# A gap is the difference of two such errors, so three times their root mean square is what 2000 tokens can show.
ROUNDING, ROUNDING_MEAN, ROUNDING_NEAR_TIE = 0.2, 0.02, 0.45


@dataclass(frozen=True)
class RealModel:
    """A model file, and the prompts as its tokens."""

    path: Path
    gguf: GGUF
    config: ModelConfig
    prompts: dict[str, list[int]]

    def open(self, **settings: Any) -> LoadedModel:
        """In memory as a whole, unless `settings` say otherwise."""
        given = {"dram": 1 << 40, "pin_percent": 100, "n_ctx": 512, "n_threads": 2, "n_logits": N_TOKENS}
        return LoadedModel(self.gguf, self.config, ModelSettings(**(given | settings)))


def real_model(path: Path) -> RealModel:
    header = gguf.read(path)
    tokenizer = Tokenizer.from_gguf(header)
    template = ChatTemplate.from_gguf(header, tokenizer)
    assert template is not None
    prompts = {key: template.encode(tokenizer, [{"role": "user", "content": text}]) for key, text in QUESTIONS.items()}
    prompts["continuation"] = tokenizer.encode(CONTINUATION)
    return RealModel(path, header, ModelConfig.from_gguf(header), prompts)


SLOW = pytest.mark.slow  # minutes


@pytest.fixture(
    scope="module", params=[pytest.param("demo", marks=SLOW), pytest.param("demo-draft", marks=SLOW), "smollm2"]
)
def model(request: pytest.FixtureRequest, smollm2: Path) -> RealModel:
    return real_model(smollm2 if request.param == "smollm2" else resolve(request.param).path)


Answers = Callable[[str], list[Drawn]]


def answers_of(model: RealModel) -> Answers:
    """llama.cpp's answer to each of the prompts, asked for once."""
    judge = Completions(model.path)

    @functools.cache
    def answer(prompt: str) -> list[Drawn]:
        found = judge.greedy(model.prompts[prompt], N_TOKENS)
        assert len(found) == N_TOKENS, "llama.cpp has ended its answer: ask for something longer"
        return found

    return answer


@pytest.fixture(scope="module")
def answers(model: RealModel) -> Answers:
    return answers_of(model)


# Our side


@dataclass(frozen=True)
class Answer:
    """Tokens, and the logits [len(tokens), n_vocab] that each was drawn from."""

    tokens: list[int]
    logits: Logits


def decoded(loaded: LoadedModel, prompt: Sequence[int], n_tokens: int) -> Answer:
    """A greedy answer, one pass for each token."""
    engine = Engine(loaded.model, loaded.store, loaded.n_threads)
    draw = Sampler(SamplerSettings(temperature=0, seed=0), loaded.config.n_vocab).draw
    steps = engine.steps(prompt, draw, max_new_tokens=n_tokens, end_tokens=frozenset(), stats=RunStats())
    taken = [(step.token, step.logits.copy()) for step in steps]
    return Answer([token for token, _ in taken], np.stack([logits for _, logits in taken]))


def along(loaded: LoadedModel, prompt: Sequence[int], tokens: Sequence[int]) -> Answer:
    """What would be said after the prompt, and after each of `tokens` but the last, from one pass over all of them."""
    ids = [*prompt, *tokens[:-1]]
    loaded.model.kv.truncate(0)
    loaded.model.forward(ids)
    logits = loaded.model.project(range(len(prompt) - 1, len(ids))).copy()
    return Answer([int(token) for token in logits.argmax(axis=-1)], logits)


# The comparison


def deviations(logits: Logits, drawn: Drawn) -> list[float]:
    """By how much each of llama.cpp's likeliest tokens is likelier here, in natural log-probability."""
    ours = dict(top_logprobs(logits, 100))
    return [ours[token] - logprob for token, logprob in drawn.top.items()]


def tie_gap(token: int, logits: Logits, drawn: Drawn) -> float:
    """Where the tokens differ: the gap between the two candidates, in the engine that sees the larger one."""
    ours = dict(top_logprobs(logits, 100))
    return max(ours[token] - ours[drawn.token], drawn.top[drawn.token] - drawn.top[token])


def assert_same(answer: Answer, expected: Sequence[Drawn], within: float) -> None:
    """Log-probabilities are equal, and so are the tokens up to a near tie, where the texts part.

    Two candidates that are off by `within` each can change places when their gap is no larger than twice that.
    """
    for token, logits, drawn in zip(answer.tokens, answer.logits, expected, strict=True):
        assert max(map(abs, deviations(logits, drawn))) <= within
        if token != drawn.token:
            assert tie_gap(token, logits, drawn) <= 2 * within
            return


# On llama.cpp's kernels


@pytest.fixture(scope="module")
def llama_cpps_ggml(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """That of the package, of whatever version; keys and values are multiplied as they lie in the cache.

    lever widens them to 32 bits first, which is more precise, and would differ from llama.cpp.
    """
    directory = tmp_path_factory.mktemp("ggml")
    for name in ("libggml-base.so", "libggml-cpu.so"):
        (directory / name).symlink_to(ggml_library())
    with mock.patch("lever.ggml.lib.VERSION", ggml_version()):
        library = Library(directory)
    with mock.patch.object(library, "cast", lambda _context, tensor, _kind: tensor):
        yield library


@contextmanager
def opened_on(library: Library, model: RealModel) -> Iterator[LoadedModel]:
    """The model on this ggml, with no more rows in a graph than there are tokens, as in llama.cpp."""
    with mock.patch("lever.loader.load", return_value=library), mock.patch("lever.loader.row_multiple", return_value=1):
        loaded = model.open()
    with loaded:
        yield loaded


@pytest.fixture(scope="module")
def on_llama_cpps_kernels(model: RealModel, llama_cpps_ggml: Library) -> Iterator[LoadedModel]:
    with opened_on(llama_cpps_ggml, model) as loaded:
        yield loaded


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_greedy_answer_is_llama_cpps_on_its_kernels(
    on_llama_cpps_kernels: LoadedModel, model: RealModel, answers: Answers, prompt: str
) -> None:
    answer = decoded(on_llama_cpps_kernels, model.prompts[prompt], N_TOKENS)
    assert_same(answer, answers(prompt), EXACT)


def test_an_answer_far_into_the_context_is_llama_cpps_on_its_kernels(llama_cpps_ggml: Library, smollm2: Path) -> None:
    """From 256 positions on, attention goes over more slots."""
    model = real_model(smollm2)
    words = model.prompts["continuation"] * 20
    judge = Completions(model.path)
    with opened_on(llama_cpps_ggml, model) as loaded:
        for n_prompt in (250, 291):
            expected = judge.greedy(words[:n_prompt], 16)
            assert_same(decoded(loaded, words[:n_prompt], 16), expected, EXACT)


# On lever's kernels


def test_answers_are_llama_cpps_up_to_the_rounding_of_activations(model: RealModel, answers: Answers) -> None:
    """Here llama.cpp's answers are followed, so that no near tie ends the comparison."""
    found: list[float] = []
    with model.open() as loaded:
        for key, prompt in model.prompts.items():
            expected = answers(key)[:24]
            answer = along(loaded, prompt, [drawn.token for drawn in expected])
            for token, logits, drawn in zip(answer.tokens, answer.logits, expected, strict=True):
                found += deviations(logits, drawn)
                assert token == drawn.token or tie_gap(token, logits, drawn) <= ROUNDING_NEAR_TIE
    assert np.sqrt(np.mean(np.square(found))) <= ROUNDING
    assert abs(np.mean(found)) <= ROUNDING_MEAN


def test_a_streamed_answer_has_the_bits_of_one_pass_in_memory(model: RealModel) -> None:
    with model.open(pin_percent=0) as loaded:
        assert loaded.plan.pinned_share == 0
        streamed = decoded(loaded, model.prompts["math"], 16)
    with model.open() as loaded:
        pinned = along(loaded, model.prompts["math"], streamed.tokens)
    assert streamed.tokens == pinned.tokens
    assert same_bits(streamed.logits, pinned.logits)


def unquantised(source: Path, target: Path) -> Path:
    """The same model with all weights as F32."""
    header, data = gguf.read(source), source.read_bytes()
    fields = Fields(metadata=[(key, value) for key, value in header.metadata.items() if value != []])
    for tensor in header.tensors.values():
        raw = data[tensor.offset : tensor.offset + tensor.nbytes]
        numbers = dequantise(raw, TYPES[tensor.type].name)
        fields.tensors.append(Tensor(tensor.name, tensor.shape, 0, numbers.tobytes()))
    return fields.write(target)


def test_answers_are_llama_cpps_where_nothing_is_quantised(smollm2: Path, tmp_path: Path) -> None:
    model = real_model(unquantised(smollm2, tmp_path / "model.gguf"))
    answers = answers_of(model)
    with model.open() as loaded:
        for key in ("translation", "continuation"):
            answer = along(loaded, model.prompts[key], [drawn.token for drawn in answers(key)])
            assert_same(answer, answers(key), HALF)


def test_H5_a_seed_gives_the_same_text_whatever_is_pinned_and_whatever_was_asked_before() -> None:
    path = resolve("demo-draft").path
    first, second = (
        GenerationSettings(sampler=SamplerSettings(temperature=0.8, seed=seed), max_new_tokens=8) for seed in (42, 43)
    )
    texts: list[str] = []
    for pin_percent in (0.0, 100.0):
        with LLM(path, ModelSettings(dram=1 << 40, pin_percent=pin_percent, n_ctx=512, n_threads=2)) as llm:
            prompt = llm.encode_raw("Ten words that come to mind:")
            texts += ["".join(llm.generate(prompt, settings)) for settings in (first, second, first)]
    one, other, *rest = texts
    assert one != other
    assert rest == [one, one, other, one]
