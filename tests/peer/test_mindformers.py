"""The tables against MindFormers 2.1.0's own converters: the same names and bytes where these are right.

Where MindFormers is known to be wrong, the test says which and why, and holds it to that: a release that
mends it will show here. MindFormers has two converters, and they disagree: ``convert_weight_dict``, offline, and the
operators of ``weight_converters``, which its ``load_hf_checkpoint`` applies.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mindformers.checkpoint.converter.convert_op import ExpertsConvertOp
from mindformers.core.context.build_context import MFContextOperator
from mindformers.models.deepseek4.utils import DeepseekV4PreTrainedModel
from mindformers.models.qwen3.modeling_qwen3_train import TrainingQwen3ForCausalLM
from mindformers.models.qwen3.utils import Qwen3PreTrainedModel
from mindformers.models.qwen3_moe.modeling_qwen3_moe_train import TrainingQwen3MoeForCausalLM
from mindformers.models.qwen3_moe.utils import Qwen3MoePreTrainedModel
from mindformers.parallel_core.utils.model_mixin import ModelMixin, TrainModelMixin
from mindformers.tools.register import MindFormerConfig
from safetensors.numpy import load_file, save_file

import ckptbridge
from ckptbridge.tables import catalog
from ckptbridge.tables.expand import expand

# The switch that selects its current networks; without it the converters refuse.
MFContextOperator(MindFormerConfig(use_legacy=False, context={}, parallel={}))

Arrays = dict[str, np.ndarray]
Config = dict[str, Any]

# Three query heads for each of two key-value heads of 5: no two sizes alike.
QWEN3: Config = {
    "model_type": "qwen3",
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "vocab_size": 11,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 5,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
QWEN3_MOE: Config = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 3,
    "moe_intermediate_size": 7,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK_V4: Config = {
    "model_type": "deepseek_v4",
    "hidden_size": 12,
    "num_hidden_layers": 4,
    "vocab_size": 17,
    "num_attention_heads": 6,
    "head_dim": 4,
    "q_lora_rank": 10,
    "o_groups": 3,
    "o_lora_rank": 5,
    "index_n_heads": 2,
    "index_head_dim": 3,
    "hc_mult": 2,
    "moe_intermediate_size": 7,
    "n_routed_experts": 3,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
    "compress_ratios": [0, 4, 128, 4, 0],
    "tie_word_embeddings": False,
}


def hf_arrays(config: Config) -> Arrays:
    """A checkpoint with a value of its own in every element, in the names and shapes of the `hf` table."""
    arrays: Arrays = {}
    start = 0
    for entry in expand(catalog.find(config["model_type"], "hf"), config).entries:
        if entry.kind != "map":
            continue
        assert entry.pt_shapes is not None
        for name, shape in zip(entry.pt, entry.pt_shapes, strict=True):
            count = int(np.prod(shape))
            dtype = np.int64 if name.endswith("tid2eid") else np.float32
            arrays[name] = np.arange(start, start + count, dtype=dtype).reshape(shape)
            start += count
    return arrays


def ours(folder: Path, config: Config, arrays: Arrays, **layout: str) -> Arrays:
    """The checkpoint as ckptbridge converts it."""
    source = folder / "hf"
    source.mkdir()
    save_file(arrays, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps(config))
    target = folder / "ms.safetensors"
    ckptbridge.convert(source, target, direction="pt2ms", target="mindformers", layout=layout)
    return load_file(target)


def assert_same(theirs: Mapping[str, np.ndarray], mine: Mapping[str, np.ndarray]) -> None:
    assert theirs.keys() == mine.keys()
    for name, array in mine.items():
        assert (theirs[name].dtype, theirs[name].shape) == (array.dtype, array.shape), name
        assert np.ascontiguousarray(theirs[name]).tobytes() == array.tobytes(), name


def model_config(config: Config, **switches: bool) -> SimpleNamespace:
    """The values that MindFormers' converters read from its TransformerConfig, under its names."""
    return SimpleNamespace(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config.get("intermediate_size"),
        moe_ffn_hidden_size=config.get("moe_intermediate_size"),
        num_moe_experts=config.get("num_experts", config.get("n_routed_experts")),
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config.get("num_key_value_heads"),
        kv_channels=config["head_dim"],
        tensor_model_parallel_size=1,
        expert_model_parallel_size=1,
        use_contiguous_weight_layout_attention=switches.get("contiguous", False),
        use_interleaved_weight_layout_mlp=switches.get("interleaved_mlp", True),
    )


