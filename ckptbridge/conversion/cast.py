"""Casting of floating words: round to nearest even, NaN kept, what is lost counted.

The only place besides :mod:`ckptbridge.conversion.dequant` that looks at values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptbridge.errors import DTypeError
from ckptbridge.formats.dtypes import BY_NAME, DType, dtype_named

Words = npt.NDArray[Any]
Empty = Callable[[int, "np.dtype[Any]"], Words]  # an array of so many words
Caster = Callable[[Words, Words, Empty], None]  # from words, into words

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


def cast_target(name: str, sources: Iterable[DType]) -> DType:
    """The dtype that ``--dtype`` names, for floating tensors of ``sources``.

    Raises DTypeError, with the casts that there are, for a name that is no dtype or to which nothing is cast.
    """
    try:
        target = dtype_named(name)
        if target.name in FLOAT_TARGETS:
            return target
        floating = sorted({source.name for source in sources if source.floating}) or ["a floating dtype"]
        what = f"There is no cast from {' or '.join(floating)} to {target}."
    except DTypeError as error:
        what = error.what
    raise DTypeError(
        what, remedy=f"Give --dtype one of: {', '.join(FLOAT_TARGETS)}; or leave it out.", option=f"--dtype {name}"
    )


def check_cast(source: DType, target: DType, **where: object) -> None:
    """Raise DTypeError, with ``where``, unless words of ``source`` can be cast to ``target``."""
    if source == target:
        return
    if source.floating and target.name in FLOAT_TARGETS:
        return
    if source.kind in ("int", "uint") and target.kind in ("int", "uint"):
        return
    raise DTypeError(
        f"There is no cast from {source} to {target}.",
        remedy=f"Cast floating tensors to one of {', '.join(FLOAT_TARGETS)}.",
        **where,
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
    out = np.empty(words.shape, target.word)
    return out, cast_into(words, source, target, out, np.empty)


def cast_into(words: Words, source: DType, target: DType, out: Words, empty: Empty) -> CastCount:
    """Like :func:`cast_words` for another dtype, into ``out``; ``empty(count, word)`` gives what memory it takes."""
    if source.kind in ("int", "uint"):
        out[...] = _cast_integers(words, source, target)
        return CastCount()
    _caster(source.name, target.name)(words, out, empty)
    return CastCount() if lossless(source, target) else _count(words, source, out, target, empty)


def _cast_integers(words: Words, source: DType, target: DType) -> Words:
    values = words.view(source.name)
    info = np.iinfo(target.name)
    if values.size and (int(values.min()) < info.min or int(values.max()) > info.max):
        raise DTypeError(f"Integers up to {values.max()} do not fit into {target}.", remedy="Keep the dtype as it is.")
    return values.astype(target.name).view(target.word)


def _count(words: Words, source: DType, result: Words, target: DType, empty: Empty) -> CastCount:
    """Looks at the sources only where a result is infinite or zero: most often none is."""
    if not result.size:
        return CastCount()
    magnitude = np.bitwise_and(result, _unsigned(target), out=empty(result.size, target.word))
    overflow = underflow = 0
    if int(magnitude.max()) >= _INFINITY[target.name]:
        # NaN has a magnitude above infinity's on both sides, and stays out of both counts.
        overflow = np.count_nonzero(magnitude == _INFINITY[target.name])
        if source.name in _INFINITY:
            overflow -= np.count_nonzero((words & _unsigned(source)) == _INFINITY[source.name])
    zeros = result.size - np.count_nonzero(magnitude)
    if zeros:
        underflow = zeros - (words.size - np.count_nonzero(words & _unsigned(source)))
    return CastCount(int(overflow), int(underflow))


# The word of infinity of the types that have one.
_INFINITY = {
    "float64": 0x7FF0 << 48,
    "float32": 0x7F80 << 16,
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float8_e5m2": 0x7C,
}


def _unsigned(dtype: DType) -> Any:
    """A mask for all but the sign, as a word."""
    return dtype.word.type((1 << (8 * dtype.itemsize - 1)) - 1)


def _bfloat16_to_float32(words: Words, out: Words, empty: Empty) -> None:
    out[...] = words
    out <<= np.uint32(16)


def _float32_to_bfloat16(words: Words, out: Words, empty: Empty) -> None:
    """Few passes, all of them such that NumPy vectorises: half a unit is added, and what lay halfway made even."""
    if not words.size:
        return
    rounded = np.add(words, np.uint32(0x8000), out=empty(words.size, np.dtype(np.uint32)))
    np.copyto(out, rounded, casting="unsafe")  # the lower halves, for a look
    halfway = np.flatnonzero(out == 0)
    rounded >>= np.uint32(16)
    np.copyto(out, rounded, casting="unsafe")
    if halfway.size:
        out[halfway] &= np.uint16(0xFFFE)
    with np.errstate(all="ignore"):
        largest = words.view(np.float32).max()
    if np.isnan(largest):
        # Rounding could carry a NaN into infinity: keep its upper half and make it quiet.
        nan = (words & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[nan] = (words[nan] >> np.uint32(16)).astype(np.uint16) | np.uint16(0x40)


def _float64_to_bfloat16(words: Words, out: Words, empty: Empty) -> None:
    _float32_to_bfloat16(_to_odd_float32(words), out, empty)


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


def _through_numpy(source: str, target: str) -> Caster:
    def cast(words: Words, out: Words, empty: Empty) -> None:
        with np.errstate(all="ignore"):  # what overflows is counted, not warned about
            np.copyto(out.view(target), words.view(source), casting="unsafe")

    return cast


def _through_float32(first: Caster, second: Caster) -> Caster:
    def cast(words: Words, out: Words, empty: Empty) -> None:
        wide = empty(words.size, np.dtype(np.uint32))
        first(words, wide, empty)
        second(wide, out, empty)

    return cast


def _looked_up(source: str, target: str) -> Caster:
    """From an 8-bit float, which has 256 values."""
    import ml_dtypes

    floats: Words = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, source)).astype(np.float32)
    table, _ = cast_words(floats.view(np.uint32), BY_NAME["float32"], BY_NAME[target])

    def cast(words: Words, out: Words, empty: Empty) -> None:
        table.take(words, out=out, mode="clip")  # no byte is out of range

    return cast


@lru_cache(maxsize=64)
def _caster(source: str, target: str) -> Caster:
    if BY_NAME[source].itemsize == 1:
        return _looked_up(source, target)
    if source == "bfloat16":
        if target == "float32":
            return _bfloat16_to_float32
        return _through_float32(_bfloat16_to_float32, _through_numpy("float32", target))
    if target == "bfloat16":
        if source == "float32":
            return _float32_to_bfloat16
        if source == "float64":
            return _float64_to_bfloat16
        return _through_float32(_through_numpy(source, "float32"), _float32_to_bfloat16)
    return _through_numpy(source, target)
