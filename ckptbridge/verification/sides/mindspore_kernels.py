"""MindSpore's activation kernels. Only the CPU has been tried; fused ones without a CPU kernel are listed
all the same, and show up as missing there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ckptbridge.errors import BackendError
from ckptbridge.verification.sides.kernels import Floats, KernelSet, NoKernel


def kernel_set(device: str = "CPU") -> KernelSet:
    """MindSpore's kernels on ``device`` (CPU, GPU, Ascend). Raises BackendError."""
    try:
        import mindspore
        from mindspore import mint, nn, ops
    except ImportError as error:
        raise BackendError(
            f"MindSpore cannot be imported: {error}", remedy='Install it: pip install "ckptbridge[mindspore]"'
        ) from error
    if mindspore.context.get_context("device_target") != device:
        try:
            mindspore.set_device(device)
        except (RuntimeError, ValueError) as error:
            raise BackendError(
                f"MindSpore cannot use device {device}: {_first_line(error)}", remedy="Use --ms-device CPU."
            ) from error
    functional = mint.nn.functional

    def widened(x: Any) -> Any:
        return x if x.dtype == mindspore.float64 else x.astype(mindspore.float32)

    def number(value: float, like: Any) -> Any:
        # A Python float beside a float64 tensor becomes float32 first (MindSpore 2.10): 4e-10 off in an eps.
        return mindspore.Tensor(value, like.dtype)

    def layer_norm_composed(x: Any, weight: Any, bias: Any) -> Any:
        wide = widened(x)
        centred = wide - wide.mean(-1, keep_dims=True)
        wide = centred * ops.rsqrt((centred * centred).mean(-1, keep_dims=True) + number(1e-5, wide))
        return (wide * widened(weight) + widened(bias)).astype(x.dtype)

    def rms_norm_composed(x: Any, weight: Any) -> Any:
        wide = widened(x)
        wide = wide * ops.rsqrt((wide * wide).mean(-1, keep_dims=True) + number(1e-6, wide))
        return weight * wide.astype(x.dtype)

    def rope_composed(x: Any, angle: Any) -> Any:
        half = x.shape[-1] // 2
        angles = ops.cat((angle, angle), -1)
        return x * ops.cos(angles) + ops.cat((-x[:, half:], x[:, :half]), -1) * ops.sin(angles)

    def rope_fused(x: Any, angle: Any) -> Any:
        angles = ops.cat((angle, angle), -1).reshape(1, -1, 1, x.shape[-1])
        return ops.rotary_position_embedding(x.reshape(angles.shape), ops.cos(angles), ops.sin(angles)).reshape(x.shape)

    kernels: dict[str, dict[str, Callable[..., Any]]] = {
        "silu": {
            "mint.nn.functional.silu": lambda x: functional.silu(x),
            "ops.silu": lambda x: ops.silu(x),
            "x * sigmoid(x)": lambda x: x * ops.sigmoid(x),
        },
        "gelu": {
            "ops.gelu": lambda x: ops.gelu(x, approximate="none"),
            "mint.nn.functional.gelu": lambda x: functional.gelu(x),
            "nn.GELU(approximate=False)": lambda x: nn.GELU(approximate=False)(x),
            "composed with mint.erf": lambda x: 0.5 * x * (1.0 + mint.erf(x * number(0.5**0.5, x))),
        },
        "gelu_tanh": {
            "ops.gelu(tanh)": lambda x: ops.gelu(x, approximate="tanh"),
            "mint.nn.functional.gelu(tanh)": lambda x: functional.gelu(x, approximate="tanh"),
        },
        "swiglu": {
            "silu(gate) * up": lambda gate, up: functional.silu(gate) * up,
            "ops.swiglu": lambda gate, up: ops.swiglu(ops.cat((gate, up), -1), -1),
        },
        "softmax": {
            "ops.softmax": lambda x: ops.softmax(x, -1),
            "mint.nn.functional.softmax": lambda x: functional.softmax(x, -1),
        },
        "rms_norm": {
            "composed": rms_norm_composed,
            "ops.rms_norm": lambda x, weight: ops.rms_norm(x, weight, 1e-6)[0],
        },
        "layer_norm": {
            "composed": layer_norm_composed,
            "ops.LayerNorm": lambda x, weight, bias: ops.LayerNorm(-1, -1, 1e-5)(x, weight, bias)[0],
            "mint.nn.functional.layer_norm": lambda x, weight, bias: functional.layer_norm(
                x, (x.shape[-1],), weight, bias, 1e-5
            ),
        },
        "rope": {"composed": rope_composed, "ops.rotary_position_embedding": rope_fused},
        "softplus": {
            "mint.nn.functional.softplus": lambda x: functional.softplus(x),
            "ops.softplus": lambda x: ops.softplus(x),
        },
        "tanh": {"ops.tanh": lambda x: ops.tanh(x), "mint.tanh": lambda x: mint.tanh(x)},
        "sigmoid": {"ops.sigmoid": lambda x: ops.sigmoid(x), "mint.sigmoid": lambda x: mint.sigmoid(x)},
    }
    defaults: dict[str, Callable[[int], Callable[..., Any]]] = {
        "LayerNorm": lambda width: nn.LayerNorm((width,)),
        "GELU": lambda width: nn.GELU(),
    }

    def once(function: Callable[..., Any], inputs: Mapping[str, Floats], dtype: str) -> Floats:
        kind = getattr(mindspore, dtype)
        arguments = []
        for x in inputs.values():
            # By way of a NumPy type that has all of the values, so that MindSpore's cast is exact.
            wide = np.float64 if dtype == "float64" else np.float32
            tensor = mindspore.Tensor(x.astype(wide)).astype(kind)
            tensor.asnumpy()  # finish the copy now: an error of the kernel must not strike it
            arguments.append(tensor)
        result = function(*arguments)
        if dtype not in ("float64", "float32"):
            result = result.astype(mindspore.float32)
        return np.asarray(result.asnumpy(), dtype=np.float64)

    failures = (RuntimeError, AttributeError, TypeError, ValueError)

    def run(function: Callable[..., Any], inputs: Mapping[str, Floats], dtype: str) -> Floats:
        # Kernels run asynchronously, so that an error may belong to an earlier one: settle, and believe the second.
        try:
            return once(function, inputs, dtype)
        except failures:
            _settle(mindspore)
        try:
            return once(function, inputs, dtype)
        except failures as error:
            _settle(mindspore)
            raise NoKernel(_first_line(error)) from error

    return KernelSet("mindspore", mindspore.__version__, device, kernels, defaults, run)


def _settle(mindspore: Any) -> None:
    """Runs a trivial kernel until no error of an earlier one surfaces."""
    for _ in range(20):
        try:
            (mindspore.Tensor(np.ones(1, np.float32)) + 1).asnumpy()
        except (RuntimeError, TypeError, ValueError):
            continue
        return


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip(" -")]
    return lines[0].strip() if lines else type(error).__name__
