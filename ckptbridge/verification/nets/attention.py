"""The attention of a block: grouped heads, or DeepSeek's latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mindspore as ms
import numpy as np
from mindspore import ops

from ckptbridge.verification.nets.norms import Norm
from ckptbridge.verification.nets.ops import attend, causal_bias, rotate
from ckptbridge.verification.nets.readers import Linear, QueryKeyValue
from ckptbridge.verification.nets.rope import alibi_slopes, rope_tables
from ckptbridge.verification.nets.spec import GroupedAttention, LatentAttention, Rope
from ckptbridge.verification.nets.weights import Shapes, Tensor, Weights


@dataclass(frozen=True, slots=True)
class Positions:
    """What attention knows of positions: RoPE's cosines and sines (T, dim / 2), and the causal bias."""

    cos: Tensor
    sin: Tensor
    pairs: bool
    bias: Tensor

    def turn(self, x: Tensor) -> Tensor:
        return x if self.cos is None else rotate(x, self.cos, self.sin, self.pairs)


def positions(
    rope: Rope | None,
    attention: GroupedAttention | LatentAttention,
    halved: bool,
    window: int | None,
    length: int,
    weights: Weights,
) -> Positions:
    """Tables for ``length`` positions. ``halved``: each head has its even dimensions first, then its odd ones."""
    bias = causal_bias(length, window, weights.wide)
    if isinstance(attention, GroupedAttention) and attention.alibi:
        # slope * (j - i) and slope * j differ by a constant per row, which softmax does not see.
        slopes = ms.Tensor(alibi_slopes(attention.heads)[:, None, None], weights.wide)
        bias = bias + slopes * ops.cast(ops.arange(length), weights.wide)
    if rope is None:
        return Positions(None, None, False, bias)
    cosines, sines = rope_tables(rope, length)
    if halved and isinstance(attention, GroupedAttention):
        # The planes that do not turn lie between those that do, so they are turned by nothing.
        rest = ((0, 0), (0, attention.dim // 2 - rope.dim // 2))
        cosines, sines = np.pad(cosines, rest, constant_values=1.0), np.pad(sines, rest)
    cos, sin = ms.Tensor(cosines, weights.compute), ms.Tensor(sines, weights.compute)
    return Positions(cos, sin, rope.pairs and not halved, bias)


class AttentionBlock(Protocol):
    def shapes(self) -> Shapes: ...

    def __call__(self, weights: Weights, x: Tensor, at: Positions) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Grouped:
    """Multi-head, grouped-query or multi-query attention."""

    qkv: QueryKeyValue
    out: Linear
    norms: tuple[Norm, Norm] | None  # of each q head, of each k head
    scale: float

    def shapes(self) -> Shapes:
        norms = {**self.norms[0].shapes(), **self.norms[1].shapes()} if self.norms else {}
        return {**self.qkv.shapes(), **norms, **self.out.shapes()}

    def __call__(self, weights: Weights, x: Tensor, at: Positions) -> Tensor:
        q, k, v = self.qkv(weights, x)
        if self.norms:
            q, k = self.norms[0](weights, q), self.norms[1](weights, k)
        return self.out(weights, attend(at.turn(q), at.turn(k), v, self.scale, at.bias, weights.wide))


@dataclass(frozen=True, slots=True)
class LatentDown:
    """Separate down-projections: (q's latent, or q itself; the key/value latent with the shared RoPE key)."""

    q: Linear
    kv: Linear

    def shapes(self) -> Shapes:
        return {**self.q.shapes(), **self.kv.shapes()}

    def __call__(self, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.q(weights, x), self.kv(weights, x)


@dataclass(frozen=True, slots=True)
class FusedLatentDown:
    """The same two as the rows of one weight, q first."""

    linear: Linear
    q_width: int

    def shapes(self) -> Shapes:
        return self.linear.shapes()

    def __call__(self, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(weights, x)
        return y[..., : self.q_width], y[..., self.q_width :]


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention. Up-projections hold [nope; rope] per q head and [k nope; v] per head."""

    spec: LatentAttention
    down: LatentDown | FusedLatentDown
    q_norm: Norm | None  # with q_up: q has a latent of its own
    q_up: Linear | None
    kv_norm: Norm
    kv_up: Linear
    out: Linear

    def shapes(self) -> Shapes:
        parts = (self.down, self.q_norm, self.q_up, self.kv_norm, self.kv_up, self.out)
        return {name: shape for part in parts if part is not None for name, shape in part.shapes().items()}

    def __call__(self, weights: Weights, x: Tensor, at: Positions) -> Tensor:
        s, (batch, length) = self.spec, x.shape[:-1]
        q, kv = self.down(weights, x)
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up(weights, self.q_norm(weights, q))
        q = ops.reshape(q, (batch, length, s.heads, s.nope + s.rope))
        up = self.kv_up(weights, self.kv_norm(weights, kv[..., : s.kv_rank]))
        up = ops.reshape(up, (batch, length, s.heads, s.nope + s.value))
        shared = at.turn(ops.reshape(kv[..., s.kv_rank :], (batch, length, 1, s.rope)))
        shared = ops.broadcast_to(shared, (batch, length, s.heads, s.rope))
        q = ops.cat((q[..., : s.nope], at.turn(q[..., s.nope :])), -1)
        k = ops.cat((up[..., : s.nope], shared), -1)
        return self.out(weights, attend(q, k, up[..., s.nope :], s.scale, at.bias, weights.wide))
