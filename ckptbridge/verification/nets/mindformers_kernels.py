"""Stand-ins on the CPU for kernels of MindFormers' networks that MindSpore has on Ascend only.

Each is composed of operations with a CPU kernel and computes the same mathematics, forward only. No
parameter, name, shape or row order of a network is touched. Found missing and tried with MindSpore
2.10.0 and MindFormers 2.1.0, in PyNative mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

_MISSING = object()


@contextmanager
def stand_ins() -> Iterator[None]:
    """The stand-ins in place of the kernels while the ``with`` lasts, where the device is the CPU."""
    import mindspore as ms

    with ExitStack() as undo:
        if ms.get_context("device_target") == "CPU":
            for owner, attribute, function in _replacements():
                _put(undo, owner, attribute, function)
        yield


def _put(undo: ExitStack, owner: Any, attribute: str, value: Any) -> None:
    old = vars(owner).get(attribute, _MISSING)
    setattr(owner, attribute, value)
    if old is _MISSING:
        undo.callback(delattr, owner, attribute)
    else:
        undo.callback(setattr, owner, attribute, old)


def _replacements() -> list[tuple[Any, str, Callable[..., Any]]]:
    """What is replaced: (class or module, attribute, function). Primitives are called through their class."""
    from mindformers.parallel_core.training_graph.transformer import attention
    from mindformers.parallel_core.training_graph.transformer.mlp import MLP, MLPInterleaved
    from mindformers.parallel_core.training_graph.transformer.moe import shared_experts, token_dispatcher
    from mindspore import mint, ops
    from mindspore.ops import auto_generate as generated
    from mindspore.ops.operations import debug_ops, nn_ops, other_ops

    return [
        (debug_ops.Morph, "__call__", _morph),
        (generated.RmsNorm, "__call__", _rms_norm),
        (generated.Outer, "__call__", _outer),
        (generated.StackExt, "__call__", _stack),
        (generated.TopkExt, "__call__", _top_k),
        (generated.SortExt, "__call__", _sort),
        (generated.OneHotExt, "__call__", _one_hot),
        (generated.IndexSelect, "__call__", _index_select),
        (generated.CumsumExt, "__call__", _cumsum),
        (generated.FmodScalar, "__call__", _fmod),
        (generated.Swiglu, "__call__", _swiglu),
        (generated.GroupedMatmul, "__call__", _grouped_matmul),
        (nn_ops.FlashAttentionScore, "__call__", _flash_attention),
        (ops.BatchMatMul, "__call__", _batch_matmul),
        (other_ops.MoveTo, "__call__", _move_to),
        (mint.nn.functional, "embedding", _embedding),
        (attention.Attention, "_repeat_kv", _keep_heads),
        (shared_experts.SharedExpertMLP, "construct", _two_of_three(MLP)),
        (shared_experts.SharedExpertMLPInterleaved, "construct", _two_of_three(MLPInterleaved)),
        (token_dispatcher, "get_rank", _rank),
    ]


# --- dense networks ---------------------------------------------------------------------------


def _morph(primitive: Any, *inputs: Any) -> Any:
    """Morph (graph mode only): the function that it wraps."""
    return primitive.__morph_fn__(*inputs)


def _rms_norm(primitive: Any, x: Any, gamma: Any) -> Any:
    """RmsNorm: x * rsqrt(mean(x^2) + eps) * gamma, and the reciprocal root."""
    from mindspore import ops

    root = ops.rsqrt((x * x).mean(-1, keep_dims=True) + primitive.epsilon)
    return x * root * gamma, root


def _embedding(input: Any, weight: Any, *unused: Any, **options: Any) -> Any:
    """mint.nn.functional.embedding: rows of the weight by index."""
    from mindspore import ops

    return ops.gather(weight, input, 0)


def _outer(primitive: Any, input: Any, vec2: Any) -> Any:
    """Outer: input[i] * vec2[j]."""
    return input.reshape(-1, 1) * vec2.reshape(1, -1)


def _stack(primitive: Any, tensors: Any) -> Any:
    """StackExt: ops.stack."""
    from mindspore import ops

    return ops.stack(tuple(tensors), primitive.dim)


def _flash_attention(
    primitive: Any,
    query: Any,
    key: Any,
    value: Any,
    real_shift: Any = None,
    drop_mask: Any = None,
    padding_mask: Any = None,
    attn_mask: Any = None,
    *unused: Any,
) -> Any:
    """FlashAttentionScore, (B, N, S, D): softmax(scale * q k^T, masked where the mask is 1) v.

    Query head h reads the key and value head h // (query heads / key heads). Returns the output last of
    four, as the kernel does; its softmax statistics are not computed.
    """
    import mindspore as ms
    from mindspore import ops

    ratio = query.shape[1] // key.shape[1]
    if ratio > 1:
        key, value = (ops.repeat_interleave(x, ratio, 1) for x in (key, value))
    scores = ops.matmul(query, key.swapaxes(-1, -2)) * primitive.scale_value
    if attn_mask is not None:
        scores = ops.masked_fill(scores, attn_mask.astype(ms.bool_), ms.Tensor(-np.inf, scores.dtype))
    return None, None, None, ops.matmul(ops.softmax(scores, -1), value)


def _keep_heads(attention: Any, x: Any, ratio: int) -> Any:
    """Attention._repeat_kv: nothing, since the attention above takes fewer key than query heads."""
    return x


def _swiglu(primitive: Any, input: Any, dim: int = -1) -> Any:
    """Swiglu: silu(first half) * second half."""
    from mindspore import ops

    gate, up = ops.chunk(input, 2, dim)
    return gate * ops.sigmoid(gate) * up


def _batch_matmul(primitive: Any, x: Any, y: Any) -> Any:
    """BatchMatMul: matmul, whose leading axes may differ (they are broadcast)."""
    from mindspore import ops

    if primitive.transpose_a:
        x = x.swapaxes(-1, -2)
    if primitive.transpose_b:
        y = y.swapaxes(-1, -2)
    return ops.matmul(x, y)


# --- experts ----------------------------------------------------------------------------------


def _top_k(primitive: Any, input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """TopkExt: the k largest of the last axis, the first of equals first."""
    import mindspore as ms

    order = np.argsort(-input.asnumpy() if largest else input.asnumpy(), axis=dim, kind="stable")
    order = np.take(order, range(k), axis=dim)
    return ms.Tensor(np.take_along_axis(input.asnumpy(), order, dim)), ms.Tensor(order.astype(np.int64))


def _sort(primitive: Any, input: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    """SortExt: sorted values and where they stood, equals in their order."""
    return _top_k(primitive, input, input.shape[dim], dim, descending)


def _one_hot(primitive: Any, tensor: Any, num_classes: int, on_value: Any, off_value: Any) -> Any:
    """OneHotExt: ops.one_hot."""
    from mindspore import ops

    return ops.one_hot(tensor, num_classes, on_value, off_value, primitive.axis)


def _index_select(primitive: Any, input: Any, dim: int, index: Any) -> Any:
    """IndexSelect: ops.gather along the axis."""
    from mindspore import ops

    return ops.gather(input, index, dim)


def _cumsum(primitive: Any, input: Any, dim: int, dtype: Any = None) -> Any:
    """CumsumExt: NumPy's cumsum."""
    import mindspore as ms

    values = ms.Tensor(np.cumsum(input.asnumpy(), axis=dim, dtype=input.asnumpy().dtype))
    return values if dtype is None else values.astype(dtype)


