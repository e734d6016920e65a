"""Random tables and random states: planned, run, and reversed, the bytes are what they were."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import leftovers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckptbridge

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8)
INDEX = {"i": 3, "e": 2}


@dataclass
class Drawn:
    """A table as text, the sizes it asks of the config, and the PyTorch side's tensors."""

    rules: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)

    @property
    def table(self) -> str:
        head = 'schema = 1\nfamily = "drawn"\ntarget = "there"\n'
        index = "[index]\n" + "".join(f'{name} = "count_{name}"\n' for name in INDEX)
        sizes = "[sizes]\n" + "".join(f'{name} = "size_{name}"\n' for name in self.sizes)
        return head + index + sizes + "".join(self.rules)

    @property
    def config(self) -> dict[str, int]:
        counts = {f"count_{name}": count for name, count in INDEX.items()}
        return {**counts, **{f"size_{name}": size for name, size in self.sizes.items()}}


def dims(draw: Any, axes: list[str], alone: str | None) -> list[list[str]]:
    """The axes in a random order, cut into dimensions; ``alone`` is one by itself."""
    order = draw(st.permutations([a for a in axes if a != alone]))
    cut: list[list[str]] = []
    for axis in order:
        if cut and draw(st.booleans()):
            cut[-1].append(axis)
        else:
            cut.append([axis])
    if alone is not None:
        cut.insert(draw(st.integers(0, len(cut))), [alone])
    return cut


def written(cut: list[list[str]]) -> str:
    return " ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" for d in cut)


@st.composite
def tables(draw: Any) -> Drawn:
    """Rules that permute, compose, concatenate, enumerate and stack, each in either direction."""
    made = Drawn()
    for k in range(draw(st.integers(1, 4))):
        common = [f"c{k}{n}" for n in range(draw(st.integers(0, 3)))]
        own = [f"p{k}{n}" for n in range(draw(st.integers(1, 3)))]
        made.sizes.update({axis: draw(st.integers(1, 4)) for axis in [*common, *own]})
        numbered, stacked = draw(st.booleans()), draw(st.booleans())
        layer = ".{i}" if numbered else ""
        one = ["e"] if stacked else []
        total = f"({' + '.join(own)})" if len(own) > 1 else own[0]
        parts = [dims(draw, [*common, *one, axis], "e" if stacked else None) for axis in own]
        whole = dims(draw, [*common, *one, total], None)
        names = [f"r{k}{layer}.{n}" + (".{e}" if stacked else "") for n in range(len(own))]
        joined = f"j{k}{layer}"
        many, single = ", ".join(written(part) for part in parts), written(whole)
        fused = draw(st.booleans())  # which side has the one tensor
        pt, ms = (json.dumps(names), json.dumps(joined)) if fused else (json.dumps(joined), json.dumps(names))
        axes = f"{many} -> {single}" if fused else f"{single} -> {many}"
        made.rules.append(f'[[rule]]\npt = {pt}\nms = {ms}\naxes = "{axes}"\n')
        lengths = {**made.sizes, **INDEX, total: sum(made.sizes[a] for a in own)}
        dtype = draw(st.sampled_from(DTYPES))
        sources = zip(names, parts, strict=True) if fused else [(joined, whole)]
        for name, cut in sources:
            # An index that stands in the names is no dimension of the tensors there.
            shape = tuple(int(np.prod([lengths[a] for a in d])) for d in cut if not (fused and d == ["e"]))
            for i in range(INDEX["i"] if numbered else 1):
                for e in range(INDEX["e"] if fused and stacked else 1):
                    made.shapes[name.format(i=i, e=e)] = shape, dtype
    return made


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def load(path: Path) -> dict[str, torch.Tensor]:
    """What the real libraries read from a file, or from all the shards of a directory."""
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".bin"))
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    return found


@pytest.mark.parametrize("there", ["ms.ckpt", "ms.safetensors", "ms"])
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_there_and_back(there: str, data: st.DataObject) -> None:
    drawn = data.draw(tables())
    back = data.draw(st.sampled_from(["pt.safetensors", "pt.bin", "pt"]))
    shards = data.draw(st.integers(16, 400))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    state = {}
    for name, (shape, dtype) in drawn.shapes.items():
        words = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
        state[name] = words.view(dtype).reshape(shape)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "table.toml").write_text(drawn.table)
        (folder / "config.json").write_text(json.dumps(drawn.config))
        options: dict[str, Any] = {"mapping": folder / "table.toml", "config": folder / "config.json"}
        sharded = {"format": "safetensors", "max_shard_size": shards}
        save_file(state, folder / "pt.in.safetensors")
        ckptbridge.convert(
            folder / "pt.in.safetensors",
            folder / there,
            direction="pt2ms",
            **options,
            **(sharded if there == "ms" else {}),
        )
        ckptbridge.convert(
            folder / there, folder / back, direction="ms2pt", **options, **(sharded if back == "pt" else {})
        )
        found = load(folder / back)
        assert found.keys() == state.keys()
        for name, tensor in state.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
            assert raw(found[name]) == raw(tensor), name
        if there != "ms.ckpt":
            # And the bytes are all there in between, whatever their order.
            words = sorted(b for tensor in load(folder / there).values() for b in raw(tensor))
            assert words == sorted(b for tensor in state.values() for b in raw(tensor))
        assert leftovers(folder) == []
