"""Streamed = pinned, bit for bit: nothing that a machine or a setting decides may change a bit of a logit.

Logits of all tokens of a prompt are compared, not only the last: 290 of them, so that attention runs over 256 slots
first and over 512 then.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lever.engine import Engine
from lever.errors import LeverError, StorageError
from lever.gguf import MATRIX_TYPES, TYPES, read
from lever.stats import RunStats
from tests import tiny
from tests.fakes import FakeDevice
from tests.models import TOKENS, Logits, logits_of, open_tiny, overflowing, same_bits, tiny_logits, tiny_of_type

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama", "rope_freqs": True},
    "qwen2": {"arch": "qwen2", "tied": True, "type": {"ffn_down": "Q6_K", "token_embd": "Q8_0", "*": "Q4_0"}},
    "qwen3": {"arch": "qwen3", "head_dim": 128, "type": {"attn_v": "Q5_0", "output": "Q6_K", "*": "Q4_K"}},
}
REFERENCE: dict[str, Any] = {"pin_percent": 100, "n_batch": 64, "n_ctx": 512, "n_threads": 1, "n_slots": 3}

SETTINGS: dict[str, dict[str, Any]] = {
    "0 % pinned": {"pin_percent": 0, "stream_projection": True},
    "30 % pinned": {"pin_percent": 30, "stream_projection": True},
    "60 % pinned": {"pin_percent": 60},
    "only the projection streamed": {"stream_projection": True},
    "only the layers streamed": {"pin_percent": 0},
    "as the budget says": {"pin_percent": None},
    "ring of 4": {"pin_percent": 0, "n_slots": 4, "stream_projection": True},
    "ring of 5": {"pin_percent": 30, "n_slots": 5, "stream_projection": True},
    "I5 chunks of 1": {"n_batch": 1},
    "I5 chunks of 7": {"n_batch": 7},
    "I5 chunks of 512": {"n_batch": 512},
    "context of 300": {"n_ctx": 300},
    "context of 2048": {"n_ctx": 2048},
    "logits of one row at a time": {"n_logits": 1},
    "C1 no direct I/O": {"pin_percent": 0, "device": FakeDevice(refuses_direct=True)},
    "C2 short reads": {"pin_percent": 30, "device": FakeDevice(at_most=(9999, 1 << 20))},
    "much at once": {"pin_percent": 30, "stream_projection": True, "n_batch": 101, "n_ctx": 2048},
}

FOR_ALL = ("0 % pinned", "60 % pinned", "ring of 5", "I5 chunks of 1", "I5 chunks of 7", "much at once")


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of each architecture, of four layers and several bands of the projection."""
    shape = ARCHITECTURES[request.param]
    path = tmp_path_factory.mktemp("exact") / "tiny.gguf"
    return tiny.tiny_model(path, n_layers=4, n_ff=256, n_vocab=1700, context_length=2048, **shape)


@pytest.fixture(scope="module")
def expected(model: Path) -> Logits:
    return tiny_logits(model, **REFERENCE)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small, for tests of many passes."""
    path = tmp_path_factory.mktemp("exact") / "tiny.gguf"
    return tiny.tiny_model(path, n_layers=3, n_ff=256, rope_freqs=True)


# --- settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "setting"),
    [(arch, name) for arch in ARCHITECTURES for name in SETTINGS if arch == "llama" or name in FOR_ALL],
    indirect=["model"],
)
def test_no_setting_changes_a_bit(model: Path, expected: Logits, setting: str) -> None:
    assert same_bits(tiny_logits(model, **REFERENCE | SETTINGS[setting]), expected)


def test_I5_threads_change_no_bit(model: Path, expected: Logits) -> None:
    tokens = TOKENS[:70]  # few: threads that wait for each other are slow on a busy machine
    assert same_bits(tiny_logits(model, tokens, **REFERENCE | {"n_threads": 2}), expected[:70])


def test_I5_threads_change_no_bit_of_a_long_prompt(llama: Path) -> None:
    assert same_bits(tiny_logits(llama, n_threads=2, n_batch=512), tiny_logits(llama, n_threads=1))


def test_the_comparison_would_see_a_bit(expected: Logits) -> None:
    other = expected.copy()
    assert same_bits(other, expected)
    other.view(np.uint32)[-1, -1] ^= 1
    assert not same_bits(other, expected)


def test_what_is_pinned_and_what_is_streamed_are_as_asked(model: Path) -> None:
    """Or the comparisons above compare nothing. 30 and 60 % cut the layers of four in two."""
    for percent in (0, 30, 60, 100):
        for projection in (False, True):
            with open_tiny(model, pin_percent=percent, stream_projection=projection) as loaded:
                assert abs(100 * loaded.plan.pinned_share - percent) < 15
                n_streamed = sum(index not in loaded.plan.pinned for layer in loaded.units.layers for index in layer)
                assert n_streamed == (0 if percent == 100 else 4)
                assert any(len(layer) == 2 for layer in loaded.units.layers) == (percent in (30, 60))
                assert len(loaded.units.projection) > 1
                assert len(loaded.store.streamed) == n_streamed + projection * len(loaded.units.projection)


def test_I4_rows_of_a_wide_pass_are_those_of_single_tokens(model: Path, expected: Logits) -> None:
    """Decoding and passes of 2 to 24 rows, one behind the other, each over whole context so far."""
    with open_tiny(model, pin_percent=100) as loaded:
        parts, at = [], 0
        for width in [*(1, 2, 3, 4, 5, 8, 16, 24, 31, 33), *[1] * 100, *(7, 64)]:
            parts.append(logits_of(loaded, TOKENS[at : at + width]))
            at += width
    assert same_bits(np.concatenate(parts), expected[:at])


def test_I4_padding_of_passes_changes_no_bit(model: Path, expected: Logits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this CPU needs no padding, padding to 4 rows gives the same; elsewhere this repeats another test."""
    monkeypatch.setattr("lever.loader.row_multiple", lambda *_args, **_options: 4)
    assert same_bits(tiny_logits(model, **REFERENCE | {"n_batch": 7}), expected)


