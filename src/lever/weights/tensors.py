"""Weights as ggml tensors, unit by unit: streamed as the file holds them, or repacked and resident.

Both kinds answer `stream(groups)` with the tensors of each group of units in turn, by name; the graphs do not see a
difference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from lever.ggml import Buffer, Context, Library
from lever.ggml.layout import new_tensor, takes_repacked
from lever.ggml.objects import RepackedPages
from lever.owner import Owner
from lever.pages import Pages
from lever.weights.store import Memory, Store
from lever.weights.units import Place, Unit

Tensors = Mapping[str, int]  # name in the GGUF -> ggml tensor
Group = Sequence[int]  # indices of units that are computed together


class Weights(Protocol):
    """Where a model's weights come from."""

    def stream(self, groups: Iterable[Group]) -> Generator[Tensors, None, None]:
        """The tensors of each group of units in turn, valid until the next step of the iteration."""

    def close(self) -> None:
        """Free what is its own; tensors become invalid."""


class Arena:
    """The memory that units lie in, and where in it ggml may place tensors.

    Tensors of a flash image whose bytes are in the kernels' own layout (`repacked`, their names) must lie in memory
    that ggml's repack buffer type has allocated; other tensors may lie there too.
    """

    def __init__(self, ggml: Library, repacked: Collection[str] = ()) -> None:
        self._ggml = ggml
        self._repacked = frozenset(repacked)
        self._pages: dict[int, RepackedPages] = {}  # by address

    def allocate(self, nbytes: int) -> Memory:
        """Memory for a unit; its owner closes it."""
        if not self._repacked:
            return Pages(nbytes)
        pages = RepackedPages(self._ggml, nbytes)
        self._pages[pages.address] = pages
        return pages

    def tensors(self, unit: Unit, address: int, stack: ExitStack) -> Tensors:
        """Tensors over a unit's bytes at `address`; the stack owns their metadata."""
        plain = [place for place in unit.places if place.tensor.name not in self._repacked]
        tensors = dict(overlay(self._ggml, plain, address, unit.nbytes, stack))
        repacked = [place for place in unit.places if place.tensor.name in self._repacked]
        if repacked:
            context = stack.enter_context(Context(self._ggml, len(repacked)))
            for place in repacked:
                tensor = new_tensor(self._ggml, context, place.tensor.type, place.tensor.shape)
                tensors[place.tensor.name] = self._pages[address].place(tensor, address + place.at)
        return tensors


class StreamedWeights:
    """Tensors laid over the bytes of the file, in whatever memory the store has put them.

    The metadata of a unit in a slot is made once and kept: a ring has few slots, so there are few such pairs.
    """

    def __init__(self, store: Store, arena: Arena) -> None:
        self.store = store
        self._arena = arena
        self._known: dict[tuple[tuple[int, int], ...], Tensors] = {}  # by units and addresses
        self._metadata = ExitStack()

    def stream(self, groups: Iterable[Group]) -> Generator[Tensors, None, None]:
        """The tensors of each group of units in turn, valid until the next step of the iteration."""
        for group in groups:
            held = []
            try:
                for index in group:
                    held.append((index, self.store.hold(index)))
                yield self._tensors(tuple(held))
            finally:
                for _, address in held:
                    self.store.release(address)

    def _tensors(self, held: tuple[tuple[int, int], ...]) -> Tensors:
        known = self._known.get(held)
        if known is None:
            known = {}
            for index, address in held:
                known |= self._arena.tensors(self.store.units[index], address, self._metadata)
            self._known[held] = known
        return known

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
        self._memory: list[Owner] = []
        self._overlays: list[Buffer] = []
        self._units: list[dict[str, int]] = []
        try:
            for index, address in store.stream(range(len(store.units))):
                self._units.append(self._load(store.units[index], address))
                on_loaded(store.units[index].nbytes)
        except BaseException:
            self.close()
            raise

    def stream(self, groups: Iterable[Group]) -> Generator[Tensors, None, None]:
        """The tensors of each group of units in turn."""
        for group in groups:
            yield {name: tensor for index in group for name, tensor in self._units[index].items()}

    def close(self) -> None:
        """Free everything."""
        self._context.close()
        for owner in (*self._overlays, *self._memory):
            owner.close()

    def _load(self, unit: Unit, address: int) -> dict[str, int]:
        tensors: dict[str, int] = {}
        for place in unit.places:
            tensor = new_tensor(self._ggml, self._context, place.tensor.type, place.tensor.shape)
            self._give_memory(tensor, place)
            self._ggml.backend_tensor_set(tensor, address + place.at, 0, place.tensor.nbytes)
            tensors[place.tensor.name] = tensor
        return tensors

    def _give_memory(self, tensor: int, place: Place) -> None:
        ggml = self._ggml
        if takes_repacked(ggml, place.tensor.type, place.tensor.shape):
            repacked = RepackedPages(ggml, place.tensor.nbytes)
            self._memory.append(repacked)
            repacked.place(tensor, repacked.address)
            return
        pages = Pages(place.tensor.nbytes)
        self._memory.append(pages)
        overlay = Buffer(ggml, pages.address, pages.nbytes)
        self._overlays.append(overlay)
        overlay.place(tensor, pages.address)


def overlay(ggml: Library, places: Sequence[Place], address: int, nbytes: int, stack: ExitStack) -> Tensors:
    """Plain tensors in `nbytes` of memory at `address`; the stack owns their metadata."""
    context = stack.enter_context(Context(ggml, len(places)))
    buffer = stack.enter_context(Buffer(ggml, address, nbytes))
    return {
        place.tensor.name: buffer.place(
            new_tensor(ggml, context, place.tensor.type, place.tensor.shape), address + place.at
        )
        for place in places
    }
