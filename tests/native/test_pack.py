"""Flash images: the bits of the model they were made from, whole or refused, and nothing left of one that failed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lever.arch import ModelConfig
from lever.errors import (
    DamagedImage,
    DoesNotFit,
    GGUFError,
    LeverError,
    LibraryError,
    StorageError,
    UnsupportedModel,
    UsageError,
)
from lever.ggml import layout as layouts
from lever.ggml import load
from lever.ggml.layout import fingerprint, takes_repacked
from lever.ggml.probe import probe
from lever.gguf import IMAGE_CHECKSUMS, MATRIX_TYPES, TYPES, read
from lever.memory import rss_bytes
from lever.models import Silent
from lever.models.cache import stamp
from lever.pack import PYTHON_GROWTH, PackSettings, pack, verify
from lever.pack import writer as writing
from lever.pack.bands import Bands
from lever.pack.contents import Entry
from lever.weights import image as images
from lever.weights.image import Image
from lever.weights.reader import CheckedFile
from tests import reference, tiny
from tests.fakes import FakeDevice, descriptors_of, reader_threads
from tests.lacking import lacking, needs
from tests.models import TOKENS, logits_of, open_tiny, relative_error, same_bits, tiny_logits

BLOCK = CheckedFile.BLOCK_BYTES
REPACKED = [kind for kind in sorted(MATRIX_TYPES) if probe(load(), kind, repacked=True)]
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"rope_freqs": True, "type": {"ffn_down": "Q6_K", "output": "Q6_K", "*": "Q4_K"}},
    "qwen2, tied": {"arch": "qwen2", "tied": True, "type": {"attn_v": "Q5_0", "token_embd": "Q4_0", "*": "Q4_0"}},
    "qwen3": {"arch": "qwen3", "head_dim": 128, "type": {"ffn_gate": "F16", "ffn_up": "F32", "*": "Q8_0"}},
    "three parts": {"splits": 3, "type": "Q4_0"},
}


def packed(source: Path, out: Path, **settings: Any) -> Path:
    """The image of a model."""
    gguf = read(source)
    chosen = PackSettings(**{"dram": 1 << 40, "n_threads": 1} | settings)
    pack(gguf, ModelConfig.from_gguf(gguf), out, chosen, name="tiny", sha256=lambda: "ab" * 32, progress=Silent())
    return out


@pytest.fixture(scope="module", params=SHAPES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pack") / "tiny.gguf"
    return tiny.tiny_model(path, n_layers=4, n_ff=512, n_vocab=1700, context_length=2048, **SHAPES[request.param])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_model(tmp_path_factory.mktemp("pack") / "small.gguf", n_ff=256, type="Q4_0")


# --- the same bits ------------------------------------------------------------------------------------------


def test_a_plain_image_gives_the_bits_of_its_source(source: Path, tmp_path: Path) -> None:
    image = packed(source, tmp_path / "image.gguf", layout="plain")
    expected = tiny_logits(source, pin_percent=100)
    for pin_percent in (0, 40, 100):
        assert same_bits(tiny_logits(image, pin_percent=pin_percent), expected)


def test_an_image_in_the_kernels_layout_gives_the_bits_of_the_repacked_source(source: Path, tmp_path: Path) -> None:
    """However much of it is streamed, and in whatever chunks."""
    image = packed(source, tmp_path / "image.gguf")
    expected = tiny_logits(source, TOKENS[:60], layout="repacked")
    settings: list[dict[str, Any]] = [{"pin_percent": 0, "stream_projection": True}, {"pin_percent": 40}]
    settings += [{"pin_percent": 100}, {"pin_percent": 0, "n_batch": 7, "n_slots": 5, "n_threads": 2}]
    for chosen in settings:
        assert same_bits(tiny_logits(image, TOKENS[:60], **chosen), expected)


@pytest.fixture
def own_layout() -> None:
    """A CPU that has a layout of its own for some type."""
    if not REPACKED:
        lacking("this CPU has no layout of its own")


@pytest.mark.usefixtures("own_layout")
def test_matrices_are_repacked_where_this_cpu_has_a_layout_for_them(source: Path, tmp_path: Path) -> None:
    """Or the comparison above compares plain with plain. Rows of the embedding are always plain."""
    gguf = read(packed(source, tmp_path / "image.gguf"))
    image = Image.of(gguf)
    assert image is not None
    for name, tensor in gguf.tensors.items():
        expected = name != "token_embd.weight" and takes_repacked(load(), tensor.type, tensor.shape)
        assert (name in image.repacked) == expected
    assert set(image.layouts) == {gguf.tensors[name].type for name in image.repacked}
    assert not Image.of(read(source))


@pytest.mark.parametrize("part", ["type", "output", "embedding"])
def test_what_is_requantised_is_what_ggml_makes_of_it_and_nothing_else_is(tmp_path: Path, part: str) -> None:
    """By the fixture's own quantiser, which calls ggml_quantize_chunk on the F32 weights."""
    prefix = {"type": "blk.", "output": "output.", "embedding": "token_embd."}[part]
    wide = tiny.tiny_fields(n_ff=256, type="F32")
    image = read(packed(wide.write(tmp_path / "wide.gguf"), tmp_path / "image.gguf", layout="plain", **{part: "q4_0"}))
    data = (tmp_path / "image.gguf").read_bytes()
    for tensor in wide.tensors:
        found = image.tensors[tensor.name]
        values = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape[::-1])
        asked_for = tensor.name.startswith(prefix) and len(tensor.shape) == 2
        assert TYPES[found.type].name == ("Q4_0" if asked_for else "F32")
        expected = tiny.quantise(values, "Q4_0") if asked_for else tensor.data
        assert data[found.offset : found.offset + found.nbytes] == expected


