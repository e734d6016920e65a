"""Tensor names that differ only in their numbers, as one class: what a suggested rule will enumerate."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ckptbridge.errors import TableError
from ckptbridge.tables.names import parse_template

Shape = tuple[int, ...]
Key = tuple[int, ...]

_MAX_LISTED = 40  # values that a condition lists one by one


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor's shape and dtype name."""

    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class NameClass:
    """Tensors of one shape and dtype whose names differ in some numeric components only.

    ``template`` are the components, None where the numbers differ. ``members`` maps those numbers to the
    name; the keys are the product of what each place takes.
    """

    template: tuple[str | None, ...]
    spec: Spec
    members: Mapping[Key, str]
    keys: frozenset[Key] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", frozenset(self.members))

    @property
    def shape(self) -> Shape:
        return self.spec.shape

    @property
    def numel(self) -> int:
        return prod(self.spec.shape)

    @property
    def slots(self) -> int:
        return self.template.count(None)

    def __str__(self) -> str:
        return ".".join("*" if part is None else part for part in self.template)


def writable(name: str) -> bool:
    """Whether a template can stand for the name as it is."""
    if "{" in name or "}" in name:
        return False
    try:
        parse_template(name)
    except TableError:
        return False
    return True


def name_classes(tensors: Mapping[str, Spec]) -> list[NameClass]:
    """The classes of all names, in the order of their first members."""
    groups: dict[tuple[tuple[str | None, ...], Spec], dict[Key, str]] = {}
    for name, spec in tensors.items():
        parts = [(None if _numeric(part) else part) for part in name.split(".")]
        key = tuple(int(part) for part in name.split(".") if _numeric(part))
        groups.setdefault((tuple(parts), spec), {})[key] = name
    found = [c for (template, spec), members in groups.items() for c in _products(template, spec, members)]
    order = {name: k for k, name in enumerate(tensors)}
    return sorted(found, key=lambda c: min(order[name] for name in c.members.values()))


def aligned(a: list[NameClass], b: list[NameClass]) -> tuple[list[NameClass], list[NameClass]]:
    """The classes, those split whose first numbers go beyond what any class of the other side has.

    So the last layer of one side, which is something else on the other (a prediction layer), stands apart.
    """
    a = _cut(a, _first_numbers(b))
    return a, _cut(b, _first_numbers(a))


def _first_numbers(classes: Iterable[NameClass]) -> set[frozenset[int]]:
    return {frozenset(key[0] for key in c.members) for c in classes if c.slots}


def _cut(classes: Iterable[NameClass], known: Collection[frozenset[int]]) -> list[NameClass]:
    found = []
    for c in classes:
        own = frozenset(key[0] for key in c.members) if c.slots else frozenset()
        inside = [numbers for numbers in known if numbers < own]
        if not inside or own in known:
            found.append(c)
            continue
        common = max(inside, key=len)
        for wanted in (True, False):
            part = {key: name for key, name in c.members.items() if (key[0] in common) is wanted}
            found += _products(c.template, c.spec, part)
    return found


def condition(index: str, values: Iterable[int], count: int) -> str | None:
    """The expression by which ``index``, from 0 to ``count`` - 1, takes just ``values``; "" for all, None for none."""
    wanted = sorted(set(values))
    first, last = wanted[0], wanted[-1]
    step = wanted[1] - first if len(wanted) > 1 else 1
    if wanted == list(range(first, last + 1, step)) and len(wanted) > 2 - (step == 1):
        terms = [f"{index} >= {first}"] if first else []
        terms += [f"{index} <= {last}"] if last + step < count else []
        terms += [f"{index} % {step} == {first % step}"] if step > 1 else []
        return " and ".join(terms)
    if len(wanted) <= _MAX_LISTED:
        return f"{index} in {wanted}"
    return None


def _numeric(part: str) -> bool:
    """Whether a component is an integer as a template renders it."""
    return part.isascii() and part.isdigit() and len(part) < 7 and (part == "0" or part[0] != "0")


def _products(template: Sequence[str | None], spec: Spec, members: Mapping[Key, str]) -> list[NameClass]:
    """Classes whose keys are full products; a place that never varies is written out."""
    columns = [sorted(set(column)) for column in zip(*members, strict=True)]
    varying = [k for k, values in enumerate(columns) if len(values) > 1]
    full = len(members) == prod(map(len, columns))
    if not full or any(condition("i", columns[k], columns[k][-1] + 1) is None for k in varying):
        parts: dict[int, dict[Key, str]] = {}
        for key, name in members.items():
            parts.setdefault(key[varying[0]], {})[key] = name
        return [c for part in parts.values() for c in _products(template, spec, part)]
    places = [k for k, part in enumerate(template) if part is None]
    fixed = list(template)
    for k, place in enumerate(places):
        if k not in varying:
            fixed[place] = str(columns[k][0])
    return [NameClass(tuple(fixed), spec, {tuple(key[k] for k in varying): name for key, name in members.items()})]
