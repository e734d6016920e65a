"""The whole way with base dependencies only: no torch, no MindSpore, on any supported Python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import ckptbridge

H, F, V, HEADS, GROUPS, D, LAYERS = 12, 10, 17, 4, 2, 5, 2


def llama(folder: Path) -> dict[str, np.ndarray]:
    """A small Llama as published, every number its own."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,)}
    shapes["lm_head.weight"] = (V, H)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for name, rows, columns in (
            ("q", HEADS * D, H),
            ("k", GROUPS * D, H),
            ("v", GROUPS * D, H),
            ("o", H, HEADS * D),
        ):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (rows, columns)
        for name, rows, columns in (("gate", F, H), ("up", F, H), ("down", H, F)):
            shapes[f"{layer}.mlp.{name}_proj.weight"] = (rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{name}.weight"] = (H,)
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    config = {"model_type": "llama", "hidden_size": H, "intermediate_size": F, "vocab_size": V, "head_dim": D}
    config |= {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "num_hidden_layers": LAYERS}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return arrays


def test_there_and_back_and_judged(tmp_path: Path) -> None:
    arrays = llama(tmp_path / "hf")
    ckptbridge.convert(tmp_path / "hf", tmp_path / "m.ckpt", direction="pt2ms")
    stored = ckptbridge.open_checkpoint(tmp_path / "m.ckpt")
    q, k, v = (arrays[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv")
    rows = []
    for g in range(GROUPS):
        rows += [
            q[g * HEADS // GROUPS * D : (g + 1) * HEADS // GROUPS * D],
            k[g * D : (g + 1) * D],
            v[g * D : (g + 1) * D],
        ]
    fused = stored["decoder.layers.1.self_attention.linear_qkv.weight"].numpy()
    assert fused.tobytes() == np.concatenate(rows).tobytes()
    for destination in (tmp_path / "back", tmp_path / "back.bin"):
        ckptbridge.convert(tmp_path / "m.ckpt", destination, direction="ms2pt")
        back = ckptbridge.open_checkpoint(destination)
        assert back.keys() == arrays.keys()
        assert all(back[name].numpy().tobytes() == array.tobytes() for name, array in arrays.items())
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == arrays.keys()
    assert ckptbridge.verify(tmp_path / "hf", tmp_path / "m.ckpt", level="weights").verdict == "holds"


def test_the_console_commands_work(tmp_path: Path) -> None:
    llama(tmp_path / "hf")
    for line, code in (
        (["convert", "pt2ms", "hf", "m.ckpt"], 0),
        (["inspect", "m.ckpt"], 0),
        (["diff", "hf", "m.ckpt", "--through-table"], 0),
        (["mappings", "list"], 0),
        (["convert", "pt2ms", "hf", "m.ckpt"], 2),
    ):
        run = [sys.executable, "-m", "ckptbridge", *line]
        ran = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == code, ran.stderr
        assert "Traceback" not in ran.stderr
