"""Words for models, and models joined from the parts that packages carry."""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import os
import resource
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from lever.errors import DownloadError, UsageError
from lever.models import Removed, Silent, assemble, cache, catalogue, list_models, remove, resolve
from lever.models.catalogue import CATALOGUE, Entry, installed_parts
from lever.models.images import image_path
from lever.models.predictors import predictor_path
from lever.predictor import write
from tests.fakes import Recorder
from tests.unit.test_predictor import MATRICES, TRANSLATORS, config

DATA = tuple(os.urandom(size) for size in (5 * 1024**2, 1, 4 * 1024**2 + 3))


def install(site: Path, data: Sequence[bytes], version: str = "1.0") -> None:
    """Lay out packages toy-part1 .. toy-partN as pip does."""
    for number, content in enumerate(data, 1):
        file = f"toy_part{number}/data/part{number:02}.bin"
        info = site / f"toy_part{number}-{version}.dist-info"
        info.mkdir(parents=True)
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_bytes(content)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toy-part{number}\nVersion: {version}\n")
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        (info / "RECORD").write_text(f"{file},sha256={digest},{len(content)}\n")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty LEVER_HOME, an empty site directory for packages, and no cache of the hub."""
    monkeypatch.setenv("LEVER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("lever.models.hub.cached_models", list)
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "home"


@pytest.fixture
def toy(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A catalogue of one model whose packages are installed; the path that it gets in the cache."""
    whole = b"".join(DATA)
    entry = Entry("toy", "toy-part", 3, "1.0", len(whole), hashlib.sha256(whole).hexdigest(), "a toy", "toy-draft")
    monkeypatch.setattr(catalogue, "CATALOGUE", {"toy": entry})
    install(home.parent / "site", DATA)
    return home / "models/toy.gguf"


@pytest.mark.parametrize("ref", ["missing.gguf", "some/where", "./demo", "/abs/model.gguf"])
def test_a_word_with_a_separator_or_ending_in_gguf_is_a_path(ref: str, home: Path) -> None:
    assert resolve(ref).path == Path(ref)
    assert not home.exists()


