"""Each layout's network against transformers, on random weights laid out by formulas of their own.

float64 on both sides: a network that reads its layout rightly agrees to rounding, a wrong one does not.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ms = pytest.importorskip("mindspore")
pytest.importorskip("transformers")

from ckptbridge.verification.sides import mindspore as ms_side  # noqa: E402
from ckptbridge.verification.sides import pytorch as pt_side  # noqa: E402
from ckptbridge.verification.sides.stages import Stages  # noqa: E402

_spec = importlib.util.spec_from_file_location("nets_oracle", Path(__file__).with_name("nets_oracle.py"))
oracle = importlib.util.module_from_spec(_spec)
sys.modules["nets_oracle"] = oracle
_spec.loader.exec_module(oracle)

EXACT, WRONG = 1e-9, 1e-3
TOKENS = np.random.default_rng(3).integers(0, 97, (2, 40))
GATED = ["llama", "llama-biased", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "glm4", "glm4_moe"]
LATENT = ["deepseek_v2", "deepseek_v3", "deepseek_v3-plain"]


class Models:
    """The random models on disk and their PyTorch stages, each made once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.get = cache(self._get)

    def _get(self, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray], Stages]:
        folder = self.root / name
        config = oracle.save_model(name, folder)
        return config, oracle.read(folder), pt_side.load(folder).forward(TOKENS)

    def save(self, name: str, weights: dict[str, np.ndarray]) -> Path:
        path = self.root / f"{name}.ckpt"
        path.unlink(missing_ok=True)
        ms.save_checkpoint(
            [{"name": k, "data": ms.Tensor(np.ascontiguousarray(v))} for k, v in weights.items()], str(path)
        )
        return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def worst(pt: Stages, found: Stages) -> float:
    """The largest difference of any stage; both sides must have the same stages in the same order."""
    assert list(pt.values) == list(found.values)
    return max(float(np.abs(pt.values[stage] - found.values[stage]).max()) for stage in pt.values)


@pytest.mark.parametrize("name", [n for n in oracle.MODELS if n != "glm"])
def test_hf(models: Models, name: str) -> None:
    config, published, pt = models.get(name)
    assert np.abs(pt.logits).max() > 0.1
    side = ms_side.load(models.save(name, published), config, "hf")
    assert worst(pt, side.forward(TOKENS)) < EXACT
    assert set(side.names) == set(published) and side.unused == ()


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2_moe", "deepseek_v3"])
def test_flat(models: Models, name: str) -> None:
    config, published, pt = models.get(name)
    side = ms_side.load(models.save(name, oracle.flat(published)), config, "flat")
    assert worst(pt, side.forward(TOKENS)) < EXACT


ORDERS = [(name, order, order) for name in GATED for order in ("interleaved", "contiguous")]


@pytest.mark.parametrize(
    ("name", "attention", "mlp"),
    [*ORDERS, ("qwen3", "interleaved", "contiguous"), ("qwen3", "contiguous", "interleaved")],
)
def test_mindformers(models: Models, name: str, attention: str, mlp: str) -> None:
    config, published, pt = models.get(name)
    experts = "2d" if mlp == "interleaved" else "3d"
    layout = {"attention": attention, "mlp": mlp, "experts": experts}
    path = models.save(name, oracle.mindformers(published, config, **layout))
    assert worst(pt, ms_side.load(path, config, "mindformers", layout).forward(TOKENS)) < EXACT


@pytest.mark.parametrize("mla", ["separate", "fused"])
@pytest.mark.parametrize("name", LATENT)
def test_mindformers_latent_attention(models: Models, name: str, mla: str) -> None:
    config, published, pt = models.get(name)
    path = models.save(name, oracle.mindformers(published, config, mla=mla))
    assert worst(pt, ms_side.load(path, config, "mindformers", {"mla": mla}).forward(TOKENS)) < EXACT


@pytest.mark.parametrize("qkv", ["split", "fused"])
@pytest.mark.parametrize("name", ["llama", "llama-biased", "mistral", "qwen2"])
def test_legacy(models: Models, name: str, qkv: str) -> None:
    config, published, pt = models.get(name)
    path = models.save(name, oracle.legacy(published, config, qkv == "fused"))
    assert worst(pt, ms_side.load(path, config, "mindformers-legacy", {"qkv": qkv}).forward(TOKENS)) < EXACT


@pytest.mark.parametrize("written", [{"attention": "contiguous"}, {"mlp": "contiguous"}])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_row_order_that_is_not_the_declared_one_shows(models: Models, name: str, written: dict[str, str]) -> None:
    config, published, pt = models.get(name)
    path = models.save(name, oracle.mindformers(published, config, **written))
    found = ms_side.load(path, config, "mindformers").forward(TOKENS)
    assert np.abs(pt.logits - found.logits).max() > WRONG


def test_faults_show_at_the_stage_that_reads_them(models: Models) -> None:
    config, published, pt = models.get("qwen3")
    side = ms_side.load(models.save("qwen3", oracle.mindformers(published, config)), config, "mindformers")
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    rows = side.value(name)
    with side.replaced({name: np.concatenate([rows[2:], rows[:2]])}):
        found = side.forward(TOKENS)
    off = [stage for stage in pt.values if np.abs(pt.values[stage] - found.values[stage]).max() > EXACT]
    assert off == ["layers.1.mlp", "layers.1", "final_norm", "logits"]
    assert name in found.feeds["layers.1.mlp"]
    assert worst(pt, side.forward(TOKENS)) < EXACT  # put back
    assert np.abs(side.with_epsilon(1e-2).forward(TOKENS).logits - pt.logits).max() > WRONG
