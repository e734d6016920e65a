"""The arithmetic of a transformer, composed of plain MindSpore operators.

No fused kernels: they differ between devices, and some have no float64 form. Activations are written
out (SiLU as x * sigmoid(x)).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import pi, sqrt

import mindspore as ms
import numpy as np
from mindspore import ops

from ckptbridge.errors import UnsupportedError
from ckptbridge.verification.nets.weights import Tensor


def number(value: float, like: Tensor) -> Tensor:
    """``value`` in the dtype of ``like``. MindSpore rounds a bare Python float to float32 before it is used,
    so only what float32 holds exactly (0.5, 1, 2) may stand in a formula as it is.
    """
    return ms.Tensor(value, like.dtype)


def silu(x: Tensor) -> Tensor:
    return x * ops.sigmoid(x)


def gelu(x: Tensor) -> Tensor:
    """Exact GELU, x Φ(x)."""
    return x * 0.5 * (1.0 + ops.erf(x * number(sqrt(0.5), x)))


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU's tanh approximation, as GPT-2 has it."""
    inner = number(sqrt(2.0 / pi), x) * (x + number(0.044715, x) * x * x * x)
    return 0.5 * x * (1.0 + ops.tanh(inner))


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": ops.relu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation that a config calls ``name``; UnsupportedError when there is none."""
    if name not in _ACTIVATIONS:
        raise UnsupportedError(f"The activation '{name}' has no built-in forward.", remedy="Use --ms-net.")
    return _ACTIVATIONS[name]


def rms_norm(x: Tensor, weight: Tensor, eps: float, wide: ms.Type) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last axis."""
    h = ops.cast(x, wide)
    h = h * ops.rsqrt(ops.mean(h * h, -1, keep_dims=True) + number(eps, h))
    return weight * ops.cast(h, x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, wide: ms.Type) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis; the variance is the biased one."""
    h = ops.cast(x, wide)
    h = h - ops.mean(h, -1, keep_dims=True)
    h = h * ops.rsqrt(ops.mean(h * h, -1, keep_dims=True) + number(eps, h))
    return ops.cast(h, x.dtype) * weight + bias


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """The first 2 * cos.shape[-1] dimensions of ``x`` (B, T, heads, d), turned by position.

    With ``pairs`` the planes are neighbouring dimensions. What comes out has all first coordinates,
    then all second ones: the same permutation for q and k, which their product does not see.
    """
    half = cos.shape[-1]
    turned = x[..., : 2 * half]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if pairs else (turned[..., :half], turned[..., half:])
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if x.shape[-1] > 2 * half:
        parts.append(x[..., 2 * half :])
    return ops.cat(parts, -1)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor, wide: ms.Type) -> Tensor:
    """softmax(q kᵀ scale + bias) v for q (B, T, n, d), k (B, T, g, d), v (B, T, g, e): (B, T, n e).

    Query head h reads key/value head h // (n / g). ``bias`` is broadcast over (B, n, T, T); -inf masks.
    """
    batch, length, heads, _ = q.shape
    q = ops.transpose(q, (0, 2, 1, 3))
    k = _spread(ops.transpose(k, (0, 2, 3, 1)), heads)
    v = _spread(ops.transpose(v, (0, 2, 1, 3)), heads)
    scores = ops.cast(ops.matmul(q, k) * number(scale, q), wide) + bias
    mixed = ops.matmul(ops.cast(ops.softmax(scores, -1), q.dtype), v)
    return ops.reshape(ops.transpose(mixed, (0, 2, 1, 3)), (batch, length, -1))


def _spread(x: Tensor, heads: int) -> Tensor:
    """(B, g, ·, ·) to (B, heads, ·, ·), each group repeated for its query heads."""
    batch, groups, rows, columns = x.shape
    if groups == heads:
        return x
    shape = (batch, groups, heads // groups, rows, columns)
    return ops.reshape(ops.broadcast_to(x[:, :, None], shape), (batch, heads, rows, columns))


def causal_bias(length: int, window: int | None, wide: ms.Type) -> Tensor:
    """(T, T): 0 where query i may see key j (i - window < j <= i), -inf elsewhere."""
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    seen = (j <= i) if window is None else (j <= i) & (j > i - window)
    return ms.Tensor(np.where(seen, 0.0, -np.inf), wide)
