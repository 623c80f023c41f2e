"""Text in, text out: the tokenizer, the chat template, the sampler and the engine, put together for one model."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lever import gguf as gguf_file
from lever.arch import ModelConfig
from lever.chat import ChatTemplate
from lever.companion import LOGITS, PART, TREE_ROWS, Companion
from lever.cycle_cost import Foretold
from lever.draft import Draft
from lever.engine import Engine
from lever.errors import Cancelled, DoesNotFit, ModelError, StorageError, TemplateError, UsageError
from lever.ggml import load
from lever.ggml.devices import Device, Devices
from lever.gguf import GGUF
from lever.grammar import Grammar, GrammarConstraint, Vocabulary, nbytes
from lever.loader import GRAMMAR, PYTHON, LoadedModel, ModelSettings, Progress, most_ctx, plan
from lever.memory import Ledger, peak_rss_bytes, release_unused, rss_bytes
from lever.owner import Owner
from lever.policies import preset
from lever.predictor import Predictor, Translator
from lever.pruner import Pruning, paper_rule
from lever.request import FinishReason, Step, check_prompt
from lever.sample import Sampler, logprob, top_logprobs
from lever.scores import Scores
from lever.settings import LOOKUP, Prune, SamplerSettings
from lever.stats import RunStats
from lever.text import StopMatcher
from lever.tokenizer import StreamDecoder, Tokenizer
from lever.trace import Cycle
from lever.weights.plan import Plan
from lever.workspace import ModelShape

log = logging.getLogger(__name__)

MOST_LOGPROBS = 20  # as OpenAI has it
PREDICTOR = "predictor"  # of the plan
NOT_ALIKE = "rows that %s computes change with those beside them: text may differ from plain decoding at near ties"
NO_ROOM_TO_PRUNE = "the budget does not hold the predictor and the output projection as well"
# Lists that only the tokenizer needs; they weigh tens of megabytes as Python objects.
VOCABULARY_KEYS = ("tokens", "merges", "scores", "token_type")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """One request: how tokens are drawn, and when to stop."""

    sampler: SamplerSettings
    max_new_tokens: int | None = None  # None: until an end token or a full context; 0: the prompt is only read
    stops: Sequence[str] = ()
    ignore_eos: bool = False
    n_logprobs: int | None = None  # likeliest tokens to tell of at each place; None: no probabilities at all
    constraint: Grammar | None = None  # what the answer must obey

    def __post_init__(self) -> None:
        """UsageError for what lies outside its range."""
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            raise UsageError(f"max-tokens is {self.max_new_tokens}: it must be at least 0, or -1 for no limit")
        if self.n_logprobs is not None and not 0 <= self.n_logprobs <= MOST_LOGPROBS:
            raise UsageError(f"logprobs is {self.n_logprobs}: it must be 0 to {MOST_LOGPROBS}")
        if self.constraint is not None and self.ignore_eos:
            raise UsageError("a grammar says where the answer may end: leave out --ignore-eos")
        StopMatcher(self.stops)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token of an answer and the likeliest ones at its place, best first: natural logs of the raw softmax."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class LLM(Owner):
    """A model that answers. One request at a time."""

    def __init__(
        self,
        path: Path,
        settings: ModelSettings,
        *,
        name: str = "",
        draft: Path | None = None,
        draft_name: str = "",
        lookup: bool = False,
        policy: str | None = None,
    ) -> None:
        """Read the file's header and build the tokenizer: enough to encode prompts. Errors as in `lever.errors`.

        `draft` is a small model of the same vocabulary that guesses ahead; with `lookup` and without a draft, guesses
        come from the text alone; `policy` is the name of a preset. None of these changes the text. DoesNotFit before
        the tokenizer is built, which takes a hundred megabytes for a moment.
        """
        self.name = name or str(path)
        self.draft_name = draft_name or str(draft) if draft is not None else LOOKUP if lookup else None
        self.policy = preset(policy or ("flash-ar" if self.draft_name is None else "lever"))
        self.settings = settings
        if self.policy.drafts and draft is None and not (lookup and self.policy.adaptive):
            raise UsageError(f"the preset {self.policy.name} needs a draft: give a model with --draft")
        with ExitStack() as stack:
            self._devices = stack.enter_context(Devices(load()))
            self._device = self._devices.open(settings.device)
            read = _read(path, self._with_trees(settings), draft, self._devices, self._device)
            self.gguf, self.config, self.tokenizer, self._companion = read
            stack.pop_all()
        self.prune: Prune = "off"
        self._predictor: Predictor | None = None
        self._must_prune = False
        self._scores: Scores | None = None  # that passes are thinned by
        self.foretold: Foretold | None = None  # what the engine, made at the first answer, knows beforehand
        self._loaded: LoadedModel | None = None
        self._vocabulary: Vocabulary | None = None  # made for the first answer that obeys a grammar

    def prune_with(self, predictor: Predictor, how: Prune, *, must: bool) -> None:
        """Thin the draft's trees in the middle of passes; the text stays the same. Before `load`, which raises what is
        wrong with the predictor's matrix where it `must` be used, and else goes on without it.
        """
        self._predictor, self.prune, self._must_prune = predictor, how, must

    def plan(self, settings: ModelSettings | None = None, *, draft: bool = True) -> tuple[ModelShape, Plan]:
        """What `load` would do with these settings, or with those it was made with; DoesNotFit if it would.

        Without `draft` it is what it would do had it been made without one.
        """
        gc.collect()  # the header's lists, before the plan counts the memory in use
        settings = settings or self.settings
        return self._planned(self._with_trees(settings), rss_bytes())[0] if draft else self._plan(settings, {})

    def _planned(self, settings: ModelSettings, python: int) -> tuple[tuple[ModelShape, Plan], dict[str, int]]:
        """The plan with all that is beside the target, and that; without the predictor, where it is of no use, or where
        its place would cut the context.
        """
        beside = _beside(self._companion, python)
        shape, found = self._plan(settings, beside)
        if self._predictor is None:
            return (shape, found), beside
        with suppress(DoesNotFit):
            with_it = {**beside, PREDICTOR: self._predictor_nbytes}
            its_shape, its_plan = self._plan(settings, with_it)
            if its_shape == shape and its_plan.pinned.issuperset(its_plan.units.projection):
                return (its_shape, its_plan), with_it
        return (shape, found), beside

    def _plan(self, settings: ModelSettings, beside: Mapping[str, int]) -> tuple[ModelShape, Plan]:
        return plan(load(), self.gguf, self.config, settings, beside, device=self._device)

    @functools.cached_property
    def _predictor_nbytes(self) -> int:
        return Scores.nbytes(load(), self.config, self._with_trees(self.settings).n_tree)

    def _with_trees(self, settings: ModelSettings) -> ModelSettings:
        """With room for trees, where anything guesses."""
        if self.draft_name is None:
            return settings
        return replace(settings, n_tree=settings.n_tree or TREE_ROWS, n_logits=LOGITS)

    @property
    def companion(self) -> Companion | None:
        """The draft's place beside the target."""
        return self._companion

    @property
    def translator(self) -> Translator | None:
        """Of the predictor, the part that is used, if there is one."""
        return None if self._predictor is None else self._predictor.best

    def load(self, progress: Progress | None = None, settings: ModelSettings | None = None) -> LoadedModel:
        """Plan, allocate, and read what is pinned; `generate` does it if nobody has.

        `settings` take the place of those it was made with: some are better chosen when the model is known.
        """
        if self._loaded is None:
            gc.collect()
            release_unused()
            settings, python = self._with_trees(settings or self.settings), rss_bytes()
            _, beside = self._planned(settings, python)  # before the draft is loaded: it may not fit
            if self._predictor is not None and PREDICTOR not in beside:
                self._leave_predictor(NO_ROOM_TO_PRUNE)
            if self._companion is not None:
                self._companion.load(python, progress)
            self._loaded = LoadedModel(
                self.gguf,
                self.config,
                settings,
                beside=beside,
                python=python,
                device=self._device,
                progress=progress,
            )
            if not self._device.on_host:
                self._tell_of_rows(self._loaded)
            if self._predictor is not None:
                self._open_scores(self._loaded, self._predictor)
        return self._loaded

    def _tell_of_rows(self, loaded: LoadedModel) -> None:
        """What the probe has found of the device that computes the layers."""
        if loaded.row_invariant:
            log.info("rows that %s computes have the same bits whatever rows are beside them", self._device.name)
        else:
            log.warning(NOT_ALIKE, self._device.name)

    def _open_scores(self, loaded: LoadedModel, predictor: Predictor) -> None:
        try:
            self._scores = loaded.open_scores(lambda into: predictor.read_matrix(predictor.best, into))
        except (ModelError, StorageError) as error:
            if self._must_prune:
                raise
            self._leave_predictor(str(error))

    def _leave_predictor(self, why: str) -> None:
        log.warning("not pruning: %s", why)
        self._predictor, self.prune = None, "off"

    def _pruning(self) -> Pruning | None:
        """What thins passes."""
        if self._scores is None or self._predictor is None:
            return None
        best = self._predictor.best
        return Pruning(self._scores, best, paper_rule(best) if self.prune == "paper" else None)

    @property
    def loaded(self) -> LoadedModel:
        """The model in its place."""
        return self.load()

    @functools.cached_property
    def engine(self) -> Engine:
        """What turns tokens into tokens."""
        loaded = self.loaded
        draft = None
        if self._companion is not None:
            draft = Draft(self._companion.load(0).model, n_vocab=self._companion.n_vocab)
        return Engine(
            loaded.model,
            loaded.store,
            loaded.n_threads,
            loaded.start_threads,
            draft=draft,
            policy=self.policy,
            foretold=self.foretold,
            pruning=self._pruning(),
        )

    def encode_raw(self, text: str) -> list[int]:
        """Tokens of a prompt without a chat template: special tokens in the text count, as for llama.cpp's -p."""
        ids = self.tokenizer.encode(text, add_special=True, parse_special=True)
        if self.tokenizer.add_bos and ids[:2] == [self.tokenizer.bos_id] * 2:
            log.warning("the prompt begins with the start token, and the model adds one: there are two now")
        return ids

    @functools.cached_property
    def template(self) -> ChatTemplate | None:
        """The model's chat template, None if its file has none. TemplateError if it cannot be used."""
        return ChatTemplate.from_gguf(self.gguf, self.tokenizer)

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Tokens of a conversation in the model's own template, ready for its answer."""
        if self.template is None:
            raise TemplateError(f"{self.name} has no chat template: use --raw to go on from the bare text")
        return self.template.encode(self.tokenizer, messages)

    def check(self, prompt: Sequence[int]) -> None:
        """UsageError or ContextOverflow for a prompt that cannot be answered, as far as that is known before `load`."""
        check_prompt(prompt, self._loaded.shape.n_ctx if self._loaded else most_ctx(self.config, self.settings))

    def generate(
        self,
        prompt: Sequence[int],
        settings: GenerationSettings,
        on_prefill: Callable[[int], None] = lambda _n_tokens: None,
        on_cycle: Callable[[Cycle], None] | None = None,
    ) -> Generation:
        """Start an answer; iterate over it for its text. Errors as of `check`, before anything is loaded.

        A constraint that this vocabulary cannot obey is a UsageError; the first one takes memory, and is DoesNotFit
        where the model was loaded without room for it (`ModelSettings.grammars`) and left none.
        `on_prefill` is told of prompt tokens as they are read, `on_cycle` of each cycle that has ended.
        """
        self.check(prompt)
        return Generation(self, prompt, settings, on_prefill, on_cycle)

    def close(self) -> None:
        """Give everything back, whatever goes wrong on the way. Safe to call twice."""
        self._vocabulary = None
        with ExitStack() as stack:  # the last one goes first
            for owner in (self._devices, self._companion, self._loaded, self._scores):
                if owner is not None:
                    stack.callback(owner.close)

    def _steps(
        self,
        prompt: Sequence[int],
        settings: GenerationSettings,
        stats: RunStats,
        on_prefill: Callable[[int], None],
        on_cycle: Callable[[Cycle], None] | None,
        cancelled: Callable[[], bool],
    ) -> Iterator[Step]:
        constraint = self._constraint(settings.constraint, len(prompt))
        sampler = Sampler(_without_end(settings, self.tokenizer), self.config.n_vocab, constraint)
        return self.engine.steps(
            prompt,
            sampler.draw,
            max_new_tokens=settings.max_new_tokens,
            end_tokens=frozenset() if settings.ignore_eos else self.tokenizer.eog_ids,
            stats=stats,
            temperature=settings.sampler.temperature,
            complete=sampler.complete,
            on_prefill=on_prefill,
            cancelled=cancelled,
            on_cycle=on_cycle,
        )

    def _constraint(self, grammar: Grammar | None, n_prompt: int) -> GrammarConstraint | None:
        if grammar is None:
            return None
        if self._vocabulary is None:
            if GRAMMAR not in self.loaded.plan.parts:
                self.loaded.ledger.reserve(GRAMMAR, nbytes(self.config.n_vocab))
            self._vocabulary = Vocabulary(self.tokenizer)
        return self._vocabulary.constraint(grammar, n_prompt)

    def _new_stats(self, seed: int) -> RunStats:
        loaded = self.loaded
        return RunStats(
            direct_io=loaded.store.direct_io,
            buffered_reason=loaded.store.buffered_reason,
            dram_budget_bytes=loaded.plan.budget,
            dram_planned_bytes=loaded.plan.total,
            pinned_share=loaded.plan.pinned_share,
            layout=loaded.layout,
            image=loaded.image.describe() if loaded.image is not None else None,
            n_ctx=loaded.shape.n_ctx,
            seed=seed,
            preset=self.policy.name,
            prune=self.prune,
            predictor=None if self._predictor is None else str(self._predictor.path),
            model=self.name,
            draft=self.draft_name,
            device=self._device.name,
            draft_device=self._companion.device.name if self._companion is not None else None,
            exact=loaded.row_invariant,
            ggml=loaded.ggml.version_text,
        )


