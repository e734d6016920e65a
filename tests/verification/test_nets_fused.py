"""Families that fuse weights in an order of their own: internlm2, baichuan, chatglm, glm4, phi3, gpt_neox, gpt2.

transformers has no class for the first three. Two are Llama with fused weights, and chatglm is
transformers' GLM with fused weights, so those models give the reference; Baichuan-13B's ALiBi is
written out here.
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

from ckptbridge.verification.sides import mindspore as ms_side  # noqa: E402
from ckptbridge.verification.sides import pytorch as pt_side  # noqa: E402

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
    llama = unfused(glm, 2, 16)
    legacy = glm_legacy(llama, False)
    assert np.abs(logits(tmp_path, legacy, config, "mindformers-legacy", qkv="split") - expected).max() < EXACT
    assert (
        np.abs(logits(tmp_path, oracle.mindformers(llama, glm_config), config, "mindformers") - expected).max() < EXACT
    )
    flat = {n.replace("dense_left", "gate_proj").replace("dense_right", "up_proj"): v for n, v in legacy.items()}
    for old, new in (
        ("embedding.embedding_weight", "embedding.word_embeddings.weight"),
        ("dense_4h_to_h", "down_proj"),
        ("self_attention.dense", "o_proj"),
        ("self_attention.wq", "q_proj"),
        ("self_attention.wk", "k_proj"),
        ("self_attention.wv", "v_proj"),
    ):
        flat = {n.replace(old, new): v for n, v in flat.items()}
    assert np.abs(logits(tmp_path, flat, config, "flat") - expected).max() < EXACT


# --- their other targets -------------------------------------------------------------------------

INTERNLM2 = {"model_type": "internlm2", "bias": False, "head_dim": None}


def test_internlm2_in_llama_like_layouts(tmp_path: Path) -> None:
    """Its weights, split, are Llama's: these targets' networks read them the same way."""
    config, llama, expected = reference("llama-linear", tmp_path)
    config = {**config, **INTERNLM2}
    split, packed = oracle.legacy(llama, config, False), oracle.legacy(llama, config, True)
    fused = {n: v for n, v in split.items() if ".wq." not in n and ".wk." not in n and ".wv." not in n}
    fused |= {n.replace(".w_qkv.", ".w."): v for n, v in packed.items() if ".w_qkv." in n}
    for target, weights, layout in (
        ("flat", oracle.flat(llama), {}),
        ("mindformers", oracle.mindformers(llama, config), {}),
        ("mindformers-legacy", split, {}),
        ("mindformers-legacy", fused, {"qkv": "fused"}),
    ):
        assert np.abs(logits(tmp_path, weights, config, target, **layout) - expected).max() < EXACT


def unfused(packed: Weights, groups: int, dim: int) -> Weights:
    """Phi-3's, or GLM-4's, weights under Llama's names."""
    out: Weights = {}
    for name, value in packed.items():
        if ".qkv_proj." in name:
            heads = len(value) // dim - 2 * groups
            cuts = np.split(value, [heads * dim, (heads + groups) * dim])
            out |= {name.replace("qkv_proj", f"{p}_proj"): cut for p, cut in zip("qkv", cuts, strict=True)}
        elif ".gate_up_proj." in name:
            gate, up = np.split(value, 2)
            out[name.replace("gate_up_proj", "gate_proj")] = gate
            out[name.replace("gate_up_proj", "up_proj")] = up
        else:
            out[name] = value
    return out


def test_phi3(tmp_path: Path) -> None:
    config, published, expected = reference("phi3", tmp_path)
    llama = unfused(published, 2, 8)
    for target, weights, layout in (
        ("flat", oracle.flat(llama), {}),
        ("mindformers", oracle.mindformers(llama, config), {}),
        ("mindformers-legacy", oracle.legacy(llama, config, True), {"qkv": "fused"}),
    ):
        assert np.abs(logits(tmp_path, weights, config, target, **layout) - expected).max() < EXACT


