"""Cases from the field, each with the value that is right, on the published configs where it happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_models import TINY, decoder_shapes, encoder_shapes, tiny_config
from table_judge import FAMILIES, HEADS, cases, numbered, translate, unfit

from ckptbridge.errors import ConfigError, CoverageError, ShapeError
from ckptbridge.tables import catalog
from ckptbridge.tables.expand import Expansion, choose_roots, expand

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def _published(name: str, family: str, target: str | None = None, **layout: str) -> Expansion:
    return expand(catalog.find(family, target), json.loads((CONFIGS / f"{name}.json").read_text()), layout)


def _ms_shape(expansion: Expansion, name: str) -> tuple[int, ...]:
    entry = expansion.by_ms[name]
    assert entry.ms_shapes is not None
    return entry.ms_shapes[entry.ms.index(name)]


# --- grouped-query attention -----------------------------------------------------------------


def test_head_dim_is_read_and_not_derived() -> None:
    # 16 heads of 128 on a hidden size of 1024: a derived head_dim of 64 would give 2048 rows.
    expansion = _published("qwen3-0.6b", "qwen3")
    assert _ms_shape(expansion, "decoder.layers.27.self_attention.linear_qkv.weight") == ((16 + 2 * 8) * 128, 1024)
    assert _ms_shape(expansion, "decoder.layers.0.self_attention.linear_proj.weight") == (1024, 16 * 128)


def test_a_config_of_another_head_dim_is_refused_by_shape() -> None:
    config = {**tiny_config("llama", "plain"), "head_dim": 5}
    entry = expand(catalog.find("llama"), config).by_pt["model.layers.0.self_attn.q_proj.weight"]
    shapes = decoder_shapes(tiny_config("llama", "plain"))
    with pytest.raises(ShapeError, match=r"q_proj\.weight' has the shape \[24, 18\], and \[30, 18\] is expected"):
        entry.bind("pt", [shapes[name] for name in entry.pt])


def test_small_grouped_attention_by_value() -> None:
    # hidden 8, 4 heads of 4, 2 key/value heads: the third head's rows stand after the first key and value.
    config = {**tiny_config("qwen3", "plain"), "hidden_size": 8, "num_attention_heads": 4, "num_hidden_layers": 1}
    pt = numbered(decoder_shapes(config))
    q, k, v = (pt[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv")
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    interleaved = translate(expand(catalog.find("qwen3"), config), pt)[name]
    assert np.array_equal(interleaved[:8], q[:8])
    assert np.array_equal(interleaved[8:12], k[:4])
    assert np.array_equal(interleaved[12:16], v[:4])
    assert np.array_equal(interleaved[16:24], q[8:])
    contiguous = translate(expand(catalog.find("qwen3"), config, {"attention": "contiguous"}), pt)[name]
    assert np.array_equal(contiguous, np.concatenate([q, k, v]))
    assert not np.array_equal(contiguous, interleaved)


@pytest.mark.parametrize(
    ("missing", "family"),
    [
        ("num_attention_heads", "llama"),
        ("hidden_size", "qwen2"),
        ("kv_lora_rank", "deepseek_v3"),
        ("vocab_size", "bert"),
    ],
)
def test_a_missing_config_value_is_named(missing: str, family: str) -> None:
    config = {k: v for k, v in tiny_config(family, "plain").items() if k != missing}
    with pytest.raises(ConfigError, match=missing):
        expand(catalog.find(family), config)


# --- experts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_experts_stand_in_the_order_of_their_numbers(family: str) -> None:
    config = tiny_config(family, "plain")
    names = [n for n in decoder_shapes(config) if ".experts." in n]
    pt = numbered(decoder_shapes(config))
    for name in names:  # each expert is filled with its number: 10 comes after 9, not after 1
        pt[name] = np.full(pt[name].shape, int(name.partition(".experts.")[2].partition(".")[0]), np.int32)
    for rank, axes in (("2d", (1,)), ("3d", (1, 2))):
        ms = translate(expand(catalog.find(family), config, {"experts": rank}), pt)
        for name in ("weight1", "weight2"):
            stacked = ms[f"decoder.layers.2.mlp.experts.{name}"]
            by_expert = stacked.min(axis=axes)
            assert np.array_equal(by_expert, stacked.max(axis=axes))
            assert np.array_equal(np.unique(by_expert), np.arange(11))
            assert np.array_equal(by_expert, np.sort(by_expert))


def test_experts_of_either_rank_are_the_same_words() -> None:
    config = tiny_config("deepseek_v3", "mtp")
    pt = numbered(decoder_shapes(config))
    flat, stacked = (translate(expand(catalog.find("deepseek_v3"), config, {"experts": r}), pt) for r in ("2d", "3d"))
    for name in flat:
        assert flat[name].tobytes() == stacked[name].tobytes()


def test_mixed_layers_are_dense_where_the_config_says_so() -> None:
    expansion = expand(catalog.find("qwen3_moe"), tiny_config("qwen3_moe", "mixed"))
    # decoder_sparse_step 2: layers 1, 3, ...; layer 3 is in mlp_only_layers.
    dense = {i for i in range(5) if f"decoder.layers.{i}.mlp.linear_fc1.weight" in expansion.by_ms}
    experts = {i for i in range(5) if f"decoder.layers.{i}.mlp.experts.weight1" in expansion.by_ms}
    assert (dense, experts) == ({0, 2, 3, 4}, {1})


def test_deepseek_v3_has_three_dense_layers() -> None:
    expansion = _published("deepseek-v3", "deepseek_v3")
    assert [i for i in range(61) if f"decoder.layers.{i}.mlp.linear_fc1.weight" in expansion.by_ms] == [0, 1, 2]
    assert _ms_shape(expansion, "decoder.layers.3.mlp.experts.weight1") == (256 * 7168, 2 * 2048)
    assert _ms_shape(expansion, "decoder.layers.3.mlp.shared_experts.linear_fc1.weight") == (2 * 2048, 7168)


# --- multi-token prediction, latent attention, fp8 -------------------------------------------


def test_prediction_layers_are_told_by_their_number() -> None:
    expansion = _published("deepseek-v3", "deepseek_v3")
    names = {
        "model.layers.61.eh_proj.weight": "mtp.layers.0.eh_proj.weight",
        "model.layers.61.shared_head.norm.weight": "mtp.layers.0.final_layernorm.weight",
        "model.layers.61.input_layernorm.weight": "mtp.layers.0.transformer_layer.input_layernorm.weight",
        "model.layers.61.mlp.experts.255.down_proj.weight": "mtp.layers.0.transformer_layer.mlp.experts.weight2",
        "model.layers.6.input_layernorm.weight": "decoder.layers.6.input_layernorm.weight",
        "model.layers.60.mlp.experts.255.down_proj.weight": "decoder.layers.60.mlp.experts.weight2",
    }
    assert {name: expansion.by_pt[name].ms[0] for name in names} == names
    assert "model.layers.62.input_layernorm.weight" not in expansion.by_pt
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    for name, original in copies.items():
        entry = expansion.by_pt[f"model.layers.61.{name}"]
        assert (entry.kind, entry.tied, entry.ms) == ("tied", original, ())


def test_without_prediction_layers_in_the_config_none_are_expected() -> None:
    for value in (0, None):
        config = json.loads((CONFIGS / "deepseek-v3.json").read_text()) | {"num_nextn_predict_layers": value}
        for target in ("hf", "mindformers"):
            expansion = expand(catalog.find("deepseek_v3", target), config)
            assert not any(name.startswith("model.layers.61.") for name in expansion.by_pt)


def test_latent_attention_without_a_rank_for_q() -> None:
    separate = _published("deepseek-v2-lite", "deepseek_v2")
    assert _ms_shape(separate, "decoder.layers.0.self_attention.linear_q_proj.weight") == (16 * 192, 2048)
    assert "decoder.layers.0.self_attention.q_layernorm.weight" not in separate.by_ms
    fused = _published("deepseek-v2-lite", "deepseek_v2", mla="fused")
    assert _ms_shape(fused, "decoder.layers.0.self_attention.linear_qkv.weight") == (16 * 192 + 512 + 64, 2048)


def test_the_router_bias_is_kept_in_its_own_type() -> None:
    for target in ("hf", "flat", "mindformers"):
        entry = _published("deepseek-v3", "deepseek_v3", target).by_pt[
            "model.layers.3.mlp.gate.e_score_correction_bias"
        ]
        assert (entry.dtype_pt, entry.dtype_ms) == ("keep", "keep")


def test_fp8_blocks_are_read_from_the_config() -> None:
    assert _published("deepseek-v3", "deepseek_v3").fp8_block == (128, 128)
    assert _published("moonlight-16b-a3b", "deepseek_v3").fp8_block is None
    table = catalog.find("deepseek_v3")
    assert table.fp8 is not None
    assert table.fp8.suffix == "_scale_inv"


# --- what a target cannot hold ---------------------------------------------------------------


def test_older_networks_have_no_bias_in_the_feed_forward_part() -> None:
    expansion = expand(catalog.find("llama", "mindformers-legacy"), tiny_config("llama", "mlp-biased"))
    assert "model.layers.0.mlp.gate_proj.bias" not in expansion.by_pt


@pytest.mark.parametrize("mla", ["separate", "fused"])
def test_networks_have_no_biases_of_latent_attention(mla: str) -> None:
    config = tiny_config("deepseek_v3", "mtp biased")
    biases = [name for name in decoder_shapes(config) if name.endswith(("proj.bias", "mqa.bias"))]
    assert len(biases) == 3 * 5
    expansion = expand(catalog.find("deepseek_v3"), config, {"mla": mla})
    assert not any(name in expansion.by_pt for name in biases)


# --- BERT ------------------------------------------------------------------------------------


def _bert_names(ms: bool, *, gamma: bool = False) -> dict[str, str]:
    config = tiny_config("bert", "plain")
    shapes = encoder_shapes(config, "bert.", names=("gamma", "beta") if gamma else ("weight", "bias"))
    table = catalog.find("bert", "nn")
    expansion = expand(table, config, {}, choose_roots(table, "pt", shapes))
    one, other = (expansion.by_ms, "pt") if ms else (expansion.by_pt, "ms")
    return {name: getattr(entry, other)[0] for name, entry in one.items() if len(entry.pt) == 1 and entry.ms}


@pytest.mark.parametrize("gamma", [False, True], ids=["PyTorch", "TensorFlow"])
def test_only_the_last_component_of_norms_and_embeddings_changes(gamma: bool) -> None:
    names = _bert_names(ms=False, gamma=gamma)
    scale, shift = ("gamma", "beta") if gamma else ("weight", "bias")
    norm = "bert.encoder.layer.1.attention.output.LayerNorm"
    assert names[f"{norm}.{scale}"] == f"{norm}.gamma"
    assert names[f"{norm}.{shift}"] == f"{norm}.beta"
    embedding = "bert.embeddings.word_embeddings"
    assert names[f"{embedding}.weight"] == f"{embedding}.embedding_table"
    dense = "bert.encoder.layer.0.output.dense"
    assert names[f"{dense}.weight"] == f"{dense}.weight"
    assert _bert_names(ms=True, gamma=gamma)[f"{norm}.gamma"] == f"{norm}.{scale}"


def test_a_checkpoint_of_neither_prefix_is_refused() -> None:
    table = catalog.find("bert", "nn")
    with pytest.raises(CoverageError, match="cannot be told"):
        choose_roots(table, "pt", ["electra.embeddings.word_embeddings.weight"])


# --- tables of one family agree --------------------------------------------------------------


def _pt_side(expansion: Expansion) -> dict[str, Any]:
    return {
        name: (entry.kind, None if entry.pt_shapes is None else entry.pt_shapes[entry.pt.index(name)])
        for name, entry in expansion.by_pt.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_all_targets_of_a_family_read_the_same_checkpoint(family: str) -> None:
    targets = catalog.targets(family)
    for variant in (v for f, v in TINY if f == family):
        fit = [t for t in (catalog.find(family, name) for name in targets) if not unfit(t, variant)]
        config = tiny_config(family, variant)
        for root in catalog.find(family).roots["root"].choices:
            sides = [_pt_side(expand(table, config, {}, {"root": root})) for table in fit]
            assert all(side == sides[0] for side in sides)


def test_every_family_is_judged_with_and_without_its_prefix() -> None:
    for family in FAMILIES:
        roots = {root for _, _, root in cases(catalog.find(family))}
        assert roots == ({"", f"{family}."} if family in HEADS else {"", "model."})
