"""Every shipped table through files: the layout written out by hand, and both round trips, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fused_judge
import numpy as np
import pytest
import table_judge
import written_fused
import written_layouts
from checkpoints import Array, assert_same_words, leftovers, load_ckpt, load_safetensors, random_arrays, save_hf
from published_models import Config, Shapes

import ckptbridge
from ckptbridge.tables import catalog
from ckptbridge.tables.table import Table

# Networks without a config of their own are judged in tests/mappings and in test_state_dicts.py.
WITHOUT_CONFIG = {"torch-nn"}
TABLES = [table for table in catalog.shipped() if table.family not in WITHOUT_CONFIG]


def options(table: Table, thorough: bool) -> Iterator[dict[str, str]]:
    """All combinations of the layout options; or, less thoroughly, each option's last value."""
    if thorough:
        yield from table_judge.layouts(table)
    else:
        yield {key: values[-1] for key, values in table.layout.items()}


def cases(table: Table) -> list[tuple[Config, Shapes, str]]:
    judge = table_judge if table.family in table_judge.FAMILIES else fused_judge
    return list(judge.cases(table))


def written_out(
    table: Table, config: Config, layout: dict[str, str], pt: dict[str, Array], root: str
) -> dict[str, Array]:
    """The MindSpore side by slices and loops; ids that MindSpore's networks hold as int32 become so."""
    if table.family in table_judge.FAMILIES:
        return written_layouts.expected(table.target, config, layout, pt, root)
    ms = written_fused.expected(table.family, table.target, config, layout, pt, root)
    narrow = table.name == "deepseek_v4/mindformers"
    return {n: a.astype(np.int32) if narrow and a.dtype == np.int64 else a for n, a in ms.items()}


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_files_have_the_layout_and_come_back_bit_for_bit(table: Table, tmp_path: Path) -> None:
    models = cases(table)
    assert models, f"no small model is written out for {table.name}"
    if table.target in ("hf", "flat"):  # renames: what the variants change is judged in tests/mappings
        models = [models[0], models[-1]] if len(models) > 1 else models
    for k, (config, shapes, root) in enumerate(models):
        pt = random_arrays(shapes, seed=k)
        source = save_hf(tmp_path / f"{k}", pt, config)
        for n, layout in enumerate(options(table, thorough=k == 0)):
            there, back, again = (tmp_path / f"{k}.{n}.{x}" for x in ("there.ckpt", "back", "again.ckpt"))
            ckptbridge.convert(source, there, direction="pt2ms", target=table.target, layout=layout)
            assert_same_words(load_ckpt(there), written_out(table, config, layout, pt, root))
            # Target, layout and config are known from the file.
            ckptbridge.convert(there, back, direction="ms2pt")
            assert_same_words(load_safetensors(back), pt)
            if n == 0:
                ckptbridge.convert(back, again, direction="pt2ms", target=table.target, layout=layout)
                assert_same_words(load_ckpt(again), load_ckpt(there))
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_what_mindspore_saved_comes_back_bit_for_bit(table: Table, tmp_path: Path) -> None:
    """ms -> pt -> ms from files that MindSpore wrote, without provenance: the options say what it is."""
    import mindspore

    models = cases(table)
    # Nothing but provenance tells a base model's prefix where the MindSpore names have none.
    config, shapes, root = [case for case in models if case[2] == models[0][2]][-1]
    pt = random_arrays(shapes, seed=1)
    source = save_hf(tmp_path / "config", {}, config)
    layout = {key: values[-1] for key, values in table.layout.items()}
    ms = written_out(table, config, layout, pt, root)
    saved = [{"name": name, "data": mindspore.Tensor(np.ascontiguousarray(a))} for name, a in ms.items()]
    mindspore.save_checkpoint(saved, str(tmp_path / "saved.ckpt"))
    keywords: dict[str, Any] = {"target": table.target, "layout": layout, "config": source / "config.json"}
    ckptbridge.convert(tmp_path / "saved.ckpt", tmp_path / "back", direction="ms2pt", **keywords)
    assert_same_words(load_safetensors(tmp_path / "back"), pt)
    ckptbridge.convert(tmp_path / "back", tmp_path / "again.ckpt", direction="pt2ms", **keywords)
    assert_same_words(load_ckpt(tmp_path / "again.ckpt"), ms)


def test_small_models_hide_nothing() -> None:
    """No two lengths are equal, heads per key/value head is not the number of these, and there are 11 experts."""
    for table in TABLES:
        for config, _, _ in cases(table):
            lengths = [config[k] for k in ("vocab_size", "hidden_size", "intermediate_size") if k in config]
            for a, b in itertools.combinations(lengths, 2):
                assert a != b
            if "num_key_value_heads" in config and "kv_lora_rank" not in config and table.family != "deepseek_v4":
                g, n = config["num_key_value_heads"], config["num_attention_heads"]
                assert n // g != g
            if "n_routed_experts" in config:
                assert config["n_routed_experts"] == 11
