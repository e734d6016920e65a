"""``ckptbridge verify`` as CI sees it: exit codes, reports on disk, and what it says of bad input."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from ckptbridge.cli import main
from ckptbridge.errors import BackendError, OutputError

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Qwen3 (hf), its .ckpt, and a second one of other sizes (other)."""
    import ckptbridge

    folder = tmp_path_factory.mktemp("verify")
    sizes = {"vocab_size": 61, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    for name, hidden in (("hf", 32), ("other", 48)):
        torch.manual_seed(1)
        config = transformers.Qwen3Config(**sizes, hidden_size=hidden, num_key_value_heads=2, head_dim=12)
        model = transformers.Qwen3ForCausalLM(config)
        for tensor in model.state_dict().values():
            tensor.normal_(std=0.3)
        model.save_pretrained(folder / name)
    ckptbridge.convert(folder / "hf", folder / "m.ckpt", direction="pt2ms")
    return folder


def test_a_right_handoff_gives_0_and_all_reports(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    reports = [tmp_path / f"r.{kind}" for kind in ("json", "xml", "html")]
    ran = ckptbridge(
        *("verify", made / "hf", made / "m.ckpt", "--atol", "1e-5", "--length", "30"),
        *("--report", reports[0], "--junit", reports[1], "--html", reports[2]),
    )
    assert ran.code == 0, ran.out + ran.err
    assert ran.out.startswith("verify: HOLDS") and len(ran.out.splitlines()) < 25
    assert "qwen3/mindformers (attention=interleaved" in ran.err and "m.ckpt: ckpt, " in ran.err
    data = json.loads(reports[0].read_text())
    assert data["weights"]["verdict"] == data["forward"]["verdict"] == "holds"
    assert data["provenance"]["table"]["name"] == "qwen3/mindformers"
    assert data["environment"]["versions"]["mindspore"]
    assert {a["switch"] for a in data["actions"]} >= {"ASCEND_FORCE_OVERFLOW", "ASCEND_FORCE_UNDERFLOW"}
    suite = ET.parse(reports[1]).getroot()
    assert int(suite.get("tests", "0")) > 3 and suite.get("failures") == "0"
    page = reports[2].read_text()
    assert page.lower().startswith("<!doctype html>") and "http" not in page.replace("http://www.w3.org", "")


def damaged(made: Path, tmp_path: Path) -> Path:
    """The PyTorch side with K and V of a layer exchanged: names, shapes and statistics are all the same."""
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text((made / "hf" / "config.json").read_text())
    arrays = load_file(made / "hf" / "model.safetensors")
    k, v = (f"model.layers.1.self_attn.{n}_proj.weight" for n in "kv")
    arrays[k], arrays[v] = arrays[v], arrays[k]
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_wrong_one_gives_1_and_says_where(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    hf = damaged(made, tmp_path)
    ran = ckptbridge("verify", hf, made / "m.ckpt", "--length", "30", "--junit", tmp_path / "r.xml")
    assert ran.code == 1
    assert "DOES NOT HOLD" in ran.out and "decoder.layers.1.self_attention.linear_qkv.weight" in ran.out
    assert "layers.1.attention" in ran.out
    assert int(ET.parse(tmp_path / "r.xml").getroot().get("failures", "0")) >= 2
    assert ckptbridge("verify", hf, made / "m.ckpt", "--level", "weights", "--quiet").code == 1
    assert ckptbridge("verify", hf, made / "m.ckpt", "--level", "forward", "--length", "30", "--quiet").code == 1


def test_json_is_the_only_output(made: Path, ckptbridge: Command) -> None:
    ran = ckptbridge("verify", made / "m.ckpt", "--level", "weights", "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["weights"]["verdict"] == "holds"
    assert ran.err == ""


def expect_2(ran: Any, *words: str) -> None:
    assert ran.code == 2, ran.out + ran.err
    assert "\nerror: " in f"\n{ran.err}" and "remedy: " in ran.err
    for word in words:
        assert word in ran.err, ran.err


def test_what_cannot_be_judged_gives_2_and_a_remedy(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    whole = (made / "m.ckpt").read_bytes()
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(whole[: len(whole) // 2])
    expect_2(ckptbridge("verify", made / "hf", cut), "cut.ckpt")
    expect_2(ckptbridge("verify", made / "other", made / "m.ckpt", "--level", "weights"), "has the shape", "config")
    expect_2(ckptbridge("verify", tmp_path / "none", made / "m.ckpt"), "none")
    expect_2(ckptbridge("verify", made / "hf"), "verify PT MS")
    expect_2(ckptbridge("verify", made / "hf", made / "m.ckpt", made / "m.ckpt"), "two")
    expect_2(ckptbridge("verify", made / "hf", made / "m.ckpt", "--atol", "-1"), "atol")
    expect_2(ckptbridge("verify", made / "hf", made / "m.ckpt", "--batch", "0"), "--batch")
    (tmp_path / "tokens.json").write_text("[1, 2, 99]")
    expect_2(
        ckptbridge("verify", made / "hf", made / "m.ckpt", "--tokens", tmp_path / "tokens.json"), "vocabulary of 61"
    )
    (tmp_path / "words.json").write_text('["a"]')
    expect_2(ckptbridge("verify", made / "hf", made / "m.ckpt", "--tokens", tmp_path / "words.json"), "token ids")


def test_a_device_that_is_not_there_gives_2(made: Path) -> None:
    # A process of its own: MindSpore takes its device once.
    line = [
        sys.executable,
        "-m",
        "ckptbridge",
        "verify",
        str(made / "hf"),
        str(made / "m.ckpt"),
        "--ms-device",
        "Ascend",
    ]
    ran = subprocess.run([*line, "--length", "8"], capture_output=True, text=True, check=False)
    assert ran.returncode == 2, ran.stdout
    assert "'Ascend'" in ran.stderr and "--ms-device CPU" in ran.stderr and "Traceback" not in ran.stderr


def test_an_empty_folder_says_what_to_name(tmp_path: Path, monkeypatch: Any, ckptbridge: Command) -> None:
    monkeypatch.chdir(tmp_path)
    expect_2(ckptbridge("verify"), "ckptbridge.json", "verify PT MS")


def test_tokens_of_the_users_own(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    np.save(tmp_path / "t.npy", np.array([[1, 2, 3, 4], [5, 6, 7, 8]]))
    ran = ckptbridge("verify", made / "hf", made / "m.ckpt", "--tokens", tmp_path / "t.npy", "--level", "forward")
    assert ran.code == 0 and "2 x 4 tokens, from t.npy" in ran.out


USER = """
import numpy as np

def echo(path, config, dtype, device):
    return lambda tokens: np.zeros((*tokens.shape, config["vocab_size"]))

def wrong(path, config, dtype, device):
    return lambda tokens: "logits"

def breaks(path, config, dtype, device):
    raise KeyError("weight")
"""


def test_functions_of_the_users_own(made: Path, tmp_path: Path, monkeypatch: Any, ckptbridge: Command) -> None:
    (tmp_path / "user_sides.py").write_text(USER)
    monkeypatch.chdir(tmp_path)
    line = ("verify", made / "hf", made / "m.ckpt", "--level", "forward", "--length", "8")
    assert ckptbridge(*line, "--ms-net", "user_sides:echo").code == 1
    assert ckptbridge(*line, "--ms-net", "user_sides:echo", "--pt-model", "user_sides:echo").code == 0
    expect_2(ckptbridge(*line, "--ms-net", "user_sides:wrong"), "user_sides:wrong")
    expect_2(ckptbridge(*line, "--pt-model", "user_sides:breaks"), "user_sides:breaks", "KeyError")
    expect_2(ckptbridge(*line, "--ms-net", "user_sides:none"), "none")
    expect_2(ckptbridge(*line, "--ms-net", "nowhere"), "MODULE:FUNCTION")
    expect_2(ckptbridge(*line, "--ms-net", "user_sides:echo", "--prove"), "--prove")


BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {name!r}:
            raise ModuleNotFoundError("No module named " + {name!r}, name={name!r})

sys.meta_path.insert(0, Block())
from ckptbridge.cli.main import main
main({args!r})
"""


@pytest.mark.parametrize(
    ("name", "extra"), [("mindspore", "ckptbridge[mindspore]"), ("transformers", "ckptbridge[verify]")]
)
def test_a_missing_backend_names_the_extra(name: str, extra: str, made: Path) -> None:
    args = ["verify", str(made / "hf"), str(made / "m.ckpt"), "--length", "8"]
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(name=name, args=args)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2, ran.stderr
    assert extra in ran.stderr and "Traceback" not in ran.stderr


def test_weights_are_judged_without_any_backend(made: Path) -> None:
    code = BLOCKED.format(name="mindspore", args=["verify", str(made / "m.ckpt"), "--level", "weights"])
    code = code.replace("== 'mindspore'", "in ('mindspore', 'torch', 'transformers')")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "verify: HOLDS" in ran.stdout


def test_activations_name_the_kernel_at_fault(ckptbridge: Command) -> None:
    ran = ckptbridge("verify", "activations", "--atol", "2e-4")
    assert ran.code == 0, ran.out
    strict = ckptbridge("verify", "activations", "--atol", "1e-7", "--json")
    assert strict.code == 1
    found = json.loads(strict.out)
    assert found["holds"] is False and found["atol"] == 1e-7
    assert "tanh" in {kernel["case"] for kernel in found["kernels"] if kernel["status"] == "fault"}


def test_activations_have_options_of_their_own(ckptbridge: Command) -> None:
    assert "--atol" in ckptbridge("verify", "activations", "--help").out
    assert "--golden" not in ckptbridge("verify", "activations", "--help").out
    assert "No such option '--junit'" in ckptbridge("verify", "activations", "--junit", "a.xml").err
    for device in ("cuda", "abacus"):
        ran = ckptbridge("verify", "activations", "--device", device)
        assert ran.code == 2 and "--device cpu" in ran.err and "not foreseen" not in ran.err


# --- golden files ----------------------------------------------------------------------------


def changed_copy(hf: Path, folder: Path) -> Path:
    """The checkpoint with one value of one tensor changed, as a trained one would be."""
    shutil.copytree(hf, folder)
    state = load_file(folder / "model.safetensors")
    state["model.norm.weight"][3] += 0.5
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_golden_file_is_never_written_over(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    golden = tmp_path / "run.golden"
    ran = ckptbridge("verify", made / "hf", "--golden", golden, "--length", "8")
    assert ran.code == 0 and f"wrote {golden}" in ran.out
    before = golden.read_bytes()
    expect_2(ckptbridge("verify", made / "other", "--golden", golden), "there already")
    expect_2(ckptbridge("verify", made / "m.ckpt", "--golden", golden, "--seed", "3"), "--seed would change nothing")
    assert golden.read_bytes() == before
    expect_2(ckptbridge("verify", made / "hf", "--golden", tmp_path / "none" / "run.golden"), "cannot be written")


def test_a_golden_file_belongs_to_one_checkpoint(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    golden = tmp_path / "run.golden"
    ckptbridge("verify", made / "hf", "--golden", golden, "--length", "8")
    ran = ckptbridge("verify", made / "hf", made / "m.ckpt", "--golden", golden)
    assert ran.code == 0 and "logits are those of the golden file" in ran.out, ran.err
    assert "1 x 8 tokens, of the golden file" in ran.out
    trained = changed_copy(made / "hf", tmp_path / "trained")
    for level in ("all", "forward"):
        ran = ckptbridge("verify", trained, made / "m.ckpt", "--golden", golden, "--level", level)
        expect_2(ran, "another checkpoint, 'hf'")
    # Without the PyTorch side, the provenance says which it was.
    other = tmp_path / "other.golden"
    ckptbridge("verify", trained, "--golden", other, "--length", "8")
    shutil.copy(made / "m.ckpt", tmp_path / "m.ckpt")
    expect_2(ckptbridge("verify", tmp_path / "m.ckpt", "--golden", other), "another checkpoint, 'trained'")
    assert ckptbridge("verify", tmp_path / "m.ckpt", "--golden", golden).code == 0


def test_a_golden_file_says_how_it_is_read(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    ran = ckptbridge("verify", made / "hf", "--golden", tmp_path / "a", "--length", "8", "--dtype", "float32")
    assert "--golden a --dtype float32'" in ran.out
    ran = ckptbridge("verify", made / "hf", "--golden", tmp_path / "b", "--length", "8", "--json")
    assert json.loads(ran.out) == {"golden": str(tmp_path / "b"), "dtype": "float64"}


def test_a_golden_file_that_no_digest_places_is_doubted(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    assert ckptbridge("convert", "pt2ms", made / "hf", tmp_path / "m.ckpt", "--digest", "sha256").code == 0
    (tmp_path / "deep" / "er" / "away").mkdir(parents=True)
    (tmp_path / "m.ckpt").rename(tmp_path / "deep" / "er" / "away" / "m.ckpt")
    assert ckptbridge("verify", made / "hf", "--golden", tmp_path / "g", "--length", "8").code == 0
    ran = ckptbridge("verify", tmp_path / "deep" / "er" / "away" / "m.ckpt", "--golden", tmp_path / "g")
    assert ran.code == 0 and "No digest tells" in ran.out


def test_a_tolerance_that_the_type_does_not_reach_is_told(made: Path, ckptbridge: Command) -> None:
    ran = ckptbridge("verify", made / "m.ckpt", "--level", "forward", "--dtype", "float32", "--atol", "1e-9")
    assert ran.code == 0 and "which correct kernels in float32 do not reach" in ran.out


def test_a_mistyped_golden_file_is_named(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    shutil.copy(made / "m.ckpt", tmp_path / "m.ckpt")
    expect_2(ckptbridge("verify", tmp_path / "m.ckpt", "--golden", tmp_path / "run.golden"), "no such golden file")


def test_a_golden_file_made_beside_a_judgement_is_told(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    golden = tmp_path / "run.golden"
    ran = ckptbridge("verify", made / "m.ckpt", "--golden", golden, "--length", "8")
    assert ran.code == 0 and "written to the golden file" in ran.out and golden.exists()


# --- what was declared, and what was recorded ------------------------------------------------


def test_a_declared_cast_is_told(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    assert ckptbridge("convert", "pt2ms", made / "hf", tmp_path / "half.ckpt", "--dtype", "bfloat16").code == 0
    ran = ckptbridge("verify", made / "hf", tmp_path / "half.ckpt", "--length", "8")
    assert "19 of 19 tensors equal bit for bit, 19 of them after cast float32 -> bfloat16" in ran.out
    assert "declares a lossy step, cast float32 -> bfloat16" in ran.out
    assert ran.code == 1  # the logits are not those of float32
    differs = ckptbridge("diff", made / "hf", tmp_path / "half.ckpt", "--through-table")
    assert differs.code == 1 and "19 of other dtype" in differs.out and "no cast is declared" not in differs.out
    assert ckptbridge("diff", made / "hf", made / "m.ckpt", "--through-table").code == 0


def test_the_config_of_the_conversion_is_the_one_that_is_judged_by(
    made: Path, tmp_path: Path, ckptbridge: Command
) -> None:
    """It need not lie beside the weights, and may be another than the one that does."""
    shutil.copytree(made / "hf", tmp_path / "hf")
    config = (tmp_path / "hf" / "config.json").rename(tmp_path / "mine.json")
    line = ("convert", "pt2ms", tmp_path / "hf", tmp_path / "m.ckpt", "--config", config)
    assert ckptbridge(*line).code == 0
    config.unlink()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for line in (
        ("verify", tmp_path / "m.ckpt", "--level", "weights"),
        ("verify", tmp_path / "hf", tmp_path / "m.ckpt", "--length", "8"),
        ("diff", tmp_path / "hf", tmp_path / "m.ckpt", "--through-table"),
    ):
        ran = ckptbridge(*line)
        assert ran.code == 0, ran.out + ran.err


def test_a_config_beside_the_weights_that_is_another_is_noted(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    shutil.copytree(made / "hf", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    line = ("convert", "pt2ms", tmp_path / "hf", tmp_path / "m.ckpt", "--config", made / "hf" / "config.json")
    assert ckptbridge(*line).code == 0
    ran = ckptbridge("verify", tmp_path / "hf", tmp_path / "m.ckpt", "--level", "weights")
    assert ran.code == 0 and "differs in: rms_norm_eps" in ran.out
    # A golden file of the config beside is that of another network.
    assert ckptbridge("verify", tmp_path / "hf", "--golden", tmp_path / "g", "--length", "8").code == 0
    expect_2(ckptbridge("verify", tmp_path / "m.ckpt", "--golden", tmp_path / "g"), "another config", "rms_norm_eps")


def test_options_against_the_provenance_are_refused(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    made_of = ("convert", "pt2ms", made / "hf", tmp_path / "c.ckpt")
    assert ckptbridge(*made_of, "--layout", "attention=contiguous", "--layout", "mlp=contiguous").code == 0
    for command in (("verify", "--level", "weights"), ("diff", "--through-table")):
        line = (*command, made / "hf", tmp_path / "c.ckpt")
        assert ckptbridge(*line, "--target", "mindformers").code == 0  # the layout is still the recorded one
        expect_2(ckptbridge(*line, "--layout", "attention=interleaved"), "The provenance says attention=contiguous")
        expect_2(ckptbridge(*line, "--target", "hf"), "The provenance says the table qwen3/mindformers")


def test_a_way_back_from_a_bare_checkpoint_is_judged_by_its_own_record(
    made: Path, tmp_path: Path, ckptbridge: Command
) -> None:
    """As MindSpore saves it: without provenance; what ms2pt wrote of it says how."""
    loaded = mindspore.load_checkpoint(str(made / "m.ckpt"))
    loaded.pop("append_info")
    tensors = [{"name": name, "data": parameter} for name, parameter in loaded.items()]
    mindspore.save_checkpoint(tensors, str(tmp_path / "trained.ckpt"))
    line = ("convert", "ms2pt", tmp_path / "trained.ckpt", tmp_path / "back", "--target", "mindformers")
    assert ckptbridge(*line, "--config", made / "hf" / "config.json").code == 0
    for paths in ((tmp_path / "back", tmp_path / "trained.ckpt"), (tmp_path / "back",)):
        ran = ckptbridge("verify", *paths, "--length", "8")
        assert ran.code == 0, ran.out + ran.err
    ran = ckptbridge("diff", tmp_path / "back", tmp_path / "trained.ckpt", "--through-table")
    assert ran.code == 0, ran.out + ran.err


def test_two_of_one_side_are_told(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    for level in ("weights", "all"):
        expect_2(ckptbridge("verify", made / "hf", made / "hf", "--level", level), "Both checkpoints are PyTorch's")
    expect_2(ckptbridge("diff", made / "hf", made / "hf", "--through-table"), "Both checkpoints are PyTorch's")
    expect_2(ckptbridge("verify", made / "m.ckpt", made / "m.ckpt"), "Both checkpoints are MindSpore's", "diff")


def test_a_way_back_is_told_by_the_names_that_it_wrote(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    assert ckptbridge("convert", "ms2pt", made / "m.ckpt", tmp_path / "back").code == 0
    state = load_file(tmp_path / "back" / "model.safetensors")
    state["model.layers.1.self_attn.k_proj.weight"][2, 5] += 1
    save_file(state, tmp_path / "back" / "model.safetensors", {"format": "pt"})
    (tmp_path / "back" / "ckptbridge.json").touch()
    ran = ckptbridge("verify", tmp_path / "back", made / "m.ckpt", "--level", "weights", "--json")
    assert ran.code == 1
    (wrong,) = [t for t in json.loads(ran.out)["weights"]["tensors"] if t["status"] == "differs"]
    assert wrong["name"] == "model.layers.1.self_attn.k_proj.weight"
    assert wrong["sources"] == ["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert (wrong["elements"], wrong["differing"], wrong["first_difference"]) == (24 * 32, 1, [2, 5])


# --- options and reports ---------------------------------------------------------------------


def test_options_that_would_be_given_in_vain(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    line = ("verify", made / "hf", made / "m.ckpt")
    expect_2(ckptbridge(*line, "--level", "weights", "--prove"), "--prove is of the logits")
    expect_2(ckptbridge(*line, "--level", "weights", "--golden", tmp_path / "g"), "--golden is of the logits")
    (tmp_path / "tokens.json").write_text("[1, 2, 3]")
    expect_2(ckptbridge(*line, "--tokens", tmp_path / "tokens.json", "--length", "5"), "--tokens says which")
    expect_2(ckptbridge(*line, "--device", "cuda"), "cannot use the device 'cuda'", "--device cpu")
    expect_2(ckptbridge(*line, "--device", "abacus"), "cannot use the device 'abacus'")


def test_no_report_tells_of_an_earlier_run(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    reports = {name: tmp_path / f"verify.{name}" for name in ("report", "junit", "html")}
    options = [part for name, path in reports.items() for part in (f"--{name}", path)]
    assert ckptbridge("verify", made / "hf", made / "m.ckpt", "--level", "weights", *options).code == 0
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes((made / "m.ckpt").read_bytes()[:5000])
    expect_2(ckptbridge("verify", made / "hf", cut, "--level", "weights", *options), "cut.ckpt")
    data = json.loads(reports["report"].read_text())
    assert (data["verdict"], data["exit_code"]) == ("unjudged", 2) and "cut.ckpt" in data["reason"]
    assert ET.parse(reports["junit"]).getroot().get("errors") == "1"
    assert "cut.ckpt" in reports["html"].read_text()


def test_a_report_that_cannot_be_written_is_told_before_the_work(made: Path, ckptbridge: Command) -> None:
    ran = ckptbridge("verify", made / "hf", made / "m.ckpt", "--report", made / "none" / "verify.json")
    expect_2(ran, "The report cannot be written")
    assert ran.err.startswith("error: ")  # nothing was understood before it


def test_a_report_replaces_nothing_but_a_report(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    shutil.copy(made / "m.ckpt", tmp_path / "m.ckpt")
    shutil.copytree(made / "hf", tmp_path / "hf")
    (tmp_path / "tokens.json").write_text("[1, 2, 3]")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for option in ("--report", "--junit", "--html"):
        for victim in ("m.ckpt", "hf/config.json", "hf/model.safetensors", "tokens.json"):
            ran = ckptbridge("verify", tmp_path / "hf", tmp_path / "m.ckpt", option, tmp_path / victim)
            expect_2(ran, "no verify has written", option)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    line = ("verify", tmp_path / "hf", tmp_path / "m.ckpt", "--level", "weights")
    one = tmp_path / "verify.out"
    expect_2(ckptbridge(*line, "--report", one, "--junit", tmp_path / "hf" / ".." / "verify.out"), "name one file")
    for option in ("--report", "--junit", "--html"):
        assert ckptbridge(*line, option, one).code == 0
        assert ckptbridge(*line, option, one).code == 0
        one.unlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "m.ckpt", "tokens.json"]


def test_options_in_vain_are_in_the_reports_too(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    report = tmp_path / "verify.xml"
    expect_2(ckptbridge("verify", made / "m.ckpt", "--level", "weights", "--prove", "--junit", report), "--prove")
    assert ET.parse(report).getroot().get("errors") == "1"
    nowhere = tmp_path / "none" / "verify.html"
    expect_2(ckptbridge("verify", made / "m.ckpt", "--junit", report, "--html", nowhere), "cannot be written")
    assert "cannot be written" in report.read_text()


def test_a_verify_that_is_stopped_says_so(made: Path, tmp_path: Path) -> None:
    """Whenever it is stopped: while libraries are imported, and while MindSpore computes."""
    report = tmp_path / "verify.json"
    line = [sys.executable, "-m", "ckptbridge", "verify", str(made / "hf"), str(made / "m.ckpt"), "--batch", "60"]
    for number, seconds in ((signal.SIGINT, 0.8), (signal.SIGTERM, 1.6), (signal.SIGINT, 2.6), (signal.SIGTERM, 4.0)):
        process = subprocess.Popen(
            [*line, "--report", str(report)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        time.sleep(seconds)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        if process.returncode in (0, 1) and seconds > 1:
            continue  # it was faster
        assert process.returncode == 128 + number, err
        assert f"Stopped by {number.name}" in err and "not foreseen" not in err
        if report.exists():
            assert f"Stopped by {number.name}" in json.loads(report.read_text())["reason"]


def test_a_library_that_a_signal_stops_while_it_is_imported_is_not_called_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What MindSpore then raises is "initialization failed": an ImportError, told as a backend that is not usable."""
    broken, output = BackendError("MindSpore cannot be imported: initialization failed"), OutputError("A full disk.")
    assert main.as_ours(broken) is broken
    monkeypatch.setattr(main, "_asked", [(0.0, signal.SIGTERM)])
    assert main.as_ours(broken).exit_code == main.as_ours(ImportError("no")).exit_code == 128 + signal.SIGTERM
    assert main.as_ours(output) is output


def test_nan_on_both_sides_passes_at_no_tolerance(made: Path, tmp_path: Path, ckptbridge: Command) -> None:
    shutil.copytree(made / "hf", tmp_path / "hf")
    state = load_file(tmp_path / "hf" / "model.safetensors")
    state["model.norm.weight"][0] = np.nan
    save_file(state, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    assert ckptbridge("convert", "pt2ms", tmp_path / "hf", tmp_path / "m.ckpt").code == 0
    ran = ckptbridge("verify", tmp_path / "hf", tmp_path / "m.ckpt", "--length", "8")
    assert ran.code == 1 and "no atol passes" in ran.out and "--equal-nan" in ran.out
    equal = ckptbridge("verify", tmp_path / "hf", tmp_path / "m.ckpt", "--length", "8", "--equal-nan")
    assert equal.code == 0 and "smallest atol that passes" in equal.out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_output_is_no_surprise(made: Path) -> None:
    line = f"'{sys.executable}' -m ckptbridge verify '{made}/m.ckpt' --level weights > /dev/full"
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "No space left on device" in ran.stderr and "not foreseen" not in ran.stderr
