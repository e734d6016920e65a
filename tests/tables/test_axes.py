"""The axis notation against formulae written out in NumPy, and against einx where it can say the line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import einx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptbridge.errors import TableError
from ckptbridge.tables.axes import MAX_BLOCKS, bind_axes, parse_axes

cat, split = np.concatenate, np.split
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Layout:
    """A line, the shapes of its left side, and its right side as a formula in NumPy."""

    line: str
    shapes: Callable[..., Sequence[tuple[int, ...]]]
    formula: Callable[..., Sequence[np.ndarray]]
    index: str = ""  # the index axes of the left


def qkv_by_group(q, k, v, g, r, d, h):
    groups = []
    for j in range(g):
        groups += [q[j * r * d : (j + 1) * r * d], k[j * d : (j + 1) * d], v[j * d : (j + 1) * d]]
    return [cat(groups)]


def gate_up_by_row(gate, up, f, h):
    out = np.empty((2 * f, h), np.int64)
    out[0::2], out[1::2] = gate, up
    return [out]


def neox_qkv(w, n, d, h):
    heads = [w[j * 3 * d : (j + 1) * 3 * d] for j in range(n)]
    return [cat([head[k * d : (k + 1) * d] for head in heads]) for k in range(3)]


def rope_pairs(w, n, k, h):
    out = np.empty_like(w)
    for head in range(n):
        for j in range(k):
            for half in range(2):
                out[head * 2 * k + 2 * j + half] = w[head * 2 * k + half * k + j]
    return [out]


def kv_b_apart(w, n, p, v, r):
    heads = [w[j * (p + v) : (j + 1) * (p + v)] for j in range(n)]
    return [cat([head[:p] for head in heads] + [head[p:] for head in heads])]


def experts_stacked(*tensors, e, f, h):
    gates, ups = tensors[:e], tensors[e:]
    return [cat([cat([gate.T, up.T], axis=1) for gate, up in zip(gates, ups, strict=True)])]


def experts_3d(*tensors, e, f, h):
    return [np.stack([cat([g.T, u.T], axis=1) for g, u in zip(tensors[:e], tensors[e:], strict=True)])]


LAYOUTS = {
    "grouped qkv": Layout(
        "(g r d) h, (g 1 d) h, (g 1 d) h -> (g (r + 1 + 1) d) h",
        lambda g, r, d, h: [(g * r * d, h), (g * d, h), (g * d, h)],
        qkv_by_group,
    ),
    "grouped qkv bias": Layout(
        "(g r d), (g 1 d), (g 1 d) -> (g (r + 1 + 1) d)",
        lambda g, r, d: [(g * r * d,), (g * d,), (g * d,)],
        lambda q, k, v, g, r, d: [
            cat([q.reshape(g, r * d), k.reshape(g, d), v.reshape(g, d)], axis=1).reshape(-1),
        ],
    ),
    "contiguous qkv": Layout(
        "(g r d) h, (g d) h, (g d) h -> (g r d + g d + g d) h",
        lambda g, r, d, h: [(g * r * d, h), (g * d, h), (g * d, h)],
        lambda q, k, v, **_: [cat([q, k, v])],
    ),
    "gate and up by row": Layout("f h, f h -> (f (1 + 1)) h", lambda f, h: [(f, h), (f, h)], gate_up_by_row),
    "GPT-NeoX qkv": Layout(
        "(n (1 + 1 + 1) d) h -> (n d) h, (n d) h, (n d) h", lambda n, d, h: [(n * 3 * d, h)], neox_qkv
    ),
    "GPT-2 qkv": Layout(
        "i (o + o + o) -> o i, o i, o i",
        lambda i, o: [(i, 3 * o)],
        lambda w, i, o: [w[:, :o].T, w[:, o : 2 * o].T, w[:, 2 * o :].T],
    ),
    "rope halves to pairs": Layout("(n 2 k) h -> (n k 2) h", lambda n, k, h: [(n * 2 * k, h)], rope_pairs),
    "kv_b to all keys, all values": Layout(
        "(n (p + v)) r -> (n p + n v) r", lambda n, p, v, r: [(n * (p + v), r)], kv_b_apart
    ),
    "side by side": Layout(
        "h e, h e -> h (e + e)", lambda h, e: [(h, e), (h, e)], lambda a, b, **_: [cat([a, b], axis=1)]
    ),
    "three scalars": Layout("(1 + 1 + 1) -> 1, 1, 1", lambda: [(3,)], lambda w: [w[0:1], w[1:2], w[2:3]]),
    "Conv1d": Layout("o i k -> o i 1 k", lambda o, i, k: [(o, i, k)], lambda w, **_: [w[:, :, None, :]]),
    "MLA down-projections": Layout(
        "q h, (k + w) h -> (q + k + w) h", lambda q, k, w, h: [(q, h), (k + w, h)], lambda a, b, **_: [cat([a, b])]
    ),
    "experts in two dimensions": Layout(
        "e f h, e f h -> (e h) (f + f)", lambda e, f, h: [(f, h)] * (2 * e), experts_stacked, index="e"
    ),
    "experts in three dimensions": Layout(
        "e f h, e f h -> e h (f + f)", lambda e, f, h: [(f, h)] * (2 * e), experts_3d, index="e"
    ),
    "a scalar": Layout("() -> 1", lambda: [()], lambda w: [w.reshape(1)]),
    "a rename": Layout("v h", lambda v, h: [(v, h)], lambda w, **_: [w]),
}


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_layout_is_its_formula_and_its_inverse_undoes_it(name, data, move, numbered):
    layout = LAYOUTS[name]
    line = parse_axes(layout.line)
    sizes = {axis: data.draw(st.integers(1, 6), axis) for axis in sorted(line.names)}
    index = frozenset(layout.index)
    sources = numbered(*layout.shapes(**sizes))
    moved = move(bind_axes(line, sizes, left=index), sources)
    expected = layout.formula(*sources, **sizes)
    assert len(moved) == len(expected)
    for got, right in zip(moved, expected, strict=True):
        np.testing.assert_array_equal(got, right)
    back = move(bind_axes(line.inverse(), sizes, right=index), moved)
    for got, source in zip(back, sources, strict=True):
        np.testing.assert_array_equal(got, source)


# What einx is asked: it wants a 1 written out, and a name for a 2. Sums of products it does not know.
EINX = {
    **{
        name: LAYOUTS[name].line
        for name in (
            *("grouped qkv", "grouped qkv bias", "gate and up by row", "GPT-2 qkv", "side by side", "three scalars"),
            *("Conv1d", "experts in two dimensions", "experts in three dimensions"),
        )
    },
    "GPT-NeoX qkv": "(n (1 + 1 + 1) d) h -> (n 1 d) h, (n 1 d) h, (n 1 d) h",
    "rope halves to pairs": "(n two k) h -> (n k two) h",
}


@pytest.mark.parametrize("name", EINX)
def test_einx_agrees(name, move, numbered):
    layout = LAYOUTS[name]
    line = parse_axes(layout.line)
    sizes = dict(zip(sorted(line.names), (3, 5, 2, 7), strict=False))
    sources = numbered(*layout.shapes(**sizes))
    moved = move(bind_axes(line, sizes, left=frozenset(layout.index)), sources)
    operands = sources
    if layout.index:  # einx has one operand where the checkpoint has a tensor for each index
        e = sizes[layout.index]
        operands = [np.stack(sources[k : k + e]) for k in range(0, len(sources), e)]
    named = {"two": 2} if "two" in EINX[name] else {}
    expected = einx.id(EINX[name], *operands, **sizes, **named)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for got, right in zip(moved, expected, strict=True):
        np.testing.assert_array_equal(got, right)


@st.composite
def permutations(draw) -> tuple[str, dict[str, int]]:
    """A line whose two sides compose the same axes in different orders, and lengths."""
    axes = list("abcde"[: draw(st.integers(1, 5))])

    def side() -> str:
        order = draw(st.permutations(axes))
        dims, rest = [], list(order)
        while rest:
            n = draw(st.integers(1, len(rest)))
            dims.append(rest[0] if n == 1 else f"({' '.join(rest[:n])})")
            rest = rest[n:]
        return " ".join(dims)

    return f"{side()} -> {side()}", {axis: draw(st.integers(1, 4)) for axis in axes}


@settings(max_examples=20, deadline=None)
@given(case=permutations())
def test_random_permutations_are_einx(case, move, numbered):
    text, sizes = case
    bound = bind_axes(parse_axes(text), sizes)
    sources = numbered(*bound.left)
    np.testing.assert_array_equal(move(bound, sources)[0], einx.id(text, *sources, **sizes))


@st.composite
def concatenations(draw) -> tuple[str, dict[str, int]]:
    """Some tensors of the axes a_k, b, c laid one after another within a composed dimension."""
    n = draw(st.integers(1, 4))
    left = ", ".join("(b {}) c".format(f"a{k}") if draw(st.booleans()) else f"c (b a{k})" for k in range(n))
    terms = " + ".join(f"a{k}" for k in range(n))
    right = draw(st.sampled_from([f"(b ({terms})) c", f"c (b ({terms}))", f"b ({terms}) c", f"({terms}) (c b)"]))
    names = [*(f"a{k}" for k in range(n)), "b", "c"]
    return f"{left} -> {right}", {name: draw(st.integers(1, 4)) for name in names}


@settings(max_examples=20, deadline=None)
@given(case=concatenations())
def test_random_concatenations_are_einx_and_invert(case, move, numbered):
    text, sizes = case
    line = parse_axes(text)
    bound = bind_axes(line, sizes)
    sources = numbered(*bound.left)
    moved = move(bound, sources)
    np.testing.assert_array_equal(moved[0], einx.id(text, *sources, **sizes))
    for got, source in zip(move(bind_axes(line.inverse(), sizes), moved), sources, strict=True):
        np.testing.assert_array_equal(got, source)


def test_the_inverse_of_the_inverse_is_the_line():
    for layout in LAYOUTS.values():
        line = parse_axes(layout.line)
        assert line.inverse().inverse() == line
        assert parse_axes(line.inverse().text) == line.inverse()


def test_an_index_axis_may_stand_on_the_right(move, numbered):
    line = parse_axes("(e h) (f + f) -> e f h, e f h")
    sizes = {"e": 11, "f": 3, "h": 5}
    (stacked,) = numbered((55, 6))
    tensors = move(bind_axes(line, sizes, right=frozenset("e")), [stacked])
    for k in range(11):
        np.testing.assert_array_equal(tensors[k], stacked[5 * k : 5 * k + 5, :3].T)
        np.testing.assert_array_equal(tensors[11 + k], stacked[5 * k : 5 * k + 5, 3:].T)


def test_two_index_axes_count_with_the_first_slowest(move, numbered):
    line = parse_axes("i e f -> (i e f)")
    sources = numbered(*[(4,)] * 6)
    (moved,) = move(bind_axes(line, {"i": 2, "e": 3, "f": 4}, left=frozenset("ie")), sources)
    np.testing.assert_array_equal(moved, cat(sources))


def test_equal_literals_correspond_in_order(move, numbered):
    (w,) = numbered((3, 3, 5))
    (moved,) = move(bind_axes(parse_axes("3 3 h -> (h 3 3)"), {"h": 5}), [w])
    np.testing.assert_array_equal(moved, w.transpose(2, 0, 1).reshape(-1))


def test_what_a_line_knows_of_itself():
    line = parse_axes("labels h, (labels 1 d) -> labels (h + d)")
    assert line.names == {"labels", "h", "d"}
    assert line.lone == set()
    assert parse_axes("labels h, labels").lone == {"labels", "h"}
    assert parse_axes("v h").identity and not parse_axes("v h -> h v").identity
    assert parse_axes("(g r d) h, (g 1 d) h, (g 1 d) h -> (g (r + 1 + 1) d) h").blocks == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no axes"),
        ("a -> ", "has no axes"),
        ("a, , b", "has no axes"),
        ("a -> b -> c", "more than one '->'"),
        ("(a b", "not closed"),
        ("a b)", "'\\)' is not expected"),
        ("a + b", "'\\+' is not expected"),
        ("(a + )", "lacks a term"),
        ("(+ a)", "lacks a term"),
        ("a-b", "'a-b' is not an axis name"),
        ("2x", "'2x' is not an axis name"),
        ("é", "is not an axis name"),
        ("a.b", "is not an axis name"),
        ("0 a", "not between 1 and"),
        ("9999999999 a", "not between 1 and"),
        ("a a -> a", "'a' occurs twice"),
        ("(a (b a))", "'a' occurs twice"),
        ("a b -> a", "Block 1 has the axes"),
        ("a b -> a c", "Block 1 has the axes"),
        ("2 a -> 3 a", "Block 1 has the axes"),
        ("a, b -> b, a", "Block 1 has the axes"),
        ("(a + b)  -> a", "2 block\\(s\\) and the right side 1"),
        ("a, a -> a", "2 block\\(s\\) and the right side 1"),
        ("(" * 30 + "a" + ")" * 30, "nested too deeply"),
        ("a " * 300, "longer than"),
        (" ".join(["(1 + 1)"] * 13), f"more than {MAX_BLOCKS} blocks"),
    ],
)
def test_a_malformed_line_is_refused(text, message):
    with pytest.raises(TableError, match=message) as caught:
        parse_axes(text)
    assert "axes" in caught.value.where


def test_binding_needs_every_length():
    with pytest.raises(TableError, match="'h' has no size"):
        bind_axes(parse_axes("v h"), {"v": 3})


def test_an_index_axis_is_a_dimension_by_itself():
    with pytest.raises(TableError, match="'e' stands in the names"):
        bind_axes(parse_axes("(e f) -> e f"), {"e": 2, "f": 3}, left=frozenset("e"))
