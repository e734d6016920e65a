"""What the names of a table mean for one config: layout, roots, strings, sizes, index ranges, config values."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ckptbridge.errors import ConfigError, CoverageError, UsageError
from ckptbridge.tables.expressions import ABSENT, LIMIT
from ckptbridge.tables.messages import located, nearest, shorten
from ckptbridge.tables.names import parse_template
from ckptbridge.tables.table import Table

MAX_NAMES = 1_000_000  # tensors of one side; DeepSeek-V3 has 45,000


def choose_layout(table: Table, given: Mapping[str, str]) -> dict[str, str]:
    """The value of each layout option, the first where none is given. Raises UsageError for unknown ones."""
    for key, value in given.items():
        if key not in table.layout:
            known = "; ".join(f"{k} = {' or '.join(v)}" for k, v in table.layout.items())
            raise UsageError(
                f"{table.name} has no layout option '{key}'.",
                option=f"--layout {key}={value}",
                remedy=f"{nearest(key, table.layout)} Options: {known}." if known else "It has no layout options.",
            )
        if value not in table.layout[key]:
            raise UsageError(
                f"The layout option '{key}' of {table.name} is never '{value}'.",
                option=f"--layout {key}={value}",
                remedy=f"Use one of: {', '.join(table.layout[key])}.",
            )
    return {key: given.get(key, values[0]) for key, values in table.layout.items()}


def choose_roots(
    table: Table, side: str, names: Collection[str], given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Which choice of each root a checkpoint uses, from its tensor names on ``side`` (``pt`` or ``ms``).

    What is ``given`` (by provenance or by the user) is taken. Otherwise the one choice whose anchor is
    among ``names``; a root without an anchor on this side takes its first choice. Raises CoverageError
    when no anchor is there, or several are, and UsageError for an unknown root or choice.
    """
    given = given or {}
    _check_given(table, given)
    # A set lookup for each choice, whatever collection it is.
    there = names if isinstance(names, (set, frozenset, Mapping)) else frozenset(names)
    roots: dict[str, str] = {}
    for key, root in table.roots.items():
        anchor = root.pt if side == "pt" else root.ms
        if key in given or not anchor:
            roots[key] = given.get(key, root.choices[0])
            continue
        template = parse_template(anchor)
        candidates: dict[str, str] = {}
        for choice in root.choices:
            known = _constants(table, {**roots, key: choice}, template.names)
            candidates[choice] = template.render(lambda name, known=known: known.get(name, ABSENT))  # type: ignore[misc]
        found = [choice for choice, name in candidates.items() if name in there]
        if len(found) != 1:
            listed = ", ".join(f"'{name}'" for name in candidates.values())
            raise CoverageError(
                f"None of {listed} is there, so the prefix '{key}' cannot be told."
                if not found
                else f"More than one of {listed} is there, so the prefix '{key}' is ambiguous.",
                table=table.name,
                remedy=f"Check that the checkpoint is a {table.family} model with {side} names.",
            )
        roots[key] = found[0]
    return roots


def default_roots(table: Table, given: Mapping[str, str] | None) -> dict[str, str]:
    """The given choices, and the first for every other root."""
    given = given or {}
    _check_given(table, given)
    return {key: given.get(key, root.choices[0]) for key, root in table.roots.items()}


def _check_given(table: Table, given: Mapping[str, str]) -> None:
    for key, value in given.items():
        if key not in table.roots:
            raise UsageError(f"{table.name} has no root '{key}'.", remedy=nearest(key, table.roots))
        if value not in table.roots[key].choices:
            listed = ", ".join(f"'{c}'" for c in table.roots[key].choices)
            raise UsageError(f"The root '{key}' of {table.name} is never '{value}'.", remedy=f"Use one of: {listed}.")


def _constants(table: Table, roots: Mapping[str, str], wanted: Collection[str]) -> dict[str, str]:
    """``roots``, and those of the table's strings that are ``wanted``, with the roots put in."""
    known = dict(roots)
    for key, text in table.strings.items():
        if key in wanted:
            known[key] = parse_template(text).render(lambda name: roots.get(name, ABSENT)) if text else ""
    return known


class Scope:
    """What a name means outside of any index; call it as an expression's lookup.

    The table's own names win over the config's, and the config over the table's defaults. Sizes
    are computed at once, but one that the config does not give is an error only when it is used:
    a model without experts need not say how many there are.
    """

    def __init__(
        self, table: Table, config: Mapping[str, object], layout: Mapping[str, str], roots: Mapping[str, str]
    ) -> None:
        self.table = table
        self.config = config
        self.known: dict[str, object] = {**_constants(table, roots, table.strings), **layout}
        self.failed: dict[str, ConfigError] = {}
        for key, expression in table.sizes.items():
            try:
                with located(file=table.path.name, field=f"sizes.{key}"):
                    # A size that is named like a config value reads that value in its own expression.
                    self.known[key] = expression.evaluate(
                        lambda name, key=key: self.configured(name) if name == key else self(name)  # type: ignore[misc]
                    )
            except ConfigError as error:
                self.failed[key] = error
        self.counts: dict[str, int] = {}

    def __call__(self, name: str) -> object:
        if name in self.known:
            return self.known[name]
        if name in self.failed:
            raise self.failed[name]
        return self.configured(name)

    def configured(self, name: str) -> object:
        value = self.config.get(name, ABSENT)
        return self.table.defaults.get(name, ABSENT) if value is ABSENT else value

    def count(self, index: str) -> int:
        """How many values an index has. Raises ConfigError unless it is between 0 and MAX_NAMES."""
        if index not in self.counts:
            with located(file=self.table.path.name, field=f"index.{index}"):
                expression = self.table.index[index]
                value = expression.evaluate(self)
                if type(value) is not int or not 0 <= value <= MAX_NAMES:
                    raise ConfigError(
                        f"The index '{index}' ranges over {shorten(value)} values.",
                        expression=expression.text,
                        remedy=f"Check the config: it must give an integer from 0 to {MAX_NAMES}.",
                    )
            self.counts[index] = value
        return self.counts[index]

    def length(self, axis: str) -> int | None:
        """The length of an axis, None for one that only the tensors give. Raises ConfigError unless it is positive."""
        if axis in self.table.index:
            value: object = self.count(axis)
            field, expression = f"index.{axis}", self.table.index[axis]
        elif axis in self.table.sizes:
            value = self(axis)
            field, expression = f"sizes.{axis}", self.table.sizes[axis]
        else:
            return None
        if type(value) is not int or not 0 < value < LIMIT:
            absent = [n for n in sorted(expression.names) if self.configured(n) is ABSENT and n not in self.known]
            raise ConfigError(
                f"The axis '{axis}' has the length {shorten(value)}; it must be a positive integer.",
                file=self.table.path.name,
                field=field,
                expression=expression.text,
                remedy=f"The config has no value for {', '.join(absent)}." if absent else "Check the config's values.",
            )
        return value
