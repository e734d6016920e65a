"""Putting bytes into place: runs move within the kernel, boxes through one buffer."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from ckptbridge.conversion.cast import CastCount
from ckptbridge.conversion.gather import Run
from ckptbridge.conversion.plan import OutputFile, Record
from ckptbridge.conversion.sources import SourceFiles
from ckptbridge.conversion.tally import Tally
from ckptbridge.conversion.words import fill, record_pieces
from ckptbridge.conversion.worker import Worker
from ckptbridge.conversion.writeback import Writeback
from ckptbridge.formats.tensors import Place

# What a kernel or file system says when it cannot copy between these two files.
_CANNOT = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM}
_WAITING = 4  # buffers that may wait to be written
_STEP = 32 << 20  # bytes a copy moves at a time, so that progress shows and signals are seen


def write_file(file: OutputFile, fd: int, files: SourceFiles, tally: Tally) -> CastCount:
    """Write the fixed bytes and all records of an output file; returns what casts lost."""
    os.ftruncate(fd, file.layout.size)
    for offset, data in file.layout.fixed:
        write_at(fd, data, offset)
    lost = CastCount()
    # Gathering here and writing there: the two take about as long, and the kernel writes one file on one thread.
    with Worker("writer", _WAITING) as worker:
        output = Output(fd, worker, tally)
        for record, places in zip(file.records, file.layout.places, strict=True):
            lost += _write_record(record, places, files, tally, output)
            worker.put(partial(files.release, record.sources))
    return lost


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view = view[done:]
        offset += done


def _write_record(
    record: Record, places: Sequence[Place], files: SourceFiles, tally: Tally, output: Output
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
                        output.copy(files, path, offset + at, to, count)
                    seen.update(files.view(path, offset, nbytes))
                    start += nbytes
            else:
                filled = fill(record, piece, files)
                lost += filled.lost
                data = filled.data
                seen.update(data)
                for at, to, count in _spread(places, filled.start, len(data)):
                    output.write(data[at : at + count], to)
    return lost


def _spread(places: Sequence[Place], start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Where tensor bytes [start, start + nbytes) go: (from start, file offset, count)."""
    for place in places:
        low = max(start, place.start)
        high = min(start + nbytes, place.start + place.nbytes)
        if low < high:
            yield low - start, place.offset + low - place.start, high - low


class Output:
    """One output file: bytes written from memory, or copied by the kernel where the file systems allow it."""

    def __init__(self, fd: int, worker: Worker, tally: Tally) -> None:
        self._fd = fd
        self._worker = worker
        self._tally = tally
        self._writeback = Writeback(fd)
        self._able = hasattr(os, "copy_file_range")

    def write(self, data: memoryview, to: int) -> None:
        """Have ``data`` written at offset ``to``; it must not change afterwards."""
        self._worker.put(partial(self._write, data, to))

    def _write(self, data: memoryview, to: int) -> None:
        write_at(self._fd, data, to)
        self._placed(len(data))

    def copy(self, files: SourceFiles, path: Path, offset: int, to: int, nbytes: int) -> None:
        """Have ``nbytes`` copied from ``offset`` of a source file to offset ``to``."""
        for at in range(0, nbytes, _STEP):
            self._worker.put(partial(self._copy, files, path, offset + at, to + at, min(_STEP, nbytes - at)))

    def _copy(self, files: SourceFiles, path: Path, offset: int, to: int, nbytes: int) -> None:
        while nbytes:
            step = nbytes
            done = self._try(files.fd(path), offset, to, step) if self._able else 0
            if not done:
                write_at(self._fd, files.view(path, offset, step), to)
                done = step
            self._placed(done)
            offset, to, nbytes = offset + done, to + done, nbytes - done

    def _placed(self, nbytes: int) -> None:
        self._tally.moved(nbytes)
        self._writeback.placed(nbytes)

    def _try(self, source: int, offset: int, to: int, nbytes: int) -> int:
        """One copy_file_range; 0 when this kernel or these file systems cannot."""
        try:
            return os.copy_file_range(source, self._fd, nbytes, offset, to)
        except OSError as e:
            if e.errno not in _CANNOT:
                raise
            self._able = False
            return 0
