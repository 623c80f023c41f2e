"""What was made is given back when something after it cannot be made: no memory, handle, file or thread is left."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from lever.errors import DoesNotFit, LeverError, LibraryError
from lever.ggml import Library
from lever.ggml.lib import find_directory
from lever.ggml.probe import probe
from tests.fakes import descriptors_of, reader_threads
from tests.models import open_tiny
from tests.tiny import tiny_model

# What makes an object of ggml, and what frees it.
MADE_AND_FREED = {
    "init": "free",
    "backend_cpu_buffer_from_ptr": "backend_buffer_free",
    "backend_alloc_ctx_tensors_from_buft": "backend_buffer_free",
    "backend_cpu_init": "backend_free",
    "gallocr_new": "gallocr_free",
}


class Rationed(Library):
    """The library of this machine, but it makes no more than `left` objects. Those in use are `alive`."""

    def __init__(self) -> None:
        super().__init__(find_directory())
        self.left = 1 << 62
        self.alive: set[int] = set()
        for name in MADE_AND_FREED:
            setattr(self, name, functools.partial(self._make, getattr(self, name)))
        for name in set(MADE_AND_FREED.values()):
            setattr(self, name, functools.partial(self._free, getattr(self, name)))

    def _make(self, make: Callable[..., int], *arguments: Any) -> int | None:
        if not self.left:
            return None
        self.left -= 1
        handle = make(*arguments)
        self.alive.add(handle)
        return handle

    def _free(self, free: Callable[[int], None], handle: int) -> None:
        self.alive.remove(handle)  # an error for what was freed before
        free(handle)


@pytest.fixture
def ggml(monkeypatch: pytest.MonkeyPatch) -> Rationed:
    library = Rationed()
    monkeypatch.setattr("lever.loader.load", lambda: library)
    return library


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny.gguf")


def leaves_nothing(ggml: Rationed, path: Path) -> None:
    assert not ggml.alive
    assert not descriptors_of(path)
    assert not reader_threads()


def test_a_model_for_which_ggml_runs_out_of_anything_leaves_nothing(ggml: Rationed, path: Path) -> None:
    with open_tiny(path):  # its types are probed here, once
        assert ggml.alive
    leaves_nothing(ggml, path)
    for n in count():
        ggml.left = n
        try:
            with open_tiny(path):
                break
        except LibraryError:
            leaves_nothing(ggml, path)
    assert n > 20
    leaves_nothing(ggml, path)


def test_a_model_for_which_the_system_has_no_memory_leaves_nothing(
    ggml: Rationed, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tiny(path):
        pass
    real, left = mmap.mmap, 0

    def rationed(*arguments: Any, **more: Any) -> mmap.mmap:
        nonlocal left
        if not left:
            raise OSError(12, "Cannot allocate memory")
        left -= 1
        return real(*arguments, **more)

    monkeypatch.setattr("lever.pages.mmap.mmap", rationed)
    for n in count():
        left = n
        try:
            with open_tiny(path):
                break
        except DoesNotFit:
            leaves_nothing(ggml, path)
    assert n > 10
    leaves_nothing(ggml, path)


def test_a_probe_for_which_ggml_runs_out_of_anything_leaves_nothing(ggml: Rationed) -> None:
    for n in range(20):
        ggml.left = n
        with pytest.raises(LeverError):
            probe(ggml, 2)
        assert not ggml.alive
