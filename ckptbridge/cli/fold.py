"""Folding: tensors that differ only in their numbers shown as one line, ``layers.{0..31}``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Folded:
    """Rows that are alike but for the numbers in their names: the names folded, the rest, and which rows they are."""

    names: tuple[str, ...]
    rest: tuple[Hashable, ...]
    rows: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.rows)


_Template = tuple[str | None, ...]  # a name's components, None for a number
_Numbers = tuple[int, ...]


def fold(rows: Iterable[tuple[Sequence[str], tuple[Hashable, ...]]]) -> list[Folded]:
    """Fold rows of (names, rest) in the order of their first appearance."""
    groups: dict[tuple[tuple[_Template, ...], tuple[Hashable, ...]], list[tuple[int, tuple[_Numbers, ...]]]] = {}
    for at, (names, rest) in enumerate(rows):
        split = [_split(name) for name in names]
        groups.setdefault((tuple(t for t, _ in split), rest), []).append((at, tuple(n for _, n in split)))
    folded = []
    for (templates, rest), members in groups.items():
        names = tuple(_merged(t, [numbers[k] for _, numbers in members]) for k, t in enumerate(templates))
        folded.append(Folded(names, rest, tuple(at for at, _ in members)))
    return folded


def numbered(part: str) -> bool:
    """Whether a component of a name is a number."""
    return part.isascii() and part.isdigit() and len(part) < 10


def _split(name: str) -> tuple[_Template, _Numbers]:
    """A name's components without its numbers, and those."""
    parts = name.split(".")
    return tuple(None if numbered(p) else p for p in parts), tuple(int(p) for p in parts if numbered(p))


def _merged(template: _Template, numbers: Sequence[_Numbers]) -> str:
    columns = iter(zip(*numbers, strict=True))
    return ".".join(ranges(sorted(set(next(columns)))) if part is None else part for part in template)


def ranges(values: Sequence[int]) -> str:
    """Sorted numbers as ``{0..2,5}``; one alone as it is."""
    if len(values) == 1:
        return str(values[0])
    runs: list[list[int]] = []
    for v in values:
        if runs and v == runs[-1][1] + 1:
            runs[-1][1] = v
        else:
            runs.append([v, v])
    return "{" + ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs) + "}"
