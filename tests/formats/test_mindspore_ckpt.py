"""The .ckpt reader and writer against the real MindSpore."""

from __future__ import annotations

import os
import zlib

import ml_dtypes
import numpy as np
import pytest

from ckptbridge.errors import DTypeError, FormatError, UnsupportedError
from ckptbridge.formats import mindspore_ckpt
from ckptbridge.formats.dtypes import BY_MINDSPORE, BY_NAME
from ckptbridge.formats.lazy import read_words
from ckptbridge.formats.tensors import TensorSpec

ms = pytest.importorskip("mindspore")

SHAPES = [(), (1,), (3,), (2, 3), (1, 5, 2)]
DTYPES = sorted(d.name for d in BY_MINDSPORE.values())


def tensor(dtype: str, array: np.ndarray) -> ms.Tensor:
    """A MindSpore tensor with these storage words."""
    values = array.view(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if dtype == "bfloat16":
        # Exact: every bfloat16 is a float32; NaN payloads are avoided by the caller.
        return ms.Tensor(values.astype(np.float32)).astype(ms.bfloat16)
    return ms.Tensor(values)


def arrays(words) -> dict[str, tuple[str, np.ndarray]]:
    made = {}
    for k, dtype in enumerate(DTYPES):
        for shape in SHAPES:
            array = words(BY_NAME[dtype], shape, seed=k)
            if dtype == "bfloat16":
                array = array & np.uint16(0xBFFF)  # no NaN
            made[f"layers.{dtype}.{len(shape)}.{'x'.join(map(str, shape))}"] = (dtype, array)
    return made


@pytest.mark.parametrize("crc", [False, True])
def test_bytes_equal_mindspores(tmp_path, words, write_plain, crc):
    made = arrays(words)
    strings = {"append_info": '{"é": "\U0001f600"}', "empty": "", "note": "two\nlines"}
    ms.save_checkpoint(
        [{"name": n, "data": tensor(*a)} for n, a in made.items()],
        str(tmp_path / "real.ckpt"),
        append_dict=dict(strings),
        crc_check=crc,
    )
    write_plain(tmp_path / "ours.ckpt", mindspore_ckpt, made, strings)
    if crc:
        trailer = mindspore_ckpt.crc_trailer(tmp_path / "ours.ckpt")
        with (tmp_path / "ours.ckpt").open("ab") as file:
            file.write(trailer)
    assert (tmp_path / "ours.ckpt").read_bytes() == (tmp_path / "real.ckpt").read_bytes()


def test_reads_what_mindspore_wrote(tmp_path, words):
    made = arrays(words)
    path = tmp_path / "real.ckpt"
    ms.save_checkpoint(
        [{"name": n, "data": tensor(*a)} for n, a in made.items()],
        str(path),
        append_dict={"epoch_num": 3, "loss_scale": 0.5, "lr": 0.1, "note": "h"},
    )
    inventory = mindspore_ckpt.read(path)
    loaded = ms.load_checkpoint(str(path))
    assert inventory.strings == {"note": "h"}
    assert {n: read_words(s).tobytes() for n, s in inventory.scalars.items()} == {
        "epoch_num": np.int64(3).tobytes(),
        "loss_scale": np.float32(0.5).tobytes(),
    }
    assert list(inventory.tensors) == [*made, "lr"]
    assert any("epoch_num" in note for note in inventory.notes)
    assert any("taken as weights" in note for note in inventory.notes)
    for name, source in inventory.tensors.items():
        assert source.spec.shape == loaded[name].shape
        assert source.spec.dtype.mindspore == str(loaded[name].dtype)
        assert read_words(source).tobytes() == loaded[name].asnumpy().tobytes()


@pytest.mark.parametrize("how", ["as tensor", "as array"])
def test_over_512_mib(tmp_path, how):
    """MindSpore cuts a tensor by bytes, and a NumPy array (asynchronous saving) by rows."""
    rows, columns = 523, 1 << 20  # 523 MiB; no multiple of the slice in rows
    big = np.zeros((rows, columns), np.int8)
    big[:, 0] = np.arange(rows) % 127
    path = tmp_path / "real.ckpt"
    parameters = [{"name": "big", "data": ms.Tensor(big)}, {"name": "small", "data": ms.Tensor(np.ones(3, np.int8))}]
    if how == "as array":
        ms.save_checkpoint(parameters, str(path), async_save="thread")
        from mindspore.train.serialization import _wait_async_thread_save_ckpt

        _wait_async_thread_save_ckpt()
    else:
        ms.save_checkpoint(parameters, str(path))
        layout = mindspore_ckpt.layout(
            [TensorSpec("big", BY_NAME["int8"], (rows, columns)), TensorSpec("small", BY_NAME["int8"], (3,))], {}
        )
        assert layout.size == path.stat().st_size
        covered = 0
        with path.open("rb") as file:
            for offset, data in layout.fixed:
                file.seek(offset)
                assert file.read(len(data)) == data
                covered += len(data)
        assert covered + big.nbytes + 3 == layout.size
        assert [p.nbytes for p in layout.places[0]] == [512 << 20, 11 << 20]
    inventory = mindspore_ckpt.read(path)
    assert len(inventory.tensors["big"].segments) == 2
    assert np.array_equal(read_words(inventory.tensors["big"]).view(np.int8), big)
    assert read_words(inventory.tensors["small"]).tolist() == [1, 1, 1]
    path.unlink()  # half a gigabyte


def test_empty_tensors_are_kept(tmp_path, write_plain):
    made = {"e": ("float32", np.zeros((0, 4), "<u4")), "w": ("float32", np.ones((2,), "<u4"))}
    write_plain(tmp_path / "a.ckpt", mindspore_ckpt, made)
    inventory = mindspore_ckpt.read(tmp_path / "a.ckpt")
    assert inventory.tensors["e"].spec.shape == (0, 4)
    assert read_words(inventory.tensors["e"]).shape == (0, 4)
    assert ms.load_checkpoint(str(tmp_path / "a.ckpt"))["e"].shape == (0, 4)


def test_crc_is_checked_when_it_is_there(tmp_path, write_plain):
    path = tmp_path / "a.ckpt"
    write_plain(path, mindspore_ckpt, {"w": ("float32", np.arange(8, dtype="<u4"))})
    assert mindspore_ckpt.checksums(path) == []
    with path.open("ab") as file:
        file.write(mindspore_ckpt.crc_trailer(path))
    (checksum,) = mindspore_ckpt.checksums(path)
    assert checksum.crc == zlib.crc32(path.read_bytes()[: checksum.nbytes])
    assert any("matches" in note for note in mindspore_ckpt.read(path, verify_crc=True).notes)
    whole = bytearray(path.read_bytes())
    whole[-25] ^= 4  # within the content
    path.write_bytes(whole)
    with pytest.raises(FormatError, match="crc trailer"):
        mindspore_ckpt.read(path, verify_crc=True)
    assert any("not checked" in note for note in mindspore_ckpt.read(path).notes)


@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC", "SM4-CBC"])
def test_encrypted_files_are_named(tmp_path, mode):
    parameters = [{"name": "w", "data": ms.Tensor(np.ones(4, np.float32))}]
    ms.save_checkpoint(parameters, str(tmp_path / "e.ckpt"), enc_key=os.urandom(16), enc_mode=mode)
    with pytest.raises(UnsupportedError, match=mode) as caught:
        mindspore_ckpt.read(tmp_path / "e.ckpt")
    assert "dec_key" in caught.value.remedy


def test_map_parameters_are_named(tmp_path):
    from mindspore.train.checkpoint_pb2 import Checkpoint

    message = Checkpoint()
    value = message.value.add()
    value.tag = "table"
    value.maptensor.SetInParent()
    (tmp_path / "m.ckpt").write_bytes(message.SerializeToString())
    with pytest.raises(UnsupportedError, match="map parameter"):
        mindspore_ckpt.read(tmp_path / "m.ckpt")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "complex64", "complex128"])
def test_dtypes_that_mindspore_lacks_are_refused(dtype):
    with pytest.raises(DTypeError, match=dtype) as caught:
        mindspore_ckpt.layout([TensorSpec("w", BY_NAME[dtype], (2,))], {})
    assert caught.value.where["tensor"] == "w"


def test_names_that_cannot_be_written():
    spec = TensorSpec("w", BY_NAME["int8"], (2,))
    with pytest.raises(FormatError, match="this tag"):
        mindspore_ckpt.layout([spec, spec], {})
    with pytest.raises(FormatError, match="this tag"):
        mindspore_ckpt.layout([spec], {"w": ""})
    with pytest.raises(FormatError, match="name"):
        mindspore_ckpt.layout([TensorSpec("", BY_NAME["int8"], (2,))], {})
    with pytest.raises(FormatError, match="UTF-8"):
        mindspore_ckpt.layout([TensorSpec("\ud800", BY_NAME["int8"], (2,))], {})
    with pytest.raises(FormatError, match="surrogate"):
        mindspore_ckpt.seal(mindspore_ckpt.layout([spec], {"s": ""}), {"s": "\ud800"})
