"""The MindSpore side of every target, written out in NumPy by hand: the oracle of the tables.

Each function takes the PyTorch side (name -> array) and gives the MindSpore side (name -> array). Nothing
here knows the table language or the axis notation; loops and slices follow the networks that read the
layout (mindformers 2.1.0, parallel_core/training_graph and models/llama).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from published_models import Config, expert_layers, head_dim, key_value_heads

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]


def expected(target: str, c: Config, options: Mapping[str, str], pt: Arrays, root: str = "model.") -> dict[str, Array]:
    """The MindSpore side of ``target`` in the layout ``options``; tied copies are not in ``pt``."""
    match target:
        case "hf":
            return dict(pt)
        case "flat":
            return {name.replace(".self_attn.", "."): array for name, array in pt.items()}
        case "mindformers":
            return mindformers(c, options, pt, root)
        case "mindformers-legacy":
            return mindformers_legacy(c, options, pt, root)
        case "nn":
            return {nn_name(name): array for name, array in pt.items()}
    raise AssertionError(target)


# --- row orders ------------------------------------------------------------------------------


def qkv_by_group(q: Array, k: Array, v: Array, c: Config) -> Array:
    """For each key/value head: the rows of its query heads, of its key, of its value."""
    g, d = key_value_heads(c), head_dim(c)
    r = c["num_attention_heads"] // g
    rows = []
    for group in range(g):
        rows += [q[group * r * d : (group + 1) * r * d], k[group * d : (group + 1) * d], v[group * d : (group + 1) * d]]
    return np.concatenate(rows)


def row_by_row(gate: Array, up: Array) -> Array:
    """gate's row, up's row, gate's next row ..."""
    joined = np.empty((2 * len(gate), *gate.shape[1:]), gate.dtype)
    joined[0::2], joined[1::2] = gate, up
    return joined


def stacked_experts(experts: list[tuple[Array, Array, Array]], rank: str) -> tuple[Array, Array]:
    """weight1 and weight2 of (gate, up, down) for each expert, as 3-D (experts first) or 2-D."""
    weight1 = np.stack([np.concatenate([gate.T, up.T], axis=1) for gate, up, _ in experts])
    weight2 = np.stack([down.T for _, _, down in experts])
    if rank == "3d":
        return weight1, weight2
    return weight1.reshape(-1, weight1.shape[2]), weight2.reshape(-1, weight2.shape[2])


# --- MindFormers' mcore networks -------------------------------------------------------------


def mindformers(c: Config, options: Mapping[str, str], pt: Arrays, root: str) -> dict[str, Array]:
    """MindFormers' current networks; the options are attention, mlp, experts and mla."""
    ms = {
        "embedding.word_embeddings.weight": pt[f"{root}embed_tokens.weight"],
        "decoder.final_layernorm.weight": pt[f"{root}norm.weight"],
    }
    if "lm_head.weight" in pt:
        ms["output_layer.weight"] = pt["lm_head.weight"]
    own = c["num_hidden_layers"]
    for i, experts in enumerate(expert_layers(c)):
        source = f"{root}layers.{i}."
        layer = {name.removeprefix(source): array for name, array in pt.items() if name.startswith(source)}
        block = {
            "input_layernorm.weight": layer["input_layernorm.weight"],
            "pre_mlp_layernorm.weight": layer["post_attention_layernorm.weight"],
        }
        attention = _mla(options, layer) if "kv_lora_rank" in c else _gqa(c, options, layer)
        block |= {f"self_attention.{name}": array for name, array in attention.items()}
        feed = _experts(c, options, layer) if experts else _feed_forward(options, layer, "mlp.")
        block |= {f"mlp.{name}": array for name, array in feed.items()}
        if i < own:
            ms |= {f"decoder.layers.{i}.{name}": array for name, array in block.items()}
        else:
            ms |= {f"mtp.layers.{i - own}.transformer_layer.{name}": array for name, array in block.items()}
            for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight"):
                ms[f"mtp.layers.{i - own}.{name}"] = layer[name]
            ms[f"mtp.layers.{i - own}.final_layernorm.weight"] = layer["shared_head.norm.weight"]
    return ms


def _gqa(c: Config, options: Mapping[str, str], layer: Arrays) -> dict[str, Array]:
    block = {"linear_proj.weight": layer["self_attn.o_proj.weight"]}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in layer:
            q, k, v = (layer[f"self_attn.{x}_proj.{kind}"] for x in "qkv")
            contiguous = options["attention"] == "contiguous"
            block[f"linear_qkv.{kind}"] = np.concatenate([q, k, v]) if contiguous else qkv_by_group(q, k, v, c)
    if "self_attn.o_proj.bias" in layer:
        block["linear_proj.bias"] = layer["self_attn.o_proj.bias"]
    if "self_attn.q_norm.weight" in layer:
        block["q_layernorm.weight"] = layer["self_attn.q_norm.weight"]
        block["k_layernorm.weight"] = layer["self_attn.k_norm.weight"]
    return block


