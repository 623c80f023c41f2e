"""What `lever doctor` makes of libraries, machines and storage that are not the ones of this machine."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from lever import doctor
from lever.doctor import Finding, Loaded, Report, Trial
from lever.errors import DownloadError, LibraryError, StorageError
from lever.ggml.probe import Probe
from lever.gguf import MATRIX_TYPES, TYPES
from lever.memory import MIB
from lever.pages import PAGE
from lever.weights.reader import read_into

PLAIN = tuple(Probe(TYPES[kind].name, "plain", 1e-4, 1) for kind in sorted(MATRIX_TYPES))
DEVICES = {"cpu": "a CPU", "rpc:HOST:PORT": "see lever rpc-serve"}
SOUND = Trial(Loaded("/nowhere", "0.20.2", {"AVX2": "1", "REPACK": "1"}), PLAIN, None, DEVICES)
KILLED = Trial(None, (), "trying ggml ended with SIGILL")

X86 = frozenset({"SSE3", "SSSE3", "AVX", "AVX2", "FMA", "F16C", "BMI2"})
ARM = frozenset({"NEON", "ARM_FMA"})

ROOT_MOUNT = "27 1 254:0 / / rw - ext4 /dev/vda rw\n"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TERMUX_VERSION", "ANDROID_ROOT", "LEVER_GGML_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LEVER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(doctor, "WRITTEN", 16 * MIB)
    monkeypatch.setattr(doctor, "try_ggml", lambda: SOUND)


def machine(tmp_path: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        path = tmp_path / "machine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path / "machine"


def named(findings: list[Finding] | tuple[Finding, ...], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def clock(step: float) -> Callable[[], float]:
    """Each look at it finds `step` seconds gone."""
    ticks = count()
    return lambda: next(ticks) * step


def file_of(path: Path, nbytes: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(nbytes)
    return path


# --- the report ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("levels", "code"), [([], 0), (["ok"], 0), (["ok", "warning"], 1), (["problem", "warning", "ok"], 2)]
)
def test_the_exit_code_is_that_of_the_worst_finding(levels: list[doctor.Level], code: int) -> None:
    assert Report(tuple(Finding("x", level, "y") for level in levels)).exit_code == code


def test_the_report_is_a_json_document() -> None:
    report = Report((Finding("cores", "ok", "2"), Finding("rows", "problem", "vary", "build again")))
    assert json.loads(json.dumps(report.to_dict())) == {
        "exit_code": 2,
        "findings": [
            {"name": "cores", "level": "ok", "value": "2", "advice": None},
            {"name": "rows", "level": "problem", "value": "vary", "advice": "build again"},
        ],
    }


def test_every_part_is_examined_and_announced_before_its_findings(tmp_path: Path) -> None:
    announced: list[str] = []
    model = file_of(tmp_path / "m.gguf", 20 * MIB)
    report = doctor.examine(tmp_path, model=model, progress=announced.append)
    names = [finding.name for finding in report.findings]
    assert {"lever", "python", "ggml", "cpu features", "kernels", "products", "rows"} < set(names)
    assert {"cores", "memory", "control group", "--dram auto", "swap"} < set(names)
    for place in ("cache", "model"):
        assert {f"{place} file system", f"{place} O_DIRECT", f"{place} read rate"} < set(names)
    assert announced[:2] == ["software", "ggml"]
    assert announced[-2:] == ["cache reads", "model reads"]
    assert len(names) == len(set(names))


def test_a_part_that_fails_is_a_problem_and_the_others_are_still_examined(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/self/mountinfo": ROOT_MOUNT})  # no /proc/meminfo
    report = doctor.examine(tmp_path, model=tmp_path / "absent.gguf", root=root)
    assert named(report.findings, "memory").level == "problem"
    assert "MemTotal" in named(report.findings, "memory").value
    assert "absent.gguf" in named(report.findings, "model reads").value
    assert named(report.findings, "cache O_DIRECT")
    assert report.exit_code == 2


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/usr/bin/python3"), "/usr/bin/python3: Permission denied"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "ggml: Cannot allocate memory"),
        (LibraryError("ggml is not installed: install it"), "ggml is not installed: install it"),
    ],
)
def test_what_a_part_raises_is_a_problem_in_one_line(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing() -> Trial:
        raise error

    monkeypatch.setattr(doctor, "try_ggml", failing)
    assert Finding("ggml", "problem", line) in doctor.examine(tmp_path).findings


# --- ggml ---------------------------------------------------------------------------------------------------


def test_the_advised_package_is_the_pinned_one() -> None:
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    assert doctor.PACKAGE in project["dependencies"]
    assert doctor.PACKAGE in doctor.reinstall()
    assert project["name"] == doctor.DISTRIBUTION


def test_a_library_chosen_by_variable_is_mended_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEVER_GGML_DIR", "/opt/ggml")
    assert "/opt/ggml" in doctor.reinstall()
    assert "pip" not in doctor.reinstall()


@pytest.mark.parametrize("missing", ["DOTPROD", "MATMUL_INT8"])
def test_D13_an_arm_library_without_the_dot_products_of_the_cpu_is_a_problem_with_the_fix(missing: str) -> None:
    found = doctor.instructions(ARM, ARM | {missing})
    assert found.level == "problem"
    assert missing in found.value
    assert "GGML_NATIVE=ON" in (found.advice or "")


@pytest.mark.parametrize("missing", ["AVX2", "FMA", "AVX512", "AVX512_VNNI", "AVX512_BF16"])
def test_D13_an_x86_library_without_the_wide_vectors_of_the_cpu_is_a_problem_with_the_fix(missing: str) -> None:
    found = doctor.instructions(X86 - {missing}, X86 | {missing})
    assert found.level == "problem"
    assert missing in found.value
    assert "GGML_NATIVE=ON" in (found.advice or "")


def test_D13_all_that_is_missing_is_listed_and_the_worst_decides() -> None:
    found = doctor.instructions(ARM, ARM | {"DOTPROD", "FP16_VA", "SVE"})
    assert found.level == "problem"
    assert "DOTPROD, FP16_VA, SVE" in found.value


@pytest.mark.parametrize("missing", ["FP16_VA", "SVE", "AVX_VNNI"])
def test_an_instruction_set_of_small_effect_is_a_warning(missing: str) -> None:
    assert doctor.instructions(ARM, ARM | {missing}).level == "warning"


@pytest.mark.parametrize("unused", ["AMX_INT8", "SME"])
def test_instruction_sets_that_lever_never_uses_are_not_missed(unused: str) -> None:
    assert doctor.instructions(X86, X86 | {unused}).level == "ok"


@pytest.mark.parametrize("feature", ["AVX512", "MATMUL_INT8", "SVE"])
def test_M2_D14_a_library_for_a_newer_cpu_is_a_problem(feature: str) -> None:
    found = doctor.instructions(X86 | {feature}, X86)
    assert found.level == "problem"
    assert feature in found.value
    assert "lacks" in found.value


def test_ways_of_building_are_not_taken_for_instruction_sets() -> None:
    assert doctor.instructions(X86 | {"REPACK", "LLAMAFILE", "OPENMP"}, X86).level == "ok"


def test_a_cpu_of_unknown_kind_is_said_to_be_so() -> None:
    found = doctor.instructions(frozenset({"RVV"}), frozenset())
    assert found.level == "ok"
    assert "not compared" in found.value


def test_M4_the_parts_of_the_library_are_listed_with_their_directory(tmp_path: Path) -> None:
    for name in ("libggml.so", "libggml-base.so", "libggml-cpu.so", "libggml-cpu.so.0", "libggml-vulkan.so"):
        (tmp_path / name).touch()
    findings = doctor.library(replace(SOUND, loaded=Loaded(str(tmp_path), "0.20.2", {})), X86)
    assert named(findings, "ggml").value == f"0.20.2 (base, cpu, vulkan) in {tmp_path}"


def test_kernels_are_named_by_the_layout_that_a_type_has() -> None:
    probes = (*PLAIN, Probe("Q4_0", "repacked", 1e-4, 1))
    kernels = named(doctor.library(replace(SOUND, probes=probes), X86), "kernels")
    repacked, plain = kernels.value.split("; ")
    assert kernels.level == "ok"
    assert repacked == "repacked: Q4_0"
    assert "Q4_0" not in plain
    assert "Q6_K" in plain


def test_a_type_that_the_library_does_not_multiply_is_a_problem() -> None:
    probes = tuple(found for found in PLAIN if found.type_name != "Q6_K")
    kernels = named(doctor.library(replace(SOUND, probes=probes), X86), "kernels")
    assert kernels.level == "problem"
    assert kernels.value.startswith("none for Q6_K;")


@pytest.mark.parametrize("error", [0.04, float("inf"), float("nan")])
def test_D14_M1_wrong_products_are_a_problem_that_names_the_type(error: float) -> None:
    probes = (Probe("Q5_K", "plain", error, 1), *PLAIN)
    products = named(doctor.library(replace(SOUND, probes=probes), X86), "products")
    assert products.level == "problem"
    assert "Q5_K plain" in products.value
    assert "Q4_0" not in products.value


def test_rows_that_change_with_their_neighbours_are_a_problem_that_names_the_type() -> None:
    probes = (*PLAIN, Probe("Q2_K", "repacked", 1e-4, None))
    rows = named(doctor.library(replace(SOUND, probes=probes), X86), "rows")
    assert rows.level == "problem"
    assert "Q2_K repacked" in rows.value


def test_rows_that_need_company_are_sound_and_named_with_their_multiple() -> None:
    probes = (*PLAIN, Probe("Q4_K", "repacked", 1e-4, 4))
    rows = named(doctor.library(replace(SOUND, probes=probes), X86), "rows")
    assert rows.level == "ok"
    assert rows.value.endswith("in multiples of: Q4_K repacked 4")


def test_devices_are_listed_and_a_ggml_without_rpc_is_told() -> None:
    found = named(doctor.library(SOUND, X86), "devices")
    assert (found.level, found.value) == ("ok", "cpu (a CPU), rpc:HOST:PORT (see lever rpc-serve)")
    found = named(doctor.library(replace(SOUND, devices={"cpu": "a CPU"}), X86), "devices")
    assert (found.level, found.value) == ("ok", "cpu (a CPU); no RPC in this ggml")
    assert "GGML_RPC=ON" in (found.advice or "")


def done(stdout: str = "", status: int = 0, stderr: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], status, stdout, stderr)


LOADED_LINE = '["loaded", {"directory": "/lib", "version": "0.20.2", "features": {"AVX2": "1"}}]\n'
PROBE_LINE = '["probe", {"type_name": "F32", "layout": "plain", "error": 1e-8, "row_multiple": 1}]\n'


def test_a_trial_is_read_from_what_the_process_said() -> None:
    trial = doctor.read_trial(done(LOADED_LINE + PROBE_LINE))
    assert trial.loaded == Loaded("/lib", "0.20.2", {"AVX2": "1"})
    assert trial.probes == (Probe("F32", "plain", 1e-8, 1),)
    assert trial.failure is None


def test_M2_D14_a_trial_ended_by_an_illegal_instruction_keeps_what_it_saw_before() -> None:
    trial = doctor.read_trial(done(LOADED_LINE + PROBE_LINE, status=-4))
    findings = doctor.library(trial, X86)
    assert [finding.name for finding in findings] == ["ggml", "cpu features", "ggml trial"]
    assert "SIGILL" in findings[-1].value
    assert "GGML_NATIVE=ON" in (findings[-1].advice or "")


def test_a_trial_that_python_itself_failed_gives_the_last_line_of_its_messages() -> None:
    trial = doctor.read_trial(done("", 1, "Traceback ...\nModuleNotFoundError: No module named 'numpy'\n"))
    assert trial.failure == "trying ggml ended with status 1: ModuleNotFoundError: No module named 'numpy'"


def test_M1_a_missing_or_wrong_library_is_a_problem_with_the_fix() -> None:
    trial = doctor.read_trial(done('["failure", "ggml is not installed"]\n'))
    assert doctor.library(trial, X86) == [Finding("ggml trial", "problem", "ggml is not installed", doctor.reinstall())]


def test_without_ggml_the_rest_is_still_examined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "try_ggml", lambda: KILLED)
    report = doctor.examine(tmp_path)
    assert report.exit_code == 2
    assert named(report.findings, "cache O_DIRECT")


# --- the machine --------------------------------------------------------------------------------------------


def test_D10_fast_cores_are_shown_beside_what_affinity_allows(tmp_path: Path) -> None:
    files = {f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity": "250" for cpu in range(6)}
    files |= {f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity": "1024" for cpu in (6, 7)}
    [found] = doctor.cores(machine(tmp_path, files), range(8))
    assert found.value.startswith("2 fast (6, 7); affinity allows 8 of ")


MEMINFO = "MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\n"
V2_MOUNT = "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2_GROUP = {
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": V2_MOUNT,
    "sys/fs/cgroup/memory.max": str(1024 * MIB),
    "sys/fs/cgroup/memory.current": str(24 * MIB),
}
V1_GROUP = {
    "proc/self/cgroup": "4:memory:/\n",
    "proc/self/mountinfo": V1_MOUNT,
    "sys/fs/cgroup/memory/memory.limit_in_bytes": str(1024 * MIB),
    "sys/fs/cgroup/memory/memory.usage_in_bytes": str(24 * MIB),
}


def test_D5_memory_of_the_machine_gives_the_budget(tmp_path: Path) -> None:
    found = doctor.memory(machine(tmp_path, {"proc/meminfo": MEMINFO}))
    assert [finding.level for finding in found] == ["ok"] * 3
    assert named(found, "memory").value == "6 GiB available of 8 GiB"
    assert named(found, "control group").value == "no limit"
    assert named(found, "--dram auto").value.startswith("4.5 GiB of the 6 GiB")


@pytest.mark.parametrize("group", [V1_GROUP, V2_GROUP], ids=["v1", "v2"])
def test_D5_the_limit_of_a_control_group_gives_the_budget(group: Mapping[str, str], tmp_path: Path) -> None:
    found = doctor.memory(machine(tmp_path, {"proc/meminfo": MEMINFO, **group}))
    assert named(found, "control group").value == "limit 1 GiB, of which 24 MiB are held"
    assert named(found, "--dram auto").value.startswith("750 MiB of the 0.98 GiB")


def test_D2_on_android_the_budget_is_smaller_and_the_ways_of_the_system_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMUX_VERSION", "0.118")
    found = doctor.memory(machine(tmp_path, {"proc/meminfo": MEMINFO}))
    assert named(found, "--dram auto").value.startswith("2.4 GiB of the 6 GiB")
    findings = doctor.examine(tmp_path).findings
    assert "termux-wake-lock" in (named(findings, "wake lock").advice or "")
    assert "phantom" in (named(findings, "phantom processes").advice or "")


def test_D2_off_android_there_is_no_word_of_it(tmp_path: Path) -> None:
    assert not {"wake lock", "phantom processes"} & {finding.name for finding in doctor.examine(tmp_path).findings}


def test_little_memory_is_a_warning(tmp_path: Path) -> None:
    meminfo = "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n"
    assert named(doctor.memory(machine(tmp_path, {"proc/meminfo": meminfo})), "--dram auto").level == "warning"


def test_swap_areas_are_listed_with_their_size(tmp_path: Path) -> None:
    header = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
    line = "/dev/block/zram0                        partition\t2097152\t\t12288\t\t32758\n"
    assert doctor.swap(machine(tmp_path, {"proc/swaps": header + line}))[0].value == "/dev/block/zram0 2 GiB"
    assert doctor.swap(machine(tmp_path, {"proc/swaps": header}))[0].value == "none"


def test_swap_that_is_hidden_is_said_to_be_so(tmp_path: Path) -> None:
    assert doctor.swap(tmp_path)[0].value == "not shown to this process"


# --- storage ------------------------------------------------------------------------------------------------


@pytest.fixture
def accepting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever file system the tests run on accepts the flag of direct reads."""
    monkeypatch.setattr(os, "O_DIRECT", 0)


