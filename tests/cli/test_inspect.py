"""``inspect``: what it says of real files of every format, and how quickly."""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckptbridge as package
from ckptbridge.cli.tree import tree
from ckptbridge.formats.dtypes import dtype_named
from ckptbridge.formats.tensors import TensorSpec

Run = Callable[..., Any]
Array = np.ndarray[Any, Any]

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 6,
    "vocab_size": 5,
}


def llama_shapes(layers: int, root: str = "model.") -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama, as transformers names them."""
    shapes: dict[str, tuple[int, ...]] = {f"{root}embed_tokens.weight": (5, 8)}
    for i in range(layers):
        at = f"{root}layers.{i}."
        shapes |= {f"{at}self_attn.{p}_proj.weight": (8, 8) for p in "qo"}
        shapes |= {f"{at}self_attn.{p}_proj.weight": (4, 8) for p in "kv"}
        shapes |= {f"{at}mlp.{p}_proj.weight": (6, 8) for p in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (8, 6)}
        shapes |= {f"{at}{norm}.weight": (8,) for norm in ("input_layernorm", "post_attention_layernorm")}
    return {**shapes, f"{root}norm.weight": (8,), "lm_head.weight": (5, 8)}


def llama(layers: int = 2, root: str = "model.") -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in llama_shapes(layers, root).items()}


def save_hf(folder: Path, arrays: Mapping[str, Array], config: Mapping[str, Any] | None = LLAMA) -> Path:
    folder.mkdir()
    save_file(dict(arrays), folder / "model.safetensors", {"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def look(run: Run, *arguments: object) -> dict[str, Any]:
    ran = run("inspect", *arguments, "--json")
    assert (ran.code, ran.err) == (0, "")
    found: dict[str, Any] = json.loads(ran.out)
    return found


# --- what a checkpoint is --------------------------------------------------------------------


def save_as(kind: str, path: Path, arrays: Mapping[str, Array]) -> None:
    if kind == "safetensors":
        save_file(dict(arrays), path)
    elif kind == "bin":
        import torch

        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
    else:
        import mindspore as ms

        ms.save_checkpoint([{"name": n, "data": ms.Tensor(a)} for n, a in arrays.items()], str(path), format="ckpt")


@pytest.mark.parametrize("kind", ["safetensors", "bin", "ckpt"])
def test_the_same_tensors_look_the_same_in_every_format(ckptbridge: Run, tmp_path: Path, kind: str) -> None:
    arrays = {
        "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b.bias": np.arange(4, dtype=np.float16),
        "b.count": np.arange(3, dtype=np.int64),
    }
    path = tmp_path / "weights.anything"
    save_as(kind, path, arrays)
    if kind == "ckpt" and not path.exists():
        path = tmp_path / "weights.anything.ckpt"
    found = look(ckptbridge, path)
    assert found["format"] == kind
    assert (found["count"], found["parameters"], found["nbytes"]) == (3, 13, 24 + 8 + 24)
    assert found["dtypes"] == {"float32": 1, "float16": 1, "int64": 1}
    assert found["shards"] == [{"file": str(path), "nbytes": path.stat().st_size}]
    rows = {t["name"]: (t["dtype"], tuple(t["shape"]), t["nbytes"]) for t in found["tensors"]}
    assert rows == {n: (str(a.dtype), a.shape, a.nbytes) for n, a in arrays.items()}


def test_a_70b_model_fits_one_screen(ckptbridge: Run, tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "hf", llama(80), {**LLAMA, "num_hidden_layers": 80})
    lines = ckptbridge("inspect", folder).out.splitlines()
    assert len(lines) <= 24
    (row,) = [line for line in lines if "q_proj" in line]
    assert row.split() == ["model.layers.{0..79}.self_attn.q_proj.weight", "float32", "[8,", "8]", "x80"]
    assert max(len(line) for line in lines if "proj" in line) <= 100


def test_shards_are_listed_with_their_sizes(ckptbridge: Run, tmp_path: Path) -> None:
    arrays = llama()
    names = list(arrays)
    shards = {f"model-0000{k + 1}-of-00002.safetensors": names[k::2] for k in range(2)}
    for shard, held in shards.items():
        save_file({n: arrays[n] for n in held}, tmp_path / shard)
    weight_map = {n: shard for shard, held in shards.items() for n in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    found = look(ckptbridge, tmp_path)
    assert found["shards"] == [
        {"file": str(tmp_path / shard), "nbytes": (tmp_path / shard).stat().st_size} for shard in sorted(shards)
    ]
    text = ckptbridge("inspect", tmp_path).out
    assert "format    safetensors, 2 shards" in text
    assert "model-00001-of-00002.safetensors (" in text


def test_wrappers_ties_and_training_state_are_told(ckptbridge: Run, tmp_path: Path) -> None:
    import torch

    embed = torch.randn(5, 8)
    wrapped = {"module.embed.weight": embed, "module.head.weight": embed, "module.norm.weight": torch.ones(8)}
    torch.save({"state_dict": wrapped, "epoch": 3}, tmp_path / "w.pt")
    found = look(ckptbridge, tmp_path / "w.pt")
    assert found["aliases"] == {"head.weight": "embed.weight"}
    assert found["parameters"] == 5 * 8 + 8  # the tied tensor counts once
    assert any("'state_dict'" in note for note in found["notes"])
    assert any("'module.'" in note for note in found["notes"])
    text = ckptbridge("inspect", tmp_path / "w.pt").out
    assert "alias     head.weight shares the storage of embed.weight" in text


def test_strings_and_scalars_of_a_ckpt(ckptbridge: Run, tmp_path: Path) -> None:
    import mindspore as ms

    path = tmp_path / "run.ckpt"
    data = [{"name": "a.weight", "data": ms.Tensor(np.ones(3, np.float32))}]
    ms.save_checkpoint(data, str(path), append_dict={"epoch_num": 7, "run": "first"})
    found = look(ckptbridge, path)
    assert found["count"] == 1
    assert found["scalars"] == {"epoch_num": 7}
    assert found["strings"] == {"run": "first"}


# --- provenance ------------------------------------------------------------------------------


def test_a_chain_of_handoffs_is_read_back_in_order(ckptbridge: Run, tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "hf", llama())
    arguments = (folder, tmp_path / "one.ckpt", "--target", "mindformers", "--layout", "mlp=contiguous")
    assert ckptbridge("convert", "pt2ms", *arguments, "--provenance", "run=42", "-q").code == 0
    assert ckptbridge("convert", "ms2pt", tmp_path / "one.ckpt", tmp_path / "back", "-q").code == 0
    last = (tmp_path / "back", tmp_path / "two.ckpt", "--target", "hf", "--dtype", "bfloat16")
    assert ckptbridge("convert", "pt2ms", *last, "-q").code == 0
    found = look(ckptbridge, tmp_path / "two.ckpt")
    steps = [(s["direction"], s["table"], s["dtype"]) for s in found["history"]]
    assert steps == [
        ("pt2ms", "llama/mindformers", None),
        ("ms2pt", "llama/mindformers", None),
        ("pt2ms", "llama/hf", "bfloat16"),
    ]
    assert found["history"][0]["layout"]["mlp"] == "contiguous"
    assert found["history"][0]["notes"] == {"run": "42"}
    assert found["history"][2]["lossy"] == ["21 tensors cast from float32 to bfloat16"]
    lines = [line for line in ckptbridge("inspect", tmp_path / "two.ckpt").out.splitlines() if " by llama/" in line]
    assert [line[:12] for line in lines] == ["history   1.", "          2.", "          3."]
    assert "from back, 21 tensors cast from float32 to bfloat16" in lines[2]


def test_provenance_from_elsewhere_is_only_data(ckptbridge: Run, tmp_path: Path) -> None:
    hostile: dict[str, Any] = {
        "tool": "ckptbridge",
        "schema": 1,
        "version": ["no"],
        "table": {"name": "x\x1b[2J"},
        "layout": [1],
        "sources": "many",
        "lossy": [7, {"step": "\x1b[31m"}],
        "dropped": 3,
        "notes": {"a": 1},
        "history": [None, 5, "text", {"tool": 1}, {"append_info": {"b": []}}],
        "config": {"model_type": {}},
    }
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "x.safetensors", {"append_info": json.dumps(hostile)})
    found = look(ckptbridge, tmp_path / "x.safetensors")
    assert len(found["history"]) == 6
    ran = ckptbridge("inspect", tmp_path / "x.safetensors")
    assert ran.code == 0 and "\x1b" not in ran.out


def test_only_the_tensors_that_are_asked_for(ckptbridge: Run, tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "hf", llama())
    found = look(ckptbridge, folder, "--tensors", "*.1.*norm*")
    assert [t["name"] for t in found["tensors"]] == [
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.post_attention_layernorm.weight",
    ]
    assert found["count"] == 21  # the counts are the checkpoint's all the same


# --- tables by names -------------------------------------------------------------------------


def tables(found: Mapping[str, Any], side: str) -> set[str]:
    return {t["table"] for t in found["tables"] if t["fits"] and t["side"] == side}


def test_tables_that_fit_by_names_alone(ckptbridge: Run, tmp_path: Path) -> None:
    found = look(ckptbridge, save_hf(tmp_path / "hf", llama(3), None))
    fitting = tables(found, "pt")
    assert {"llama/mindformers", "llama/hf", "llama/flat"} <= fitting
    assert {"qwen2/mindformers", "mistral/hf"} <= fitting  # the same names: all stay candidates
    assert not {t for t in fitting if t.startswith(("qwen3/", "gpt2/", "bert/", "mixtral/", "qwen2_moe/"))}
    assert all("21" not in r and "30 names are in it" in r for t in found["tables"] for r in t["reasons"])


def test_the_config_narrows_the_candidates(ckptbridge: Run, tmp_path: Path) -> None:
    found = look(ckptbridge, save_hf(tmp_path / "hf", llama()))
    assert found["model_type"] == "llama"
    assert {t["table"].split("/")[0] for t in found["tables"]} == {"llama"}
    assert found["tables"][0]["default"] is True


def test_a_table_does_not_fit_without_a_layer(ckptbridge: Run, tmp_path: Path) -> None:
    arrays = llama(3)
    del arrays["model.layers.1.self_attn.k_proj.weight"]
    (near,) = look(ckptbridge, save_hf(tmp_path / "hf", arrays))["tables"]
    assert near["fits"] is False
    assert near["reasons"] == [
        "1 of 3 'model.layers.*.self_attn.k_proj.weight' are missing, first 'model.layers.1.self_attn.k_proj.weight'"
    ]


def test_a_table_does_not_fit_with_a_tensor_too_many_or_too_few(ckptbridge: Run, tmp_path: Path) -> None:
    arrays = llama()
    del arrays["model.norm.weight"]
    arrays["model.layers.0.adapter.weight"] = np.ones(3, np.float32)
    (near,) = look(ckptbridge, save_hf(tmp_path / "hf", arrays))["tables"]
    assert near["reasons"] == [
        "1 of 21 names are not in the table: 'model.layers.*.adapter.weight'",
        "names that the table requires are missing: 'model.norm.weight'",
    ]
    text = ckptbridge("inspect", tmp_path / "hf").out
    assert "none fits; llama/mindformers comes nearest" in text


def test_a_network_of_no_family(ckptbridge: Run, tmp_path: Path) -> None:
    import torch

    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))
    torch.save(net.state_dict(), tmp_path / "net.pt")
    (only,) = look(ckptbridge, tmp_path / "net.pt")["tables"]
    assert (only["table"], only["fits"]) == ("torch-nn/nn", True)
    save_file({"slope.weight": np.ones(3, np.float32)}, tmp_path / "p.safetensors")
    (doubt,) = look(ckptbridge, tmp_path / "p.safetensors")["tables"]
    assert doubt["fits"] is False and "--target nn" in doubt["reasons"][1]


# --- the tree --------------------------------------------------------------------------------


def test_the_tree_folds_what_is_alike_and_sums_parameters(ckptbridge: Run, tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "hf", llama(4))
    lines = ckptbridge("inspect", folder, "--tree").out.split("\n\n")[1].splitlines()
    per_layer = 2 * 64 + 2 * 32 + 3 * 48 + 2 * 8
    rows = [line.split() for line in lines]
    assert ["{0..3}", "x4", "1.4", "K"] in rows
    assert round(4 * per_layer / 1000, 1) == 1.4
    assert sum("q_proj" in line for line in lines) == 1
    top = [line for line in lines if not line.startswith(" ")]
    assert [line.split()[0] for line in top] == ["lm_head.weight", "model"]


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, dtype_named("float32"), shape)


def test_the_tree_keeps_layers_of_other_contents_apart() -> None:
    dense = [spec(f"layers.{i}.mlp.weight", 2) for i in (0, 1)]
    sparse = [spec(f"layers.{i}.experts.{e}.weight", 3) for i in (2, 3, 4) for e in range(8)]
    rows = [(r.depth, r.label, r.times, r.parameters) for r in tree([*dense, *sparse])]
    assert rows == [
        (0, "layers", 1, 4 + 72),
        (1, "{0..1}", 2, 4),
        (2, "mlp.weight", 1, 4),
        (1, "{2..4}", 3, 72),
        (2, "experts", 1, 72),
        (3, "{0..7}", 8, 72),
        (4, "weight", 1, 72),
    ]


def test_a_name_that_is_also_a_prefix_and_one_without_end() -> None:
    rows = tree([spec("a", 2), spec("a.b", 3), spec(".".join("x" * 30_000), 1)])
    assert [(r.depth, r.label[:3], r.parameters) for r in rows] == [(0, "a", 5), (1, "b", 3), (0, "x.x", 1)]


# --- hostile names, errors, the API ----------------------------------------------------------


def test_names_are_escaped_and_stars_are_only_characters(ckptbridge: Run, tmp_path: Path) -> None:
    names = ["a.*.b", "a.1.b", "\x1b[31m.weight", "{0..3}.w", "..", "9" * 40]
    save_file({n: np.ones(2, np.float32) for n in names}, tmp_path / "m.safetensors")
    for arguments in ((), ("--tree",), ("--stats",)):
        ran = ckptbridge("inspect", tmp_path / "m.safetensors", *arguments)
        assert ran.code == 0
        assert "\x1b" not in ran.out and "\\x1b[31m" in ran.out
    assert {t["name"] for t in look(ckptbridge, tmp_path / "m.safetensors")["tensors"]} == set(names)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tensors", "q_proj"), "A glob must match the whole name"),
        (("--tensors", "lm_head.weigth"), "Did you mean 'lm_head.weight'?"),
        (("--stats", "--tree"), "exclude each other"),
        (("--key", "model"), "Leave --key out."),
        (("--satts",), "Did you mean '--stats'?"),
    ],
)
def test_what_cannot_be_shown_is_said(ckptbridge: Run, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    ran = ckptbridge("inspect", save_hf(tmp_path / "hf", llama()), *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_a_config_is_no_checkpoint(ckptbridge: Run, tmp_path: Path) -> None:
    ran = ckptbridge("inspect", save_hf(tmp_path / "hf", llama()) / "config.json")
    assert ran.code == 2
    assert "no index of shards" in ran.err and "Name the weights" in ran.err


def test_the_function_gives_what_the_command_prints(ckptbridge: Run, tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "hf", llama())
    read: list[int] = []
    found = package.inspect(folder, tensors="*norm*", stats=True, progress=read.append)
    assert found.to_dict() == look(ckptbridge, folder, "--tensors", "*norm*", "--stats")
    assert sum(read) == sum(spec.nbytes for spec in found.tensors) == 5 * 32
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.count = 0  # type: ignore[misc]


# --- quick -----------------------------------------------------------------------------------


def cpu_seconds(*command: object) -> float:
    """Processor time of a child, the least of three runs: other work on the machine does not count."""
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([str(c) for c in command], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(taken)


def test_a_thousand_tensors_within_half_a_second(tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "hf", llama(111), {**LLAMA, "num_hidden_layers": 111})
    bare = cpu_seconds(sys.executable, "-c", "import click, numpy")
    assert cpu_seconds(sys.executable, "-m", "ckptbridge", "inspect", folder) - bare < 0.5


def test_no_backend_is_imported(tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "hf", llama())
    script = (
        "import sys\nfrom ckptbridge.cli.main import main\n"
        "try:\n    main(['inspect', sys.argv[1]])\nexcept SystemExit:\n    pass\n"
        "print(sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=True)
    for name in ("torch", "mindspore", "transformers", "safetensors", "ml_dtypes", "tqdm", "blake3"):
        assert f"'{name}'" not in done.stderr
