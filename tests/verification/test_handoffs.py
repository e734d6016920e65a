"""Whole handoffs of tiny models: converted through the tables, judged on both backends, and broken on purpose.

The tables and the MindSpore networks were written apart and meet only here, in the logits.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nets_oracle import MODELS, save_model

import ckptbridge
from ckptbridge import CkptBridgeError
from ckptbridge.tables import catalog
from ckptbridge.verification.handoff import Overrides
from ckptbridge.verification.options import ForwardOptions
from ckptbridge.verification.report import VerifyReport
from ckptbridge.verification.session import run_verify

LENGTH = 40
# transformers leaves multi-token prediction layers out when it saves, and keeps their number in the config.
NO_MTP = {"num_nextn_predict_layers": 0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of transformers, made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name) / "hf"
            config = save_model(name, folder)
            if "num_nextn_predict_layers" in config:
                (folder / "config.json").write_text(json.dumps({**config, **NO_MTP}))
            made[name] = folder
        return made[name]

    return get


def judge(*paths: Path, level: str = "all", **options: Any) -> VerifyReport:
    report = run_verify(paths, level, Overrides(), ForwardOptions(length=LENGTH, **options))  # type: ignore[arg-type]
    assert isinstance(report, VerifyReport)
    return report


def largest(report: VerifyReport) -> float:
    assert report.forward is not None and report.forward.metrics is not None
    return report.forward.metrics.max_abs


def variants(name: str) -> list[tuple[str, dict[str, str]]]:
    """For each target of a model's family: the default layout, and the one furthest from it."""
    family = {"llama-biased": "llama", "deepseek_v3-plain": "deepseek_v3"}.get(name, name.partition("-")[0])
    found = []
    for target in catalog.targets(family):
        options = catalog.find(family, target).layout
        for pick in (0, -1):
            layout = {key: values[pick] for key, values in options.items()}
            if (target, layout) not in found:
                found.append((target, layout))
    return found


CASES = [
    (name, target, layout)
    for name in sorted(MODELS)
    if name not in ("glm", "llama-dynamic", "llama-linear", "phi3-long", "qwen2-window", "gpt_neox-serial")
    for target, layout in variants(name)
    # No network of MindFormers has these biases: on the older MLP, and in latent attention.
    if (name, target) not in {("llama-biased", "mindformers-legacy"), ("deepseek_v3", "mindformers")}
]
IDS = ["-".join([name, target, *layout.values()]) for name, target, layout in CASES]


@pytest.mark.parametrize(("name", "target", "layout"), CASES, ids=IDS)
def test_a_right_handoff_holds_with_room(
    name: str, target: str, layout: dict[str, str], saved: Callable[[str], Path], tmp_path: Path
) -> None:
    hf = saved(name)
    ckptbridge.convert(hf, tmp_path / "m.ckpt", direction="pt2ms", target=target, layout=layout)
    report = judge(hf, tmp_path / "m.ckpt")
    assert report.verdict == "holds", report.reason
    assert largest(report) < 1e-9
    assert report.forward is not None
    assert report.forward.repeatable == {"PyTorch": True, "MindSpore": True}
    assert [s for s in report.forward.stages if not s.quiet] == []