# --- files --------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "A26 alignment 8": {"alignment": 8},
    "A26 alignment 64": {"alignment": 64},
    "A26 alignment 4096": {"alignment": 4096},
    "A4 no padding at the end": {"align_tail": False},
    "three parts": {"splits": 3},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("percent", [0, 100])
def test_the_layout_of_the_file_changes_no_bit(
    tmp_path: Path, llama: Path, layout: dict[str, Any], percent: int
) -> None:
    other = tiny.tiny_model(tmp_path / "other.gguf", n_layers=3, n_ff=256, rope_freqs=True, **layout)
    tokens = TOKENS[:40]
    assert same_bits(tiny_logits(other, tokens, pin_percent=percent), tiny_logits(llama, tokens))


@pytest.mark.parametrize("kind", [TYPES[kind].name for kind in sorted(MATRIX_TYPES)])
def test_every_type_of_weights_streams_exactly(tmp_path: Path, kind: str) -> None:
    path = tiny_of_type(tmp_path / "tiny.gguf", kind)
    tokens = TOKENS[:35]
    expected = tiny_logits(path, tokens, pin_percent=100, n_batch=64)
    assert same_bits(tiny_logits(path, tokens, pin_percent=0, stream_projection=True, n_batch=7), expected)
    assert same_bits(tiny_logits(path, tokens[:9], pin_percent=50, n_batch=1), expected[:9])
    assert same_bits(tiny_logits(path, tokens[:5], n_threads=2), expected[:5])


# --- history ------------------------------------------------------------------------------------------------


def test_I5_rows_after_a_truncated_cache_are_those_of_a_fresh_one(llama: Path) -> None:
    """A rollback, to before and behind the border of 256 slots, with other tokens in what is cut off."""
    fresh = tiny_logits(llama)
    with open_tiny(llama) as loaded:
        assert same_bits(logits_of(loaded, TOKENS), fresh)
        for length in (270, 256, 255, 100, 1, 0):
            loaded.model.kv.truncate(length)
            wrong = TOKENS[::-1][: 300 - length]
            logits_of(loaded, wrong)
            loaded.model.kv.truncate(length)
            assert same_bits(logits_of(loaded, TOKENS[length:]), fresh[length:])


@pytest.mark.parametrize("part", ["first layer", "second layer", "projection"])
def test_I20_a_pass_that_failed_leaves_the_cache_as_it_was(llama: Path, part: str) -> None:
    fresh = tiny_logits(llama)
    device = FakeDevice()
    with open_tiny(llama, device=device, stream_projection=True, n_batch=64) as loaded:
        unit = {"first layer": 0, "second layer": 1, "projection": loaded.units.projection[0]}[part]
        (extent,) = loaded.store.units[unit].extents
        head = logits_of(loaded, TOKENS[:100])
        device.broken = range(extent.offset, extent.offset + 1)  # not the page that it shares with the next one
        with pytest.raises(StorageError, match="Input/output error") as caught:
            logits_of(loaded, TOKENS[100:] * 2)  # in several passes: what was read ahead is still good
        assert loaded.store.units[unit].name in str(caught.value)
        device.broken = range(0)
        assert loaded.model.kv.length in range(100, 2 * len(TOKENS), 64)  # whole passes only
        loaded.model.kv.truncate(100)
        tail = logits_of(loaded, TOKENS[100:])
    assert same_bits(np.concatenate([head, tail]), fresh)


def test_I20_a_pass_ended_by_the_caller_leaves_the_cache_as_it_was(llama: Path) -> None:
    fresh = tiny_logits(llama)
    with open_tiny(llama) as loaded:
        head = logits_of(loaded, TOKENS[:100])
        with pytest.raises(KeyboardInterrupt):
            loaded.model.forward(TOKENS[200:], interrupt)
        assert loaded.model.kv.length == 100
        assert same_bits(np.concatenate([head, logits_of(loaded, TOKENS[100:])]), fresh)


