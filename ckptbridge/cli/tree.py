"""Tensor names as a tree, with numbered children that are alike as one: ``layers`` has ``{0..31}`` below it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ckptbridge.cli.fold import numbered, ranges
from ckptbridge.formats.tensors import TensorSpec


@dataclass(slots=True)
class Node:
    """A component of names: what lies below it, and the tensor that ends here, if one does."""

    children: dict[str, Node] = field(default_factory=dict)
    tensor: TensorSpec | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the tree; ``times`` components are alike, ``parameters`` are those of all of them."""

    depth: int
    label: str
    times: int
    parameters: int
    tensor: TensorSpec | None


def tree(specs: Iterable[TensorSpec]) -> list[Row]:
    """The rows of a tree, in the order in which the names first appear."""
    root = Node()
    for spec in specs:
        node = root
        for part in spec.name.split("."):
            node = node.children.setdefault(part, Node())
        node.tensor = spec
    return list(_rows(_groups(root), 0, 1))


@dataclass(frozen=True, slots=True)
class _Group:
    """Children of one node that are alike: their label, the first one's tensor, and what lies below each."""

    label: str
    times: int
    tensor: TensorSpec | None
    below: tuple[_Group, ...]
    kind: int  # equal for groups of equal contents, whatever their labels
    parameters: int  # of one of them


def _groups(root: Node) -> tuple[_Group, ...]:
    """The groups below a node. Names from a file may have any depth, so nothing here recurses."""
    order: list[Node] = [root]
    for node in order:
        order += node.children.values()
    kinds: dict[tuple[object, ...], int] = {}
    done: dict[int, tuple[_Group, ...]] = {}
    for node in reversed(order):
        done[id(node)] = _folded(node, done, kinds)
    return done[id(root)]


def _folded(
    node: Node, done: dict[int, tuple[_Group, ...]], kinds: dict[tuple[object, ...], int]
) -> tuple[_Group, ...]:
    found: dict[tuple[int, str], tuple[list[str], Node]] = {}
    for label, child in node.children.items():
        here = (child.tensor.dtype.name, child.tensor.shape) if child.tensor is not None else None
        contents = (here, tuple((group.label, group.kind) for group in done[id(child)]))
        kind = kinds.setdefault(contents, len(kinds))
        found.setdefault((kind, "" if numbered(label) else f".{label}"), ([], child))[0].append(label)
    groups = []
    for (kind, _), (labels, child) in found.items():
        label = ranges(sorted(map(int, labels))) if len(labels) > 1 else labels[0]
        below = done[id(child)]
        parameters = (child.tensor.numel if child.tensor is not None else 0) + sum(
            group.parameters * group.times for group in below
        )
        groups.append(_Group(label, len(labels), child.tensor, below, kind, parameters))
    return tuple(groups)


def _rows(groups: tuple[_Group, ...], depth: int, times: int) -> Iterator[Row]:
    stack = [(group, depth, times) for group in reversed(groups)]
    while stack:
        group, at, outer = stack.pop()
        label = group.label
        while group.tensor is None and len(group.below) == 1 and group.times == 1 and group.below[0].times == 1:
            (group,) = group.below
            label = f"{label}.{group.label}"
        count = outer * group.times
        yield Row(at, label, group.times, group.parameters * count, group.tensor)
        stack += [(below, at + 1, count) for below in reversed(group.below)]
