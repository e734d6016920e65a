"""The axis notation: how the axes of some tensors correspond to the axes of others.

``"(g r d) h, (g 1 d) h, (g 1 d) h -> (g (r + 1 + 1) d) h"`` reads: parentheses compose axes
(outermost first), ``+`` concatenates, commas separate tensors, and equal names on both sides
correspond. It is the notation of einops and einx.

Each side expands into *blocks*, one for each choice at its pluses; a block is a product of plain
axes. The blocks of the two sides correspond in order and must have the same axes. Since the blocks
of a side partition its tensors, a well-formed line is a bijection between the elements of its two
sides, and its inverse is the same line read from right to left.

An *index axis* stands in a tensor's names instead of its shape: with ``{e}`` in the names,
``e f h`` is one ``f h`` tensor for each value of ``e``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from ckptbridge.errors import TableError

MAX_LENGTH = 500  # characters of one line
MAX_BLOCKS = 4096  # blocks of one side, before index axes are split


# --- syntax ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Axis:
    """A named axis."""

    name: str


@dataclass(frozen=True, slots=True)
class Literal:
    """An axis of fixed length; 1 vanishes, others correspond by value and order."""

    length: int


@dataclass(frozen=True, slots=True)
class Product:
    """Composed axes, outermost first; no factors is length 1."""

    factors: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """Concatenated terms, in order."""

    terms: tuple[Node, ...]


Node = Axis | Literal | Product | Sum
Dims = tuple[Node, ...]  # one tensor: a node for each of its dimensions

# One choice at every plus: the plain axes, each with its dimension.
_Choice = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class AxisMap:
    """A parsed line; ``left`` is the PyTorch side and ``right`` the MindSpore side of a rule."""

    text: str
    left: tuple[Dims, ...]
    right: tuple[Dims, ...]

    def inverse(self) -> AxisMap:
        """The same line read from right to left."""
        left, arrow, right = self.text.partition("->")
        text = f"{right.strip()} -> {left.strip()}" if arrow else self.text
        return AxisMap(text, self.right, self.left)

    @property
    def names(self) -> frozenset[str]:
        """The axis names that occur."""
        return frozenset(n for dims in (*self.left, *self.right) for node in dims for n in _names(node))

    @property
    def lone(self) -> frozenset[str]:
        """Axis names that are a whole dimension wherever they occur: their length moves nothing."""
        composed = {
            n for dims in (*self.left, *self.right) for node in dims if not isinstance(node, Axis) for n in _names(node)
        }
        return self.names - composed

    @property
    def blocks(self) -> int:
        """How many blocks either side has, before index axes are split."""
        return sum(prod(map(_count, dims)) for dims in self.left)

    @property
    def identity(self) -> bool:
        """Whether both sides are the same: a rename."""
        return self.left == self.right


def parse_axes(text: str) -> AxisMap:
    """Parse a line; ``"v h"`` without an arrow means the same shape on both sides.

    Raises TableError when the line is malformed, an axis occurs twice in one tensor, or the blocks
    of the two sides do not correspond.
    """
    if len(text) > MAX_LENGTH:
        raise TableError(f"The axes are longer than {MAX_LENGTH} characters.", axes=text[:60] + "...")
    sides = text.split("->")
    if len(sides) > 2:
        raise TableError("Axes hold more than one '->'.", axes=text)
    parsed = tuple(_Parser(side, text).side() for side in sides)
    result = AxisMap(text, parsed[0], parsed[-1])
    left = [_corresponding(c) for c in _side_choices(result.left, text)]
    right = [_corresponding(c) for c in _side_choices(result.right, text)]
    if len(left) != len(right):
        raise TableError(
            f"The left side has {len(left)} block(s) and the right side {len(right)}.",
            axes=text,
            remedy="Each choice at a '+' (and each tensor) of one side needs its counterpart on the other, in order.",
        )
    for k, (a, b) in enumerate(zip(left, right, strict=True), 1):
        if sorted(a) != sorted(b):
            raise TableError(
                f"Block {k} has the axes ({' '.join(a)}) on the left and ({' '.join(b)}) on the right.",
                axes=text,
                remedy="Corresponding blocks must be made of the same axes.",
            )
    return result


class _Parser:
    """Recursive descent over one side; nesting is bounded by MAX_LENGTH and checked."""

    def __init__(self, side: str, text: str) -> None:
        for mark in "(),+":
            side = side.replace(mark, f" {mark} ")
        self.tokens = side.split()
        self.text = text
        self.at = 0

    def fail(self, what: str) -> TableError:
        return TableError(what, axes=self.text)

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def side(self) -> tuple[Dims, ...]:
        tensors = [self.dims()]
        while self.peek() == ",":
            self.at += 1
            tensors.append(self.dims())
        if self.at < len(self.tokens):
            raise self.fail(f"'{self.peek()}' is not expected here.")
        return tuple(tensors)

    def dims(self) -> Dims:
        dims: list[Node] = []
        while self.peek() not in ("", ",", "+", ")"):
            dims.append(self.atom(0))
        if not dims:
            raise self.fail("A tensor has no axes; a scalar is written '()'.")
        # A scalar has no dimension at all.
        return () if dims == [Product(())] else tuple(dims)

    def atom(self, depth: int) -> Node:
        token = self.peek()
        self.at += 1
        if token == "(":
            if depth > 20:
                raise self.fail("The parentheses are nested too deeply.")
            node = self.sum(depth + 1)
            if self.peek() != ")":
                raise self.fail("A parenthesis is not closed.")
            self.at += 1
            return node
        if token.isascii() and token.isdigit():
            if len(token) > 9 or int(token) < 1:
                raise self.fail(f"The length {token} is not between 1 and 999999999.")
            return Literal(int(token))
        if token.isascii() and token.isidentifier():
            return Axis(token)
        raise self.fail(f"'{token}' is not an axis name.")

    def sum(self, depth: int) -> Node:
        terms = [self.product(depth)]
        while self.peek() == "+":
            self.at += 1
            terms.append(self.product(depth))
        if len(terms) == 1:
            return terms[0]
        if any(isinstance(t, Product) and not t.factors for t in terms):
            raise self.fail("A '+' lacks a term.")
        return Sum(tuple(terms))

    def product(self, depth: int) -> Node:
        factors: list[Node] = []
        while self.peek() not in ("", ",", "+", ")"):
            factors.append(self.atom(depth))
        return factors[0] if len(factors) == 1 else Product(tuple(factors))


def _names(node: Node) -> list[str]:
    match node:
        case Axis(name):
            return [name]
        case Literal():
            return []
        case Product(parts) | Sum(parts):
            return [n for part in parts for n in _names(part)]


def _choices(node: Node) -> list[tuple[str, ...]]:
    """The plain axes of each choice at the pluses of ``node``."""
    match node:
        case Axis(name):
            return [(name,)]
        case Literal(length):
            return [(f"#{length}",) if length > 1 else ()]
        case Product(factors):
            return [tuple(a for part in parts for a in part) for parts in product(*map(_choices, factors))]
        case Sum(terms):
            return [choice for term in terms for choice in _choices(term)]


def _count(node: Node) -> int:
    match node:
        case Product(factors):
            return prod(map(_count, factors))
        case Sum(terms):
            return sum(map(_count, terms))
        case _:
            return 1


def _side_choices(side: tuple[Dims, ...], text: str) -> list[_Choice]:
    if sum(prod(map(_count, dims)) for dims in side) > MAX_BLOCKS:
        raise TableError(f"One side has more than {MAX_BLOCKS} blocks.", axes=text)
    blocks: list[_Choice] = []
    for dims in side:
        for parts in product(*map(_choices, dims)):
            block = tuple((axis, dim) for dim, part in enumerate(parts) for axis in part)
            named = [a for a, _ in block if not a.startswith("#")]
            if len(set(named)) < len(named):
                twice = next(a for a in named if named.count(a) > 1)
                raise TableError(f"The axis '{twice}' occurs twice in one tensor.", axes=text)
            blocks.append(block)
    return blocks


def _corresponding(block: _Choice) -> list[str]:
    """The axes of a block under names that both sides share: equal literals are numbered."""
    seen: dict[str, int] = {}
    names = []
    for axis, _ in block:
        if axis.startswith("#"):
            seen[axis] = seen.get(axis, 0) + 1
            axis = f"{axis}.{seen[axis]}"
        names.append(axis)
    return names


# --- sizes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class View:
    """How a block lies in one tensor of a side (index axes already split into tensors).

    The block's element (k0, k1, ...) is the tensor's element whose coordinate in dimension ``d`` is
    ``start[d]`` plus the sum of ``k_j * step_j`` over the axes j with ``axes[j] == (d, step_j)``.
    """

    tensor: int
    start: tuple[int, ...]
    axes: tuple[tuple[int, int], ...]

    def offset(self, strides: Sequence[int]) -> int:
        """The block's first element, for a tensor with these element strides."""
        return sum(s * t for s, t in zip(self.start, strides, strict=True))

    def strides(self, strides: Sequence[int]) -> tuple[int, ...]:
        """The block's element strides, for a tensor with these element strides."""
        return tuple(step * strides[dim] for dim, step in self.axes)


