"""The proof: what it counts, and a counter-example for everything that is no bijection."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from ckptbridge.errors import ProofError
from ckptbridge.tables.axes import Block, BoundAxes, View
from ckptbridge.tables.expand import expand
from ckptbridge.tables.proof import prove

SECTIONS = '[index]\ni = "layers"\ne = "experts"\n[sizes]\nh = "hidden"\nf = "ffn"\n'
CONFIG = {"layers": 3, "experts": 11, "hidden": 7, "ffn": 5}


def table_text(*rules: str) -> str:
    return SECTIONS + "".join(f"[[rule]]\n{rule}\n" for rule in rules)


GOOD = (
    'pt = "embed"\nms = "emb"\naxes = "h f"',
    'pt = ["l.{i}.{e}.a", "l.{i}.{e}.b"]\nms = "l.{i}.w"\naxes = "e f h, e f h -> (e h) (f + f)"',
    'pt = "labels"\naxes = "labels h"\noptional = true',
    'pt = "head"\nms = "out"\naxes = "h f"\ntied = "embed"',
    'pt = "buf.{i}"\ndrop = "computed"',
)


def test_a_bijection_is_counted(load):
    proof = prove(expand(load(table_text(*GOOD)), CONFIG))
    assert proof.pt_names == 1 + 3 * 22 + 1
    assert proof.ms_names == 1 + 3 + 1
    assert (proof.entries, proof.drops, proof.tied, proof.optional) == (5, 3, 1, 1)
    assert proof.free == ("labels",)
    assert proof.elements == 35 + 3 * 22 * 35


@pytest.mark.parametrize(
    ("rules", "message", "tensor"),
    [
        (['pt = "a"', 'pt = "a"\nms = "b"'], "'a' stands twice on the pt side", "a"),
        (['pt = "a"\nms = "x"', 'pt = "b"\nms = "x"'], "'x' stands twice on the ms side", "x"),
        (['pt = "l.{i}"', 'pt = "l.1"\nms = "m"'], "'l.1' stands twice on the pt side", "l.1"),
        (['pt = "a"', 'pt = "a"\ndrop = "why"'], "'a' is both mapped and dropped", "a"),
        (['pt = "a"\ndrop = "why"', 'pt = "a"'], "'a' is both mapped and dropped", "a"),
        (['pt = "a"', 'ms = "a"\ndrop = "why"'], "'a' is both mapped and dropped", "a"),
        (['pt = "a"\ndrop = "x"', 'pt = "a"\ndrop = "y"', 'pt = "b"'], "'a' stands twice", "a"),
        (['pt = "a"', 'pt = "a"\ntied = "a"'], "'a' stands twice", "a"),
    ],
)
def test_a_name_twice_names_both_rules(load, rules, message, tensor):
    with pytest.raises(ProofError, match=message) as caught:
        prove(expand(load(table_text(*rules)), CONFIG))
    where = caught.value.where
    assert where["tensor"] == tensor
    assert where["rule"] == "toy.toml rule 1" and where["other_rule"] == "toy.toml rule 2"


@pytest.mark.parametrize(
    "rule",
    [
        'pt = ["a", "a"]\nms = ["b", "c"]\naxes = "h, h"',
        'pt = "l.{i + 1 - i}"\nms = "m.{i}"',
        'pt = "l.{i // 2}"\nms = "m.{i}"',
    ],
)
def test_a_name_twice_within_a_rule(load, rule):
    with pytest.raises(ProofError, match="stands twice on the pt side") as caught:
        prove(expand(load(table_text(rule)), CONFIG))
    assert caught.value.where["rule"] == "toy.toml rule 1"


@pytest.mark.parametrize(
    ("rule", "index", "side"),
    [
        ('pt = "l.{i}.w"\nms = "w"', "i", "PyTorch"),
        ('pt = "w"\nms = "l.{i}.w"', "i", "MindSpore"),
        ('pt = "l.{i}.{e}"\nms = "m.{i}"\naxes = "h"', "e", "PyTorch"),
        ('pt = "l.{i}"\nms = "w"\ntied = "x"', "i", "PyTorch"),
    ],
)
@pytest.mark.parametrize("layers", [1, 3])  # with one layer no name is twice, and still the rule is wrong
def test_an_index_on_one_side_only_is_an_axis(load, rule, index, side, layers):
    with pytest.raises(ProofError, match=f"The index '{index}' stands in the names of the {side} side only") as caught:
        prove(expand(load(table_text('pt = "x"', rule)), CONFIG | {"layers": layers, "experts": 1}))
    assert caught.value.where["rule"] == "toy.toml rule 2"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (['pt = "a"', 'pt = "b"\ntied = "c"'], "'b' is tied to 'c', which no rule maps"),
        (['pt = "a"\ndrop = "x"', 'pt = "b"\ntied = "a"', 'pt = "c"'], "'b' is tied to 'a', which no rule maps"),
        (['pt = "a"', 'pt = "b"\ntied = "a"', 'pt = "c"\ntied = "b"'], "'c' is tied to 'b', which no rule maps"),
        (['pt = "a"\nwhen = "hidden < 0"', 'pt = "b"\ntied = "a"', 'pt = "c"'], "'b' is tied to 'a'"),
        (
            ['pt = ["a", "c"]\nms = "m"\naxes = "h, h -> (h + h)"', 'ms = "b"\ntied = "a"'],
            "'b' is tied to 'a', which is no tensor by itself",
        ),
        (['pt = "a"\naxes = "h f"', 'pt = "b"\naxes = "f h"\ntied = "a"'], "'b' has the shape \\[5, 7\\]"),
        (
            ['pt = "a"\nms = "m"\naxes = "h f -> f h"', 'pt = "b"\nms = "c"\naxes = "h f"\ntied = "a"'],
            "'c' has the shape \\[7, 5\\], and what it is tied to has \\[5, 7\\]",
        ),
        (['pt = "a"\ndtype = "float32"', 'pt = "b"\ntied = "a"\ndtype = "keep"'], "contradict each other"),
    ],
)
def test_what_is_tied_has_something_to_equal(load, rules, message):
    with pytest.raises(ProofError, match=message) as caught:
        prove(expand(load(table_text(*rules)), CONFIG))
    assert str(caught.value.where["rule"]).startswith("toy.toml rule")


@pytest.mark.parametrize("dtype", ['{ pt = "keep", ms = "float32" }', '{ pt = "int64", ms = "float32" }'])
def test_contradicting_dtypes(load, dtype):
    with pytest.raises(ProofError, match="contradict each other"):
        prove(expand(load(table_text(f'pt = "a"\ndtype = {dtype}')), CONFIG))


@pytest.mark.parametrize("dtype", ['"keep"', '"float32"', '{ pt = "int64", ms = "int32" }', '{ ms = "float32" }'])
def test_dtypes_that_do_not(load, dtype):
    prove(expand(load(table_text(f'pt = "a"\ndtype = {dtype}')), CONFIG))


def test_a_table_that_maps_nothing_proves_nothing(load):
    with pytest.raises(ProofError, match="maps nothing"):
        prove(expand(load(table_text('pt = "a"\ndrop = "x"')), CONFIG))
    with pytest.raises(ProofError, match="maps nothing"):
        prove(expand(load(table_text('pt = "l.{i}"')), CONFIG | {"layers": 0}))


VIEW = View(0, (0, 0), ((0, 1), (1, 1)))


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([], "0 elements are mapped of 'a'"),
        ([Block((7, 4), VIEW, VIEW)], "28 elements are mapped"),
        ([Block((7, 5), VIEW, VIEW)] * 2, "70 elements are mapped"),
        ([Block((5, 7), VIEW, VIEW)], "leaves its tensor"),
        ([Block((7, 5), VIEW, View(0, (1, 0), ((0, 1), (1, 1))))], "leaves its tensor"),
    ],
)
def test_blocks_that_do_not_fill_their_tensors_are_found(load, blocks, message):
    """No line can be written that gives such blocks; the proof does not rely on that."""
    expansion = expand(load(table_text('pt = "a"\naxes = "h f"')), CONFIG)
    (entry,) = expansion.entries
    wrong = replace(entry.form, bound=BoundAxes(((7, 5),), ((7, 5),), tuple(blocks)))
    with pytest.raises(ProofError, match=message):
        prove(replace(expansion, entries=(replace(entry, form=wrong),)))


# --- the largest published model -------------------------------------------------------------

DEEPSEEK = """
[index]
i = "num_hidden_layers"
e = "n_routed_experts"
j = "num_nextn_predict_layers or 0"
[sizes]
v = "vocab_size"
h = "hidden_size"
f = "moe_intermediate_size"
n = "num_attention_heads"
q = "q_lora_rank"
k = "kv_lora_rank"
p = "qk_nope_head_dim"
w = "qk_rope_head_dim"
u = "v_head_dim"
[[rule]]
pt = "model.embed_tokens.weight"
ms = "embedding.word_embeddings.weight"
axes = "v h"
[[rule]]
pt = ["model.layers.{i}.self_attn.q_a_proj.weight", "model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight"]
ms = "decoder.layers.{i}.self_attention.linear_qkv.weight"
axes = "q h, (k + w) h -> (q + k + w) h"
[[rule]]
pt = "model.layers.{i}.self_attn.q_b_proj.weight"
ms = "decoder.layers.{i}.self_attention.linear_qb.weight"
axes = "(n (p + w)) q"
[[rule]]
pt = "model.layers.{i}.self_attn.kv_b_proj.weight"
ms = "decoder.layers.{i}.self_attention.linear_kvb.weight"
axes = "(n (p + u)) k"
[[rule]]
when = "i >= first_k_dense_replace"
pt = "model.layers.{i}.mlp.gate.e_score_correction_bias"
ms = "decoder.layers.{i}.mlp.router.expert_bias"
axes = "e"
dtype = "keep"
[[rule]]
pt = "model.layers.{num_hidden_layers + j}.embed_tokens.weight"
axes = "v h"
tied = "model.embed_tokens.weight"
"""
FUSED = """
[[rule]]
when = "i >= first_k_dense_replace"
pt = ["model.layers.{i}.mlp.experts.{e}.gate_proj.weight", "model.layers.{i}.mlp.experts.{e}.up_proj.weight"]
ms = "decoder.layers.{i}.mlp.experts.weight1"
axes = "e f h, e f h -> (e h) (f + f)"
[[rule]]
when = "i >= first_k_dense_replace"
pt = "model.layers.{i}.mlp.experts.{e}.down_proj.weight"
ms = "decoder.layers.{i}.mlp.experts.weight2"
axes = "e h f -> (e f) h"
"""
APART = "".join(
    f"""
