"""Exact, fast and proved handoff of model checkpoints between PyTorch and MindSpore.

``convert``, ``verify``, ``inspect`` and ``open_checkpoint`` are the entries; errors are the family of
``CkptBridgeError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptbridge.errors import CkptBridgeError

if TYPE_CHECKING:
    from ckptbridge.api import convert, verify
    from ckptbridge.conversion.inspection import inspect
    from ckptbridge.formats.lazy import open_checkpoint
    from ckptbridge.tables.table import load_table

__version__ = "0.1.0"
__all__ = ["CkptBridgeError", "__version__", "convert", "inspect", "load_table", "open_checkpoint", "verify"]

# Imported on first use, so that the command line starts quickly.
_HOMES = {
    "convert": "ckptbridge.api",
    "verify": "ckptbridge.api",
    "inspect": "ckptbridge.conversion.inspection",
    "open_checkpoint": "ckptbridge.formats.lazy",
    "load_table": "ckptbridge.tables.table",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckptbridge' has no attribute '{name}'")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
