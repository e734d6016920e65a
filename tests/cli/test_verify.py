"""``ckptbridge verify`` as CI sees it: exit codes, reports on disk, and what it says of bad input."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

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
    expect_2(ckptbridge("verify", made / "other", made / "m.ckpt", "--level", "weights"), "other shapes", "config")
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
    strict = ckptbridge("verify", "activations", "--atol", "1e-7")
    assert strict.code == 1 and "tanh" in strict.out
