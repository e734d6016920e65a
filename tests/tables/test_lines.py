"""The axis lines of suggestions: each fits the shapes that it is for, and moves what its words say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptbridge.tables.axes import bind_axes, parse_axes
from ckptbridge.tables.lines import STACK, Line, fused_lines, pair_lines, regroup_lines

SHAPES = st.lists(st.integers(1, 12), max_size=4).map(tuple)


def bound(line: Line, stack: int = 0) -> Any:
    index = frozenset({STACK}) if stack else frozenset()
    return bind_axes(parse_axes(line.axes(True)), {**line.sizes, STACK: stack}, index, frozenset())


@settings(max_examples=150, deadline=None)
@given(SHAPES, st.randoms())
def test_pairs_fit_their_shapes_and_differ(a: tuple[int, ...], random: Any) -> None:
    b = list(a)
    random.shuffle(b)
    lines = [*pair_lines(a, tuple(b)), *regroup_lines(a, tuple(b))]
    assert lines
    assert len({line.axes(True) for line in lines}) == len(lines)
    for line in lines:
        assert (bound(line).left, bound(line).right) == ((a,), (tuple(b),))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_fusings_fit_their_shapes_and_differ(rows: list[int], columns: int, stack: int, turned: bool) -> None:
    parts = [(columns, r) if turned else (r, columns) for r in rows]
    whole = (stack, sum(rows), columns) if stack else (sum(rows), columns)
    lines = [*fused_lines(parts, whole, stack)]
    assert lines
    assert len({line.axes(True) for line in lines}) == len(lines)
    for line in lines:
        assert bound(line, stack).left == tuple(p for p in parts for _ in range(stack or 1))
        assert bound(line, stack).right == (whole,)


def test_joined_stacked_and_interleaved(numbered: Callable[..., Any], move: Callable[..., Any]) -> None:
    gate, up = numbered((2, 6, 5), (2, 6, 5))
    experts = [*gate, *up]
    # The experts of MindFormers' weight1: each [gate.T | up.T], one below the other.
    wanted = np.concatenate([np.concatenate([gate[e].T, up[e].T], axis=1) for e in range(2)])
    made = {line.text: move(bound(line, 2), experts)[0] for line in fused_lines([(6, 5), (6, 5)], (10, 12), 2)}
    assert np.array_equal(made["2 stacked, side by side, transposed"], wanted)
    rows = np.stack([gate[0], up[0]], axis=1).reshape(12, 5)
    made = {line.text: move(bound(line), [gate[0], up[0]])[0] for line in fused_lines([(6, 5), (6, 5)], (12, 5), 0)}
    assert np.array_equal(made["interleaved in 6 groups"], rows)
    assert np.array_equal(made["one after the other"], np.concatenate([gate[0], up[0]]))


def test_regrouped_rows(numbered: Callable[..., Any], move: Callable[..., Any]) -> None:
    (w,) = numbered((12, 2))
    made = {line.axes(True): move(bound(line), [w])[0] for line in regroup_lines((12, 2), (12, 2))}
    # Three heads of two halves of two rows; and all first halves before all second ones.
    pairs = w.reshape(3, 2, 2, 2).transpose(0, 2, 1, 3).reshape(12, 2)
    halves = w.reshape(3, 2, 2, 2).transpose(1, 0, 2, 3).reshape(12, 2)
    assert np.array_equal(made["(g3 2 r2) c2 -> (g3 r2 2) c2"], pairs)
    assert np.array_equal(made["(g3 2 r2) c2 -> (2 g3 r2) c2"], halves)