def test_K14_a_prompt_that_overflows_leaves_no_trace(tmp_path: Path) -> None:
    """Token 7 alone has values beyond the largest number of F16, in the first layer; its logits are not finite."""
    path = overflowing(tmp_path / "tiny.gguf")
    tokens = [token for token in TOKENS if token != 7][:40]
    device = FakeDevice()
    with open_tiny(path, device=device) as loaded:
        fresh = logits_of(loaded, tokens)
        loaded.model.kv.truncate(10)
        assert not np.isfinite(logits_of(loaded, [7] * 60)).any()
        loaded.model.kv.truncate(10)
        assert same_bits(logits_of(loaded, tokens[10:]), fresh[10:])
        loaded.model.kv.truncate(10)
        with pytest.raises(KeyboardInterrupt):
            loaded.model.forward([7] * 60, interrupt)  # in mid-pass, when the first layer's values are written
        loaded.model.kv.truncate(10)
        assert same_bits(logits_of(loaded, tokens[10:]), fresh[10:])


def interrupt(_layer: int) -> None:
    raise KeyboardInterrupt


def test_a_closed_model_says_so(llama: Path) -> None:
    with open_tiny(llama) as loaded:
        model = loaded.model
        model.forward(TOKENS[:3])
    with pytest.raises(LeverError, match="the model is closed"):
        model.forward(TOKENS[:3])
    with pytest.raises(LeverError, match="the model is closed"):
        model.project([0])


# --- through the engine -------------------------------------------------------------------------------------


class Answers:
    """Greedy answers of one engine, with the logits of every step."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self._opened = open_tiny(path, **settings)
        self.loaded = self._opened.__enter__()
        self.engine = Engine(self.loaded.model, self.loaded.store, n_threads=1)
        self.cached = 0

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def to(self, prompt: Sequence[int], n_tokens: int = 6) -> tuple[list[int], Logits]:
        stats = RunStats()
        steps = self.engine.steps(
            prompt,
            lambda logits, _history, _position: int(np.argmax(logits)),
            max_new_tokens=n_tokens,
            end_tokens=frozenset(),
            stats=stats,
        )
        found = [(step.token, step.logits.copy()) for step in steps]
        self.cached = stats.cached_tokens
        return [token for token, _ in found], np.stack([logits for _, logits in found])


def fresh_answer(path: Path, prompt: Sequence[int], **settings: Any) -> tuple[list[int], Logits]:
    with Answers(path, **settings) as answers:
        return answers.to(prompt)


A, B = TOKENS[:260], [*TOKENS[:150], *TOKENS[:150:-1][:80]]


def test_K14_H5_an_answer_does_not_depend_on_the_one_before(llama: Path) -> None:
    with Answers(llama) as answers:
        found = [(answers.cached, *answers.to(prompt)) for prompt in (A, B, A, A)]
    fresh = {id(prompt): fresh_answer(llama, prompt) for prompt in (A, B)}
    for (_, tokens, logits), prompt in zip(found, (A, B, A, A), strict=True):
        expected_tokens, expected_logits = fresh[id(prompt)]
        assert tokens == expected_tokens
        assert same_bits(logits, expected_logits)


@pytest.mark.parametrize("shared", [1, 149, 255, 256, 259, 260])
def test_I5_a_prompt_found_in_the_cache_gives_the_bits_of_a_fresh_one(llama: Path, shared: int) -> None:
    prompt = [*TOKENS[:shared], *TOKENS[shared:270]]
    before = [*TOKENS[:shared], 251, 252, 253]
    with Answers(llama, n_batch=64) as answers:
        answers.to(before)
        tokens, logits = answers.to(prompt)
        assert answers.cached == shared
    expected_tokens, expected_logits = fresh_answer(llama, prompt)
    assert tokens == expected_tokens
    assert same_bits(logits, expected_logits)


def test_I5_a_conversation_that_grows_gives_the_bits_of_a_fresh_one(llama: Path) -> None:
    with Answers(llama) as answers:
        text, known = TOKENS[:50], 0
        for turn in range(3):
            tokens, logits = answers.to(text)
            assert answers.cached == known
            assert same_bits(logits, fresh_answer(llama, text)[1])
            known = len(text) + len(tokens) - 1  # the last token drawn was never a row
            text = [*text, *tokens, *TOKENS[100 * turn : 100 * turn + 10]]


def test_the_path_of_splits_reads_every_part(tmp_path: Path) -> None:
    path = tiny.tiny_model(tmp_path / "tiny.gguf", splits=3)
    assert len(read(path).files) == 3
    with open_tiny(path) as loaded:
        files = {extent.file for unit in loaded.store.units for extent in unit.extents}
    assert files == {0, 1, 2}
