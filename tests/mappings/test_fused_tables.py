"""Every table of internlm2, baichuan, phi3, gpt_neox, chatglm, gpt2, glm4, glm4_moe, deepseek_v4."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import numpy as np
import pytest
from fused_judge import FAMILIES, cases, faults
from published_fused import shapes, tiny_config
from table_judge import layouts, numbered, translate

from ckptbridge.errors import CoverageError, ProofError
from ckptbridge.tables import catalog
from ckptbridge.tables.expand import choose_roots, expand
from ckptbridge.tables.proof import prove
from ckptbridge.tables.table import Table

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
TARGETS = {
    "internlm2": {"hf", "flat", "mindformers", "mindformers-legacy"},
    "baichuan": {"hf", "flat", "mindformers", "mindformers-legacy"},
    "phi3": {"hf", "flat", "mindformers"},
    "gpt_neox": {"hf", "flat", "nn", "mindformers"},
    "chatglm": {"hf", "flat", "mindformers", "mindformers-legacy"},
    "gpt2": {"hf", "flat", "nn", "mindformers", "mindformers-legacy"},
    "glm4": {"hf", "flat", "mindformers", "mindformers-legacy"},
    "glm4_moe": {"hf", "flat", "mindformers"},
    "deepseek_v4": {"hf", "mindformers"},
}
TABLES = [catalog.find(family, target) for family in FAMILIES for target in sorted(TARGETS[family])]


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_layout_is_the_formula_written_out(table: Table) -> None:
    judged = 0
    for config, model, root in cases(table):
        for options in layouts(table):
            assert faults(table, config, model, root, options) == [], (config, options)
            judged += 1
    assert judged


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_its_targets_and_one_default(family: str) -> None:
    assert set(catalog.targets(family)) == TARGETS[family]
    # MindFormers' only network for ChatGLM's own code is the older one.
    assert catalog.find(family).target == ("mindformers-legacy" if family == "chatglm" else "mindformers")


def test_layout_options_and_their_defaults() -> None:
    both = ("interleaved", "contiguous")
    assert dict(catalog.find("glm4_moe").layout) == {"attention": both, "mlp": both, "experts": ("2d", "3d")}
    # MindFormers runs DeepSeek-V4 in PyNative mode only, whose experts have three dimensions.
    assert dict(catalog.find("deepseek_v4").layout) == {"mlp": both, "experts": ("3d", "2d")}
    for family in ("internlm2", "baichuan", "phi3", "glm4"):
        assert dict(catalog.find(family).layout) == {"attention": both, "mlp": both}
    assert dict(catalog.find("gpt2").layout) == dict(catalog.find("gpt_neox").layout) == {"attention": both}
    # qkv_concat: True by default in the GLM network, a choice in the others.
    assert dict(catalog.find("chatglm", "mindformers-legacy").layout) == {
        "qkv": ("fused", "split"),
        "rope": ("pairs", "halves"),
    }
    assert catalog.find("glm4", "mindformers-legacy").layout["qkv"] == ("fused", "split")
    assert catalog.find("internlm2", "mindformers-legacy").layout["qkv"] == ("split", "fused")
    assert dict(catalog.find("baichuan", "mindformers-legacy").layout) == {}


# --- published models, names and shapes only -------------------------------------------------


def _published() -> list[tuple[str, Table]]:
    types = {path.stem: json.loads(path.read_text())["model_type"] for path in sorted(CONFIGS.glob("*.json"))}
    return [(name, table) for name, model_type in types.items() for table in TABLES if model_type in table.model_types]


@pytest.mark.parametrize(("name", "table"), _published(), ids=lambda x: x if isinstance(x, str) else x.target)
def test_proof_on_published_configs(name: str, table: Table) -> None:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    for options in layouts(table):
        prove(expand(table, config, options))


PARAMETERS = {
    # In full where the model cards or transformers' num_parameters() give it.
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "pythia-1b": 1_011_781_632,
    "gpt-neox-20b": 20_554_567_680,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-4-mini": 3_836_021_760,
    "phi-4": 14_659_507_200,
    "internlm2-7b": 7_737_708_544,
    "internlm2-20b": 19_861_149_696,
    "baichuan2-7b": 7_505_973_248,
    "chatglm3-6b": 6_243_584_000,
    "glm-4-9b-chat": 9_399_951_360,
    "glm-4-9b-0414": 9_400_279_040,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_models_have_their_published_number_of_parameters(name: str) -> None:
    assert _parameters(name) == PARAMETERS[name]


# As the model cards give them: DeepSeek's without, GLM's with the multi-token prediction layer and its copies.
@pytest.mark.parametrize(
    ("name", "changed", "billions"),
    [
        ("deepseek-v4-flash", {"num_nextn_predict_layers": 0}, 284),
        ("deepseek-v4-pro", {"num_nextn_predict_layers": 0}, 1573),  # "1.6T"
        ("glm-4.5-air", {}, 110),
        ("glm-4.5", {}, 358),
    ],
)
def test_published_experts_have_their_published_size(name: str, changed: dict[str, object], billions: int) -> None:
    found = _parameters(name, changed)
    assert round(found / 1e9) == billions


def _parameters(name: str, changed: dict[str, object] | None = None) -> int:
    """Elements of the PyTorch side, copies that are stored twice included."""
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | (changed or {})
    expansion = expand(catalog.find(config["model_type"]), config)
    copies = [
        entry.pt_shapes
        for entry in expansion.entries
        if entry.kind == "tied" and not config.get("tie_word_embeddings", True)
    ]
    return prove(expansion).elements + sum(prod(shape) for shapes in copies for shape in shapes or ())


# --- what goes wrong in the field ------------------------------------------------------------


def test_two_fused_layouts_of_equal_shape_are_not_confused() -> None:
    """C14: wqkv is grouped, qkv_proj is not; with equal sizes the shapes are the same and the rows are not."""
    config = tiny_config("phi3", "plain")
    fused = np.arange(30 * 18, dtype=np.int32).reshape(30, 18)
    grouped = _split(catalog.find("internlm2", "flat"), config | {"bias": False}, "attention.wqkv", fused)
    blocks = _split(catalog.find("phi3", "flat"), config, "self_attn.qkv_proj", fused)
    # Heads of 3 rows: three queries, a key and a value for each of the two key/value heads.
    rows = {
        "q": [*range(9), *range(15, 24)],
        "k": [*range(9, 12), *range(24, 27)],
        "v": [*range(12, 15), *range(27, 30)],
    }
    for x in "qkv":
        assert np.array_equal(grouped[x], fused[rows[x]])
    assert np.array_equal(blocks["q"], fused[:18])
    assert np.array_equal(blocks["k"], fused[18:24])
    assert np.array_equal(blocks["v"], fused[24:])


def _split(table: Table, config: dict[str, object], name: str, fused: np.ndarray) -> dict[str, np.ndarray]:
    pt = numbered(shapes(config | {"model_type": table.family}, "model."))
    pt[f"model.layers.1.{name}.weight"] = fused
    ms = translate(expand(table, config), pt)
    return {x: ms[f"model.layers.1.{x}_proj.weight"] for x in "qkv"}


def test_rotary_rows_are_reordered_within_each_head_of_q_and_of_k() -> None:
    """C11: q has three times as many heads as k; the rows of v stay, whatever their number."""
    config = tiny_config("chatglm", "plain")
    table = catalog.find("chatglm", "mindformers-legacy")
    pt = numbered(shapes(config, "transformer."))
    fused = pt["transformer.encoder.layers.0.self_attention.query_key_value.bias"]
    ms = translate(expand(table, config, {"rope": "halves"}), pt)
    got = ms["transformer.encoder.layers.0.self_attention.query_key_value.bias"] - fused[0]
    # Heads of 4: six of q, two of k, two of v.
    heads = [[4 * n + row for row in ((0, 2, 1, 3) if n < 8 else (0, 1, 2, 3))] for n in range(10)]
    assert got.tolist() == [row for head in heads for row in head]


def test_head_dim_is_read_from_the_config() -> None:
    """C14: heads of 4 on a hidden size of 18 with 6 heads; a derived head_dim would be 3."""
    expansion = expand(catalog.find("glm4"), tiny_config("glm4", "plain"))
    entry = expansion.by_ms["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert entry.ms_shapes == (((6 + 2 + 2) * 4, 18),)


def test_a_square_conv1d_is_transposed_by_rule_and_not_by_shape() -> None:
    """B7: c_proj is square, so either way loads; Dense wants (out, in), Conv1D (in, out)."""
    config = tiny_config("gpt2", "plain")
    pt = numbered(shapes(config, ""))
    square = pt["h.0.attn.c_proj.weight"]
    assert square.shape == (15, 15)
    for target, name, want in (
        ("hf", "h.0.attn.c_proj.weight", square),
        ("nn", "h.0.attn.c_proj.weight", square.T),
        ("mindformers-legacy", "backbone.blocks.0.attention.projection.weight", square),
    ):
        table = catalog.find("gpt2", target)
        ms = translate(expand(table, config, None, choose_roots(table, "pt", pt)), pt)
        assert np.array_equal(ms[name], want)


def test_experts_stand_in_the_order_of_their_numbers() -> None:
    """C20: eleven experts, each filled with its number; expert 10 comes after 9, and not after 1."""
    config = tiny_config("glm4_moe", "plain")
    pt = {name: np.zeros(shape, np.int32) for name, shape in shapes(config, "model.").items()}
    for name in pt:
        if ".experts." in name:
            pt[name][...] = int(name.split(".experts.")[1].partition(".")[0])
    expansion = expand(catalog.find("glm4_moe"), config, {"experts": "3d"})
    ms = translate(expansion, pt)
    weight1 = ms["decoder.layers.1.mlp.experts.weight1"]
    assert weight1.shape == (11, 18, 14)
    assert [int(x) for x in weight1[:, 0, 0]] == list(range(11))
    assert all(np.array_equal(again, pt[name]) for name, again in translate(expansion, ms, back=True).items())


def test_prediction_layers_come_after_the_model_by_its_config() -> None:
    """C19: 3 + 2 layers; layer 3's own embedding and head are compared with the model's, not mapped over them."""
    expansion = expand(catalog.find("glm4_moe"), tiny_config("glm4_moe", "mtp"))
    assert expansion.by_pt["model.layers.3.eh_proj.weight"].ms == ("mtp.layers.0.eh_proj.weight",)
    assert expansion.by_pt["model.layers.4.enorm.weight"].ms == ("mtp.layers.1.enorm.weight",)
    assert expansion.by_pt["model.embed_tokens.weight"].ms == ("embedding.word_embeddings.weight",)
    assert expansion.by_pt["model.layers.3.embed_tokens.weight"].kind == "tied"
    assert expansion.by_pt["model.layers.3.shared_head.head.weight"].tied_pt == "lm_head.weight"


def test_the_dialect_of_deepseek_v4_is_told_by_its_names() -> None:
    table = catalog.find("deepseek_v4")
    published = shapes(tiny_config("deepseek_v4", "published"), "")
    saved = shapes(tiny_config("deepseek_v4", "saved by transformers"), "model.")
    assert choose_roots(table, "pt", published) == {
        "root": "", "embed": "embed", "hc_head": "hc_head_", "kv_norm": "kv_norm",
    }  # fmt: skip
    assert choose_roots(table, "pt", saved) == {
        "root": "model.", "embed": "model.embed_tokens", "hc_head": "model.hc_head.hc_", "kv_norm": "norm",
    }  # fmt: skip
    with pytest.raises(CoverageError, match="cannot be told"):
        choose_roots(table, "pt", shapes(tiny_config("glm4", "plain"), "decoder."))


def test_both_dialects_of_deepseek_v4_give_the_same_file() -> None:
    """The same weights under either dialect's names, MTP layers apart."""
    table = catalog.find("deepseek_v4")
    config, saved_config = (tiny_config("deepseek_v4", v) for v in ("published", "saved by transformers"))
    published = {n: a for n, a in numbered(shapes(config, "")).items() if not n.startswith("mtp.")}
    saved = {_saved_name(n): a for n, a in published.items()}
    one = expand(table, config | {"num_nextn_predict_layers": 0}, None, choose_roots(table, "pt", published))
    other = expand(table, saved_config, None, choose_roots(table, "pt", saved))
    a, b = translate(one, published), translate(other, saved)
    assert a.keys() == b.keys()
    assert all(np.array_equal(a[name], b[name]) for name in a)


def _saved_name(name: str) -> str:
    """What transformers calls a published tensor, by hand."""
    if name == "head.weight":
        return name
    if name == "embed.weight":
        return "model.embed_tokens.weight"
    name = name.replace("hc_head_", "hc_head.hc_") if name.startswith("hc_head_") else name
    return "model." + name.replace("attn.kv_norm", "attn.norm")


def test_a_half_written_rule_is_no_bijection() -> None:
    """The proof names the tensor when two rules want it."""
    table = catalog.find("phi3")
    twice = [rule for rule in table.rules if "qkv_proj" in rule.pt[0]]
    broken = type(table)(
        **{name: getattr(table, name) for name in table.__dataclass_fields__ if name != "rules"},
        rules=(*table.rules, twice[0]),
    )
    with pytest.raises(ProofError):
        prove(expand(broken, tiny_config("phi3", "plain")))
