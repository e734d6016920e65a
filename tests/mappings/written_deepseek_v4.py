"""The MindSpore side of DeepSeek-V4, written out in NumPy by hand: the oracle of its table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from published_fused import Config
from written_layouts import row_by_row, stacked_experts

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]

# What stands in a layer, and what MindFormers calls it (mindformers 2.1.0, models/deepseek4).
V4_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "pre_mlp_layernorm.weight",
    "attn.wq_a.weight": "self_attention.linear_q_down_proj.weight",
    "attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "attn.wq_b.weight": "self_attention.linear_q_up_proj.weight",
    "attn.wkv.weight": "self_attention.linear_kv_proj.weight",
    "attn.kv_norm.weight": "self_attention.kv_layernorm.weight",
    "attn.norm.weight": "self_attention.kv_layernorm.weight",
    "attn.wo_a.weight": "self_attention.linear_o_group_proj",
    "attn.wo_b.weight": "self_attention.linear_proj.weight",
    "attn.attn_sink": "self_attention.core_attention.attn_sink",
    "attn.compressor.ape": "self_attention.core_attention.compressor.ape",
    "attn.compressor.wkv.weight": "self_attention.core_attention.compressor.linear_wkv.weight",
    "attn.compressor.wgate.weight": "self_attention.core_attention.compressor.linear_wgate.weight",
    "attn.compressor.norm.weight": "self_attention.core_attention.compressor.norm.weight",
    "attn.indexer.wq_b.weight": "self_attention.core_attention.indexer.linear_wq_b.weight",
    "attn.indexer.weights_proj.weight": "self_attention.core_attention.indexer.linear_weights_proj.weight",
    "attn.indexer.compressor.ape": "self_attention.core_attention.indexer.compressor.ape",
    "attn.indexer.compressor.wkv.weight": "self_attention.core_attention.indexer.compressor.linear_wkv.weight",
    "attn.indexer.compressor.wgate.weight": "self_attention.core_attention.indexer.compressor.linear_wgate.weight",
    "attn.indexer.compressor.norm.weight": "self_attention.core_attention.indexer.compressor.norm.weight",
    "ffn.gate.weight": "mlp.router.weight",
    "ffn.gate.bias": "mlp.expert_bias",
    "ffn.gate.tid2eid": "mlp.router.tid2eid",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.linear_fc2.weight",
    "hc_attn_fn": "attn_hc.mapping_proj.weight",
    "hc_attn_base": "attn_hc.bias",
    "hc_ffn_fn": "ffn_hc.mapping_proj.weight",
    "hc_ffn_base": "ffn_hc.bias",
}
V4_OUTER = {
    "embed.weight": "embedding.word_embeddings.weight",
    "embed_tokens.weight": "embedding.word_embeddings.weight",
    "head.weight": "output_layer.weight",
    "norm.weight": "decoder.final_layernorm.weight",
}


def deepseek_v4(c: Config, options: Mapping[str, str], pt: Arrays, root: str) -> dict[str, Array]:
    """MindFormers' PyNative network; options mlp and experts."""
    ms: dict[str, Array] = {}
    blocks: dict[str, dict[str, Array]] = {}
    for name, array in pt.items():
        plain = name.removeprefix(root)
        first, _, rest = plain.partition(".")
        if first in ("layers", "mtp"):
            index, _, inner = rest.partition(".")
            block = f"decoder.layers.{index}." if first == "layers" else f"mtp.layers.{index}."
            blocks.setdefault(block, {})[inner] = array
        elif plain in V4_OUTER:
            ms[V4_OUTER[plain]] = array
        else:
            what = plain.removeprefix("hc_head.hc_").removeprefix("hc_head_")
            ms["decoder.hc_head.hc_fn.weight" if what == "fn" else f"decoder.hc_head.hc_{what}"] = array
    for outer, block in blocks.items():
        prefix = outer if outer.startswith("decoder.") else outer + "transformer_layer."
        ms |= {prefix + name: array for name, array in v4_block(c, options, block).items()}
        if prefix != outer:
            ms |= {outer + name: array for name, array in v4_prediction(block).items()}
    return ms


def v4_block(c: Config, options: Mapping[str, str], block: dict[str, Array]) -> dict[str, Array]:
    """A layer; what it uses is taken out of ``block``."""
    found = {V4_LAYER[name]: block.pop(name) for name in list(block) if name in V4_LAYER}
    for part in ("attn", "ffn"):
        scale = block.pop(f"hc_{part}_scale")
        found |= {
            f"{part}_hc.alpha_pre": scale[:1],
            f"{part}_hc.alpha_post": scale[1:2],
            f"{part}_hc.alpha_res": scale[2:],
        }
    triples = []
    for k in range(c["n_routed_experts"]):
        gate, up, down = (block.pop(f"ffn.experts.{k}.{name}.weight") for name in ("w1", "w3", "w2"))
        triples.append((gate, up, down))
    weight1, weight2 = stacked_experts(triples, options["experts"])
    gate, up = (block.pop(f"ffn.shared_experts.{name}.weight") for name in ("w1", "w3"))
    shared = np.concatenate([gate, up]) if options["mlp"] == "contiguous" else row_by_row(gate, up)
    found |= {"mlp.experts.weight1": weight1, "mlp.experts.weight2": weight2}
    return found | {"mlp.shared_experts.linear_fc1.weight": shared}


def v4_prediction(block: Arrays) -> dict[str, Array]:
    """What only a multi-token prediction layer has."""
    return {
        "enorm.weight": block["enorm.weight"],
        "hnorm.weight": block["hnorm.weight"],
        "final_layernorm.weight": block["norm.weight"],
        "eh_proj.weight": np.hstack([block["e_proj.weight"], block["h_proj.weight"]]),
        "hc_head.hc_fn.weight": block["hc_head_fn"],
        "hc_head.hc_base": block["hc_head_base"],
        "hc_head.hc_scale": block["hc_head_scale"],
    }
