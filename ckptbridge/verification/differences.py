"""What is different between two checkpoints: names, shapes, dtypes, and values bit for bit.

Both are read once, side by side, in pieces that are compared as they come: equal ones are told in the
time of reading them, which no digest could better, and where a piece differs it is counted at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ckptbridge.conversion.cast import check_cast
from ckptbridge.conversion.inspection import scalar_values
from ckptbridge.conversion.plan import FileStat
from ckptbridge.conversion.reading import identity
from ckptbridge.conversion.sources import SourceFiles
from ckptbridge.conversion.tally import Progress
from ckptbridge.errors import DTypeError
from ckptbridge.formats.tensors import Inventory, TensorSource
from ckptbridge.verification.comparing import compare_tensor
from ckptbridge.verification.handoff import Handoff, Overrides, find_handoff
from ckptbridge.verification.report import TensorResult
from ckptbridge.verification.weights import NO_CAST, compare_weights

Kind = Literal["removed", "added", "shape", "dtype", "values"]
Shape = tuple[int, ...]

_THREADS = 2


@dataclass(frozen=True, slots=True)
class Change:
    """One tensor that is not the same in A and B.

    ``counterpart`` are the names on the other side of a table, empty without one. ``a`` and ``b`` are
    (dtype, shape), None where the tensor is not there. ``differing`` of ``elements`` have other bits,
    the first at index ``first``; ``max_abs`` is the largest difference of values, None where one of
    those that differ is not finite, or nothing was compared. For the kind ``dtype``, B was compared
    with A cast to B's dtype.
    """

    kind: Kind
    name: str
    a: tuple[str, Shape] | None
    b: tuple[str, Shape] | None
    counterpart: tuple[str, ...] = ()
    elements: int = 0
    differing: int = 0
    first: Shape | None = None
    max_abs: float | None = None
    note: str = ""

    def to_dict(self) -> dict[str, object]:
        """The change as JSON shows it."""
        sides = ((side[0], list(side[1])) if side is not None else (None, None) for side in (self.a, self.b))
        a, b = ({"dtype": dtype, "shape": shape} if dtype else None for dtype, shape in sides)
        return {
            "kind": self.kind,
            "name": self.name,
            "counterpart": list(self.counterpart),
            "a": a,
            "b": b,
            "elements": self.elements,
            "differing": self.differing,
            "first": list(self.first) if self.first is not None else None,
            "max_abs": self.max_abs,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Difference:
    """Two checkpoints compared: ``same`` tensors are equal bit for bit, ``left_out`` ones a table drops."""

    a: Path
    b: Path
    same: int
    changes: tuple[Change, ...]
    left_out: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def exit_code(self) -> int:
        return 1 if self.changes else 0

    def to_dict(self) -> dict[str, Any]:
        """The difference as ``--json`` prints it."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "equal": not self.changes,
            "same": self.same,
            "left_out": self.left_out,
            "changes": [change.to_dict() for change in self.changes],
            "notes": list(self.notes),
        }


def nbytes_compared(a: Inventory, b: Inventory) -> int:
    """The bytes of A's tensors that :func:`differences` compares, for its ``progress``."""
    return sum(source.spec.nbytes for source, _ in _pairs(a, b))


def differences(a: Inventory, b: Inventory, progress: Progress | None = None) -> Difference:
    """Compare two checkpoints of any formats by their tensors' names.

    ``progress`` is called with the bytes of A just compared. Training state and strings are not compared
    but for a note. In a few buffers of memory, whatever the sizes.
    """
    changes = [Change("removed", n, _about(t), None) for n, t in a.tensors.items() if n not in b.tensors]
    for name, source in a.tensors.items():
        other = b.tensors.get(name)
        if other is not None and other.spec.shape != source.spec.shape:
            changes.append(Change("shape", name, _about(source), _about(other)))
    pairs = _pairs(a, b)
    same = 0
    with SourceFiles(_stats((*a.files, *b.files))) as files, ThreadPoolExecutor(_THREADS, "diff") as pool:
        for path in dict.fromkeys((*a.files, *b.files)):
            files.map(path)  # opened before there are threads
        for (source, _), change in zip(
            pairs, pool.map(lambda pair: _compared(pair[0], pair[1], files), pairs), strict=True
        ):
            same += change is None
            if change is not None:
                changes.append(change)
            if progress is not None:
                progress(source.spec.nbytes)
        files.check_unchanged()
    order = {name: k for k, name in enumerate(a.tensors)}
    changes.sort(key=lambda change: order[change.name])
    changes += [Change("added", n, None, _about(t)) for n, t in b.tensors.items() if n not in a.tensors]
    return Difference(a.path, b.path, same, tuple(changes), notes=_notes(a, b))