@pytest.mark.parametrize(("output", "embedding"), [("q4_0", "keep"), ("keep", "q4_0"), ("q4_0", "q4_0")])
def test_a_tied_model_has_one_matrix_for_both_unless_their_types_differ(
    tmp_path: Path, output: str, embedding: str
) -> None:
    source = tiny.tiny_model(tmp_path / "tied.gguf", n_ff=256, tied=True, type="F32")
    image = packed(source, tmp_path / "image.gguf", layout="plain", output=output, embedding=embedding)
    types = {name: TYPES[tensor.type].name for name, tensor in read(image).tensors.items()}
    names = {"keep": "F32", "q4_0": "Q4_0"}
    assert types["token_embd.weight"] == names[embedding]
    assert types.get("output.weight") == (None if output == embedding else names[output])
    assert 0.001 < relative_error(tiny_logits(image, TOKENS[:20]), reference.forward(source, TOKENS[:20])) < 0.5


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "F16", "BF16", "IQ4_XS"])
def test_requantising_keeps_the_numbers_up_to_the_new_type(tmp_path: Path, kind: str) -> None:
    source = tiny.tiny_model(tmp_path / "tiny.gguf", n_ff=256, type={"attn_q": kind, "ffn_down": kind, "*": "F32"})
    image = packed(source, tmp_path / "image.gguf", type="q4_0")
    found = tiny_logits(image, TOKENS[:20])
    assert 0.001 < relative_error(found, reference.forward(source, TOKENS[:20])) < 0.5


def test_the_metadata_of_the_source_is_in_the_image(source: Path, tmp_path: Path) -> None:
    before, after = read(source), read(packed(source, tmp_path / "image.gguf"))
    changed = {"general.architecture", "general.alignment", "split.no", "split.count", "split.tensors.count"}
    for key, value in before.metadata.items():
        if key not in changed:
            assert after.metadata[key] == value
    assert after.text("general.architecture") == "lever." + before.text("general.architecture")
    tied = replace(ModelConfig.from_gguf(after), tied_output=ModelConfig.from_gguf(before).tied_output)
    assert tied == ModelConfig.from_gguf(before)


