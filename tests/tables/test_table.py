"""Loading tables: what is read, and every refusal with file, rule number and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptbridge.errors import TableError
from ckptbridge.formats.dtypes import DTYPES
from ckptbridge.tables.rules import DTYPE_NAMES
from ckptbridge.tables.sources import MAX_BYTES, MAX_FILES
from ckptbridge.tables.table import load_table

RULE = '[[rule]]\npt = "a.weight"\n'


def test_a_table_is_read_whole(load):
    table = load(
        """
        schema = 1
        family = "toy"
        model_types = ["toy", "toy-2"]
        target = "there"
        default = true
        summary = "Toy to there"
        [index]
        i = "num_layers"
        [sizes]
        d = "h // n"
        h = "hidden"
        n = "heads or 1"
        [defaults]
        heads = 2
        [layout]
        mlp = ["interleaved", "contiguous"]
        [strings]
        attn = "self_attn."
        [roots.root]
        choices = ["model.", ""]
        pt = "{root}embed"
        [fp8]
        suffix = "_scale_inv"
        block = "quantization_config.weight_block_size"
        [[rule]]
        pt = "{root}embed"
        ms = "embedding"
        axes = "h d"
        dtype = "keep"
        [[rule]]
        when = "mlp == 'contiguous' and i >= 1"
        pt = ["{root}{i}.a", "{root}{i}.b"]
        ms = "{i}.ab"
        axes = "h, h -> (h + h)"
        optional = true
        dtype = { pt = "int64", ms = "int32" }
        [[rule]]
        pt = "head"
        tied = "{root}embed"
        [[rule]]
        ms = "seed"
        drop = "a random state"
        """
    )
    assert (table.family, table.target, table.name) == ("toy", "there", "toy/there")
    assert table.model_types == ("toy", "toy-2")
    assert table.default is True and table.summary == "Toy to there"
    assert {k: e.text for k, e in table.index.items()} == {"i": "num_layers"}
    order = list(table.sizes)
    assert sorted(order) == ["d", "h", "n"] and order[-1] == "d"  # it needs the other two
    assert table.layout == {"mlp": ("interleaved", "contiguous")}
    assert table.strings == {"attn": "self_attn."} and table.defaults == {"heads": 2}
    assert table.roots["root"].choices == ("model.", "") and table.roots["root"].ms == ""
    assert table.fp8.suffix == "_scale_inv"
    embed, fused, head, seed = table.rules
    assert (embed.pt, embed.ms, embed.axes.text) == (("{root}embed",), ("embedding",), "h d")
    assert (embed.dtype_pt, embed.dtype_ms) == ("keep", "keep")
    assert fused.pt == ("{root}{i}.a", "{root}{i}.b") and fused.optional
    assert (fused.dtype_pt, fused.dtype_ms) == ("int64", "int32")
    assert (head.tied, head.ms) == ("{root}embed", ())
    assert (seed.drop, seed.pt, seed.ms) == ("a random state", (), ("seed",))
    assert [str(rule) for rule in table.rules] == [f"toy.toml rule {k}" for k in (1, 2, 3, 4)]


def test_names_left_out_on_the_other_side_are_the_same(load):
    (rule,) = load(RULE).rules
    assert rule.ms == rule.pt == ("a.weight",)
    assert not rule.optional and rule.when is None and rule.axes is None
    assert load(RULE).model_types == ("toy",)


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message", "field"),
    [
        ('famly = "x"\n' + RULE, "'famly' is not part of a table", "famly"),
        ('sizes = "h"\n' + RULE, "\\[sizes\\] is a table", "sizes"),
        ("default = 1\n" + RULE, "true or false", "default"),
        ("model_types = []\n" + RULE, "at least one string", "model_types"),
        ('model_types = ["a", "a"]\n' + RULE, "stands twice", "model_types"),
        ("model_types = [3]\n" + RULE, "not a printable string", "model_types"),
        ('summary = "a\\u001b[31m"\n' + RULE, "not a printable string", "summary"),
        ("rule = 3\n", "written as \\[\\[rule\\]\\]", "rule"),
        ("", "has 0 rules", "rule"),
        ("[index]\ni = 3\n" + RULE, "3 is not an expression", "index.i"),
        ("[index]\ni = 'a b'\n" + RULE, "cannot be parsed", "index.i"),
        ("[sizes]\nh = 'f(x)'\n" + RULE, "not part of the expression language", "sizes.h"),
        ("[sizes]\n'a-b' = 'x'\n" + RULE, "cannot be used as a name", "sizes.a-b"),
        ("[sizes]\nif = 'x'\n" + RULE, "cannot be used as a name", "sizes.if"),
        ("[sizes]\nh = 'x'\n[index]\nh = 'x'\n" + RULE, "both in \\[index\\] and in \\[sizes\\]", "sizes.h"),
        ("[sizes]\na = 'b'\nb = 'c + 1'\nc = 'a'\n" + RULE, "need each other", "sizes"),
        ("[sizes]\na = 'i + 1'\n[index]\ni = 'n'\n" + RULE, "'i' is an index", "sizes.a"),
        ("[layout]\nmlp = 'x'\n" + RULE, "at least one string", "layout.mlp"),
        ("[layout]\nmlp = ['a b']\n" + RULE, "not made of letters", "layout.mlp"),
        ("[layout]\nmlp = ['x']\n[sizes]\nh = \"1 if mlp == 'y' else 2\"\n" + RULE, "never 'y'", "sizes.h"),
        ("[strings]\na = 3\n" + RULE, "not a printable string", "strings.a"),
        ("[strings]\na = '{b}'\n" + RULE, "'{b}' is not a root", "strings.a"),
        ("[roots]\nroot = 3\n" + RULE, "A root is a table", "roots.root"),
        ("[roots.root]\npt = '{root}x'\n" + RULE, "list of choices", "roots.root.choices"),
        ("[roots.root]\nchoices = ['a', 'a']\n" + RULE, "stands twice", "roots.root.choices"),
        ("[roots.root]\nchoices = ['a']\nanchor = 'x'\n" + RULE, "'anchor' is not known", "roots.root"),
        ("[roots.root]\nchoices = ['a']\npt = 'x'\n" + RULE, "does not hold '{root}'", "roots.root.pt"),
        ("[roots.root]\nchoices = ['a']\nms = '{root}{i}'\n" + RULE, "neither a root nor a string", "roots.root.ms"),
        ("[roots.a]\nchoices=['x']\npt='{a}{b}'\n[roots.b]\nchoices=['x']\npt='{b}{a}'\n" + RULE, "need each", "roots"),
        ("[defaults]\nd = 1979-05-27\n" + RULE, "not a value that a config holds", "defaults.d"),
        ("[defaults]\nd = [[[[[[[1]]]]]]]\n" + RULE, "not a value that a config holds", "defaults.d"),
        ("[fp8]\nblock = 'x'\n" + RULE, "suffix of the scale tensors is missing", "fp8.suffix"),
        ("[fp8]\nsuffix = '_s'\n" + RULE, "cannot be parsed", "fp8.block"),
        ("[fp8]\nsuffix = '_s'\nblok = 'x'\n" + RULE, "'blok' is not known", "fp8"),
    ],
)
def test_a_malformed_section_is_refused(load, text, message, field):
    with pytest.raises(TableError, match=message) as caught:
        load(text)
    assert caught.value.where["file"] == "toy.toml"
    assert caught.value.where["field"] == field


@pytest.mark.parametrize(
    ("rule", "message", "field"),
    [
        ('pt = "a"\nmss = "b"', "'mss' is not part of a rule", "mss"),
        ("", "no names on the PyTorch side", "pt"),
        ('ms = "a"', "no names on the PyTorch side", "pt"),
        ("pt = []", "from 1 to", "pt"),
        ("pt = 3", "3 is not a name", "pt"),
        ('pt = ["a", 3]', "3 is not a name", "pt"),
        ('pt = ""', "printable", "pt"),
        ('pt = "a{"', "do not pair", "pt"),
        ('pt = "a"\nms = "{x y}"', "cannot be parsed", "ms"),
        ('pt = "a"\naxes = 3', "not an axis line", "axes"),
        ('pt = "a"\naxes = "h h"', "occurs twice", "axes"),
        ('pt = "a"\naxes = "h, f"', "1 name\\(s\\) on the pt side and 2 operand", "axes"),
        ('pt = "a"\nms = ["b", "c"]\naxes = "h -> h"', "2 name\\(s\\) on the ms side and 1 operand", "axes"),
        ('pt = "a"\naxes = "(h q)"', "The axis 'q' has no size", "axes"),
        ('pt = ["a", "b"]', "needs axes", "axes"),
        ('pt = "a"\nwhen = 3', "not an expression", "when"),
        ('pt = "a"\nwhen = "f(x)"', "not part of the expression language", "when"),
        ('pt = "a"\nwhen = "i > 3"', "index 'i' does not stand in", "when"),
        ('pt = "a"\nwhen = "mlp == \'interleavd\'"', "'mlp' is never 'interleavd'", "when"),
        ('pt = "a"\nwhen = "root in (\'model\',)"', "'root' is never 'model'", "when"),
        ('pt = "a"\noptional = 1', "true or false", "optional"),
        ('pt = "a"\noptional = true\ndrop = "x"', "may be absent anyway", "optional"),
        ('pt = "a"\noptional = true\ntied = "x"', "may be absent anyway", "optional"),
        ('pt = "a"\ndrop = ""', "needs a reason", "drop"),
        ('pt = "a"\ndrop = 3', "not a printable string", "drop"),
        ('pt = "a"\nms = "b"\ndrop = "x"', "one side only", "drop"),
        ('drop = "x"', "one side only", "drop"),
        ('pt = "a"\ndrop = "x"\ntied = "y"', "either dropped or tied", "tied"),
        ('pt = "a"\ndrop = "x"\ndtype = "keep"', "has no dtype", "dtype"),
        ('pt = "a"\ndrop = "x"\naxes = "h -> h"', "no '->'", "axes"),
        ('pt = ["a", "b"]\ntied = "y"', "one name on a side", "tied"),
        ('tied = "y"', "one name on a side", "tied"),
        ('pt = "a"\ntied = "y{i}"', "index 'i' does not stand in", "tied"),
        ('pt = "a"\ndtype = "float31"', "neither 'keep' nor a dtype", "dtype"),
        ('pt = "a"\ndtype = 3', "neither 'keep' nor a dtype", "dtype"),
        ('pt = "a"\ndtype = { pt = "int64", mss = "int32" }', "'mss' is not a side", "dtype"),
        ('pt = "a.{i}"\naxes = "i h"', "'i' enumerates the rule's names", "axes"),
        ('pt = "a.{i}"\nms = "b.{i}"\naxes = "(i h) f"', "'i' enumerates the rule's names", "axes"),
        ('pt = ["a.{e}", "b"]\nms = "c"\naxes = "e h, e f -> (e h + e f)"', "or in neither", "axes"),
        ('pt = "a.{e}"\nms = "c"\naxes = "(e h) -> e h"', "a dimension by itself", "axes"),
    ],
)
def test_a_malformed_rule_is_refused(load, rule, message, field):
    text = (
        "[index]\ni = 'n'\ne = 'm'\n[sizes]\nh = 'hidden'\nf = 'ffn'\n[layout]\nmlp = ['interleaved', 'contiguous']\n"
        "[roots.root]\nchoices = ['model.', '']\npt = '{root}x'\n" + RULE + "[[rule]]\n" + rule
    )
    with pytest.raises(TableError, match=message) as caught:
        load(text)
    where = caught.value.where
    assert (where["file"], where["rule"], where["field"]) == ("toy.toml", 2, field)


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        ('famly = "x"\n' + RULE, "family"),
        ('[[rule]]\npt = "a"\naxis = "h"', "axes"),
        ('[[rule]]\npt = "a"\ndtype = "float23"', "float32"),
        ("[layout]\nmlp = ['interleaved']\n[[rule]]\npt = 'a'\nwhen = \"mlp == 'interleavd'\"", "interleaved"),
    ],
)
def test_the_nearest_right_word_is_suggested(load, text, suggestion):
    with pytest.raises(TableError) as caught:
        load(text)
    assert f"Did you mean '{suggestion}'?" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('family = "toy"\ntarget = "t"\n' + RULE + "# schema", "no schema"),
        ('schema = 2\nfamily = "toy"\ntarget = "t"\n' + RULE, "schema is 2"),
        ('schema = true\nfamily = "toy"\ntarget = "t"\n' + RULE, "schema is True"),
        ('schema = 1\ntarget = "t"\n' + RULE, "no 'family'"),
        ('schema = 1\nfamily = "toy"\n' + RULE, "no 'target'"),
        ('schema = 1\nfamily = "../x"\ntarget = "t"\n' + RULE, "not made of letters"),
    ],
)
def test_the_top_says_what_the_table_is(load, text, message):
    with pytest.raises(TableError, match=message) as caught:
        load(text)
    assert caught.value.where["file"] == "toy.toml"


def test_the_dtype_names_are_those_of_the_formats():
    assert set(DTYPE_NAMES) == {d.name for d in DTYPES}


# --- files -----------------------------------------------------------------------------------


def test_a_missing_file_a_directory_and_bytes_are_refused(tmp_path):
    with pytest.raises(TableError, match="No such file"):
        load_table(tmp_path / "none.toml")
    with pytest.raises(TableError, match="directory"):
        load_table(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"schema = 1\n\xff\xfe")
    with pytest.raises(TableError, match="not UTF-8") as caught:
        load_table(tmp_path / "bytes.toml")
    assert caught.value.where["offset"] == 11


def test_text_that_is_not_toml_names_the_line(load):
    with pytest.raises(TableError, match="line 5"):
        load("this is = not toml\n")


# --- include ---------------------------------------------------------------------------------


def test_parts_come_first_and_later_files_win_key_by_key(load):
    part = """
        schema = 1
        [sizes]
        h = "from_part"
        f = "from_part"
        [roots.root]
        choices = ["model.", ""]
        pt = "{root}x"
        [[rule]]
        pt = "part"
        axes = "h f"
    """
    table = load(
        'include = ["parts/p.toml"]\n[sizes]\nh = "from_table"\n[roots.root]\nms = "{root}y"\n' + RULE,
        {"parts/p.toml": part},
    )
    assert {k: e.text for k, e in table.sizes.items()} == {"h": "from_table", "f": "from_part"}
    assert [str(rule) for rule in table.rules] == ["parts/p.toml rule 1", "toy.toml rule 1"]
    assert (table.roots["root"].pt, table.roots["root"].ms) == ("{root}x", "{root}y")


def test_a_part_is_found_beside_the_including_file_then_in_the_table_s_folder(load):
    files = {
        "parts/a.toml": 'schema = 1\ninclude = ["b.toml", "parts/c.toml"]\n',
        "parts/b.toml": 'schema = 1\n[[rule]]\npt = "beside"\n',
        "b.toml": 'schema = 1\n[[rule]]\npt = "wrong"\n',
        "parts/c.toml": 'schema = 1\n[[rule]]\npt = "below"\n',
    }
    table = load('include = ["parts/a.toml"]\n' + RULE, files)
    assert [rule.pt[0] for rule in table.rules] == ["beside", "below", "a.weight"]


def test_a_part_reached_twice_counts_once(load):
    files = {
        "a.toml": 'schema = 1\ninclude = ["c.toml"]\n[[rule]]\npt = "a"\n',
        "b.toml": 'schema = 1\ninclude = ["c.toml"]\n[[rule]]\npt = "b"\n',
        "c.toml": 'schema = 1\n[[rule]]\npt = "c"\n',
    }
    assert [r.pt[0] for r in load('include = ["a.toml", "b.toml"]\n' + RULE, files).rules] == [
        "c",
        "a",
        "b",
        "a.weight",
    ]


def test_an_error_in_a_part_names_the_part(load):
    with pytest.raises(TableError, match="occurs twice") as caught:
        load('include = ["p.toml"]\n' + RULE, {"p.toml": f'schema = 1\n{RULE}[[rule]]\npt = "x"\naxes = "a a"\n'})
    where = caught.value.where
    assert (where["file"], where["rule"], where["field"]) == ("p.toml", 2, "axes")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"p.toml": 'schema = 1\ninclude = ["p.toml"]\n'}, "includes itself"),
        ({"p.toml": 'schema = 1\ninclude = ["toy.toml"]\n'}, "includes itself"),
        (
            {"p.toml": 'schema = 1\ninclude = ["q.toml"]\n', "q.toml": 'schema = 1\ninclude = ["p.toml"]\n'},
            "includes itself",
        ),
        ({}, "does not exist"),
        ({"p.toml": 'schema = 1\nfamily = "x"\n'}, "An included part has no 'family'"),
        ({"p.toml": 'schema = 1\ntarget = "x"\n'}, "An included part has no 'target'"),
        ({"p.toml": "[sizes]\n"}, "no schema"),
    ],
)
def test_loops_and_missing_parts_are_refused(load, files, message):
    with pytest.raises(TableError, match=message):
        load('include = ["p.toml"]\n' + RULE, files)


@pytest.mark.parametrize("name", ["../p.toml", "/etc/passwd", "a/../../p.toml", "c:p.toml", "a\\\\b.toml", "a\\nb"])
def test_an_include_stays_below_the_table(load, name):
    with pytest.raises(TableError, match="not a path below"):
        load(f'include = ["{name}"]\n' + RULE)


def test_a_symbolic_link_does_not_lead_out(load, tmp_path_factory, tmp_path):
    outside = tmp_path_factory.mktemp("outside") / "p.toml"
    outside.write_text("schema = 1\n" + RULE)
    (tmp_path / "p.toml").symlink_to(outside)
    with pytest.raises(TableError, match="leads out"):
        load('include = ["p.toml"]\n' + RULE)


def test_the_number_of_parts_is_bounded(load):
    files = {f"p{k}.toml": f'schema = 1\ninclude = ["p{k + 1}.toml"]\n' for k in range(MAX_FILES + 5)}
    with pytest.raises(TableError, match=f"more than {MAX_FILES} files"):
        load('include = ["p0.toml"]\n' + RULE, files)


# --- digest ----------------------------------------------------------------------------------


def test_the_digest_is_of_the_contents_and_not_of_their_place(load, tmp_path_factory):
    text = 'include = ["p.toml"]\n[sizes]\nh = "x"\n' + RULE
    files = {"p.toml": 'schema = 1\n[[rule]]\npt = "c"\n'}
    first = load(text, files)
    assert first.digest.startswith("sha256:") and len(first.digest) == 7 + 64
    assert load(text + "# a comment\n", files, name="other.toml").digest == first.digest
    assert load(text, {"p.toml": files["p.toml"].replace('"c"', '"d"')}).digest != first.digest
    assert load(text.replace('"x"', '"y"'), files).digest != first.digest


# --- hostile files ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 100_000 + "]" * 100_000,
        "x = " + "{a=" * 50_000 + "1" + "}" * 50_000,
        "[" + "a." * 50_000 + "a]\n",
        "x = " + "9" * 200_000,
        "schema = 1\n" + "# " + "x" * MAX_BYTES,
        "schema = 0x" + "f" * 200_000,
    ],
    ids=["arrays", "tables", "dots", "digits", "long", "hex"],
)
def test_monsters_are_refused_quickly(tmp_path: Path, text):
    path = tmp_path / "monster.toml"
    path.write_text(text)
    with pytest.raises(TableError):
        load_table(path)


@pytest.mark.parametrize("section", ["sizes", "index"])
def test_thousands_of_keys_are_refused(load, section):
    with pytest.raises(TableError, match="more than 500 keys"):
        load(f"[{section}]\n" + "".join(f"k{k} = '1'\n" for k in range(501)) + RULE)


def test_a_long_chain_of_sizes_is_followed_without_recursion(load):
    chain = "".join(f"k{k} = 'k{k + 1}'\n" for k in range(499)) + "k499 = '7'\n"
    table = load("[sizes]\n" + chain + RULE)
    assert next(iter(table.sizes)) == "k499"
