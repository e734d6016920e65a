"""What a conversion writes: bytes, modes, digests, provenance and indices, against the real libraries and by hand."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from pathlib import Path
from typing import Any

import blake3
import mindspore
import numpy as np
import pytest
import torch
from checkpoints import Array, assert_same_words, leftovers, load_ckpt, load_safetensors, random_arrays, save_hf
from published_models import decoder_shapes, tiny_config
from safetensors import safe_open

import ckptbridge

IDENTITY = """
schema = 1
family = "plain"
target = "same"
[index]
i = "number"
[[rule]]
pt = "t.{i}"
"""


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    config = tiny_config("qwen3", "plain")
    return save_hf(tmp_path / "hf", random_arrays(decoder_shapes(config)), config)


def provenance_of(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        with safe_open(path, "np") as file:
            return dict(json.loads(file.metadata()["append_info"]))
    text = mindspore.load_checkpoint(str(path))["append_info"]
    assert type(text) is str
    return dict(json.loads(text))


# --- .ckpt -----------------------------------------------------------------------------------


def as_mindspore_saves(ckpt: Path, path: Path) -> bytes:
    """The file that MindSpore writes for what it reads from ``ckpt``: the same tensors, the same order, the string."""
    loaded = mindspore.load_checkpoint(str(ckpt))
    text = loaded.pop("append_info")
    tensors = [{"name": name, "data": parameter} for name, parameter in loaded.items()]
    mindspore.save_checkpoint(tensors, str(path), append_dict={"append_info": text})
    return path.read_bytes()


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float64"])
def test_a_ckpt_is_what_mindspore_would_have_written(dtype: str | None, hf: Path, tmp_path: Path) -> None:
    ckptbridge.convert(hf, tmp_path / "a.ckpt", direction="pt2ms", dtype=dtype, allow_overflow=True)
    assert (tmp_path / "a.ckpt").read_bytes() == as_mindspore_saves(tmp_path / "a.ckpt", tmp_path / "b.ckpt")


def test_a_crc_trailer_is_mindspores(hf: Path, tmp_path: Path) -> None:
    ckptbridge.convert(hf, tmp_path / "a.ckpt", direction="pt2ms", crc=True)
    loaded = mindspore.load_checkpoint(str(tmp_path / "a.ckpt"), crc_check=True)
    text = loaded.pop("append_info")
    tensors = [{"name": name, "data": parameter} for name, parameter in loaded.items()]
    mindspore.save_checkpoint(tensors, str(tmp_path / "b.ckpt"), append_dict={"append_info": text}, crc_check=True)
    assert (tmp_path / "a.ckpt").read_bytes() == (tmp_path / "b.ckpt").read_bytes()


def torch_bits(array: Array, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array.copy()).view(dtype)


def test_every_dtype_scalars_and_odd_names_pass_untouched(tmp_path: Path) -> None:
    """Through a table of the user's own, whose rule has no axes: any shape, any dtype that the formats have."""
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    dtypes += (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16)
    dtypes += (torch.uint8, torch.bool)
    shapes = [(), (1,), (3, 5), (2, 1, 7)]
    generator = torch.Generator().manual_seed(0)
    state = {}
    for dtype in dtypes:
        for shape in shapes:
            high = 2 if dtype is torch.bool else 256
            raw = torch.randint(0, high, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
            state[f"t.{len(state)}"] = raw.view(dtype).reshape(shape)
    state[f"t.{len(state)}"] = torch.empty(0, 4)
    torch.save(state, tmp_path / "any.bin")
    (tmp_path / "table.toml").write_text(IDENTITY)
    (tmp_path / "config.json").write_text(json.dumps({"number": len(state)}))
    keywords: dict[str, Any] = {"mapping": tmp_path / "table.toml", "config": tmp_path / "config.json"}
    for middle in ("ms.ckpt", "ms.safetensors"):
        ckptbridge.convert(tmp_path / "any.bin", tmp_path / middle, direction="pt2ms", **keywords)
        back = tmp_path / f"{middle}.back.bin"
        ckptbridge.convert(tmp_path / middle, back, direction="ms2pt", **keywords)
        loaded = torch.load(back, weights_only=True)
        assert loaded.keys() == state.keys()
        for name, tensor in state.items():
            assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape), name
            assert raw_bytes(loaded[name]) == raw_bytes(tensor), name
    arrays = load_ckpt(tmp_path / "ms.ckpt")
    # An empty tensor stands in the file, and MindSpore's own loader gives it no shape but (0,): A2, A20.
    for name, tensor in state.items():
        if tensor.numel() and tensor.dtype is not torch.bfloat16:
            assert arrays[name].shape == tuple(tensor.shape), name
            assert arrays[name].tobytes() == raw_bytes(tensor), name