@dataclass(frozen=True, slots=True)
class Block:
    """A product of plain axes that lies in a tensor of the left and in one of the right side."""

    sizes: tuple[int, ...]
    left: View
    right: View

    def inverse(self) -> Block:
        return Block(self.sizes, self.right, self.left)


@dataclass(frozen=True, slots=True)
class BoundAxes:
    """A line with its sizes: the shape of every tensor, and the blocks that carry left to right."""

    left: tuple[tuple[int, ...], ...]
    right: tuple[tuple[int, ...], ...]
    blocks: tuple[Block, ...]


def node_length(node: Node, lengths: Mapping[str, int]) -> int:
    """The length of a dimension."""
    match node:
        case Axis(name):
            return lengths[name]
        case Literal(length):
            return length
        case Product(factors):
            return prod(node_length(f, lengths) for f in factors)
        case Sum(terms):
            return sum(node_length(t, lengths) for t in terms)


def bind_axes(
    line: AxisMap, sizes: Mapping[str, int], left: frozenset[str] = frozenset(), right: frozenset[str] = frozenset()
) -> BoundAxes:
    """Give the axes their lengths.

    ``left`` and ``right`` are the index axes of either side: those that stand in the names of its
    tensors. A side's tensors are numbered operand by operand, and within one by its index axes,
    the first of them slowest. Raises TableError for an axis without a length, or an index axis
    that is not a dimension by itself.
    """
    missing = sorted(line.names - sizes.keys())
    if missing:
        raise TableError(f"The axis '{missing[0]}' has no size.", axes=line.text)
    return _bind(line, tuple((name, sizes[name]) for name in sorted(line.names)), left, right)


