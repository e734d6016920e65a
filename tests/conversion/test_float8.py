"""Block-quantised DeepSeek-V3 through the whole conversion, against the product written out with torch."""

from __future__ import annotations

import json
from pathlib import Path

import mindspore
import numpy as np
import pytest
import torch
from checkpoints import random_arrays, save_hf
from published_models import decoder_shapes, tiny_config
from safetensors.torch import load_file, save_file
from written_layouts import expected

import ckptbridge
from ckptbridge.errors import CkptBridgeError

BLOCK = (4, 8)  # ragged on every side of the small model
CONFIG = {
    **tiny_config("deepseek_v3", "mtp"),
    "quantization_config": {"quant_method": "fp8", "weight_block_size": list(BLOCK)},
}
QUANTISED = ("_proj.weight", "proj_with_mqa.weight")
COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def quantise(seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The file's tensors, and what they stand for in bfloat16 (the router's bias in float32)."""
    generator = torch.Generator().manual_seed(seed)
    stored, meant = {}, {}
    for name, array in random_arrays(decoder_shapes(CONFIG), seed).items():
        if name.endswith(COPIES) and "layers" in name:
            continue
        if name.endswith(QUANTISED):
            words = torch.randint(0, 256, array.shape, generator=generator, dtype=torch.uint8)
            words[(words & 0x7F) == 0x7F] = 0  # no NaN
            shape = [-(-n // b) for n, b in zip(array.shape, BLOCK, strict=True)]
            scale = torch.rand(shape, generator=generator) + 0.01
            spread = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
            stored[name] = words.view(torch.float8_e4m3fn)
            stored[name + "_scale_inv"] = scale
            rows, columns = array.shape
            meant[name] = (stored[name].float() * spread[:rows, :columns]).to(torch.bfloat16)
        else:
            dtype = torch.float32 if name.endswith("correction_bias") else torch.bfloat16
            stored[name] = meant[name] = torch.randn(array.shape, generator=generator).to(dtype)
    return stored, meant


def words(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {n: t.view(torch.int16 if t.dtype == torch.bfloat16 else torch.int32).numpy() for n, t in tensors.items()}


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Two shards, each weight's scale in the other one."""
    stored, meant = quantise()
    folder = save_hf(tmp_path / "hf", {}, CONFIG)
    (folder / "model.safetensors").unlink()
    scales = {n: t for n, t in stored.items() if n.endswith("_scale_inv")}
    weight_map = {}
    for k, shard in enumerate(({n: t for n, t in stored.items() if n not in scales}, scales), 1):
        name = f"model-0000{k}-of-00002.safetensors"
        save_file(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder, meant


@pytest.mark.parametrize("mla", ["separate", "fused"])
@pytest.mark.parametrize("mlp", ["interleaved", "contiguous"])
def test_every_weight_is_its_words_times_its_scales(
    source: tuple[Path, dict[str, torch.Tensor]], mla: str, mlp: str, tmp_path: Path
) -> None:
    folder, meant = source
    layout = {"mla": mla, "mlp": mlp, "experts": "2d"}
    summary = ckptbridge.convert(folder, tmp_path / "ms.ckpt", direction="pt2ms", layout=layout)
    loaded = mindspore.load_checkpoint(str(tmp_path / "ms.ckpt"))
    record = json.loads(loaded.pop("append_info"))
    want = expected("mindformers", CONFIG, layout, words(meant))
    assert loaded.keys() == want.keys()
    for name, parameter in loaded.items():
        assert parameter.asnumpy().tobytes() == want[name].tobytes(), name
    assert [(s["step"], s["from"], s["to"]) for s in record["lossy"]] == [("dequantise", "float8_e4m3fn", "bfloat16")]
    assert "quantization_config" not in record["config"]
    assert summary.provenance == record
    # What comes back is the dequantised model, by a config that says so.
    ckptbridge.convert(tmp_path / "ms.ckpt", tmp_path / "back", direction="ms2pt")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == meant.keys()
    assert all(torch.equal(back[n], meant[n]) for n in meant)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_words_and_scales_pass_untouched_when_they_are_kept(
    source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, _ = source
    ckptbridge.convert(
        folder, tmp_path / "ms", direction="pt2ms", target="flat", format="safetensors", keep_quantized=True
    )
    stored, _ = quantise()
    flat = load_file(tmp_path / "ms" / "model.safetensors")
    assert flat.keys() == {n.replace(".self_attn.", ".") for n in stored}
    for name, tensor in stored.items():
        assert torch.equal(flat[name.replace(".self_attn.", ".")].view(torch.uint8), tensor.view(torch.uint8)), name
    ckptbridge.convert(tmp_path / "ms", tmp_path / "back", direction="ms2pt")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[n].view(torch.uint8), t.view(torch.uint8)) for n, t in stored.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == CONFIG


def test_kept_words_cannot_be_rearranged(source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, _ = source
    with pytest.raises(CkptBridgeError) as caught:
        ckptbridge.convert(folder, tmp_path / "ms", direction="pt2ms", format="safetensors", keep_quantized=True)
    assert "scales cannot follow" in caught.value.what
    assert "--keep-quantized" in caught.value.remedy
    assert not (tmp_path / "ms").exists()
