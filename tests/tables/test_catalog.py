"""Which tables are shipped, and how one is chosen."""

from __future__ import annotations

import pytest

from ckptbridge.errors import TableError, UsageError
from ckptbridge.tables import catalog
from ckptbridge.tables.sources import shipped_directory


def test_every_file_is_a_table_and_says_what_its_name_says():
    tables = catalog.shipped()
    assert len(tables) == len(list(shipped_directory().glob("*.toml")))
    for table in tables:
        assert table.path.name == f"{table.family}.{table.target}.toml"
        assert table.summary, table.path.name


def test_a_model_type_and_a_target_mean_one_table():
    served = [(model_type, table.target) for table in catalog.shipped() for model_type in table.model_types]
    assert len(set(served)) == len(served)


def test_a_model_type_has_at_most_one_default():
    for model_type in catalog.model_types():
        defaults = [t.name for t in catalog.shipped() if t.default and model_type in t.model_types]
        assert len(defaults) <= 1, (model_type, defaults)


def test_a_family_has_one_name_a_model_type():
    """A name that is a family of one table and a model type of another would be found as either."""
    for name in set(catalog.model_types()) & set(catalog.families()):
        owners = {t.family for t in catalog.shipped() if name in t.model_types}
        assert owners == {name}


def test_a_table_is_found_by_model_type_and_target():
    table = catalog.find("qwen3", "hf")
    assert (table.family, table.target) == ("qwen3", "hf")
    assert catalog.find("qwen3", "hf") is table  # read once
    assert catalog.find("qwen3").target == "mindformers" == catalog.targets("qwen3")[0]
    assert catalog.find("bert").target == "nn"
    assert "qwen3" in catalog.families() and "qwen3" in catalog.model_types()


def test_a_model_type_may_be_an_alias():
    assert "xlm-roberta" not in catalog.families()
    assert catalog.find("xlm-roberta", "hf").family == "roberta"
    assert catalog.targets("xlm-roberta") == catalog.targets("roberta")


def test_what_there_is_not_is_answered_with_what_there_is():
    with pytest.raises(UsageError, match="no table for the model type 'qwen33'") as caught:
        catalog.find("qwen33")
    assert "Did you mean 'qwen3'?" in caught.value.remedy
    with pytest.raises(UsageError, match="to the target 'mindformer'") as caught:
        catalog.find("qwen3", "mindformer")
    assert "Did you mean 'mindformers'?" in caught.value.remedy
    assert all(target in caught.value.remedy for target in catalog.targets("qwen3"))
    assert catalog.targets("nothing") == ()


def test_only_the_chosen_table_is_read_whole(monkeypatch, tmp_path):
    """A shipped table that is broken below its top does not stop another from being found."""
    (tmp_path / "a.hf.toml").write_text('schema = 1\nfamily = "a"\ntarget = "hf"\n[[rule]]\npt = "x"\n')
    (tmp_path / "b.hf.toml").write_text(
        'schema = 1\nfamily = "b"\nmodel_types = [\n  "b1", # one\n  "b2",\n]\ntarget = "hf"\n\n[sizes]\nbroken'
    )
    monkeypatch.setattr(catalog, "shipped_directory", lambda: tmp_path)
    catalog._heads.cache_clear()
    try:
        assert catalog.families() == ("a", "b") and catalog.model_types() == ("a", "b1", "b2")
        assert catalog.find("a", "hf").rules[0].pt == ("x",)
        with pytest.raises(UsageError, match="no default target") as caught:
            catalog.find("a")
        assert "hf" in caught.value.remedy
        with pytest.raises(TableError, match="not valid TOML"):
            catalog.find("b2", "hf")
    finally:
        catalog._heads.cache_clear()
