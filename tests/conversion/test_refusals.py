"""Everything that cannot be done is refused: exit code 2, the tensor, the remedy, nothing left behind, no traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
import torch
from checkpoints import assert_same_words, leftovers, load_ckpt, load_safetensors, random_arrays, save_hf
from command import Run
from published_models import decoder_shapes, tiny_config
from safetensors.torch import save_file

import ckptbridge

CONFIG = tiny_config("qwen3", "plain")
Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"

Case = Callable[[Path], tuple[list[object], list[str]]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """A scenario: writes a source into the folder, and gives the arguments and words that the message must have.

    Where no destination is among the arguments, it is ``out.ckpt``.
    """
    CASES[function.__name__] = function
    return function


def arrays() -> dict[str, Any]:
    return random_arrays(decoder_shapes(CONFIG))


def source(folder: Path, tensors: dict[str, Any] | None = None, config: dict[str, Any] | None = None) -> Path:
    return save_hf(folder / "hf", arrays() if tensors is None else tensors, CONFIG if config is None else config)


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in CONFIG.items() if key not in keys}


def ms_file(folder: Path, provenance: bool = True, **options: Any) -> Path:
    """A MindSpore checkpoint of the model; without provenance as MindSpore saves it."""
    ckptbridge.convert(source(folder), folder / "ms.ckpt", direction="pt2ms", **options)
    if not provenance:
        saved = [{"name": n, "data": mindspore.Tensor(a)} for n, a in load_ckpt(folder / "ms.ckpt").items()]
        (folder / "ms.ckpt").unlink()
        mindspore.save_checkpoint(saved, str(folder / "ms.ckpt"))
    return folder / "ms.ckpt"


# --- tensors ---------------------------------------------------------------------------------


@case
def missing_tensor(folder: Path) -> tuple[list[object], list[str]]:
    tensors = arrays()
    del tensors[K]
    return ["pt2ms", source(folder, tensors)], [K, "missing", "rule", f"--allow-missing '{K}'"]


@case
def unexpected_tensor(folder: Path) -> tuple[list[object], list[str]]:
    tensors = arrays() | {"model.layers.0.adapter.weight": np.zeros(3, np.float32)}
    words = ["model.layers.0.adapter.weight", "not named by the table", "--allow-unexpected", "--mapping"]
    return ["pt2ms", source(folder, tensors)], words


@case
def wrong_shape(folder: Path) -> tuple[list[object], list[str]]:
    tensors = arrays() | {Q: np.zeros((6 * 3, 18), np.float32)}  # as if head_dim were hidden_size / heads
    return ["pt2ms", source(folder, tensors)], [Q, "[18, 18]", "[24, 18]", "config"]


@case
def transposed_shape(folder: Path) -> tuple[list[object], list[str]]:
    tensors = arrays()
    tensors[Q] = tensors[Q].T
    return ["pt2ms", source(folder, tensors)], [Q, "[18, 24]", "[24, 18]"]


@case
def mixed_dtypes_in_a_fused_tensor(folder: Path) -> tuple[list[object], list[str]]:
    tensors = arrays()
    tensors[K] = tensors[K].astype(np.float64)
    return ["pt2ms", source(folder, tensors)], [Q, K, "float64", "float32", "linear_qkv", "--dtype"]


@case
def missing_in_a_group_that_may_be_missing(folder: Path) -> tuple[list[object], list[str]]:
    tensors = arrays()
    del tensors[K]
    return ["pt2ms", source(folder, tensors), "--allow-missing", K], [K, Q, "whole group"]


@case
def nothing_at_all(folder: Path) -> tuple[list[object], list[str]]:
    tensors = {"alien": np.zeros(3, np.float32)}
    args = ["pt2ms", source(folder, tensors), "--allow-missing", "*", "--allow-unexpected", "*"]
    return args, ["prefix", "embed_tokens"]


@case
def two_tensors_to_one_name(folder: Path) -> tuple[list[object], list[str]]:
    table = folder / "own.toml"
    table.write_text(
        'schema = 1\nfamily = "qwen3"\ntarget = "mine"\n'
        '[[rule]]\npt = "a.weight"\nms = "c.weight"\naxes = "x"\n'
        '[[rule]]\npt = "b.weight"\nms = "c.weight"\naxes = "x"\n'
    )
    tensors = {n: np.zeros(3, np.float32) for n in ("a.weight", "b.weight")}
    return ["pt2ms", source(folder, tensors), "--mapping", table], ["c.weight", "twice", "own.toml rule"]


@case
def tied_but_different(folder: Path) -> tuple[list[object], list[str]]:
    tensors = arrays()
    tensors[HEAD] = tensors[EMBED].copy()
    tensors[HEAD][-1, -1] = 7
    args = ["pt2ms", source(folder, tensors, {**CONFIG, "tie_word_embeddings": True})]
    return args, [HEAD, EMBED, "differs", "tie_word_embeddings"]


@case
def tied_but_of_another_dtype(folder: Path) -> tuple[list[object], list[str]]:
    tensors = arrays()
    tensors[HEAD] = tensors[EMBED].astype(np.float64)
    args = ["pt2ms", source(folder, tensors, {**CONFIG, "tie_word_embeddings": True})]
    return args, [HEAD, EMBED, "float64", "tie_word_embeddings"]


@case
def untied_and_absent(folder: Path) -> tuple[list[object], list[str]]:
    tensors = arrays()
    del tensors[HEAD]
    return ["pt2ms", source(folder, tensors)], [HEAD, "missing"]


# --- dtypes ----------------------------------------------------------------------------------


@case
def cast_overflow(folder: Path) -> tuple[list[object], list[str]]:
    tensors = {n: np.ones_like(a) for n, a in arrays().items()}
    tensors[EMBED][0, 0] = 1e5
    words = ["1 finite value", "tensors: embedding.word_embeddings.weight\n", "--allow-overflow"]
    return ["pt2ms", source(folder, tensors), "--dtype", "float16"], words


@case
def cast_underflow(folder: Path) -> tuple[list[object], list[str]]:
    tensors = {n: np.ones_like(a) for n, a in arrays().items()}
    tensors[EMBED][0, 0] = 1e-9
    return ["pt2ms", source(folder, tensors), "--dtype", "float16"], ["1 non-zero value", "--allow-overflow"]


@case
def unknown_dtype(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", source(folder), "--dtype", "floaty"], ["floaty", "bfloat16"]


@case
def cast_to_an_integer(folder: Path) -> tuple[list[object], list[str]]:
    tensors = {n: torch.from_numpy(a).bfloat16() for n, a in arrays().items()}
    target = source(folder, {})
    save_file(tensors, target / "model.safetensors")
    words = ["from bfloat16 to int8", "--dtype int8", "float64, float32, float16, bfloat16"]
    return ["pt2ms", target, "--dtype", "int8"], words


def deepseek(folder: Path, scales: bool, block: list[int] | None = None) -> Path:
    """A DeepSeek-V3 whose down projection of layer 0 is float8 in blocks."""
    config = dict(tiny_config("deepseek_v3", "plain"))
    if block:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": block}
    tensors = {n: torch.from_numpy(a) for n, a in random_arrays(decoder_shapes(config)).items()}
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = torch.ones(18, 13).to(torch.float8_e4m3fn)
    if scales:
        tensors[name + "_scale_inv"] = torch.ones(5, 2)
    target = source(folder, {}, config)
    save_file(tensors, target / "model.safetensors")
    return target


FP8 = "model.layers.0.mlp.down_proj.weight"


@case
def float8_without_its_scale(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", deepseek(folder, scales=False, block=[4, 8])], [FP8, FP8 + "_scale_inv", "missing"]


@case
def float8_without_a_block_size(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", deepseek(folder, scales=True)], ["float8_e4m3fn", "weight_block_size"]


@case
def float8_with_scales_of_other_blocks(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", deepseek(folder, scales=True, block=[4, 4])], [FP8 + "_scale_inv", "[5, 2]", "[18, 13]", "4 x 4"]


@case
def float8_kept_in_a_ckpt(folder: Path) -> tuple[list[object], list[str]]:
    args = ["pt2ms", deepseek(folder, scales=True, block=[4, 8]), "--keep-quantized", "--target", "hf"]
    return args, [FP8, "float8_e4m3fn", ".ckpt", "safetensors"]


@case
def float8_where_the_table_knows_no_scales(folder: Path) -> tuple[list[object], list[str]]:
    tensors = {n: torch.from_numpy(a) for n, a in arrays().items()}
    tensors["model.norm.weight"] = torch.ones(18).to(torch.float8_e5m2)
    target = source(folder, {})
    save_file(tensors, target / "model.safetensors")
    return ["pt2ms", target], ["decoder.final_layernorm.weight", "float8_e5m2", "--dtype"]


@case
def complex_numbers(folder: Path) -> tuple[list[object], list[str]]:
    tensors = {n: torch.from_numpy(a) for n, a in arrays().items()}
    tensors["model.norm.weight"] = torch.ones(18, dtype=torch.complex64)
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return ["pt2ms", folder / "pytorch_model.bin"], ["decoder.final_layernorm.weight", "complex64"]


# --- config, table, options ------------------------------------------------------------------


@case
def missing_config_value(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", source(folder, config=without("num_attention_heads"))], ["num_attention_heads", "config"]


@case
def missing_config(folder: Path) -> tuple[list[object], list[str]]:
    target = source(folder)
    (target / "config.json").unlink()
    return ["pt2ms", target], ["model type", "--config"]


@case
def config_that_is_no_json(folder: Path) -> tuple[list[object], list[str]]:
    target = source(folder)
    (target / "config.json").write_text("{'a': 1}")
    return ["pt2ms", target], ["JSON", "config.json", "line: 1", "column: 2", "Mend it", "--config"]


@case
def config_that_is_no_text(folder: Path) -> tuple[list[object], list[str]]:
    target = source(folder)
    (target / "config.json").write_bytes(b'{"a": "\xff"}')
    return ["pt2ms", target], ["JSON", "config.json", "Mend it", "--config"]


@case
def config_without_model_type(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", source(folder, config=without("model_type"))], ["model_type", "--mapping"]


@case
def unknown_model_type(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", source(folder, config={**CONFIG, "model_type": "qwen33"})], ["qwen33", "qwen3", "--mapping"]


@case
def unknown_target(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", source(folder), "--target", "mindformer"], ["mindformer", "mindformers", "hf", "flat", "--target"]


@case
def unknown_layout_key(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", source(folder), "--layout", "atention=contiguous"], ["atention", "attention", "interleaved"]


@case
def unknown_layout_value(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", source(folder), "--layout", "mlp=continuous"], ["continuous", "contiguous", "mlp"]


@case
def one_layout_key_twice(folder: Path) -> tuple[list[object], list[str]]:
    args = ["pt2ms", source(folder), "--layout", "mlp=contiguous", "--layout", "mlp=interleaved"]
    return args, ["mlp", "twice", "--layout"]


@case
def layout_without_a_value(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", source(folder), "--layout", "mlp"], ["mlp", "KEY=VALUE"]


@case
def unknown_option(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", source(folder), "--layuot", "mlp=contiguous"], ["--layuot", "--layout"]


@case
def format_against_suffix(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", source(folder), folder / "out.ckpt", "--format", "safetensors"], [".ckpt", "--format"]


@case
def format_that_mindspore_does_not_read(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", source(folder), "--format", "bin"], ["--format", "'ckpt', 'safetensors'"]


@case
def file_that_mindspore_does_not_read(folder: Path) -> tuple[list[object], list[str]]:
    words = ["'.PT'", "does not write bin", "file: ", "ends in .ckpt or .safetensors, or a directory"]
    return ["pt2ms", source(folder), folder / "out.PT"], words


@case
def format_that_pytorch_does_not_read(folder: Path) -> tuple[list[object], list[str]]:
    return ["ms2pt", ms_file(folder), folder / "out.ckpt"], ["ckpt", "safetensors", "bin"]


@case
def standard_output(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", source(folder), "-"], ["standard output", "ends in .ckpt or .safetensors, or a directory"]


@case
def shards_of_one_file(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", source(folder), folder / "out.safetensors", "--max-shard-size", "1MB"], ["--max-shard-size"]


@case
def shard_size_that_is_none(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", source(folder), folder / "out", "--max-shard-size", "many"], ["many", "5GB"]


@case
def crc_of_safetensors(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", source(folder), folder / "out.safetensors", "--crc"], ["--crc"]


@case
def key_of_safetensors(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", source(folder), "--key", "ema"], ["--key", "safetensors"]


@case
def broken_table(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "own.toml").write_text('schema = 1\nfamily = "x"\ntarget = "y"\n[[rule]]\npt = "a"\nmss = "b"\n')
    return ["pt2ms", source(folder), "--mapping", folder / "own.toml"], ["own.toml", "rule", "1", "mss", "ms"]


# --- direction and provenance ----------------------------------------------------------------


@case
def ckpt_given_to_pt2ms(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", ms_file(folder)], ["MindSpore .ckpt", "ms2pt"]


@case
def bin_given_to_ms2pt(folder: Path) -> tuple[list[object], list[str]]:
    torch.save({n: torch.from_numpy(a) for n, a in arrays().items()}, folder / "a.bin")
    return ["ms2pt", folder / "a.bin", folder / "out"], [".bin", "pt2ms"]


@case
def safetensors_of_the_other_side(folder: Path) -> tuple[list[object], list[str]]:
    ckptbridge.convert(source(folder), folder / "ms.safetensors", direction="pt2ms")
    args = ["pt2ms", folder / "ms.safetensors", "--config", folder / "hf" / "config.json"]
    return args, ["ms2pt"]


@case
def pytorch_safetensors_given_to_ms2pt(folder: Path) -> tuple[list[object], list[str]]:
    return ["ms2pt", source(folder), folder / "out"], [
        "The source is PyTorch's",
        "remedy: Use 'ckptbridge convert pt2ms'",
    ]


@case
def pytorch_safetensors_given_to_ms2pt_with_a_target(folder: Path) -> tuple[list[object], list[str]]:
    args = ["ms2pt", source(folder), folder / "out", "--target", "mindformers"]
    return args, [
        "error: The source's names are those of the table's other side. ",
        "remedy: Use 'ckptbridge convert pt2ms'.\n",
    ]


@case
def pytorch_safetensors_given_to_ms2pt_with_a_target_that_shares_most_names(
    folder: Path,
) -> tuple[list[object], list[str]]:
    args = ["ms2pt", source(folder), folder / "out", "--target", "flat"]
    return args, [
        "error: The source's names are those of the table's other side. ",
        "remedy: Use 'ckptbridge convert pt2ms'.\n",
    ]


@case
def mindspore_safetensors_given_to_pt2ms(folder: Path) -> tuple[list[object], list[str]]:
    tensors = load_ckpt(ms_file(folder))
    (folder / "ms.ckpt").unlink()
    args = ["pt2ms", source(folder, tensors)]
    return args, ["names are those of the table's other side", "remedy: Use 'ckptbridge convert ms2pt'.\n"]


@case
def layout_against_the_provenance(folder: Path) -> tuple[list[object], list[str]]:
    args = ["ms2pt", ms_file(folder), folder / "out", "--layout", "attention=contiguous"]
    said = ["The provenance says attention=interleaved", "--layout says attention=contiguous"]
    return args, [*said, "Leave --layout attention=contiguous out", "--target mindformers and --config FILE"]


@case
def layout_against_the_provenance_with_half_of_what_sets_it_aside(folder: Path) -> tuple[list[object], list[str]]:
    args = ["ms2pt", ms_file(folder), folder / "out", "--layout", "mlp=contiguous", "--target", "mindformers"]
    return args, ["The provenance says mlp=interleaved", "--config FILE"]


@case
def target_against_the_provenance(folder: Path) -> tuple[list[object], list[str]]:
    args = ["ms2pt", ms_file(folder), folder / "out", "--target", "flat"]
    return args, ["qwen3/mindformers", "--target says flat", "Leave --target out", "--config FILE"]


@case
def no_provenance(folder: Path) -> tuple[list[object], list[str]]:
    return ["ms2pt", ms_file(folder, provenance=False), folder / "out"], [
        "provenance",
        "--target",
        "--layout",
        "--config",
    ]


@case
def no_provenance_and_no_config(folder: Path) -> tuple[list[object], list[str]]:
    args = ["ms2pt", ms_file(folder, provenance=False), folder / "out", "--target", "mindformers"]
    return args, ["model type", "--config"]


@case
def provenance_of_a_table_of_the_users_own(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "own.toml").write_text(
        'schema = 1\nfamily = "qwen3"\ntarget = "mindformers"\n[index]\ni = "1"\n[[rule]]\npt = "t.{i}"\nms = "u.{i}"\n'
    )
    target = source(folder, {"t.0": np.zeros(3, np.float32)})
    ckptbridge.convert(target, folder / "ms.ckpt", direction="pt2ms", mapping=folder / "own.toml")
    return ["ms2pt", folder / "ms.ckpt", folder / "out"], ["qwen3/mindformers", "--mapping"]


@case
def tied_source_that_lacks_what_it_was_tied_to(folder: Path) -> tuple[list[object], list[str]]:
    tensors = arrays()
    tensors[HEAD] = tensors[EMBED].copy()
    config = {**CONFIG, "tie_word_embeddings": True}
    ckptbridge.convert(source(folder, tensors, config), folder / "full.ckpt", direction="pt2ms")
    text = mindspore.load_checkpoint(str(folder / "full.ckpt"))["append_info"]
    saved = [
        {"name": n, "data": mindspore.Tensor(a)}
        for n, a in load_ckpt(folder / "full.ckpt").items()
        if n != "embedding.word_embeddings.weight"
    ]
    mindspore.save_checkpoint(saved, str(folder / "ms.ckpt"), append_dict={"append_info": text})
    return ["ms2pt", folder / "ms.ckpt", folder / "out"], ["embedding.word_embeddings.weight", "missing"]


# --- sources ---------------------------------------------------------------------------------


def sharded(folder: Path) -> Path:
    """Two shards and their index, written by hand."""
    target = source(folder, {})
    tensors = {n: torch.from_numpy(a) for n, a in arrays().items()}
    halves = [dict(list(tensors.items())[k::2]) for k in range(2)]
    weight_map = {}
    (target / "model.safetensors").unlink()
    for k, half in enumerate(halves, 1):
        save_file(half, target / f"model-0000{k}-of-00002.safetensors", {"format": "pt"})
        weight_map |= dict.fromkeys(half, f"model-0000{k}-of-00002.safetensors")
    write_index(target, weight_map)
    return target


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_index(folder: Path) -> dict[str, str]:
    return dict(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])


@case
def missing_shard(folder: Path) -> tuple[list[object], list[str]]:
    target = sharded(folder)
    (target / "model-00002-of-00002.safetensors").unlink()
    return ["pt2ms", target], ["model-00002-of-00002.safetensors", "missing"]


@case
def index_that_names_a_tensor_its_shard_lacks(folder: Path) -> tuple[list[object], list[str]]:
    target = sharded(folder)
    write_index(target, {**read_index(target), "ghost.weight": "model-00001-of-00002.safetensors"})
    return ["pt2ms", target], ["ghost.weight", "model-00001-of-00002.safetensors"]


@case
def shard_that_holds_more_than_its_index_says(folder: Path) -> tuple[list[object], list[str]]:
    target = sharded(folder)
    write_index(target, {n: s for n, s in read_index(target).items() if n != HEAD})
    return ["pt2ms", target], [HEAD, "index"]


@case
def tensor_in_another_shard_than_the_index_says(folder: Path) -> tuple[list[object], list[str]]:
    target = sharded(folder)
    weight_map = read_index(target)
    weight_map[HEAD] = {"1": "model-00002-of-00002.safetensors", "2": "model-00001-of-00002.safetensors"}[
        weight_map[HEAD][10]
    ]
    write_index(target, weight_map)
    return ["pt2ms", target], [HEAD, "index"]


@case
def tensor_in_two_shards(folder: Path) -> tuple[list[object], list[str]]:
    target = sharded(folder)
    for k in (1, 2):
        path = target / f"model-0000{k}-of-00002.safetensors"
        tensors = {n: torch.from_numpy(a) for n, a in load_safetensors(path).items()}
        save_file(tensors | {HEAD: torch.zeros(29, 18)}, path)
    return ["pt2ms", target], [HEAD]


@case
def stray_shard(folder: Path) -> tuple[list[object], list[str]]:
    target = sharded(folder)
    save_file({"x": torch.zeros(1)}, target / "model-00003-of-00003.safetensors")
    return ["pt2ms", target], ["model-00003-of-00003.safetensors", "index"]


@case
def cut_source(folder: Path) -> tuple[list[object], list[str]]:
    target = source(folder)
    path = target / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    return ["pt2ms", target], ["model.safetensors", "cut"]


@case
def cut_ckpt(folder: Path) -> tuple[list[object], list[str]]:
    path = ms_file(folder)
    path.write_bytes(path.read_bytes()[:-1])
    return ["ms2pt", path, folder / "out"], ["ms.ckpt", "offset"]


@case
def ckpt_whose_crc_is_wrong(folder: Path) -> tuple[list[object], list[str]]:
    path = ms_file(folder, crc=True)
    data = bytearray(path.read_bytes())
    data[2000] ^= 1
    path.write_bytes(data)
    return ["ms2pt", path, folder / "out"], ["crc", "damaged"]


@case
def no_such_source(folder: Path) -> tuple[list[object], list[str]]:
    return ["pt2ms", folder / "nowhere"], ["nowhere", "no such", "path"]


@case
def folder_without_weights(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "empty").mkdir()
    return ["pt2ms", folder / "empty"], ["empty", "no weights"]


@case
def git_lfs_pointer(folder: Path) -> tuple[list[object], list[str]]:
    target = source(folder)
    (target / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return ["pt2ms", target], ["LFS", "git lfs pull"]


# --- destinations ----------------------------------------------------------------------------


@case
def destination_that_is_the_source(folder: Path) -> tuple[list[object], list[str]]:
    path = source(folder) / "model.safetensors"
    return ["pt2ms", path, path, "--overwrite"], ["source", "destination"]


@case
def destination_that_is_the_source_by_another_name(folder: Path) -> tuple[list[object], list[str]]:
    path = source(folder) / "model.safetensors"
    (folder / "link").symlink_to(folder / "hf")
    return ["pt2ms", path, folder / "link" / ".." / "hf" / "model.safetensors", "--overwrite"], [
        "source",
        "destination",
    ]


@case
def destination_folder_that_is_the_source(folder: Path) -> tuple[list[object], list[str]]:
    ckptbridge.convert(source(folder), folder / "ms", direction="pt2ms", target="hf", format="safetensors")
    return ["ms2pt", folder / "ms", folder / "ms", "--overwrite"], ["source", "destination"]


@case
def destination_folder_that_holds_the_source(folder: Path) -> tuple[list[object], list[str]]:
    ckptbridge.convert(source(folder), folder / "ms", direction="pt2ms")
    return ["ms2pt", folder / "ms" / "model.ckpt", folder / "ms", "--overwrite"], ["source", "destination"]


@case
def destination_below_a_file(folder: Path) -> tuple[list[object], list[str]]:
    (folder / "file").write_text("")
    return ["pt2ms", source(folder), folder / "file" / "out.ckpt"], ["file"]


@pytest.mark.parametrize("name", CASES)
def test_is_refused(name: str, tmp_path: Path, run: Run) -> None:
    args, words = CASES[name](tmp_path)
    if len(args) == 2 or str(args[2]).startswith("--"):
        args = [*args[:2], tmp_path / "out.ckpt", *args[2:]]
    before = snapshot(tmp_path)
    result = run("convert", *args)
    assert result.code == 2, result
    assert result.out == ""
    for word in words:
        assert word in result.err, (word, result.err)
    assert snapshot(tmp_path) == before
    # The same as JSON: one object on standard output, with code, text, place and remedy.
    result = run("convert", *args, "--json")
    assert result.code == 2
    error = result.json["error"]
    assert error.keys() == {"code", "what", "where", "remedy"}
    assert error["code"] != "error"
    assert error["what"]
    assert snapshot(tmp_path) == before
    # And when nothing is to be said, the reason still is.
    result = run("convert", *args, "--quiet")
    assert (result.code, result.out) == (2, "")
    assert result.err


def snapshot(folder: Path) -> dict[str, bytes]:
    """All files below a folder with their contents, and all folders."""
    return {str(p): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


# --- existing destinations -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out.ckpt", "out"])
def test_an_existing_output_is_refused(name: str, tmp_path: Path, run: Run) -> None:
    target = source(tmp_path)
    assert run("convert", "pt2ms", target, tmp_path / name).code == 0
    before = snapshot(tmp_path)
    result = run("convert", "pt2ms", target, tmp_path / name)
    assert result.code == 2
    assert "--overwrite" in result.err
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "name",
    ["a.npz", "a.gguf", "a.onnx", "a.h5", "a.msgpack", "model.safetensors.index.json", "A.GGUF", "old.ckpt.tar"],
)
@pytest.mark.parametrize("direction", ["pt2ms", "ms2pt"])
def test_a_name_of_another_format_does_not_become_a_directory(
    name: str, direction: str, tmp_path: Path, run: Run
) -> None:
    target = source(tmp_path) if direction == "pt2ms" else ms_file(tmp_path)
    result = run("convert", direction, target, tmp_path / name)
    assert result.code == 2
    assert f"ends in '{Path(name).suffix}'" in result.err
    good = ".ckpt or .safetensors" if direction == "pt2ms" else ".safetensors, .bin, .pt or .pth"
    assert f"Name a file that ends in {good}, or a directory" in result.err
    assert not (tmp_path / name).exists()


def test_a_suffix_is_not_taken_for_an_option(tmp_path: Path, run: Run) -> None:
    result = run("convert", "pt2ms", source(tmp_path), tmp_path / "out.pt")
    assert "--format" not in result.err


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "PTH"])
def test_every_suffix_of_a_bin_is_one_file(suffix: str, tmp_path: Path, run: Run) -> None:
    assert run("convert", "ms2pt", ms_file(tmp_path), tmp_path / f"out.{suffix}").code == 0
    assert torch.load(tmp_path / f"out.{suffix}", weights_only=True).keys() == arrays().keys()


def test_a_folder_that_no_conversion_wrote_is_refused_at_once(tmp_path: Path, run: Run) -> None:
    """Told to give --overwrite, one would only meet the next refusal."""
    target = source(tmp_path)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").write_text("years")
    result = run("convert", "pt2ms", target, tmp_path / "theirs")
    assert result.code == 2
    assert "thesis.tex" in result.err and "Move it away" in result.err
    assert "--overwrite replaces a file, or a folder that a conversion wrote" in result.err


def test_overwrite_replaces_any_file(tmp_path: Path, run: Run) -> None:
    (tmp_path / "out.ckpt").write_text("no checkpoint")
    assert run("convert", "pt2ms", source(tmp_path), tmp_path / "out.ckpt").code == 2
    assert run("convert", "pt2ms", tmp_path / "hf", tmp_path / "out.ckpt", "--overwrite").code == 0
    assert load_ckpt(tmp_path / "out.ckpt")


def test_overwrite_takes_no_folder_but_a_former_output(tmp_path: Path, run: Run) -> None:
    target = source(tmp_path)
    out = tmp_path / "out"
    assert run("convert", "pt2ms", target, out).code == 0
    (out / "notes.txt").write_text("mine")
    result = run("convert", "pt2ms", target, out, "--overwrite")
    assert result.code == 2
    assert "notes.txt" in result.err
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    assert run("convert", "pt2ms", target, out, "--overwrite").code == 0
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").write_text("years")
    assert run("convert", "pt2ms", target, tmp_path / "theirs", "--overwrite").code == 2
    assert (tmp_path / "theirs" / "thesis.tex").read_text() == "years"
    (tmp_path / "folder.ckpt").mkdir()
    assert run("convert", "pt2ms", target, tmp_path / "folder.ckpt", "--overwrite").code == 2
    (tmp_path / "plain").write_text("a file")
    assert run("convert", "pt2ms", target, tmp_path / "plain", "--overwrite").code == 2
    assert (tmp_path / "plain").read_text() == "a file"
    assert leftovers(tmp_path) == []


def test_an_output_that_appears_meanwhile_is_left_alone(tmp_path: Path) -> None:
    """Another program writes the destination while the bytes move: it stays, and nothing of ours does."""
    target = source(tmp_path)
    for name in ("out.ckpt", "out"):
        path = tmp_path / name

        def appear(_: int, path: Path = path) -> None:
            if path.suffix:
                path.write_text("theirs")
            else:
                path.mkdir(exist_ok=True)
                (path / "theirs").write_text("theirs")

        with pytest.raises(ckptbridge.CkptBridgeError, match="appeared"):
            ckptbridge.convert(target, path, direction="pt2ms", progress=appear)
        assert (path if path.suffix else path / "theirs").read_text() == "theirs"
        assert leftovers(tmp_path) == []


def test_a_failing_run_leaves_a_former_output_as_it_was(tmp_path: Path, run: Run) -> None:
    tensors = {n: np.ones_like(a) for n, a in arrays().items()}
    tensors[EMBED][0, 0] = 1e5
    target = source(tmp_path, tensors)
    for name in ("out.ckpt", "out"):
        assert run("convert", "pt2ms", target, tmp_path / name).code == 0
        before = snapshot(tmp_path)
        result = run("convert", "pt2ms", target, tmp_path / name, "--overwrite", "--dtype", "float16")
        assert result.code == 2
        assert snapshot(tmp_path) == before


def test_a_source_that_changes_meanwhile_is_told(tmp_path: Path) -> None:
    target = source(tmp_path)

    def touch(_: int) -> None:
        with (target / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\xff")

    with pytest.raises(ckptbridge.CkptBridgeError, match="changed"):
        ckptbridge.convert(target, tmp_path / "out.ckpt", direction="pt2ms", progress=touch)
    assert not (tmp_path / "out.ckpt").exists()
    assert leftovers(tmp_path) == []


def test_folders_are_made_and_links_and_dots_are_followed(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = source(tmp_path)
    assert run("convert", "pt2ms", target, tmp_path / "a" / "b" / "out.ckpt").code == 0
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert run("convert", "pt2ms", target, tmp_path / "link").code == 0
    assert (tmp_path / "link").is_symlink()
    assert {p.name for p in (tmp_path / "real").iterdir()} == {"model.ckpt", "config.json", "ckptbridge.json"}
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run("convert", "pt2ms", "../hf", ".").code == 2
    assert run("convert", "pt2ms", "../hf", "./new").code == 0
    assert_same_words(load_ckpt(tmp_path / "here" / "new" / "model.ckpt"), load_ckpt(tmp_path / "a" / "b" / "out.ckpt"))
    assert run("convert", "pt2ms", "../hf", "plain.ckpt").code == 0
    assert leftovers(tmp_path) == []
