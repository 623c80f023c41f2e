"""What computes: the CPU, or another of ggml's devices, whose memory is not this process's. Knows no model.

`Cpu` and `FarDevice` answer alike, so that a model is written once: where memory is the same, `send` and `fetch` of a
matrix do nothing. A device behind ggml's RPC is reached by `lever.rpc`, any other one by its name in ggml's registry.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lever.errors import DeviceLost, DoesNotFit, LibraryError, UsageError
from lever.ggml.arrays import KINDS, Matrix, placed, shared
from lever.ggml.lib import Library
from lever.ggml.objects import SUCCESS, Backend, Context, GraphAllocator
from lever.memory import format_size
from lever.owner import Owner
from lever.pages import PAGE, Pages, round_up
from lever.rpc import Relay
from lever.settings import CPU

log = logging.getLogger(__name__)

RPC = "rpc:"  # what the names of servers begin with
# ggml hashes what is larger than 10 MiB before it sends it to a server, in case that has it: a second for a gigabyte.
PIECE = 8 << 20
# A signal whose handler runs in a call of ggml's client ends it as if the server were lost, and then the process. So
# all of them wait, but for those that tell of a fault of the call itself.
FAULTS = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGTRAP,
    signal.SIGSYS,
}
SIGNALS = signal.valid_signals() - FAULTS


@dataclass(slots=True)
class Traffic:
    """What went to a device and came back for one model."""

    upload_bytes: int = 0
    upload_s: float = 0.0  # in which nothing else was done
    download_bytes: int = 0  # their seconds are those of computing, which they wait for


class Cpu:
    """The CPU: memory is this process's own."""

    name = CPU
    on_host = True

    def __init__(self, ggml: Library) -> None:
        self._ggml = ggml
        self.traffic = Traffic()
        self.handle = ggml.cpu_device
        self.buffer_type: int = ggml.backend_cpu_buffer_type()

    def open_backend(self, most_threads: int, *, spin: bool = False) -> Backend:
        """What computes graphs, with so many threads."""
        return Backend(self._ggml, most_threads, spin=spin)

    def open_allocator(self) -> GraphAllocator:
        """Memory for the intermediate tensors of its graphs."""
        return GraphAllocator(self._ggml)

    def matrix(self, context: Context, stack: ExitStack, dtype: DTypeLike, rows: int, length: int) -> Matrix:
        """A matrix of zeros; the stack owns its memory, the context its tensor."""
        return Matrix(*shared(self._ggml, context, stack, dtype, rows, length))

    def over(self, context: Context, stack: ExitStack, kind: int, rows: int, length: int, pages: Pages) -> Matrix:
        """A matrix of any type over memory of somebody's; its array is of bytes."""
        tensor = placed(self._ggml, context, stack, kind, rows, length, pages.address, pages.nbytes)
        return Matrix(tensor, pages.bytes)

    def send(self, tensor: int, address: int, nbytes: int, at: int = 0) -> None:
        """Bytes from `address` on into a tensor, from its byte `at` on, in the layout of where that lies."""
        self._ggml.backend_tensor_set(tensor, address, at, nbytes)

    def fetch(self, tensor: int, address: int, nbytes: int) -> None:
        """The first bytes of a tensor to `address`."""
        self._ggml.backend_tensor_get(tensor, address, 0, nbytes)

    @contextmanager
    def hold(self, context: Context, buffer_type: int) -> Iterator[None]:
        """Memory of some type for all tensors of a context."""
        buffer = _held(self._ggml, context, buffer_type)
        try:
            yield
        finally:
            self._ggml.backend_buffer_free(buffer)

    def require(self, graph: int) -> None:
        """Every graph of lever's is one that the CPU computes."""


