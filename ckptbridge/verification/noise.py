"""Judging in float32 and below: how much of a difference is rounding, measured on the model at hand.

In float64 a correct conversion agrees to 1e-9 and no floor is needed. Below, two correct
implementations differ by rounding, and how much depends on depth, width and data. So the PyTorch
side runs twice, in the asked dtype and in float64; the distance of the two is the *noise floor*.

The limits come from one experiment: a random 16-layer Llama (hidden size 512), two sequences of 512
tokens, torch 2.13 and a separate MindSpore 2.10 forward, CPU; with the errors of two real faults
(RMSNorm eps 1e-5 for 1e-6; RoPE halves exchanged in the last layer only) as the thing to catch:

============  =======================  =========================  ================================
compute       noise: max abs, KL max,  the smaller fault:         limits taken
              top-1                    max abs, KL max
============  =======================  =========================  ================================
float32       7.9e-5, 1.8e-10, 100 %   1.5e-1, 5.6e-4             atol = rtol = 1e-4, KL 1e-8,
                                                                  no top-1 flip beyond tolerance
float16       3.5e-2, 3.6e-5, 99.2 %   1.5e-1, 5.9e-4             atol = 0.1 sigma of the logits,
                                                                  KL 2e-4, top-1 98 %
bfloat16      0.24, 1.3e-3, 91.7 %     0.25, 1.6e-3               none: noise and fault look alike
============  =======================  =========================  ================================

(Cosine similarity is reported and never judged: 0.99 lets both faults through.)

A limit grows with the floor, since another model may be noisier than that one: to ``FACTOR`` = 4
times the floor (two roundings that do not know each other differ by up to 2 floors; the other 2 are
for kernels that round more often than PyTorch's), and for KL, which goes with the square of the
error, to ``FACTOR`` squared times its floor. It stops where a fault would fit under it: at 0.1
sigma and at KL 2e-4. If the floor itself reaches that far, or the dtype is bfloat16, agreement
proves nothing and the judgement is "cannot tell", while disagreement still counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptbridge.errors import DTypeError
from ckptbridge.verification.metrics import Judgement, Metrics, check_tolerances, judge

FACTOR = 4.0
_SIGMA_SHARE = 0.1
_KL_CAP = 2e-4


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one compute dtype; ``top1`` is the least share of tokens that agree (0: none)."""

    atol: float
    rtol: float
    kl: float
    top1: float
    separates: bool


LIMITS = {
    "float32": Limits(atol=1e-4, rtol=1e-4, kl=1e-8, top1=0.0, separates=True),
    "float16": Limits(atol=0.0, rtol=0.0, kl=_KL_CAP, top1=0.98, separates=True),
    "bfloat16": Limits(atol=0.0, rtol=0.0, kl=_KL_CAP, top1=0.0, separates=False),
}


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """The PyTorch side's run in ``dtype`` against its own float64 run; ``sigma``: its logits' spread."""

    dtype: str
    max_abs: float
    kl_max: float | None
    top1: float | None
    sigma: float


def noise_floor(dtype: str, against_float64: Metrics) -> NoiseFloor:
    """The floor, from the metrics of the low-precision run (judged) against the float64 one (reference)."""
    _limits(dtype)
    tokens = against_float64.tokens
    return NoiseFloor(
        dtype=dtype,
        max_abs=against_float64.max_abs,
        kl_max=tokens.kl_max if tokens else None,
        top1=tokens.top1 if tokens else None,
        sigma=against_float64.ref_std,
    )


def judge_with_noise(
    metrics: Metrics, floor: NoiseFloor, atol: float, rtol: float = 0.0, *, equal_nan: bool = False
) -> Judgement:
    """Judges logits computed in ``floor.dtype``; see the module's text for the limits.

    A wider ``atol`` or ``rtol`` of the caller wins. ``holds`` is None where the dtype cannot tell a
    fault from rounding. Raises DTypeError for a dtype without limits (float64: use ``judge``).
    """
    check_tolerances(atol, rtol)
    limits = _limits(floor.dtype)
    cap = _SIGMA_SHARE * floor.sigma
    floor_kl = floor.kl_max or 0.0
    separates = limits.separates and floor.max_abs < cap and floor_kl < _KL_CAP
    # float16's own limit is the cap; float32's is 1e-4, or the floor's multiple where that is more.
    wide = min(max(limits.atol or cap, FACTOR * floor.max_abs), cap) if separates else FACTOR * floor.max_abs
    used_atol, used_rtol = max(atol, wide), max(rtol, limits.rtol)
    verdict = judge(metrics, used_atol, used_rtol, equal_nan=equal_nan)
    reasons = [*verdict.reasons, *_token_reasons(metrics, floor, limits, used_atol, used_rtol, separates)]
    if reasons:
        return Judgement(False, used_atol, used_rtol, verdict.needed_atol, tuple(reasons))
    if not separates:
        why = (
            f"{floor.dtype} cannot tell a fault from rounding here (noise floor {floor.max_abs:.1e},"
            f" spread of the logits {floor.sigma:.1e}): a smoke test only. Verify in float64."
        )
        return Judgement(None, used_atol, used_rtol, verdict.needed_atol, (why,))
    return Judgement(True, used_atol, used_rtol, verdict.needed_atol)


def _token_reasons(
    metrics: Metrics, floor: NoiseFloor, limits: Limits, atol: float, rtol: float, separates: bool
) -> list[str]:
    tokens = metrics.tokens
    if tokens is None:
        return []
    reasons = []
    kl_limit = max(limits.kl, FACTOR**2 * (floor.kl_max or 0.0))
    if separates:
        kl_limit = min(kl_limit, _KL_CAP)
    if tokens.kl_max is None:
        reasons.append("Some tokens have no probability distribution (NaN or +Inf among their logits).")
    elif tokens.kl_max > kl_limit:
        reasons.append(f"KL max is {tokens.kl_max:.1e} at token {tokens.kl_worst_token}; the limit is {kl_limit:.1e}.")
    # Two elements may each be off by the tolerance, so a first choice may change hands within twice that.
    reach = 2 * (atol + rtol * metrics.ref_max)
    if tokens.top1_margin > reach:
        reasons.append(
            f"A token's first choice changed against a margin of {tokens.top1_margin:.1e} (limit {reach:.1e})."
        )
    # The model's own rounding flips some tokens, and each of two sides flips its own.
    least = min(limits.top1, 1.0 - 2.0 * (1.0 - (floor.top1 if floor.top1 is not None else 1.0)))
    if tokens.top1 < least:
        reasons.append(f"Only {tokens.top1:.1%} of the tokens agree on their first choice; the limit is {least:.1%}.")
    return reasons


def _limits(dtype: str) -> Limits:
    found = LIMITS.get(dtype)
    if found is None:
        raise DTypeError(
            f"There is no noise limit for compute dtype '{dtype}'.", remedy=f"Use one of: {', '.join(LIMITS)}."
        )
    return found
