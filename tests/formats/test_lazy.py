"""A checkpoint as a mapping of lazily read tensors, in every format; and strided, sliced storages."""

from __future__ import annotations

import sys
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptbridge.errors import FormatError, SourceChangedError, UsageError
from ckptbridge.formats import mindspore_ckpt
from ckptbridge.formats import safetensors as safetensors_format
from ckptbridge.formats.dtypes import BY_MINDSPORE, BY_NAME, DTYPES
from ckptbridge.formats.lazy import numpy_dtype, open_checkpoint, read_words
from ckptbridge.formats.tensors import Segment, TensorSource, TensorSpec


@pytest.mark.parametrize("format_name", ["safetensors", "ckpt", "bin"])
def test_every_dtype_of_every_format(tmp_path, words, write_plain, format_name):
    names = [d.name for d in DTYPES if {"safetensors": d.safetensors, "ckpt": d.mindspore, "bin": d.torch}[format_name]]
    made = {name: (name, words(BY_NAME[name], (3, 2), seed=k)) for k, name in enumerate(names)}
    path = tmp_path / "weights"
    if format_name == "bin":
        raw = {n: torch.from_numpy(np.frombuffer(a.tobytes(), np.uint8).copy()) for n, (_, a) in made.items()}
        torch.save({n: t.view(getattr(torch, n)).reshape(3, 2) for n, t in raw.items()}, path)
    else:
        write_plain(path, {"safetensors": safetensors_format, "ckpt": mindspore_ckpt}[format_name], made)
    opened = open_checkpoint(path)
    assert opened.format == format_name
    assert opened.keys() == made.keys()
    for name, lazy in opened.items():
        array = made[name][1]
        assert (lazy.name, lazy.dtype, lazy.shape, lazy.nbytes) == (name, name, (3, 2), array.nbytes)
        assert lazy.words().tobytes() == array.tobytes()
        values = lazy.numpy()
        assert values.dtype.name == name
        assert values.shape == (3, 2)
        assert values.tobytes() == array.tobytes()
        assert values.flags.c_contiguous
        assert values.flags.writeable


def test_the_values_of_small_floats(tmp_path):
    tensors = {"b": torch.tensor([1.5, -2.0]).bfloat16(), "f": torch.tensor([0.5]).to(torch.float8_e4m3fn)}
    safetensors.torch.save_file(tensors, tmp_path / "f", {"format": "pt"})
    opened = open_checkpoint(str(tmp_path / "f"))
    assert opened["b"].numpy().dtype == ml_dtypes.bfloat16
    assert opened["b"].numpy().tolist() == [1.5, -2.0]
    assert opened["f"].numpy().tolist() == [0.5]
    assert opened.strings == {"format": "pt"}


def test_it_is_a_mapping(tmp_path, write_plain):
    arrays = {
        "z": ("int8", np.ones((2,), "u1")),
        "a": ("int8", np.ones((), "u1")),
        "epoch_num": ("int64", np.ones((), "<u8")),
    }
    write_plain(tmp_path / "f", mindspore_ckpt, arrays, {"append_info": "{}"})
    opened = open_checkpoint(tmp_path / "f")
    assert list(opened) == ["z", "a"]
    assert len(opened) == 2
    assert "a" in opened
    assert "epoch_num" not in opened
    assert opened.scalars["epoch_num"].numpy() == 1
    assert opened.strings == {"append_info": "{}"}
    assert any("epoch_num" in note for note in opened.notes)
    assert opened.path == tmp_path / "f"
    assert opened["a"].numpy().shape == ()
    assert repr(opened["z"]) == "LazyTensor('z', int8, (2,))"
    with pytest.raises(KeyError):
        opened["none"]
    with pytest.raises(TypeError):
        opened["z"] = 1


def test_arrays_are_fresh(tmp_path, write_plain):
    write_plain(tmp_path / "f", mindspore_ckpt, {"w": ("int8", np.ones((2,), "u1"))})
    opened = open_checkpoint(tmp_path / "f")
    opened["w"].numpy()[:] = 5
    assert opened["w"].numpy().tolist() == [1, 1]


def test_strided_tensors_of_a_bin(tmp_path):
    base = torch.arange(24.0).reshape(2, 3, 4)
    torch.save({"t": base.permute(2, 0, 1), "part": base[1:, ::2, 1:3], "same": base}, tmp_path / "f")
    opened = open_checkpoint(tmp_path / "f")
    assert np.array_equal(opened["t"].numpy(), base.permute(2, 0, 1).numpy())
    assert np.array_equal(opened["part"].numpy(), base[1:, ::2, 1:3].numpy())
    assert np.array_equal(opened["same"].numpy(), base.numpy())


