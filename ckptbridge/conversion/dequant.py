"""Block-scaled float8 to a wider float: each word times its block's scale, in float32.

``value = float8_e4m3fn(word) * scale[row // rows, column // columns]``, rounded to the target to nearest
even. (DeepSeek-V3's files call the factor ``weight_scale_inv``; it is multiplied all the same.)
A word has 256 values, so a block is one table look-up.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
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
    block_rows = range(r0 // scale.rows, -(-r1 // scale.rows))
    block_columns = range(c0 // scale.columns, -(-c1 // scale.columns))
    # All look-up tables of the rectangle at once: building them is short only when numpy does many together.
    own = _scales(scale, files)[block_rows.start : block_rows.stop, block_columns.start : block_columns.stop]
    tables, losses = _tables(own.reshape(-1), target)
    for k, (row, column) in enumerate(product(block_rows, block_columns)):
        across = slice(max(column * scale.columns, c0) - c0, min((column + 1) * scale.columns, c1) - c0)
        down = slice(max(row * scale.rows, r0) - r0, min((row + 1) * scale.rows, r1) - r0)
        tile = words[down, across]
        # All indices are bytes, so none is out of range; "clip" spares numpy the check and a buffer.
        np.take(tables[k], tile, out=result[down, across], mode="clip")
        if losses is not None:
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