@lru_cache(maxsize=4096)
def _bind(line: AxisMap, sizes: tuple[tuple[str, int], ...], left: frozenset[str], right: frozenset[str]) -> BoundAxes:
    # Cached because every layer of a model binds the same lines to the same sizes.
    lengths = dict(sizes)
    left_shapes, left_raw = _side_blocks(line.left, lengths, left, line.text)
    right_shapes, right_raw = _side_blocks(line.right, lengths, right, line.text)
    blocks = [block for a, b in zip(left_raw, right_raw, strict=True) for block in _blocks(a, b, lengths)]
    return BoundAxes(left_shapes, right_shapes, tuple(blocks))


@dataclass(frozen=True, slots=True)
class _SideBlock:
    """A block in one side: ``index`` maps an index axis to its stride in tensor numbers."""

    tensor: int
    index: Mapping[str, int]
    start: tuple[int, ...]
    axes: Mapping[str, tuple[int, int]]  # name -> (dimension, step)


def _side_blocks(
    side: tuple[Dims, ...], lengths: Mapping[str, int], index_axes: frozenset[str], text: str
) -> tuple[tuple[tuple[int, ...], ...], list[_SideBlock]]:
    shapes: list[tuple[int, ...]] = []
    blocks: list[_SideBlock] = []
    for dims in side:
        index = [node.name for node in dims if isinstance(node, Axis) and node.name in index_axes]
        real = [node for node in dims if not (isinstance(node, Axis) and node.name in index_axes)]
        composed = index_axes & {n for node in real for n in _names(node)}
        if composed:
            raise TableError(
                f"The index '{min(composed)}' stands in the names, so it must be a dimension by itself.", axes=text
            )
        shape = tuple(node_length(node, lengths) for node in real)
        strides: dict[str, int] = {}
        copies = 1
        for name in reversed(index):
            strides[name] = copies
            copies *= lengths[name]
        for parts in product(*(_placed(node, 1, lengths) for node in real)):
            axes: dict[str, tuple[int, int]] = {}
            for dim, (_, part) in enumerate(parts):
                for name, step in part:
                    if name.startswith("#"):
                        name = f"{name}.{1 + sum(a.startswith(name + '.') for a in axes)}"
                    axes[name] = (dim, step)
            blocks.append(_SideBlock(len(shapes), strides, tuple(start for start, _ in parts), axes))
        shapes += [shape] * copies
    return tuple(shapes), blocks


