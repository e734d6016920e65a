"""The expression language: Python itself is the oracle where it may be asked."""

from __future__ import annotations

import contextlib
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptbridge.errors import ConfigError, TableError
from ckptbridge.tables.expressions import ABSENT, MAX_LENGTH, parse_expression

CONFIG = {
    "hidden": 8,
    "heads": 4,
    "nothing": None,
    "tied": True,
    "theta": 10000.0,
    "kind": "moe",
    "layers": [0, 3],
    "quant": {"block": [128, 64], "deep": {"er": 5}},
    "huge": 10**30,
}


def evaluate(text: str, config: dict | None = None) -> object:
    known = CONFIG if config is None else config
    return parse_expression(text).evaluate(lambda name: known.get(name, ABSENT))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("hidden", 8),
        ("hidden // heads", 2),
        ("hidden * heads + 1", 33),
        ("hidden - heads - heads", 0),
        ("-hidden + 9", 1),
        ("hidden % 3", 2),
        ("(1 + 2) * 3", 9),
        ("quant.block[1]", 64),
        ("quant.deep.er", 5),
        ("layers[heads - 3]", 3),
        ("'moe'", "moe"),
        ("None", None),
        ("True", True),
        ("kind == 'moe'", True),
        ("kind != 'moe'", False),
        ("kind in ('moe', 'dense')", True),
        ("3 in layers", True),
        ("2 not in layers", True),
        ("1 < heads <= 4", True),
        ("1 < heads <= 3", False),
        ("theta > 500", True),
        ("tied and heads", 4),
        ("not tied", False),
        ("hidden if tied else heads", 8),
        ("hidden if not tied else heads", 4),
        ("nothing is None", True),
        ("hidden is not None", True),
        ("layers is None", False),
        ("hidden //\n heads", 2),
    ],
)
def test_what_the_language_says(text, value):
    got = evaluate(text)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("absent or hidden", 8),
        ("absent or nothing or 3", 3),
        ("absent or gone", None),
        ("absent is None", True),
        ("absent is not None", False),
        ("quant.absent is None", True),
        ("absent.deeper is None", True),
        ("nothing.deeper is None", True),
        ("quant.absent or 7", 7),
        ("(absent or None) is None", True),
        ("3 in (absent or [])", False),
        ("hidden or absent // 2", 8),
        ("absent if not tied else hidden", 8),
        ("tied or absent < 3", True),
    ],
)
def test_what_is_absent_counts_as_none_only_where_it_is_said(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("absent", "absent"),
        ("absent + 1", "absent"),
        ("absent and True", "absent"),
        ("not absent", "absent"),
        ("absent == 3", "absent"),
        ("3 in absent", "absent"),
        ("1 if absent else 2", "absent"),
        ("quant.gone", "quant.gone"),
        ("nothing.gone", "nothing.gone"),
        ("gone or absent // 2", "absent"),
        ("layers[absent]", "absent"),
        ("absent[0]", "absent"),
    ],
)
def test_any_other_use_of_what_is_absent_names_it(text, named):
    with pytest.raises(ConfigError, match=f"no value for '{named}'") as caught:
        evaluate(text)
    assert caught.value.where["expression"] == text
    assert named.partition(".")[0] in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hidden + kind", "'kind' is 'moe', not an integer"),
        ("kind * 3", "'kind' is 'moe', not an integer"),
        ("tied + 1", "'tied' is True, not an integer"),
        ("theta // 2", "'theta' is 10000.0, not an integer"),
        ("nothing - 1", "'nothing' is None, not an integer"),
        ("layers * 2", "'layers' is a list of 2, not an integer"),
        ("huge + 1", "an integer of 100 bits, not an integer below"),
        ("hidden // 0", "'0' is 0"),
        ("hidden % (heads - 4)", "'heads - 4' is 0"),
        ("4611686018427387904 * 2", "The result is 2\\*\\*63 or more"),
        ("9223372036854775807 + 1", "The result is 2\\*\\*63 or more"),
        ("layers[2]", "has 2 values and none at 2"),
        ("layers[-1]", "has 2 values and none at -1"),
        ("kind[0]", "'kind' is 'moe', not a list"),
        ("quant['block']", "''block'' is 'block', not an integer"),
        ("hidden.deeper", "'hidden' is 8, which has no 'deeper'"),
        ("kind < 3", "'kind' is 'moe', not a number"),
        ("tied < 3", "'tied' is True, not a number"),
        ("3 in kind", "'kind' is 'moe', not a list"),
        ("layers == 3", "'layers' is a list of 2, which cannot be compared"),
        ("layers in (1, 2)", "'layers' is a list of 2, which cannot be compared"),
    ],
)
def test_values_of_the_wrong_kind_are_the_config_s_fault(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        evaluate(text)
    assert caught.value.where["expression"] == text


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "open('x')",
        "(lambda: 1)()",
        "[x for x in layers]",
        "{'a': 1}",
        "{1, 2}",
        "f'{hidden}'",
        "b'bytes'",
        "1.5",
        "2j",
        "...",
        "2 ** 3",
        "hidden / 2",
        "1 << 60",
        "hidden & 1",
        "~hidden",
        "+hidden",
        "layers[0:1]",
        "layers[0, 1]",
        "(hidden).real.x().y",
        "'text'.upper",
        "[1, 2].append",
        "(x := 3)",
        "hidden is heads",
        "hidden is True",
        "None is hidden",
        "*layers",
        "yield 1",
        "await x",
        "a; b",
        "a = 1",
        "",
        "   ",
        "1 +",
        ")",
        "1) + (2",
        "import os",
        "9223372036854775808",
        "9" * 400,
        "a\0b",
    ],
)
def test_the_rest_of_python_is_refused(text):
    with pytest.raises(TableError) as caught:
        parse_expression(text)
    assert caught.value.where["expression"] == text


