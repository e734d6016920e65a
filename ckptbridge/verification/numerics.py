"""The numerics guard: every switch that makes two backends compute the same thing the same way.

Environment variables are set before a backend is imported, its own switches once it is loaded, and
all of it is put back on leaving, exceptions included. What was done, and what could not be, is kept
as a list of :class:`Action` for the report.

Not thread-safe: environment, flags and functions belong to the process. Untested for want of the
hardware: what the CUDA and Ascend switches do there (that they are set and restored is tested; HF32
is touched on Ascend only).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType

UNSET = "unset"

# name, value, the backend that reads it, why
ENVIRONMENT: tuple[tuple[str, str, str, str], ...] = (
    ("ASCEND_FORCE_OVERFLOW", "0", "mindspore", "handoff recipe; not publicly documented, so not relied on"),
    ("ASCEND_FORCE_UNDERFLOW", "0", "mindspore", "handoff recipe; not publicly documented, so not relied on"),
    ("MS_ASCEND_CHECK_OVERFLOW_MODE", "INFNAN_MODE", "mindspore", "INF and NaN stay, instead of 65504 and 0"),
    ("INF_NAN_MODE_ENABLE", "1", "mindspore", "the same for CANN and torch_npu"),
    ("HCCL_DETERMINISTIC", "true", "mindspore", "collectives in a fixed order"),
    ("LCCL_DETERMINISTIC", "1", "mindspore", "small all-reduce in a fixed order"),
    ("TE_PARALLEL_COMPILER", "1", "mindspore", "what set_deterministic would set"),
    ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", "torch", "deterministic cuBLAS; read at the first CUDA operation"),
)


@dataclass(frozen=True, slots=True)
class Action:
    """One switch: what it was, what it is now, and whether that took effect."""

    switch: str
    old: str
    new: str
    applied: bool
    note: str = ""


@dataclass(slots=True)
class Numerics:
    """What the guard has done so far, in order."""

    actions: list[Action] = field(default_factory=list)


@contextmanager
def deterministic(*, torch: bool = True, mindspore: bool = True) -> Iterator[Numerics]:
    """Sets all switches of the named backends, importing them; puts all back on leaving.

    One thing cannot be put back: MindSpore takes its deterministic mode once a process. The list of
    actions says so. Raises BackendError if a named backend cannot be imported.
    """
    done = Numerics()
    wanted = [name for name, on in (("torch", torch), ("mindspore", mindspore)) if on]
    with ExitStack() as undo:
        for name, value, backend, why in ENVIRONMENT:
            if backend in wanted:
                done.actions.append(_set_variable(undo, name, value, backend, why))
        if torch:
            from ckptbridge.verification.sides import torch_numerics

            done.actions += torch_numerics.switch(undo)
        if mindspore:
            from ckptbridge.verification.sides import mindspore_numerics

            done.actions += mindspore_numerics.switch(undo)
        yield done


def _set_variable(undo: ExitStack, name: str, value: str, backend: str, why: str) -> Action:
    old = os.environ.get(name)
    undo.callback(_put_variable, name, old)
    os.environ[name] = value
    late = backend in sys.modules and old != value
    note = f"{why}; {backend} was already imported and may have read the old value" if late else why
    return Action(name, UNSET if old is None else old, value, applied=True, note=note)


def _put_variable(name: str, old: str | None) -> None:
    if old is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = old


# --- used by the sides' switches ------------------------------------------------------------


def set_flag(undo: ExitStack, owner: object, attribute: str, value: object, switch: str, note: str = "") -> Action:
    """Sets ``owner.attribute`` until ``undo`` closes."""
    try:
        old = getattr(owner, attribute)
        setattr(owner, attribute, value)
    except (AttributeError, RuntimeError) as error:  # other versions, or set through another interface before
        return Action(switch, "unknown", str(value), applied=False, note=f"not possible: {error}")
    undo.callback(setattr, owner, attribute, old)
    return Action(switch, str(old), str(value), applied=True, note=note)


def replace_function(
    undo: ExitStack, original: Callable[..., object], replacement: Callable[..., object], switch: str, note: str
) -> Action:
    """Puts ``replacement`` wherever a loaded module holds ``original``, under any name, until ``undo`` closes.

    Every module, since ``from torch.nn.functional import silu`` copies the reference. What holds the
    function in a closure or on an object is not reached.
    """
    places = [
        (module, name)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if value is original
    ]
    for module, name in places:
        undo.callback(setattr, module, name, original)
        setattr(module, name, replacement)
    where = f"in {len(places)} place{'' if len(places) == 1 else 's'}"
    return Action(switch, "the backend's kernel", "x * sigmoid(x)", applied=bool(places), note=f"{note}; {where}")
