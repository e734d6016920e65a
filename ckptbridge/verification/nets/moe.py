"""A mixture of experts: the router's choice, the chosen experts, the shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import ops

from ckptbridge.verification.nets.ops import number
from ckptbridge.verification.nets.readers import ExpertsReader, FeedForwardReader, Linear, product
from ckptbridge.verification.nets.spec import Experts
from ckptbridge.verification.nets.weights import Shapes, Tensor, Weights


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    spec: Experts
    router: Linear
    bias: str  # the router's stored numbers for the choice; empty: none
    experts: ExpertsReader
    shared: FeedForwardReader | None
    shared_gate: Linear | None

    def shapes(self) -> Shapes:
        bias = {self.bias: (self.spec.count,)} if self.bias else {}
        shared = self.shared.shapes() if self.shared else {}
        gate = self.shared_gate.shapes() if self.shared_gate else {}
        return {**self.router.shapes(), **bias, **self.experts.shapes(), **shared, **gate}

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        rows = ops.reshape(x, (-1, x.shape[-1]))
        shares = self._shares(weights, rows).asnumpy()
        total = ops.zeros_like(rows)
        for e in range(self.spec.count):
            picked = np.nonzero(shares[:, e])[0]
            if not len(picked):
                continue
            where = ms.Tensor(picked[:, None], ms.int32)
            part = self.experts(weights, ops.gather_nd(rows, where), e)
            part = part * ms.Tensor(shares[picked, e][:, None], part.dtype)
            total = ops.tensor_scatter_add(total, where, part)
        if self.shared is not None:
            part = self.shared(weights, rows)
            if self.shared_gate is not None:
                part = part * ops.sigmoid(self.shared_gate(weights, rows))
            total = total + part
        return ops.reshape(total, x.shape)

    def _shares(self, weights: Weights, rows: Tensor) -> Tensor:
        """(N, experts): each expert's weight for each row, 0 where it is not chosen."""
        spec, wide = self.spec, weights.wide
        logits = product(ops.cast(rows, wide), weights(f"{self.router.name}.weight", wide), True)
        scores = ops.softmax(logits, -1) if spec.scoring == "softmax" else ops.sigmoid(logits)
        choice = scores + weights(self.bias, wide) if self.bias else scores
        if spec.groups > 1:
            # The kept groups' scores stay; the others can no longer win.
            out = 0.0 if spec.group_score == "max" else float("-inf")
            choice = ops.masked_fill(choice, ops.logical_not(self._kept(choice)), out)
        _, winners = ops.topk(choice, spec.chosen)
        one_hot = ops.cast(winners[..., None] == ops.arange(spec.count), wide)
        share = scores * ops.sum(one_hot, 1)
        if spec.normalise:
            # DeepSeek's published code guards the sum; softmax scores cannot sum to zero.
            guard = 1e-20 if spec.scoring == "sigmoid" else 0.0
            share = share / (ops.sum(share, -1, keepdim=True) + number(guard, share))
        return share * number(spec.scaling, share)

    def _kept(self, choice: Tensor) -> Tensor:
        """(N, experts): whether the expert's group is among the ``groups_kept`` best."""
        spec = self.spec
        grouped = ops.reshape(choice, (-1, spec.groups, spec.count // spec.groups))
        best, _ = ops.topk(grouped, 1 if spec.group_score == "max" else 2)
        _, kept = ops.topk(ops.sum(best, -1), spec.groups_kept)
        mask = ops.sum(ops.cast(kept[..., None] == ops.arange(spec.groups), ms.int32), 1) > 0
        return ops.reshape(ops.broadcast_to(mask[..., None], grouped.shape), choice.shape)
