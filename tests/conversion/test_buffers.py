"""Memory is given out again when nobody can see it any more, and never before."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ckptbridge.conversion.buffers import Buffers

WORD = np.dtype(np.uint16)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_when_array_and_views_are_gone() -> None:
    buffers = Buffers()
    first = buffers.empty(1000, WORD)
    place = address(first)
    view = first.view(np.uint8)[10:20].data
    del first
    assert address(buffers.empty(1000, WORD)) != place, "a view still shows the memory"
    del view
    gc.collect()
    again = {address(a) for a in [buffers.empty(1000, WORD), buffers.empty(1000, WORD)]}
    assert place in again


@pytest.mark.parametrize("count", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_any_size_is_writable_throughout(count: int) -> None:
    buffers = Buffers()
    for _ in range(3):
        array = buffers.empty(count, WORD)
        array[:] = 7
        assert array.shape == (count,) and array.dtype == WORD and array.flags.aligned
        assert int(array.sum(dtype=np.int64)) == 7 * count


def test_threads_never_share_a_buffer() -> None:
    buffers = Buffers()

    def own(number: int) -> bool:
        for _ in range(200):
            array = buffers.empty(64, WORD)
            array[:] = number
            if not (array == number).all():
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(own, range(4)))
