"""Pieces against the definition of a block, element by element."""

from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptbridge.conversion.gather import Box, Copy, Run, copies, pieces, within_segments
from ckptbridge.conversion.sources import assign
from ckptbridge.formats.dtypes import BY_NAME
from ckptbridge.formats.tensors import Segment, TensorSource, TensorSpec, contiguous_strides
from ckptbridge.tables.axes import bind_axes, parse_axes

LINES = [
    "v h",
    "(g r d) h, (g 1 d) h, (g 1 d) h -> (g (r + 1 + 1) d) h",
    "f h, f h -> (f (1 + 1)) h",
    "f h, f h -> (f + f) h",
    "i (f + f + f) -> f i, f i, f i",
    "(g r d) -> (r g d)",
    "(f 2 h) v -> (f h 2) v",
    "(g (r + d)) h -> (g r + g d) h",
    "f h v -> v f h",
    "f h -> f 1 h",
]


def source(name: str, shape: tuple[int, ...], offset: int = 0, strides: tuple[int, ...] | None = None) -> TensorSource:
    spec = TensorSpec(name, BY_NAME["int32"], shape)
    return TensorSource(spec, (Segment(Path("none"), 0, spec.nbytes),), offset, strides)


def assemble(parts: list[Copy], storages: list[np.ndarray], numel: int, limit: int, min_run: int) -> np.ndarray:
    """Carry pieces out with Python loops, checking that each starts where the last one ended."""
    out = np.full(numel, -1, np.int64)
    at = 0
    for piece in pieces(parts, limit, min_run):
        assert piece.dst == at
        at += piece.numel
        if isinstance(piece, Run):
            out[piece.dst : piece.dst + piece.numel] = storages[piece.source][piece.src : piece.src + piece.numel]
            continue
        assert isinstance(piece, Box)
        for part in piece.copies:
            for index in product(*map(range, part.sizes)):
                src = part.src + sum(i * s for i, s in zip(index, part.src_strides, strict=True))
                dst = part.dst + sum(i * s for i, s in zip(index, part.dst_strides, strict=True))
                assert piece.dst <= dst < piece.dst + piece.numel
                assert out[dst] == -1, "written twice"
                out[dst] = storages[part.source][src]
    assert at == numel
    return out


def by_definition(bound, sources: list[TensorSource], storages: list[np.ndarray], target: int) -> np.ndarray:
    """A target tensor, flat, straight from the definition of a block."""
    shape = bound.right[target]
    out = np.full(shape, -1, np.int64)
    for block in bound.blocks:
        if block.right.tensor != target:
            continue
        src = sources[block.left.tensor]
        for index in product(*map(range, block.sizes)):
            places = []
            for view in (block.left, block.right):
                place = list(view.start)
                for i, (dim, step) in zip(index, view.axes, strict=True):
                    place[dim] += i * step
                places.append(tuple(place))
            element = src.offset + sum(i * s for i, s in zip(places[0], src.element_strides, strict=True))
            out[places[1]] = storages[block.left.tensor][element]
    return out.reshape(-1)


@settings(deadline=None)  # shared machines stall
@given(
    line=st.sampled_from(LINES),
    sizes=st.fixed_dictionaries({name: st.integers(1, 4) for name in "grdhfvi"}),
    limit=st.integers(1, 40),
    min_run=st.integers(1, 40),
    backwards=st.booleans(),
)
def test_pieces_assemble_what_the_blocks_say(line, sizes, limit, min_run, backwards) -> None:
    axes = parse_axes(line)
    bound = bind_axes(axes.inverse() if backwards else axes, sizes)
    sources = [source(str(k), shape) for k, shape in enumerate(bound.left)]
    storages = [np.arange(prod(s)) + 1000 * k for k, s in enumerate(bound.left)]
    for target, shape in enumerate(bound.right):
        own = [b for b in bound.blocks if b.right.tensor == target]
        got = assemble(copies(own, sources, shape), storages, prod(shape), limit, min_run)
        assert np.array_equal(got, by_definition(bound, sources, storages, target))


@settings(deadline=None)
@given(limit=st.integers(1, 30), min_run=st.integers(1, 30))
def test_a_strided_source_is_read_by_its_strides(limit: int, min_run: int) -> None:
    storage = np.arange(100)
    view = source("v", (4, 3, 2), offset=5, strides=(1, 20, 7))
    bound = bind_axes(parse_axes("f h v -> v (f h)"), {"f": 4, "h": 3, "v": 2})
    got = assemble(copies(bound.blocks, [view], bound.right[0]), [storage], 24, limit, min_run)
    base = np.lib.stride_tricks.as_strided(storage[5:], (4, 3, 2), [8 * s for s in (1, 20, 7)])
    assert np.array_equal(got, base.transpose(2, 0, 1).reshape(-1))


