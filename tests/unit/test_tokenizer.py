"""The tokenizer on small vocabularies in memory: what it refuses, special tokens, bytes, streaming."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from lever.errors import TokenizerError, UsageError
from lever.gguf import GGUF
from lever.tokenizer import StreamDecoder, Tokenizer
from lever.tokenizer.pre import PRE_TOKENIZERS
from tests import tiny

PREFIX = "tokenizer.ggml."


def header(vocabulary: dict[str, object], **changes: object) -> GGUF:
    """A GGUF with this vocabulary; `changes` are keys without their prefix, None removes one."""
    metadata = vocabulary | {PREFIX + key: value for key, value in changes.items()}
    return GGUF(
        path=Path("model.gguf"),
        files=(Path("model.gguf"),),
        size=0,
        version=3,
        alignment=32,
        metadata={key: as_read(value) for key, value in metadata.items() if value is not None},
        tensors={},
    )


def as_read(value: object) -> object:
    """Strings in arrays stay bytes in a header that was read."""
    if isinstance(value, list):
        return [item.encode() if isinstance(item, str) else item for item in value]
    return value


def bpe(**changes: object) -> Tokenizer:
    return Tokenizer.from_gguf(header(tiny.bpe_vocabulary(None), **changes))


def spm(**changes: object) -> Tokenizer:
    return Tokenizer.from_gguf(header(tiny.spm_vocabulary(None), **changes))


def with_tokens(vocabulary: dict[str, object], *added: tuple[str, int]) -> GGUF:
    """A header whose last tokens, which are unused, are these texts and types instead."""
    tokens: Any = vocabulary[PREFIX + "tokens"]
    types: Any = vocabulary[PREFIX + "token_type"]
    for at, (text, kind) in enumerate(added, len(tokens) - len(added)):
        tokens[at], types[at] = text, kind
    return header(vocabulary)


BPE, SPM = bpe(), spm()


def pieces(tokenizer: Tokenizer, text: str, **how: bool) -> list[str]:
    return [tokenizer.token_text(token) for token in tokenizer.encode(text, **how)]


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("token_type", [1] * 10, "10 values for 384 tokens"),
        ("token_type", [1.0] * 384, "integers"),
        ("token_type", ["1"] * 384, "integers"),
        ("token_type", [1] * 383 + [7], "known are 0 to 6"),
        ("token_type", [1] * 383 + [-1], "known are 0 to 6"),
        ("token_type", 1, "integers"),
        ("tokens", [1, 2, 3], "strings"),
        ("tokens", [], "empty"),
        ("tokens", None, "missing"),
        ("tokens", [b"\xff"], "not UTF-8"),
        ("merges", [1], "strings"),
        ("merges", None, "missing"),
        ("merges", ["ab"], "merge 0"),
        ("merges", ["a b c"], "merge 0"),
        ("merges", ["a b", "a q"], "merge 0"),
        ("merges", [b"\xff \xfe"], "merge 0"),
        ("eos_token_id", 384, "384 tokens"),
        ("bos_token_id", -1, "384 tokens"),
        ("eot_token_id", "5", "integer"),
        ("add_bos_token", 1, "boolean"),
        ("pre", 1, "string"),
        ("model", None, "missing"),
        ("model", "bert", "gpt2 and llama"),
    ],
)
def test_A11_a_byte_level_vocabulary_that_does_not_fit_together_is_refused(key: str, value: object, says: str) -> None:
    with pytest.raises(TokenizerError, match=says) as error:
        bpe(**{key: value})
    assert "model.gguf" in str(error.value)
    assert "\n" not in str(error.value)


N_SPM = SPM.n_vocab


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        ([0.0] * (N_SPM - 1), f"{N_SPM - 1} values for {N_SPM} tokens"),
        ([0] * N_SPM, "floats"),
        ([math.nan] + [0.0] * (N_SPM - 1), "not finite"),
        (["0"] * N_SPM, "floats"),
        (None, "missing"),
    ],
    ids=["short", "integers", "nan", "strings", "missing"],
)
def test_A11_scores_of_wrong_type_or_length_are_refused(scores: object, says: str) -> None:
    with pytest.raises(TokenizerError, match=says):
        spm(scores=scores)


def test_A11_a_byte_token_must_be_named_after_its_byte() -> None:
    with pytest.raises(TokenizerError, match="0xZZ"):
        Tokenizer.from_gguf(with_tokens(tiny.spm_vocabulary(None), ("<0xZZ>", tiny.BYTE)))


def test_A11_a_llama_type_vocabulary_without_a_byte_is_refused() -> None:
    vocabulary = tiny.spm_vocabulary(None)
    tokens: Any = vocabulary[PREFIX + "tokens"]
    tokens[tokens.index("<0x41>")] = "<0x41"
    types: Any = vocabulary[PREFIX + "token_type"]
    types[tokens.index("<0x41")] = tiny.NORMAL
    with pytest.raises(TokenizerError, match="<0x41>"):
        Tokenizer.from_gguf(header(vocabulary))


def test_a_duplicate_token_is_refused_as_by_llama_cpp() -> None:
    with pytest.raises(TokenizerError, match=r"tokens \d+ and 383 are both 'Ġthe'"):
        Tokenizer.from_gguf(with_tokens(tiny.bpe_vocabulary(None), ("Ġthe", tiny.NORMAL)))


def test_empty_tokens_are_tolerated_and_stand_for_nothing() -> None:
    tokenizer = Tokenizer.from_gguf(with_tokens(tiny.bpe_vocabulary(None), ("", tiny.NORMAL), ("", tiny.CONTROL)))
    assert (tokenizer.token_bytes(383), tokenizer.token_text(383)) == (b"", "")
    assert tokenizer.encode("the") == BPE.encode("the")


def test_a_bos_that_is_to_be_added_must_exist() -> None:
    with pytest.raises(TokenizerError, match="there is no bos token"):
        bpe(bos_token_id=None, add_bos_token=True)


@pytest.mark.parametrize("token", [-1, 384])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    for method in (BPE.token_bytes, BPE.token_text, BPE.is_control):
        with pytest.raises(UsageError, match="vocabulary of 384"):
            method(token)


# --- pre-tokenizers -----------------------------------------------------------------------------------------


def test_E1_an_unknown_pre_tokenizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TokenizerError, match=r"unknown pre-tokenizer 'nonsense'.* qwen2 "):
        bpe(pre="nonsense")


def test_E1_an_unknown_pre_tokenizer_can_be_overridden() -> None:
    file = header(tiny.bpe_vocabulary(None), pre="nonsense")
    assert Tokenizer.from_gguf(file, pre="qwen2").encode("the 12") == BPE.encode("the 12")
    with pytest.raises(TokenizerError, match="'rubbish'"):
        Tokenizer.from_gguf(file, pre="rubbish")


def test_E1_a_missing_pre_tokenizer_is_the_default_one_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        missing = bpe(pre=None)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "names no pre-tokenizer" in caplog.text
    text = "It's 123456  \n\n好 'LL $5"
    assert missing.encode(text) == bpe(pre="default").encode(text)


def cut(patterns: Sequence[str], text: str) -> list[str]:
    words = [text]
    for pattern in patterns:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        words = [word for text in words for word, _ in split.pre_tokenize_str(text)]
    return words


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("llama-bpe", ["It", "'S", " ", "123", "45", "  \n\n", "x", " !?\n"]),
        ("qwen2", ["It", "'S", " ", "1", "2", "3", "4", "5", "  \n\n", "x", " !?\n"]),
        ("smollm", ["It", "'", "S", " ", "1", "2", "3", "4", "5", "  \n", "\n", "x", " !?", "\n"]),
        ("gpt-2", ["It", "'", "S", " 12345", "  \n", "\n", "x", " !?", "\n"]),
        ("default", ["It", "'", "S", " ", "123", "45", "  \n", "\n", "x", " ", "!?", "\n"]),
    ],
)
def test_E2_each_family_cuts_digits_contractions_and_line_ends_its_own_way(pre: str, words: list[str]) -> None:
    assert cut(PRE_TOKENIZERS[pre].patterns, "It'S 12345  \n\nx !?\n") == words


# As published with the models, where a pattern may go back over what it has taken.
PLAIN_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PLAIN_QWEN2 = (
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PLAIN = {
    "gpt-2": [PLAIN_GPT2],
    "smollm": [r"\p{N}", PLAIN_GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", PLAIN_GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "qwen2": [PLAIN_QWEN2],
    "llama-bpe": [PLAIN_QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")],
}


@pytest.mark.parametrize("pre", PLAIN)
@given(text=st.text(st.sampled_from("aLsdreé好1٣½ \n\r\t\u00a0\u0085'.-$😀\u0301\x00"), max_size=30))
def test_E10_patterns_that_never_go_back_cut_like_those_that_do(pre: str, text: str) -> None:
    assert cut(PRE_TOKENIZERS[pre].patterns, text) == cut(PLAIN[pre], text)


@pytest.mark.parametrize("pre", PLAIN)
@pytest.mark.parametrize("unit", ["a", " ", "\n", " \n", "😀", "\t ", "é", "'s", "1 "])
def test_E10_time_does_not_grow_with_the_square_of_a_run(pre: str, unit: str) -> None:
    tokenizer = bpe(pre=pre)
    text = unit * ((1 << 16) // len(unit.encode()))
    start = time.process_time()
    ids = tokenizer.encode(text)
    assert time.process_time() - start < 5
    assert tokenizer.decode(ids) == text


# --- special tokens -----------------------------------------------------------------------------------------


def test_E11_control_text_is_ordinary_text_unless_special_parsing_is_on() -> None:
    text = "a<|im_end|>b"
    assert "<|im_end|>" not in pieces(BPE, text)
    assert BPE.decode(BPE.encode(text)) == text
    assert pieces(BPE, text, parse_special=True) == ["a", "<|im_end|>", "b"]


def test_E11_user_defined_tokens_are_always_matched_and_before_merges() -> None:
    added = (("<tool>", tiny.USER_DEFINED), ("llo", tiny.USER_DEFINED))
    tokenizer = Tokenizer.from_gguf(with_tokens(tiny.bpe_vocabulary(None), *added))
    assert pieces(tokenizer, "x<tool>hello") == ["x", "<tool>", "he", "llo"]
    assert tokenizer.decode(tokenizer.encode("x<tool>hello")) == "x<tool>hello"


def test_E11_the_longest_special_token_is_matched_first() -> None:
    added = (("<a", tiny.USER_DEFINED), ("<ab>", tiny.USER_DEFINED), ("b><c>", tiny.CONTROL))
    tokenizer = Tokenizer.from_gguf(with_tokens(tiny.bpe_vocabulary(None), *added))
    assert pieces(tokenizer, "<ab><a<ab") == ["<ab>", "<a", "<a", "b"]
    assert pieces(tokenizer, "<ab><c>", parse_special=True) == ["<a", "b><c>"]


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
@pytest.mark.parametrize("kind", [tiny.UNUSED, tiny.CONTROL, tiny.UNKNOWN])
def test_E11_tokens_of_other_types_never_come_out_of_merges_or_words(pre: str, kind: int) -> None:
    vocabulary = tiny.bpe_vocabulary(None)
    types: Any = vocabulary[PREFIX + "token_type"]
    tokens: Any = vocabulary[PREFIX + "tokens"]
    types[tokens.index("hello")] = kind
    tokenizer = Tokenizer.from_gguf(header(vocabulary, pre=pre))
    assert pieces(tokenizer, "hello", add_special=False) == ["hell", "o"]


def test_E11_unused_tokens_are_not_even_parsed_as_special() -> None:
    assert "[PAD383]" not in pieces(BPE, "[PAD383]", parse_special=True)


def test_a_word_that_is_a_token_is_that_token_for_llama_3_only() -> None:
    vocabulary = tiny.bpe_vocabulary(None)
    with_tokens(vocabulary, ("Ġunmerged", tiny.NORMAL))
    llama = Tokenizer.from_gguf(header(vocabulary, pre="llama-bpe"))
    assert pieces(llama, " unmerged", add_special=False) == ["Ġunmerged"]
    smaug = Tokenizer.from_gguf(header(vocabulary, pre="smaug-bpe"))
    assert len(pieces(smaug, " unmerged")) > 1


@pytest.mark.parametrize("kind", [tiny.NORMAL, tiny.CONTROL, tiny.USER_DEFINED])
def test_E8_well_known_end_tokens_end_a_turn_whatever_their_type(kind: int) -> None:
    tokenizer = Tokenizer.from_gguf(with_tokens(tiny.bpe_vocabulary(None), ("<|eot_id|>", kind)))
    assert 383 in tokenizer.eog_ids
    assert tokenizer.is_control(383)
    assert tokenizer.token_bytes(383) == b""
    assert 383 not in tokenizer.encode("<|eot_id|>")
    assert 383 in tokenizer.encode("<|eot_id|>", parse_special=True)


def test_E8_all_end_ids_of_the_metadata_end_a_turn() -> None:
    tokenizer = bpe(eos_token_id=343, eot_token_id=10, eom_token_id=11, fim_pad_token_id=12)
    assert tokenizer.eog_ids == {343, 10, 11, 12, 342, 344}  # the last two by their texts
    assert tokenizer.eos_id == 343


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({}, [101, 120]),
        ({"add_bos_token": True}, [342, 101, 120]),
        ({"add_eos_token": True}, [101, 120, 344]),
        ({"pre": "llama-bpe", "add_bos_token": None}, [342, 101, 120]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [101, 120]),
    ],
)
def test_bos_and_eos_are_added_when_the_file_or_its_family_says_so(changes: dict[str, object], ids: list[int]) -> None:
    tokenizer = bpe(**changes)
    assert tokenizer.encode("ex") == ids
    assert tokenizer.encode("ex", add_special=False) == [101, 120]
    assert tokenizer.encode("") == ids[: ids.index(101)] + ids[ids.index(120) + 1 :]


def test_a_gpt2_type_file_without_ids_has_no_bos_and_no_eos() -> None:
    tokenizer = bpe(bos_token_id=None, eos_token_id=None)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, None)


def test_a_llama_type_file_without_ids_has_bos_1_and_eos_2() -> None:
    tokenizer = spm(bos_token_id=None, eos_token_id=None, add_bos_token=None)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos, tokenizer.add_eos) == (1, 2, True, False)


@pytest.mark.parametrize(
    ("add_space_prefix", "text", "expected"),
    [
        (True, "hello", ["<s>", "▁hell", "o"]),
        (False, "hello", ["<s>", "hell", "o"]),
        (True, "<s>hello", ["<s>", "<s>", "▁hell", "o"]),
        (False, "<s>hello", ["<s>", "<s>", "hell", "o"]),
        (True, "</s> hello", ["<s>", "</s>", "▁", "▁hell", "o"]),
        (False, "</s> hello", ["<s>", "</s>", "▁hell", "o"]),
        (True, "a</s>", ["<s>", "▁a", "</s>"]),
        (True, "", ["<s>"]),
        (None, "a", ["<s>", "▁a"]),
    ],
)
def test_E4_a_blank_is_put_before_text_that_follows_nothing_or_a_special_token(
    add_space_prefix: bool | None, text: str, expected: list[str]
) -> None:
    tokenizer = spm(add_space_prefix=add_space_prefix)
    assert [tokenizer.token_text(token) for token in tokenizer.encode(text, parse_special=True)] == expected


def test_E4_a_character_without_a_token_falls_back_to_bytes() -> None:
    assert pieces(SPM, "😀", add_special=False) == ["▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert SPM.decode(SPM.encode("😀")) == " 😀"


def test_E4_the_name_of_a_byte_in_a_text_is_not_that_byte() -> None:
    assert SPM.decode(SPM.encode("x<0x41>")) == " x<0x41>"


# --- pieces -------------------------------------------------------------------------------------------------


def test_words_and_merges_run_across_the_borders_of_pieces() -> None:
    assert BPE.encode_pieces([("he", True), ("l", False), ("", True), ("lo", True)]) == BPE.encode("hello")


def test_E11_special_text_is_special_only_in_the_pieces_that_say_so() -> None:
    asked = BPE.encode_pieces([("<|im_start|>", True), ("<|im_end|>", False), ("<|im_end|>", True)])
    assert asked == [343, *BPE.encode("<|im_end|>"), 344]


def test_E11_a_special_token_cannot_be_put_together_across_a_border() -> None:
    assert 344 not in BPE.encode_pieces([("<|im_", True), ("end|>", False), ("<|im_end|", False), (">", True)])


# --- bytes --------------------------------------------------------------------------------------------------


@given(st.text())
def test_byte_level_text_comes_back_as_it_was(text: str) -> None:
    assert BPE.decode(BPE.encode(text)) == text


@given(st.text())
def test_llama_type_text_comes_back_with_one_blank_before_it(text: str) -> None:
    assert SPM.decode(SPM.encode(text)) == (" " + text.replace("▁", " ") if text else "")


@given(st.binary())
def test_bytes_that_are_not_utf8_become_the_tokens_of_these_bytes(raw: bytes) -> None:
    ids = BPE.encode(raw.decode(errors="surrogateescape"))
    assert b"".join(map(BPE.token_bytes, ids)) == raw
    assert BPE.decode(ids) == raw.decode(errors="replace")


def test_a_byte_that_is_not_utf8_splits_words_on_both_sides() -> None:
    assert pieces(BPE, "he\udcffllo") == ["he", "ÿ", "l", "l", "o"]
    assert pieces(SPM, "\udcffa", add_special=False) == ["▁", "<0xFF>", "a"]


def test_escaped_bytes_that_form_a_character_are_that_character() -> None:
    assert BPE.encode("\udcc3\udca9") == BPE.encode("é")


def test_other_lone_surrogates_are_refused_with_their_place() -> None:
    with pytest.raises(UsageError, match=r"U\+D800 at character 2"):
        BPE.encode("ab\ud800")


def test_a_byte_without_a_token_is_left_out_and_does_not_join_its_neighbours() -> None:
    vocabulary = tiny.bpe_vocabulary(None)
    tokens: Any = vocabulary[PREFIX + "tokens"]
    tokens[tokens.index("ā")] = "[WAS 01]"  # the letter of byte 1
    tokenizer = Tokenizer.from_gguf(header(vocabulary))
    assert pieces(tokenizer, "=\x01=") == ["=", "="]
    assert pieces(tokenizer, "==") == ["=="]
    assert pieces(tokenizer, "\x01") == []


@pytest.mark.parametrize(
    ("text", "kind", "raw"),
    [
        ("Ġé", tiny.NORMAL, b" \xe9"),
        ("plain text", tiny.NORMAL, b"plain text"),  # has a blank, which is no letter of the alphabet
        ("Ġé", tiny.USER_DEFINED, "Ġé".encode()),
        ("<0x0a>", tiny.BYTE, b"\n"),
        ("<ctl>", tiny.CONTROL, b""),
        ("<ctl>", tiny.UNKNOWN, b""),
        ("<ctl>", tiny.UNUSED, b""),
        ("<ctl>", 0, b""),
    ],
)
def test_the_bytes_of_a_token_depend_on_its_type(text: str, kind: int, raw: bytes) -> None:
    tokenizer = Tokenizer.from_gguf(with_tokens(tiny.bpe_vocabulary(None), (text, kind)))
    assert tokenizer.token_bytes(383) == raw
    assert tokenizer.token_text(383) == text
    assert tokenizer.is_control(383) == (kind == tiny.CONTROL)


def test_a_blank_of_a_llama_type_token_is_a_blank() -> None:
    assert SPM.token_bytes(SPM.encode("the")[1]) == b" the"


# --- streaming ----------------------------------------------------------------------------------------------


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*map(decoder.feed, ids), decoder.flush()]


def of_bytes(raw: bytes) -> list[int]:
    return [BPE.encode(bytes([byte]).decode(errors="surrogateescape"))[0] for byte in raw]


def test_F1_a_character_split_over_tokens_appears_when_it_is_complete() -> None:
    assert streamed(BPE, of_bytes("a😀b".encode())) == ["a", "", "", "", "😀", "b", ""]


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"\xe2\x82 x", ["", "", "\ufffd ", "x", ""]),
        (b"\xe2\x82\xac", ["", "", "€", ""]),
        (b"\xe2\x82", ["", "", "\ufffd"]),
        (b"\xff\xfea", ["\ufffd", "\ufffd", "a", ""]),
        (b"\xf0\x9f\x98\xf0\x9f\x98\x80", ["", "", "", "\ufffd", "", "", "😀", ""]),
        (b"\x80", ["\ufffd", ""]),
    ],
)
def test_F2_garbage_becomes_one_mark_and_the_tail_is_kept(raw: bytes, shown: list[str]) -> None:
    assert streamed(BPE, of_bytes(raw)) == shown


def test_F1_a_control_token_inside_a_character_shows_nothing() -> None:
    first, *rest = of_bytes("é".encode())
    assert streamed(BPE, [first, 344, *rest]) == ["", "", "é", ""]


@pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["gpt2", "llama"])
@given(data=st.data())
def test_F1_what_is_streamed_adds_up_to_the_text_of_all_tokens(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_vocab - 1)))
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


# --- memory -------------------------------------------------------------------------------------------------

# In a process of its own, whose peak is that of building. Of three letters each, so that a piece has two cuts.
MEASURE = """
import gc, sys
from lever.memory import peak_rss_bytes, release_unused, rss_bytes
from lever.tokenizer import Tokenizer
from tests import tiny
from tests.unit.test_tokenizer import PREFIX, header

