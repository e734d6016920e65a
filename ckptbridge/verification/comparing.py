"""One tensor against what it should be: bit for bit, a piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptbridge.conversion.cast import cast_words
from ckptbridge.conversion.gather import Piece, Run
from ckptbridge.conversion.plan import Record
from ckptbridge.conversion.reading import tensor_bytes
from ckptbridge.conversion.sources import SourceFiles
from ckptbridge.conversion.syscalls import same_bytes
from ckptbridge.conversion.words import fill, record_pieces
from ckptbridge.formats.dtypes import BY_NAME, DType
from ckptbridge.formats.tensors import TensorSource

Words = npt.NDArray[Any]

_BUFFER = 4 << 20
_STEP = 512 << 10  # bytes of each side that are digested, counted and compared while they are in the cache
_INFINITY = {"float64": 0x7FF0 << 48, "float32": 0x7F80 << 16, "float16": 0x7C00, "bfloat16": 0x7F80}


@dataclass
class Found:
    """What the comparison of one tensor has found so far.

    ``differing`` elements have other words, ``first`` is the flat index of the first of them.
    ``max_abs`` is the largest difference of values; None while nothing differs, and for good once
    one that differs is not a finite number. ``nan`` and ``inf`` count the values found.
    """

    differing: int = 0
    first: int | None = None
    max_abs: float | None = None
    nan: int = 0
    inf: int = 0
    _infinite: bool = False

    def compare(self, start: int, expected: Words, words: Words, dtype: DType) -> None:
        """Add elements from the flat index ``start`` on, both as storage words of ``dtype``."""
        # As bytes: words may lie at any offset of a file, and NumPy is slow where they are not aligned.
        equal = same_bytes(expected, words)
        infinity = _INFINITY.get(dtype.name)
        if infinity is not None:
            self._count(expected if equal and expected.flags.aligned else words, dtype, infinity)
        if equal:
            return
        differs = expected != words
        self.differing += int(np.count_nonzero(differs))
        if self.first is None:
            self.first = start + int(np.argmax(differs))
        size = _largest(expected[differs], words[differs], dtype)
        self._infinite |= size is None
        self.max_abs = None if size is None or self._infinite else max(size, self.max_abs or 0.0)

    def _count(self, words: Words, dtype: DType, infinity: int) -> None:
        sign = 1 << (8 * dtype.itemsize - 1)
        # Among signed words the positive values come last, among unsigned ones the negative values.
        signed = words.view(f"i{dtype.itemsize}")
        if words.size and (int(signed.max()) >= infinity or int(words.max()) >= sign | infinity):
            magnitude = words & words.dtype.type(sign - 1)
            self.inf += int(np.count_nonzero(magnitude == infinity))
            self.nan += int(np.count_nonzero(magnitude > infinity))

    def index_in(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Where in a tensor of ``shape`` the first difference is."""
        if self.first is None:
            return None
        return tuple(int(i) for i in np.unravel_index(self.first, shape)) if shape else ()


def compare_tensor(
    record: Record, actual: TensorSource, files: SourceFiles, seen: Callable[[memoryview], object]
) -> Found:
    """Compare ``actual`` with what ``record`` makes of its sources; shapes and dtypes are the same.

    ``seen`` is given all of ``actual``'s bytes, in order. A few buffers of 4 MiB, whatever the size.
    """
    there = _Stream(tensor_bytes(actual, files, _BUFFER), record.spec.dtype)
    found = Found()
    step = _STEP // record.spec.dtype.itemsize
    for piece in record_pieces(record, _BUFFER):
        for start, expected in _expected(record, piece, files):
            for at in range(0, expected.size, step):
                part = expected[at : at + step]
                words = there.take(part.size)
                seen(words.view(np.uint8).data)
                found.compare(start + at, part, words, record.spec.dtype)
    return found


def _expected(record: Record, piece: Piece, files: SourceFiles) -> Iterator[tuple[int, Words]]:
    """A piece of what should be there, as (first element, words)."""
    itemsize = record.spec.dtype.itemsize
    if not isinstance(piece, Run):
        filled = fill(record, piece, files)
        yield filled.start // itemsize, filled.words
        return
    at = piece.dst
    for path, offset, nbytes in files.runs(record.sources[piece.source], piece.src, piece.numel):
        for step in range(0, nbytes, _BUFFER):
            count = min(_BUFFER, nbytes - step)
            yield at, np.frombuffer(files.view(path, offset + step, count), record.spec.dtype.word)
            at += count // itemsize


class _Stream:
    """Takes given numbers of words from a tensor's pieces."""

    def __init__(self, pieces: Any, dtype: DType) -> None:
        self._pieces = pieces
        self._word = dtype.word
        self._rest: memoryview = memoryview(b"")

    def take(self, count: int) -> Words:
        """The next ``count`` words; without a copy where they lie in one piece."""
        need = count * self._word.itemsize
        if not self._rest and need:
            self._rest = next(self._pieces)
        if len(self._rest) >= need:
            data, self._rest = self._rest[:need], self._rest[need:]
            return np.frombuffer(data, self._word)
        out = bytearray(need)
        at = 0
        while at < need:
            if not self._rest:
                self._rest = next(self._pieces)
            part = min(need - at, len(self._rest))
            out[at : at + part] = self._rest[:part]
            self._rest = self._rest[part:]
            at += part
        return np.frombuffer(out, self._word)


def _largest(expected: Words, words: Words, dtype: DType) -> float | None:
    """The largest difference of values; None where the values are not all finite numbers."""
    if dtype.kind in ("int", "uint"):
        a, b = (w.view(dtype.name).astype(np.float64) for w in (expected, words))
    elif dtype.floating and dtype.name != "float8_e8m0fnu":
        a, b = (cast_words(w, dtype, BY_NAME["float64"])[0].view(np.float64) for w in (expected, words))
    else:
        return None
    with np.errstate(invalid="ignore"):
        distance = np.abs(a - b)
    return float(distance.max()) if np.isfinite(distance).all() else None
