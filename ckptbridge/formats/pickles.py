"""A pickle interpreter that runs nothing: no import, no call, no attribute of anything in the file.

Opcodes as in CPython's ``pickletools``, protocols 2 to 5: what ``torch.save`` writes, and Python 2
before it. Classes and functions stay names. A call of one of the few names that the caller passes as
``constructors`` runs the caller's own function; any other call, instance or state becomes an inert
stub (:mod:`ckptbridge.formats.pickle_objects`).

Every opcode takes at least a byte of the file, long strings are passed over unread and numbers are
bounded, so memory grows with the pickle's own size and with nothing that it claims.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from ckptbridge.errors import FormatError
from ckptbridge.formats.files import MAX_HEADER_BYTES, SourceFile
from ckptbridge.formats.pickle_objects import CONTAINERS, Constructor, Global, Misfit, Stub, dict_key

MAX_OPCODES = 16_000_000  # about 45 opcodes a tensor
MAX_MARKS = 1000  # picklers recurse, so none nests deeper
LONG_STRING = 64 << 10  # from here on a string is no name: it is passed over
MAX_INT_BYTES = 256
MAX_LINE = 1024
_CHUNK = 256 << 10


class PickleStream:
    """The bytes of a file from ``at`` to ``end``, taken in order through a small window."""

    __slots__ = ("_base", "_buffer", "_pos", "_start", "end", "source")

    def __init__(self, source: SourceFile, at: int, end: int) -> None:
        self.source = source
        self.end = end
        self._base = at
        self._buffer = b""
        self._pos = 0
        self._start = at  # moved along by what is skipped

    @property
    def at(self) -> int:
        """Offset in the file of the next byte."""
        return self._base + self._pos

    def take(self, nbytes: int) -> bytes:
        start = self._pos
        stop = start + nbytes
        if stop > len(self._buffer):
            self._refill(nbytes)
            start, stop = 0, nbytes
        self._pos = stop
        return self._buffer[start:stop]

    def line(self) -> bytes:
        """The bytes up to a newline, which is taken too and not returned."""
        line = bytearray()
        while (byte := self.take(1)) != b"\n":
            line += byte
            if len(line) > MAX_LINE:
                raise self.bad(f"A line is longer than {MAX_LINE} bytes.")
        return bytes(line)

    def skip(self, nbytes: int) -> None:
        """Pass over ``nbytes`` bytes without reading them."""
        if nbytes > self.end - self.at:
            raise self.bad(f"A string of {nbytes} bytes reaches past the end of the pickle.")
        self._start += nbytes
        if self._pos + nbytes <= len(self._buffer):
            self._pos += nbytes
        else:
            self._base, self._pos, self._buffer = self.at + nbytes, 0, b""

    def bad(self, what: str, near: str | None = None) -> FormatError:
        """A FormatError at the present place, ``near`` the string that was read last."""
        return FormatError(
            what,
            remedy="The file is damaged or made to harm; get it again from where it was made.",
            file=self.source.path,
            offset=self.at,
            near=near,
        )

    def _refill(self, nbytes: int) -> None:
        room = self.end - self.at
        if nbytes > room:
            raise self.bad(f"The pickle ends within an opcode: {nbytes} bytes are due and {room} are left.")
        size = min(max(nbytes, _CHUNK), room)
        if self.at - self._start > MAX_HEADER_BYTES:
            raise self.bad(f"The pickle is larger than {MAX_HEADER_BYTES} bytes.")
        self._base, self._pos = self.at, 0
        self._buffer = self.source.read(self._base, size)


@dataclass(slots=True)
class Pickle:
    """A pickle's value, and how often each name was made a stub of."""

    value: object
    stubbed: dict[Global, int] = field(default_factory=dict)