vocabulary = tiny.spm_vocabulary(None) if sys.argv[1] == "llama" else tiny.bpe_vocabulary(None)
letters = tiny.byte_letters()[33:73]
pairs = [(a, b) for a in letters for b in letters]
merges = pairs + [(a + b, c) for a, b in pairs for c in letters]
known = set(vocabulary[PREFIX + "tokens"])
new = [token for token in [*letters, *map("".join, merges)] if token not in known]
vocabulary[PREFIX + "tokens"] += new
vocabulary[PREFIX + "token_type"] += [tiny.NORMAL] * len(new)
if sys.argv[1] == "llama":
    vocabulary[PREFIX + "scores"] += [-float(rank) for rank in range(len(new))]
else:
    vocabulary[PREFIX + "merges"] += [f"{a} {b}" for a, b in merges]
gguf = header(vocabulary)
del vocabulary, pairs, merges, known, new
gc.collect()
release_unused()
before = rss_bytes()
tokenizer = Tokenizer.from_gguf(gguf)
print(Tokenizer.building_nbytes(gguf), peak_rss_bytes() - before)
"""


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_D6_what_building_takes_is_known_before_within_a_fifth(model: str) -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE, model], capture_output=True, text=True, check=True)
    told, taken = map(int, done.stdout.split())
    assert taken > 20 << 20
    assert told == pytest.approx(taken, rel=0.2)
