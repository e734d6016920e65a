""".bin sources as people have them: views, strides, shared storage, wrappers, prefixes, classes of no use here."""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import assert_same_words, load_ckpt, load_safetensors, random_arrays
from published_models import decoder_shapes, tiny_config
from written_layouts import expected

import ckptbridge
from ckptbridge.errors import CkptBridgeError

CONFIG = tiny_config("qwen3", "plain")
LAYOUT = {"attention": "interleaved", "mlp": "interleaved"}
FORMS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "older"])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "config.json"


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    return {n: torch.from_numpy(a) for n, a in random_arrays(decoder_shapes(CONFIG), seed).items()}


def written_out(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return expected("mindformers", CONFIG, LAYOUT, {n: t.contiguous().numpy() for n, t in tensors.items()})


def convert(value: object, folder: Path, zipped: bool = True, **options: Any) -> tuple[Any, dict[str, np.ndarray]]:
    torch.save(value, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    summary = ckptbridge.convert(
        folder / "pytorch_model.bin", folder / "ms.ckpt", direction="pt2ms", overwrite=True, **options
    )
    return summary, load_ckpt(folder / "ms.ckpt")


@FORMS
def test_views_strides_and_offsets_are_honoured(zipped: bool, config: Path, tmp_path: Path) -> None:
    """A flat buffer of all weights (as DeepSpeed has it), transposed storage, every second row, and an expanded row."""
    plain = state()
    flat = torch.cat([t.reshape(-1) for t in plain.values()])
    flat_views, at = {}, 0
    for name, tensor in plain.items():
        flat_views[name] = flat[at : at + tensor.numel()].view(tensor.shape)
        at += tensor.numel()
    transposed = {n: t.t().contiguous().t() if t.dim() == 2 else t for n, t in plain.items()}
    spaced = {}
    for name, tensor in plain.items():
        room = torch.zeros(2 * tensor.shape[0] + 3, *tensor.shape[1:])
        room[3::2] = tensor
        spaced[name] = room[3::2]
    for views in (plain, flat_views, transposed, spaced):
        _, got = convert(views, tmp_path, zipped)
        assert_same_words(got, written_out(plain))
    expanded = plain | {"model.layers.0.self_attn.k_proj.weight": torch.arange(18.0).expand(8, 18)}
    _, got = convert(expanded, tmp_path, zipped)
    assert_same_words(got, written_out(expanded))


def test_a_view_of_a_large_storage_takes_only_its_own_bytes(config: Path, tmp_path: Path) -> None:
    tensors = state()
    room = torch.zeros(1 << 18, 18)
    room[5:34] = tensors["lm_head.weight"]
    _, got = convert(tensors | {"lm_head.weight": room[5:34]}, tmp_path)
    assert (tmp_path / "pytorch_model.bin").stat().st_size > 18 << 20
    assert (tmp_path / "ms.ckpt").stat().st_size < 1 << 20
    assert_same_words(got, written_out(tensors))


def test_shared_storage_is_two_tensors_where_the_table_says_two(config: Path, tmp_path: Path) -> None:
    """Untied by config, and equal: both are written, nothing is left out because it looks the same."""
    tensors = state()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    _, got = convert(tensors, tmp_path)
    assert_same_words(got, written_out(tensors))
    ckptbridge.convert(tmp_path / "ms.ckpt", tmp_path / "back", direction="ms2pt")
    assert_same_words(load_safetensors(tmp_path / "back"), {n: t.numpy() for n, t in tensors.items()})


@FORMS
def test_parameters_and_ordered_dicts_are_tensors(zipped: bool, config: Path, tmp_path: Path) -> None:
    tensors = state()
    wrapped = OrderedDict((n, torch.nn.Parameter(t)) for n, t in tensors.items())
    _, got = convert(wrapped, tmp_path, zipped)
    assert_same_words(got, written_out(tensors))


# --- wrappers --------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("wrapper", ["state_dict", "model", "module", "net", "model_state_dict"])
def test_the_one_state_dict_is_found_and_said(wrapper: str, zipped: bool, config: Path, tmp_path: Path) -> None:
    tensors = state()
    extra = {"epoch": 3, "args": argparse.Namespace(lr=0.1), "best": np.float64(0.5), "optimizer": {"lr": 0.1}}
    summary, got = convert({wrapper: tensors, **extra}, tmp_path, zipped)
    assert_same_words(got, written_out(tensors))
    notes = " ".join(summary.plan.notes)
    assert wrapper in notes
    assert "Namespace" in notes


def test_two_candidates_need_a_key(config: Path, tmp_path: Path) -> None:
    one, two = state(0), state(1)
    value = {"model": one, "ema": two, "epoch": 1}
    with pytest.raises(CkptBridgeError) as caught:
        convert(value, tmp_path)
    assert "--key" in caught.value.remedy
    assert "model" in str(caught.value)
    assert "ema" in str(caught.value)
    assert not (tmp_path / "ms.ckpt").exists()
    for key, tensors in (("model", one), ("ema", two)):
        _, got = convert(value, tmp_path, key=key)
        assert_same_words(got, written_out(tensors))
    with pytest.raises(CkptBridgeError, match="swa"):
        convert(value, tmp_path, key="swa")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "module.module."])