def full_of(size: int) -> Callable[[int, memoryview, int], int]:
    """Reads of a file of this size that take no time."""
    return lambda _fd, view, offset: max(0, min(len(view), size - offset))


@pytest.mark.parametrize("kind", ["fuse", "fuse.sshfs", "fuseblk", "sdcardfs", "nfs4", "cifs", "9p", "tmpfs"])
def test_M6_storage_unfit_for_models_is_a_warning_with_a_better_place(kind: str, tmp_path: Path) -> None:
    mounts = ROOT_MOUNT + f"30 27 0:50 / /storage/emulated rw - {kind} source rw\n"
    root = machine(tmp_path, {"proc/self/mountinfo": mounts})
    [found] = doctor.file_system("model", Path("/storage/emulated/0/m.gguf"), root)
    assert found.level == "warning"
    assert kind in found.value
    assert "$HOME" in (found.advice or "")


@pytest.mark.parametrize("kind", ["ext4", "f2fs", "xfs", "btrfs", "overlay"])
def test_M6_a_disk_of_the_machine_is_sound(kind: str, tmp_path: Path) -> None:
    mounts = f"27 1 254:0 / / rw - {kind} /dev/vda rw\n"
    [found] = doctor.file_system("cache", Path("/data/x"), machine(tmp_path, {"proc/self/mountinfo": mounts}))
    assert found == Finding("cache file system", "ok", f"{kind} on /dev/vda at /, for /data/x")


