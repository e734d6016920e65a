"""The least that a durable copy can do: copy_file_range, sync_file_range, fsync. ``bare.py SRC DST``.

All files of SRC go one after the other into DST, at an offset that is no multiple of a page, as a
checkpoint's records do. With ``--read`` the files are only read, each byte once.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_STEP = 16 << 20
_WRITE = 2  # SYNC_FILE_RANGE_WRITE


def copy(source: Path, destination: Path) -> None:
    """Copy a file or all files of a folder into one durable file."""
    libc = ctypes.CDLL(None)
    libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    out = os.open(destination, os.O_CREAT | os.O_EXCL | os.O_RDWR)
    at = 100
    for path in _files(source):
        fd = os.open(path, os.O_RDONLY)
        offset, size = 0, os.fstat(fd).st_size
        while offset < size:
            done = os.copy_file_range(fd, out, min(_STEP, size - offset), offset, at)
            libc.sync_file_range(out, at, done, _WRITE)
            offset, at = offset + done, at + done
        os.close(fd)
    os.fsync(out)
    os.close(out)


def read(path: Path) -> None:
    """Read a file, or all files of a folder, through one buffer."""
    buffer = bytearray(1 << 20)
    for file in _files(path):
        fd = os.open(file, os.O_RDONLY)
        while os.readv(fd, [buffer]):
            pass
        os.close(fd)


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]


if __name__ == "__main__":
    if sys.argv[1] == "--read":
        for argument in sys.argv[2:]:
            read(Path(argument))
    else:
        copy(Path(sys.argv[1]), Path(sys.argv[2]))