def test_weights_that_end_like_a_crc_trailer_are_weights(tmp_path: Path) -> None:
    """MindSpore takes the last 17 bytes of a file for a trailer when they begin so, whatever they are."""
    array = np.frombuffer(bytes(15) + b"crc_num" + bytes(6) + b"\x5f\x8c\xd3\xc2", np.uint8)
    torch.save({"t.0": torch.from_numpy(array.copy())}, tmp_path / "any.bin")
    (tmp_path / "table.toml").write_text(IDENTITY)
    (tmp_path / "config.json").write_text(json.dumps({"number": 1}))
    keywords: dict[str, Any] = {"mapping": tmp_path / "table.toml", "config": tmp_path / "config.json"}
    for name, crc in (("plain.ckpt", False), ("crc.ckpt", True)):
        ckptbridge.convert(tmp_path / "any.bin", tmp_path / name, direction="pt2ms", crc=crc, **keywords)
        assert load_ckpt(tmp_path / name)["t.0"].tobytes() == array.tobytes()
        assert ckptbridge.open_checkpoint(tmp_path / name)["t.0"].shape == array.shape
        ckptbridge.convert(tmp_path / name, tmp_path / f"{name}.bin", direction="ms2pt", **keywords)
        assert torch.load(tmp_path / f"{name}.bin")["t.0"].numpy().tobytes() == array.tobytes()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


# --- modes and determinism -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out.ckpt", "out.safetensors", "out"])
def test_modes_are_those_of_any_new_file(name: str, hf: Path, tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        ckptbridge.convert(hf, tmp_path / name, direction="pt2ms")
    finally:
        os.umask(old)
    out = tmp_path / name
    for path in [out, *(out.iterdir() if out.is_dir() else ())]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640), path


@pytest.mark.parametrize("format_name", ["ckpt", "safetensors"])
def test_the_same_input_and_options_give_the_same_bytes(format_name: str, hf: Path, tmp_path: Path) -> None:
    outputs = []
    for k in range(2):
        ckptbridge.convert(
            hf,
            tmp_path / f"{k}",
            direction="pt2ms",
            format=format_name,
            dtype="bf16",
            allow_overflow=True,
            provenance={"run": "42"},
        )
        os.utime(hf / "model.safetensors", (k, k))  # the source's time is not its content
        outputs.append({p.name: p.read_bytes() for p in (tmp_path / f"{k}").iterdir()})
    assert outputs[0] == outputs[1]
    back = []
    for k in range(2):
        ckptbridge.convert(tmp_path / "0", tmp_path / f"back{k}", direction="ms2pt", format="bin")
        back.append({p.name: p.read_bytes() for p in (tmp_path / f"back{k}").iterdir()})
    assert back[0] == back[1]


def test_the_provenance_knows_no_clock_no_host_and_no_user(hf: Path, tmp_path: Path) -> None:
    import getpass
    import socket

    ckptbridge.convert(hf, tmp_path / "out.ckpt", direction="pt2ms")
    text = json.dumps(provenance_of(tmp_path / "out.ckpt"))
    for word in (socket.gethostname(), f"/{getpass.getuser()}/", str(tmp_path)):
        assert word not in text


# --- digests ---------------------------------------------------------------------------------


def content_digest(tensors: dict[str, tuple[str, tuple[int, ...], bytes]], new: Any) -> str:
    """The documented content digest, written out: a line for each tensor, sorted by name."""
    lines = []
    for name in sorted(tensors, key=lambda n: n.encode()):
        dtype, shape, data = tensors[name]
        lines.append(f"{name}\0{dtype}\0{','.join(map(str, shape))}\0{new(data).hexdigest()}\n")
    return str(new("".join(lines).encode()).hexdigest())


@pytest.mark.parametrize(("algorithm", "new"), [("blake3", blake3.blake3), ("sha256", hashlib.sha256)])
def test_digests_are_the_documented_ones_in_every_format(algorithm: str, new: Any, hf: Path, tmp_path: Path) -> None:
    state = {n: torch.from_numpy(a) for n, a in load_safetensors(hf).items()}
    views = {n: t.t().contiguous().t() if t.dim() == 2 else t for n, t in state.items()}  # stored transposed
    for name, content in (("plain.bin", state), ("views.bin", views)):
        torch.save(content, tmp_path / name)
    want = {n: ("float32", tuple(t.shape), t.numpy().tobytes()) for n, t in state.items()}
    expected_pt = f"{algorithm}:{content_digest(want, new)}"
    expected_ms: set[str] = set()
    for source in (hf, tmp_path / "plain.bin", tmp_path / "views.bin"):
        for suffix in ("ckpt", "safetensors"):
            out = tmp_path / f"{source.name}.{suffix}"
            ckptbridge.convert(source, out, direction="pt2ms", config=hf / "config.json", digest=algorithm)
            loaded = load_ckpt(out) if suffix == "ckpt" else load_safetensors(out)
            written = {n: (str(a.dtype), a.shape, a.tobytes()) for n, a in loaded.items()}
            record = provenance_of(out)
            assert record["content"]["pt"] == expected_pt
            assert record["content"]["ms"] == f"{algorithm}:{content_digest(written, new)}"
            expected_ms.add(record["content"]["ms"])
            file_name = source.name if source.is_file() else "model.safetensors"
            size = (source if source.is_file() else source / file_name).stat().st_size
            assert record["sources"] == [{"name": file_name, "size": size, "digest": expected_pt}]
    assert len(expected_ms) == 1
    for suffix in ("safetensors", "bin"):
        summary = ckptbridge.convert(
            tmp_path / "hf.ckpt", tmp_path / f"b.{suffix}", direction="ms2pt", digest=algorithm
        )
        assert summary.provenance["content"] == {"pt": expected_pt, "ms": expected_ms.copy().pop()}


