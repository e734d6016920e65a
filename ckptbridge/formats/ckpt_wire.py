"""A ``.ckpt``'s records on the wire: the few lines of protobuf that MindSpore uses, read strictly and written.

A record is ``0a <len> 0a <len> tag 12 <len> (08 dim)* 12 <len> type 1a <len> content``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptbridge.errors import FormatError, UnsupportedError
from ckptbridge.formats.files import MAX_DIMS, SourceFile
from ckptbridge.formats.tensors import Segment

_VARINT, _BYTES = 0, 2  # protobuf wire types
_WIRE_NAMES = {0: "varint", 1: "64-bit", 2: "length-delimited", 3: "group", 4: "end of group", 5: "32-bit"}


@dataclass(frozen=True, slots=True)
class Record:
    """One Value: where it starts, its tensor's fields, and where the content lies."""

    at: int
    tag: str
    dims: tuple[int, ...]
    type: str
    content: Segment


def read_record(source: SourceFile, at: int, end: int) -> tuple[Record, int]:
    """The record at ``at`` of a file whose records end at ``end``, and where the next one begins.

    Reads all of it but the content. Raises FormatError with the offset for what is malformed: fields
    that are unknown, repeated, missing, of a wrong wire type or longer than what holds them,
    non-minimal varints, negative dims, text that is not UTF-8.
    """
    return _Parser(source, end).record(at)


class _Parser:
    """Protobuf, as strict as the format allows: minimal varints, known fields, each once."""

    def __init__(self, source: SourceFile, end: int) -> None:
        self.source = source
        self.end = end

    def fail(self, what: str, at: int, tag: str | None = None) -> FormatError:
        return FormatError(
            what,
            remedy="The file is damaged, or is not a MindSpore checkpoint; fetch or save it again.",
            file=self.source.path,
            tensor=tag,
            offset=at,
        )

    def varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        for k in range(at, min(at + 10, end)):
            byte = self.source.byte(k)
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                if value >= 1 << 64 or (byte == 0 and k > at):
                    raise self.fail("A number is encoded in more bytes than it needs.", at)
                return value, k + 1
        raise self.fail("A number does not end within its field.", at)

    def field(self, at: int, end: int, known: Mapping[int, str]) -> tuple[int, int, int, int]:
        """A field's number, its wire type, and either (value, next) or (start, end) of its bytes."""
        start = at
        key, at = self.varint(at, end)
        number, wire = key >> 3, key & 7
        if number not in known:
            raise self.fail(f"Field {number} is not one of a checkpoint's.", start)
        value, at = self.varint(at, end) if wire in (_VARINT, _BYTES) else (0, at)
        if wire == _VARINT:
            return number, wire, value, at
        if wire != _BYTES:
            raise self.fail(f"The field '{known[number]}' has wire type {_WIRE_NAMES.get(wire, wire)}.", start)
        if value > end - at:
            raise self.fail(f"The field '{known[number]}' is {value} bytes long and {end - at} are left.", start)
        return number, wire, at, at + value

    def record(self, start: int) -> tuple[Record, int]:
        """The record at ``start``, and where the next one begins."""
        _, wire, at, stop = self.field(start, self.end, {1: "value"})
        if wire != _BYTES:
            raise self.fail("The field 'value' has wire type varint.", start)
        tag: str | None = None
        tensor: tuple[int, int] | None = None
        while at < stop:
            where = at
            number, wire, first, at = self.field(at, stop, {1: "tag", 2: "tensor", 3: "maptensor"})
            if wire != _BYTES:
                raise self.fail("The tag or tensor of a record has wire type varint.", where)
            if number == 3:
                raise UnsupportedError(
                    "The checkpoint holds a map parameter (a hash table of embeddings).",
                    remedy="Export its values as an ordinary parameter first.",
                    file=self.source.path,
                    tensor=tag,
                    offset=where,
                )
            if (tag if number == 1 else tensor) is not None:
                raise self.fail("A record has two tags or two tensors.", where, tag)
            if number == 1:
                tag = self.text(first, at, "tag")
            else:
                tensor = (first, at)
        if not tag:
            raise self.fail("A record has no tag.", start)
        if tensor is None:
            raise self.fail("A record has no tensor.", start, tag)
        return self.tensor(start, tag, *tensor), stop

    def tensor(self, record: int, tag: str, at: int, stop: int) -> Record:
        dims: list[int] = []
        name: str | None = None
        content: Segment | None = None
        while at < stop:
            where = at
            number, wire, first, at = self.field(at, stop, {1: "dims", 2: "tensor_type", 3: "tensor_content"})
            if number == 1:
                inner = first
                values = [first] if wire == _VARINT else []
                while wire == _BYTES and inner < at:  # protobuf lets a writer pack them
                    value, inner = self.varint(inner, at)
                    values.append(value)
                    if len(values) > MAX_DIMS:
                        break
                dims += values
                if len(dims) > MAX_DIMS:
                    raise self.fail(f"The tensor has more than {MAX_DIMS} dimensions.", where, tag)
                if any(v >= 1 << 63 for v in values):
                    raise self.fail("A dimension is negative.", where, tag)
                continue
            if wire != _BYTES:
                raise self.fail("The type or content of a tensor has wire type varint.", where, tag)
            if (name if number == 2 else content) is not None:
                raise self.fail("A tensor has two types or two contents.", where, tag)
            if number == 2:
                name = self.text(first, at, "tensor_type")
            else:
                content = Segment(self.source.path, first, at - first)
        if name is None or content is None:
            raise self.fail("A tensor lacks its type or its content.", record, tag)
        return Record(record, tag, tuple(dims), name, content)

    def text(self, start: int, stop: int, what: str) -> str:
        if stop - start > 1 << 16:
            raise self.fail(f"The {what} is {stop - start} bytes long.", start)
        try:
            return self.source.read(start, stop - start).decode()
        except UnicodeDecodeError:
            raise self.fail(f"The {what} is not UTF-8.", start) from None


def encode_tag(name: str) -> bytes:
    try:
        tag = name.encode()
    except UnicodeEncodeError:
        raise FormatError("A name is not UTF-8.", tensor=name.encode("utf-8", "backslashreplace").decode()) from None
    if not tag:
        raise FormatError("An entry of a .ckpt needs a name.")
    return tag


def record_head(name: str, dims: Sequence[int], type_name: str, nbytes: int) -> bytes:
    """A record up to its content of ``nbytes`` bytes, which comes last."""
    tag = encode_tag(name)
    tensor = b"".join(b"\x08" + _varint(dim) for dim in dims)
    tensor += b"\x12" + _varint(len(type_name)) + type_name.encode() + b"\x1a" + _varint(nbytes)
    value = b"\x0a" + _varint(len(tag)) + tag + b"\x12" + _varint(len(tensor) + nbytes) + tensor
    return b"\x0a" + _varint(len(value) + nbytes) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
