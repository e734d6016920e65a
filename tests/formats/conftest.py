"""Helpers that the format tests share: a writer of plain buffers, and records made with the real protobuf class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ckptbridge.formats.dtypes import BY_NAME, DType
from ckptbridge.formats.tensors import TensorSpec


def words(dtype: DType, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random storage words; bools are 0 or 1."""
    high = 2 if dtype.name == "bool" else 256
    raw = np.random.default_rng(seed).integers(0, high, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return raw.view(dtype.word).reshape(shape)


def write_plain(
    path: Path,
    module: ModuleType,
    arrays: Mapping[str, tuple[str, np.ndarray]],
    strings: Mapping[str, str] | None = None,
    placeholders: Mapping[str, str] | None = None,
) -> None:
    """A file by a format's layout and seal, the plain way: ``arrays`` maps names to (dtype, storage words)."""
    strings = strings or {}
    specs = [TensorSpec(name, BY_NAME[dtype], array.shape) for name, (dtype, array) in arrays.items()]
    layout = module.layout(specs, placeholders or strings)
    buffers = [np.ascontiguousarray(array).tobytes() for _, array in arrays.values()]
    with path.open("wb") as file:
        file.truncate(layout.size)
        for offset, data in layout.fixed:
            file.seek(offset)
            file.write(data)
        for places, data in zip(layout.places, buffers, strict=True):
            for place in places:
                file.seek(place.offset)
                file.write(data[place.start : place.start + place.nbytes])
        for offset, data in module.seal(layout, strings, None):
            file.seek(offset)
            file.write(data)


@pytest.fixture(name="words", scope="session")
def words_fixture() -> Callable[..., np.ndarray]:
    return words


@pytest.fixture(name="write_plain", scope="session")
def write_plain_fixture() -> Callable[..., None]:
    return write_plain
