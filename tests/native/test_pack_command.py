"""`lever pack` and what other verbs make of images, in processes of their own: what is said, written, refused, left."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest

from lever.gguf import read
from lever.models.cache import stamp
from lever.weights.reader import CheckedFile
from tests.command import Lever, one_line
from tests.fakes import wait_until
from tests.lacking import lacking
from tests.tiny import tiny_model

BLOCK = CheckedFile.BLOCK_BYTES
ASK = ("Hello", "-n", "6", "--temp", "0", "-s", "1")

# The command on a slow storage device.
SLOWLY = """
import functools, sys
import lever.pack.bands
from lever.cli import main
from tests.fakes import FakeDevice
lever.pack.bands.DirectFile = functools.partial(lever.pack.bands.DirectFile, read=FakeDevice(delay_s=0.2))
main()
"""


class SlowLever(Lever):
    """Packs for some seconds."""

    @staticmethod
    def _command(_device: object) -> list[str]:
        return [sys.executable, "-c", SLOWLY]


@pytest.fixture
def slow_lever(tmp_path: Path, bytecode: Path) -> SlowLever:
    return SlowLever(tmp_path / "home", bytecode)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("pack") / "tiny.gguf", n_ff=256, type="Q4_K")


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original, tmp_path))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Where they are kept."""
    return tmp_path / "home/images"


def packed(lever: Lever, *words: str | Path) -> Path:
    """The image that `lever pack` names."""
    done = lever("pack", *words)
    assert done.returncode == 0, done.stderr
    return Path(os.fsdecode(done.stdout.removesuffix(b"\n")))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# --- pack and run -------------------------------------------------------------------------------------------


def test_run_uses_the_image_and_says_so_and_a_plain_one_gives_the_same_text(lever: Lever, model: Path) -> None:
    alone = lever("run", model, *ASK)
    image = packed(lever, model, "--layout", "plain")
    done = lever("run", model, *ASK)

    assert f"using the flash image of {model} (types of its source, plain): {image}\n" in done.stderr.decode()
    assert done.stdout == alone.stdout
    assert b"flash image" not in alone.stderr


def test_layers_in_another_type_are_another_text_which_no_image_takes_back(lever: Lever, model: Path) -> None:
    alone = lever("run", model, *ASK).stdout
    image = packed(lever, model, "--type", "q4_0")
    done = lever("run", model, *ASK)

    assert f"using the flash image of {model} (Q4_0, " in done.stderr.decode()
    assert done.stdout == lever("run", image, *ASK).stdout != alone
    for flag in ("--no-image", "--layout=repacked"):
        without = lever("run", model, *ASK, flag)
        assert b"flash image" not in without.stderr
        assert flag != "--no-image" or without.stdout == alone


def test_an_image_given_as_the_model_has_its_own_layout(lever: Lever, model: Path) -> None:
    image = packed(lever, model)
    done = lever("run", image, *ASK, "--layout", "repacked")

    assert (done.returncode, done.stdout) == (2, b"")
    assert f"{image} is a flash image and has its layout: leave out --layout" in one_line(done.stderr)


def test_packing_again_does_nothing_unless_forced(lever: Lever, model: Path) -> None:
    image = packed(lever, model)
    first = stamp(image.stat())
    again = lever("pack", model)

    assert (again.returncode, again.stdout) == (0, f"{image}\n".encode())
    assert "is packed already" in one_line_of(again.stderr)
    assert stamp(image.stat()) == first
    assert packed(lever, model, "--force") == image
    assert stamp(image.stat()) != first


def one_line_of(stderr: bytes) -> str:
    text = stderr.decode()
    assert text.count("\n") == 1, text
    return text


