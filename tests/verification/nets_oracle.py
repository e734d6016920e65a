"""Tiny random models of transformers, and their weights laid out for each target by formulas written out here.

Nothing of ckptbridge's tables or networks is used: the layouts are loops over heads, groups, rows and
experts, as the networks that read them are documented.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

Weights = dict[str, np.ndarray]

# Sizes: no two axes equal, groups != queries per group, head_dim != hidden / heads where the family allows.
BASE = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2}
GQA = {**BASE, "num_attention_heads": 6, "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MLA = {
    **BASE,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "kv_lora_rank": 14,
    "q_lora_rank": 18,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 12,
    "routed_scaling_factor": 1.7,
}
MOE = {**GQA, "num_experts": 11, "num_experts_per_tok": 3, "moe_intermediate_size": 20}

# name: (prefix of the transformers classes, config values)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**GQA, "head_dim": 10, "rms_norm_eps": 1e-5}),
    "llama-biased": (
        "Llama",
        {
            **GQA,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32},
        },
    ),
    "llama-linear": ("Llama", {**GQA, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama-yarn": ("Llama", {**GQA, "head_dim": 16, "rope_parameters": YARN}),
    "llama-dynamic": (
        "Llama",
        {
            **GQA,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "mistral": ("Mistral", {**GQA, "sliding_window": 7}),
    "qwen2": ("Qwen2", {**GQA, "tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {**GQA, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**GQA, "head_dim": 16, "attention_bias": True}),
    "mixtral": ("Mixtral", {**GQA, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 28, "norm_topk_prob": False}),
    "qwen3_moe": ("Qwen3Moe", {**MOE, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "deepseek_v2": ("DeepseekV2", {**MLA, "topk_method": "group_limited_greedy", "q_lora_rank": None}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **MLA,
            "attention_bias": True,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v3-plain": ("DeepseekV3", {**MLA, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "glm4": ("Glm4", {**GQA, "head_dim": 16, "attention_bias": True, "pad_token_id": 0}),
    "glm4_moe": (
        "Glm4Moe",
        {**GQA, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
        | {"use_qk_norm": True, "attention_bias": True, "pad_token_id": 0, "n_group": 2, "topk_group": 1},
    ),
    "phi3": ("Phi3", {**GQA, "pad_token_id": 0}),
    "phi3-long": (
        "Phi3",
        {
            **GQA,
            "pad_token_id": 0,
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.5, 2.0, 3.0, 4.0],
            },
        },
    ),
    "gpt_neox": ("GPTNeoX", {**BASE, "num_attention_heads": 6}),
    "gpt_neox-serial": (
        "GPTNeoX",
        {**BASE, "num_attention_heads": 6, "use_parallel_residual": False, "hidden_act": "gelu_new"},
    ),
    "gpt2": ("GPT2", {"vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64, "n_inner": 56}),
    "glm": ("Glm", {**GQA, "head_dim": 16, "attention_bias": True, "pad_token_id": 0}),
}


def save_model(name: str, folder: Path) -> dict[str, Any]:
    """Save the random model ``name`` in ``folder`` as published; returns its config.json."""
    prefix, values = MODELS[name]
    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, f"{prefix}Config")(**values)
    head = "LMHeadModel" if prefix == "GPT2" else "ForCausalLM"
    model = getattr(transformers, prefix + head)(config)
    shake(model)
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def shake(model: torch.nn.Module) -> None:
    """Weights that hide nothing: norms away from 1, biases away from 0, projections that keep the signal alive."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(0.0, 0.2)
            elif "inv_freq" in name or not tensor.is_floating_point():
                continue
            elif tensor.ndim == 1 and name.endswith("weight"):
                tensor.uniform_(0.5, 1.5)
            elif tensor.ndim == 1:
                tensor.normal_(0.0, 0.3)
            else:
                tensor.normal_(0.0, 0.2)


def read(folder: Path) -> Weights:
    return load_file(folder / "model.safetensors")


# --- rows --------------------------------------------------------------------------------------


