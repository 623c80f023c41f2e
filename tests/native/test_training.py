"""What a predictor is fitted to, and the whole way to one, on tiny models: records are what plain passes say of the
same text, and a run that was stopped goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lever.arch import ModelConfig
from lever.draft import CANDIDATES, Draft
from lever.engine import Engine
from lever.errors import StorageError, UsageError
from lever.ggml import load
from lever.ggml.probe import probe
from lever.gguf import read
from lever.loader import LoadedModel, ModelSettings
from lever.models import Silent as SilentProgress
from lever.opening import Silent, Wanted
from lever.pack import PackSettings, pack
from lever.predictor import Predictor, Translator, write
from lever.sample import Sampler
from lever.settings import SamplerSettings
from lever.stats import RunStats
from lever.training import Pair, TrainingSettings, _record, default_layers, train
from lever.training.make import make_predictor
from lever.training.record import NOTHING, TEMPERATURES, Record, Recorder
from lever.training.rows import OutputRows
from lever.tree import DraftTree
from tests import tiny
from tests.lacking import lacking
from tests.models import TOKENS, open_tiny, relative_error

N_VOCAB, N_LAYERS = 384, 3
LAYERS = (0, 1)
PROMPT = TOKENS[:20]
NO_END: frozenset[int] = frozenset()
SHAPE: dict[str, Any] = {"n_ff": 256, "n_vocab": N_VOCAB, "type": "F32"}
# Of F16 beside F32, and of sums in another order: `relative_error` of all states of a test is at 0.0003.
ROUNDING = 0.001


@dataclass(frozen=True)
class Files:
    """A target, and its first layers, which draft: often they guess right."""

    target: Path
    draft: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("training")
    return Files(
        tiny.tiny_model(folder / "target.gguf", n_layers=N_LAYERS, **SHAPE),
        tiny.tiny_model(folder / "draft.gguf", n_layers=N_LAYERS - 1, **SHAPE),
    )


@dataclass(frozen=True)
class Opened:
    """A target and a draft that are recorded, and the same two apart, which say what is right."""

    target: LoadedModel
    draft: Draft
    plain: LoadedModel
    plain_draft: Draft

    def recorder(self, end: frozenset[int] = NO_END) -> Recorder:
        return Recorder(self.target.model, self.draft, LAYERS, end)


@pytest.fixture(scope="module")
def models(files: Files) -> Iterator[Opened]:
    drafting: dict[str, Any] = {"n_tree": 26, "pin_percent": 100, "n_batch": 16, "n_logits": 4, "n_steps": 3}
    with ExitStack() as stack:
        yield Opened(
            stack.enter_context(open_tiny(files.target, n_tree=26, n_logits=3, n_batch=64, pin_percent=100)),
            Draft(stack.enter_context(open_tiny(files.draft, **drafting)).model),
            stack.enter_context(open_tiny(files.target, pin_percent=100)),
            Draft(stack.enter_context(open_tiny(files.draft, **drafting)).model),
        )


# --- what plain passes say ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Position:
    """Behind one token of a text."""

    hidden: dict[int, NDArray[np.float32]]
    final: NDArray[np.float32]
    best: int


def plainly(loaded: LoadedModel, prompt: Sequence[int], text: Sequence[int]) -> list[Position]:
    """What a model says of each token of a text in turn, behind a prompt."""
    model, found = loaded.model, list[Position]()
    model.kv.truncate(0)
    if prompt:
        model.forward(prompt)
    for token in text:
        hidden: dict[int, NDArray[np.float32]] = {}

        def see(layer: int, into: dict[int, NDArray[np.float32]] = hidden) -> None:
            state = model.hidden(1)[0].astype(np.float64)
            into[layer] = (state / np.sqrt(np.mean(state * state) + loaded.config.norm_eps)).astype(np.float32)

        model.forward([token], see)
        best = int(model.project([0])[0].argmax())
        found.append(Position(hidden, model.normed(1)[0].copy(), best))
    model.kv.truncate(0)
    return found


def answer(
    loaded: LoadedModel, prompt: Sequence[int], n: int, seed: int, temperature: float, end: frozenset[int]
) -> list[int]:
    """Plain decoding of n tokens, each the next of which would be drawn behind a row."""
    draw = Sampler(SamplerSettings(seed=seed, temperature=temperature), loaded.config.n_vocab).draw
    engine = Engine(loaded.model, loaded.store, 1)
    steps = engine.steps(prompt, draw, max_new_tokens=n, end_tokens=end, stats=RunStats())
    return [step.token for step in steps]


def branches_of(models: Opened, prompt: Sequence[int], n: int, n_tokens: int, seed: int, end: frozenset[int]) -> Any:
    """The rows of each branch: the tokens that were drawn and do not end it."""
    temperatures = [0.0, *(TEMPERATURES[place % len(TEMPERATURES)] for place in range(n - 1))]
    drawn = [
        answer(models.plain, prompt, n_tokens, seed + place, temperature, end)
        for place, temperature in enumerate(temperatures)
    ]
    return [[token for token in tokens if token not in end] for tokens in drawn]


def step_by_step(branches: Sequence[Sequence[Any]]) -> list[Any]:
    """What comes of each branch in turn, the first of all before the second of any."""
    longest = max(map(len, branches))
    return [branch[at] for at in range(longest) for branch in branches if at < len(branch)]


def assert_same_states(record: Record, expected: Sequence[Position]) -> None:
    assert len(record) == len(record.final) == len(expected)
    assert record.hidden.keys() == {*LAYERS}
    for layer in LAYERS:
        right = np.stack([position.hidden[layer] for position in expected]).astype(np.float64)
        assert relative_error(record.hidden[layer].astype(np.float32), right) < ROUNDING
    right = np.stack([position.final for position in expected]).astype(np.float64)
    assert relative_error(record.final.astype(np.float32), right) < ROUNDING
    assert record.best.tolist() == [position.best for position in expected]


def assert_same_candidates(record: Record, draft: Draft, texts: Sequence[Sequence[int]]) -> None:
    """Those that a draft names which is asked at each place by itself."""
    for tokens, chances, text in zip(record.tokens, record.chances, texts, strict=True):
        tree = DraftTree.rooted_at(text[-1])
        draft.begin(tree, text, 0.0)
        n = len(tree) - 1
        assert tokens.tolist() == [*tree.tokens[1:], *[NOTHING] * (CANDIDATES - n)]
        np.testing.assert_allclose(chances, [*tree.reach[1:], *[0.0] * (CANDIDATES - n)], rtol=1e-3)


# --- records ------------------------------------------------------------------------------------------------


def test_answers_are_what_plain_decoding_gives_and_each_row_is_what_a_plain_pass_says(models: Opened) -> None:
    told: list[int] = []
    record = models.recorder().answers(PROMPT, 5, 6, 70, told.append)
    branches = branches_of(models, PROMPT, 5, 6, 70, NO_END)

    assert told == [5, 10, 15, 20, 25, 30]
    assert len({tuple(branch) for branch in branches}) == 5
    found = [plainly(models.plain, PROMPT, branch) for branch in branches]
    assert_same_states(record, step_by_step(found))
    texts = [[[*PROMPT, *branch[: at + 1]] for at in range(len(branch))] for branch in branches]
    assert_same_candidates(record, models.plain_draft, step_by_step(texts))
    assert (record.chances > 0).any(axis=1).all()


def test_the_first_branch_alone_is_the_greedy_answer(models: Opened) -> None:
    record = models.recorder().answers(PROMPT, 5, 6, 70)
    greedy = answer(models.plain, PROMPT, 7, 0, 0.0, NO_END)
    assert record.best[::5].tolist() == greedy[1:]
    others = branches_of(models, PROMPT, 5, 6, 70, NO_END)[1:]
    assert greedy[:6] not in others


def test_an_end_token_ends_its_branch_and_no_other(models: Opened) -> None:
    whole = branches_of(models, PROMPT, 3, 8, 70, NO_END)
    end = frozenset({next(token for token in whole[1][2:] if token not in whole[1][:2])})
    branches = branches_of(models, PROMPT, 3, 8, 70, end)
    assert 0 < len(branches[1]) < 8
    assert max(map(len, branches)) == 8

    record = models.recorder(end).answers(PROMPT, 3, 8, 70)
    found = [plainly(models.plain, PROMPT, branch) for branch in branches]
    assert_same_states(record, step_by_step(found))
    texts = [[[*PROMPT, *branch[: at + 1]] for at in range(len(branch))] for branch in branches]
    assert_same_candidates(record, models.plain_draft, step_by_step(texts))


def test_answers_that_end_at_once_are_a_record_of_nothing(models: Opened, tmp_path: Path) -> None:
    record = models.recorder(frozenset(range(N_VOCAB))).answers(PROMPT, 3, 8, 70)
    assert len(record) == len(record.final) == 0
    record.save(tmp_path / "empty.npz")
    assert Record.load(tmp_path / "empty.npz").hidden[0].shape == (0, models.target.config.n_embd)


def test_a_full_context_ends_all_branches(files: Files, models: Opened) -> None:
    with open_tiny(files.target, n_tree=26, n_ctx=256, pin_percent=100) as target:
        recorder = Recorder(target.model, models.draft, LAYERS, NO_END)
        prompt = TOKENS[:234]
        record = recorder.answers(prompt, 4, 32, 70)  # room for five steps of four rows
        assert len(record) == 20
        assert len(recorder.answers(TOKENS[:254], 4, 32, 70)) == 0
    branches = branches_of(models, prompt, 4, 5, 70, NO_END)
    found = [plainly(models.plain, prompt, branch) for branch in branches]
    assert_same_states(record, step_by_step(found))


def test_a_text_is_read_as_it_is(models: Opened) -> None:
    """In several passes, whose rows are projected a few at a time."""
    text = TOKENS[:150]
    record = models.recorder().text(text)
    assert_same_states(record, plainly(models.plain, [], text))
    assert_same_candidates(record, models.plain_draft, [text[: n + 1] for n in range(len(text))])


def test_what_was_recorded_before_leaves_no_trace(models: Opened) -> None:
    recorder = models.recorder()
    first = recorder.answers(PROMPT, 4, 6, 3)
    recorder.text(TOKENS[30:90])
    again = recorder.answers(PROMPT, 4, 6, 3)
    np.testing.assert_array_equal(again.best, first.best)
    np.testing.assert_array_equal(again.tokens, first.tokens)
    np.testing.assert_array_equal(again.final.view(np.uint16), first.final.view(np.uint16))
    assert models.target.model.kv.length == 0


def test_what_is_saved_is_loaded_and_what_is_damaged_is_told(models: Opened, tmp_path: Path) -> None:
    record, path = models.recorder().text(PROMPT), tmp_path / "record.npz"
    record.save(path)
    found = Record.load(path)
    for name in ("final", "best", "tokens", "chances"):
        np.testing.assert_array_equal(getattr(found, name), getattr(record, name))
    for layer in LAYERS:
        np.testing.assert_array_equal(found.hidden[layer], record.hidden[layer])
    assert [file.name for file in tmp_path.iterdir()] == [path.name]

    data = path.read_bytes()
    for damaged in (b"", data[: len(data) // 2], data[:-1], b"PK" + bytes(200), b"nothing of the kind"):
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match=r"record\.npz cannot be read"):
            Record.load(path)


# --- rows of the output projection --------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_K", "Q6_K"])
def test_rows_are_those_of_the_projection(tmp_path: Path, kind: str, *, tied: bool) -> None:
    """By ggml's own routine, apart from lever. More than are read at once."""
    fields = tiny.tiny_fields(n_layers=1, n_ff=256, n_vocab=N_VOCAB, type=kind, tied=tied)
    path = fields.write(tmp_path / "tiny.gguf")
    blocks = fields.tensor("token_embd.weight" if tied else "output.weight").data
    expected = tiny.dequantise(blocks, kind).reshape(N_VOCAB, -1)
    tokens = np.array([[5, 383, 0], [383, -1, 17]], np.int32)
    with open_tiny(path) as loaded, OutputRows(loaded, 500) as rows:
        places = rows.places(tokens)
        assert (places >= 0).tolist() == [[True, True, True], [True, False, True]]
        np.testing.assert_array_equal(rows.at(places)[places >= 0], expected[tokens[tokens >= 0]].astype(np.float16))
        every = np.arange(N_VOCAB, dtype=np.int32)
        np.testing.assert_array_equal(rows.at(rows.places(every)), expected.astype(np.float16))
        np.testing.assert_array_equal(rows.places(tokens), places)


