"""The activations by their formulas, in NumPy's widest float, and the inputs to try them on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def rounded(x: Floats, dtype: str) -> Floats:
    """``x`` rounded to ``dtype`` (to nearest, ties to even), as float64."""
    kind: npt.DTypeLike = dtype
    if dtype == "bfloat16":
        import ml_dtypes

        kind = ml_dtypes.bfloat16
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(kind).astype(np.float64)


# --- formulas: float64 in and out, longdouble between ----------------------------------------


Wide = Any  # an array of longdouble: NumPy's type stubs lose it in mixed arithmetic


def _wide(formula: Callable[..., Wide]) -> Callable[..., Floats]:
    def narrow(*inputs: Floats) -> Floats:
        with np.errstate(all="ignore"):
            return np.asarray(formula(*(x.astype(np.longdouble) for x in inputs)), dtype=np.float64)

    return narrow


def _sigmoid(x: Wide) -> Wide:
    small = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def _silu(x: Wide) -> Wide:
    return np.where(x == 0, x, x * _sigmoid(x))


def _softplus(x: Wide) -> Wide:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _softmax(x: Wide) -> Wide:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _rms_norm(x: Wide, weight: Wide) -> Wide:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.longdouble(1e-6)) * weight


def _gelu_tanh(x: Wide) -> Wide:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.longdouble(np.pi)) * (x + np.longdouble(0.044715) * x**3)))


def _rope(x: Wide, angle: Wide) -> Wide:
    half = x.shape[-1] // 2
    cos, sin = (np.concatenate((f, f), axis=-1) for f in (np.cos(angle), np.sin(angle)))
    return x * cos + np.concatenate((-x[..., half:], x[..., :half]), axis=-1) * sin


def gelu(x: Floats) -> Floats:
    """x/2 erfc(-x/sqrt 2): unlike 1 + erf it keeps its digits in the negative tail. NumPy has no erf, so math's."""
    erfc = np.array([math.erfc(-v / math.sqrt(2)) for v in x.ravel()]).reshape(x.shape)
    return np.asarray(x / 2 * erfc, dtype=np.float64)


def gelu_tanh(x: Floats) -> Floats:
    """The tanh approximation of GELU."""
    return _wide(_gelu_tanh)(x)


def layer_norm(x: Floats, eps: float, weight: Floats | None = None, bias: Floats | None = None) -> Floats:
    """Layer normalisation over the last axis."""
    w: Wide = x.astype(np.longdouble)
    w = w - w.mean(axis=-1, keepdims=True)
    w = w / np.sqrt((w * w).mean(axis=-1, keepdims=True) + np.longdouble(eps))
    w = w * (1 if weight is None else weight) + (0 if bias is None else bias)
    return np.asarray(w, dtype=np.float64)


# --- inputs ---------------------------------------------------------------------------------

_LIMITS = {  # largest magnitude tried (leaving room to double it), smallest denormal
    "float64": (1e30, 2.0**-1074),
    "float32": (1e30, 2.0**-149),
    "float16": (3e4, 2.0**-24),
    "bfloat16": (1e30, 2.0**-133),
}


def line(dtype: str) -> Floats:
    """Scalars: the range where activations bend, then large, tiny and denormal ones, both zeros."""
    large, denormal = _LIMITS[dtype]
    magnitudes = np.concatenate(
        (
            np.geomspace(12, large, 40),
            np.geomspace(denormal * 64, 1e-2, 40) if dtype != "float64" else np.geomspace(1e-300, 1e-2, 40),
            denormal * np.array([1.0, 3.0, 64.0, 1000.0]),
        )
    )
    return np.concatenate((np.linspace(-12, 12, 2401), [0.0, -0.0], magnitudes, -magnitudes)).reshape(1, -1)


def rows(dtype: str) -> Floats:
    """(7, 64): rows of ordinary, small, tiny, large, constant, denormal and one-peaked values."""
    rng = np.random.default_rng(1)
    normal = rng.standard_normal((7, 64))
    large = 100.0 if dtype == "float16" else 1e4
    denormal = _LIMITS[dtype][1]
    normal[1] *= 0.02
    normal[2] *= 1e-4
    normal[3] *= large
    normal[4] = 0.75
    normal[5] = denormal * np.arange(64)
    normal[6, 7] = 30.0
    return normal


def _weights(seed: int) -> Floats:
    return 1 + 0.2 * np.random.default_rng(seed).standard_normal(64)


def _angles(dtype: str) -> Floats:
    """(64, 32): positions times RoPE's frequencies, as far as the dtype tells neighbouring positions apart."""
    last = {"float64": 4096, "float32": 4096, "float16": 512, "bfloat16": 64}[dtype]
    return np.outer(np.linspace(0, last, 64).round(), 10000.0 ** (-np.arange(32) / 32))


@dataclass(frozen=True, slots=True)
class Case:
    """An activation: its inputs for a dtype, the exact result, and whether it works element by element."""

    name: str
    inputs: Callable[[str], Mapping[str, Floats]]
    formula: Callable[..., Floats]
    elementwise: bool

    def exact(self, inputs: Mapping[str, Floats]) -> Floats:
        return self.formula(*inputs.values())


def _scalars(dtype: str) -> Mapping[str, Floats]:
    return {"x": line(dtype)}


CASES: tuple[Case, ...] = (
    Case("silu", _scalars, _wide(_silu), True),
    Case("gelu", _scalars, gelu, True),
    Case("gelu_tanh", _scalars, gelu_tanh, True),
    Case(
        "swiglu",
        lambda dtype: {"gate": line(dtype), "up": np.linspace(-2, 2, line(dtype).size).reshape(1, -1)},
        _wide(lambda gate, up: _silu(gate) * up),
        True,
    ),
    Case("softmax", lambda dtype: {"x": rows(dtype)}, _wide(_softmax), False),
    Case("rms_norm", lambda dtype: {"x": rows(dtype), "weight": _weights(2)}, _wide(_rms_norm), False),
    Case(
        "layer_norm",
        lambda dtype: {"x": rows(dtype), "weight": _weights(3), "bias": _weights(4) - 1},
        lambda x, weight, bias: layer_norm(x, 1e-5, weight, bias),
        False,
    ),
    Case(
        "rope",
        lambda dtype: {"x": np.random.default_rng(5).standard_normal((64, 64)), "angle": _angles(dtype)},
        _wide(_rope),
        False,
    ),
    Case("softplus", _scalars, _wide(_softplus), True),
    Case("tanh", _scalars, _wide(partial(np.tanh)), True),
    Case("sigmoid", _scalars, _wide(_sigmoid), True),
)
