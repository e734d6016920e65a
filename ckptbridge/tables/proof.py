"""That a table is a bijection for a config: shown from names and shapes, before a weight is read.

Within an entry the axis line is a bijection by its syntax (:mod:`ckptbridge.tables.axes`), and here its
blocks are counted against the shapes. Between entries, no tensor may stand twice on a side. So every
element of every tensor on one side has exactly one place on the other, apart from what the table
states to be dropped or tied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ckptbridge.errors import ProofError
from ckptbridge.tables.axes import Block, BoundAxes, View
from ckptbridge.tables.expand import Entry, Expansion, Form
from ckptbridge.tables.rules import Rule, index_axes, indices


@dataclass(frozen=True, slots=True)
class Proof:
    """What was shown, in numbers.

    ``pt_names`` and ``ms_names`` count the tensors of the mapped entries, ``elements`` those of
    either side whose shapes the config fixes. ``free`` lists the PyTorch names of mapped tensors
    whose shapes only a checkpoint gives.
    """

    pt_names: int
    ms_names: int
    entries: int
    drops: int
    tied: int
    optional: int
    elements: int
    free: tuple[str, ...]


def prove(expansion: Expansion) -> Proof:
    """Show that the expansion is a bijection, or raise ProofError with the counter-example."""
    for rule in expansion.table.rules:
        _check_indices(rule, expansion)
        _check_dtypes(rule)
    _check_names(expansion)
    elements = _check_elements(expansion)
    mapped = [entry for entry in expansion.entries if entry.kind == "map"]
    if not mapped:
        raise ProofError("The table maps nothing for this config.", table=expansion.table.name)
    tied = [entry for entry in expansion.entries if entry.kind == "tied"]
    for entry in tied:
        _check_tied(entry, expansion)
    return Proof(
        pt_names=sum(len(entry.pt) for entry in mapped),
        ms_names=sum(len(entry.ms) for entry in mapped),
        entries=len(mapped),
        drops=len(expansion.entries) - len(mapped) - len(tied),
        tied=len(tied),
        optional=sum(entry.optional for entry in mapped),
        elements=elements,
        free=tuple(name for entry in mapped if entry.bound is None for name in entry.pt),
    )


def _check_indices(rule: Rule, expansion: Expansion) -> None:
    if rule.drop or (rule.tied and not (rule.pt and rule.ms)):
        return
    index = expansion.table.index
    pt, ms = set(indices(rule.pt, index)), set(indices(rule.ms, index))
    pt_index, ms_index = index_axes(rule, index)
    for side, lone in (("PyTorch", pt - ms - pt_index), ("MindSpore", ms - pt - ms_index)):
        if lone:
            raise ProofError(
                f"The index '{min(lone)}' stands in the names of the {side} side only, and is no axis.",
                rule=str(rule),
                pt=", ".join(rule.pt),
                ms=", ".join(rule.ms),
                remedy=f"Name '{min(lone)}' on the other side too, or make it an axis: 'e f h -> (e f) h'.",
            )


def _check_dtypes(rule: Rule) -> None:
    pt, ms = rule.dtype_pt, rule.dtype_ms
    if not pt or not ms or pt == ms:
        return
    # "keep" promises that nothing is cast; integers and floats do not correspond.
    if "keep" in (pt, ms) or _kind(pt) != _kind(ms):
        raise ProofError(
            f"The dtypes contradict each other: {pt} on the PyTorch side, {ms} on the MindSpore side.",
            rule=str(rule),
            field="dtype",
        )


def _kind(dtype: str) -> str:
    return next((kind for kind in ("uint", "int", "bool", "complex") if dtype.startswith(kind)), "float")


def _check_names(expansion: Expansion) -> None:
    for side in ("pt", "ms"):
        seen: dict[str, Entry] = {}
        for entry in expansion.entries:
            for name in entry.pt if side == "pt" else entry.ms:
                first = seen.setdefault(name, entry)
                if first is not entry:
                    raise ProofError(
                        f"'{name}' is both mapped and dropped."
                        if {first.kind, entry.kind} == {"map", "drop"}
                        else f"'{name}' stands twice on the {side} side.",
                        tensor=name,
                        rule=str(first.rule),
                        other_rule=str(entry.rule),
                        at=_shown(first, entry),
                    )
            names = entry.pt if side == "pt" else entry.ms
            if len(names) > 1 and len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise ProofError(
                    f"'{twice}' stands twice on the {side} side.", tensor=twice, rule=str(entry.rule), at=_shown(entry)
                )


def _shown(*entries: Entry) -> str | None:
    """The index values, for a message."""
    texts = [", ".join(f"{k}={v}" for k, v in entry.at.items()) for entry in entries]
    return "; ".join(texts) if any(texts) else None


def _check_tied(entry: Entry, expansion: Expansion) -> None:
    target = expansion.by_pt.get(entry.tied)
    if target is None or target.kind != "map":
        raise ProofError(
            f"'{(*entry.pt, *entry.ms)[0]}' is tied to '{entry.tied}', which no rule maps.",
            tensor=entry.tied,
            rule=str(entry.rule),
            other_rule=None if target is None else str(target.rule),
            remedy="Name a tensor of the PyTorch side that a rule maps for this config.",
        )
    if entry.ms and not entry.tied_ms:
        raise ProofError(
            f"'{entry.ms[0]}' is tied to '{entry.tied}', which is no tensor by itself on the MindSpore side.",
            tensor=entry.ms[0],
            rule=str(entry.rule),
            other_rule=str(target.rule),
        )
    for side in ("pt", "ms"):
        own = entry.pt_shapes if side == "pt" else entry.ms_shapes
        others = target.pt_shapes if side == "pt" else target.ms_shapes
        if not own or not others:
            continue
        other = others[target.pt.index(entry.tied)] if side == "pt" else others[0]
        if own[0] != other:
            raise ProofError(
                f"'{(entry.pt if side == 'pt' else entry.ms)[0]}' has the shape {list(own[0])}, "
                f"and what it is tied to has {list(other)}.",
                tensor=entry.tied,
                rule=str(entry.rule),
                other_rule=str(target.rule),
            )
    for side, own_dtype, other_dtype in (
        ("pt", entry.dtype_pt, target.dtype_pt),
        ("ms", entry.dtype_ms, target.dtype_ms),
    ):
        if own_dtype and other_dtype and own_dtype != other_dtype:
            raise ProofError(
                f"The dtypes on the {side} side contradict each other: {own_dtype}, tied to {other_dtype}.",
                tensor=entry.tied,
                rule=str(entry.rule),
                other_rule=str(target.rule),
            )


# --- elements --------------------------------------------------------------------------------


def _check_elements(expansion: Expansion) -> int:
    """Count the blocks of each form against its shapes; returns the elements of all mapped entries."""
    sizes: dict[Form, int] = {}
    elements = 0
    for entry in expansion.entries:
        if entry.kind != "map" or entry.bound is None:
            continue
        if entry.form not in sizes:
            sizes[entry.form] = _count(entry, entry.bound)
        elements += sizes[entry.form]
    return elements


def _count(entry: Entry, bound: BoundAxes) -> int:
    """The elements of one side. Raises ProofError unless the blocks fill every tensor of both sides."""
    for names, shapes, views in (
        (entry.pt, bound.left, [(block, block.left) for block in bound.blocks]),
        (entry.ms, bound.right, [(block, block.right) for block in bound.blocks]),
    ):
        filled = [0] * len(shapes)
        if len(names) != len(shapes):
            raise ProofError(f"{len(names)} names have {len(shapes)} shapes.", rule=str(entry.rule))
        for block, view in views:
            filled[view.tensor] += prod(block.sizes)
            if any(end > length for end, length in zip(_ends(block, view), shapes[view.tensor], strict=True)):
                raise ProofError("A block leaves its tensor.", tensor=names[view.tensor], rule=str(entry.rule))
        for name, shape, count in zip(names, shapes, filled, strict=True):
            if count != prod(shape):
                raise ProofError(
                    f"{count} elements are mapped of '{name}', which has the shape {list(shape)}.",
                    tensor=name,
                    axes=entry.form.text,
                    rule=str(entry.rule),
                )
    return sum(map(prod, bound.left))


def _ends(block: Block, view: View) -> Iterator[int]:
    """In each dimension, one past the block's last coordinate."""
    for dim, start in enumerate(view.start):
        yield start + 1 + sum((n - 1) * step for n, (d, step) in zip(block.sizes, view.axes, strict=True) if d == dim)
