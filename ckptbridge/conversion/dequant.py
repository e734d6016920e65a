"""Block-scaled float8 to a wider float: each word times its block's scale, in float32.

``value = float8_e4m3fn(word) * scale[row // rows, column // columns]``, rounded to the target to nearest
even. (DeepSeek-V3's files call the factor ``weight_scale_inv``; it is multiplied all the same.)
A word has 256 values, so a block is one table look-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptbridge.conversion.cast import CastCount, cast_words
from ckptbridge.conversion.gather import Copy
from ckptbridge.conversion.plan import Scale
from ckptbridge.conversion.sources import SourceFiles
from ckptbridge.formats.dtypes import BY_NAME, DType
from ckptbridge.formats.tensors import TensorSource, contiguous_strides

Words = npt.NDArray[Any]

_FLOAT32 = BY_NAME["float32"]


def dequantise(
    part: Copy, source: TensorSource, scale: Scale, files: SourceFiles, target: DType, out: Words, base: int
) -> CastCount:
    """Carry out a copy from a 2-D quantised tensor into ``out``, whose element 0 is target element ``base``."""
    columns = source.spec.shape[1]
    segment = source.segments[0]
    # An axis of the copy goes along rows of the source or along columns; one of each, the longest, makes planes.
    axes = sorted(range(len(part.sizes)), key=lambda k: -part.sizes[k])
    down = [k for k in axes if part.src_strides[k] >= columns][:1]
    across = [k for k in axes if part.src_strides[k] < columns][:1]
    rest = [k for k in axes if k not in (*down, *across)]
    src: Words = np.ndarray(part.sizes, np.uint8, files.map(segment.path), segment.offset + part.src, part.src_strides)
    item = target.itemsize
    dst: Words = np.ndarray(
        part.sizes, target.word, out.data, (part.dst - base) * item, tuple(s * item for s in part.dst_strides)
    )
    src, dst = (np.expand_dims(a.transpose(*rest, *down, *across), _missing(down, across)) for a in (src, dst))
    steps = [part.src_strides[down[0]] // columns if down else 1, part.src_strides[across[0]] if across else 1]
    blocks = _Blocks(part, columns, scale, files, target)
    lost = CastCount()
    for outer in np.ndindex(src.shape[:-2]):
        start = part.src + sum(i * part.src_strides[k] for i, k in zip(outer, rest, strict=True))
        lost += _plane(dst[outer], src[outer], divmod(start, columns), steps, blocks)
    return lost


def _missing(down: Sequence[int], across: Sequence[int]) -> tuple[int, ...]:
    """The axes to add, so that there are two at the end."""
    return tuple(k for k, found in ((-2, down), (-1, across)) if not found)


def _plane(dst: Words, src: Words, start: tuple[int, int], steps: Sequence[int], blocks: _Blocks) -> CastCount:
    """Look up a plane of words that begins at row and column ``start`` and goes ``steps`` apart, block by block."""
    lost = CastCount()
    turned = dst.strides[0] < dst.strides[1]
    for row, i, i_end in _within(start[0], steps[0], src.shape[0], blocks.scale.rows):
        for column, j, j_end in _within(start[1], steps[1], src.shape[1], blocks.scale.columns):
            tile, place = src[i:i_end, j:j_end], dst[i:i_end, j:j_end]
            if turned:  # the look-up transposes on the way, from a tile that is at hand in one piece
                tile, place = np.ascontiguousarray(tile).T, place.T
            table, losses = blocks.table(row, column)
            # All indices are bytes, so none is out of range; "clip" spares numpy the check.
            place[...] = table.take(tile, mode="clip")
            if losses is not None:
                lost += _lost(tile, losses)
    return lost


def _within(start: int, step: int, count: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Cut positions ``start + k * step`` at multiples of ``length``: (multiple, first k, end)."""
    k = 0
    while k < count:
        multiple = (start + k * step) // length
        end = min(count, -(-((multiple + 1) * length - start) // step))
        yield multiple, k, end
        k = end


class _Blocks:
    """The look-up tables of the blocks that a copy reads, all made at once: many together are little work for numpy."""

    def __init__(self, part: Copy, columns: int, scale: Scale, files: SourceFiles, target: DType) -> None:
        self.scale = scale
        row, column = divmod(part.src, columns)
        axes = list(zip(part.sizes, part.src_strides, strict=True))
        last_row = row + sum((n - 1) * (s // columns) for n, s in axes if s >= columns)
        last_column = column + sum((n - 1) * s for n, s in axes if s < columns)
        self._row, self._column = row // scale.rows, column // scale.columns
        own = _scales(scale, files)[
            self._row : last_row // scale.rows + 1, self._column : last_column // scale.columns + 1
        ]
        self._width = own.shape[1]
        self._tables, self._losses = _tables(own.reshape(-1), target)

    def table(self, row: int, column: int) -> tuple[Words, Words | None]:
        """A block's target words of all 256 source words, and which of these lose their value, if any in sight do."""
        k = (row - self._row) * self._width + column - self._column
        return self._tables[k], None if self._losses is None else self._losses[k]


def _scales(scale: Scale, files: SourceFiles) -> npt.NDArray[np.float32]:
    """The whole scale tensor as float32: one value for each block, so it is small."""
    spec = scale.tensor.spec
    strides = contiguous_strides(spec.shape)
    raw = np.empty(spec.numel, spec.dtype.word)
    whole = Copy(0, spec.shape, scale.tensor.element_strides, strides, scale.tensor.offset, 0)
    files.copy(scale.tensor, whole, raw, 0)
    words, _ = cast_words(raw, spec.dtype, _FLOAT32)
    return words.view(np.float32).reshape(spec.shape)


@lru_cache(maxsize=1)
def _float8_values() -> npt.NDArray[np.float32]:
    words, _ = cast_words(np.arange(256, dtype=np.uint8), BY_NAME["float8_e4m3fn"], _FLOAT32)
    return words.view(np.float32)


def _tables(scales: npt.NDArray[np.float32], target: DType) -> tuple[Words, Words | None]:
    """For each scale the target words of all 256 source words; and which of these lose their value, if any do.

    The second array holds 1 where a finite product became infinite and 2 where a non-zero one became zero.
    """
    values = _float8_values()
    with np.errstate(all="ignore"):
        products = values[None, :] * scales[:, None]
    flat, _ = cast_words(np.ascontiguousarray(products).reshape(-1).view(np.uint32), _FLOAT32, target)
    back, _ = cast_words(flat, target, _FLOAT32) if target.itemsize <= 4 else (products.view(np.uint32), None)
    result = back.reshape(-1).view(np.float32).reshape(products.shape)
    finite = np.isfinite(values)[None, :] & np.isfinite(scales)[:, None]
    nonzero = (values != 0)[None, :] & (scales != 0)[:, None]
    code = (finite & np.isinf(result)).astype(np.uint8) + 2 * (finite & nonzero & (result == 0)).astype(np.uint8)
    return flat.reshape(products.shape), code if code.any() else None


def _lost(tile: Words, code: Words) -> CastCount:
    counts = np.bincount(tile.reshape(-1), minlength=256)
    return CastCount(int(counts[code == 1].sum()), int(counts[code == 2].sum()))
