"""Flash images in the cache: one place for each model, and an image stands only for the model it was made from."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lever.arch import ModelConfig
from lever.errors import DamagedImage, StorageError
from lever.gguf import IMAGE_CHECKSUMS, read
from lever.models import Silent
from lever.models.cache import place_hash
from lever.models.images import Found, cached_images, find_image, image_path, remove_images, steady_sha256
from lever.pack import PackSettings, pack
from lever.weights import image as weights_image
from lever.weights.image import pack_command
from tests import tiny
from tests.fakes import Recorder
from tests.lacking import lacking

SHAPE: dict[str, Any] = {"n_ff": 256, "type": "Q4_0"}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_model(tmp_path_factory.mktemp("images") / "tiny.gguf", **SHAPE)


@pytest.fixture
def model(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of this test's own, and an empty LEVER_HOME."""
    monkeypatch.setenv("LEVER_HOME", str(tmp_path / "home"))
    return Path(shutil.copy(original, tmp_path))


def packed(source: Path, **settings: Any) -> Path:
    """The image of a model in the cache."""
    path = image_path(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    gguf = read(source)
    chosen = PackSettings(**{"dram": 1 << 40} | settings)
    sha256 = steady_sha256(source, Silent())
    pack(gguf, ModelConfig.from_gguf(gguf), path, chosen, name=str(source), sha256=sha256, progress=Silent())
    return path


def found(source: Path, progress: Recorder | None = None) -> Found:
    result = find_image(source, progress or Recorder())
    assert result is not None
    return result


def write_at(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


# --- places -------------------------------------------------------------------------------------------------


def test_a_link_of_any_name_leads_to_the_image_of_the_model(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(model.name)
    (tmp_path / "link of a link").symlink_to(tmp_path / "link.gguf")
    image = packed(tmp_path / "link of a link")
    assert image.name.startswith("tiny-")
    for name in ("tiny.gguf", "link.gguf", "link of a link"):
        assert found(tmp_path / name) == Found(image, found(model).image)


def test_a_link_of_the_hub_leads_to_one_image_for_all_revisions_with_these_bytes(model: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blobs/0123abcd"
    blob.parent.mkdir()
    model.rename(blob)
    links = [tmp_path / f"snapshots/{revision}/model-Q4_0.gguf" for revision in "12"]
    for link in links:
        link.parent.mkdir(parents=True)
        link.symlink_to(f"../../blobs/{blob.name}")
    packed(links[0])
    assert found(links[1]).problem is None


def test_every_part_of_a_split_model_leads_to_its_image(model: Path, tmp_path: Path) -> None:
    first = tiny.tiny_model(tmp_path / "split.gguf", splits=3, **SHAPE)
    image = packed(first)
    for number in (1, 2, 3):
        assert found(tmp_path / f"split-{number:05}-of-00003.gguf").path == image
    assert find_image(model, Silent()) is None


def test_models_of_one_name_in_two_folders_have_an_image_each(model: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Path(shutil.copy(model, tmp_path / "other"))
    packed(model)
    assert find_image(other, Silent()) is None


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("name", [b"\xe6\xbc\xa2" * 83 + b".gguf", b"caf\xe9 \n'.gguf", b"-rf.gguf", b"x" * 255])
def test_the_name_of_an_image_is_short_and_plain_whatever_the_model_is_called(tmp_path: Path, name: bytes) -> None:
    path = image_path(tmp_path / os.fsdecode(name))
    assert path.name.isascii()
    assert len(path.name) < 120
    assert not set(path.name) & set(" \n'/")


def test_a_link_to_itself_has_no_image(model: Path, tmp_path: Path) -> None:
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    packed(model)
    assert find_image(tmp_path / "loop.gguf", Silent()) is None


# --- whether it is of the model -----------------------------------------------------------------------------


def test_an_image_of_the_model_stands_for_it_and_nothing_is_hashed_again(model: Path) -> None:
    assert find_image(model, Silent()) is None
    image, progress = packed(model, type="q4_0"), Recorder()
    result = found(model, progress)
    assert (result.path, result.problem, result.error) == (image, None, None)
    assert result.describe().startswith("Q4_0, ")
    assert progress.jobs == []


def test_a_touched_model_is_hashed_once_and_its_image_used(model: Path) -> None:
    packed(model)
    os.utime(model, (1, 1))
    progress = Recorder()
    for _ in range(2):
        assert found(model, progress).problem is None
    assert progress.jobs == ["checking tiny.gguf"]


def grown(model: Path) -> None:
    model.write_bytes(model.read_bytes() + bytes(32))


def other_bytes(model: Path) -> None:
    write_at(model, model.stat().st_size - 9, b"otherwise")


def other_bytes_at_the_same_time(model: Path) -> None:
    before = model.stat()
    other_bytes(model)
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))


def another_file_of_the_same_time(model: Path) -> None:
    other = Path(shutil.copy2(model, model.with_name("other")))
    other_bytes_at_the_same_time(other)
    other.replace(model)


CHANGES = [grown, other_bytes, other_bytes_at_the_same_time, another_file_of_the_same_time]


@pytest.mark.parametrize("change", CHANGES)
def test_an_image_of_what_the_model_was_does_not_stand_for_it(model: Path, change: Callable[[Path], None]) -> None:
    image = packed(model)
    change(model)
    assert found(model) == Found(image, found(model).image, f"was made from another version of {model}")


@pytest.mark.usefixtures("model")
def test_a_split_model_is_another_when_any_part_is(tmp_path: Path) -> None:
    first = tiny.tiny_model(tmp_path / "split.gguf", splits=3, **SHAPE)
    packed(first)
    assert found(first).problem is None
    other_bytes_at_the_same_time(tmp_path / "split-00003-of-00003.gguf")
    assert "another version" in str(found(first).problem)


def test_a_model_that_is_gone_is_named(model: Path) -> None:
    packed(model)
    model.unlink()
    with pytest.raises(StorageError, match=f"^{model}: No such file"):
        find_image(model, Silent())


# --- whether it is of use -----------------------------------------------------------------------------------


def emptied(image: Path) -> None:
    image.write_bytes(b"")


def cut(image: Path) -> None:
    os.truncate(image, image.stat().st_size - 9)


def cut_in_the_header(image: Path) -> None:
    os.truncate(image, 3000)


def with_another_number_in_its_metadata(image: Path) -> None:
    """It would give another text, and nobody would know."""
    at = image.read_bytes().index(b"llama.rope.freq_base") + len("llama.rope.freq_base") + 4
    write_at(image, at, b"\x01")


def with_a_damaged_checksum(image: Path) -> None:
    write_at(image, read(image).tensors[IMAGE_CHECKSUMS].offset, bytes(4))


@pytest.mark.parametrize(
    "damage", [emptied, cut, cut_in_the_header, with_another_number_in_its_metadata, with_a_damaged_checksum]
)
def test_a_damaged_image_does_not_stand_for_its_model(model: Path, damage: Callable[[Path], None]) -> None:
    damage(packed(model))
    result = found(model)
    assert result.problem == "is damaged"
    assert result.error is not None
    assert result.error.exit_code == 4


def test_damage_in_the_header_is_named_by_its_block(model: Path) -> None:
    with_another_number_in_its_metadata(packed(model))
    error = found(model).error
    assert isinstance(error, DamagedImage)
    assert "block 0 (bytes 0 to 65536)" in str(error)


def test_another_model_in_its_place_is_no_image(model: Path) -> None:
    image = packed(model)
    shutil.copy(model, image)
    assert found(model) == Found(image, None, "is no flash image")


def test_an_image_that_cannot_be_read_is_no_reason_not_to_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed(model)
    monkeypatch.setattr("lever.gguf.read", lambda _path: (_ for _ in ()).throw(StorageError("x: Input/output error")))
    assert found(model).problem == "cannot be read"


def test_an_image_for_another_cpu_is_told_before_the_model_is_hashed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = packed(model)
    if not (looked_at := found(model).image) or not looked_at.repacked:
        lacking("this CPU has no layout of its own")
    monkeypatch.setattr(weights_image, "fingerprint", lambda *_: "0123456789abcdef")
    os.utime(model, (1, 1))
    progress = Recorder()
    result = found(model, progress)
    assert (result.path, result.error, progress.jobs) == (image, None, [])
    assert "has Q4_0 weights in the layout of another kind of CPU or ggml" in str(result.problem)


def test_an_image_of_another_version_is_not_looked_into(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lever.pack.contents.VERSION", 2)
    packed(model)
    assert found(model).problem == "is a flash image of version 2, this lever reads 1"


# --- the command that mends it ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({}, ""),
        ({"type": "q4_0"}, " --type q4_0"),
        ({"layout": "plain"}, " --layout plain"),
        ({"type": "q4_0", "layout": "plain"}, " --type q4_0 --layout plain"),
    ],
)
def test_the_command_makes_the_same_image_again(model: Path, settings: dict[str, Any], flags: str) -> None:
    image = packed(model, **settings)
    assert found(model).mend("demo") == f"lever pack demo --force{flags}"
    looked_at = found(model).image
    assert looked_at is not None
    assert looked_at.mend() == f"lever pack {model} --force{flags} -o {image}"
    emptied(image)
    assert found(model).mend("demo") == "lever pack demo --force"


def test_the_command_can_be_pasted_whatever_names_are_in_it() -> None:
    words = shlex.split(pack_command("my 'model'; rm -rf ~.gguf", out=Path("$HOME/x y")))
    assert words == ["lever", "pack", "my 'model'; rm -rf ~.gguf", "--force", "-o", "$HOME/x y"]


# --- removal ------------------------------------------------------------------------------------------------


def test_an_image_is_removed_alone(model: Path, tmp_path: Path) -> None:
    other = tiny.tiny_model(tmp_path / "other.gguf", **SHAPE)
    image, kept = packed(model), packed(other)
    size = image.stat().st_size
    assert cached_images() == sorted([image, kept])
    assert (remove_images(model), remove_images(model)) == (size, 0)
    assert cached_images() == [kept]
    assert model.exists()


# --- the source while it is packed --------------------------------------------------------------------------


def test_the_hash_of_a_model_is_taken_once_and_steady(model: Path) -> None:
    progress = Recorder()
    sha256 = steady_sha256(model, progress)
    assert sha256() == sha256()
    assert progress.jobs == ["checking tiny.gguf"]


@pytest.mark.parametrize("change", [*CHANGES, Path.unlink])
@pytest.mark.parametrize("job", ["checking", "packing"])
def test_a_model_that_changes_while_it_is_packed_leaves_no_image(
    model: Path, change: Callable[[Path], None], job: str
) -> None:
    class Changing(Recorder):
        def advance(self, n: int) -> None:
            super().advance(n)
            if self.done == n and self.jobs[-1].startswith(job):
                change(model)

    progress = Changing()
    sha256 = steady_sha256(model, progress)
    gguf, out = read(model), model.with_name("image.gguf")
    config, settings = ModelConfig.from_gguf(gguf), PackSettings(dram=1 << 40)
    with pytest.raises(StorageError, match=f"^{model} changed while it was packed: try again"):
        pack(gguf, config, out, settings, name="tiny", sha256=sha256, progress=progress)
    assert progress.jobs[-1].startswith(job)
    assert not [path for path in model.parent.iterdir() if path.name.startswith("image")]


def test_a_model_that_is_gone_before_it_is_packed_is_named(model: Path) -> None:
    sha256, gguf = steady_sha256(model, Silent()), read(model)
    model.unlink()
    config, settings = ModelConfig.from_gguf(gguf), PackSettings(dram=1 << 40)
    with pytest.raises(StorageError, match=f"^{model}: cannot be read: No such file"):
        pack(gguf, config, model, settings, name="tiny", sha256=sha256, progress=Silent())


def test_a_place_is_named_by_where_it_leads(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    assert place_hash(tmp_path / "link") == place_hash(model) != place_hash(tmp_path)
