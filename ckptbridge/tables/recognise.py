"""Which shipped tables know a checkpoint, by its tensor names alone: no config, no shapes.

A rule's names are read with every number left open, so ``layers.{i}.norm.weight`` and
``layers.7.norm.weight`` are one pattern, ``layers.*.norm.weight``. A table fits when it has a
pattern for every name, when nothing is missing that its rules require whatever the config says, and when
each index counts from 0 without a gap; an index that no name has must be one that may be empty. That is what
names can show: which of several layouts of one name a tensor has, they cannot, and models that share all
names remain candidates together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Literal

from ckptbridge.errors import ConfigError
from ckptbridge.tables.expressions import ABSENT, Expression, parse_expression
from ckptbridge.tables.sections import Head, parse_head
from ckptbridge.tables.sources import Parsed, RawRule, Source, read_source, shipped_directory

Side = Literal["pt", "ms"]

_ANY = "*"
_SHOWN = 3
_NEAR = 0.5  # of the names known: below that, a table has nothing to do with the checkpoint


@dataclass(frozen=True, slots=True)
class Candidate:
    """How a table's names on one side meet a checkpoint's: ``known`` of ``total`` stand in the table.

    ``reasons`` are sentences on why it fits, or all that speaks against it.
    """

    family: str
    target: str
    default: bool
    side: Side
    fits: bool
    known: int
    total: int
    reasons: tuple[str, ...]

    @property
    def table(self) -> str:
        return f"{self.family}/{self.target}"

    def to_dict(self) -> dict[str, object]:
        """The candidate as JSON shows it."""
        return {
            "table": self.table,
            "side": self.side,
            "default": self.default,
            "fits": self.fits,
            "known": self.known,
            "total": self.total,
            "reasons": list(self.reasons),
        }


def recognise(
    names: Iterable[str], sides: Sequence[Side] = ("pt", "ms"), model_type: str | None = None
) -> tuple[Candidate, ...]:
    """The tables that fit ``names`` on one of ``sides``; when none does, the nearest one.

    ``model_type`` (of a config) narrows the search to the tables that serve it. By family, the
    default target first. Empty when no table knows even half of the names.
    """
    seen = _Seen(names)
    if not seen.total:
        return ()
    tables = [(head, source) for head, source in _shipped() if model_type in (None, *head.model_types)]
    found = [_judge(head, source, side, seen) for head, source in tables for side in sides]
    fitting = [c for c in found if c.fits]
    if fitting:
        return tuple(sorted(fitting, key=lambda c: (c.side != "pt", c.family, not c.default, c.target)))
    near = max(found, key=lambda c: (c.known, -len(c.reasons), c.default), default=None)
    return (near,) if near is not None and near.known >= _NEAR * seen.total else ()


@lru_cache(maxsize=1)
def _shipped() -> tuple[tuple[Head, Source], ...]:
    # What rules mean need not be understood to read their names, and would take twice the time.
    parsed: Parsed = {}
    sources = [read_source(path, parsed) for path in sorted(shipped_directory().glob("*.toml"))]
    return tuple((parse_head(source.head), source) for source in sources)


# --- the checkpoint's names ------------------------------------------------------------------


class _Seen:
    """A checkpoint's names by pattern: for each, the numbers that stood where the pattern is open."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        self.numbers: dict[str, list[tuple[int, ...]]] = {}
        for name in self.names:
            pattern, found = _opened(name)
            self.numbers.setdefault(pattern, []).append(found)
        self.total = len(self.names)


def _opened(name: str) -> tuple[str, tuple[int, ...]]:
    """A name with each component that is a number replaced by ``*``, and the numbers."""
    parts = name.split(".")
    numbers = []
    for k, part in enumerate(parts):
        if part.isascii() and part.isdigit() and len(part) < 10:
            numbers.append(int(part))
            parts[k] = _ANY
    return ".".join(parts), tuple(numbers)


