"""Page-aligned memory: where it lies, when it is there, and when it is gone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lever.errors import DoesNotFit
from lever.memory import rss_bytes
from lever.pages import PAGE, Pages, round_up

MIB = 1 << 20


@given(nbytes=st.integers(0, 1 << 50), to=st.integers(1, 1 << 20))
def test_rounding_up_gives_the_next_multiple(nbytes: int, to: int) -> None:
    found = round_up(nbytes, to)
    assert found % to == 0
    assert nbytes <= found < nbytes + to


def test_a_page_is_a_power_of_two_that_every_device_takes() -> None:
    assert PAGE >= 4096
    assert PAGE & (PAGE - 1) == 0


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 3 * MIB - 1])
def test_memory_is_aligned_whole_zero_and_writable(nbytes: int) -> None:
    with Pages(nbytes) as pages:
        assert pages.nbytes == len(pages.bytes) == round_up(nbytes)
        assert pages.address % PAGE == 0
        assert pages.address == pages.bytes.ctypes.data
        assert not pages.bytes.any()
        pages.bytes[:] = 7
        assert pages.bytes.min() == 7


@pytest.mark.parametrize("nbytes", [MIB, 64 * MIB], ids=["small pages", "huge pages"])
def test_memory_is_there_from_the_start_and_goes_back_when_closed(nbytes: int) -> None:
    """A plan is then right from the first moment, and a refusal comes before the work."""
    before = rss_bytes()
    pages = [Pages(nbytes) for _ in range(64 * MIB // nbytes)]
    held = rss_bytes()
    for part in pages:
        part.close()
    assert held - before == pytest.approx(64 * MIB, rel=0.1)
    assert rss_bytes() - before < 8 * MIB


def test_a_view_keeps_the_memory_after_closing() -> None:
    pages = Pages(PAGE)
    view = pages.bytes[:8]
    view[:] = np.arange(8)
    pages.close()
    pages.close()
    assert view.tolist() == list(range(8))
    assert len(pages.bytes) == 0


def test_D8_memory_that_the_system_refuses_is_an_error_of_one_line() -> None:
    with pytest.raises(DoesNotFit, match=r"the system refused \d+ bytes .*--dram") as caught:
        Pages(1 << 60)
    assert caught.value.exit_code == 3


def test_no_memory_at_all_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        Pages(0)
