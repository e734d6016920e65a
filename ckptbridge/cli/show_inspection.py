"""What ``ckptbridge inspect`` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptbridge.cli.fold import fold
from ckptbridge.cli.show import human_bytes
from ckptbridge.errors import printable
from ckptbridge.formats.tensors import TensorSpec

if TYPE_CHECKING:
    from ckptbridge.conversion.inspection import Inspection, Step
    from ckptbridge.conversion.statistics import Statistics
    from ckptbridge.tables.recognise import Candidate

_WIDEST = 64  # a longer name does not push the next column away from all others
_FILES_SHOWN = 3
_VALUE = 160  # characters of a string entry
_SIDES = {"pt": "PyTorch", "ms": "MindSpore"}


def inspection_lines(found: Inspection, as_tree: bool) -> list[str]:
    """The checkpoint on one screen: what it is, then its tensors, layers folded; safe for a terminal."""
    lines = [f"{name:9} {text}" for name, text in _facts(found)]
    lines.append("")
    if found.statistics:
        lines += statistics_lines(found.tensors, found.statistics)
    elif as_tree:
        lines += tree_lines(found.tensors)
    else:
        lines += tensor_lines(found.tensors)
    return [printable(line) for line in lines]


def human_count(n: int) -> str:
    """A number of parameters: ``22.7 M``."""
    value = float(n)
    for unit in ("", "K", "M", "B", "T"):
        if value < 1000 or unit == "T":
            break
        value /= 1000
    return f"{value:.1f} {unit}" if unit else str(n)


# --- what it is ------------------------------------------------------------------------------


def _facts(found: Inspection) -> Iterator[tuple[str, str]]:
    yield "path", str(found.path)
    yield "format", found.format + (f", {len(found.shards)} shards" if len(found.shards) > 1 else "")
    yield "tensors", f"{found.count}, {human_count(found.parameters)} parameters, {human_bytes(found.nbytes)}"
    yield "dtypes", ", ".join(f"{name} ({count})" for name, count in found.dtypes.items())
    if len(found.shards) > 1:
        shown = [f"{path.name} ({human_bytes(nbytes)})" for path, nbytes in found.shards[:_FILES_SHOWN]]
        yield "shards", ", ".join(shown) + _more(len(found.shards) - _FILES_SHOWN)
    if found.model_type:
        yield "config", f"model type {found.model_type}"
    yield from _tables(found)
    for note in found.notes:
        yield "note", note
    for title, pairs, why in (
        ("alias", found.aliases, "shares the storage of"),
        ("tied", found.tied, "was an equal copy of"),
    ):
        for row in fold(((a, b), ()) for a, b in pairs.items()):
            yield title, f"{row.names[0]} {why} {row.names[1]}"
    for key, text in found.strings.items():
        yield "string", f"{key} = {text[:_VALUE]}{'...' if len(text) > _VALUE else ''}"
    for name, value in found.scalars.items():
        yield "scalar", f"{name} = {value}"
    for number, step in enumerate(found.history, 1):
        yield "history" if number == 1 else "", f"{number}. {_step(step)}"


def _tables(found: Inspection) -> Iterator[tuple[str, str]]:
    """The tables that fit, those of one family and side in one line, with the reason; or the nearest, and why not."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[Candidate]] = {}
    for c in found.candidates:
        if c.fits:
            groups.setdefault((c.side, c.family, c.reasons), []).append(c)
    said: tuple[str, ...] = ()
    for (side, _, reasons), members in groups.items():
        tables = ", ".join(c.table + (" (default)" if c.default else "") for c in members)
        why = "" if reasons == said else f": {'; '.join(reasons)}"
        yield "table", f"{tables}, by its {_SIDES[side]} names{why}"
        said = reasons
    if groups:
        return
    if not found.candidates:
        yield "table", "none fits; 'ckptbridge mappings suggest' makes one from two checkpoints"
    for c in found.candidates:
        yield "table", f"none fits; {c.table} comes nearest" if c.known else f"{c.table} does not fit as it is"
        for reason in c.reasons:
            yield "", f"  {reason}"


def _step(step: Step) -> str:
    layout = ", ".join(f"{key}={value}" for key, value in step.layout.items())
    parts = [f"{step.direction or 'unknown step'}" + (f" by {step.table}" if step.table else "")]
    if layout:
        parts[0] += f" ({layout})"
    if step.source:
        parts.append(f"from {step.source}" + (f" ({step.files} files)" if step.files > 1 else ""))
    if step.dtype and not step.lossy:
        parts.append(f"cast to {step.dtype}")
    parts += step.lossy
    if step.dropped:
        parts.append(f"{step.dropped} tensors dropped")
    parts.append(step.tool)
    parts += [f"{key}={value}" for key, value in step.notes.items()]
    return ", ".join(parts)


def _more(n: int) -> str:
    return f" and {n} more" if n > 0 else ""


# --- its tensors -----------------------------------------------------------------------------


def tensor_lines(specs: Iterable[TensorSpec]) -> list[str]:
    """Names, dtypes and shapes, those that differ only in their numbers folded."""
    rows = fold(((spec.name,), (spec.dtype.name, str(list(spec.shape)))) for spec in specs)
    cells = [(row.names[0], f"{row.rest[0]} {row.rest[1]}", f"x{row.count}" if row.count > 1 else "") for row in rows]
    return columns(cells)


def tree_lines(specs: Iterable[TensorSpec]) -> list[str]:
    """The names as a tree, with the parameters below each component."""
    from ckptbridge.cli.tree import tree

    cells = []
    for row in tree(specs):
        times = f"  x{row.times}" if row.times > 1 else ""
        about = f"{row.tensor.dtype.name} {list(row.tensor.shape)}" if row.tensor is not None else ""
        cells.append((f"{'  ' * row.depth}{row.label}{times}", human_count(row.parameters), about))
    return columns(cells)


def statistics_lines(specs: Iterable[TensorSpec], statistics: Mapping[str, Statistics]) -> list[str]:
    """A line a tensor: the numbers first, since names have any length."""
    head = f"{'min':>11} {'max':>11} {'mean':>11} {'std':>11} {'zeros':>9}  tensor"
    lines = [head]
    for spec in specs:
        about = f"{spec.name}  {spec.dtype} {list(spec.shape)}"
        values = statistics.get(spec.name)
        if values is None:
            lines.append(f"{'no order':>11} {'':45}  {about}")
            continue
        numbers = [_number(v) for v in (values.minimum, values.maximum, values.mean, values.std)]
        odd = ", ".join(f"{n} {what}" for n, what in ((values.nan, "NaN"), (values.inf, "Inf")) if n)
        lines.append(" ".join(numbers) + f" {values.zeros:>9}  {about}" + (f"  {odd}" if odd else ""))
    return lines


def _number(value: float | None) -> str:
    return f"{'-' if value is None else format(value, '.5g'):>11}"


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Cells under each other, the last column as it comes."""
    count = max((len(row) for row in rows), default=0)
    widths = [min(_WIDEST, max(len(printable(row[k])) for row in rows)) for k in range(count - 1)]
    return [
        "  ".join([*(printable(cell).ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
