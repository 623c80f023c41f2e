"""Weights in the memory of another device: sent there once and for all, or from the ring in every pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack

from lever.ggml import Context, Library
from lever.ggml.devices import FarDevice
from lever.ggml.layout import new_tensor
from lever.weights.store import Store
from lever.weights.tensors import Group, Tensors
from lever.weights.units import Unit


class FarWeights:
    """Units of a model as tensors of a device. Those that are kept there are loaded once; the others go, when they are
    wanted, from where a store has put them to one place, one after the other.

    One place is enough: a device computes a graph before it takes what is sent behind it, and the slot of the ring is
    free again when all is sent.
    """

    def __init__(
        self,
        ggml: Library,
        device: FarDevice,
        units: Sequence[Unit],
        kept: Collection[int],
        without: Collection[int] = (),
    ) -> None:
        """Memory for the units, but for those that it is to do `without`; `load` fills that of those that are kept.

        DoesNotFit where the device has less.
        """
        self._ggml, self._device, self._units = ggml, device, units
        self._store: Store | None = None
        self._kept = frozenset(kept)
        with ExitStack() as stack:
            self._context = stack.enter_context(Context(ggml, sum(len(unit.places) for unit in units)))
            self._tensors: Mapping[int, Tensors] = {
                index: self._made(unit) for index, unit in enumerate(units) if index not in without
            }
            sizes = {index: self._nbytes(made) for index, made in self._tensors.items()}
            passing = [nbytes for index, nbytes in sizes.items() if index not in self._kept]
            place = stack.enter_context(device.allocate(max(passing))) if passing else None
            for index, made in self._tensors.items():
                memory = place if index not in self._kept else stack.enter_context(device.allocate(sizes[index]))
                assert memory is not None
                at = 0
                for tensor in made.values():
                    memory.place(tensor, at)
                    at += device.nbytes_of(tensor)
            self._cleanup = stack.pop_all()

    def load(self, source: Store, indices: Sequence[int], on_loaded: Callable[[int], None]) -> None:
        """Send units that are kept from a store that has them alone, in this order."""
        for index, (_, address) in zip(indices, source.stream(range(len(indices))), strict=True):
            self._send(index, address)
            on_loaded(self._units[index].nbytes)

    def stream_from(self, store: Store) -> None:
        """Where units that are not kept come from."""
        self._store = store

    def stream(self, groups: Iterable[Group]) -> Generator[Tensors, None, None]:
        """The tensors of each group of units in turn, valid until the next step of the iteration."""
        for group in groups:
            found: dict[str, int] = {}
            for index in group:
                if index not in self._kept:
                    self._pass_on(index)
                found |= self._tensors[index]
            yield found

    def close(self) -> None:
        """Free everything there."""
        self._cleanup.close()

    def _pass_on(self, index: int) -> None:
        assert self._store is not None
        address = self._store.hold(index)
        try:
            self._send(index, address)
        finally:
            self._store.release(address)

    def _send(self, index: int, address: int) -> None:
        for place in self._units[index].places:
            self._device.send(self._tensors[index][place.tensor.name], address + place.at, place.tensor.nbytes)

    def _made(self, unit: Unit) -> Mapping[str, int]:
        return {
            place.tensor.name: new_tensor(self._ggml, self._context, place.tensor.type, place.tensor.shape)
            for place in unit.places
        }

    def _nbytes(self, tensors: Tensors) -> int:
        return sum(self._device.nbytes_of(tensor) for tensor in tensors.values())
