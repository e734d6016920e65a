"""A table and a config give the finite list of what corresponds: no pattern is left, only names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Literal

from ckptbridge.errors import ConfigError, ShapeError
from ckptbridge.tables.axes import Axis, AxisMap, Block, BoundAxes, Dims, View, bind_axes, node_length
from ckptbridge.tables.expressions import LIMIT
from ckptbridge.tables.messages import located, shorten
from ckptbridge.tables.names import Template, parse_template
from ckptbridge.tables.rules import index_axes, indices
from ckptbridge.tables.scope import MAX_NAMES, Scope, choose_layout, choose_roots, default_roots
from ckptbridge.tables.table import Rule, Table

__all__ = ["Entry", "Expansion", "Form", "choose_roots", "expand"]

Side = Literal["pt", "ms"]
MAX_BLOCKS = 1_000_000  # of one entry, its index axes split


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """A rule's axes with their lengths, shared by the rule's entries.

    ``bound`` is None when the config alone does not fix the shapes: there are no axes, or an axis
    has no length in ``lengths``. ``pt_index`` and ``ms_index`` are the index axes of either side.
    """

    line: AxisMap | None
    lengths: Mapping[str, int]
    pt_index: frozenset[str]
    ms_index: frozenset[str]
    bound: BoundAxes | None

    @property
    def text(self) -> str:
        """The line with its lengths, for messages: ``(g r d) h with d=128 g=8 h=1024 r=2``."""
        if self.line is None:
            return ""
        sizes = " ".join(f"{name}={length}" for name, length in sorted(self.lengths.items()))
        return f"{self.line.text} with {sizes}" if sizes else self.line.text


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """Tensors that correspond, for one value of each of the rule's indices (``at``).

    ``pt`` and ``ms`` are tensor names in the order of ``BoundAxes.left`` and ``.right``: operand by
    operand, index axes inside. For the kind ``tied``, ``tied`` is the PyTorch tensor that they must
    equal, and ``tied_ms`` that tensor's counterpart, "" when it has none by itself.
    """

    rule: Rule
    at: Mapping[str, int]
    kind: Literal["map", "drop", "tied"]
    pt: tuple[str, ...]
    ms: tuple[str, ...]
    form: Form
    tied: str = ""
    tied_ms: str = ""

    @property
    def tied_pt(self) -> str:
        """What the PyTorch tensor must equal; "" when the entry has no such tensor."""
        return self.tied if self.pt else ""

    @property
    def bound(self) -> BoundAxes | None:
        """The shapes and blocks, as far as the config alone fixes them."""
        return self.form.bound

    @property
    def optional(self) -> bool:
        """Whether all of the entry's tensors may be absent together."""
        return self.rule.optional

    @property
    def dtype_pt(self) -> str:
        return self.rule.dtype_pt

    @property
    def dtype_ms(self) -> str:
        return self.rule.dtype_ms

    @property
    def pt_shapes(self) -> tuple[tuple[int, ...], ...] | None:
        """The shapes of ``pt``, None when the config alone does not fix them."""
        return None if self.bound is None else self.bound.left[: len(self.pt)]

    @property
    def ms_shapes(self) -> tuple[tuple[int, ...], ...] | None:
        """The shapes of ``ms``, None when the config alone does not fix them."""
        return None if self.bound is None else self.bound.right[: len(self.ms)]

    def bind(self, side: Side, shapes: Sequence[tuple[int, ...]]) -> BoundAxes:
        """The shapes and blocks, given the actual shapes of all of this side's tensors.

        Raises ShapeError when a shape is not the one that the config requires, or when two
        tensors disagree about an axis that the config leaves free.
        """
        found = tuple(tuple(shape) for shape in shapes)
        names = self.pt if side == "pt" else self.ms
        if len(found) != len(names) or not names:
            raise ShapeError(
                f"{len(found)} shape(s) are given for {len(names)} tensor(s) on the {side} side.", rule=str(self.rule)
            )
        if self.bound is not None:
            expected = (self.bound.left if side == "pt" else self.bound.right)[: len(names)]
            if found == expected:
                return self.bound
        line = self.form.line
        if line is None:
            return _same(found)
        lengths = _measure(self, line, side, found)
        return bind_axes(line, lengths, self.form.pt_index, self.form.ms_index)


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """A table for one config. ``by_pt`` and ``by_ms`` hold the entries of every kind under each of their names.

    ``sizes`` are the lengths that the config gives; those that it lacks, and no rule needed, are left out.
    """

    table: Table
    config: Mapping[str, object]
    layout: Mapping[str, str]
    roots: Mapping[str, str]
    sizes: Mapping[str, int]
    counts: Mapping[str, int]
    entries: tuple[Entry, ...]
    by_pt: Mapping[str, Entry]
    by_ms: Mapping[str, Entry]
    fp8_block: tuple[int, int] | None


