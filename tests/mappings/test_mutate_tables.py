"""The mutation script: it lets nothing pass here, and says so when a judge is blind."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import table_judge

from ckptbridge.tables import catalog


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "mutate_tables.py"
    spec = importlib.util.spec_from_file_location("mutate_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("family", "target"), [("llama", "mindformers-legacy"), ("qwen3", "mindformers")])
def test_no_fault_survives(script: ModuleType, family: str, target: str) -> None:
    count, alive = script.survivors(table_judge, catalog.find(family, target))
    assert count > 80
    assert alive == []


def test_the_faults_are_those_that_were_asked_for(script: ModuleType) -> None:
    faults = [m.what for m in script.mutants(catalog.find("qwen3", "mindformers"))]
    for wanted in (
        "mindformers_gqa.toml rule 1: pt names 2 and 3 exchanged",
        "mindformers_mlp.toml rule 1: 'f h, f h -> (f (1 + 1)) h' became 'f h, f h -> ((1 + 1) f) h'",
        "mindformers_qk_norm.toml rule 1: names exchanged with parts/mindformers_qk_norm.toml rule 2",
        "mindformers_decoder.toml rule 1: taken out",
    ):
        assert f"parts/{wanted}" in faults


def test_a_blind_judge_is_found_out(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_judge, "faults", lambda *_: [])
    count, alive = script.survivors(table_judge, catalog.find("bert", "hf"))
    assert len(alive) == count > 80
    monkeypatch.setattr(table_judge, "FAMILIES", ("bert",))
    assert script.main(["bert"]) == 1
