"""From the word for a model to its predictor in the cache. Prints nothing."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np

from lever import predictor
from lever.draft import Draft
from lever.errors import DoesNotFit, StorageError, UsageError
from lever.gguf import F32
from lever.llm import LLM
from lever.loader import ModelSettings
from lever.memory import format_size, rss_bytes
from lever.models import cache
from lever.models.images import model_sha256
from lever.models.predictors import predictor_path
from lever.opening import Told, Wanted, open_llm
from lever.predictor import Predictor
from lever.training import MOST_OF_CONTEXT, Pair, TrainingSettings, check, default_layers, nbytes, train
from lever.training.fit import Floats

log = logging.getLogger(__name__)

N_CTX = 1024  # of answers to a prompt beside each other
TEXT_TOKENS = 512  # of a text that are read at once


def make_predictor(
    wanted: Wanted,
    settings: ModelSettings,
    progress: Told,
    *,
    texts: Sequence[Path] = (),
    prompts: Path | None = None,
    n_positions: int = 8_000,
    layers: tuple[int, ...] | None = None,
    out: Path | None = None,
) -> Predictor:
    """Make the predictor of a model and its draft and keep it, in the cache unless `out` says where.

    It learns from the model's answers to lever's prompts, to those of a file, or from texts. Errors as of opening and
    loading a model; UsageError where there is no draft, or too little to learn from.
    """
    with closing(open_llm(wanted, settings, progress)) as llm:
        if llm.companion is None:
            raise UsageError(f"{wanted.model} has no draft, and a predictor is fitted beside one: give it with --draft")
        chosen = default_layers(llm.config.n_layers) if layers is None else layers
        training = TrainingSettings(layers=chosen, n_positions=n_positions)
        n_ctx = min(N_CTX, llm.config.n_ctx_train, llm.companion.config.n_ctx_train)
        tokens = _texts(llm, texts, n_ctx) if texts else _prompts(llm, prompts, n_ctx, progress)
        check(training, llm.config.n_layers, len(tokens))
        progress.start(None, "loading the weights")
        beside = nbytes(llm.config.n_embd, len(chosen))
        if settings.dram <= beside:
            raise DoesNotFit(f"training alone takes {format_size(beside)}: give more with --dram, or fewer --layers")
        loaded = llm.load(settings=replace(settings, dram=settings.dram - beside, n_ctx=n_ctx))
        target = model_sha256(llm.gguf, progress)
        draft = model_sha256(llm.companion.gguf, progress)
        pair = Pair(
            loaded,
            Draft(llm.companion.load(rss_bytes()).model, n_vocab=llm.companion.n_vocab),
            _norm(llm),
            llm.tokenizer.eog_ids,
        )
        path = out or predictor_path(target, draft)
        work = cache.home() / "training" / predictor_path(target, draft).stem
        progress.start(None, "recording")
        with cache.exclusive(f"training-{work.name}", progress, "makes this predictor"):
            found = train(pair, tokens, training, work, progress.tell, texts=bool(texts))
            predictor.write(
                path,
                llm.config,
                target=target,
                draft=draft,
                translators=[translator for translator, _ in found],
                matrices=[matrix for _, matrix in found],
            )
            _forget(work)
    return Predictor.read(path)


def _forget(work: Path) -> None:
    """Delete what was recorded."""
    try:
        shutil.rmtree(work)
    except OSError as error:
        log.warning("what was recorded is left in %s: %s", work, error.strerror or error)


def _norm(llm: LLM) -> Floats:
    """Weights of the norm before the output projection."""
    place = llm.gguf.tensors["output_norm.weight"]
    if place.type != F32:
        raise UsageError("the norm before the output projection is not in single precision")
    return np.fromfile(llm.gguf.files[place.file], np.float32, llm.config.n_embd, offset=place.offset)


def _prompts(llm: LLM, path: Path | None, n_ctx: int, progress: Told) -> list[list[int]]:
    """One a line, in the model's chat template if it has one. Those that are too long are left out, and told of."""
    lines = _read(path) if path is not None else (resources.files("lever") / "data" / "training.txt").read_text()
    prompts = [line for line in lines.splitlines() if line.strip()]
    if llm.template is None:
        found = [llm.encode_raw(prompt) for prompt in prompts]
    else:
        found = [llm.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    short = [tokens for tokens in found if tokens and len(tokens) <= MOST_OF_CONTEXT * n_ctx]
    if len(short) < len(found):
        progress.note(
            f"leaving out {len(found) - len(short)} of {len(found)} prompts: they leave no room for an answer"
        )
    return short


def _texts(llm: LLM, paths: Sequence[Path], n_ctx: int) -> list[list[int]]:
    """Pieces of texts."""
    n = min(TEXT_TOKENS, n_ctx)
    tokens = [llm.tokenizer.encode(_read(path), add_special=True, parse_special=False) for path in paths]
    return [text[start : start + n] for text in tokens for start in range(0, len(text), n)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read {path}: {error}") from error
