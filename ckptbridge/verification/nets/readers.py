"""How attention, MLP and expert weights are read as they are stored.

Each reader knows the names and shapes that its checkpoint holds (``shapes``) and computes with the
stored tensor as it lies: one product with the whole weight, then the *activations* are cut and
reshaped in the weight's row order. Weights are never rearranged, so a row in the wrong place shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mindspore import ops

from ckptbridge.verification.nets.ops import activation
from ckptbridge.verification.nets.weights import Shapes, Tensor, Weights


@dataclass(frozen=True, slots=True)
class Linear:
    """``x @ weightᵀ + bias`` with weight (outputs, inputs), or (inputs, outputs) when ``transposed``."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    transposed: bool = False

    def shapes(self) -> Shapes:
        shape = (self.inputs, self.outputs) if self.transposed else (self.outputs, self.inputs)
        bias = {f"{self.name}.bias": (self.outputs,)} if self.bias else {}
        return {f"{self.name}.weight": shape, **bias}

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        y = product(x, weights(f"{self.name}.weight"), not self.transposed)
        return y + weights(f"{self.name}.bias") if self.bias else y


def product(x: Tensor, weight: Tensor, transpose: bool) -> Tensor:
    """``x`` (..., inputs) times a 2-D weight, transposed inside the kernel when asked for."""
    flat = ops.MatMul(transpose_b=transpose)(ops.reshape(x, (-1, x.shape[-1])), weight)
    return ops.reshape(flat, (*x.shape[:-1], flat.shape[-1]))


class QueryKeyValue(Protocol):
    """Queries (B, T, n, d), keys and values (B, T, g, d) of ``x`` (B, T, hidden)."""

    def shapes(self) -> Shapes: ...

    def __call__(self, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class SeparateQkv:
    q: Linear
    k: Linear
    v: Linear
    dim: int

    def shapes(self) -> Shapes:
        return {**self.q.shapes(), **self.k.shapes(), **self.v.shapes()}

    def __call__(self, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = (*x.shape[:-1], -1, self.dim)
        q, k, v = (ops.reshape(part(weights, x), shape) for part in (self.q, self.k, self.v))
        return q, k, v


@dataclass(frozen=True, slots=True)
class ContiguousQkv:
    """One weight with rows [all q heads; all k heads; all v heads]."""

    linear: Linear
    heads: int
    groups: int
    dim: int

    def shapes(self) -> Shapes:
        return self.linear.shapes()

    def __call__(self, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = ops.reshape(self.linear(weights, x), (*x.shape[:-1], self.heads + 2 * self.groups, self.dim))
        k, v = self.heads, self.heads + self.groups
        return y[:, :, :k], y[:, :, k:v], y[:, :, v:]


@dataclass(frozen=True, slots=True)
class GroupedQkv:
    """One weight whose rows are, for each group in turn, its q heads, its k head, its v head."""

    linear: Linear
    groups: int
    ratio: int
    dim: int

    def shapes(self) -> Shapes:
        return self.linear.shapes()

    def __call__(self, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length = x.shape[:-1]
        y = ops.reshape(self.linear(weights, x), (batch, length, self.groups, self.ratio + 2, self.dim))
        q = ops.reshape(y[:, :, :, : self.ratio], (batch, length, self.groups * self.ratio, self.dim))
        return q, y[:, :, :, self.ratio], y[:, :, :, self.ratio + 1]


class FeedForwardReader(Protocol):
    """The MLP's output of ``x`` (..., hidden)."""

    def shapes(self) -> Shapes: ...

    def __call__(self, weights: Weights, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PlainMlp:
    up: Linear
    down: Linear
    act: str

    def shapes(self) -> Shapes:
        return {**self.up.shapes(), **self.down.shapes()}

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        return self.down(weights, activation(self.act)(self.up(weights, x)))


@dataclass(frozen=True, slots=True)
class SeparateMlp:
    gate: Linear
    up: Linear
    down: Linear
    act: str

    def shapes(self) -> Shapes:
        return {**self.gate.shapes(), **self.up.shapes(), **self.down.shapes()}

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        return self.down(weights, activation(self.act)(self.gate(weights, x)) * self.up(weights, x))


@dataclass(frozen=True, slots=True)
class HalvesMlp:
    """One weight with rows [gate; up]."""

    gate_up: Linear
    down: Linear
    act: str

    def shapes(self) -> Shapes:
        return {**self.gate_up.shapes(), **self.down.shapes()}

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        y = self.gate_up(weights, x)
        width = self.down.inputs
        return self.down(weights, activation(self.act)(y[..., :width]) * y[..., width:])


@dataclass(frozen=True, slots=True)
class RowsMlp:
    """One weight whose rows are gate and up in turn."""

    gate_up: Linear
    down: Linear
    act: str

    def shapes(self) -> Shapes:
        return {**self.gate_up.shapes(), **self.down.shapes()}

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        y = ops.reshape(self.gate_up(weights, x), (*x.shape[:-1], self.down.inputs, 2))
        return self.down(weights, activation(self.act)(y[..., 0]) * y[..., 1])


class ExpertsReader(Protocol):
    """Expert ``e``'s output of the rows ``x`` (N, hidden)."""

    def shapes(self) -> Shapes: ...

    def __call__(self, weights: Weights, x: Tensor, e: int) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    experts: tuple[SeparateMlp, ...]

    def shapes(self) -> Shapes:
        return {name: shape for expert in self.experts for name, shape in expert.shapes().items()}

    def __call__(self, weights: Weights, x: Tensor, e: int) -> Tensor:
        return self.experts[e](weights, x)


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """All experts in two tensors, each expert as (in, out), gate and up side by side.

    ``weight1`` is (count * hidden, 2 width) or (count, hidden, 2 width), ``weight2`` (count * width,
    hidden) or (count, width, hidden), by ``rank``.
    """

    prefix: str
    count: int
    hidden: int
    width: int
    act: str
    rank: int

    def shapes(self) -> Shapes:
        if self.rank == 3:
            first, second = (self.count, self.hidden, 2 * self.width), (self.count, self.width, self.hidden)
            return {f"{self.prefix}weight1": first, f"{self.prefix}weight2": second}
        return {
            f"{self.prefix}weight1": (self.count * self.hidden, 2 * self.width),
            f"{self.prefix}weight2": (self.count * self.width, self.hidden),
        }

    def __call__(self, weights: Weights, x: Tensor, e: int) -> Tensor:
        y = product(x, self._expert(weights, "weight1", e, self.hidden), False)
        y = activation(self.act)(y[..., : self.width]) * y[..., self.width :]
        return product(y, self._expert(weights, "weight2", e, self.width), False)

    def _expert(self, weights: Weights, which: str, e: int, rows: int) -> Tensor:
        if self.rank == 3:
            return weights.part(f"{self.prefix}{which}", e, e + 1)[0]
        return weights.part(f"{self.prefix}{which}", e * rows, (e + 1) * rows)
