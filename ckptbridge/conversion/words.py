"""A record's bytes, piece by piece: gathered, cast or dequantised, in buffers of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptbridge.conversion.cast import CastCount, cast_into, cast_words
from ckptbridge.conversion.dequant import dequantise
from ckptbridge.conversion.gather import BUFFER_BYTES, Box, Copy, Piece, Run, copies, pieces
from ckptbridge.conversion.plan import Record
from ckptbridge.conversion.sources import SourceFiles
from ckptbridge.formats.dtypes import DType

Words = npt.NDArray[Any]

# Below this a range is gathered with its neighbours: a system call of its own would cost more.
MIN_RUN_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Filled:
    """Target bytes from byte ``start`` on, and what their cast lost."""

    start: int
    words: Words
    lost: CastCount

    @property
    def data(self) -> memoryview:
        return self.words.view(np.uint8).data


def record_pieces(record: Record, buffer_bytes: int = BUFFER_BYTES) -> Iterator[Piece]:
    """The record in pieces, in target order; runs only where the words do not change."""
    widest = max([record.spec.dtype.itemsize, *(s.spec.dtype.itemsize for s in record.sources)])
    limit = max(1, buffer_bytes // widest)
    scaled = [k for k, scale in enumerate(record.scales) if scale is not None]
    parts = copies(record.blocks, record.sources, record.spec.shape, scaled)
    changed = record.cast or bool(scaled)
    # Words that change are always gathered, so no run is long enough.
    min_run = record.spec.numel + 1 if changed else MIN_RUN_BYTES // record.spec.dtype.itemsize
    if len(parts) == 1 and not changed:
        min_run = 1  # a plain rename is one run, however short
    return pieces(parts, limit, min_run)


def fill(record: Record, piece: Piece, files: SourceFiles) -> Filled:
    """Gather a piece into a buffer of target words, which is used again when all that was returned is gone."""
    box = piece if isinstance(piece, Box) else _as_box(piece)
    target = record.spec.dtype
    out = files.buffers.empty(box.numel, target.word)
    lost = CastCount()
    by_dtype: dict[DType, list[Copy]] = {}
    for part in box.copies:
        scale = record.scales[part.source] if record.scales else None
        source = record.sources[part.source]
        if scale is not None:
            lost += dequantise(part, source, scale, files, target, out, box.dst)
        elif source.spec.dtype == target:
            files.copy(source, part, out, box.dst)
        else:
            by_dtype.setdefault(source.spec.dtype, []).append(part)
    for dtype, parts in by_dtype.items():
        lost += _cast(record, parts, dtype, files, out, box)
    return Filled(box.dst * target.itemsize, out, lost)


def _as_box(run: Run) -> Box:
    return Box(run.dst, run.numel, (Copy(run.source, (run.numel,), (1,), (1,), run.src, run.dst),))


def _cast(record: Record, parts: list[Copy], dtype: DType, files: SourceFiles, out: Words, box: Box) -> CastCount:
    """Gather in the source's words, cast, and put into place."""
    target = record.spec.dtype
    if sum(p.numel for p in parts) == box.numel:
        gathered = files.buffers.empty(box.numel, dtype.word)
        for part in parts:
            files.copy(record.sources[part.source], part, gathered, box.dst)
        return _cast_steps(gathered, dtype, target, out, files)
    lost = CastCount()
    for part in parts:  # sources of several dtypes in one tensor: each by itself, densely
        dense = _dense(part)
        own = np.empty(part.numel, dtype.word)
        files.copy(record.sources[part.source], dense, own, 0)
        cast, count = cast_words(own, dtype, target)
        lost += count
        strides = tuple(s * target.itemsize for s in part.dst_strides)
        place: Words = np.ndarray(part.sizes, target.word, out.data, (part.dst - box.dst) * target.itemsize, strides)
        place[...] = cast.reshape(part.sizes)
    return lost


_CAST_STEP = 1 << 17  # elements: the passes of a cast then stay in the cache


def _cast_steps(words: Words, source: DType, target: DType, out: Words, files: SourceFiles) -> CastCount:
    lost = CastCount()
    for at in range(0, words.size, _CAST_STEP):
        step = slice(at, at + _CAST_STEP)
        lost += cast_into(words[step], source, target, out[step], files.buffers.empty)
    return lost


def _dense(part: Copy) -> Copy:
    """The same elements, put contiguously from element 0 in the order of the copy's axes."""
    strides = [1] * len(part.sizes)
    for k in range(len(strides) - 2, -1, -1):
        strides[k] = strides[k + 1] * part.sizes[k + 1]
    return replace(part, dst_strides=tuple(strides), dst=0)
