"""Options beside a provenance: what agrees is taken, and who says all that it says goes before it, with a note."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mindspore
import pytest
from checkpoints import assert_same_words, load_ckpt, load_safetensors, random_arrays, save_hf
from published_models import decoder_shapes, tiny_config

import ckptbridge
from ckptbridge.errors import UsageError

CONFIG = tiny_config("qwen3", "plain")


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return save_hf(tmp_path / "hf", random_arrays(decoder_shapes(CONFIG)), CONFIG)


def mislabelled(hf: Path, path: Path, **truth: Any) -> Path:
    """A checkpoint converted by ``truth`` that carries the provenance of the defaults."""
    ckptbridge.convert(hf, path.with_name("true.ckpt"), direction="pt2ms", **truth)
    ckptbridge.convert(hf, path.with_name("claimed.ckpt"), direction="pt2ms")
    text = mindspore.load_checkpoint(str(path.with_name("claimed.ckpt")))["append_info"]
    saved = [{"name": n, "data": mindspore.Tensor(a)} for n, a in load_ckpt(path.with_name("true.ckpt")).items()]
    mindspore.save_checkpoint(saved, str(path), append_dict={"append_info": text})
    return path


def test_what_agrees_with_the_provenance_may_be_said(hf: Path, tmp_path: Path) -> None:
    ckptbridge.convert(hf, tmp_path / "ms.ckpt", direction="pt2ms", layout={"attention": "contiguous"})
    summary = ckptbridge.convert(
        tmp_path / "ms.ckpt",
        tmp_path / "back",
        direction="ms2pt",
        target="mindformers",
        layout={"attention": "contiguous"},
        config=hf / "config.json",
    )
    assert summary.plan.notes == ()
    assert_same_words(load_safetensors(tmp_path / "back"), load_safetensors(hf))


def test_a_layout_goes_before_the_provenance_when_target_and_config_are_said(hf: Path, tmp_path: Path) -> None:
    path = mislabelled(hf, tmp_path / "ms.ckpt", layout={"attention": "contiguous"})
    options: dict[str, Any] = {"direction": "ms2pt", "layout": {"attention": "contiguous"}}
    with pytest.raises(UsageError, match="The provenance says attention=interleaved, and --layout says") as caught:
        ckptbridge.convert(path, tmp_path / "back", **options)
    assert "--target mindformers and --config FILE" in caught.value.remedy
    summary = ckptbridge.convert(path, tmp_path / "back", target="mindformers", config=hf / "config.json", **options)
    assert summary.plan.notes[0] == (
        "The provenance says attention=interleaved; attention=contiguous was taken, as the options say."
    )
    assert_same_words(load_safetensors(tmp_path / "back"), load_safetensors(hf))


def test_target_and_config_alone_leave_the_layout_to_the_provenance(hf: Path, tmp_path: Path) -> None:
    """A default that goes before what the provenance says would put rows into the wrong order."""
    ckptbridge.convert(hf, tmp_path / "ms.ckpt", direction="pt2ms", layout={"attention": "contiguous"})
    options: dict[str, Any] = {"target": "mindformers", "config": hf / "config.json"}
    ckptbridge.convert(tmp_path / "ms.ckpt", tmp_path / "back", direction="ms2pt", **options)
    assert_same_words(load_safetensors(tmp_path / "back"), load_safetensors(hf))


def test_a_target_goes_before_the_provenance_when_the_config_is_said(hf: Path, tmp_path: Path) -> None:
    path = mislabelled(hf, tmp_path / "ms.ckpt", target="flat")
    with pytest.raises(UsageError, match="qwen3/mindformers, and --target says flat") as caught:
        ckptbridge.convert(path, tmp_path / "back", direction="ms2pt", target="flat")
    assert "give --config FILE as well" in caught.value.remedy
    summary = ckptbridge.convert(path, tmp_path / "back", direction="ms2pt", target="flat", config=hf / "config.json")
    assert summary.plan.notes[0] == (
        "The provenance says the table qwen3/mindformers; qwen3/flat was taken, as the options say."
    )
    assert_same_words(load_safetensors(tmp_path / "back"), load_safetensors(hf))


def test_a_table_of_ones_own_goes_before_the_provenance_with_a_note(hf: Path, tmp_path: Path) -> None:
    ckptbridge.convert(hf, tmp_path / "ms.ckpt", direction="pt2ms", target="hf")
    (tmp_path / "own.toml").write_text(
        'schema = 1\nfamily = "mine"\ntarget = "same"\n'
        + "".join(f'[[rule]]\npt = "{name}"\n' for name in decoder_shapes(CONFIG))
    )
    summary = ckptbridge.convert(
        tmp_path / "ms.ckpt", tmp_path / "back", direction="ms2pt", mapping=tmp_path / "own.toml"
    )
    assert summary.plan.notes == ("The provenance says the table qwen3/hf; mine/same was taken, as the options say.",)
    assert_same_words(load_safetensors(tmp_path / "back"), load_safetensors(hf))


def test_a_config_of_another_model_type_is_noted(hf: Path, tmp_path: Path) -> None:
    ckptbridge.convert(hf, tmp_path / "ms.ckpt", direction="pt2ms")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "llama"}))
    summary = ckptbridge.convert(
        tmp_path / "ms.ckpt", tmp_path / "back", direction="ms2pt", config=tmp_path / "config.json"
    )
    assert summary.plan.notes == (
        "The config is one of the model type 'llama', and the table qwen3/mindformers is for qwen3.",
    )


def test_what_carries_the_mark_of_pytorch_is_taken_when_the_target_is_said(hf: Path, tmp_path: Path) -> None:
    """A network written like transformers' own, whose weights somebody saved with that library."""
    with pytest.raises(UsageError, match="The source is PyTorch's"):
        ckptbridge.convert(hf, tmp_path / "back", direction="ms2pt")
    ckptbridge.convert(hf, tmp_path / "back", direction="ms2pt", target="hf")
    assert_same_words(load_safetensors(tmp_path / "back"), load_safetensors(hf))


def test_a_base_model_without_its_prefix_shows_the_direction_too(tmp_path: Path) -> None:
    shapes = {name.removeprefix("model."): shape for name, shape in decoder_shapes(CONFIG).items()}
    shapes.pop("lm_head.weight")
    folder = save_hf(tmp_path / "base", random_arrays(shapes), {**CONFIG, "tie_word_embeddings": True})
    with pytest.raises(ckptbridge.CkptBridgeError, match="other side") as caught:
        ckptbridge.convert(folder, tmp_path / "back", direction="ms2pt", target="mindformers")
    assert caught.value.remedy == "Use 'ckptbridge convert pt2ms'."
    ckptbridge.convert(folder, tmp_path / "ms.ckpt", direction="pt2ms", target="mindformers")
