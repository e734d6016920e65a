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
from ckptbridge.verification.handoff import Overrides
from ckptbridge.verification.options import ForwardOptions
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
QWEN3_MOE: Config = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 14,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
# One dense layer and two with experts; the router chooses as transformers' does (4 // 2 = 2 a group).
DEEPSEEK_V3: Config = {
    **SMALL,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 6,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 14,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 12,
    "rope_interleave": True,
    "num_nextn_predict_layers": 0,
}
YARN: Config = {
    "max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.8,
    },
}
LAYOUTS = [(a, b) for a in ("interleaved", "contiguous") for b in ("interleaved", "contiguous")]
THEIRS = ForwardOptions(dtype="float32", ms_net="mindformers", length=24, batch=2)


def made(
    folder: Path, config: Config, target: str, dtype: str | None = None, lowest: float = 0.0, **layout: str
) -> tuple[Path, Path]:
    """A random transformers model (all parameters, norms too), and its conversion.

    ``lowest``: the routers' biases lie between this and 1 above it.
    """
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else noise * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(lowest + torch.rand_like(buffer))
    if dtype is not None:
        model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder / "hf")
    ckptbridge.convert(folder / "hf", folder / "ms.ckpt", direction="pt2ms", target=target, layout=layout)
    return folder / "hf", folder / "ms.ckpt"


def judged(paths: tuple[Path, Path], options: ForwardOptions = THEIRS, **layout: str) -> ForwardSection:
    report = run_verify(paths, "forward", Overrides(layout=layout), options)
    assert report.forward is not None
    assert any("stand-ins" in note for note in report.notes) is (options.ms_net == "mindformers")
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


# --- experts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["interleaved", "contiguous"])
def test_qwen3_moe(tmp_path: Path, attention: str) -> None:
    paths = made(tmp_path, QWEN3_MOE, "mindformers", attention=attention)
    assert_holds(judged(paths))
    assert_holds(judged(paths, replace(THEIRS, ms_net=None)))


def test_qwen3_moe_without_normalised_weights(tmp_path: Path) -> None:
    assert_holds(judged(made(tmp_path, QWEN3_MOE | {"norm_topk_prob": False}, "mindformers")))


def test_qwen3_moe_read_in_another_layout(tmp_path: Path) -> None:
    paths = made(tmp_path, QWEN3_MOE, "mindformers", attention="contiguous")
    assert_fails(judged(paths, THEIRS, attention="interleaved"))


@pytest.mark.parametrize("change", [{}, {"q_lora_rank": None}, YARN], ids=["plain", "no q-lora", "yarn"])
@pytest.mark.parametrize("mla", ["separate", "fused"])
def test_deepseek_v3(tmp_path: Path, mla: str, change: Config) -> None:
    paths = made(tmp_path, DEEPSEEK_V3 | change, "mindformers", mla=mla)
    section = judged(paths)
    assert_holds(section)
    assert section.hints == ()
    assert_holds(judged(paths, replace(THEIRS, ms_net=None)))


def test_deepseek_v3_with_contiguous_mlp(tmp_path: Path) -> None:
    """Dense layer and shared experts; the routed ones have one order only."""
    paths = made(tmp_path, DEEPSEEK_V3, "mindformers", mlp="contiguous")
    assert_holds(judged(paths))
    assert_fails(judged(paths, THEIRS, mlp="interleaved"))


@pytest.mark.parametrize(
    ("change", "lowest", "hint"),
    [
        ({"num_experts_per_tok": 2}, 0.0, "best 1"),
        ({"n_group": 2, "n_routed_experts": 8, "topk_group": 1, "num_experts_per_tok": 2}, -3.0, "minus infinity"),
    ],
    ids=["group score", "masked groups"],
)
def test_deepseek_v3_networks_differ_on_right_weights(tmp_path: Path, change: Config, lowest: float, hint: str) -> None:
    """The logits differ, the report says why, and with our own network the same checkpoint holds."""
    paths = made(tmp_path, DEEPSEEK_V3 | change, "mindformers", lowest=lowest)
    section = judged(paths)
    assert_fails(section)
    assert [hint in found and "the weights are right" in found for found in section.hints] == [True]
    assert_holds(judged(paths, replace(THEIRS, ms_net=None)))


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


@pytest.mark.parametrize(
    ("config", "layout", "reason"),
    [
        (QWEN3_MOE, {"experts": "3d"}, "two dimensions"),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, {}, "in every layer"),
        (QWEN3 | {"attention_bias": True}, {}, "no bias in the attention's output"),
        (DEEPSEEK_V3 | {"rope_interleave": False}, {}, "neighbouring"),
        (LLAMA | {"head_dim": 10}, {}, "hidden_size / heads"),
        (LLAMA | {"hidden_act": "gelu"}, {}, "activation 'gelu'"),
        (LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, {}, "RoPE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_their_network_would_compute_otherwise(
    tmp_path: Path, config: Config, layout: dict[str, str], reason: str
) -> None:
    target = "mindformers-legacy" if config["model_type"] == "llama" else "mindformers"
    with pytest.raises(UnsupportedError, match=reason):
        judged(made(tmp_path, config, target, **layout))


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
