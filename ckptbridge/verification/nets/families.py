"""From a ``config.json`` to what the model computes.

Sources: the published modelling code of each family, as shipped in transformers 5.24; for internlm2,
baichuan and chatglm the code published beside the weights. A value that the config omits is the one
that the family's own config class assumes; any other missing value is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import log
from typing import Literal

from ckptbridge.errors import UnsupportedError
from ckptbridge.verification.nets.config_values import (
    Config,
    grouped_attention,
    head_kind,
    need,
    one_window,
    qwen_windows,
    rope_of,
    value_or,
)
from ckptbridge.verification.nets.encoder_config import encoder_spec
from ckptbridge.verification.nets.spec import (
    DecoderSpec,
    EncoderSpec,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
    Rope,
)


def model_spec(config: Config) -> DecoderSpec | EncoderSpec:
    """What the model of ``config`` (a parsed ``config.json``) computes.

    Raises UnsupportedError for a model type without a forward here, ConfigError for a missing or
    impossible value.
    """
    model_type = config.get("model_type")
    build = _FAMILIES.get(str(model_type))
    if build is None:
        raise UnsupportedError(
            f"There is no built-in MindSpore forward for model type '{model_type}'.",
            remedy="Give --level weights, or a network of your own with --ms-net MODULE:FUNCTION; "
            f"built in are: {', '.join(sorted(_FAMILIES))}.",
        )
    return build(config)


def _rms_decoder(
    config: Config,
    attention: GroupedAttention | LatentAttention,
    rope: Rope | None,
    *,
    family: str | None = None,
    mlp_bias: bool = False,
    eps: float = 1e-6,
    experts: Experts | None = None,
    expert_layers: frozenset[int] = frozenset(),
    windows: tuple[int | None, ...] | None = None,
    sandwich: bool = False,
) -> DecoderSpec:
    """The shape that Llama made common: RMSNorm, gated SiLU MLP, rotary positions."""
    layers = int(need(config, "num_hidden_layers"))
    act = str(value_or(config, "hidden_act", "silu"))
    return DecoderSpec(
        family=family or str(config["model_type"]),
        vocab=int(need(config, "vocab_size")),
        hidden=int(need(config, "hidden_size")),
        layers=layers,
        norm="rms",
        eps=float(value_or(config, "rms_norm_eps", eps)),
        attention=attention,
        feed_forward=FeedForward(int(need(config, "intermediate_size")), act, True, mlp_bias),
        rope=rope,
        head=head_kind(config),
        experts=experts,
        expert_layers=expert_layers,
        windows=windows or (None,) * layers,
        sandwich=sandwich,
    )


def _llama(config: Config) -> DecoderSpec:
    bias = bool(config.get("attention_bias"))
    attention = grouped_attention(config, bias, bias)
    return _rms_decoder(config, attention, rope_of(config, attention.dim), mlp_bias=bool(config.get("mlp_bias")))


def _mistral(config: Config) -> DecoderSpec:
    attention = grouped_attention({"num_key_value_heads": 8, **config}, False, False)
    windows = one_window(config, int(need(config, "num_hidden_layers")))
    return _rms_decoder(config, attention, rope_of(config, attention.dim), windows=windows)


def _qwen2(config: Config) -> DecoderSpec:
    attention = grouped_attention(config, True, False)
    windows = qwen_windows(config, int(need(config, "num_hidden_layers")))
    return _rms_decoder(config, attention, rope_of(config, attention.dim), windows=windows)


def _qwen3(config: Config) -> DecoderSpec:
    bias = bool(config.get("attention_bias"))
    attention = grouped_attention({"head_dim": 128, **config}, bias, bias, norm=True)
    windows = qwen_windows(config, int(need(config, "num_hidden_layers")))
    return _rms_decoder(config, attention, rope_of(config, attention.dim), windows=windows)


def _mixtral(config: Config) -> DecoderSpec:
    attention = grouped_attention({"num_key_value_heads": 8, **config}, False, False)
    layers = int(need(config, "num_hidden_layers"))
    experts = Experts(
        count=int(need(config, "num_local_experts")),
        chosen=int(need(config, "num_experts_per_tok")),
        width=int(need(config, "intermediate_size")),
        act=str(value_or(config, "hidden_act", "silu")),
        scoring="softmax",
        normalise=True,
    )
    rope = rope_of(config, attention.dim, theta=1e6)
    return _rms_decoder(
        config,
        attention,
        rope,
        eps=1e-5,
        experts=experts,
        expert_layers=frozenset(range(layers)),
        windows=one_window(config, layers),
    )


def _sparse_layers(config: Config, layers: int) -> frozenset[int]:
    """Qwen's rule: every ``decoder_sparse_step``-th layer that ``mlp_only_layers`` does not name."""
    step = int(value_or(config, "decoder_sparse_step", 1))
    dense = set(config.get("mlp_only_layers") or ())
    return frozenset(i for i in range(layers) if i not in dense and step > 0 and (i + 1) % step == 0)


