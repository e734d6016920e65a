"""Reading whole sources in bounded pieces: digests of files and tensors, and comparison of two tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptbridge.conversion.digests import Hasher, new_hasher
from ckptbridge.conversion.plan import Record
from ckptbridge.conversion.sources import SourceFiles
from ckptbridge.conversion.words import fill, record_pieces
from ckptbridge.formats.tensors import TensorSource
from ckptbridge.tables.axes import Block, View

_STEP = 1 << 20  # bytes hashed at a time: what one hasher has read is still in the cache for the other


def identity(source: TensorSource) -> Record:
    """The record that carries a tensor over as it is, in C order."""
    shape = source.spec.shape
    view = View(0, (0,) * len(shape), tuple((k, 1) for k in range(len(shape))))
    return Record(source.spec, (source,), (Block(shape, view, view),), "", "")


def tensor_bytes(source: TensorSource, files: SourceFiles, buffer_bytes: int = 4 << 20) -> Iterator[memoryview]:
    """A tensor's bytes in C order, in pieces."""
    if source.contiguous:
        itemsize = source.spec.dtype.itemsize
        for path, offset, nbytes in files.runs(source, source.offset, source.spec.numel):
            for at in range(0, nbytes, buffer_bytes):
                yield files.view(path, offset + at, min(buffer_bytes, nbytes - at) // itemsize * itemsize)
        return
    record = identity(source)
    for piece in record_pieces(record, buffer_bytes):
        yield fill(record, piece, files).data


def equal_tensors(a: TensorSource, b: TensorSource, files: SourceFiles) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes."""
    if a.segments == b.segments and a.offset == b.offset and a.element_strides == b.element_strides:
        return True
    pieces_b = tensor_bytes(b, files)
    rest = memoryview(b"")
    for piece in tensor_bytes(a, files):
        while piece:
            if not rest:
                rest = next(pieces_b)
            count = min(len(piece), len(rest))
            if piece[:count] != rest[:count]:
                return False
            piece, rest = piece[count:], rest[count:]
    return True


@dataclass(frozen=True, slots=True)
class SourceDigests:
    """Hex digests of source files and of the bytes of source tensors, by name."""

    files: dict[Path, str]
    tensors: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Span:
    """A tensor's bytes, or some of them, in a file."""

    offset: int
    nbytes: int
    name: str


def digest_sources(
    paths: Sequence[Path], tensors: Sequence[TensorSource], files: SourceFiles, algorithm: str
) -> SourceDigests:
    """Digest files and tensors, reading each byte once where tensors lie one after the other."""
    spans: dict[Path, list[_Span]] = {path: [] for path in paths}
    found = SourceDigests({}, {})
    for source in tensors:
        if not source.contiguous:
            hasher = new_hasher(algorithm)
            for data in tensor_bytes(source, files):
                hasher.update(data)
            found.tensors[source.spec.name] = hasher.hexdigest()
            continue
        for path, offset, nbytes in files.runs(source, source.offset, source.spec.numel):
            spans[path].append(_Span(offset, nbytes, source.spec.name))
    hashers = {s.spec.name: new_hasher(algorithm) for s in tensors if s.contiguous}
    for path in paths:
        found.files[path] = _digest_file(path, sorted(spans[path], key=lambda s: s.offset), hashers, files, algorithm)
    found.tensors.update((name, hasher.hexdigest()) for name, hasher in hashers.items())
    return found


def _digest_file(
    path: Path, spans: Sequence[_Span], hashers: dict[str, Hasher], files: SourceFiles, algorithm: str
) -> str:
    whole = new_hasher(algorithm)
    data = memoryview(files.map(path))
    at = 0
    for span in spans:
        if span.offset > at:
            whole.update(data[at : span.offset])
            at = span.offset
        hasher = hashers[span.name]
        end = span.offset + span.nbytes
        for start in range(span.offset, end, _STEP):
            stop = min(start + _STEP, end)
            hasher.update(data[start:stop])
            if stop > at:  # tensors may share their storage: the file's bytes count once
                whole.update(data[max(at, start) : stop])
                at = stop
    whole.update(data[at:])
    return whole.hexdigest()
