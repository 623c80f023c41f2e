"""Is this machine, with this ggml and this storage, sound for lever? Answers with findings; draws and mends nothing.

ggml is tried in a process of its own, because a build for another CPU ends the process that loads it.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Literal

from lever.errors import LeverError, LibraryError, StorageError
from lever.ggml import VERSION, load
from lever.ggml.devices import listed
from lever.ggml.lib import DIRECTORY_VARIABLE
from lever.ggml.probe import MAX_ERROR, Probe, probe
from lever.gguf import MATRIX_TYPES, TYPES
from lever.linux import ROOT, is_android, read_text
from lever.machine import cpu_features, filesystem_of, is_rotational, performance_cores
from lever.memory import MIB, available_memory, drop_page_cache, format_size, parse_size
from lever.models.cache import check_space, home
from lever.pages import Pages
from lever.weights.reader import DirectFile, ReadInto, read_into

Level = Literal["ok", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "problem")  # the exit code is the place of the worst one
Clock = Callable[[], float]  # seconds

DISTRIBUTION = "lever-llm"
SERVERS = "rpc:HOST:PORT"  # among devices
PACKAGE = f"libggml-python=={VERSION}.post1"

# Instruction sets that ggml's kernels use, and what it means when the library was built without one that the CPU has.
# AMX and SME are left out: lever chooses neither.
INSTRUCTIONS: Mapping[str, Level] = {
    **dict.fromkeys(("AVX", "AVX2", "FMA", "F16C"), "problem"),
    **dict.fromkeys(("AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16"), "problem"),
    **dict.fromkeys(("NEON", "ARM_FMA", "DOTPROD", "MATMUL_INT8"), "problem"),
    **dict.fromkeys(("SSE3", "SSSE3", "BMI2", "AVX_VNNI", "FP16_VA", "SVE"), "warning"),
}

NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "glusterfs", "afs", "lustre"}
SHARED = {"sdcardfs", "esdfs"}  # Android's shared storage where it is not FUSE
IN_MEMORY = {"tmpfs", "ramfs"}

BLOCK = 4 * MIB  # of one timed read: small enough to stop in time on slow storage
SAMPLE = 512 * MIB  # at most so much is read
LEAST_MODEL = 256 * MIB  # an existing model of this size is read instead of a file written for it
WRITTEN = 128 * MIB
LEAST_SAMPLE = 16 * MIB  # less, read in less than the time below, tells no rate
SECONDS = 2.0  # for writing, and for reading
SLOW = 300e6  # bytes per second: below are SD cards, hard disks and networks
LITTLE_MEMORY = 512 * MIB


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `advice` says how to mend it, or what else to do; None when there is nothing."""

    name: str
    level: Level
    value: str
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything found, in the order in which it was examined."""

    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 when all is sound, 1 with warnings, 2 with problems."""
        return max((LEVELS.index(finding.level) for finding in self.findings), default=0)

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"exit_code": self.exit_code, "findings": [asdict(finding) for finding in self.findings]}


def examine(
    directory: Path | None = None,
    *,
    model: Path | None = None,
    root: Path = ROOT,
    progress: Callable[[str], None] = lambda _what: None,
) -> Report:
    """Examine software, machine and storage; a part that fails is a finding and does not end the report.

    `directory` is where models are kept, lever's own cache if not given; `model` a file whose storage is examined
    besides. `progress` is told what is being examined next; each part may take two seconds. About 128 MiB are written
    to the directory, and deleted, when it has no model of 256 MiB that can be read instead.
    """
    places = [("cache", directory or home()), *([("model", model)] if model else [])]
    parts: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("software", software),
        ("ggml", lambda: library(try_ggml(), cpu_features(root))),
        ("cores", partial(cores, root)),
        ("memory", partial(memory, root)),
        ("swap", partial(swap, root)),
        *((f"{name} file system", partial(file_system, name, place, root)) for name, place in places),
        ("cache reads", partial(reads_in, directory or home(), root)),
    ]
    if model:
        parts.append(("model reads", partial(reads, "model", model, root)))
    if is_android():
        parts.append(("android", android))
    return Report(tuple(finding for name, part in parts for finding in _examined(name, part, progress)))


def _examined(name: str, part: Callable[[], list[Finding]], progress: Callable[[str], None]) -> Iterable[Finding]:
    progress(name)
    try:
        return part()
    except LeverError as error:
        return [Finding(name, "problem", str(error))]
    except OSError as error:
        return [Finding(name, "problem", f"{error.filename or name}: {error.strerror or error}")]


def software() -> list[Finding]:
    """lever and Python."""
    try:
        version = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        version = "a source tree that is not installed"
    python = f"{platform.python_implementation()} {platform.python_version()} on {platform.machine()}"
    return [Finding("lever", "ok", version), Finding("python", "ok", python)]


