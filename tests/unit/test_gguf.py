"""The GGUF reader, on sound files and on every kind of broken one."""

from __future__ import annotations

import errno
import io
import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

from lever import gguf
from lever.errors import GGUFError, LeverError, ModelError, StorageError, UnsupportedModel
from tests import tiny
from tests.tiny import Fields, Raw, Tensor, Typed


@pytest.fixture
def small() -> Fields:
    """A file of a few hundred bytes with every kind of value."""
    metadata: list[tuple[str, object]] = [
        ("general.architecture", "llama"),
        ("some.integer", Typed(tiny.I64, -5)),
        ("some.real", 0.5),
        ("some.flag", True),
        ("some.text", "héllo"),
        ("some.integers", [1, 2, 3]),
        ("some.reals", [0.25, 0.5]),
        ("some.flags", [True, False]),
        ("some.strings", ["a", "b" * 20, ""]),
        ("some.nothing", Typed(tiny.I32, [])),
    ]
    return Fields(metadata, [vector("a", 8), vector("b", 16), Tensor("c", (32, 2), 2, bytes(36))])


def vector(name: str, n: int) -> Tensor:
    return Tensor(name, (n,), 0, struct.pack(f"<{n}f", *range(n)))


def refusal(path: Path, kind: type[LeverError] = GGUFError) -> str:
    """The message with which the file is refused: one line that names the file and says what to do."""
    with pytest.raises(LeverError) as caught:
        gguf.read(path)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message.startswith(f"{path.parent}/")
    assert message.isprintable()
    return message


def written(fields: Fields, directory: Path) -> Path:
    return fields.write(directory / "model.gguf")


def data_of(header: gguf.GGUF, name: str) -> bytes:
    tensor = header.tensors[name]
    with header.files[tensor.file].open("rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.nbytes)


# --- sound files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_value_is_read(small: Fields, version: int, tmp_path: Path) -> None:
    small.version = version
    header = gguf.read(written(small, tmp_path))
    assert dict(header.metadata) == {
        "general.architecture": "llama",
        "some.integer": -5,
        "some.real": 0.5,
        "some.flag": True,
        "some.text": "héllo",
        "some.integers": [1, 2, 3],
        "some.reals": [0.25, 0.5],
        "some.flags": [True, False],
        "some.strings": [b"a", b"b" * 20, b""],
        "some.nothing": [],
    }
    assert header.version == version
    assert header.architecture == "llama"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (tiny.U8, 255),
        (tiny.I8, -128),
        (tiny.U16, 65535),
        (tiny.I16, -32768),
        (tiny.U32, 2**32 - 1),
        (tiny.I32, -(2**31)),
        (tiny.U64, 2**64 - 1),
        (tiny.I64, -(2**63)),
        (tiny.F32, 1.5),
        (tiny.F64, 1e300),
        (tiny.BOOL, True),
    ],
)
def test_extreme_values_survive_alone_and_in_arrays(kind: int, value: object, tmp_path: Path) -> None:
    fields = Fields([("one", Typed(kind, value)), ("many", Typed(kind, [value, value]))])
    metadata = gguf.read(written(fields, tmp_path)).metadata
    assert metadata == {"one": value, "many": [value, value]}
    assert type(metadata["one"]) is type(value)


def test_the_gguf_package_sees_the_same_directory(tmp_path: Path) -> None:
    path = tiny.tiny_model(tmp_path / "tiny.gguf", arch="qwen2", type={"attn_q": "Q6_K", "*": "Q5_0"})
    header = gguf.read(path)
    expected = {
        tensor.name: (
            tuple(int(size) for size in tensor.shape),
            int(tensor.tensor_type),
            tensor.data_offset,
            tensor.n_bytes,
        )
        for tensor in GGUFReader(path).tensors
    }
    found = {t.name: (t.shape, t.type, t.offset, t.nbytes) for t in header.tensors.values()}
    assert found == expected
    assert header.size == path.stat().st_size


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_A26_tensors_lie_where_the_alignment_puts_them(small: Fields, alignment: int, tmp_path: Path) -> None:
    small.alignment = alignment
    small.set("general.alignment", alignment)
    header = gguf.read(written(small, tmp_path))
    assert header.alignment == alignment
    for tensor in small.tensors:
        assert header.tensors[tensor.name].offset % alignment == 0
        assert data_of(header, tensor.name) == tensor.data