def _fmod(primitive: Any, input: Any, other: Any) -> Any:
    """FmodScalar: NumPy's fmod, the remainder with the dividend's sign."""
    import mindspore as ms

    return ms.Tensor(np.fmod(input.asnumpy(), other).astype(input.asnumpy().dtype))


def _grouped_matmul(
    primitive: Any,
    x: Any,
    weight: Any,
    bias: Any = None,
    scale: Any = None,
    offset: Any = None,
    antiquant_scale: Any = None,
    antiquant_offset: Any = None,
    group_list: Any = None,
) -> Any:
    """GroupedMatmul (one tensor of stacked groups): rows up to group_list[e] of x, times weight[e], in turn."""
    from mindspore import ops

    ends = [int(n) for n in group_list.asnumpy()]
    starts = [0, *ends[:-1]]
    parts = [
        ops.matmul(x[0][start:end], weight[0][e])
        for e, (start, end) in enumerate(zip(starts, ends, strict=True))
        if end > start
    ]
    return (ops.cat(parts, 0),)


def _two_of_three(base: Any) -> Callable[..., Any]:
    """SharedExpertMLP.construct: its base's, without the third result (an extra loss), which it does not expect."""

    def construct(cell: Any, hidden_states: Any) -> Any:
        output, bias, _ = base.construct(cell, hidden_states)
        return output, bias

    return construct


def _move_to(primitive: Any, input: Any, *unused: Any) -> Any:
    """MoveTo: nothing, host and device are one."""
    return input


def _rank() -> int:
    """get_rank of the expert dispatcher: the only process."""
    return 0
