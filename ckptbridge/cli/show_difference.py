"""What ``ckptbridge diff`` prints."""

from __future__ import annotations

from collections.abc import Iterator

from ckptbridge.cli.fold import fold
from ckptbridge.errors import printable
from ckptbridge.verification.differences import Change, Difference, Shape
from ckptbridge.verification.report import short

_MARKS = {"removed": "-", "added": "+", "shape": "!", "dtype": "!", "values": "~"}


def difference_lines(found: Difference) -> list[str]:
    """A line a change, those that differ only in their numbers folded; the tally last; safe for a terminal."""
    lines = [f"note: {note}" for note in found.notes]
    rows = fold(((c.name, *c.counterpart[:1]), (c.kind, c.a, c.b, len(c.counterpart), c.note)) for c in found.changes)
    for row in rows:
        members = [found.changes[k] for k in row.rows]
        mark = _MARKS[members[0].kind]
        names = row.names[0]
        if len(row.names) > 1:
            names += f" = {row.names[1]}" + (" ..." if len(members[0].counterpart) > 1 else "")
        times = f"  x{row.count}" if row.count > 1 else ""
        lines.append(f"{mark} {members[0].kind:7} {names}{times}  {', '.join(_what(members))}")
    lines.append(_tally(found))
    return [printable(line) for line in lines]


def _what(members: list[Change]) -> Iterator[str]:
    """What changed, of one or of several tensors that are alike."""
    one = members[0]
    if one.kind in ("removed", "added"):
        yield _about(one.a or one.b)
    elif one.kind in ("shape", "dtype"):
        yield f"{_about(one.a)} -> {_about(one.b)}" if one.a and one.b else _about(one.a or one.b)
    differing = sum(c.differing for c in members)
    if differing:
        yield f"{differing} of {sum(c.elements for c in members)} elements"
        if len(members) == 1 and one.first is not None:
            yield f"first at {list(one.first)}"
        finite = [c for c in members if c.differing and c.max_abs is not None]
        if len(finite) < sum(c.differing > 0 for c in members):
            yield "some not finite"
        elif len(finite) == 1:
            yield f"max |a-b| {short(finite[0].max_abs or 0.0)}"
        else:
            worst = max(finite, key=lambda c: c.max_abs or 0.0)
            yield f"max |a-b| {short(worst.max_abs or 0.0)} in {worst.name}"
    if one.note:
        yield one.note


def _about(side: tuple[str, Shape] | None) -> str:
    return f"{side[0]} {list(side[1])}" if side is not None else ""


def _tally(found: Difference) -> str:
    left_out = f", {found.left_out} left out by the table" if found.left_out else ""
    if not found.changes:
        return f"same: {found.same} tensors equal bit for bit{left_out}"
    counts: dict[str, int] = {}
    for change in found.changes:
        counts[change.kind] = counts.get(change.kind, 0) + 1
    words = {"removed": "removed", "added": "added", "shape": "of other shape", "dtype": "of other dtype"}
    listed = ", ".join(f"{n} {words.get(kind, 'with other values')}" for kind, n in counts.items())
    return f"different: {listed}; {found.same} tensors equal bit for bit{left_out}"