# --- a table's names -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A rule's name. ``opens`` are the placeholders that its stars stand for ("" for a written number)."""

    text: str
    opens: tuple[str, ...]
    indices: frozenset[str]


def _pattern(template: str, constants: Mapping[str, str], known: Collection[str]) -> _Pattern:
    """``template`` with ``constants`` put in, everything else in braces open; ``known`` are the table's indices."""
    text = ""
    placeholders: list[str] = []
    rest = template
    while rest:
        literal, _, rest = rest.partition("{")
        inside, closed, rest = rest.partition("}")
        text += literal
        if closed and inside in constants:
            text += constants[inside]
        elif closed:
            placeholders.append(inside)
            text += _ANY
    parts = text.split(".")
    waiting = iter(placeholders)
    opens = []
    for k, part in enumerate(parts):
        if _ANY in part:
            placeholder = next(waiting, "")
            if part == _ANY:
                opens.append(placeholder)
        elif part.isascii() and part.isdigit():
            opens.append("")
            parts[k] = _ANY
    names = frozenset(name for p in placeholders for name in parse_expression(p).names)
    return _Pattern(".".join(parts), tuple(opens), names & frozenset(known))


def _strings(value: object) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else ()


def _templates(rule: Mapping[str, Any], side: Side) -> tuple[str, ...]:
    """A rule's names on a side; without ``ms``, and unless it only drops, they are the same on both."""
    if side == "ms" and "ms" not in rule:
        return () if "drop" in rule else _strings(rule.get("pt"))
    return _strings(rule.get(side))


def _always(rules: Sequence[RawRule], side: Side, layout: Mapping[str, object], roots: Mapping[str, str]) -> set[str]:
    """The templates whose tensors must be there whatever the config says: in every layout, some rule asks for them.

    A rule whose condition reads the config may never apply, and so requires nothing.
    """
    asking: list[tuple[tuple[str, ...], Expression | None]] = []
    for rule in rules:
        if rule.fields.get("optional") is True or not rule.fields.keys().isdisjoint(("drop", "tied")):
            continue
        when = parse_expression(str(rule.fields["when"])) if "when" in rule.fields else None
        if when is None or when.names <= {*layout, *roots}:
            asking.append((_templates(rule.fields, side), when))
    deciding = sorted({name for _, when in asking if when is not None for name in when.names & layout.keys()})
    required: set[str] | None = None
    for values in product(*(_strings(layout[name]) for name in deciding)):
        chosen = {**roots, **dict(zip(deciding, values, strict=True))}
        asked = {t for templates, when in asking if when is None or when.holds(chosen.__getitem__) for t in templates}
        required = asked if required is None else required & asked
    return required or set()


def _choose_roots(source: Source, side: Side, names: frozenset[str]) -> tuple[dict[str, str], str]:
    """The choice of each root whose anchor is there, and a sentence if there is none, or more than one."""
    strings = {k: str(v) for k, v in source.sections["strings"].items()}
    chosen: dict[str, str] = {}
    for key, root in source.sections["roots"].items():
        assert isinstance(root, dict)
        choices, anchor = _strings(root["choices"]), root.get(side, "")
        chosen[key] = choices[0]
        if not anchor:
            continue
        anchors = {c: _filled(anchor, _filled_all(strings, {**chosen, key: c})) for c in choices}
        there = [c for c, name in anchors.items() if name in names]
        if len(there) != 1:
            listed = " and ".join(f"'{name}'" for name in anchors.values())
            return chosen, f"of {listed}, {'none' if not there else 'more than one'} is there"
        chosen[key] = there[0]
    return chosen, ""


def _filled(template: str, constants: Mapping[str, str]) -> str:
    for key, text in constants.items():
        template = template.replace(f"{{{key}}}", text)
    return template


def _filled_all(strings: Mapping[str, str], roots: Mapping[str, str]) -> dict[str, str]:
    """Strings, which may hold roots, and the roots themselves."""
    return {**{key: _filled(text, roots) for key, text in strings.items()}, **roots}


