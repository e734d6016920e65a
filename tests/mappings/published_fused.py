"""The PyTorch side of the families that fuse, written out by hand: names and shapes of a model from its config.

Independent of the tables. Where transformers has the family, test_fused_published.py holds it equal to what
transformers itself writes; the others follow the published checkpoints and their code.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

# --- small models: no two lengths alike, heads/kv_heads != kv_heads, head_dim != hidden/heads where it is free ---

_GQA: Config = {
    "vocab_size": 29,
    "hidden_size": 18,
    "intermediate_size": 13,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
_GLM_MOE: Config = {
    **_GQA,
    "head_dim": 4,
    "moe_intermediate_size": 7,
    "n_routed_experts": 11,
    "n_shared_experts": 3,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "use_qk_norm": False,
    "num_nextn_predict_layers": 0,
}
_CHATGLM: Config = {
    "padded_vocab_size": 29,
    "hidden_size": 18,
    "ffn_hidden_size": 13,
    "num_layers": 3,
    "num_attention_heads": 6,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "kv_channels": 4,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "post_layer_norm": True,
}
_MHA: Config = {
    "vocab_size": 29,
    "hidden_size": 15,
    "intermediate_size": 13,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "tie_word_embeddings": False,
}
_GPT2: Config = {"vocab_size": 29, "n_positions": 23, "n_embd": 15, "n_layer": 3, "n_head": 3, "n_inner": 13}
_V4: Config = {
    "vocab_size": 29,
    "hidden_size": 18,
    "moe_intermediate_size": 7,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "q_lora_rank": 14,
    "o_groups": 3,
    "o_lora_rank": 5,
    "n_routed_experts": 11,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "index_n_heads": 9,
    "index_head_dim": 4,
    "hc_mult": 2,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
_V4_PUBLISHED: Config = {**_V4, "compress_ratios": [0, 4, 128, 4, 128, 0], "num_hash_layers": 2}
_V4_SAVED: Config = {
    **_V4,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "layer_types": ["sliding_attention", *("compressed_sparse_attention", "heavily_compressed_attention") * 2],
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe"],
}

# (family, variant) -> config. The variants are those that change names or layouts.
TINY: dict[tuple[str, str], Config] = {
    ("internlm2", "plain"): {**_GQA, "bias": False},
    ("internlm2", "biased"): {**_GQA, "bias": True},
    ("internlm2", "tied"): {**_GQA, "bias": False, "tie_word_embeddings": True},
    ("baichuan", "plain"): _MHA,
    ("baichuan", "tied"): {**_MHA, "tie_word_embeddings": True},
    ("phi3", "plain"): _GQA,
    ("phi3", "tied"): {**_GQA, "tie_word_embeddings": True},
    ("gpt_neox", "plain"): _MHA,
    ("gpt_neox", "unbiased"): {**_MHA, "attention_bias": False},
    ("gpt_neox", "tied"): {**_MHA, "tie_word_embeddings": True},
    ("chatglm", "plain"): _CHATGLM,
    ("chatglm", "biased"): {**_CHATGLM, "add_bias_linear": True, "add_qkv_bias": False},
    ("chatglm", "tied"): {**_CHATGLM, "tie_word_embeddings": True},
    ("chatglm", "one head each"): {**_CHATGLM, "multi_query_attention": False, "post_layer_norm": False},
    ("gpt2", "plain"): _GPT2,
    ("gpt2", "untied"): {**_GPT2, "tie_word_embeddings": False},
    ("gpt2", "four times"): {**_GPT2, "n_inner": None},
    ("glm4", "plain"): {**_GQA, "head_dim": 4, "attention_bias": True},
    ("glm4", "unbiased"): {**_GQA, "head_dim": 4, "attention_bias": False},
    ("glm4", "tied"): {**_GQA, "head_dim": 4, "attention_bias": False, "tie_word_embeddings": True},
    ("glm4_moe", "plain"): _GLM_MOE,
    ("glm4_moe", "normed"): {**_GLM_MOE, "attention_bias": False, "use_qk_norm": True},
    ("glm4_moe", "mtp"): {**_GLM_MOE, "num_nextn_predict_layers": 2, "use_qk_norm": True},
    ("glm4_moe", "tied mtp"): {**_GLM_MOE, "num_nextn_predict_layers": 1, "tie_word_embeddings": True},
    ("deepseek_v4", "published"): _V4_PUBLISHED,
    ("deepseek_v4", "saved by transformers"): _V4_SAVED,
    ("deepseek_v4", "tied"): {**_V4_PUBLISHED, "tie_word_embeddings": True, "num_nextn_predict_layers": 2},
}


def tiny_config(family: str, variant: str) -> Config:
    """A small config of ``family``."""
    return {"model_type": family, **TINY[family, variant]}


def roots(family: str, variant: str) -> tuple[str, ...]:
    """The prefixes that a model of this family is saved under: with the head, and without."""
    if family == "deepseek_v4":
        return ("model.",) if variant == "saved by transformers" else ("",)
    if (family, variant) in (("glm4_moe", "mtp"), ("glm4_moe", "tied mtp")):
        return ("model.",)
    return {"gpt_neox": "gpt_neox.", "chatglm": "transformer.", "gpt2": "transformer."}.get(family, "model."), ""


def has_own_head(c: Config, root: str) -> bool:
    """Whether the output head is a tensor of its own in the file."""
    match c["model_type"]:
        case "gpt2":
            return bool(root) and not c.get("tie_word_embeddings", True)
        case "chatglm" | "deepseek_v4":
            return not c.get("tie_word_embeddings", False)
    return bool(root) and not c["tie_word_embeddings"]


def shapes(c: Config, root: str) -> Shapes:
    """Every tensor of a model, tied copies left out."""
    match c["model_type"]:
        case "internlm2":
            return _internlm2(c, root)
        case "baichuan" | "phi3" | "glm4" | "glm4_moe":
            return _llama_like(c, root)
        case "gpt_neox":
            return _gpt_neox(c, root)
        case "chatglm":
            return _chatglm(c, root)
        case "gpt2":
            return _gpt2(c, root)
        case "deepseek_v4":
            return _deepseek_v4(c, root)
    raise AssertionError(c["model_type"])


def _internlm2(c: Config, root: str) -> Shapes:
    v, h, f = c["vocab_size"], c["hidden_size"], c["intermediate_size"]
    n, g = c["num_attention_heads"], c["num_key_value_heads"]
    d = h // n
    found: Shapes = {f"{root}tok_embeddings.weight": (v, h), f"{root}norm.weight": (h,)}
    for i in range(c["num_hidden_layers"]):
        layer = f"{root}layers.{i}."
        found |= {
            layer + "attention_norm.weight": (h,),
            layer + "ffn_norm.weight": (h,),
            layer + "attention.wqkv.weight": ((n + 2 * g) * d, h),
            layer + "attention.wo.weight": (h, h),
            layer + "feed_forward.w1.weight": (f, h),
            layer + "feed_forward.w2.weight": (h, f),
            layer + "feed_forward.w3.weight": (f, h),
        }
        if c["bias"]:
            found |= {layer + "attention.wqkv.bias": ((n + 2 * g) * d,), layer + "attention.wo.bias": (h,)}
    if has_own_head(c, root):
        found["output.weight"] = (v, h)
    return found


def _llama_like(c: Config, root: str) -> Shapes:
    v, h, family = c["vocab_size"], c["hidden_size"], c["model_type"]
    found: Shapes = {f"{root}embed_tokens.weight": (v, h), f"{root}norm.weight": (h,)}
    own = c["num_hidden_layers"]
    extra = c.get("num_nextn_predict_layers", 0) if family == "glm4_moe" else 0
    for i in range(own + extra):
        layer = f"{root}layers.{i}."
        names = ["input_layernorm", "post_attention_layernorm"]
        if family == "glm4":
            names += ["post_self_attn_layernorm", "post_mlp_layernorm"]
        if i >= own:
            names += ["enorm", "hnorm", "shared_head.norm"]
            found[layer + "eh_proj.weight"] = (h, 2 * h)
        found |= {f"{layer}{name}.weight": (h,) for name in names}
        found |= {f"{layer}self_attn.{name}": shape for name, shape in _attention(c).items()}
        found |= {f"{layer}mlp.{name}": shape for name, shape in _feed_forward(c, i).items()}
    if has_own_head(c, root):
        found["lm_head.weight"] = (v, h)
    return found


def _attention(c: Config) -> Shapes:
    h, n = c["hidden_size"], c["num_attention_heads"]
    g = c.get("num_key_value_heads") or n
    d = c.get("head_dim") or h // n
    match c["model_type"]:
        case "baichuan":
            return {"W_pack.weight": (3 * h, h), "o_proj.weight": (h, h)}
        case "phi3":
            return {"qkv_proj.weight": ((n + 2 * g) * d, h), "o_proj.weight": (h, n * d)}
    found: Shapes = {
        "q_proj.weight": (n * d, h),
        "k_proj.weight": (g * d, h),
        "v_proj.weight": (g * d, h),
        "o_proj.weight": (h, n * d),
    }
    if c["attention_bias"]:
        found |= {"q_proj.bias": (n * d,), "k_proj.bias": (g * d,), "v_proj.bias": (g * d,)}
    if c.get("use_qk_norm"):
        found |= {"q_norm.weight": (d,), "k_norm.weight": (d,)}
    return found


def _gated(prefix: str, h: int, f: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (f, h),
        f"{prefix}up_proj.weight": (f, h),
        f"{prefix}down_proj.weight": (h, f),
    }


def _feed_forward(c: Config, i: int) -> Shapes:
    h, f = c["hidden_size"], c["intermediate_size"]
    if c["model_type"] in ("phi3", "glm4"):
        return {"gate_up_proj.weight": (2 * f, h), "down_proj.weight": (h, f)}
    if c["model_type"] == "baichuan" or i < c["first_k_dense_replace"]:
        return _gated("", h, f)
    e, x = c["n_routed_experts"], c["moe_intermediate_size"]
    found: Shapes = {"gate.weight": (e, h), "gate.e_score_correction_bias": (e,)}
    for k in range(e):
        found |= _gated(f"experts.{k}.", h, x)
    return found | _gated("shared_experts.", h, x * c["n_shared_experts"])


def _gpt_neox(c: Config, root: str) -> Shapes:
    v, h, f = c["vocab_size"], c["hidden_size"], c["intermediate_size"]
    linears = {
        "attention.query_key_value": (3 * h, h),
        "attention.dense": (h, h),
        "mlp.dense_h_to_4h": (f, h),
        "mlp.dense_4h_to_h": (h, f),
    }
    found: Shapes = {f"{root}embed_in.weight": (v, h)}
    for i in range(c["num_hidden_layers"]):
        layer = f"{root}layers.{i}."
        for name, shape in linears.items():
            found[f"{layer}{name}.weight"] = shape
            if name.startswith("mlp.") or c.get("attention_bias", True):
                found[f"{layer}{name}.bias"] = shape[:1]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found |= {f"{layer}{norm}.weight": (h,), f"{layer}{norm}.bias": (h,)}
    found |= {f"{root}final_layer_norm.weight": (h,), f"{root}final_layer_norm.bias": (h,)}
    if has_own_head(c, root):
        found["embed_out.weight"] = (v, h)
    return found


def _chatglm(c: Config, root: str) -> Shapes:
    v, h, f, n, d = (
        c["padded_vocab_size"],
        c["hidden_size"],
        c["ffn_hidden_size"],
        c["num_attention_heads"],
        c["kv_channels"],
    )
    g = c["multi_query_group_num"] if c["multi_query_attention"] else n
    biased = c["add_bias_linear"]
    linears = {
        "self_attention.query_key_value": ((n + 2 * g) * d, h),
        "self_attention.dense": (h, n * d),
        "mlp.dense_h_to_4h": (2 * f, h),
        "mlp.dense_4h_to_h": (h, f),
    }
    found: Shapes = {f"{root}embedding.word_embeddings.weight": (v, h)}
    for i in range(c["num_layers"]):
        layer = f"{root}encoder.layers.{i}."
        for name, shape in linears.items():
            found[f"{layer}{name}.weight"] = shape
            if biased or (c["add_qkv_bias"] and "query" in name):
                found[f"{layer}{name}.bias"] = shape[:1]
        found |= {f"{layer}input_layernorm.weight": (h,), f"{layer}post_attention_layernorm.weight": (h,)}
    if c["post_layer_norm"]:
        found[f"{root}encoder.final_layernorm.weight"] = (h,)
    if has_own_head(c, root):
        found[f"{root}output_layer.weight"] = (v, h)
    return found


def _gpt2(c: Config, root: str) -> Shapes:
    h, f = c["n_embd"], c["n_inner"] or 4 * c["n_embd"]
    # Conv1D: (in, out).
    convs = {"attn.c_attn": (h, 3 * h), "attn.c_proj": (h, h), "mlp.c_fc": (h, f), "mlp.c_proj": (f, h)}
    found: Shapes = {f"{root}wte.weight": (c["vocab_size"], h), f"{root}wpe.weight": (c["n_positions"], h)}
    for i in range(c["n_layer"]):
        for name, shape in convs.items():
            found |= {f"{root}h.{i}.{name}.weight": shape, f"{root}h.{i}.{name}.bias": shape[1:]}
        for norm in ("ln_1", "ln_2"):
            found |= {f"{root}h.{i}.{norm}.weight": (h,), f"{root}h.{i}.{norm}.bias": (h,)}
    found |= {f"{root}ln_f.weight": (h,), f"{root}ln_f.bias": (h,)}
    if has_own_head(c, root):
        found["lm_head.weight"] = (c["vocab_size"], h)
    return found


def compression(c: Config, i: int) -> int:
    """How many tokens layer ``i`` of DeepSeek-V4 compresses into one; 0 for none."""
    if "compress_ratios" in c:
        return int(c["compress_ratios"][i])
    rates = {"sliding_attention": 0, **c["compress_rates"]}
    return int(rates[c["layer_types"][i]])


def hashed(c: Config, i: int) -> bool:
    """Whether layer ``i`` of DeepSeek-V4 looks its experts up by token id."""
    return bool(c["mlp_layer_types"][i] == "hash_moe") if "mlp_layer_types" in c else i < c["num_hash_layers"]


def _deepseek_v4(c: Config, root: str) -> Shapes:
    v, h, k = c["vocab_size"], c["hidden_size"], c["hc_mult"]
    saved = root == "model."
    embed, head = ("model.embed_tokens", "model.hc_head.hc_") if saved else ("embed", "hc_head_")
    found: Shapes = {f"{embed}.weight": (v, h), f"{root}norm.weight": (h,)}
    found |= {f"{head}fn": (k, k * h), f"{head}base": (k,), f"{head}scale": (1,)}
    for i in range(c["num_hidden_layers"]):
        layer = f"{root}layers.{i}."
        found |= {layer + name: shape for name, shape in _v4_layer(c, compression(c, i), hashed(c, i), saved).items()}
    for j in range(0 if saved else c["num_nextn_predict_layers"]):
        layer = f"mtp.{j}."
        found |= {layer + name: shape for name, shape in _v4_layer(c, 0, False, saved).items()}
        found |= {f"{layer}{name}.weight": (h,) for name in ("enorm", "hnorm", "norm")}
        found |= {f"{layer}{name}.weight": (h, h) for name in ("e_proj", "h_proj")}
        found |= {f"{layer}hc_head_fn": (k, k * h), f"{layer}hc_head_base": (k,), f"{layer}hc_head_scale": (1,)}
    if has_own_head(c, root):
        found["head.weight"] = (v, h)
    return found


def _v4_layer(c: Config, ratio: int, by_hash: bool, saved: bool) -> Shapes:
    h, n, d, q, u, o = (
        c[key] for key in ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank")
    )
    found: Shapes = {
        "attn_norm.weight": (h,),
        "ffn_norm.weight": (h,),
        "attn.wq_a.weight": (q, h),
        "attn.q_norm.weight": (q,),
        "attn.wq_b.weight": (n * d, q),
        "attn.wkv.weight": (d, h),
        "attn.norm.weight" if saved else "attn.kv_norm.weight": (d,),
        "attn.attn_sink": (n,),
        "attn.wo_a.weight": (u * o, n * d // u),
        "attn.wo_b.weight": (h, u * o),
    }
    if ratio:
        # The windows of the finer compression overlap: each token has two of everything.
        found |= _compressor("attn.compressor.", ratio, d * (2 if ratio == 4 else 1), d, h)
    if ratio == 4:
        m, y = c["index_n_heads"], c["index_head_dim"]
        found |= {"attn.indexer.wq_b.weight": (m * y, q), "attn.indexer.weights_proj.weight": (m, h)}
        found |= _compressor("attn.indexer.compressor.", ratio, 2 * y, y, h)
    e, x, k = c["n_routed_experts"], c["moe_intermediate_size"], c["hc_mult"]
    found["ffn.gate.weight"] = (e, h)
    if by_hash:
        found["ffn.gate.tid2eid"] = (c["vocab_size"], c["num_experts_per_tok"])
    else:
        found["ffn.gate.bias"] = (e,)
    for prefix in (*(f"ffn.experts.{index}." for index in range(e)), "ffn.shared_experts."):
        found |= {prefix + "w1.weight": (x, h), prefix + "w2.weight": (h, x), prefix + "w3.weight": (x, h)}
    for part in ("attn", "ffn"):
        found |= {
            f"hc_{part}_fn": (2 * k + k * k, k * h),
            f"hc_{part}_base": (2 * k + k * k,),
            f"hc_{part}_scale": (3,),
        }
    return found


def _compressor(prefix: str, ratio: int, width: int, normed: int, h: int) -> Shapes:
    return {
        prefix + "ape": (ratio, width),
        prefix + "wkv.weight": (width, h),
        prefix + "wgate.weight": (width, h),
        prefix + "norm.weight": (normed,),
    }