def expand(
    table: Table,
    config: Mapping[str, object],
    layout: Mapping[str, str] | None = None,
    roots: Mapping[str, str] | None = None,
) -> Expansion:
    """Expand every rule for ``config``; ``roots`` are from :func:`choose_roots`, else each root's first choice.

    Raises UsageError for an unknown layout option, and ConfigError or TableError, naming the rule,
    for what the config lacks or what does not fit together.
    """
    chosen = choose_layout(table, layout or {})
    prefixes = default_roots(table, roots)
    scope = Scope(table, config, chosen, prefixes)
    entries: list[Entry] = []
    total = 0
    for rule in table.rules:
        with located(rule=str(rule)):
            for entry in _entries(rule, scope, MAX_NAMES - total):
                entries.append(entry)
                total += len(entry.pt) + len(entry.ms)
    mapped = {name: entry for entry in reversed(entries) if entry.kind == "map" for name in entry.pt}
    entries = [_with_counterpart(entry, mapped) if entry.kind == "tied" else entry for entry in entries]
    # The first of a name counts; that there is no second is the proof's to show.
    by_pt = {name: entry for entry in reversed(entries) for name in entry.pt}
    by_ms = {name: entry for entry in reversed(entries) for name in entry.ms}
    sizes = {key: value for key in table.sizes if type(value := scope.known.get(key)) is int}
    return Expansion(
        table, config, chosen, prefixes, sizes, scope.counts, tuple(entries), by_pt, by_ms, _fp8_block(scope)
    )


# --- one rule --------------------------------------------------------------------------------


def _entries(rule: Rule, scope: Scope, budget: int) -> Iterator[Entry]:
    """A rule's entries, its indices counting upwards, the first of them slowest."""
    index = scope.table.index
    pt_index, ms_index = index_axes(rule, index)
    free = [n for n in indices((*rule.pt, *rule.ms), index) if n not in pt_index and n not in ms_index]
    deciding = [n for n in free if rule.when is not None and n in rule.when.names]
    if not deciding and not _applies(rule, scope, {}):
        return
    ranges = [range(scope.count(n)) for n in free]
    inner = prod(scope.count(n) for n in pt_index | ms_index)
    if prod(map(len, ranges)) * max(1, inner) * (len(rule.pt) + len(rule.ms)) > budget:
        raise ConfigError(
            f"The table has more than {MAX_NAMES} names for this config.", remedy="Check the config's numbers."
        )
    writers = _Writers(rule, scope, (*free, *pt_index, *ms_index))
    form: Form | None = None
    decided: dict[tuple[int, ...], bool] = {}
    for values in product(*ranges):
        at = dict(zip(free, values, strict=True))
        key = tuple(at[n] for n in deciding)
        if deciding and key not in decided:
            decided[key] = _applies(rule, scope, at)
        if deciding and not decided[key]:
            continue
        if form is None:  # only now: the sizes of a rule that never applies need not be there
            form = _form(rule, scope, pt_index, ms_index)
        pt, ms, tied = writers.names(at)
        yield Entry(rule, at, "drop" if rule.drop else "tied" if rule.tied else "map", pt, ms, form, tied)


def _applies(rule: Rule, scope: Scope, at: Mapping[str, int]) -> bool:
    if rule.when is None:
        return True
    with located(field="when"):
        return rule.when.holds(lambda name: at[name] if name in at else scope(name))


def _form(rule: Rule, scope: Scope, pt_index: frozenset[str], ms_index: frozenset[str]) -> Form:
    line = rule.axes
    if line is None:
        return Form(None, {}, pt_index, ms_index, None)
    with located(field="axes", axes=line.text):
        measured = {name: scope.length(name) for name in sorted(line.names)}
        lengths = {name: length for name, length in measured.items() if length is not None}
        copies = prod(lengths[name] for name in pt_index | ms_index)
        if line.blocks * copies > MAX_BLOCKS:
            raise ConfigError(f"One entry has more than {MAX_BLOCKS} blocks.", remedy="Check the config's numbers.")
        if len(lengths) < len(measured):
            return Form(line, lengths, pt_index, ms_index, None)
        bound = bind_axes(line, lengths, pt_index, ms_index)
        for shape in (*bound.left, *bound.right):
            if prod(shape) >= LIMIT:
                raise ConfigError(f"A tensor would have the shape {list(shape)}.", remedy="Check the config's numbers.")
    return Form(line, lengths, pt_index, ms_index, bound)


