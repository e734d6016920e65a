"""Shows that the tests of the mapping tables would catch a wrong table.

Every rule of every table is spoilt in turn: two of its tensors exchanged, two factors of a dimension swapped (which
undoes an interleave), two terms of a sum or two dimensions swapped, the whole rule taken out, its type or its
being optional changed, its names exchanged with those of a rule of equal axes. Each spoilt table goes
through the same judgement as in the tests (tests/mappings/*_judge.py); one that passes is a survivor and is
printed. Exit code 0 when there are none, else 1.

    python scripts/mutate_tables.py                 every family
    python scripts/mutate_tables.py llama bert      these families
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "mappings")]

from table_judge import layouts  # noqa: E402 - found by the path above

from ckptbridge.errors import CkptBridgeError, TableError  # noqa: E402
from ckptbridge.tables import catalog  # noqa: E402
from ckptbridge.tables.axes import Axis, AxisMap, Dims, Literal, Node, Product, Sum, bind_axes, parse_axes  # noqa: E402
from ckptbridge.tables.expand import choose_roots, expand  # noqa: E402
from ckptbridge.tables.rules import Rule, index_axes  # noqa: E402
from ckptbridge.tables.table import Table  # noqa: E402

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


@dataclass(frozen=True)
class Mutant:
    """A table with one fault; ``rules`` are the positions of the rules that it touches."""

    what: str
    table: Table
    rules: frozenset[int]


# --- faults ----------------------------------------------------------------------------------


def mutants(table: Table) -> Iterator[Mutant]:
    """Every table that differs from ``table`` by one fault."""
    for at, rule in enumerate(table.rules):
        for what, spoilt in _spoilt(rule, table):
            yield _mutant(table, {at: spoilt}, what)
        yield Mutant(f"{rule}: taken out", replace(table, rules=_without(table, at)), frozenset({at}))
    for (at, a), (other, b) in combinations(enumerate(table.rules), 2):
        if a.axes is None or b.axes is None or a.axes.text != b.axes.text or _drops(a) or _drops(b):
            continue
        if a.ms != b.ms and len(a.ms) == len(b.ms) and a.ms:
            yield _mutant(table, {at: replace(a, ms=b.ms), other: replace(b, ms=a.ms)}, f"names exchanged with {b}")


def _mutant(table: Table, spoilt: dict[int, Rule], what: str) -> Mutant:
    rules = tuple(spoilt.get(k, rule) for k, rule in enumerate(table.rules))
    return Mutant(f"{table.rules[min(spoilt)]}: {what}", replace(table, rules=rules), frozenset(spoilt))


def _without(table: Table, at: int) -> tuple[Rule, ...]:
    return (*table.rules[:at], *table.rules[at + 1 :])


def _drops(rule: Rule) -> bool:
    return bool(rule.drop)


def _spoilt(rule: Rule, table: Table) -> Iterator[tuple[str, Rule]]:
    for side in ("pt", "ms"):
        names = rule.pt if side == "pt" else rule.ms
        for i, j in combinations(range(len(names)), 2):
            changed = list(names)
            changed[i], changed[j] = changed[j], changed[i]
            yield f"{side} names {i + 1} and {j + 1} exchanged", _renamed(rule, side, tuple(changed))
    if rule.optional:
        yield "no longer optional", replace(rule, optional=False)
    if rule.dtype_pt or rule.dtype_ms:
        yield "without its dtype", replace(rule, dtype_pt="", dtype_ms="")
    if rule.tied:
        yield "no longer tied", replace(rule, tied="", ms=rule.ms or rule.pt)
    if rule.axes is None or rule.drop or rule.tied:
        return
    for text in _other_lines(rule.axes):
        try:
            line = parse_axes(text)
        except TableError:
            continue  # such a table does not load
        if _meaning(line, rule, table) != _meaning(rule.axes, rule, table):
            yield f"'{rule.axes.text}' became '{text}'", replace(rule, axes=line)


def _renamed(rule: Rule, side: str, names: tuple[str, ...]) -> Rule:
    return replace(rule, pt=names) if side == "pt" else replace(rule, ms=names)


def _meaning(line: AxisMap, rule: Rule, table: Table) -> object:
    """Shapes and blocks for lengths that all differ: of a factor 1, or an index axis, the place means nothing."""
    lengths = dict(zip(sorted(line.names), PRIMES, strict=False))
    pt_index, ms_index = index_axes(rule, table.index)
    try:
        return bind_axes(line, lengths, pt_index, ms_index)
    except TableError:
        return None


def _other_lines(line: AxisMap) -> Iterator[str]:
    """The line with one change in the right side, or in the left."""
    left, right = _shown(line.left), _shown(line.right)
    for changed in _changed_side(line.right):
        yield f"{left} -> {_shown(changed)}"
    for changed in _changed_side(line.left):
        yield f"{_shown(changed)} -> {right}"


def _changed_side(side: tuple[Dims, ...]) -> Iterator[tuple[Dims, ...]]:
    for k, dims in enumerate(side):
        for changed in _changed_parts(dims):
            yield (*side[:k], changed, *side[k + 1 :])


def _changed_node(node: Node) -> Iterator[Node]:
    match node:
        case Product(parts):
            yield from (Product(changed) for changed in _changed_parts(parts))
        case Sum(parts):
            yield from (Sum(changed) for changed in _changed_parts(parts))


def _changed_parts(parts: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
    yield from _swapped(parts)
    for k, part in enumerate(parts):
        for changed in _changed_node(part):
            yield (*parts[:k], changed, *parts[k + 1 :])


def _swapped(parts: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
    for i, j in combinations(range(len(parts)), 2):
        if parts[i] != parts[j]:
            changed = list(parts)
            changed[i], changed[j] = changed[j], changed[i]
            yield tuple(changed)


def _shown(side: tuple[Dims, ...]) -> str:
    return ", ".join(" ".join(_text(node) for node in dims) or "()" for dims in side)


def _text(node: Node) -> str:
    match node:
        case Axis(name):
            return name
        case Literal(length):
            return str(length)
        case Product(factors):
            return f"({' '.join(map(_text, factors))})"
        case Sum(terms):
            return f"({' + '.join(map(_text, terms))})"


# --- judgement -------------------------------------------------------------------------------


def survivors(judge: ModuleType, table: Table) -> tuple[int, list[str]]:
    """How many mutants were judged, and those that passed."""
    trials = []
    for case in judge.cases(table):
        config, shapes, *_ = case
        roots = choose_roots(table, "pt", shapes.keys())
        for options in layouts(table):
            used = {id(entry.rule) for entry in expand(table, config, options, roots).entries}
            # Only these trials can tell: in the others the rule does not apply.
            active = frozenset(k for k, rule in enumerate(table.rules) if id(rule) in used)
            trials.append((case, options, active))
    count, alive = 0, []
    for mutant in mutants(table):
        count += 1
        telling = (trial for trial in trials if trial[2] & mutant.rules)
        if not any(_caught(judge, mutant.table, case, options) for case, options, _ in telling):
            alive.append(mutant.what)
    return count, alive


def _caught(judge: ModuleType, table: Table, case: tuple[object, ...], options: Mapping[str, str]) -> bool:
    try:
        return bool(judge.faults(table, *case, options))
    except (CkptBridgeError, KeyError):
        return True


def main(wanted: list[str]) -> int:
    """Judge every mutant of the wanted families, or of all."""
    start, total, alive = time.monotonic(), 0, 0
    for path in sorted((ROOT / "tests" / "mappings").glob("*_judge.py")):
        judge = importlib.import_module(path.stem)
        for family in judge.FAMILIES:
            for target in catalog.targets(family) if family in (wanted or judge.FAMILIES) else ():
                table = catalog.find(family, target)
                count, passed = survivors(judge, table)
                total, alive = total + count, alive + len(passed)
                print(f"{table.name}: {count} faults, {len(passed)} not caught", flush=True)
                for what in passed:
                    print(f"  survivor: {what}")
    print(f"{total} faults in {time.monotonic() - start:.0f} s; {alive} not caught.")
    return 1 if alive or not total else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