class Generation:
    """One answer while it comes: iterate for its text, in whole characters. Figures and ids are up to date always."""

    def __init__(
        self,
        llm: LLM,
        prompt: Sequence[int],
        settings: GenerationSettings,
        on_prefill: Callable[[int], None],
        on_cycle: Callable[[Cycle], None] | None,
    ) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []  # of each token, where asked for
        self.finish_reason: FinishReason | None = None
        self.stats = llm._new_stats(settings.sampler.seed)
        self.cancelled = False
        self._steps = llm._steps(prompt, settings, self.stats, on_prefill, on_cycle, lambda: self.cancelled)
        self._decoder = StreamDecoder(llm.tokenizer)
        self._stops = StopMatcher(settings.stops)
        self._n_logprobs = settings.n_logprobs

    def cancel(self) -> None:
        """Let the iteration end, within one layer. May be called from a signal handler or another thread."""
        self.cancelled = True

    def __iter__(self) -> Iterator[str]:
        try:
            yield from self._pieces()
        except Cancelled:
            self.finish_reason = None
            yield from self._show(self._stops.flush())  # no stop string will come: it is text like any other
        finally:
            self.stats.peak_rss_bytes = peak_rss_bytes()

    def _pieces(self) -> Iterator[str]:
        for step in self._steps:
            piece, stopped = self._take(step)
            yield from self._show(piece)
            if stopped:
                self.finish_reason = "stop"
                return
        self.finish_reason = self.finish_reason or "length"  # no token was asked for
        yield from self._show(self._last_text())

    def _show(self, piece: str) -> Iterator[str]:
        if piece:
            self.text += piece
            yield piece

    def _take(self, step: Step) -> tuple[str, bool]:
        """Text that a step makes safe to show, and whether it completes a stop string."""
        self.tokens.append(step.token)
        if self._n_logprobs is not None:
            top = tuple(top_logprobs(step.logits, self._n_logprobs)) if self._n_logprobs else ()
            own = dict(top).get(step.token)  # where it is among them, no second softmax of all logits is needed
            own = logprob(step.logits, step.token) if own is None else own
            self.logprobs.append(TokenLogprobs(step.token, own, top))
        self.finish_reason = step.finish_reason
        return self._stops.feed(self._decoder.feed(step.token))

    def _last_text(self) -> str:
        """What was held back for the rest of a character or of a stop string."""
        piece, stopped = self._stops.feed(self._decoder.flush())
        if stopped:
            self.finish_reason = "stop"
            return piece
        return piece + self._stops.flush()