@pytest.mark.usefixtures("accepting")
def test_C1_a_file_system_that_refuses_direct_reads_is_a_warning_and_still_measured(tmp_path: Path) -> None:
    model = file_of(tmp_path / "m.gguf", 20 * MIB)
    first = iter([True])

    def refusing(fd: int, view: memoryview, offset: int) -> int:
        if next(first, False):
            raise OSError(errno.EINVAL, "Invalid argument")
        return read_into(fd, view, offset)

    found = doctor.reads("model", model, read=refusing)
    assert named(found, "model O_DIRECT").level == "warning"
    assert "refuses its reads" in named(found, "model O_DIRECT").value
    assert "MB/s over 20 MiB" in named(found, "model read rate").value


@pytest.mark.usefixtures("accepting")
@pytest.mark.parametrize("refuses", [True, False])
def test_C1_only_before_buffered_reads_the_page_cache_is_emptied(
    refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(doctor, "drop_page_cache", emptied.append)

    def read(fd: int, view: memoryview, offset: int) -> int:
        if refuses and len(view) == PAGE:  # the question whether direct reads work
            raise OSError(errno.EINVAL, "Invalid argument")
        return full_of(20 * MIB)(fd, view, offset)

    doctor.reads("model", file_of(tmp_path / "m.gguf", 20 * MIB), read=read)
    assert len(emptied) == refuses


@pytest.mark.usefixtures("accepting")
def test_C1_direct_reads_are_reported_where_they_work(tmp_path: Path) -> None:
    model = file_of(tmp_path / "m.gguf", 20 * MIB)
    found = doctor.reads("model", model, read=full_of(20 * MIB))
    assert named(found, "model O_DIRECT") == Finding("model O_DIRECT", "ok", "yes")


def test_the_rate_is_bytes_over_time_in_whole_blocks(tmp_path: Path) -> None:
    model = file_of(tmp_path / "m.gguf", 40 * MIB)
    # 10 blocks, before each of which the clock is looked at; the next block is empty.
    rate = named(doctor.reads("model", model, clock=clock(0.01), read=full_of(40 * MIB)), "model read rate")
    assert rate == Finding("model read rate", "ok", "350 MB/s over 40 MiB: a GB that is streamed takes 2.86 s per pass")


def test_slow_storage_is_a_warning(tmp_path: Path) -> None:
    model = file_of(tmp_path / "m.gguf", 400 * MIB)
    rate = named(doctor.reads("model", model, clock=clock(0.05), read=full_of(400 * MIB)), "model read rate")
    assert rate.level == "warning"
    assert "NVMe" in (rate.advice or "")


def test_slow_storage_with_moving_parts_is_called_so(tmp_path: Path) -> None:
    rotational = {"proc/self/mountinfo": ROOT_MOUNT, "sys/class/block/vda/queue/rotational": "1\n"}
    root = machine(tmp_path, rotational)
    model = file_of(tmp_path / "m.gguf", 400 * MIB)
    slow = named(doctor.reads("model", model, root, clock=clock(0.05), read=full_of(400 * MIB)), "model read rate")
    fast = named(doctor.reads("model", model, root, clock=clock(0.001), read=full_of(400 * MIB)), "model read rate")
    assert "moving parts" in (slow.advice or "")
    assert fast.level == "ok"


@pytest.mark.parametrize("step", [0.001, 0.2])
def test_reading_ends_after_its_bytes_or_its_seconds(step: float, tmp_path: Path) -> None:
    model = file_of(tmp_path / "m.gguf", 4096 * MIB)
    blocks: list[int] = []

    def counting(_fd: int, view: memoryview, offset: int) -> int:
        blocks.append(offset)
        return len(view)

    doctor.reads("model", model, clock=clock(step), read=counting)
    assert max(blocks) + 4 * MIB <= min(doctor.SAMPLE, 4 * MIB * doctor.SECONDS / step + 4 * MIB)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 5 * MIB])