def _mla(options: Mapping[str, str], layer: Arrays) -> dict[str, Array]:
    a = {name.removeprefix("self_attn."): array for name, array in layer.items() if name.startswith("self_attn.")}
    block = {"linear_proj.weight": a["o_proj.weight"]}
    low_rank = "q_a_proj.weight" in a
    first = a["q_a_proj.weight"] if low_rank else a["q_proj.weight"]
    if low_rank:
        block["q_layernorm.weight"] = a["q_a_layernorm.weight"]
    if options["mla"] == "fused":
        block["linear_qkv.weight"] = np.concatenate([first, a["kv_a_proj_with_mqa.weight"]])
        if low_rank:
            block["linear_qb.weight"] = a["q_b_proj.weight"]
        block["k_layernorm.weight"] = a["kv_a_layernorm.weight"]
        block["linear_kvb.weight"] = a["kv_b_proj.weight"]
        return block
    block["linear_q_down_proj.weight" if low_rank else "linear_q_proj.weight"] = first
    if low_rank:
        block["linear_q_up_proj.weight"] = a["q_b_proj.weight"]
    block["linear_kv_down_proj.weight"] = a["kv_a_proj_with_mqa.weight"]
    block["kv_layernorm.weight"] = a["kv_a_layernorm.weight"]
    block["linear_kv_up_proj.weight"] = a["kv_b_proj.weight"]
    return block


def _feed_forward(options: Mapping[str, str], layer: Arrays, prefix: str) -> dict[str, Array]:
    block = {}
    for kind in ("weight", "bias"):
        if f"{prefix}gate_proj.{kind}" in layer:
            gate, up = layer[f"{prefix}gate_proj.{kind}"], layer[f"{prefix}up_proj.{kind}"]
            contiguous = options["mlp"] == "contiguous"
            block[f"linear_fc1.{kind}"] = np.concatenate([gate, up]) if contiguous else row_by_row(gate, up)
            block[f"linear_fc2.{kind}"] = layer[f"{prefix}down_proj.{kind}"]
    return block


def _experts(c: Config, options: Mapping[str, str], layer: Arrays) -> dict[str, Array]:
    if c["model_type"] == "mixtral":
        prefix, (gate, up, down), count = "block_sparse_moe.", ("w1", "w3", "w2"), c["num_local_experts"]
    else:
        count = c["num_experts"] if "num_experts" in c else c["n_routed_experts"]
        prefix, (gate, up, down) = "mlp.", ("gate_proj", "up_proj", "down_proj")
    triples = []
    for k in range(count):
        one = [layer[f"{prefix}experts.{k}.{name}.weight"] for name in (gate, up, down)]
        triples.append((one[0], one[1], one[2]))
    weight1, weight2 = stacked_experts(triples, options["experts"])
    block = {
        "router.weight": layer[f"{prefix}gate.weight"],
        "experts.weight1": weight1,
        "experts.weight2": weight2,
    }
    if "mlp.gate.e_score_correction_bias" in layer:
        block["router.expert_bias"] = layer["mlp.gate.e_score_correction_bias"]
    shared = {
        "qwen2_moe": "mlp.shared_expert.",
        "deepseek_v2": "mlp.shared_experts.",
        "deepseek_v3": "mlp.shared_experts.",
    }
    if c["model_type"] in shared:
        feed = _feed_forward(options, layer, shared[c["model_type"]])
        block |= {f"shared_experts.{name}": array for name, array in feed.items()}
    if "mlp.shared_expert_gate.weight" in layer:
        block["shared_experts.shared_experts_gate.weight"] = layer["mlp.shared_expert_gate.weight"]
    return block


# --- MindFormers' older networks -------------------------------------------------------------


def mindformers_legacy(c: Config, options: Mapping[str, str], pt: Arrays, root: str) -> dict[str, Array]:
    """MindFormers' LlamaForCausalLM; option qkv."""
    ms = {
        "model.tok_embeddings.embedding_weight": pt[f"{root}embed_tokens.weight"],
        "model.norm_out.weight": pt[f"{root}norm.weight"],
    }
    if "lm_head.weight" in pt:
        ms["lm_head.weight"] = pt["lm_head.weight"]
    fused = options["qkv"] == "fused"
    for i in range(c["num_hidden_layers"]):
        a, m = f"{root}layers.{i}.self_attn.", f"{root}layers.{i}.mlp."
        layer = f"model.layers.{i}."
        ms[layer + "attention_norm.weight"] = pt[f"{root}layers.{i}.input_layernorm.weight"]
        ms[layer + "ffn_norm.weight"] = pt[f"{root}layers.{i}.post_attention_layernorm.weight"]
        for kind in ("weight", "bias"):
            if f"{a}q_proj.{kind}" in pt:
                q, k, v = (pt[f"{a}{x}_proj.{kind}"] for x in "qkv")
                if fused:
                    ms[f"{layer}attention.w_qkv.{kind}"] = qkv_by_group(q, k, v, c)
                else:
                    ms |= {f"{layer}attention.w{x}.{kind}": y for x, y in zip("qkv", (q, k, v), strict=True)}
            if f"{a}o_proj.{kind}" in pt:
                ms[f"{layer}attention.wo.{kind}"] = pt[f"{a}o_proj.{kind}"]
        gate, up = pt[m + "gate_proj.weight"], pt[m + "up_proj.weight"]
        if fused:
            ms[layer + "feed_forward.w_gate_hidden.weight"] = row_by_row(gate, up)
        else:
            ms |= {layer + "feed_forward.w1.weight": gate, layer + "feed_forward.w3.weight": up}
        ms[layer + "feed_forward.w2.weight"] = pt[m + "down_proj.weight"]
    return ms


# --- networks of mindspore.nn layers ---------------------------------------------------------


def nn_name(name: str) -> str:
    """BERT's and RoBERTa's names with mindspore.nn's last component."""
    owner, _, last = name.rpartition(".")
    module = owner.rpartition(".")[2]
    if module in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
        return f"{owner}.embedding_table"
    if module in ("LayerNorm", "layer_norm"):
        return f"{owner}.{'gamma' if last in ('weight', 'gamma') else 'beta'}"
    return name
