"""There and back, opened by transformers itself: nothing missing, nothing unexpected, the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import load_ckpt, load_safetensors
from published_models import tiny_config

import ckptbridge
from ckptbridge.errors import CkptBridgeError

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0]])
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
PLAIN: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}


def build(model_type: str, variant: str = "plain", auto: str = "AutoModelForCausalLM", **more: Any) -> Any:
    """A small model whose every tensor is random: norms of ones and biases of zeros would hide a wrong place."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**{**PLAIN, **tiny_config(model_type, variant), **more})
    model = getattr(transformers, auto).from_config(config, **EAGER).eval()
    for tensor in model.state_dict().values():
        tensor.normal_(std=0.5)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        output = model(TOKENS)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def reopen(auto: str, folder: Path, **more: Any) -> Any:
    """The model that transformers makes of a folder, if it misses nothing and finds nothing unexpected."""
    cls = getattr(transformers, auto)
    model, report = cls.from_pretrained(folder, output_loading_info=True, **EAGER, **more)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not report[what], (what, report[what])
    return model.eval()


DECODERS = [
    ("llama", "plain"),
    ("llama", "biased"),
    ("llama", "tied"),
    ("mistral", "plain"),
    ("qwen2", "plain"),
    ("qwen2", "tied"),
    ("qwen3", "plain"),
    ("mixtral", "plain"),
    ("qwen2_moe", "mixed"),
    ("qwen3_moe", "plain"),
    ("deepseek_v2", "lite"),
    ("deepseek_v3", "plain"),
    ("deepseek_v3", "no-q-lora"),
]


@pytest.mark.parametrize(("model_type", "variant"), DECODERS)
def test_decoders_open_again_with_equal_logits(model_type: str, variant: str, tmp_path: Path) -> None:
    model = build(model_type, variant)
    model.save_pretrained(tmp_path / "hf")
    ckptbridge.convert(tmp_path / "hf", tmp_path / "ms.ckpt", direction="pt2ms")
    ckptbridge.convert(tmp_path / "ms.ckpt", tmp_path / "back", direction="ms2pt")
    again = reopen("AutoModelForCausalLM", tmp_path / "back")
    assert again.config.to_dict() == reopen("AutoModelForCausalLM", tmp_path / "hf").config.to_dict() | {
        "_name_or_path": str(tmp_path / "back")
    }
    expected = logits(model)
    assert expected.std() > 0.1  # a model that says something
    assert torch.equal(logits(again), expected)


@pytest.mark.parametrize(
    ("auto", "more"),
    [
        ("AutoModel", {}),
        ("AutoModelForMaskedLM", {}),
        ("AutoModelForSequenceClassification", {"num_labels": 3}),
    ],
)
def test_bert_opens_again(auto: str, more: dict[str, Any], tmp_path: Path) -> None:
    model = build("bert", auto=auto, **more)
    model.save_pretrained(tmp_path / "hf")
    ckptbridge.convert(tmp_path / "hf", tmp_path / "ms", direction="pt2ms", format="safetensors")
    ckptbridge.convert(tmp_path / "ms", tmp_path / "back", direction="ms2pt")
    assert torch.equal(logits(reopen(auto, tmp_path / "back")), logits(model))


def test_a_base_model_opens_again(tmp_path: Path) -> None:
    model = build("qwen3", auto="AutoModel")
    model.save_pretrained(tmp_path / "hf")
    ckptbridge.convert(tmp_path / "hf", tmp_path / "ms.ckpt", direction="pt2ms")
    ckptbridge.convert(tmp_path / "ms.ckpt", tmp_path / "back", direction="ms2pt")
    assert torch.equal(logits(reopen("AutoModel", tmp_path / "back")), logits(model))


