"""Memory for pieces, used again and again: fresh pages from the kernel would cost more than what is put into them."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[Any]

_UNIT = 2 << 20  # bytes; a huge page on most machines


class Buffers:
    """Gives out arrays; the memory of one is given out again when it and all views of it are gone.

    There are as many buffers as were in use at one time. Any thread may ask.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}

    def empty(self, count: int, word: np.dtype[Any]) -> Words:
        """An array of ``count`` words that holds anything."""
        units = max(1, -(-count * word.itemsize // _UNIT))
        free = self._free.setdefault(units, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = mmap.mmap(-1, units * _UNIT)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
        array: Words = np.ndarray(count, word, memory)
        # Views keep the array, and the array keeps its memory; the kernel's pages stay with it.
        weakref.finalize(array, free.append, memory).atexit = False
        return array