# --- provenance ------------------------------------------------------------------------------


def test_the_record_says_what_was_done(hf: Path, tmp_path: Path) -> None:
    summary = ckptbridge.convert(
        hf, tmp_path / "out.ckpt", direction="pt2ms", layout={"mlp": "contiguous"}, provenance={"run": "42", "é": "ü"}
    )
    record = provenance_of(tmp_path / "out.ckpt")
    assert record == summary.provenance
    assert record["tool"] == "ckptbridge"
    assert record["version"] == ckptbridge.__version__
    assert record["direction"] == "pt2ms"
    assert record["framework"] == "mindspore"
    assert record["table"]["name"] == "qwen3/mindformers"
    assert record["target"] == "mindformers"
    assert record["layout"] == {"attention": "interleaved", "mlp": "contiguous"}
    assert record["config"] == json.loads((hf / "config.json").read_text())
    assert record["tensors"] == len(load_ckpt(tmp_path / "out.ckpt"))
    assert record["notes"] == {"run": "42", "é": "ü"}
    assert record["lossy"] == []
    assert record["history"] == []
    text = mindspore.load_checkpoint(str(tmp_path / "out.ckpt"))["append_info"]
    assert text == json.dumps(record, sort_keys=True, separators=(",", ":"))


def test_a_chain_of_handoffs_can_be_read_back(hf: Path, tmp_path: Path) -> None:
    """pt2ms, ms2pt, pt2ms, through files that carry the record inside, and through a .bin, which cannot."""
    for k, middle in enumerate(("back.safetensors", "back", "bin")):
        first, second, third = tmp_path / f"{k}.ckpt", tmp_path / f"{k}" / middle, tmp_path / f"{k}.again.ckpt"
        one = ckptbridge.convert(hf, first, direction="pt2ms", provenance={"step": "one"}).provenance
        form = "bin" if middle == "bin" else None
        two = ckptbridge.convert(first, second, direction="ms2pt", format=form, provenance={"step": "two"}).provenance
        three = ckptbridge.convert(second, third, direction="pt2ms", config=hf / "config.json").provenance
        steps = [{key: value for key, value in step.items() if key != "history"} for step in (one, two)]
        assert (one["history"], two["history"], three["history"]) == ([], steps[:1], steps)
        assert [step["notes"] for step in three["history"]] == [{"step": "one"}, {"step": "two"}]
        assert [step["direction"] for step in three["history"]] == ["pt2ms", "ms2pt"]
        # The same weights all along, told by digests alone.
        assert one["content"] == two["content"] == three["content"]
        assert_same_words(load_ckpt(third), load_ckpt(first))


def test_an_append_info_of_somebody_elses_is_kept_as_text(hf: Path, tmp_path: Path) -> None:
    ckptbridge.convert(hf, tmp_path / "a.ckpt", direction="pt2ms")
    tensors = [{"name": n, "data": mindspore.Tensor(a)} for n, a in load_ckpt(tmp_path / "a.ckpt").items()]
    mindspore.save_checkpoint(tensors, str(tmp_path / "b.ckpt"), append_dict={"append_info": "trained by us"})
    summary = ckptbridge.convert(
        tmp_path / "b.ckpt", tmp_path / "b", direction="ms2pt", target="mindformers", config=hf / "config.json"
    )
    assert summary.provenance["history"] == [{"tool": "unknown", "append_info": "trained by us"}]
    assert_same_words(load_safetensors(tmp_path / "b"), load_safetensors(hf))


