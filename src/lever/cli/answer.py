"""One answer as it comes: text or JSON on stdout, its progress and figures on stderr. Parses no words."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from lever.cli.console import bar, note, write_json
from lever.cli.options import INTERRUPTED
from lever.cli.showing import Waiting, figures, on_interrupt, show
from lever.errors import UsageError
from lever.llm import LLM, Generation, GenerationSettings
from lever.loader import ModelSettings
from lever.opening import Wanted, learn, open_llm, prepare

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of which model."""

    wanted: Wanted
    text: str
    system: str | None = None
    raw: bool = False  # no chat template
    use_profile: bool = True  # what is known of this machine, and measured if nothing is


@dataclass(frozen=True, slots=True)
class Output:
    """How the answer is shown."""

    json: bool = False
    quiet: bool = False


def answer(question: Question, settings: ModelSettings, request: GenerationSettings, output: Output) -> int:
    """Print the answer; the exit code."""
    if not question.text and not question.raw:
        raise UsageError("the prompt is empty: there is nothing to answer")
    with bar(quiet=output.quiet) as progress, open_llm(question.wanted, settings, progress) as llm:
        prompt = _encode(llm, question)
        llm.check(prompt)  # before anything large is read
        tuning = prepare(llm, progress, use_profile=question.use_profile)
        on_prefill = Waiting(llm, progress, quiet=output.quiet).start(len(prompt))
        generation = llm.generate(prompt, request, on_prefill)
        with on_interrupt(generation.cancel):
            show(generation, progress, to_stdout=not output.json)
        line = figures(generation.stats, llm.loaded.store.bytes_per_pass)
    if tuning is not None:
        learn(tuning, generation.stats)
    if output.json:
        write_json(_document(generation))
    if not output.quiet:
        note(line)
    return INTERRUPTED if generation.cancelled else 0


def _encode(llm: LLM, question: Question) -> list[int]:
    if not question.raw and llm.template is not None:
        system = [{"role": "system", "content": question.system}] if question.system is not None else []
        return llm.encode_chat([*system, {"role": "user", "content": question.text}])
    if question.system is not None:
        raise UsageError("--system needs a chat template: leave it out, or leave out --raw")
    if not question.raw:
        log.warning("the model has no chat template: going on from the bare text")
    return llm.encode_raw(question.text)


def _document(generation: Generation) -> dict[str, object]:
    return {
        "text": generation.text,
        "tokens": generation.tokens,
        "finish_reason": generation.finish_reason,  # null after Ctrl-C
        "stats": generation.stats.to_dict(),
    }