def test_a_file_of_any_name_is_a_path(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy").write_bytes(b"GGUF")
    assert resolve("toy").path == Path("toy")
    assert not toy.exists()


def test_a_directory_does_not_hide_a_model_of_its_name(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy").mkdir()
    assert resolve("toy").path == toy


def test_an_unknown_name_is_answered_with_the_nearest_and_all_known(home: Path) -> None:
    with pytest.raises(UsageError, match=r"no model 'dmeo', did you mean demo\? known: demo, demo-draft;"):
        resolve("dmeo")
    assert not home.exists()


def test_the_parts_become_one_file_with_its_draft_and_licence(toy: Path) -> None:
    progress = Recorder()
    model = resolve("toy", progress=progress)
    assert (model.path, model.draft, model.notice) == (toy, "toy-draft", "a toy")
    assert toy.read_bytes() == b"".join(DATA)
    assert (progress.jobs, progress.total, progress.done) == (
        ["assembling toy"],
        toy.stat().st_size,
        progress.total,
    )
    assert progress.finished == 1


def test_a_model_in_the_cache_needs_neither_packages_nor_hashing(toy: Path, home: Path) -> None:
    resolve("toy")
    shutil.rmtree(home.parent / "site")
    progress = Recorder()
    assert resolve("toy", progress=progress).path == toy
    assert progress.jobs == []


def test_a_touched_file_is_hashed_once_and_then_trusted(toy: Path) -> None:
    resolve("toy")
    os.utime(toy, (1, 1))
    progress = Recorder()
    for _ in range(2):
        resolve("toy", progress=progress)
    assert progress.jobs == ["checking toy.gguf"]


def test_a_file_written_to_is_not_trusted_though_its_size_and_time_were_put_back(toy: Path) -> None:
    before = resolve("toy").path.stat()
    whole = toy.read_bytes()
    toy.write_bytes(b"x" + whole[1:])
    os.utime(toy, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert toy.stat().st_size == before.st_size
    assert resolve("toy").path.read_bytes() == whole


def test_a_file_written_to_while_it_is_hashed_is_hashed_again(tmp_path: Path, home: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(9))

    class Writing(Recorder):
        def finish(self) -> None:
            file.write_bytes(b"x" * 9)

    assert cache.known_sha256(file, Writing()) == hashlib.sha256(bytes(9)).hexdigest()
    assert cache.known_sha256(file, Silent()) == hashlib.sha256(b"x" * 9).hexdigest()
    assert home.exists()


def test_a_hash_that_cannot_be_remembered_is_right_all_the_same(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(bytes(9))
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert cache.known_sha256(tmp_path / "file", Silent()) == hashlib.sha256(bytes(9)).hexdigest()
    assert caplog.messages == [f"{tmp_path / 'file'} will be hashed again next time: No space left on device"]
    assert list((home / "verified").iterdir()) == []


@pytest.mark.usefixtures("toy")
def test_a_damaged_record_only_costs_a_second_look(home: Path) -> None:
    resolve("toy")
    (record,) = (home / "verified").iterdir()
    record.write_text("{")
    progress = Recorder()
    resolve("toy", progress=progress)
    assert progress.jobs == ["checking toy.gguf"]


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_B2_a_file_in_the_cache_that_is_not_whole_is_made_anew(toy: Path, damage: str) -> None:
    whole = resolve("toy").path.read_bytes()
    toy.write_bytes({"flipped": b"x" + whole[1:], "cut": whole[:-1], "empty": b""}[damage])
    assert resolve("toy").path.read_bytes() == whole


def test_B2_a_part_file_of_a_killed_process_is_not_taken_as_the_model(toy: Path) -> None:
    toy.parent.mkdir(parents=True)
    part = toy.with_name("toy.gguf.part")
    part.write_bytes(b"half")
    assert resolve("toy").path.read_bytes() == b"".join(DATA)
    assert not part.exists()


def test_missing_packages_are_answered_with_the_command_that_installs_them(home: Path) -> None:
    entry = Entry("toy", "toy-part", 4, "1.0", 1, "00", "")
    install(home.parent / "site", DATA[:1])
    with pytest.raises(DownloadError, match=r"3 of the 4 packages .* \(toy-part2, .*\): .*pip install 'lever-llm") as e:
        installed_parts(entry)
    assert "uv sync --extra demo" in str(e.value)


def test_packages_of_another_version_count_as_missing(home: Path) -> None:
    install(home.parent / "site", DATA, version="0.9")
    with pytest.raises(DownloadError, match=r"toy: 3 of the 3 packages .* not of version 1\.0 "):
        installed_parts(Entry("toy", "toy-part", 3, "1.0", 1, "00", ""))


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"y", r"toy_part2/data/part02\.bin is damaged"), (b"yy", r"part02\.bin has 2 bytes, not 1")],
)
def test_A5_a_damaged_part_is_named_and_nothing_is_left(toy: Path, home: Path, content: bytes, words: str) -> None:
    (home.parent / "site/toy_part2/data/part02.bin").write_bytes(content)
    with pytest.raises(DownloadError, match=rf"{words}; install it again: pip install .* toy-part2==1\.0"):
        resolve("toy")
    assert list(toy.parent.iterdir()) == []


def test_A5_packages_that_hold_another_model_are_refused(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry("toy", "toy-part", 3, "1.0", sum(map(len, DATA)), "00" * 32, "")
    monkeypatch.setattr(catalogue, "CATALOGUE", {"toy": entry})
    with pytest.raises(DownloadError, match="hold another model than expected"):
        resolve("toy")
    assert list(toy.parent.iterdir()) == []


def test_A5_too_small_a_disk_is_refused_before_anything_is_written(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1024)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(DownloadError, match=r"9 MiB are needed and 1 KiB are free: .* LEVER_HOME"):
        resolve("toy")
    assert list(toy.parent.iterdir()) == []


def test_A5_a_disk_that_fills_up_meanwhile_leaves_nothing_behind(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(assemble, "_write_all", full)
    with pytest.raises(DownloadError, match=r"toy\.gguf: No space left on device: free some space"):
        resolve("toy")
    assert list(toy.parent.iterdir()) == []


def test_A5_a_write_that_the_kernel_stops_half_way_leaves_nothing_behind(toy: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 * 1024**2, before[1]))
    try:
        with pytest.raises(DownloadError, match=r"toy\.gguf: File too large"):
            resolve("toy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(toy.parent.iterdir()) == []
    assert resolve("toy").path == toy


def test_A5_an_interrupted_assembly_leaves_nothing_behind(toy: Path) -> None:
    class Interrupted(Recorder):
        def advance(self, n: int) -> None:
            raise KeyboardInterrupt(n)

    progress = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        resolve("toy", progress=progress)
    assert list(toy.parent.iterdir()) == []
    assert progress.finished == 1


def test_of_several_at_once_one_assembles_and_the_others_wait(toy: Path) -> None:
    recorders = [Recorder() for _ in range(4)]
    threads = [threading.Thread(target=resolve, args=("toy",), kwargs={"progress": r}) for r in recorders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    jobs = [job for recorder in recorders for job in recorder.jobs if not job.startswith("waiting")]
    assert jobs == ["assembling toy"]
    assert toy.read_bytes() == b"".join(DATA)


def test_waiting_for_another_process_is_shown(toy: Path, home: Path) -> None:
    (home / "locks").mkdir(parents=True)
    progress = Recorder()
    thread = threading.Thread(target=resolve, args=("toy",), kwargs={"progress": progress})
    with (home / "locks/toy.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread.start()
        assert progress.told.wait(10)
        assert not toy.exists()
    thread.join()
    assert progress.jobs == ["waiting for another lever that fetches toy", "assembling toy"]


def test_the_cache_is_in_the_user_cache_directory_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.delenv("LEVER_HOME", raising=False)
    assert cache.home() == Path("/somewhere/lever")
    monkeypatch.setenv("LEVER_HOME", "~/models")
    assert cache.home() == Path.home() / "models"


def test_models_are_listed_and_removed_by_name(toy: Path, home: Path) -> None:
    assert list_models() == []
    resolve("toy")
    (model,) = list_models()
    size = sum(map(len, DATA))
    assert (model.name, model.path, model.bytes, model.source) == ("toy", toy, size, "lever")
    assert remove("toy") == Removed(size)
    assert list_models() == []
    assert list((home / "verified").iterdir()) == []


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "tyo", "toy.gguf", ""])
def test_what_is_not_listed_is_not_removed(toy: Path, home: Path, name: str) -> None:
    resolve("toy")
    secret = home / "secret.gguf"
    secret.write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"no model .* in the cache.* known: toy$"):
        remove(name)
    assert toy.exists()
    assert secret.exists()


def test_removing_a_link_leaves_what_it_points_to(toy: Path, tmp_path: Path) -> None:
    toy.parent.mkdir(parents=True)
    outside = tmp_path / "outside.gguf"
    outside.write_bytes(b"GGUF")
    (toy.parent / "mine.gguf").symlink_to(outside)
    remove("mine")
    assert outside.exists()
    assert list_models() == []


def test_a_flash_image_is_listed_with_its_model_and_removed_with_it(toy: Path) -> None:
    resolve("toy")
    image = image_path(toy)
    image.parent.mkdir()
    image.write_bytes(bytes(7))
    (model,) = list_models()
    assert (model.images, model.image_bytes) == ((image,), 7)
    assert remove("toy") == Removed(sum(map(len, DATA)), 7)
    assert not image.exists()


def test_a_drafts_image_is_listed_and_removed_with_its_model_and_has_a_name_of_its_own(toy: Path) -> None:
    resolve("toy")
    for image, size in ((image_path(toy), 7), (image_path(toy, draft=True), 5)):
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(bytes(size))
    (model,) = list_models()
    assert model.images == (image_path(toy), image_path(toy, draft=True))
    assert remove("toy") == Removed(sum(map(len, DATA)), 12)
    for draft in (False, True):
        image_path(toy, draft=draft).write_bytes(bytes(3))
    assert sorted(model.name for model in list_models()) == [f"drafts/{image.stem}", image.stem]
    assert remove(f"drafts/{image.stem}") == Removed(0, 3)
    assert image_path(toy).exists()


@pytest.mark.usefixtures("toy")
def test_predictors_of_a_model_and_beside_it_as_a_draft_are_removed_with_it_and_others_are_not() -> None:
    resolve("toy")
    own = hashlib.sha256(b"".join(DATA)).hexdigest()
    pairs = [(own, "d" * 64), ("t" * 64, own), ("t" * 64, "d" * 64)]
    paths = [predictor_path(*pair) for pair in pairs]
    for path, (target, draft) in zip(paths, pairs, strict=True):
        write(path, config(), target=target, draft=draft, translators=TRANSLATORS, matrices=MATRICES)
    damaged = paths[0].with_name("damaged.gguf")
    damaged.write_bytes(b"GGUF")
    freed = sum(path.stat().st_size for path in paths[:2])
    assert remove("toy") == Removed(sum(map(len, DATA)), 0, freed)
    assert sorted(paths[0].parent.iterdir()) == sorted([paths[2], damaged])


def test_an_image_whose_model_is_elsewhere_is_listed_and_removed_by_its_own_name(toy: Path, tmp_path: Path) -> None:
    resolve("toy")
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(b"GGUF")
    image = image_path(mine)
    image.parent.mkdir()
    image.write_bytes(bytes(7))
    _, lone = list_models()
    assert (lone.name, lone.path, lone.bytes, lone.source, lone.images) == (image.stem, image, 7, "image", ())
    assert remove(lone.name) == Removed(0, 7)
    assert mine.exists()
    assert [model.path for model in list_models()] == [toy]


@pytest.mark.real
@pytest.mark.parametrize("name", ["demo", "demo-draft"])
def test_the_installed_packages_join_to_the_models_of_the_catalogue(name: str) -> None:
    digest = hashlib.sha256()
    parts = installed_parts(CATALOGUE[name])
    for part in parts:
        with part.path.open("rb") as file:
            while block := file.read(1024**2):
                digest.update(block)
    assert sum(part.path.stat().st_size for part in parts) == CATALOGUE[name].nbytes
    assert digest.hexdigest() == CATALOGUE[name].sha256