def test_rows_are_as_many_as_there_is_room_for(files: Files) -> None:
    with open_tiny(files.target) as loaded, OutputRows(loaded, 10) as rows:
        assert rows.room == 10
        few = rows.places(np.arange(7, dtype=np.int32))
        assert rows.room == 3
        more = rows.places(np.arange(20, dtype=np.int32))
        assert rows.room == 0
        assert (more[:7] == few).all()
        assert sorted(more[more >= 0].tolist()) == list(range(10))
        later = rows.places(np.array([3, 100, 5], np.int32))
        assert later.tolist() == [few[3], -1, few[5]]
        assert rows.at(later).shape == (3, loaded.config.n_embd)


def test_a_projection_in_the_kernels_own_layout_is_refused(tmp_path: Path) -> None:
    if not probe(load(), tiny.TYPE_IDS["Q4_0"], repacked=True):
        lacking("this CPU has no layout of its own for Q4_0")
    source = read(tiny.tiny_model(tmp_path / "tiny.gguf", n_layers=1, n_ff=256, type="Q4_0"))
    out, config = tmp_path / "image.gguf", ModelConfig.from_gguf(source)
    settings = PackSettings(dram=1 << 40, n_threads=1)
    pack(source, config, out, settings, name="tiny", sha256=lambda: "ab" * 32, progress=SilentProgress())
    with open_tiny(out) as loaded, pytest.raises(UsageError, match="use --no-image"):
        OutputRows(loaded, 10)
    with open_tiny(tmp_path / "tiny.gguf", layout="repacked") as loaded, OutputRows(loaded, 10) as rows:
        assert rows.places(np.array([3], np.int32)).tolist() == [0]  # read from the file, where it lies plainly


