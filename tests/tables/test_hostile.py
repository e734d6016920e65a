"""Random and damaged tables, and random configs: a value or an error of the family, and nothing else."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptbridge.errors import CkptBridgeError, ConfigError, TableError
from ckptbridge.tables.axes import parse_axes
from ckptbridge.tables.expand import expand
from ckptbridge.tables.expressions import parse_expression
from ckptbridge.tables.names import parse_template
from ckptbridge.tables.proof import prove
from ckptbridge.tables.sources import shipped_directory
from ckptbridge.tables.table import load_table

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

TABLE = """
schema = 1
family = "toy"
target = "there"
[index]
i = "layers"
e = "experts or 0"
[sizes]
h = "hidden"
f = "ffn // 2"
[layout]
mlp = ["a", "b"]
[roots.root]
choices = ["model.", ""]
pt = "{root}x"
[[rule]]
when = "i >= first and mlp == 'a'"
pt = ["{root}{i}.{e}.gate", "{root}{i}.{e}.up"]
ms = "{i}.w"
axes = "e f h, e f h -> (e h) (f + f)"
[[rule]]
pt = "{root}x"
axes = "h labels"
[[rule]]
pt = "y"
tied = "{root}x"
"""
CONFIG = {"layers": 2, "experts": 3, "hidden": 7, "ffn": 10, "first": 1}


@pytest.fixture
def damaged(tmp_path: Path):
    def run(text: str) -> None:
        path = tmp_path / "damaged.toml"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        with contextlib.suppress(CkptBridgeError):
            prove(expand(load_table(path), CONFIG))

    return run


def test_the_table_that_is_damaged_is_sound(tmp_path):
    path = tmp_path / "sound.toml"
    path.write_text(TABLE)
    assert prove(expand(load_table(path), CONFIG)).entries == 2


@FEW
@given(at=st.integers(0, len(TABLE)), cut=st.integers(0, 40), put=st.text(max_size=12))
def test_a_damaged_table(damaged, at, cut, put):
    damaged(TABLE[:at] + put + TABLE[at + cut :])


@FEW
@given(data=st.data())
def test_a_table_with_one_value_exchanged(damaged, data):
    """Every value by another of the table's own, or by one that is nowhere expected."""
    lines = TABLE.splitlines()
    k = data.draw(st.sampled_from([k for k, line in enumerate(lines) if "=" in line]))
    key = lines[k].partition("=")[0]
    values = [line.partition("=")[2] for line in lines if "=" in line]
    strange = [
        "0",
        "-1",
        "1e99",
        "nan",
        "true",
        "[]",
        "{}",
        '""',
        "[[]]",
        "1979-05-27",
        '"{i}"',
        '"i i"',
        '"' + "(" * 99 + '"',
    ]
    lines[k] = f"{key}={data.draw(st.sampled_from(values + strange))}"
    damaged("\n".join(lines))


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=4,
)


@FEW
@given(
    config=st.fixed_dictionaries(
        {},
        optional={
            key: st.one_of(VALUES, st.integers(0, 20)) for key in ("layers", "experts", "hidden", "ffn", "first")
        },
    )
)
def test_a_random_config(tmp_path, config):
    path = tmp_path / "sound.toml"
    path.write_text(TABLE)
    with contextlib.suppress(CkptBridgeError):
        prove(expand(load_table(path), config))


@FEW
@given(st.text(alphabet="abi12 ()+,->\x00é", max_size=60))
def test_a_random_axis_line(text):
    with contextlib.suppress(TableError):
        line = parse_axes(text)
        assert line.inverse().inverse() == line


@FEW
@given(st.text(alphabet="ab{}+.[] 1\n'", max_size=30))
def test_a_random_name(text):
    with contextlib.suppress(TableError, ConfigError):
        parse_template(text).render(lambda name: 3)


def test_nothing_is_executed(damaged, tmp_path):
    """A canary must not appear, wherever the code is put."""
    canary = tmp_path / "canary"
    code = f"__import__('pathlib').Path('{canary}').touch()"
    for place in ('"layers"', '"hidden"', "\"i >= first and mlp == 'a'\""):
        damaged(TABLE.replace(place, f'"{code}"'))
    damaged(TABLE.replace("{i}.w", "{" + code + "}"))
    damaged(TABLE.replace("{root}x", "{" + code + "}"))
    assert not canary.exists()


@pytest.mark.parametrize("text", ["9 ** 9 ** 9 ** 9", "'a' * 10 ** 9", "[0] * 1000000000", "1 << 10000000000"])
def test_towers_are_refused_before_they_are_built(text):
    with pytest.raises((TableError, ConfigError)):
        parse_expression(text).evaluate(lambda name: 1)


def test_nested_configs_are_not_followed_by_recursion():
    deep: object = []
    for _ in range(sys.getrecursionlimit() * 2):
        deep = [deep]
    look = {"deep": deep, "other": [deep]}.__getitem__
    for text in ("deep == other", "deep in other", "deep < 1", "deep + 1"):
        with pytest.raises(ConfigError):
            parse_expression(text).evaluate(look)
    assert parse_expression("1 in deep").evaluate(look) is False


@pytest.mark.parametrize("path", sorted(shipped_directory().glob("*.mindformers.toml")), ids=lambda p: p.name)
def test_no_shipped_table_takes_an_empty_config(path):
    with pytest.raises(ConfigError):
        expand(load_table(path), {})
