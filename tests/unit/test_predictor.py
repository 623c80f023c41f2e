"""The file of a predictor: what is written is read, and every damage is told."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lever.arch import ModelConfig
from lever.errors import GGUFError, LeverError, StorageError, UsageError
from lever.predictor import Predictor, Quality, Translator, write
from lever.prune import Mix

N_EMBD, N_LAYERS = 8, 6
QUALITY = Quality(
    positions=100,
    first_by_draft=0.75,
    first_by_lens=0.125,
    first_by_translator=0.5,
    first_by_both=0.875,
    kept_rows=0.5,
    kept_rows_by_draft=0.625,
)
TRANSLATORS = [
    Translator(layer=layer, mix=Mix(0.5, 0.75), threshold=0.25, quality=replace(QUALITY, kept_rows=kept))
    for layer, kept in ((2, 0.5), (4, 0.25))
]
MATRICES = [np.full((N_EMBD, N_EMBD), value, np.float16) + np.eye(N_EMBD, dtype=np.float16) for value in (1, 2)]


def config(**changes: Any) -> ModelConfig:
    return cast(ModelConfig, SimpleNamespace(n_embd=N_EMBD, n_layers=N_LAYERS, **changes))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "kept" / "predictor.gguf"
    write(found, config(), target="t" * 64, draft="d" * 64, translators=TRANSLATORS, matrices=MATRICES)
    return found


def test_what_is_written_is_read(path: Path) -> None:
    found = Predictor.read(path)
    assert (found.target, found.draft) == ("t" * 64, "d" * 64)
    assert found.translators == tuple(TRANSLATORS)
    for translator, matrix in zip(found.translators, MATRICES, strict=True):
        into = np.zeros((N_EMBD, N_EMBD), np.float16)
        found.read_matrix(translator, into)
        assert (into == matrix).all()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_best_one_leaves_most_layers_to_the_fewest_rows(path: Path) -> None:
    assert Predictor.read(path).best.layer == 2  # half of the rows spared three layers; three quarters spared one


def test_it_serves_its_own_model_alone(path: Path) -> None:
    found = Predictor.read(path)
    found.check(config(), "t" * 64)
    with pytest.raises(UsageError, match=r"predictor.gguf was made for another model: make one .* train-predictor"):
        found.check(config(), "x" * 64)
    other = cast(ModelConfig, SimpleNamespace(n_embd=N_EMBD, n_layers=N_LAYERS + 1))
    with pytest.raises(UsageError, match="another model"):
        found.check(other, "t" * 64)


def test_a_file_that_is_none_is_told(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"lever-predictor", b"other-predictor"))
    with pytest.raises(GGUFError, match="is no predictor: lever train-predictor makes one"):
        Predictor.read(path)


@pytest.mark.parametrize("length", [0, 10, 200, 600, -1, -200])
def test_a_file_that_was_cut_is_told(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(LeverError, match=r"predictor\.gguf"):
        Predictor.read(path)


@pytest.mark.parametrize("at", range(0, 1200, 7))
def test_a_flipped_byte_never_ends_in_anything_but_an_error_of_ours(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 0x41
    path.write_bytes(data)
    with suppress(LeverError):
        found = Predictor.read(path)
        found.read_matrix(found.best, np.zeros((found.n_embd, found.n_embd), np.float16))
        assert all(0 <= t.quality.kept_rows <= 1 and t.mix.score >= 0 for t in found.translators)


def test_a_matrix_with_what_is_no_number_is_damaged(path: Path) -> None:
    found = Predictor.read(path)
    data = bytearray(path.read_bytes())
    data[found.places[0].offset : found.places[0].offset + 2] = np.array([np.nan], np.float16).tobytes()
    path.write_bytes(data)
    with pytest.raises(GGUFError, match="matrix of layer 2 is damaged; make it anew"):
        found.read_matrix(found.translators[0], np.zeros((N_EMBD, N_EMBD), np.float16))


@pytest.mark.parametrize(
    "wrong",
    [
        {"mix": Mix(float("nan"), 1.0)},
        {"mix": Mix(1.0, -1.0)},
        {"threshold": 1.5},
        {"quality": replace(QUALITY, kept_rows=float("inf"))},
        {"quality": replace(QUALITY, first_by_both=-0.5)},
    ],
    ids=str,
)
def test_figures_that_cannot_be_are_damage(path: Path, wrong: dict[str, Any]) -> None:
    translators = [replace(TRANSLATORS[0], **wrong)]
    write(path, config(), target="", draft="", translators=translators, matrices=MATRICES[:1])
    with pytest.raises(GGUFError, match=r"figures of layer 2 make no sense; make it anew|must be a finite number"):
        Predictor.read(path)


def test_a_file_that_is_gone_is_told(path: Path) -> None:
    found = Predictor.read(path)
    path.unlink()
    with pytest.raises(StorageError, match=r"predictor.gguf: cannot be read: No such file"):
        found.read_matrix(found.best, np.zeros((N_EMBD, N_EMBD), np.float16))


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        write(tmp_path / "file" / "p.gguf", config(), target="", draft="", translators=TRANSLATORS, matrices=MATRICES)
