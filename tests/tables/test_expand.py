"""Expansion: names, shapes and conditions for a config; layouts and roots; binding to actual shapes."""

from __future__ import annotations

import numpy as np
import pytest

from ckptbridge.errors import ConfigError, CoverageError, ShapeError, TableError, UsageError
from ckptbridge.tables.expand import choose_roots, expand
from ckptbridge.tables.scope import MAX_NAMES

SIZES = """
[index]
i = "layers"
e = "experts or 0"
[sizes]
h = "hidden"
f = "ffn"
g = "kv or heads"
r = "heads // (kv or heads)"
d = "head_dim or hidden // heads"
"""
CONFIG = {"layers": 3, "hidden": 7, "ffn": 5, "heads": 6, "kv": 2, "head_dim": 4, "experts": 11}


def rules(*texts: str) -> str:
    return SIZES + "".join(f"[[rule]]\n{text}\n" for text in texts)


QKV = """
pt = ["l.{i}.q", "l.{i}.k", "l.{i}.v"]
ms = "m.{i}.qkv"
axes = "(g r d) h, (g 1 d) h, (g 1 d) h -> (g (r + 1 + 1) d) h"
"""
EXPERTS = """
when = "i >= first"
pt = ["l.{i}.{e}.gate", "l.{i}.{e}.up"]
ms = "m.{i}.w1"
axes = "e f h, e f h -> (e h) (f + f)"
"""


# --- entries ---------------------------------------------------------------------------------


def test_an_index_enumerates_entries(load):
    expansion = expand(load(rules(QKV)), CONFIG)
    assert [dict(e.at) for e in expansion.entries] == [{"i": 0}, {"i": 1}, {"i": 2}]
    entry = expansion.entries[1]
    assert entry.kind == "map" and not entry.optional
    assert entry.pt == ("l.1.q", "l.1.k", "l.1.v") and entry.ms == ("m.1.qkv",)
    assert entry.pt_shapes == ((24, 7), (8, 7), (8, 7)) and entry.ms_shapes == ((40, 7),)
    assert expansion.by_pt["l.1.k"] is entry and expansion.by_ms["m.1.qkv"] is entry
    assert expansion.sizes == {"h": 7, "f": 5, "g": 2, "r": 3, "d": 4}
    # Every layer has the same axes: they are bound once.
    assert expansion.entries[0].bound is expansion.entries[2].bound


def test_an_index_axis_lists_the_tensors_of_an_operand(load, move, numbered):
    expansion = expand(load(rules(EXPERTS)), CONFIG | {"first": 1})
    assert [dict(e.at) for e in expansion.entries] == [{"i": 1}, {"i": 2}]
    entry = expansion.entries[0]
    # In the order of the numbers: 10 after 9, not after 1.
    assert entry.pt == (*(f"l.1.{e}.gate" for e in range(11)), *(f"l.1.{e}.up" for e in range(11)))
    assert entry.pt_shapes == ((5, 7),) * 22 and entry.ms_shapes == ((77, 10),)
    tensors = numbered(*entry.pt_shapes)
    (w1,) = move(entry.bound, tensors)
    for e in range(11):
        np.testing.assert_array_equal(w1[7 * e : 7 * e + 7, :5], tensors[e].T)
        np.testing.assert_array_equal(w1[7 * e : 7 * e + 7, 5:], tensors[11 + e].T)


def test_an_index_axis_may_stand_on_the_mindspore_side(load):
    rule = 'pt = "l.{i}.w"\nms = "m.{i}.{e}.w"\naxes = "(e h) f -> e f h"'
    entry = expand(load(rules(rule)), CONFIG).entries[0]
    assert entry.ms == tuple(f"m.0.{e}.w" for e in range(11))
    assert entry.ms_shapes == ((5, 7),) * 11 and entry.pt_shapes == ((77, 5),)


def test_an_index_that_is_no_axis_of_its_rule_is_a_length_there(load):
    entry = expand(load(rules('pt = "l.{i}.router"\naxes = "e h"')), CONFIG).entries[0]
    assert entry.pt_shapes == ((11, 7),)