@pytest.mark.parametrize("form", ["one file", "shards"])
def test_bins_and_shards_open_again(form: str, tmp_path: Path) -> None:
    """A pytorch_model.bin, or shards with their index, in; the same form of .bin out."""
    model = build("llama", "tied")
    folder = tmp_path / "hf"
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    state = model.state_dict()
    assert "lm_head.weight" in state  # tied, sharing its storage
    shard_size = 10**9 if form == "one file" else 6000
    split = transformers.modeling_utils.split_torch_state_dict_into_shards(
        state, filename_pattern="pytorch_model{suffix}.bin", max_shard_size=shard_size
    )
    for file, names in split.filename_to_tensors.items():
        torch.save({name: state[name] for name in names}, folder / file)
    if split.is_sharded:
        index = {"metadata": {}, "weight_map": split.tensor_to_filename}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert split.is_sharded == (form == "shards")
    ckptbridge.convert(folder, tmp_path / "ms.ckpt", direction="pt2ms")
    summary = ckptbridge.convert(
        tmp_path / "ms.ckpt", tmp_path / "back", direction="ms2pt", format="bin", max_shard_size=shard_size
    )
    assert (len(summary.plan.files) > 3) == split.is_sharded
    assert not list((tmp_path / "back").glob("*.safetensors"))
    assert torch.equal(logits(reopen("AutoModelForCausalLM", tmp_path / "back")), logits(model))
    loaded: dict[str, torch.Tensor] = {}
    for file in sorted((tmp_path / "back").glob("*.bin")):
        loaded |= torch.load(file, weights_only=True)
    assert loaded.keys() == state.keys()  # the tied copy is restored: the source had it
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_safetensors_shards_open_again(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path / "hf", max_shard_size="8KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    ckptbridge.convert(tmp_path / "hf", tmp_path / "ms", direction="pt2ms", format="safetensors", max_shard_size=9000)
    ckptbridge.convert(tmp_path / "ms", tmp_path / "back", direction="ms2pt", max_shard_size=9000)
    shards = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(shards) > 3
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert {shard.name for shard in shards} == set(index["weight_map"].values())
    arrays = load_safetensors(tmp_path / "back")
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in arrays.values())
    assert index["weight_map"].keys() == arrays.keys()
    assert torch.equal(logits(reopen("AutoModelForCausalLM", tmp_path / "back")), logits(model))


# --- casts -----------------------------------------------------------------------------------


def test_a_cast_to_bfloat16_is_torchs_and_the_config_says_so(tmp_path: Path) -> None:
    model = build("deepseek_v3")
    model.save_pretrained(tmp_path / "hf")
    ckptbridge.convert(tmp_path / "hf", tmp_path / "ms.ckpt", direction="pt2ms", dtype="bfloat16")
    ckptbridge.convert(tmp_path / "ms.ckpt", tmp_path / "back", direction="ms2pt")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    again = reopen("AutoModelForCausalLM", tmp_path / "back", dtype="auto")
    kept = "e_score_correction_bias"
    for name, tensor in model.state_dict().items():
        got = again.state_dict()[name]
        if name.endswith(kept):
            assert torch.equal(got.float(), tensor), name
        else:
            assert torch.equal(got, tensor.to(torch.bfloat16)), name
    # In the file itself the router's bias is float32 still.
    import mindspore

    loaded = mindspore.load_checkpoint(str(tmp_path / "ms.ckpt"))
    types = {name: str(value.dtype) for name, value in loaded.items() if not isinstance(value, str)}
    assert {name for name, dtype in types.items() if dtype == "Float32"} == {n for n in types if "expert_bias" in n}
    assert {dtype for name, dtype in types.items() if "expert_bias" not in name} == {"BFloat16"}


def test_bfloat16_to_float32_and_back_is_exact(tmp_path: Path) -> None:
    model = build("qwen2").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "hf")
    ckptbridge.convert(tmp_path / "hf", tmp_path / "ms.ckpt", direction="pt2ms", dtype="fp32")
    assert {a.dtype for a in load_ckpt(tmp_path / "ms.ckpt").values()} == {np.dtype(np.float32)}
    summary = ckptbridge.convert(tmp_path / "ms.ckpt", tmp_path / "back", direction="ms2pt", dtype="bf16")
    assert (summary.overflow, summary.underflow) == (0, 0)
    again = reopen("AutoModelForCausalLM", tmp_path / "back", dtype="auto")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_values_that_a_cast_loses_are_an_error_and_counted_when_allowed(tmp_path: Path) -> None:
    model = build("llama")
    lost = model.model.layers[1].self_attn.v_proj.weight.data
    lost[0, :3] = torch.tensor([1e5, -7e4, torch.inf])  # two of them overflow float16; infinity was infinite before
    lost[1, :4] = torch.tensor([1e-9, -1e-8, 0.0, 2.0**-25])  # ties round to even: 2**-25 becomes zero
    lost[2, :2] = torch.tensor([torch.nan, 2.0**-24])  # NaN stays NaN, and the smallest denormal stays
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(CkptBridgeError, match=r"2 finite value\(s\) into infinity and 3 non-zero value\(s\) into zero"):
        ckptbridge.convert(tmp_path / "hf", tmp_path / "ms.ckpt", direction="pt2ms", dtype="float16")
    assert not (tmp_path / "ms.ckpt").exists()
    summary = ckptbridge.convert(
        tmp_path / "hf", tmp_path / "ms.ckpt", direction="pt2ms", dtype="float16", allow_overflow=True
    )
    assert (summary.overflow, summary.underflow) == (2, 3)
    ckptbridge.convert(tmp_path / "ms.ckpt", tmp_path / "back", direction="ms2pt")
    words = load_safetensors(tmp_path / "back")["model.layers.1.self_attn.v_proj.weight"]
    assert torch.equal(torch.from_numpy(words).nan_to_num(7), lost.to(torch.float16).nan_to_num(7))
