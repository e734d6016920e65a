"""Starting the disk early: dirty pages are handed to it while the copy goes on, so that the final sync is short."""

from __future__ import annotations

import os

from ckptbridge.conversion.syscalls import SYNC_WAIT_AFTER, SYNC_WAIT_BEFORE, SYNC_WRITE, sync_file_range

_STEP = 16 << 20  # bytes between two requests


class Writeback:
    """Counts the bytes placed in a file and asks the kernel, step by step, to begin writing them out."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._waiting = 0
        self._call = sync_file_range()

    def placed(self, nbytes: int) -> None:
        """Bytes have been placed somewhere in the file."""
        self._waiting += nbytes
        if self._waiting >= _STEP and self._call is not None:
            # The whole file: pages that are clean or under way cost nothing, and places need no bookkeeping.
            self._call(self._fd, 0, os.fstat(self._fd).st_size, SYNC_WRITE)
            self._waiting = 0


def sync(fd: int) -> None:
    """fsync, after a wait in steps: a signal is not heard while one system call waits for the disk."""
    call = sync_file_range()
    if call is not None:
        for offset in range(0, os.fstat(fd).st_size, _STEP):
            call(fd, offset, _STEP, SYNC_WAIT_BEFORE | SYNC_WRITE | SYNC_WAIT_AFTER)
    os.fsync(fd)