def test_several_indices_count_in_the_order_of_their_appearance(load):
    expansion = expand(load(rules('pt = "l.{i}.{e}"\nms = "m.{e}.{i}"\naxes = "h"')), CONFIG)
    assert [e.pt[0] for e in expansion.entries[:12]] == [*(f"l.0.{e}" for e in range(11)), "l.1.0"]
    assert len(expansion.entries) == 33


def test_names_may_hold_arithmetic(load):
    expansion = expand(load(rules('pt = "l.{layers + e}"\nms = "mtp.{e}"')), CONFIG | {"experts": 2})
    assert [(e.pt, e.ms) for e in expansion.entries] == [(("l.3",), ("mtp.0",)), (("l.4",), ("mtp.1",))]


def test_conditions_choose_entries_by_config_layout_root_and_index(load):
    text = '[layout]\nqkv = ["split", "fused"]\n[roots.root]\nchoices = ["model.", ""]\n' + rules(
        "when = \"qkv == 'split'\"\npt = 'split'",
        "when = \"qkv == 'fused'\"\npt = 'fused'",
        "when = \"root == ''\"\npt = 'bare'",
        "when = \"i % 2 == 0 and layers > 2\"\npt = 'l.{i}'",
        "when = \"i in (dense or [])\"\npt = 'dense.{i}'",
    )
    table = load(text)

    def names(**more):
        return [e.pt[0] for e in expand(table, CONFIG | more.pop("config", {}), **more).entries]

    assert names() == ["split", "l.0", "l.2"]
    assert names(layout={"qkv": "fused"}, roots={"root": ""}) == ["fused", "bare", "l.0", "l.2"]
    assert names(config={"layers": 2}) == ["split"]
    assert names(config={"dense": [1]}) == ["split", "l.0", "l.2", "dense.1"]


def test_what_a_rule_that_never_applies_needs_may_be_absent(load):
    never = 'when = "lora is not None"\npt = "a.{i}"\naxes = "q h"'
    table = load(rules('pt = "b"\naxes = "h"', never).replace("[sizes]", '[sizes]\nq = "lora * 1"'))
    assert [e.pt for e in expand(table, CONFIG).entries] == [("b",)]
    assert expand(table, CONFIG | {"lora": 3}).by_pt["a.0"].pt_shapes == ((3, 7),)


def test_defaults_stand_in_for_what_the_config_omits_and_not_for_null(load):
    table = load("[defaults]\nkv = 3\nhead_dim = 9\n" + rules('pt = "k"\naxes = "(g d) h"'))
    config = {k: v for k, v in CONFIG.items() if k not in ("kv", "head_dim")}
    assert expand(table, config).entries[0].pt_shapes == ((27, 7),)
    assert expand(table, config | {"kv": None, "head_dim": 1}).entries[0].pt_shapes == ((6, 7),)


def test_the_table_s_own_names_win_over_the_config_s(load):
    table = load('[layout]\nattention = ["a", "b"]\n' + rules("when = \"attention == 'a'\"\npt = 'x.{h}'"))
    config = CONFIG | {"attention": "b", "h": 99}
    assert expand(table, config).entries[0].pt == ("x.7",)


def test_a_size_of_a_config_s_name_reads_the_config(load):
    table = load(rules('pt = "x"\naxes = "v h"').replace("[sizes]", '[sizes]\nv = "v + 1"'))
    assert expand(table, CONFIG | {"v": 10}).entries[0].pt_shapes == ((11, 7),)


def test_strings_and_roots_stand_in_names(load):
    text = (
        '[strings]\nattn = "self."\ngamma = "{scale}"\nnone = ""\n'
        '[roots.scale]\nchoices = ["weight", "gamma"]\n' + rules('pt = "{attn}q{none}.{scale}"\nms = "q.{gamma}"')
    )
    entry = expand(load(text), CONFIG, roots={"scale": "gamma"}).entries[0]
    assert (entry.pt, entry.ms) == (("self.q.gamma",), ("q.gamma",))