def _qwen_moe(config: Config) -> DecoderSpec:
    """Qwen2-MoE (q/k/v biases, a gated shared expert) and Qwen3-MoE (q/k norms, none shared)."""
    second = config["model_type"] == "qwen2_moe"
    layers = int(need(config, "num_hidden_layers"))
    bias = bool(value_or(config, "qkv_bias", True)) if second else bool(config.get("attention_bias"))
    attention = grouped_attention(config, bias, bias and not second, norm=not second)
    experts = Experts(
        count=int(need(config, "num_experts", "num_local_experts")),
        chosen=int(need(config, "num_experts_per_tok")),
        width=int(need(config, "moe_intermediate_size")),
        act=str(value_or(config, "hidden_act", "silu")),
        scoring="softmax",
        normalise=bool(value_or(config, "norm_topk_prob", False)),
        shared_width=int(need(config, "shared_expert_intermediate_size")) if second else 0,
        shared_gate=second,
    )
    return _rms_decoder(
        config,
        attention,
        rope_of(config, attention.dim),
        experts=experts,
        expert_layers=_sparse_layers(config, layers),
        windows=qwen_windows(config, layers) if second else one_window(config, layers),
    )


def _latent(config: Config, rope: Rope) -> LatentAttention:
    nope, turned = int(need(config, "qk_nope_head_dim")), int(need(config, "qk_rope_head_dim"))
    scale = (nope + turned) ** -0.5
    # DeepSeek's yarn stretches the softmax besides: mscale_all_dim, squared.
    all_dim = rope.scaling.get("mscale_all_dim", 0.0)
    if rope.kind != "default" and all_dim and rope.scaling["factor"] > 1:
        scale *= (0.1 * all_dim * log(rope.scaling["factor"]) + 1.0) ** 2
    rank = config.get("q_lora_rank", 1536)  # null: q has no latent
    return LatentAttention(
        heads=int(need(config, "num_attention_heads")),
        q_rank=None if rank is None else int(rank),
        kv_rank=int(need(config, "kv_lora_rank")),
        nope=nope,
        rope=turned,
        value=int(need(config, "v_head_dim")),
        scale=scale,
        bias=bool(config.get("attention_bias")),
    )