def test_a_rename_is_one_run() -> None:
    bound = bind_axes(parse_axes("v h"), {"v": 7, "h": 5})
    assert list(pieces(copies(bound.blocks, [source("a", (7, 5))], (7, 5)), 8)) == [Run(0, 0, 0, 35)]


def test_concatenation_is_runs_and_interleaving_is_boxes() -> None:
    sources = [source("gate", (6, 4)), source("up", (6, 4))]
    halves = bind_axes(parse_axes("f h, f h -> (f + f) h"), {"f": 6, "h": 4})
    assert list(pieces(copies(halves.blocks, sources, (12, 4)), 8)) == [Run(0, 0, 0, 24), Run(1, 0, 24, 24)]
    rows = bind_axes(parse_axes("f h, f h -> (f (1 + 1)) h"), {"f": 6, "h": 4})
    boxes = list(pieces(copies(rows.blocks, sources, (12, 4)), 16, min_run=8))
    assert [(b.dst, b.numel) for b in boxes] == [(0, 16), (16, 16), (32, 16)]
    assert all(isinstance(b, Box) for b in boxes)


def test_no_box_is_larger_than_the_limit() -> None:
    line = parse_axes("(g r d) h, (g 1 d) h, (g 1 d) h -> (g (r + 1 + 1) d) h")
    bound = bind_axes(line, {"g": 2, "r": 3, "d": 16, "h": 32})
    sources = [source(str(k), shape) for k, shape in enumerate(bound.left)]
    found = list(pieces(copies(bound.blocks, sources, bound.right[0]), 100, min_run=10_000))
    assert max(p.numel for p in found) <= 100


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_segments_split_a_copy_without_losing_an_element(lengths: list[int], data) -> None:
    bounds = np.cumsum(lengths).tolist()
    total = bounds[-1]
    sizes = data.draw(st.sampled_from([(total,), (total // 2, 2) if total > 1 else (1,), (1,)]))
    strides = contiguous_strides(sizes)
    part = Copy(0, tuple(sizes), strides, tuple(reversed(contiguous_strides(tuple(reversed(sizes))))), 0, 0)
    seen = []
    for segment, piece in within_segments(part, bounds):
        for index in product(*map(range, piece.sizes)):
            src = piece.src + sum(i * s for i, s in zip(index, piece.src_strides, strict=True))
            dst = piece.dst + sum(i * s for i, s in zip(index, piece.dst_strides, strict=True))
            assert (bounds[segment - 1] if segment else 0) <= src < bounds[segment]
            seen.append((src, dst))
    whole = [
        (
            sum(i * s for i, s in zip(index, part.src_strides, strict=True)),
            sum(i * s for i, s in zip(index, part.dst_strides, strict=True)),
        )
        for index in product(*map(range, sizes))
    ]
    assert sorted(seen) == sorted(whole)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (0, 4)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    names = [f"a{k}" for k in range(len(shape))]
    bound = bind_axes(parse_axes(" ".join(names) or "()"), {n: max(1, s) for n, s in zip(names, shape, strict=True)})
    if 0 in shape:
        blocks = [type(b)(shape, b.left, b.right) for b in bound.blocks]
        assert list(pieces(copies(blocks, [source("a", shape)], shape), 4)) == []
    else:
        assert list(pieces(copies(bound.blocks, [source("a", shape)], shape), 4)) == [Run(0, 0, 0, 1)]


@pytest.mark.parametrize("shape", [(130, 257), (520, 300), (3, 129, 200), (2, 300, 2, 150)])
@pytest.mark.parametrize("word", ["u1", "u2", "u8"])
def test_tiled_transposition_equals_plain_assignment(shape: tuple[int, ...], word: str) -> None:
    rng = np.random.default_rng(0)
    for axes in [tuple(reversed(range(len(shape)))), (*range(1, len(shape)), 0)]:
        base = rng.integers(0, 1 << 8 * np.dtype(word).itemsize, tuple(shape[a] for a in axes), dtype=word)
        src = base.transpose(np.argsort(axes))
        dst = np.zeros(shape, word)
        assign(dst, src)
        assert np.array_equal(dst, src)
