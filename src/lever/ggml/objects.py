"""Owners of ggml's native objects: each frees what it made, once, in `close`. Tensors are plain addresses (int).

ggml keeps tensor *metadata* in a context and tensor *data* in buffers. lever's weights, caches and rows live in memory
of its own (`lever.pages`), which a `Buffer` makes known to ggml without copying.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from lever.errors import LibraryError
from lever.ggml.lib import InitParams, Library, ThreadpoolParams
from lever.owner import Owner
from lever.pages import PAGE, advise_huge, round_up

SUCCESS = 0  # GGML_STATUS_SUCCESS


class Context(Owner):
    """Room for the metadata of `n_tensors` tensors and, with `n_nodes`, of graphs of that many nodes."""

    def __init__(self, ggml: Library, n_tensors: int, n_nodes: int = 0) -> None:
        graph = ggml.graph_overhead_custom(n_nodes, False) if n_nodes else 0
        self._ggml = ggml
        self._n_nodes = n_nodes
        self.nbytes: int = n_tensors * ggml.tensor_overhead() + graph
        self.handle: int = _made(ggml.init(InitParams(self.nbytes, None, True)), f"context of {self.nbytes} bytes")

    def new_graph(self) -> int:
        """An empty graph for `n_nodes` nodes."""
        graph: int = self._ggml.new_graph_custom(self.handle, self._n_nodes, False)
        return graph

    def reset(self) -> None:
        """Forget all tensors and graphs, keep the room."""
        self._ggml.reset(self.handle)

    def close(self) -> None:
        if self.handle:
            self._ggml.free(self.handle)
            self.handle = 0


class Buffer(Owner):
    """Memory of ours that ggml may place tensors in. The pages must outlive it."""

    def __init__(self, ggml: Library, address: int, nbytes: int) -> None:
        self._ggml = ggml
        self.handle: int = _made(ggml.backend_cpu_buffer_from_ptr(address, nbytes), "buffer")

    def place(self, tensor: int, address: int) -> int:
        """Give a tensor its data address, inside this buffer; returns the tensor."""
        if self._ggml.backend_tensor_alloc(self.handle, tensor, address) != SUCCESS:
            raise LibraryError("ggml could not place a tensor in its buffer")
        return tensor

    def close(self) -> None:
        if self.handle:
            self._ggml.backend_buffer_free(self.handle)
            self.handle = 0


class RepackedPages(Owner):
    """Page-aligned memory that ggml's repack buffer type has allocated, for reads with O_DIRECT.

    A matrix placed in it is multiplied as one whose bytes are in the kernels' own layout. Resident from the start, like
    `lever.pages.Pages`.
    """

    def __init__(self, ggml: Library, nbytes: int) -> None:
        assert nbytes > 0
        self._ggml = ggml
        self.nbytes = round_up(nbytes)
        buffer = ggml.backend_buft_alloc_buffer(ggml.repack_buffer_type, self.nbytes + PAGE)
        self.handle: int = _made(buffer, f"repack buffer of {self.nbytes} bytes")
        self.address = round_up(ggml.backend_buffer_get_base(self.handle))
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        self.bytes: NDArray[np.uint8] = np.frombuffer(memoryview(memory), np.uint8)
        advise_huge(self.address, self.nbytes)
        self.bytes[::PAGE] = 0  # touches every page

    def place(self, tensor: int, address: int) -> int:
        """Give a tensor its data address in here; returns the tensor. The CPU must take its type and shape repacked."""
        if self._ggml.backend_tensor_alloc(self.handle, tensor, address) != SUCCESS:
            raise LibraryError("ggml could not place a tensor in its repack buffer")
        return tensor

    def close(self) -> None:
        if self.handle:
            self.bytes = np.empty(0, np.uint8)
            self._ggml.backend_buffer_free(self.handle)
            self.handle = 0


class Backend(Owner):
    """ggml's CPU backend with a number of threads that may change between graphs (it never changes a bit).

    Threads beyond the first are a pool that lives as long: ggml would start them anew for each graph. Between graphs
    they sleep, or `spin` for a while, which is faster where graphs follow each other at once, and takes a core where
    they do not.
    """

    def __init__(self, ggml: Library, most_threads: int, *, spin: bool = False) -> None:
        self._ggml = ggml
        self._most = most_threads
        self._n_threads = 0
        self._pool: int | None = None
        self.handle: int = _made(ggml.backend_cpu_init(), "CPU backend")
        if most_threads > 1:
            params = ThreadpoolParams()
            ggml.threadpool_params_init(ctypes.addressof(params), most_threads)
            params.poll = params.poll if spin else 0
            self._pool = ggml.threadpool_new(ctypes.addressof(params))
            if not self._pool:
                self.close()
                raise LibraryError(f"ggml could not start {most_threads} threads")
        self.n_threads = most_threads

    @property
    def n_threads(self) -> int:
        """Threads that the next graph is computed with."""
        return self._n_threads

    @n_threads.setter
    def n_threads(self, count: int) -> None:
        assert 0 < count <= self._most
        if count != self._n_threads:
            self._ggml.backend_cpu_set_n_threads(self.handle, count)
            self._ggml.backend_cpu_set_threadpool(self.handle, self._pool if count > 1 else None)
            self._n_threads = count

    def compute(self, graph: int) -> None:
        """Run a graph whose tensors all have data. LibraryError when ggml reports a failure."""
        status = self._ggml.backend_graph_compute(self.handle, graph)
        if status != SUCCESS:
            raise LibraryError(f"ggml could not compute a graph (status {status})")

    def close(self) -> None:
        if self.handle:
            self._ggml.backend_free(self.handle)
            self.handle = 0
        if self._pool:
            self._ggml.threadpool_free(self._pool)
            self._pool = None


class GraphAllocator(Owner):
    """Memory for the intermediate tensors of graphs, the CPU's unless another type of buffer is given. It grows to the
    largest graph it has seen.
    """

    def __init__(self, ggml: Library, buffer_type: int | None = None) -> None:
        self._ggml = ggml
        self.handle: int = _made(ggml.gallocr_new(buffer_type or ggml.backend_cpu_buffer_type()), "graph allocator")

    def size_of(self, graph: int) -> int:
        """Bytes that this graph takes; allocates nothing."""
        size = ctypes.c_size_t(0)
        self._ggml.gallocr_reserve_n_size(self.handle, graph, None, None, ctypes.byref(size))
        return size.value

    def reserve(self, graph: int) -> None:
        """Have memory for this graph at least."""
        if not self._ggml.gallocr_reserve(self.handle, graph):
            raise LibraryError("ggml could not allocate its compute buffer")

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        size: int = self._ggml.gallocr_get_buffer_size(self.handle, 0)
        return size

    def allocate(self, graph: int) -> None:
        """Give every intermediate tensor of the graph its place."""
        if not self._ggml.gallocr_alloc_graph(self.handle, graph):
            raise LibraryError("ggml could not allocate a graph")

    def close(self) -> None:
        if self.handle:
            self._ggml.gallocr_free(self.handle)
            self.handle = 0


def _made(handle: int | None, what: str) -> int:
    """What ggml has made; LibraryError when it could not."""
    if not handle:
        raise LibraryError(f"ggml could not make a {what}")
    return handle
