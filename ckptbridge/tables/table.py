"""Mapping tables: TOML into frozen dataclasses, each error naming file, rule number and field.

``mappings/README.md`` teaches the language. What is checked here needs no config; what depends on
one is :mod:`ckptbridge.tables.expand`'s and :mod:`ckptbridge.tables.proof`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptbridge.errors import TableError
from ckptbridge.tables.expressions import Expression
from ckptbridge.tables.messages import located
from ckptbridge.tables.rules import Rule, parse_rule
from ckptbridge.tables.sections import Fp8, Root, parse_head, parse_sections
from ckptbridge.tables.sources import read_source

__all__ = ["Fp8", "Root", "Rule", "Table", "load_table"]

MAX_RULES = 5000


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping table.

    ``sizes``, and ``roots``, stand in an order in which each needs only earlier ones; ``strings``
    are templates over roots. ``digest`` identifies the contents, includes and all, independent of
    where they lie.
    """

    family: str
    model_types: tuple[str, ...]
    target: str
    default: bool
    summary: str
    index: Mapping[str, Expression]
    sizes: Mapping[str, Expression]
    layout: Mapping[str, tuple[str, ...]]
    strings: Mapping[str, str]
    roots: Mapping[str, Root]
    defaults: Mapping[str, object]
    fp8: Fp8 | None
    rules: tuple[Rule, ...]
    path: Path
    digest: str

    @property
    def name(self) -> str:
        """``family/target``, as messages and provenance call the table."""
        return f"{self.family}/{self.target}"


def load_table(path: Path) -> Table:
    """Read a table with its includes and check all that needs no config.

    Raises TableError naming the file, the rule's number and the field.
    """
    source = read_source(path)
    with located(file=path.name):
        head = parse_head(source.head)
        sections = parse_sections(source.sections)
        if not 0 < len(source.rules) <= MAX_RULES:
            raise TableError(f"The table has {len(source.rules)} rules; from 1 to {MAX_RULES} are read.", field="rule")
    rules = []
    for raw in source.rules:
        with located(file=raw.file, rule=raw.number):
            rules.append(parse_rule(raw, sections))
    return Table(
        family=head.family,
        model_types=head.model_types,
        target=head.target,
        default=head.default,
        summary=head.summary,
        index=sections.index,
        sizes=sections.sizes,
        layout=sections.layout,
        strings=sections.strings,
        roots=sections.roots,
        defaults=sections.defaults,
        fp8=sections.fp8,
        rules=tuple(rules),
        path=path,
        digest=source.digest,
    )
