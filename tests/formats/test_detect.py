"""Which reader takes a path, what is recognised as wrong, and what is done about wrappers."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptbridge.errors import CkptBridgeError, FormatError, UnsupportedError, UsageError
from ckptbridge.formats import mindspore_ckpt
from ckptbridge.formats.detect import open_inventory
from ckptbridge.formats.lazy import read_words

W = np.arange(6, dtype=np.float32).reshape(2, 3)
NAMES = ("fc.weight", "fc.bias")


def save_safetensors(path, names=NAMES, metadata=None):
    safetensors.numpy.save_file({n: W + k for k, n in enumerate(names)}, path, metadata)


def save_bin(path, names=NAMES, legacy=False):
    state = {n: torch.from_numpy(W + k) for k, n in enumerate(names)}
    with path.open("wb") as file:  # torch refuses some names
        torch.save(state, file, _use_new_zipfile_serialization=not legacy)


@pytest.fixture
def save_ckpt(write_plain):
    def save(path, names=NAMES):
        arrays = {n: ("float32", (W + k).view("<u4")) for k, n in enumerate(names)}
        write_plain(path, mindspore_ckpt, arrays)

    return save


@pytest.fixture
def saved(save_ckpt):
    """Writers by format."""
    return {
        "safetensors": save_safetensors,
        "ckpt": save_ckpt,
        "bin": save_bin,
        "legacy bin": lambda path: save_bin(path, legacy=True),
    }


def refusal(path, error=UnsupportedError) -> CkptBridgeError:
    with pytest.raises(error) as caught:
        open_inventory(path)
    assert caught.value.remedy
    return caught.value


# --- by content ------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["safetensors", "ckpt", "bin", "pth", "", "txt"])
@pytest.mark.parametrize("kind", ["safetensors", "ckpt", "bin", "legacy bin"])
def test_content_decides_and_never_the_suffix(tmp_path, saved, kind, suffix):
    path = tmp_path / f"weights.{suffix}"
    saved[kind](path)
    inventory = open_inventory(path)
    assert inventory.format == kind.removeprefix("legacy ")
    assert set(inventory.tensors) == set(NAMES)
    assert read_words(inventory.tensors["fc.bias"]).tobytes() == (W + 1).tobytes()
    # The same file alone in a directory.
    assert open_inventory(tmp_path).tensors.keys() == inventory.tensors.keys()


def test_there_is_no_such_file(tmp_path):
    assert "no such" in refusal(tmp_path / "none", UsageError).what


# --- recognised, and named -------------------------------------------------------------------

WRONG = {
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git-LFS", "git lfs pull"),
    "html": (b"\n<!DOCTYPE html><html><body>Sign in</body></html>", "web page", "log in"),
    "xml": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "web page", "download again"),
    "gguf": (b"GGUF\x03\0\0\0" + bytes(40), "GGUF", "original"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(40), "HDF5", "from_tf"),
    "npy": (b"\x93NUMPY\x01\x00" + bytes(40), "NumPy", "safetensors"),
    "gzip": (gzip.compress(b"a" * 40), "gzip", "gunzip"),
    "tensorflow": (bytes(range(1, 41)) + (0xDB4775248B80FB57).to_bytes(8, "little"), "TensorFlow", "from_tf"),
    "mindir": (b"\n\x031.1\x12\tMindSpore*\x062.10.0:\xa5\x17\n0\x12\x0bValueNode_9", "MindIR", "save_checkpoint"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_are_named(tmp_path, name):
    content, what, remedy = WRONG[name]
    (tmp_path / "model.safetensors").write_bytes(content)
    error = refusal(tmp_path / "model.safetensors")
    assert what in error.what
    assert remedy in error.remedy
    assert error.where["file"] == tmp_path / "model.safetensors"
    # A directory with such a file says the same, under a usual name and under another.
    assert refusal(tmp_path).what == error.what
    (tmp_path / "model.safetensors").rename(tmp_path / "other")
    assert refusal(tmp_path).what == error.what


def test_tar_archives_are_named(tmp_path):
    (tmp_path / "a").write_bytes(b"a")
    with tarfile.open(tmp_path / "old.pt", "w") as tar:
        tar.add(tmp_path / "a", "storages")
    assert "tar archive" in refusal(tmp_path / "old.pt").what


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "empty"),
        (bytes(100), "zeros"),
        (b"\x01\x02\x03 nothing known", "not recognised"),
        (b"\n\0" * 50, "not rec"),
    ],
)
def test_what_is_no_file_of_any_kind(tmp_path, content, what):
    (tmp_path / "f").write_bytes(content)
    assert what in refusal(tmp_path / "f", FormatError).what


def test_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "regular" in refusal(tmp_path / "pipe", FormatError).what


def test_sentencepiece_is_no_checkpoint(tmp_path, save_ckpt):
    """Tokenizer models are protobuf too, and begin as a .ckpt does."""
    piece = b"\x0a\x05<unk>\x15\0\0\0\0\x18\x02"
    (tmp_path / "tokenizer.model").write_bytes((b"\x0a" + bytes([len(piece)]) + piece) * 4)
    save_ckpt(tmp_path / "net-1_32.ckpt")
    assert open_inventory(tmp_path).format == "ckpt"


# --- directories -----------------------------------------------------------------------------


def test_safetensors_go_before_bin_with_a_note(tmp_path):
    save_safetensors(tmp_path / "model.safetensors")
    save_bin(tmp_path / "pytorch_model.bin")
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x02}.")
    inventory = open_inventory(tmp_path)
    assert inventory.format == "safetensors"
    assert any("pytorch_model.bin" in note for note in inventory.notes)


def test_several_checkpoints_need_a_name(tmp_path, save_ckpt):
    save_ckpt(tmp_path / "net-1_32.ckpt")
    save_ckpt(tmp_path / "net-2_32.ckpt")
    error = refusal(tmp_path, UsageError)
    assert "net-1_32.ckpt, net-2_32.ckpt" in error.what
    assert str(tmp_path / "net-1_32.ckpt") in error.remedy
    save_ckpt(tmp_path / "model.ckpt")
    assert open_inventory(tmp_path).files == (tmp_path / "model.ckpt",)
    save_safetensors(tmp_path / "model.safetensors")
    assert "model.safetensors, model.ckpt" in refusal(tmp_path, UsageError).what


def test_unfinished_output_is_passed_over(tmp_path, save_ckpt):
    save_ckpt(tmp_path / ".ckptbridge-model.ckpt")
    assert "no weights" in refusal(tmp_path, FormatError).what
    save_safetensors(tmp_path / "x.safetensors")
    assert open_inventory(tmp_path).format == "safetensors"


def test_a_directory_without_weights_names_what_is_below(tmp_path):
    (tmp_path / "checkpoint-500").mkdir()
    (tmp_path / "config.json").write_text("{}")
    assert "checkpoint-500" in refusal(tmp_path, FormatError).remedy


@pytest.mark.parametrize(
    ("make", "what", "remedy"),
    [
        (["rank_0/net.ckpt", "rank_1/net.ckpt"], "rank_0", "unified_safetensors"),
        (["rank_0/net.ckpt"], "rank_0", "one device"),
        (["consolidated.00.pth", "consolidated.01.pth"], "Meta", "Hugging Face"),
        (["__0_0.distcp", ".metadata"], "FSDP", "dcp_to_torch"),
        (["zero_to_fp32.py", "latest", "global_step1/zero_pp_rank_0_mp_rank_00_optim_states.pt"], "ZeRO", "zero_to"),
        (["zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"], "ZeRO", "zero_to_fp32"),
        (["mp_rank_00/model_optim_rng.pt"], "Megatron", "Join"),
    ],
)
def test_parts_of_a_distributed_run_are_named(tmp_path, make, what, remedy):
    for name in make:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        save_bin(path)
    error = refusal(tmp_path)
    assert what in error.what
    assert remedy in error.remedy


def test_shards_without_their_index(tmp_path):
    save_safetensors(tmp_path / "model-00001-of-00002.safetensors")
    assert "no index" in refusal(tmp_path, FormatError).what
    (tmp_path / "model-00001-of-00002.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    assert len(open_inventory(tmp_path).tensors) == 2


def test_a_damaged_file_of_a_directory_is_told(tmp_path):
    (tmp_path / "README.md").write_text("text")
    (tmp_path / "net.ckpt").write_bytes(bytes(100))
    error = refusal(tmp_path, FormatError)
    assert "zeros" in error.what
    assert error.where["file"] == tmp_path / "net.ckpt"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_files_of_another_user(save_ckpt):
    """MindSpore sets 0400 on what it saves."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        save_ckpt(directory / "a.ckpt")
        (directory / "a.ckpt").chmod(0o400)
        (directory / "closed").mkdir(mode=0o700)
        save_ckpt(directory / "closed" / "a.ckpt")
        os.seteuid(65534)
        try:
            assert "0400" in refusal(directory / "a.ckpt", FormatError).remedy
            assert "0400" in refusal(directory, FormatError).remedy
            assert "may not" in refusal(directory / "closed", FormatError).what
            assert "may not" in refusal(directory / "closed" / "a.ckpt", FormatError).what
        finally:
            os.seteuid(0)


