"""How each target names and stores a decoder's weights, as data for the readers.

This is written from the networks that read these checkpoints (transformers and the code published
beside the weights for ``hf``; MindFormers 2.1.0's network classes for ``mindformers`` and
``mindformers-legacy``), and deliberately not from the mapping tables: a forward judges a table only
if it does not come from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ckptbridge.errors import UnsupportedError, UsageError
from ckptbridge.verify.nets.spec import DecoderSpec, LatentAttention


@dataclass(frozen=True, slots=True)
class Layout:
    """Names and storage orders of one decoder's weights.

    Names are without ``.weight`` and ``.bias``, but for those of the two embeddings and the router's
    bias. Names from ``input_norm`` on follow ``layer``. ``qkv`` are three names, or one whose rows are
    [all q; all k; all v] ("contiguous") or, for each key/value group, [its q heads; k; v]
    ("grouped"). ``gate_up`` are two names, or one with rows [gate; up] ("halves") or gate and up in
    turn ("rows"); a plain MLP has one name. ``transposed`` weights are (in, out).
    """

    embedding: str = "{root}embed_tokens.weight"
    final_norm: str = "{root}norm"
    head: str = "lm_head"
    positions: str = ""
    roots: tuple[str, ...] = ("model.", "")
    layer: str = "{root}layers.{i}."
    input_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention_post_norm: str = "post_self_attn_layernorm"
    mlp_post_norm: str = "post_mlp_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_order: Literal["separate", "contiguous", "grouped"] = "separate"
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    # Latent attention. "fused": q_down (or q_direct) and kv_down are the rows of one weight, latent_down.
    latent_order: Literal["separate", "fused"] = "separate"
    q_direct: str = "self_attn.q_proj"
    q_down: str = "self_attn.q_a_proj"
    q_down_norm: str = "self_attn.q_a_layernorm"
    q_up: str = "self_attn.q_b_proj"
    kv_down: str = "self_attn.kv_a_proj_with_mqa"
    kv_down_norm: str = "self_attn.kv_a_layernorm"
    kv_up: str = "self_attn.kv_b_proj"
    latent_down: str = ""
    mlp: str = "mlp."
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    gate_up_order: Literal["separate", "halves", "rows", "plain"] = "separate"
    down: str = "down_proj"
    transposed: bool = False
    # "2d", "3d": stacked as experts.weight1 and experts.weight2, each expert transposed.
    experts_order: Literal["separate", "2d", "3d"] = "separate"
    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    expert: str = "mlp.experts.{e}."
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    experts: str = "mlp.experts."
    shared: str = "mlp.shared_experts."
    shared_gate: str = "mlp.shared_expert_gate"

    def with_root(self, root: str) -> Layout:
        """The layout with every ``{root}`` filled in."""
        return _renamed(self, lambda name: name.replace("{root}", root))


_LLAMA = Layout()

_HF: Mapping[str, Layout] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": replace(
        _LLAMA,
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{e}.",
        expert_parts=("w1", "w3", "w2"),
    ),
    "qwen2_moe": replace(_LLAMA, shared="mlp.shared_expert."),
    "qwen3_moe": _LLAMA,
    "deepseek_v2": _LLAMA,
    "deepseek_v3": _LLAMA,
    "glm4": replace(_LLAMA, gate_up=("gate_up_proj",), gate_up_order="halves"),
    "glm4_moe": _LLAMA,
    "phi3": replace(
        _LLAMA,
        qkv=("self_attn.qkv_proj",),
        qkv_order="contiguous",
        gate_up=("gate_up_proj",),
        gate_up_order="halves",
    ),
    "baichuan": replace(_LLAMA, qkv=("self_attn.W_pack",), qkv_order="contiguous"),
    "internlm2": replace(
        _LLAMA,
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
        _LLAMA,
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
        _LLAMA,
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
        _LLAMA,
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
        transposed=True,
    ),
}

_MINDFORMERS = Layout(
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

_LEGACY = Layout(
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

# What the layout options of a target may be, the default first.
OPTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "hf": {},
    "flat": {},
    "mindformers": {
        "attention": ("interleaved", "contiguous"),
        "mlp": ("interleaved", "contiguous"),
        "experts": ("2d", "3d"),
        "mla": ("separate", "fused"),
    },
    "mindformers-legacy": {"qkv": ("split", "fused")},
}


def decoder_layout(spec: DecoderSpec, target: str, options: Mapping[str, str], names: Collection[str]) -> Layout:
    """How a checkpoint of ``spec`` for ``target`` is stored; ``names`` (what it holds) decide the root alone.

    Raises UsageError for an unknown target or option value, UnsupportedError for a pair of family and
    target without a network.
    """
    if target not in OPTIONS:
        raise UsageError(
            f"There is no built-in MindSpore network for a {spec.family} checkpoint in the layout '{target}'.",
            remedy=f"Give your own with --ms-net MODULE:FUNCTION; built in are: {', '.join(OPTIONS)}.",
        )
    chosen = {key: options.get(key, values[0]) for key, values in OPTIONS[target].items()}
    for key, value in chosen.items():
        if value not in OPTIONS[target][key]:
            raise UsageError(
                f"The layout option {key}={value} of '{target}' is unknown.",
                remedy=f"Use one of: {', '.join(OPTIONS[target][key])}.",
            )
    if target in ("hf", "flat"):
        layout = _HF[spec.family]
        return _rooted(_flattened(layout) if target == "flat" else layout, names)
    if spec.norm != "rms" or not spec.feed_forward.gated:
        raise UnsupportedError(
            f"There is no '{target}' network for the family '{spec.family}'.", remedy="Use --ms-net."
        )
    if target == "mindformers-legacy":
        if isinstance(spec.attention, LatentAttention) or spec.experts or spec.sandwich:
            raise UnsupportedError(
                f"There is no '{target}' network for the family '{spec.family}'.", remedy="Use --ms-net."
            )
        return _LEGACY if chosen["qkv"] == "split" else _LEGACY_FUSED
    layout = replace(_MINDFORMERS, experts_order="2d" if chosen["experts"] == "2d" else "3d")
    if chosen["attention"] == "contiguous":
        layout = replace(layout, qkv_order="contiguous")
    if chosen["mlp"] == "contiguous":
        layout = replace(layout, gate_up_order="halves")
    if chosen["mla"] == "fused":
        layout = replace(
            layout,
            latent_order="fused",
            latent_down="self_attention.linear_qkv",
            q_up="self_attention.linear_qb",
            kv_up="self_attention.linear_kvb",
            kv_down_norm="self_attention.k_layernorm",
        )
    return layout


_LEGACY_FUSED = replace(
    _LEGACY,
    qkv=("attention.w_qkv",),
    qkv_order="grouped",
    gate_up=("w_gate_hidden",),
    gate_up_order="rows",
)


def _flattened(layout: Layout) -> Layout:
    """``hf`` without the ``self_attn.`` component."""
    return _renamed(layout, lambda name: name.removeprefix("self_attn."))


def _renamed(layout: Layout, change: Callable[[str], str]) -> Layout:
    """The layout with every string changed; no order's word is touched by the changes above."""
    values: dict[str, Any] = {f.name: getattr(layout, f.name) for f in fields(layout)}
    for key, value in values.items():
        if isinstance(value, str):
            values[key] = change(value)
        elif key != "roots" and isinstance(value, tuple):
            values[key] = tuple(change(part) for part in value)
    return Layout(**values)


def _rooted(layout: Layout, names: Collection[str]) -> Layout:
    """The layout with the root whose embedding is there; the family's usual one when none is."""
    for root in layout.roots:
        if layout.embedding.replace("{root}", root) in names:
            return layout.with_root(root)
    return layout.with_root(layout.roots[0])
