"""The raw ctypes declarations of the ggml calls that lever makes, and how the library is found. Nothing else.

Names and arguments follow ggml.h, ggml-backend.h, ggml-alloc.h and ggml-cpu.h of the pinned version. Large structs of
ggml are never copied here: everything goes through ggml's own accessor functions.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Mapping, Sequence
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint8, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from lever.errors import LibraryError

VERSION = "0.20.2"
DIRECTORY_VARIABLE = "LEVER_GGML_DIR"

P = c_void_p


class InitParams(ctypes.Structure):
    """struct ggml_init_params (ggml.h): bytes of metadata, optional memory, whether tensor data is left alone."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class Feature(ctypes.Structure):
    """struct ggml_backend_feature (ggml-backend.h)."""

    _fields_ = (("name", c_char_p), ("value", c_char_p))


class ThreadpoolParams(ctypes.Structure):
    """struct ggml_threadpool_params (ggml.h)."""

    _fields_ = (
        ("cpumask", c_bool * 512),  # GGML_MAX_N_THREADS
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


# name -> (result, arguments)
_BASE: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_log_set": (None, (P, P)),
    "ggml_init": (P, (InitParams,)),
    "ggml_reset": (None, (P,)),
    "ggml_free": (None, (P,)),
    "ggml_tensor_overhead": (c_size_t, ()),
    "ggml_threadpool_params_init": (None, (P, c_int)),
    "ggml_graph_overhead_custom": (c_size_t, (c_size_t, c_bool)),
    "ggml_type_name": (c_char_p, (c_int,)),
    "ggml_blck_size": (c_int64, (c_int,)),
    "ggml_type_size": (c_size_t, (c_int,)),
    "ggml_set_input": (None, (P,)),
    "ggml_nelements": (c_int64, (P,)),
    # tensors and views
    "ggml_new_tensor_1d": (P, (P, c_int, c_int64)),
    "ggml_new_tensor_2d": (P, (P, c_int, c_int64, c_int64)),
    "ggml_view_1d": (P, (P, P, c_int64, c_size_t)),
    "ggml_view_2d": (P, (P, P, c_int64, c_int64, c_size_t, c_size_t)),
    "ggml_view_3d": (P, (P, P, c_int64, c_int64, c_int64, c_size_t, c_size_t, c_size_t)),
    "ggml_reshape_2d": (P, (P, P, c_int64, c_int64)),
    "ggml_reshape_3d": (P, (P, P, c_int64, c_int64, c_int64)),
    "ggml_permute": (P, (P, P, c_int, c_int, c_int, c_int)),
    "ggml_transpose": (P, (P, P)),
    "ggml_cont": (P, (P, P)),
    "ggml_cont_2d": (P, (P, P, c_int64, c_int64)),
    "ggml_cpy": (P, (P, P, P)),
    "ggml_cast": (P, (P, P, c_int)),
    # operations
    "ggml_get_rows": (P, (P, P, P)),
    "ggml_set_rows": (P, (P, P, P, P)),
    "ggml_add": (P, (P, P, P)),
    "ggml_mul": (P, (P, P, P)),
    "ggml_mul_mat": (P, (P, P, P)),
    "ggml_rms_norm": (P, (P, P, c_float)),
    "ggml_swiglu_split": (P, (P, P, P)),
    "ggml_soft_max_ext": (P, (P, P, P, c_float, c_float)),
    "ggml_rope_ext": (
        P,
        (P, P, P, P, c_int, c_int, c_int, c_float, c_float, c_float, c_float, c_float, c_float),
    ),
    # graphs
    "ggml_new_graph_custom": (P, (P, c_size_t, c_bool)),
    "ggml_build_forward_expand": (None, (P, P)),
    "ggml_graph_n_nodes": (c_int, (P,)),
    "ggml_graph_node": (P, (P, c_int)),
    "ggml_op_desc": (c_char_p, (P,)),
    "ggml_gallocr_new": (P, (P,)),
    "ggml_gallocr_free": (None, (P,)),
    "ggml_gallocr_reserve": (c_bool, (P, P)),
    "ggml_gallocr_reserve_n_size": (None, (P, P, P, P, P)),
    "ggml_gallocr_alloc_graph": (c_bool, (P, P)),
    "ggml_gallocr_get_buffer_size": (c_size_t, (P, c_int)),
    # memory and devices
    "ggml_backend_buft_name": (c_char_p, (P,)),
    "ggml_backend_buft_alloc_buffer": (P, (P, c_size_t)),
    "ggml_backend_buft_get_alloc_size": (c_size_t, (P, P)),
    "ggml_backend_buft_get_alignment": (c_size_t, (P,)),
    "ggml_backend_buft_get_max_size": (c_size_t, (P,)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (P, (P, P)),
    "ggml_backend_buffer_free": (None, (P,)),
    "ggml_backend_buffer_get_base": (P, (P,)),
    "ggml_backend_buffer_clear": (None, (P, c_uint8)),
    "ggml_backend_tensor_alloc": (c_int, (P, P, P)),
    "ggml_backend_tensor_set": (None, (P, P, c_size_t, c_size_t)),
    "ggml_backend_tensor_get": (None, (P, P, c_size_t, c_size_t)),
    "ggml_backend_graph_compute": (c_int, (P, P)),
    "ggml_backend_free": (None, (P,)),
    "ggml_backend_cpu_buffer_type": (P, ()),
    "ggml_backend_cpu_buffer_from_ptr": (P, (P, c_size_t)),
    "ggml_backend_reg_dev_count": (c_size_t, (P,)),
    "ggml_backend_reg_dev_get": (P, (P, c_size_t)),
    "ggml_backend_reg_get_proc_address": (P, (P, c_char_p)),
    "ggml_backend_dev_supports_op": (c_bool, (P, P)),
    "ggml_backend_dev_name": (c_char_p, (P,)),
    "ggml_backend_dev_description": (c_char_p, (P,)),
    "ggml_backend_dev_memory": (None, (P, P, P)),
    "ggml_backend_dev_init": (P, (P, c_char_p)),
    "ggml_backend_dev_buffer_type": (P, (P,)),
}

_CPU: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_backend_cpu_reg": (P, ()),
    "ggml_backend_cpu_init": (P, ()),
    "ggml_backend_cpu_set_n_threads": (None, (P, c_int)),
    "ggml_backend_cpu_set_threadpool": (None, (P, P)),
    "ggml_threadpool_new": (P, (P,)),
    "ggml_threadpool_free": (None, (P,)),
}

