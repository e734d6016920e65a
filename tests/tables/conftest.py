"""Helpers for the tests of the tables: write and load a table, and carry out what an axis line says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from ckptbridge.formats.tensors import contiguous_strides
from ckptbridge.tables.axes import BoundAxes
from ckptbridge.tables.table import Table, load_table

Arrays = Sequence[np.ndarray]

HEAD = """
schema = 1
family = "toy"
target = "there"
"""


@pytest.fixture(scope="session")
def move() -> Callable[[BoundAxes, Arrays], list[np.ndarray]]:
    """Copy the left tensors of a bound line into its right tensors, block by block.

    Every element of the right must be written exactly once.
    """

    def run(bound: BoundAxes, arrays: Arrays) -> list[np.ndarray]:
        assert [a.shape for a in arrays] == list(bound.left)
        written = [np.zeros(shape, np.int64) for shape in bound.right]
        counts = [np.zeros(shape, np.int64) for shape in bound.right]

        def window(array: np.ndarray, view: object, sizes: tuple[int, ...]) -> np.ndarray:
            strides = contiguous_strides(array.shape)
            flat = array.reshape(-1)[view.offset(strides) :]
            return as_strided(flat, sizes, [flat.itemsize * s for s in view.strides(strides)])

        for block in bound.blocks:
            source = window(arrays[block.left.tensor], block.left, block.sizes)
            window(written[block.right.tensor], block.right, block.sizes)[...] = source
            window(counts[block.right.tensor], block.right, block.sizes)[...] += 1
        assert all((count == 1).all() for count in counts)
        return written

    return run


@pytest.fixture(scope="session")
def numbered() -> Callable[..., list[np.ndarray]]:
    """Arrays of the given shapes, no element like another."""

    def make(*shapes: Sequence[int]) -> list[np.ndarray]:
        arrays, start = [], 1
        for shape in shapes:
            size = int(np.prod(shape, dtype=np.int64))
            arrays.append(np.arange(start, start + size).reshape(shape))
            start += size
        return arrays

    return make


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Table]:
    """Load a table of the given text; further files are given by name, relative to it.

    Text without a schema gets a head, so that a test shows only what it is about.
    """

    def write(text: str, files: dict[str, str] | None = None, name: str = "toy.toml") -> Table:
        text = dedent(text)
        (tmp_path / name).write_text(text if "schema" in text else HEAD + text, encoding="utf-8")
        for path, content in (files or {}).items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(dedent(content), encoding="utf-8")
        return load_table(tmp_path / name)

    return write
