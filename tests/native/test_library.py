"""The loaded ggml itself: found where it should be, of the pinned version, and as the binding believes it to be."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lever import doctor
from lever.errors import LibraryError
from lever.ggml import Backend, Context, GraphAllocator, Library, lib, load
from lever.gguf import TYPES
from tests.lacking import lacking

F32 = 0


@pytest.fixture(scope="module")
def ggml() -> Library:
    return load()


# --- finding and refusing -----------------------------------------------------------------------------------

Build = Callable[[str], Path]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Compiles C into both libraries of a directory."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        lacking("this machine has no C compiler")

    def compile_(source: str) -> Path:
        code = tmp_path / "fake.c"
        code.write_text(source)
        for name in ("base", "cpu"):
            library = tmp_path / f"libggml-{name}.so"
            subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", str(library), str(code)], check=True)
        return tmp_path

    return compile_


def stubs(version: str, without: str = "") -> str:
    """A library that has every call of the binding, all of them empty."""
    bodies = dict.fromkeys((*lib._BASE, *lib._CPU), "return 0;") | {"ggml_version": f'return "{version}";'}
    return "\n".join(f"void *{name}(void) {{ {body} }}" for name, body in bodies.items() if name != without)


def is_one_line(error: pytest.ExceptionInfo[LibraryError]) -> bool:
    return "\n" not in str(error.value)


@pytest.mark.parametrize("version", ["0.1.0", "0.20.1", "0.20.20", "1.20.2", ""])
def test_M1_a_library_of_another_version_is_refused_in_one_line(version: str, build: Build) -> None:
    directory = build(stubs(version))
    with pytest.raises(LibraryError, match=f"ggml {re.escape(version)} in {directory} is not the pinned") as error:
        Library(directory)
    assert is_one_line(error)
    assert "libggml-python" in str(error.value)


@pytest.mark.parametrize("version", [lib.VERSION, f"{lib.VERSION}-dirty"])
def test_M1_a_library_of_the_pinned_version_is_taken(version: str, build: Build) -> None:
    assert Library(build(stubs(version))).version_text == version


@pytest.mark.parametrize("name", ["ggml_mul_mat", "ggml_backend_cpu_init", "ggml_version"])
def test_M1_a_library_without_a_call_that_lever_makes_is_refused_by_its_name(name: str, build: Build) -> None:
    with pytest.raises(LibraryError, match=f"{name} is missing in .*libggml-") as error:
        Library(build(stubs(lib.VERSION, without=name)))
    assert is_one_line(error)


def test_M4_a_directory_without_the_library_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match=f"cannot be loaded from {tmp_path}/libggml-base.so") as error:
        Library(tmp_path)
    assert is_one_line(error)


def test_M4_a_file_that_is_no_library_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "libggml-base.so").write_bytes(b"\x7fELF and no more")
    with pytest.raises(LibraryError, match=f"cannot be loaded from {tmp_path}/libggml-base.so") as error:
        Library(tmp_path)
    assert is_one_line(error)


def test_M4_the_directory_in_the_environment_wins_over_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(lib.DIRECTORY_VARIABLE, raising=False)
    installed = lib.find_directory()
    monkeypatch.setenv(lib.DIRECTORY_VARIABLE, str(tmp_path))
    assert (installed / "libggml-base.so").is_file()
    assert lib.find_directory() == tmp_path


def test_M4_without_the_package_the_way_to_install_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(lib.DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(LibraryError, match="pip install libggml-python") as error:
        lib.find_directory()
    assert is_one_line(error)


def test_a_call_that_is_not_declared_is_no_attribute(ggml: Library) -> None:
    with pytest.raises(AttributeError, match="ggml_conv_2d"):
        _ = ggml.conv_2d


def calls_made() -> Iterator[str]:
    """Names of ggml that the sources take from a library, or that the library takes from itself."""
    sources = Path(lib.__file__).parents[1]
    for path in sources.rglob("*.py"):
        owners = {"ggml", "self._ggml"} | ({"self"} if path.samefile(lib.__file__) else set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners:
                yield f"ggml_{node.attr}"


def test_every_call_that_is_declared_is_made() -> None:
    assert not {*lib._BASE, *lib._CPU}.difference(calls_made())


# --- as doctor finds it -------------------------------------------------------------------------------------

DIES_OF_SIGILL = "#include <signal.h>\n__attribute__((constructor)) void die(void) { raise(SIGILL); }\n"


def test_M2_D14_a_library_that_ends_its_process_is_reported_and_the_rest_examined(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = build(DIES_OF_SIGILL)
    monkeypatch.setenv(lib.DIRECTORY_VARIABLE, str(directory))
    report = doctor.examine(directory)
    trial = next(finding for finding in report.findings if finding.name == "ggml trial")
    assert (trial.level, trial.value) == ("problem", "trying ggml ended with SIGILL")
    assert str(directory) in (trial.advice or "")
    assert any(finding.name == "cache read rate" for finding in report.findings)
    assert report.exit_code == 2


def test_M1_doctor_tells_the_version_that_it_found(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lib.DIRECTORY_VARIABLE, str(build(stubs("0.1.0"))))
    trial = doctor.try_ggml()
    assert trial.loaded is None
    assert "ggml 0.1.0" in (trial.failure or "")


def test_D14_the_library_in_use_passes_its_self_test(ggml: Library) -> None:
    trial = doctor.try_ggml()
    assert trial.failure is None
    assert trial.loaded is not None
    assert trial.loaded.directory == str(ggml.directory)
    levels = {found.name: found.level for found in doctor.library(trial, frozenset())}
    assert levels == dict.fromkeys(("ggml", "cpu features", "kernels", "products", "rows", "devices"), "ok")
    assert "cpu" in trial.devices


# Kills the process at io_uring_setup, number 425 on every architecture: load the number, compare, kill or allow.
KILL_IO_URING = """
import ctypes, struct, sys
steps = ((0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x80000000), (0x06, 0, 0, 0x7FFF0000))
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_C5_doctor_survives_where_io_uring_kills(tmp_path: Path) -> None:
    control = python(f"{KILL_IO_URING}\nlibc.syscall(425, 1, 0)")
    assert control.returncode == -31, control.stderr  # SIGSYS
    ask = f"import pathlib, lever.doctor; print(lever.doctor.examine(pathlib.Path({str(tmp_path)!r})))"
    examined = python(f"{KILL_IO_URING}\n{ask}")
    assert examined.returncode == 0, examined.stderr
    assert "cache read rate" in examined.stdout
    assert "SIGSYS" not in examined.stdout


