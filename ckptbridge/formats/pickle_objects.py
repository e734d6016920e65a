"""What a pickle's objects become here: names, inert stubs, and plain containers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

_MAX_KEY_INT = 1 << 60  # beyond, integers hash modulo 2**61 - 1: keys made to collide take quadratic time


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that a pickle names. It is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Stub:
    """An object whose class means nothing here: what the pickle would have made it from, inert."""

    callee: Global
    args: tuple[object, ...] = ()
    state: object = None
    items: dict[object, object] | None = None
    elements: list[object] | None = None


class Misfit(ValueError):
    """Raised by constructors and ``persistent``: a sentence without its stop, about what does not fit."""


Constructor = Callable[[tuple[object, ...]], object]


# --- containers ------------------------------------------------------------------------------


def dict_key(key: object) -> object:
    """``key``, or an inert stand-in for a key whose hashing a hostile file could make expensive."""
    kind = type(key)
    if kind is int:
        return key if abs(key) < _MAX_KEY_INT else Stub(Global("builtins", "int"), (key,))  # type: ignore[arg-type]
    if kind is tuple:
        return Stub(Global("builtins", "tuple"), key)  # type: ignore[arg-type]
    if kind in (list, dict, bytearray):
        raise TypeError(kind.__name__)
    return key


def _dict(args: tuple[object, ...]) -> object:
    """dict, OrderedDict or Counter: of nothing, of a dict, or of pairs (Python 2)."""
    made: dict[object, object] = {}
    for arg in args:
        if isinstance(arg, dict):
            made.update(arg)
        elif isinstance(arg, list) and all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in arg):
            for key, value in arg:
                made[dict_key(key)] = value
        else:
            raise TypeError("pairs")
    return made


def _default_dict(args: tuple[object, ...]) -> object:
    """defaultdict(factory): the factory is dropped."""
    return _dict(args[1:])


def _elements(name: str) -> Constructor:
    """set or frozenset, of a list of elements."""

    def make(args: tuple[object, ...]) -> object:
        if len(args) > 1 or (args and not isinstance(args[0], (list, tuple))):
            raise TypeError("elements")
        return Stub(Global("builtins", name), elements=list(args[0]) if args else [])  # type: ignore[call-overload]

    return make


def _bytes(args: tuple[object, ...]) -> object:
    """``_codecs.encode(text, "latin1")``, protocol 2's way to write bytes: not needed, so not made."""
    return Stub(Global("builtins", "bytes"), args)


CONTAINERS: Mapping[Global, Constructor] = {
    Global("builtins", "dict"): _dict,
    Global("collections", "OrderedDict"): _dict,
    Global("collections", "Counter"): _dict,
    Global("collections", "defaultdict"): _default_dict,
    Global("builtins", "set"): _elements("set"),
    Global("builtins", "frozenset"): _elements("frozenset"),
    Global("_codecs", "encode"): _bytes,
}
