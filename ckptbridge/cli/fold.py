"""Folding: tensors that differ only in their numbers shown as one line, ``layers.{0..31}``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Folded:
    """Rows that are alike but for the numbers in their names: the names folded, the rest, and how many."""

    names: tuple[str, ...]
    rest: tuple[Hashable, ...]
    count: int


def fold(rows: Iterable[tuple[Sequence[str], tuple[Hashable, ...]]]) -> list[Folded]:
    """Fold rows of (names, rest) in the order of their first appearance."""
    groups: dict[tuple[tuple[str, ...], tuple[Hashable, ...]], list[tuple[tuple[int, ...], ...]]] = {}
    for names, rest in rows:
        split = [_split(name) for name in names]
        groups.setdefault((tuple(t for t, _ in split), rest), []).append(tuple(n for _, n in split))
    folded = []
    for (templates, rest), numbers in groups.items():
        names = tuple(_merged(t, [row[k] for row in numbers]) for k, t in enumerate(templates))
        folded.append(Folded(names, rest, len(numbers)))
    return folded


def _split(name: str) -> tuple[str, tuple[int, ...]]:
    """A name with its numeric components replaced by ``*``, and the numbers."""
    parts = name.split(".")
    numbers = tuple(int(p) for p in parts if p.isascii() and p.isdigit() and len(p) < 10)
    return ".".join("*" if p.isascii() and p.isdigit() and len(p) < 10 else p for p in parts), numbers


def _merged(template: str, numbers: Sequence[tuple[int, ...]]) -> str:
    columns = iter(zip(*numbers, strict=True))
    parts = []
    for part in template.split("."):
        parts.append(_ranges(sorted(set(next(columns)))) if part == "*" else part)
    return ".".join(parts)


def _ranges(values: Sequence[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    runs: list[list[int]] = []
    for v in values:
        if runs and v == runs[-1][1] + 1:
            runs[-1][1] = v
        else:
            runs.append([v, v])
    return "{" + ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs) + "}"
