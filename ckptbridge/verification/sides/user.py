"""A side that the user gives as ``MODULE:FUNCTION``: a loader that returns tokens -> logits.

    def load(path: str, config: dict, dtype: str, device: str) -> Callable[[numpy.ndarray], numpy.ndarray]

The loader gets the checkpoint's path, the parsed config.json, and the names of compute dtype and device.
What it returns gets int64 token ids (batch, length) and gives the logits (batch, length, vocabulary) as an
array of floats, or as a tensor with ``.asnumpy()`` (MindSpore) or ``.numpy()`` (PyTorch).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ckptbridge.errors import BackendError, UsageError
from ckptbridge.verification.sides.stages import Stages

Forward = Callable[[NDArray[Any]], Stages]


def pytorch_function(name: str, path: Path, config: Mapping[str, Any], dtype: str, device: str) -> Forward:
    """The forward of ``--pt-model MODULE:FUNCTION``: its only stage is ``logits``.

    Raises UsageError when the name, the module or what it returns is wrong, BackendError when the user's
    code raises; so does the forward.
    """
    return _forward(name, path, config, dtype, device)


def mindspore_function(name: str, path: Path, config: Mapping[str, Any], dtype: str, device: str) -> Forward:
    """The forward of ``--ms-net MODULE:FUNCTION``; the rest as in :func:`pytorch_function`."""
    return _forward(name, path, config, dtype, device)


def _forward(name: str, path: Path, config: Mapping[str, Any], dtype: str, device: str) -> Forward:
    loader = _find(name)
    try:
        compute = loader(str(path), dict(config), dtype, device)
    # Here and below it is the user's code: whatever it raises is reported as its failure.
    except Exception as error:
        raise _failed(name, "the loader", error) from error
    if not callable(compute):
        raise UsageError(
            f"{name} returned {type(compute).__name__}, which cannot be called.",
            remedy="Let it return a function of token ids (batch, length) that gives the logits.",
        )

    def forward(tokens: NDArray[Any]) -> Stages:
        ids = np.asarray(tokens, dtype=np.int64)
        try:
            result = compute(ids)
        except Exception as error:
            raise _failed(name, "the forward", error) from error
        return Stages({"logits": _logits(name, result, ids.shape)}, {"logits": ()})

    return forward


def _find(name: str) -> Callable[..., Any]:
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(f"'{name}' is not of the form MODULE:FUNCTION.", remedy="For example: my_networks:load.")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UsageError(
                f"There is no module '{module_name}' here.",
                remedy="Run in the folder that holds it, or set PYTHONPATH.",
            ) from error
        raise _failed(name, "the import", error) from error
    except Exception as error:
        raise _failed(name, "the import", error) from error
    finally:
        if added:
            sys.path.remove(here)
    found = getattr(module, attribute, None)
    if not callable(found):
        what = "has no" if found is None else "has, but cannot call,"
        raise UsageError(f"The module '{module_name}' {what} '{attribute}'.", remedy="Name a function of the module.")
    return cast(Callable[..., Any], found)


def _logits(name: str, result: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    for method in ("asnumpy", "numpy"):
        convert = getattr(result, method, None)
        if callable(convert):
            try:
                result = convert()
            except Exception as error:
                raise _failed(name, f"its result's .{method}()", error) from error
            break
    array = np.asarray(result)
    if not np.issubdtype(array.dtype, np.floating):
        raise UsageError(
            f"{name} gave {type(result).__name__} of dtype {array.dtype}, and not an array of floats.",
            remedy="Return the logits alone, as float64 or float32 (detached, on the host).",
        )
    if array.ndim < 3 or array.shape[:2] != shape:
        raise UsageError(
            f"{name} gave an array of shape {array.shape} for tokens of shape {shape}.",
            remedy="Return logits of shape (batch, length, vocabulary).",
        )
    return array if array.dtype == np.float64 else array.astype(np.float32)


def _failed(name: str, what: str, error: Exception) -> BackendError:
    return BackendError(
        f"{name} failed in {what}: {type(error).__name__}: {error}.",
        remedy="Run it by itself first: FUNCTION(path, config, dtype, device)(tokens).",
    )
