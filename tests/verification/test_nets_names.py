"""Networks and shipped tables, written apart, must name the same tensors with the same shapes.

Real-world configs, cut to a few layers and experts. Multi-token prediction is in the tables alone: the
forward does not compute it.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mindspore")

from ckptbridge.errors import UnsupportedError
from ckptbridge.tables import catalog
from ckptbridge.tables.expand import Expansion, expand
from ckptbridge.verification.nets.families import model_spec
from ckptbridge.verification.sides.mindspore import Network

CONFIGS = sorted((Path(__file__).parents[1] / "data" / "configs").glob("*.json"))
WITHOUT_NETWORK = {"deepseek_v4"}


def cut(config: dict[str, Any]) -> dict[str, Any]:
    """A few layers (of each kind) and experts: every name pattern and every shape stays."""
    most = {"num_hidden_layers": 5, "n_layer": 5, "num_layers": 5}
    most |= {"n_routed_experts": 32, "num_experts": 32, "num_local_experts": 32}
    small = {key: min(value, most[key]) if key in most else value for key, value in config.items()}
    small.pop("layer_types", None)
    return small


def written(expansion: Expansion) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """What the table writes (with shapes), and what may be there or not."""
    always: dict[str, tuple[int, ...]] = {}
    perhaps: set[str] = set()
    for entry in expansion.entries:
        if entry.kind == "map" and not entry.optional:
            assert entry.ms_shapes is not None
            always |= dict(zip(entry.ms, entry.ms_shapes, strict=True))
        else:
            perhaps |= set(entry.ms)
    return always, perhaps


def predicted(name: str, config: dict[str, Any]) -> bool:
    """Whether the tensor belongs to multi-token prediction."""
    layers, extra = int(config.get("num_hidden_layers", 0)), int(config.get("num_nextn_predict_layers") or 0)
    return name.startswith("mtp.") or any(f"layers.{layers + j}." in name for j in range(extra))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_network_reads_what_the_table_writes(path: Path) -> None:
    config = cut(json.loads(path.read_text(encoding="utf-8")))
    model_type = config["model_type"]
    if model_type in WITHOUT_NETWORK:
        with pytest.raises(UnsupportedError, match="no built-in MindSpore forward"):
            model_spec(config)
        return
    spec = model_spec(config)
    for target in catalog.targets(model_type):
        table = catalog.find(model_type, target)
        for values in product(*table.layout.values()):
            layout = dict(zip(table.layout, values, strict=True))
            always, perhaps = written(expand(table, config, layout))
            always = {name: shape for name, shape in always.items() if not predicted(name, config)}
            shapes = Network(target, layout, frozenset(always)).build(spec).shapes()
            assert {n: s for n, s in shapes.items() if n not in perhaps} == always, (target, layout)
