"""What a tensor's values are like: range, mean, spread, zeros and non-finite values, streamed.

Everything is computed in float64. Pieces are merged by the formula of Chan, Golub and LeVeque
(Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979), which stays exact to
rounding where the mean is large against the spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptbridge.conversion.cast import cast_words
from ckptbridge.conversion.reading import tensor_bytes
from ckptbridge.conversion.sources import SourceFiles
from ckptbridge.formats.dtypes import BY_NAME, DType
from ckptbridge.formats.tensors import TensorSource

_STEP = 1 << 17  # elements: their float64 values then stay in the cache
_BUFFER = 4 << 20
_THREADS = 2


@dataclass(frozen=True, slots=True)
class Statistics:
    """A tensor's values in float64; ``std`` is the population's, as ``numpy.std`` has it.

    ``minimum``, ``maximum``, ``mean`` and ``std`` are over the finite values, None when there is none;
    the last two also where they exceed float64. Integers beyond 2^53 are rounded to the nearest float64.
    """

    elements: int
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    zeros: int
    nan: int
    inf: int

    def to_dict(self) -> dict[str, object]:
        """The statistics as JSON shows them."""
        return {
            "min": self.minimum,
            "max": self.maximum,
            "mean": self.mean,
            "std": self.std,
            "zeros": self.zeros,
            "nan": self.nan,
            "inf": self.inf,
        }


@dataclass
class _Moments:
    """Counts and moments of the values so far; ``spread`` is the sum of squared distances from the mean.

    The mean is ``mean + rest``: in one float64 alone, that of values around 1e9 would be too coarse for their spread.
    """

    elements: int = 0
    finite: int = 0
    minimum: float = float("inf")
    maximum: float = float("-inf")
    mean: float = 0.0
    rest: float = 0.0
    spread: float = 0.0
    zeros: int = 0
    nan: int = 0
    inf: int = 0

    def add(self, values: npt.NDArray[np.float64]) -> None:
        self.elements += values.size
        self.zeros += values.size - int(np.count_nonzero(values))
        finite = np.isfinite(values)
        if not finite.all():
            nan = int(np.count_nonzero(np.isnan(values)))
            self.nan += nan
            values = values[finite]
            self.inf += finite.size - values.size - nan
        if not values.size:
            return
        self.minimum = min(self.minimum, float(values.min()))
        self.maximum = max(self.maximum, float(values.max()))
        # Values near the end of float64's range overflow here; result() then says nothing of mean and spread.
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(values.mean())
            distance = values - mean
            rest = float(distance.mean())
            self._merge(values.size, mean, rest, float(distance @ distance) - values.size * rest * rest)

    def _merge(self, count: int, mean: float, rest: float, spread: float) -> None:
        if not self.finite:
            self.finite, self.mean, self.rest, self.spread = count, mean, rest, spread
            return
        total = self.finite + count
        step = (mean - self.mean) + (rest - self.rest)
        self.rest += step * (count / total)
        self.spread += spread + step * step * (self.finite * (count / total))
        self.finite = total

    def result(self) -> Statistics:
        if not self.finite:
            return Statistics(self.elements, None, None, None, None, self.zeros, self.nan, self.inf)
        mean = self.mean + self.rest
        std = sqrt(max(self.spread, 0.0) / self.finite) if isfinite(self.spread) else None
        return Statistics(
            self.elements,
            self.minimum,
            self.maximum,
            mean if isfinite(mean) else None,
            std,
            self.zeros,
            self.nan,
            self.inf,
        )


def has_statistics(dtype: DType) -> bool:
    """Whether the values of ``dtype`` have an order: all but complex ones."""
    return dtype.kind != "complex"


def statistics(source: TensorSource, files: SourceFiles) -> Statistics:
    """The statistics of one tensor, in a few MiB of memory whatever its size; see :func:`has_statistics`."""
    moments = _Moments()
    dtype = source.spec.dtype
    for data in tensor_bytes(source, files, _BUFFER):
        words: npt.NDArray[Any] = np.frombuffer(data, dtype.word)
        for at in range(0, words.size, _STEP):
            moments.add(_values(words[at : at + _STEP], dtype))
        files.release((source,))
    return moments.result()


def all_statistics(
    tensors: Sequence[TensorSource], files: SourceFiles, progress: Callable[[int], object] | None = None
) -> dict[str, Statistics]:
    """The statistics of tensors by name, those without order left out; ``progress`` is told the bytes read."""
    ordered = [source for source in tensors if has_statistics(source.spec.dtype)]
    found = {}
    with ThreadPoolExecutor(_THREADS, "statistics") as pool:
        for path in dict.fromkeys(segment.path for source in ordered for segment in source.segments):
            files.map(path)  # opened before there are threads
        for source, result in zip(ordered, pool.map(lambda s: statistics(s, files), ordered), strict=True):
            found[source.spec.name] = result
            if progress is not None:
                progress(source.spec.nbytes)
    return found


def _values(words: npt.NDArray[Any], dtype: DType) -> npt.NDArray[np.float64]:
    if dtype.floating:
        values: npt.NDArray[np.float64] = cast_words(words, dtype, BY_NAME["float64"])[0].view(np.float64)
        return values
    return words.view(dtype.name).astype(np.float64)
