"""A comparison from its settings to its figures: opens what is needed, lets all answer, writes. Parses no words."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lever import bench
from lever.bench import IN_RAM, PLAIN, RAW_BYTES, Comparison, PresetWay, Prompt, RawReads, Request, Row, Way, settle
from lever.cli.console import Bar, bar, complain, note, printable, write_json, write_table
from lever.cli.options import INTERRUPTED
from lever.cli.showing import on_interrupt
from lever.errors import DoesNotFit, LeverError, StorageError
from lever.llm import LLM
from lever.loader import ModelSettings
from lever.memory import format_size
from lever.models import resolve
from lever.models.hub import PREFIX
from lever.opening import Wanted, open_llm, prepare
from lever.peer import DRAFT_ROOM, LLAMA_CPP, LlamaCpp, PeerModel, require_gguf, require_llama_cpp
from lever.plots import draw_bench, require_matplotlib
from lever.policies import preset
from lever.profile import identity_of
from lever.settings import SAMPLING_NUMBERS, Prune
from lever.trace import Cycle

log = logging.getLogger(__name__)

DIFFERENT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cage:
    """How much memory another program gets, and how that was written."""

    words: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is compared, on what."""

    model: str
    presets: Sequence[str]
    prompts: Sequence[Prompt]
    prompts_name: str
    rounds: int
    draft: str
    predictor: str
    prune: Prune
    use_image: bool
    use_profile: bool
    peer: bool
    cage: Cage | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where figures go."""

    json: Path | None
    to_stdout: bool  # the JSON, and no table
    plot: Path | None
    offline: bool
    quiet: bool


class _Interrupt:
    """Ctrl-C: presets give up between two layers, other programs at once."""

    def __init__(self) -> None:
        self.came = False
        self.peers: list[LlamaCpp] = []

    def __call__(self) -> None:
        self.came = True
        for peer in self.peers:
            peer.kill()


@dataclass(slots=True)
class _Measured:
    """What there is to write, however it ended."""

    found: Comparison
    cycles: Sequence[Cycle]
    about: Mapping[str, object]
    bytes_per_pass: int
    failure: LeverError | None = None


def compare(asked: Asked, settings: ModelSettings, request: Request, output: Output) -> int:
    """Measure and write; the exit code. What was measured is written whatever ends it."""
    _check(asked, output)
    interrupt = _Interrupt()
    with bar(quiet=output.quiet) as progress:
        measured = _measure(asked, settings, request, output, progress, interrupt)
    _write(measured, output, interrupted=interrupt.came)
    if measured.found.differences:
        first = measured.found.differences[0]
        complain(
            f"{first} ({len(measured.found.differences)} answers differ): that is a bug of lever, please report it"
        )
    if measured.failure is not None and not interrupt.came:
        raise measured.failure
    return DIFFERENT if measured.found.differences else INTERRUPTED if interrupt.came else 0


def _check(asked: Asked, output: Output) -> None:
    """What would be found out after minutes of measuring, or after loading."""
    if output.plot is not None:
        require_matplotlib(output.plot)
    if output.json is not None and not output.to_stdout:
        target = output.json if output.json.exists() else output.json.parent
        if output.json.is_dir() or not os.access(target, os.W_OK):
            raise StorageError(f"cannot write to {output.json}: give --json a file that can be made")
    if asked.peer:
        require_llama_cpp()


def _measure(
    asked: Asked, settings: ModelSettings, request: Request, output: Output, progress: Bar, interrupt: _Interrupt
) -> _Measured:
    with ExitStack() as stack:
        llm = stack.enter_context(_open(asked, settings, output, progress))
        if llm.template is None:
            log.warning("the model has no chat template: going on from the bare text")
        prompts = [(prompt, _encode(llm, prompt)) for prompt in asked.prompts]
        for _, ids in prompts:
            llm.check(ids)
        used = _load(llm, asked, progress)
        raw = stack.enter_context(RawReads(llm.gguf.path, used.block, used.depth))
        presets = _presets(llm, asked, request, lambda: interrupt.came, traced=output.plot is not None)
        drafting = [way for way in presets if way.drafts]
        measured = _Measured(
            Comparison([]),
            drafting[-1].cycles if drafting else (),
            _about(asked, llm, request, settings, used),
            llm.loaded.store.bytes_per_pass,
        )
        try:
            with on_interrupt(interrupt):
                n_ctx = max(len(ids) for _, ids in prompts) + request.max_new_tokens + DRAFT_ROOM
                peers = _peers(asked, llm, n_ctx, request, output, progress, interrupt, stack)
                ways: list[Way] = [*presets, *peers]
                measured.found.ways = [way.name for way in ways]
                progress.start(None, "comparing")
                bench.compare(
                    ways,
                    prompts,
                    measured.found,
                    rounds=asked.rounds,
                    read=(drafting or presets)[0].read,
                    raw_rate=lambda: raw_rate(raw, llm),
                    tell=progress.tell,
                )
        except LeverError as error:
            measured.failure = error
        return measured


def raw_rate(raw: RawReads, llm: LLM) -> float:
    """Bytes per second of reads alone, once the model's own have come to rest."""
    settle(llm.loaded.store.stats)
    return raw.bytes_per_s()