def grouped(q: np.ndarray, k: np.ndarray, v: np.ndarray, groups: int, dim: int) -> np.ndarray:
    """For each group: the rows of its q heads, of its k head, of its v head."""
    ratio = len(q) // (groups * dim)
    rows = []
    for g in range(groups):
        rows.append(q[g * ratio * dim : (g + 1) * ratio * dim])
        rows.append(k[g * dim : (g + 1) * dim])
        rows.append(v[g * dim : (g + 1) * dim])
    return np.concatenate(rows)


def alternating(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Row 2j is gate's j, row 2j + 1 up's j."""
    rows = np.empty((2 * len(gate), *gate.shape[1:]), gate.dtype)
    for j in range(len(gate)):
        rows[2 * j], rows[2 * j + 1] = gate[j], up[j]
    return rows


# --- targets -----------------------------------------------------------------------------------


def flat(published: Weights) -> Weights:
    return {name.replace(".self_attn.", "."): value for name, value in published.items()}


def legacy(published: Weights, config: dict[str, Any], fused: bool) -> Weights:
    """MindFormers' older Llama-style names."""
    out: Weights = {
        "model.tok_embeddings.embedding_weight": published["model.embed_tokens.weight"],
        "model.norm_out.weight": published["model.norm.weight"],
    }
    if "lm_head.weight" in published:
        out["lm_head.weight"] = published["lm_head.weight"]
    groups = config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for i in range(config["num_hidden_layers"]):
        src, dst = f"model.layers.{i}.", f"model.layers.{i}."
        out[dst + "attention_norm.weight"] = published[src + "input_layernorm.weight"]
        out[dst + "ffn_norm.weight"] = published[src + "post_attention_layernorm.weight"]
        for kind in ("weight", "bias"):
            parts = [published.get(f"{src}self_attn.{p}_proj.{kind}") for p in "qkvo"]
            mlp = [published.get(f"{src}mlp.{p}_proj.{kind}") for p in ("gate", "up", "down")]
            if parts[0] is not None:
                if fused:
                    out[f"{dst}attention.w_qkv.{kind}"] = grouped(*parts[:3], groups, dim)
                else:
                    out |= {f"{dst}attention.w{p}.{kind}": part for p, part in zip("qkv", parts[:3], strict=True)}
            if parts[3] is not None:
                out[f"{dst}attention.wo.{kind}"] = parts[3]
            if mlp[0] is not None:
                if fused:
                    out[f"{dst}feed_forward.w_gate_hidden.{kind}"] = alternating(mlp[0], mlp[1])
                else:
                    out[f"{dst}feed_forward.w1.{kind}"], out[f"{dst}feed_forward.w3.{kind}"] = mlp[0], mlp[1]
                out[f"{dst}feed_forward.w2.{kind}"] = mlp[2]
    return out


def mindformers(
    published: Weights,
    config: dict[str, Any],
    attention: str = "interleaved",
    mlp: str = "interleaved",
    experts: str = "2d",
    mla: str = "separate",
) -> Weights:
    """MindFormers' training networks (mcore names)."""
    out: Weights = {
        "embedding.word_embeddings.weight": published["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": published["model.norm.weight"],
    }
    if "lm_head.weight" in published:
        out["output_layer.weight"] = published["lm_head.weight"]
    for i in range(config["num_hidden_layers"]):
        src, dst = f"model.layers.{i}.", f"decoder.layers.{i}."
        layer = {name.removeprefix(src): value for name, value in published.items() if name.startswith(src)}
        new: Weights = {
            "input_layernorm.weight": layer["input_layernorm.weight"],
            "pre_mlp_layernorm.weight": layer["post_attention_layernorm.weight"],
        }
        for name in ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"):
            if name in layer:
                new[name] = layer[name]
        if "self_attn.kv_b_proj.weight" in layer:
            new |= _latent(layer, mla)
        else:
            new |= _grouped_attention(layer, config, attention)
        new |= _feed_forward(layer, mlp)
        if any(name.startswith(("mlp.experts.", "block_sparse_moe.")) for name in layer):
            new |= _experts(layer, experts, mlp)
        out |= {dst + name: value for name, value in new.items()}
    return out


def _grouped_attention(layer: Weights, config: dict[str, Any], order: str) -> Weights:
    groups = config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    new: Weights = {}
    for kind in ("weight", "bias"):
        q, k, v, o = (layer.get(f"self_attn.{p}_proj.{kind}") for p in "qkvo")
        if q is not None:
            rows = grouped(q, k, v, groups, dim) if order == "interleaved" else np.concatenate([q, k, v])
            new[f"self_attention.linear_qkv.{kind}"] = rows
        if o is not None:
            new[f"self_attention.linear_proj.{kind}"] = o
    for p in "qk":
        if f"self_attn.{p}_norm.weight" in layer:
            new[f"self_attention.{p}_layernorm.weight"] = layer[f"self_attn.{p}_norm.weight"]
    return new


def _latent(layer: Weights, order: str) -> Weights:
    at = "self_attn."
    new: Weights = {}
    for kind in ("weight", "bias"):
        direct, q_a = layer.get(f"{at}q_proj.{kind}"), layer.get(f"{at}q_a_proj.{kind}")
        kv_a, out = layer.get(f"{at}kv_a_proj_with_mqa.{kind}"), layer.get(f"{at}o_proj.{kind}")
        if order == "fused" and kv_a is not None:
            new[f"self_attention.linear_qkv.{kind}"] = np.concatenate([direct if q_a is None else q_a, kv_a])
        elif order == "separate":
            for name, value in (("q_proj", direct), ("q_down_proj", q_a), ("kv_down_proj", kv_a)):
                if value is not None:
                    new[f"self_attention.linear_{name}.{kind}"] = value
        if out is not None:
            new[f"self_attention.linear_proj.{kind}"] = out
    if f"{at}q_b_proj.weight" in layer:
        up = "linear_qb" if order == "fused" else "linear_q_up_proj"
        new[f"self_attention.{up}.weight"] = layer[f"{at}q_b_proj.weight"]
        new["self_attention.q_layernorm.weight"] = layer[f"{at}q_a_layernorm.weight"]
    up, norm = ("linear_kvb", "k_layernorm") if order == "fused" else ("linear_kv_up_proj", "kv_layernorm")
    new[f"self_attention.{up}.weight"] = layer[f"{at}kv_b_proj.weight"]
    new[f"self_attention.{norm}.weight"] = layer[f"{at}kv_a_layernorm.weight"]
    return new


def _feed_forward(layer: Weights, order: str) -> Weights:
    """Dense and shared MLPs: ``linear_fc1`` and ``linear_fc2``."""
    new: Weights = {}
    for src, dst in (("mlp.", "mlp."), ("mlp.shared_expert.", "mlp.shared_experts."), ("mlp.shared_experts.",) * 2):
        for kind in ("weight", "bias"):
            gate, up = layer.get(f"{src}gate_proj.{kind}"), layer.get(f"{src}up_proj.{kind}")
            packed = layer.get(f"{src}gate_up_proj.{kind}")
            if packed is not None:
                gate, up = packed[: len(packed) // 2], packed[len(packed) // 2 :]
            if gate is None:
                continue
            rows = alternating(gate, up) if order == "interleaved" else np.concatenate([gate, up])
            new[f"{dst}linear_fc1.{kind}"] = rows
            new[f"{dst}linear_fc2.{kind}"] = layer[f"{src}down_proj.{kind}"]
    if "mlp.shared_expert_gate.weight" in layer:
        new["mlp.shared_experts.shared_experts_gate.weight"] = layer["mlp.shared_expert_gate.weight"]
    return new


def _experts(layer: Weights, rank: str, order: str) -> Weights:
    mixtral = "block_sparse_moe.gate.weight" in layer
    at, parts = (
        ("block_sparse_moe.", ("w1", "w3", "w2")) if mixtral else ("mlp.", ("gate_proj", "up_proj", "down_proj"))
    )
    new: Weights = {"mlp.router.weight": layer[f"{at}gate.weight"]}
    if f"{at}gate.e_score_correction_bias" in layer:
        new["mlp.router.expert_bias"] = layer[f"{at}gate.e_score_correction_bias"]
    first, second, e = [], [], 0
    while f"{at}experts.{e}.{parts[0]}.weight" in layer:
        gate, up, down = (layer[f"{at}experts.{e}.{p}.weight"] for p in parts)
        first.append(np.concatenate([gate.T, up.T], axis=1))
        second.append(down.T)
        e += 1
    join = np.concatenate if rank == "2d" else np.stack
    return {**new, "mlp.experts.weight1": join(first), "mlp.experts.weight2": join(second)}
