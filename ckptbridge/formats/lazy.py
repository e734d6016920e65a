"""A checkpoint as a mapping of names to tensors that are read when asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptbridge.errors import SourceChangedError
from ckptbridge.formats.detect import open_inventory
from ckptbridge.formats.dtypes import DType
from ckptbridge.formats.files import open_source
from ckptbridge.formats.tensors import Inventory, Segment, TensorSource

_READ = 1 << 30  # Linux moves at most 2 GiB at a call


def read_words(source: TensorSource) -> npt.NDArray[Any]:
    """A tensor's storage words in a fresh C-order array of its shape.

    Takes memory for the tensor, and for a strided one also for the storage between its first and last element. Raises
    SourceChangedError when the file has become too short.
    """
    spec, word = source.spec, source.spec.dtype.word
    if spec.numel == 0:
        return np.empty(spec.shape, word)
    strides = source.element_strides
    span = 1 + sum((dim - 1) * stride for dim, stride in zip(spec.shape, strides, strict=True))
    storage = np.empty(span, word)
    target = storage.view(np.uint8).data
    skip = source.offset * word.itemsize
    for segment in source.segments:
        take = min(segment.nbytes - skip, len(target))
        if take > 0:
            _read_into(target[:take], Segment(segment.path, segment.offset + skip, take))
            target = target[take:]
        skip = max(0, skip - segment.nbytes)
    if source.contiguous:
        return storage.reshape(spec.shape)
    byte_strides = [stride * word.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(storage, spec.shape, byte_strides, writeable=False).copy()


def _read_into(target: memoryview, segment: Segment) -> None:
    # Plain reads, not a memory map: a file that is cut meanwhile gives an error instead of a SIGBUS.
    done = 0
    with open_source(segment.path) as file:
        while done < segment.nbytes:
            count = os.preadv(file.fd, [target[done : done + _READ]], segment.offset + done)
            if count == 0:
                raise SourceChangedError(
                    "The file is shorter than its header says.", file=segment.path, offset=segment.offset + done
                )
            done += count


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The NumPy dtype of ``dtype``'s values; ml_dtypes' for those that NumPy lacks."""
    if dtype.name == "bfloat16" or dtype.name.startswith("float8"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, dtype.name))
    return np.dtype(dtype.name)


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor of a checkpoint; its bytes stay on disk until :meth:`numpy` or :meth:`words`."""

    source: TensorSource

    @property
    def name(self) -> str:
        return self.source.spec.name

    @property
    def dtype(self) -> str:
        """The dtype's name, as torch has it: ``bfloat16`` ..."""
        return self.source.spec.dtype.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.spec.shape

    @property
    def nbytes(self) -> int:
        return self.source.spec.nbytes

    def words(self) -> npt.NDArray[Any]:
        """The storage words as unsigned integers, a fresh C-order array."""
        return read_words(self.source)

    def numpy(self) -> npt.NDArray[Any]:
        """The values, a fresh C-order array; bfloat16 and fp8 have ml_dtypes' types."""
        # A 0-d array can change its dtype only as long as the item size stays, which it does.
        return read_words(self.source).view(numpy_dtype(self.source.spec.dtype))

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, {self.dtype}, {self.shape})"


class Checkpoint(Mapping[str, LazyTensor]):
    """A checkpoint of any format, read-only and in file order.

    ``strings`` are a ``.ckpt``'s string entries or a safetensors file's metadata, ``scalars`` the
    training state that stood among the weights, ``notes`` sentences on what the reader found.
    """

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory

    @property
    def path(self) -> Path:
        return self.inventory.path

    @property
    def format(self) -> str:
        return self.inventory.format

    @property
    def strings(self) -> Mapping[str, str]:
        return self.inventory.strings

    @property
    def notes(self) -> tuple[str, ...]:
        return self.inventory.notes

    @property
    def scalars(self) -> Mapping[str, LazyTensor]:
        return {name: LazyTensor(source) for name, source in self.inventory.scalars.items()}

    def __getitem__(self, name: str) -> LazyTensor:
        return LazyTensor(self.inventory.tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.inventory.tensors)

    def __len__(self) -> int:
        return len(self.inventory.tensors)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {self.format}, {len(self)} tensors)"


def open_checkpoint(path: str | os.PathLike[str], key: str | None = None) -> Checkpoint:
    """Open a checkpoint file or directory by its content; reads headers only.

    ``key`` chooses among several nested state dicts of a ``.bin`` (model and ema, say). Raises the
    errors of :mod:`ckptbridge.errors`.

    >>> import numpy, safetensors.numpy
    >>> safetensors.numpy.save_file({"norm.weight": numpy.ones(3, "float32")}, "model.safetensors")
    >>> checkpoint = open_checkpoint("model.safetensors")
    >>> list(checkpoint), checkpoint.format
    (['norm.weight'], 'safetensors')
    >>> tensor = checkpoint["norm.weight"]
    >>> tensor
    LazyTensor('norm.weight', float32, (3,))
    >>> tensor.numpy()
    array([1., 1., 1.], dtype=float32)
    """
    return Checkpoint(open_inventory(Path(path), key))