# --- ggml ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a ggml says of itself."""

    directory: str
    version: str
    features: Mapping[str, str]  # by ggml's names


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of loading ggml and running its kernels: as much as was seen before `failure`, if there was one."""

    loaded: Loaded | None
    probes: tuple[Probe, ...]
    failure: str | None
    devices: Mapping[str, str] = field(default_factory=dict)  # by the names that users give them, with what they are


def try_ggml() -> Trial:
    """Load ggml and run a small product per type, in another process."""
    code = f"from {__name__} import report_trial; report_trial()"
    # -P: whatever lies in the current directory is not imported.
    command = [sys.executable, "-P", "-c", code]
    return read_trial(subprocess.run(command, capture_output=True, text=True, check=False))


def report_trial() -> None:
    """The other process: a line of JSON for each thing seen, at once, since the next step may be the last."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an end that is expected leaves no core file
    try:
        ggml = load()
        _say("loaded", asdict(Loaded(str(ggml.directory), ggml.version_text, ggml.cpu_features())))
        for kind, repacked in product(sorted(MATRIX_TYPES), (False, True)):
            found = probe(ggml, kind, repacked)
            if found is not None:
                _say("probe", asdict(found))
        _say("devices", {**listed(ggml), **({SERVERS: "see lever rpc-serve"} if ggml.has_rpc else {})})
    except LibraryError as error:
        _say("failure", str(error))


def _say(what: str, data: object) -> None:
    sys.stdout.write(f"{json.dumps([what, data])}\n")
    sys.stdout.flush()


def read_trial(done: subprocess.CompletedProcess[str]) -> Trial:
    """The trial that a process has left; a negative exit status is the signal that ended it."""
    said = [json.loads(line) for line in done.stdout.splitlines()]
    failures = [data for what, data in said if what == "failure"]
    if done.returncode < 0:
        failures.append(f"trying ggml ended with {signal.Signals(-done.returncode).name}")
    elif done.returncode > 0:
        last = (done.stderr.splitlines() or ["no message"])[-1]
        failures.append(f"trying ggml ended with status {done.returncode}: {last}")
    return Trial(
        next((Loaded(**data) for what, data in said if what == "loaded"), None),
        tuple(Probe(**data) for what, data in said if what == "probe"),
        failures[0] if failures else None,
        next((data for what, data in said if what == "devices"), {}),
    )


def library(trial: Trial, cpu: frozenset[str]) -> list[Finding]:
    """The library, its instruction sets against those of the CPU, and its kernels, as far as the trial came."""
    findings = []
    if trial.loaded:
        findings += [_version(trial.loaded), instructions(frozenset(trial.loaded.features), cpu)]
    if trial.failure:
        findings.append(Finding("ggml trial", "problem", trial.failure, reinstall()))
        return findings
    findings.append(_kernels(trial.probes))
    if trial.probes:
        findings += [_products(trial.probes), _rows(trial.probes)]
    return [*findings, _devices(trial.devices)]


def reinstall() -> str:
    """How to get a ggml of the pinned version that is made for this CPU."""
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if chosen:
        return f"build ggml {VERSION} with GGML_NATIVE=ON into {chosen}, or unset {DIRECTORY_VARIABLE}"
    return (
        "pip install (or uv pip install) --force-reinstall --no-cache-dir --no-binary libggml-python "
        f"-C cmake.define.GGML_NATIVE=ON {PACKAGE}"
    )


def _version(loaded: Loaded) -> Finding:
    names = sorted(path.name for path in Path(loaded.directory).glob("libggml-*.so"))
    parts = ", ".join(name.removeprefix("libggml-").removesuffix(".so") for name in names)
    return Finding("ggml", "ok", f"{loaded.version} ({parts}) in {loaded.directory}")


def instructions(built: frozenset[str], cpu: frozenset[str]) -> Finding:
    """Instruction sets that the library was built with, against those of this CPU."""
    name = "cpu features"
    used = sorted(built & INSTRUCTIONS.keys())
    if not cpu:
        return Finding(name, "ok", f"library: {_listed(used)}; this kind of CPU is not known, so not compared")
    beyond = sorted(set(used) - cpu)
    if beyond:
        value = f"the library uses {_listed(beyond)}, which this CPU lacks: it may be killed at any time"
        return Finding(name, "problem", value, reinstall())
    missing = sorted((cpu & INSTRUCTIONS.keys()) - built)
    if missing:
        level = max((INSTRUCTIONS[feature] for feature in missing), key=LEVELS.index)
        value = f"the CPU has {_listed(missing)}, but the library is built without: slower than need be"
        return Finding(name, level, value, reinstall())
    return Finding(name, "ok", f"the library uses what the CPU has: {_listed(used)}")


