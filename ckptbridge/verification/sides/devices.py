"""Whether PyTorch has a device."""

from __future__ import annotations

from typing import Any

from ckptbridge.errors import BackendError


def check_device(torch: Any, device: str) -> None:
    """Raise unless torch knows the device and has it."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BackendError(
            f"PyTorch cannot use the device '{device}' here.",
            remedy="Give --device cpu, or run where the device and a PyTorch for it are installed.",
            option="--device",
            reason=(str(error).strip().splitlines() or [type(error).__name__])[0],
        ) from None