def test_llama_cpp_refuses_an_image(small: Path, tmp_path: Path) -> None:
    """Repacked bytes read as plain ones would be a model that talks nonsense."""
    xllamacpp = needs("xllamacpp")
    image = packed(small, tmp_path / "image.gguf")
    params = xllamacpp.CommonParams()
    params.model.path = str(image)
    with pytest.raises(RuntimeError):
        xllamacpp.Server(params)


# --- the order of the file ----------------------------------------------------------------------------------


def test_layers_lie_in_order_each_from_a_block_on_with_its_vectors_first(source: Path, tmp_path: Path) -> None:
    gguf = read(packed(source, tmp_path / "image.gguf"))
    ordered = sorted(gguf.tensors.values(), key=lambda tensor: tensor.offset)
    layers = [int(tensor.name.split(".")[1]) for tensor in ordered if tensor.name.startswith("blk.")]
    assert layers == sorted(layers)
    for layer in range(4):
        tensors = [tensor for tensor in ordered if tensor.name.startswith(f"blk.{layer}.")]
        assert tensors[0].offset % BLOCK == 0
        dims = [len(tensor.shape) for tensor in tensors]
        assert dims == sorted(dims)
        assert tensors[-1].name.endswith("ffn_down.weight")
    assert ordered[-1].name == IMAGE_CHECKSUMS


def test_an_image_reads_hardly_more_than_its_weights(source: Path, tmp_path: Path) -> None:
    image = packed(source, tmp_path / "image.gguf", layout="plain")
    with open_tiny(image) as loaded:
        for (index,) in loaded.units.layers:
            unit = loaded.units.units[index]
            weights = sum(place.tensor.nbytes for place in unit.places)
            assert len(unit.extents) == 1
            assert unit.nbytes - weights < BLOCK + 64 * len(unit.places)


# --- damage -------------------------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x04
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q.weight", "blk.1.ffn_down.weight", "output.weight", "output_norm.weight"]
)
def test_a_flipped_bit_is_found_when_its_block_is_first_read(small: Path, tmp_path: Path, name: str) -> None:
    path = packed(small, tmp_path / "image.gguf")
    offset = read(path).tensors[name].offset + 33
    flip(path, offset)
    with pytest.raises(DamagedImage, match=f"{path} is damaged: block {offset // BLOCK} "):
        tiny_logits(path, TOKENS[:3], pin_percent=0, stream_projection=True)
    assert not reader_threads()
    with pytest.raises(DamagedImage, match=f"block {offset // BLOCK} "):
        check(path)


def test_a_flipped_bit_of_an_embedding_is_found_when_its_token_comes(small: Path, tmp_path: Path) -> None:
    path = packed(small, tmp_path / "image.gguf")
    flip(path, read(path).tensors["token_embd.weight"].offset)
    with pytest.raises(DamagedImage), open_tiny(path) as loaded:
        logits_of(loaded, [0])


def test_what_was_damaged_for_a_while_is_read_again(small: Path, tmp_path: Path) -> None:
    """The engine stays sound: the next pass gives the right bits."""
    path = packed(small, tmp_path / "image.gguf")
    expected = tiny_logits(path, TOKENS[:9])
    offset = read(path).tensors["blk.1.attn_k.weight"].offset
    flip(path, offset)
    with open_tiny(path) as loaded:
        with pytest.raises(DamagedImage, match=r"^blk\.1: "):
            logits_of(loaded, TOKENS[:9])
        flip(path, offset)
        loaded.model.kv.truncate(0)
        assert same_bits(logits_of(loaded, TOKENS[:9]), expected)


def test_a_flipped_bit_of_the_metadata_is_found_before_it_is_computed_with(small: Path, tmp_path: Path) -> None:
    """The angle of every position, for one: the text would be another, and fluent."""
    path = packed(small, tmp_path / "image.gguf")
    key = b"llama.rope.freq_base"
    flip(path, path.read_bytes().index(key) + len(key) + 4 + 2)
    assert read(path).real(key.decode()) != read(small).real(key.decode())
    with pytest.raises(DamagedImage, match="block 0 "):
        tiny_logits(path, TOKENS[:3])


