"""From the tensor directory to ranges of files and places in memory, for any layout of a file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lever.arch import ModelConfig, layer_tensors
from lever.gguf import MATRIX_TYPES, TYPES, TensorInfo, read
from lever.pages import PAGE, round_up
from lever.weights.plan import model_units
from lever.weights.units import MERGE_GAP, Extent, Unit, bands, row_nbytes, unit
from tests import tiny

F32 = 0
FILES = tuple(np.random.default_rng(file).bytes(3 << 20) for file in range(2))


def vector(name: str, file: int, offset: int, nbytes: int) -> TensorInfo:
    return TensorInfo(name, (nbytes // 4,), F32, file, offset, nbytes)


@st.composite
def layouts(draw: st.DrawFn) -> list[TensorInfo]:
    """Tensors of one or two files, in any order, with gaps below, at and above the one that is read along."""
    gaps = st.one_of(st.integers(0, 3 * PAGE), st.integers(MERGE_GAP - 64, MERGE_GAP + 64), st.just(3 * MERGE_GAP))
    tensors = []
    for file in range(draw(st.integers(1, 2))):
        end = draw(st.integers(0, 2 * PAGE))
        for number in range(draw(st.integers(1, 6))):
            offset = round_up(end + draw(gaps), 32)
            nbytes = 4 * draw(st.integers(1, 3 * PAGE))
            tensors.append(vector(f"{file}.{number}", file, offset, nbytes))
            end = offset + nbytes
    return draw(st.permutations(tensors))


def memory_of(unit: Unit, files: Sequence[bytes]) -> bytes:
    """A unit's memory after its extents were read, by nothing but their numbers."""
    memory = bytearray(unit.nbytes)
    for extent in unit.extents:
        data = files[extent.file][extent.offset : extent.offset + extent.nbytes].ljust(extent.nbytes, b"\0")
        memory[extent.at : extent.at + extent.nbytes] = data
    return bytes(memory)


GRAINS = st.sampled_from([PAGE, 16 * PAGE])


@given(tensors=layouts(), grain=GRAINS)
@settings(deadline=None)
def test_every_tensor_lands_at_an_address_congruent_to_its_offset(tensors: list[TensorInfo], grain: int) -> None:
    whole = unit("u", tensors, grain)
    memory = memory_of(whole, FILES)
    assert {place.tensor.name for place in whole.places} == {tensor.name for tensor in tensors}
    for place in whole.places:
        tensor = place.tensor
        assert place.at % grain == tensor.offset % grain
        expected = FILES[tensor.file][tensor.offset : tensor.offset + tensor.nbytes]
        assert memory[place.at : place.at + tensor.nbytes] == expected


@given(tensors=layouts(), grain=GRAINS)
@settings(deadline=None)
def test_extents_are_whole_grains_that_never_overlap_in_memory(tensors: list[TensorInfo], grain: int) -> None:
    whole = unit("u", tensors, grain)
    end = 0
    for extent in whole.extents:
        assert (extent.offset % grain, extent.nbytes % grain, extent.at % grain) == (0, 0, 0)
        assert extent.at == end
        end = extent.at + extent.nbytes
    assert whole.nbytes == end


@given(tensors=layouts())
@settings(deadline=None)
def test_extents_need_bytes_up_to_the_end_of_their_last_tensor(tensors: list[TensorInfo]) -> None:
    """A file may end there, in the middle of the page."""
    for extent in unit("u", tensors).extents:
        inside = [
            tensor.offset + tensor.nbytes
            for tensor in tensors
            if tensor.file == extent.file and extent.offset <= tensor.offset < extent.offset + extent.needed
        ]
        assert extent.offset + extent.needed == max(inside)
        assert extent.nbytes == round_up(extent.needed)


@given(tensors=layouts())
@settings(deadline=None)
def test_small_gaps_are_read_along_and_large_ones_skipped(tensors: list[TensorInfo]) -> None:
    extents = unit("u", tensors).extents
    ordered = sorted(tensors, key=lambda tensor: (tensor.file, tensor.offset))
    for before, after in pairwise(ordered):
        gap = after.offset - before.offset - before.nbytes
        together = extent_of(before, extents) == extent_of(after, extents)
        assert together == (before.file == after.file and gap <= MERGE_GAP)


def extent_of(tensor: TensorInfo, extents: tuple[Extent, ...]) -> Extent:
    (extent,) = (
        extent
        for extent in extents
        if extent.file == tensor.file and extent.offset <= tensor.offset < extent.offset + extent.needed
    )
    return extent


