"""One rule of a table, checked: names on two sides, and how their axes correspond."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptbridge.errors import TableError
from ckptbridge.tables.axes import Axis, AxisMap, Dims, parse_axes
from ckptbridge.tables.expressions import Expression, parse_expression
from ckptbridge.tables.messages import located, nearest, shorten
from ckptbridge.tables.names import parse_template
from ckptbridge.tables.sections import MAX_ITEMS, Sections, check_compared, string
from ckptbridge.tables.sources import RawRule

RULE_KEYS = ("pt", "ms", "axes", "when", "optional", "drop", "tied", "dtype")

# The canonical dtype names; a test holds them equal to those of the formats.
DTYPE_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool", "complex64", "complex128"),
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One ``[[rule]]``: ``number`` counts from 1 in ``file``; ``pt`` and ``ms`` are name templates.

    ``drop`` is the reason and ``tied`` the template of the PyTorch name that is equalled, or "".
    ``dtype_pt`` and ``dtype_ms`` are "", "keep" or a dtype name.
    """

    number: int
    file: str
    pt: tuple[str, ...]
    ms: tuple[str, ...]
    axes: AxisMap | None
    when: Expression | None
    optional: bool
    drop: str
    tied: str
    dtype_pt: str
    dtype_ms: str

    def __str__(self) -> str:
        return f"{self.file} rule {self.number}"


def parse_rule(raw: RawRule, sections: Sections) -> Rule:
    """Check a rule by itself and against the table's sections. Raises TableError naming the field."""
    fields = raw.fields
    for key in fields:
        if key not in RULE_KEYS:
            raise TableError(f"'{key[:60]}' is not part of a rule.", field=key[:60], remedy=nearest(key, RULE_KEYS))
    drop = _reason(fields.get("drop"))
    tied = _template(fields["tied"], "tied") if "tied" in fields else ""
    pt, ms = _names(fields.get("pt"), "pt"), _names(fields.get("ms"), "ms")
    _check_sides(pt, ms, drop, tied)
    if not ms and not drop and not tied:
        ms = pt
    axes, when = _axes(fields.get("axes")), _when(fields.get("when"))
    optional = fields.get("optional", False)
    if not isinstance(optional, bool):
        raise TableError(f"'optional' is {shorten(optional)}; it is true or false.", field="optional")
    if optional and (drop or tied):
        raise TableError("What is dropped or tied may be absent anyway.", field="optional", remedy="Take it out.")
    if "dtype" in fields and drop:
        raise TableError("What is dropped has no dtype.", field="dtype", remedy="Take it out.")
    dtype_pt, dtype_ms = _dtypes(fields.get("dtype", ""))
    rule = Rule(raw.number, raw.file, pt, ms, axes, when, optional, drop, tied, dtype_pt, dtype_ms)
    _check_indices(rule, sections)
    if axes is None:
        _check_rename(rule)
    else:
        with located(field="axes"):
            _check_operands(rule, axes, sections)
    if when is not None:
        with located(field="when"):
            check_compared(when, sections)
    return rule


def indices(templates: Iterable[str], index: Iterable[str]) -> tuple[str, ...]:
    """The indices that stand in the names, in order of appearance."""
    known = set(index)
    found: dict[str, None] = {}
    for text in templates:
        for part in parse_template(text).parts:
            if isinstance(part, Expression):
                found |= dict.fromkeys(sorted(part.names & known))
    return tuple(found)


