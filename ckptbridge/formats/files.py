"""Source files: positioned reads for headers, a checksum for contents, and JSON that nobody vouches for."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptbridge.errors import FormatError, UsageError

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own bound; ample for a million names
MAX_DIMS = 32  # what NumPy 1 can hold; no framework's tensors have more
_WINDOW = 4096
_CHUNK = 4 << 20


@dataclass(slots=True)
class SourceFile:
    """An open file of known size, read at offsets; reads past the end are FormatErrors."""

    path: Path
    fd: int
    size: int
    _start: int = 0
    _window: bytes = field(default=b"", repr=False)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes at ``offset``."""
        at = offset - self._start
        if at >= 0 and at + nbytes <= len(self._window):
            return self._window[at : at + nbytes]
        if offset + nbytes > self.size:
            raise FormatError(
                f"The file ends at byte {self.size}, within what was announced to reach byte {offset + nbytes}.",
                remedy="The file is cut or damaged; fetch it again.",
                file=self.path,
                offset=offset,
            )
        self._start, self._window = offset, self._pread(offset, min(max(nbytes, _WINDOW), self.size - offset))
        return self._window[:nbytes]

    def byte(self, offset: int) -> int:
        """The byte at ``offset``."""
        at = offset - self._start
        return self._window[at] if 0 <= at < len(self._window) else self.read(offset, 1)[0]

    def crc32(self, end: int) -> int:
        """The CRC-32 of the bytes before ``end``, streamed."""
        crc = 0
        for offset in range(0, end, _CHUNK):
            crc = zlib.crc32(self._pread(offset, min(_CHUNK, end - offset)), crc)
        return crc

    def _pread(self, offset: int, nbytes: int) -> bytes:
        data = os.pread(self.fd, nbytes, offset)
        while len(data) < nbytes:
            more = os.pread(self.fd, nbytes - len(data), offset + len(data))
            if not more:
                raise FormatError(
                    "The file became shorter while it was read.",
                    remedy="Wait until it is written completely.",
                    file=self.path,
                )
            data += more
        return data


@contextmanager
def open_source(path: Path) -> Iterator[SourceFile]:
    """Open a regular file for positioned reads.

    Raises UsageError when there is no such file, FormatError when it is no regular file (a pipe or
    a device would block or never end) or cannot be read.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("This is not a regular file.", remedy="Name a checkpoint file.", file=path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UsageError("There is no such file.", remedy="Check the path.", file=path) from None
    except PermissionError:
        raise FormatError(
            "This user may not read the file.",
            remedy="Change its mode: MindSpore sets 0400 on what it saves, so only its owner can read it.",
            file=path,
        ) from None
    except OSError as error:
        raise FormatError(f"The file cannot be opened: {error.strerror}.", file=path) from None
    try:
        yield SourceFile(path, fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def checked_numel(shape: tuple[int, ...], itemsize: int) -> int | None:
    """The number of elements of ``shape``, or None when it, or its size in bits, exceeds 64 bits.

    Every partial product counts, as in the safetensors library: ``(2**40, 2**40, 0)`` overflows.
    """
    numel = 1
    for dim in shape:
        numel *= dim
        if numel >= 1 << 64:
            return None
    return numel if numel * itemsize * 8 < 1 << 64 else None


def parse_json(data: bytes, path: Path) -> Any:
    """JSON from a file that nobody vouches for.

    Raises FormatError for what parsers disagree on: a key that stands twice, NaN and infinities,
    integers beyond 64 bits, surrogate halves, and nesting without end. A negative integer comes back
    as a float, so that ``type(value) is int`` means a natural number.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique, parse_int=_integer, parse_constant=_no_constant)
    except RecursionError:
        raise FormatError("The JSON is nested too deeply.", remedy="Fetch the file again.", file=path) from None
    except ValueError as error:
        raise FormatError(f"The JSON is malformed: {error}.", remedy="Fetch the file again.", file=path) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = min(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key '{twice}' stands twice")
    for key, value in pairs:
        for text in (key, value):
            if isinstance(text, str) and not text.isascii():
                text.encode()  # UnicodeEncodeError, a ValueError, for half of a surrogate pair
    return made


def _integer(text: str) -> int | float:
    if len(text) > 20:
        raise ValueError(f"the number {text[:24]} is too large")
    return float(text) if text.startswith("-") else int(text)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")
