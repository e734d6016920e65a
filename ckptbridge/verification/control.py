"""The negative control: faults seeded into the model at hand, one at a time, to see the verdict turn.

A check that has never failed has shown little. Each fault here is one that happens at handoffs; it is
made in memory in the MindSpore network's own parameters, and judged like the real thing. A fault
that would pass is reported as a hole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptbridge.formats.tensors import contiguous_strides
from ckptbridge.tables.axes import Block
from ckptbridge.tables.expand import Entry, Expansion
from ckptbridge.verification.report import ControlResult

if TYPE_CHECKING:
    from ckptbridge.verification.metrics import Judgement, Metrics
    from ckptbridge.verification.sides.mindspore import MsSide

Array = npt.NDArray[Any]

# Last components of tensors that lie apart in some layouts, are of one shape and must not be exchanged.
_PAIRS = (
    ("K and V exchanged", ("k_proj", "v_proj"), ("wk", "wv"), ("key", "value"), ("linear_k", "linear_v")),
    ("gate and up exchanged", ("gate_proj", "up_proj"), ("w1", "w3"), ("gating", "hidden")),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: what it is called, the tensor it sits in, and the parameters' values with it."""

    name: str
    tensor: str
    values: dict[str, Array]


def run_control(
    side: MsSide, expansion: Expansion, judge: Callable[[MsSide], tuple[Metrics, Judgement]], bitwise: bool
) -> tuple[ControlResult, ...]:
    """Seed each fault that the model has room for; ``judge`` runs the forward and judges it.

    ``bitwise`` says that the weights level runs too, which sees any changed bit.
    """
    results = []
    for fault in faults(side, expansion):
        with side.replaced(fault.values):
            metrics, judgement = judge(side)
        caught = judgement.holds is not True
        note = ""
        if not caught and bitwise and any(_changed(side.value(n), v) for n, v in fault.values.items()):
            caught, note = True, "below the forward's tolerance; the weights level sees it"
        results.append(ControlResult(fault.name, fault.tensor, caught, metrics.max_abs, note))
    # The two values in common use are the ones that get confused.
    eps = 1e-6 if side.spec.eps == 1e-5 else 1e-5
    metrics, judgement = judge(side.with_epsilon(eps))
    name = f"norm epsilon {eps:g} for {side.spec.eps:g}"
    results.append(ControlResult(name, "every norm", judgement.holds is not True, metrics.max_abs))
    return tuple(results)