def index_axes(rule: Rule, index: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The index axes of either side: indices in the names of that side only that are axes of it too."""
    if rule.axes is None:
        return frozenset(), frozenset()
    pt, ms = set(indices(rule.pt, index)), set(indices(rule.ms, index))
    if rule.drop or rule.tied:
        return frozenset(), frozenset()
    return frozenset((pt - ms) & rule.axes.names), frozenset((ms - pt) & rule.axes.names)


# --- fields ----------------------------------------------------------------------------------


def _names(value: object, field: str) -> tuple[str, ...]:
    if value is None:
        return ()
    items = value if isinstance(value, list) else [value]
    if not 0 < len(items) <= MAX_ITEMS:
        raise TableError(f"A rule has from 1 to {MAX_ITEMS} names on a side.", field=field)
    return tuple(_template(item, field) for item in items)


def _template(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise TableError(f"{shorten(value)} is not a name.", field=field)
    with located(field=field):
        return parse_template(value).text


def _reason(value: object) -> str:
    if value is None:
        return ""
    reason = string(value, "drop")
    if not reason.strip():
        raise TableError("A dropped tensor needs a reason.", field="drop", remedy='Write why: drop = "...".')
    return reason


def _axes(value: object) -> AxisMap | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise TableError(f"{shorten(value)} is not an axis line in quotes.", field="axes")
    with located(field="axes"):
        return parse_axes(value)


def _when(value: object) -> Expression | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise TableError(f"{shorten(value)} is not an expression in quotes.", field="when")
    with located(field="when"):
        return parse_expression(value)


def _dtypes(value: object) -> tuple[str, str]:
    sides: Mapping[str, object] = value if isinstance(value, dict) else {"pt": value, "ms": value}
    for side, name in sides.items():
        if side not in ("pt", "ms"):
            raise TableError(f"'{side[:60]}' is not a side; there are pt and ms.", field="dtype")
        if not isinstance(name, str) or (name and name != "keep" and name not in DTYPE_NAMES):
            raise TableError(
                f"{shorten(name)} is neither 'keep' nor a dtype.",
                field="dtype",
                remedy=nearest(name if isinstance(name, str) else "", (*DTYPE_NAMES, "keep")),
            )
    return str(sides.get("pt", "")), str(sides.get("ms", ""))


# --- what must fit together ------------------------------------------------------------------


def _check_sides(pt: Sequence[str], ms: Sequence[str], drop: str, tied: str) -> None:
    if drop and tied:
        raise TableError("A tensor is either dropped or tied.", field="tied")
    if drop and bool(pt) == bool(ms):
        raise TableError("A dropped tensor has names on one side only.", field="drop", remedy="Give pt, or ms.")
    if tied and (len(pt) > 1 or len(ms) > 1 or not (pt or ms)):
        raise TableError("A tied rule has one name on a side.", field="tied", remedy="Write a rule for each name.")
    if not drop and not tied and not pt:
        raise TableError("The rule has no names on the PyTorch side.", field="pt")


def _check_indices(rule: Rule, sections: Sections) -> None:
    there = set(indices((*rule.pt, *rule.ms), sections.index))
    used: dict[str, frozenset[str]] = {}
    if rule.when is not None:
        used["when"] = rule.when.names
    if rule.tied:
        used["tied"] = parse_template(rule.tied).names
    for field, names in used.items():
        missing = sorted((names & sections.index.keys()) - there)
        if missing:
            raise TableError(f"The index '{missing[0]}' does not stand in the rule's names.", field=field)


def _check_rename(rule: Rule) -> None:
    if not rule.drop and (len(rule.pt) > 1 or len(rule.ms) > 1):
        raise TableError(
            "A rule with several names on a side needs axes that say how they correspond.",
            field="axes",
            remedy="Write axes, or a rule for each name.",
        )


def _check_operands(rule: Rule, line: AxisMap, sections: Sections) -> None:
    if "->" in line.text and (rule.drop or rule.tied):
        raise TableError("What is dropped or tied has a shape only: there is no '->'.")
    free = line.names - sections.sizes.keys() - sections.index.keys()
    if free - line.lone:
        raise TableError(
            f"The axis '{min(free - line.lone)}' has no size, and is not a whole dimension everywhere.",
            axes=line.text,
            remedy=f"Give '{min(free - line.lone)}' an expression in [sizes].",
        )
    named = indices((*rule.pt, *rule.ms), sections.index)
    pt_index, ms_index = index_axes(rule, sections.index)
    both = line.names & set(named) - pt_index - ms_index
    if both:
        raise TableError(
            f"'{min(both)}' enumerates the rule's names, so it cannot be an axis as well.",
            axes=line.text,
            remedy="An index axis stands in the names of one side only.",
        )
    for side, templates, operands, index in (
        ("pt", rule.pt, line.left, pt_index),
        ("ms", rule.ms, line.right, ms_index),
    ):
        if templates and len(templates) != len(operands):
            raise TableError(
                f"There are {len(templates)} name(s) on the {side} side and {len(operands)} operand(s) in its axes.",
                axes=line.text,
                remedy="Write one operand for each name, separated by commas.",
            )
        for text, dims in zip(templates, operands, strict=False):
            _check_index_axes(text, dims, index, line)


def _check_index_axes(text: str, dims: Dims, index: frozenset[str], line: AxisMap) -> None:
    """Each operand has an index axis both in its name and as a dimension, or not at all."""
    whole = {node.name for node in dims if isinstance(node, Axis)}
    for name in sorted(index):
        if (name in parse_template(text).names) != (name in whole):
            raise TableError(
                f"The index '{name}' must stand both in an operand's name and as a dimension by itself, or in neither.",
                axes=line.text,
                name=text,
            )
