"""Casting of floating words: round to nearest even, NaN kept, what is lost counted.

The only place besides :mod:`ckptbridge.conversion.dequant` that looks at values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptbridge.errors import DTypeError
from ckptbridge.formats.dtypes import BY_NAME, DType

Words = npt.NDArray[Any]

FLOAT_TARGETS = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class CastCount:
    """What a cast lost: finite values that became infinite, and non-zero values that became zero."""

    overflow: int = 0
    underflow: int = 0

    def __add__(self, other: CastCount) -> CastCount:
        return CastCount(self.overflow + other.overflow, self.underflow + other.underflow)

    def __bool__(self) -> bool:
        return bool(self.overflow or self.underflow)


def check_cast(source: DType, target: DType) -> None:
    """Raise DTypeError unless words of ``source`` can be cast to ``target``."""
    if source == target:
        return
    if source.floating and target.name in FLOAT_TARGETS:
        return
    if source.kind in ("int", "uint") and target.kind in ("int", "uint"):
        return
    raise DTypeError(
        f"There is no cast from {source} to {target}.",
        remedy=f"Cast floating tensors to one of {', '.join(FLOAT_TARGETS)}.",
    )


def lossless(source: DType, target: DType) -> bool:
    """Whether every value of ``source`` is a value of ``target``."""
    if source == target or target.name == "float64":
        return True
    if source.kind in ("int", "uint"):
        signs_fit = source.kind == target.kind or (source.kind == "uint" and target.itemsize > source.itemsize)
        return signs_fit and target.itemsize >= source.itemsize
    return target.name == "float32" and source.name != "float64"


def cast_words(words: Words, source: DType, target: DType) -> tuple[Words, CastCount]:
    """``words`` (contiguous, storage words of ``source``) as storage words of ``target``.

    Floats round to nearest, ties to even; NaN stays NaN; infinities stay. Integers must fit:
    DTypeError otherwise.
    """
    if source == target:
        return words, CastCount()
    if source.kind in ("int", "uint"):
        return _cast_integers(words, source, target), CastCount()
    result = _caster(source.name, target.name)(words)
    return result, CastCount() if lossless(source, target) else _count(words, source, result, target)


def _cast_integers(words: Words, source: DType, target: DType) -> Words:
    values = words.view(source.name)
    info = np.iinfo(target.name)
    if values.size and (int(values.min()) < info.min or int(values.max()) > info.max):
        raise DTypeError(f"Integers up to {values.max()} do not fit into {target}.", remedy="Keep the dtype as it is.")
    return values.astype(target.name).view(target.word)


def _count(words: Words, source: DType, result: Words, target: DType) -> CastCount:
    magnitude_in, inf_in = _magnitude(words, source)
    magnitude_out, inf_out = _magnitude(result, target)
    # NaN has a magnitude above infinity's on both sides, and stays out of both counts.
    overflow = np.count_nonzero(magnitude_out == inf_out)
    if overflow:
        overflow -= np.count_nonzero(magnitude_in == inf_in)
    underflow = result.size - np.count_nonzero(magnitude_out)
    if underflow:
        underflow -= words.size - np.count_nonzero(magnitude_in)
    return CastCount(int(overflow), int(underflow))


def _magnitude(words: Words, dtype: DType) -> tuple[Words, int]:
    """Words without their sign, and the word of infinity (-1 where the type has none)."""
    infinity = {
        "float64": 0x7FF0 << 48,
        "float32": 0x7F80 << 16,
        "float16": 0x7C00,
        "bfloat16": 0x7F80,
        "float8_e5m2": 0x7C,
    }.get(dtype.name, -1)
    return words & words.dtype.type((1 << (8 * dtype.itemsize - 1)) - 1), infinity


def _bfloat16_to_float32(words: Words) -> Words:
    return words.astype(np.uint32) << np.uint32(16)


def _float32_to_bfloat16(words: Words) -> Words:
    bits = words.astype(np.uint32, copy=False)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    result = rounded.astype(np.uint16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if nan.any():
        # Rounding could carry a NaN into infinity: keep its upper half and make it quiet.
        result[nan] = (bits[nan] >> np.uint32(16)).astype(np.uint16) | np.uint16(0x40)
    return result


def _to_odd_float32(words: Words) -> Words:
    """float64 to float32 rounded to odd, so that a second rounding to a narrower type is exact."""
    values = words.view(np.float64)
    with np.errstate(all="ignore"):
        near = values.astype(np.float32)
        inexact = near.astype(np.float64) != values
        above = np.abs(near.astype(np.float64)) > np.abs(values)
    bits = near.view(np.uint32)
    nan = np.isnan(values)
    bits = np.where(above & ~nan, bits - np.uint32(1), bits)
    return np.where(inexact & ~nan, bits | np.uint32(1), bits)


def _through_numpy(source: str, target: str) -> Callable[[Words], Words]:
    def cast(words: Words) -> Words:
        with np.errstate(all="ignore"):  # what overflows is counted, not warned about
            return words.view(source).astype(target).view(BY_NAME[target].word)

    return cast


def _eight_bit_table(source: str) -> Words:
    """The float32 words of all 256 values of an 8-bit float."""
    import ml_dtypes

    values: Words = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, source)).astype(np.float32)
    return values.view(np.uint32)


@lru_cache(maxsize=64)
def _caster(source: str, target: str) -> Callable[[Words], Words]:
    if BY_NAME[source].itemsize == 1:
        table = _eight_bit_table(source)
        values = table if target == "float32" else cast_words(table, BY_NAME["float32"], BY_NAME[target])[0]
        return lambda words: values[words]
    if source == "bfloat16":
        if target == "float32":
            return _bfloat16_to_float32
        narrow = _through_numpy("float32", target)
        return lambda words: narrow(_bfloat16_to_float32(words))
    if target == "bfloat16":
        if source == "float32":
            return _float32_to_bfloat16
        if source == "float64":
            return lambda words: _float32_to_bfloat16(_to_odd_float32(words))
        widen = _through_numpy(source, "float32")
        return lambda words: _float32_to_bfloat16(widen(words))
    return _through_numpy(source, target)
