"""``mappings list``, ``show`` and ``check``: what they print, and their exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from ckptbridge.tables.catalog import shipped

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "tests" / "data" / "configs"
Run = Callable[..., Any]

HEAD = 'schema = 1\nfamily = "toy"\ntarget = "mine"\n'


def table(folder: Path, text: str, name: str = "toy.toml") -> Path:
    path = folder / name
    path.write_text(HEAD + dedent(text))
    return path


# --- list ------------------------------------------------------------------------------------


def test_list_names_every_shipped_table(ckptbridge: Run) -> None:
    ran = ckptbridge("mappings", "list", "--json")
    listed = json.loads(ran.out)["tables"]
    files = {tuple(p.name.removesuffix(".toml").split(".", 1)) for p in (ROOT / "mappings").glob("*.toml")}
    assert ran.code == 0
    assert {(t["family"], t["target"]) for t in listed} == files
    qwen3 = next(t for t in listed if (t["family"], t["target"]) == ("qwen3", "mindformers"))
    assert qwen3["default"] is True
    assert qwen3["layout"]["attention"] == ["interleaved", "contiguous"]
    assert qwen3["model_types"] == ["qwen3"]


def test_list_marks_the_default_target_and_the_default_layout(ckptbridge: Run) -> None:
    lines = ckptbridge("mappings", "list").out.splitlines()
    row = next(line.split() for line in lines if line.startswith("qwen3 ") and "mindformers" in line)
    assert row == [
        *("qwen3", "mindformers", "*"),
        *("attention=interleaved|contiguous;", "mlp=interleaved|contiguous", "qwen3"),
    ]
    assert all(" * " not in line for line in lines if line.startswith("qwen3 ") and "mindformers" not in line)


# --- show ------------------------------------------------------------------------------------


def test_show_gives_the_rules_as_text(ckptbridge: Run) -> None:
    ran = ckptbridge("mappings", "show", "qwen3", "mindformers")
    assert ran.code == 0
    assert "    {root}layers.{i}.self_attn.q_proj.weight" in ran.out
    assert "  = decoder.layers.{i}.self_attention.linear_qkv.weight" in ran.out
    assert "(g r d) h, (g 1 d) h, (g 1 d) h -> (g (r + 1 + 1) d) h" in ran.out
    assert "when attention == 'interleaved'" in ran.out
    assert "dropped: recomputed from rope_theta" in ran.out
    assert "tied: absent, or equal to {root}embed_tokens.weight" in ran.out


def test_show_takes_the_default_target(ckptbridge: Run) -> None:
    assert ckptbridge("mappings", "show", "bert").out.startswith("bert/nn: ")


@pytest.mark.parametrize("config", [(), ("--config", CONFIGS / "qwen3-0.6b.json")])
def test_show_takes_a_tables_name_as_every_command_prints_it(ckptbridge: Run, config: tuple[object, ...]) -> None:
    ran = ckptbridge("mappings", "show", "qwen3/flat", *config)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == ckptbridge("mappings", "show", "qwen3", "flat", *config).out


def test_show_names_the_argument_and_no_option(ckptbridge: Run) -> None:
    for arguments in (("qwen3", "mindformer"), ("qwen3/mindformer",)):
        ran = ckptbridge("mappings", "show", *arguments)
        assert ran.code == 2
        assert "argument: TARGET" in ran.err and "--target" not in ran.err
        assert "Did you mean 'mindformers'?" in ran.err


def test_show_notes_a_config_of_another_model_type(ckptbridge: Run) -> None:
    note = "The config is one of the model type 'llama', and the table qwen3/mindformers is for qwen3."
    (config,) = [path for path in CONFIGS.glob("*.json") if path.stem == "llama-3.2-1b"]
    ran = ckptbridge("mappings", "show", "qwen3", "--config", config)
    assert (ran.code, ran.err) == (0, f"note    {note}\n")
    ran = ckptbridge("mappings", "show", "qwen3", "--config", config, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(ran.out)["notes"] == [note]
    ran = ckptbridge("mappings", "show", "qwen3", "--config", CONFIGS / "qwen3-8b.json", "--json")
    assert json.loads(ran.out)["notes"] == []


def test_show_with_a_config_gives_names_and_shapes_folded(ckptbridge: Run) -> None:
    # Qwen3-0.6B: 28 layers, 16 heads of 128 on 8 key-value heads, hidden size 1024.
    ran = ckptbridge("mappings", "show", "qwen3", "mindformers", "--config", CONFIGS / "qwen3-0.6b.json")
    assert ran.code == 0
    assert "    model.layers.{0..27}.self_attn.q_proj.weight [2048, 1024]" in ran.out
    assert "    model.layers.{0..27}.self_attn.k_proj.weight [1024, 1024]" in ran.out
    assert "  = decoder.layers.{0..27}.self_attention.linear_qkv.weight [4096, 1024]" in ran.out
    assert "  x28" in ran.out
    assert ran.out.count("linear_qkv.weight") == 1


def test_show_folds_experts_and_keeps_the_dense_layers_apart(ckptbridge: Run) -> None:
    ran = ckptbridge("mappings", "show", "deepseek_v3", "--config", CONFIGS / "deepseek-v3.json")
    assert "    model.layers.{3..60}.mlp.experts.{0..255}.gate_proj.weight [2048, 7168]" in ran.out
    assert "  = decoder.layers.{3..60}.mlp.experts.weight1 [1835008, 4096]" in ran.out
    assert "    model.layers.{0..2}.mlp.gate_proj.weight [18432, 7168]" in ran.out


def test_show_with_a_layout_gives_only_its_rules(ckptbridge: Run) -> None:
    arguments = ("mappings", "show", "qwen3_moe", "mindformers", "--config", CONFIGS / "qwen3-30b-a3b.json", "--json")
    shapes = {}
    for layout in ("2d", "3d"):
        entries = json.loads(ckptbridge(*arguments, "--layout", f"experts={layout}").out)["entries"]
        (entry,) = [e for e in entries if any("weight1" in t["name"] for t in e["ms"])]
        shapes[layout] = entry["ms"][0]["shape"]
        assert entry["times"] == 48
        assert [t["name"] for t in entry["pt"]] == [
            "model.layers.{0..47}.mlp.experts.{0..127}.gate_proj.weight",
            "model.layers.{0..47}.mlp.experts.{0..127}.up_proj.weight",
        ]
    assert shapes == {"2d": [128 * 2048, 2 * 768], "3d": [128, 2048, 2 * 768]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("qwn3",), "Did you mean 'qwen3'?"),
        (("qwen3", "mindformer"), "Did you mean 'mindformers'?"),
        (("qwen3/flat", "hf"), "The target is given twice: 'flat' and 'hf'."),
        (("qwen3/",), "no table from 'qwen3' to the target ''"),
        (("qwen3", "--layout", "mlp=contiguous"), "Give a model's config.json with --config."),
        (("qwen3", "--config", CONFIGS / "qwen3-8b.json", "--layout", "mpl=contiguous"), "Did you mean 'mlp'?"),
        (("qwen3", "--config", CONFIGS / "qwen3-8b.json", "--layout", "mlp=x"), "interleaved, contiguous"),
        (("qwen3", "--config", CONFIGS / "gpt2.json"), "The config has no value for 'num_hidden_layers'"),
        (("qwen3", "--config", __file__), "not valid JSON"),
        (("qwen3", "--config", "nowhere.json"), "does not exist"),
    ],
)
def test_show_says_what_is_wrong(ckptbridge: Run, arguments: tuple[object, ...], said: str) -> None:
    ran = ckptbridge("mappings", "show", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


# --- check -----------------------------------------------------------------------------------

RENAME = '[[rule]]\npt = "a.weight"\nms = "b.weight"\n'


def test_check_proves_a_table_that_needs_no_config(ckptbridge: Run, tmp_path: Path) -> None:
    ran = ckptbridge("mappings", "check", table(tmp_path, RENAME))
    assert ran.code == 0
    (line,) = ran.out.splitlines()
    assert line.startswith(str(tmp_path / "toy.toml"))
    assert "proved  without a config, 1 case(s), up to 1 = 1 tensors" in line


def test_check_shows_the_counter_example(ckptbridge: Run, tmp_path: Path) -> None:
    bad = table(tmp_path, RENAME + '[[rule]]\npt = "c.weight"\nms = "b.weight"\n', "bad.toml")
    ran = ckptbridge("mappings", "check", table(tmp_path, RENAME), bad)
    assert ran.code == 1
    assert "toy.toml" in ran.out.splitlines()[0] and "proved" in ran.out.splitlines()[0]
    assert "FAILED" in ran.out.splitlines()[1]
    assert "'b.weight' stands twice on the ms side." in ran.out
    as_json = ckptbridge("mappings", "check", bad, "--json")
    (result,) = json.loads(as_json.out)["tables"]
    assert as_json.code == 1
    assert (result["proved"], result["counter_example"]["where"]["tensor"]) == (False, "b.weight")


def test_check_quiet_prints_failures_only(ckptbridge: Run, tmp_path: Path) -> None:
    good = table(tmp_path, RENAME)
    bad = table(tmp_path, RENAME + '[[rule]]\npt = "a.weight"\nms = "c.weight"\n', "bad.toml")
    assert ckptbridge("mappings", "check", good, "--quiet").out == ""
    ran = ckptbridge("mappings", "check", good, bad, "--quiet")
    assert ran.code == 1
    assert "bad.toml" in ran.out and "toy.toml" not in ran.out


FAULT_IN_ONE_LAYOUT = """
    [layout]
    one = ["right", "other"]
    two = ["right", "wrong"]
    [[rule]]
    pt = "a"
    ms = "b"
    [[rule]]
    when = "one == 'other' and two == 'wrong'"
    pt = "c"
    ms = "b"