class FarDevice:
    """A device whose memory is not this process's, for one model: it counts what goes there and back."""

    on_host = False

    def __init__(self, ggml: Library, way: Way) -> None:
        self._ggml, self.way = ggml, way
        self.name, self.handle, self.buffer_type = way.name, way.handle, way.buffer_type
        self.traffic = Traffic()

    def open_backend(self, _most_threads: int, *, spin: bool = False) -> Backend:  # noqa: ARG002  as of `Cpu`
        """What computes graphs."""
        return FarBackend(self._ggml, self.way)

    def open_allocator(self) -> GraphAllocator:
        """Memory of the device for the intermediate tensors of its graphs."""
        return FarAllocator(self._ggml, self.way)

    def allocate(self, nbytes: int) -> FarMemory:
        """Memory of the device, all zero. DoesNotFit where it has no more."""
        return FarMemory(self._ggml, self.way, nbytes)

    def nbytes_of(self, tensor: int) -> int:
        """What a tensor takes there, up to where the next one may begin."""
        with self.way.calling():  # a server is asked about some types
            nbytes: int = self._ggml.backend_buft_get_alloc_size(self.buffer_type, tensor)
            return round_up(nbytes, self._ggml.backend_buft_get_alignment(self.buffer_type))

    def matrix(self, context: Context, stack: ExitStack, dtype: DTypeLike, rows: int, length: int) -> Matrix:
        """As of `Cpu.matrix`: the array is here, the tensor there."""
        nbytes = rows * length * np.dtype(dtype).itemsize
        array = stack.enter_context(Pages(nbytes)).bytes[:nbytes].view(dtype).reshape(rows, length)
        return FarMatrix(self, self._made(context, stack, KINDS[np.dtype(dtype)], rows, length, nbytes), array)

    def over(self, context: Context, stack: ExitStack, kind: int, rows: int, length: int, pages: Pages) -> Matrix:
        """As of `Cpu.over`."""
        return FarMatrix(self, self._made(context, stack, kind, rows, length, pages.nbytes), pages.bytes)

    def _made(self, context: Context, stack: ExitStack, kind: int, rows: int, length: int, nbytes: int) -> int:
        memory = stack.enter_context(self.allocate(nbytes))
        return memory.place(self._ggml.new_tensor_2d(context.handle, kind, length, rows))

    def send(self, tensor: int, address: int, nbytes: int, at: int = 0) -> None:
        """Bytes from `address` on into a tensor, from its byte `at` on."""
        started = time.perf_counter()
        for start in range(0, nbytes, PIECE):
            with self.way.calling():
                self._ggml.backend_tensor_set(tensor, address + start, at + start, min(PIECE, nbytes - start))
        self.traffic.upload_bytes += nbytes
        self.traffic.upload_s += time.perf_counter() - started

    def fetch(self, tensor: int, address: int, nbytes: int) -> None:
        """The first bytes of a tensor, once they are computed, to `address`."""
        with self.way.calling():
            self._ggml.backend_tensor_get(tensor, address, 0, nbytes)
        self.traffic.download_bytes += nbytes

    @contextmanager
    def hold(self, context: Context, buffer_type: int) -> Iterator[None]:
        """As of `Cpu.hold`."""
        with self.way.calling():
            buffer = _held(self._ggml, context, buffer_type)
        try:
            yield
        finally:
            with self.way.leaving():
                self._ggml.backend_buffer_free(buffer)

    def require(self, graph: int) -> None:
        """LibraryError for a graph with an operation that the device does not say it has: it may end the process."""
        for index in range(self._ggml.graph_n_nodes(graph)):
            node = self._ggml.graph_node(graph, index)
            if not self._ggml.backend_dev_supports_op(self.handle, node):
                operation = self._ggml.op_desc(node).decode()
                raise LibraryError(f"the device {self.name} has no {operation} as this model needs it: use another one")


Device = Cpu | FarDevice


class FarMatrix(Matrix):
    """A matrix here, and its like on a device."""

    def __init__(self, device: FarDevice, tensor: int, array: NDArray[Any]) -> None:
        super().__init__(tensor, array)
        self._device = device

    def send(self, n: int, start: int = 0) -> None:
        """The device shall see n elements of the array."""
        size = self.array.itemsize
        self._device.send(self.tensor, self.array.ctypes.data + start * size, n * size, start * size)

    def fetch(self, n: int) -> None:
        """The array shall show the tensor's first n elements, once they are computed."""
        self._device.fetch(self.tensor, self.array.ctypes.data, n * self.array.itemsize)


