"""The self-test of ggml: sound here for every type, and not to be fooled by a library that computes wrongly."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from lever.errors import LibraryError
from lever.ggml import Library, load
from lever.ggml.lib import find_directory
from lever.ggml.probe import LENGTHS, N_WEIGHTS, ROW_MULTIPLES, WIDTH, probe, row_multiple
from lever.gguf import F32, MATRIX_TYPES, TYPES

Q4_0 = 2
Product = NDArray[np.float32]  # [width, N_WEIGHTS]


class Spoilt(Library):
    """The library of this machine, but `spoil` changes every product with small weights before it is read.

    `of`: weights of this type only.
    """

    def __init__(self, spoil: Callable[[Product], None], of: int | None = None) -> None:
        super().__init__(find_directory())
        self._spoil, self._of = spoil, of
        self._kind = -1  # of the weights last made
        self._new: Callable[..., int] = self.new_tensor_2d
        self._get: Callable[..., None] = self.backend_tensor_get
        self.new_tensor_2d: Callable[..., int] = self.new
        self.backend_tensor_get: Callable[..., None] = self.get

    def new(self, context: int, kind: int, length: int, n: int) -> int:
        if n == N_WEIGHTS:
            self._kind = kind
        return self._new(context, kind, length, n)

    def get(self, tensor: int, address: int, offset: int, nbytes: int) -> None:
        self._get(tensor, address, offset, nbytes)
        if nbytes <= 4 * N_WEIGHTS * WIDTH and self._of in (None, self._kind):
            data = (ctypes.c_char * nbytes).from_address(address)
            self._spoil(np.frombuffer(memoryview(data).cast("B"), np.float32).reshape(-1, N_WEIGHTS))


def last_bit_at(*widths: int) -> Callable[[Product], None]:
    """Products of these widths differ in the last bit of their last row: another kernel took it."""

    def spoil(product: Product) -> None:
        if len(product) in widths:
            product.view(np.uint32)[-1, 0] ^= 1

    return spoil


# --- this machine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(MATRIX_TYPES), ids=[TYPES[kind].name for kind in sorted(MATRIX_TYPES)])
@pytest.mark.parametrize("repacked", [False, True], ids=["plain", "repacked"])
def test_D14_I4_every_type_is_sound_here(kind: int, repacked: bool) -> None:
    found = probe(load(), kind, repacked)
    if repacked and found is None:
        return  # this CPU multiplies it in the plain layout only
    assert found is not None
    assert (found.type_name, found.layout) == (TYPES[kind].name, "repacked" if repacked else "plain")
    assert found.sound
    assert found.row_multiple in ROW_MULTIPLES


def test_a_model_pads_to_the_largest_multiple_that_its_types_need() -> None:
    ggml = load()
    for repacked in (False, True):
        found = [probe(ggml, kind, layout) for kind in MATRIX_TYPES for layout in {False, repacked}]
        multiples = [result.row_multiple or 0 for result in found if result is not None]
        assert row_multiple(ggml, MATRIX_TYPES, MATRIX_TYPES if repacked else ()) == max(multiples)


OTHER_TYPES = sorted(set(range(max(TYPES) + 2)) - MATRIX_TYPES)  # withdrawn ids and one that never was, too
ASK_FOR_OTHERS = f"""
from lever.ggml import load
from lever.ggml.probe import probe
print([probe(load(), kind, repacked) for kind in {OTHER_TYPES} for repacked in (False, True)])
"""


def test_types_that_are_no_weights_are_not_had_in_any_layout() -> None:
    """In a process of its own: asked to compute with them, ggml ends it."""
    done = subprocess.run([sys.executable, "-c", ASK_FOR_OTHERS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[None] * 2 * len(OTHER_TYPES)}\n"


def test_a_model_of_a_type_that_is_no_weight_is_refused_by_its_name() -> None:
    with pytest.raises(LibraryError, match="multiplies no weights of type Q8_1"):
        row_multiple(load(), [9])


# --- a library that computes wrongly ------------------------------------------------------------------------


def scaled(product: Product) -> None:
    product *= np.float32(1.03)


def a_row_of_weights_twice(product: Product) -> None:
    product[:, 17] = product[:, 16]


def one_sign(product: Product) -> None:
    product[0, 0] *= -1


def nothing(product: Product) -> None:
    product[:] = 0


def not_a_number(product: Product) -> None:
    product[-1, -1] = np.nan


@pytest.mark.parametrize("spoil", [scaled, a_row_of_weights_twice, one_sign, nothing, not_a_number])
@pytest.mark.parametrize("kind", [0, Q4_0, 14], ids=["F32", "Q4_0", "Q6_K"])
def test_D14_a_wrong_product_is_found_and_refused_in_one_line(kind: int, spoil: Callable[[Product], None]) -> None:
    library = Spoilt(spoil)
    found = probe(library, kind)
    assert found is not None
    assert not found.sound
    with pytest.raises(LibraryError, match=r"fails its self-test for .*lever doctor") as caught:
        row_multiple(library, [kind])
    assert str(library.directory) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1


def test_D14_a_product_that_is_wrong_for_long_rows_only_is_found() -> None:
    calls = []

    def spoil(product: Product) -> None:
        calls.append(1)
        if len(calls) > n_calls // len(LENGTHS):
            not_a_number(product)

    n_calls = 0
    probe(Spoilt(lambda _product: calls.append(1)), Q4_0)
    n_calls = len(calls)
    calls.clear()
    found = probe(Spoilt(spoil), Q4_0)
    assert found is not None
    assert not found.sound


@pytest.mark.parametrize(
    ("widths", "multiple"),
    [((1,), 4), ((1, 3, 5, 7), 4), ((13,), 4), ((2,), 4), ((1, 2, 3), 4), ((4,), None), ((8,), None), ((16,), None)],
    ids=str,
)
def test_I4_the_widths_that_differ_decide_the_multiple(widths: tuple[int, ...], multiple: int | None) -> None:
    found = probe(Spoilt(last_bit_at(*widths)), Q4_0)
    assert found is not None
    assert found.row_multiple == multiple
    assert found.error < 2e-3
    assert found.sound == (multiple is not None)


def test_I4_a_library_whose_rows_depend_on_each_other_is_refused() -> None:
    with pytest.raises(LibraryError, match="fails its self-test for Q4_0"):
        row_multiple(Spoilt(last_bit_at(4), of=Q4_0), [Q4_0])


def test_I4_what_attention_multiplies_counts_for_every_model() -> None:
    library = Spoilt(last_bit_at(1, 2, 3), of=F32)
    assert row_multiple(library, []) == row_multiple(library, [Q4_0]) == 4
    with pytest.raises(LibraryError, match="fails its self-test for F32"):
        row_multiple(Spoilt(last_bit_at(4), of=F32), [Q4_0])