def test_a_file_too_small_to_tell_a_rate_is_not_judged(nbytes: int, tmp_path: Path) -> None:
    rate = named(doctor.reads("model", file_of(tmp_path / "m.gguf", nbytes)), "model read rate")
    assert rate.level == "ok"
    assert rate.value.startswith("not measured")


def test_an_error_of_the_device_is_reported_with_file_and_offset(tmp_path: Path) -> None:
    def failing(_fd: int, view: memoryview, offset: int) -> int:
        if offset >= 8 * MIB:
            raise OSError(errno.EIO, "Input/output error")
        return len(view)

    with pytest.raises(StorageError, match=f"m.gguf failed at byte {8 * MIB}"):
        doctor.reads("model", file_of(tmp_path / "m.gguf", 20 * MIB), read=failing)


def test_a_large_model_of_the_cache_is_read_rather_than_a_file_written(tmp_path: Path) -> None:
    file_of(tmp_path / "models" / "small.gguf", MIB)
    file_of(tmp_path / "models" / "large.gguf", 300 * MIB)
    before = set(tmp_path.rglob("*"))
    rate = named(doctor.reads_in(tmp_path), "cache read rate")
    assert "over 300 MiB" in rate.value
    assert set(tmp_path.rglob("*")) == before


def test_a_link_to_a_model_on_another_disk_is_no_measure_of_the_cache(tmp_path: Path) -> None:
    elsewhere = file_of(tmp_path / "elsewhere" / "large.gguf", 300 * MIB)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "large.gguf").symlink_to(elsewhere)
    assert "over 16 MiB" in named(doctor.reads_in(tmp_path / "cache"), "cache read rate").value