# --- the judgement ---------------------------------------------------------------------------


def _judge(head: Head, source: Source, side: Side, seen: _Seen) -> Candidate:
    roots, unrooted = _choose_roots(source, side, seen.names)
    constants = _filled_all({k: str(v) for k, v in source.sections["strings"].items()}, roots)
    index = source.sections["index"]
    written = {t: _pattern(t, constants, index) for rule in source.rules for t in _templates(rule.fields, side)}
    # A layer after the last, of another index, has some names like any layer's: those speak for neither index.
    patterns: dict[str, frozenset[str]] = {}
    for pattern in written.values():
        patterns[pattern.text] = patterns.get(pattern.text, pattern.indices) & pattern.indices
    scale = str(source.sections["fp8"].get("suffix") or "")
    unknown = [t for t in seen.numbers if t not in patterns and not (scale and t.removesuffix(scale) in patterns)]
    known = seen.total - sum(len(seen.numbers[text]) for text in unknown)
    against = [unrooted] if unrooted else []
    if unknown:
        against.append(f"{seen.total - known} of {seen.total} names are not in the table: {_few(unknown)}")
    used = frozenset(name for text in seen.numbers for name in patterns.get(text, ()))
    unused = frozenset(name for indices in patterns.values() for name in indices) - used
    empty = frozenset(name for name in unused if _may_be_empty(str(index[name]), roots))
    for name in sorted(unused - empty):
        against.append(f"no name with the table's index '{name}' ({index[name]}) is there")
    always = _always(source.rules, side, source.sections["layout"], roots)
    required = [p for template, p in written.items() if template in always and p.indices.isdisjoint(unused)]
    missing = [p.text for p in required if p.text not in seen.numbers]
    if missing:
        against.append(f"names that the table requires are missing: {_few(missing)}")
    against += _gaps(required, seen, set(index))
    reasons = tuple(against) or (f"all {seen.total} names are in it, and none that it always requires is missing",)
    return Candidate(head.family, head.target, head.default, side, not against, known, seen.total, reasons)


def _may_be_empty(expression: str, roots: Mapping[str, str]) -> bool:
    """Whether an index has no values for a config that says nothing of it, as prediction layers have none."""
    try:
        return parse_expression(expression).evaluate(lambda name: roots.get(name, ABSENT)) == 0
    except ConfigError:
        return False


def _gaps(required: Sequence[_Pattern], seen: _Seen, indices: set[str]) -> list[str]:
    """Sentences on indices of required names that do not count from 0, or not to the same end."""
    there = [p for p in required if p.opens and set(p.opens) <= indices and p.text in seen.numbers]
    counts: dict[str, int] = {}
    for pattern in there:
        for index, values in zip(pattern.opens, zip(*seen.numbers[pattern.text], strict=True), strict=True):
            counts[index] = max(counts.get(index, 0), max(values) + 1)
    for pattern in there:
        expected = 1
        for index in pattern.opens:
            expected *= counts[index]
        found = seen.numbers[pattern.text]
        if len(found) != expected:
            absent = _first_absent(pattern, counts, set(found))
            return [f"{expected - len(found)} of {expected} '{pattern.text}' are missing, first {absent}"]
    return []


def _first_absent(pattern: _Pattern, counts: Mapping[str, int], found: set[tuple[int, ...]]) -> str:
    for numbers in product(*(range(counts[index]) for index in pattern.opens)):
        if numbers not in found:
            values = iter(numbers)
            return "'" + ".".join(str(next(values)) if p == _ANY else p for p in pattern.text.split(".")) + "'"
    return ""


def _few(patterns: Sequence[str]) -> str:
    shown = ", ".join(f"'{text}'" for text in patterns[:_SHOWN])
    return shown + (f" and {len(patterns) - _SHOWN} more" if len(patterns) > _SHOWN else "")