def test_a_whole_model_beside_shards_is_taken(tmp_path):
    (tmp_path / "zero_to_fp32.py").write_text("")
    save_safetensors(tmp_path / "model.safetensors")
    assert open_inventory(tmp_path).tensors.keys() == set(NAMES)


def test_adapters_are_named(tmp_path):
    save_safetensors(tmp_path / "adapter_model.safetensors", ["base_model.model.q.lora_A.weight"])
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "adapter" in refusal(tmp_path).what
    assert "adapter" in refusal(tmp_path / "adapter_model.safetensors").what


def test_optimizer_state_is_named(tmp_path, save_ckpt):
    save_ckpt(tmp_path / "opt.ckpt", ["adam_m.fc.weight", "adam_v.fc.weight"])
    assert "optimizer state" in refusal(tmp_path / "opt.ckpt").what
    save_ckpt(tmp_path / "all.ckpt", ["fc.weight", "adam_m.fc.weight", "adam_v.fc.weight"])
    inventory = open_inventory(tmp_path / "all.ckpt")
    assert any("--allow-unexpected 'adam_m.*'" in note for note in inventory.notes)
    assert len(inventory.tensors) == 3


# --- wrappers --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["safetensors", "ckpt", "bin"])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.module."])
def test_wrapper_prefixes_are_removed(tmp_path, saved, kind, prefix):
    saved[kind](tmp_path / "f", [prefix + n for n in NAMES])
    inventory = open_inventory(tmp_path / "f")
    assert set(inventory.tensors) == set(NAMES)
    assert all(name == source.spec.name for name, source in inventory.tensors.items())
    assert any(prefix in note for note in inventory.notes)