def _read(
    path: Path, settings: ModelSettings, draft: Path | None, devices: Devices, device: Device
) -> tuple[GGUF, ModelConfig, Tokenizer, Companion | None]:
    """The header without the lists of its vocabulary, what is made of it, and the draft that fits it."""
    gguf = gguf_file.read(path)
    config = ModelConfig.from_gguf(gguf)
    companion = None
    if draft is not None:
        companion = Companion(draft, config, settings, gguf, devices)
    _require_room(gguf, config, settings, companion, device)
    tokenizer = Tokenizer.from_gguf(gguf)
    dropped = {f"tokenizer.ggml.{key}" for key in VOCABULARY_KEYS}
    kept = {key: value for key, value in gguf.metadata.items() if key not in dropped}
    return replace(gguf, metadata=kept), config, tokenizer, companion


def _beside(companion: Companion | None, python: int) -> dict[str, int]:
    """The draft's part of the budget."""
    return {} if companion is None else {PART: companion.nbytes(python)}


def _require_room(
    gguf: GGUF, config: ModelConfig, settings: ModelSettings, companion: Companion | None, device: Device
) -> None:
    """DoesNotFit for a budget too small for the model, or for building its tokenizer.

    The plan counts Python's memory as it is now, with the lists of the vocabulary. The tokenizer takes more than these
    when it takes their place, so nothing is refused here that would fit later.
    """
    plan(load(), gguf, config, settings, _beside(companion, rss_bytes()), device=device)
    ledger = Ledger(settings.dram, ("give more with --dram",))
    ledger.reserve(PYTHON, rss_bytes())
    ledger.reserve("building the tokenizer", Tokenizer.building_nbytes(gguf))


def _without_end(settings: GenerationSettings, tokenizer: Tokenizer) -> SamplerSettings:
    """With ignore_eos no end token can be drawn, as in llama.cpp."""
    if not settings.ignore_eos:
        return settings.sampler
    banned = dict.fromkeys(tokenizer.eog_ids, -float("inf"))
    return replace(settings.sampler, logit_bias={**settings.sampler.logit_bias, **banned})
