"""The machine under a run: its fast cores, CPU features and file systems. Measures and changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from lever.errors import StorageError
from lever.linux import ROOT, Mount, below, cgroup_dirs, is_android, mounts, read_text

__all__ = [
    "FileSystem",
    "clock_hertz",
    "cpu_features",
    "cpu_model",
    "filesystem_of",
    "hottest_celsius",
    "is_android",
    "is_rotational",
    "performance_cores",
]

# Share of the best core's figure that makes a core a fast one. Capacity is measured work per time (little
# ARM cores have 0.2 to 0.45 of a big one); frequency alone understates the gap (little cores reach 0.75).
_FAST_CAPACITY = 0.6
_FAST_FREQUENCY = 0.8

# ggml's names (ggml_cpu_has_* in ggml-cpu.h) and what /proc/cpuinfo must list for each.
_X86 = {
    "SSE3": {"pni"},
    "SSSE3": {"ssse3"},
    "AVX": {"avx"},
    "AVX_VNNI": {"avx_vnni"},
    "AVX2": {"avx2"},
    "BMI2": {"bmi2"},
    "F16C": {"f16c"},
    "FMA": {"fma"},
    "AVX512": {"avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"},
    "AVX512_VBMI": {"avx512vbmi"},
    "AVX512_VNNI": {"avx512_vnni"},
    "AVX512_BF16": {"avx512_bf16"},
    "AMX_INT8": {"amx_int8"},
}
_ARM64 = {
    "NEON": {"asimd"},
    "ARM_FMA": {"asimd"},
    "FP16_VA": {"asimdhp"},
    "DOTPROD": {"asimddp"},
    "MATMUL_INT8": {"i8mm"},
    "SVE": {"sve"},
    "SME": {"sme"},
    "SME2": {"sme2"},
}
_FEATURES: Mapping[str, Mapping[str, set[str]]] = {"flags": _X86, "Features": _ARM64}


def performance_cores(root: Path = ROOT, allowed: Iterable[int] | None = None) -> tuple[int, ...]:
    """The fast cores that this process may use, one hardware thread of each, by number.

    Fast is judged by cpu_capacity, else by the highest frequency, else all are. `allowed` is the affinity
    mask of the process if not given. A CPU quota of a control group cuts the number, never below one.
    """
    cpus = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    cores = _one_thread_each(root, cpus)
    speeds, share = _speeds(root, cores)
    best_first = sorted(cores, key=lambda cpu: -speeds[cpu])
    fast = [cpu for cpu in best_first if speeds[cpu] >= share * speeds[best_first[0]]]
    return tuple(sorted(fast[: _quota(root)]))


def _one_thread_each(root: Path, cpus: list[int]) -> list[int]:
    seen: set[int] = set()
    cores = []
    for cpu in cpus:
        if cpu not in seen:
            cores.append(cpu)
        siblings = read_text(_cpu(root, cpu) / "topology/thread_siblings_list")
        seen |= _cpu_list(siblings or "")
    return cores


def _speeds(root: Path, cpus: list[int]) -> tuple[dict[int, int], float]:
    """A comparable figure for each core, and the share of the best that counts as fast."""
    for name, share in (("cpu_capacity", _FAST_CAPACITY), ("cpufreq/cpuinfo_max_freq", _FAST_FREQUENCY)):
        texts = {cpu: (read_text(_cpu(root, cpu) / name) or "").strip() for cpu in cpus}
        if all(text.isdigit() for text in texts.values()):
            return {cpu: int(text) for cpu, text in texts.items()}, share
    return dict.fromkeys(cpus, 1), 1.0


def _cpu(root: Path, cpu: int) -> Path:
    return root / f"sys/devices/system/cpu/cpu{cpu}"


def _cpu_list(text: str) -> set[int]:
    """The kernel's list format: 0-3,8."""
    spans = [part.split("-") for part in text.strip().split(",") if part]
    return {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}


def _quota(root: Path) -> int | None:
    """Whole CPUs of the tightest control group, at least one; None without a quota."""
    quotas = [quota for path in cgroup_dirs("cpu", root) if (quota := _group_quota(path)) is not None]
    return max(1, int(min(quotas))) if quotas else None


