"""The golden file: the PyTorch side's tokens and activations, for a machine that has no PyTorch.

A safetensors file: ``tokens`` (int64), one tensor a stage, and as metadata what they belong to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptbridge.errors import FormatError
from ckptbridge.verification.sides.stages import Stages

SCHEMA = "1"
_STAGE = "stage:"


@dataclass(frozen=True, slots=True)
class Golden:
    """What a golden file holds; ``config`` is the model's, ``content`` the PyTorch checkpoint's content digest."""

    tokens: npt.NDArray[np.int64]
    stages: Stages
    floor: Stages | None
    dtype: str
    config: Mapping[str, Any]
    source: str
    versions: Mapping[str, str]


def write_golden(path: Path, golden: Golden) -> None:
    """Write the file; raises FormatError when it cannot be written."""
    from safetensors.numpy import save_file

    tensors = {"tokens": np.ascontiguousarray(golden.tokens)}
    for prefix, stages in ((_STAGE, golden.stages), ("floor:", golden.floor)):
        if stages is not None:
            tensors.update({prefix + k: np.ascontiguousarray(v) for k, v in stages.values.items()})
    metadata = {
        "ckptbridge_golden": SCHEMA,
        "dtype": golden.dtype,
        "source": golden.source,
        "order": json.dumps(list(golden.stages.values)),
        "feeds": json.dumps({k: list(v) for k, v in golden.stages.feeds.items()}),
        "config": json.dumps(golden.config, sort_keys=True),
        "versions": json.dumps(golden.versions, sort_keys=True),
    }
    try:
        save_file(tensors, path, metadata=metadata)
    except OSError as e:
        raise FormatError(
            f"The golden file cannot be written: {e.strerror}.", remedy="Name another place.", file=path
        ) from None


def read_golden(path: Path) -> Golden:
    """Read the file; raises FormatError when it is not one that :func:`write_golden` made."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get("ckptbridge_golden") != SCHEMA:
            raise ValueError
        order = json.loads(metadata["order"])
        feeds = {k: tuple(v) for k, v in json.loads(metadata["feeds"]).items()}
        floor = {k: tensors["floor:" + k] for k in order if "floor:" + k in tensors}
        return Golden(
            tokens=tensors["tokens"],
            stages=Stages({k: tensors[_STAGE + k] for k in order}, feeds),
            floor=Stages(floor, feeds) if floor else None,
            dtype=metadata["dtype"],
            config=json.loads(metadata["config"]),
            source=metadata["source"],
            versions=json.loads(metadata["versions"]),
        )
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        raise FormatError(
            "This is not a golden file.", remedy="Write one with 'ckptbridge verify PT --golden FILE'.", file=path
        ) from None
