"""Fast cores, CPU features and file systems, on file trees of machines that are not this one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from lever.errors import StorageError
from lever.machine import (
    FileSystem,
    clock_hertz,
    cpu_features,
    cpu_model,
    filesystem_of,
    hottest_celsius,
    is_android,
    is_rotational,
    performance_cores,
)

V2 = {"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": "1 0 0:38 / /sys/fs/cgroup rw - cgroup2 c rw\n"}
V1 = {
    "proc/self/cgroup": "1:cpu:/a\n",
    "proc/self/mountinfo": "1 0 0:38 / /sys/fs/cgroup rw - cgroup c rw,cpu\n",
}


def machine(tmp_path: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


def cpus(name: str, figures: Sequence[int]) -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{cpu}/{name}": f"{figure}\n" for cpu, figure in enumerate(figures)}


def test_D10_two_big_and_six_little_cores_give_two(tmp_path: Path) -> None:
    root = machine(tmp_path, cpus("cpu_capacity", [280] * 6 + [1024] * 2))
    assert performance_cores(root, range(8)) == (6, 7)


def test_D10_big_and_prime_cores_both_count_as_fast(tmp_path: Path) -> None:
    root = machine(tmp_path, cpus("cpu_capacity", [250] * 4 + [870] * 3 + [1024]))
    assert performance_cores(root, range(8)) == (4, 5, 6, 7)


def test_D10_without_capacities_the_highest_frequency_decides(tmp_path: Path) -> None:
    files = cpus("cpufreq/cpuinfo_max_freq", [1_800_000] * 4 + [2_420_000] * 3 + [2_840_000])
    assert performance_cores(machine(tmp_path, files), range(8)) == (4, 5, 6, 7)


def test_D10_cores_outside_the_affinity_mask_are_left_out(tmp_path: Path) -> None:
    root = machine(tmp_path, cpus("cpu_capacity", [280] * 6 + [1024] * 2))
    assert performance_cores(root, {0, 1, 7}) == (7,)
    assert performance_cores(root, {0, 1, 2}) == (0, 1, 2)


def test_D10_the_affinity_of_the_process_is_respected(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    os.sched_setaffinity(0, {one})
    try:
        assert performance_cores(tmp_path) == (one,)
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("200000 100000", (6, 7)),
        ("150000 100000", (7,)),
        ("50000 100000", (7,)),
        ("max 100000", (4, 5, 6, 7)),
    ],
)
def test_D10_a_v2_quota_cuts_the_number_and_keeps_the_best(tmp_path: Path, quota: str, cores: tuple[int, ...]) -> None:
    files = V2 | {"sys/fs/cgroup/a/cpu.max": quota} | cpus("cpu_capacity", [250] * 4 + [800, 810, 900, 1024])
    assert performance_cores(machine(tmp_path, files), range(8)) == cores


@pytest.mark.parametrize(("quota", "cores"), [("200000", (0, 1)), ("-1", (0, 1, 2, 3))])
def test_D10_a_v1_quota_of_a_parent_counts_too(tmp_path: Path, quota: str, cores: tuple[int, ...]) -> None:
    files = V1 | {
        "sys/fs/cgroup/a/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/a/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu.cfs_quota_us": quota,
        "sys/fs/cgroup/cpu.cfs_period_us": "100000\n",
    }
    assert performance_cores(machine(tmp_path, files), range(4)) == cores


def test_D10_of_two_threads_of_a_core_one_is_used(tmp_path: Path) -> None:
    names = {0: "0,4", 1: "1,5", 2: "2-3", 3: "2-3", 4: "0,4", 5: "1,5"}
    files = {f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": text for n, text in names.items()}
    root = machine(tmp_path, files)
    assert performance_cores(root, range(6)) == (0, 1, 2)
    assert performance_cores(root, {3, 4, 5}) == (3, 4, 5)


def test_D10_a_machine_that_tells_nothing_gives_every_allowed_core(tmp_path: Path) -> None:
    assert performance_cores(tmp_path, {3, 1}) == (1, 3)


def test_this_machine_has_a_fast_core() -> None:
    assert set(performance_cores()) <= os.sched_getaffinity(0)
    assert len(performance_cores()) >= 1


def test_D13_features_of_a_phone_have_ggml_names(tmp_path: Path) -> None:
    words = "fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm asimddp sve i8mm bf16"
    root = machine(tmp_path, {"proc/cpuinfo": f"processor\t: 0\nFeatures\t: {words}\nCPU part\t: 0xd4d\n\n" * 2})
    assert cpu_features(root) == {"NEON", "ARM_FMA", "FP16_VA", "DOTPROD", "MATMUL_INT8", "SVE"}


def test_D13_only_features_of_all_cores_count(tmp_path: Path) -> None:
    text = "processor : 0\nFeatures : asimd asimddp\n\nprocessor : 1\nFeatures : asimd\n"
    assert cpu_features(machine(tmp_path, {"proc/cpuinfo": text})) == {"NEON", "ARM_FMA"}


def test_D13_features_of_a_desktop_have_ggml_names(tmp_path: Path) -> None:
    words = "fpu sse sse2 pni ssse3 fma avx f16c avx2 bmi2 avx512f avx512_vnni avx_vnni"
    root = machine(tmp_path, {"proc/cpuinfo": f"flags\t\t: {words}\n"})
    expected = {"SSE3", "SSSE3", "FMA", "AVX", "F16C", "AVX2", "BMI2", "AVX512_VNNI", "AVX_VNNI"}
    assert cpu_features(root) == expected


@pytest.mark.parametrize("text", ["", "processor : 0\nisa : rv64imafdc\n"])
def test_D13_an_unknown_cpu_has_no_known_features(tmp_path: Path, text: str) -> None:
    assert cpu_features(machine(tmp_path, {"proc/cpuinfo": text})) == frozenset()


def test_the_deepest_and_latest_mount_holds_a_path(tmp_path: Path) -> None:
    lines = (
        "1 0 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "2 1 0:30 / /data rw - tmpfs tmpfs rw\n"
        "3 1 259:2 / /data rw shared:1 master:2 - f2fs /dev/block/dm-5 rw\n"
        "4 1 0:31 / /database rw - tmpfs tmpfs rw\n"
    )
    root = machine(tmp_path, {"proc/self/mountinfo": lines})
    assert filesystem_of(Path("/data/models/x.gguf"), root) == FileSystem(Path("/data"), "f2fs", "/dev/block/dm-5")
    assert filesystem_of(Path("/home"), root).type == "ext4"


def test_a_device_is_named_as_sysfs_names_it(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/self/mountinfo": "1 0 179:2 / / rw - ext4 /dev/root rw\n"})
    (root / "sys/devices/mmc/mmcblk0/mmcblk0p2").mkdir(parents=True)
    (root / "sys/dev/block").mkdir(parents=True)
    (root / "sys/dev/block/179:2").symlink_to("../../devices/mmc/mmcblk0/mmcblk0p2")
    assert filesystem_of(Path("/x"), root).device == "/dev/mmcblk0p2"


def test_a_machine_without_a_mount_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot tell the file system of /x"):
        filesystem_of(Path("/x"), tmp_path)


def test_the_file_system_of_this_directory_is_that_of_its_device_number(tmp_path: Path) -> None:
    point = filesystem_of(tmp_path).mount_point
    assert os.stat(point).st_dev == tmp_path.stat().st_dev  # noqa: PTH116
    assert point.is_mount()


@pytest.mark.parametrize(("text", "rotates"), [("1\n", True), ("0\n", False)])
def test_a_partition_rotates_as_its_disk_does(tmp_path: Path, text: str, rotates: bool) -> None:
    root = machine(tmp_path, {"sys/devices/ata/sda/queue/rotational": text, "sys/devices/ata/sda/sda1/size": "1"})
    (root / "sys/class/block").mkdir(parents=True)
    for name, place in {"sda": "sda", "sda1": "sda/sda1"}.items():
        (root / "sys/class/block" / name).symlink_to(f"../../devices/ata/{place}")
    assert is_rotational("/dev/sda", root) is rotates
    assert is_rotational("/dev/sda1", root) is rotates


def test_a_mapped_device_is_followed_to_its_block_device(tmp_path: Path) -> None:
    root = machine(tmp_path, {"sys/class/block/dm-0/queue/rotational": "1\n"})
    (root / "dev/mapper").mkdir(parents=True)
    (root / "dev/mapper/vault").symlink_to("../dm-0")
    assert is_rotational("/dev/mapper/vault", root) is True


@pytest.mark.parametrize("device", ["tmpfs", "server:/export", "/dev/nothing"])
def test_what_is_no_block_device_is_neither(tmp_path: Path, device: str) -> None:
    assert is_rotational(device, tmp_path) is None


@pytest.mark.parametrize(
    ("environ", "android"),
    [({}, False), ({"TERMUX_VERSION": "0.118"}, True), ({"ANDROID_ROOT": "/system"}, True)],
)
def test_android_is_known_by_its_environment(environ: dict[str, str], android: bool) -> None:
    assert is_android(environ) is android


# --- its name, heat and clock -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel name\t: Xeon: fast\n\nprocessor\t: 1\nmodel name\t: Xeon: fast\n", "Xeon: fast"),
        ("CPU implementer: 0x41\nCPU part: 0xd05\n\nCPU implementer: 0x41\nCPU part: 0xd0b\n", "0x41, 0xd05, 0xd0b"),
        ("", "unknown"),
    ],
)
def test_a_cpu_is_named_by_its_cores(tmp_path: Path, cpuinfo: str, name: str) -> None:
    assert cpu_model(machine(tmp_path, {"proc/cpuinfo": cpuinfo})) == name


def test_the_hottest_zone_counts_and_nonsense_does_not(tmp_path: Path) -> None:
    temperatures = ["41500", "0", "-274000", "67250", "999999", "off"]
    files = {f"sys/class/thermal/thermal_zone{zone}/temp": f"{text}\n" for zone, text in enumerate(temperatures)}

    assert hottest_celsius(machine(tmp_path, files)) == 67.25
    assert hottest_celsius(tmp_path / "none") is None


def test_the_clock_is_the_mean_of_the_cores_that_are_asked_for(tmp_path: Path) -> None:
    root = machine(tmp_path, cpus("cpufreq/scaling_cur_freq", [600_000, 2_000_000, 3_000_000]))

    assert clock_hertz([1, 2], root) == 2.5e9
    assert clock_hertz([1, 7], root) == 2e9
    assert clock_hertz([7], root) is None
