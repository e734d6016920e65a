"""Calls of Linux and its C library that Python and NumPy lack, or do several times slower."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy.typing as npt

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
_AT_FDCWD = -100

SYNC_WAIT_BEFORE, SYNC_WRITE, SYNC_WAIT_AFTER = 1, 2, 4


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def renameat2(source: Path, destination: Path, flags: int) -> None:
    """Rename without replacing, or exchange two names. Raises OSError, with ENOSYS where there is no such call."""
    call = getattr(_libc(), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(destination))
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(destination), flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(destination))


@lru_cache(maxsize=1)
def sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux's sync_file_range(fd, offset, nbytes, flags), where the C library has it. A hint: fsync makes durable."""
    call = getattr(_libc(), "sync_file_range", None)
    if call is None:
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    call.restype = ctypes.c_int
    found: Callable[[int, int, int, int], int] = call
    return found


@lru_cache(maxsize=1)
def _memcmp() -> Callable[[int, int, int], int]:
    call = ctypes.CDLL(None).memcmp
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    call.restype = ctypes.c_int
    found: Callable[[int, int, int], int] = call
    return found


def same_bytes(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Whether two C-contiguous arrays hold the same bytes, at any alignment; other threads run meanwhile."""
    return a.nbytes == b.nbytes and _memcmp()(a.ctypes.data, b.ctypes.data, a.nbytes) == 0
