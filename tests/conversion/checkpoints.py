"""Checkpoints written and read by the real libraries, never by the code under test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Config = Mapping[str, Any]


def random_arrays(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Array]:
    """Random words, seen as float32 (NaNs with payloads among them); token and id tables are small integers."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Array] = {}
    for name, shape in shapes.items():
        if name.endswith(("tid2eid", "position_ids", "token_type_ids")):
            arrays[name] = rng.integers(0, 11, shape, dtype=np.int64)
        else:
            arrays[name] = rng.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)
    return arrays


def save_hf(folder: Path, arrays: Mapping[str, Array], config: Config) -> Path:
    """A Hugging Face directory with one safetensors file; arrays in C order."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: np.ascontiguousarray(a) for n, a in arrays.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load_ckpt(path: Path) -> dict[str, Array]:
    """The tensors of a .ckpt as mindspore.load_checkpoint gives them."""
    import mindspore

    loaded = mindspore.load_checkpoint(str(path))
    return {name: value.asnumpy() for name, value in loaded.items() if not isinstance(value, str)}


def load_safetensors(path: Path) -> dict[str, Array]:
    """The tensors of a safetensors file, or of all of them in a directory, by the safetensors library."""
    from safetensors.numpy import load_file

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    loaded: dict[str, Array] = {}
    for file in files:
        found = load_file(file)
        assert not loaded.keys() & found.keys()
        loaded |= found
    return loaded


def assert_same_words(got: Mapping[str, Array], want: Mapping[str, Array]) -> None:
    """The same names, dtypes, shapes and bytes."""
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
        assert got[name].tobytes() == array.tobytes(), name


def leftovers(folder: Path) -> list[str]:
    """What an unfinished conversion could have left anywhere below a folder."""
    return sorted(str(p) for p in folder.rglob(".ckptbridge-*"))