def _group_limited(config: Config, *, scoring: Literal["softmax", "sigmoid"], grouped: bool) -> Experts:
    """DeepSeek's and GLM-4-MoE's experts: routed ones in groups, and shared ones as one wide MLP."""
    width = int(need(config, "moe_intermediate_size"))
    sigmoid = scoring == "sigmoid"
    return Experts(
        count=int(need(config, "n_routed_experts", "num_local_experts", "num_experts")),
        chosen=int(need(config, "num_experts_per_tok")),
        width=width,
        act=str(value_or(config, "hidden_act", "silu")),
        scoring=scoring,
        # transformers' DeepSeek-V2 never normalises; its published configs do not ask for it.
        normalise=bool(value_or(config, "norm_topk_prob", True)) and sigmoid,
        scaling=float(value_or(config, "routed_scaling_factor", 1.0)),
        bias=sigmoid,
        groups=int(value_or(config, "n_group", 1)) if grouped else 1,
        groups_kept=int(value_or(config, "topk_group", 1)) if grouped else 1,
        group_score="top2" if sigmoid else "max",
        shared_width=width * int(need(config, "n_shared_experts")),
    )


def _deepseek(config: Config) -> DecoderSpec:
    second = config["model_type"] == "deepseek_v2"
    layers = int(need(config, "num_hidden_layers"))
    pairs = True if second else bool(value_or(config, "rope_interleave", True))
    rope = rope_of(config, int(need(config, "qk_rope_head_dim")), pairs=pairs)
    method = str(value_or(config, "topk_method", "greedy"))
    if second and method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedError(f"DeepSeek-V2's expert choice '{method}' has no built-in forward.")
    # What transformers' own class assumes of a config that is silent.
    silent = {} if second else {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
    experts = _group_limited(
        {**silent, **config},
        scoring="softmax" if second else "sigmoid",
        grouped=not second or method == "group_limited_greedy",
    )
    first = int(value_or(config, "first_k_dense_replace", 0 if second else 3))
    return _rms_decoder(
        config,
        _latent(config, rope),
        rope,
        mlp_bias=bool(config.get("mlp_bias")) and second,
        experts=experts,
        expert_layers=frozenset(range(first, layers)),
    )


def _glm4(config: Config) -> DecoderSpec:
    attention = grouped_attention({"head_dim": 128, **config}, bool(value_or(config, "attention_bias", True)), False)
    rope = rope_of(config, attention.dim, pairs=True, part=0.5)
    return _rms_decoder(config, attention, rope, eps=1.5625e-7, sandwich=True)


def _glm4_moe(config: Config) -> DecoderSpec:
    layers = int(need(config, "num_hidden_layers"))
    attention = grouped_attention(
        config, bool(config.get("attention_bias")), False, norm=bool(value_or(config, "use_qk_norm", False))
    )
    return _rms_decoder(
        config,
        attention,
        rope_of(config, attention.dim, part=0.5),
        eps=1e-5,
        experts=_group_limited(config, scoring="sigmoid", grouped=True),
        expert_layers=frozenset(range(int(value_or(config, "first_k_dense_replace", 1)), layers)),
    )


def _internlm2(config: Config) -> DecoderSpec:
    bias = bool(value_or(config, "bias", True))
    attention = grouped_attention(config, bias, bias)
    return _rms_decoder(config, attention, rope_of(config, attention.dim))


def _baichuan(config: Config) -> DecoderSpec:
    """7B turns its heads; 13B uses ALiBi, and its config class knows no ``max_position_embeddings``.

    Baichuan 2 divides each row of the head by its length; its configs carry ``z_loss_weight``.
    """
    attention = grouped_attention(config, False, False)
    alibi = "max_position_embeddings" not in config
    rope = None if alibi else rope_of(config, attention.dim)
    spec = _rms_decoder(config, replace(attention, alibi=alibi), rope)
    return replace(spec, head_normalised="z_loss_weight" in config)


def _phi3(config: Config) -> DecoderSpec:
    attention = grouped_attention(config, False, False)
    windows = one_window(config, int(need(config, "num_hidden_layers")))
    return _rms_decoder(config, attention, rope_of(config, attention.dim), eps=1e-5, windows=windows)


def _chatglm(config: Config) -> DecoderSpec:
    """ChatGLM 2 and 3 and GLM-4 as first published: half of each head turns, in neighbouring pairs."""
    if not value_or(config, "rmsnorm", True) or config.get("apply_residual_connection_post_layernorm"):
        raise UnsupportedError("Only chatglm models with RMSNorm before each part have a built-in forward.")
    heads, dim = int(need(config, "num_attention_heads")), int(need(config, "kv_channels"))
    groups = int(need(config, "multi_query_group_num")) if config.get("multi_query_attention") else heads
    bias = bool(config.get("add_bias_linear"))
    layers = int(need(config, "num_layers", "num_hidden_layers"))
    return DecoderSpec(
        family="chatglm",
        vocab=int(need(config, "padded_vocab_size", "vocab_size")),
        hidden=int(need(config, "hidden_size")),
        layers=layers,
        norm="rms",
        eps=float(value_or(config, "layernorm_epsilon", 1e-5)),
        attention=GroupedAttention(
            heads, groups, dim, bias=bias or bool(config.get("add_qkv_bias")), out_bias=bias, scale=dim**-0.5
        ),
        feed_forward=FeedForward(int(need(config, "ffn_hidden_size")), "silu", True, bias),
        rope=Rope(dim // 2, 10000.0 * float(value_or(config, "rope_ratio", 1.0)), pairs=True),
        # Published configs name "ChatGLMModel" for the model with its head.
        head="tied" if config.get("tie_word_embeddings") else "own",
        windows=(None,) * layers,
    )


def _gpt_neox(config: Config) -> DecoderSpec:
    bias = bool(value_or(config, "attention_bias", True))
    attention = grouped_attention({**config, "head_dim": None, "num_key_value_heads": None}, bias, bias)
    layers = int(need(config, "num_hidden_layers"))
    return DecoderSpec(
        family="gpt_neox",
        vocab=int(need(config, "vocab_size")),
        hidden=int(need(config, "hidden_size")),
        layers=layers,
        norm="layer",
        eps=float(value_or(config, "layer_norm_eps", 1e-5)),
        attention=attention,
        feed_forward=FeedForward(
            int(need(config, "intermediate_size")), str(value_or(config, "hidden_act", "gelu")), False, True
        ),
        rope=rope_of(config, attention.dim, part=0.25),
        head=head_kind(config),
        windows=(None,) * layers,
        parallel=bool(value_or(config, "use_parallel_residual", True)),
    )


def _gpt2(config: Config) -> DecoderSpec:
    hidden, heads = int(need(config, "n_embd", "hidden_size")), int(need(config, "n_head", "num_attention_heads"))
    layers = int(need(config, "n_layer", "num_hidden_layers"))
    dim = hidden // heads
    attention = GroupedAttention(
        heads,
        heads,
        dim,
        bias=True,
        out_bias=True,
        scale=dim**-0.5 if value_or(config, "scale_attn_weights", True) else 1.0,
        scale_by_layer=bool(config.get("scale_attn_by_inverse_layer_idx")),
    )
    return DecoderSpec(
        family="gpt2",
        vocab=int(need(config, "vocab_size")),
        hidden=hidden,
        layers=layers,
        norm="layer",
        eps=float(value_or(config, "layer_norm_epsilon", 1e-5)),
        attention=attention,
        feed_forward=FeedForward(
            int(value_or(config, "n_inner", 4 * hidden)),
            str(value_or(config, "activation_function", "gelu_new")),
            False,
            True,
        ),
        rope=None,
        head=head_kind(config, tied=True),
        windows=(None,) * layers,
        positions=int(need(config, "n_positions", "max_position_embeddings")),
    )


_FAMILIES: Mapping[str, Callable[[Config], DecoderSpec | EncoderSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "internlm2": _internlm2,
    "baichuan": _baichuan,
    "phi3": _phi3,
    "chatglm": _chatglm,
    "gpt_neox": _gpt_neox,
    "gpt2": _gpt2,
    "bert": encoder_spec,
    "roberta": encoder_spec,
    "xlm-roberta": encoder_spec,
}