def test_tied_and_dropped_tensors(load):
    table = load(
        rules(
            'pt = "embed"\nms = "emb"\naxes = "h f"\ndtype = "keep"',
            'pt = "head"\nms = "out"\ntied = "embed"\naxes = "h f"',
            'pt = "copy.{i}"\ntied = "embed"',
            'ms = "shadow"\ntied = "embed"',
            'pt = "buf.{i}"\ndrop = "computed"',
            'ms = "seed"\ndrop = "random"',
        )
    )
    expansion = expand(table, CONFIG)
    head = expansion.by_pt["head"]
    assert (head.kind, head.tied_pt, head.tied_ms) == ("tied", "embed", "emb")
    assert head.pt_shapes == head.ms_shapes == ((7, 5),)
    copy = expansion.by_pt["copy.2"]
    assert (copy.tied_pt, copy.tied_ms, copy.ms, copy.bound) == ("embed", "emb", (), None)
    shadow = expansion.by_ms["shadow"]
    assert (shadow.tied_pt, shadow.tied_ms, shadow.pt) == ("", "emb", ())
    assert expansion.by_ms["out"] is head
    assert expansion.by_pt["buf.1"].kind == "drop" and expansion.by_pt["buf.1"].ms == ()
    assert expansion.by_ms["seed"].kind == "drop"
    assert (expansion.by_pt["embed"].dtype_pt, expansion.by_pt["embed"].dtype_ms) == ("keep", "keep")


def test_the_block_size_of_fp8_comes_from_the_config(load):
    table = load('[fp8]\nsuffix = "_s"\nblock = "quant.block"\n' + rules('pt = "a"'))
    assert expand(table, CONFIG).fp8_block is None
    assert expand(table, CONFIG | {"quant": {"block": [128, 64]}}).fp8_block == (128, 64)
    assert expand(load(rules('pt = "a"')), CONFIG | {"quant": {"block": [128, 64]}}).fp8_block is None
    for wrong in ([128], [0, 128], ["a", 1], 128, [True, 2.0]):
        with pytest.raises(ConfigError, match="block size is"):
            expand(table, CONFIG | {"quant": {"block": wrong}})


# --- what the config lacks or gets wrong -----------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message", "field"),
    [
        ({"hidden": None}, "'h' has the length None", "sizes.h"),
        ({"hidden": 0}, "'h' has the length 0", "sizes.h"),
        ({"hidden": -7}, "'h' has the length -7", "sizes.h"),
        ({"hidden": 7.0}, "'h' has the length 7.0", "sizes.h"),
        ({"hidden": True}, "'h' has the length True", "sizes.h"),
        ({"hidden": "7"}, "'h' has the length '7'", "sizes.h"),
        ({"hidden": 2**63}, "'h' has the length 9223372036854775808", "sizes.h"),
        ({"heads": 0, "kv": 0}, "'g' has the length 0", "sizes.g"),
        ({"heads": 0, "head_dim": None}, "'heads' is 0 and something is divided by it", "sizes.d"),
        ({"heads": 2**62}, "would have the shape", "axes"),
        ({"layers": None}, "'i' ranges over None", "index.i"),
        ({"layers": -1}, "'i' ranges over -1", "index.i"),
        ({"layers": "3"}, "'i' ranges over '3'", "index.i"),
        ({"layers": 10**12}, "'i' ranges over 1000000000000", "index.i"),
        ({"layers": MAX_NAMES}, f"more than {MAX_NAMES} names", None),
    ],
)
def test_impossible_numbers_are_refused(load, change, message, field):
    with pytest.raises(ConfigError, match=message) as caught:
        expand(load(rules(QKV)), CONFIG | change)
    assert caught.value.where["rule"] == "toy.toml rule 1"
    assert caught.value.where.get("field") == field


def test_what_the_config_lacks_is_named(load):
    config = {k: v for k, v in CONFIG.items() if k != "hidden"}
    with pytest.raises(ConfigError, match="no value for 'hidden'") as caught:
        expand(load(rules(QKV)), config)
    assert caught.value.where["rule"] == "toy.toml rule 1" and "hidden" in caught.value.remedy
    config = {k: v for k, v in CONFIG.items() if k not in ("kv", "heads")}
    with pytest.raises(ConfigError, match="'g' has the length None") as caught:
        expand(load(rules('pt = "a"\naxes = "g"')), config)
    assert "heads, kv" in caught.value.remedy


