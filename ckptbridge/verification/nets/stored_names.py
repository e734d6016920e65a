"""The names and storage orders of decoders' weights, a :class:`Layout` for each network that reads them.

Sources: transformers 5.24 and the code published beside the weights (``HF``); MindFormers 2.1.0's
training networks (``MINDFORMERS``); its ``models/llama`` and ``models/glm2``, and ``models/gpt2`` and
``research/internlm2`` of its versions 1.x (``LEGACY...``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptbridge.verification.nets.layout import Layout

LLAMA = Layout()

HF: Mapping[str, Layout] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "mixtral": replace(
        LLAMA,
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{e}.",
        expert_parts=("w1", "w3", "w2"),
    ),
    "qwen2_moe": replace(LLAMA, shared="mlp.shared_expert."),
    "qwen3_moe": LLAMA,
    "deepseek_v2": LLAMA,
    "deepseek_v3": LLAMA,
    "glm4": replace(LLAMA, gate_up=("gate_up_proj",), gate_up_order="halves"),
    "glm4_moe": LLAMA,
    "phi3": replace(
        LLAMA,
        qkv=("self_attn.qkv_proj",),
        qkv_order="contiguous",
        gate_up=("gate_up_proj",),
        gate_up_order="halves",
    ),
    "baichuan": replace(LLAMA, qkv=("self_attn.W_pack",), qkv_order="contiguous"),
    "internlm2": replace(
        LLAMA,
        embedding="{root}tok_embeddings.weight",
        head="output",
        input_norm="attention_norm",
        mlp_norm="ffn_norm",
        qkv=("attention.wqkv",),
        qkv_order="grouped",
        out="attention.wo",
        mlp="feed_forward.",
        gate_up=("w1", "w3"),
        down="w2",
    ),
    "chatglm": replace(
        LLAMA,
        roots=("transformer.", ""),
        embedding="{root}embedding.word_embeddings.weight",
        final_norm="{root}encoder.final_layernorm",
        head="{root}output_layer",
        layer="{root}encoder.layers.{i}.",
        qkv=("self_attention.query_key_value",),
        qkv_order="contiguous",
        out="self_attention.dense",
        gate_up=("dense_h_to_4h",),
        gate_up_order="halves",
        down="dense_4h_to_h",
    ),
    # Each head holds its own q, k and v: groups of one query head.
    "gpt_neox": replace(
        LLAMA,
        roots=("gpt_neox.", ""),
        embedding="{root}embed_in.weight",
        final_norm="{root}final_layer_norm",
        head="embed_out",
        qkv=("attention.query_key_value",),
        qkv_order="grouped",
        out="attention.dense",
        gate_up=("dense_h_to_4h",),
        gate_up_order="plain",
        down="dense_4h_to_h",
    ),
    "gpt2": replace(
        LLAMA,
        roots=("transformer.", ""),
        embedding="{root}wte.weight",
        positions="{root}wpe.weight",
        final_norm="{root}ln_f",
        layer="{root}h.{i}.",
        input_norm="ln_1",
        mlp_norm="ln_2",
        qkv=("attn.c_attn",),
        qkv_order="contiguous",
        out="attn.c_proj",
        gate_up=("c_fc",),
        gate_up_order="plain",
        down="c_proj",
        transposed=frozenset({"qkv", "out", "mlp"}),
    ),
}

MINDFORMERS = Layout(
    embedding="embedding.word_embeddings.weight",
    final_norm="decoder.final_layernorm",
    head="output_layer",
    roots=("",),
    layer="decoder.layers.{i}.",
    mlp_norm="pre_mlp_layernorm",
    qkv=("self_attention.linear_qkv",),
    qkv_order="grouped",
    out="self_attention.linear_proj",
    q_norm="self_attention.q_layernorm",
    k_norm="self_attention.k_layernorm",
    q_direct="self_attention.linear_q_proj",
    q_down="self_attention.linear_q_down_proj",
    q_down_norm="self_attention.q_layernorm",
    q_up="self_attention.linear_q_up_proj",
    kv_down="self_attention.linear_kv_down_proj",
    kv_down_norm="self_attention.kv_layernorm",
    kv_up="self_attention.linear_kv_up_proj",
    gate_up=("linear_fc1",),
    gate_up_order="rows",
    down="linear_fc2",
    experts_order="2d",
    router="mlp.router",
    router_bias="mlp.router.expert_bias",
    shared_gate="mlp.shared_experts.shared_experts_gate",
)

LEGACY = Layout(
    embedding="model.tok_embeddings.embedding_weight",
    final_norm="model.norm_out",
    roots=("",),
    layer="model.layers.{i}.",
    input_norm="attention_norm",
    mlp_norm="ffn_norm",
    qkv=("attention.wq", "attention.wk", "attention.wv"),
    out="attention.wo",
    q_norm="attention.q_norm",
    k_norm="attention.k_norm",
    mlp="feed_forward.",
    gate_up=("w1", "w3"),
    down="w2",
)

LEGACY_FUSED = replace(
    LEGACY,
    qkv=("attention.w_qkv",),
    qkv_order="grouped",
    gate_up=("w_gate_hidden",),
    gate_up_order="rows",
)
LEGACY_LLAMA_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "internlm2", "baichuan", "phi3")

# Its one projection is called w and has InternLM2's own order; the MLP stays in two.
LEGACY_INTERNLM2_FUSED = replace(LEGACY, qkv=("attention.w",), qkv_order="grouped")

LEGACY_GLM = replace(
    HF["chatglm"].with_root("transformer."),
    embedding="transformer.embedding.embedding_weight",
    roots=("",),
)
LEGACY_GLM_SPLIT = replace(
    LEGACY_GLM,
    qkv=("self_attention.wq", "self_attention.wk", "self_attention.wv"),
    qkv_order="separate",
    gate_up=("dense_left", "dense_right"),
    gate_up_order="separate",
)
LEGACY_GLM_FAMILIES = ("chatglm", "glm4")

# Its q, k and v multiply with a transpose, its other projections without.
LEGACY_GPT2 = Layout(
    embedding="backbone.embedding.word_embedding.embedding_table",
    positions="backbone.embedding.position_embedding.embedding_table",
    final_norm="backbone.layernorm",
    head="head",
    roots=("",),
    layer="backbone.blocks.{i}.",
    input_norm="layernorm1",
    mlp_norm="layernorm2",
    qkv=("attention.dense1", "attention.dense2", "attention.dense3"),
    out="attention.projection",
    mlp="output.",
    gate_up=("mapping",),
    gate_up_order="plain",
    down="projection",
    transposed=frozenset({"out", "mlp"}),
    norm_parts=("gamma", "beta"),
)
