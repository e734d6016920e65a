"""Which tables know a checkpoint by its names: every shipped table its own models, and no other shape of model."""

from __future__ import annotations

from itertools import product

import pytest

from ckptbridge.tables.catalog import shipped
from ckptbridge.tables.expand import Expansion, expand
from ckptbridge.tables.published import NamedConfig, published_configs
from ckptbridge.tables.recognise import Side, recognise
from ckptbridge.tables.table import Table

# Of each family the smallest config with everything in it: expanding DeepSeek-V3 for every layout takes long.
_LARGEST = 6_000


def served(table: Table) -> list[NamedConfig]:
    return [c for c in published_configs() if c.values.get("model_type") in table.model_types]


def names(expansion: Expansion, side: Side) -> set[str]:
    """What a checkpoint of the expansion holds: no tensor that is dropped or tied."""
    entries = [entry for entry in expansion.entries if entry.kind == "map" and not entry.optional]
    return {name for entry in entries for name in (entry.pt if side == "pt" else entry.ms)}


def expansions(table: Table, config: NamedConfig) -> list[Expansion]:
    layouts = [dict(zip(table.layout, values, strict=True)) for values in product(*table.layout.values())]
    return [expand(table, config.values, layout) for layout in layouts]


@pytest.mark.parametrize("table", shipped(), ids=lambda table: table.name)
def test_a_table_knows_its_own_models_in_every_layout(table: Table) -> None:
    for config in served(table):
        smallest = expand(table, config.values)
        if len(smallest.by_pt) > _LARGEST:
            continue
        for k, expansion in enumerate(expansions(table, config)):
            sides: tuple[Side, ...] = ("pt", "ms") if k == 0 else ("ms",)
            for side in sides:
                found = recognise(names(expansion, side), (side,))
                assert table.name in {c.table for c in found if c.fits}, (config.name, side, expansion.layout, found)


def test_a_dense_model_is_no_mixture_of_experts_and_the_other_way_round() -> None:
    by_name = {table.name: table for table in shipped()}
    for family, other in (("qwen3", "qwen3_moe"), ("qwen3_moe", "qwen3")):
        table = by_name[f"{family}/mindformers"]
        config = min(served(table), key=lambda c: len(expand(table, c.values).by_pt))
        found = {c.family for c in recognise(names(expand(table, config.values), "pt"), ("pt",))}
        assert family in found and other not in found


def test_a_part_of_a_checkpoint_does_not_fit() -> None:
    (table,) = (t for t in shipped() if t.name == "qwen3/mindformers")
    whole = names(expand(table, served(table)[0].values), "pt")
    for part in (
        {n for n in whole if ".layers." in n},
        {n for n in whole if ".layers." not in n},
        {n for n in whole if ".layers.0." not in n},
        {n for n in whole if "input_layernorm" not in n},
    ):
        found = recognise(part, ("pt",))
        assert found and not [c for c in found if c.fits]


def test_names_of_nothing_known() -> None:
    assert recognise([]) == ()
    assert recognise(["conv1.weight", "fc.bias"]) == ()
    assert recognise(["*", "a.*.b", "{i}", ".", ""]) == ()


def test_a_model_type_narrows_the_search() -> None:
    (table,) = (t for t in shipped() if t.name == "llama/hf")
    found = recognise(names(expand(table, served(table)[0].values), "pt"), ("pt",), "llama")
    assert {c.family for c in found} == {"llama"}
    assert found[0].default
    assert recognise(["model.embed_tokens.weight"], ("pt",), "unheard-of") == ()
