"""Measuring a machine with a tiny model: what is measured, within which memory, and what is kept. None needs speed."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lever import profile as measuring
from lever.arch import ModelConfig, layer_tensors
from lever.companion import TREE_ROWS, Companion
from lever.cost import Profile, best_read, read_bytes_per_s
from lever.draft import Draft
from lever.errors import DoesNotFit, LeverError, StorageError
from lever.ggml import load
from lever.ggml.devices import Devices
from lever.gguf import GGUF, read
from lever.loader import ModelSettings, plan
from lever.models import Silent
from lever.pack import PackSettings, pack
from lever.pair import ASSUMED, PairProfile
from lever.plots import draw_profile
from lever.profile import (
    ENOUGH_CYCLES,
    ENOUGH_PASSES,
    QUICK,
    SHORT_CONTEXT,
    Scope,
    covers,
    covers_steps,
    draft_steps,
    drafted_cycle,
    foretold,
    identity_of,
    is_worth_it,
    keep,
    keep_pair,
    kept,
    kept_pair,
    learned,
    learned_pair,
    measure,
    measure_pair,
    of_layers,
    pair_path,
    profile_path,
    thread_counts,
    tuned,
)
from lever.stats import RunStats
from lever.tree import DraftTree
from lever.weights.image import Image
from tests import tiny
from tests.fakes import FakeDevice, descriptors_of, reader_threads
from tests.lacking import needs
from tests.models import TOKENS, open_tiny, same_bits, tiny_logits

MIB = 1 << 20
N_LAYERS = 5
TINY = Scope(
    quick=True,
    reads=((MIB, 1), (2 * MIB, 2)),
    rounds=2,
    read_bytes=4 * MIB,
    read_s=0.02,
    rows=(1, 3),
    logits=(1, 2),
    together=(1, 2),
    nodes=(1, 3),
    laps=2,
    sample_bytes=MIB // 4,
    pass_bytes=MIB // 4,
    enough_s=0.5,
)
SETTINGS = ModelSettings(dram=1 << 40, n_threads=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of two types, so that it matters which are taken."""
    types = {f"blk.{layer}.ffn_down": "Q8_0" for layer in (0, 3)} | {"*": "Q4_0"}
    return tiny.tiny_model(tmp_path_factory.mktemp("profile") / "tiny.gguf", n_layers=N_LAYERS, n_ff=256, type=types)


@pytest.fixture
def model(path: Path) -> tuple[GGUF, ModelConfig]:
    gguf = read(path)
    return gguf, ModelConfig.from_gguf(gguf)


@pytest.fixture(scope="module")
def measured(path: Path) -> Profile:
    gguf = read(path)
    return measure(gguf, ModelConfig.from_gguf(gguf), SETTINGS, TINY)


