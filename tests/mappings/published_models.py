"""The PyTorch side as published, written out by hand: names and shapes of a model from its config.

Independent of the tables. tests/mappings/test_published_models.py holds it equal to what transformers itself
writes; what transformers does not build (multi-token prediction layers, old buffers) follows the published
checkpoints.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

# --- small models of every family: no two lengths alike, heads/kv_heads != kv_heads, head_dim != hidden/heads ---

_GQA: Config = {
    "vocab_size": 29,
    "hidden_size": 18,
    "intermediate_size": 13,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "tie_word_embeddings": False,
}
_QWEN_MOE: Config = {"moe_intermediate_size": 7, "num_experts": 11, "num_experts_per_tok": 2}
_MLA: Config = {
    "vocab_size": 29,
    "hidden_size": 18,
    "intermediate_size": 13,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 7,
    "n_routed_experts": 11,
    "n_shared_experts": 3,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_BERT: Config = {
    "vocab_size": 29,
    "hidden_size": 18,
    "intermediate_size": 13,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 23,
    "type_vocab_size": 4,
    "tie_word_embeddings": True,
}

# (model_type, variant) -> config. The variants are those that change names or layouts.
# Variants in UNBUILT are known from the published checkpoints and DeepSeek's own modelling code: transformers' class
# has neither multi-token prediction layers nor moe_layer_freq, and always makes the router's bias.
TINY: dict[tuple[str, str], Config] = {
    ("llama", "plain"): _GQA,
    ("llama", "biased"): {**_GQA, "attention_bias": True},
    ("llama", "mlp-biased"): {**_GQA, "mlp_bias": True},
    ("llama", "tied"): {**_GQA, "tie_word_embeddings": True},
    ("mistral", "plain"): _GQA,
    ("mistral", "tied"): {**_GQA, "tie_word_embeddings": True},
    ("qwen2", "plain"): _GQA,
    ("qwen2", "tied"): {**_GQA, "tie_word_embeddings": True},
    ("qwen3", "plain"): _GQA,
    ("qwen3", "biased"): {**_GQA, "attention_bias": True},
    ("qwen3", "tied"): {**_GQA, "tie_word_embeddings": True},
    ("mixtral", "plain"): {**_GQA, "num_local_experts": 11, "num_experts_per_tok": 2},
    ("mixtral", "tied"): {**_GQA, "num_local_experts": 11, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    ("qwen2_moe", "plain"): {**_GQA, **_QWEN_MOE, "shared_expert_intermediate_size": 5},
    ("qwen2_moe", "mixed"): {
        **_GQA,
        **_QWEN_MOE,
        "shared_expert_intermediate_size": 5,
        "num_hidden_layers": 5,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "qkv_bias": False,
        "tie_word_embeddings": True,
    },
    ("qwen3_moe", "plain"): {**_GQA, **_QWEN_MOE},
    ("qwen3_moe", "biased"): {**_GQA, **_QWEN_MOE, "attention_bias": True},
    ("qwen3_moe", "mixed"): {
        **_GQA,
        **_QWEN_MOE,
        "num_hidden_layers": 5,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "tie_word_embeddings": True,
    },
    ("deepseek_v2", "plain"): {**_MLA, "topk_method": "greedy"},
    ("deepseek_v2", "lite"): {**_MLA, "topk_method": "greedy", "q_lora_rank": None},
    ("deepseek_v2", "biased"): {**_MLA, "topk_method": "greedy", "attention_bias": True},
    ("deepseek_v2", "tied"): {**_MLA, "topk_method": "greedy", "tie_word_embeddings": True},
    ("deepseek_v3", "plain"): {**_MLA, "topk_method": "noaux_tc", "num_nextn_predict_layers": 0},
    ("deepseek_v3", "no-q-lora"): {
        **_MLA,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
    },
    ("deepseek_v3", "biased"): {
        **_MLA,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "attention_bias": True,
    },
    ("deepseek_v3", "greedy"): {**_MLA, "topk_method": "greedy", "num_nextn_predict_layers": 0},
    ("deepseek_v3", "every second"): {
        **_MLA,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "num_hidden_layers": 5,
        "moe_layer_freq": 2,
    },
    ("deepseek_v3", "mtp"): {**_MLA, "topk_method": "noaux_tc", "num_nextn_predict_layers": 2},
    ("deepseek_v3", "mtp greedy"): {**_MLA, "topk_method": "greedy", "num_nextn_predict_layers": 2},
    ("deepseek_v3", "mtp no-q-lora"): {
        **_MLA,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 2,
        "q_lora_rank": None,
    },
    ("deepseek_v3", "mtp biased"): {
        **_MLA,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 2,
        "attention_bias": True,
    },
    ("deepseek_v3", "mtp tied"): {
        **_MLA,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 2,
        "tie_word_embeddings": True,
    },
    ("bert", "plain"): _BERT,
    ("roberta", "plain"): _BERT,
}

UNBUILT = frozenset(
    {"greedy", "every second", "mtp", "mtp greedy", "mtp no-q-lora", "mtp biased", "mtp tied"},
)


def tiny_config(model_type: str, variant: str) -> Config:
    """A small config of ``model_type``."""
    return {"model_type": model_type, **TINY[model_type, variant]}


# --- which layers hold experts ---------------------------------------------------------------


def expert_layers(c: Config) -> list[bool]:
    """For each layer (multi-token prediction layers last) whether its feed-forward part is made of experts."""
    layers = range(c["num_hidden_layers"] + extra_layers(c))
    match c["model_type"]:
        case "mixtral":
            return [True for _ in layers]
        case "qwen2_moe" | "qwen3_moe":
            step, dense = c.get("decoder_sparse_step", 1), c.get("mlp_only_layers") or []
            return [i not in dense and (i + 1) % step == 0 for i in layers]
        case "deepseek_v2" | "deepseek_v3":
            freq = c.get("moe_layer_freq", 1)
            return [i >= c["first_k_dense_replace"] and i % freq == 0 for i in layers]
    return [False for _ in layers]


def extra_layers(c: Config) -> int:
    """How many multi-token prediction layers follow the model's own."""
    return c.get("num_nextn_predict_layers", 0) if c["model_type"] == "deepseek_v3" else 0


