"""The MindSpore side of the families that fuse, written out in NumPy by hand: the oracle of their tables.

A model is first taken apart into its plain parts (q, k, v, gate, up ...), then put together as the target has
it. Both follow the networks that read the layouts, with loops and slices; nothing here knows the table language
or the axis notation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from published_fused import Config
from written_deepseek_v4 import deepseek_v4
from written_layouts import row_by_row, stacked_experts

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]
KINDS = ("weight", "bias")


def expected(
    family: str, target: str, c: Config, options: Mapping[str, str], pt: Arrays, root: str
) -> dict[str, Array]:
    """The MindSpore side of ``target`` in the layout ``options``; tied copies are not in ``pt``."""
    if target == "hf":
        return dict(pt)
    if family == "deepseek_v4":
        return deepseek_v4(c, options, pt, root)
    if target == "nn":
        return {nn_name(name): _upright(family, name, array) for name, array in pt.items()}
    ms: dict[str, Array] = {}
    left = dict(pt)
    for i in range(layers(c)):
        layer = take_layer(family, c, left, root, i)
        ms |= put_layer(family, target, c, options, layer, root, i)
    for name, array in left.items():
        ms[outer_name(family, target, name, root)] = array
    return ms


def layers(c: Config) -> int:
    """The number of layers, multi-token prediction layers included."""
    own = c.get("num_hidden_layers") or c.get("num_layers") or c["n_layer"]
    return int(own + (c.get("num_nextn_predict_layers") or 0))


# --- taking a layer apart --------------------------------------------------------------------


def heads(c: Config) -> tuple[int, int, int]:
    """Query heads, key/value heads, length of a head."""
    n = c.get("num_attention_heads") or c["n_head"]
    h = c.get("hidden_size") or c["n_embd"]
    if c["model_type"] == "chatglm":
        return n, c["multi_query_group_num"] if c["multi_query_attention"] else n, c["kv_channels"]
    return n, c.get("num_key_value_heads") or n, c.get("head_dim") or h // n


PREFIX = {"chatglm": "encoder.layers.{}.", "gpt2": "h.{}."}
# How each family calls its plain parts.
PARTS = {
    "internlm2": {"o": "attention.wo", "gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2",
                  "norm1": "attention_norm", "norm2": "ffn_norm"},
    "baichuan": {"gate": "mlp.gate_proj", "up": "mlp.up_proj"},
    "gpt_neox": {"o": "attention.dense", "fc1": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"},
    "chatglm": {"o": "self_attention.dense", "down": "mlp.dense_4h_to_h"},
    "gpt2": {"o": "attn.c_proj", "fc1": "mlp.c_fc", "down": "mlp.c_proj", "norm1": "ln_1", "norm2": "ln_2"},
    "phi3": {},
    "glm4": {"norm3": "post_self_attn_layernorm", "norm4": "post_mlp_layernorm"},
    "glm4_moe": {"gate": "mlp.gate_proj", "up": "mlp.up_proj"},
}  # fmt: skip
COMMON = {
    "o": "self_attn.o_proj",
    "down": "mlp.down_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}
FUSED = {
    "internlm2": "attention.wqkv",
    "baichuan": "self_attn.W_pack",
    "phi3": "self_attn.qkv_proj",
    "gpt_neox": "attention.query_key_value",
    "chatglm": "self_attention.query_key_value",
    "gpt2": "attn.c_attn",
}
PACKED = {"phi3": "mlp.gate_up_proj", "glm4": "mlp.gate_up_proj", "chatglm": "mlp.dense_h_to_4h"}


def take_layer(family: str, c: Config, left: dict[str, Array], root: str, i: int) -> dict[str, Array]:
    """The plain parts of layer ``i``, linear weights (out, in); takes what it knows out of ``left``."""
    prefix = root + PREFIX.get(family, "layers.{}.").format(i)
    source = {name.removeprefix(prefix): left.pop(name) for name in list(left) if name.startswith(prefix)}
    found: dict[str, Array] = {}
    for part, name in {**COMMON, **PARTS[family]}.items():
        for kind in KINDS:
            if f"{name}.{kind}" in source:
                array = source.pop(f"{name}.{kind}")
                found[f"{part}.{kind}"] = array.T if family == "gpt2" and array.ndim == 2 else array
    for kind in KINDS:
        if family in FUSED and f"{FUSED[family]}.{kind}" in source:
            q, k, v = take_apart(family, c, source.pop(f"{FUSED[family]}.{kind}"))
            found |= {f"q.{kind}": q, f"k.{kind}": k, f"v.{kind}": v}
        elif f"self_attn.q_proj.{kind}" in source:
            found |= {f"{x}.{kind}": source.pop(f"self_attn.{x}_proj.{kind}") for x in "qkv"}
        if family in PACKED and f"{PACKED[family]}.{kind}" in source:
            packed = source.pop(f"{PACKED[family]}.{kind}")
            half = len(packed) // 2
            found |= {f"gate.{kind}": packed[:half], f"up.{kind}": packed[half:]}
    return found | source


def take_apart(family: str, c: Config, fused: Array) -> tuple[Array, Array, Array]:
    """q, k and v, rows (out), from what the family's own code reads as one tensor."""
    n, g, d = heads(c)
    if family == "gpt2":  # Conv1D: the outputs are the last axis; split in three there
        h = n * d
        return tuple(fused[..., part * h : (part + 1) * h].T for part in range(3))  # type: ignore[return-value]
    if family == "gpt_neox":  # view(heads, 3 * d), then chunk(3)
        per_head = fused.reshape(n, 3 * d, *fused.shape[1:])
        return tuple(
            np.concatenate([per_head[head, part * d : (part + 1) * d] for head in range(n)]) for part in range(3)
        )  # type: ignore[return-value]
    if family == "internlm2":  # view(groups, queries of one + 2, d): queries, then -2 is the key and -1 the value
        groups = fused.reshape(g, n // g + 2, d, *fused.shape[1:])
        rows = fused.shape[1:]
        return (
            groups[:, :-2].reshape(n * d, *rows),
            groups[:, -2].reshape(g * d, *rows),
            groups[:, -1].reshape(g * d, *rows),
        )
    return fused[: n * d], fused[n * d : (n + g) * d], fused[(n + g) * d :]


# --- putting a layer together ----------------------------------------------------------------


def qkv_by_group(c: Config, q: Array, k: Array, v: Array) -> Array:
    """For each key/value head: the rows of its query heads, of its key, of its value."""
    n, g, d = heads(c)
    r = n // g
    rows = []
    for group in range(g):
        rows += [q[group * r * d : (group + 1) * r * d], k[group * d : (group + 1) * d], v[group * d : (group + 1) * d]]
    return np.concatenate(rows)


def put_layer(
    family: str, target: str, c: Config, options: Mapping[str, str], layer: Arrays, root: str, i: int
) -> dict[str, Array]:
    """Layer ``i`` as the target has it."""
    match target:
        case "flat":
            return flat_layer(family, layer, root, i)
        case "mindformers":
            return mindformers_layer(family, c, options, layer, i)
    match family:
        case "chatglm" | "glm4":
            if options.get("rope") == "halves":
                layer = {key: even_then_odd(c, a) if key[:2] in ("q.", "k.") else a for key, a in layer.items()}
            return legacy_glm_layer(options, layer, i)
        case "gpt2":
            return legacy_gpt2_layer(layer, i)
    return legacy_llama_layer(options, layer, i, c)


def flat_layer(family: str, layer: Arrays, root: str, i: int) -> dict[str, Array]:
    """q, k, v, o on the layer itself; gated feed-forward layers have gate_proj, up_proj, down_proj."""
    if family == "internlm2":
        prefix = f"model.layers.{i}."
        names = {**COMMON, "gate": "mlp.gate_proj", "up": "mlp.up_proj"}
    else:
        prefix = root + PREFIX.get(family, "layers.{}.").format(i)
        names = {**COMMON, **PARTS[family]}
        if family in PACKED:
            names |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    names |= {x: f"{x}_proj" for x in "qkvo"}
    found = {}
    for key, array in layer.items():
        part, _, kind = key.rpartition(".")
        name = f"{names[part]}.{kind}" if part in names else key.replace("self_attn.", "")
        found[prefix + name] = array
    return found


def mindformers_layer(family: str, c: Config, options: Mapping[str, str], layer: Arrays, i: int) -> dict[str, Array]:
    """A layer of the mcore networks; options attention, mlp, experts."""
    own = layers(c) - (c.get("num_nextn_predict_layers") or 0)
    outer = f"decoder.layers.{i}." if i < own else f"mtp.layers.{i - own}."
    prefix = outer if i < own else outer + "transformer_layer."
    norm = {"weight": "gamma", "bias": "beta"} if family in ("gpt_neox", "gpt2") else {"weight": "weight"}
    found: dict[str, Array] = {}
    used = set()
    for kind in KINDS:
        plain = {
            "o": "self_attention.linear_proj",
            "down": "mlp.linear_fc2",
            "fc1": "mlp.linear_fc1",
            "self_attn.q_norm": "self_attention.q_layernorm",
            "self_attn.k_norm": "self_attention.k_layernorm",
        }
        for part, name in plain.items():
            if f"{part}.{kind}" in layer:
                found[f"{prefix}{name}.{kind}"] = layer[f"{part}.{kind}"]
                used.add(f"{part}.{kind}")
        norms = ("input_layernorm", "pre_mlp_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
        for k, name in enumerate(norms, 1):
            if f"norm{k}.{kind}" in layer:
                found[f"{prefix}{name}.{norm[kind]}"] = layer[f"norm{k}.{kind}"]
                used.add(f"norm{k}.{kind}")
        if f"q.{kind}" in layer:
            q, k, v = (layer[f"{x}.{kind}"] for x in "qkv")
            fused = np.concatenate([q, k, v]) if options["attention"] == "contiguous" else qkv_by_group(c, q, k, v)
            found[f"{prefix}self_attention.linear_qkv.{kind}"] = fused
            used |= {f"{x}.{kind}" for x in "qkv"}
        if f"gate.{kind}" in layer:
            gate, up = layer[f"gate.{kind}"], layer[f"up.{kind}"]
            joined = np.concatenate([gate, up]) if options["mlp"] == "contiguous" else row_by_row(gate, up)
            found[f"{prefix}mlp.linear_fc1.{kind}"] = joined
            used |= {f"gate.{kind}", f"up.{kind}"}
    if "mlp.gate.weight" in layer:
        found |= {f"{prefix}mlp.{name}": array for name, array in experts(c, options, layer).items()}
        found[f"{prefix}mlp.router.weight"] = layer["mlp.gate.weight"]
        found[f"{prefix}mlp.router.expert_bias"] = layer["mlp.gate.e_score_correction_bias"]
        used |= {name for name in layer if name.startswith("mlp.")}
    for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight"):
        if name in layer:
            found[outer + name] = layer[name]
            used.add(name)
    if "shared_head.norm.weight" in layer:
        found[outer + "final_layernorm.weight"] = layer["shared_head.norm.weight"]
        used.add("shared_head.norm.weight")
    assert used == set(layer), sorted(set(layer) - used)
    return found


def experts(c: Config, options: Mapping[str, str], layer: Arrays) -> dict[str, Array]:
    """Routed and shared experts of GLM-4.5."""
    triples = []
    for k in range(c["n_routed_experts"]):
        gate, up, down = (layer[f"mlp.experts.{k}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        triples.append((gate, up, down))
    gate, up, down = (layer[f"mlp.shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down"))
    weight1, weight2 = stacked_experts(triples, options["experts"])
    shared = np.concatenate([gate, up]) if options["mlp"] == "contiguous" else row_by_row(gate, up)
    return {
        "experts.weight1": weight1,
        "experts.weight2": weight2,
        "shared_experts.linear_fc1.weight": shared,
        "shared_experts.linear_fc2.weight": down,
    }


def legacy_llama_layer(options: Mapping[str, str], layer: Arrays, i: int, c: Config) -> dict[str, Array]:
    """InternLM2 and Baichuan in MindFormers' older networks; InternLM2's fused projection keeps its own order."""
    prefix = f"model.layers.{i}."
    names = {"o": "attention.wo", "gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"}
    names |= {"norm1": "attention_norm", "norm2": "ffn_norm"}
    found = {
        f"{prefix}{names[key.partition('.')[0]]}.weight": a
        for key, a in layer.items()
        if key[:2] not in ("q.", "k.", "v.")
    }
    q, k, v = (layer[f"{x}.weight"] for x in "qkv")
    if options.get("qkv") == "fused":
        return found | {prefix + "attention.w.weight": qkv_by_group(c, q, k, v)}
    return found | {f"{prefix}attention.w{x}.weight": array for x, array in zip("qkv", (q, k, v), strict=True)}


def even_then_odd(c: Config, rows: Array) -> Array:
    """In each head, the rows 0, 2, 4 ... before the rows 1, 3, 5 ..."""
    d = heads(c)[2]
    each = [rows[start : start + d] for start in range(0, len(rows), d)]
    return np.concatenate([part for head in each for part in (head[0::2], head[1::2])])


def legacy_glm_layer(options: Mapping[str, str], layer: Arrays, i: int) -> dict[str, Array]:
    """ChatGLM2ForConditionalGeneration."""
    prefix = f"transformer.encoder.layers.{i}."
    names = {"o": "self_attention.dense", "down": "mlp.dense_4h_to_h", "norm1": "input_layernorm"}
    names |= {"norm2": "post_attention_layernorm", "norm3": "post_self_attn_layernorm", "norm4": "post_mlp_layernorm"}
    split = options["qkv"] == "split"
    if split:
        names |= {"q": "self_attention.wq", "k": "self_attention.wk", "v": "self_attention.wv"}
        names |= {"gate": "mlp.dense_left", "up": "mlp.dense_right"}
    found = {}
    for key, array in layer.items():
        part, _, kind = key.rpartition(".")
        if part in names:
            found[f"{prefix}{names[part]}.{kind}"] = array
    for kind in KINDS:
        if not split and f"q.{kind}" in layer:
            found[f"{prefix}self_attention.query_key_value.{kind}"] = np.concatenate(
                [layer[f"{x}.{kind}"] for x in "qkv"]
            )
        if not split and f"gate.{kind}" in layer:
            found[f"{prefix}mlp.dense_h_to_4h.{kind}"] = np.concatenate([layer[f"gate.{kind}"], layer[f"up.{kind}"]])
    return found


def legacy_gpt2_layer(layer: Arrays, i: int) -> dict[str, Array]:
    """MindFormers' older GPT-2: q, k, v (out, in); the other projections (in, out)."""
    prefix = f"backbone.blocks.{i}."
    names = {"q": "attention.dense1", "k": "attention.dense2", "v": "attention.dense3", "o": "attention.projection"}
    names |= {"fc1": "output.mapping", "down": "output.projection", "norm1": "layernorm1", "norm2": "layernorm2"}
    found = {}
    for key, array in layer.items():
        part, _, kind = key.rpartition(".")
        if part.startswith("norm"):
            kind = {"weight": "gamma", "bias": "beta"}[kind]
        found[f"{prefix}{names[part]}.{kind}"] = array.T if part in ("o", "fc1", "down") else array
    return found


# --- what is outside of the layers -----------------------------------------------------------

OUTER = {
    "mindformers": {
        "embed_tokens.weight": "embedding.word_embeddings.weight",
        "tok_embeddings.weight": "embedding.word_embeddings.weight",
        "embed_in.weight": "embedding.word_embeddings.weight",
        "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
        "wte.weight": "embedding.word_embeddings.weight",
        "wpe.weight": "embedding.position_embeddings.weight",
        "norm.weight": "decoder.final_layernorm.weight",
        "encoder.final_layernorm.weight": "decoder.final_layernorm.weight",
        "final_layer_norm.weight": "decoder.final_layernorm.gamma",
        "final_layer_norm.bias": "decoder.final_layernorm.beta",
        "ln_f.weight": "decoder.final_layernorm.gamma",
        "ln_f.bias": "decoder.final_layernorm.beta",
        "lm_head.weight": "output_layer.weight",
        "output.weight": "output_layer.weight",
        "embed_out.weight": "output_layer.weight",
        "output_layer.weight": "output_layer.weight",
    },
    "mindformers-legacy": {
        "embed_tokens.weight": "model.tok_embeddings.embedding_weight",
        "tok_embeddings.weight": "model.tok_embeddings.embedding_weight",
        "norm.weight": "model.norm_out.weight",
        "lm_head.weight": "lm_head.weight",
        "output.weight": "lm_head.weight",
        "wte.weight": "backbone.embedding.word_embedding.embedding_table",
        "wpe.weight": "backbone.embedding.position_embedding.embedding_table",
        "ln_f.weight": "backbone.layernorm.gamma",
        "ln_f.bias": "backbone.layernorm.beta",
        "embedding.word_embeddings.weight": "transformer.embedding.embedding_weight",
        "encoder.final_layernorm.weight": "transformer.encoder.final_layernorm.weight",
        "output_layer.weight": "transformer.output_layer.weight",
    },
}
GLM4_LEGACY = {
    "embed_tokens.weight": "transformer.embedding.embedding_weight",
    "norm.weight": "transformer.encoder.final_layernorm.weight",
    "lm_head.weight": "transformer.output_layer.weight",
}
INTERNLM2_FLAT = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def outer_name(family: str, target: str, name: str, root: str) -> str:
    """The name of a tensor that belongs to no layer."""
    plain = name.removeprefix(root)
    if target == "flat":
        return INTERNLM2_FLAT[plain] if family == "internlm2" else name
    if (family, target) == ("glm4", "mindformers-legacy"):
        return GLM4_LEGACY[plain]
    return OUTER[target][plain]


# --- networks of mindspore.nn layers ---------------------------------------------------------


def nn_name(name: str) -> str:
    """GPT-2's and GPT-NeoX's names with mindspore.nn's last component."""
    owner, _, last = name.rpartition(".")
    module = owner.rpartition(".")[2]
    if module in ("wte", "wpe", "embed_in"):
        return f"{owner}.embedding_table"
    if module in ("ln_1", "ln_2", "ln_f", "input_layernorm", "post_attention_layernorm", "final_layer_norm"):
        return f"{owner}.{'gamma' if last == 'weight' else 'beta'}"
    return name


def _upright(family: str, name: str, array: Array) -> Array:
    """A Conv1D as a Dense has it."""
    return array.T if family == "gpt2" and ".c_" in name and array.ndim == 2 else array