@pytest.mark.parametrize("experts", [10**6, 3 * 10**5])
def test_the_number_of_experts_is_bounded(load, experts):
    with pytest.raises(ConfigError, match=f"more than {MAX_NAMES} names"):
        expand(load(rules(EXPERTS)), CONFIG | {"first": 0, "experts": experts})


def test_the_number_of_blocks_is_bounded(load):
    rule = 'pt = "l.{e}"\nms = "m"\naxes = "e (1 + 1 + 1 + 1) h -> (e (1 + 1 + 1 + 1)) h"'
    with pytest.raises(ConfigError, match="blocks"):
        expand(load(rules(rule)), CONFIG | {"experts": 400_000})


def test_a_condition_that_cannot_be_judged_names_rule_and_field(load):
    with pytest.raises(ConfigError, match="no value for 'first'") as caught:
        expand(load(rules(EXPERTS)), CONFIG)
    assert (caught.value.where["rule"], caught.value.where["field"]) == ("toy.toml rule 1", "when")


# --- layout options --------------------------------------------------------------------------


def test_layout_options_default_to_the_first_and_unknown_ones_are_refused(load):
    table = load('[layout]\nattention = ["interleaved", "contiguous"]\nmlp = ["a", "b"]\n' + rules('pt = "a"'))
    assert expand(table, CONFIG).layout == {"attention": "interleaved", "mlp": "a"}
    assert expand(table, CONFIG, {"mlp": "b"}).layout == {"attention": "interleaved", "mlp": "b"}
    with pytest.raises(UsageError, match="no layout option 'atention'") as caught:
        expand(table, CONFIG, {"atention": "contiguous"})
    assert "Did you mean 'attention'?" in caught.value.remedy
    with pytest.raises(UsageError, match="never 'contiguos'") as caught:
        expand(table, CONFIG, {"attention": "contiguos"})
    assert "interleaved, contiguous" in caught.value.remedy
    with pytest.raises(UsageError) as caught:
        expand(load(rules('pt = "a"')), CONFIG, {"x": "y"})
    assert "no layout options" in caught.value.remedy


# --- roots -----------------------------------------------------------------------------------

ROOTS = (
    '[strings]\nlast = "{scale}"\n'
    '[roots.scale]\nchoices = ["weight", "gamma"]\npt = "{root}norm.{scale}"\nms = "n.{last}.{scale}"\n'
    '[roots.root]\nchoices = ["model.", ""]\npt = "{root}embed"\n' + SIZES + '[[rule]]\npt = "{root}norm.{scale}"\n'
)


def test_the_root_is_what_the_anchors_say(load):
    table = load(ROOTS)
    assert choose_roots(table, "pt", ["model.embed", "model.norm.weight"]) == {"root": "model.", "scale": "weight"}
    assert choose_roots(table, "pt", {"embed": 1, "norm.gamma": 2}) == {"root": "", "scale": "gamma"}
    # Without an anchor on a side: what is given, else the first.
    assert choose_roots(table, "ms", {"n.gamma.gamma"}) == {"root": "model.", "scale": "gamma"}
    assert choose_roots(table, "ms", {"n.gamma.gamma"}, {"root": ""}) == {"root": "", "scale": "gamma"}
    assert choose_roots(table, "pt", [], {"root": "", "scale": "gamma"}) == {"root": "", "scale": "gamma"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["other"], "None of 'model.embed', 'embed' is there"),
        (["model.embed", "embed"], "More than one of 'model.embed', 'embed'"),
        (["model.embed", "norm.weight"], "None of 'model.norm.weight', 'model.norm.gamma'"),
    ],
)
def test_a_root_is_never_guessed(load, names, message):
    with pytest.raises(CoverageError, match=message):
        choose_roots(load(ROOTS), "pt", names)


def test_unknown_roots_and_choices_are_refused(load):
    table = load(ROOTS)
    for call in (lambda given: choose_roots(table, "pt", [], given), lambda given: expand(table, CONFIG, roots=given)):
        with pytest.raises(UsageError, match="no root 'rot'"):
            call({"rot": ""})
        with pytest.raises(UsageError, match="never 'x'"):
            call({"root": "x"})


# --- actual shapes ---------------------------------------------------------------------------