def test_an_image_of_another_kind_is_not_overwritten_unasked(lever: Lever, model: Path) -> None:
    image = packed(lever, model)
    first = image.read_bytes()
    for flags in (["--type", "q4_0"], ["--layout", "plain"]):
        refused = lever("pack", model, *flags)
        assert (refused.returncode, refused.stdout) == (2, b"")
        assert f"{image} is there already (types of its source, " in one_line(refused.stderr)
        assert "--force" in refused.stderr.decode()
    assert image.read_bytes() == first
    assert packed(lever, model, "--type", "q4_0", "--force") == image
    assert "(Q4_0, " in lever("run", model, *ASK).stderr.decode()


def test_quiet_says_nothing(lever: Lever, model: Path) -> None:
    commands: list[list[str | Path]] = [["pack", model, "--verify"], ["pack", model], ["run", model, *ASK]]
    for words in commands:
        assert lever(*words, "-q").stderr == b""


def test_a_name_that_is_no_utf_8_is_packed_and_found(lever: Lever, model: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(model.parent) + b"/caf\xe9 'x'.gguf"))
    model.rename(odd)
    packed(lever, odd)

    assert b"using the flash image of" in lever("run", odd, *ASK).stderr
    facts = lever.json("info", next((model.parent / "home/images").iterdir()))
    assert facts["image"]["source"].endswith("/caf\\udce9 'x'.gguf")


# --- verify, damage and what mends it -----------------------------------------------------------------------


