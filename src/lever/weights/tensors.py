"""Weights as ggml tensors, unit by unit: streamed as the file holds them, or repacked and resident.

Both kinds answer `stream(indices)` with the tensors of each unit in turn, by name; the graphs do not see a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack
from typing import Protocol

from lever.errors import LibraryError
from lever.ggml import Buffer, Context, Library
from lever.gguf import F32
from lever.pages import Pages
from lever.weights.store import Store
from lever.weights.units import Place, Unit

Tensors = Mapping[str, int]  # name in the GGUF -> ggml tensor


class Weights(Protocol):
    """Where a model's weights come from."""

    def stream(self, indices: Iterable[int]) -> Generator[Tensors, None, None]:
        """The tensors of each unit in turn, valid until the next step of the iteration."""

    def close(self) -> None:
        """Free what is its own; tensors become invalid."""


class StreamedWeights:
    """Tensors laid over the bytes of the file, in whatever memory the store has put them.

    The metadata of a unit in a slot is made once and kept: a ring has few slots, so there are few such pairs.
    """

    def __init__(self, ggml: Library, store: Store) -> None:
        self._ggml = ggml
        self.store = store
        self._known: dict[tuple[int, int], Tensors] = {}
        self._metadata = ExitStack()

    def stream(self, indices: Iterable[int]) -> Generator[Tensors, None, None]:
        """The tensors of each unit in turn, valid until the next step of the iteration."""
        for index, address in self.store.stream(indices):
            known = self._known.get((index, address))
            if known is None:
                known = overlay(self._ggml, self.store.units[index], address, self._metadata)
                self._known[index, address] = known
            yield known

    def close(self) -> None:
        """Free the metadata; the memory is the store's."""
        self._known.clear()
        self._metadata.close()


class RepackedWeights:
    """All units in memory, matrices in the layout of the fastest kernels where ggml has one for their type.

    Products of repacked weights round differently from those of plain ones, so a model is one or the other as a whole:
    never depending on how much of it is pinned.
    """

    def __init__(self, ggml: Library, store: Store, on_loaded: Callable[[int], None] = lambda _nbytes: None) -> None:
        """Load all units of `store`, each by its way through a slot; the store is not needed afterwards."""
        self._ggml = ggml
        self._context = Context(ggml, sum(len(unit.places) for unit in store.units))
        self._plain: list[Pages] = []
        self._buffers: list[int] = []
        self._overlays: list[Buffer] = []
        self._units: list[dict[str, int]] = []
        try:
            for index, address in store.stream(range(len(store.units))):
                self._units.append(self._load(store.units[index], address))
                on_loaded(store.units[index].nbytes)
        except BaseException:
            self.close()
            raise

    def stream(self, indices: Iterable[int]) -> Generator[Tensors, None, None]:
        """The tensors of each unit in turn."""
        for index in indices:
            yield self._units[index]

    def close(self) -> None:
        """Free everything."""
        self._context.close()
        for buffer in self._buffers:
            self._ggml.backend_buffer_free(buffer)
        for overlay in self._overlays:
            overlay.close()
        for pages in self._plain:
            pages.close()
        self._buffers.clear()

    def _load(self, unit: Unit, address: int) -> dict[str, int]:
        tensors: dict[str, int] = {}
        for place in unit.places:
            tensor = _new_tensor(self._ggml, self._context, place)
            self._give_memory(tensor, place)
            self._ggml.backend_tensor_set(tensor, address + place.at, 0, place.tensor.nbytes)
            tensors[place.tensor.name] = tensor
        return tensors

    def _give_memory(self, tensor: int, place: Place) -> None:
        ggml, repack = self._ggml, self._ggml.repack_buffer_type
        if repack is None or not takes_repacked(ggml, place):
            pages = Pages(place.tensor.nbytes)
            overlay = Buffer(ggml, pages.address, pages.nbytes)
            overlay.place(tensor, pages.address)
            self._plain.append(pages)
            self._overlays.append(overlay)
            return
        buffer = ggml.backend_buft_alloc_buffer(repack, ggml.backend_buft_get_alloc_size(repack, tensor))
        if not buffer or ggml.backend_tensor_alloc(buffer, tensor, ggml.backend_buffer_get_base(buffer)) != 0:
            raise LibraryError(f"ggml could not hold {place.tensor.name} repacked")
        self._buffers.append(buffer)


def takes_repacked(ggml: Library, place: Place) -> bool:
    """Whether this CPU multiplies a matrix of this type and shape in the repacked layout.

    Asked of a product with a weight that already lies in a repack buffer: writing a type that it does not take into
    such a buffer ends the process.
    """
    if ggml.repack_buffer_type is None or len(place.tensor.shape) != 2:
        return False
    with Context(ggml, 1) as weight_context, Context(ggml, 2) as context:
        weight = _new_tensor(ggml, weight_context, place)
        buffer = ggml.backend_alloc_ctx_tensors_from_buft(weight_context.handle, ggml.repack_buffer_type)
        if not buffer:
            return False
        try:
            rows = ggml.new_tensor_2d(context.handle, F32, place.tensor.shape[0], 4)
            product = ggml.mul_mat(context.handle, weight, rows)
            return bool(ggml.backend_dev_supports_op(ggml.cpu_device, product))
        finally:
            ggml.backend_buffer_free(buffer)


def overlay(ggml: Library, unit: Unit, address: int, stack: ExitStack) -> Tensors:
    """Tensors over a unit's bytes at `address`; the stack owns their metadata."""
    context = stack.enter_context(Context(ggml, len(unit.places)))
    buffer = stack.enter_context(Buffer(ggml, address, unit.nbytes))
    return {
        place.tensor.name: buffer.place(_new_tensor(ggml, context, place), address + place.at) for place in unit.places
    }


def _new_tensor(ggml: Library, context: Context, place: Place) -> int:
    shape = place.tensor.shape
    if len(shape) == 1:
        vector: int = ggml.new_tensor_1d(context.handle, place.tensor.type, shape[0])
        return vector
    matrix: int = ggml.new_tensor_2d(context.handle, place.tensor.type, shape[0], shape[1])
    return matrix
