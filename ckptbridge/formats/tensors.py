"""What a checkpoint holds, without its bytes: specs, where the bytes lie, and the inventory.

Everything here is frozen and free of input and output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from ckptbridge.formats.dtypes import DType


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's name, element type and shape."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of ``nbytes`` bytes at ``offset`` of the file ``path``."""

    path: Path
    offset: int
    nbytes: int


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """C-order strides of ``shape``, in elements."""
    strides = [1] * len(shape)
    for k in range(len(shape) - 2, -1, -1):
        strides[k] = strides[k + 1] * shape[k + 1]
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor on disk.

    The storage is the concatenation of ``segments`` (more than one only for a ``.ckpt`` tensor over
    512 MiB; each holds whole elements). Element (i0, i1, ...) of the tensor is storage element
    ``offset + i0*strides[0] + i1*strides[1] + ...``; a reader has checked that all of them lie
    inside. ``strides`` None means C order.
    """

    spec: TensorSpec
    segments: tuple[Segment, ...]
    offset: int = 0
    strides: tuple[int, ...] | None = None

    @property
    def contiguous(self) -> bool:
        return self.strides is None or self.strides == contiguous_strides(self.spec.shape)

    @property
    def element_strides(self) -> tuple[int, ...]:
        return contiguous_strides(self.spec.shape) if self.strides is None else self.strides


@dataclass(frozen=True, slots=True)
class Inventory:
    """A checkpoint's contents, from its headers alone.

    ``tensors`` is in file order, shards in the order of their names. ``strings`` are a ``.ckpt``'s
    string entries, or a safetensors file's metadata. ``aliases`` maps a name to the earlier name
    with which it shares storage, offset, shape and strides (PyTorch's tied weights); both names are
    in ``tensors``. ``notes`` are sentences for the user: wrappers found, prefixes removed, what was
    skipped, scalars set apart. ``scalars`` are the 0-d training state that ``append_dict`` mixes
    into a ``.ckpt`` (epoch_num ...): kept apart from the weights.
    """

    path: Path
    format: str  # "safetensors", "ckpt" or "bin"
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorSource]
    strings: Mapping[str, str] = field(default_factory=dict)
    scalars: Mapping[str, TensorSource] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(t.spec.nbytes for t in self.tensors.values())


# --- what a writer decides before the first byte ---------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run of a tensor's bytes goes: ``nbytes`` from byte ``start`` of the tensor to ``offset`` of the file."""

    start: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A file's whole geometry, known before its first byte.

    ``places[k]`` says where tensor k's bytes go (several runs for a sliced ``.ckpt`` tensor, none
    for an empty one). ``fixed`` are the header bytes that do not depend on the contents, as
    (offset, bytes). What depends on them is written by the format's ``seal``.
    """

    specs: tuple[TensorSpec, ...]
    size: int
    places: tuple[tuple[Place, ...], ...]
    fixed: tuple[tuple[int, bytes], ...]
    needs_crc: bool = False  # seal needs each tensor's CRC-32 (zip)


@dataclass(frozen=True, slots=True)
class Checksum:
    """A CRC-32 that a file carries of ``nbytes`` of its bytes; ``what`` names them in a message."""

    what: str
    offset: int
    nbytes: int
    crc: int