# --- what is compared ---------------------------------------------------------------------------------------


def _open(asked: Asked, settings: ModelSettings, output: Output, progress: Bar) -> LLM:
    """The model, with its draft if a preset needs one, in what the budget leaves beside raw reads."""
    # What a preset that prunes needs, others need too.
    drafting = sorted((name for name in asked.presets if preset(name).drafts), key=lambda name: not preset(name).prunes)
    if settings.dram <= RAW_BYTES:
        raise DoesNotFit(
            f"the budget is {format_size(settings.dram)}, and raw reads alone take {format_size(RAW_BYTES)}"
        )
    wanted = Wanted(
        asked.model,
        asked.draft,
        drafting[0] if drafting else PLAIN,
        asked.use_image,
        output.offline,
        asked.predictor,
        asked.prune,
    )
    return open_llm(wanted, replace(settings, dram=settings.dram - RAW_BYTES), progress)


def _load(llm: LLM, asked: Asked, progress: Bar) -> ModelSettings:
    """Load it, tuned as `lever run` is; the settings that were used."""
    tuning = prepare(llm, progress, use_profile=asked.use_profile)
    return tuning.settings if tuning is not None else llm.settings


def _encode(llm: LLM, prompt: Prompt) -> list[int]:
    """In the model's chat template, if it has one."""
    if llm.template is None:
        return llm.encode_raw(prompt.text)
    return llm.encode_chat([{"role": "user", "content": prompt.text}])


def _presets(
    llm: LLM, asked: Asked, request: Request, cancelled: Callable[[], bool], *, traced: bool
) -> list[PresetWay]:
    return [PresetWay(llm, preset(name), request, cancelled, traced=traced) for name in asked.presets]


def _peers(
    asked: Asked,
    llm: LLM,
    n_ctx: int,
    request: Request,
    output: Output,
    progress: Bar,
    interrupt: _Interrupt,
    stack: ExitStack,
) -> list[LlamaCpp]:
    """Other programs with the model loaded: in RAM without a draft, and in a cage with one if there is one."""
    if not asked.peer:
        return []

    def source(name: str) -> Path:
        path = resolve(name, offline=output.offline, progress=progress).path
        require_gguf(path)
        return path

    plain = PeerModel(source(asked.model), None, n_ctx, llm.loaded.n_threads)
    wanted: list[tuple[str, PeerModel, int | None]] = [(f"{LLAMA_CPP}{IN_RAM}", plain, None)]
    if asked.cage is not None:
        draft = source(llm.draft_name) if llm.draft_name is not None else None
        name = f"{LLAMA_CPP} in {asked.cage.words}{' with draft' if draft is not None else ''}"
        wanted.append((name, replace(plain, draft=draft), asked.cage.nbytes))
    for name, model, limit in wanted:
        progress.start(None, f"loading {name}")
        interrupt.peers.append(stack.enter_context(LlamaCpp(name, model, request, limit)))
        interrupt.peers[-1].wait()
    return interrupt.peers


