"""The tables of the Llama, Qwen, Mixtral, DeepSeek-V2/V3 and BERT families: layout, proof, published sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from table_judge import FAMILIES, cases, faults, layouts

from ckptbridge.errors import UsageError
from ckptbridge.tables import catalog
from ckptbridge.tables.expand import expand
from ckptbridge.tables.proof import prove
from ckptbridge.tables.table import Table

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
TARGETS = {
    **{family: {"hf", "flat", "mindformers", "mindformers-legacy"} for family in ("llama", "mistral", "qwen2")},
    **{
        family: {"hf", "flat", "mindformers"}
        for family in ("qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
    },
    **{family: {"hf", "nn"} for family in ("bert", "roberta")},
}
TABLES = [table for family in FAMILIES for table in (catalog.find(family, t) for t in sorted(TARGETS[family]))]


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_layout_is_the_formula_written_out(table: Table) -> None:
    judged = 0
    for config, shapes, root in cases(table):
        for options in layouts(table):
            assert faults(table, config, shapes, root, options) == [], (config, options)
            judged += 1
    assert judged


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_its_targets_and_one_default(family: str) -> None:
    assert set(catalog.targets(family)) == TARGETS[family]
    assert catalog.find(family).target == ("nn" if family in ("bert", "roberta") else "mindformers")


def test_layout_options_and_their_defaults() -> None:
    assert dict(catalog.find("deepseek_v3").layout) == {
        "mla": ("separate", "fused"),
        "mlp": ("interleaved", "contiguous"),
        "experts": ("2d", "3d"),
    }
    assert dict(catalog.find("qwen3").layout) == {
        "attention": ("interleaved", "contiguous"),
        "mlp": ("interleaved", "contiguous"),
    }
    assert dict(catalog.find("llama", "mindformers-legacy").layout) == {"qkv": ("split", "fused")}


def test_qwen3_never_had_an_older_network() -> None:
    with pytest.raises(UsageError, match="no table from 'qwen3' to the target 'mindformers-legacy'") as caught:
        catalog.find("qwen3", "mindformers-legacy")
    assert "mindformers, flat, hf" in caught.value.remedy


# --- published models, names and shapes only -------------------------------------------------


def _published() -> list[tuple[str, Table]]:
    pairs = []
    for path in sorted(CONFIGS.glob("*.json")):
        model_type = json.loads(path.read_text())["model_type"]
        tables = [t for t in TABLES if model_type in t.model_types]
        pairs += [(path.stem, table) for table in tables]
    return pairs


@pytest.mark.parametrize(("name", "table"), _published(), ids=lambda x: x if isinstance(x, str) else x.target)
def test_proof_on_published_configs(name: str, table: Table) -> None:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    first, second = table.roots["root"].choices
    prove(expand(table, config, {}, {"root": second}))
    for options in ({}, *({key: value} for key, values in table.layout.items() for value in values[1:])):
        prove(expand(table, config, options, {"root": first}))


def _parameters(name: str, family: str) -> int:
    expansion = expand(catalog.find(family), json.loads((CONFIGS / f"{name}.json").read_text()))
    mapped = [entry for entry in expansion.entries if entry.kind == "map" and not entry.optional]
    return prove(expansion).elements - sum(
        _elements(e) for e in expansion.entries if e.kind == "map" and e not in mapped
    )


def _elements(entry: object) -> int:
    bound = entry.bound  # type: ignore[attr-defined]
    return 0 if bound is None else sum(_product(shape) for shape in bound.left)


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


@pytest.mark.parametrize(
    ("name", "family", "parameters"),
    [
        # The counts that the model cards and papers give, in full where they do.
        ("llama-7b", "llama", 6_738_415_616),
        ("llama-3-8b", "llama", 8_030_261_248),
        ("llama-3-70b", "llama", 70_553_706_496),
        ("llama-3.2-1b", "llama", 1_235_814_400),
        ("mistral-7b", "mistral", 7_241_732_096),
        ("qwen2-0.5b", "qwen2", 494_032_768),
        ("qwen2-7b", "qwen2", 7_615_616_512),
        ("qwen3-0.6b", "qwen3", 596_049_920),
        ("qwen3-8b", "qwen3", 8_190_735_360),
        ("mixtral-8x7b", "mixtral", 46_702_792_704),
        ("qwen1.5-moe-a2.7b", "qwen2_moe", 14_315_784_192),
        ("qwen3-30b-a3b", "qwen3_moe", 30_532_122_624),
        ("deepseek-v2-lite", "deepseek_v2", 15_706_484_224),
        ("deepseek-v2", "deepseek_v2", 235_741_434_880),
        ("bert-base", "bert", 108_891_648),
        ("minilm-l6", "bert", 22_565_376),
    ],
)
def test_published_models_have_their_published_number_of_parameters(name: str, family: str, parameters: int) -> None:
    assert _parameters(name, family) == parameters
