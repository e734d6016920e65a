"""Which shipped tables know a checkpoint, by its tensor names alone: no config, no shapes.

A rule's names are read with every number left open, so ``layers.{i}.norm.weight`` and
``layers.7.norm.weight`` are one pattern, ``layers.*.norm.weight``. A table fits when it has a
pattern for every name, when nothing is missing that its rules require whatever the config says, and
when each index counts from 0 without a gap; an index that no name uses may be empty. That is what names
can show: which of several layouts of one name a tensor has, they cannot, and models that share all
names remain candidates together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Literal

from ckptbridge.tables.expressions import parse_expression
from ckptbridge.tables.sections import Head, parse_head
from ckptbridge.tables.sources import Parsed, Source, read_source, shipped_directory

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
    judged = [_judge(head, source, side, seen) for head, source in tables for side in sides]
    fitting = [j for j in judged if j.candidate.fits]
    if fitting:
        # A mixture of experts is no candidate for a model without any, where a dense model is one.
        full = {j.candidate.side for j in fitting if not j.unused}
        found = [j.candidate for j in fitting if not j.unused or j.candidate.side not in full]
        return tuple(sorted(found, key=lambda c: (c.side != "pt", c.family, not c.default, c.target)))
    near = max(judged, key=lambda j: (j.candidate.known, -j.unused, j.candidate.default), default=None)
    return (near.candidate,) if near is not None and near.candidate.known >= _NEAR * seen.total else ()


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


def _required(rule: Mapping[str, Any]) -> bool:
    """Whether the rule's tensors must be there whatever config and layout say."""
    return not any(key in rule for key in ("when", "drop", "tied")) and rule.get("optional") is not True


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


@dataclass(frozen=True, slots=True)
class _Judged:
    """A candidate, and how many of its table's indices no name uses."""

    candidate: Candidate
    unused: int


def _judge(head: Head, source: Source, side: Side, seen: _Seen) -> _Judged:
    roots, unrooted = _choose_roots(source, side, seen.names)
    constants = _filled_all({k: str(v) for k, v in source.sections["strings"].items()}, roots)
    index = source.sections["index"]
    patterns: dict[str, _Pattern] = {}
    required: list[_Pattern] = []
    for rule in source.rules:
        for template in _templates(rule.fields, side):
            pattern = _pattern(template, constants, index)
            patterns[pattern.text] = pattern
            if _required(rule.fields):
                required.append(pattern)
    scale = str(source.sections["fp8"].get("suffix") or "")
    unknown = [t for t in seen.numbers if t not in patterns and not (scale and t.removesuffix(scale) in patterns)]
    known = seen.total - sum(len(seen.numbers[text]) for text in unknown)
    there = [patterns[text] for text in seen.numbers if text in patterns]
    used = frozenset(name for pattern in there for name in pattern.indices)
    against = [unrooted] if unrooted else []
    if unknown:
        against.append(f"{seen.total - known} of {seen.total} names are not in the table: {_few(unknown)}")
    missing = [p.text for p in required if p.text not in seen.numbers and (p.indices <= used or not used)]
    if missing:
        against.append(f"names that the table requires are missing: {_few(missing)}")
    against += _gaps(required, seen, set(index))
    reasons = tuple(against) or (f"all {seen.total} names are in it, and none that it always requires is missing",)
    candidate = Candidate(head.family, head.target, head.default, side, not against, known, seen.total, reasons)
    on_side = frozenset(name for pattern in patterns.values() for name in pattern.indices)
    return _Judged(candidate, len(on_side - used))


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