def _kernels(probes: tuple[Probe, ...]) -> Finding:
    types: dict[str, list[str]] = {"repacked": [], "plain": []}
    for found in probes:
        types[found.layout].append(found.type_name)
    plain_only = [name for name in types["plain"] if name not in types["repacked"]]
    value = f"repacked: {_listed(types['repacked'])}; plain only: {_listed(plain_only)}"
    absent = [TYPES[kind].name for kind in sorted(MATRIX_TYPES) if TYPES[kind].name not in types["plain"]]
    if absent:
        return Finding("kernels", "problem", f"none for {_listed(absent)}; {value}", reinstall())
    return Finding("kernels", "ok", value)


def _products(probes: tuple[Probe, ...]) -> Finding:
    """Self-test: products against float64."""
    worst = max(probes, key=lambda found: found.error)
    wrong = [f"{_kernel(found)} by {found.error:.1e}" for found in probes if not found.error < MAX_ERROR]
    if wrong:
        value = f"off float64 by more than {MAX_ERROR:.0e}: {_listed(wrong)}"
        return Finding("products", "problem", value, reinstall())
    value = f"at most {worst.error:.1e} off float64 ({_kernel(worst)}), {MAX_ERROR:.0e} allowed"
    return Finding("products", "ok", value)


def _rows(probes: tuple[Probe, ...]) -> Finding:
    """Exactness stands on this: a row's bits do not depend on the rows beside it, at multiples of 1, 2 or 4."""
    varying = [_kernel(found) for found in probes if not found.row_invariant]
    if varying:
        value = f"rows change with those beside them at every multiple tried: {_listed(varying)}"
        return Finding("rows", "problem", value, f"use a model of other types, or another build: {reinstall()}")
    grouped = [f"{_kernel(found)} {found.row_multiple}" for found in probes if (found.row_multiple or 1) > 1]
    value = "bit-equal whatever rows are beside them, all types and layouts"
    return Finding("rows", "ok", f"{value}; in multiples of: {_listed(grouped)}" if grouped else value)


def _devices(devices: Mapping[str, str]) -> Finding:
    """What --device and --draft-device may name; the RPC backend is how another machine is one."""
    value = _listed(f"{name} ({what})" for name, what in devices.items())
    if SERVERS in devices:
        return Finding("devices", "ok", value)
    return Finding(
        "devices", "ok", f"{value}; no RPC in this ggml", "build it with GGML_RPC=ON to let other machines compute"
    )


def _kernel(found: Probe) -> str:
    return f"{found.type_name} {found.layout}"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words) or "none"


# --- the machine --------------------------------------------------------------------------------------------


def cores(root: Path = ROOT, allowed: Iterable[int] | None = None) -> list[Finding]:
    """The cores that lever computes on, and those that it may use at all."""
    usable = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    fast = performance_cores(root, usable)
    value = f"{len(fast)} fast ({_numbers(fast)}); affinity allows {len(usable)} of {os.cpu_count()}"
    return [Finding("cores", "ok", value)]


def _numbers(cpus: Iterable[int]) -> str:
    return ", ".join(map(str, cpus))


def memory(root: Path = ROOT) -> list[Finding]:
    """What the machine has, what a control group leaves, and the budget that follows."""
    limits = available_memory(root)
    group = "no limit"
    if limits.cgroup_limit is not None:
        group = f"limit {format_size(limits.cgroup_limit)}, of which {format_size(limits.cgroup_used)} are held"
    return [
        Finding("memory", "ok", f"{format_size(limits.mem_available)} available of {format_size(limits.mem_total)}"),
        Finding("control group", "ok", group),
        _budget(limits.available),
    ]


def _budget(available: int) -> Finding:
    budget = parse_size("auto", available)
    value = f"{format_size(budget)} of the {format_size(available)} that may still be allocated"
    if budget < LITTLE_MEMORY:
        return Finding("--dram auto", "warning", value, "close other programs, or raise the limit of the control group")
    return Finding("--dram auto", "ok", value)


def swap(root: Path = ROOT) -> list[Finding]:
    """Swap areas, from /proc/swaps: a header, then name, kind, KiB, KiB used, priority."""
    text = read_text(root / "proc/swaps")
    if text is None:
        return [Finding("swap", "ok", "not shown to this process")]
    areas = [line.split() for line in text.splitlines()[1:]]
    listed = [f"{area[0]} {format_size(int(area[2]) * 1024)}" for area in areas]
    return [Finding("swap", "ok", _listed(listed))]


