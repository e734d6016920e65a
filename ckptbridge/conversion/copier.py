"""Putting bytes into place: runs move within the kernel, boxes through one buffer."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from ckptbridge.conversion.cast import CastCount
from ckptbridge.conversion.gather import Box, Piece, Run
from ckptbridge.conversion.plan import OutputFile, Record
from ckptbridge.conversion.sources import SourceFiles
from ckptbridge.conversion.tally import Seen, Tally
from ckptbridge.conversion.words import Filled, fill, record_pieces
from ckptbridge.conversion.worker import Worker
from ckptbridge.conversion.writeback import Writeback
from ckptbridge.formats.tensors import Place

# What a kernel or file system says when it cannot copy between these two files.
# EIO may be either file's; plain reads and writes tell which.
_CANNOT = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM, errno.EIO}
_GATHERERS = 2
_AHEAD = 4  # pieces gathered in advance
_WAITING = 4  # buffers that may wait to be written
_STEP = 32 << 20  # bytes a copy moves at a time, so that progress shows and signals are seen
_BUFFER = 1 << 20  # bytes of a copy through memory: they stay in the cache


def lay_out(file: OutputFile, fd: int) -> None:
    """Give an output file its size and its fixed bytes."""
    os.ftruncate(fd, file.layout.size)
    for offset, data in file.layout.fixed:
        write_at(fd, data, offset)


def write_records(file: OutputFile, first: int, last: int, fd: int, files: SourceFiles, tally: Tally) -> CastCount:
    """Write the records from ``first`` up to ``last`` of an output file; returns what casts lost."""
    lost = CastCount()
    # Gathering on two threads and writing on another: the kernel writes one file on one thread.
    with Worker("writer", _WAITING) as worker, ThreadPoolExecutor(_GATHERERS, "gather") as pool:
        output = Output(fd, worker, tally)
        pieces = _pieces(file, first, last)
        for at, filled in ahead(pool, partial(_fill, files), pieces, _AHEAD):
            if at.first:
                seen = tally.begin()
            of_piece = _place(at, filled, files, seen, output)
            if of_piece:
                lost += of_piece
                tally.lossy(at.record)
            if at.last:
                tally.end(at.record, seen)
                worker.put(partial(files.release, at.record.sources))
    return lost


@dataclass(frozen=True, slots=True)
class _At:
    """A piece of a record (none of an empty tensor), where the record goes, and whether it is its first or last."""

    record: Record
    places: Sequence[Place]
    piece: Piece | None
    first: bool
    last: bool


def _pieces(file: OutputFile, begin: int, end: int) -> Iterator[_At]:
    for record, places in zip(file.records[begin:end], file.layout.places[begin:end], strict=True):
        first = True
        held: Piece | None = None
        for piece in record_pieces(record):
            if held is not None:
                yield _At(record, places, held, first, False)
                first = False
            held = piece
        yield _At(record, places, held, first, True)


def _fill(files: SourceFiles, at: _At) -> Filled | None:
    return fill(at.record, at.piece, files) if isinstance(at.piece, Box) else None


_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


def ahead(
    pool: ThreadPoolExecutor, make: Callable[[_Item], _Made], items: Iterable[_Item], count: int
) -> Iterator[tuple[_Item, _Made]]:
    """Each item with what ``make`` gives for it, in order, at most ``count`` of them made in advance."""
    waiting: deque[tuple[_Item, Future[_Made]]] = deque()
    for item in items:
        waiting.append((item, pool.submit(make, item)))
        if len(waiting) > count:
            item, made = waiting.popleft()
            yield item, made.result()
    for item, made in waiting:
        yield item, made.result()


def _place(at: _At, filled: Filled | None, files: SourceFiles, seen: Seen, output: Output) -> CastCount:
    """Have a piece written, and seen by the digest."""
    if filled is not None:
        data = filled.data
        seen.update(data)
        for start, to, count in _spread(at.places, filled.start, len(data)):
            output.write(data[start : start + count], to)
        return filled.lost
    if isinstance(at.piece, Run):
        begin = at.piece.dst * at.record.spec.dtype.itemsize
        for path, offset, nbytes in files.runs(at.record.sources[at.piece.source], at.piece.src, at.piece.numel):
            # In steps: what has just been copied is digested while it is at hand.
            for step in range(0, nbytes, _STEP):
                count = min(_STEP, nbytes - step)
                for start, to, part in _spread(at.places, begin + step, count):
                    output.copy(files, path, offset + step + start, to, part)
                seen.update(files.view(path, offset + step, count))
            begin += nbytes
    return CastCount()


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view = view[done:]
        offset += done


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
        self._buffer = memoryview(bytearray(_BUFFER))  # the writer's alone

    def write(self, data: memoryview, to: int) -> None:
        """Have ``data`` written at offset ``to``; it must not change afterwards."""
        self._worker.put(partial(self._write, data, to))

    def _write(self, data: memoryview, to: int) -> None:
        write_at(self._fd, data, to)
        self._placed(len(data))

    def copy(self, files: SourceFiles, path: Path, offset: int, to: int, nbytes: int) -> None:
        """Have ``nbytes`` copied from ``offset`` of a source file to offset ``to``."""
        self._worker.put(partial(self._copy, files, path, offset, to, nbytes))

    def _copy(self, files: SourceFiles, path: Path, offset: int, to: int, nbytes: int) -> None:
        while nbytes:
            done = self._try(files.fd(path), offset, to, nbytes) if self._able else 0
            if not done:  # not able, or the source has become shorter
                buffer = self._buffer[: min(nbytes, _BUFFER)]
                done = files.read_into(buffer, path, offset)
                write_at(self._fd, buffer[:done], to)
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