class FarBackend(Backend):
    """Computes graphs whose tensors lie on a device. Some begin and do not wait for the end: `fetch` does.

    How many threads that takes is the device's own affair.
    """

    def __init__(self, ggml: Library, way: Way) -> None:
        self._ggml, self._way = ggml, way
        with way.calling():
            self.handle = ggml.backend_dev_init(way.handle, None) or 0
        if not self.handle:
            raise LibraryError(f"ggml could not open the device {way.name}")

    @property
    def n_threads(self) -> int:
        """Of this process: the one that asks."""
        return 1

    @n_threads.setter
    def n_threads(self, count: int) -> None:
        pass

    def compute(self, graph: int) -> None:
        """Run a graph. LibraryError when ggml reports a failure, DeviceLost where there is nobody any more."""
        with self._way.calling():
            status = self._ggml.backend_graph_compute(self.handle, graph)
        if status != SUCCESS:
            raise LibraryError(f"the device {self._way.name} could not compute a graph (status {status})")

    def close(self) -> None:
        if self.handle:
            with self._way.leaving():
                self._ggml.backend_free(self.handle)
            self.handle = 0


class FarAllocator(GraphAllocator):
    """A device's memory for intermediate tensors."""

    def __init__(self, ggml: Library, way: Way) -> None:
        self._way = way
        super().__init__(ggml, way.buffer_type)

    def reserve(self, graph: int) -> None:
        with self._way.calling():
            super().reserve(graph)

    def allocate(self, graph: int) -> None:
        with self._way.calling():
            super().allocate(graph)

    def close(self) -> None:
        with self._way.leaving():
            super().close()


class FarMemory(Owner):
    """Memory of a device, all zero at first."""

    def __init__(self, ggml: Library, way: Way, nbytes: int) -> None:
        self._ggml, self._way = ggml, way
        self.nbytes = nbytes
        self.handle = 0
        if nbytes > ggml.backend_buft_get_max_size(way.buffer_type):
            raise DoesNotFit(f"the device {way.name} holds no {format_size(nbytes)} in one piece")
        with way.calling():
            self.handle = ggml.backend_buft_alloc_buffer(way.buffer_type, nbytes) or 0
        if not self.handle:
            raise DoesNotFit(f"the device {way.name} gave no {format_size(nbytes)} of its memory")
        try:
            with way.calling():
                self.base: int = ggml.backend_buffer_get_base(self.handle)
                ggml.backend_buffer_clear(self.handle, 0)
        except BaseException:
            self.close()
            raise

    def place(self, tensor: int, at: int = 0) -> int:
        """Give a tensor its data, `at` bytes from the start; returns the tensor."""
        with self._way.calling():
            status = self._ggml.backend_tensor_alloc(self.handle, tensor, self.base + at)
        if status != SUCCESS:
            raise LibraryError(f"ggml could not place a tensor on the device {self._way.name}")
        return tensor

    def clear(self) -> None:
        """All of it becomes zeros."""
        with self._way.calling():
            self._ggml.backend_buffer_clear(self.handle, 0)

    def close(self) -> None:
        if self.handle:
            with self._way.leaving():
                self._ggml.backend_buffer_free(self.handle)
            self.handle = 0