def test_a_damaged_image_ends_with_4_naming_block_file_and_the_command_that_mends_it(
    lever: Lever, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "elsewhere.gguf"
    for image in (packed(lever, model, "--type", "q4_0"), packed(lever, model, "-o", out)):
        offset = read(image).tensors["blk.1.attn_q.weight"].offset
        assert lever("pack", image, "--verify").stdout == f"{image}\n".encode()
        flip(image, offset)
        commands: list[list[str | Path]] = [["pack", image, "--verify"], ["run", image, *ASK]]
        if image != out:
            commands += [["pack", model, "--type", "q4_0", "--verify"], ["run", model, *ASK]]
        for words in commands:
            done = lever(*words)
            said = done.stderr.decode()
            assert (done.returncode, done.stdout) == (4, b"")
            assert f"{image} is damaged: block {offset // BLOCK} (bytes " in said
        mend = shlex.split(said[said.index(": lever pack ") + 2 :])
        assert lever(*mend[1:]).returncode == 0
        assert lever("pack", image, "--verify").returncode == 0
    assert "(Q4_0, " in lever("run", model, *ASK).stderr.decode()


def test_verify_finds_a_flipped_bit_wherever_it_is(lever: Lever, model: Path) -> None:
    image = packed(lever, model)
    whole, size = image.read_bytes(), image.stat().st_size
    for offset in (9, 1000, BLOCK - 1, size - 1):
        image.write_bytes(whole)
        flip(image, offset)
        assert lever("pack", image if offset > 1000 else model, "--verify").returncode == 4, offset


def rewritten(model: Path) -> None:
    """Of the same size, at the same time."""
    before = model.stat()
    flip(model, before.st_size - 1)
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("spoil", ["the model", "the image"])
def test_an_image_that_may_not_stand_for_its_model_is_not_used_and_packed_anew_by_the_command_that_is_told(
    lever: Lever, model: Path, images: Path, spoil: str
) -> None:
    image = packed(lever, model, "--type", "q4_0")
    if spoil == "the model":
        rewritten(model)
    else:
        os.truncate(image, 5000)
    alone = lever("run", model, *ASK, "--no-image")
    done = lever("run", model, *ASK, "-q")  # it is told all the same

    assert (done.returncode, done.stdout) == (0, alone.stdout)
    reason = f"was made from another version of {model}" if spoil == "the model" else "is damaged"
    flags = " --type q4_0" if spoil == "the model" else ""
    mend = f"lever pack {model} --force{flags}"
    said = f"lever: not using the flash image of {model}: {image} {reason}; pack it anew: {mend}\n"
    assert done.stderr.decode() == said
    assert lever(*shlex.split(mend)[1:]).returncode == 0
    assert b"\nusing the flash image" in b"\n" + lever("run", model, *ASK).stderr
    assert [path.name for path in images.iterdir()] == [image.name]


def test_an_image_of_no_use_is_not_in_the_way_of_a_new_one(lever: Lever, model: Path) -> None:
    image = packed(lever, model, "--type", "q4_0")
    rewritten(model)
    done = lever("pack", model)

    assert (done.returncode, done.stdout) == (0, f"{image}\n".encode())
    said, packed_now = done.stderr.decode().splitlines()
    assert said == f"{image} was made from another version of {model}: packing it anew"
    assert packed_now.startswith(f"packed {model} into ")


# --- places -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--force"]])
def test_an_image_never_takes_the_place_of_its_model(
    lever: Lever, model: Path, tmp_path: Path, flags: list[str]
) -> None:
    before = model.read_bytes()
    (tmp_path / "link.gguf").symlink_to(model)
    for out in (model, tmp_path / "link.gguf", tmp_path / "home/../tiny.gguf"):
        (tmp_path / "home").mkdir(exist_ok=True)
        done = lever("pack", model, "-o", out, *flags)
        assert (done.returncode, done.stdout) == (2, b"")
        assert f"{model} is the model itself" in one_line(done.stderr)
    assert model.read_bytes() == before
    assert (tmp_path / "link.gguf").is_symlink()


@pytest.mark.parametrize(
    ("out", "code", "says"),
    [
        ("pipe", 2, "is no file: give the name of a file with -o"),
        ("folder", 2, "is a directory: give the name of a file with -o"),
        ("folder/none/x.gguf", 5, "there is no directory "),
        ("pipe/x.gguf", 5, "there is no directory "),
        ("there.gguf", 2, "is there already: write it anew with --force"),
    ],
)
def test_a_place_for_an_image_that_is_none_is_refused(
    lever: Lever, model: Path, tmp_path: Path, out: str, code: int, says: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "there.gguf").write_bytes(b"mine")
    before = sorted(tmp_path.iterdir())
    done = lever("pack", model, "-o", tmp_path / out)

    assert (done.returncode, done.stdout) == (code, b"")
    assert says in one_line(done.stderr)
    assert sorted(path for path in tmp_path.iterdir() if path.name != "home") == before
    assert (tmp_path / "there.gguf").read_bytes() == b"mine"


def test_an_image_goes_where_a_link_leads(lever: Lever, model: Path, tmp_path: Path) -> None:
    """To another disk, for one; the link stays."""
    (tmp_path / "large disk").mkdir()
    link = tmp_path / "link.gguf"
    link.symlink_to("large disk/x.gguf")
    for flags in ([], ["--force"]):
        assert packed(lever, model, "-o", link, *flags) == link
        assert link.is_symlink()
    assert [path.name for path in (tmp_path / "large disk").iterdir()] == ["x.gguf"]


def test_an_image_is_no_source_of_another(lever: Lever, model: Path, tmp_path: Path) -> None:
    image = packed(lever, model)
    for words in ([], ["--force"], ["--verify", "-o", tmp_path / "x.gguf"], ["--verify", "--force"]):
        done = lever("pack", image, *words)
        assert done.returncode == 2
        assert "is a flash image already" in one_line(done.stderr)


# --- all or nothing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_of_an_image(
    slow_lever: SlowLever, model: Path, images: Path, number: signal.Signals
) -> None:
    with slow_lever.started("pack", model) as process:
        wait_until(lambda: any(path.stat().st_size for path in images.glob("*.part")), seconds=60)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)

    assert (process.returncode, out, err) == (128 + number, b"", b"")
    assert list(images.iterdir()) == []