# Of libggml.so, which knows the backends that this build has; loaded where somebody asks for one.
_REGISTRY: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_backend_dev_count": (c_size_t, ()),
    "ggml_backend_dev_get": (P, (c_size_t,)),
}

# Of libggml-rpc.so, where the build has it.
_RPC: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_backend_rpc_add_server": (P, (c_char_p,)),
    "ggml_backend_rpc_start_server": (None, (c_char_p, c_char_p, c_size_t, c_size_t, P)),
}

# Functions that a registry hands out by name (ggml-backend.h).
_EXTRA_BUFTS = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)
_GET_FEATURES = ctypes.CFUNCTYPE(ctypes.POINTER(Feature), c_void_p)
_LOG = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
# ggml's own notes are not ours to print. It keeps one address for the whole process, so this lives as long.
_SILENCE = _LOG(lambda _level, _text, _data: None)


class Library:
    """The loaded ggml: each declared function is an attribute without its `ggml_` prefix.

    Calls release the GIL while they run (ctypes does), which is what lets storage and compute overlap.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        base = _open(directory / "libggml-base.so")
        self.version_text: str = _bind(base, "ggml_version", c_char_p, ())().decode()
        if self.version_text.split("-")[0] != VERSION:
            raise LibraryError(
                f"ggml {self.version_text} in {directory} is not the pinned {VERSION}: install libggml-python again, "
                f"or point {DIRECTORY_VARIABLE} at a build of {VERSION}"
            )
        cpu = _open(directory / "libggml-cpu.so")
        self._declare(base, _BASE)
        self._declare(cpu, _CPU)
        self.log_set(ctypes.cast(_SILENCE, c_void_p), None)
        self.cpu_registry: int = self.backend_cpu_reg()
        self.cpu_device: int = self.backend_reg_dev_get(self.cpu_registry, 0)

    def __getattr__(self, name: str) -> Any:  # only reached for names that the tables above do not hold
        raise AttributeError(f"ggml_{name} is not among the declared calls")

    def _declare(self, library: ctypes.CDLL, table: Mapping[str, tuple[Any, tuple[Any, ...]]]) -> None:
        for name, (result, arguments) in table.items():
            setattr(self, name.removeprefix("ggml_"), _bind(library, name, result, arguments))

    @functools.cached_property
    def devices(self) -> Sequence[int]:
        """Devices of the backends that this build has, the CPU among them. Some take a while to look for theirs."""
        path = self.directory / "libggml.so"
        if not path.exists():  # nothing here needs it but other devices
            return [self.cpu_device]
        self._declare(_open(path), _REGISTRY)
        return [self.backend_dev_get(index) for index in range(self.backend_dev_count())]

    @functools.cached_property
    def has_rpc(self) -> bool:
        """Whether this build has the RPC backend, whose calls may be made then."""
        path = self.directory / "libggml-rpc.so"
        if not path.exists():
            return False
        self._declare(_open(path), _RPC)
        return True

    @functools.cached_property
    def repack_buffer_type(self) -> int | None:
        """The buffer type that holds weights in the kernels' own layout; None where this CPU has none.

        Chosen by name: the AMX type, offered beside it, kills the process on some machines that claim AMX.
        """
        for buffer_type in self._extra_buffer_types():
            if self.backend_buft_name(buffer_type) == b"CPU_REPACK":
                return buffer_type
        return None

    def cpu_features(self) -> dict[str, str]:
        """What this build was compiled to use, by ggml's own names, for example {"AVX2": "1"}."""
        address = self.backend_reg_get_proc_address(self.cpu_registry, b"ggml_backend_get_features")
        feature = _GET_FEATURES(address)(self.cpu_registry)
        features = {}
        index = 0
        while feature[index].name:
            features[feature[index].name.decode()] = feature[index].value.decode()
            index += 1
        return features

    def _extra_buffer_types(self) -> list[int]:
        address = self.backend_reg_get_proc_address(self.cpu_registry, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return []
        types = _EXTRA_BUFTS(address)(self.cpu_device)
        found: list[int] = []
        while types[len(found)]:
            found.append(types[len(found)])
        return found


def find_directory() -> Path:
    """The folder of libggml-base.so: `LEVER_GGML_DIR` first, then the package libggml-python."""
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if chosen:
        return Path(chosen)
    spec = importlib.util.find_spec("libggml")
    if spec is None or not spec.submodule_search_locations:
        raise LibraryError(f"ggml is not installed: pip install libggml-python, or set {DIRECTORY_VARIABLE}")
    package = Path(spec.submodule_search_locations[0])
    # CMake installs into lib or lib64, by distribution.
    found = sorted(package.glob("lib*/libggml-base.so"))
    return found[0].parent if found else package / "lib"


@functools.cache
def load() -> Library:
    """The one ggml of this process, loaded on first use and checked for its version."""
    return Library(find_directory())


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"ggml cannot be loaded from {path}: {error}") from error


def _bind(library: ctypes.CDLL, name: str, result: Any, arguments: tuple[Any, ...]) -> Any:
    try:
        function = library[name]
    except AttributeError as error:
        raise LibraryError(f"{name} is missing in {library._name}: not ggml {VERSION}?") from error
    function.restype = result
    function.argtypes = arguments
    return function


__all__ = ["DIRECTORY_VARIABLE", "VERSION", "InitParams", "Library", "ThreadpoolParams", "find_directory", "load"]
