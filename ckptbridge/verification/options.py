"""The options of the forward level, apart from it: the weights level alone should not wait for its imports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ForwardOptions:
    """What the command line says of the forward level."""

    atol: float = 1e-5
    rtol: float = 0.0
    dtype: str = "float64"
    tokens: Path | None = None
    batch: int = 1
    length: int | None = None
    seed: int = 0
    device: str = "cpu"
    ms_device: str = "CPU"
    pt_model: str | None = None
    ms_net: str | None = None
    golden: Path | None = None
    equal_nan: bool = False
    prove: bool = False
    bitwise: bool = True
