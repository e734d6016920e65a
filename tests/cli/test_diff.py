"""``diff``: what changed between real files, across formats and across sides, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

Run = Callable[..., Any]
Array = np.ndarray[Any, Any]

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 6,
    "vocab_size": 5,
}


def arrays(seed: int = 0) -> dict[str, Array]:
    """Values of several dtypes, one of them of several pieces of a comparison (4 MiB each)."""
    rng = np.random.default_rng(seed)
    return {
        "layers.0.w": rng.standard_normal((300, 5000)).astype(np.float32),
        "layers.1.w": rng.standard_normal((3, 4)).astype(np.float32),
        "half": rng.standard_normal(7).astype(np.float16),
        "ids": rng.integers(0, 100, 9, dtype=np.int64),
        "mask": rng.integers(0, 2, 9).astype(np.bool_),
        "empty": np.zeros((0, 4), np.float32),
    }


def save(path: Path, tensors: Mapping[str, Array]) -> Path:
    save_file(dict(tensors), path)
    return path


def compare(run: Run, *arguments: object) -> tuple[int, dict[str, Any]]:
    ran = run("diff", *arguments, "--json")
    assert ran.err == ""
    return ran.code, json.loads(ran.out)


def changes(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {change["name"]: change for change in found["changes"]}


# --- across formats --------------------------------------------------------------------------


def test_equal_tensors_are_the_same_in_every_pair_of_formats(ckptbridge: Run, tmp_path: Path) -> None:
    import mindspore as ms
    import torch

    tensors = {n: a for n, a in arrays().items() if a.size}
    paths = [save(tmp_path / "a.safetensors", tensors), tmp_path / "b.bin", tmp_path / "c.ckpt"]
    torch.save({n: torch.from_numpy(a) for n, a in tensors.items()}, paths[1])
    ms.save_checkpoint([{"name": n, "data": ms.Tensor(a)} for n, a in tensors.items()], str(paths[2]))
    for a in paths:
        for b in paths:
            ran = ckptbridge("diff", a, b)
            assert (ran.code, ran.out) == (0, "same: 5 tensors equal bit for bit\n"), (a, b)


def test_a_strided_tensor_equals_its_copy(ckptbridge: Run, tmp_path: Path) -> None:
    import torch

    tensor = torch.randn(1200, 1000)
    torch.save({"w": tensor.t()}, tmp_path / "a.pt")
    same = save(tmp_path / "b.safetensors", {"w": np.ascontiguousarray(tensor.t().numpy())})
    assert ckptbridge("diff", tmp_path / "a.pt", same).code == 0
    other = np.ascontiguousarray(tensor.t().numpy())
    other[1, 700] += 1
    code, found = compare(ckptbridge, tmp_path / "a.pt", save(tmp_path / "c.safetensors", {"w": other}))
    assert (code, found["changes"][0]["first"], found["changes"][0]["differing"]) == (1, [1, 700], 1)


# --- what changed ----------------------------------------------------------------------------


def test_every_kind_of_change_is_told_with_its_size(ckptbridge: Run, tmp_path: Path) -> None:
    one = arrays()
    other = {n: a.copy() for n, a in one.items()}
    other["layers.0.w"][299, 4990:] += np.float32(0.5)
    other["layers.0.w"][250, 3] += np.float32(2)
    other["layers.1.w"] = other["layers.1.w"].reshape(4, 3)
    other["ids"][4] = 1000
    other["mask"][[0, 8]] ^= True
    other["half"] = other["half"].astype(np.float32)
    other["new"] = np.zeros(2, np.int32)
    del other["empty"]
    a, b = save(tmp_path / "a.safetensors", one), save(tmp_path / "b.safetensors", other)
    code, found = compare(ckptbridge, a, b)
    assert (code, found["equal"], found["same"]) == (1, False, 0)
    said = changes(found)
    assert {n: c["kind"] for n, c in said.items()} == {
        "layers.0.w": "values",
        "layers.1.w": "shape",
        "half": "dtype",
        "ids": "values",
        "mask": "values",
        "empty": "removed",
        "new": "added",
    }
    big = said["layers.0.w"]
    assert (big["differing"], big["elements"], big["first"]) == (11, 1_500_000, [250, 3])
    exact = np.abs(one["layers.0.w"].astype(np.float64) - other["layers.0.w"].astype(np.float64)).max()
    assert big["max_abs"] == exact
    assert said["ids"]["max_abs"] == 1000 - int(one["ids"][4])
    assert (said["mask"]["differing"], said["mask"]["first"], said["mask"]["max_abs"]) == (2, [0], None)
    assert (said["half"]["differing"], said["half"]["note"]) == (0, "B is A, cast")
    assert (said["half"]["a"], said["half"]["b"]) == (
        {"dtype": "float16", "shape": [7]},
        {"dtype": "float32", "shape": [7]},
    )
    assert (said["empty"]["b"], said["new"]["a"]) == (None, None)
    text = ckptbridge("diff", a, b)
    assert text.code == 1
    tally = text.out.splitlines()[-1]
    assert tally.startswith("different: ") and tally.endswith("; 0 tensors equal bit for bit")


def test_a_cast_that_is_none_is_counted(ckptbridge: Run, tmp_path: Path) -> None:
    one = {"w": np.array([1, 2, 3, 1 + 2**-11], np.float32)}
    cast = one["w"].astype(np.float16)
    cast[1] = 2.5
    code, found = compare(
        ckptbridge, save(tmp_path / "a.safetensors", one), save(tmp_path / "b.safetensors", {"w": cast})
    )
    (change,) = found["changes"]
    assert (code, change["kind"], change["differing"], change["first"], change["max_abs"]) == (1, "dtype", 1, [1], 0.5)


def test_values_without_a_cast_between_them_are_not_compared(ckptbridge: Run, tmp_path: Path) -> None:
    a = save(tmp_path / "a.safetensors", {"w": np.zeros(3, np.float32), "i": np.array([300], np.int64)})
    b = save(tmp_path / "b.safetensors", {"w": np.zeros(3, np.int32), "i": np.array([44], np.uint8)})
    code, found = compare(ckptbridge, a, b)
    said = changes(found)
    assert code == 1
    assert said["w"]["note"].startswith("values not compared: There is no cast")
    assert said["i"]["note"].startswith("values not compared: Integers up to 300")


@pytest.mark.parametrize(("value", "finite"), [(np.nan, False), (np.inf, False), (1e30, True)])
def test_the_largest_difference_needs_finite_numbers(
    ckptbridge: Run, tmp_path: Path, value: float, finite: bool
) -> None:
    """In the first of several pieces, whatever comes later."""
    one = np.zeros(3_000_000, np.float32)
    other = one.copy()
    other[5], other[2_500_000] = value, 1
    a, b = save(tmp_path / "a.safetensors", {"w": one}), save(tmp_path / "b.safetensors", {"w": other})
    code, found = compare(ckptbridge, a, b)
    (change,) = found["changes"]
    assert (code, change["differing"], change["first"]) == (1, 2, [5])
    assert (change["max_abs"] is not None) == finite
    assert ("not finite" in ckptbridge("diff", a, b).out) != finite


def test_bits_decide_not_values(ckptbridge: Run, tmp_path: Path) -> None:
    """A zero of the other sign is a change; the same NaN is none."""
    nan = np.array([np.nan, 0.0], np.float32)
    a = save(tmp_path / "a.safetensors", {"w": nan})
    assert ckptbridge("diff", a, save(tmp_path / "b.safetensors", {"w": nan.copy()})).code == 0
    code, found = compare(ckptbridge, a, save(tmp_path / "c.safetensors", {"w": np.negative(nan)}))
    assert (code, found["changes"][0]["differing"]) == (1, 2)


def test_layers_fold_into_one_line_with_the_worst_named(ckptbridge: Run, tmp_path: Path) -> None:
    one = {f"layers.{i}.w": np.zeros((2, 2), np.float32) for i in range(40)}
    other = {n: a + np.float32(k) for k, (n, a) in enumerate(one.items())}
    ran = ckptbridge("diff", save(tmp_path / "a.safetensors", one), save(tmp_path / "b.safetensors", other))
    assert ran.out.splitlines() == [
        "~ values  layers.{1..39}.w  x39  156 of 156 elements, max |a-b| 39 in layers.39.w",
        "different: 39 with other values; 1 tensors equal bit for bit",
    ]


def test_training_state_is_told_and_does_not_decide(ckptbridge: Run, tmp_path: Path) -> None:
    import mindspore as ms

    for epoch in (3, 4):
        data = [{"name": "w", "data": ms.Tensor(np.ones(3, np.float32))}]
        ms.save_checkpoint(data, str(tmp_path / f"{epoch}.ckpt"), append_dict={"epoch_num": epoch})
    ran = ckptbridge("diff", tmp_path / "3.ckpt", tmp_path / "4.ckpt")
    assert ran.code == 0
    assert "epoch_num (3 and 4)" in ran.out


def test_one_flipped_bit_anywhere_is_found(ckptbridge: Run, tmp_path: Path) -> None:
    a = save(tmp_path / "a.safetensors", arrays())
    data = bytearray(a.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    b = tmp_path / "b.safetensors"
    for at in np.random.default_rng(1).integers(start, len(data), 8):
        flipped = data.copy()
        flipped[at] ^= 1 << 6
        b.write_bytes(flipped)
        code, found = compare(ckptbridge, a, b)
        assert code == 1
        assert [c["differing"] for c in found["changes"]] == [1], at


# --- across sides ----------------------------------------------------------------------------


def llama(folder: Path, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (5, 8)}
    for i in range(2):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{p}_proj.weight": (8, 8) for p in "qo"}
        shapes |= {f"{at}self_attn.{p}_proj.weight": (4, 8) for p in "kv"}
        shapes |= {f"{at}mlp.{p}_proj.weight": (6, 8) for p in ("gate", "up")} | {f"{at}mlp.down_proj.weight": (8, 6)}
        shapes |= {f"{at}{norm}.weight": (8,) for norm in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {"model.norm.weight": (8,), "lm_head.weight": (5, 8)}
    folder.mkdir()
    tensors = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_through_the_table_of_the_provenance(ckptbridge: Run, tmp_path: Path) -> None:
    hf, ms = llama(tmp_path / "hf"), tmp_path / "m.ckpt"
    arguments = ("--target", "mindformers", "--layout", "mlp=contiguous", "-q")
    assert ckptbridge("convert", "pt2ms", hf, ms, *arguments).code == 0
    for pair in ((hf, ms), (ms, hf)):
        ran = ckptbridge("diff", *pair, "--through-table")
        assert ran.code == 0
        assert "through the table llama/mindformers" in ran.out
        assert ran.out.splitlines()[-1].startswith("same: 15 tensors")
    assert ckptbridge("diff", hf, ms, "--through-table", "--quiet").out == ""


def test_a_change_on_one_side_is_found_through_the_table(ckptbridge: Run, tmp_path: Path) -> None:
    hf, ms = llama(tmp_path / "hf"), tmp_path / "m.ckpt"
    assert ckptbridge("convert", "pt2ms", hf, ms, "--target", "mindformers", "-q").code == 0
    tensors = load_file(hf / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"] = tensors["model.layers.1.self_attn.k_proj.weight"] + 1
    save_file(tensors, hf / "model.safetensors", {"format": "pt"})
    code, found = compare(ckptbridge, hf, ms, "--through-table")
    (change,) = found["changes"]
    assert code == 1
    assert (change["kind"], change["name"]) == ("values", "decoder.layers.1.self_attention.linear_qkv.weight")
    assert change["differing"] == 32 and change["max_abs"] == pytest.approx(1, rel=1e-6)
    assert "model.layers.1.self_attn.k_proj.weight" in change["counterpart"]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_tensor_that_one_side_lacks_is_removed_or_added(ckptbridge: Run, tmp_path: Path, swapped: bool) -> None:
    import mindspore as ms

    hf, path = llama(tmp_path / "hf"), tmp_path / "m.ckpt"
    assert ckptbridge("convert", "pt2ms", hf, path, "--target", "hf", "-q").code == 0
    loaded = {n: v for n, v in ms.load_checkpoint(str(path)).items() if not isinstance(v, str)}
    loaded["extra.weight"] = ms.Parameter(ms.Tensor(np.ones(2, np.float32)), name="extra.weight")
    del loaded["model.norm.weight"]
    ms.save_checkpoint([{"name": n, "data": v} for n, v in loaded.items()], str(tmp_path / "n.ckpt"))
    pair = (tmp_path / "n.ckpt", hf) if swapped else (hf, tmp_path / "n.ckpt")
    code, found = compare(ckptbridge, *pair, "--through-table", "--target", "hf")
    kinds = {n: c["kind"] for n, c in changes(found).items()}
    lacks, has = ("added", "removed") if swapped else ("removed", "added")
    assert (code, kinds) == (1, {"model.norm.weight": lacks, "extra.weight": has})


def test_two_sides_without_the_table_share_no_name(ckptbridge: Run, tmp_path: Path) -> None:
    hf, ms = llama(tmp_path / "hf"), tmp_path / "m.ckpt"
    assert ckptbridge("convert", "pt2ms", hf, ms, "--target", "mindformers", "-q").code == 0
    ran = ckptbridge("diff", hf, ms)
    assert ran.code == 1
    assert "--through-table" in ran.out.splitlines()[0]


# --- what cannot be compared -----------------------------------------------------------------


def test_errors_are_exit_code_2(ckptbridge: Run, tmp_path: Path) -> None:
    hf = llama(tmp_path / "hf")
    for arguments, said in (
        ((hf, tmp_path / "nowhere"), "There is no such file"),
        ((hf, hf / "config.json"), "no index of shards"),
        ((hf, hf, "--target", "hf"), "Give --through-table as well."),
        ((hf, hf, "--trough-table"), "Did you mean '--through-table'?"),
        ((hf, save(tmp_path / "x.safetensors", {"a": np.ones(2)}), "--through-table", "--target", "hg"), "Targets of"),
    ):
        ran = ckptbridge("diff", *arguments)
        assert (ran.code, ran.out) == (2, ""), arguments
        assert said in ran.err
    assert json.loads(ckptbridge("diff", hf, tmp_path / "nowhere", "--json").out)["error"]["code"] == "usage"


def test_names_are_escaped(ckptbridge: Run, tmp_path: Path) -> None:
    a = save(tmp_path / "a.safetensors", {"\x1b[31m.*": np.ones(2)})
    b = save(tmp_path / "b.safetensors", {"\x1b[31m.*": np.zeros(2)})
    ran = ckptbridge("diff", a, b)
    assert ran.code == 1
    assert "\x1b" not in ran.out and "\\x1b[31m.*" in ran.out
