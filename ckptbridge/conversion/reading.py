"""Reading whole tensors in bounded pieces: their digests, and the comparison of two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ckptbridge.conversion.digests import new_hasher
from ckptbridge.conversion.plan import Record
from ckptbridge.conversion.sources import SourceFiles
from ckptbridge.conversion.syscalls import same_bytes
from ckptbridge.conversion.words import fill, record_pieces
from ckptbridge.formats.tensors import TensorSource
from ckptbridge.tables.axes import Block, View


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
            if not same_bytes(np.frombuffer(piece[:count], np.uint8), np.frombuffer(rest[:count], np.uint8)):
                return False
            piece, rest = piece[count:], rest[count:]
    return True


def digest_tensor(source: TensorSource, files: SourceFiles, algorithm: str) -> str:
    """The hex digest of a tensor's bytes in C order."""
    hasher = new_hasher(algorithm)
    for data in tensor_bytes(source, files):
        hasher.update(data)
    return hasher.hexdigest()


def digest_tensors(tensors: Iterable[TensorSource], files: SourceFiles, algorithm: str) -> dict[str, str]:
    """The hex digests of tensors, by name."""
    return {source.spec.name: digest_tensor(source, files, algorithm) for source in tensors}
