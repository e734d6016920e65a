"""What ``ckptbridge mappings`` prints: the list, one table's rules or tensors, the results of proofs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from ckptbridge.cli.fold import fold
from ckptbridge.errors import printable
from ckptbridge.tables.check import Checked
from ckptbridge.tables.expand import Entry, Expansion
from ckptbridge.tables.pairings import Evidence
from ckptbridge.tables.suggest import Suggestion
from ckptbridge.tables.table import Rule, Table


def list_lines(tables: Sequence[Table]) -> list[str]:
    """A line a table, in columns: family, target, layout options, model types."""
    rows = [("FAMILY", "TARGET", "LAYOUT", "MODEL TYPES")]
    for table in tables:
        layout = "; ".join(f"{key}={'|'.join(values)}" for key, values in table.layout.items())
        target = f"{table.target} *" if table.default else table.target
        rows.append((table.family, target, layout or "-", ", ".join(table.model_types)))
    widths = [max(len(row[k]) for row in rows) for k in range(3)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
    return [*lines, "", "* is taken without --target; of a layout option, the first value is taken without --layout."]


def list_dict(table: Table) -> dict[str, object]:
    """A table's entry in ``mappings list --json``."""
    return {
        "family": table.family,
        "target": table.target,
        "default": table.default,
        "summary": table.summary,
        "layout": {key: list(values) for key, values in table.layout.items()},
        "model_types": list(table.model_types),
    }


# --- one table -------------------------------------------------------------------------------


def table_lines(table: Table) -> list[str]:
    """A table as written: its sections, and its rules as text."""
    lines = [f"{table.name}: {table.summary}" if table.summary else table.name, ""]
    facts = [("model types", ", ".join(table.model_types)), ("digest", table.digest)]
    facts += [("layout", f"{key} = {' or '.join(values)}") for key, values in table.layout.items()]
    facts += [("root", f"{key} = {' or '.join(map(repr, root.choices))}") for key, root in table.roots.items()]
    facts += [("index", f"{key} from 0 to {expression.text} - 1") for key, expression in table.index.items()]
    facts += [("size", f"{key} = {expression.text}") for key, expression in table.sizes.items()]
    facts += [("string", f"{key} = '{text}'") for key, text in table.strings.items()]
    facts += [("default", f"{key} = {value!r}") for key, value in table.defaults.items()]
    if table.fp8:
        facts.append(("fp8", f"scales *{table.fp8.suffix}, blocks of {table.fp8.block.text}"))
    lines += [printable(f"{name:12} {text}") for name, text in facts]
    for rule in table.rules:
        lines += ["", *map(printable, _rule_lines(rule))]
    return lines


def rule_dict(rule: Rule) -> dict[str, object]:
    """A rule in ``mappings show --json``."""
    return {
        "file": rule.file,
        "number": rule.number,
        "pt": list(rule.pt),
        "ms": list(rule.ms),
        "axes": rule.axes.text if rule.axes else None,
        "when": rule.when.text if rule.when else None,
        "optional": rule.optional,
        "drop": rule.drop or None,
        "tied": rule.tied or None,
        "dtype": {"pt": rule.dtype_pt or None, "ms": rule.dtype_ms or None},
    }


def _rule_lines(rule: Rule) -> Iterator[str]:
    yield f"{rule}" + (f", when {rule.when.text}" if rule.when else "")
    yield from _sides(rule.pt, rule.ms)
    if rule.axes:
        yield f"    {rule.axes.text}"
    for text in _remarks(rule):
        yield f"    {text}"


def _sides(pt: Sequence[object], ms: Sequence[object]) -> Iterator[str]:
    for mark, names in ((" ", pt), ("=", ms)):
        for k, name in enumerate(names):
            yield f"  {' ' if k else mark} {name}"


def _remarks(rule: Rule) -> Iterator[str]:
    if rule.drop:
        yield f"dropped: {rule.drop}"
    if rule.tied:
        yield f"tied: absent, or equal to {rule.tied}"
    if rule.optional:
        yield "optional"
    if rule.dtype_pt or rule.dtype_ms:
        same = rule.dtype_pt == rule.dtype_ms
        yield f"dtype: {rule.dtype_pt}" if same else f"dtype: {rule.dtype_pt or 'any'} = {rule.dtype_ms or 'any'}"


# --- a table and a config --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Tensors of one shape whose names differ only in their numbers; shape None: the config leaves it open."""

    name: str
    shape: tuple[int, ...] | None

    def __str__(self) -> str:
        return f"{self.name} {'[any]' if self.shape is None else list(self.shape)}"


@dataclass(frozen=True, slots=True)
class FoldedEntry:
    """Entries of one rule that differ only in their numbers."""

    rule: str
    times: int
    pt: tuple[_Tensors, ...]
    ms: tuple[_Tensors, ...]
    axes: str
    remarks: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """The entry in ``mappings show --json``."""
        return {
            "rule": self.rule,
            "times": self.times,
            "pt": [{"name": t.name, "shape": None if t.shape is None else list(t.shape)} for t in self.pt],
            "ms": [{"name": t.name, "shape": None if t.shape is None else list(t.shape)} for t in self.ms],
            "axes": self.axes or None,
            "remarks": list(self.remarks),
        }