# --- the whole way ------------------------------------------------------------------------------------------

PROMPTS = [TOKENS[start : start + 12] for start in range(0, 60, 10)]
FEW = TrainingSettings(layers=LAYERS, n_positions=170, n_branches=4, n_tokens=6)
EACH = 4 * 6  # positions of a prompt


class Stopped(Exception):
    """As if somebody had pressed Ctrl-C."""


Trained = list[tuple[Translator, NDArray[np.float16]]]


@pytest.fixture
def pair(files: Files) -> Iterator[Pair]:
    drafting: dict[str, Any] = {"n_tree": 48, "pin_percent": 100, "n_logits": 8, "n_steps": 6}
    with (
        open_tiny(files.target, n_tree=48, n_logits=8, n_ctx=256, pin_percent=100) as target,
        open_tiny(files.draft, **drafting) as draft,
    ):
        yield Pair(target, Draft(draft.model), norm_of(target), NO_END)


def norm_of(loaded: LoadedModel) -> NDArray[np.float32]:
    place = loaded.gguf.tensors["output_norm.weight"]
    return np.fromfile(loaded.gguf.path, np.float32, loaded.config.n_embd, offset=place.offset)


def trained(
    pair: Pair, work: Path, settings: TrainingSettings = FEW, *, stop_at: str = "never", **more: Any
) -> Trained:
    """The result; Stopped when a line begins so."""

    def tell(line: str) -> None:
        told.append(line)
        if line.startswith(stop_at):
            raise Stopped

    told: list[str] = []
    return train(pair, more.pop("prompts", PROMPTS), settings, work, tell, **more)