@pytest.fixture(autouse=True)
def nothing_left(path: Path) -> Iterator[None]:
    """Every measurement ends its threads and closes its files."""
    yield
    assert not reader_threads()
    assert not [thread for thread in threading.enumerate() if thread.name == "lever-profile"]
    assert not descriptors_of(path)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("LEVER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


# --- what is measured ---------------------------------------------------------------------------------------


def test_every_figure_of_the_scope_is_there_for_every_number_of_threads(measured: Profile) -> None:
    both = [(rows, threads) for rows in (1, 3) for threads in (1, 2)]

    assert [(rate.block, rate.depth) for rate in measured.reads] == [(MIB, 1), (2 * MIB, 2)]
    assert all(rate.busy is not None for rate in measured.reads)
    assert sorted((time.rows, time.threads) for time in measured.layers) == both
    assert sorted((time.rows, time.threads) for time in measured.projections) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert {(t.rows, t.threads) for t in measured.together} >= {(1, 1), (2, 1)}
    assert (measured.n_layers, measured.quick, measured.buffered_reason) == (N_LAYERS, True, None)


def test_a_pass_with_everything_streamed_is_made_of_its_parts(measured: Profile, path: Path) -> None:
    size = path.stat().st_size
    for t in measured.together:
        assert 0 < t.read_bytes <= size
        assert t.n_layers * t.layer.median + t.projection.median < t.seconds.median * (1 + t.seconds.spread) * 2


def test_a_device_that_takes_its_time_shows_in_the_rate(model: tuple[GGUF, ModelConfig], path: Path) -> None:
    with mock.patch("lever.weights.reader.read_into", FakeDevice(delay_s=0.02)):
        found = measure(*model, SETTINGS, TINY)

    for rate in found.reads:
        for figure in (rate.idle, rate.busy):
            assert figure is not None
            assert figure.median <= 1.5 * rate.depth * path.stat().st_size / 0.02


def test_a_file_system_that_refuses_direct_reads_is_told(model: tuple[GGUF, ModelConfig]) -> None:
    with mock.patch("lever.weights.reader.read_into", FakeDevice(refuses_direct=True)):
        assert "refuses" in str(measure(*model, SETTINGS, TINY).buffered_reason)


def test_a_device_that_fails_is_an_error_with_file_and_byte(model: tuple[GGUF, ModelConfig], path: Path) -> None:
    broken = FakeDevice(broken=range(200_000, path.stat().st_size))
    with (
        mock.patch("lever.weights.reader.read_into", broken),
        pytest.raises(StorageError, match=rf"{path} failed at byte \d+"),
    ):
        measure(*model, SETTINGS, TINY)


def test_a_split_model_is_read_in_all_its_parts(tmp_path: Path) -> None:
    gguf = read(tiny.tiny_model(tmp_path / "split.gguf", splits=3, n_ff=256, type="Q4_0"))
    device = FakeDevice()
    with mock.patch("lever.weights.reader.read_into", device):
        assert measure(gguf, ModelConfig.from_gguf(gguf), SETTINGS, TINY).reads


def test_progress_tells_each_kind_of_figure(model: tuple[GGUF, ModelConfig]) -> None:
    told: list[str] = []
    measure(*model, SETTINGS, TINY, progress=told.append)

    for word in ("layers: 3 rows, 2 threads", "output projection: 2 rows", "reads of 1 MiB, 1 at a time", "passes"):
        assert any(word in line for line in told), word


def test_threads_are_powers_of_two_and_all() -> None:
    assert [thread_counts(most) for most in (1, 2, 3, 6, 8)] == [
        (1,), (1, 2), (1, 2, 3), (1, 2, 4, 6), (1, 2, 4, 8)
    ]  # fmt: skip


def test_threads_that_only_spin_are_not_tried_on_whole_passes(measured: Profile) -> None:
    slow = [
        replace(time, seconds=replace(time.seconds, median=9.0)) if time.threads == 2 else time
        for time in measured.layers
    ]

    assert not measuring._pays(slow, 2)
    assert measuring._pays(slow, 1)


# --- memory -------------------------------------------------------------------------------------------------


def least_budget(gguf: GGUF, config: ModelConfig, **settings: Any) -> int:
    chosen = ModelSettings(**{"dram": 1, "n_ctx": 256, "n_batch": 3, "n_logits": 2, "pin_percent": 0} | settings)
    with pytest.raises(DoesNotFit) as caught:
        plan(load(), gguf, config, chosen)
    return sum(caught.value.parts.values())


def test_where_no_layer_fits_in_memory_they_are_streamed_and_reads_are_measured_alone(
    model: tuple[GGUF, ModelConfig],
) -> None:
    settings = replace(SETTINGS, dram=least_budget(*model) + 2 * MIB)

    found = measure(*model, settings, TINY)
    assert [rate.busy for rate in found.reads] == [None, None]
    assert best_read(found).rate == best_read(found).idle


def test_what_does_not_fit_at_all_is_refused(model: tuple[GGUF, ModelConfig]) -> None:
    with pytest.raises(DoesNotFit, match="needs"):
        measure(*model, replace(SETTINGS, dram=8 * MIB), TINY)


# --- the draft ----------------------------------------------------------------------------------------------


@pytest.fixture
def companion(path: Path) -> Iterator[Companion]:
    """The model as its own draft."""
    gguf = read(path)
    config = ModelConfig.from_gguf(gguf)
    with Devices(load()) as devices, Companion(path, config, SETTINGS, gguf, devices) as found:
        yield found


@pytest.fixture
def pair(path: Path, companion: Companion) -> PairProfile:
    gguf = read(path)
    target = identity_of(gguf, ModelConfig.from_gguf(gguf))
    return measure_pair(target, companion, companion.load(0).model, TINY, lambda _what: None)


def test_draft_steps_are_measured_by_nodes_for_every_number_of_threads_that_pays(companion: Companion) -> None:
    told: list[str] = []
    found = {
        (step.rows, step.threads): step.seconds for step in draft_steps(companion.load(0).model, TINY, told.append)
    }

    assert {(1, 1), (1, 2), (3, 1)} <= found.keys() <= {(1, 1), (1, 2), (3, 1), (3, 2)}
    assert ((3, 2) in found) == (found[1, 2].median < found[1, 1].median)
    assert "the draft: 3 nodes, 1 threads" in told


def test_a_step_is_what_the_draft_itself_does(companion: Companion) -> None:
    """Through `Draft.expand`, with as many nodes as are told; trees are begun anew when there is no room for more."""
    widths: list[int] = []
    expand = Draft.expand

    def spy(self: Draft, tree: DraftTree, nodes: list[int], temperature: float) -> None:
        assert len(nodes) <= self.room
        widths.append(len(nodes))
        expand(self, tree, nodes, temperature)

    model = companion.load(0).model
    with mock.patch.object(Draft, "expand", spy):
        draft_steps(model, replace(TINY, nodes=(16, 40), rounds=3))

    assert {16, 40} <= set(widths) <= {1, 16, 40}
    assert (model.kv.length, model.n_threads) == (0, 2)


def test_nodes_beyond_those_of_one_step_are_not_measured(companion: Companion) -> None:
    steps = draft_steps(companion.load(0).model, replace(TINY, nodes=(1, TREE_ROWS + 1)))

    assert {step.rows for step in steps} == {1}


def test_a_draft_whose_logits_are_no_numbers_is_an_error_and_leaves_nothing(companion: Companion) -> None:
    model = companion.load(0).model
    with (
        mock.patch.object(Draft, "_likeliest", return_value=[]),
        pytest.raises(LeverError, match="guesses nothing"),
    ):
        draft_steps(model, TINY)
    assert draft_steps(model, TINY)


def test_a_pair_is_kept_by_both_models_and_what_runs_have_shown_outlives_its_steps(
    pair: PairProfile, companion: Companion
) -> None:
    target = pair.target
    assert kept_pair(target, companion) is None
    shown = pair.after(0.5, None)
    path = keep_pair(shown)

    assert path == pair_path(pair.target, pair.draft)
    assert kept_pair(target, companion) == shown
    assert kept_pair(replace(target, model="another"), companion) is None
    assert kept(target) is None  # a pair is no profile
    again = measure_pair(target, companion, companion.load(0).model, TINY, lambda _what: None)
    assert (again.shown.runs, again.shown.first) == (1, 0.5)


def test_a_kept_pair_that_is_damaged_is_told_of_and_counts_as_none(
    pair: PairProfile, companion: Companion, caplog: pytest.LogCaptureFixture
) -> None:
    path = keep_pair(pair)
    path.write_text(path.read_text().replace('"first": 0.', '"first": 9.'))
    with caplog.at_level(logging.WARNING):
        assert kept_pair(pair.target, companion) is None

    assert str(path) in caplog.text


def test_steps_of_fewer_threads_are_not_enough_unless_all_was_measured(pair: PairProfile) -> None:
    assert [covers_steps(pair, threads) for threads in (1, 2, 3, 4)] == [True, True, True, False]
    assert covers_steps(replace(pair, quick=False), 4)


def test_a_profile_a_pair_and_a_plan_foretell_a_cycle(measured: Profile, pair: PairProfile, path: Path) -> None:
    gguf = read(path)
    _, streams = plan(load(), gguf, ModelConfig.from_gguf(gguf), replace(SETTINGS, pin_percent=0))
    found = foretold(measured, pair, streams, 2)
    cycle = drafted_cycle(measured, pair, streams, 2)

    assert found.read_s == pytest.approx(streams.bytes_per_pass / read_bytes_per_s(measured, 1, 1))
    assert found.draft[1] == {step.rows: step.seconds.median for step in pair.steps if step.threads == 1}
    assert foretold(measured, None, streams, 2).draft == {}
    assert 1 <= cycle.tokens <= cycle.rows
    assert 0 < cycle.draft_s < cycle.seconds


def test_a_run_with_a_draft_shows_how_often_it_was_right(measured: Profile, pair: PairProfile, path: Path) -> None:
    gguf = read(path)
    _, streams = plan(load(), gguf, ModelConfig.from_gguf(gguf), replace(SETTINGS, pin_percent=0))
    n = ENOUGH_CYCLES
    stats = RunStats(prompt_tokens=5, new_tokens=4 * n + 1, cycles=n, verified=7 * n, decode_s=1.0)
    after = learned_pair(measured, pair, streams, 2, stats)

    assert pair.shown.first == ASSUMED
    assert after is not None
    assert (after.shown.runs, after.steps) == (1, pair.steps)
    assert 0.7 < after.shown.first < 0.95  # four tokens of eight rows
    for change in (replace(stats, cycles=n - 1), replace(stats, verified=0)):
        assert learned_pair(measured, pair, streams, 2, change) is None
    long = learned_pair(measured, pair, streams, 2, replace(stats, prompt_tokens=SHORT_CONTEXT))
    assert long is not None
    assert (long.shown.first, long.shown.seconds) == (after.shown.first, 1.0)


# --- a model of a few layers --------------------------------------------------------------------------------


def test_layers_are_taken_evenly_from_the_depth(model: tuple[GGUF, ModelConfig]) -> None:
    gguf, config = model
    some, short = of_layers(gguf, config, 2)

    assert short == replace(config, n_layers=2)
    for place, chosen in enumerate((1, 3)):
        names = zip(layer_tensors(config, place), layer_tensors(config, chosen), strict=True)
        for new, old in names:
            assert replace(some.tensors[new], name=old) == gguf.tensors[old]
            assert some.tensors[new].name == new
    assert "blk.2.attn_q.weight" not in some.tensors


def test_all_layers_of_a_model_are_that_model(model: tuple[GGUF, ModelConfig]) -> None:
    gguf, config = model
    every, same = of_layers(gguf, config, N_LAYERS)

    assert (dict(every.tensors), same) == (dict(gguf.tensors), config)


def test_few_layers_of_an_image_know_which_of_their_matrices_are_repacked(path: Path, tmp_path: Path) -> None:
    """Types differ between layers, and so may layouts: a matrix in the wrong kind of memory ends the process."""
    gguf = read(path)
    out = tmp_path / "image.gguf"
    chosen = PackSettings(dram=1 << 40, n_threads=1)
    pack(gguf, ModelConfig.from_gguf(gguf), out, chosen, name="tiny", sha256=lambda: "ab" * 32, progress=Silent())
    image = read(out)
    some, _ = of_layers(image, ModelConfig.from_gguf(image), 2)
    whole, part = Image.of(image), Image.of(some)
    assert whole is not None
    assert part is not None

    for name in some.tensors:
        old = name.replace("blk.1.", "blk.3.").replace("blk.0.", "blk.1.")
        assert (name in part.repacked) == (old in whole.repacked)
    found = measure(image, ModelConfig.from_gguf(image), SETTINGS, TINY)
    assert found.identity.layout == whole.layout


# --- other storage ------------------------------------------------------------------------------------------


def test_a_directory_is_measured_with_a_file_that_is_gone_afterwards(
    model: tuple[GGUF, ModelConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "LARGEST_FILE", 8 * MIB)
    monkeypatch.setattr(measuring, "LEAST_FILE", 1 * MIB)
    place = tmp_path / "card"
    place.mkdir()
    device = FakeDevice()
    with mock.patch("lever.weights.reader.read_into", device):
        found = measure(*model, SETTINGS, TINY, storage=place)

    assert max(offset for offset, _ in device.reads) >= 6 * MIB  # beyond the model: it is the file that was read
    assert (found.together, list(place.iterdir())) == ((), [])
    assert found.layers


def test_a_file_elsewhere_is_read_and_left_as_it_is(model: tuple[GGUF, ModelConfig], tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(bytes(3 * MIB + 5))

    assert measure(*model, SETTINGS, TINY, storage=tmp_path / "other").reads
    assert (tmp_path / "other").read_bytes() == bytes(3 * MIB + 5)


def test_storage_that_is_not_there_empty_or_full_is_told(
    model: tuple[GGUF, ModelConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").touch()
    for place, says in (("none", "No such file"), ("empty", "is empty")):
        with pytest.raises(StorageError, match=says):
            measure(*model, SETTINGS, TINY, storage=tmp_path / place)
    monkeypatch.setattr(measuring, "LEAST_FILE", 1 << 60)
    with pytest.raises(StorageError, match="has no room"):
        measure(*model, SETTINGS, TINY, storage=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


# --- what is kept -------------------------------------------------------------------------------------------


def test_a_profile_is_kept_by_what_it_is_of(measured: Profile, path: Path) -> None:
    gguf = read(path)
    identity = identity_of(gguf, ModelConfig.from_gguf(gguf))
    assert kept(identity) is None
    assert keep(measured) == profile_path(identity)

    assert kept(identity) == measured
    assert kept(replace(identity, storage="another disk")) is None
    assert [file.suffix for file in profile_path(identity).parent.iterdir()] == [".json"]


@pytest.mark.parametrize("text", ["", "{}", "\udcff", '{"version": 0}'])
def test_a_kept_file_that_is_damaged_is_told_of_and_counts_as_none(
    measured: Profile, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = keep(measured)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with caplog.at_level(logging.WARNING):
        assert kept(measured.identity) is None

    assert str(path) in caplog.text
    assert keep(measured) == path
    assert kept(measured.identity) == measured


def test_a_profile_under_the_name_of_another_is_not_taken(measured: Profile) -> None:
    other = replace(measured.identity, machine="another")
    keep(measured).rename(profile_path(other))

    assert kept(other) is None


def test_a_profile_that_cannot_be_written_is_an_error_and_leaves_nothing(measured: Profile, home: Path) -> None:
    home.mkdir()
    (home / "profiles").write_text("a file in the place of the directory")
    with pytest.raises(StorageError, match="cannot keep the profile"):
        keep(measured)


def test_types_and_places_of_tensors_make_a_model_what_it_is(path: Path, tmp_path: Path) -> None:
    def identity(path: Path) -> str:
        gguf = read(path)
        return identity_of(gguf, ModelConfig.from_gguf(gguf)).model

    same = tiny.tiny_model(tmp_path / "same.gguf", n_ff=256, type="Q4_0")
    other = tiny.tiny_model(tmp_path / "other.gguf", n_ff=256, type="Q8_0")
    assert len({identity(path), identity(same), identity(other)}) == 3


# --- what is made of it -------------------------------------------------------------------------------------


def test_a_run_reads_as_is_best_and_starts_with_the_threads_that_are(measured: Profile, path: Path) -> None:
    gguf = read(path)
    _, found = plan(load(), gguf, ModelConfig.from_gguf(gguf), replace(SETTINGS, pin_percent=0))
    settings = tuned(measured, found, SETTINGS)
    best = best_read(measured)

    assert (settings.block, settings.depth) == (best.block, best.depth)
    assert settings.start_threads in (1, 2)
    assert not is_worth_it(found)


def test_whatever_the_profile_says_the_bits_are_the_same(path: Path) -> None:
    expected = tiny_logits(path, TOKENS[:20], pin_percent=100)
    for block, depth in ((4096, 1), (2 * MIB, 3)):
        assert same_bits(tiny_logits(path, TOKENS[:20], block=block, depth=depth), expected)


def test_the_threads_to_start_with_are_within_those_allowed(path: Path) -> None:
    for start, most, expected in ((None, 2, 1), (2, 2, 2), (7, 2, 2), (1, 2, 1)):
        with open_tiny(path, n_threads=most, start_threads=start) as loaded:
            assert loaded.start_threads == expected
    with open_tiny(path, n_threads=2, pin_percent=100) as loaded:
        assert loaded.start_threads == 2


def test_a_quick_profile_of_fewer_threads_is_not_enough_and_a_full_one_is_kept(measured: Profile) -> None:
    assert [covers(measured, threads) for threads in (1, 2, 3)] == [True, True, False]
    assert covers(replace(measured, quick=False), 3)


def test_a_run_corrects_the_profile_when_it_was_long_enough_and_its_context_short(
    measured: Profile, path: Path
) -> None:
    gguf = read(path)
    _, found = plan(load(), gguf, ModelConfig.from_gguf(gguf), replace(SETTINGS, pin_percent=0))
    n = ENOUGH_PASSES
    stats = RunStats(prompt_tokens=5, new_tokens=n + 1, cycles=n, decode_s=1.0, read_s=0.5, read_bytes=10**6)

    after = learned(measured, found, SETTINGS, stats)
    assert after is not None
    assert after.correction.runs == 1
    for change in ({"cycles": n - 1}, {"prompt_tokens": SHORT_CONTEXT}, {"read_s": 0.0}):
        assert learned(measured, found, SETTINGS, replace(stats, **change)) is None


def test_the_quick_scope_asks_for_little() -> None:
    assert len(QUICK.reads) == 3
    assert (QUICK.rows, QUICK.together, QUICK.nodes) == ((1, 16), (1, 16), (1, 2, 4))


def test_a_plot_that_cannot_be_written_is_an_error(measured: Profile, tmp_path: Path) -> None:
    needs("matplotlib")
    draw_profile(measured, tmp_path / "plot.svg")
    with pytest.raises(StorageError, match="cannot write the plot"):
        draw_profile(measured, tmp_path / "none/plot.svg")

    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_a_plot_has_the_steps_of_a_draft_beside_the_rest(measured: Profile, pair: PairProfile, tmp_path: Path) -> None:
    needs("matplotlib")
    widths = []
    for name, draft in (("without.svg", None), ("with.svg", pair)):
        draw_profile(measured, tmp_path / name, draft)
        found = re.search(r'width="([\d.]+)pt"', (tmp_path / name).read_text())
        assert found is not None
        widths.append(float(found[1]))

    assert widths[1] == pytest.approx(1.5 * widths[0])