def head_dim(c: Config) -> int:
    """The length of one attention head."""
    return int(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])


def key_value_heads(c: Config) -> int:
    """The number of key/value heads."""
    return int(c.get("num_key_value_heads") or c["num_attention_heads"])


def has_qkv_bias(c: Config) -> bool:
    """Whether q, k and v projections have a bias."""
    if c["model_type"] == "qwen2":
        return True
    if c["model_type"] == "qwen2_moe":
        return bool(c.get("qkv_bias", True))
    return bool(c.get("attention_bias", False))


# --- decoders --------------------------------------------------------------------------------


def decoder_shapes(c: Config, root: str = "model.") -> Shapes:
    """Every tensor of a causal language model (``root`` "model.") or of a base model (``root`` "")."""
    v, h = c["vocab_size"], c["hidden_size"]
    shapes: Shapes = {f"{root}embed_tokens.weight": (v, h)}
    for i, experts in enumerate(expert_layers(c)):
        layer = f"{root}layers.{i}."
        shapes[layer + "input_layernorm.weight"] = (h,)
        shapes[layer + "post_attention_layernorm.weight"] = (h,)
        mla = "kv_lora_rank" in c
        shapes |= {layer + "self_attn." + k: s for k, s in (_mla(c) if mla else _gqa(c)).items()}
        shapes |= {layer + k: s for k, s in (_experts(c) if experts else _dense(c)).items()}
        if i >= c["num_hidden_layers"]:
            shapes |= {layer + k: s for k, s in _prediction(c).items()}
    shapes[f"{root}norm.weight"] = (h,)
    if root and not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, h)
    return shapes


def _gqa(c: Config) -> Shapes:
    h, n, g, d = c["hidden_size"], c["num_attention_heads"], key_value_heads(c), head_dim(c)
    shapes: Shapes = {
        "q_proj.weight": (n * d, h),
        "k_proj.weight": (g * d, h),
        "v_proj.weight": (g * d, h),
        "o_proj.weight": (h, n * d),
    }
    if has_qkv_bias(c):
        shapes |= {"q_proj.bias": (n * d,), "k_proj.bias": (g * d,), "v_proj.bias": (g * d,)}
    if c.get("attention_bias"):
        shapes["o_proj.bias"] = (h,)
    if c["model_type"] in ("qwen3", "qwen3_moe"):
        shapes |= {"q_norm.weight": (d,), "k_norm.weight": (d,)}
    return shapes


def _mla(c: Config) -> Shapes:
    h, n, q, kv = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    shapes: Shapes = {
        "kv_a_proj_with_mqa.weight": (kv + rope, h),
        "kv_a_layernorm.weight": (kv,),
        "kv_b_proj.weight": (n * (nope + value), kv),
        "o_proj.weight": (h, n * value),
    }
    if q is None:
        shapes["q_proj.weight"] = (n * (nope + rope), h)
    else:
        shapes |= {
            "q_a_proj.weight": (q, h),
            "q_a_layernorm.weight": (q,),
            "q_b_proj.weight": (n * (nope + rope), q),
        }
    if c.get("attention_bias"):
        shapes |= {"kv_a_proj_with_mqa.bias": (kv + rope,), "o_proj.bias": (h,)}
        if q is not None:
            shapes["q_a_proj.bias"] = (q,)
    return shapes


def _gated(prefix: str, h: int, f: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (f, h),
        f"{prefix}up_proj.weight": (f, h),
        f"{prefix}down_proj.weight": (h, f),
    }


