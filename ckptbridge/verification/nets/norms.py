"""Normalisation layers that read their own parameters."""

from __future__ import annotations

from dataclasses import dataclass

from ckptbridge.verification.nets.ops import layer_norm, rms_norm
from ckptbridge.verification.nets.weights import Shapes, Tensor, Weights


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm (``bias`` empty) or LayerNorm over the last axis; ``weight`` and ``bias`` are whole names."""

    weight: str
    bias: str
    size: int
    eps: float

    def shapes(self) -> Shapes:
        return {name: (self.size,) for name in (self.weight, self.bias) if name}

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        if self.bias:
            return layer_norm(x, weights(self.weight), weights(self.bias), self.eps, weights.wide)
        return rms_norm(x, weights(self.weight), self.eps, weights.wide)


def rms(name: str, size: int, eps: float) -> Norm:
    """The RMSNorm whose weight stands under ``name``."""
    return Norm(f"{name}.weight", "", size, eps)