@pytest.mark.parametrize(
    ("name", "target", "layout", "expected"),
    [
        ("qwen3", "mindformers", {}, {"K and V exchanged", "gate and up exchanged", "one group's rows shifted"}),
        ("llama", "mindformers-legacy", {}, {"K and V exchanged", "gate and up exchanged", "one group's rows shifted"}),
        ("qwen3_moe", "mindformers", {}, {"K and V exchanged", "one expert not transposed"}),
        ("deepseek_v3-plain", "mindformers", {"mla": "fused"}, {"one expert not transposed", "gate and up exchanged"}),
    ],
)
def test_every_seeded_fault_turns_the_verdict_by_three_orders_of_magnitude(
    name: str, target: str, layout: dict[str, str], expected: set[str], saved: Callable[[str], Path], tmp_path: Path
) -> None:
    hf = saved(name)
    ckptbridge.convert(hf, tmp_path / "m.ckpt", direction="pt2ms", target=target, layout=layout)
    report = judge(hf, tmp_path / "m.ckpt", prove=True)
    assert report.verdict == "holds", report.reason
    assert expected <= {c.fault for c in report.controls}
    assert any(c.fault.startswith("norm epsilon") for c in report.controls)
    assert any(c.fault == "one mantissa bit flipped" for c in report.controls)
    for control in report.controls:
        assert control.caught, control
        assert control.max_abs is not None and control.max_abs > 1e3 * max(largest(report), 1e-12), control


