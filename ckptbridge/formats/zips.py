"""The directory of a stored zip archive, read and checked by hand.

Layout as in PKWARE's APPNOTE 6.3.9 (sections 4.3.7 local header, 4.3.12 central header, 4.3.14 and
4.3.15 zip64 end, 4.3.16 end). Only what PyTorch needs is accepted: one disk, no encryption, no
compression; so a record's bytes lie in the file as they are, and nothing can expand.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckptbridge.errors import FormatError
from ckptbridge.formats.files import MAX_HEADER_BYTES, SourceFile

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR64 = struct.Struct("<4sIQI")
END = struct.Struct("<4s4H2IH")
LOCAL_MAGIC, CENTRAL_MAGIC, END64_MAGIC, LOCATOR64_MAGIC, END_MAGIC = (
    b"PK\x03\x04",
    b"PK\x01\x02",
    b"PK\x06\x06",
    b"PK\x06\x07",
    b"PK\x05\x06",
)
DESCRIPTOR_MAGIC = b"PK\x07\x08"
MAX16, MAX32 = 0xFFFF, 0xFFFFFFFF
ZIP64_FIELD = 1
_DEFERRED = 1 << 3  # checksum and sizes stand in a descriptor behind the data
_MAX_COMMENT = 65535
_DAMAGED = "The file is damaged or cut; get it again from where it was made."


@dataclass(frozen=True, slots=True)
class Record:
    """A stored record: ``nbytes`` bytes at ``offset`` of the file, and the CRC-32 that the directory claims."""

    name: str
    offset: int
    nbytes: int
    crc: int


def read_zip(source: SourceFile) -> dict[str, Record]:
    """The records of a zip file by name, in the order of its directory.

    Every local header is compared with the directory, and no two records overlap. Raises
    FormatError for anything else than a plain stored archive.
    """
    start, size, count = _end(source)
    if size > MAX_HEADER_BYTES or count * CENTRAL.size > size:
        raise _bad(source, f"The zip directory of {count} records in {size} bytes is impossible.", start)
    directory = source.read(start, size)
    records: dict[str, Record] = {}
    extents: list[tuple[int, int, str]] = []
    at = 0
    for _ in range(count):
        if at + CENTRAL.size > size:
            raise _bad(source, "The zip directory is cut.", start + at)
        record, header, at = _central(source, directory, at, start)
        if record.name in records:
            raise _bad(source, f"Two zip records have the name '{record.name}'.", start + at)
        records[record.name] = record
        extents.append((header, record.offset + record.nbytes, record.name))
    if at != size:
        raise _bad(source, f"The zip directory has {size - at} bytes too many.", start + at)
    _refuse_overlaps(source, extents, start)
    return records


def _bad(source: SourceFile, what: str, offset: int, remedy: str = _DAMAGED) -> FormatError:
    return FormatError(what, remedy=remedy, file=source.path, offset=offset)


def _end(source: SourceFile) -> tuple[int, int, int]:
    """Offset, size and record count of the central directory."""
    tail_at = max(0, source.size - END.size - _MAX_COMMENT)
    tail = source.read(tail_at, source.size - tail_at)
    found = tail.rfind(END_MAGIC)
    if found < 0 or found + END.size > len(tail):
        raise _bad(source, "The zip file has no end record: it is cut.", source.size)
    end_at = tail_at + found
    _, disk, first_disk, count_here, count, size, start, comment = END.unpack_from(tail, found)
    if end_at + END.size + comment != source.size:
        raise _bad(source, "The end of the zip file is malformed.", end_at)
    limit = end_at
    if end_at >= LOCATOR64.size and (MAX16 in (count, count_here) or MAX32 in (size, start)):
        magic, _, end64_at, _ = LOCATOR64.unpack(source.read(end_at - LOCATOR64.size, LOCATOR64.size))
        if magic == LOCATOR64_MAGIC:
            if end64_at + END64.size != end_at - LOCATOR64.size:
                raise _bad(source, "The zip64 end record is not where it must be.", end64_at)
            magic, length, _, _, disk, first_disk, count_here, count, size, start = END64.unpack(
                source.read(end64_at, END64.size)
            )
            if magic != END64_MAGIC or length != END64.size - 12:
                raise _bad(source, "The zip64 end record is malformed.", end64_at)
            limit = end64_at
    elif end_at >= LOCATOR64.size:
        # torch writes the zip64 records always; the plain values, being in range, hold.
        magic, _, end64_at, _ = LOCATOR64.unpack(source.read(end_at - LOCATOR64.size, LOCATOR64.size))
        limit = end64_at if magic == LOCATOR64_MAGIC else limit
    if disk or first_disk or count != count_here:
        raise _bad(source, "The zip file is one of several volumes.", end_at, "Join the volumes first.")
    if start + size != limit:
        raise _bad(source, "The zip directory does not end where its end record begins.", end_at)
    return start, size, count


def _central(source: SourceFile, directory: bytes, at: int, start: int) -> tuple[Record, int, int]:
    """The record of the central header at ``at``, the offset of its local header, and what follows ``at``."""
    here = start + at
    magic, _, _, flags, method, _, _, crc, packed, nbytes, n_name, n_extra, n_comment, disk, _, _, header = (
        CENTRAL.unpack_from(directory, at)
    )
    at += CENTRAL.size
    if magic != CENTRAL_MAGIC or at + n_name + n_extra + n_comment > len(directory):
        raise _bad(source, "A zip directory entry is malformed.", here)
    raw_name = directory[at : at + n_name]
    extra = directory[at + n_name : at + n_name + n_extra]
    at += n_name + n_extra + n_comment
    name = _name(source, raw_name, here)
    nbytes, packed, header, disk = _zip64(source, extra, nbytes, packed, header, disk, here)
    if disk:
        raise _bad(source, "The zip file is one of several volumes.", here, "Join the volumes first.")
    if flags & 1:
        raise _bad(source, f"The zip record '{name}' is encrypted.", here, "Decrypt the archive first.")
    if method or packed != nbytes:
        raise _bad(
            source,
            f"The zip record '{name}' is compressed, which PyTorch never does.",
            here,
            "Unpack the archive and pack it without compression (zip -0 -r), or torch.load and torch.save it.",
        )
    record = Record(name, 0, nbytes, crc)
    return replace(record, offset=_data_offset(source, record, header, raw_name, start)), header, at


def _name(source: SourceFile, raw: bytes, here: int) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _bad(source, "A zip record's name is not UTF-8.", here) from None
    parts = name.split("/")
    if not name or name.startswith("/") or "\\" in name or "\0" in name or ":" in parts[0] or ".." in parts:
        raise _bad(
            source,
            f"A zip record has the name '{name}', which leads out of the archive.",
            here,
            "Do not unpack this file; get it again from where it was made.",
        )
    return name


def _zip64(
    source: SourceFile, extra: bytes, nbytes: int, packed: int, header: int, disk: int, here: int
) -> tuple[int, int, int, int]:
    """The values of a central header, those that are full replaced by the zip64 field's, in its order."""
    values = [nbytes, packed, header, disk]
    full = [MAX32, MAX32, MAX32, MAX16]
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        at += 4
        if at + length > len(extra):
            raise _bad(source, "An extra field of a zip directory entry is cut.", here)
        if kind == ZIP64_FIELD:
            stop = at + length
            where = at
            for k in range(4):
                if values[k] == full[k]:
                    form = "<Q" if k < 3 else "<I"
                    if where + struct.calcsize(form) > stop:
                        raise _bad(source, "A zip64 field lacks a value.", here)
                    values[k] = struct.unpack_from(form, extra, where)[0]
                    where += struct.calcsize(form)
            break
        at += length
    return values[0], values[1], values[2], values[3]


