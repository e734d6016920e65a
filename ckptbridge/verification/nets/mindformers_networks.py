"""Which MindFormers network serves a checkpoint, and its config: from this project's spec to MindFormers' names.

All compute in float32, and are set to coincide with transformers' networks where a setting can do that.
A feature that they would compute otherwise is refused. Written for MindFormers 2.1.0: the legacy Llama,
and the networks of its training graph, which run without Ascend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptbridge.errors import UnsupportedError
from ckptbridge.verification.nets.spec import DecoderSpec, Experts, GroupedAttention, LatentAttention

OWN = "Leave --ms-net out: the networks of this tool have more families."


# --- the networks -----------------------------------------------------------------------------


def _legacy_llama(spec: DecoderSpec, layout: Mapping[str, str], shape: tuple[int, int]) -> Any:
    from mindformers.models.llama.llama import LlamaForCausalLM
    from mindformers.models.llama.llama_config import LlamaConfig

    attention = _grouped(spec)
    if attention.dim * attention.heads != spec.hidden:
        raise UnsupportedError(
            "MindFormers' legacy Llama has heads of hidden_size / heads dimensions, and this config others.",
            remedy=OWN,
        )
    return LlamaForCausalLM(
        LlamaConfig(
            batch_size=shape[0],
            seq_length=shape[1],
            hidden_size=spec.hidden,
            num_layers=spec.layers,
            num_heads=attention.heads,
            n_kv_heads=attention.groups,
            intermediate_size=spec.feed_forward.width,
            vocab_size=spec.vocab,
            rms_norm_eps=spec.eps,
            theta=_theta(spec),
            qkv_has_bias=attention.bias,
            attn_proj_has_bias=attention.out_bias,
            tie_word_embeddings=spec.head == "tied",
            pad_token_id=-1,  # no token is padding, as for transformers without an attention mask
            compute_dtype="float32",
            param_init_type="float32",
            layernorm_compute_type="float32",
            softmax_compute_type="float32",
            rotary_dtype="float32",
            use_flash_attention=False,
            fused_rms_norm=False,
        )
    )


def _qwen3(spec: DecoderSpec, layout: Mapping[str, str], shape: tuple[int, int]) -> Any:
    from mindformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from mindformers.models.qwen3.modeling_qwen3_train import TrainingQwen3ForCausalLM

    return TrainingQwen3ForCausalLM(Qwen3Config(**_common(spec, layout, shape), **_grouped_values(spec)))


def _qwen3_moe(spec: DecoderSpec, layout: Mapping[str, str], shape: tuple[int, int]) -> Any:
    from mindformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from mindformers.models.qwen3_moe.modeling_qwen3_moe_train import TrainingQwen3MoeForCausalLM

    experts = _experts(spec, layout)
    if len(spec.expert_layers) < spec.layers:
        raise UnsupportedError("MindFormers' Qwen3-MoE has experts in every layer, and this config not.", remedy=OWN)
    return TrainingQwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **_common(spec, layout, shape),
            **_grouped_values(spec),
            **_expert_values(experts),
            num_experts=experts.count,
        )
    )


def _deepseek_v3(spec: DecoderSpec, layout: Mapping[str, str], shape: tuple[int, int]) -> Any:
    from mindformers.models.deepseek3.configuration_deepseek_v3 import DeepseekV3Config
    from mindformers.models.deepseek3.modeling_deepseek_v3_train import TrainingDeepseekV3ForCausalLM

    experts, attention = _experts(spec, layout), spec.attention
    assert isinstance(attention, LatentAttention)
    return TrainingDeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{**_common(spec, layout, shape), **_latent_rope(spec)},
            **_expert_values(experts),
            num_attention_heads=attention.heads,
            num_key_value_heads=attention.heads,
            attention_bias=attention.bias,
            q_lora_rank=attention.q_rank,
            kv_lora_rank=attention.kv_rank,
            qk_nope_head_dim=attention.nope,
            qk_rope_head_dim=attention.rope,
            v_head_dim=attention.value,
            qk_layernorm=True,  # False, its default, leaves the norms on the latents out
            mla_qkv_concat=layout.get("mla") == "fused",
            first_k_dense_replace=spec.layers - len(spec.expert_layers),
            n_routed_experts=experts.count,
            n_shared_experts=experts.shared_width // experts.width,
            n_group=experts.groups,
            topk_group=experts.groups_kept,
            num_nextn_predict_layers=None,  # multi-token prediction plays no part in the logits
        )
    )


def _latent_rope(spec: DecoderSpec) -> dict[str, Any]:
    """RoPE of MindFormers' latent attention: neighbours turn, plain or by yarn."""
    rope = spec.rope
    assert rope is not None
    if not rope.pairs:
        raise UnsupportedError(
            "MindFormers' DeepSeek-V3 turns neighbouring dimensions, and this config not.", remedy=OWN
        )
    if rope.kind == "default":
        # 40, the default of the scaling factor, scales the softmax even with plain RoPE.
        return {"position_embedding_type": "rope", "rotary_scaling_factor": 1.0}
    mscale = rope.scaling.get("mscale", 0.0)
    if not mscale or mscale != rope.scaling.get("mscale_all_dim") or "attention_factor" in rope.scaling:
        raise UnsupportedError(
            "MindFormers' DeepSeek-V3 scales the softmax by yarn's mscale and transformers' by mscale_all_dim, "
            "and in this config they differ.",
            remedy=OWN,
        )
    return {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": rope.scaling["factor"],
        "max_position_embeddings": int(rope.scaling["original_max_position_embeddings"]),
        "beta_fast": rope.scaling.get("beta_fast", 32.0),
        "beta_slow": rope.scaling.get("beta_slow", 1.0),
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


def _common(spec: DecoderSpec, layout: Mapping[str, str], shape: tuple[int, int]) -> dict[str, Any]:
    """What the configs of the training networks have in common."""
    return {
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.feed_forward.width,
        "num_hidden_layers": spec.layers,
        "rms_norm_eps": spec.eps,
        "rope_theta": _theta(spec),
        "tie_word_embeddings": spec.head == "tied",
        "max_position_embeddings": shape[1],
        "seq_length": shape[1],
        "pad_token_id": -1,  # no token is padding, as for transformers without an attention mask
        "use_contiguous_weight_layout_attention": layout.get("attention") == "contiguous",
        "use_interleaved_weight_layout_mlp": layout.get("mlp", "interleaved") == "interleaved",
        "use_flash_attention": False,  # True casts to float16; the attention cell is the same
        "input_layout": "BNSD",
        "params_dtype": "float32",
        "compute_dtype": "float32",
        "layernorm_compute_dtype": "float32",
        "softmax_compute_dtype": "float32",
        "rotary_dtype": "float32",
    }


def _grouped_values(spec: DecoderSpec) -> dict[str, Any]:
    attention = _grouped(spec)
    if attention.out_bias:
        raise UnsupportedError(
            "MindFormers' training network has no bias in the attention's output projection, and the config has.",
            remedy=OWN,
        )
    return {
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.groups,
        "head_dim": attention.dim,
        "attention_bias": attention.bias,
    }


def _expert_values(experts: Experts) -> dict[str, Any]:
    return {
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.width,
        "norm_topk_prob": experts.normalise,
        "routed_scaling_factor": experts.scaling,
        "moe_grouped_gemm": True,
        "moe_router_dtype": "float32",
        "moe_token_dispatcher_type": "alltoall",
        "moe_permute_fusion": False,
        "use_pad_tokens": False,
    }


# By model type and target. Each function: (spec, layout, (batch, length)) -> the network, a mindspore.nn.Cell.
NETWORKS: Mapping[tuple[str, str], Callable[[DecoderSpec, Mapping[str, str], tuple[int, int]], Any]] = {
    ("llama", "mindformers-legacy"): _legacy_llama,
    ("qwen3", "mindformers"): _qwen3,
    ("qwen3_moe", "mindformers"): _qwen3_moe,
    ("deepseek_v3", "mindformers"): _deepseek_v3,
}


# --- what fits --------------------------------------------------------------------------------


def refuse(spec: DecoderSpec) -> None:
    """Raises UnsupportedError for what these networks, as they are set up here, would compute otherwise."""
    rope, latent = spec.rope and spec.rope.kind, isinstance(spec.attention, LatentAttention)
    missing = {
        "a sliding window": any(window is not None for window in spec.windows),
        f"the activation '{spec.feed_forward.act}'": spec.feed_forward.act != "silu",
        "a model without head": spec.head == "none",
        f"RoPE of type '{rope}'": rope != "default" and not (rope == "yarn" and latent),
    }
    for what, there in missing.items():
        if there:
            raise UnsupportedError(f"MindFormers' network is not set up here for {what}.", remedy=OWN)


def _experts(spec: DecoderSpec, layout: Mapping[str, str]) -> Experts:
    if layout.get("experts", "2d") != "2d":
        raise UnsupportedError(
            "MindFormers' training graph reads experts in two dimensions, and this checkpoint has them in three.",
            remedy="Convert it with --layout experts=2d: the words are the same.",
        )
    assert spec.experts is not None
    if spec.experts.normalise and spec.experts.chosen == 1:
        raise UnsupportedError("MindFormers' router does not normalise the weight of a single expert.", remedy=OWN)
    return spec.experts


def _grouped(spec: DecoderSpec) -> GroupedAttention:
    assert isinstance(spec.attention, GroupedAttention)
    return spec.attention


def _theta(spec: DecoderSpec) -> float:
    assert spec.rope is not None
    return spec.rope.theta


def known_differences(spec: DecoderSpec, loaded: Mapping[str, Any]) -> tuple[str, ...]:
    """Where the network is known to compute something else than transformers', on the same, right weights."""
    experts = spec.experts
    if experts is None or experts.groups == 1:
        return ()
    found = []
    summed = experts.chosen // experts.groups_kept
    if summed != 2:
        found.append(
            f"MindFormers' router scores a group of experts by its best {summed} (num_experts_per_tok // topk_group), "
            "transformers' by its best 2"
        )
    biases = [value for name, value in loaded.items() if name.endswith(".expert_bias")]
    if any(float(bias.min()) < 0 for bias in biases):
        found.append(
            "MindFormers' router gives the experts of other groups the score 0, transformers' minus infinity, and with "
            "the negative biases here such an expert can be chosen"
        )
    tail = "Where the weights level holds, the weights are right and the networks differ."
    return tuple(f"{text}. {tail}" for text in found)
