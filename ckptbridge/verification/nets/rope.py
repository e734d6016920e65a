"""Rotary position tables in float64, computed by NumPy so that both sides can start from the same numbers.

Formulas: RoFormer (default), position interpolation (linear), Llama 3.1's model code (llama3), YaRN
(yarn, with DeepSeek's ``mscale``), and LongRoPE as Phi-3 uses it (longrope).
"""

from __future__ import annotations

from math import ceil, floor, log, pi, sqrt

import numpy as np
from numpy.typing import NDArray

from ckptbridge.errors import UnsupportedError
from ckptbridge.verification.nets.spec import Rope

Float64 = NDArray[np.float64]


def rope_tables(rope: Rope, length: int) -> tuple[Float64, Float64]:
    """Cosines and sines of the angles, each (length, dim / 2), scaled as the kind asks for."""
    frequencies, magnitude = inverse_frequencies(rope, length)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles) * magnitude, np.sin(angles) * magnitude


def inverse_frequencies(rope: Rope, length: int) -> tuple[Float64, float]:
    """Radians per position of each plane, (dim / 2,), and the factor on cosine and sine.

    Raises UnsupportedError for a ``dynamic`` RoPE beyond the trained length, where the frequencies
    would depend on the history of calls.
    """
    plain: Float64 = rope.theta ** -(np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    if rope.kind == "linear":
        return plain / rope.scaling["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(plain, rope)
    if rope.kind == "longrope":
        return _longrope(plain, rope, length)
    if rope.kind == "dynamic" and length > rope.max_positions:
        raise UnsupportedError(
            f"A dynamic RoPE of {rope.max_positions} positions is not compared at length {length}.",
            remedy=f"Give --length {rope.max_positions} or less.",
        )
    return plain, 1.0


def _llama3(plain: Float64, rope: Rope) -> Float64:
    """Long waves are stretched by ``factor``, short ones kept, those between blended."""
    low, high = rope.scaling["low_freq_factor"], rope.scaling["high_freq_factor"]
    turns = rope.scaling["original_max_position_embeddings"] * plain / (2 * pi)  # in the trained length
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    stretched: Float64 = plain * (kept + (1.0 - kept) / rope.scaling["factor"])
    return stretched


def mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's temperature: 0.1 weight ln(factor) + 1."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * log(factor) + 1.0


def _yarn(plain: Float64, rope: Rope) -> tuple[Float64, float]:
    scaling, dim = rope.scaling, rope.dim
    factor, trained = scaling["factor"], scaling["original_max_position_embeddings"]

    def plane_of(turns: float) -> float:
        return dim * log(trained / (turns * 2 * pi)) / (2 * log(rope.theta))

    low, high = plane_of(scaling.get("beta_fast") or 32.0), plane_of(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", 1.0):
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    stretched = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    frequencies = plain / factor * stretched + plain * (1.0 - stretched)
    if scaling.get("attention_factor") is not None:
        return frequencies, scaling["attention_factor"]
    top, bottom = scaling.get("mscale", 0.0), scaling.get("mscale_all_dim", 0.0)
    if top and bottom:
        return frequencies, mscale(factor, top) / mscale(factor, bottom)
    return frequencies, mscale(factor)


def _longrope(plain: Float64, rope: Rope, length: int) -> tuple[Float64, float]:
    trained = rope.scaling["original_max_position_embeddings"]
    factors = rope.factors[1] if length > trained else rope.factors[0]
    frequencies = plain / np.asarray(factors, dtype=np.float64)
    if rope.scaling.get("attention_factor") is not None:
        return frequencies, rope.scaling["attention_factor"]
    factor = rope.scaling["factor"]
    return frequencies, 1.0 if factor <= 1.0 else sqrt(1.0 + log(factor) / log(trained))


def alibi_slopes(heads: int) -> Float64:
    """ALiBi's slope per head (Press et al.): a geometric series, interleaved when heads is no power of two."""

    def series(count: int) -> list[float]:
        start = 2.0 ** (-8.0 / count)
        return [start ** (k + 1) for k in range(count)]

    power = 1 << (heads.bit_length() - 1)
    slopes = series(power)
    if power < heads:
        slopes += series(2 * power)[0::2][: heads - power]
    return np.asarray(slopes, dtype=np.float64)
