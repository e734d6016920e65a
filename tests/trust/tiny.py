"""A model of four tensors on both sides, by a table of its own: few calls of the system make a conversion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from checkpoints import random_arrays, save_hf

import ckptbridge

# Two tensors are interleaved, and two keep their bytes.
TABLE = """
schema = 1
family = "tiny"
target = "fused"
[sizes]
h = "width"
o = "2 * width"
v = "vocabulary"
[[rule]]
pt = ["q.weight", "k.weight"]
ms = "qk.weight"
axes = "o h, o h -> (o (1 + 1)) h"
[[rule]]
pt = "embed.weight"
ms = "embedding.table"
axes = "v h"
[[rule]]
pt = "norm.weight"
ms = "norm.gamma"
axes = "h"
"""
CONFIG = {"model_type": "tiny", "width": 24, "vocabulary": 60}
SHAPES = {"embed.weight": (60, 24), "q.weight": (48, 24), "k.weight": (48, 24), "norm.weight": (24,)}


@dataclass(frozen=True)
class Sources:
    """One model on both sides, another one to make former outputs of, and the table between the sides."""

    table: Path
    hf: Path
    ckpt: Path
    other_hf: Path
    other_ckpt: Path


def make_sources(folder: Path) -> Sources:
    """Two models with other values."""
    folder.mkdir()
    table = folder / "tiny.toml"
    table.write_text(TABLE)
    paths = [table]
    for seed in range(2):
        hf = save_hf(folder / f"hf{seed}", random_arrays(SHAPES, seed), CONFIG)
        ckptbridge.convert(hf, folder / f"ms{seed}.ckpt", direction="pt2ms", mapping=table)
        paths += [hf, folder / f"ms{seed}.ckpt"]
    return Sources(*paths)
