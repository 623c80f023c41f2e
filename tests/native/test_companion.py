"""Which models may draft for which: vocabularies compared token by token."""

from __future__ import annotations

from pathlib import Path

import pytest

from lever.companion import shared_vocabulary
from lever.errors import UsageError
from lever.gguf import read
from lever.llm import LLM, Generation, GenerationSettings
from lever.loader import ModelSettings
from lever.settings import SamplerSettings
from tests import tiny

BUDGET = 1 << 30
TAIL = 390  # a token that only a vocabulary of 448 has


def model(path: Path, n_vocab: int = 384, **changed: object) -> Path:
    return tiny.tiny_fields(arch="qwen2", n_vocab=n_vocab, metadata=changed).write(path)


def answer(target: Path, draft: Path | None, bias: dict[int, float] | None = None) -> Generation:
    """Forty tokens, and the figures."""
    policy = None if draft is None else "chain-sd"
    with LLM(target, ModelSettings(dram=BUDGET), draft=draft, policy=policy) as llm:
        sampler = SamplerSettings(temperature=0.0, seed=1, logit_bias=bias or {})
        settings = GenerationSettings(sampler=sampler, max_new_tokens=40, ignore_eos=True, n_logprobs=0)
        found = llm.generate(llm.encode_raw("a b a b a b"), settings)
        for _ in found:
            pass
        return found


@pytest.mark.parametrize(("n_draft", "n_target"), [(384, 384), (384, 448), (448, 384)])
def test_I17_models_of_one_family_may_be_padded_to_different_lengths(
    tmp_path: Path, n_draft: int, n_target: int
) -> None:
    draft, target = model(tmp_path / "draft.gguf", n_draft), model(tmp_path / "target.gguf", n_target)
    plain, drafted = answer(target, None), answer(target, draft)

    assert shared_vocabulary(read(draft), read(target)) == 384
    assert (drafted.tokens, drafted.logprobs) == (plain.tokens, plain.logprobs)
    assert drafted.stats.verified > 0


def test_I17_a_token_that_the_draft_does_not_have_is_written_and_read_as_another(tmp_path: Path) -> None:
    draft, target = model(tmp_path / "draft.gguf", 384), model(tmp_path / "target.gguf", 448)
    bias = {TAIL: 100.0}
    plain, drafted = answer(target, None, bias), answer(target, draft, bias)

    assert TAIL in plain.tokens
    assert (drafted.tokens, drafted.logprobs) == (plain.tokens, plain.logprobs)


def test_I17_a_draft_never_says_a_token_that_the_target_does_not_have(tmp_path: Path) -> None:
    """All weights of its output but those of the tail are zero, so that it would say nothing else."""
    fields = tiny.tiny_fields(arch="qwen2", n_vocab=448, type="F32")
    output = fields.tensor("output.weight")
    n_shared = 4 * 384 * output.shape[0]  # bytes
    output.data = bytes(n_shared) + output.data[n_shared:]
    draft, target = fields.write(tmp_path / "draft.gguf"), model(tmp_path / "target.gguf", 384)
    assert answer(target, draft).tokens == answer(target, None).tokens


@pytest.mark.parametrize("n_more", [0, 64])
def test_I17_the_first_token_that_differs_is_named(tmp_path: Path, n_more: int) -> None:
    target = model(tmp_path / "target.gguf", 384 + n_more)
    tokens = [token.decode() for token in read(target).strings("tokenizer.ggml.tokens")]
    tokens[17] = "another"
    draft = model(tmp_path / "draft.gguf", 384 + n_more, **{"tokenizer.ggml.tokens": tokens})
    with pytest.raises(UsageError, match="token 17 is 'another' there"):
        LLM(target, ModelSettings(dram=BUDGET), draft=draft)


@pytest.mark.parametrize("longer", ["draft", "target"])
def test_I17_what_one_has_more_than_the_other_must_be_unused(tmp_path: Path, longer: str) -> None:
    long, short = tmp_path / "long.gguf", model(tmp_path / "short.gguf", 384)
    kinds = read(model(long, 448)).integers("tokenizer.ggml.token_type")
    kinds[400] = 1
    model(long, 448, **{"tokenizer.ggml.token_type": kinds})
    draft, target = (long, short) if longer == "draft" else (short, long)
    with pytest.raises(UsageError, match=r"token 400 is .*nothing"):
        LLM(target, ModelSettings(dram=BUDGET), draft=draft)


def test_I11_a_draft_takes_the_targets_context_however_long_its_own_might_be(tmp_path: Path) -> None:
    target = model(tmp_path / "target.gguf")
    draft = tiny.tiny_fields(arch="qwen2", n_vocab=384, context_length=1 << 17).write(tmp_path / "draft.gguf")
    with LLM(target, ModelSettings(dram=BUDGET, n_ctx=256), draft=draft) as llm:
        llm.load()
        assert llm.companion is not None
        assert llm.companion.load(0).shape.n_ctx < 512
        assert llm.loaded.plan.parts["draft"] < 64 << 20
