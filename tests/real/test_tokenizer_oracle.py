"""The tokenizer against llama.cpp: real vocabularies, and one learned on the spot for each kind of pre-tokenizer."""

from __future__ import annotations

import random
import re
import time
import unicodedata
from pathlib import Path

import pytest

from lever import gguf
from lever.tokenizer import StreamDecoder, Tokenizer
from lever.tokenizer.pre import PRE_TOKENIZERS
from tests.oracle import Oracle
from tests.real.texts import TEXTS
from tests.real.vocabularies import byte_level, sentencepiece, write_model

pytestmark = pytest.mark.real


def differences(model: Path, texts: list[str], oracle: Oracle | None = None) -> list[str]:
    """What both say of each text that they see differently, with all settings."""
    oracle = oracle or Oracle(model)
    tokenizer = Tokenizer.from_gguf(gguf.read(model))
    found = []
    for text in texts:
        for add_special, parse_special in ((True, False), (False, True)):
            expected = oracle.tokenize(text, add_special=add_special, parse_special=parse_special)
            ids = tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
            if ids != expected:
                found.append(f"{text!r} special={parse_special}: {expected} by llama.cpp, {ids} here")
    return found


@pytest.fixture(params=["demo_target", "smollm2"])
def real_model(request: pytest.FixtureRequest) -> Path:
    path = request.getfixturevalue(request.param)
    assert isinstance(path, Path)
    return path


def test_there_are_texts_enough() -> None:
    assert len(TEXTS) >= 300


def test_ids_of_real_vocabularies_are_llama_cpps(real_model: Path) -> None:
    assert differences(real_model, TEXTS) == []


@pytest.mark.parametrize("pre", ["llama-bpe", "smaug-bpe", "qwen2", "smollm", "gpt-2", "default"])
def test_E2_ids_are_llama_cpps_for_every_family_of_pre_tokenizers(tmp_path: Path, pre: str) -> None:
    model = write_model(tmp_path / "model.gguf", byte_level(TEXTS, pre))
    assert differences(model, TEXTS) == []


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_E2_every_name_of_a_pre_tokenizer_means_what_it_means_to_llama_cpp(tmp_path: Path, pre: str) -> None:
    model = write_model(tmp_path / "model.gguf", byte_level(TEXTS, pre))
    texts = ["It'S 123456 I'll  \n\nx", " Hello", "$5+<= !?\n", "", "<|im_start|>x", *TEXTS[::16]]
    assert differences(model, texts) == []