def _data_offset(source: SourceFile, record: Record, header: int, raw_name: bytes, limit: int) -> int:
    """Where the data of ``record``, whose local header is at ``header``, begins; all of it lies before ``limit``.

    The lengths in a local header are protected by no checksum, so that one flipped bit would shift
    the data. What must follow the data, the descriptor, shows that they are right.
    """
    if header + LOCAL.size > limit:
        raise _bad(source, "A zip record begins outside the file.", header)
    magic, _, flags, method, _, _, crc, packed, nbytes, n_name, n_extra = LOCAL.unpack(source.read(header, LOCAL.size))
    offset = header + LOCAL.size + int(n_name) + int(n_extra)
    if offset + record.nbytes > limit:
        raise _bad(source, "A zip record reaches outside the file.", header)
    same = magic == LOCAL_MAGIC and not method and not flags & 1 and n_name == len(raw_name)
    if same and flags & _DEFERRED:
        same = not record.nbytes or _descriptor_agrees(source, record, offset + record.nbytes)
    elif same:
        # With the zip64 field the sizes stand there.
        same = crc == record.crc and nbytes in (record.nbytes, MAX32) and packed in (record.nbytes, MAX32)
    if not same or source.read(header + LOCAL.size, n_name) != raw_name:
        raise _bad(source, f"The zip record '{record.name}' disagrees with the directory.", header)
    return offset


def _descriptor_agrees(source: SourceFile, record: Record, at: int) -> bool:
    """Whether a data descriptor for ``record`` is at ``at``: signature, checksum and sizes.

    APPNOTE lets the signature be left out, no writer does, and without it data moved by four bytes
    would look right.
    """
    found = source.read(at, min(24, source.size - at))
    forms = ["<4sI2Q"] + ["<4sI2I"] * (record.nbytes < MAX32)
    wanted = (DESCRIPTOR_MAGIC, record.crc, record.nbytes, record.nbytes)
    return any(found.startswith(struct.pack(form, *wanted)) for form in forms)


def _refuse_overlaps(source: SourceFile, extents: list[tuple[int, int, str]], start: int) -> None:
    before, name_before = 0, ""
    for header, stop, name in sorted(extents):
        if header < before:
            raise _bad(source, f"The zip records '{name_before}' and '{name}' overlap.", header)
        before, name_before = stop, name


def directory_of(records: Mapping[str, Record], inner: str) -> str | None:
    """The one top folder ("archive") that holds a record ``inner``; None when there is none, or several."""
    found = [name for name in records if name.count("/") == 1 and name.endswith(f"/{inner}")]
    return found[0][: -len(inner) - 1] if len(found) == 1 else None
