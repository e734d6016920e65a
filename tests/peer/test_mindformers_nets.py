"""MindFormers' own networks judge converted checkpoints: ``--ms-net mindformers``.

The oracle is independent of this project: transformers computes one side and MindFormers the other.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ckptbridge
from ckptbridge.errors import CoverageError, UnsupportedError, UsageError
from ckptbridge.verification.forward import ForwardOptions
from ckptbridge.verification.handoff import Overrides
from ckptbridge.verification.report import ForwardSection
from ckptbridge.verification.session import run_verify

Config = dict[str, Any]

SMALL: Config = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
LLAMA: Config = {"model_type": "llama", **SMALL}
QWEN3: Config = {"model_type": "qwen3", "head_dim": 10, **SMALL}
LAYOUTS = [(a, b) for a in ("interleaved", "contiguous") for b in ("interleaved", "contiguous")]
THEIRS = ForwardOptions(dtype="float32", ms_net="mindformers", length=24, batch=2)


def made(folder: Path, config: Config, target: str, dtype: str | None = None, **layout: str) -> tuple[Path, Path]:
    """A random transformers model (all parameters, norms too), and its conversion."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else noise * parameter.shape[-1] ** -0.5)
    if dtype is not None:
        model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder / "hf")
    ckptbridge.convert(folder / "hf", folder / "ms.ckpt", direction="pt2ms", target=target, layout=layout)
    return folder / "hf", folder / "ms.ckpt"


def judged(paths: tuple[Path, Path], options: ForwardOptions = THEIRS, **layout: str) -> ForwardSection:
    report = run_verify(paths, "forward", Overrides(layout=layout), options)
    assert report.forward is not None
    return report.forward


def assert_holds(section: ForwardSection) -> None:
    """Within the noise that the PyTorch side measures on itself (1e-6), far under the tolerance."""
    print(f"measured: {section.metrics.max_abs:.1e}")
    assert section.verdict == "holds"
    assert 0.0 < section.metrics.max_abs < 2e-5
    assert section.repeatable == {"PyTorch": True, "MindSpore": True}


def assert_fails(section: ForwardSection) -> None:
    print(f"measured: {section.metrics.max_abs:.1e}")
    assert section.verdict == "fails"
    assert section.metrics.max_abs > 0.5


# --- legacy Llama ----------------------------------------------------------------------------


def test_legacy_llama(tmp_path: Path) -> None:
    paths = made(tmp_path, LLAMA, "mindformers-legacy")
    assert_holds(judged(paths))
    assert_holds(judged(paths, replace(THEIRS, ms_net=None)))


@pytest.mark.parametrize("change", [{"attention_bias": True}, {"tie_word_embeddings": True}], ids=str)
def test_legacy_llama_variants(tmp_path: Path, change: Config) -> None:
    assert_holds(judged(made(tmp_path, LLAMA | change, "mindformers-legacy")))


def test_a_checkpoint_in_bfloat16(tmp_path: Path) -> None:
    """Loaded in its own dtype and cast then, on both sides."""
    assert_holds(judged(made(tmp_path, LLAMA, "mindformers-legacy", dtype="bfloat16")))


def test_other_epsilon_is_noticed(tmp_path: Path) -> None:
    pt, ms = made(tmp_path, LLAMA | {"rms_norm_eps": 1e-2}, "mindformers-legacy")
    assert_holds(judged((pt, ms)))
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads((pt / "config.json").read_text()) | {"rms_norm_eps": 1e-6}))
    golden = replace(THEIRS, golden=tmp_path / "run.golden")
    run_verify((pt,), "forward", Overrides(target="mindformers-legacy"), golden)
    report = run_verify((ms,), "forward", Overrides(config=other), golden)
    assert report.forward is not None
    assert report.forward.verdict == "fails"


# --- Qwen3 -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("attention", "mlp"), LAYOUTS)
def test_qwen3(tmp_path: Path, attention: str, mlp: str) -> None:
    paths = made(tmp_path, QWEN3, "mindformers", attention=attention, mlp=mlp)
    assert_holds(judged(paths))
    assert_holds(judged(paths, replace(THEIRS, ms_net=None)))


@pytest.mark.parametrize("changed", [{"attention": "interleaved"}, {"mlp": "interleaved"}], ids=str)
def test_qwen3_read_in_another_layout(tmp_path: Path, changed: dict[str, str]) -> None:
    """All shapes fit, nothing is missing, and the numbers are wrong: with their network and with ours."""
    paths = made(tmp_path, QWEN3, "mindformers", attention="contiguous", mlp="contiguous")
    assert_fails(judged(paths, THEIRS, **changed))
    assert_fails(judged(paths, replace(THEIRS, ms_net=None), **changed))


def test_tied_qwen3(tmp_path: Path) -> None:
    assert_holds(judged(made(tmp_path, QWEN3 | {"tie_word_embeddings": True}, "mindformers")))


# --- what is refused -------------------------------------------------------------------------


def test_what_does_not_go_together(tmp_path: Path) -> None:
    paths = made(tmp_path, QWEN3, "mindformers")
    with pytest.raises(UsageError, match="float64 is asked for"):
        judged(paths, replace(THEIRS, dtype="float64"))
    with pytest.raises(UsageError, match="--prove"):
        judged(paths, replace(THEIRS, prove=True))
    folder = tmp_path / "llama"
    folder.mkdir()
    with pytest.raises(UnsupportedError, match="'llama' and target 'mindformers'") as caught:
        judged(made(folder, LLAMA, "mindformers"))
    assert "llama (mindformers-legacy), qwen3 (mindformers)" in caught.value.remedy


def test_missing_tensors_are_fatal(tmp_path: Path) -> None:
    """A tied checkpoint has no head; read as untied, MindSpore itself would go on with a random one."""
    pt, ms = made(tmp_path, QWEN3 | {"tie_word_embeddings": True}, "mindformers")
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads((pt / "config.json").read_text()) | {"tie_word_embeddings": False}))
    golden = replace(THEIRS, golden=tmp_path / "run.golden")
    run_verify((pt,), "forward", Overrides(), golden)
    with pytest.raises(CoverageError, match=r"output_layer\.weight missing"):
        run_verify((ms,), "forward", Overrides(config=other), golden)


def test_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No line on standard output but the report's, no log files, no changed switch, no stand-in."""
    from mindformers.core.context.build_context import is_legacy_model
    from mindspore.ops.auto_generate import RmsNorm

    before = is_legacy_model(), RmsNorm.__call__, os.environ.get("LOG_MF_PATH")
    paths = made(tmp_path, QWEN3, "mindformers")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    capfd.readouterr()
    judged(paths)
    assert capfd.readouterr().out == ""
    assert list(work.iterdir()) == []
    assert (is_legacy_model(), RmsNorm.__call__, os.environ.get("LOG_MF_PATH")) == before