def stopped_at(pair: Pair, work: Path, stop_at: str, settings: TrainingSettings = FEW, **more: Any) -> list[str]:
    """Begin to train and stop; the names of what was recorded."""
    with pytest.raises(Stopped):
        trained(pair, work, settings, stop_at=stop_at, **more)
    return sorted(path.name for path in work.iterdir())


def test_a_run_gives_translators_that_a_predictor_is_made_of(pair: Pair, tmp_path: Path) -> None:
    found, config = trained(pair, tmp_path / "work"), pair.target.config
    assert [translator.layer for translator, _ in found] == [*LAYERS]
    path = tmp_path / "predictor.gguf"
    write(
        path,
        config,
        target="t" * 64,
        draft="d" * 64,
        translators=[translator for translator, _ in found],
        matrices=[matrix for _, matrix in found],
    )
    kept = Predictor.read(path)
    kept.check(config, "t" * 64)
    assert len(kept.translators) == len(found)
    for again, (translator, matrix) in zip(kept.translators, found, strict=True):
        assert again.quality.positions == translator.quality.positions == 3 * EACH / 2  # half of three answers
        assert 0 < again.quality.kept_rows <= 1
        into = np.empty_like(matrix)
        kept.read_matrix(again, into)
        np.testing.assert_array_equal(into, matrix)
        assert (matrix != np.diag(pair.norm).astype(np.float16)).any()