@pytest.mark.parametrize(
    "text",
    [
        "(" * 240 + "1" + ")" * 240,
        "-" * 480 + "1",
        "not " * 120 + "a",
        "a" + ".b" * 240,
        "a" + "[0]" * 160,
        "[" * 249 + "]" * 249,
    ],
)
def test_deep_nesting_is_refused_and_not_followed(text):
    with pytest.raises(TableError, match=r"nested too deeply|cannot be parsed"):
        parse_expression(text)


def test_length_is_bounded():
    assert evaluate("+".join(["1"] * 20)) == 20
    with pytest.raises(TableError, match="longer than"):
        parse_expression("1" + " " * MAX_LENGTH)


def test_dunder_names_are_only_keys():
    assert evaluate("quant.__class__ is None")
    assert evaluate("__builtins__ is None")
    assert evaluate("x.__class__", {"x": {"__class__": 3}}) == 3


def test_python_s_advice_on_style_is_not_shown():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluate("1or 2") == 1


def test_an_expression_knows_its_names_and_what_it_compares():
    expression = parse_expression("attention == 'interleaved' and i >= quant.first and 'x' != b and m in ['p', 'q', i]")
    assert expression.names == {"attention", "i", "quant", "b", "m"}
    assert expression.compared == {("attention", "interleaved"), ("b", "x"), ("m", "p"), ("m", "q")}
    assert expression == parse_expression(expression.text)
    assert str(expression) == expression.text


# --- random expressions, of which Python itself gives the value ------------------------------

NAMES = ("a", "b", "c")
NUMBERS = st.recursive(
    st.one_of(st.integers(0, 9).map(str), st.sampled_from(NAMES)),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda x: f"(-{x})"),
        st.tuples(inner, inner, inner).map(lambda t: f"({t[0]} if {t[1]} > 2 else {t[2]})"),
    ),
    max_leaves=8,
)
TRUTHS = st.recursive(
    st.tuples(NUMBERS, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), NUMBERS).map(" ".join),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda x: f"(not {x})"),
    ),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None)
@given(
    text=st.one_of(NUMBERS, TRUTHS).filter(lambda t: len(t) < MAX_LENGTH), values=st.tuples(*[st.integers(-5, 50)] * 3)
)
def test_arithmetic_and_comparisons_are_python_s(text, values):
    config = dict(zip(NAMES, values, strict=True))
    try:
        expected = eval(text, {"__builtins__": {}}, dict(config))  # texts made here, from the grammar above
    except ZeroDivisionError:
        with pytest.raises(ConfigError, match="is 0"):
            evaluate(text, config)
    else:
        assert evaluate(text, config) == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab1.()[]+-*/%<>=!'\", notrinsfel", max_size=30))
def test_any_text_gives_a_value_or_an_error_of_the_family(text):
    with contextlib.suppress(TableError, ConfigError):
        evaluate(text)