def test_of_two_that_pack_the_same_model_one_waits(
    lever: Lever, slow_lever: SlowLever, model: Path, images: Path
) -> None:
    with slow_lever.started("pack", model) as first:
        wait_until(lambda: bool(list(images.glob("*.part"))), seconds=60)
        second = lever("pack", model)
        out, err = first.communicate(timeout=60)

    assert (first.returncode, second.returncode) == (0, 0)
    assert out == second.stdout
    assert err.decode().startswith(f"packed {model} into ")
    waiting, done = second.stderr.decode().splitlines()
    assert waiting == f"waiting for another lever that packs {model}"
    assert "is packed already" in done
    assert len(list(images.iterdir())) == 1


def test_a_budget_too_small_is_refused_with_3(lever: Lever, model: Path, images: Path) -> None:
    done = lever("pack", model, "--dram", "20MiB")

    assert (done.returncode, done.stdout) == (3, b"")
    assert re.search(r"needs \d+ MiB but the budget is 20 MiB: Python ", one_line(done.stderr))
    assert not list(images.iterdir())


# --- info, list, rm -----------------------------------------------------------------------------------------


def test_info_of_an_image_tells_what_it_says_of_itself(lever: Lever, model: Path) -> None:
    assert lever.json("info", model)["image"] is None
    image = packed(lever, model, "--type", "q4_0", "--layout", "plain")
    facts = lever.json("info", image)

    assert facts["architecture"] == "llama"
    assert facts["tensor_types"].keys() == {"Q4_0", "Q4_K", "F32"}
    assert facts["pass_bytes"] % BLOCK == 0  # as it is read
    digest = facts["image"].pop("source_sha256")
    assert re.fullmatch("[0-9a-f]{64}", digest)
    ggml = facts["image"].pop("ggml")
    assert ggml.startswith("0.")
    assert facts["image"] == {
        "version": 1,
        "type": "q4_0",
        "layout": "plain",
        "source": str(model),
        "source_bytes": model.stat().st_size,
        "runs_here": True,
        "hindrance": None,
    }
    shown = lever("info", image).stdout.decode()
    assert re.search(r"^image runs here +yes$", shown, re.MULTILINE)
    assert b"\nimage " not in lever("info", model).stdout


def test_info_of_an_image_for_another_cpu_says_so(lever: Lever, model: Path) -> None:
    image = packed(lever, model)
    prints = read(image).strings("lever.image.layouts")
    if not prints:
        lacking("this CPU has no layout of its own")
    data, name = image.read_bytes(), prints[0].partition(b"=")[0].decode()
    image.write_bytes(data.replace(prints[0], prints[0][:-4] + b"0000"))
    facts = lever.json("info", image)["image"]

    assert facts["runs_here"] is False
    assert f"has {name} weights in the layout of another kind of CPU or ggml" in facts["hindrance"]
    done = lever("run", image, *ASK)
    assert (done.returncode, done.stdout) == (4, b"")
    assert f"{name} weights in the layout of another kind of CPU" in done.stderr.decode()
    assert f"pack it here: lever pack {model} --force -o {image}\n" in done.stderr.decode()


def test_an_image_in_the_cache_is_listed_and_removed(lever: Lever, model: Path, tmp_path: Path) -> None:
    models = tmp_path / "home/models"
    models.mkdir(parents=True)
    shutil.copy(model, models / "mine.gguf")
    mine, other = packed(lever, models / "mine.gguf"), packed(lever, model)
    listed = json.loads(lever("list", "--json").stdout)

    assert listed == [
        {
            "name": "mine",
            "path": str(models / "mine.gguf"),
            "bytes": model.stat().st_size,
            "source": "lever",
            "images": [str(mine)],
            "image_bytes": mine.stat().st_size,
        },
        {
            "name": other.stem,
            "path": str(other),
            "bytes": other.stat().st_size,
            "source": "image",
            "images": [],
            "image_bytes": 0,
        },
    ]
    removed = lever("rm", "mine", other.stem).stderr.decode().splitlines()
    assert removed[0].startswith("removed mine and its flash images, ")
    assert removed[1].startswith(f"removed {other.stem}, ")
    assert json.loads(lever("list", "--json").stdout) == []
    assert model.exists()
