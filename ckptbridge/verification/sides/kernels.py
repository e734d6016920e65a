"""What the activation check needs of a backend: its kernels by name, and how to run one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class NoKernel(Exception):
    """The backend cannot compute this on this device in this dtype; the text is its own first line."""


@dataclass(frozen=True, slots=True)
class KernelSet:
    """A backend's kernels.

    ``kernels`` maps a case (``silu``) to named functions of the backend's tensors, the one that
    networks use first. ``defaults`` maps a layer (``LayerNorm``) to a function that builds it with
    the backend's default settings for a given width. ``run`` gives a function its arguments as
    tensors of a dtype and returns float64; it raises NoKernel.
    """

    name: str
    version: str
    device: str
    kernels: Mapping[str, Mapping[str, Callable[..., Any]]]
    defaults: Mapping[str, Callable[[int], Callable[..., Any]]]
    run: Callable[[Callable[..., Any], Mapping[str, Floats], str], Floats]
