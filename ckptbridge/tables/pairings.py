"""Possible correspondences between classes of tensors: what fits together in numbers and in size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations

from ckptbridge.tables.axes import BoundAxes, bind_axes, parse_axes
from ckptbridge.tables.lines import COLUMNS, ROWS, STACK, Line, fused_lines
from ckptbridge.tables.name_classes import Key, NameClass
from ckptbridge.tables.similarity import part_order

_GROUP = 12  # parts of one module among which fused candidates are formed

Sums = Mapping[int, Sequence[tuple[NameClass, ...]]]
Ref = tuple[str, str]  # side ("pt" or "ms") and tensor name


class Agreement(Enum):
    """What sampled values say of a correspondence."""

    EQUAL = "equal"
    SILENT = "agree, and are too few or too alike to tell"
    UNKNOWN = "cannot be compared"
    DIFFERENT = "differ"


Probe = Callable[[Sequence[Ref], Sequence[Ref], BoundAxes], Agreement]


class Evidence(Enum):
    """Why a pair is suggested."""

    VALUE = "verified by value"
    NAME = "by name and shape"
    DOUBTFUL = "DOUBTFUL"


@dataclass(frozen=True, slots=True)
class Stack:
    """The index axis: the numbers at ``slot`` of the names of ``side`` count from 0 to ``count`` - 1."""

    side: str
    slot: int
    count: int


@dataclass(frozen=True, slots=True)
class Alternative:
    """What could be right instead, as text; ``sizes`` are the lengths of the axis line in it, if there is one."""

    text: str
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Pairing:
    """Classes that may correspond, and how. ``remarks`` are for a comment."""

    pt: tuple[NameClass, ...]
    ms: tuple[NameClass, ...]
    line: Line
    stack: Stack | None
    evidence: Evidence
    remarks: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()

    @property
    def many_left(self) -> bool:
        """Whether the line's many are the PyTorch side."""
        return len(self.ms) == 1 and not (self.stack and self.stack.side == "ms")

    @property
    def axes(self) -> str:
        """The axis line from PyTorch to MindSpore."""
        return self.line.axes(self.many_left)

    @property
    def is_pair(self) -> bool:
        """Whether it is one tensor on either side."""
        return len(self.pt) == len(self.ms) == 1 and self.stack is None

    @property
    def modules(self) -> tuple[tuple[str | None, ...], ...]:
        """The modules of the tensors, in order."""
        return tuple(c.template[:-1] for c in (*self.pt, *self.ms))

    @property
    def row_order(self) -> str:
        """What is done to the rows; a vector beside a matrix has nothing to transpose, and no columns."""
        text = self.line.text.replace(", transposed", "").replace("transposed", "as it is")
        return text.replace(COLUMNS, ROWS)

    def as_alternative(self) -> Alternative:
        """The pairing's layout, as another's alternative."""
        return Alternative(f"axes = {self.axes!r} ({self.line.text})", self.line.sizes)

    def parts(self, side: str) -> tuple[NameClass, ...]:
        """The classes of ``pt`` or ``ms``."""
        return self.pt if side == "pt" else self.ms

    def keys(self) -> list[Key]:
        """The numbers by which the pairing's groups of tensors differ, in order."""
        one = self.ms if self.stack is None or self.stack.side == "pt" else self.pt
        return sorted(one[0].members)

    def tensors(self, key: Key) -> tuple[list[Ref], list[Ref]]:
        """The tensors of both sides for one of :meth:`keys`, in the order of :meth:`bound`."""
        sides = []
        for side in ("pt", "ms"):
            stack = self.stack if self.stack and self.stack.side == side else None
            keys = [key] if stack is None else [(*key[: stack.slot], e, *key[stack.slot :]) for e in range(stack.count)]
            sides.append([(side, c.members[k]) for c in self.parts(side) for k in keys])
        return sides[0], sides[1]

    def bound(self) -> BoundAxes:
        """The axis line with its lengths."""
        index = frozenset({STACK}) if self.stack else frozenset()
        sizes = {**self.line.sizes, STACK: self.stack.count} if self.stack else self.line.sizes
        left, right = (index, frozenset()) if self.many_left else (frozenset(), index)
        return bind_axes(parse_axes(self.axes), sizes, left, right)


def fusings(many_side: str, parts: tuple[NameClass, ...], whole: NameClass) -> Iterator[Pairing]:
    """Every way to make ``whole`` of just these parts, in this order."""
    for stack in _stacks(many_side, parts[0], whole):
        if any(p.keys != parts[0].keys for p in parts) or (stack is None and len(parts) == 1):
            continue
        for line in fused_lines([p.shape for p in parts], whole.shape, stack.count if stack else 0):
            pt, ms = (parts, (whole,)) if many_side == "pt" else ((whole,), parts)
            yield Pairing(pt, ms, line, stack, Evidence.VALUE)


def _stacks(side: str, part: NameClass, whole: NameClass) -> Iterator[Stack | None]:
    """The numbers of ``part`` that ``whole`` lacks, if they are all from 0 on; None: both have the same numbers."""
    if part.keys == whole.keys:
        yield None
    if part.slots != whole.slots + 1:
        return
    for slot in range(part.slots):
        values = {key[slot] for key in part.members}
        if values == set(range(len(values))) and {k[:slot] + k[slot + 1 :] for k in part.members} == whole.keys:
            yield Stack(side, slot, len(values))


def elements(c: NameClass) -> int:
    return c.numel * len(c.members)


def sums(classes: Iterable[NameClass]) -> Sums:
    """Up to three classes that may be parts of one thing, by the number of their elements.

    Such are those of one module, and those of sister modules under the same last name.
    """
    groups: dict[tuple[object, ...], list[NameClass]] = {}
    for c in classes:
        groups.setdefault((c.template[:-2], c.template[-1], len(c.shape)), []).append(c)
        groups.setdefault((c.template[:-1], len(c.shape)), []).append(c)
    found: dict[tuple[NameClass, ...], None] = {}
    for group in groups.values():
        group.sort(key=lambda c: part_order(c.template))
        found |= dict.fromkeys((c,) for c in group if c.slots)  # what may be stacked
        for count in (2, 3):
            found |= dict.fromkeys(combinations(group[:_GROUP], count))
    sums: dict[int, list[tuple[NameClass, ...]]] = {}
    for parts in found:
        sums.setdefault(sum(map(elements, parts)), []).append(parts)
    return sums
