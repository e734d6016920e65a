"""Tied heads: config and file disagree in every way that they can; and prefixes, drops and a base model's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import assert_same_words, load_ckpt, load_safetensors, random_arrays, save_hf
from published_models import decoder_shapes, tiny_config

import ckptbridge
from ckptbridge.errors import CkptBridgeError

CONFIG = tiny_config("qwen2", "plain")
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
OUT, IN = "output_layer.weight", "embedding.word_embeddings.weight"


def model(folder: Path, *, tied: bool, head: str) -> tuple[Path, dict[str, Any]]:
    """A model whose config says ``tied``, and whose file has the head ``absent``, ``equal`` or ``different``."""
    tensors = random_arrays(decoder_shapes(CONFIG))
    if head == "absent":
        del tensors[HEAD]
    elif head == "equal":
        tensors[HEAD] = tensors[EMBED].copy()
    return save_hf(folder / "hf", tensors, {**CONFIG, "tie_word_embeddings": tied}), tensors


@pytest.mark.parametrize(
    ("tied", "head", "outcome"),
    [
        (True, "absent", "one"),
        (True, "equal", "one"),
        (True, "different", "differs from"),
        (False, "absent", "missing"),
        (False, "equal", "two"),
        (False, "different", "two"),
    ],
)
def test_config_and_file_decide_together(tied: bool, head: str, outcome: str, tmp_path: Path) -> None:
    source, tensors = model(tmp_path, tied=tied, head=head)
    out = tmp_path / "ms.ckpt"
    if outcome not in ("one", "two"):
        with pytest.raises(CkptBridgeError, match=outcome):
            ckptbridge.convert(source, out, direction="pt2ms")
        assert not out.exists()
        return
    summary = ckptbridge.convert(source, out, direction="pt2ms")
    ms = load_ckpt(out)
    assert ms[IN].tobytes() == tensors[EMBED].tobytes()
    if outcome == "two":
        assert ms[OUT].tobytes() == tensors[HEAD].tobytes()
    else:
        assert OUT not in ms
    said = {d.name: d.reason for d in summary.plan.dropped}
    assert said.keys() == ({HEAD} if (tied, head) == (True, "equal") else set())
    # What the source had comes back, a copy included, and nothing else.
    ckptbridge.convert(out, tmp_path / "back", direction="ms2pt")
    assert_same_words(load_safetensors(tmp_path / "back"), tensors)


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_copy_on_the_mindspore_side_is_compared_too(same: bool, tmp_path: Path) -> None:
    import mindspore

    source, tensors = model(tmp_path, tied=True, head="absent")
    ckptbridge.convert(source, tmp_path / "one.ckpt", direction="pt2ms")
    ms = load_ckpt(tmp_path / "one.ckpt")
    ms[OUT] = ms[IN].copy()
    if not same:
        ms[OUT].view(np.uint32)[3, 3] ^= 1
    saved = [{"name": n, "data": mindspore.Tensor(a)} for n, a in ms.items()]
    mindspore.save_checkpoint(saved, str(tmp_path / "two.ckpt"))
    options: dict[str, Any] = {"direction": "ms2pt", "target": "mindformers", "config": source / "config.json"}
    if same:
        ckptbridge.convert(tmp_path / "two.ckpt", tmp_path / "back", **options)
        assert_same_words(load_safetensors(tmp_path / "back"), tensors)
    else:
        with pytest.raises(CkptBridgeError, match="differs from"):
            ckptbridge.convert(tmp_path / "two.ckpt", tmp_path / "back", **options)
        assert not (tmp_path / "back").exists()


def test_a_restored_copy_follows_a_cast(tmp_path: Path) -> None:
    source, tensors = model(tmp_path, tied=True, head="equal")
    ckptbridge.convert(source, tmp_path / "ms.ckpt", direction="pt2ms")
    ckptbridge.convert(tmp_path / "ms.ckpt", tmp_path / "back", direction="ms2pt", dtype="float64")
    back = load_safetensors(tmp_path / "back")
    assert back[HEAD].tobytes() == back[EMBED].tobytes() == tensors[EMBED].astype(np.float64).tobytes()


def test_mtp_copies_are_compared_and_come_back(tmp_path: Path) -> None:
    """The prediction layer of DeepSeek-V3 holds copies of embedding and head."""
    config = tiny_config("deepseek_v3", "mtp")
    tensors = random_arrays(decoder_shapes(config))
    copies = [f"model.layers.{i}.{n}" for i in (3, 4) for n in ("embed_tokens.weight", "shared_head.head.weight")]
    for name in copies:
        tensors[name] = tensors[EMBED if "embed" in name else HEAD].copy()
    source = save_hf(tmp_path / "hf", tensors, config)
    summary = ckptbridge.convert(source, tmp_path / "ms.ckpt", direction="pt2ms")
    assert {d.name for d in summary.plan.dropped} == set(copies)
    assert not [n for n in load_ckpt(tmp_path / "ms.ckpt") if "shared_head" in n or "embed_tokens" in n]
    ckptbridge.convert(tmp_path / "ms.ckpt", tmp_path / "back", direction="ms2pt")
    assert_same_words(load_safetensors(tmp_path / "back"), tensors)
    tensors[copies[-1]].view(np.uint32)[0, 0] ^= 1
    save_hf(tmp_path / "hf", tensors, config)
    with pytest.raises(CkptBridgeError, match=r"model\.layers\.4\.shared_head\.head\.weight.*differs"):
        ckptbridge.convert(source, tmp_path / "again.ckpt", direction="pt2ms")


# --- leaving out and letting be missing ------------------------------------------------------


def test_what_is_allowed_to_be_missing_or_unexpected_is_listed(tmp_path: Path) -> None:
    tensors = random_arrays(decoder_shapes(CONFIG))
    del tensors[HEAD]
    extra = {f"ema.{k}": np.zeros(2, np.float32) for k in range(2)}
    source = save_hf(tmp_path / "hf", tensors | extra, CONFIG)
    summary = ckptbridge.convert(
        source, tmp_path / "ms.ckpt", direction="pt2ms", allow_missing=["lm_head.*"], allow_unexpected=["ema.*"]
    )
    assert summary.plan.absent == (HEAD,)
    assert {d.name: d.reason for d in summary.plan.dropped} == dict.fromkeys(
        extra, "allowed by --allow-unexpected 'ema.*'"
    )
    assert summary.provenance["absent"] == [HEAD]
    assert summary.provenance["dropped"].keys() == extra.keys()
    assert OUT not in load_ckpt(tmp_path / "ms.ckpt")
    assert [(a.kind, a.by, a.names) for a in summary.plan.allowed] == [
        ("absent", "--allow-missing 'lm_head.*'", (HEAD,)),
        ("left out", "--allow-unexpected 'ema.*'", tuple(extra)),
    ]
    # The way back knows it from the provenance, and so does the way there again.
    for source_, there, direction, gone in (("ms.ckpt", "back", "ms2pt", OUT), ("back", "again.ckpt", "pt2ms", HEAD)):
        summary = ckptbridge.convert(tmp_path / source_, tmp_path / there, direction=direction)
        assert [(a.kind, a.by, a.names) for a in summary.plan.allowed] == [("absent", "the provenance", (gone,))]
        assert summary.provenance["absent"] == [gone]
    assert_same_words(load_safetensors(tmp_path / "back"), tensors)
    assert_same_words(load_ckpt(tmp_path / "again.ckpt"), load_ckpt(tmp_path / "ms.ckpt"))


def test_what_the_provenance_does_not_list_is_missed(tmp_path: Path) -> None:
    """A tensor that was there when the provenance was written, and is not now."""
    import mindspore

    tensors = random_arrays(decoder_shapes(CONFIG))
    del tensors[HEAD]
    source = save_hf(tmp_path / "hf", tensors, CONFIG)
    ckptbridge.convert(source, tmp_path / "a.ckpt", direction="pt2ms", allow_missing=[HEAD])
    loaded = mindspore.load_checkpoint(str(tmp_path / "a.ckpt"))
    text = loaded.pop("append_info")
    del loaded[IN]
    saved = [{"name": name, "data": parameter} for name, parameter in loaded.items()]
    mindspore.save_checkpoint(saved, str(tmp_path / "b.ckpt"), append_dict={"append_info": text})
    with pytest.raises(CkptBridgeError, match=rf"1 tensor\(s\) of the MindSpore side are missing: '{IN}'"):
        ckptbridge.convert(tmp_path / "b.ckpt", tmp_path / "back", direction="ms2pt")


def test_a_pattern_that_allows_nothing_is_noted(tmp_path: Path) -> None:
    source, _ = model(tmp_path, tied=False, head="different")
    summary = ckptbridge.convert(
        source, tmp_path / "ms.ckpt", direction="pt2ms", allow_missing=["lm_haed*"], allow_unexpected=["*"]
    )
    assert summary.plan.notes == (
        "--allow-missing 'lm_haed*' matched no missing tensor.",
        "--allow-unexpected '*' matched no unexpected tensor.",
    )
    assert summary.plan.allowed == ()


def test_training_state_among_the_weights_is_left_out_and_said(tmp_path: Path) -> None:
    """What append_dict adds comes back as 0-d parameters among the weights; they are none."""
    import mindspore

    source, tensors = model(tmp_path, tied=False, head="different")
    ckptbridge.convert(source, tmp_path / "a.ckpt", direction="pt2ms")
    saved = [{"name": n, "data": mindspore.Tensor(a)} for n, a in load_ckpt(tmp_path / "a.ckpt").items()]
    state = {"epoch_num": 3, "step_num": 7, "learning_rate": 0.1, "loss_scale": 65536.0, "note": "hello"}
    mindspore.save_checkpoint(saved, str(tmp_path / "b.ckpt"), append_dict=state)
    summary = ckptbridge.convert(
        tmp_path / "b.ckpt", tmp_path / "b", direction="ms2pt", target="mindformers", config=source / "config.json"
    )
    assert_same_words(load_safetensors(tmp_path / "b"), tensors)
    assert {d.name: d.reason for d in summary.plan.dropped} == dict.fromkeys(
        ("epoch_num", "step_num", "learning_rate", "loss_scale"), "training state, not a weight"
    )
