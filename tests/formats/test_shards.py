"""Indices and shards, checked against each other both ways."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

from ckptbridge.errors import CkptBridgeError, FormatError, UnsupportedError
from ckptbridge.formats import safetensors as ours
from ckptbridge.formats.detect import open_inventory
from ckptbridge.formats.lazy import read_words
from ckptbridge.formats.shards import index_json, param_name_map_json

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
HELD = {FIRST: ["a", "b"], SECOND: ["c"]}
INDEX = "model.safetensors.index.json"


def arrays(names: list[str]) -> dict[str, np.ndarray]:
    return {name: np.full((2, 3), ord(name[-1]), np.float32) for name in names}


@pytest.fixture
def sharded(tmp_path):
    """A directory of two shards with their index."""
    directory = tmp_path / "model"
    directory.mkdir()
    for shard, names in HELD.items():
        safetensors.numpy.save_file(arrays(names), directory / shard, {"format": "pt"})
    weight_map = {name: shard for shard, names in HELD.items() for name in names}
    (directory / INDEX).write_bytes(index_json(weight_map, 72))
    return directory


def edit(directory, name=INDEX, **changes):
    index = json.loads((directory / name).read_text())
    for tensor, shard in changes.items():
        if shard is None:
            del index["weight_map"][tensor]
        else:
            index["weight_map"][tensor] = shard
    (directory / name).write_text(json.dumps(index))


def refusal(directory, error=FormatError) -> CkptBridgeError:
    """Both ways in refuse with one text; every refusal has a remedy and names a file."""
    with pytest.raises(error) as caught:
        open_inventory(directory)
    if error is FormatError:
        with pytest.raises(FormatError) as direct:
            ours.read_directory(directory)
        assert direct.value.what == caught.value.what
    assert caught.value.remedy
    assert "file" in caught.value.where
    return caught.value


def test_shards_are_one_inventory(sharded):
    inventory = open_inventory(sharded)
    assert list(inventory.tensors) == ["a", "b", "c"]
    assert inventory.files == (sharded / FIRST, sharded / SECOND)
    assert inventory.strings == {"format": "pt"}
    for name, source in inventory.tensors.items():
        assert read_words(source).tobytes() == arrays([name])[name].tobytes()


def test_a_missing_shard(sharded):
    (sharded / SECOND).unlink()
    assert SECOND in refusal(sharded).what


def test_a_tensor_that_its_shard_lacks(sharded):
    edit(sharded, d=SECOND)
    error = refusal(sharded)
    assert SECOND in error.what
    assert error.where["tensor"] == "d"


def test_a_tensor_that_the_index_lacks(sharded):
    edit(sharded, b=None)
    error = refusal(sharded)
    assert FIRST in error.what
    assert error.where["tensor"] == "b"


def test_a_renamed_tensor(sharded):
    edit(sharded, b=None, renamed=FIRST)
    assert refusal(sharded).where["tensor"] in ("b", "renamed")


def test_a_tensor_in_two_shards(sharded):
    safetensors.numpy.save_file(arrays(["c", "b"]), sharded / SECOND)
    error = refusal(sharded)
    assert error.where["tensor"] == "b"
    assert FIRST in error.what


def test_a_tensor_mapped_twice(sharded):
    text = (sharded / INDEX).read_text().replace('"c":', f'"a": "{SECOND}", "c":')
    (sharded / INDEX).write_text(text)
    assert "'a' stands twice" in refusal(sharded).what


def test_a_stray_shard(sharded):
    safetensors.numpy.save_file(arrays(["z"]), sharded / "model-00003-of-00003.safetensors")
    assert "model-00003-of-00003" in refusal(sharded).what


def test_mindspores_extra_file_is_a_stray_without_its_index(sharded):
    safetensors.numpy.save_file(arrays(["z"]), sharded / "hyper_param.safetensors")
    assert "hyper_param" in refusal(sharded).what


def test_unfinished_output_is_no_stray(sharded):
    (sharded / ".ckptbridge-x.safetensors").write_bytes(b"")
    (sharded / ".ckptbridge-x.safetensors.index.json").write_bytes(b"")
    assert len(open_inventory(sharded).tensors) == 3


def test_two_names_for_one_shard(sharded):
    (sharded / "again.safetensors").symlink_to(SECOND)
    edit(sharded, d="again.safetensors")
    assert "one file" in refusal(sharded).what


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", "a\\b", "a\0b"]
)
def test_names_that_lead_out(sharded, name):
    safetensors.numpy.save_file(arrays(["c"]), sharded.parent / "x.safetensors")
    edit(sharded, c=name)
    assert "leads out" in refusal(sharded).what


def test_a_name_longer_than_any_files(sharded):
    edit(sharded, c="x" * 300 + ".safetensors")
    assert "cannot be looked for: File name too long" in refusal(sharded).what


def test_a_link_out_of_the_directory(sharded):
    outside = sharded.parent / "x.safetensors"
    (sharded / SECOND).rename(outside)
    (sharded / SECOND).symlink_to(outside)
    assert "link" in refusal(sharded).what


def test_a_link_within_the_directory(sharded):
    (sharded / SECOND).rename(sharded / "real.bytes")
    (sharded / SECOND).symlink_to("real.bytes")
    assert len(open_inventory(sharded).tensors) == 3


def test_the_hugging_face_cache(sharded):
    """The cache keeps every file in blobs/, and links to it from snapshots/REVISION/."""
    root = sharded.parent / "models--x"
    (root / "snapshots").mkdir(parents=True)
    (root / "blobs").mkdir()
    snapshot = sharded.rename(root / "snapshots" / "0123abc")
    for k, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(root / "blobs" / str(k))
        path.symlink_to(f"../../blobs/{k}")
    assert len(open_inventory(snapshot).tensors) == 3


def test_a_directory_as_a_shard(sharded):
    (sharded / SECOND).unlink()
    (sharded / SECOND).mkdir()
    assert "regular file" in refusal(sharded).what


NO_INDEX = ["", "[]", "{", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}', "{}", '{"a": NaN}']


@pytest.mark.parametrize("text", [*NO_INDEX, "[" * 10**5])
def test_a_malformed_index(sharded, text):
    (sharded / INDEX).write_text(text)
    assert refusal(sharded).where["file"] == sharded / INDEX


def test_a_pointer_among_the_shards(sharded):
    (sharded / SECOND).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "git-LFS" in refusal(sharded, UnsupportedError).what


def test_sizes_as_real_indices_have_them(sharded):
    """Published indices also state a float, or more metadata."""
    index = json.loads((sharded / INDEX).read_text())
    index["metadata"] = {"total_size": 72.0, "merged_by": {"tool": "x", "weights": [0.5, -1]}}
    (sharded / INDEX).write_text(json.dumps(index))
    assert len(open_inventory(sharded).tensors) == 3


def test_differing_metadata_is_told(sharded):
    safetensors.numpy.save_file(arrays(["c"]), sharded / SECOND, {"format": "np", "more": "x"})
    inventory = open_inventory(sharded)
    assert inventory.strings == {"format": "pt", "more": "x"}
    assert any("'format'" in note for note in inventory.notes)


# --- bin shards through the same checks ------------------------------------------------------


def test_bin_shards(tmp_path):
    torch = pytest.importorskip("torch")
    for shard, names in HELD.items():
        state = {name: torch.from_numpy(array) for name, array in arrays(names).items()}
        torch.save(state, tmp_path / shard.replace("model", "pytorch_model").replace("safetensors", "bin"))
    weight_map = {n: s.replace("model", "pytorch_model").replace("safetensors", "bin") for s in HELD for n in HELD[s]}
    (tmp_path / "pytorch_model.bin.index.json").write_bytes(index_json(weight_map, 72))
    inventory = open_inventory(tmp_path)
    assert inventory.format == "bin"
    assert list(inventory.tensors) == ["a", "b", "c"]
    lost = tmp_path / "pytorch_model-00002-of-00002.bin"
    lost.write_bytes(b"<html>404</html>")
    assert "web page" in refusal(tmp_path, UnsupportedError).what
    lost.unlink()
    with pytest.raises(FormatError, match="missing"):
        open_inventory(tmp_path)


# --- MindSpore's index -----------------------------------------------------------------------


@pytest.fixture
def mindspore_directory(tmp_path):
    for k, names in enumerate(HELD.values()):
        safetensors.numpy.save_file(arrays(names), tmp_path / f"part{k}.safetensors", {"format": "ms"})
    weight_map = {name: f"part{k}.safetensors" for k, names in enumerate(HELD.values()) for name in names}
    (tmp_path / "param_name_map.json").write_bytes(param_name_map_json(weight_map, 72))
    return tmp_path


def test_mindspores_index_is_read(mindspore_directory):
    assert list(open_inventory(mindspore_directory).tensors) == ["a", "b", "c"]
    # The bare map, which MindSpore takes too.
    index = mindspore_directory / "param_name_map.json"
    index.write_text(json.dumps(json.loads(index.read_text())["weight_map"]))
    assert list(open_inventory(mindspore_directory).tensors) == ["a", "b", "c"]


def test_mindspores_parameters_beside_the_index(mindspore_directory):
    """unified_safetensors puts what no strategy covers into a file of its own, and not into the index."""
    extra = {"global_step": np.ones(1, np.int32), "learning_rate": np.float32(0.1), "more": np.ones(3, np.float32)}
    extra["learning_rate"] = np.array(0.1, np.float32)
    safetensors.numpy.save_file(extra, mindspore_directory / "hyper_param.safetensors")
    inventory = open_inventory(mindspore_directory)
    assert list(inventory.tensors) == ["a", "b", "c", "more"]
    assert set(inventory.scalars) == {"global_step", "learning_rate"}
    assert any("learning_rate" in note for note in inventory.notes)
    safetensors.numpy.save_file(arrays(["a"]), mindspore_directory / "hyper_param.safetensors")
    assert refusal(mindspore_directory).where["tensor"] == "a"


def test_two_indices_must_agree(sharded):
    (sharded / "param_name_map.json").write_bytes((sharded / INDEX).read_bytes())
    assert len(open_inventory(sharded).tensors) == 3
    edit(sharded, "param_name_map.json", c=FIRST)
    assert "disagree" in refusal(sharded).what


def test_mindspore_reads_the_index(mindspore_directory):
    """The real loader finds every tensor by the index that is written here."""
    ms = pytest.importorskip("mindspore")

    class Net(ms.nn.Cell):
        def __init__(self):
            super().__init__()
            for name in "abc":
                setattr(self, name, ms.Parameter(ms.Tensor(np.zeros((2, 3), np.float32)), name=name))

    net = Net()
    ms.load_distributed_checkpoint(net, format="safetensors", unified_safetensors_dir=str(mindspore_directory))
    for parameter in net.get_parameters():
        assert np.array_equal(parameter.asnumpy(), arrays([parameter.name])[parameter.name])


def test_the_index_is_mindspores_own(tmp_path):
    pytest.importorskip("mindspore")
    from mindspore.parallel.transform_safetensors import _save_parameter_map_json

    _save_parameter_map_json([["a", "b"], ["c"]], None, (), str(tmp_path), 72)
    weight_map = {"a": "part0.safetensors", "b": "part0.safetensors", "c": "part1.safetensors"}
    assert (tmp_path / "param_name_map.json").read_bytes() == param_name_map_json(weight_map, 72)
