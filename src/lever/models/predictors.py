"""Predictors in the cache: where that of a model and its draft is kept, and whether a file is one of theirs."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from lever.arch import ModelConfig
from lever.errors import LeverError
from lever.gguf import GGUF
from lever.models.cache import Progress, Silent, home
from lever.models.images import model_sha256, source_sha256
from lever.predictor import Predictor

log = logging.getLogger(__name__)


def predictors_dir() -> Path:
    """Where they are kept."""
    return home() / "predictors"


def predictor_path(target: str, draft: str) -> Path:
    """The place of the predictor of a model and a draft, by their hashes."""
    return predictors_dir() / (hashlib.sha256(f"{target} {draft}".encode()).hexdigest()[:20] + ".gguf")


def kept(config: ModelConfig, target: GGUF, draft: GGUF, progress: Progress) -> Predictor | None:
    """The one that was made for this model and draft; None where there is none. One that is unsound is told of."""
    if not any(predictors_dir().glob("*.gguf")):
        return None  # so that large files are not hashed for nothing
    sha256 = model_sha256(target, progress)
    path = predictor_path(sha256, model_sha256(draft, progress))
    if not path.exists():
        return None
    try:
        found = Predictor.read(path)
        found.check(config, sha256)
    except LeverError as error:
        log.warning("not pruning: %s", error)
        return None
    return found


def named(path: Path, config: ModelConfig, target: GGUF, draft: GGUF, progress: Progress) -> Predictor:
    """One that somebody has named. Errors as of `Predictor.read`, and UsageError for another model's; another draft's
    is told of.
    """
    found = Predictor.read(path)
    found.check(config, model_sha256(target, progress))
    if found.draft != model_sha256(draft, progress):
        log.warning("the predictor %s was made beside another draft: it may prune less well", path)
    return found


def remove_predictors(files: Sequence[Path]) -> int:
    """Delete those of the model in these files, and those that were made beside it as a draft; the bytes freed."""
    paths, freed = list(predictors_dir().glob("*.gguf")), 0
    if not paths:
        return 0
    sha256 = source_sha256(files, Silent())
    for path in paths:
        try:
            found = Predictor.read(path)
        except LeverError:
            continue  # whose it is cannot be told; one made anew takes its place
        if sha256 in (found.target, found.draft):
            freed += path.stat().st_size
            path.unlink()
    return freed