def test_prefixes_that_all_names_have_are_removed_and_said(prefix: str, config: Path, tmp_path: Path) -> None:
    tensors = state()
    summary, got = convert({prefix + n: t for n, t in tensors.items()}, tmp_path)
    assert_same_words(got, written_out(tensors))
    assert any(prefix in note for note in summary.plan.notes)


def test_a_prefix_that_only_some_names_have_is_part_of_the_name(config: Path, tmp_path: Path) -> None:
    tensors = state()
    mixed = {("module." if k else "") + n: t for k, (n, t) in enumerate(tensors.items())}
    with pytest.raises(CkptBridgeError, match="not named by the table"):
        convert(mixed, tmp_path)


# --- names that mislead ----------------------------------------------------------------------


def test_the_content_decides_and_never_the_suffix(config: Path, tmp_path: Path) -> None:
    """Lightning calls its pickles .ckpt, and a MindSpore file renamed to .bin is what it was."""
    tensors = state()
    torch.save({"state_dict": tensors, "pytorch-lightning_version": "2.4"}, tmp_path / "last.ckpt")
    ckptbridge.convert(tmp_path / "last.ckpt", tmp_path / "ms.ckpt", direction="pt2ms")
    assert_same_words(load_ckpt(tmp_path / "ms.ckpt"), written_out(tensors))
    (tmp_path / "ms.ckpt").rename(tmp_path / "ms.bin")
    ckptbridge.convert(tmp_path / "ms.bin", tmp_path / "back.safetensors", direction="ms2pt")
    assert_same_words(load_safetensors(tmp_path / "back.safetensors"), {n: t.numpy() for n, t in tensors.items()})
    (tmp_path / "back.safetensors").rename(tmp_path / "odd.pth")
    ckptbridge.convert(tmp_path / "odd.pth", tmp_path / "again.ckpt", direction="pt2ms")
    assert_same_words(load_ckpt(tmp_path / "again.ckpt"), written_out(tensors))


# --- classes ---------------------------------------------------------------------------------


class Trap:
    """Would run when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@FORMS
def test_nothing_in_a_bin_is_run(zipped: bool, config: Path, tmp_path: Path) -> None:
    tensors = state()
    canary = tmp_path / "canary"
    summary, got = convert({"state_dict": tensors, "trap": Trap(canary)}, tmp_path, zipped)
    assert not canary.exists()
    assert_same_words(got, written_out(tensors))
    assert any("touch" in note or "pathlib" in note for note in summary.plan.notes)


def test_buffers_without_a_counterpart_are_dropped_with_the_reason(config: Path, tmp_path: Path) -> None:
    tensors = state()
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.rand(2) for i in range(3)}
    summary, got = convert(tensors | buffers, tmp_path)
    assert_same_words(got, written_out(tensors))
    assert {d.name for d in summary.plan.dropped} == set(buffers)
    assert all("rope_theta" in d.reason for d in summary.plan.dropped)
    assert summary.provenance["dropped"].keys() == set(buffers)
