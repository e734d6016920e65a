"""The sections of a table, checked: what its rules' names may stand for."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from ckptbridge.errors import TableError
from ckptbridge.tables.expressions import Expression, parse_expression
from ckptbridge.tables.messages import located, nearest, shorten
from ckptbridge.tables.names import parse_template

MAX_KEYS = 500  # of one section
MAX_ITEMS = 1000  # of one list


@dataclass(frozen=True, slots=True)
class Head:
    """What the top of a table says of itself."""

    family: str
    model_types: tuple[str, ...]
    target: str
    default: bool
    summary: str


@dataclass(frozen=True, slots=True)
class Root:
    """A name prefix that differs between checkpoints; ``pt`` and ``ms`` are the anchor templates, or ""."""

    choices: tuple[str, ...]
    pt: str
    ms: str


@dataclass(frozen=True, slots=True)
class Fp8:
    """Block-quantised sources: the scale of ``NAME`` is ``NAME + suffix``; ``block`` gives [rows, columns], or None."""

    suffix: str
    block: Expression


@dataclass(frozen=True, slots=True)
class Sections:
    """``sizes`` and ``roots`` stand in an order in which each needs only earlier ones."""

    index: Mapping[str, Expression]
    sizes: Mapping[str, Expression]
    layout: Mapping[str, tuple[str, ...]]
    strings: Mapping[str, str]
    roots: Mapping[str, Root]
    defaults: Mapping[str, object]
    fp8: Fp8 | None


def parse_head(raw: Mapping[str, object]) -> Head:
    """Check family, model types, target, default and summary."""
    for key in ("family", "target"):
        if key not in raw:
            raise TableError(f"The table has no '{key}'.", field=key, remedy=f"Write '{key} = \"...\"' at the top.")
    family = word(raw["family"], "family")
    types = words(raw.get("model_types", [family]), "model_types")
    default = raw.get("default", False)
    if not isinstance(default, bool):
        raise TableError(f"'default' is {shorten(default)}; it is true or false.", field="default")
    return Head(family, types, word(raw["target"], "target"), default, string(raw.get("summary", ""), "summary"))


def parse_sections(raw: Mapping[str, Mapping[str, object]]) -> Sections:
    """Check every section by itself and against the others."""
    for section, entries in raw.items():
        if len(entries) > MAX_KEYS:
            raise TableError(f"[{section}] has more than {MAX_KEYS} keys.", field=section)
    index = {k: _expression(v, f"index.{k}") for k, v in raw["index"].items()}
    sizes = {k: _expression(v, f"sizes.{k}") for k, v in raw["sizes"].items()}
    layout = {k: words(v, f"layout.{k}") for k, v in raw["layout"].items()}
    strings = {k: string(v, f"strings.{k}") for k, v in raw["strings"].items()}
    roots = {k: _root(v, f"roots.{k}") for k, v in raw["roots"].items()}
    defaults = {k: _literal(v, f"defaults.{k}", 0) for k, v in raw["defaults"].items()}
    _check_names({"index": index, "sizes": sizes, "layout": layout, "strings": strings, "roots": roots})
    for section, expressions in (("index", index), ("sizes", sizes)):
        for key, expression in expressions.items():
            if expression.names & index.keys():
                name = min(expression.names & index.keys())
                raise TableError(
                    f"'{name}' is an index: it has no value here.",
                    field=f"{section}.{key}",
                    remedy="Write the expression that gives the index its range.",
                )
    needs = {k: (e.names & sizes.keys()) - {k} for k, e in sizes.items()}
    sizes = {k: sizes[k] for k in _ordered(needs, "sizes")}
    roots = _ordered_roots(roots, strings)
    sections = Sections(index, sizes, layout, strings, roots, defaults, _fp8(raw["fp8"]))
    for section, expressions in (("index", index), ("sizes", sizes)):
        for key, expression in expressions.items():
            with located(field=f"{section}.{key}"):
                check_compared(expression, sections)
    return sections


def check_compared(expression: Expression, sections: Sections) -> None:
    """Refuse a comparison of a layout option, or a root, with a value that it never has."""
    for name, value in sorted(expression.compared):
        root = sections.roots.get(name)
        choices = root.choices if root else sections.layout.get(name)
        if choices is not None and value not in choices:
            raise TableError(
                f"'{name}' is never '{value}'.", expression=expression.text, remedy=nearest(value, choices)
            )


def _check_names(named: Mapping[str, Mapping[str, object]]) -> None:
    """All of them share one namespace with the axes, and stand in expressions."""
    owner: dict[str, str] = {}
    for section, entries in named.items():
        for name in entries:
            if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
                raise TableError(f"'{name[:60]}' cannot be used as a name.", field=f"{section}.{name[:60]}")
            if name in owner:
                raise TableError(f"'{name}' is both in [{owner[name]}] and in [{section}].", field=f"{section}.{name}")
            owner[name] = section


def _ordered(needs: Mapping[str, Iterable[str]], section: str) -> tuple[str, ...]:
    """The keys, each after those that it needs."""
    try:
        return tuple(TopologicalSorter(needs).static_order())
    except CycleError as error:
        # graphlib names the cycle in its second argument.
        raise TableError(f"These need each other: {', '.join(error.args[1])}.", field=section) from None


def _ordered_roots(roots: Mapping[str, Root], strings: Mapping[str, str]) -> dict[str, Root]:
    """The roots in the order in which their anchors can be decided."""
    held: dict[str, frozenset[str]] = {key: frozenset({key}) for key in roots}
    for key, text in strings.items():
        held[key] = _held(text, f"strings.{key}")
        unknown = held[key] - roots.keys()
        if unknown:
            raise TableError(
                f"'{{{min(unknown)}}}' is not a root; a string may hold nothing else in braces.", field=f"strings.{key}"
            )
    needs: dict[str, frozenset[str]] = {}
    for key, root in roots.items():
        needs[key] = frozenset()
        for side, text in (("pt", root.pt), ("ms", root.ms)):
            if not text:
                continue
            names = _held(text, f"roots.{key}.{side}")
            unknown = names - held.keys()
            if unknown:
                raise TableError(
                    f"'{{{min(unknown)}}}' is neither a root nor a string; an anchor may hold nothing else in braces.",
                    field=f"roots.{key}.{side}",
                )
            used = frozenset(r for name in names for r in held[name])
            if key not in used:
                raise TableError(f"The anchor does not hold '{{{key}}}'.", field=f"roots.{key}.{side}")
            needs[key] |= used - {key}
    return {key: roots[key] for key in _ordered(needs, "roots")}


def _held(text: str, field: str) -> frozenset[str]:
    """The names in a template, which may be empty here."""
    with located(field=field):
        return parse_template(text).names if text else frozenset()


def _root(value: object, field: str) -> Root:
    if not isinstance(value, dict):
        raise TableError("A root is a table with 'choices' and its anchors.", field=field)
    _known(value, ("choices", "pt", "ms"), field)
    choices = value.get("choices")
    if not isinstance(choices, list) or not choices or len(choices) > MAX_ITEMS:
        raise TableError("A root has a list of choices.", field=f"{field}.choices")
    texts = tuple(string(c, f"{field}.choices") for c in choices)
    if len(set(texts)) < len(texts):
        raise TableError("A choice stands twice.", field=f"{field}.choices")
    return Root(texts, string(value.get("pt", ""), f"{field}.pt"), string(value.get("ms", ""), f"{field}.ms"))


def _fp8(value: Mapping[str, object]) -> Fp8 | None:
    if not value:
        return None
    _known(value, ("suffix", "block"), "fp8")
    suffix = string(value.get("suffix", ""), "fp8.suffix")
    if not suffix:
        raise TableError("The suffix of the scale tensors is missing.", field="fp8.suffix")
    block = _expression(value.get("block", ""), "fp8.block")
    # Most configs are of models that are not quantised: what is absent is None, not an error.
    return Fp8(suffix, _expression(f"({block}) or None", "fp8.block"))


def _known(value: Mapping[str, object], keys: tuple[str, ...], field: str) -> None:
    for key in value:
        if key not in keys:
            raise TableError(f"'{key[:60]}' is not known here.", field=field, remedy=nearest(key, keys))


# --- single values, also for the rules -------------------------------------------------------


def string(value: object, field: str) -> str:
    """A printable string, which may be empty."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > MAX_ITEMS:
        raise TableError(f"{shorten(value)} is not a printable string.", field=field)
    return value