def test_without_a_model_a_file_is_written_and_taken_away_again(tmp_path: Path) -> None:
    rate = named(doctor.reads_in(tmp_path / "absent" / "yet"), "cache read rate")
    assert "over 16 MiB" in rate.value
    assert list(tmp_path.iterdir()) == []


def test_writing_ends_when_its_seconds_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fdatasync", synced.append)
    doctor.reads_in(tmp_path, clock=clock(0.8))
    assert len(synced) == 2  # of 4 blocks, at 0.8 and 1.6 of 2 seconds


def test_a_small_model_is_no_measure_of_the_cache(tmp_path: Path) -> None:
    file_of(tmp_path / "models" / "small.gguf", doctor.LEAST_MODEL - 1)
    assert "over 16 MiB" in named(doctor.reads_in(tmp_path), "cache read rate").value


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "WRITTEN", 1 << 60)
    with pytest.raises(DownloadError, match="are needed"):
        doctor.reads_in(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_while_it_is_measured_is_an_error_that_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fdatasync", full)
    with pytest.raises(StorageError, match="No space left on device; set LEVER_HOME"):
        doctor.reads_in(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_an_error_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**_options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(doctor, "NamedTemporaryFile", refused)
    with pytest.raises(StorageError, match="Read-only file system; set LEVER_HOME"):
        doctor.reads_in(tmp_path)
