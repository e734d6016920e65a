"""PyTorch's ``.bin`` (the zip form), written without PyTorch.

The geometry is that of torch 2.13: its zip writer (miniz in caffe2/serialize, every record stored, data
aligned to 64 bytes by an extra field ``FB``, checksums in a descriptor behind the data, zip64 records
always) and its pickler (protocol 2). For the same tensors in the same order the file is byte for byte
what ``torch.save(collections.OrderedDict(...), buffer)`` writes up to the last record,
``.data/serialization_id``: an optional hash for torch's own logging, which is left out.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptbridge.errors import FormatError
from ckptbridge.formats.dtypes import DType
from ckptbridge.formats.tensors import FileLayout, Place, TensorSpec
from ckptbridge.formats.zips import (
    CENTRAL,
    CENTRAL_MAGIC,
    DESCRIPTOR_MAGIC,
    END,
    END64,
    END64_MAGIC,
    END_MAGIC,
    LOCAL,
    LOCAL_MAGIC,
    LOCATOR64,
    LOCATOR64_MAGIC,
    MAX16,
    MAX32,
    ZIP64_FIELD,
)

ALIGNMENT = 64
_FOLDER = "archive"  # torch.save's name for a buffer
_UTF8 = 1 << 11
_DEFERRED = 1 << 3  # size and checksum stand behind the data
_MADE_BY = 0x031E  # miniz says "version 3.0, Unix" in the zip64 end record, and nowhere else


@dataclass(frozen=True, slots=True)
class _Record:
    """A record's place: local header at ``header``, data at ``offset``; ``data`` None for a tensor's bytes."""

    name: bytes
    header: int
    offset: int
    nbytes: int
    data: bytes | None

    @property
    def wide(self) -> bool:
        """Whether the record needs the zip64 field, and so eight-byte sizes in its descriptor."""
        return self.nbytes >= MAX32 or self.header >= MAX32

    @property
    def flags(self) -> int:
        return _UTF8 | (_DEFERRED if self.nbytes else 0)

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self.offset + self.nbytes + (0 if not self.nbytes else 24 if self.wide else 16)


def layout(specs: Sequence[TensorSpec], strings: Mapping[str, str]) -> FileLayout:
    """Where every byte goes. The format has no room for ``strings``.

    ``size`` is where the zip directory begins, which ``seal`` appends. Raises FormatError for
    strings, for a name that stands twice and for one that is not Unicode text.
    """
    _check(specs, strings)
    records = _records(specs)
    fixed: list[tuple[int, bytes]] = []
    for record in records:
        fixed.append((record.header, _local_header(record)))
        if record.data is not None:
            fixed.append((record.offset, record.data))
            fixed.append((record.offset + record.nbytes, _descriptor(record, zlib.crc32(record.data))))
    places = tuple(
        (Place(0, record.offset, record.nbytes),) if record.nbytes else () for record in records if record.data is None
    )
    return FileLayout(tuple(specs), records[-1].end, places, tuple(fixed), needs_crc=True)


def seal(layout: FileLayout, strings: Mapping[str, str], crcs: Sequence[int] | None) -> tuple[tuple[int, bytes], ...]:
    """The descriptors and the directory, for tensors whose bytes have the CRC-32 values ``crcs``."""
    _check(layout.specs, strings)
    if crcs is None or len(crcs) != len(layout.specs):
        raise ValueError("a zip needs one CRC-32 for each tensor")
    records = _records(layout.specs)
    remaining = iter(crcs)
    runs: list[tuple[int, bytes]] = []
    headers: list[bytes] = []
    for record in records:
        crc = next(remaining) if record.data is None else zlib.crc32(record.data)
        if record.data is None and record.nbytes:
            runs.append((record.offset + record.nbytes, _descriptor(record, crc)))
        headers.append(_central_header(record, crc))
    directory = b"".join(headers)
    return (*runs, (layout.size, directory + _end(len(records), layout.size, len(directory))))


def _check(specs: Sequence[TensorSpec], strings: Mapping[str, str]) -> None:
    if strings:
        raise FormatError(
            "A .bin file has no room for strings.",
            remedy="Write a directory: it has ckptbridge.json beside the weights; or --format safetensors.",
        )
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise FormatError("Two tensors have the same name.", remedy="Names must differ.", tensor=spec.name)
        seen.add(spec.name)
        try:
            spec.name.encode()
        except UnicodeEncodeError:
            raise FormatError("The name is not Unicode text.", remedy="Rename it.", tensor=spec.name) from None


# --- the zip ---------------------------------------------------------------------------------


def _records(specs: Sequence[TensorSpec]) -> list[_Record]:
    """All records in torch's order, placed."""
    contents: list[tuple[str, int, bytes | None]] = [
        (name, len(data), data)
        for name, data in (
            ("data.pkl", _pickle(specs)),
            (".format_version", b"1"),
            (".storage_alignment", str(ALIGNMENT).encode()),
            ("byteorder", b"little"),
        )
    ]
    contents += [(f"data/{k}", spec.nbytes, None) for k, spec in enumerate(specs)]
    contents.append(("version", 2, b"3\n"))
    records: list[_Record] = []
    at = 0
    for name, nbytes, data in contents:
        path = f"{_FOLDER}/{name}".encode()
        unpadded = _Record(path, at, 0, nbytes, data)
        start = at + LOCAL.size + len(path) + len(_zip64_field(unpadded, local=True)) + 4
        records.append(_Record(path, at, start + -start % ALIGNMENT, nbytes, data))
        at = records[-1].end
    return records


