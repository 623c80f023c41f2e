"""Amounts of memory in words, what a machine has left, and the budget ledger."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lever.errors import DoesNotFit, StorageError, UsageError
from lever.memory import (
    Ledger,
    MemoryLimits,
    available_memory,
    does_not_fit,
    format_size,
    parse_size,
    peak_rss_bytes,
    rss_bytes,
)

MIB = 1024**2
GIB = 1024**3
MEMINFO = "MemTotal:        8388608 kB\nMemFree:         1048576 kB\nMemAvailable:    6291456 kB\n"  # 8 and 6 GiB
V1_NO_LIMIT = 0x7FFFFFFFFFFFF000
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2_MOUNT = "41 31 0:38 {root} /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw\n"


def machine(tmp_path: Path, files: Mapping[str, object]) -> Path:
    """A file tree like that of a machine."""
    for name, content in {"proc/meminfo": MEMINFO, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))
    return tmp_path


def v2_group(path: str, limit: object, current: int, **more: object) -> dict[str, object]:
    files = {"memory.max": limit, "memory.current": current, "memory.stat": "anon 1\nfile 2\n"}
    return {f"sys/fs/cgroup{path}/{name}": content for name, content in {**files, **more}.items()}


@pytest.fixture(autouse=True)
def not_android(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TERMUX_VERSION", raising=False)
    monkeypatch.delenv("ANDROID_ROOT", raising=False)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("900MiB", 900 * MIB),
        ("900M", 900 * MIB),
        ("900mib", 900 * MIB),
        (" 900 MiB ", 900 * MIB),
        ("900MB", 900_000_000),
        ("2G", 2 * GIB),
        ("2GiB", 2 * GIB),
        ("2gb", 2_000_000_000),
        ("1.5G", 3 * GIB // 2),
        ("1T", 1024 * GIB),
        ("64k", 65536),
        ("64KB", 64000),
        ("1234567", 1234567),
        ("1234567B", 1234567),
        ("60%", 6_000_000),
        ("12.5%", 1_250_000),
        ("100%", 10_000_000),
        ("auto", 7_500_000),
        ("AUTO", 7_500_000),
    ],
)
def test_an_amount_in_words_is_a_number_of_bytes(text: str, nbytes: int) -> None:
    assert parse_size(text, total=10_000_000) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lots",
        "-1G",
        "1e9",
        "900 parsecs",
        "1.G",
        ".5G",
        "1..5G",
        "0",
        "0%",
        "0.1B",
        "101%",
        "٣G",
        "9" * 5000,
    ],
)
def test_what_is_no_amount_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not an amount .* 900MiB|is no memory at all|at most 100%"):
        parse_size(text, total=10_000_000)


@given(st.integers(1, 10**6), st.sampled_from("KMGT"))
def test_the_short_unit_is_the_binary_one(number: int, unit: str) -> None:
    assert parse_size(f"{number}{unit}") == parse_size(f"{number}{unit}iB") > parse_size(f"{number}{unit}B")


@pytest.mark.parametrize("variable", ["TERMUX_VERSION", "ANDROID_ROOT"])
def test_D2_auto_takes_at_most_40_percent_on_android(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "x")
    assert parse_size("auto", total=10_000_000) == 4_000_000


def test_a_fixed_amount_needs_no_look_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def unread() -> MemoryLimits:
        raise AssertionError

    monkeypatch.setattr("lever.memory.available_memory", unread)
    assert parse_size("900MiB") == 900 * MIB


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (90 * MIB, "90 MiB"),
        (1023, "1 KiB"),
        (1536, "1.5 KiB"),
        (1000 * MIB, "0.98 GiB"),
        (117 * MIB + 1, "117 MiB"),
        (1_117_320_768, "1.04 GiB"),
        (600 * MIB, "600 MiB"),
        (5000 * 1024 * GIB, "5000 TiB"),
    ],
)
def test_a_size_is_shown_with_about_three_digits(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(0, 10**15))
def test_a_shown_size_means_the_size_it_was_made_from(nbytes: int) -> None:
    shown = format_size(nbytes)
    assert nbytes == 0 or abs(parse_size(shown) - nbytes) <= 0.006 * nbytes


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    limits = available_memory(machine(tmp_path, {}))
    assert limits == MemoryLimits(8 * GIB, 6 * GIB, None, 0)
    assert limits.available == 6 * GIB


def test_a_v2_group_limits_by_what_it_cannot_give_back(tmp_path: Path) -> None:
    stat = f"anon {MIB}\nactive_file {10 * MIB}\ninactive_file {20 * MIB}\nslab_reclaimable {5 * MIB}\n"
    files = {
        "proc/self/cgroup": "0::/user.slice/app\n",
        "proc/self/mountinfo": V2_MOUNT.format(root="/"),
        **v2_group("/user.slice/app", GIB, 100 * MIB, **{"memory.stat": stat}),
    }
    limits = available_memory(machine(tmp_path, files))
    assert (limits.cgroup_limit, limits.cgroup_used) == (GIB, 65 * MIB)
    assert limits.available == GIB - 65 * MIB


def test_of_nested_groups_the_one_that_leaves_the_least_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b/c\n",
        "proc/self/mountinfo": V2_MOUNT.format(root="/"),
        **v2_group("/a/b/c", "max", 10 * MIB),
        **v2_group("/a/b", 2 * GIB, 1900 * MIB),
        **v2_group("/a", GIB, 100 * MIB),
    }
    limits = available_memory(machine(tmp_path, files))
    assert (limits.cgroup_limit, limits.cgroup_used) == (2 * GIB, 1900 * MIB)
    assert limits.available == 148 * MIB


def test_memory_high_counts_as_a_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT.format(root="/"),
        **v2_group("", "max", 0, **{"memory.high": 700 * MIB}),
    }
    assert available_memory(machine(tmp_path, files)).available == 700 * MIB


def test_a_v1_group_beside_a_v2_hierarchy_without_memory_is_found(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/jobs/7/"
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/jobs/7\n1:cpuset:/\n0::/\n",
        "proc/self/mountinfo": (
            "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
            "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory,cpu\n"
            "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
        ),
        group + "memory.limit_in_bytes": 900 * MIB,
        group + "memory.usage_in_bytes": 300 * MIB,
        group + "memory.stat": f"inactive_file 7\ntotal_inactive_file {200 * MIB}\ntotal_active_file {MIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NO_LIMIT,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB,
    }
    limits = available_memory(machine(tmp_path, files))
    assert (limits.cgroup_limit, limits.cgroup_used) == (900 * MIB, 99 * MIB)


def test_the_huge_number_of_v1_is_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n",
        "proc/self/mountinfo": V1_MOUNT.format(root="/"),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NO_LIMIT,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 7 * GIB,
    }
    assert available_memory(machine(tmp_path, files)) == MemoryLimits(8 * GIB, 6 * GIB, None, 0)


@pytest.mark.parametrize(
    ("group", "mounted"),
    [("/docker/12ab", "/docker/12ab"), ("/", "/"), ("/../host.slice", "/"), ("/other", "/docker")],
)
def test_in_a_container_the_mount_point_is_the_group(tmp_path: Path, group: str, mounted: str) -> None:
    files = {
        "proc/self/cgroup": f"0::{group}\n",
        "proc/self/mountinfo": V2_MOUNT.format(root=mounted),
        **v2_group("", 512 * MIB, 12 * MIB),
    }
    assert available_memory(machine(tmp_path, files)).available == 500 * MIB


def test_a_mount_point_with_a_blank_is_found(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": r"41 31 0:38 / /my\040groups rw - cgroup2 cgroup2 rw" + "\n",
        "my groups/memory.max": 512 * MIB,
    }
    assert available_memory(machine(tmp_path, files)).cgroup_limit == 512 * MIB


@pytest.mark.parametrize("memory_max", ["max\n", "", "nonsense", None])
def test_a_group_that_tells_no_limit_sets_none(tmp_path: Path, memory_max: str | None) -> None:
    files: dict[str, object] = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT.format(root="/"),
    }
    if memory_max is not None:
        files["sys/fs/cgroup/memory.max"] = memory_max
    assert available_memory(machine(tmp_path, files)).cgroup_limit is None


def test_unreadable_group_files_set_no_limit(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT.format(root="/")}
    root = machine(tmp_path, files)
    (root / "sys/fs/cgroup/memory.max").mkdir(parents=True)  # reading it fails whoever asks, root too
    assert available_memory(root).cgroup_limit is None


def test_a_full_group_leaves_nothing_rather_than_less(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT.format(root="/"),
        **v2_group("", GIB, 2 * GIB),
    }
    assert available_memory(machine(tmp_path, files)).available == 0


@pytest.mark.parametrize("meminfo", ["", "MemTotal: 8 kB\n"])
def test_a_machine_that_does_not_tell_its_memory_asks_for_a_fixed_amount(tmp_path: Path, meminfo: str) -> None:
    with pytest.raises(StorageError, match=r"meminfo does not tell Mem.*--dram as a fixed amount"):
        available_memory(machine(tmp_path, {"proc/meminfo": meminfo}))


def test_this_machine_has_memory_left() -> None:
    limits = available_memory()
    page = os.sysconf("SC_PAGE_SIZE")
    assert limits.mem_total == os.sysconf("SC_PHYS_PAGES") * page
    assert 0 < limits.available <= limits.mem_total


def test_resident_memory_is_read_from_the_status_file(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t   90112 kB\nVmRSS:\t   81920 kB\n")
    assert (rss_bytes(status), peak_rss_bytes(status)) == (80 * MIB, 88 * MIB)


HOLD_AND_GIVE_BACK = f"""
from lever.memory import peak_rss_bytes, rss_bytes
before = rss_bytes()
block = bytearray(b"x") * {64 * MIB}
del block
print(peak_rss_bytes() - before, rss_bytes() - before)
"""


def test_the_peak_remembers_memory_that_was_given_back() -> None:
    """In a process of its own: what others have left in this one's heap decides what goes back to the system."""
    done = subprocess.run([sys.executable, "-c", HOLD_AND_GIVE_BACK], capture_output=True, timeout=60, check=True)
    peak, now = map(int, done.stdout.split())
    assert peak >= 60 * MIB
    assert now < 30 * MIB