def check(path: Path) -> None:
    gguf = read(path)
    image = Image.of(gguf)
    assert image is not None
    verify(gguf, image, Silent())


def test_a_whole_image_is_verified(small: Path, tmp_path: Path) -> None:
    check(packed(small, tmp_path / "image.gguf"))


@pytest.mark.parametrize("at", [0, -8], ids=["a checksum", "the checksum of the checksums"])
def test_damaged_checksums_are_no_proof_against_the_blocks(small: Path, tmp_path: Path, at: int) -> None:
    path = packed(small, tmp_path / "image.gguf")
    tensor = read(path).tensors[IMAGE_CHECKSUMS]
    flip(path, tensor.offset + (at if at >= 0 else tensor.nbytes + at))
    with pytest.raises(DamagedImage, match="its checksums are damaged"):
        tiny_logits(path, TOKENS[:3])


def test_a_cut_image_is_refused_and_one_cut_while_in_use_is_an_error(small: Path, tmp_path: Path) -> None:
    path = packed(small, tmp_path / "image.gguf")
    size = path.stat().st_size
    device = FakeDevice()
    with open_tiny(path, device=device, n_batch=1) as loaded:
        device.ends_at = read(path).tensors["blk.1.attn_q.weight"].offset
        with pytest.raises(StorageError, match="was it replaced or cut while in use") as caught:
            logits_of(loaded, TOKENS[:9])
        assert caught.value.exit_code == 5
    os.truncate(path, size - 9)
    with pytest.raises(GGUFError, match="is cut"):
        read(path)


# --- images of other machines and versions ------------------------------------------------------------------