def offline(network: type, names: type, config: SimpleNamespace, arrays: Arrays) -> Arrays:
    """MindFormers' ``convert_weight_dict``, on its own name mapping, without building the network."""

    class Converter(TrainModelMixin, ModelMixin):
        weight_mapping = names.weight_mapping

    converter = Converter()
    converter.transformer_config = config
    found: Arrays = network.convert_weight_dict(converter, dict(arrays), qkv_dict={}, condition=threading.Condition())
    return found


def operators(names: type, config: SimpleNamespace, arrays: Arrays) -> tuple[Arrays, set[str]]:
    """MindFormers' ``weight_converters`` on one device: what they make, and the names that none of them takes."""
    found: Arrays = {}
    used: set[str] = set()
    for shared in names.weight_converters:
        operator = copy.deepcopy(shared)  # the list belongs to the class: setting it up for one model changes all
        if hasattr(operator, "set_model_config"):
            operator.set_model_config(config)
            if hasattr(operator, "optimizer_parallel_size"):
                operator.optimizer_parallel_size = 1  # MindSpore's context has -1 where nothing was set
        for i in range(config.num_layers):
            experts = isinstance(operator, ExpertsConvertOp)
            groups = [
                [name.format(i, e) for e in range(config.num_moe_experts)] if experts else [name.format(i)]
                for name in operator.hf_names
            ]
            flat = [name for group in groups for name in group]
            if not all(name in arrays for name in flat) or used.issuperset(flat):
                continue
            used.update(flat)
            if experts:  # its loader stacks the experts, and hands them over as one array
                made = operator._hf_to_mf([np.stack([arrays[name] for name in group]) for group in groups])
                found |= zip([name.format(i) for name in operator.mf_names], made, strict=True)
            else:
                found |= operator({name: arrays[name] for name in flat})
    return found, set(arrays) - used


# --- Qwen3 -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mlp", ["interleaved", "contiguous"])
@pytest.mark.parametrize("attention", ["interleaved", "contiguous"])
def test_qwen3_offline(tmp_path: Path, attention: str, mlp: str) -> None:
    arrays = hf_arrays(QWEN3)
    config = model_config(QWEN3, contiguous=attention == "contiguous", interleaved_mlp=mlp == "interleaved")
    theirs = offline(TrainingQwen3ForCausalLM, Qwen3PreTrainedModel, config, arrays)
    assert_same(theirs, ours(tmp_path, QWEN3, arrays, attention=attention, mlp=mlp))


def test_qwen3_offline_biases_are_matrices_of_one_column(tmp_path: Path) -> None:
    """Wrong: its network's bias is a vector. MindSpore loads the column all the same, and the forward then fails."""
    config = QWEN3 | {"attention_bias": True}
    arrays = hf_arrays(config)
    theirs = offline(TrainingQwen3ForCausalLM, Qwen3PreTrainedModel, model_config(config), arrays)
    mine = ours(tmp_path, config, arrays)
    fused = [name for name in mine if name.endswith("linear_qkv.bias")]
    assert len(fused) == 2
    for name in fused:
        assert (theirs[name].shape, mine[name].shape) == ((50, 1), (50,))
        theirs[name] = theirs[name][:, 0]  # the order of its elements is right
    assert_same(theirs, mine)


@pytest.mark.parametrize("mlp", ["interleaved", "contiguous"])
def test_qwen3_operators(tmp_path: Path, mlp: str) -> None:
    arrays = hf_arrays(QWEN3)
    theirs, left = operators(Qwen3PreTrainedModel, model_config(QWEN3, interleaved_mlp=mlp == "interleaved"), arrays)
    assert left == set()
    assert_same(theirs, ours(tmp_path, QWEN3, arrays, attention="interleaved", mlp=mlp))