def test_a_translator_is_nearer_to_the_target_than_the_lens(pair: Pair, tmp_path: Path) -> None:
    """On prompts that it was not fitted to, behind the last layer but one: enough positions for a model so narrow."""
    many = replace(FEW, layers=(1,), n_positions=900, n_branches=8, n_tokens=12)
    ((translator, _),) = trained(pair, tmp_path / "work", many)
    quality = translator.quality
    assert quality.first_by_translator > quality.first_by_lens
    assert quality.first_by_both >= quality.first_by_draft


def test_a_run_that_was_stopped_goes_on_and_ends_as_one_that_was_not(pair: Pair, tmp_path: Path) -> None:
    names = stopped_at(pair, tmp_path / "work", f"recording: {2 * EACH + 4}")
    assert [name[:5] for name in names] == ["00000", "00001"]
    before = {name: (tmp_path / "work" / name).stat().st_mtime_ns for name in names}

    found, whole = trained(pair, tmp_path / "work"), trained(pair, tmp_path / "other")
    assert {name: (tmp_path / "work" / name).stat().st_mtime_ns for name in names} == before
    assert len([*(tmp_path / "work").iterdir()]) == len([*(tmp_path / "other").iterdir()]) == 8
    for (translator, matrix), (right, expected) in zip(found, whole, strict=True):
        np.testing.assert_array_equal(matrix, expected)
        assert translator == right


def test_what_was_recorded_serves_settings_that_record_the_same(pair: Pair, tmp_path: Path) -> None:
    work, third = tmp_path / "work", f"recording: {2 * EACH + 4}"
    first = stopped_at(pair, work, third)
    assert len(first) == 2
    assert stopped_at(pair, work, third, replace(FEW, n_positions=100, whole=False)) == first


@pytest.mark.parametrize(
    "other",
    [{"layers": (1,)}, {"n_branches": 3}, {"n_tokens": 5}, {"seed": 1}, {"texts": True}, {"prompts": PROMPTS[3:]}],
    ids=str,
)
def test_what_was_recorded_with_other_settings_is_not_taken(pair: Pair, tmp_path: Path, other: dict[str, Any]) -> None:
    stopped_at(pair, tmp_path / "work", f"recording: {2 * EACH + 4}")
    calls = {name: other[name] for name in ("texts", "prompts") if name in other}
    settings = replace(FEW, **{name: value for name, value in other.items() if name not in calls})
    stopped_at(pair, tmp_path / "work", "recording: 0", settings, **calls)