def _about(asked: Asked, llm: LLM, request: Request, settings: ModelSettings, used: ModelSettings) -> dict[str, object]:
    """The machine and all that figures depend on. Names of files, but not where they lie."""
    loaded, identity = llm.loaded, identity_of(llm.gguf, llm.config)
    kind, _, device = identity.storage.rpartition(" on ")
    return {
        "date": date.today().isoformat(),
        "machine": identity.machine,
        "storage": f"{kind} on {Path(device).name}",
        "settings": {
            "model": _name(asked.model),
            "draft": _name(llm.draft_name) if llm.draft_name is not None else None,
            "prune": llm.prune,
            "image": loaded.image.describe() if loaded.image is not None else None,
            "layout": loaded.layout,
            "presets": list(asked.presets),
            "prompts": asked.prompts_name,
            "chat_template": llm.template is not None,
            "rounds": asked.rounds,
            "max_new_tokens": request.max_new_tokens,
            **{name: getattr(request.sampler, name) for name in SAMPLING_NUMBERS},
            "dram_budget_bytes": settings.dram,
            "dram_planned_bytes": loaded.plan.total + RAW_BYTES,
            "pinned_share": loaded.plan.pinned_share,
            "bytes_per_pass": loaded.store.bytes_per_pass,
            "n_ctx": loaded.shape.n_ctx,
            "n_batch": loaded.shape.n_batch,
            "n_threads": loaded.n_threads,
            "block": used.block,
            "depth": used.depth,
            "direct_io": loaded.store.direct_io,
            "buffered_reason": loaded.store.buffered_reason,
            "ggml": loaded.ggml.version_text,
        },
    }


def _name(reference: str) -> str:
    return reference if reference.startswith(PREFIX) else Path(reference).name


# --- what is shown ------------------------------------------------------------------------------------------


def _write(measured: _Measured, output: Output, *, interrupted: bool) -> None:
    found = measured.found
    if output.json is not None:
        whole = {**measured.about, "interrupted": interrupted, **bench.document(found, measured.bytes_per_pass)}
        _write_document(whole, output)
    if not found.results:
        note("no prompt has been answered by all: there are no figures")
        return
    table = bench.rows(found, measured.bytes_per_pass)
    totals = bench.rows(found, measured.bytes_per_pass, by_domain=False)
    if not output.to_stdout:
        write_table(Group(*_tables(found, table, totals)))
    if output.plot is not None:
        draw_bench(table, bench.typical(measured.cycles), output.plot)


def _write_document(whole: Mapping[str, object], output: Output) -> None:
    assert output.json is not None
    if output.to_stdout:
        write_json(whole)
        return
    text = json.dumps(whole, indent=1, ensure_ascii=False) + "\n"
    try:
        output.json.write_bytes(text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise StorageError(f"cannot write to {output.json}: {error.strerror or error}") from error


def _tables(found: Comparison, table: Sequence[Row], totals: Sequence[Row]) -> list[RenderableType]:
    shown: list[RenderableType] = [_speeds(table), "", _times(totals), ""]
    shown += [Text(printable(f"{name}: {ratio:.2f} times as fast")) for name, ratio in bench.ratios(table).items()]
    shown.append(Text(f"raw reads: {found.raw_read_bytes_per_s / 1e9:.2f} GB/s (median of {len(found.raw_rates)})"))
    first, *others = found.ours
    if others and not found.differences:
        shown.append(Text(f"the same text from the same logits as {first}: {', '.join(others)}"))
    return shown


def _speeds(table: Sequence[Row]) -> Table:
    headings = ("DOMAIN", "PRESET", "ANSWERS", "TOKENS", "TOKENS/s", "TOKENS A CYCLE", "GB/s READ", "PEAK")
    shown = Table(*headings, box=None, pad_edge=False)
    _to_the_right(shown, 2)
    last = ""
    for row in table:
        shown.add_row(
            printable(row.domain) if row.domain != last else "",
            printable(row.preset),
            str(row.prompts),
            str(row.new_tokens),
            f"{row.tokens_per_s:.2f}",
            f"{row.tokens_per_cycle:.2f}",
            f"{row.read_bytes_per_s / 1e9:.2f}" if row.read_bytes_per_s is not None else "",
            format_size(row.peak_rss_bytes),
        )
        last = row.domain
    return shown


def _times(totals: Sequence[Row]) -> Table:
    """Where a cycle's time goes, in milliseconds, and how near it comes to what it cannot be shorter than."""
    headings = ("ms A CYCLE", "DRAFT", "WAITING", "COMPUTE", "LOGITS", "PYTHON", "ALL", "BOUND", "ALL/BOUND")
    shown = Table(*headings, box=None, pad_edge=False)
    _to_the_right(shown, 1)
    for row in totals:
        parts = (row.draft_s, row.stall_s, row.verify_s, row.project_s, row.python_s, row.cycle_s, row.bound_s)
        against = f"{row.cycle_s / row.bound_s:.2f}" if row.bound_s else ""
        shown.add_row(printable(row.preset), *(f"{1e3 * s:.1f}" if s is not None else "" for s in parts), against)
    return shown


def _to_the_right(table: Table, first: int) -> None:
    for column in table.columns[first:]:
        column.justify = "right"
