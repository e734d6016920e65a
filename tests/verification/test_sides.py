"""Loading a side: what opens, and what is refused with which sentence."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ms = pytest.importorskip("mindspore")
pytest.importorskip("transformers")

import torch  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402
from safetensors.torch import save_file as torch_save_file  # noqa: E402

from ckptbridge.errors import (  # noqa: E402
    BackendError,
    CkptBridgeError,
    ConfigError,
    CoverageError,
    FormatError,
    ShapeError,
    UnsupportedError,
    UsageError,
)
from ckptbridge.verification.sides import mindspore as ms_side  # noqa: E402
from ckptbridge.verification.sides import pytorch as pt_side  # noqa: E402
from ckptbridge.verification.sides import user  # noqa: E402

_spec = importlib.util.spec_from_file_location("nets_oracle", Path(__file__).with_name("nets_oracle.py"))
oracle = importlib.util.module_from_spec(_spec)
sys.modules.setdefault("nets_oracle", oracle)
_spec.loader.exec_module(oracle)

TOKENS = np.random.default_rng(8).integers(0, 97, (2, 20))
Weights = dict[str, np.ndarray]


class Model:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = oracle.save_model("qwen2", folder)
        self.published: Weights = oracle.read(folder)
        self.weights: Weights = oracle.mindformers(self.published, self.config)
        self.logits = pt_side.load(folder).forward(TOKENS).logits

    def ckpt(self, path: Path, weights: Weights, **options: Any) -> Path:
        tensors = {name: ms.Tensor(np.ascontiguousarray(value)) for name, value in weights.items()}
        ms.save_checkpoint([{"name": name, "data": tensor} for name, tensor in tensors.items()], str(path), **options)
        return path

    def load(self, path: Path, **options: Any) -> ms_side.MsSide:
        return ms_side.load(path, self.config, "mindformers", **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("qwen2"))


def refused(error: type[CkptBridgeError], match: str, call: Any, *args: Any, **options: Any) -> CkptBridgeError:
    with pytest.raises(error, match=match or None) as caught:
        call(*args, **options)
    assert caught.value.exit_code == 2
    return caught.value


# --- MindSpore -----------------------------------------------------------------------------------


def test_strings_and_training_state_in_a_ckpt_are_no_weights(model: Model, tmp_path: Path) -> None:
    state = {"epoch_num": 3, "loss_scale": 0.5, "note": "hello", "append_info": json.dumps({"tool": "x" * 500})}
    side = model.load(model.ckpt(tmp_path / "m.ckpt", model.weights, append_dict=state))
    assert np.abs(side.forward(TOKENS).logits - model.logits).max() < 1e-9
    assert set(side.unused) == {"epoch_num", "loss_scale"}


def test_content_decides_and_not_the_suffix(model: Model, tmp_path: Path) -> None:
    one = model.ckpt(tmp_path / "m.ckpt", model.weights).rename(tmp_path / "weights.safetensors")
    two = tmp_path / "weights.ckpt"
    save_file(model.weights, two)
    for path in (one, two):
        assert np.abs(model.load(path).forward(TOKENS).logits - model.logits).max() < 1e-9


def test_a_sharded_directory(model: Model, tmp_path: Path) -> None:
    names = sorted(model.weights)
    shards = {"a-1.safetensors": names[:5], "a-2.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: model.weights[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert np.abs(model.load(tmp_path).forward(TOKENS).logits - model.logits).max() < 1e-9
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    refused(FormatError, "", model.load, tmp_path)


@pytest.mark.parametrize(("name", "experts"), [("qwen2", "2d"), ("qwen3_moe", "2d"), ("qwen3_moe", "3d")])
def test_half_precision_weights_are_cast_only_after_loading(tmp_path: Path, name: str, experts: str) -> None:
    config = oracle.save_model(name, tmp_path)
    published = {n: torch.from_numpy(v).bfloat16() for n, v in oracle.read(tmp_path).items()}
    torch_save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = pt_side.load(tmp_path).forward(TOKENS).logits
    weights = oracle.mindformers({n: v.float().numpy() for n, v in published.items()}, config, experts=experts)
    half = {n: ms.Tensor(np.ascontiguousarray(v)).astype(ms.bfloat16) for n, v in weights.items()}
    path = tmp_path / "half.ckpt"
    ms.save_checkpoint([{"name": n, "data": value} for n, value in half.items()], str(path))
    side = ms_side.load(path, config, "mindformers", {"experts": experts})
    assert np.abs(side.forward(TOKENS).logits - expected).max() < 1e-9
    assert all(side.value(n).dtype.name == "bfloat16" for n in side.names)
    first = "decoder.layers.0.input_layernorm.weight"
    flipped = (side.value(first).view(np.uint16) ^ 64).view(side.value(first).dtype)
    with side.replaced({first: flipped}):
        assert side.value(first).tobytes() == flipped.tobytes()
        assert np.abs(side.forward(TOKENS).logits - expected).max() > 1e-3
    assert np.abs(side.forward(TOKENS).logits - expected).max() < 1e-9


def test_float32_compute(model: Model, tmp_path: Path) -> None:
    side = model.load(model.ckpt(tmp_path / "m.ckpt", model.weights), dtype="float32")
    found = side.forward(TOKENS).logits
    assert found.dtype == np.float32
    assert 0 < np.abs(found - model.logits).max() < 1e-3


def test_layers_for_multi_token_prediction_are_named_unused(tmp_path: Path) -> None:
    config = oracle.save_model("deepseek_v3", tmp_path)
    published = oracle.read(tmp_path)
    extra = {f"model.layers.2.{name}": np.ones((3, 3), np.float32) for name in ("eh_proj.weight", "enorm.weight")}
    path = tmp_path / "m.ckpt"
    tensors = {**published, **extra}
    ms.save_checkpoint([{"name": n, "data": ms.Tensor(v)} for n, v in tensors.items()], str(path))
    assert set(ms_side.load(path, config, "hf").unused) == set(extra)
    refused(CoverageError, "layers.2", ms_side.load, path, {**config, "num_nextn_predict_layers": 0}, "hf")


def test_what_does_not_fit_is_refused(model: Model, tmp_path: Path) -> None:
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    less = {n: v for n, v in model.weights.items() if n != name}
    path = model.ckpt(tmp_path / "less.ckpt", less)
    refused(CoverageError, f"{name} missing", model.load, path)
    path = model.ckpt(tmp_path / "more.ckpt", {**model.weights, "decoder.stray.weight": np.ones(3, np.float32)})
    refused(CoverageError, r"decoder\.stray\.weight unexpected", model.load, path)
    # MindSpore itself lets a trailing axis of one pass.
    path = model.ckpt(tmp_path / "axis.ckpt", {**model.weights, name: model.weights[name][..., None]})
    assert refused(ShapeError, "asks for shape", model.load, path).where["tensor"] == name
    path = model.ckpt(tmp_path / "m.ckpt", model.weights)
    refused(ConfigError, "3 layers", ms_side.load, path, {**model.config, "num_hidden_layers": 3}, "mindformers")
    untyped = {**model.config, "layer_types": None}
    refused(CoverageError, r"layers\.2\.", ms_side.load, path, {**untyped, "num_hidden_layers": 3}, "mindformers")
    refused(CoverageError, r"layers\.1\.", ms_side.load, path, {**untyped, "num_hidden_layers": 1}, "mindformers")
    refused(ShapeError, "asks for", ms_side.load, path, {**model.config, "intermediate_size": 55}, "mindformers")
    refused(ConfigError, "hidden_size", ms_side.load, path, {"model_type": "qwen2", "num_attention_heads": 2}, "hf")
    refused(UnsupportedError, "model type 't5'", ms_side.load, path, {"model_type": "t5"}, "hf")
    refused(UsageError, "layout 'mine'", ms_side.load, path, model.config, "mine")
    refused(UsageError, "mlp=odd", ms_side.load, path, model.config, "mindformers", {"mlp": "odd"})
    refused(UsageError, "'int8'", model.load, path, dtype="int8")
    refused(BackendError, "'Ascend'", model.load, path, device="Ascend")


def test_files_that_mindspore_cannot_read(model: Model, tmp_path: Path) -> None:
    refused(UsageError, "no such file", model.load, tmp_path / "none.ckpt")
    refused(CkptBridgeError, "", model.load, tmp_path)
    path = model.ckpt(tmp_path / "m.ckpt", model.weights)
    broken = tmp_path / "broken.ckpt"
    broken.write_bytes(path.read_bytes()[:-7])
    refused(FormatError, "", model.load, broken)
    torch.save({n: torch.from_numpy(v) for n, v in model.published.items()}, tmp_path / "pytorch.ckpt")
    refused(FormatError, "is a PyTorch file", model.load, tmp_path / "pytorch.ckpt")
    quarter = {n: torch.from_numpy(v).to(torch.float8_e4m3fn) for n, v in model.weights.items()}
    torch_save_file(quarter, tmp_path / "quarter.safetensors")
    refused(FormatError, "MindSpore cannot read", model.load, tmp_path / "quarter.safetensors")


def test_tokens_are_checked(model: Model, tmp_path: Path) -> None:
    side, pt = model.load(model.ckpt(tmp_path / "m.ckpt", model.weights)), pt_side.load(model.folder)
    for one in (side, pt):
        refused(UsageError, "vocabulary of 97", one.forward, np.array([[97]]))
        refused(UsageError, "integer array", one.forward, np.zeros((1, 3)))
        refused(UsageError, "integer array", one.forward, np.zeros(3, np.int64))


def test_two_runs_are_bit_identical(model: Model, tmp_path: Path) -> None:
    side = model.load(model.ckpt(tmp_path / "m.ckpt", model.weights))
    assert side.forward(TOKENS).logits.tobytes() == side.forward(TOKENS).logits.tobytes()


# --- PyTorch -------------------------------------------------------------------------------------


def test_single_files_of_either_kind(model: Model, tmp_path: Path) -> None:
    torch.save({n: torch.from_numpy(v) for n, v in model.published.items()}, tmp_path / "weights.pt")
    shutil.copy(model.folder / "model.safetensors", tmp_path / "other.bin")
    for name in ("weights.pt", "other.bin"):
        found = pt_side.load(tmp_path / name, model.config).forward(TOKENS).logits
        assert found.tobytes() == model.logits.tobytes()


def test_wrapped_state_dicts_and_shards_of_any_name(model: Model, tmp_path: Path) -> None:
    state = {f"module.{n}": torch.from_numpy(v) for n, v in model.published.items()}
    wrapped = {"model": state, "ema": {n: v * 0 for n, v in state.items()}, "args": argparse.Namespace(lr=1)}
    torch.save(wrapped, tmp_path / "wrapped.pt")
    found = pt_side.load(tmp_path / "wrapped.pt", model.config, key="model").forward(TOKENS).logits
    assert found.tobytes() == model.logits.tobytes()
    folder = tmp_path / "shards"
    folder.mkdir()
    names = sorted(model.published)
    parts = {"first.safetensors": names[:7], "second.safetensors": names[7:]}
    for file, part in parts.items():
        save_file({n: model.published[n] for n in part}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: file for file, part in parts.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = pt_side.load(folder, model.config).forward(TOKENS).logits
    assert found.tobytes() == model.logits.tobytes()
    path = model.ckpt(tmp_path / "m.ckpt", model.weights)
    refused(FormatError, "is a MindSpore file", pt_side.load, path, model.config)


def test_float64_agrees_with_numpy_beyond_float32(model: Model) -> None:
    """Norm, q projection and RoPE of the first layer recomputed by NumPy: no float32 is left on the way."""
    side = pt_side.load(model.folder)
    seen: dict[str, np.ndarray] = {}
    attention = side.model.model.layers[0].self_attn
    hook = attention.o_proj.register_forward_hook(lambda _m, x, _y: seen.update(mixed=x[0].numpy()))
    side.forward(TOKENS)
    hook.remove()
    w = {n.removeprefix("model.layers.0."): v.astype(np.float64) for n, v in model.published.items()}
    x = w["model.embed_tokens.weight"][TOKENS[0]]
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + model.config["rms_norm_eps"]) * w["input_layernorm.weight"]
    q, k, v = (x @ w[f"self_attn.{p}_proj.weight"].T + w[f"self_attn.{p}_proj.bias"] for p in "qkv")
    angles = np.arange(20)[:, None] / 10000.0 ** (np.arange(4) / 4)
    cos, sin = np.cos(angles), np.sin(angles)

    def turn(head: np.ndarray) -> np.ndarray:
        a, b = head[:, :4], head[:, 4:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

    mixed = []
    for n in range(6):
        g = n // 3
        key, value = k[:, 8 * g : 8 * g + 8], v[:, 8 * g : 8 * g + 8]
        scores = turn(q[:, 8 * n : 8 * n + 8]) @ turn(key).T / np.sqrt(8.0)
        scores = np.exp(np.where(np.tri(20) > 0, scores, -np.inf))
        mixed.append(scores / scores.sum(1, keepdims=True) @ value)
    assert np.abs(seen["mixed"][0] - np.concatenate(mixed, 1)).max() < 1e-12


def test_loading_prints_nothing(model: Model, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = model.ckpt(tmp_path / "m.ckpt", model.weights)
    pt_side.load(model.folder).forward(TOKENS)
    model.load(path).forward(TOKENS)
    assert capfd.readouterr() == ("", "")


def test_what_transformers_cannot_judge_is_refused(model: Model, tmp_path: Path) -> None:
    less = {n: v for n, v in model.published.items() if "layers.1.mlp.up_proj" not in n}
    save_file(less, tmp_path / "less.safetensors", metadata={"format": "pt"})
    refused(CoverageError, r"up_proj\.weight missing", pt_side.load, tmp_path / "less.safetensors", model.config)
    more = {**model.published, "model.stray.weight": np.ones(3, np.float32)}
    save_file(more, tmp_path / "more.safetensors", metadata={"format": "pt"})
    refused(
        CoverageError, r"model\.stray\.weight unexpected", pt_side.load, tmp_path / "more.safetensors", model.config
    )
    refused(ConfigError, "config.json", pt_side.load, tmp_path / "less.safetensors")
    refused(UnsupportedError, "internlm2", pt_side.load, model.folder, {**model.config, "model_type": "internlm2"})
    refused(UnsupportedError, "Nonesuch", pt_side.load, model.folder, {**model.config, "architectures": ["Nonesuch"]})
    refused(
        UnsupportedError, "quantised", pt_side.load, model.folder, {**model.config, "quantization_config": {"a": 1}}
    )
    refused(UsageError, "no such file", pt_side.load, tmp_path / "none.bin", model.config)
    wide = {**model.config, "intermediate_size": 58}
    refused(CoverageError, "another shape", pt_side.load, model.folder, wide)


# --- the user's own ------------------------------------------------------------------------------

USER_MODULE = """
import numpy as np

