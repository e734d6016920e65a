"""Families whose PyTorch code is published beside the weights: internlm2, baichuan, chatglm.

transformers has no class of their names. Two are Llama with fused weights, and chatglm is transformers'
GLM with fused weights, so those models give the reference; Baichuan-13B's ALiBi is written out here.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ms = pytest.importorskip("mindspore")
pytest.importorskip("transformers")

import torch  # noqa: E402

from ckptbridge.verify.sides import mindspore as ms_side  # noqa: E402
from ckptbridge.verify.sides import pytorch as pt_side  # noqa: E402

_spec = importlib.util.spec_from_file_location("nets_oracle", Path(__file__).with_name("nets_oracle.py"))
oracle = importlib.util.module_from_spec(_spec)
sys.modules.setdefault("nets_oracle", oracle)
_spec.loader.exec_module(oracle)

EXACT, WRONG = 1e-9, 1e-3
TOKENS = np.random.default_rng(4).integers(0, 97, (2, 40))
Weights = dict[str, np.ndarray]


def reference(name: str, folder: Path) -> tuple[dict[str, Any], Weights, np.ndarray]:
    config = oracle.save_model(name, folder)
    return config, oracle.read(folder), pt_side.load(folder).forward(TOKENS).logits


def logits(folder: Path, weights: Weights, config: dict[str, Any], target: str = "hf", **layout: str) -> np.ndarray:
    path = folder / "model.ckpt"
    path.unlink(missing_ok=True)
    tensors = {name: ms.Tensor(np.ascontiguousarray(value)) for name, value in weights.items()}
    ms.save_checkpoint([{"name": name, "data": tensor} for name, tensor in tensors.items()], str(path))
    return ms_side.load(path, config, target, layout).forward(TOKENS).logits


def internlm2(llama: Weights, groups: int, dim: int) -> Weights:
    out: Weights = {}
    for name, value in llama.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            k, v = (llama[name.replace("q_proj", f"{p}_proj")] for p in "kv")
            value = oracle.grouped(value, k, v, groups, dim)
        for old, new in (
            ("embed_tokens", "tok_embeddings"),
            ("lm_head", "output"),
            ("self_attn.q_proj", "attention.wqkv"),
            ("self_attn.o_proj", "attention.wo"),
            ("mlp.gate_proj", "feed_forward.w1"),
            ("mlp.up_proj", "feed_forward.w3"),
            ("mlp.down_proj", "feed_forward.w2"),
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "ffn_norm"),
        ):
            name = name.replace(old, new)
        out[name] = value
    return out


def baichuan(llama: Weights) -> Weights:
    out = {name: value for name, value in llama.items() if ".k_proj." not in name and ".v_proj." not in name}
    for name in [n for n in out if ".q_proj." in n]:
        parts = [llama[name.replace("q_proj", f"{p}_proj")] for p in "qkv"]
        out[name.replace("q_proj", "W_pack")] = np.concatenate(parts)
        del out[name]
    return out


def chatglm(glm: Weights) -> Weights:
    out: Weights = {}
    for name, value in glm.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            value = np.concatenate([glm[name.replace("q_proj", f"{p}_proj")] for p in "qkv"])
        for old, new in (
            ("model.embed_tokens", "transformer.embedding.word_embeddings"),
            ("model.norm", "transformer.encoder.final_layernorm"),
            ("lm_head", "transformer.output_layer"),
            ("model.layers", "transformer.encoder.layers"),
            ("self_attn.q_proj", "self_attention.query_key_value"),
            ("self_attn.o_proj", "self_attention.dense"),
            ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ):
            name = name.replace(old, new)
        out[name] = value
    out["transformer.rotary_pos_emb.inv_freq"] = np.ones(4, np.float32)
    return out


def test_internlm2(tmp_path: Path) -> None:
    config, llama, expected = reference("llama-linear", tmp_path)
    config = {**config, "model_type": "internlm2", "bias": False, "head_dim": None}
    weights = internlm2(llama, 2, 8)
    assert np.abs(logits(tmp_path, weights, config) - expected).max() < EXACT
    for name in [n for n in weights if ".wqkv." in n]:  # rows as baichuan has them
        q, k, v = (llama[name.replace("attention.wqkv", f"self_attn.{p}_proj")] for p in "qkv")
        weights[name] = np.concatenate([q, k, v])
    assert np.abs(logits(tmp_path, weights, config) - expected).max() > WRONG


def test_baichuan_7b(tmp_path: Path) -> None:
    oracle.MODELS["mha"] = ("Llama", {**oracle.BASE, "num_attention_heads": 6})
    config, llama, expected = reference("mha", tmp_path)
    config = {**config, "model_type": "baichuan"}
    assert np.abs(logits(tmp_path, baichuan(llama), config) - expected).max() < EXACT
    # Baichuan 2 divides the head's rows by their lengths.
    rows = llama["lm_head.weight"].astype(np.float64)
    hidden = np.linalg.lstsq(rows, expected.reshape(-1, 97).T, rcond=None)[0].T
    normalised = hidden @ (rows / np.sqrt((rows**2).sum(1, keepdims=True))).T
    found = logits(tmp_path, baichuan(llama), {**config, "z_loss_weight": 0})
    assert np.abs(found.reshape(-1, 97) - normalised).max() < EXACT


@pytest.mark.parametrize("heads", [4, 6])
def test_baichuan_13b_alibi(tmp_path: Path, heads: int) -> None:
    """Against the published forward written out: no rotation, a slope per head times the distance."""
    rng = np.random.default_rng(6)
    hidden, width, vocab = 48, 56, 97
    weights: Weights = {
        "model.embed_tokens.weight": rng.normal(size=(vocab, hidden)),
        "model.norm.weight": rng.uniform(0.5, 1.5, hidden),
        "lm_head.weight": rng.normal(size=(vocab, hidden)) * 0.2,
    }
    for i in range(2):
        at = f"model.layers.{i}."
        weights |= {
            f"{at}input_layernorm.weight": rng.uniform(0.5, 1.5, hidden),
            f"{at}post_attention_layernorm.weight": rng.uniform(0.5, 1.5, hidden),
            f"{at}self_attn.W_pack.weight": rng.normal(size=(3 * hidden, hidden)) * 0.2,
            f"{at}self_attn.o_proj.weight": rng.normal(size=(hidden, hidden)) * 0.2,
            f"{at}mlp.gate_proj.weight": rng.normal(size=(width, hidden)) * 0.2,
            f"{at}mlp.up_proj.weight": rng.normal(size=(width, hidden)) * 0.2,
            f"{at}mlp.down_proj.weight": rng.normal(size=(hidden, width)) * 0.2,
        }
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    config = {
        "model_type": "baichuan",
        "architectures": ["BaichuanForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "rms_norm_eps": 1e-6,
        "model_max_length": 64,
        "hidden_act": "silu",
    }
    slopes = [2.0 ** (-8.0 * (k + 1) / 4) for k in range(4)]
    if heads == 6:  # the first four, then every other one of the series for eight
        slopes += [2.0 ** -(k + 1) for k in range(0, 8, 2)][:2]
    w = {name: torch.from_numpy(value).double() for name, value in weights.items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w[f"{name}.weight"]

    expected = []
    for row in TOKENS:
        x = w["model.embed_tokens.weight"][torch.from_numpy(row)]
        for i in range(2):
            at, h = f"model.layers.{i}.", norm(x, f"model.layers.{i}.input_layernorm")
            q, k, v = (h @ w[f"{at}self_attn.W_pack.weight"].T).chunk(3, -1)
            dim, mixed = hidden // heads, []
            for n in range(heads):
                cut = slice(n * dim, (n + 1) * dim)
                scores = q[:, cut] @ k[:, cut].T / math.sqrt(dim)
                distance = torch.arange(40)[None, :] - torch.arange(40)[:, None]
                scores = (scores + slopes[n] * distance).masked_fill(distance > 0, -math.inf)
                mixed.append(scores.softmax(-1) @ v[:, cut])
            x = x + torch.cat(mixed, -1) @ w[f"{at}self_attn.o_proj.weight"].T
            h = norm(x, f"{at}post_attention_layernorm")
            gate = h @ w[f"{at}mlp.gate_proj.weight"].T
            x = x + (gate * gate.sigmoid() * (h @ w[f"{at}mlp.up_proj.weight"].T)) @ w[f"{at}mlp.down_proj.weight"].T
        expected.append((norm(x, "model.norm") @ w["lm_head.weight"].T).numpy())
    assert np.abs(logits(tmp_path, weights, config) - np.stack(expected)).max() < EXACT


def test_chatglm(tmp_path: Path) -> None:
    glm_config, glm, expected = reference("glm", tmp_path)
    config = {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "padded_vocab_size": 97,
        "hidden_size": 48,
        "num_layers": 2,
        "num_attention_heads": 6,
        "kv_channels": 16,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "ffn_hidden_size": 56,
        "layernorm_epsilon": glm_config["rms_norm_eps"],
        "rmsnorm": True,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "rope_ratio": glm_config["rope_parameters"]["rope_theta"] / 10000.0,
    }
    assert np.abs(logits(tmp_path, chatglm(glm), config) - expected).max() < EXACT


def test_fused_families_in_mindformers_names(tmp_path: Path) -> None:
    """Their weights, split, are Llama's: the target's network reads them the same way."""
    config, llama, expected = reference("llama-linear", tmp_path)
    config = {**config, "model_type": "internlm2", "bias": False, "head_dim": None}
    weights = oracle.mindformers(llama, config)
    assert np.abs(logits(tmp_path, weights, config, "mindformers") - expected).max() < EXACT