def _zip64_field(record: _Record, *, local: bool) -> bytes:
    """The extra field for what does not fit 32 bits. As in miniz, the packed size of a local one is 0."""
    values = b""
    if record.nbytes >= MAX32:
        values += struct.pack("<2Q", record.nbytes, 0 if local else record.nbytes)
    if record.header >= MAX32:
        values += struct.pack("<Q", record.header)
    return struct.pack("<2H", ZIP64_FIELD, len(values)) + values if values else b""


def _local_header(record: _Record) -> bytes:
    extra = _zip64_field(record, local=True)
    room = record.offset - record.header - LOCAL.size - len(record.name) - len(extra) - 4
    extra += b"FB" + struct.pack("<H", room) + b"Z" * room
    fields = (0, record.flags, 0, 0, 0, 0, 0, 0, len(record.name), len(extra))
    return LOCAL.pack(LOCAL_MAGIC, *fields) + record.name + extra


def _descriptor(record: _Record, crc: int) -> bytes:
    sizes = struct.pack("<2Q" if record.wide else "<2I", record.nbytes, record.nbytes)
    return DESCRIPTOR_MAGIC + struct.pack("<I", crc) + sizes


def _central_header(record: _Record, crc: int) -> bytes:
    extra = _zip64_field(record, local=False)
    size = min(record.nbytes, MAX32)
    fields = (0, 0, record.flags, 0, 0, 0, crc, size, size, len(record.name), len(extra), 0, 0, 0, 0)
    return CENTRAL.pack(CENTRAL_MAGIC, *fields, min(record.header, MAX32)) + record.name + extra


def _end(count: int, start: int, size: int) -> bytes:
    """The zip64 end record, its locator and the end record, for ``count`` headers at ``start``."""
    end64 = END64.pack(END64_MAGIC, END64.size - 12, _MADE_BY, 45, 0, 0, count, count, size, start)
    locator = LOCATOR64.pack(LOCATOR64_MAGIC, 0, start + size, 1)
    few = min(count, MAX16)
    return end64 + locator + END.pack(END_MAGIC, 0, 0, few, few, min(size, MAX32), min(start, MAX32), 0)


# --- the pickle ------------------------------------------------------------------------------


