"""The whole model in memory in the layout of the fastest kernels: nearly the numbers of the plain one, and as exact."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from lever.arch import ModelConfig
from lever.errors import DoesNotFit, StorageError
from lever.ggml import load
from lever.ggml.layout import takes_repacked
from lever.ggml.probe import probe
from lever.gguf import MATRIX_TYPES, TYPES, read
from lever.loader import LoadedModel, ModelSettings
from lever.pages import PAGE
from lever.weights.plan import model_units
from lever.weights.tensors import RepackedWeights
from tests import reference, tiny
from tests.fakes import FakeDevice, descriptors_of, reader_threads
from tests.models import TOKENS, logits_of, open_tiny, relative_error, same_bits, tiny_logits

N_TOKENS = 45
# Those that this CPU has such kernels for; on another these may be others, or none.
KINDS = [kind for kind in sorted(MATRIX_TYPES) if probe(load(), kind, repacked=True)]
NAMES = [TYPES[kind].name for kind in KINDS]
# Both layouts round activations to 8 bits, in blocks of their own: each loses 0.7 % in each of 15 products.
TOLERANCE = 2 * math.sqrt(2 * 15) * 0.007


@pytest.fixture(scope="module", params=NAMES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Matrices of one type; those that are not repacked lie beside them."""
    types = {"attn_v": "Q6_K", "ffn_gate": "F32", "*": request.param}
    if request.param.startswith("IQ4"):  # slow to quantise
        types = {"attn_q": request.param, "ffn_down": request.param, "*": "F32"}
    return tiny.tiny_model(tmp_path_factory.mktemp("repacked") / "tiny.gguf", n_ff=256, type=types)


def test_the_layout_is_used_where_the_cpu_has_it(path: Path) -> None:
    with open_tiny(path) as loaded:
        tensors = [place.tensor for unit in loaded.units.units for place in unit.places]
        taken = {TYPES[t.type].name for t in tensors if takes_repacked(loaded.ggml, t.type, t.shape)}
    assert taken <= set(NAMES)
    assert taken


def test_numbers_are_those_of_the_plain_layout_but_for_rounding(path: Path) -> None:
    tokens = TOKENS[:N_TOKENS]
    plain = tiny_logits(path, tokens)
    repacked = tiny_logits(path, tokens, layout="repacked")
    assert relative_error(repacked, plain.astype(np.float64)) < TOLERANCE
    assert relative_error(repacked, reference.forward(path, tokens)) < TOLERANCE


@pytest.mark.parametrize("n_batch", [1, 2, 3, 7, 31])
def test_I5_chunks_of_the_prompt_change_no_bit(path: Path, n_batch: int) -> None:
    tokens = TOKENS[:N_TOKENS]
    expected = tiny_logits(path, tokens, layout="repacked")
    assert same_bits(tiny_logits(path, tokens, layout="repacked", n_batch=n_batch), expected)


def test_I4_rows_do_not_depend_on_the_rows_beside_them(path: Path) -> None:
    """Each width from 1 to 24, begun behind the same context."""
    expected = tiny_logits(path, TOKENS[:50], layout="repacked")
    with open_tiny(path, layout="repacked") as loaded:
        logits_of(loaded, TOKENS[:26])
        for width in (1, 2, 3, 4, 5, 8, 16, 24):
            loaded.model.kv.truncate(26)
            assert same_bits(logits_of(loaded, TOKENS[26 : 26 + width]), expected[26 : 26 + width])


def test_I5_threads_and_logits_at_once_change_no_bit(path: Path) -> None:
    tokens = TOKENS[:20]
    expected = tiny_logits(path, tokens, layout="repacked")
    assert same_bits(tiny_logits(path, tokens, layout="repacked", n_threads=2, n_logits=3), expected)


def test_what_has_no_such_kernels_gives_the_bits_of_the_plain_layout(tmp_path: Path) -> None:
    path = tiny.tiny_model(tmp_path / "tiny.gguf", n_ff=256, type="F32", rope_freqs=True)
    tokens = TOKENS[:N_TOKENS]
    assert same_bits(tiny_logits(path, tokens, layout="repacked"), tiny_logits(path, tokens))


def test_only_rows_of_the_embedding_are_read_once_it_is_loaded(path: Path) -> None:
    device = FakeDevice()
    with open_tiny(path, layout="repacked", device=device) as loaded:
        assert not reader_threads()
        table = loaded.gguf.tensors["token_embd.weight"]
        device.reads.clear()
        logits_of(loaded, TOKENS[:5])
    rows = range(table.offset - table.offset % PAGE, table.offset + table.nbytes)
    assert device.reads
    assert all(offset in rows for offset, _ in device.reads)


def test_D8_a_budget_that_cannot_hold_it_is_refused_with_its_parts(path: Path) -> None:
    gguf = read(path)
    settings = ModelSettings(dram=1 << 20, n_ctx=256, layout="repacked")
    with pytest.raises(DoesNotFit) as caught:
        LoadedModel(gguf, ModelConfig.from_gguf(gguf), settings)
    for part in ("Python", "KV cache", "pinned layers", "output projection", "--dram"):
        assert part in str(caught.value)
    assert "ring" not in str(caught.value)
    assert not descriptors_of(path)


def test_C10_an_error_while_loading_leaves_nothing_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf, freed, close = read(path), [], RepackedWeights.close

    def noted(self: RepackedWeights) -> None:
        freed.append(len(self._memory))
        close(self)

    monkeypatch.setattr(RepackedWeights, "close", noted)
    extent = model_units(gguf, ModelConfig.from_gguf(gguf)).units[1].extents[0]
    device = FakeDevice(broken=range(extent.offset, extent.offset + 1))
    with pytest.raises(StorageError, match=r"blk\.1: reading"), open_tiny(path, layout="repacked", device=device):
        pass
    assert freed[0] > 0
    assert not reader_threads()
    assert not descriptors_of(path)