def interpret(
    stream: PickleStream,
    constructors: Mapping[Global, Constructor],
    persistent: Callable[[object], object],
) -> Pickle:
    """The value of the pickle at ``stream``, which is left behind its STOP.

    ``constructors`` rebuild the objects that matter, beside the containers known here;
    ``persistent`` resolves persistent ids (torch's storages). Ordered and default dicts become
    dicts, sets and frozensets stubs with ``elements``. Raises FormatError with the offset for
    anything malformed.
    """
    machine = _Machine(stream, {**CONTAINERS, **constructors}, persistent)
    try:
        return Pickle(machine.run(), machine.stubbed)
    except IndexError:
        raise stream.bad("An opcode takes more from the stack than is there.") from None


# --- the machine -----------------------------------------------------------------------------

# Python 2's names, which protocol 2 keeps to this day.
_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}


class _Machine:
    """Stack, marks and memo of one pickle."""

    def __init__(
        self,
        stream: PickleStream,
        constructors: Mapping[Global, Constructor],
        persistent: Callable[[object], object],
    ) -> None:
        self.stream = stream
        self.constructors = constructors
        self.persistent = persistent
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.stubbed: dict[Global, int] = {}
        self.start = stream.at
        self.copied = 0

    def run(self) -> object:
        take = self.stream.take
        for _ in range(MAX_OPCODES):
            code = take(1)[0]
            if code == 0x2E:  # STOP
                return self.stack.pop()
            op = _OPS.get(code)
            if op is None:
                raise self.stream.bad(f"Opcode {code:#04x} is not one that checkpoints are written with.")
            op(self)
        raise self.stream.bad(f"The pickle has more than {MAX_OPCODES} opcodes.")

    # Helpers

    def number(self, form: struct.Struct) -> int:
        return int(form.unpack(self.stream.take(form.size))[0])

    def pop_mark(self) -> list[object]:
        items = self.stack
        if not self.marks:
            raise self.stream.bad("An opcode refers to a mark that was not set.")
        self.stack = self.marks.pop()
        return items

    def stub(self, callee: Global, args: tuple[object, ...]) -> Stub:
        self.stubbed[callee] = self.stubbed.get(callee, 0) + 1
        return Stub(callee, args)

    def call(self, callee: object, args: object) -> object:
        if not isinstance(args, tuple):
            raise self.stream.bad("A call has arguments that are no tuple.")
        if isinstance(callee, Stub):
            return self.stub(callee.callee, args)
        if not isinstance(callee, Global):
            raise self.stream.bad("What is called is neither a class nor a function.")
        constructor = self.constructors.get(callee)
        if constructor is None:
            return self.stub(callee, args)
        # A real pickle copies each list into a dict or set once; a hostile one could copy it for ever.
        self.copied += sum(len(arg) for arg in args if isinstance(arg, (list, dict)))
        if self.copied > self.stream.at - self.start:
            raise self.stream.bad("Containers are copied more often than they were written.")
        try:
            return constructor(args)
        except Misfit as misfit:
            raise self.stream.bad(f"{misfit}.", self.last_string()) from None
        except (TypeError, ValueError):
            raise self.stream.bad(f"{callee} is called with arguments that do not fit.", self.last_string()) from None

    def last_string(self) -> str | None:
        """The string on top of the stack: in a state dict, the name of the tensor that is being rebuilt."""
        frames = (self.stack, *reversed(self.marks))
        return next((item for frame in frames for item in reversed(frame) if isinstance(item, str)), None)

    def set_items(self, items: list[object]) -> None:
        target = self.stack[-1]
        if isinstance(target, Stub):
            target.items = {} if target.items is None else target.items
            target = target.items
        if type(target) is not dict or len(items) % 2:
            raise self.stream.bad("Keys and values are set in what is no dict, or do not come in pairs.")
        try:
            for key, value in zip(items[::2], items[1::2], strict=True):
                target[dict_key(key)] = value
        except TypeError:
            raise self.stream.bad("A dict has a key that cannot be one.") from None

    def extend(self, items: list[object]) -> None:
        target = self.stack[-1]
        if isinstance(target, Stub):
            target.elements = [] if target.elements is None else target.elements
            target = target.elements
        if type(target) is not list:
            raise self.stream.bad("Elements are appended to what is no list.")
        target.extend(items)

    def text(self, nbytes: int) -> None:
        if nbytes >= LONG_STRING:
            self.stream.skip(nbytes)
            self.stack.append(Stub(Global("builtins", "str")))
            return
        try:
            self.stack.append(self.stream.take(nbytes).decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            raise self.stream.bad("A string is not UTF-8.") from None

    def octets(self, nbytes: int) -> None:
        if nbytes >= LONG_STRING:
            self.stream.skip(nbytes)
            self.stack.append(Stub(Global("builtins", "bytes")))
            return
        self.stack.append(self.stream.take(nbytes))

    def python_2_str(self, nbytes: int) -> None:
        self.octets(nbytes)
        value = self.stack[-1]
        if isinstance(value, bytes):
            with suppress(UnicodeDecodeError):  # else some binary data of Python 2, no name
                self.stack[-1] = value.decode("utf-8")

    def long(self, nbytes: int) -> None:
        if not 0 <= nbytes <= MAX_INT_BYTES:
            raise self.stream.bad(f"An integer has {nbytes} bytes.")
        self.stack.append(int.from_bytes(self.stream.take(nbytes), "little", signed=True))

    def decimal(self) -> None:
        """Python 2's pickler wrote integers beyond 32 bits as text, with an L if they were long."""
        digits = self.stream.line()
        if digits.endswith(b"L"):
            digits = digits[:-1]
        if len(digits) > MAX_INT_BYTES or not digits.lstrip(b"-").isdigit():
            raise self.stream.bad("An integer in text form is none.")
        try:
            self.stack.append(int(digits))
        except ValueError:
            raise self.stream.bad("An integer in text form is none.") from None

    def new_global(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str) or max(len(module), len(name)) > MAX_LINE:
            raise self.stream.bad("A class or function has no proper name.")
        self.stack.append(Global(_PYTHON_2.get(module, module), name))

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise self.stream.bad(f"Memo entry {index} is used and was not made.")
        self.stack.append(self.memo[index])

    # Opcodes that need more than a line

    def op_mark(self) -> None:
        if len(self.marks) >= MAX_MARKS:
            raise self.stream.bad(f"Objects are nested more than {MAX_MARKS} deep.")
        self.marks.append(self.stack)
        self.stack = []

    def op_pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.pop_mark()

    def op_tuple(self) -> None:
        items = tuple(self.pop_mark())
        self.stack.append(items)

    def op_tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def op_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self.set_items([key, value])

    def op_reduce(self) -> None:
        args = self.stack.pop()
        self.stack.append(self.call(self.stack.pop(), args))

    def op_persistent(self) -> None:
        pid = self.stack.pop()
        try:
            self.stack.append(self.persistent(pid))
        except Misfit as misfit:
            raise self.stream.bad(f"{misfit}.", self.last_string()) from None

    def op_newobj_ex(self) -> None:
        kwargs = self.stack.pop()
        args = self.stack.pop()
        made = self.call(self.stack.pop(), args)
        if isinstance(made, Stub) and kwargs:
            made.state = kwargs
        self.stack.append(made)

    def op_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Stub):
            target.state = state
        elif type(target) is not dict:  # an OrderedDict's attributes (a state dict's _metadata) say nothing of weights
            raise self.stream.bad(f"State is set on a {type(target).__name__}.")

    def op_global(self) -> None:
        module, name = self.stream.line(), self.stream.line()
        try:
            self.new_global(module.decode(), name.decode())
        except UnicodeDecodeError:
            raise self.stream.bad("A class or function has no proper name.") from None

    def op_stack_global(self) -> None:
        name = self.stack.pop()
        self.new_global(self.stack.pop(), name)

    def op_frozenset(self) -> None:
        items = self.pop_mark()
        self.stack.append(Stub(Global("builtins", "frozenset"), elements=items))

    def op_proto(self) -> None:
        version = self.stream.take(1)[0]
        if version > 5:
            raise self.stream.bad(f"The pickle's protocol is {version}; there are protocols up to 5.")