def test_lossy_steps_and_what_they_lost_are_recorded(tmp_path: Path) -> None:
    config = tiny_config("qwen3", "plain")
    arrays = {n: np.ones(s, np.float32) for n, s in decoder_shapes(config).items()}
    arrays["lm_head.weight"] = np.full_like(arrays["lm_head.weight"], 0.5, dtype=np.float64)
    arrays["lm_head.weight"][0, :3] = 1e300
    arrays["model.norm.weight"][:2] = 1e-30, 1e30
    source = save_hf(tmp_path / "hf", arrays, config)
    summary = ckptbridge.convert(source, tmp_path / "out.ckpt", direction="pt2ms", dtype="float16", allow_overflow=True)
    record = provenance_of(tmp_path / "out.ckpt")
    assert record["lossy"] == [
        {"step": "cast", "from": "float32", "to": "float16", "tensors": len(arrays) - 1},
        {"step": "cast", "from": "float64", "to": "float16", "tensors": 1},
    ]
    assert record["lost"] == {"overflow": 4, "underflow": 1}
    assert (summary.overflow, summary.underflow) == (4, 1)


# --- directories -----------------------------------------------------------------------------


def test_safetensors_say_which_framework_they_are_for(hf: Path, tmp_path: Path) -> None:
    ckptbridge.convert(hf, tmp_path / "ms", direction="pt2ms", format="safetensors", max_shard_size=3000)
    ckptbridge.convert(tmp_path / "ms", tmp_path / "pt", direction="ms2pt", max_shard_size=3000)
    for folder, mark in (("ms", "ms"), ("pt", "pt")):
        shards = sorted((tmp_path / folder).glob("*.safetensors"))
        assert len(shards) > 2
        for shard in shards:
            with safe_open(shard, "np") as file:
                assert file.metadata()["format"] == mark
                assert json.loads(file.metadata()["append_info"])["tool"] == "ckptbridge"
            # The safetensors format asks for no alignment; programs that map the file do.
            length = struct.unpack("<Q", shard.read_bytes()[:8])[0]
            assert length % 8 == 0


def test_mindspore_reads_its_shards_by_their_map(hf: Path, tmp_path: Path) -> None:
    ckptbridge.convert(hf, tmp_path / "whole.ckpt", direction="pt2ms")
    ckptbridge.convert(hf, tmp_path / "ms", direction="pt2ms", format="safetensors", max_shard_size=3000)
    name_map = json.loads((tmp_path / "ms" / "param_name_map.json").read_text())["weight_map"]
    expected = load_ckpt(tmp_path / "whole.ckpt")
    assert name_map.keys() == expected.keys()
    loaded: dict[str, Array] = {}
    for shard in sorted(set(name_map.values())):
        found = mindspore.load_checkpoint(str(tmp_path / "ms" / shard), format="safetensors")
        loaded |= {n: p.asnumpy() for n, p in found.items() if not isinstance(p, str)}
    assert_same_words(loaded, expected)

    cell = _Holder(expected)
    mindspore.load_distributed_checkpoint(cell, unified_safetensors_dir=str(tmp_path / "ms"), format="safetensors")
    assert_same_words({n: p.asnumpy() for n, p in cell.parameters_dict().items()}, expected)


class _Holder(mindspore.nn.Cell):
    """A network that has the parameters of a checkpoint and nothing else, all zero."""

    def __init__(self, arrays: dict[str, Array]) -> None:
        super().__init__()
        for k, (name, array) in enumerate(arrays.items()):
            parameter = mindspore.Parameter(mindspore.Tensor(np.zeros_like(array)), name=name)
            self.insert_param_to_cell(f"p{k}", parameter, check_name_contain_dot=False)
            parameter.name = name


def test_a_directory_lists_what_it_holds(hf: Path, tmp_path: Path) -> None:
    ckptbridge.convert(hf, tmp_path / "ms", direction="pt2ms")
    assert {p.name for p in (tmp_path / "ms").iterdir()} == {"model.ckpt", "config.json", "ckptbridge.json"}
    record = json.loads((tmp_path / "ms" / "ckptbridge.json").read_text())
    files = record.pop("files")
    assert files == ["config.json", "model.ckpt"]
    assert record == provenance_of(tmp_path / "ms" / "model.ckpt")
    assert json.loads((tmp_path / "ms" / "config.json").read_text()) == json.loads((hf / "config.json").read_text())


# --- overwriting -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out.ckpt", "out"])
def test_overwrite_replaces_a_former_output_whole(name: str, hf: Path, tmp_path: Path) -> None:
    out = tmp_path / name
    ckptbridge.convert(hf, out, direction="pt2ms", format=None if out.suffix else "safetensors", max_shard_size=None)
    ckptbridge.convert(hf, out, direction="pt2ms", layout={"mlp": "contiguous"}, overwrite=True)
    ckpt = out if out.is_file() else out / "model.ckpt"
    assert provenance_of(ckpt)["layout"]["mlp"] == "contiguous"
    if out.is_dir():
        assert {p.name for p in out.iterdir()} == {"model.ckpt", "config.json", "ckptbridge.json"}
    assert leftovers(tmp_path) == []