def test_faults_are_seeded_in_bfloat16_weights_too(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Published language models are bfloat16, a type without a buffer format of its own."""
    hf = saved("qwen3_moe")
    ckptbridge.convert(hf, tmp_path / "m.ckpt", direction="pt2ms", dtype="bfloat16")
    ckptbridge.convert(tmp_path / "m.ckpt", tmp_path / "half", direction="ms2pt")
    report = judge(tmp_path / "half", tmp_path / "m.ckpt", prove=True)
    assert report.verdict == "holds", report.reason
    assert len(report.controls) >= 5 and all(c.caught for c in report.controls)


def with_layout(saved_to: Path, hf: Path, **layout: str) -> Path:
    ckptbridge.convert(hf, saved_to, direction="pt2ms", target="mindformers", layout=layout)
    return saved_to


def test_rows_in_the_wrong_order_are_found_where_they_first_matter(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """A checkpoint whose layout is not the one that it claims: same names, same shapes, wrong rows."""
    hf = saved("qwen3")
    wrong = with_layout(tmp_path / "wrong.ckpt", hf, attention="contiguous")
    report = run_verify(
        (hf, wrong),
        "all",
        Overrides(target="mindformers", layout={"attention": "interleaved"}, config=hf / "config.json"),
        ForwardOptions(length=LENGTH),
    )
    assert isinstance(report, VerifyReport)
    assert report.verdict == "fails" and report.exit_code == 1
    assert report.forward is not None and report.weights is not None
    assert report.forward.first_bad == "layers.0.attention"
    assert "layer 0" in report.forward.message and "linear_qkv" in report.forward.message
    differing = {t.name for t in report.weights.tensors if t.status == "differs"}
    assert differing and all("linear_qkv" in name for name in differing)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A .ckpt with some tensors changed, written by MindSpore itself; the provenance stays."""
    import mindspore as ms

    loaded = ms.load_checkpoint(str(path))
    info = loaded.pop("append_info")
    arrays = {name: np.array(value.asnumpy()) for name, value in loaded.items()}
    change(arrays)
    out = path.with_name("changed.ckpt")
    records = [{"name": name, "data": ms.Tensor(value)} for name, value in arrays.items()]
    ms.save_checkpoint(records, str(out), append_dict={"append_info": info})
    return out


def test_one_flipped_bit_fails_and_is_named(saved: Callable[[str], Path], tmp_path: Path) -> None:
    hf = saved("llama")
    path = with_layout(tmp_path / "m.ckpt", hf)
    name = "decoder.layers.1.mlp.linear_fc2.weight"

    def flip(arrays: dict[str, Any]) -> None:
        arrays[name].view(np.uint32)[3, 5] ^= 1

    report = judge(hf, rewrite(path, flip), level="weights")
    assert report.weights is not None and report.weights.verdict == "fails"
    (bad,) = [t for t in report.weights.tensors if not t.ok]
    assert (bad.name, bad.differing, bad.first_difference) == (name, 1, (3, 5))
    assert bad.max_abs is not None and 0 < bad.max_abs < 1e-6


def test_missing_unexpected_shape_and_dtype_are_told_apart(saved: Callable[[str], Path], tmp_path: Path) -> None:
    hf = saved("llama")

    def damage(arrays: dict[str, Any]) -> None:
        del arrays["decoder.final_layernorm.weight"]
        arrays["surplus"] = np.zeros(3, np.float32)
        arrays["output_layer.weight"] = arrays["output_layer.weight"][:-1].copy()
        name = "decoder.layers.0.input_layernorm.weight"
        arrays[name] = arrays[name].astype(np.float16)

    changed = rewrite(with_layout(tmp_path / "m.ckpt", hf), damage)
    report = judge(hf, changed, level="weights")
    assert report.weights is not None
    found = {t.name: t.status for t in report.weights.tensors if not t.ok}
    assert found == {
        "decoder.final_layernorm.weight": "missing",
        "surplus": "unexpected",
        "output_layer.weight": "shape",
        "decoder.layers.0.input_layernorm.weight": "dtype",
    }
    assert report.exit_code == 1


def test_nan_and_infinity_in_equal_weights_are_counted(saved: Callable[[str], Path], tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    hf = tmp_path / "hf"
    shutil.copytree(saved("llama"), hf)
    arrays = load_file(hf / "model.safetensors")
    arrays["model.layers.0.mlp.up_proj.weight"][1, :3] = [np.nan, np.inf, -np.inf]
    save_file(arrays, hf / "model.safetensors", metadata={"format": "pt"})
    report = judge(hf, with_layout(tmp_path / "m.ckpt", hf), level="weights")
    assert report.weights is not None and report.weights.verdict == "holds"
    (odd,) = [t for t in report.weights.tensors if t.nan or t.inf]
    assert (odd.name, odd.nan, odd.inf) == ("decoder.layers.0.mlp.linear_fc1.weight", 1, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_declared_cast_is_carried_out_on_the_source(dtype: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    hf = saved("llama")
    ckptbridge.convert(hf, tmp_path / "m.ckpt", direction="pt2ms", dtype=dtype, allow_overflow=True)
    report = judge(hf, tmp_path / "m.ckpt", level="weights")
    assert report.weights is not None and report.weights.verdict == "holds", report.reason
    assert {t.dtype for t in report.weights.tensors} == {dtype}


def test_the_way_back_is_judged_by_its_own_provenance(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: Any
) -> None:
    hf = saved("qwen2")
    ckptbridge.convert(hf, tmp_path / "m.ckpt", direction="pt2ms")
    ckptbridge.convert(tmp_path / "m.ckpt", tmp_path / "back", direction="ms2pt")
    report = judge(tmp_path / "back", tmp_path / "m.ckpt")
    assert report.verdict == "holds" and report.provenance["direction"] == "ms2pt"
    monkeypatch.chdir(tmp_path / "back")
    alone = judge()
    assert alone.verdict == "holds"
    assert alone.mindspore.endswith("m.ckpt")
    # And the checkpoint alone: its provenance says where it came from.
    assert judge(tmp_path / "m.ckpt", level="weights").verdict == "holds"


def test_the_golden_file_stands_for_the_pytorch_side(saved: Callable[[str], Path], tmp_path: Path) -> None:
    hf = tmp_path / "elsewhere" / "hf"
    shutil.copytree(saved("qwen3"), hf)
    path = with_layout(tmp_path / "m.ckpt", hf)
    golden = tmp_path / "run.golden"
    written = run_verify((hf,), "all", Overrides(), ForwardOptions(length=LENGTH, golden=golden))
    assert not isinstance(written, VerifyReport) and golden.exists()
    shutil.rmtree(tmp_path / "elsewhere")
    report = judge(path, golden=golden)
    assert report.verdict == "holds" and report.weights is None
    assert largest(report) < 1e-9
    assert report.forward is not None and len(report.forward.stages) > 5

    def scale(arrays: dict[str, Any]) -> None:
        arrays["decoder.layers.1.mlp.linear_fc2.weight"] *= 1.001

    worse = judge(rewrite(path, scale), golden=golden)
    assert worse.verdict == "fails"
    assert worse.forward is not None and worse.forward.first_bad == "layers.1.mlp"


def test_float32_is_judged_against_its_own_noise(saved: Callable[[str], Path], tmp_path: Path) -> None:
    hf = saved("llama")
    report = judge(hf, with_layout(tmp_path / "m.ckpt", hf), dtype="float32")
    assert report.forward is not None and report.forward.floor is not None
    assert 0 < report.forward.floor.max_abs < 1e-4
    assert report.forward.verdict == "holds", report.forward.reason


def test_a_type_that_the_device_cannot_compute_is_an_error_that_says_so(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """MindSpore's CPU has no bfloat16 matrix product."""
    hf = saved("llama")
    with pytest.raises(CkptBridgeError) as caught:
        judge(hf, with_layout(tmp_path / "m.ckpt", hf), dtype="bfloat16")
    assert caught.value.code == "backend" and "--dtype" in caught.value.remedy


def test_all_layouts_of_a_target_are_judged_as_what_they_are(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Each layout holds under its own name and no other: nothing is guessed from shapes that fit."""
    hf = saved("llama")
    layouts = list(itertools.product(("interleaved", "contiguous"), repeat=2))
    for k, (attention, mlp) in enumerate(layouts):
        path = with_layout(tmp_path / f"{k}.ckpt", hf, attention=attention, mlp=mlp)
        for a, m in layouts:
            layout = {"attention": a, "mlp": m}
            overrides = Overrides(target="mindformers", layout=layout, config=hf / "config.json")
            report = run_verify((hf, path), "forward", overrides, ForwardOptions(length=LENGTH))
            assert isinstance(report, VerifyReport)
            assert (report.verdict == "holds") == ((a, m) == (attention, mlp))


def test_a_config_that_is_silent_means_what_transformers_assumes(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """DeepSeek-V3's factor, groups and normalisation left out of config.json: its class has values of its own."""
    import torch
    import transformers

    hf = tmp_path / "hf"
    shutil.copytree(saved("deepseek_v3-plain"), hf)
    config = json.loads((hf / "config.json").read_text())
    for key in ("routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob"):
        config.pop(key, None)
    config.update(n_routed_experts=16, num_experts_per_tok=3)  # eight groups of two
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**config))
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_(std=0.2)
    model.save_pretrained(hf)
    (hf / "config.json").write_text(json.dumps(config))
    ckptbridge.convert(hf, tmp_path / "m.ckpt", direction="pt2ms")
    report = judge(hf, tmp_path / "m.ckpt")
    assert report.verdict == "holds" and largest(report) < 1e-9, report.reason


def test_multi_token_prediction_layers_of_any_number_are_no_hindrance(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    hf = tmp_path / "hf"
    shutil.copytree(saved("deepseek_v3-plain"), hf)
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    arrays = load_file(hf / "model.safetensors")
    hidden, last = config["hidden_size"], config["num_hidden_layers"]
    more = {
        n.replace(f".{last - 1}.", f".{last}.", 1): a
        for n, a in arrays.items()
        if n.startswith(f"model.layers.{last - 1}.")
    }
    for name in ("enorm", "hnorm", "shared_head.norm"):
        more[f"model.layers.{last}.{name}.weight"] = np.ones(hidden, np.float32)
    more[f"model.layers.{last}.eh_proj.weight"] = np.ones((hidden, 2 * hidden), np.float32)
    save_file({**arrays, **more}, hf / "model.safetensors", metadata={"format": "pt"})
    ckptbridge.convert(hf, tmp_path / "m.ckpt", direction="pt2ms")
    report = judge(hf, tmp_path / "m.ckpt")
    assert report.verdict == "holds" and largest(report) < 1e-9, report.reason
