"""Whether two checkpoints agree in the values that a possible correspondence connects: by samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptbridge.conversion.cast import cast_words, check_cast
from ckptbridge.conversion.plan import FileStat
from ckptbridge.conversion.sources import SourceFiles
from ckptbridge.errors import DTypeError
from ckptbridge.formats.tensors import Inventory, TensorSource
from ckptbridge.tables.axes import BoundAxes, View
from ckptbridge.tables.pairings import Agreement, Ref

Words = npt.NDArray[Any]
Elements = npt.NDArray[np.int64]

_SAMPLES = 64  # elements of each block; independent values agree in all of them by no accident
_BLOCKS = 16


class ValueProbe:
    """Compares sampled elements of two checkpoints; the same samples in every run.

    The left is cast to the right's dtype where they differ, rounding to nearest even.
    """

    def __init__(self, pt: Inventory, ms: Inventory) -> None:
        self.tensors: Mapping[str, Mapping[str, TensorSource]] = {"pt": pt.tensors, "ms": ms.tensors}
        stats = {path: path.stat() for path in {*pt.files, *ms.files}}
        self.files = SourceFiles({path: FileStat(s.st_size, s.st_mtime_ns) for path, s in stats.items()})

    def __enter__(self) -> ValueProbe:
        self.files.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.files.__exit__(*exception)

    def __call__(self, left: Sequence[Ref], right: Sequence[Ref], bound: BoundAxes) -> Agreement:
        """What up to 16 blocks of 64 samples each say; the names are in the order of ``bound``'s shapes."""
        rng = np.random.default_rng(0)
        blocks = bound.blocks
        if len(blocks) > _BLOCKS:
            blocks = tuple(blocks[k] for k in sorted(rng.choice(len(blocks), _BLOCKS, replace=False)))
        silent = False
        seen: set[bytes] = set()
        singles: list[bytes] = []
        for block in blocks:
            at = [rng.integers(0, n, _SAMPLES, dtype=np.int64) for n in block.sizes]
            a = self.tensors[left[block.left.tensor][0]][left[block.left.tensor][1]]
            b = self.tensors[right[block.right.tensor][0]][right[block.right.tensor][1]]
            words = self.comparable(a, b, _elements(a, block.left, at))
            if words is None:
                return Agreement.UNKNOWN
            wanted = self.read(b, _elements(b, block.right, at))
            if words.tobytes() != wanted.tobytes():
                return Agreement.DIFFERENT
            values = {word.tobytes() for word in wanted}
            seen |= values
            if all(n == 1 for n in block.sizes):
                singles += values
            elif len(values) == 1:
                silent = True
        alike = len(seen) < 2 or len(set(singles)) < len(singles)
        return Agreement.SILENT if silent or alike else Agreement.EQUAL

    def comparable(self, source: TensorSource, target: TensorSource, elements: Elements) -> Words | None:
        """Elements of ``source`` as words of the target's dtype; None when there is no exact meaning to that."""
        a, b = source.spec.dtype, target.spec.dtype
        words = self.read(source, elements)
        if a == b:
            return words
        if a.floating and a.itemsize == 1:
            return None  # quantised: the scale is elsewhere
        try:
            check_cast(a, b)
            return cast_words(words, a, b)[0]
        except DTypeError:
            return None

    def read(self, source: TensorSource, elements: Elements) -> Words:
        """Storage elements of a tensor, as words."""
        dtype = source.spec.dtype
        out = np.empty(len(elements), dtype.word)
        ends = np.array([*accumulate(s.nbytes // dtype.itemsize for s in source.segments)], dtype=np.int64)
        owner = np.searchsorted(ends, elements, side="right")
        for k, segment in enumerate(source.segments):
            own = owner == k
            if own.any():
                count = segment.nbytes // dtype.itemsize
                words: Words = np.ndarray((count,), dtype.word, self.files.map(segment.path), segment.offset)
                out[own] = words[elements[own] - (int(ends[k]) - count)]
        return out


def _elements(source: TensorSource, view: View, at: Sequence[Elements]) -> Elements:
    """The storage elements of a block's coordinates."""
    strides = source.element_strides
    found = np.full(_SAMPLES, source.offset + view.offset(strides), dtype=np.int64)
    for coordinates, stride in zip(at, view.strides(strides), strict=True):
        found += coordinates * stride
    return found