def faults(side: MsSide, expansion: Expansion) -> Iterator[Fault]:
    """The faults that this model's layout has room for, in its middle layer."""
    names = frozenset(side.names)
    entries = [e for e in expansion.entries if e.kind == "map" and e.bound is not None and set(e.ms) <= names]
    layers = sorted({e.at["i"] for e in entries if "i" in e.at})
    middle = [e for e in entries if layers and e.at.get("i") == layers[len(layers) // 2]]
    yield from _exchanges(side, middle)
    yield from _shift(side, middle)
    yield from _expert(side, middle)
    yield from _bit(side, middle)


def _exchanges(side: MsSide, entries: Sequence[Entry]) -> Iterator[Fault]:
    """Two parts of one shape change places: within a fused tensor, or between two tensors."""
    by_name = {name: entry for entry in entries for name in entry.ms}
    for title, *pairs in _PAIRS:
        for a, b in pairs:
            first = next((n for n in by_name if f".{a}." in n), None)
            second = first.replace(f".{a}.", f".{b}.") if first else ""
            if first and second in by_name and side.value(first).shape == side.value(second).shape:
                yield Fault(title, first, {first: side.value(second), second: side.value(first)})
                break
    for entry in entries:
        found = _fused_parts(entry)
        if found is not None and entry.ms[0].endswith("weight"):
            name, one, two = found
            value = side.value(entry.ms[0])
            faulty = value.copy()
            _part(faulty, one)[...], _part(faulty, two)[...] = _part(value, two), _part(value, one)
            yield Fault(name, entry.ms[0], {entry.ms[0]: faulty})


def _fused_parts(entry: Entry) -> tuple[str, Block, Block] | None:
    """The two blocks of a fused tensor that can be exchanged unnoticed by any shape."""
    if entry.bound is None or len(entry.ms) != 1:
        return None
    blocks = entry.bound.blocks
    attention = any(part in entry.ms[0] for part in ("qkv", "query_key_value", "W_pack", "c_attn"))
    if attention and len(blocks) == 3 and sorted(blocks[1].sizes) == sorted(blocks[2].sizes):
        return "K and V exchanged", blocks[1], blocks[2]
    if not attention and len(blocks) == 2 and blocks[0].sizes == blocks[1].sizes:
        return "gate and up exchanged", blocks[0], blocks[1]
    return None


def _part(tensor: Array, block: Block) -> Array:
    """The elements of a tensor that a block of its entry fills, as a view of their words."""
    strides = contiguous_strides(tensor.shape)
    start = block.right.offset(strides)
    words = tensor.view(f"u{tensor.itemsize}")  # bfloat16 has no buffer format of its own
    item = words.itemsize
    return np.ndarray(
        block.sizes, words.dtype, words.data, start * item, tuple(s * item for s in block.right.strides(strides))
    )


def _shift(side: MsSide, entries: Sequence[Entry]) -> Iterator[Fault]:
    """The rows of one group of the keys (or of the fused projection) move on by one."""
    name = next((n for e in entries for n in e.ms if n.endswith("weight") and _is_attention_input(n)), None)
    if name is None:
        return
    value = side.value(name)
    rows = max(2, value.shape[0] // 4)
    faulty = value.copy()
    faulty[:rows] = np.roll(value[:rows], 1, axis=0)
    yield Fault("one group's rows shifted", name, {name: faulty})


def _is_attention_input(name: str) -> bool:
    parts = name.split(".")
    wanted = ("linear_qkv", "w_qkv", "query_key_value", "qkv_proj", "W_pack", "wqkv", "c_attn", "k_proj", "wk", "key")
    return len(parts) > 1 and parts[-2] in (*wanted, "linear_kvb", "linear_kv_up_proj", "kv_b_proj")


def _expert(side: MsSide, entries: Sequence[Entry]) -> Iterator[Fault]:
    """One expert's matrix laid down without its transpose."""
    for entry in entries:
        if len(entry.ms) != 1 or "experts" not in entry.ms[0] or entry.bound is None or len(entry.bound.blocks) < 2:
            continue
        value = side.value(entry.ms[0])
        faulty = value.copy()
        part = _part(value, entry.bound.blocks[-1])
        place = _part(faulty, entry.bound.blocks[-1])
        place[...] = part.T.reshape(part.shape)
        yield Fault("one expert not transposed", entry.ms[0], {entry.ms[0]: faulty})
        return


def _bit(side: MsSide, entries: Sequence[Entry]) -> Iterator[Fault]:
    """One mantissa bit of one weight: the highest of the largest weight."""
    name = next((n for e in reversed(entries) for n in e.ms if len(side.value(n).shape) == 2), None)
    if name is None:
        return
    value = side.value(name)
    mantissa = {"float64": 51, "float32": 22, "float16": 9, "bfloat16": 6}.get(str(value.dtype))
    if mantissa is None:
        return
    words = value.copy().view(f"u{value.itemsize}").reshape(-1)
    largest = int(np.argmax(np.abs(value.astype(np.float64))))
    words[largest] ^= words.dtype.type(1 << mantissa)
    yield Fault("one mantissa bit flipped", name, {name: words.view(value.dtype).reshape(value.shape)})


def _changed(a: Array, b: Array) -> bool:
    """Whether the words differ, as the weights level compares them."""
    return not np.array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))