# --- what it says of itself ---------------------------------------------------------------------------------


def test_features_equal_what_each_question_to_the_library_answers(ggml: Library) -> None:
    cpu = ctypes.CDLL(str(ggml.directory / "libggml-cpu.so"))
    answers = {name: getattr(cpu, f"ggml_cpu_has_{name.lower()}")() for name in doctor.INSTRUCTIONS}
    assert {name for name, answer in answers.items() if answer} == ggml.cpu_features().keys() & answers.keys()
    assert any(answers.values())


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: TYPES[kind].name)
def test_sizes_of_a_type_equal_those_of_ggml(kind: int, ggml: Library) -> None:
    name, block, nbytes = ggml.type_name(kind).decode().upper(), ggml.blck_size(kind), ggml.type_size(kind)
    assert (TYPES[kind].name, TYPES[kind].block, TYPES[kind].nbytes) == (name, block, nbytes)


def test_ids_that_are_not_in_the_table_are_those_that_ggml_withdrew(ggml: Library) -> None:
    n_types = max(TYPES) + 1
    package = importlib.util.find_spec("libggml")
    assert package is not None
    assert package.origin is not None
    header = Path(package.origin).parent / "include" / "ggml.h"
    assert f"GGML_TYPE_COUNT   = {n_types}," in header.read_text()
    assert {kind for kind in range(n_types) if ggml.blck_size(kind)} == set(TYPES)