def folded_entries(entries: Iterable[Entry]) -> list[FoldedEntry]:
    """The entries, those that differ only in their numbers as one."""
    rows: list[tuple[list[str], tuple[FoldedEntry]]] = []
    for entry in entries:
        pt, ms = _folded(entry.pt, entry.pt_shapes), _folded(entry.ms, entry.ms_shapes)
        nameless = FoldedEntry(
            str(entry.rule),
            0,
            tuple(replace(t, name="") for t in pt),
            tuple(replace(t, name="") for t in ms),
            "" if entry.rule.axes is None or entry.rule.axes.identity else entry.form.text,
            tuple(_remarks(entry.rule)),
        )
        rows.append(([t.name for t in (*pt, *ms)], (nameless,)))
    found = []
    for row in fold(rows):
        like = cast(FoldedEntry, row.rest[0])
        names = iter(row.names)
        pt = tuple(replace(t, name=next(names)) for t in like.pt)
        ms = tuple(replace(t, name=next(names)) for t in like.ms)
        found.append(replace(like, times=row.count, pt=pt, ms=ms))
    return found


def _folded(names: Sequence[str], shapes: Sequence[tuple[int, ...]] | None) -> tuple[_Tensors, ...]:
    """One entry's tensors of a side; experts folded."""
    rows = fold(((name,), (shapes[k] if shapes else None,)) for k, name in enumerate(names))
    return tuple(_Tensors(row.names[0], cast("tuple[int, ...] | None", row.rest[0])) for row in rows)


def expansion_lines(expansion: Expansion) -> list[str]:
    """The tensors of both sides with their shapes, layers and experts folded, and what is tied or dropped."""
    table = expansion.table
    lines = [f"{table.name}: {table.summary}" if table.summary else table.name]
    for title, values in (
        ("layout", expansion.layout),
        ("roots", {key: repr(value) for key, value in expansion.roots.items()}),
        ("index", {key: f"0..{count - 1}" for key, count in expansion.counts.items() if count}),
        ("sizes", expansion.sizes),
    ):
        if values:
            lines.append(f"{title:7} " + ", ".join(f"{key}={value}" for key, value in values.items()))
    for entry in folded_entries(expansion.entries):
        lines.append("")
        lines.append(entry.rule + (f"  x{entry.times}" if entry.times > 1 else ""))
        lines += _sides(entry.pt, entry.ms)
        lines += [f"    {text}" for text in ((entry.axes,) if entry.axes else ()) + entry.remarks]
    mapped = [entry for entry in expansion.entries if entry.kind == "map"]
    pt, ms = (sum(len(names) for names in side) for side in ([e.pt for e in mapped], [e.ms for e in mapped]))
    return [*map(printable, lines), "", f"{pt} PyTorch tensors = {ms} MindSpore tensors"]


# --- proofs ----------------------------------------------------------------------------------


def checked_lines(checked: Checked, file: Path | None) -> list[str]:
    """One table's result in one line, under its file's name if one was given; below it the counter-example."""
    name = f"{file or checked.table.name!s:28}"
    if checked.counter_example is not None:
        error = [f"  {line}" for line in str(checked.counter_example).splitlines()]
        return [f"{printable(name)} FAILED  after {checked.proved} case(s) that hold", *error]
    largest = checked.largest
    sizes = f"{largest.pt_names} = {largest.ms_names} tensors, {largest.elements} elements" if largest else ""
    configs = f"{len(checked.configs)} config(s)" if checked.configs else "without a config"
    return [printable(f"{name} proved  {configs}, {checked.proved} case(s), up to {sizes}")]


# --- suggestions -----------------------------------------------------------------------------


def suggestion_dict(found: Suggestion) -> dict[str, object]:
    """What a suggestion rests on, in ``mappings suggest --json``."""
    return {
        "rules": len(found.pairings),
        "verified_by_value": found.count(Evidence.VALUE),
        "by_name": found.count(Evidence.NAME),
        "doubtful": found.count(Evidence.DOUBTFUL),
        "tied": len(found.tied),
        "dropped": sum(len(c.members) for c, _ in found.dropped),
        "left_pt": list(found.left_pt),
        "left_ms": list(found.left_ms),
    }


def suggestion_line(found: Suggestion, output: Path | None) -> str:
    """The last line of ``mappings suggest``."""
    counts = ", ".join(f"{found.count(evidence)} {evidence.value}" for evidence in Evidence)
    left = f"{len(found.left_pt)} PyTorch and {len(found.left_ms)} MindSpore tensor(s) are left over"
    where = f"wrote {printable(output)}: " if output else ""
    return f"{where}{len(found.pairings)} rule(s), unproved: {counts}; {left}"
