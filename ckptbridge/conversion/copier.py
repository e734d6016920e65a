"""Putting bytes into place: runs move within the kernel, boxes through one buffer."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptbridge.conversion.cast import CastCount
from ckptbridge.conversion.gather import Run
from ckptbridge.conversion.plan import OutputFile, Record
from ckptbridge.conversion.sources import SourceFiles
from ckptbridge.conversion.tally import Tally
from ckptbridge.conversion.words import fill, record_pieces
from ckptbridge.formats.tensors import Place

# What a kernel or file system says when it cannot copy between these two files.
_CANNOT = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM}
_STEP = 64 << 20  # bytes a copy moves at a time, so that progress shows


def write_file(file: OutputFile, fd: int, files: SourceFiles, tally: Tally) -> CastCount:
    """Write the fixed bytes and all records of an output file; returns what casts lost."""
    os.ftruncate(fd, file.layout.size)
    for offset, data in file.layout.fixed:
        write_at(fd, data, offset)
    lost = CastCount()
    copy = KernelCopy(fd)
    for record, places in zip(file.records, file.layout.places, strict=True):
        lost += _write_record(record, places, fd, files, tally, copy)
    return lost


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view = view[done:]
        offset += done


def _write_record(
    record: Record, places: Sequence[Place], fd: int, files: SourceFiles, tally: Tally, copy: KernelCopy
) -> CastCount:
    lost = CastCount()
    itemsize = record.spec.dtype.itemsize
    with tally.record(record) as seen:
        for piece in record_pieces(record):
            if isinstance(piece, Run):
                source = record.sources[piece.source]
                start = piece.dst * itemsize
                for path, offset, nbytes in files.runs(source, piece.src, piece.numel):
                    for at, to, count in _spread(places, start, nbytes):
                        copy(files, path, offset + at, to, count, tally)
                    seen.update(files.view(path, offset, nbytes))
                    start += nbytes
            else:
                filled = fill(record, piece, files)
                lost += filled.lost
                data = filled.data
                seen.update(data)
                for at, to, count in _spread(places, filled.start, len(data)):
                    write_at(fd, data[at : at + count], to)
                    tally.moved(count)
    return lost


def _spread(places: Sequence[Place], start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Where tensor bytes [start, start + nbytes) go: (from start, file offset, count)."""
    for place in places:
        low = max(start, place.start)
        high = min(start + nbytes, place.start + place.nbytes)
        if low < high:
            yield low - start, place.offset + low - place.start, high - low


class KernelCopy:
    """Copies ranges of files into one output, by copy_file_range where the file systems allow it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._able = hasattr(os, "copy_file_range")

    def __call__(self, files: SourceFiles, path: Path, offset: int, to: int, nbytes: int, tally: Tally) -> None:
        """Copy ``nbytes`` from ``offset`` of a source file to offset ``to`` of the output."""
        while nbytes:
            step = min(nbytes, _STEP)
            done = self._try(files.fd(path), offset, to, step) if self._able else 0
            if not done:
                write_at(self._fd, files.view(path, offset, step), to)
                done = step
            tally.moved(done)
            offset, to, nbytes = offset + done, to + done, nbytes - done

    def _try(self, source: int, offset: int, to: int, nbytes: int) -> int:
        try:
            return os.copy_file_range(source, self._fd, nbytes, offset, to)
        except OSError as e:
            if e.errno not in _CANNOT:
                raise
            self._able = False
            return 0
