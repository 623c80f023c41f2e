"""Owners of ggml's native objects: each frees what it made, once, in `close`. Tensors are plain addresses (int).

ggml keeps tensor *metadata* in a context and tensor *data* in buffers. lever's weights, caches and rows live in memory
of its own (`lever.pages`), which a `Buffer` makes known to ggml without copying.
"""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Self

from lever.errors import LibraryError
from lever.ggml.lib import InitParams, Library

SUCCESS = 0  # GGML_STATUS_SUCCESS


class _Owner:
    """Closes on leaving a `with`; `close` may be called twice."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Context(_Owner):
    """Room for the metadata of `n_tensors` tensors and, with `n_nodes`, of graphs of that many nodes."""

    def __init__(self, ggml: Library, n_tensors: int, n_nodes: int = 0) -> None:
        graph = ggml.graph_overhead_custom(n_nodes, False) if n_nodes else 0
        self._ggml = ggml
        self._n_nodes = n_nodes
        self.nbytes: int = n_tensors * ggml.tensor_overhead() + graph
        self.handle: int = ggml.init(InitParams(self.nbytes, None, True))
        if not self.handle:
            raise LibraryError(f"ggml could not make a context of {self.nbytes} bytes")

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


class Buffer(_Owner):
    """Memory of ours that ggml may place tensors in. The pages must outlive it."""

    def __init__(self, ggml: Library, address: int, nbytes: int) -> None:
        self._ggml = ggml
        self.handle: int = ggml.backend_cpu_buffer_from_ptr(address, nbytes)

    def place(self, tensor: int, address: int) -> int:
        """Give a tensor its data address, inside this buffer; returns the tensor."""
        if self._ggml.backend_tensor_alloc(self.handle, tensor, address) != SUCCESS:
            raise LibraryError("ggml could not place a tensor in its buffer")
        return tensor

    def close(self) -> None:
        if self.handle:
            self._ggml.backend_buffer_free(self.handle)
            self.handle = 0


class Backend(_Owner):
    """ggml's CPU backend with a number of threads that may change between graphs (it never changes a bit)."""

    def __init__(self, ggml: Library, n_threads: int) -> None:
        self._ggml = ggml
        self.handle: int = ggml.backend_cpu_init()
        self._n_threads = 0
        self.n_threads = n_threads

    @property
    def n_threads(self) -> int:
        """Threads that the next graph is computed with."""
        return self._n_threads

    @n_threads.setter
    def n_threads(self, count: int) -> None:
        if count != self._n_threads:
            self._ggml.backend_cpu_set_n_threads(self.handle, count)
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


class GraphAllocator(_Owner):
    """Memory for the intermediate tensors of graphs, sized once by the largest graph."""

    def __init__(self, ggml: Library) -> None:
        self._ggml = ggml
        self.handle: int = ggml.gallocr_new(ggml.backend_cpu_buffer_type())
        self._reserved = 0

    def size_of(self, graph: int) -> int:
        """Bytes that `reserve` would take for this graph; allocates nothing."""
        size = ctypes.c_size_t(0)
        self._ggml.gallocr_reserve_n_size(self.handle, graph, None, None, ctypes.byref(size))
        return size.value

    def reserve(self, graph: int) -> None:
        """Allocate for this graph; graphs that need more are refused afterwards."""
        if not self._ggml.gallocr_reserve(self.handle, graph):
            raise LibraryError("ggml could not allocate its compute buffer")
        self._reserved = self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        size: int = self._ggml.gallocr_get_buffer_size(self.handle, 0)
        return size

    def allocate(self, graph: int) -> None:
        """Give every intermediate tensor of the graph its place."""
        if not self._ggml.gallocr_alloc_graph(self.handle, graph):
            raise LibraryError("ggml could not allocate a graph")
        assert not self._reserved or self.nbytes == self._reserved, (
            "a graph outgrew the planned compute buffer"
        )

    def close(self) -> None:
        if self.handle:
            self._ggml.gallocr_free(self.handle)
            self.handle = 0
