"""A suggestion as a TOML table: every rule with its evidence, every doubt with its alternatives."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from ckptbridge.errors import UsageError, printable
from ckptbridge.tables.lines import STACK
from ckptbridge.tables.name_classes import NameClass, condition
from ckptbridge.tables.pairings import Evidence, Pairing
from ckptbridge.tables.rules import DTYPE_NAMES
from ckptbridge.tables.sections import MAX_KEYS
from ckptbridge.tables.similarity import similarity
from ckptbridge.tables.sources import MAX_BYTES
from ckptbridge.tables.suggest import Suggestion
from ckptbridge.tables.table import MAX_RULES

_LETTERS = "ijklmnopqstvwxyz"  # for indices; not those that stack, and none that an axis has without a number
_LISTED = 200  # names left over that are listed


def to_toml(found: Suggestion, sources: tuple[str, str]) -> str:
    """The table's text; ``sources`` are what the two checkpoints are called in it.

    Raises UsageError when it would have more rules, or more text, than a table may have.
    """
    text = "\n".join(_Writer(found).lines(sources)) + "\n"
    rules = text.count("\n[[rule]]\n")
    nbytes = len(text.encode())
    if rules > MAX_RULES or nbytes > MAX_BYTES:
        raise UsageError(
            f"The table would have {rules} rules in {nbytes} bytes, and {MAX_RULES} in {MAX_BYTES} are read.",
            remedy="Only names that differ in dotted numbers (layers.0., layers.1.) share a rule; script the table.",
        )
    return text


class _Writer:
    """Gives the indices and sizes their names, and writes the sections that they need."""

    def __init__(self, found: Suggestion) -> None:
        self.found = found
        self.index: dict[tuple[int, int], str] = {}
        self.sizes: dict[str, int] = {}
        self.stacks: dict[int, str] = {}
        self.ranges = _ranges(c for pairing in found.pairings for c in pairing.pt)
        plain = {k: v for p in found.pairings if p.axes == p.line.one for k, v in p.line.sizes.items()}
        # More lengths than a table may name: then what is only renamed goes without its shape.
        self.bare = len(plain) > MAX_KEYS // 2
        rules = [line for pairing in found.pairings for line in ("", *self.pairing(pairing))]
        self.rules = [*rules, *self.tied(), *self.dropped(), *self.left()]

    def lines(self, sources: tuple[str, str]) -> Iterator[str]:
        found = self.found
        yield "# unproved: suggested from names, shapes" + (" and values of" if found.related else " of")
        yield f"#   PyTorch    {printable(sources[0])}"
        yield f"#   MindSpore  {printable(sources[1])}"
        counts = [f"{found.count(e)} {e.value}" for e in Evidence]
        yield f"# {len(found.pairings)} rule(s): {', '.join(counts)}."
        if not found.related:
            yield "# No values agree, so these are not the same weights: names and shapes are all there is to go by."
        yield "# Read the rules, settle what is DOUBTFUL, write lengths as expressions over config.json, and prove the"
        yield "# table: ckptbridge mappings check FILE"
        yield from ("schema = 1", 'family = "mymodel" # config.json\'s model_type', 'target = "mine"')
        index = {name: count for (_, count), name in self.index.items()}
        index |= {name: count for count, name in self.stacks.items()}
        for section, values in (("index", index), ("sizes", self.sizes)):
            if values:
                yield from ("", f"[{section}]", *(f'{name} = "{value}"' for name, value in values.items()))
        yield from self.rules

    # --- rules ---

    def pairing(self, pairing: Pairing) -> Iterator[str]:
        remarks = [pairing.evidence.value, *([] if pairing.line.text == "as it is" else [pairing.line.text])]
        yield f"# {printable('; '.join([*remarks, *pairing.remarks]))}"
        for other in pairing.alternatives:
            yield f"#   or: {printable(other.text)}"
            if len(self.sizes) + len(other.sizes) < MAX_KEYS // 2:
                self.sizes |= other.sizes
        yield "[[rule]]"
        when, names = self.places(pairing)
        if when:
            yield f"when = {_quoted(when)}"
        for side, classes in (("pt", pairing.pt), ("ms", pairing.ms)):
            stacked = pairing.stack is not None and pairing.stack.side == side
            templates = [_template(c, self.slots(pairing, names) if stacked else names) for c in classes]
            yield f"{side} = {_quoted(templates[0] if len(templates) == 1 else templates)}"
        axes = self.axes(pairing)
        if axes:
            yield f"axes = {_quoted(axes)}"
        dtypes = [{c.spec.dtype for c in classes} for classes in (pairing.pt, pairing.ms)]
        pt, ms = (min(d) for d in dtypes)
        if pt != ms and _integer(pt) and _integer(ms) and all(len(d) == 1 for d in dtypes):
            yield f"dtype = {{ pt = {_quoted(pt)}, ms = {_quoted(ms)} }}"

    def places(self, pairing: Pairing) -> tuple[str, list[str]]:
        """The condition of a rule, and its indices in the order of the names."""
        stack = pairing.stack
        one = pairing.ms[0] if stack is None or stack.side == "pt" else pairing.pt[0]
        names, terms = [], []
        for slot in range(one.slots):
            values = [key[slot] for key in one.members]
            count = max(max(values) + 1, self.pt_range(pairing, slot))
            name = self.index.setdefault((slot, count), _numbered(_LETTERS, len(self.index)))
            names.append(name)
            terms.append(condition(name, values, count))
        return " and ".join(term for term in terms if term), names

    def pt_range(self, pairing: Pairing, slot: int) -> int:
        """How far the PyTorch names of a module count at the place that the one side's ``slot`` is."""
        stack = pairing.stack
        if stack is not None and stack.side == "pt" and slot >= stack.slot:
            slot += 1
        return self.ranges.get(_prefix(pairing.pt[0], slot), 0)

    def slots(self, pairing: Pairing, names: Sequence[str]) -> list[str]:
        """The indices of the stacked side."""
        stack = pairing.stack
        if stack is None:
            return [*names]
        own = self.stacks.setdefault(stack.count, f"{STACK}{len(self.stacks) + 1}" if self.stacks else STACK)
        return [*names[: stack.slot], own, *names[stack.slot :]]

    def axes(self, pairing: Pairing) -> str:
        if self.bare and pairing.axes == pairing.line.one and pairing.stack is None:
            return ""
        self.sizes |= pairing.line.sizes
        if pairing.stack is None:
            return pairing.axes
        own = self.stacks[pairing.stack.count]
        return pairing.axes if own == STACK else _renamed(pairing.axes, own)

    def tied(self) -> Iterator[str]:
        for side, name, target in self.found.tied:
            yield from ("", f"# {Evidence.VALUE.value}: equal to {printable(target)}", "[[rule]]")
            yield from (f"{side} = {_quoted(name)}", f"tied = {_quoted(target)}")

    def dropped(self) -> Iterator[str]:
        for c, reason in self.found.dropped:
            for name in c.members.values():
                yield from ("", "[[rule]]", f"pt = {_quoted(name)}", f"drop = {_quoted(reason)}")

    def left(self) -> Iterator[str]:
        """What has no counterpart: listed, for nothing may be left out silently."""
        found = self.found
        for side, names, others in (("pt", found.left_pt, found.left_ms), ("ms", found.left_ms, found.left_pt)):
            if not names:
                continue
            title = "PyTorch" if side == "pt" else "MindSpore"
            yield from ("", f"# {len(names)} {title} tensor(s) without a counterpart; write a rule for each, or")
            yield f'#   [[rule]]  {side} = "NAME"  drop = "why it is not needed"'
            for name in names[:_LISTED]:
                near = max(others[:_LISTED], key=partial(_alike, name), default="")
                yield f"#   {printable(name)}" + (f"    (most alike: {printable(near)})" if near else "")
            if len(names) > _LISTED:
                yield f"#   and {len(names) - _LISTED} more"


