"""MindSpore's part of the numerics guard."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ckptbridge.errors import BackendError
from ckptbridge.verification.numerics import Action, replace_function


def switch(undo: ExitStack) -> list[Action]:
    """Imports mindspore and sets its switches until ``undo`` closes. Raises BackendError."""
    try:
        import mindspore
        from mindspore import mint, ops
    except ImportError as error:
        raise BackendError(
            f"MindSpore cannot be imported: {error}", remedy='Install it: pip install "ckptbridge[mindspore]"'
        ) from error
    return [_deterministic(mindspore), *_hf32(mindspore), *_silu(undo, mint, ops)]


def _deterministic(mindspore: Any) -> Action:
    name = "mindspore.set_deterministic"
    old = mindspore.context.get_context("deterministic")
    once = "MindSpore takes it once a process"
    try:
        mindspore.set_deterministic(True)
    except RuntimeError:  # set before, by us or by the caller
        return Action(name, old, "ON", applied=old == "ON", note=f"{once}: left as it was")
    return Action(name, old, "ON", applied=True, note=f"{once}: stays on until the process ends")


def _hf32(mindspore: Any) -> list[Action]:
    """HF32 (19-bit float32) off, on Ascend only: elsewhere the calls log errors. Not run on an Ascend yet."""
    target = mindspore.context.get_context("device_target")
    actions = []
    for name in ("conv_allow_hf32", "matmul_allow_hf32"):
        switch_name = f"mindspore.device_context.ascend.op_precision.{name}"
        if target != "Ascend":
            actions.append(Action(switch_name, "unknown", "False", applied=False, note=f"no HF32 on {target}"))
            continue
        try:
            getattr(mindspore.device_context.ascend.op_precision, name)(False)
        except RuntimeError as error:  # set to True before: MindSpore takes it once a process
            actions.append(Action(switch_name, "True", "False", applied=False, note=str(error).strip()))
        else:
            actions.append(Action(switch_name, "unknown", "False", applied=True, note="stays off"))
    return actions


def _silu(undo: ExitStack, mint: Any, ops: Any) -> list[Action]:
    def silu(input: Any, inplace: bool = False) -> Any:
        product = input * ops.sigmoid(input)
        if inplace:
            input.copy_(product)
            return input
        return product

    def call(primitive: Any, input: Any) -> Any:
        return silu(input)

    # nn.SiLU calls ops.function.silu and mint.nn.SiLU calls mint.nn.functional.silu, both looked up when called;
    # networks that build the primitive themselves are reached through its class.
    actions = [
        replace_function(undo, ops.silu, silu, "mindspore ops.silu", "ops.silu and through it nn.SiLU"),
        replace_function(
            undo, mint.nn.functional.silu, silu, "mindspore mint.nn.functional.silu", "and through it mint.nn.SiLU"
        ),
    ]
    primitive = getattr(ops.auto_generate, "SiLU", None)
    if primitive is not None:
        undo.callback(setattr, primitive, "__call__", primitive.__call__)
        primitive.__call__ = call
        actions.append(Action("mindspore ops.auto_generate.SiLU", "the backend's kernel", "x * sigmoid(x)", True))
    return actions
