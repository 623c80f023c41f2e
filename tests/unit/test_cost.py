"""What passes cost, from figures that are given here: no machine is measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lever.cost import (
    DOUBT,
    MOST_DOUBT,
    SHARP,
    WEIGHT,
    Conditions,
    Correction,
    Identity,
    Measured,
    Profile,
    ReadRate,
    RowTime,
    Together,
    at_once,
    best_read,
    compute_seconds,
    corrected,
    doubts,
    fewest_threads,
    layer_seconds,
    pass_time,
    projection_seconds,
    read_bytes_per_s,
)
from lever.errors import ProfileError

MIB = 1 << 20
LAYER_BYTES, N_LAYERS = 10_000_000, 10
WHOLE = LAYER_BYTES * N_LAYERS


def m(median: float, spread: float = 0.0) -> Measured:
    return Measured(median, spread)


def layer(rows: int, threads: int, ms: float) -> RowTime:
    return RowTime(rows, threads, m(ms / 1e3))


def together(rows: int, threads: int, **more: Any) -> Together:
    """A pass over all layers at 1 GB/s: 0.1 s of reads, 10 layers of 4 ms, 1 ms of Python, 5 ms of projection."""
    figures = {"seconds": 0.1, "read": 1e9, "layer": 4e-3, "projection": 5e-3, "python": 1e-3} | more
    nbytes = int(figures.pop("read_bytes", WHOLE))
    return Together(rows, threads, N_LAYERS, nbytes, **{name: m(figure) for name, figure in figures.items()})


def profile(**more: Any) -> Profile:
    """One thread takes 3 ms for a layer in memory and 4 beside reads, two take 2 in memory and 2.5 beside."""
    tables: dict[str, Any] = {
        "identity": Identity("cpu", "disk", "model", "plain"),
        "date": "2026-01-01T00:00:00",
        "quick": False,
        "n_layers": N_LAYERS,
        "layer_bytes": LAYER_BYTES,
        "buffered_reason": None,
        "reads": (ReadRate(4 * MIB, 2, m(1.2e9), m(1.1e9)),),
        "layers": (layer(1, 1, 3), layer(16, 1, 18), layer(1, 2, 2), layer(16, 2, 9)),
        "projections": tuple(RowTime(1, threads, m(5e-3)) for threads in (1, 2)),
        "together": (together(1, 1), together(1, 2, layer=2.5e-3, read=0.9e9)),
    }
    return Profile(**tables | more)


# --- figures ------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=20))
def test_a_median_lies_among_its_samples_and_a_spread_is_not_negative(samples: list[float]) -> None:
    figure = Measured.of(samples)

    assert min(samples) <= figure.median <= max(samples)
    assert 0 <= figure.spread < math.inf


def test_the_spread_is_the_distance_of_the_quartiles_over_the_median() -> None:
    assert Measured.of([8.0, 9.0, 10.0, 11.0, 12.0]) == m(10.0, 0.2)
    assert Measured.of([7.0]) == m(7.0, 0.0)


def test_what_takes_no_time_at_all_takes_a_nanosecond() -> None:
    assert Measured.of([0.0, -1e-12]).median == 1e-9


# --- reads --------------------------------------------------------------------------------------------------


def reads(*table: tuple[int, int, float]) -> tuple[ReadRate, ...]:
    return tuple(ReadRate(block * MIB, depth, m(rate * 1e9), None) for block, depth, rate in table)


@pytest.mark.parametrize(
    ("table", "best"),
    [
        ([(1, 1, 1.0), (2, 1, 1.5), (4, 1, 1.5), (4, 2, 1.5)], (2, 1)),
        ([(1, 1, 1.46), (8, 4, 1.5)], (1, 1)),  # within 3 %
        ([(1, 1, 1.44), (8, 4, 1.5)], (8, 4)),
        ([(4, 1, 1.5), (1, 4, 1.5), (2, 2, 1.5)], (1, 4)),  # as much in flight: the smaller block
    ],
)
def test_the_best_read_is_the_least_in_flight_that_comes_near_the_best_rate(
    table: Sequence[tuple[int, int, float]], best: tuple[int, int]
) -> None:
    found = best_read(profile(reads=reads(*table)))

    assert (found.block // MIB, found.depth) == best


def test_the_rate_beside_compute_decides_where_it_is_known() -> None:
    small, large = ReadRate(MIB, 1, m(2e9), m(1e9)), ReadRate(8 * MIB, 2, m(1.8e9), m(1.5e9))

    assert best_read(profile(reads=(small, large))) == large


@pytest.mark.parametrize(("spread", "block"), [(0.0, 8), (0.06, 1), (5.0, 8)])
def test_a_rate_that_varies_is_beaten_by_less_in_flight_but_not_by_far_less(spread: float, block: int) -> None:
    slower = 0.95 if spread < 1 else 1 - 1.1 * MOST_DOUBT
    table = (ReadRate(MIB, 1, m(slower * 1e9), None), ReadRate(8 * MIB, 2, m(1e9, spread), None))

    assert best_read(profile(reads=table)).block == block * MIB


def test_the_rate_of_passes_is_that_of_passes_and_without_any_that_of_reads() -> None:
    assert read_bytes_per_s(profile(), 1, 1) == 1e9
    assert read_bytes_per_s(profile(), 1, 2) == 0.9e9
    assert read_bytes_per_s(profile(together=()), 1, 1) == 1.1e9


# --- compute ------------------------------------------------------------------------------------------------


def test_times_between_measured_rows_lie_on_the_line_between_them() -> None:
    p = profile(together=())

    assert layer_seconds(p, 1, 1) == 3e-3
    assert layer_seconds(p, 16, 1) == 18e-3
    assert layer_seconds(p, 6, 1) == pytest.approx(8e-3)


def test_beyond_the_most_rows_the_last_line_goes_on() -> None:
    assert layer_seconds(profile(together=()), 31, 1) == pytest.approx(33e-3)
    assert layer_seconds(profile(layers=(layer(4, 1, 8),), together=()), 16, 1) == pytest.approx(32e-3)


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([1, 2]), st.floats(0, 1))
def test_more_rows_never_take_less_time(a: int, b: int, threads: int, streamed: float) -> None:
    few, many = (compute_seconds(profile(), rows, threads, streamed) for rows in sorted((a, b)))

    assert few <= many


def test_a_layer_takes_longer_the_more_streams_beside_it() -> None:
    assert [layer_seconds(profile(), 1, 1, share) for share in (0, 0.5, 1, 1.2)] == pytest.approx(
        [3e-3, 3.5e-3, 4e-3, 4e-3]
    )


def test_a_layer_beside_reads_is_never_faster_than_in_memory() -> None:
    assert layer_seconds(profile(together=(together(1, 1, layer=1e-3),)), 1, 1, 1.0) == 3e-3


def test_threads_that_were_not_measured_are_as_the_next_fewer() -> None:
    p = profile(together=())

    assert layer_seconds(p, 1, 3) == layer_seconds(p, 1, 2)
    assert layer_seconds(profile(layers=(layer(1, 2, 2),)), 1, 1) >= 2e-3
    assert projection_seconds(p, 1, 7) == 5e-3


# --- passes -------------------------------------------------------------------------------------------------


def test_a_pass_that_was_measured_takes_what_was_measured() -> None:
    time = pass_time(profile(together=(together(1, 1, seconds=0.11),)), 1, 1, WHOLE)

    assert time.seconds == pytest.approx(0.11)
    assert (time.reads_s, time.compute_s) == pytest.approx((0.1, 0.046))
    assert time.limit == "reads"


def test_a_pass_takes_as_long_as_the_slower_side() -> None:
    times = [pass_time(profile(), 1, 1, int(share * WHOLE)) for share in (1, 0.5, 0.1, 0)]

    assert [max(time.reads_s, time.compute_s) for time in times] == pytest.approx([0.1, 0.05, 0.037, 0.036])
    for time in times:
        assert 1.0 <= time.seconds / max(time.reads_s, time.compute_s) <= 2 ** (1 / SHARP)
    assert [time.limit for time in times] == ["reads", "reads", "compute", "compute"]


def test_bands_of_the_projection_that_stream_are_read_like_layers() -> None:
    assert pass_time(profile(), 1, 1, 2 * WHOLE).reads_s == pytest.approx(0.2)


@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3))
def test_both_at_once_take_the_longer_and_a_little_more_where_they_are_even(a: float, b: float) -> None:
    assert max(a, b) <= at_once(a, b) <= 1.13 * max(a, b)
    assert at_once(a, a) == pytest.approx(1.122 * a, rel=1e-3)
    assert at_once(a, b) == at_once(b, a)


def test_a_pass_that_streams_nothing_loses_nothing() -> None:
    slow_start = profile(together=(together(1, 1, seconds=0.2),))

    assert pass_time(slow_start, 1, 1, 0).seconds == pass_time(slow_start, 1, 1, 0).compute_s


@given(st.integers(1, 2 * WHOLE), st.integers(1, 2 * WHOLE), st.integers(1, 64))
def test_reading_more_never_takes_less_time(a: int, b: int, rows: int) -> None:
    few, many = (pass_time(profile(), rows, 1, nbytes).seconds for nbytes in sorted((a, b)))

    assert few <= many


@pytest.mark.parametrize(("streamed", "most", "threads"), [(1.0, 2, 1), (0.1, 2, 2), (0.1, 1, 1), (0.0, 2, 2)])
def test_a_pass_gets_the_fewest_threads_that_keep_up_with_its_reads(streamed: float, most: int, threads: int) -> None:
    assert fewest_threads(profile(), 1, int(streamed * WHOLE), most).threads == threads


def test_threads_without_a_core_of_their_own_are_not_chosen() -> None:
    spinning = profile(layers=(layer(1, 1, 3), layer(1, 2, 200)), together=(together(1, 1),))

    assert fewest_threads(spinning, 1, 0, 2).threads == 1


# --- corrections --------------------------------------------------------------------------------------------


def after_a_run(p: Profile, seconds: float, rate: float, streamed: int = WHOLE) -> Profile:
    """A run of one thread, which streams all if nothing is said."""
    expected = fewest_threads(p, 1, streamed, 1)
    return corrected(p, seconds, rate, expected, read_bytes_per_s(p, 1, 1))


def test_a_run_as_foretold_changes_nothing_but_its_count() -> None:
    p = profile()
    expected = fewest_threads(p, 1, WHOLE, 1).seconds

    assert after_a_run(p, expected, 1e9).correction == Correction(1, 1.0, 1.0)


def test_runs_with_slower_reads_bring_the_foretold_pass_to_theirs() -> None:
    p = profile()
    errors = []
    for _ in range(12):
        errors.append(abs(pass_time(p, 1, 1, WHOLE).seconds - 0.15))
        p = after_a_run(p, 0.15, WHOLE / 0.15)

    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02 * 0.15
    assert p.correction.seconds == pytest.approx(1.0, rel=1e-3)  # the rate explains all of it


def test_one_run_moves_the_average_by_its_weight() -> None:
    expected = fewest_threads(profile(), 1, WHOLE, 1).seconds
    p = after_a_run(profile(), 1.2 * expected, 1e9)

    assert p.correction.seconds == pytest.approx(1.2**WEIGHT)


def test_where_compute_is_the_limit_the_rate_of_reads_is_not_learnt() -> None:
    p = after_a_run(profile(), 0.06, 0.7e9, streamed=WHOLE // 100)

    assert p.correction.read == 1.0
    assert p.correction.seconds > 1.0


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_a_run_that_cannot_be_true_of_the_machine_teaches_nothing(factor: float) -> None:
    assert after_a_run(profile(), factor * 0.1, factor * 1e9).correction == Correction(1, 1.0, 1.0)


@given(st.lists(st.tuples(st.floats(1e-4, 10), st.floats(1e6, 1e11)), max_size=30))
def test_a_correction_stays_within_its_bounds(runs: list[tuple[float, float]]) -> None:
    p = profile()
    for seconds, rate in runs:
        p = after_a_run(p, seconds, rate)

    assert 1 / DOUBT <= p.correction.seconds <= DOUBT
    assert 1 / DOUBT <= p.correction.read <= DOUBT


# --- doubts -------------------------------------------------------------------------------------------------


def test_a_quiet_cool_machine_gives_no_doubt() -> None:
    conditions = Conditions(50.0, 3e9)

    assert doubts(profile(before=conditions, after=conditions)) == []
    assert doubts(profile()) == []  # nothing is told: nothing is said


def test_figures_that_vary_are_doubted() -> None:
    wild = tuple(RowTime(rows, 1, m(1e-3, 0.4)) for rows in range(1, 9))

    (doubt,) = doubts(profile(layers=wild))
    assert "8 of 14 figures vary by more than 15 %" in doubt


def test_a_clock_that_fell_and_heat_are_told() -> None:
    said = doubts(profile(before=Conditions(45.0, 3e9), after=Conditions(72.0, 2e9)))

    assert [word in " ".join(said) for word in ("3.00 to 2.00 GHz", "45 to 72 °C")] == [True, True]


def test_reads_through_the_page_cache_are_told() -> None:
    assert "page cache (FUSE)" in doubts(profile(buffered_reason="FUSE"))[0]


# --- what is kept -------------------------------------------------------------------------------------------


def test_a_profile_comes_back_from_json_as_it_was() -> None:
    p = profile(before=Conditions(50.0, None), correction=Correction(3, 1.1, 0.9), quick=True)

    assert Profile.from_json(p.to_json()) == p
    assert Profile.from_json(profile(together=(), buffered_reason="tmpfs").to_json()).buffered_reason == "tmpfs"


def changed(change: Callable[[dict[str, Any]], Any]) -> str:
    document = json.loads(profile().to_json())
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is no JSON"),
        (profile().to_json()[:100], "it is no JSON"),
        ("[]", "profile has not the fields of a Profile"),
        ("null", "profile has not the fields"),
        (changed(lambda d: d.update(version=0)), "it is of version 0"),
        (changed(lambda d: d.pop("version")), "it is of version None"),
        (changed(lambda d: d.pop("reads")), "profile has not the fields"),
        (changed(lambda d: d.update(more=1)), "profile has not the fields"),
        (changed(lambda d: d.update(reads=[])), "reads is empty"),
        (changed(lambda d: d.update(layers={})), "profile.layers is no list"),
        (changed(lambda d: d.update(n_layers="10")), "profile.n_layers is '10'"),
        (changed(lambda d: d.update(n_layers=True)), "profile.n_layers is True"),
        (changed(lambda d: d.update(n_layers=0)), "a model without layers"),
        (changed(lambda d: d["layers"][0].update(rows=0)), "0 rows on 1 threads"),
        (changed(lambda d: d["layers"][0].update(rows=16)), "measured twice"),
        (changed(lambda d: d["layers"][0]["seconds"].update(median=0)), "is no measurement"),
        (changed(lambda d: d["layers"][0]["seconds"].update(median=math.nan)), "is no measurement"),
        (changed(lambda d: d["reads"][0].update(block=3)), "reads of 3 bytes"),
        (changed(lambda d: d["reads"][0].update(depth=1000)), "1000 reads in flight"),
        (changed(lambda d: d["correction"].update(read=1e9)), "is no correction"),
    ],
)
def test_a_damaged_or_foreign_profile_is_refused_with_a_reason(text: str, says: str) -> None:
    with pytest.raises(ProfileError, match=says):
        Profile.from_json(text)


@given(st.data())
def test_no_damage_of_a_kept_profile_is_a_crash(data: st.DataObject) -> None:
    """A byte is changed, or the file is cut: it is refused, or still a profile."""
    text = profile().to_json()
    place = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:place] + data.draw(st.characters(codec="ascii")) * data.draw(st.booleans()) + text[place + 1 :]
    try:
        found = Profile.from_json(damaged)
    except ProfileError:
        return
    assert fewest_threads(found, 1, WHOLE, 2).seconds > 0


def test_another_machine_storage_model_or_layout_is_kept_elsewhere() -> None:
    one = profile().identity
    others = [replace(one, **{name: "other"}) for name in ("machine", "storage", "model", "layout")]

    assert len({identity.key for identity in (one, *others)}) == 5