def test_qwen3_operators_know_no_contiguous_attention(tmp_path: Path) -> None:
    """Wrong: the fused weight is interleaved whatever the config says; SelfAttentionContiguous reads [Q; K; V]."""
    arrays = hf_arrays(QWEN3)
    theirs, _ = operators(Qwen3PreTrainedModel, model_config(QWEN3, contiguous=True), arrays)
    for attention, agrees in (("interleaved", True), ("contiguous", False)):
        folder = tmp_path / attention
        folder.mkdir()
        name = "decoder.layers.0.self_attention.linear_qkv.weight"
        mine = ours(folder, QWEN3, arrays, attention=attention)[name]
        assert theirs[name].shape == mine.shape
        assert (theirs[name].tobytes() == mine.tobytes()) is agrees


def test_qwen3_operators_drop_biases() -> None:
    """Wrong: there is no operator for the biases of a model with attention_bias, and its loader goes on without."""
    arrays = hf_arrays(QWEN3 | {"attention_bias": True})
    _, left = operators(Qwen3PreTrainedModel, model_config(QWEN3), arrays)
    assert left == {name for name in arrays if name.endswith(".bias")}
    assert len(left) == 8


def test_qwen3_operators_come_back(tmp_path: Path) -> None:
    """From their MindSpore side to PyTorch's: the same as ms2pt of ours."""
    arrays = hf_arrays(QWEN3)
    mine = ours(tmp_path, QWEN3, arrays)
    for shared in Qwen3PreTrainedModel.weight_converters:
        operator = copy.deepcopy(shared)
        if hasattr(operator, "set_model_config"):
            operator.set_model_config(model_config(QWEN3))
            operator.optimizer_parallel_size = 1
        for i in range(QWEN3["num_hidden_layers"]):
            back = operator({name.format(i): mine[name.format(i)] for name in operator.mf_names}, mf_to_hf=True)
            assert_same(back, {name: arrays[name] for name in back})


# --- Qwen3-MoE -------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["interleaved", "contiguous"])
def test_qwen3_moe_offline(tmp_path: Path, attention: str) -> None:
    arrays = hf_arrays(QWEN3_MOE)
    config = model_config(QWEN3_MOE, contiguous=attention == "contiguous")
    theirs = offline(TrainingQwen3MoeForCausalLM, Qwen3MoePreTrainedModel, config, arrays)
    assert_same(theirs, ours(tmp_path, QWEN3_MOE, arrays, attention=attention, experts="2d"))


def test_qwen3_moe_operators(tmp_path: Path) -> None:
    arrays = hf_arrays(QWEN3_MOE)
    theirs, left = operators(Qwen3MoePreTrainedModel, model_config(QWEN3_MOE), arrays)
    assert left == set()
    assert_same(theirs, ours(tmp_path, QWEN3_MOE, arrays, experts="2d"))


def test_three_dimensional_experts_are_the_same_bytes(tmp_path: Path) -> None:
    """What MindFormers' PyNative and inference networks read is a reshape of what its operators write."""
    arrays = hf_arrays(QWEN3_MOE)
    theirs, _ = operators(Qwen3MoePreTrainedModel, model_config(QWEN3_MOE), arrays)
    mine = ours(tmp_path, QWEN3_MOE, arrays, experts="3d")
    name = "decoder.layers.1.mlp.experts.weight1"
    assert mine[name].shape == (3, 24, 14)
    assert np.array_equal(theirs[name].reshape(3, 24, 14), mine[name])


