"""Expressions over config values: a small part of Python's grammar, interpreted here.

The text is parsed by :mod:`ast`, every node is checked against a list of what there is, and the
rest is refused; nothing is ever handed to Python to run. There are names, dotted access into
nested objects, ``x[k]`` on lists, integers, strings, ``True``, ``False``, ``None``, lists and
tuples, ``+ - * // %`` on integers, comparisons, ``in``, ``is None``, ``and``, ``or``, ``not`` and
``a if c else b``. There are no calls, no powers and no arithmetic on strings, and integers stay
below 2**63, so an expression costs no more than its length.

A value that the config does not hold counts as None in ``x or y`` and in ``x is None``; any other
use of it is an error that names it.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any

from ckptbridge.errors import ConfigError, TableError
from ckptbridge.tables.messages import shorten

MAX_LENGTH = 500  # characters
MAX_DEPTH = 40  # nested nodes
LIMIT = 2**63  # magnitude of integers


class Absent(Enum):
    """What a lookup returns for a name that has no value (None is a value: JSON's null)."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT

Look = Callable[[str], object]  # what a name means; ABSENT when it means nothing
_Step = Callable[[Look], Any]

_ALLOWED = "Use names, a.b, x[i], integers, strings, + - * // %, comparisons, in, is None, and, or, not, a if c else b."


@dataclass(frozen=True, slots=True)
class Expression:
    """A checked expression; equal texts are equal expressions.

    ``names`` are the names it looks up (of ``a.b`` only ``a``); ``compared`` are the pairs of a
    name and a string that it is compared with, by which a misspelt option is found.
    """

    text: str
    names: frozenset[str] = field(compare=False)
    compared: frozenset[tuple[str, str]] = field(compare=False)
    _step: _Step = field(compare=False, repr=False)

    def evaluate(self, look: Look) -> object:
        """The value. Raises ConfigError when a value is absent or of the wrong kind."""
        return self._step(look)

    def holds(self, look: Look) -> bool:
        """Whether the value is true in Python's sense."""
        return bool(self._step(look))

    def __str__(self) -> str:
        return self.text


@lru_cache(maxsize=4096)
def parse_expression(text: str) -> Expression:
    """Parse and check ``text``; TableError says what is not part of the language."""
    if len(text) > MAX_LENGTH:
        raise TableError(f"The expression is longer than {MAX_LENGTH} characters.", expression=text[:60] + "...")
    source = text.replace("\n", " ").strip()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's advice on style in "1or 2" concerns nobody here
            tree = ast.parse(source, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else "it is nested too deeply"
        raise TableError(f"The expression cannot be parsed: {reason}.", expression=text, remedy=_ALLOWED) from None
    compiler = _Compiler(text)
    step = compiler.value(tree.body, 0)
    return Expression(text, frozenset(compiler.names), frozenset(compiler.compared), step)


class _Compiler:
    """Turns each allowed node into a function of the lookup, and refuses the others."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.names: set[str] = set()
        self.compared: set[tuple[str, str]] = set()

    def refuse(self, what: str) -> TableError:
        return TableError(what, expression=self.text, remedy=_ALLOWED)

    def wrong(self, what: str) -> ConfigError:
        return ConfigError(what, expression=self.text)

    def value(self, node: ast.expr, depth: int, absent_is_none: bool = False) -> _Step:
        if depth > MAX_DEPTH:
            raise self.refuse("The expression is nested too deeply.")
        depth += 1
        match node:
            case ast.Constant(value=constant):
                return self.constant(constant)
            case ast.Name() | ast.Attribute() | ast.Subscript():
                return self.present(node, depth, absent_is_none)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                steps = [self.value(e, depth) for e in elements]
                return lambda look: [step(look) for step in steps]
            case ast.BoolOp(op=ast.Or(), values=values):
                return self.either([self.value(v, depth, absent_is_none=True) for v in values])
            case ast.BoolOp(op=ast.And(), values=values):
                return self.both([self.value(v, depth) for v in values])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.value(operand, depth)
                return lambda look: not inner(look)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                number = self.integer(operand, depth)
                return lambda look: -number(look)
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv() | ast.Mod()):
                return self.arithmetic(node, depth)
            case ast.Compare():
                return self.comparison(node, depth)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                condition = self.value(test, depth)
                yes, no = self.value(body, depth, absent_is_none), self.value(orelse, depth, absent_is_none)
                return lambda look: yes(look) if condition(look) else no(look)
        raise self.refuse(f"'{_shown(node)}' is not part of the expression language.")

    def constant(self, constant: object) -> _Step:
        if constant is not None and type(constant) not in (int, str, bool):
            raise self.refuse(f"A {type(constant).__name__} is not part of the expression language.")
        if isinstance(constant, int) and constant >= LIMIT:
            raise self.refuse("An integer is 2**63 or more.")
        return lambda look: constant

    # --- names, and what the config does not hold --------------------------------------------

    def present(self, node: ast.expr, depth: int, absent_is_none: bool) -> _Step:
        reference = self.reference(node, depth)
        if absent_is_none:

            def lenient(look: Look) -> object:
                value = reference(look)
                return None if value is ABSENT else value

            return lenient
        name = _shown(node)

        def strict(look: Look) -> object:
            value = reference(look)
            if value is ABSENT:
                raise ConfigError(
                    f"The config has no value for '{name}'.",
                    expression=self.text,
                    remedy=f"Give '{name.partition('.')[0]}' in config.json (or in the file given by --config).",
                )
            return value

        return strict

    def reference(self, node: ast.expr, depth: int) -> _Step:
        """The value of a name or of something inside one, ABSENT when there is none."""
        if depth > MAX_DEPTH:
            raise self.refuse("The expression is nested too deeply.")
        match node:
            case ast.Name(id=name):
                self.names.add(name)
                return lambda look: look(name)
            case ast.Attribute(value=owner, attr=attribute) if isinstance(owner, (ast.Name, ast.Attribute)):
                base = self.reference(owner, depth + 1)
                shown = _shown(owner)

                def member(look: Look) -> object:
                    found = base(look)
                    if found is ABSENT or found is None:
                        return ABSENT
                    if not isinstance(found, Mapping):
                        raise self.wrong(f"'{shown}' is {shorten(found)}, which has no '{attribute}'.")
                    return found.get(attribute, ABSENT)

                return member
            case ast.Subscript(value=owner, slice=position) if not isinstance(position, (ast.Slice, ast.Tuple)):
                sequence = self.value(owner, depth + 1)
                index = self.integer(position, depth + 1)
                shown = _shown(owner)

                def item(look: Look) -> object:
                    items, k = sequence(look), index(look)
                    if not isinstance(items, (list, tuple)):
                        raise self.wrong(f"'{shown}' is {shorten(items)}, not a list.")
                    if not 0 <= k < len(items):
                        raise self.wrong(f"'{shown}' has {len(items)} values and none at {k}.")
                    return items[k]

                return item
        raise self.refuse(f"'{_shown(node)}' is not part of the expression language.")

    # --- operators ---------------------------------------------------------------------------

    def either(self, steps: list[_Step]) -> _Step:
        def run(look: Look) -> object:
            value: object = None
            for step in steps:
                value = step(look)
                if value:
                    break
            return value

        return run

    def both(self, steps: list[_Step]) -> _Step:
        def run(look: Look) -> object:
            value: object = None
            for step in steps:
                value = step(look)
                if not value:
                    break
            return value

        return run

    def integer(self, node: ast.expr, depth: int) -> Callable[[Look], int]:
        step = self.value(node, depth)

        def checked(look: Look) -> int:
            value = step(look)
            if type(value) is not int or not -LIMIT < value < LIMIT:  # True is not a number here
                raise self.wrong(f"'{_shown(node)}' is {shorten(value)}, not an integer below 2**63.")
            return value

        return checked

    def arithmetic(self, node: ast.BinOp, depth: int) -> _Step:
        left, right = self.integer(node.left, depth), self.integer(node.right, depth)
        match node.op:
            case ast.Add():
                return lambda look: self.bounded(left(look) + right(look))
            case ast.Sub():
                return lambda look: self.bounded(left(look) - right(look))
            case ast.Mult():
                return lambda look: self.bounded(left(look) * right(look))

        remainder = isinstance(node.op, ast.Mod)

        def divide(look: Look) -> int:
            a, b = left(look), right(look)
            if b == 0:
                raise self.wrong(f"'{_shown(node.right)}' is 0 and something is divided by it.")
            return a % b if remainder else a // b

        return divide

    def bounded(self, value: int) -> int:
        if not -LIMIT < value < LIMIT:
            raise self.wrong("The result is 2**63 or more.")
        return value

    def comparison(self, node: ast.Compare, depth: int) -> _Step:
        nodes = [node.left, *node.comparators]
        tests = [self.test(a, op, b, depth) for a, op, b in zip(nodes, node.ops, nodes[1:], strict=False)]
        if len(tests) == 1:
            return tests[0]
        return self.both(tests)

    def test(self, left: ast.expr, op: ast.cmpop, right: ast.expr, depth: int) -> _Step:
        if isinstance(op, (ast.Is, ast.IsNot)):
            if not (isinstance(right, ast.Constant) and right.value is None):
                raise self.refuse("'is' compares with None only.")
            tested = self.value(left, depth, absent_is_none=True)
            if isinstance(op, ast.Is):
                return lambda look: tested(look) is None
            return lambda look: tested(look) is not None
        a = self.value(left, depth)
        b = self.value(right, depth)
        self.note_strings(left, right)
        match op:
            case ast.Eq():
                return lambda look: self.plain(left, a(look)) == self.plain(right, b(look))
            case ast.NotEq():
                return lambda look: self.plain(left, a(look)) != self.plain(right, b(look))
            case ast.In():
                return lambda look: self.plain(left, a(look)) in self.items(right, b(look))
            case ast.NotIn():
                return lambda look: self.plain(left, a(look)) not in self.items(right, b(look))
            case ast.Lt():
                return lambda look: self.number(left, a(look)) < self.number(right, b(look))
            case ast.LtE():
                return lambda look: self.number(left, a(look)) <= self.number(right, b(look))
            case ast.Gt():
                return lambda look: self.number(left, a(look)) > self.number(right, b(look))
            case ast.GtE():
                return lambda look: self.number(left, a(look)) >= self.number(right, b(look))
        raise self.refuse("This comparison is not part of the expression language.")

    def plain(self, node: ast.expr, value: object) -> object:
        # Lists from elsewhere may be nested deeper than a comparison can follow.
        if value is not None and not isinstance(value, (str, int, float)):
            raise self.wrong(f"'{_shown(node)}' is {shorten(value)}, which cannot be compared.")
        return value

    def items(self, node: ast.expr, value: object) -> list[object] | tuple[object, ...]:
        if not isinstance(value, (list, tuple)):
            raise self.wrong(f"'{_shown(node)}' is {shorten(value)}, not a list.")
        return value

    def number(self, node: ast.expr, value: object) -> int | float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(f"'{_shown(node)}' is {shorten(value)}, not a number.")
        return value

    def note_strings(self, left: ast.expr, right: ast.expr) -> None:
        for name, other in ((left, right), (right, left)):
            if isinstance(name, ast.Name):
                constants = other.elts if isinstance(other, (ast.List, ast.Tuple)) else [other]
                self.compared |= {
                    (name.id, c.value) for c in constants if isinstance(c, ast.Constant) and isinstance(c.value, str)
                }


def _shown(node: ast.expr) -> str:
    """The node's text, for a message; cut, and safe for nodes of any depth."""
    try:
        text = ast.unparse(node)
    except (RecursionError, ValueError):
        return type(node).__name__
    return text if len(text) <= 80 else text[:80] + "..."