def _placed(node: Node, step: int, lengths: Mapping[str, int]) -> list[tuple[int, tuple[tuple[str, int], ...]]]:
    """Each choice in a dimension as (start, ((axis, step), ...)), in the order of :func:`_choices`."""
    match node:
        case Axis(name):
            return [(0, ((name, step),))]
        case Literal(length):
            return [(0, ((f"#{length}", step),) if length > 1 else ())]
        case Product(factors):
            choices: list[list[tuple[int, tuple[tuple[str, int], ...]]]] = []
            for factor in reversed(factors):
                choices.insert(0, _placed(factor, step, lengths))
                step *= node_length(factor, lengths)
            return [
                (sum(start for start, _ in parts), tuple(a for _, axes in parts for a in axes))
                for parts in product(*choices)
            ]
        case Sum(terms):
            placed = []
            start = 0
            for term in terms:
                placed += [(start + s, axes) for s, axes in _placed(term, step, lengths)]
                start += node_length(term, lengths) * step
            return placed


def _blocks(a: _SideBlock, b: _SideBlock, lengths: Mapping[str, int]) -> list[Block]:
    """The block pair ``a``, ``b``, split at every value of its index axes."""
    index = [*a.index, *(name for name in b.index if name not in a.index)]
    plain = [*a.axes, *(name for name in b.axes if name not in a.axes)]
    plain = [name for name in plain if name not in a.index and name not in b.index]
    sizes = tuple(int(n[1:].partition(".")[0]) if n.startswith("#") else lengths[n] for n in plain)
    found = []
    for values in product(*(range(lengths[name]) for name in index)):
        at = dict(zip(index, values, strict=True))
        found.append(Block(sizes, _view(a, at, plain), _view(b, at, plain)))
    return found


def _view(block: _SideBlock, at: Mapping[str, int], plain: Sequence[str]) -> View:
    start = list(block.start)
    for name, value in at.items():
        if name in block.axes:
            dim, step = block.axes[name]
            start[dim] += value * step
    tensor = block.tensor + sum(at[name] * stride for name, stride in block.index.items())
    return View(tensor, tuple(start), tuple(block.axes[name] for name in plain))
