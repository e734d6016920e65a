"""Name templates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptbridge.errors import ConfigError, TableError
from ckptbridge.tables.expressions import ABSENT
from ckptbridge.tables.names import MAX_LENGTH, parse_template


def look(**known):
    return lambda name: known.get(name, ABSENT)


def test_a_template_renders_strings_indices_and_expressions():
    template = parse_template("{root}layers.{n + j}.x.{e}.weight")
    assert template.render(look(root="model.", n=61, j=0, e=10)) == "model.layers.61.x.10.weight"
    assert template.render(look(root="", n=2, j=1, e=0)) == "layers.3.x.0.weight"
    assert template.names == {"root", "n", "j", "e"}


def test_what_is_known_can_be_put_in_first():
    template = parse_template("{root}{attn}.{i}.{n}.{n + i}.w")
    fixed = template.fixed(look(root="model.", attn="self", n=4), free=["i"])
    assert fixed.names == template.names and fixed.text == template.text
    assert [p if isinstance(p, str) else p.text for p in fixed.parts] == ["model.self.", "i", ".4.", "n + i", ".w"]
    assert fixed.render(look(i=3, n=4)) == template.render(look(root="model.", attn="self", n=4, i=3))


@pytest.mark.parametrize("text", ["a{b", "a}b", "a{b{c}}", "{a}}", "}{", "{"])
def test_braces_pair(text):
    with pytest.raises(TableError, match="do not pair"):
        parse_template(text)


@pytest.mark.parametrize("text", ["", "a\nb", "a\x1b[31m", "a‮b", "a" * (MAX_LENGTH + 1)])
def test_names_are_printable_and_not_endless(text):
    with pytest.raises(TableError, match="printable"):
        parse_template(text)


@pytest.mark.parametrize("text", ["a{}", "a{b!r}", "a{b:>3}", "a{f(x)}", "{2 ** 3}"])
def test_what_stands_in_braces_is_an_expression(text):
    with pytest.raises(TableError) as caught:
        parse_template(text)
    assert caught.value.where["name"] == text


@pytest.mark.parametrize("value", [None, True, -1, 1.5, [1], {}])
def test_a_part_is_a_string_or_an_integer_from_0(value):
    with pytest.raises(ConfigError, match=r"'\{x\}' is"):
        parse_template("a.{x}").render(look(x=value))


def test_an_absent_part_is_named():
    with pytest.raises(ConfigError, match="no value for 'x'"):
        parse_template("a.{x}").render(look())


@given(
    st.text(
        alphabet=st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="{}"), min_size=1, max_size=50
    )
)
def test_a_name_without_braces_is_itself(text):
    assert parse_template(text).render(look()) == text