class Way(Owner):
    """The one way to a device, which all who use it share: one call at a time, and each is looked after."""

    def __init__(self, ggml: Library, name: str) -> None:
        """UsageError for a name that ggml does not have, DeviceLost for a server that cannot be reached."""
        self.name = name
        self.probes: dict[int, Any] = {}  # what `lever.ggml.probe` has found, by type
        self._lock = threading.RLock()
        self._relay: Relay | None = None
        with ExitStack() as stack:
            if name.startswith(RPC):
                relay = self._relay = stack.enter_context(_reach(ggml, name))
                self.handle = self._server(ggml, relay)
            else:
                self.handle = _by_name(ggml, name)
            with self.calling():
                self.buffer_type: int = ggml.backend_dev_buffer_type(self.handle)
                self.description: str = ggml.backend_dev_description(self.handle).decode(errors="replace")
            if self._relay is not None:
                # ggml keeps its connection as long as there is a buffer behind it: so there always is one.
                stack.enter_context(FarMemory(ggml, self, PAGE))
                self._relay.shut_the_door()
            self._ggml = ggml
            self._cleanup = stack.pop_all()

    def _server(self, ggml: Library, relay: Relay) -> int:
        with self.calling():
            registry = ggml.backend_rpc_add_server(relay.endpoint.encode())
        if not registry:
            raise DeviceLost(f"{self.name}: it has no devices")
        if (n := ggml.backend_reg_dev_count(registry)) > 1:
            log.warning("%s has %d devices, of which lever uses the first", self.name, n)
        device: int = ggml.backend_reg_dev_get(registry, 0)
        return device

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Around each call that reaches the device: alone, without signals, and DeviceLost if it was lost."""
        self.check()
        try:
            with self.leaving():
                yield
        finally:  # whatever else went wrong, that is the reason
            self.check()

    def check(self) -> None:
        """DeviceLost if it was lost."""
        if self._relay is not None:
            self._relay.check()

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """As `calling`, to free what was made: that works, and fails, without a word."""
        with self._lock:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            try:
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a handler of one before may raise out of this
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def nbytes(self) -> int:
        """Bytes that what goes to a server takes here: ggml's client copies each piece, and then the relay."""
        return 0 if self._relay is None else PIECE + self._relay.nbytes

    def free_bytes(self) -> int | None:
        """What the device says that it has left; None where it does not say."""
        free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
        with self.calling():
            self._ggml.backend_dev_memory(self.handle, ctypes.byref(free), ctypes.byref(total))
        return free.value if total.value else None

    def close(self) -> None:
        """Let it go; all memory there has been freed."""
        self._cleanup.close()


class Devices(Owner):
    """The devices of a model and its draft, by name: each is reached by one way, since a server takes one client."""

    def __init__(self, ggml: Library) -> None:
        self._ggml = ggml
        self._ways: dict[str, Way] = {}

    def open(self, name: str) -> Device:
        """A device by its name, in whatever case. Errors as of `Way`."""
        name = name.lower()
        if name == CPU:
            return Cpu(self._ggml)
        if name not in self._ways:
            self._ways[name] = Way(self._ggml, name)
        return FarDevice(self._ggml, self._ways[name])

    def close(self) -> None:
        """Let all of them go. Safe to call twice."""
        with ExitStack() as stack:
            for way in self._ways.values():
                stack.callback(way.close)
            self._ways.clear()


def listed(ggml: Library) -> Mapping[str, str]:
    """Devices of this machine by the names that users give them, with what ggml says of each."""
    return {
        ggml.backend_dev_name(handle).decode().lower(): ggml.backend_dev_description(handle).decode(errors="replace")
        for handle in ggml.devices
    }


def _reach(ggml: Library, name: str) -> Relay:
    if not ggml.has_rpc:
        raise LibraryError(f"{name}: ggml in {ggml.directory} is built without RPC (GGML_RPC=ON)")
    host, _, port = name.removeprefix(RPC).rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise UsageError(f"{name!r} is no server: write it as rpc:HOST:PORT, such as rpc:127.0.0.1:50052")
    return Relay(host.strip("[]"), int(port))


def _held(ggml: Library, context: Context, buffer_type: int) -> int:
    buffer: int = ggml.backend_alloc_ctx_tensors_from_buft(context.handle, buffer_type) or 0
    if not buffer:
        raise LibraryError("ggml could not allocate a small matrix")
    return buffer


def _by_name(ggml: Library, name: str) -> int:
    for handle in ggml.devices:
        if ggml.backend_dev_name(handle).decode().lower() == name:
            return handle
    there = ", ".join([*listed(ggml), *(["rpc:HOST:PORT"] if ggml.has_rpc else [])])
    raise UsageError(f"there is no device {name!r}: this ggml has {there}")