def _pickle(specs: Sequence[TensorSpec]) -> bytes:
    """``collections.OrderedDict`` of the tensors, each on a storage of its own, as CPython's pickler writes it."""
    writer = _Opcodes()
    writer.raw(b"\x80\x02")
    writer.empty_ordered_dict()
    for batch in _batches(specs):
        writer.raw(b"(" if len(batch) > 1 else b"")
        for k, spec in batch:
            writer.text(spec.name)
            writer.tensor(spec, str(k))
        writer.raw(b"u" if len(batch) > 1 else b"s")
    writer.raw(b".")
    return bytes(writer.out)


def _batches(specs: Sequence[TensorSpec]) -> Iterator[list[tuple[int, TensorSpec]]]:
    numbered = list(enumerate(specs))
    return (numbered[k : k + 1000] for k in range(0, len(numbered), 1000))


class _Opcodes:
    """Protocol 2 opcodes, appended to ``out``; every object is put in the memo, as CPython's pickler does."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.memo_size = 0
        self.known: dict[bytes, int] = {}

    def raw(self, code: bytes) -> None:
        self.out += code

    def put(self) -> None:
        self.out += b"q" + bytes([self.memo_size]) if self.memo_size < 256 else b"r" + _u4(self.memo_size)
        self.memo_size += 1

    def once(self, code: bytes) -> None:
        """``code`` the first time, later its memo entry."""
        index = self.known.get(code)
        if index is None:
            self.known[code] = self.memo_size
            self.raw(code)
            self.put()
        else:
            self.raw(b"h" + bytes([index]) if index < 256 else b"j" + _u4(index))

    def name(self, module: str, name: str) -> None:
        self.once(f"c{module}\n{name}\n".encode())

    def text(self, text: str) -> None:
        self.raw(_unicode(text))
        self.put()

    def integer(self, value: int) -> None:
        if value < 1 << 8:
            self.raw(b"K" + bytes([value]))
        elif value < 1 << 16:
            self.raw(b"M" + struct.pack("<H", value))
        elif value < 1 << 31:
            self.raw(b"J" + struct.pack("<i", value))
        else:
            nbytes = value.bit_length() // 8 + 1
            self.raw(b"\x8a" + bytes([nbytes]) + value.to_bytes(nbytes, "little"))

    def integers(self, values: Sequence[int]) -> None:
        """A tuple of integers."""
        self.raw(b"(" if len(values) > 3 else b"")
        for value in values:
            self.integer(value)
        self.raw((b")", b"\x85", b"\x86", b"\x87")[len(values)] if len(values) <= 3 else b"t")
        if values:
            self.put()

    def empty_ordered_dict(self) -> None:
        self.name("collections", "OrderedDict")
        self.raw(b")R")
        self.put()

    def tensor(self, spec: TensorSpec, key: str) -> None:
        """A C-order tensor at the start of storage ``key``, which is as long as the tensor."""
        typed = bool(spec.dtype.storage)
        self.name("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3")
        self.raw(b"(")
        self.storage(spec.dtype, key, spec.numel if typed else spec.nbytes)
        self.integer(0)
        self.integers(spec.shape)
        self.integers(_torch_strides(spec.shape))
        self.raw(b"\x89")  # requires_grad
        self.empty_ordered_dict()  # backward hooks
        if not typed:
            self.name("torch", spec.dtype.torch)
        self.raw(b"t")
        self.put()
        self.raw(b"R")
        self.put()

    def storage(self, dtype: DType, key: str, numel: int) -> None:
        self.raw(b"(")
        self.once(_unicode("storage"))
        if dtype.storage:
            self.name("torch", dtype.storage)
        else:
            self.name("torch.storage", "UntypedStorage")
        self.text(key)
        self.once(_unicode("cpu"))
        self.integer(numel)
        self.raw(b"t")
        self.put()
        self.raw(b"Q")


def _unicode(text: str) -> bytes:
    data = text.encode()
    return b"X" + _u4(len(data)) + data


def _u4(value: int) -> bytes:
    return struct.pack("<I", value)


def _torch_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """C-order strides as torch counts them: an axis of length 0 as one of length 1."""
    strides = [1] * len(shape)
    for k in range(len(shape) - 2, -1, -1):
        strides[k] = strides[k + 1] * max(shape[k + 1], 1)
    return tuple(strides)
