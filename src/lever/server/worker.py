"""One thread that owns the model: it opens and loads it, then answers one job after the other. Knows no HTTP.

    loading ──> ready ──> stopped
       └──────────┴─────> failed

A job hands what happens to its `tell`, in this thread. What goes wrong in a job ends that job alone; what goes wrong
beside them ends the thread, and is told to all who wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from lever.errors import Cancelled, ContextOverflow, LeverError, UsageError
from lever.llm import LLM, Generation, GenerationSettings, TokenLogprobs
from lever.opening import Told, Tuning, learn
from lever.request import FinishReason
from lever.server.cycles import Cycles, CycleShown, text_of
from lever.stats import RunStats

log = logging.getLogger(__name__)

State = Literal["loading", "ready", "failed", "stopped"]
SUMMED = (  # as they stand in the figures of an answer
    "new_tokens", "prefill_s", "decode_s", "verified", "accepted", "cycles", "read_bytes", "read_s", "stall_s",
)  # fmt: skip
READINGS_APART_S = 0.2  # of a prompt: a small model has hundreds of layers a second


class QueueFull(LeverError):
    """As many jobs wait as may."""


class NotReady(LeverError):
    """The model is still being loaded, could not be loaded, or is on its way out."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How far the prompt is read, in tokens; `cached` ones were there before."""

    processed: int
    total: int
    cached: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Piece:
    """Text, in whole characters. `logprobs`: one for each token that it came with, if they were asked for."""

    text: str
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is complete."""

    finish_reason: FinishReason
    stats: RunStats


@dataclass(frozen=True, slots=True)
class Failed:
    """There will be no more: Cancelled, or what went wrong."""

    error: Exception


Event = Reading | Piece | CycleShown | Done | Failed


@dataclass(slots=True, kw_only=True)
class Job:
    """An answer that is asked for. The last event is Done or Failed."""

    prompt: Sequence[int]
    settings: GenerationSettings
    tell: Callable[[Event], None]
    readings: bool = False  # whether Reading events are wanted
    cycles: bool = False  # whether CycleShown events are
    cancelled: bool = False
    generation: Generation | None = None  # once it has begun

    def cancel(self) -> None:
        """Give it up: before it begins, or within one layer. From any thread, at any time, also after its end."""
        self.cancelled = True
        if self.generation is not None:
            self.generation.cancel()


@dataclass(frozen=True, slots=True)
class Served:
    """A model that is ready, and what is known of this machine with it."""

    llm: LLM
    tuning: Tuning | None = None


@dataclass(slots=True)
class Totals:
    """Sums over all answers: counts, seconds and bytes."""

    requests: int = 0
    prompt_tokens: int = 0  # read, without cached ones
    new_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    verified: int = 0
    accepted: int = 0
    cycles: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    stall_s: float = 0.0

    def add(self, stats: RunStats) -> None:
        """One answer more, or the part of it that there is."""
        self.requests += 1
        self.prompt_tokens += stats.prompt_tokens - stats.cached_tokens
        for name in SUMMED:
            setattr(self, name, getattr(self, name) + getattr(stats, name))


@dataclass(slots=True)
class _Stoppable:
    """Progress of loading, which ends when nobody wants the model any more: Cancelled from the next report on."""

    told: Told
    stopping: Callable[[], bool]
    doing: str = "opening it"
    jobs: int = 0

    def start(self, total: int | None, what: str) -> None:
        self._look()
        self.jobs += 1
        self.doing = what
        self.told.start(total, what)

    def advance(self, n: int) -> None:
        self._look()
        self.told.advance(n)

    def tell(self, text: str) -> None:
        self._look()
        self.told.tell(text)

    def finish(self) -> None:
        self.told.finish()

    def note(self, text: str) -> None:
        self.told.note(text)

    def _look(self) -> None:
        if self.stopping():
            raise Cancelled("loading was given up")


class Worker:
    """The thread. `start` it, `submit` jobs, `stop` it; all of these from any other thread."""

    def __init__(
        self,
        open_model: Callable[[Told], Served],
        told: Told,
        *,
        n_waiting: int,
        on_change: Callable[[State], None] = lambda _state: None,
    ) -> None:
        """`open_model` is called in the thread; `n_waiting` jobs at most wait beside the one that runs.

        `on_change` is told each new state, in the thread.
        """
        self.totals = Totals()
        self.error: Exception | None = None  # why it failed
        self._open_model, self._told = open_model, _Stoppable(told, lambda: self._stopping)
        self._n_waiting, self._on_change = n_waiting, on_change
        self._changed = threading.Condition()
        self._state: State = "loading"
        self._served: Served | None = None
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="lever-worker")

    @property
    def state(self) -> State:
        """Where it is."""
        return self._state

    @property
    def running(self) -> bool:
        """Whether a job is being answered."""
        return self._running is not None

    @property
    def waiting(self) -> int:
        """Jobs that have not begun."""
        return len(self._waiting)

    @property
    def served(self) -> Served:
        """The model; NotReady if there is none. Other threads may ask its tokenizer and template, and look at it."""
        self.check()
        assert self._served is not None
        return self._served

    def check(self) -> None:
        """NotReady unless there is a model that answers."""
        if self._state != "ready":
            raise self._not_ready()

    def _not_ready(self) -> NotReady:
        if self._state == "loading":
            return NotReady(f"the model is still being loaded: {self._told.doing}")
        if self._state == "stopped":
            return NotReady("the server is shutting down")
        what = "the model could not be loaded" if self._served is None else "the server has failed"
        return NotReady(f"{what}: {self.error}")

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Let it be answered in its turn. NotReady, or QueueFull."""
        with self._changed:
            self.check()
            for gone in [waiting for waiting in self._waiting if waiting.cancelled]:
                self._waiting.remove(gone)
            if len(self._waiting) + self.running > self._n_waiting:
                raise QueueFull(f"{len(self._waiting)} requests are waiting already: try again later")
            self._waiting.append(job)
            self._changed.notify()

    def stop(self) -> None:
        """Give up all jobs, and loading. Does not wait: see `join`."""
        with self._changed:
            self._stopping = True
            if self._running is not None:
                self._running.cancel()
            self._changed.notify()

    def join(self) -> None:
        """Wait until everything is given back."""
        if self._thread.ident is not None:
            self._thread.join()

    # In the thread

    def _main(self) -> None:
        try:
            self._served = self._open_model(self._told)
        except Cancelled:
            self._become("stopped")
            return
        except LeverError as error:
            self.error = error
            self._become("failed")
            return
        except Exception as error:
            log.exception("the model could not be loaded")
            self.error = error
            self._become("failed")
            return
        last: State = "failed"
        try:
            with self._served.llm:
                self._become("ready")
                while (job := self._next()) is not None:
                    self._work(self._served, job)
            last = "stopped"
        except Exception as error:  # beside the answers; unseen, it would leave all who ask waiting
            log.exception("the thread that answers has failed")
            self.error = error
        self._become(last)
        for job in self._waiting:
            job.tell(Failed(self._not_ready()))

    def _become(self, state: State) -> None:
        with self._changed:
            self._state = state
        self._on_change(state)

    def _next(self) -> Job | None:
        """The next job, waited for; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._waiting)
            if self._stopping:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def _work(self, served: Served, job: Job) -> None:
        last: Event
        try:
            last = self._answer(served, job)
        except (Cancelled, ContextOverflow, UsageError) as error:
            last = Failed(error)
        except LeverError as error:
            log.error("an answer failed: %s", error)  # it says all that there is to say
            last = Failed(error)
        except Exception as error:
            log.exception("an answer failed")
            last = Failed(error)
        stats = job.generation.stats if job.generation is not None else None
        with self._changed:
            self._running = None  # before it is told: who hears of it may ask for the next one
            if stats is not None:
                self.totals.add(stats)
        job.tell(last)
        if served.tuning is not None and isinstance(last, Done):
            learn(served.tuning, last.stats)

    def _answer(self, served: Served, job: Job) -> Event:
        """All of it but the last event, which is returned."""
        if job.cancelled:
            return Failed(Cancelled("the answer was given up"))
        llm = served.llm
        shown = Cycles(partial(text_of, llm.tokenizer), llm.loaded.store.stats.read_bytes)
        reader = _Reader(job)
        generation = job.generation = llm.generate(
            job.prompt,
            job.settings,
            on_prefill=reader.read if job.readings else lambda _n_tokens: None,
            on_cycle=(lambda cycle: job.tell(shown.shown(cycle))) if job.cycles else None,
        )
        if job.cancelled:  # while it was made
            generation.cancel()
        sent = 0
        for text in generation:
            ended = generation.tokens[-1] in llm.tokenizer.eog_ids and not job.settings.ignore_eos
            sent = _send(job, generation, text, sent, len(generation.tokens) - ended)
        if generation.finish_reason is None:
            return Failed(Cancelled("the answer was given up"))
        if generation.finish_reason == "length" and sent < len(generation.logprobs):
            _send(job, generation, "", sent, len(generation.tokens))  # at a stop, what is left is no part of the text
        return Done(generation.finish_reason, generation.stats)


class _Reader:
    """Tells now and then how far a prompt is read."""

    def __init__(self, job: Job) -> None:
        self._job, self._processed = job, 0
        self._started = self._told = time.monotonic()

    def read(self, n_tokens: int) -> None:
        """So many tokens more are through the layers."""
        self._processed += n_tokens
        assert self._job.generation is not None
        cached, total = self._job.generation.stats.cached_tokens, len(self._job.prompt)
        now, done = time.monotonic(), cached + self._processed
        if done == total or now - self._told >= READINGS_APART_S:
            self._told = now
            self._job.tell(Reading(done, total, cached, now - self._started))


def _send(job: Job, generation: Generation, text: str, sent: int, end: int) -> int:
    """Text with what is told of the tokens since the `sent` first ones; how many are sent now."""
    job.tell(Piece(text, generation.logprobs[sent:end]))
    return end