def test_E1_a_missing_pre_tokenizer_gives_llama_cpps_ids(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", byte_level(TEXTS, None))
    assert differences(model, TEXTS) == []


@pytest.mark.parametrize("add_space_prefix", [None, True, False])
@pytest.mark.parametrize("merges", [60, 900])
def test_E4_ids_of_llama_type_vocabularies_are_llama_cpps(
    tmp_path: Path, add_space_prefix: bool | None, merges: int
) -> None:
    more = {} if add_space_prefix is None else {"tokenizer.ggml.add_space_prefix": add_space_prefix}
    model = write_model(tmp_path / "model.gguf", sentencepiece(TEXTS, merges=merges, more=more))
    assert differences(model, TEXTS) == []


@pytest.mark.parametrize("sizes", [(2, 3, 4), (4, 2, 3), (2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11), (2, 3, 5)])
def test_E4_runs_of_blanks_that_have_one_score_are_cut_as_by_llama_cpp(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """Llama and Mistral give all runs of blanks the score -1e9."""
    runs = ["▁" * size for size in sizes]
    vocabulary = sentencepiece(["a b."], merges=0, pieces=runs)
    tokens = vocabulary["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    vocabulary["tokenizer.ggml.scores"] = [-1e9 if "▁" in token else 0.0 for token in tokens]
    model = write_model(tmp_path / "model.gguf", vocabulary)
    shapes = ("{}", "a{}b", "{}a", "b{}", "a{}.{}b")
    assert differences(model, [shape.replace("{}", " " * n) for n in range(40) for shape in shapes]) == []


def test_E4_bos_and_eos_are_added_where_llama_cpp_adds_them(tmp_path: Path) -> None:
    more = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    model = write_model(tmp_path / "spm.gguf", sentencepiece(TEXTS, more=more))
    assert differences(model, TEXTS[:40]) == []
    model = write_model(tmp_path / "bpe.gguf", byte_level(TEXTS, "llama-bpe") | more)
    assert differences(model, TEXTS[:40]) == []


def test_E2_each_character_up_to_U3000_is_of_the_same_class_as_in_llama_cpp(real_model: Path) -> None:
    """Those of Python's Unicode; llama.cpp does not know the letters that Unicode 16 added."""
    chars = [chr(code) for code in range(0x3000) if unicodedata.category(chr(code)) != "Cn"]
    lines = [
        "".join(f"x{char}'ll 1{char}1 .{char} \n" for char in chars[at : at + 64]) for at in range(0, len(chars), 64)
    ]
    assert differences(real_model, lines) == []


def test_E11_a_control_token_never_comes_out_of_merges_though_llama_cpp_lets_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", sentencepiece(["x</s> "], merges=0, pieces=["</", "</s"]))
    tokenizer = Tokenizer.from_gguf(gguf.read(model))
    assert tokenizer.eos_id in Oracle(model).tokenize("x</s>")
    ids = tokenizer.encode("x</s>")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == " x</s>"


def test_E8_the_tokens_that_end_a_turn_are_llama_cpps(real_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Oracle(real_model, verbosity=5)
    expected = {int(token) for token in re.findall(r"EOG token += (\d+)", capfd.readouterr().err)}
    assert len(expected) > 1
    assert Tokenizer.from_gguf(gguf.read(real_model)).eog_ids == expected


def test_the_text_of_every_token_is_llama_cpps(real_model: Path) -> None:
    oracle, tokenizer = Oracle(real_model), Tokenizer.from_gguf(gguf.read(real_model))
    shown = [token for token in range(tokenizer.n_vocab) if tokenizer.token_bytes(token)]
    for at in range(0, len(shown), 512):
        assert tokenizer.decode(shown[at : at + 512]) == oracle.detokenize(shown[at : at + 512])


def test_F1_streamed_text_is_the_text_that_was_encoded(demo_target: Path) -> None:
    tokenizer = Tokenizer.from_gguf(gguf.read(demo_target))
    for text in TEXTS:
        decoder = StreamDecoder(tokenizer)
        ids = tokenizer.encode(text, add_special=False)
        assert "".join(map(decoder.feed, ids)) + decoder.flush() == text == tokenizer.decode(ids)


MIB = 1 << 20
LONG = {
    "letters": "a" * MIB,
    "blanks": " " * MIB,
    "emoji": "\U0001f600" * (MIB // 4),
    "line ends": "\n" * MIB,
    "blank lines": " \n" * (MIB // 2),
    "marks": "-" * MIB,
    "specials": "<|im_end|>" * (MIB // 10),
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG.keys())
def test_E10_a_mebibyte_of_one_thing_takes_less_than_five_seconds(demo_target: Path, text: str) -> None:
    tokenizer = Tokenizer.from_gguf(gguf.read(demo_target))
    start = time.process_time()
    ids = tokenizer.encode(text, parse_special=True)
    assert time.process_time() - start < 5
    assert "".join(map(tokenizer.token_text, ids[:1]))[0] in "aĠðĊ-<"


def test_E10_a_mebibyte_through_a_llama_type_vocabulary_takes_less_than_five_seconds(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", sentencepiece(TEXTS))
    tokenizer = Tokenizer.from_gguf(gguf.read(model))
    text = "".join(random.Random(0).choices("abcdefgh", k=MIB))
    start = time.process_time()
    ids = tokenizer.encode(text)
    assert time.process_time() - start < 5
    assert tokenizer.decode(ids) == " " + text


def test_the_demo_vocabulary_is_built_in_less_than_a_second_and_a_half(demo_target: Path) -> None:
    header = gguf.read(demo_target)
    start = time.process_time()
    Tokenizer.from_gguf(header)
    assert time.process_time() - start < 1.5
