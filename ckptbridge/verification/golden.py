"""The golden file: the PyTorch side's tokens and activations, for a machine that has no PyTorch.

A safetensors file: ``tokens`` (int64), one tensor a stage, and as metadata what they belong to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptbridge.errors import FormatError, OutputError, UsageError
from ckptbridge.verification.handoff import differing_keys
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
    content: str
    source: str
    versions: Mapping[str, str]


def write_golden(path: Path, golden: Golden) -> None:
    """Write the file; raises OutputError when it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    tensors = {"tokens": np.ascontiguousarray(golden.tokens)}
    for prefix, stages in ((_STAGE, golden.stages), ("floor:", golden.floor)):
        if stages is not None:
            tensors.update({prefix + k: np.ascontiguousarray(v) for k, v in stages.values.items()})
    metadata = {
        "ckptbridge_golden": SCHEMA,
        "dtype": golden.dtype,
        "content": golden.content,
        "source": golden.source,
        "order": json.dumps(list(golden.stages.values)),
        "feeds": json.dumps({k: list(v) for k, v in golden.stages.feeds.items()}),
        "config": json.dumps(golden.config, sort_keys=True),
        "versions": json.dumps(golden.versions, sort_keys=True),
    }
    try:
        save_file(tensors, path, metadata=metadata)
    except (OSError, SafetensorError) as e:
        raise OutputError(f"The golden file cannot be written: {e}.", remedy="Name another place.", file=path) from None


def check_golden(path: Path, reading: bool, writing: bool) -> None:
    """Raise, before the long work, when the file is not there to be read, or cannot be written.

    ``reading`` says that a MindSpore side is to be judged by it, ``writing`` that a PyTorch side can make it.
    """
    if path.exists():
        if not reading:
            raise OutputError("The golden file is there already.", remedy="Remove it, or name another.", file=path)
    elif not writing:
        raise UsageError(
            "There is no such golden file, and no PyTorch side to make it of.",
            remedy="Check the path, or name the PyTorch checkpoint, too.",
            file=path,
        )
    elif not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise OutputError("The golden file cannot be written there.", remedy="Name another place.", file=path)


def check_belongs(path: Path, golden: Golden, content: str, config: Mapping[str, Any]) -> bool:
    """Raise UsageError for the run of another checkpoint or config; False where no digest (``content``) can tell."""
    comparable = content.partition(":")[0] == golden.content.partition(":")[0]
    differing = differing_keys(golden.config, config)
    if differing and not (comparable and content != golden.content):
        raise UsageError(
            f"The golden file was computed with another config, which differs in: {', '.join(differing)}.",
            remedy="Write one with the config of the conversion: ckptbridge verify PT --config FILE --golden FILE.",
            file=path,
        )
    if comparable and content != golden.content:
        raise UsageError(
            f"The golden file was written from another checkpoint, '{golden.source}'.",
            remedy="Write one from the checkpoint that was handed over: ckptbridge verify PT --golden FILE.",
            file=path,
        )
    return comparable


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
            content=metadata["content"],
            source=metadata["source"],
            versions=json.loads(metadata["versions"]),
        )
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        raise FormatError(
            "This is not a golden file.", remedy="Write one with 'ckptbridge verify PT --golden FILE'.", file=path
        ) from None