def _dense(c: Config) -> Shapes:
    h, f = c["hidden_size"], c["intermediate_size"]
    shapes = _gated("mlp.", h, f)
    if c.get("mlp_bias"):
        shapes |= {"mlp.gate_proj.bias": (f,), "mlp.up_proj.bias": (f,), "mlp.down_proj.bias": (h,)}
    return shapes


def _experts(c: Config) -> Shapes:
    h = c["hidden_size"]
    shapes: Shapes = {}
    if c["model_type"] == "mixtral":
        f, e = c["intermediate_size"], c["num_local_experts"]
        shapes["block_sparse_moe.gate.weight"] = (e, h)
        for k in range(e):
            prefix = f"block_sparse_moe.experts.{k}."
            shapes |= {prefix + "w1.weight": (f, h), prefix + "w3.weight": (f, h), prefix + "w2.weight": (h, f)}
        return shapes
    e = c["num_experts"] if "num_experts" in c else c["n_routed_experts"]
    f = c["moe_intermediate_size"]
    shapes["mlp.gate.weight"] = (e, h)
    for k in range(e):
        shapes |= _gated(f"mlp.experts.{k}.", h, f)
    match c["model_type"]:
        case "qwen2_moe":
            shapes |= _gated("mlp.shared_expert.", h, c["shared_expert_intermediate_size"])
            shapes["mlp.shared_expert_gate.weight"] = (1, h)
        case "deepseek_v2" | "deepseek_v3":
            shapes |= _gated("mlp.shared_experts.", h, f * c["n_shared_experts"])
    if c["model_type"] == "deepseek_v3" and c["topk_method"] == "noaux_tc":
        shapes["mlp.gate.e_score_correction_bias"] = (e,)
    return shapes


def _prediction(c: Config) -> Shapes:
    v, h = c["vocab_size"], c["hidden_size"]
    return {
        "embed_tokens.weight": (v, h),
        "enorm.weight": (h,),
        "hnorm.weight": (h,),
        "eh_proj.weight": (h, 2 * h),
        "shared_head.norm.weight": (h,),
        "shared_head.head.weight": (v, h),
    }


# --- BERT and RoBERTa ------------------------------------------------------------------------


def encoder_shapes(
    c: Config, root: str = "", *, pooler: bool = True, names: tuple[str, str] = ("weight", "bias")
) -> Shapes:
    """The encoder; ``names`` are what a layer norm calls its two parameters."""
    h, f = c["hidden_size"], c["intermediate_size"]
    scale, shift = names
    shapes: Shapes = {
        "embeddings.word_embeddings.weight": (c["vocab_size"], h),
        "embeddings.position_embeddings.weight": (c["max_position_embeddings"], h),
        "embeddings.token_type_embeddings.weight": (c["type_vocab_size"], h),
        f"embeddings.LayerNorm.{scale}": (h,),
        f"embeddings.LayerNorm.{shift}": (h,),
    }
    for i in range(c["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        linears = {
            "attention.self.query": (h, h),
            "attention.self.key": (h, h),
            "attention.self.value": (h, h),
            "attention.output.dense": (h, h),
            "intermediate.dense": (f, h),
            "output.dense": (h, f),
        }
        for name, shape in linears.items():
            shapes |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"{layer}{name}.{scale}": (h,), f"{layer}{name}.{shift}": (h,)}
    if pooler:
        shapes |= {"pooler.dense.weight": (h, h), "pooler.dense.bias": (h,)}
    return {root + name: shape for name, shape in shapes.items()}


def head_shapes(c: Config, head: str, names: tuple[str, str] = ("weight", "bias")) -> Shapes:
    """One of the heads; three labels where the number of labels is free."""
    v, h = c["vocab_size"], c["hidden_size"]
    scale, shift = names
    match head:
        case "cls.predictions":
            return {
                "cls.predictions.bias": (v,),
                "cls.predictions.transform.dense.weight": (h, h),
                "cls.predictions.transform.dense.bias": (h,),
                f"cls.predictions.transform.LayerNorm.{scale}": (h,),
                f"cls.predictions.transform.LayerNorm.{shift}": (h,),
            }
        case "cls.seq_relationship":
            return {"cls.seq_relationship.weight": (2, h), "cls.seq_relationship.bias": (2,)}
        case "lm_head":
            return {
                "lm_head.bias": (v,),
                "lm_head.dense.weight": (h, h),
                "lm_head.dense.bias": (h,),
                "lm_head.layer_norm.weight": (h,),
                "lm_head.layer_norm.bias": (h,),
            }
        case "classification head":
            return {
                "classifier.dense.weight": (h, h),
                "classifier.dense.bias": (h,),
                "classifier.out_proj.weight": (3, h),
                "classifier.out_proj.bias": (3,),
            }
    return {f"{head}.weight": (3, h), f"{head}.bias": (3,)}