def load(path, config, dtype, device):
    table = np.random.default_rng(0).normal(size=(config["vocab_size"], 7))
    return lambda tokens: table[tokens]

def no_function(path, config, dtype, device):
    return 3

def raising(path, config, dtype, device):
    raise OSError("no such disk")

def forward_raises(path, config, dtype, device):
    return lambda tokens: 1 / 0

def integers(path, config, dtype, device):
    return lambda tokens: np.stack([tokens] * 3, -1)

def flat(path, config, dtype, device):
    return lambda tokens: np.zeros((tokens.size, 7))

constant = 3
"""


@pytest.mark.parametrize("function", [user.pytorch_function, user.mindspore_function])
def test_user_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    (tmp_path / "own_networks.py").write_text(USER_MODULE)
    (tmp_path / "own_broken.py").write_text("import no_such_thing_at_all\n")
    monkeypatch.chdir(tmp_path)
    for module in ("own_networks", "own_broken"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    config = {"vocab_size": 97}

    def load(name: str) -> Any:
        return function(name, tmp_path / "w.ckpt", config, "float64", "cpu")

    table = np.random.default_rng(0).normal(size=(97, 7))
    assert load("own_networks:load")(TOKENS).logits.tobytes() == table[TOKENS].tobytes()
    refused(UsageError, "MODULE:FUNCTION", load, "own_networks")
    refused(UsageError, "no module 'own_missing'", load, "own_missing:load")
    refused(BackendError, "no_such_thing_at_all", load, "own_broken:load")
    refused(UsageError, "has no 'absent'", load, "own_networks:absent")
    refused(UsageError, "cannot call", load, "own_networks:constant")
    refused(UsageError, "returned int", load, "own_networks:no_function")
    refused(BackendError, "no such disk", load, "own_networks:raising")
    refused(BackendError, "ZeroDivisionError", load("own_networks:forward_raises"), TOKENS)
    refused(UsageError, "array of floats", load("own_networks:integers"), TOKENS)
    refused(UsageError, r"shape \(40, 7\)", load("own_networks:flat"), TOKENS)
    assert str(tmp_path) not in sys.path
