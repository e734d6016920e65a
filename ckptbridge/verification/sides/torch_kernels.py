"""PyTorch's activation kernels. Only CPU devices have been tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptbridge.errors import BackendError
from ckptbridge.verification.sides.devices import check_device
from ckptbridge.verification.sides.kernels import Floats, KernelSet, NoKernel


def kernel_set(device: str = "cpu") -> KernelSet:
    """PyTorch's kernels on ``device`` (cpu, cuda). Raises BackendError."""
    try:
        import torch
    except ImportError as error:
        raise BackendError(
            f"PyTorch cannot be imported: {error}", remedy='Install it: pip install "ckptbridge[torch]"'
        ) from error
    check_device(torch, device)
    functional = torch.nn.functional

    def rope(x: Any, angle: Any) -> Any:
        first, second = x.chunk(2, dim=-1)
        angles = torch.cat((angle, angle), dim=-1)
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

    def rms_norm_composed(x: Any, weight: Any) -> Any:
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(x.dtype)

    kernels: dict[str, dict[str, Callable[..., Any]]] = {
        "silu": {"functional.silu": functional.silu, "x * sigmoid(x)": lambda x: x * torch.sigmoid(x)},
        "gelu": {"functional.gelu": functional.gelu},
        "gelu_tanh": {"functional.gelu(tanh)": lambda x: functional.gelu(x, approximate="tanh")},
        "swiglu": {"silu(gate) * up": lambda gate, up: functional.silu(gate) * up},
        "softmax": {"functional.softmax": lambda x: functional.softmax(x, dim=-1)},
        "rms_norm": {
            "functional.rms_norm": lambda x, weight: functional.rms_norm(x, (x.shape[-1],), weight, 1e-6),
            "composed": rms_norm_composed,
        },
        "layer_norm": {
            "functional.layer_norm": lambda x, weight, bias: functional.layer_norm(
                x, (x.shape[-1],), weight, bias, 1e-5
            )
        },
        "rope": {"composed": rope},
        "softplus": {"functional.softplus": functional.softplus},
        "tanh": {"tanh": torch.tanh},
        "sigmoid": {"sigmoid": torch.sigmoid},
    }
    defaults: dict[str, Callable[[int], Callable[..., Any]]] = {
        "LayerNorm": torch.nn.LayerNorm,
        "GELU": lambda width: torch.nn.GELU(),
    }

    def run(function: Callable[..., Any], inputs: Mapping[str, Floats], dtype: str) -> Floats:
        kind = getattr(torch, dtype)
        arguments = [torch.from_numpy(x).to(device=device, dtype=kind) for x in inputs.values()]
        try:
            with torch.no_grad():
                result: Floats = function(*arguments).to(torch.float64).cpu().numpy()
        except (RuntimeError, AttributeError, TypeError) as error:
            raise NoKernel(_first_line(error)) from error
        return result

    return KernelSet("torch", torch.__version__, device, kernels, defaults, run)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
