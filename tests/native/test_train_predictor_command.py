"""`lever train-predictor` and what other verbs make of predictors, in processes of their own, on a tiny pair: what is
said, kept, found, refused, and left by Ctrl-C.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lever.predictor import Predictor
from tests.command import Lever, interrupt, one_line
from tests.fakes import wait_until
from tests.native.test_run import WITH_A_PARTNER
from tests.native.test_serve_command import started
from tests.tiny import tiny_model

SHAPE: dict[str, Any] = {"n_ff": 256, "n_vocab": 384, "type": "Q4_0"}
LINES = ("Hello, world", "Is water wet?", "", "this and the world", "Why is the sky blue?")
POSITIONS = ("--positions", "600")  # of two prompts: 16 answers of 32 tokens to each
GREEDY = ("--temp", "0", "-s", "1")


@dataclass(frozen=True)
class Trained:
    """A pair, the home in which a predictor was made for it, and what was said then."""

    target: Path
    draft: Path
    prompts: Path
    home: Path
    stdout: str
    stderr: str
    code: int

    @property
    def predictor(self) -> Path:
        (path,) = (self.home / "predictors").iterdir()
        return path

    @property
    def words(self) -> tuple[str | Path, ...]:
        """What trains one."""
        return ("train-predictor", self.target, "--draft", self.draft, "--prompts", self.prompts, *POSITIONS)

    def ask(self, *more: str | Path) -> tuple[str | Path, ...]:
        """What answers with the pair."""
        return ("run", self.target, "Hello, world", "--draft", self.draft, "-n", "24", "--no-profile", *more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, bytecode: Path) -> Trained:
    folder = tmp_path_factory.mktemp("predictor")
    target = tiny_model(folder / "target.gguf", arch="qwen2", n_layers=4, **SHAPE)
    draft = tiny_model(folder / "draft.gguf", arch="qwen2", n_layers=2, **SHAPE)  # the first two of the target's
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(LINES))
    begun = Trained(target, draft, prompts, folder / "home", "", "", 0)
    done = Lever(begun.home, bytecode)(*begun.words)
    return Trained(target, draft, prompts, begun.home, done.stdout.decode(), done.stderr.decode(), done.returncode)


@pytest.fixture(scope="module")
def greedy(trained: Trained, bytecode: Path) -> list[int]:
    """The tokens of plain decoding."""
    tokens: list[int] = Lever(trained.home, bytecode).json(*trained.ask(*GREEDY, "--no-draft"))["tokens"]
    return tokens


@pytest.fixture
def lever(trained: Trained, bytecode: Path) -> Lever:
    """In the home where the predictor is."""
    return Lever(trained.home, bytecode)


@pytest.fixture
def copied(trained: Trained, tmp_path: Path, bytecode: Path) -> Lever:
    """In a home like it, where things may be damaged."""
    shutil.copytree(trained.home, tmp_path / "home")
    return Lever(tmp_path / "home", bytecode)


@pytest.fixture
def fresh(tmp_path: Path, bytecode: Path) -> Lever:
    """In a home without anything."""
    return Lever(tmp_path / "fresh", bytecode)


# --- making one ---------------------------------------------------------------------------------------------


def test_a_table_tells_of_each_layer_and_a_note_where_the_file_is(trained: Trained) -> None:
    assert trained.code == 0, trained.stderr
    head, *rows = trained.stdout.splitlines()
    assert re.split(r"  +", head.strip()) == [
        "after layer",
        "draft",
        "lens",
        "translator",
        "both",
        "rows kept",
        "by draft alone",
    ]
    assert [row.split()[0] for row in rows] == ["1", "2"]  # of four layers, those from the middle on but the last
    for row in rows:
        assert all(0 <= float(share) <= 1 for share in row.split()[1:])
    assert f"kept in {trained.predictor}\n" in trained.stderr


def test_the_file_lies_in_the_cache_and_what_was_recorded_is_gone(trained: Trained) -> None:
    found = Predictor.read(trained.predictor)
    assert (found.n_embd, found.n_layers) == (256, 4)
    assert [translator.layer for translator in found.translators] == [1, 2]
    assert all(translator.quality.positions > 0 for translator in found.translators)
    assert not [*(trained.home / "training").iterdir()]


def test_it_learns_from_texts_instead_and_tells_all_figures_in_json(
    trained: Trained, fresh: Lever, tmp_path: Path
) -> None:
    book, out = tmp_path / "book.txt", tmp_path / "mine.gguf"
    book.write_text("this and the world is not hello to her in a system. " * 36)
    done = fresh(*trained.words[:4], "--text", book, "--layers", "1", "-o", out, "--json", "-q")
    assert (done.returncode, done.stderr) == (0, b"")
    document = json.loads(done.stdout)
    assert document["path"] == str(out)
    (translator,) = document["translators"]
    assert translator["layer"] == 1
    assert translator["mix"].keys() == {"score", "draft"}
    assert translator["quality"]["positions"] == 256  # half of the first piece of a text
    assert 0 < translator["quality"]["kept_rows"] <= 1
    (kept,) = Predictor.read(out).translators
    assert kept.quality.positions == 256
    assert not Path(fresh.environment["LEVER_HOME"], "predictors").exists()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--draft", "none"), 2, "has no draft"),
        (("--draft", "lookup"), 2, "has no draft"),
        (("--layers", "nonsense"), 2, "it must be auto, or numbers"),
        (("--layers", "1,,2"), 2, "it must be auto, or numbers"),
        (("--layers", "1,1"), 2, "it must be auto, or numbers"),
        (("--layers", "3"), 2, "layer 3: there must be layers behind it, so it is 0 to 2"),
        (("--layers", "0,77"), 2, "layer 77"),
        (("--positions", "0"), 2, "positions"),
        (("--positions", "40"), 2, "positions are too few"),
        (("--text", "book.txt"), 2, "--text or --prompts, not both"),
        (("--prompts", "/dev/null"), 2, "one text is too little"),
        (("--prompts", "/nowhere/prompts.txt"), 5, "cannot read /nowhere/prompts.txt"),
        (("--dram", "100MiB"), 3, "--dram"),
    ],
)
def test_what_makes_no_sense_is_refused_with_one_line(
    trained: Trained, lever: Lever, words: tuple[str, ...], code: int, says: str
) -> None:
    done = lever(*trained.words, *words, "-q")
    assert done.returncode == code
    assert says in one_line(done.stderr)
    assert done.stdout == b""


def test_ctrl_c_ends_it_and_leaves_what_was_recorded(trained: Trained, fresh: Lever) -> None:
    home = Path(fresh.environment["LEVER_HOME"])
    with fresh.started(*trained.words, "--positions", "100000000") as process:
        wait_until(lambda: len([*home.glob("training/*/*.npz")]) >= 2, seconds=60)
        interrupt(process)
    assert process.returncode == 130
    assert len([*home.glob("training/*/*.npz")]) >= 2
    assert not (home / "predictors").exists()


# --- finding it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("--prune", "paper"), ("--predictor", "none"), ("--prune", "off")], ids=str)
def test_a_run_finds_it_unless_it_shall_not_and_the_text_is_the_same(
    trained: Trained, lever: Lever, greedy: list[int], words: tuple[str, ...]
) -> None:
    done = lever(*trained.ask(*GREEDY, "--json", "-v", *words))
    document, used = json.loads(done.stdout), words in ((), ("--prune", "paper"))
    stats = document["stats"]

    assert document["tokens"] == greedy
    assert stats["predictor"] == (str(trained.predictor) if used else None)
    assert stats["prune"] == (words[1] if words and used else "auto" if used else "off")
    assert stats["exact"] is True
    planned = re.search(r"planned: (.*)", done.stderr.decode())
    assert planned is not None
    assert ("predictor " in planned[1]) == used  # has its place in the budget


def test_what_is_drawn_is_the_same_with_and_without(trained: Trained, lever: Lever) -> None:
    words = (("--prune", "paper"), ("--predictor", "none"), ("--no-draft",))
    found, *others = (lever.json(*trained.ask("--temp", "0.9", "-s", "7", *more)) for more in words)
    assert found["stats"]["predictor"] == str(trained.predictor)
    assert [other["tokens"] for other in others] == [found["tokens"]] * 2


def test_one_that_is_given_is_used_wherever_it_lies(trained: Trained, fresh: Lever, tmp_path: Path) -> None:
    elsewhere = Path(shutil.copy(trained.predictor, tmp_path / "mine.gguf"))
    done = fresh(*trained.ask(*GREEDY, "--predictor", elsewhere, "--json"))
    assert json.loads(done.stdout)["stats"]["predictor"] == str(elsewhere)
    assert "another draft" not in done.stderr.decode()


def test_one_that_was_made_beside_another_draft_serves_and_is_told_of(
    trained: Trained, lever: Lever, tmp_path: Path
) -> None:
    """But it is not found by itself."""
    other = tiny_model(tmp_path / "other.gguf", arch="qwen2", n_layers=1, seed=4, **SHAPE)
    words = trained.ask(*GREEDY, "--draft", other, "--json")
    assert json.loads(lever(*words).stdout)["stats"]["predictor"] is None
    done = lever(*words, "--predictor", trained.predictor)
    assert json.loads(done.stdout)["stats"]["predictor"] == str(trained.predictor)
    assert "was made beside another draft" in done.stderr.decode()


# --- refusing it --------------------------------------------------------------------------------------------


def test_another_models_predictor_is_refused(trained: Trained, lever: Lever, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other.gguf", arch="qwen2", n_layers=4, seed=9, **SHAPE)
    words = ("run", other, "Hello", "-n", "2", "--draft", trained.draft, "-q", "--no-profile")
    done = lever(*words, "--predictor", trained.predictor)
    assert done.returncode == 2
    assert "was made for another model" in one_line(done.stderr)
    assert json.loads(lever(*words, "--json").stdout)["stats"]["predictor"] is None


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def without_a_number(path: Path) -> None:
    """In one place of all matrices, where a reader of the header alone does not look."""
    data = bytearray(path.read_bytes())
    for place in Predictor.read(path).places:
        data[place.offset + 100 : place.offset + 102] = np.array([np.nan], np.float16).tobytes()
    path.write_bytes(data)


def of_another_kind(path: Path) -> None:
    path.write_bytes(b"no GGUF at all")


@pytest.mark.parametrize("damage", [cut, without_a_number, of_another_kind], ids=lambda damage: damage.__name__)
def test_a_damaged_one_that_is_kept_is_told_of_and_one_that_is_given_ends_the_run(
    trained: Trained, copied: Lever, greedy: list[int], damage: Any
) -> None:
    (path,) = Path(copied.environment["LEVER_HOME"], "predictors").iterdir()
    damage(path)
    done = copied(*trained.ask(*GREEDY, "--json"))
    document = json.loads(done.stdout)

    assert done.returncode == 0
    assert f"lever: not pruning: {path}" in done.stderr.decode()
    assert document["tokens"] == greedy
    assert (document["stats"]["predictor"], document["stats"]["prune"]) == (None, "off")

    done = copied(*trained.ask(*GREEDY, "--predictor", path, "-q"))
    assert done.returncode == 4
    assert str(path) in one_line(done.stderr)


def test_one_that_is_not_there_ends_the_run(trained: Trained, lever: Lever, tmp_path: Path) -> None:
    """Also where the draft was not named, and is left out if it is that which cannot be read."""
    words = ("run", trained.target, "Hello", "-n", "2", "-q", "--no-profile", "--predictor", tmp_path / "nowhere.gguf")
    named = lever(*words, "--draft", trained.draft)
    unnamed = subprocess.run(
        [sys.executable, "-c", WITH_A_PARTNER, trained.draft, *words],
        env=lever.environment,
        capture_output=True,
        timeout=120,
        check=False,
    )
    for done in (named, unnamed):
        assert done.returncode == 5
        assert "nowhere.gguf: cannot be read" in one_line(done.stderr)


# --- nothing unasked ----------------------------------------------------------------------------------------


def test_no_verb_trains_unasked(trained: Trained, fresh: Lever) -> None:
    home = Path(fresh.environment["LEVER_HOME"])
    assert fresh(*trained.ask(*GREEDY)).returncode == 0
    chat = ("chat", trained.target, "--draft", trained.draft, "-n", "4", "--no-profile")
    assert fresh(*chat, stdin=b"Hello\n").returncode == 0
    with started(fresh, trained.target, "--draft", trained.draft, "--no-profile") as process:
        process.url()
    assert (home / "images").exists()
    assert not (home / "predictors").exists()
    assert not (home / "training").exists()
