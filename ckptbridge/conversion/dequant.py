"""Block-scaled float8 to a wider float: each word times its block's scale, in float32.

``value = float8_e4m3fn(word) * scale[row // rows, column // columns]``, rounded to the target to nearest
even. (DeepSeek-V3's files call the factor ``weight_scale_inv``; it is multiplied all the same.)
A word has 256 values, so a block is one table look-up.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptbridge.conversion.cast import CastCount, cast_words
from ckptbridge.conversion.gather import Copy
from ckptbridge.conversion.plan import Scale
from ckptbridge.conversion.sources import SourceFiles, assign
from ckptbridge.formats.dtypes import BY_NAME, DType
from ckptbridge.formats.tensors import TensorSource, contiguous_strides

Words = npt.NDArray[Any]

_FLOAT32 = BY_NAME["float32"]


def dequantise(
    part: Copy, source: TensorSource, scale: Scale, files: SourceFiles, target: DType, out: Words, base: int
) -> CastCount:
    """Carry out a copy from a 2-D quantised tensor into ``out``, whose element 0 is target element ``base``.

    Works on the smallest rectangle of the source that holds the copy's elements.
    """
    columns = source.spec.shape[1]
    rectangle = _rectangle(part, columns)
    words, lost = _rectangle_words(rectangle, source, scale, files, target)
    width = rectangle[3] - rectangle[2]
    # The same elements in the rectangle: strides of whole rows and of columns within one.
    strides = tuple(s // columns * width if s >= columns else s for s in part.src_strides)
    row, column = divmod(part.src, columns)
    first = (row - rectangle[0]) * width + column - rectangle[2]
    item = target.itemsize
    src: Words = np.ndarray(part.sizes, target.word, words.data, first * item, tuple(s * item for s in strides))
    dst: Words = np.ndarray(
        part.sizes, target.word, out.data, (part.dst - base) * item, tuple(s * item for s in part.dst_strides)
    )
    assign(dst, src)
    return lost


def _rectangle(part: Copy, columns: int) -> tuple[int, int, int, int]:
    """The rows [r0, r1) and columns [c0, c1) that a copy reads. Its axes are along rows or along columns."""
    row, column = divmod(part.src, columns)
    axes = list(zip(part.sizes, part.src_strides, strict=True))
    rows = sum((n - 1) * (s // columns) for n, s in axes if s >= columns)
    across = sum((n - 1) * s for n, s in axes if s < columns)
    return row, row + rows + 1, column, column + across + 1


def _rectangle_words(
    rectangle: tuple[int, int, int, int], source: TensorSource, scale: Scale, files: SourceFiles, target: DType
) -> tuple[Words, CastCount]:
    r0, r1, c0, c1 = rectangle
    columns = source.spec.shape[1]
    segment = source.segments[0]
    at = segment.offset + source.offset + r0 * columns + c0
    words: Words = np.ndarray((r1 - r0, c1 - c0), np.uint8, files.map(segment.path), at, (columns, 1))
    result = np.empty((r1 - r0, c1 - c0), target.word)
    lost = CastCount()
    scales = _scales(scale, files)
    for block_row in range(r0 // scale.rows, -(-r1 // scale.rows)):
        tables, losses = _tables(scales[block_row, c0 // scale.columns : -(-c1 // scale.columns)], target)
        top = max(block_row * scale.rows, r0) - r0
        bottom = min((block_row + 1) * scale.rows, r1) - r0
        for k, block_column in enumerate(range(c0 // scale.columns, -(-c1 // scale.columns))):
            left = max(block_column * scale.columns, c0) - c0
            right = min((block_column + 1) * scale.columns, c1) - c0
            tile = words[top:bottom, left:right]
            result[top:bottom, left:right] = tables[k][tile]
            if losses[k] is not None:
                lost += _lost(tile, losses[k])
    return result, lost


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


def _tables(scales: npt.NDArray[np.float32], target: DType) -> tuple[list[Words], list[Words | None]]:
    """For each scale: the target words of all 256 source words, and which of these lose their value."""
    values = _float8_values()
    with np.errstate(all="ignore"):
        products = values[None, :] * scales[:, None]
    flat, _ = cast_words(np.ascontiguousarray(products).reshape(-1).view(np.uint32), _FLOAT32, target)
    tables = list(flat.reshape(products.shape))
    back, _ = cast_words(flat, target, _FLOAT32) if target.itemsize <= 4 else (products.view(np.uint32), None)
    result = back.reshape(-1).view(np.float32).reshape(products.shape)
    finite = np.isfinite(values)[None, :] & np.isfinite(scales)[:, None]
    nonzero = (values != 0)[None, :] & (scales != 0)[:, None]
    code = (finite & np.isinf(result)).astype(np.uint8) + 2 * (finite & nonzero & (result == 0)).astype(np.uint8)
    return tables, [row if row.any() else None for row in code]


def _lost(tile: Words, code: Words | None) -> CastCount:
    if code is None:
        return CastCount()
    counts = np.bincount(tile.reshape(-1), minlength=256)
    return CastCount(int(counts[code == 1].sum()), int(counts[code == 2].sum()))
