"""Checkpoints to measure on: made-up weights in the shapes of real families, streamed to disk.

The safetensors files are written here by hand (eight bytes of header length, JSON, bytes), so that inputs of
any size need little memory and no framework. A *sparse* checkpoint has its header and its length, and no data.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

GIB = 1 << 30
_ITEMSIZE = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
_POOL_BYTES = 32 << 20


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written: its name, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEMSIZE[self.dtype]


Checkpoint = tuple[dict[str, Any], list[Tensor]]


# --- shapes ----------------------------------------------------------------------------------


def llama(nbytes: int, dtype: str = "BF16") -> Checkpoint:
    """A Llama of about ``nbytes``: hidden 2048, 16 heads over 4 groups, as many layers as fit."""
    h, f, heads, groups, d, v = 2048, 5632, 16, 4, 128, 32000
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": h,
        "intermediate_size": f,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": d,
        "vocab_size": v,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
    }
    layer = {
        "self_attn.q_proj": (heads * d, h),
        "self_attn.k_proj": (groups * d, h),
        "self_attn.v_proj": (groups * d, h),
        "self_attn.o_proj": (h, heads * d),
        "mlp.gate_proj": (f, h),
        "mlp.up_proj": (f, h),
        "mlp.down_proj": (h, f),
        "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
    }
    per_layer = sum(math.prod(s) for s in layer.values()) * _ITEMSIZE[dtype]
    layers = max(1, round((nbytes - 2 * v * h * _ITEMSIZE[dtype]) / per_layer))
    tensors = [Tensor("model.embed_tokens.weight", dtype, (v, h))]
    for i in range(layers):
        tensors += [Tensor(f"model.layers.{i}.{name}.weight", dtype, shape) for name, shape in layer.items()]
    tensors += [Tensor("model.norm.weight", dtype, (h,)), Tensor("lm_head.weight", dtype, (v, h))]
    return {**config, "num_hidden_layers": layers}, tensors


def one_large_tensor(nbytes: int, dtype: str = "BF16") -> Checkpoint:
    """A Llama of one small layer with an embedding table of about ``nbytes``."""
    config, tensors = llama(0, dtype)
    hidden = config["hidden_size"]
    vocabulary = nbytes // (hidden * _ITEMSIZE[dtype])
    config["vocab_size"] = vocabulary
    wide = {"model.embed_tokens.weight", "lm_head.weight"}
    return {**config, "tie_word_embeddings": True}, [
        Tensor(t.name, dtype, (vocabulary, hidden)) if t.name in wide else t
        for t in tensors
        if t.name != "lm_head.weight"
    ]


def deepseek_v3(nbytes: int, fp8: bool = False) -> Checkpoint:
    """A small DeepSeek-V3 of about ``nbytes``: 32 experts of 1024 a layer, as many layers as fit."""
    config = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "moe_intermediate_size": 1024,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 512,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "topk_method": "noaux_tc",
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
    }
    if fp8:
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    per_layer = 33 * 3 * 2048 * 1024 * (1 if fp8 else 2)
    config["num_hidden_layers"] = max(1, round((nbytes - 2 * 32000 * 2048 * 2) / per_layer))
    return config, deepseek_tensors(config)


def deepseek_tensors(config: dict[str, Any]) -> list[Tensor]:
    """The tensors of a DeepSeek-V3 checkpoint as published: names and shapes from its config."""
    block = config.get("quantization_config", {}).get("weight_block_size")
    h, heads = config["hidden_size"], config["num_attention_heads"]
    q, kv = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
    layers, extra = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0

    def linear(name: str, rows: int, columns: int) -> list[Tensor]:
        if not block:
            return [Tensor(name, "BF16", (rows, columns))]
        scale = Tensor(f"{name}_scale_inv", "F32", (-(-rows // block[0]), -(-columns // block[1])))
        return [Tensor(name, "F8_E4M3", (rows, columns)), scale]

    def mlp(prefix: str, f: int) -> list[Tensor]:
        return [
            *linear(f"{prefix}.gate_proj.weight", f, h),
            *linear(f"{prefix}.up_proj.weight", f, h),
            *linear(f"{prefix}.down_proj.weight", h, f),
        ]

    embedding, head = (
        Tensor(name, "BF16", (config["vocab_size"], h)) for name in ("model.embed_tokens.weight", "lm_head.weight")
    )
    found = [embedding]
    for i in range(layers + extra):
        at = f"model.layers.{i}"
        found += [
            *linear(f"{at}.self_attn.q_a_proj.weight", q, h),
            *linear(f"{at}.self_attn.q_b_proj.weight", heads * (nope + rope), q),
            *linear(f"{at}.self_attn.kv_a_proj_with_mqa.weight", kv + rope, h),
            *linear(f"{at}.self_attn.kv_b_proj.weight", heads * (nope + value), kv),
            *linear(f"{at}.self_attn.o_proj.weight", h, heads * value),
            Tensor(f"{at}.self_attn.q_a_layernorm.weight", "BF16", (q,)),
            Tensor(f"{at}.self_attn.kv_a_layernorm.weight", "BF16", (kv,)),
            Tensor(f"{at}.input_layernorm.weight", "BF16", (h,)),
            Tensor(f"{at}.post_attention_layernorm.weight", "BF16", (h,)),
        ]
        if i < config["first_k_dense_replace"]:
            found += mlp(f"{at}.mlp", config["intermediate_size"])
            continue
        found.append(Tensor(f"{at}.mlp.gate.weight", "BF16", (experts, h)))
        found.append(Tensor(f"{at}.mlp.gate.e_score_correction_bias", "F32", (experts,)))
        for e in range(experts):
            found += mlp(f"{at}.mlp.experts.{e}", width)
        found += mlp(f"{at}.mlp.shared_experts", width * config["n_shared_experts"])
        if i >= layers:  # multi-token prediction: a layer with its own ends
            found += [
                Tensor(f"{at}.enorm.weight", "BF16", (h,)),
                Tensor(f"{at}.hnorm.weight", "BF16", (h,)),
                Tensor(f"{at}.eh_proj.weight", "BF16", (h, 2 * h)),
                Tensor(f"{at}.shared_head.norm.weight", "BF16", (h,)),
                Tensor(f"{at}.embed_tokens.weight", "BF16", (config["vocab_size"], h)),
                Tensor(f"{at}.shared_head.head.weight", "BF16", (config["vocab_size"], h)),
            ]
    return [*found, Tensor("model.norm.weight", "BF16", (h,)), head]


# --- files -----------------------------------------------------------------------------------


def write(folder: Path, checkpoint: Checkpoint, shards: int = 2, sparse: bool = False) -> Path:
    """Write config.json and the tensors in ``shards`` files of about one size; returns ``folder``."""
    config, tensors = checkpoint
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    parts = _cut(tensors, shards)
    pools = None if sparse else {dtype: _pool(dtype) for dtype in {t.dtype for t in tensors}}
    weight_map = {}
    for k, part in enumerate(parts, 1):
        name = f"model-{k:05d}-of-{len(parts):05d}.safetensors" if len(parts) > 1 else "model.safetensors"
        write_file(folder / name, part, pools)
        weight_map.update({t.name: name for t in part})
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_file(path: Path, tensors: Sequence[Tensor], pools: dict[str, npt.NDArray[np.uint8]] | None) -> None:
    """One safetensors file; without ``pools`` the data is a hole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for t in tensors:
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if pools is None:
            file.truncate(8 + len(text) + at)
            return
        for k, t in enumerate(tensors):
            # Each tensor begins elsewhere in the pool, so that no two are equal.
            for data in _stream(pools[t.dtype], k * 4096, t.nbytes):
                file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _cut(tensors: Sequence[Tensor], shards: int) -> list[list[Tensor]]:
    share = sum(t.nbytes for t in tensors) / shards
    parts: list[list[Tensor]] = [[]]
    filled = 0
    for t in tensors:
        if filled >= share * len(parts) and parts[-1]:
            parts.append([])
        parts[-1].append(t)
        filled += t.nbytes
    return parts


def _pool(dtype: str) -> npt.NDArray[np.uint8]:
    """Bytes of weights drawn from a normal distribution; of float8, any words but NaN."""
    rng = np.random.default_rng(0)
    if dtype == "F8_E4M3":
        words = rng.integers(0, 256, _POOL_BYTES, dtype=np.uint8)
        words[words & 0x7F == 0x7F] = 0
        return words
    values = rng.standard_normal(_POOL_BYTES // 4, dtype=np.float32) * np.float32(0.02)
    if dtype == "F32":
        return values.view(np.uint8)
    return np.concatenate([(values.view(np.uint32) >> 16).astype(np.uint16)] * 2).view(np.uint8)


def _stream(pool: npt.NDArray[np.uint8], start: int, nbytes: int) -> Iterable[memoryview]:
    at = start % pool.size
    while nbytes:
        count = min(nbytes, pool.size - at)
        yield pool[at : at + count].data
        nbytes -= count
        at = 0