def test_A4_the_last_tensor_may_end_the_file_without_padding(small: Fields, tmp_path: Path) -> None:
    path = small.write(tmp_path / "model.gguf", align_tail=False)
    header = gguf.read(path)
    last = header.tensors["c"]
    assert last.offset + last.nbytes == path.stat().st_size
    assert data_of(header, "c") == small.tensor("c").data


def test_a_tensor_beyond_2_GiB_is_placed_rightly_without_reading_it(tmp_path: Path) -> None:
    n = 3 << 28
    fields = Fields(tensors=[Tensor("big", (n,), 0, b""), Tensor("end", (8,), 0, bytes(32), offset=4 * n)])
    path = tmp_path / "sparse.gguf"
    header = fields.header()
    start = tiny.align(len(header), 32)
    path.write_bytes(header)
    os.truncate(path, start + 4 * n + 32)
    tensors = gguf.read(path).tensors
    assert tensors["big"].nbytes == 3 << 30
    assert tensors["end"].offset == start + (3 << 30)


def test_a_file_without_tensors_is_read(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(Fields([("general.architecture", "llama")]).header())
    assert gguf.read(path).tensors == {}


def test_nothing_can_be_changed_by_who_reads_it(small: Fields, tmp_path: Path) -> None:
    header = gguf.read(written(small, tmp_path))
    with pytest.raises(TypeError):
        header.metadata["some.real"] = 1.0  # type: ignore[index]
    with pytest.raises(AttributeError):
        header.version = 4  # type: ignore[misc]


# --- types --------------------------------------------------------------------------------------------------


def test_sizes_of_types_are_those_of_the_gguf_package() -> None:
    """But for Q8_1: the package counts two 32-bit numbers in its block, ggml-common.h has two of 16 bits."""
    known = {int(kind): (size, int(kind)) for kind, size in GGML_QUANT_SIZES.items() if kind.name != "Q8_1"}
    assert len(known) == 30
    for type_id, (size, _) in known.items():
        assert (gguf.TYPES[type_id].block, gguf.TYPES[type_id].nbytes) == size


def test_types_are_exactly_those_that_ggml_itself_knows() -> None:
    library = tiny.ggml()
    names = {type_id: library.ggml_type_name(type_id).decode().upper() for type_id in range(43)}
    withdrawn = {4, 5, 31, 32, 33, 36, 37, 38}
    assert set(gguf.TYPES) == set(names) - withdrawn
    for type_id, info in gguf.TYPES.items():
        assert info.name == names[type_id]
        assert info.block == library.ggml_blck_size(type_id)
        assert info.nbytes == library.ggml_type_size(type_id)


def test_A20_an_unknown_type_is_named_with_its_tensor_and_what_is_known(small: Fields, tmp_path: Path) -> None:
    small.tensor("b").type = 99
    message = refusal(written(small, tmp_path), UnsupportedModel)
    assert "tensor b has type 99" in message
    assert "ggml 0.20.2" in message
    assert "F32, F16, Q4_0" in message


@pytest.mark.parametrize("type_id", [4, 33, 36])
def test_A20_a_withdrawn_type_is_unknown(small: Fields, type_id: int, tmp_path: Path) -> None:
    small.tensor("b").type = type_id
    assert f"tensor b has type {type_id}" in refusal(written(small, tmp_path), UnsupportedModel)


# --- cut files ----------------------------------------------------------------------------------------------


def test_A1_a_header_cut_at_any_byte_is_refused_with_the_offset(small: Fields, tmp_path: Path) -> None:
    path = written(small, tmp_path)
    for size in range(len(small.header()) - 1, -1, -1):
        os.truncate(path, size)
        message = refusal(path)
        assert f"{size}" in message or "more than the" in message


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_A1_a_model_cut_anywhere_is_refused(data: st.DataObject, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    content = tiny.tiny_fields(type="Q4_0").encode(align_tail=False)
    size = data.draw(st.integers(0, len(content) - 1))
    path.write_bytes(content[:size])
    refusal(path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_A1_flipped_bytes_end_in_a_header_or_in_one_of_our_errors(data: st.DataObject, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    fields = tiny.tiny_fields(type="Q4_0", tokenizer=False)
    content = bytearray(fields.encode())
    header = len(fields.header())
    for where in data.draw(st.lists(st.integers(0, header - 1), min_size=1, max_size=4)):
        content[where] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        result = gguf.read(path)
    except ModelError as error:
        assert str(error).isprintable()  # noqa: PT017  # either outcome is right
    else:
        assert all(t.offset + t.nbytes <= len(content) for t in result.tensors.values())


@pytest.mark.parametrize("missing", [1, 20, 36])
def test_A2_a_file_cut_in_the_tensors_is_refused(small: Fields, missing: int, tmp_path: Path) -> None:
    path = small.write(tmp_path / "model.gguf", align_tail=False)
    size = path.stat().st_size - missing
    os.truncate(path, size)
    message = refusal(path)
    assert "is cut: tensor c" in message
    assert f"ends at {size}" in message


def test_A5_a_file_that_lost_its_last_byte_never_passes_for_whole(tmp_path: Path) -> None:
    path = tiny.tiny_model(tmp_path / "tiny.gguf", align_tail=False)
    gguf.read(path)
    os.truncate(path, path.stat().st_size - 1)
    assert "download it again" in refusal(path)


# --- numbers that lie ---------------------------------------------------------------------------------------


def string_length(length: int) -> Raw:
    return Raw(struct.pack("<IQ", tiny.STRING, length))


def array_count(kind: int, count: int) -> Raw:
    return Raw(struct.pack("<IIQ", tiny.ARRAY, kind, count))


def element_length(length: int) -> Raw:
    return Raw(struct.pack("<IIQQ", tiny.ARRAY, tiny.STRING, 1, length))


LIES: dict[str, Callable[[Fields], None]] = {
    "string 2^48": lambda fields: fields.set("lie", string_length(2**48)),
    "string 2^64 - 1": lambda fields: fields.set("lie", string_length(2**64 - 1)),
    "array 2^48": lambda fields: fields.set("lie", array_count(tiny.U8, 2**48)),
    "array 2^61": lambda fields: fields.set("lie", array_count(tiny.F64, 2**61)),
    "strings 2^61": lambda fields: fields.set("lie", array_count(tiny.STRING, 2**61)),
    "element 2^63": lambda fields: fields.set("lie", element_length(2**63)),
    "tensors 2^48": lambda fields: setattr(fields, "n_tensors", 2**48),
    "tensors 2^64 - 1": lambda fields: setattr(fields, "n_tensors", 2**64 - 1),
    "keys 2^48": lambda fields: setattr(fields, "n_keys", 2**48),
    "keys 2^64 - 1": lambda fields: setattr(fields, "n_keys", 2**64 - 1),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
@pytest.mark.parametrize("size", [0, 1 << 33], ids=["small file", "file of 8 GiB"])
def test_A7_a_lying_count_allocates_nothing(
    small: Fields, lie: Callable[[Fields], None], size: int, tmp_path: Path
) -> None:
    lie(small)
    path = written(small, tmp_path)
    os.truncate(path, max(size, path.stat().st_size))
    tracemalloc.start()
    try:
        refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def length_of_first_name(content: bytes, name: str, length: int) -> bytes:
    old = tiny.encode_string(name)
    assert content.count(old) == 1
    return content.replace(old, struct.pack("<Q", length) + name.encode())


@pytest.mark.parametrize("name", ["some.integer", "a"], ids=["key", "tensor name"])
@pytest.mark.parametrize("length", [2**48, 2**64 - 1, 70_000])
def test_A7_a_lying_length_of_a_name_allocates_nothing(name: str, length: int, tmp_path: Path) -> None:
    fields = Fields([("some.integer", 7)], [vector("a", 8)])
    path = tmp_path / "model.gguf"
    path.write_bytes(length_of_first_name(fields.encode(), name, length))
    os.truncate(path, 1 << 33)
    tracemalloc.start()
    try:
        assert f"{length} bytes long" in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_A7_names_may_be_as_long_as_ggml_allows_and_no_longer(tmp_path: Path) -> None:
    longest = Fields([("k" * 65536, 1)], [vector("t" * 64, 8)])
    header = gguf.read(written(longest, tmp_path))
    assert list(header.metadata) == ["k" * 65536]
    assert list(header.tensors) == ["t" * 64]
    assert "65537 bytes long" in refusal(written(Fields([("k" * 65537, 1)]), tmp_path))
    assert "65 bytes long" in refusal(written(Fields(tensors=[vector("t" * 65, 8)]), tmp_path))


def test_A7_arrays_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "MAX_ARRAY_ELEMENTS", 10)
    fields = Fields([("first", list(range(6))), ("second", list(range(4)))])
    gguf.read(written(fields, tmp_path))
    fields.set("third", [1])
    assert "number of elements of third is 1, more than the 0" in refusal(written(fields, tmp_path))


def test_A7_a_header_is_bounded(small: Fields, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "MAX_HEADER_BYTES", 300)
    assert "a header may have 300" in refusal(written(small, tmp_path))


@pytest.mark.parametrize(
    "shape",
    [
        (2**32, 2**32, 4),
        (4194305, 4194305, 1048576),
        (2**63, 2),
        (2**64 - 1,),
        (2**20, 2**20, 2),
        (32, 0),
        (0,),
    ],
    ids=str,
)
def test_A8_a_product_of_dimensions_cannot_wrap(small: Fields, shape: tuple[int, ...], tmp_path: Path) -> None:
    small.tensor("b").shape = shape
    assert f"tensor b has shape {shape}" in refusal(written(small, tmp_path))


def test_A8_many_elements_within_the_limit_must_still_lie_in_the_file(small: Fields, tmp_path: Path) -> None:
    small.tensor("c").shape = (2**20, 2**20)
    assert "is cut: tensor c" in refusal(written(small, tmp_path))


@pytest.mark.parametrize("shape", [(), (1, 1, 1, 1, 1)], ids=str)
def test_a_tensor_has_one_to_four_dimensions(small: Fields, shape: tuple[int, ...], tmp_path: Path) -> None:
    small.tensor("b").shape = shape
    assert f"tensor b has {len(shape)} dimensions" in refusal(written(small, tmp_path))


def test_a_row_is_whole_blocks(small: Fields, tmp_path: Path) -> None:
    small.tensor("c").shape = (48, 2)
    assert "tensor c has rows of 48, not a multiple of 32 (Q4_0)" in refusal(written(small, tmp_path))


@pytest.mark.parametrize("offset", [2**64 - 32, 2**63, 2**40])
def test_A10_an_offset_cannot_wrap(small: Fields, offset: int, tmp_path: Path) -> None:
    small.tensor("c").offset = offset
    assert "is cut: tensor c" in refusal(written(small, tmp_path))


@pytest.mark.parametrize("offset", [65, 100])
def test_an_offset_is_aligned(small: Fields, offset: int, tmp_path: Path) -> None:
    small.tensor("c").offset = offset
    assert "tensor c" in (message := refusal(written(small, tmp_path)))
    assert "not aligned to 32" in message


def test_tensors_do_not_overlap(small: Fields, tmp_path: Path) -> None:
    small.tensor("c").offset = 64
    assert "tensors b and c overlap" in refusal(written(small, tmp_path))


@pytest.mark.parametrize("alignment", [0, 1, 4, 7, 24, "32", True, [32]], ids=repr)
def test_an_alignment_is_a_power_of_two_of_at_least_8(small: Fields, alignment: object, tmp_path: Path) -> None:
    small.set("general.alignment", alignment)
    assert "general.alignment is" in refusal(written(small, tmp_path))


# --- things that must not be there --------------------------------------------------------------------------


def test_A25_a_key_appears_once(small: Fields, tmp_path: Path) -> None:
    small.metadata.append(("some.real", 0.75))
    assert "metadata key some.real appears twice" in refusal(written(small, tmp_path))


def test_a_tensor_appears_once(small: Fields, tmp_path: Path) -> None:
    small.tensors.append(vector("a", 8))
    assert "tensor a appears twice" in refusal(written(small, tmp_path))


BAD_VALUES = {
    "array of arrays": array_count(tiny.ARRAY, 1),
    "value type 13": Raw(struct.pack("<I", 13)),
    "value type 13, in an array": array_count(13, 0),
    "boolean 2": Raw(struct.pack("<IB", tiny.BOOL, 2)),
    "boolean 2, in an array": Raw(struct.pack("<IIQB", tiny.ARRAY, tiny.BOOL, 1, 2)),
}


@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_a_value_of_no_known_kind_is_refused(small: Fields, value: Raw, tmp_path: Path) -> None:
    small.set("odd", value)
    assert "odd" in refusal(written(small, tmp_path))


@pytest.mark.parametrize("name", ["", "\x1b[2J", "two\nlines"], ids=repr)
def test_a_name_that_would_garble_a_message_is_refused(name: str, tmp_path: Path) -> None:
    assert "cannot be a name" in refusal(written(Fields([(name, 1)]), tmp_path))
    assert "cannot be a name" in refusal(written(Fields(tensors=[vector(name, 8)]), tmp_path))


def test_text_that_is_not_utf_8_is_shown_with_marks(tmp_path: Path) -> None:
    fields = Fields([("general.name", b"caf\xe9"), ("tokens", [b"\xff", b"ok"])])
    header = gguf.read(written(fields, tmp_path))
    assert header.text("general.name") == "caf\ufffd"
    assert header.strings("tokens") == [b"\xff", b"ok"]


@pytest.mark.parametrize("magic", [b"GGML", b"ggjt", b"<htm", b"vers", b"\0\0\0\0"])
def test_another_kind_of_file_is_refused(small: Fields, magic: bytes, tmp_path: Path) -> None:
    small.magic = magic
    assert "is not a GGUF file" in refusal(written(small, tmp_path))


@pytest.mark.parametrize("version", [0, 1, 4, 2**31])
def test_another_version_is_refused(small: Fields, version: int, tmp_path: Path) -> None:
    small.version = version
    assert f"has GGUF version {version}" in refusal(written(small, tmp_path), UnsupportedModel)


def test_a_big_endian_file_is_refused_as_such(small: Fields, tmp_path: Path) -> None:
    small.version = int.from_bytes((3).to_bytes(4, "big"), "little")
    assert "is a big-endian GGUF" in refusal(written(small, tmp_path), UnsupportedModel)


# --- the storage below --------------------------------------------------------------------------------------


class FakeFile(io.RawIOBase):
    """Gives at most `most` bytes a read, ends early at `end`, and counts what was read."""

    def __init__(self, content: bytes, most: int = 1 << 20, end: int | None = None) -> None:
        self.rest = content[:end]
        self.most = most
        self.bytes_read = 0

    def read(self, size: int = -1, /) -> bytes:
        taken = self.rest[: min(size, self.most)]
        self.rest = self.rest[len(taken) :]
        self.bytes_read += len(taken)
        return taken


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_A29_short_reads_are_continued(small: Fields, most: int, tmp_path: Path) -> None:
    content = small.encode()
    plain = gguf.read(written(small, tmp_path))
    parsed = gguf._parse(tmp_path / "model.gguf", FakeFile(content, most), len(content))
    assert parsed.metadata == plain.metadata
    assert {tensor.name: tensor for tensor in parsed.tensors} == plain.tensors


def test_A29_an_end_before_the_end_is_an_error(small: Fields) -> None:
    content = small.encode()
    with pytest.raises(StorageError, match=f"reading stopped at byte 100 of {len(content)}"):
        gguf._parse(Path("model.gguf"), FakeFile(content, end=100), len(content))


def test_weights_are_not_read(tmp_path: Path) -> None:
    fields = tiny.tiny_fields(type="F32")
    content, header = fields.encode(), len(fields.header())
    file = FakeFile(content)
    gguf._parse(tmp_path, file, len(content))
    assert file.bytes_read < header + gguf.CHUNK_BYTES < len(content)


def test_an_error_of_the_storage_is_reported_with_the_file(
    small: Fields, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(FakeFile, "read", failing)
    path = written(small, tmp_path)
    monkeypatch.setattr(Path, "open", lambda *_, **__: FakeFile(b""))
    assert "Input/output error" in refusal(path, StorageError)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.gguf", StorageError)


def test_a_directory_or_pipe_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in refusal(tmp_path / "folder.gguf", StorageError)
    assert "not a regular file" in refusal(tmp_path / "pipe.gguf", StorageError)


# --- speed --------------------------------------------------------------------------------------------------


def vocabulary(n: int) -> Fields:
    tokens = [f"token{number}" for number in range(n)]
    merges = [f"tok en{number}" for number in range(n)]
    return Fields([("tokenizer.ggml.tokens", tokens), ("tokenizer.ggml.merges", merges)])


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def test_A13_a_vocabulary_of_150_k_opens_in_under_a_second(tmp_path: Path) -> None:
    path = written(vocabulary(150_000), tmp_path)
    assert min(seconds(lambda: gguf.read(path)) for _ in range(3)) < 1.0
    assert gguf.read(path).strings("tokenizer.ggml.merges")[-1] == b"tok en149999"


def test_A13_opening_is_ten_times_faster_than_the_gguf_package(tmp_path: Path) -> None:
    path = written(vocabulary(20_000), tmp_path)
    ours = min(seconds(lambda: gguf.read(path)) for _ in range(3))
    assert ours * 10 < seconds(lambda: GGUFReader(path))


# --- split models -------------------------------------------------------------------------------------------


def part(path: Path, number: int, count: int = 3) -> Path:
    return path.with_name(f"{path.name[: -len('-00001-of-00003.gguf')]}-{number:05d}-of-{count:05d}.gguf")


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """The first of three parts of a model."""
    return tiny.tiny_model(tmp_path / "model.gguf", type="Q4_0", splits=3)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_any_part_stands_for_the_whole_model(split: Path, number: int) -> None:
    header = gguf.read(part(split, number))
    whole = tiny.tiny_fields(type="Q4_0")
    assert header.path == part(split, number)
    assert header.files == tuple(part(split, n) for n in (1, 2, 3))
    assert header.size == sum(file.stat().st_size for file in header.files)
    assert header.architecture == "llama"
    assert {tensor.file for tensor in header.tensors.values()} == {0, 1, 2}
    for tensor in whole.tensors:
        assert data_of(header, tensor.name) == tensor.data


def test_A17_missing_parts_are_listed(split: Path) -> None:
    part(split, 2).unlink()
    part(split, 3).unlink()
    message = refusal(split)
    assert "model-00002-of-00003.gguf, model-00003-of-00003.gguf" in message
    assert "model-00001-of-00003.gguf," not in message


def test_A17_a_long_list_of_missing_parts_is_cut_short(small: Fields, tmp_path: Path) -> None:
    small.set("split.count", Typed(tiny.U16, 5_000))
    small.set("split.no", Typed(tiny.U16, 0))
    message = refusal(small.write(tmp_path / "model-00001-of-05000.gguf"))
    assert "and 4991 more" in message
    assert len(message) < 1000


def test_A16_a_lone_part_under_another_name_is_explained(split: Path) -> None:
    renamed = split.rename(split.with_name("model.gguf"))
    message = refusal(renamed)
    assert "one of 3 parts" in message
    assert "NAME-00001-of-00003.gguf" in message


@pytest.mark.parametrize("order", [(1, 2, 3), (1, 2), (2, 1)])
def test_A16_parts_joined_end_to_end_are_recognised(split: Path, order: tuple[int, ...]) -> None:
    joined = split.with_name("joined.gguf")
    joined.write_bytes(b"".join(part(split, number).read_bytes() for number in order))
    assert "parts of a split model were joined" in refusal(joined)


def test_A16_a_joined_file_under_the_name_of_part_one_is_recognised(split: Path) -> None:
    split.write_bytes(b"".join(part(split, number).read_bytes() for number in (1, 2, 3)))
    assert "parts of a split model were joined" in refusal(part(split, 2))


def test_A16_a_first_part_without_tensors_is_recognised_when_joined(small: Fields, tmp_path: Path) -> None:
    """As gguf-split makes it with --no-tensor-first-split."""
    small.set("split.count", Typed(tiny.U16, 2))
    first = Fields([("split.count", Typed(tiny.U16, 2)), ("split.no", Typed(tiny.U16, 0))])
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(first.encode() + small.encode())
    assert "parts of a split model were joined" in refusal(joined)


def test_A19_parts_are_sought_next_to_the_link_not_its_target(split: Path) -> None:
    blobs, snapshot = split.parent / "blobs", split.parent / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for number in (1, 2, 3):
        blob = part(split, number).rename(blobs / f"{number:064x}")
        (snapshot / part(split, number).name).symlink_to(blob)
    header = gguf.read(snapshot / split.name)
    assert [file.parent for file in header.files] == [snapshot] * 3
    assert data_of(header, "output.weight") == tiny.tiny_fields(type="Q4_0").tensor("output.weight").data


def test_parts_under_each_others_names_are_refused(split: Path) -> None:
    first, second = part(split, 2).read_bytes(), part(split, 3).read_bytes()
    part(split, 2).write_bytes(second)
    part(split, 3).write_bytes(first)
    assert "says that it is part 2" in refusal(split)


def test_a_part_of_another_model_is_refused(split: Path, tmp_path: Path) -> None:
    other = tiny.tiny_model(tmp_path / "other.gguf", type="Q4_0", splits=3, n_layers=3)
    part(split, 3).write_bytes(part(other, 3).read_bytes())
    refusal(split)


def test_A2_a_cut_part_is_named(split: Path) -> None:
    os.truncate(part(split, 3), part(split, 3).stat().st_size // 2)
    assert refusal(split).startswith(str(part(split, 3)))


def test_a_name_like_a_part_means_nothing_without_the_metadata(small: Fields, tmp_path: Path) -> None:
    header = gguf.read(small.write(tmp_path / "model-00001-of-00003.gguf"))
    assert len(header.files) == 1


# --- typed getters ------------------------------------------------------------------------------------------


@pytest.fixture
def header(small: Fields, tmp_path: Path) -> gguf.GGUF:
    return gguf.read(written(small, tmp_path))


def test_getters_give_values_and_defaults(header: gguf.GGUF) -> None:
    assert header.integer("some.integer") == -5
    assert header.real("some.real") == 0.5
    assert header.real("some.integer") == -5.0
    assert header.text("some.text") == "héllo"
    assert header.flag("some.flag") is True
    assert header.integers("some.integers") == [1, 2, 3]
    assert header.reals("some.reals") == [0.25, 0.5]
    assert header.strings("some.strings") == [b"a", b"b" * 20, b""]
    assert header.strings("some.nothing") == []
    assert header.integer("absent", 3) == 3
    assert header.text("absent", "") == ""
    assert header.flag("absent", False) is False
    assert header.integers("absent", []) == []


@pytest.mark.parametrize(
    ("getter", "key"),
    [
        ("integer", "some.real"),
        ("integer", "some.flag"),
        ("integer", "some.text"),
        ("integer", "some.integers"),
        ("real", "some.text"),
        ("real", "some.flag"),
        ("text", "some.integer"),
        ("text", "some.strings"),
        ("flag", "some.integer"),
        ("integers", "some.integer"),
        ("integers", "some.flags"),
        ("integers", "some.reals"),
        ("reals", "some.integers"),
        ("strings", "some.text"),
        ("strings", "some.integers"),
    ],
)
def test_A11_a_getter_refuses_another_type_and_names_the_key(header: gguf.GGUF, getter: str, key: str) -> None:
    with pytest.raises(GGUFError, match=f"metadata key {key} must be an? "):
        getattr(header, getter)(key)


@pytest.mark.parametrize("getter", ["integer", "real", "text", "flag", "integers", "reals", "strings"])
def test_a_getter_without_default_names_the_missing_key(header: gguf.GGUF, getter: str) -> None:
    with pytest.raises(GGUFError, match=r"metadata key some\.absent is missing"):
        getattr(header, getter)("some.absent")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_real_is_finite(value: float, tmp_path: Path) -> None:
    header = gguf.read(written(Fields([("epsilon", value)]), tmp_path))
    with pytest.raises(GGUFError, match="epsilon must be a finite number"):
        header.real("epsilon")


def test_A23_one_value_may_stand_for_all_layers(header: gguf.GGUF) -> None:
    assert header.per_layer("some.integer", 3) == (-5, -5, -5)
    assert header.per_layer("some.integers", 3) == (1, 2, 3)
    assert header.per_layer("absent", 2, 7) == (7, 7)


@pytest.mark.parametrize("n_layers", [0, 2, 4])
def test_A23_an_array_of_another_length_than_the_layers_is_refused(header: gguf.GGUF, n_layers: int) -> None:
    with pytest.raises(GGUFError, match=f"some.integers has 3 values for {n_layers} layers"):
        header.per_layer("some.integers", n_layers)


def test_A23_an_array_of_another_type_is_refused(header: gguf.GGUF) -> None:
    with pytest.raises(GGUFError, match=r"some\.reals must be an array of integers"):
        header.per_layer("some.reals", 2)