class _Writers:
    """A rule's templates, rendered as far as no index is in them."""

    def __init__(self, rule: Rule, scope: Scope, free: Sequence[str]) -> None:
        self.scope = scope
        index = index_axes(rule, scope.table.index)
        line = rule.axes
        self.pt = [self.operand(t, line.left[k] if line else (), index[0], free) for k, t in enumerate(rule.pt)]
        self.ms = [self.operand(t, line.right[k] if line else (), index[1], free) for k, t in enumerate(rule.ms)]
        self.tied = parse_template(rule.tied).fixed(scope, free) if rule.tied else None

    def operand(
        self, text: str, dims: Dims, index: frozenset[str], free: Sequence[str]
    ) -> tuple[Template, tuple[dict[str, int], ...]]:
        """A template and the values of its index axes, the first dimension slowest."""
        inner = [node.name for node in dims if isinstance(node, Axis) and node.name in index]
        values = product(*(range(self.scope.count(name)) for name in inner))
        return parse_template(text).fixed(self.scope, free), tuple(dict(zip(inner, v, strict=True)) for v in values)

    def names(self, at: Mapping[str, int]) -> tuple[tuple[str, ...], tuple[str, ...], str]:
        """The names on either side, and the one that they are tied to."""
        sides = []
        for operands in (self.pt, self.ms):
            sides.append(
                tuple([template.render(self.look({**at, **more})) for template, inner in operands for more in inner])
            )
        return sides[0], sides[1], self.tied.render(self.look(at)) if self.tied else ""

    def look(self, at: Mapping[str, int]) -> Callable[[str], object]:
        return lambda name: at[name] if name in at else self.scope(name)


def _with_counterpart(entry: Entry, mapped: Mapping[str, Entry]) -> Entry:
    """A tied entry with the MindSpore name of what it is tied to, if that is one tensor there."""
    target = mapped.get(entry.tied)
    if target is None or len(target.pt) != 1 or len(target.ms) != 1:
        return entry
    return replace(entry, tied_ms=target.ms[0])


def _fp8_block(scope: Scope) -> tuple[int, int] | None:
    """Rows and columns that share a scale, None when the config says nothing of it."""
    if scope.table.fp8 is None:
        return None
    expression = scope.table.fp8.block
    with located(file=scope.table.path.name, field="fp8.block"):
        value = expression.evaluate(scope)
        if value is None:
            return None
        match value:
            case [int(rows), int(columns)] if 0 < rows < LIMIT and 0 < columns < LIMIT:
                return rows, columns
        raise ConfigError(f"The block size is {shorten(value)}; it must be two positive integers.")


# --- shapes ----------------------------------------------------------------------------------


def _same(shapes: tuple[tuple[int, ...], ...]) -> BoundAxes:
    """What a rename without axes means: each tensor as it is."""
    blocks = []
    for k, shape in enumerate(shapes):
        view = View(k, (0,) * len(shape), tuple((dim, 1) for dim in range(len(shape))))
        blocks.append(Block(shape, view, view))
    return BoundAxes(shapes, shapes, tuple(blocks))


def _measure(entry: Entry, line: AxisMap, side: Side, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """Check every shape, and read off the axes that the config leaves free."""
    form = entry.form
    names, operands, index = (
        (entry.pt, line.left, form.pt_index) if side == "pt" else (entry.ms, line.right, form.ms_index)
    )
    lengths = dict(form.lengths)
    at = 0
    for dims in operands:
        real = [node for node in dims if not (isinstance(node, Axis) and node.name in index)]
        copies = prod(lengths[node.name] for node in dims if isinstance(node, Axis) and node.name in index)
        for name, shape in zip(names[at : at + copies], shapes[at : at + copies], strict=True):
            if len(shape) == len(real):
                for node, length in zip(real, shape, strict=True):
                    if isinstance(node, Axis):
                        lengths.setdefault(node.name, length)
            known = [
                "any" if isinstance(node, Axis) and node.name not in lengths else node_length(node, lengths)
                for node in real
            ]
            if list(shape) != known:
                raise ShapeError(
                    f"'{name}' has the shape {list(shape)}, and {_listed(known)} is expected.",
                    tensor=name,
                    expected=_listed(known),
                    found=list(shape),
                    axes=form.text,
                    rule=str(entry.rule),
                    remedy="Check that the config is this checkpoint's, and that target and layout are right.",
                )
        at += copies
    return lengths


def _listed(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"