def test_a_record_that_is_damaged_is_told_of_and_made_anew(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    work = tmp_path / "work"
    first, second = (work / name for name in stopped_at(pair, work, f"recording: {2 * EACH + 4}"))
    whole = first.read_bytes()
    first.write_bytes(whole[:1000])
    with caplog.at_level(logging.WARNING):
        stopped_at(pair, work, f"recording: {2 * EACH + 4}")
    assert first.read_bytes() == whole
    assert second.exists()
    assert f"recording anew: {first} cannot be read" in caplog.text


def test_answers_to_a_prompt_are_all_fitted_to_or_all_held_out(pair: Pair, tmp_path: Path) -> None:
    """Three prompts, asked again and again."""
    found = _record(pair, PROMPTS[:3], FEW, tmp_path / "work", lambda _line: None, texts=False)
    numbers = [[int(path.name[:5]) for path in paths] for paths in (found.held_out, found.fitted_to)]
    assert numbers == [[0, 3, 6], [1, 2, 4, 5, 7]]


@pytest.mark.parametrize(
    ("settings", "prompts", "says"),
    [
        ({"layers": (2,)}, PROMPTS, "layer 2: there must be layers behind it, so it is 0 to 1"),
        ({"layers": (0, 9)}, PROMPTS, "layer 9"),
        ({"layers": ()}, PROMPTS, "too few"),
        ({}, PROMPTS[:1], "one text is too little"),
        ({}, [], "one text is too little"),
        ({"n_positions": 5}, PROMPTS, "24 positions are too few"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    pair: Pair, tmp_path: Path, settings: dict[str, Any], prompts: list[list[int]], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        trained(pair, tmp_path / "work", replace(FEW, **settings), prompts=prompts)


@pytest.mark.parametrize("name", ["n_positions", "n_branches", "n_tokens"])
def test_counts_are_at_least_one(name: str) -> None:
    nothing: dict[str, Any] = {name: 0}
    with pytest.raises(UsageError, match="is 0: it must be at least 1"):
        replace(FEW, **nothing)


def test_a_model_that_says_nothing_is_refused_after_all_prompts(pair: Pair, tmp_path: Path) -> None:
    silent = replace(pair, end_tokens=frozenset(range(N_VOCAB)))
    with pytest.raises(UsageError, match="0 positions are too few"):
        trained(silent, tmp_path / "work")


def test_texts_are_read_once_and_a_long_one_leaves_room_to_go_on(pair: Pair, tmp_path: Path) -> None:
    """The first fills the context, and is one whose trees are looked at."""
    texts = [TOKENS[:256], TOKENS[100:160]]
    found = trained(pair, tmp_path / "work", replace(FEW, layers=(1,), n_positions=10_000), prompts=texts, texts=True)
    assert found[0][0].quality.positions == 128
    assert len([*(tmp_path / "work").iterdir()]) == 2


def test_a_projection_that_is_streamed_is_refused_before_anything_is_recorded(files: Files, tmp_path: Path) -> None:
    with (
        open_tiny(files.target, n_tree=48, n_logits=8, n_ctx=256, stream_projection=True) as target,
        open_tiny(files.draft, n_tree=48, pin_percent=100) as draft,
        pytest.raises(UsageError, match="give more --dram"),
    ):
        trained(Pair(target, Draft(draft.model), norm_of(target), NO_END), tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_a_folder_that_cannot_be_written_is_told(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "work").write_text("")
    with pytest.raises(StorageError, match="work: cannot be written"):
        trained(pair, tmp_path / "work")


# --- from words ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shorter", ["target", "draft"])
def test_I10_prompts_and_texts_fit_in_the_context_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shorter: str
) -> None:
    monkeypatch.setenv("LEVER_HOME", str(tmp_path / "home"))
    for name, n_layers in (("target", 2), ("draft", 1)):
        n_ctx = 64 if name == shorter else 512
        tiny.tiny_model(tmp_path / f"{name}.gguf", n_layers=n_layers, context_length=n_ctx, n_ff=256, type="Q4_0")
    book = tmp_path / "book.txt"
    book.write_text("\n".join(["Is water wet?", "Why?", "word " * 60, "Is the sky blue?"]))
    options: tuple[dict[str, Any], ...] = ({"prompts": book}, {"texts": [book]})
    for what in options:
        made = make_predictor(
            Wanted(str(tmp_path / "target.gguf"), str(tmp_path / "draft.gguf")),
            ModelSettings(dram=1 << 40),
            Silent(),
            n_positions=200,
            out=tmp_path / "predictor.gguf",
            **what,
        )
        assert [translator.layer for translator in made.translators] == [0]
        assert made.best.quality.positions > 10


@pytest.mark.parametrize(
    ("n_layers", "layers"), [(1, ()), (2, (0,)), (3, (0, 1)), (8, (3, 5)), (28, (13, 20)), (32, (15, 23))]
)
def test_layers_are_from_the_middle_on(n_layers: int, layers: tuple[int, ...]) -> None:
    assert default_layers(n_layers) == layers
