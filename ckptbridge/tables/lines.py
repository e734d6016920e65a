"""Axis lines that fit given shapes: as it is, transposed, regrouped, concatenated, interleaved, stacked.

Lengths become axis names (``r512``: 512 rows, ``c64``: 64 columns, ``g8``: 8 groups), so that a line can
be read without its sizes. ``e`` is the index axis of what is stacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import gcd

from ckptbridge.tables.name_classes import Shape

_LETTERS = "rcdabu"  # one for each dimension
STACK = "e"
ROWS, COLUMNS = "one after the other", "side by side"


@dataclass(frozen=True, slots=True)
class Line:
    """How some tensors make one: an operand for each of ``many``, and ``one``. ``text`` says what it does."""

    many: tuple[str, ...]
    one: str
    sizes: Mapping[str, int]
    text: str

    def axes(self, many_left: bool) -> str:
        """The axis line with the many on the left or on the right; "" when it says nothing of the shape."""
        many = ", ".join(self.many)
        if many == self.one:
            return self.one
        return f"{many} -> {self.one}" if many_left else f"{self.one} -> {many}"


class _Names:
    """Names axes by letter and length, and remembers the lengths."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def axis(self, letter: str, length: int) -> str:
        if length == 1:
            return "1"
        self.sizes[f"{letter}{length}"] = length
        return f"{letter}{length}"

    def dims(self, shape: Shape) -> list[str]:
        return [self.axis(letter, length) for letter, length in zip(_LETTERS, shape, strict=False)]


def pair_lines(a: Shape, b: Shape) -> Iterator[Line]:
    """The lines that make a tensor of shape ``b`` of one of shape ``a``: as it is first, then its axes reordered."""
    if 0 in a or len(a) > len(_LETTERS):
        if a == b:
            yield Line(("",), "", {}, "as it is")
        return
    core = [k for k, length in enumerate(a) if length > 1]
    wanted = [length for length in b if length > 1]
    for order in permutations(core) if len(core) <= 4 else [tuple(core)]:
        if [a[k] for k in order] != wanted:
            continue
        names = _Names()
        left = names.dims(a)
        moved = iter(order)
        right = ["1" if length == 1 else left[next(moved)] for length in b]
        text = "as it is" if a == b and list(order) == core else "axes of length 1" if list(order) == core else ""
        text = text or ("transposed" if len(core) == 2 else "axes reordered")
        yield Line((" ".join(left) or "()",), " ".join(right) or "()", names.sizes, text)


def regroup_lines(a: Shape, b: Shape) -> Iterator[Line]:
    """The lines of :func:`pair_lines` with the rows of ``b`` dealt anew, in twos or threes.

    Such are rotary halves to pairs within a head, and [Q; K; V] to q, k, v within a head. Vectors and
    matrices only: nothing else has heads.
    """
    if sum(length > 1 for length in a) > 2:
        return
    for base in pair_lines(a, b):
        rows = base.one.split(" ")[0]
        length = base.sizes.get(rows, 1)
        for factor in (2, 3):
            for groups in _divisors(length // factor)[1:] if length % factor == 0 else ():
                inner = length // factor // groups
                names = _Names()
                f, g, r = str(factor), names.axis("g", groups), names.axis(rows[0], inner)
                orders = [((f, g, r), (g, f, r)), ((g, f, r), (f, g, r))]
                orders += [((g, f, r), (g, r, f)), ((g, r, f), (g, f, r))] if inner > 1 else []
                for one, other in orders:
                    many, whole = (
                        " ".join(_row_axes(order) if axis == rows else axis for axis in side.split(" "))
                        for order, side in ((one, base.many[0]), (other, base.one))
                    )
                    sizes = {name: size for name, size in base.sizes.items() if name != rows} | names.sizes
                    turned = "" if base.text == "as it is" else f", {base.text}"
                    shown = [
                        " x ".join(axis.strip("grcdabu") for axis in order if axis != "1") for order in (one, other)
                    ]
                    yield Line((many,), whole, sizes, f"rows regrouped from {shown[0]} to {shown[1]}{turned}")


def _row_axes(order: Sequence[str]) -> str:
    return f"({' '.join(axis for axis in order if axis != '1')})"


def fused_lines(parts: Sequence[Shape], whole: Shape, stack: int) -> Iterator[Line]:
    """The lines that make one tensor of shape ``whole`` of ``parts``, each of them ``stack`` times when that is not 0.

    Contiguous first, then interleaved in ever more groups.
    """
    rank = len(parts[0])
    if not rank or any(len(p) != rank or 0 in p for p in parts) or len(whole) > len(_LETTERS) or 0 in whole:
        return
    seen: set[str] = set()
    for inner, place in _unstacked(whole, rank, stack):
        for order in permutations(range(rank)) if rank == 2 else [tuple(range(rank))]:
            oriented = [tuple(p[k] for k in order) for p in parts]
            turned = ", transposed" if order != tuple(range(rank)) else ""
            for dim in range(rank):
                for line in _joined(oriented, inner, dim, order, stack, place, turned):
                    if line.axes(True) not in seen:
                        seen.add(line.axes(True))
                        yield line


def _unstacked(whole: Shape, rank: int, stack: int) -> Iterator[tuple[Shape, int | None]]:
    """What one of a stack's members makes, and the dimension that the stack is composed with; None: by itself."""
    if not stack:
        if len(whole) == rank:
            yield whole, None
        return
    if len(whole) == rank + 1 and whole[0] == stack:
        yield whole[1:], None
    if len(whole) == rank:
        for k, length in enumerate(whole):
            if length % stack == 0:
                yield (*whole[:k], length // stack, *whole[k + 1 :]), k


def _joined(
    parts: Sequence[Shape], whole: Shape, dim: int, order: Sequence[int], stack: int, place: int | None, turned: str
) -> Iterator[Line]:
    rest = [p[:dim] + p[dim + 1 :] for p in parts]
    lengths = [p[dim] for p in parts]
    if any(r != whole[:dim] + whole[dim + 1 :] for r in rest) or sum(lengths) != whole[dim]:
        return
    for groups in _divisors(gcd(*lengths)) if len(parts) > 1 else [1]:
        names = _Names()
        dims = names.dims((*whole[:dim], 1, *whole[dim + 1 :]))  # the joined dimension is written below
        g = names.axis("g", groups)
        terms = [names.axis(_LETTERS[dim], length // groups) for length in lengths]
        operands = []
        for term in terms:
            own = list(dims)
            own[dim] = term if groups == 1 else g if term == "1" else f"({g} {term})"
            operands.append(" ".join([STACK] * bool(stack) + [own[order.index(k)] for k in range(len(own))]))
        joined = terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"
        out = list(dims)
        out[dim] = joined if groups == 1 else f"({g} {joined})"
        if stack and place is not None:
            out[place] = f"({STACK} {out[place]})"
        elif stack:
            out.insert(0, STACK)
        how = (ROWS, COLUMNS)[dim > 0] if groups == 1 else f"interleaved in {groups} groups"
        how = how if len(terms) > 1 else ""
        stacked = f"{stack} stacked" if stack else ""
        text = ", ".join(t for t in (stacked, how) if t) + turned
        yield Line(tuple(operands), " ".join(out), names.sizes, text)


def _divisors(n: int) -> list[int]:
    small = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})