"""

FAULT_UNDER_ONE_ROOT = """
    [roots.root]
    choices = ["model.", ""]
    pt = "{root}a"
    [[rule]]
    pt = "{root}a"
    ms = "b"
    [[rule]]
    when = "root == ''"
    pt = "c"
    ms = "b"
"""


@pytest.mark.parametrize(
    ("text", "case"), [(FAULT_IN_ONE_LAYOUT, "one=other, two=wrong"), (FAULT_UNDER_ONE_ROOT, "root=''")]
)
def test_check_tries_every_layout_and_root(ckptbridge: Run, tmp_path: Path, text: str, case: str) -> None:
    ran = ckptbridge("mappings", "check", table(tmp_path, text))
    assert ran.code == 1
    assert case in ran.out


NEEDS_CONFIG = """
    [index]
    i = "num_hidden_layers"
    [[rule]]
    pt = "layers.{i}.weight"
    ms = "h.{i}.weight"
"""


def test_check_asks_for_a_config_where_none_fits(ckptbridge: Run, tmp_path: Path) -> None:
    path = table(tmp_path, NEEDS_CONFIG)
    ran = ckptbridge("mappings", "check", path)
    assert ran.code == 2
    assert "Give a model's config.json with --config." in ran.err
    config = tmp_path / "config.json"
    config.write_text('{"num_hidden_layers": 3}')
    ran = ckptbridge("mappings", "check", path, "--config", config)
    assert ran.code == 0
    assert "1 config(s), 1 case(s), up to 3 = 3 tensors" in ran.out


def test_check_names_the_config_that_does_not_give_what_is_asked_for(ckptbridge: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    ran = ckptbridge("mappings", "check", table(tmp_path, NEEDS_CONFIG), "--config", config)
    assert ran.code == 2
    assert "'num_hidden_layers'" in ran.err and str(config) in ran.err


@pytest.mark.parametrize("text", ["schema = ", "schema = 2", 'schema = 1\nfamily = "x"\n'])
def test_check_cannot_judge_what_is_no_table(ckptbridge: Run, tmp_path: Path, text: str) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text(text)
    ran = ckptbridge("mappings", "check", table(tmp_path, RENAME), bad)
    assert (ran.code, ran.out) == (2, "")
    assert "bad.toml" in ran.err


def test_check_cannot_judge_a_file_that_is_not_there(ckptbridge: Run) -> None:
    assert ckptbridge("mappings", "check", "nowhere.toml").code == 2


def test_check_of_the_shipped_tables_for_one_model(ckptbridge: Run) -> None:
    ran = ckptbridge("mappings", "check", "--config", CONFIGS / "qwen3-0.6b.json", "--json")
    results = json.loads(ran.out)["tables"]
    assert ran.code == 0
    assert {r["table"] for r in results} == {"qwen3/flat", "qwen3/hf", "qwen3/mindformers"}
    # Two roots; for mindformers also every combination of two options with two values.
    assert {r["table"]: r["cases"] for r in results} == {"qwen3/flat": 2, "qwen3/hf": 2, "qwen3/mindformers": 5}
    # Embedding and final norm; eleven tensors in each of the 28 layers. The head is tied.
    assert all(r["pt_names"] == 2 + 28 * 11 for r in results)
    assert all(r["elements"] == 596_049_920 for r in results)


def test_check_of_a_model_type_without_tables(ckptbridge: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "unheard-of"}')
    ran = ckptbridge("mappings", "check", "--config", config)
    assert ran.code == 2
    assert "unheard-of" in ran.err


def test_every_shipped_table_is_proved_on_published_configs() -> None:
    from ckptbridge.tables.published import published_configs

    assert {c.name for c in published_configs()} == {p.stem for p in CONFIGS.glob("*.json")}
    served = {c.values["model_type"] for c in published_configs()}
    unproved = [t.name for t in shipped() if t.index and served.isdisjoint(t.model_types)]
    assert unproved == []
