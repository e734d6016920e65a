"""Reports from a small residual network in NumPy, computed twice with different summation orders, and with a fault.

Run as a program it writes the two pages that scripts/screenshot.sh is for:
    python tests/verification/sample_reports.py DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from ckptbridge.verification.activations import hints
from ckptbridge.verification.metrics import compare, compare_logits
from ckptbridge.verification.numerics import Action
from ckptbridge.verification.report import (
    ControlResult,
    Environment,
    ForwardSection,
    StageResult,
    TensorResult,
    VerifyReport,
    WeightsSection,
    forward_section,
    stage_noise,
    weights_section,
)

LAYERS, HIDDEN, VOCABULARY, TOKENS = 12, 32, 96, 64
QKV = "decoder.layers.{}.self_attention.linear_qkv.weight"
FC1 = "decoder.layers.{}.mlp.linear_fc1.weight"


def forward(reordered: bool, fault_in: int | None = None) -> dict[str, np.ndarray]:
    """The stages of the network; ``reordered`` sums in another order, as another framework would."""
    rng = np.random.default_rng(0)

    def product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        if reordered:
            return np.asarray(sum(x[:, k : k + 1] * w[k] for k in reversed(range(w.shape[0]))))
        return x @ w

    x = rng.standard_normal((TOKENS, HIDDEN))
    stages = {"embedding": x}
    for layer in range(LAYERS):
        for part in ("attention", "mlp"):
            w = rng.standard_normal((HIDDEN, HIDDEN)) / np.sqrt(HIDDEN)
            if layer == fault_in and part == "attention":
                w = w[:, np.r_[HIDDEN // 2 : HIDDEN, : HIDDEN // 2]]
            stages[f"layers.{layer}.{part}"] = update = product(np.tanh(x), w)
            x = x + update
        stages[f"layers.{layer}"] = x
    stages["final_norm"] = x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    stages["logits"] = product(x, rng.standard_normal((HIDDEN, VOCABULARY)))
    return stages


def feeds(stage: str) -> tuple[str, ...]:
    layer = stage.split(".")[1] if stage.startswith("layers.") else ""
    if stage.endswith("attention"):
        return (f"decoder.layers.{layer}.input_layernorm.weight", QKV.format(layer))
    if stage.endswith("mlp"):
        return (f"decoder.layers.{layer}.pre_mlp_layernorm.weight", FC1.format(layer))
    return {"embedding": ("embedding.word_embeddings.weight",), "logits": ("output_layer.weight",)}.get(stage, ())


def sample_forward(fault_in: int | None = None, atol: float = 1e-5) -> ForwardSection:
    judged, reference = forward(True, fault_in), forward(False)
    stages = []
    for name in reference:
        m = compare(judged[name], reference[name], atol=atol)
        stages.append(StageResult(name, m, stage_noise("float64", m), feeds(name)))
    bad = next((s for s in stages if not s.quiet), None)
    return forward_section(
        dtype="float64",
        tokens="2 x 32 tokens, seed 0",
        metrics=compare_logits(judged["logits"], reference["logits"], atol=atol),
        atol=atol,
        stages=stages,
        repeatable={"PyTorch": True, "MindSpore": True},
        hints=hints(bad.name, bad.metrics.max_abs) if bad else (),
    )


def sample_weights(fault_in: int | None = None) -> WeightsSection:
    tensors = [
        TensorResult(
            "embedding.word_embeddings.weight",
            ("model.embed_tokens.weight",),
            "equal",
            "bfloat16",
            (151936, 1024),
            155582464,
        )
    ]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        sources = tuple(f"{at}self_attn.{p}_proj.weight" for p in "qkv")
        wrong = layer == fault_in
        tensors.append(
            TensorResult(
                QKV.format(layer),
                sources,
                "differs" if wrong else "equal",
                "bfloat16",
                (4096, 1024),
                4194304,
                differing=2093056 if wrong else 0,
                first_difference=(256, 0) if wrong else None,
                max_abs=0.3125 if wrong else None,
            )
        )
        sources = tuple(f"{at}mlp.{p}_proj.weight" for p in ("gate", "up"))
        tensors.append(TensorResult(FC1.format(layer), sources, "equal", "bfloat16", (6144, 1024), 6291456))
    if fault_in is not None:
        tensors.append(
            TensorResult("output_layer.weight", ("lm_head.weight",), "missing", note="the .ckpt has no such record")
        )
    tensors.append(
        TensorResult(
            "", ("model.rotary_emb.inv_freq",), "dropped", "float32", (64,), 64, note="recomputed from the config"
        )
    )
    digest = "5f0c1f0e6f1c9a4be2f0b7f0d1f7c8be0a4d7a14c2f3b5d69a0f3c1e8d2b7a60"
    other = digest if fault_in is None else digest[::-1]
    return weights_section(tensors, {"PyTorch": digest, "MindSpore": other})


CONTROLS = (
    ControlResult("K and V exchanged", QKV.format(0), True, 4.1),
    ControlResult("rows of one group shifted", QKV.format(5), True, 2.3),
    ControlResult("gate and up exchanged", FC1.format(0), True, 2.9),
    ControlResult("one flipped mantissa bit", "output_layer.weight", True, 3.1e-3, "bit 12 of element [17, 3]"),
    ControlResult("RMSNorm eps 1e-5 for 1e-6", "decoder.final_layernorm.weight", True, 4.0e-2),
)
ACTIONS = (
    Action("MS_ASCEND_CHECK_OVERFLOW_MODE", "unset", "INFNAN_MODE", True, "INF and NaN stay, instead of 65504 and 0"),
    Action("CUBLAS_WORKSPACE_CONFIG", "unset", ":4096:8", True, "read at the first CUDA operation"),
    Action("torch.use_deterministic_algorithms", "False", "True", True),
    Action("torch SiLU", "the backend's kernel", "x * sigmoid(x)", True, "torch.nn.functional.silu; in 3 places"),
    Action(
        "mindspore.device_context.ascend.op_precision.matmul_allow_hf32", "unknown", "False", False, "no HF32 on CPU"
    ),
)


def sample_report(fault_in: int | None = None, hole: bool = False) -> VerifyReport:
    hole_control = ControlResult("one expert's transpose", "decoder.layers.1.mlp.experts.weight1", False, 0.0)
    return VerifyReport(
        pytorch="Qwen3-0.6B (safetensors, 1 file)",
        mindspore="out/qwen3-0.6b.ckpt (ckpt, target mindformers)",
        weights=sample_weights(fault_in),
        forward=sample_forward(fault_in),
        controls=() if fault_in is not None else CONTROLS + ((hole_control,) if hole else ()),
        actions=ACTIONS,
        environment=Environment(
            versions={"torch": "2.13.0", "mindspore": "2.10.0", "transformers": "5.24.0", "numpy": "1.26.4"},
            devices={"PyTorch": "cpu", "MindSpore": "CPU"},
            platform="Linux x86_64, Python 3.11.7",
            command="ckptbridge verify --atol 1e-5 --prove",
        ),
        provenance={
            "direction": "pt2ms",
            "table": "qwen3",
            "target": "mindformers",
            "layout": {"attention": "interleaved", "mlp": "interleaved"},
            "user": {"run": "sft-2"},
            "version": "0.1.0",
        },
        tool="ckptbridge 0.1.0",
    )


if __name__ == "__main__":
    from ckptbridge.verification.report_html import to_html
    from ckptbridge.verification.report_text import render_text

    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, report in (
        ("pass", sample_report()),
        ("fail", sample_report(fault_in=7)),
        ("hole", sample_report(hole=True)),
    ):
        (directory / f"{name}.html").write_text(to_html(report), encoding="utf-8")
        print(render_text(report), end="\n\n")
