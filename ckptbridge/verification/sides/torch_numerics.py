"""PyTorch's part of the numerics guard."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ckptbridge.errors import BackendError
from ckptbridge.verification.numerics import Action, replace_function, set_flag


def switch(undo: ExitStack) -> list[Action]:
    """Imports torch and sets its switches until ``undo`` closes. Raises BackendError."""
    try:
        import torch
    except ImportError as error:
        raise BackendError(
            f"PyTorch cannot be imported: {error}", remedy='Install it: pip install "ckptbridge[torch]"'
        ) from error
    return [
        _deterministic_algorithms(undo, torch),
        # Set even on the CPU: a model that a user function moves to CUDA then computes in float32 proper.
        set_flag(undo, torch.backends.cuda.matmul, "allow_tf32", False, "torch.backends.cuda.matmul.allow_tf32"),
        set_flag(undo, torch.backends.cudnn, "allow_tf32", False, "torch.backends.cudnn.allow_tf32"),
        _silu(undo, torch),
    ]


def _deterministic_algorithms(undo: ExitStack, torch: Any) -> Action:
    old = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    undo.callback(torch.use_deterministic_algorithms, old, warn_only=warn_only)
    torch.use_deterministic_algorithms(True)
    return Action("torch.use_deterministic_algorithms", str(old), "True", applied=True)


def _silu(undo: ExitStack, torch: Any) -> Action:
    def silu(input: Any, inplace: bool = False) -> Any:
        product = input * torch.sigmoid(input)
        return input.copy_(product) if inplace else product

    # nn.SiLU, and transformers' classes for "silu" and "swish", look the function up when called.
    return replace_function(
        undo, torch.nn.functional.silu, silu, "torch SiLU", "torch.nn.functional.silu and through it nn.SiLU"
    )