def android() -> list[Finding]:
    """What cannot be seen from inside an app, and ends long runs."""
    return [
        Finding("wake lock", "ok", "not visible from here", "run termux-wake-lock, or the run stops with the screen"),
        Finding(
            "phantom processes",
            "ok",
            "Android 12 and later may end busy background apps; lever runs as one process",
            "if runs end with signal 9: adb shell settings put global settings_enable_monitor_phantom_procs false",
        ),
    ]


# --- storage ------------------------------------------------------------------------------------------------


def file_system(name: str, place: Path, root: Path = ROOT) -> list[Finding]:
    """Where a path lives, and whether models should."""
    found = filesystem_of(place, root)
    value = f"{found.type} on {found.device} at {found.mount_point}, for {place}"
    unfit = _unfit(found.type)
    if unfit:
        advice = "keep models on internal storage, such as below $HOME; LEVER_HOME sets the cache directory"
        return [Finding(f"{name} file system", "warning", f"{unfit}: {value}", advice)]
    return [Finding(f"{name} file system", "ok", value)]


def _unfit(kind: str) -> str | None:
    if kind in NETWORK:
        return "not a disk of this machine"
    if kind in IN_MEMORY:
        return "takes memory for what it stores"
    if kind in SHARED or kind.partition(".")[0] in ("fuse", "fuseblk"):
        return "slow shared storage"
    return None


def reads(
    name: str, path: Path, root: Path = ROOT, *, clock: Clock = time.perf_counter, read: ReadInto = read_into
) -> list[Finding]:
    """Whether reads of a file go past the page cache, and how fast."""
    rotational = is_rotational(filesystem_of(path, root).device, root)
    with DirectFile(path, read) as file:
        return [_direct(name, file), _rate(name, file, rotational, clock)]


def _direct(name: str, file: DirectFile) -> Finding:
    name = f"{name} O_DIRECT"
    if file.reason is None:
        return Finding(name, "ok", "yes")
    advice = "keep models on internal storage with ext4, f2fs, xfs or btrfs"
    return Finding(name, "warning", f"no, reads are buffered: {file.reason}", advice)


def _rate(name: str, file: DirectFile, rotational: bool | None, clock: Clock) -> Finding:
    name = f"{name} read rate"
    nbytes, seconds = _read(file, clock)
    if nbytes < LEAST_SAMPLE and seconds < SECONDS:
        return Finding(name, "ok", f"not measured: {file.path} has only {format_size(nbytes)}")
    rate = nbytes / seconds
    value = f"{rate / 1e6:.0f} MB/s over {format_size(nbytes)}: a GB that is streamed takes {1e9 / rate:.2f} s per pass"
    if rate < SLOW:
        disk = "this disk has moving parts" if rotational else "this storage is slow"
        return Finding(name, "warning", value, f"{disk}: keep models on NVMe, UFS or another fast flash")
    return Finding(name, "ok", value)


def _read(file: DirectFile, clock: Clock) -> tuple[int, float]:
    """Bytes read from the start of the file, and the seconds that took."""
    if not file.direct:
        with file.path.open("rb") as cached:
            drop_page_cache(cached.fileno())
    with Pages(BLOCK) as block:
        done, start = 0, clock()
        while done < SAMPLE and clock() - start < SECONDS:
            count = file.read(block.bytes.data, done)
            done += count
            if count < BLOCK:
                break
        return done, clock() - start


def reads_in(directory: Path, root: Path = ROOT, *, clock: Clock = time.perf_counter) -> list[Finding]:
    """Reads of the largest model in a directory, or of a file written for the purpose and deleted."""
    large = _largest_model(directory)
    if large:
        return reads("cache", large, root, clock=clock)
    with _written(directory, clock) as path:
        return reads("cache", path, root, clock=clock)


def _largest_model(directory: Path) -> Path | None:
    found = [path for path in (*directory.glob("*.gguf"), *directory.glob("models/*.gguf")) if not path.is_symlink()]
    largest = max(found, key=lambda path: path.stat().st_size, default=None)
    return largest if largest and largest.stat().st_size >= LEAST_MODEL else None


@contextmanager
def _written(directory: Path, clock: Clock) -> Iterator[Path]:
    """A temporary file of random bytes, which no storage compresses; shorter where writing is slow."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    check_space(existing, 2 * WRITTEN)
    with ExitStack() as stack:
        try:
            file = stack.enter_context(NamedTemporaryFile(dir=existing, prefix=".lever-doctor-", buffering=0))
            deadline = clock() + SECONDS
            while file.tell() < WRITTEN and clock() < deadline:
                file.write(os.urandom(BLOCK))
                os.fdatasync(file.fileno())
        except OSError as error:
            why = error.strerror or error
            raise StorageError(f"cannot write to {existing}: {why}; set LEVER_HOME to another directory") from error
        drop_page_cache(file.fileno())
        yield Path(file.name)