def _stats(paths: Sequence[Path]) -> dict[Path, FileStat]:
    found = {}
    for path in paths:
        stat = path.stat()
        found[path] = FileStat(stat.st_size, stat.st_mtime_ns)
    return found


def _pairs(a: Inventory, b: Inventory) -> list[tuple[TensorSource, TensorSource]]:
    pairs = ((source, b.tensors.get(name)) for name, source in a.tensors.items())
    return [(x, y) for x, y in pairs if y is not None and x.spec.shape == y.spec.shape]


def _about(source: TensorSource) -> tuple[str, Shape]:
    return source.spec.dtype.name, source.spec.shape


def _compared(a: TensorSource, b: TensorSource, files: SourceFiles) -> Change | None:
    """What differs in two tensors of one name and shape."""
    kind: Kind = "values" if a.spec.dtype == b.spec.dtype else "dtype"
    change = Change(kind, a.spec.name, _about(a), _about(b), elements=a.spec.numel)
    try:
        check_cast(a.spec.dtype, b.spec.dtype)
        found = compare_tensor(replace(identity(a), spec=b.spec), b, files, lambda data: None)
    except DTypeError as error:
        return replace(change, note=f"values not compared: {error.what}")
    finally:
        files.release((a, b))
    if kind == "values" and not found.differing:
        return None
    note = "B is A, cast" if not found.differing else ""
    return replace(
        change, differing=found.differing, first=found.index_in(a.spec.shape), max_abs=found.max_abs, note=note
    )


def _notes(a: Inventory, b: Inventory) -> tuple[str, ...]:
    notes = []
    if a.tensors and b.tensors and not a.tensors.keys() & b.tensors.keys():
        notes.append("The two have no name in common; --through-table compares a PyTorch with a MindSpore side.")
    state = {name: (scalar_values(a).get(name), scalar_values(b).get(name)) for name in {**a.scalars, **b.scalars}}
    other = [f"{name} ({_or_none(x)} and {_or_none(y)})" for name, (x, y) in state.items() if x != y]
    if other:
        notes.append(f"The training state differs: {', '.join(other)}.")
    return tuple(notes)


def _or_none(value: object) -> object:
    return "none" if value is None else value


# --- across sides ----------------------------------------------------------------------------


def differences_through_table(
    a: Path,
    b: Path,
    overrides: Overrides,
    understood: Callable[[Handoff], object] | None = None,
    progress: Progress | None = None,
) -> Difference:
    """Compare a PyTorch and a MindSpore checkpoint, one of them taken through the table between them.

    The table is the one that the provenance of either names, else the one of ``overrides`` and config.
    ``understood`` is told what is compared, before the long work; ``progress`` the bytes compared.
    Raises the errors of reading, of the table, and of a checkpoint that the table does not cover.
    """
    handoff = find_handoff((a, b), overrides, alone=False)
    if understood is not None:
        understood(handoff)
    made = handoff.made
    assert made is not None  # two paths make two sides
    request = replace(handoff.request, dtype=None)  # another dtype is a difference, declared or not
    section = compare_weights(handoff.known, request, made.inventory, {}, "blake3", progress)
    changes = [_from_result(t, made_is_b=made.path == b) for t in section.tensors if not t.ok]
    table = handoff.known.expansion.table.name
    return Difference(
        a,
        b,
        sum(t.status == "equal" for t in section.tensors),
        tuple(changes),
        sum(t.status == "dropped" for t in section.tensors),
        (f"Compared through the table {table}.", *handoff.notes, *section.notes),
    )


def _from_result(result: TensorResult, made_is_b: bool) -> Change:
    """A result of the weights level, in which one side was made again from the other."""
    about = (result.dtype, result.shape)
    kind: Kind
    match result.status:
        case "missing":
            kind = "removed" if made_is_b else "added"
        case "unexpected":
            kind = "added" if made_is_b else "removed"
        case "shape" | "dtype" as status:
            kind = status
        case _:
            kind = "values"
    # Of a wrong shape or dtype, what was found is known here, and the note says what was expected.
    known_a = kind == "values" or kind == "removed" or (kind in ("shape", "dtype") and not made_is_b)
    known_b = kind == "values" or kind == "added" or (kind in ("shape", "dtype") and made_is_b)
    return Change(
        kind,
        result.name,
        about if known_a else None,
        about if known_b else None,
        result.sources,
        result.elements,
        result.differing,
        result.first_difference,
        result.max_abs,
        result.note.removesuffix(NO_CAST),
    )