def test_D8_the_refusal_names_need_budget_parts_and_ways_to_fit() -> None:
    ledger = Ledger(600 * MIB)
    ledger.reserve("ring", 90 * MIB)
    ledger.reserve("KV cache", 117 * MIB)
    with pytest.raises(DoesNotFit) as caught:
        ledger.reserve("output", 605 * MIB)
    assert str(caught.value) == (
        "needs 812 MiB but the budget is 600 MiB: ring 90 MiB, KV cache 117 MiB, output 605 MiB; "
        "give more with --dram, shorten the context with -c, or read the prompt in smaller parts with -b"
    )
    assert caught.value.exit_code == 3


def test_a_refused_part_is_not_booked() -> None:
    ledger = Ledger(100)
    ledger.reserve("ring", 60)
    with pytest.raises(DoesNotFit):
        ledger.reserve("ring", 41)
    assert (ledger.parts, ledger.used, ledger.free) == ({"ring": 60}, 60, 40)
    ledger.reserve("ring", 40)
    assert ledger.free == 0


@given(st.integers(0, 2**40), st.integers(1, 2**40))
def test_need_and_budget_never_read_equal(budget: int, excess: int) -> None:
    words = str(does_not_fit({"all": budget + excess}, budget, ["buy more"])).split()
    assert int(words[1]) > int(words[7])