# ggml notes each matrix that it repacks; what it calls then must still be there.
NOTES_AFTER_A_LIBRARY = """
import gc
from lever.ggml import Library, load
from lever.ggml.lib import find_directory
from lever.ggml.probe import probe

used = load()
Library(find_directory())
gc.collect()
probe(used, 2, repacked=True)
"""


def test_ggml_may_speak_when_a_library_of_ours_is_gone() -> None:
    done = python(NOTES_AFTER_A_LIBRARY)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- the repack buffer --------------------------------------------------------------------------------------


def library_offering(monkeypatch: pytest.MonkeyPatch, *names: bytes) -> Library:
    """A library whose extra buffer types are numbered from 1 and have these names."""
    made = object.__new__(Library)
    monkeypatch.setattr(made, "_extra_buffer_types", lambda: list(range(1, len(names) + 1)), raising=False)
    monkeypatch.setattr(made, "backend_buft_name", lambda number: names[number - 1], raising=False)
    return made


def test_the_repack_buffer_is_chosen_by_name_and_never_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library_offering(monkeypatch, b"AMX", b"CPU_REPACK").repack_buffer_type == 2
    assert library_offering(monkeypatch, b"CPU_REPACK", b"AMX").repack_buffer_type == 1
    assert library_offering(monkeypatch, b"AMX").repack_buffer_type is None
    assert library_offering(monkeypatch).repack_buffer_type is None


def test_the_repack_buffer_of_this_library_is_no_amx(ggml: Library) -> None:
    chosen = ggml.repack_buffer_type
    assert chosen is None or ggml.backend_buft_name(chosen) == b"CPU_REPACK"


# In a process of its own: asking wrongly, or writing what was wrongly allowed, ends it.
ASK_AND_WRITE = """
import json
from lever.ggml import load
from lever.ggml.probe import probe
from lever.gguf import MATRIX_TYPES, TYPES
from lever.ggml.layout import takes_repacked

ggml = load()
answers = [
    (TYPES[kind].name, shape, takes_repacked(ggml, kind, shape))
    for kind in TYPES
    for shape in ((512, 64), (512, 6), (512,))
]
held = [TYPES[kind].name for kind in MATRIX_TYPES if probe(ggml, kind, repacked=True) is not None]
print(json.dumps([answers, held]))
"""


def test_asking_for_the_repacked_layout_never_ends_the_process_and_tells_what_can_be_written() -> None:
    done = python(ASK_AND_WRITE)
    assert done.returncode == 0, done.stderr
    answers, held = json.loads(done.stdout)
    assert {name for name, shape, taken in answers if taken and shape == [512, 64]} == set(held)
    assert not any(taken for _, shape, taken in answers if len(shape) == 1)


# --- the GIL ------------------------------------------------------------------------------------------------


@pytest.fixture
def ticks() -> Iterator[Callable[[], int]]:
    """How often a thread that does next to nothing has woken up, about once a millisecond."""
    stop, woken = threading.Event(), [0]

    def run() -> None:
        while not stop.wait(0.001):
            woken[0] += 1

    thread = threading.Thread(target=run)
    thread.start()
    yield lambda: woken[0]
    stop.set()
    thread.join()


def test_other_threads_run_while_ggml_computes(ggml: Library, ticks: Callable[[], int]) -> None:
    size = 1024
    with Context(ggml, 4, 4) as context, GraphAllocator(ggml) as allocator, Backend(ggml, 1) as backend:
        while True:
            context.reset()
            left = ggml.new_tensor_2d(context.handle, F32, size, size)
            right = ggml.new_tensor_2d(context.handle, F32, size, size)
            graph = context.new_graph()
            ggml.build_forward_expand(graph, ggml.mul_mat(context.handle, left, right))
            allocator.allocate(graph)
            for tensor in (left, right):
                ones = np.ones((size, size), np.float32)
                ggml.backend_tensor_set(tensor, ones.ctypes.data, 0, ones.nbytes)
            before, start = ticks(), time.perf_counter()
            backend.compute(graph)
            during, seconds = ticks() - before, time.perf_counter() - start
            if seconds > 0.1:
                break
            size *= 2
    # A thread kept waiting would wake up once or twice, whatever the time.
    assert during > seconds * 100