def _group_quota(directory: Path) -> float | None:
    """CPU time per wall time: "200000 100000" in v2, two files in v1; "max" and -1 are no quota."""
    names = ("cpu.max",) if (directory / "cpu.max").exists() else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    words = " ".join(read_text(directory / name) or "" for name in names).split()
    if len(words) != 2 or not words[0].isdigit():
        return None
    return int(words[0]) / int(words[1])


def cpu_features(root: Path = ROOT) -> frozenset[str]:
    """Features that every core has, by ggml's names; empty on a CPU family not known here."""
    lines = (line.partition(":") for line in (read_text(root / "proc/cpuinfo") or "").splitlines())
    cores = [_named(key.strip(), set(words.split())) for key, _, words in lines if key.strip() in _FEATURES]
    return reduce(frozenset.intersection, cores) if cores else frozenset()


def _named(key: str, words: set[str]) -> frozenset[str]:
    return frozenset(name for name, needed in _FEATURES[key].items() if needed <= words)


def cpu_model(root: Path = ROOT) -> str:
    """What kinds of core there are, by name (x86) or by the numbers of their makers (ARM); "unknown" elsewhere."""
    lines = [line.partition(":") for line in (read_text(root / "proc/cpuinfo") or "").splitlines()]
    values = [(key.strip(), value.strip()) for key, _, value in lines]
    names = [value for key, value in values if key == "model name"]
    parts = [value for key, value in values if key in ("CPU implementer", "CPU part")]
    return ", ".join(dict.fromkeys(names or parts)) or "unknown"


def hottest_celsius(root: Path = ROOT) -> float | None:
    """The hottest thermal zone; None where the kernel shows none. Zones that are off say 0 or nonsense."""
    texts = [read_text(path) or "" for path in sorted((root / "sys/class/thermal").glob("thermal_zone*/temp"))]
    degrees = [int(text) / 1000 for text in map(str.strip, texts) if text.isdigit()]
    return max((celsius for celsius in degrees if 0 < celsius < 150), default=None)


def clock_hertz(cpus: Iterable[int], root: Path = ROOT) -> float | None:
    """The mean clock of these cores now; None where the kernel does not tell."""
    texts = [(read_text(_cpu(root, cpu) / "cpufreq/scaling_cur_freq") or "").strip() for cpu in cpus]
    clocks = [1000.0 * int(text) for text in texts if text.isdigit()]
    return sum(clocks) / len(clocks) if clocks else None


@dataclass(frozen=True, slots=True)
class FileSystem:
    """Where a path lives."""

    mount_point: Path
    type: str
    device: str  # "/dev/vda" for a block device, else what the mount calls its source


def filesystem_of(path: Path, root: Path = ROOT) -> FileSystem:
    """The mounted file system that holds a path, which need not exist yet."""
    whole = path.resolve()
    covering = [mount for mount in mounts(root) if whole.is_relative_to(mount.point)]
    if not covering:
        raise StorageError(f"cannot tell the file system of {path}: /proc/self/mountinfo has no line for it")
    # Of two mounts on the same point the later one hides the earlier.
    mount = max(enumerate(covering), key=lambda item: (len(Path(item[1].point).parts), item[0]))[1]
    return FileSystem(Path(mount.point), mount.type, _device(mount, root))


def _device(mount: Mount, root: Path) -> str:
    """sysfs knows the device better than the mount, whose source may be a name like /dev/root."""
    link = root / "sys/dev/block" / mount.number
    return f"/dev/{link.resolve().name}" if link.exists() else mount.source


def is_rotational(device: str, root: Path = ROOT) -> bool | None:
    """Whether a block device has moving parts; None where the kernel does not tell (network, FUSE, tmpfs)."""
    name = below(root, device).resolve().name  # /dev/mapper/x is a link to /dev/dm-0
    block = (root / "sys/class/block" / name).resolve()
    for directory in (block, block.parent):  # a partition has the queue of its disk
        text = read_text(directory / "queue/rotational")
        if text is not None:
            return text.strip() == "1"
    return None
