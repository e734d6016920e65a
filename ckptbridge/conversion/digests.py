"""Digests of files and of contents, computed beside the copy.

A *content digest* does not depend on the file format: it is the digest of one line per tensor,
``name NUL dtype NUL d0,d1,... NUL hex(digest of the C-order bytes) LF``, sorted by name (UTF-8), so equal
tensors give equal digests in .ckpt, safetensors and .bin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Protocol

from ckptbridge.errors import UsageError
from ckptbridge.formats.tensors import TensorSpec

ALGORITHMS = ("blake3", "sha256", "none")
DEFAULT_ALGORITHM = "blake3"


class Hasher(Protocol):
    """What hashlib's objects and blake3's have in common."""

    def update(self, data: memoryview | bytes, /) -> object: ...

    def hexdigest(self) -> str: ...


def new_hasher(algorithm: str) -> Hasher:
    """An empty hasher; raises UsageError for an unknown algorithm."""
    if algorithm == "sha256":
        return hashlib.sha256()
    if algorithm == "blake3":
        import blake3

        hasher: Hasher = blake3.blake3()
        return hasher
    raise UsageError(f"There is no digest '{algorithm}'.", remedy=f"Use one of: {', '.join(ALGORITHMS)}.")


def tagged(algorithm: str, hexdigest: str) -> str:
    """A digest as it is written down: ``blake3:...``."""
    return f"{algorithm}:{hexdigest}"


def placeholder(algorithm: str) -> str:
    """A digest of the right length, for laying a file out before its bytes have moved."""
    return tagged(algorithm, "0" * 64)


def content_digest(algorithm: str, tensors: Iterable[tuple[TensorSpec, str]]) -> str:
    """The tagged content digest of (spec, hex digest of the tensor's bytes) pairs, in any order."""
    hasher = new_hasher(algorithm)
    for spec, digest in sorted(tensors, key=lambda pair: pair[0].name.encode("utf-8", "surrogateescape")):
        shape = ",".join(map(str, spec.shape))
        hasher.update(f"{spec.name}\0{spec.dtype.name}\0{shape}\0{digest}\n".encode("utf-8", "surrogateescape"))
    return tagged(algorithm, hasher.hexdigest())


def digest_bytes(algorithm: str, data: bytes) -> str:
    """The hex digest of ``data``."""
    hasher = new_hasher(algorithm)
    hasher.update(data)
    return hasher.hexdigest()