@pytest.mark.parametrize("kind", ["safetensors", "ckpt", "bin"])
def test_a_real_submodule_named_module_stays(tmp_path, saved, kind):
    names = ["module.fc.weight", "head.weight"]
    saved[kind](tmp_path / "f", names)
    inventory = open_inventory(tmp_path / "f")
    assert set(inventory.tensors) == set(names)
    assert not any("removed" in note for note in inventory.notes)


def test_only_what_all_have_is_removed(tmp_path):
    save_safetensors(tmp_path / "f", ["module.module.fc.weight", "module.head.weight"])
    assert set(open_inventory(tmp_path / "f").tensors) == {"module.fc.weight", "head.weight"}


# --- an index as the path --------------------------------------------------------------------


def test_an_index_can_be_named(tmp_path):
    save_safetensors(tmp_path / "a.safetensors", ["x"])
    save_safetensors(tmp_path / "b.safetensors", ["y"])
    save_safetensors(tmp_path / "consolidated.safetensors", ["x", "y"])
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    error = refusal(tmp_path, FormatError)
    assert "consolidated.safetensors" in error.what
    assert str(index) in error.remedy
    assert open_inventory(index).tensors.keys() == {"x", "y"}


# --- anything at all -------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_file_gets_past_the_error_family(tmp_path_factory, saved, data):
    """Whatever the bytes, a file opens or is refused with an error of the family; nothing else escapes."""
    path = tmp_path_factory.mktemp("any") / "f"
    kind = data.draw(st.sampled_from(["safetensors", "ckpt", "bin", "legacy bin", "none"]))
    if kind == "none":
        start = data.draw(st.sampled_from([b"", b"\n", b"PK\x03\x04", b"\x80\x02", b"{", bytes(8) + b"{", b"GGUF"]))
        content = start + data.draw(st.binary(max_size=60))
    else:
        saved[kind](path)
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            # Headers and trailers are where the formats are; contents are mostly numbers.
            at = data.draw(st.one_of(st.integers(0, min(300, len(content) - 1)), st.integers(0, len(content) - 1)))
            content[at] = data.draw(st.integers(0, 255))
        content = content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))]
    path.write_bytes(content)
    try:
        inventory = open_inventory(path)
    except CkptBridgeError as error:
        assert error.exit_code == 2
        return
    size = path.stat().st_size
    for source in (*inventory.tensors.values(), *inventory.scalars.values()):
        assert all(0 <= s.offset <= s.offset + s.nbytes <= size for s in source.segments)
