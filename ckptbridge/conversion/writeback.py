"""Starting the disk early: dirty pages are handed to it while the copy goes on, so that the final sync is short."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache

_STEP = 16 << 20  # bytes between two requests
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: start writing, wait for nothing


@lru_cache(maxsize=1)
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux's sync_file_range, where the C library has it. Only a hint: fsync alone makes the bytes durable."""
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    call.restype = ctypes.c_int
    found: Callable[[int, int, int, int], int] = call
    return found


class Writeback:
    """Counts the bytes placed in a file and asks the kernel, step by step, to begin writing them out."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._waiting = 0
        self._call = _sync_file_range()

    def placed(self, nbytes: int) -> None:
        """Bytes have been placed somewhere in the file."""
        self._waiting += nbytes
        if self._waiting >= _STEP and self._call is not None:
            # The whole file: pages that are clean or under way cost nothing, and places need no bookkeeping.
            self._call(self._fd, 0, os.fstat(self._fd).st_size, _WRITE)
            self._waiting = 0
