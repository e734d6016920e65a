"""What convert and verify print: what was understood, the plan as a table, progress, the last line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from ckptbridge.cli.fold import fold
from ckptbridge.errors import printable

if TYPE_CHECKING:  # what only annotates is not loaded: inspect prints by this module, too
    from ckptbridge.conversion.plan import Allowed, Change, Plan, Record
    from ckptbridge.conversion.run import Summary
    from ckptbridge.conversion.tally import Progress
    from ckptbridge.formats.tensors import Inventory
    from ckptbridge.tables.expand import Expansion
    from ckptbridge.verification.handoff import Handoff

_SOURCES_SHOWN = 4
_NAMES_SHOWN = 8


def understood_lines(plan: Plan) -> list[str]:
    """What source, table, layout and sizes were understood, what is cast or absent, before the long work."""
    lines = [_side_line("source", plan.inventory), *_table_lines(plan.expansion)]
    lines += [_change_line(change) for change in plan.changes]
    notes = [*plan.notes, *(_allowed_note(allowed) for allowed in plan.allowed)]
    return [*lines, *(f"note    {printable(note)}" for note in notes)]


def _change_line(change: Change) -> str:
    how = "dequantised, " if change.step == "dequantise" else ""
    loss = "lossy" if change.lossy else "lossless"
    return f"cast    {change.source} -> {change.target} ({_tensors(change.tensors)}, {how}{loss})"


def _allowed_note(allowed: Allowed) -> str:
    names = [row.names[0] for row in fold(((name,), ()) for name in allowed.names)]
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    listed = ", ".join(names[:_NAMES_SHOWN]) + more
    return f"{_tensors(len(allowed.names))} {allowed.kind}, allowed by {allowed.by}: {listed}"


def _tensors(count: int) -> str:
    return f"{count} tensor" + ("s" if count != 1 else "")


def compared_lines(handoff: Handoff) -> list[str]:
    """What verify has understood, before the long work: both sides, table, layout and sizes."""
    sides = (("pt", handoff.pt), ("ms", handoff.ms))
    lines = [_side_line(name, side.inventory) for name, side in sides if side is not None]
    return [*lines, *_table_lines(handoff.known.expansion)]


def _side_line(title: str, inventory: Inventory) -> str:
    return (
        f"{title:<7} {printable(inventory.path)}: {inventory.format}, {len(inventory.tensors)} tensors, "
        f"{human_bytes(inventory.nbytes)} in {len(inventory.files)} file(s)"
    )


def _table_lines(expansion: Expansion) -> list[str]:
    layout = ", ".join(f"{k}={v}" for k, v in expansion.layout.items())
    sizes = ", ".join(f"{k}={v}" for k, v in expansion.sizes.items())
    lines = [f"table   {expansion.table.name}" + (f" ({layout})" if layout else "")]
    return [*lines, f"sizes   {sizes}"] if sizes else lines


def plan_table(plan: Plan, room: int) -> str:
    """The plan, layers folded: target, dtype and shape, sources, rule and layout; then what is left out.

    ``room`` is the number of bytes that the whole output would take.
    """
    lines = understood_lines(plan)
    for file in plan.files:
        lines.append("")
        lines.append(f"{printable(file.name)}  {human_bytes(file.layout.size)}, {len(file.records)} tensors")
        for row in fold(_row(record) for record in file.records):
            dtype, shape, rule, axes, more = row.rest
            target, *sources = row.names
            times = f"  x{row.count}" if row.count > 1 else ""
            lines.append(f"  {printable(target)}  {dtype}{shape}{times}")
            joined = ", ".join(map(printable, sources)) + (f" and {more} more" if more else "")
            lines.append(f"    <- {joined}")
            lines.append(f"       {printable(rule)}" + (f": {printable(axes)}" if axes else ""))
    for title, names in (
        ("dropped", {d.name: d.reason for d in plan.dropped}),
        ("missing, allowed", dict.fromkeys(plan.absent, "")),
    ):
        if names:
            lines.append("")
            lines.append(f"{title}: {len(names)}")
            for folded in fold(((name,), (reason,)) for name, reason in names.items()):
                reason = f": {printable(folded.rest[0])}" if folded.rest[0] else ""
                lines.append(f"  {printable(folded.names[0])}{reason}")
    lines.append("")
    lines.append(
        f"{len(plan.records)} tensors, {human_bytes(plan.nbytes)} of weights, {human_bytes(room)} in all, would be "
        f"written to {printable(plan.destination)}; nothing was written."
    )
    return "\n".join(lines)


def _row(record: Record) -> tuple[list[str], tuple[str, str, str, str, int]]:
    spec = record.spec
    shown = record.sources[:_SOURCES_SHOWN]
    arrow = "" if all(s.spec.dtype == spec.dtype for s in shown) else f"{shown[0].spec.dtype} -> "
    return [spec.name, *(s.spec.name for s in shown)], (
        f"{arrow}{spec.dtype}",
        str(list(spec.shape)),
        record.rule,
        record.axes,
        len(record.sources) - len(shown),
    )


@contextmanager
def progress_bar(nbytes: int, silent: bool) -> Iterator[Progress | None]:
    """Bytes, rate and time left on standard error; nothing when it is not a terminal."""
    if silent or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=nbytes, unit="B", unit_scale=True, file=sys.stderr, leave=False) as bar:
        yield bar.update


class ComparisonBar:
    """The bar of a comparison, whose size is known only once both sides were understood; it goes with ``stack``."""

    def __init__(self, stack: ExitStack, silent: bool) -> None:
        self._stack = stack
        self._silent = silent
        self._update: Progress | None = None

    def start(self, handoff: Handoff) -> None:
        """Show the bar, as long as what the conversion wrote."""
        if handoff.made is not None:
            self._update = self._stack.enter_context(progress_bar(handoff.made.inventory.nbytes, self._silent))

    def update(self, nbytes: int) -> None:
        """Move on by the bytes of one tensor."""
        if self._update is not None:
            self._update(nbytes)


def summary_line(summary: Summary) -> str:
    """The last line: what was written, how many tensors and bytes, how long."""
    files = [file.name for file in summary.plan.files]
    where = printable(summary.plan.destination)
    shards = f" ({len(files)} shards)" if len(files) > 1 else ""
    kept = f" ({human_bytes(summary.kept)} of them by an earlier run)" if summary.kept else ""
    lost = ""
    if summary.overflow or summary.underflow:
        lost = f"; {summary.overflow} value(s) became infinite and {summary.underflow} zero"
    return (
        f"wrote {where}{shards}: {summary.tensors} tensors, {human_bytes(summary.nbytes)} ({summary.nbytes} bytes)"
        f"{kept}, in {summary.seconds:.1f} s{lost}"
    )


def human_bytes(n: int) -> str:
    """A number of bytes in decimal units: ``2.1 GB``."""
    value = float(n)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{n} B" if unit == "B" else f"{value:.1f} {unit}"
