"""Source files while they are read: opened once, mapped, and checked against the plan.

Size and time of change are compared before each piece, so that a file that is cut or written to meanwhile ends the
conversion at once. What remains is the moment between that look and the reading of the piece (a few megabytes): pages
that vanish within it are a SIGBUS, which ends the process as a SIGKILL would. Plain reads would close that gap and cost
a second copy of every byte.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptbridge.conversion.buffers import Buffers
from ckptbridge.conversion.gather import Copy, within_segments
from ckptbridge.conversion.plan import FileStat
from ckptbridge.errors import SourceChangedError
from ckptbridge.formats.tensors import TensorSource

Words = npt.NDArray[Any]


class Stopped(Exception):
    """Raised in threads that still ask for bytes after :meth:`SourceFiles.stop`; nobody waits for them any more."""


class SourceFiles:
    """Opens the files of a plan on first use and hands out their bytes without reading them.

    Raises SourceChangedError when a file is gone, or is not the one that was planned.
    """

    def __init__(self, stats: Mapping[Path, FileStat]) -> None:
        self._stats = stats
        self._open: dict[Path, tuple[int, mmap.mmap | None]] = {}
        self._stopped = False
        self.buffers = Buffers()  # for what is made of these files

    def __enter__(self) -> SourceFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for fd, _ in self._open.values():
            os.close(fd)
        # The maps close when the last array over them goes; closing them here could leave arrays behind.
        self._open.clear()

    def stop(self) -> None:
        """Give out no more bytes: threads that read end at their next piece."""
        self._stopped = True

    def fd(self, path: Path) -> int:
        """A descriptor of the file, for copies within the kernel."""
        return self._file(path)[0]

    def map(self, path: Path) -> mmap.mmap | bytes:
        """The file's bytes, mapped."""
        return self._file(path)[1] or b""

    def _file(self, path: Path) -> tuple[int, mmap.mmap | None]:
        found = self._open.get(path)
        if found is None:
            found = self._open[path] = self._opened(path)
        return found

    def _opened(self, path: Path) -> tuple[int, mmap.mmap | None]:
        fd = -1
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._check(path, os.fstat(fd))
            size = self._stats[path].size
            return fd, mmap.mmap(fd, 0, prot=mmap.PROT_READ) if size else None
        except BaseException as e:
            if fd >= 0:
                os.close(fd)
            if not isinstance(e, OSError):
                raise
            many = e.errno in (errno.EMFILE, errno.ENFILE)
            raise SourceChangedError(
                f"A file cannot be opened any more: {e.strerror}.",
                remedy="Allow more open files (ulimit -n 65536)." if many else "Run the command again.",
                file=path,
            ) from None

    def _ready(self, path: Path) -> None:
        """Raise unless the file may be read and is the one that was planned."""
        if self._stopped:
            raise Stopped
        self._check(path, os.fstat(self._file(path)[0]))

    def _check(self, path: Path, stat: os.stat_result) -> None:
        planned = self._stats[path]
        if (stat.st_size, stat.st_mtime_ns) != (planned.size, planned.mtime_ns):
            raise SourceChangedError(
                "A file changed while it was read "
                f"(planned {planned.size} bytes, now {stat.st_size}; or its time of change differs).",
                remedy="Run the command again when nothing writes to the file.",
                file=path,
            )

    def check_unchanged(self) -> None:
        """Raise SourceChangedError unless all files that were used are still what they were."""
        for path, (fd, _) in self._open.items():
            self._check(path, os.fstat(fd))

    def release(self, sources: Iterable[TensorSource]) -> None:
        """Unmap the pages of sources that have passed; the file stays cached where the kernel likes."""
        for source in sources:
            for segment in source.segments:
                found = self._open.get(segment.path)
                if found is not None and found[1] is not None:
                    start = segment.offset // mmap.PAGESIZE * mmap.PAGESIZE
                    found[1].madvise(mmap.MADV_DONTNEED, start, segment.offset + segment.nbytes - start)

    # --- bytes and words ---

    def runs(self, source: TensorSource, element: int, numel: int) -> Iterator[tuple[Path, int, int]]:
        """The file ranges (path, offset, nbytes) that hold storage elements from ``element`` on."""
        at = element * source.spec.dtype.itemsize
        left = numel * source.spec.dtype.itemsize
        for segment in source.segments:
            if at < segment.nbytes:
                count = min(left, segment.nbytes - at)
                yield segment.path, segment.offset + at, count
                left -= count
                if not left:
                    return
                at = 0
            else:
                at -= segment.nbytes

    def view(self, path: Path, offset: int, nbytes: int) -> memoryview:
        """A run of a file's bytes, without copying them."""
        self._ready(path)
        return memoryview(self.map(path))[offset : offset + nbytes]

    def read_into(self, buffer: memoryview, path: Path, offset: int) -> int:
        """Fill ``buffer`` from ``offset`` of a file as far as one read goes; returns the number of bytes, never 0."""
        self._ready(path)
        try:
            done = os.preadv(self.fd(path), [buffer], offset)
        except OSError as e:
            raise SourceChangedError(
                f"A file cannot be read: {e.strerror}.",
                remedy="See what the system's log says of the disk or server, and run again.",
                file=path,
                offset=offset,
            ) from None
        if not done:
            raise SourceChangedError(
                "A file became shorter while it was read.",
                remedy="Run the command again when nothing writes to the file.",
                file=path,
                offset=offset,
            )
        return done

    def copy(self, source: TensorSource, part: Copy, out: Words, base: int) -> None:
        """Carry out a strided copy into ``out``, whose element 0 is the target's element ``base``."""
        if len(source.segments) == 1:
            self._copy_segment(source, 0, 0, part, out, base)
            return
        itemsize = source.spec.dtype.itemsize
        bounds = list(accumulate(s.nbytes // itemsize for s in source.segments))
        for k, piece in within_segments(part, bounds):
            self._copy_segment(source, k, bounds[k - 1] if k else 0, piece, out, base)

    def _copy_segment(self, source: TensorSource, k: int, first: int, part: Copy, out: Words, base: int) -> None:
        segment = source.segments[k]
        self._ready(segment.path)
        word = source.spec.dtype.word
        sizes, src_strides, dst_strides = part.sizes, part.src_strides, part.dst_strides
        src_at = segment.offset + (part.src - first) * word.itemsize
        dst_at = (part.dst - base) * word.itemsize
        if sizes and src_strides[-1] == dst_strides[-1] == 1:
            # Whole rows are copied as bytes: a file's rows need not be aligned to their words.
            sizes = (*sizes[:-1], sizes[-1] * word.itemsize)
            src_bytes = (*(s * word.itemsize for s in src_strides[:-1]), 1)
            dst_bytes = (*(s * word.itemsize for s in dst_strides[:-1]), 1)
            word = np.dtype(np.uint8)
        else:
            src_bytes = tuple(s * word.itemsize for s in src_strides)
            dst_bytes = tuple(s * word.itemsize for s in dst_strides)
        src: Words = np.ndarray(sizes, word, buffer=self.map(segment.path), offset=src_at, strides=src_bytes)
        dst: Words = np.ndarray(sizes, word, buffer=out.data, offset=dst_at, strides=dst_bytes)
        assign(dst, src)


_TILE = 256  # elements: a tile lies in the second-level cache
_TILE_PAD = 64  # bytes after each row of a tile: rows a power of two apart would fall on the same few cache lines
_UNTILED = 1 << 14  # elements: fewer are not worth a tile


def assign(dst: Words, src: Words) -> None:
    """``dst[...] = src``; a transposition goes in tiles, so that neither side strides through all of memory."""
    itemsize = src.dtype.itemsize
    inner = next((k for k in range(src.ndim - 1) if src.strides[k] == itemsize), None)
    if inner is None or src.strides[-1] == itemsize or src.size < _UNTILED:
        dst[...] = src
        return
    # The axis that is contiguous in the source comes next to the one that is contiguous in the target.
    dst, src = np.moveaxis(dst, inner, -2), np.moveaxis(src, inner, -2)
    rows, columns = dst.shape[-2:]
    tile = np.empty((min(columns, _TILE), min(rows, _TILE) + _TILE_PAD // itemsize), src.dtype)
    for outer in np.ndindex(dst.shape[:-2]):
        to, of = dst[outer], src[outer]
        for i in range(0, rows, _TILE):
            for j in range(0, columns, _TILE):
                # Through a copy of its own: a file's rows are pages apart, and are best read one at a time.
                part = of[i : i + _TILE, j : j + _TILE].T
                own = tile[: part.shape[0], : part.shape[1]]
                own[...] = part
                to[i : i + _TILE, j : j + _TILE] = own.T