@given(
    kind=st.sampled_from(sorted(MATRIX_TYPES)),
    blocks=st.integers(1, 8),
    rows=st.integers(1, 3000),
    offset=st.integers(0, PAGE),
    band_bytes=st.integers(1, 1 << 20),
)
@settings(deadline=None)
def test_bands_cover_each_row_once(kind: int, blocks: int, rows: int, offset: int, band_bytes: int) -> None:
    info = TYPES[kind]
    nbytes = blocks * info.nbytes * rows
    matrix = TensorInfo("output.weight", (blocks * info.block, rows), kind, 1, 32 * offset, nbytes)
    parts = [band.places[0].tensor for band in bands(matrix, band_bytes)]
    assert sum(part.shape[1] for part in parts) == rows
    assert sum(part.nbytes for part in parts) == nbytes
    assert parts[0].offset == matrix.offset
    for before, after in pairwise(parts):
        assert after.offset == before.offset + before.nbytes
    for part in parts:
        assert part.shape[0] == matrix.shape[0]
        assert part.nbytes == part.shape[1] * row_nbytes(matrix) == part.shape[1] * blocks * info.nbytes
        assert part.file == matrix.file
        assert part.shape[1] % 256 == 0 or part is parts[-1]
        assert part.nbytes <= max(band_bytes, 256 * row_nbytes(matrix))


def test_bands_are_as_large_as_they_may_be() -> None:
    matrix = TensorInfo("output.weight", (256, 10_000), F32, 0, 0, 10_000 * 1024)
    assert [band.places[0].tensor.shape[1] for band in bands(matrix, 4 << 20)] == [4096, 4096, 1808]
    assert [band.name for band in bands(matrix, 8 << 20)] == ["output.weight[0:8192]", "output.weight[8192:10000]"]


def test_nothing_of_a_unit_depends_on_the_order_of_its_tensors() -> None:
    tensors = [vector(str(n), 0, n * 100_000, 4096) for n in range(9)]
    assert unit("u", tensors) == unit("u", tensors[::-1])


# --- of whole models ----------------------------------------------------------------------------------------

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_freqs": True},
    "qwen2": {"arch": "qwen2"},
    "qwen3, tied": {"arch": "qwen3", "tied": True},
    "alignment 4096": {"alignment": 4096},
    "no padding at the end": {"align_tail": False},
    "three parts": {"splits": 3},
    "seven parts": {"splits": 7},
    "mixed types": {"type": {"ffn_down": "Q6_K", "output": "Q8_0", "*": "Q4_0"}},
}


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS.keys())
def test_the_units_of_a_model_hold_the_bytes_that_were_written(shape: dict[str, Any]) -> None:
    """The fixture says what it wrote; splits and alignment included."""
    with TemporaryDirectory() as folder:
        gguf = read(tiny.tiny_model(Path(folder) / "tiny.gguf", **shape))
        files = [path.read_bytes() for path in gguf.files]
    written = {
        tensor.name: tensor.data
        for tensor in tiny.tiny_fields(
            **{key: value for key, value in shape.items() if key not in ("splits", "align_tail")}
        ).tensors
    }
    config = ModelConfig.from_gguf(gguf)
    model = model_units(gguf, config)
    found: dict[str, bytes] = {}
    for whole in model.units:
        memory = memory_of(whole, files)
        for place in whole.places:
            data = memory[place.at : place.at + place.tensor.nbytes]
            found[place.tensor.name] = found.get(place.tensor.name, b"") + data  # bands follow each other
    if not config.tied_output:
        del written["token_embd.weight"]  # its rows are read one by one
    assert found == written


def test_the_units_of_a_model_are_its_layers_then_the_projection_then_the_rest(tmp_path: Path) -> None:
    gguf = read(tiny.tiny_model(tmp_path / "tiny.gguf", n_layers=3, n_vocab=900, rope_freqs=True))
    config = ModelConfig.from_gguf(gguf)
    model = model_units(gguf, config)
    names = [[place.tensor.name for place in whole.places] for whole in model.units]
    for layer, (index,) in enumerate(model.layers):
        assert sorted(names[index]) == sorted(layer_tensors(config, layer))
    assert [names[band] for band in model.projection] == [["output.weight"]] * len(model.projection)
    assert sum(model.band_rows) == 900
    assert sorted(names[model.small]) == ["output_norm.weight", "rope_freqs.weight"]
    assert [*chain(*model.layers), *model.projection, model.small] == list(range(len(model.units)))
