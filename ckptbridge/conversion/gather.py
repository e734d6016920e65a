"""How a target tensor's bytes come together: pure geometry, in pieces of bounded size.

A record's blocks are strided copies of opaque words. They are coalesced, grouped where they
interleave, and cut along the target's outermost axis, so that each piece is one contiguous range
of the target: either a *run* that is also contiguous in the source (no user-space copy needed), or
a *box* of strided copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from ckptbridge.formats.tensors import TensorSource, contiguous_strides
from ckptbridge.tables.axes import Block

BUFFER_BYTES = 2 << 20  # the largest box: one that is written while the next is gathered stays in the cache


@dataclass(frozen=True, slots=True)
class Copy:
    """A strided copy from storage elements of ``source`` to elements of the target.

    Axes are ordered by falling target stride; lengths-1 axes and mergeable neighbours are gone.
    """

    source: int
    sizes: tuple[int, ...]
    src_strides: tuple[int, ...]
    dst_strides: tuple[int, ...]
    src: int
    dst: int

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def dst_end(self) -> int:
        """One past the last target element."""
        return self.dst + 1 + sum((n - 1) * s for n, s in zip(self.sizes, self.dst_strides, strict=True))

    @property
    def run(self) -> bool:
        """Whether both sides are contiguous."""
        return not self.sizes or (self.sizes[1:] == () and self.src_strides == (1,) and self.dst_strides == (1,))


@dataclass(frozen=True, slots=True)
class Run:
    """``numel`` elements from element ``src`` of a source's storage to element ``dst`` of the target."""

    source: int
    src: int
    dst: int
    numel: int


@dataclass(frozen=True, slots=True)
class Box:
    """Copies that together fill the target's elements from ``dst`` to ``dst + numel``."""

    dst: int
    numel: int
    copies: tuple[Copy, ...]


Piece = Run | Box


def copies(
    blocks: Sequence[Block],
    sources: Sequence[TensorSource],
    target_shape: tuple[int, ...],
    scaled: Collection[int] = (),
) -> list[Copy]:
    """The strided copies of blocks that lead from ``sources`` (their left side) to one target tensor.

    Axes of the sources numbered in ``scaled`` (2-D) are never merged across the end of a row.
    """
    target = contiguous_strides(target_shape)
    found = []
    for block in blocks:
        source = sources[block.left.tensor]
        strides = source.element_strides
        found.append(
            _coalesced(
                block.left.tensor,
                block.sizes,
                block.left.strides(strides),
                block.right.strides(target),
                source.offset + block.left.offset(strides),
                block.right.offset(target),
                strides[0] if block.left.tensor in scaled else 0,
            )
        )
    return found


def pieces(parts: Sequence[Copy], limit: int, min_run: int = 1) -> Iterator[Piece]:
    """Cut copies that partition a target tensor into pieces, in target order.

    A box holds at most ``limit`` elements, unless a single innermost row is longer. Runs shorter
    than ``min_run`` elements are gathered with their neighbours instead.
    """
    pending: list[Copy] = []  # small groups wait to share a box
    for group in _groups(parts):
        size = sum(c.numel for c in group)
        if len(group) == 1 and group[0].run and size >= min_run:
            yield from _boxes(pending)
            pending = []
            yield Run(group[0].source, group[0].src, group[0].dst, size)
        elif size <= limit:
            if pending and sum(c.numel for c in pending) + size > limit:
                yield from _boxes(pending)
                pending = []
            pending += group
        else:
            yield from _boxes(pending)
            pending = []
            yield from _cut(group, limit, min_run)
    yield from _boxes(pending)


def _boxes(group: list[Copy]) -> Iterator[Box]:
    if group:
        yield Box(group[0].dst, sum(c.numel for c in group), tuple(group))


def _groups(parts: Sequence[Copy]) -> Iterator[list[Copy]]:
    """Copies whose target ranges interleave, in target order; each group fills a contiguous range."""
    group: list[Copy] = []
    end = 0
    for part in sorted((p for p in parts if p.numel), key=lambda p: p.dst):
        if group and part.dst >= end:
            yield group
            group = []
        group.append(part)
        end = max(end, part.dst_end)
    if group:
        yield group


def _cut(group: list[Copy], limit: int, min_run: int) -> Iterator[Piece]:
    """Cut a group along the target's outermost axis, which all its members share."""
    length = group[0].sizes[0]
    unit = sum(c.numel // length for c in group)
    if any(c.sizes[0] != length or c.dst_strides[0] != unit for c in group):
        # Copies of unlike shape interleave in no layout that the notation can write; uncut they are
        # still right, only larger.
        yield from _boxes(group)
        return
    step = max(1, limit // unit)
    for at in range(0, length, step):
        count = min(step, length - at)
        part = [_slice(c, at, count) for c in group]
        if count == 1 and unit > limit:
            yield from pieces(part, limit, min_run)
        else:
            yield from _boxes(sorted(part, key=lambda c: c.dst))


def _slice(part: Copy, at: int, count: int) -> Copy:
    src = part.src + at * part.src_strides[0]
    dst = part.dst + at * part.dst_strides[0]
    if count == 1:
        return replace(
            part,
            sizes=part.sizes[1:],
            src_strides=part.src_strides[1:],
            dst_strides=part.dst_strides[1:],
            src=src,
            dst=dst,
        )
    return replace(part, sizes=(count, *part.sizes[1:]), src=src, dst=dst)


def _coalesced(
    source: int,
    sizes: Sequence[int],
    src_strides: Sequence[int],
    dst_strides: Sequence[int],
    src: int,
    dst: int,
    row: int,
) -> Copy:
    axes = sorted(
        ((d, s, n) for n, s, d in zip(sizes, src_strides, dst_strides, strict=True) if n != 1), key=lambda a: -a[0]
    )
    merged: list[tuple[int, int, int]] = []
    for d, s, n in axes:
        if merged:
            outer_d, outer_s, outer_n = merged[-1]
            if outer_d == d * n and outer_s == s * n and outer_s != row:
                merged[-1] = (d, s, outer_n * n)
                continue
        merged.append((d, s, n))
    return Copy(
        source,
        tuple(n for _, _, n in merged),
        tuple(s for _, s, _ in merged),
        tuple(d for d, _, _ in merged),
        src,
        dst,
    )


def within_segments(part: Copy, bounds: Sequence[int]) -> Iterator[tuple[int, Copy]]:
    """Split a copy so that each part reads from one segment of its storage: (segment, part).

    ``bounds`` are the storage elements at which segments end. Halves along the axis of largest
    source extent, so only what straddles a boundary is split finely.
    """
    stack = [part]
    while stack:
        c = stack.pop()
        last = c.src + sum((n - 1) * s for n, s in zip(c.sizes, c.src_strides, strict=True))
        first_segment = next(k for k, end in enumerate(bounds) if c.src < end)
        if last < bounds[first_segment]:
            yield first_segment, c
            continue
        axis = max(range(len(c.sizes)), key=lambda k: (c.sizes[k] - 1) * c.src_strides[k])
        half = c.sizes[axis] // 2
        for at, count in ((half, c.sizes[axis] - half), (0, half)):
            stack.append(
                replace(
                    c,
                    sizes=(*c.sizes[:axis], count, *c.sizes[axis + 1 :]),
                    src=c.src + at * c.src_strides[axis],
                    dst=c.dst + at * c.dst_strides[axis],
                )
            )