def test_what_is_released_can_be_reserved_again() -> None:
    ledger = Ledger(100)
    ledger.reserve("draft", 100)
    ledger.release("draft", 30)
    ledger.reserve("ring", 30)
    assert ledger.parts == {"draft": 70, "ring": 30}


def test_more_released_than_reserved_is_a_bug_of_ours() -> None:
    ledger = Ledger(100)
    ledger.reserve("ring", 10)
    with pytest.raises(AssertionError, match="ring gives back more"):
        ledger.release("ring", 11)
    assert ledger.used == 10


def test_memory_held_for_a_block_is_given_back_when_the_block_fails() -> None:
    ledger = Ledger(100)
    free_inside = -1
    with pytest.raises(ZeroDivisionError), ledger.holding("ring", 60):
        free_inside = ledger.free // (ledger.free - 40)
    with ledger.holding("ring", 60):
        free_inside = ledger.free
    assert (free_inside, ledger.free) == (40, 100)


def test_threads_never_book_more_than_the_budget() -> None:
    ledger = Ledger(1000)
    refused = []

    def grab() -> None:
        for _ in range(500):
            try:
                ledger.reserve("ring", 1)
            except DoesNotFit:
                refused.append(1)

    threads = [threading.Thread(target=grab) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (ledger.used, len(refused)) == (1000, 1000)
