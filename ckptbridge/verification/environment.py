"""Versions, devices and platform, for the report."""

from __future__ import annotations

import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version

from ckptbridge.verification.report import Environment

_PACKAGES = ("ckptbridge", "numpy", "torch", "transformers", "mindspore", "mindformers", "safetensors")


def versions() -> dict[str, str]:
    """Versions of the packages that matter, those that are installed; nothing is imported."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def environment(device: str, ms_device: str) -> Environment:
    """Where a verification ran."""
    return Environment(
        versions=versions(),
        devices={"PyTorch": device, "MindSpore": ms_device},
        platform=platform.platform(),
        command=shlex.join(["ckptbridge", *sys.argv[1:]]),
    )