def test_qwen3_moe_has_no_rule_for_dense_layers(tmp_path: Path) -> None:
    """Wrong: of a model with mlp_only_layers, the operators take no dense weight at all, and ``convert_weight_dict``
    puts the halves one after the other where the default network reads them row by row."""
    config = QWEN3_MOE | {"mlp_only_layers": [0]}
    arrays = hf_arrays(config)
    _, left = operators(Qwen3MoePreTrainedModel, model_config(config), arrays)
    assert left == {f"model.layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    theirs = offline(TrainingQwen3MoeForCausalLM, Qwen3MoePreTrainedModel, model_config(config), arrays)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    for mlp, agrees in (("interleaved", False), ("contiguous", True)):
        folder = tmp_path / mlp
        folder.mkdir()
        assert (theirs[name].tobytes() == ours(folder, config, arrays, mlp=mlp)[name].tobytes()) is agrees


# --- DeepSeek-V4 -----------------------------------------------------------------------------


@pytest.mark.parametrize("mlp", ["interleaved", "contiguous"])
def test_deepseek_v4_operators(tmp_path: Path, mlp: str) -> None:
    arrays = hf_arrays(DEEPSEEK_V4)
    config = model_config(DEEPSEEK_V4, interleaved_mlp=mlp == "interleaved")
    theirs, left = operators(DeepseekV4PreTrainedModel, config, arrays)
    assert left == set()
    # The token to expert ids are cast by its loader, not by the operator.
    hashed = "decoder.layers.0.mlp.router.tid2eid"
    theirs[hashed] = theirs[hashed].astype(np.int32)
    assert_same(theirs, ours(tmp_path, DEEPSEEK_V4, arrays, mlp=mlp, experts="2d"))


def test_deepseek_v4_operators_know_one_prediction_layer() -> None:
    """Wrong: but for the routed experts, the number of the prediction layer stands in their names as 0."""
    config = DEEPSEEK_V4 | {"num_nextn_predict_layers": 2, "compress_ratios": [0, 4, 128, 4, 0, 0]}
    arrays = hf_arrays(config)
    _, left = operators(DeepseekV4PreTrainedModel, model_config(config), arrays)
    second = {name for name in arrays if name.startswith("mtp.1.")}
    assert left == {name for name in second if ".experts." not in name}
    assert left


def test_deepseek_v4_offline_names_are_corrupt() -> None:
    """Wrong: ``convert_weight_dict`` renames by substrings, so that 'norm.' and 'layers.' hit inside other names, and
    '{}' is never filled in. Of the 73 names of its operators, 46 come out otherwise."""
    mapping = type("Names", (ModelMixin,), {"weight_mapping": DeepseekV4PreTrainedModel.weight_mapping})()
    names = {
        (hf.format(0, 0), mf.format(0, 0))
        for operator in DeepseekV4PreTrainedModel.weight_converters
        for hf in operator.hf_names
        for mf in operator.mf_names[:1]
    }
    wrong = {hf for hf, mf in names if mapping.convert_name(hf) != mf}
    assert (len(names), len(wrong)) == (73, 46)
    assert mapping.convert_name("layers.0.attn_norm.weight") != "decoder.layers.0.input_layernorm.weight"
    assert mapping.convert_name("layers.0.ffn.experts.0.w1.weight").endswith("experts.0.w1.weight")


def test_deepseek_v4_offline_shared_experts_are_contiguous(tmp_path: Path) -> None:
    """Wrong: what ``convert_weight_dict`` calls for them joins gate and up one after the other; the PyNative network
    reads them row by row."""
    arrays = hf_arrays(DEEPSEEK_V4)
    gate, up = (arrays[f"layers.1.ffn.shared_experts.{n}.weight"] for n in ("w1", "w3"))
    joined = {"x.gating.weight": gate, "x.hidden.weight": up}
    converter = TrainModelMixin()
    converter.concat_ffn_weight_infer(["x.gating.weight"], ["x.hidden.weight"], {}, threading.Condition(), joined)
    name = "decoder.layers.1.mlp.shared_experts.linear_fc1.weight"
    for mlp, agrees in (("interleaved", False), ("contiguous", True)):
        folder = tmp_path / mlp
        folder.mkdir()
        mine = ours(folder, DEEPSEEK_V4, arrays, mlp=mlp)[name]
        assert (joined["x.linear_fc1.weight"].tobytes() == mine.tobytes()) is agrees