def test_a_small_view_of_a_large_storage_is_read_alone(tmp_path):
    import tracemalloc

    torch.save({"v": torch.arange(4_000_000.0)[-3:]}, tmp_path / "f")
    opened = open_checkpoint(tmp_path / "f")
    tracemalloc.start()
    assert opened["v"].numpy().tolist() == [3999997.0, 3999998.0, 3999999.0]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_segments_offsets_and_strides(tmp_path_factory, data):
    """Any view of a storage in pieces, against NumPy's own indexing."""
    dtype = BY_NAME[data.draw(st.sampled_from(["int8", "bfloat16", "float32", "int64", "complex128"]))]
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=4)))
    strides = tuple(data.draw(st.integers(0, 5)) for _ in shape)
    offset = data.draw(st.integers(0, 7))
    last = offset + sum((d - 1) * s for d, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
    count = last + 1 + data.draw(st.integers(0, 4))
    path = tmp_path_factory.mktemp("s") / "f"
    raw = np.random.default_rng(0).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=3))})
    segments, body = [], b""
    for a, b in pairwise(cuts):
        body += bytes(data.draw(st.integers(0, 3)))
        segments.append(Segment(path, len(body), (b - a) * dtype.itemsize))
        body += raw[a * dtype.itemsize : b * dtype.itemsize].tobytes()
    path.write_bytes(body)
    source = TensorSource(TensorSpec("w", dtype, shape), tuple(segments), offset, strides)
    storage = raw.view(dtype.word)
    expected = np.empty(shape, dtype.word)
    for at in np.ndindex(shape):
        expected[at] = storage[offset + sum(i * s for i, s in zip(at, strides, strict=True))]
    found = read_words(source)
    assert found.shape == shape
    assert found.tobytes() == expected.tobytes()


def test_a_file_that_was_cut_meanwhile(tmp_path, write_plain):
    write_plain(tmp_path / "f", mindspore_ckpt, {"w": ("int8", np.ones((100,), "u1"))})
    opened = open_checkpoint(tmp_path / "f")
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[:-10])
    with pytest.raises(SourceChangedError) as caught:
        opened["w"].numpy()
    assert caught.value.where["file"] == tmp_path / "f"
    (tmp_path / "f").unlink()
    with pytest.raises((SourceChangedError, UsageError)):
        opened["w"].numpy()


def test_errors_are_the_familys(tmp_path):
    (tmp_path / "f").write_bytes(b"\x01\x02")
    with pytest.raises(FormatError):
        open_checkpoint(tmp_path / "f")
    with pytest.raises(UsageError):
        open_checkpoint(tmp_path / "none")


def test_numpy_has_every_dtype():
    for dtype in DTYPES:
        assert numpy_dtype(dtype).itemsize == dtype.itemsize


def test_opening_imports_no_framework(tmp_path, write_plain):
    import subprocess

    write_plain(tmp_path / "f.ckpt", mindspore_ckpt, {"w": ("bfloat16", np.ones((2,), "<u2"))})
    code = (
        "import sys; from ckptbridge.formats.lazy import open_checkpoint; open_checkpoint(sys.argv[1])['w'].numpy(); "
        "assert not {'torch', 'mindspore', 'transformers', 'safetensors'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "f.ckpt")], check=True)


# --- round trips through the writers ---------------------------------------------------------


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(lambda n: n != "__metadata__")
KINDS = st.sampled_from(sorted(d.name for d in BY_MINDSPORE.values()))
SHAPES = st.lists(st.integers(0, 4), max_size=3)


@given(
    st.dictionaries(NAMES, st.tuples(KINDS, SHAPES), max_size=5),
    st.dictionaries(st.text(min_size=1, max_size=5).map(lambda n: "s:" + n), st.text(max_size=9), max_size=3),
    st.sampled_from([safetensors_format, mindspore_ckpt]),
)
@settings(max_examples=150, deadline=None)
def test_what_is_written_is_read(tmp_path_factory, words, write_plain, entries, strings, module):
    made = {name: (dtype, words(BY_NAME[dtype], tuple(shape))) for name, (dtype, shape) in entries.items()}
    made = {name: value for name, value in made.items() if name not in strings}
    if module is mindspore_ckpt and not made and not strings:
        return  # a .ckpt of nothing is an empty file
    strings = {key: text.rstrip("\0") for key, text in strings.items()}
    path = tmp_path_factory.mktemp("r") / "f"
    write_plain(path, module, made, strings)
    inventory = module.read(path)
    assert inventory.strings == strings
    found = {**inventory.tensors, **inventory.scalars}
    assert {n: (s.spec.dtype.name, s.spec.shape, read_words(s).tobytes()) for n, s in found.items()} == {
        n: (dtype, array.shape, array.tobytes()) for n, (dtype, array) in made.items()
    }