def _alike(name: str, other: str) -> float:
    return similarity(tuple(name.split(".")), tuple(other.split(".")))


def _quoted(value: object) -> str:
    """A TOML string, or list of strings: JSON's escapes are among TOML's."""
    return json.dumps(value, ensure_ascii=False)


def _template(c: NameClass, names: Sequence[str]) -> str:
    indices = iter(names)
    return ".".join(f"{{{next(indices)}}}" if part is None else part for part in c.template)


def _prefix(c: NameClass, slot: int) -> tuple[str | None, ...]:
    """The components before the number at ``slot``."""
    places = [k for k, part in enumerate(c.template) if part is None]
    return c.template[: places[slot]] if slot < len(places) else ()


def _ranges(classes: Iterator[NameClass]) -> Mapping[tuple[str | None, ...], int]:
    """For the components before a number: one more than the largest number there."""
    found: dict[tuple[str | None, ...], int] = {}
    for c in classes:
        for slot in range(c.slots):
            prefix = _prefix(c, slot)
            found[prefix] = max(found.get(prefix, 0), 1 + max(key[slot] for key in c.members))
    return found


def _numbered(letters: str, k: int) -> str:
    turn, letter = divmod(k, len(letters))
    return letters[letter] if not turn else f"{letters[letter]}_{turn}"


def _renamed(axes: str, own: str) -> str:
    """The line with its stacking axis under another name."""
    for mark in "(),":
        axes = axes.replace(mark, f" {mark} ")
    words = [own if word == STACK else word for word in axes.split()]
    return " ".join(words)


def _integer(dtype: str) -> bool:
    return dtype in DTYPE_NAMES and dtype.startswith(("int", "uint"))