def word(value: object, field: str) -> str:
    """A name as users type it: letters, digits, and ``-``, ``_``, ``.`` inside."""
    text = string(value, field)
    if not text or not text.isascii() or not text.replace("-", "a").replace("_", "a").replace(".", "a").isalnum():
        raise TableError(f"{shorten(text)} is not made of letters, digits, '-', '_' and '.'.", field=field)
    return text


def words(value: object, field: str) -> tuple[str, ...]:
    """A list of at least one :func:`word`, none of them twice."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_ITEMS:
        raise TableError("It is a list of at least one string.", field=field)
    found = tuple(word(v, field) for v in value)
    if len(set(found)) < len(found):
        raise TableError("A value stands twice.", field=field)
    return found


def _expression(value: object, field: str) -> Expression:
    if not isinstance(value, str):
        raise TableError(f"{shorten(value)} is not an expression in quotes.", field=field)
    with located(field=field):
        return parse_expression(value)


def _literal(value: object, field: str, depth: int) -> object:
    """A value as JSON has it; nested no deeper than configs are."""
    if isinstance(value, (str, bool, int, float)):
        return value
    if depth < 5 and isinstance(value, list):
        return [_literal(v, field, depth + 1) for v in value]
    if depth < 5 and isinstance(value, dict):
        return {k: _literal(v, field, depth + 1) for k, v in value.items()}
    raise TableError("It is not a value that a config holds.", field=field)