def test_shapes_that_agree_give_what_the_config_gave(load):
    entry = expand(load(rules(QKV)), CONFIG).entries[0]
    assert entry.bind("pt", entry.pt_shapes) is entry.bound
    assert entry.bind("ms", [[40, 7]]) is entry.bound


@pytest.mark.parametrize(
    ("side", "shapes", "name", "expected"),
    [
        ("pt", [(24, 7), (8, 7), (24, 7)], "l.0.v", "[8, 7]"),
        ("pt", [(24, 8), (8, 7), (8, 7)], "l.0.q", "[24, 7]"),
        ("pt", [(24, 7, 1), (8, 7), (8, 7)], "l.0.q", "[24, 7]"),
        ("pt", [(24, 7), (), (8, 7)], "l.0.k", "[8, 7]"),
        ("ms", [(7, 40)], "m.0.qkv", "[40, 7]"),
    ],
)
def test_a_wrong_shape_names_tensor_expectation_and_rule(load, side, shapes, name, expected):
    entry = expand(load(rules(QKV)), CONFIG).entries[0]
    with pytest.raises(ShapeError) as caught:
        entry.bind(side, shapes)
    where = caught.value.where
    assert where["tensor"] == name and where["expected"] == expected and where["rule"] == "toy.toml rule 1"
    assert where["axes"].endswith("with d=4 g=2 h=7 r=3")
    assert caught.value.remedy


def test_free_axes_are_read_off_the_tensors(load, move, numbered):
    rule = 'pt = ["w.{e}", "b"]\nms = ["v", "b"]\naxes = "e labels h, labels -> e h labels, labels"'
    entry = expand(load(rules(rule)), CONFIG | {"experts": 2}).entries[0]
    assert entry.bound is None and entry.pt_shapes is None and entry.ms_shapes is None
    bound = entry.bind("pt", [(9, 7), (9, 7), (9,)])
    assert bound.left == ((9, 7), (9, 7), (9,)) and bound.right == ((2, 7, 9), (9,))
    assert entry.bind("ms", [(2, 7, 9), (9,)]) == bound
    sources = numbered(*bound.left)
    np.testing.assert_array_equal(move(bound, sources)[0], np.stack([s.T for s in sources[:2]]))
    with pytest.raises(ShapeError, match="'b' has the shape \\[8\\], and \\[9\\] is expected"):
        entry.bind("pt", [(9, 7), (9, 7), (8,)])
    with pytest.raises(ShapeError, match="\\[9, 6\\], and \\[9, 7\\] is expected"):
        entry.bind("pt", [(9, 7), (9, 6), (9,)])
    with pytest.raises(ShapeError, match="\\[9\\], and \\[any, 7\\] is expected"):
        entry.bind("pt", [(9,), (9, 7), (9,)])


def test_a_rule_without_axes_takes_any_shape(load, move, numbered):
    entry = expand(load(rules('pt = "a"\nms = "b"')), CONFIG).entries[0]
    for shape in ((), (3,), (2, 5, 3)):
        bound = entry.bind("pt", [shape])
        sources = numbered(shape)
        np.testing.assert_array_equal(move(bound, sources)[0], sources[0])


def test_tied_and_dropped_tensors_are_bound_on_their_side(load):
    table = load(rules('pt = "t"\naxes = "h f"\ntied = "x"', 'ms = "s"\naxes = "h"\ndrop = "x"', 'pt = "x"'))
    tied, drop, _ = expand(table, CONFIG).entries
    assert tied.bind("pt", [(7, 5)]).left == ((7, 5),) and tied.ms_shapes == ()
    assert drop.bind("ms", [(7,)]).right == ((7,),) and drop.pt_shapes == ()
    with pytest.raises(ShapeError):
        tied.bind("pt", [(5, 7)])
    with pytest.raises(ShapeError, match="0 tensor"):
        drop.bind("pt", [(7,)])


def test_an_axis_line_that_cannot_be_bound_is_the_table_s_fault(load):
    rule = 'pt = "l.{e}"\nms = "m"\naxes = "e (e2 h) -> e e2 h"'
    with pytest.raises(TableError):
        load(rules(rule))