def glm_legacy(llama: Weights, fused: bool) -> Weights:
    """MindFormers' GLM network, from Llama-like names: contiguous [q; k; v] and [gate; up], or all apart."""
    out: Weights = {}
    for name, value in llama.items():
        for old, new in (
            ("model.embed_tokens.weight", "transformer.embedding.embedding_weight"),
            ("model.norm", "transformer.encoder.final_layernorm"),
            ("lm_head", "transformer.output_layer"),
            ("model.layers", "transformer.encoder.layers"),
            ("self_attn.o_proj", "self_attention.dense"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
            ("self_attn.q_proj", "self_attention.wq"),
            ("self_attn.k_proj", "self_attention.wk"),
            ("self_attn.v_proj", "self_attention.wv"),
            ("mlp.gate_proj", "mlp.dense_left"),
            ("mlp.up_proj", "mlp.dense_right"),
        ):
            name = name.replace(old, new)
        out[name] = value
    if fused:
        for parts, whole in ((("wq", "wk", "wv"), "query_key_value"), (("dense_left", "dense_right"), "dense_h_to_4h")):
            for name in [n for n in out if f".{parts[0]}." in n]:
                rows = [out.pop(name.replace(f".{parts[0]}.", f".{part}.")) for part in parts]
                out[name.replace(f".{parts[0]}.", f".{whole}.")] = np.concatenate(rows)
    return out


def even_rows_first(llama: Weights, dim: int) -> Weights:
    """The rows of each query and key head: 0, 2, 4 ... then 1, 3, 5 ..."""
    order = [*range(0, dim, 2), *range(1, dim, 2)]
    out = dict(llama)
    for name, value in llama.items():
        if ".q_proj." in name or ".k_proj." in name:
            heads = range(len(value) // dim)
            out[name] = np.concatenate([value[n * dim : (n + 1) * dim][order] for n in heads])
    return out


@pytest.mark.parametrize("qkv", ["fused", "split"])
def test_glm_legacy_with_rearranged_rope(tmp_path: Path, qkv: str) -> None:
    config, published, expected = reference("glm4", tmp_path)
    llama = unfused(published, 2, 16)
    layout = {"qkv": qkv, "rope": "halves"}
    weights = glm_legacy(even_rows_first(llama, 16), qkv == "fused")
    assert np.abs(logits(tmp_path, weights, config, "mindformers-legacy", **layout) - expected).max() < EXACT
    weights = glm_legacy(llama, qkv == "fused")
    assert np.abs(logits(tmp_path, weights, config, "mindformers-legacy", **layout) - expected).max() > WRONG


@pytest.mark.parametrize("qkv", ["fused", "split"])
def test_glm4_legacy(tmp_path: Path, qkv: str) -> None:
    config, published, expected = reference("glm4", tmp_path)
    weights = glm_legacy(unfused(published, 2, 16), qkv == "fused")
    assert np.abs(logits(tmp_path, weights, config, "mindformers-legacy", qkv=qkv) - expected).max() < EXACT
    if qkv == "fused":  # the default of this network
        assert np.abs(logits(tmp_path, weights, config, "mindformers-legacy") - expected).max() < EXACT
    flat = oracle.flat(unfused(published, 2, 16))
    assert np.abs(logits(tmp_path, flat, config, "flat") - expected).max() < EXACT


def parts_of(name: str, published: Weights) -> dict[str, Any]:
    """GPT-NeoX's and GPT-2's weights, apart and (out, in): common ones by name, per layer by part."""
    neox = name.startswith("gpt_neox")
    root, layer = ("gpt_neox.", "layers") if neox else ("transformer.", "h")
    names = (
        ("input_layernorm", "post_attention_layernorm", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
        if neox
        else ("ln_1", "ln_2", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    )
    layers = []
    for i in range(2):
        at, one = f"{root}{layer}.{i}.", {}
        for part, stored in zip(("norm1", "norm2", "o", "up", "down"), names, strict=True):
            for kind in ("weight", "bias"):
                value = published[f"{at}{stored}.{kind}"]
                one[f"{part}.{kind}"] = value.T if not neox and value.ndim == 2 else value
        for kind in ("weight", "bias"):
            fused = published[f"{at}{'attention.query_key_value' if neox else 'attn.c_attn'}.{kind}"]
            rows = fused if neox else fused.T
            if neox:  # for each of 6 heads: 8 rows of q, 8 of k, 8 of v
                cuts = [np.concatenate([rows[24 * n + 8 * p : 24 * n + 8 * p + 8] for n in range(6)]) for p in range(3)]
            else:
                cuts = np.split(rows, 3)
            one |= {f"{p}.{kind}": cut for p, cut in zip("qkv", cuts, strict=True)}
        layers.append(one)
    final = f"{root}{'final_layer_norm' if neox else 'ln_f'}"
    return {
        "word": published[f"{root}{'embed_in' if neox else 'wte'}.weight"],
        "position": None if neox else published[f"{root}wpe.weight"],
        "final.weight": published[f"{final}.weight"],
        "final.bias": published[f"{final}.bias"],
        "head": published.get("embed_out.weight"),
        "layers": layers,
    }


@pytest.mark.parametrize("attention", ["interleaved", "contiguous"])
@pytest.mark.parametrize("name", ["gpt_neox", "gpt2"])
def test_layer_norm_families_in_mindformers(tmp_path: Path, name: str, attention: str) -> None:
    config, published, expected = reference(name, tmp_path)
    p = parts_of(name, published)
    weights = {
        "embedding.word_embeddings.weight": p["word"],
        "decoder.final_layernorm.gamma": p["final.weight"],
        "decoder.final_layernorm.beta": p["final.bias"],
    }
    if p["position"] is not None:
        weights["embedding.position_embeddings.weight"] = p["position"]
    if p["head"] is not None:
        weights["output_layer.weight"] = p["head"]
    for i, one in enumerate(p["layers"]):
        at = f"decoder.layers.{i}."
        for part, stored in (("norm1", "input_layernorm"), ("norm2", "pre_mlp_layernorm")):
            weights[f"{at}{stored}.gamma"] = one[f"{part}.weight"]
            weights[f"{at}{stored}.beta"] = one[f"{part}.bias"]
        for kind in ("weight", "bias"):
            q, k, v = (one[f"{part}.{kind}"] for part in "qkv")
            rows = oracle.grouped(q, k, v, 6, 8) if attention == "interleaved" else np.concatenate([q, k, v])
            weights[f"{at}self_attention.linear_qkv.{kind}"] = rows
            weights[f"{at}self_attention.linear_proj.{kind}"] = one[f"o.{kind}"]
            weights[f"{at}mlp.linear_fc1.{kind}"] = one[f"up.{kind}"]
            weights[f"{at}mlp.linear_fc2.{kind}"] = one[f"down.{kind}"]
    assert np.abs(logits(tmp_path, weights, config, "mindformers", attention=attention) - expected).max() < EXACT


@pytest.mark.parametrize("target", ["flat", "nn"])
@pytest.mark.parametrize("name", ["gpt_neox", "gpt2"])
def test_layer_norm_families_in_other_layouts(tmp_path: Path, name: str, target: str) -> None:
    config, published, expected = reference(name, tmp_path)
    weights: Weights = {}
    for stored, value in published.items():
        conv1d = name == "gpt2" and value.ndim == 2 and ".h." in stored
        value = value.T if conv1d else value
        if target == "nn":
            if stored.endswith(("wte.weight", "wpe.weight", "embed_in.weight")):
                stored = stored.removesuffix("weight") + "embedding_table"
            elif "ln_" in stored or "norm" in stored:
                stored = stored.replace(".weight", ".gamma").replace(".bias", ".beta")
        elif ".c_attn." in stored or ".query_key_value." in stored or "attn." in stored or "attention.dense" in stored:
            continue
        weights[stored] = value
    if target == "flat":
        at = "gpt_neox.layers" if name == "gpt_neox" else "transformer.h"
        for i, one in enumerate(parts_of(name, published)["layers"]):
            weights |= {f"{at}.{i}.{p}_proj.{k}": one[f"{p}.{k}"] for p in "qkvo" for k in ("weight", "bias")}
    assert np.abs(logits(tmp_path, weights, config, target) - expected).max() < EXACT


def test_gpt2_legacy(tmp_path: Path) -> None:
    """q, k and v are (out, in); the other projections of this network multiply without a transpose."""
    config, published, expected = reference("gpt2", tmp_path)
    p = parts_of("gpt2", published)
    weights = {
        "backbone.embedding.word_embedding.embedding_table": p["word"],
        "backbone.embedding.position_embedding.embedding_table": p["position"],
        "backbone.layernorm.gamma": p["final.weight"],
        "backbone.layernorm.beta": p["final.bias"],
    }
    for i, one in enumerate(p["layers"]):
        at = f"backbone.blocks.{i}."
        for part, stored in (("norm1", "layernorm1"), ("norm2", "layernorm2")):
            weights |= {f"{at}{stored}.gamma": one[f"{part}.weight"], f"{at}{stored}.beta": one[f"{part}.bias"]}
        for kind in ("weight", "bias"):
            weights |= {
                f"{at}attention.dense{n}.{kind}": one[f"{part}.{kind}"] for n, part in ((1, "q"), (2, "k"), (3, "v"))
            }
            for part, stored in (
                ("o", "attention.projection"),
                ("up", "output.mapping"),
                ("down", "output.projection"),
            ):
                weights[f"{at}{stored}.{kind}"] = one[f"{part}.{kind}"].T
    assert np.abs(logits(tmp_path, weights, config, "mindformers-legacy") - expected).max() < EXACT