[[rule]]
when = "i >= first_k_dense_replace"
pt = "model.layers.{{i}}.mlp.experts.{{e}}.{name}.weight"
axes = "{axes}"
"""
    for name, axes in (("gate_proj", "f h"), ("up_proj", "f h"), ("down_proj", "h f"))
)
V3 = {
    "num_hidden_layers": 61,
    "n_routed_experts": 256,
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
}


@pytest.mark.parametrize(("experts", "ms_names"), [(FUSED, 1 + 61 * 3 + 58 * 3), (APART, 1 + 61 * 3 + 58 * (1 + 768))])
def test_deepseek_v3_is_expanded_and_proved_within_two_seconds(load, experts, ms_names):
    table = load(DEEPSEEK + experts)
    start = time.process_time()
    expansion = expand(table, V3)
    proof = prove(expansion)
    spent = time.process_time() - start  # of this process: other work on the machine does not count
    assert spent < 2
    assert proof.pt_names == 1 + 61 * 4 + 58 * (1 + 768)
    assert proof.ms_names == ms_names
    assert proof.tied == 1
    assert expansion.by_pt["model.layers.61.embed_tokens.weight"].tied_ms == "embedding.word_embeddings.weight"
    per_layer = (1536 + 576) * 7168 + 128 * 192 * 1536 + 128 * 256 * 512
    assert proof.elements == 129280 * 7168 + 61 * per_layer + 58 * (256 + 768 * 2048 * 7168)