_U1, _U2, _U4, _U8 = (struct.Struct(form) for form in ("<B", "<H", "<I", "<Q"))
_I4 = struct.Struct("<i")
_F8 = struct.Struct(">d")

# Left out on purpose: text forms of protocol 0 (S V P i F p g), the extension registry (0x82 to 0x84)
# and out-of-band buffers (0x97, 0x98). torch.load(weights_only=True) refuses them too.
_OPS: dict[int, Callable[[_Machine], None]] = {
    ord("("): _Machine.op_mark,
    ord("0"): _Machine.op_pop,
    ord("1"): lambda m: (m.pop_mark(), None)[1],
    ord("2"): lambda m: m.stack.append(m.stack[-1]),
    ord("N"): lambda m: m.stack.append(None),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    ord("J"): lambda m: m.stack.append(m.number(_I4)),
    ord("K"): lambda m: m.stack.append(m.stream.take(1)[0]),
    ord("M"): lambda m: m.stack.append(m.number(_U2)),
    ord("I"): _Machine.decimal,
    ord("L"): _Machine.decimal,
    0x8A: lambda m: m.long(m.number(_U1)),
    0x8B: lambda m: m.long(m.number(_I4)),
    ord("G"): lambda m: m.stack.append(_F8.unpack(m.stream.take(8))[0]),
    ord("U"): lambda m: m.python_2_str(m.number(_U1)),
    ord("T"): lambda m: m.python_2_str(m.number(_U4)),
    0x8C: lambda m: m.text(m.number(_U1)),
    ord("X"): lambda m: m.text(m.number(_U4)),
    0x8D: lambda m: m.text(m.number(_U8)),
    ord("C"): lambda m: m.octets(m.number(_U1)),
    ord("B"): lambda m: m.octets(m.number(_U4)),
    0x8E: lambda m: m.octets(m.number(_U8)),
    0x96: lambda m: m.octets(m.number(_U8)),
    ord("]"): lambda m: m.stack.append([]),
    ord("}"): lambda m: m.stack.append({}),
    ord(")"): lambda m: m.stack.append(()),
    0x8F: lambda m: m.stack.append(Stub(Global("builtins", "set"))),
    0x91: _Machine.op_frozenset,
    ord("t"): _Machine.op_tuple,
    0x85: lambda m: m.op_tuple_of(1),
    0x86: lambda m: m.op_tuple_of(2),
    0x87: lambda m: m.op_tuple_of(3),
    ord("a"): lambda m: m.extend([m.stack.pop()]),
    ord("e"): lambda m: m.extend(m.pop_mark()),
    0x90: lambda m: m.extend(m.pop_mark()),
    ord("s"): _Machine.op_setitem,
    ord("u"): lambda m: m.set_items(m.pop_mark()),
    ord("c"): _Machine.op_global,
    0x93: _Machine.op_stack_global,
    ord("R"): _Machine.op_reduce,
    0x81: _Machine.op_reduce,
    0x92: _Machine.op_newobj_ex,
    ord("b"): _Machine.op_build,
    ord("Q"): _Machine.op_persistent,
    ord("q"): lambda m: m.put(m.number(_U1)),
    ord("r"): lambda m: m.put(m.number(_U4)),
    0x94: lambda m: m.put(len(m.memo)),
    ord("h"): lambda m: m.get(m.number(_U1)),
    ord("j"): lambda m: m.get(m.number(_U4)),
    0x80: _Machine.op_proto,
    0x95: lambda m: (m.number(_U8), None)[1],  # FRAME: only a hint for reading ahead
}