@pytest.mark.usefixtures("own_layout")
def test_an_image_for_another_cpu_is_refused_with_the_command_that_mends_it(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packed(small, tmp_path / "image.gguf")
    monkeypatch.setattr(images, "fingerprint", lambda *_: "0123456789abcdef")
    with pytest.raises(UnsupportedModel, match=r"another kind of CPU .*lever pack tiny --force") as caught:
        tiny_logits(path, TOKENS[:3])
    assert caught.value.exit_code == 4


@pytest.mark.usefixtures("own_layout")
def test_a_type_that_this_cpu_does_not_repack_is_never_put_into_its_buffer(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ggml would end the process."""
    path = packed(small, tmp_path / "image.gguf")
    monkeypatch.setattr(images, "takes_repacked", lambda *_: False)
    with pytest.raises(UnsupportedModel, match="another kind of CPU"):
        tiny_logits(path, TOKENS[:3])


def test_an_image_of_another_version_is_refused(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lever.pack.contents.VERSION", 2)
    path = packed(small, tmp_path / "image.gguf")
    with pytest.raises(UnsupportedModel, match="version 2, this lever reads 1; pack it here: lever pack tiny --force"):
        tiny_logits(path, TOKENS[:3])


@pytest.mark.parametrize("kind", REPACKED)
def test_a_fingerprint_names_what_repacking_does(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ggml, repack = load(), layouts.repack
    found = fingerprint(ggml, kind)
    assert found is not None
    fingerprint.cache_clear()
    assert fingerprint(ggml, kind) == found

    def otherwise(*arguments: Any) -> None:
        repack(*arguments)
        arguments[-1].bytes[:2] = arguments[-1].bytes[:2][::-1].copy()

    monkeypatch.setattr(layouts, "repack", otherwise)
    fingerprint.cache_clear()
    assert fingerprint(ggml, kind) != found
    fingerprint.cache_clear()


@pytest.mark.usefixtures("own_layout")
def test_a_buffer_that_cannot_be_had_is_an_error_and_no_plain_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    ggml = load()
    takes_repacked.cache_clear()
    monkeypatch.setattr(ggml, "backend_alloc_ctx_tensors_from_buft", lambda *_: None)
    with pytest.raises(LibraryError, match="could not allocate a repack buffer"):
        takes_repacked(ggml, REPACKED[0], (512, 64))
    monkeypatch.undo()
    assert takes_repacked(ggml, REPACKED[0], (512, 64))


def test_types_without_a_layout_have_no_fingerprint() -> None:
    assert [fingerprint(load(), kind) for kind in MATRIX_TYPES - set(REPACKED)] == [None] * (
        len(MATRIX_TYPES) - len(REPACKED)
    )


# --- all or nothing -----------------------------------------------------------------------------------------


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def failing(error: Exception, after: int) -> Callable[..., None]:
    """A `Writer._write` that fails once so many bytes are written."""
    write, done = writing.Writer._write, [0]

    def fail(self: writing.Writer, view: memoryview) -> None:
        done[0] += len(view)
        if done[0] > after:
            raise error
        write(self, view)

    return fail


@pytest.mark.parametrize(
    "error", [StorageError("the disk is full"), KeyboardInterrupt(), RuntimeError("a bug")], ids=repr
)
def test_an_image_that_was_not_finished_leaves_nothing_behind(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(writing.Writer, "_write", failing(error, 200_000))
    with pytest.raises(type(error)):
        packed(small, tmp_path / "image.gguf")
    assert left_in(tmp_path) == []
    assert not descriptors_of(small)


def test_a_full_disk_is_one_line_that_names_the_file(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda _fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(StorageError, match=r"image\.gguf cannot be written: No space left on device: free") as caught:
        packed(small, tmp_path / "image.gguf")
    assert caught.value.exit_code == 5
    assert left_in(tmp_path) == []


def test_too_little_space_is_refused_before_a_byte_is_written(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": 1000}))
    with pytest.raises(StorageError, match=r"are needed and .* are free"):
        packed(small, tmp_path / "image.gguf")
    assert left_in(tmp_path) == []


def a_link(out: Path, source: Path) -> None:
    out.symlink_to(source)


def a_name_of_the_same_file(out: Path, source: Path) -> None:
    out.hardlink_to(source)


def a_directory(out: Path, _source: Path) -> None:
    out.mkdir()


def a_pipe(out: Path, _source: Path) -> None:
    os.mkfifo(out)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (a_link, "is the model itself"),
        (a_name_of_the_same_file, "is the model itself"),
        (a_directory, "is a directory"),
        (a_pipe, "is no file"),
    ],
)
def test_a_place_that_no_image_may_have_is_refused_and_left_as_it_is(
    small: Path, tmp_path: Path, make: Callable[[Path, Path], None], says: str
) -> None:
    out = tmp_path / "image.gguf"
    make(out, small)
    before = stamp(out.lstat())
    with pytest.raises(UsageError, match=f"{out} {says}.*-o"):
        packed(small, out)
    assert stamp(out.lstat()) == before
    assert left_in(tmp_path) == ["image.gguf"]
    with pytest.raises(UsageError, match="is the model itself"):
        packed(small, small)


def test_what_a_killed_process_left_of_the_same_image_goes_and_nothing_else(small: Path, tmp_path: Path) -> None:
    names = ["image.gguf.4711.part", "image.gguf.mine.part", "other.gguf.4711.part", "imagexgguf.4711.part"]
    for name in names:
        (tmp_path / name).write_bytes(b"half")
    packed(small, tmp_path / "image.gguf")
    assert left_in(tmp_path) == sorted(["image.gguf", *names[1:]])


def test_room_and_budget_are_looked_at_before_the_source_is_hashed(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes a while for a large one."""
    hashed = 0

    def sha256() -> str:
        nonlocal hashed
        hashed += 1
        return "00"

    gguf = read(small)

    def refused(dram: int) -> None:
        settings, config = PackSettings(dram=dram), ModelConfig.from_gguf(gguf)
        pack(gguf, config, tmp_path / "image.gguf", settings, name="tiny", sha256=sha256, progress=Silent())

    with pytest.raises(DoesNotFit):
        refused(1 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": 1000}))
    with pytest.raises(StorageError):
        refused(1 << 40)
    assert hashed == 0


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free some space, or choose another place"),
        (errno.EDQUOT, "free some space, or choose another place"),
        (errno.EROFS, "Read-only file system: choose another place"),
        (errno.EFBIG, "File too large: choose another place"),
    ],
)
def test_what_keeps_an_image_from_being_written_is_told_with_what_helps(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    error = OSError(number, os.strerror(number))
    monkeypatch.setattr("os.fdatasync", lambda _fd: (_ for _ in ()).throw(error))
    monkeypatch.setattr(writing, "SYNC_BYTES", 1)
    with pytest.raises(StorageError, match=rf"image\.gguf cannot be written: .*{advice}"):
        packed(small, tmp_path / "image.gguf")
    assert left_in(tmp_path) == []


def test_metadata_of_an_image_in_a_source_is_not_taken_over(tmp_path: Path) -> None:
    """It would stand there twice, and nobody could read the image."""
    keys = {"lever.image.type": "q4_0", "lever.image.surprise": 1}
    source = tiny.tiny_model(tmp_path / "tiny.gguf", n_ff=256, type="Q4_0", metadata=keys)
    gguf = read(packed(source, tmp_path / "image.gguf"))
    assert gguf.text("lever.image.type") == "keep"
    assert "lever.image.surprise" not in gguf.metadata


@pytest.mark.parametrize("threads", [0, -1, 513, 100_000])
def test_a_number_of_threads_that_ggml_does_not_have_is_refused(threads: int) -> None:
    with pytest.raises(UsageError, match=f"threads is {threads}: it must be 1 to 512"):
        PackSettings(dram=1, n_threads=threads)


def test_an_older_image_stays_until_the_new_one_is_whole(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packed(small, tmp_path / "image.gguf")
    before = path.read_bytes()
    monkeypatch.setattr(writing.Writer, "_write", failing(StorageError("x"), 200_000))
    with pytest.raises(StorageError):
        packed(small, path, layout="plain")
    assert path.read_bytes() == before


def test_a_source_that_fails_while_it_is_read_leaves_nothing(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_bands: Bands, entry: Entry) -> Any:
        raise StorageError(f"reading {entry.name} failed")

    monkeypatch.setattr(Bands, "of", broken)
    with pytest.raises(StorageError, match="reading blk"):
        packed(small, tmp_path / "image.gguf")
    assert left_in(tmp_path) == []


def test_a_budget_too_small_is_refused_and_an_image_is_no_source(small: Path, tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit, match="bands of weights"):
        packed(small, tmp_path / "image.gguf", dram=rss_bytes() + PYTHON_GROWTH + (1 << 20))
    assert left_in(tmp_path) == []
    image = packed(small, tmp_path / "image.gguf")
    with pytest.raises(UsageError, match="is a flash image already"):
        packed(image, tmp_path / "again.gguf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lever.image.repacked", ["blk.0.nothing"]),
        ("lever.image.repacked", [b"\xff"]),
        ("lever.image.layouts", ["Q4_0"]),
        ("lever.image.layouts", ["Q9_9=00"]),
        ("lever.image.version", "one"),
        ("lever.image.repacked", None),
    ],
)
def test_a_hostile_header_is_an_error_of_ours(tmp_path: Path, key: str, value: object) -> None:
    fields = tiny.tiny_fields(n_ff=256, type="Q4_0", metadata={"general.architecture": "lever.llama"})
    good = {"version": 1, "type": "keep", "layout": "auto", "ggml": "x", "source.name": "x", "source.bytes": 1}
    for name, sound in good.items():
        fields.set(f"lever.image.{name}", sound)
    fields.set("lever.image.source.sha256", "00")
    fields.set("lever.image.layouts", ["Q4_0=00"])
    fields.set("lever.image.repacked", ["blk.0.attn_q.weight"])
    fields.set(key, value)
    with pytest.raises(LeverError) as caught:
        tiny_logits(fields.write(tmp_path / "hostile.gguf"), TOKENS[:3])
    assert caught.value.exit_code == 4
