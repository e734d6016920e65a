"""The safetensors reader and writer against the real library."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptbridge.errors import DTypeError, FormatError, UnsupportedError
from ckptbridge.formats import safetensors as ours
from ckptbridge.formats.dtypes import BY_NAME, BY_SAFETENSORS
from ckptbridge.formats.lazy import read_words
from ckptbridge.formats.tensors import TensorSpec

DTYPES = sorted(d.name for d in BY_SAFETENSORS.values())


def torch_tensor(dtype: str, array: np.ndarray) -> torch.Tensor:
    if array.size == 0:
        return torch.empty(array.shape, dtype=getattr(torch, dtype))
    flat = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())
    return flat.view(getattr(torch, dtype)).reshape(array.shape)


def arrays(words) -> dict[str, tuple[str, np.ndarray]]:
    shapes = [(), (0, 3), (5,), (3, 2), (1, 1, 7)]
    return {
        f"{dtype}/é\n\u2028{shape}": (dtype, words(BY_NAME[dtype], shape, seed=k))
        for k, dtype in enumerate(DTYPES)
        for shape in shapes
    }


@pytest.mark.parametrize("strings", [{}, {"format": "pt"}], ids=["no metadata", "metadata"])
def test_bytes_equal_the_librarys(tmp_path, words, write_plain, strings):
    made = dict(sorted(arrays(words).items()))
    write_plain(tmp_path / "ours", ours, made, strings)
    safetensors.torch.save_file({n: torch_tensor(*a) for n, a in made.items()}, tmp_path / "real", strings or None)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "real").read_bytes()


def test_reads_what_the_library_wrote(tmp_path, words):
    made = arrays(words)
    safetensors.torch.save_file({n: torch_tensor(*a) for n, a in made.items()}, tmp_path / "real", {"format": "pt"})
    inventory = ours.read(tmp_path / "real")
    assert inventory.strings == {"format": "pt"}
    assert inventory.tensors.keys() == made.keys()
    for name, source in inventory.tensors.items():
        dtype, array = made[name]
        assert (source.spec.dtype.name, source.spec.shape) == (dtype, array.shape)
        assert read_words(source).tobytes() == array.tobytes()


def test_placeholders_reserve_the_header(tmp_path, words, write_plain):
    made = {"b": ("bool", words(BY_NAME["bool"], (3,))), "a": ("float64", words(BY_NAME["float64"], (2,)))}
    write_plain(tmp_path / "f", ours, made, {"digest": "ab"}, placeholders={"digest": "0" * 64})
    opened = safetensors.safe_open(tmp_path / "f", "pt")
    assert opened.metadata() == {"digest": "ab"}
    assert opened.get_tensor("b").numpy().tobytes() == made["b"][1].tobytes()
    assert opened.get_tensor("a").numpy().tobytes() == made["a"][1].tobytes()
    layout = ours.layout([TensorSpec("a", BY_NAME["int8"], (1,))], {"digest": ""})
    with pytest.raises(FormatError, match="reserved"):
        ours.seal(layout, {"digest": "0" * 64}, None)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4)), max_size=8))
@settings(max_examples=60, deadline=None)
def test_every_tensor_is_aligned_and_in_its_place(entries):
    specs = [TensorSpec(f"t{k}", BY_NAME[d], tuple(shape)) for k, (d, shape) in enumerate(entries)]
    layout = ours.layout(specs, {"format": "pt"})
    runs = sorted((p.offset, p.nbytes, s) for s, places in enumerate(layout.places) for p in places)
    at = layout.size - sum(spec.nbytes for spec in specs)
    assert at % 8 == 0
    for offset, nbytes, k in runs:
        assert offset == at
        assert offset % specs[k].dtype.itemsize == 0
        assert nbytes == specs[k].nbytes
        at += nbytes
    assert at == layout.size


def test_what_cannot_be_written_is_refused():
    spec = TensorSpec("w", BY_NAME["int8"], (2,))
    with pytest.raises(FormatError, match="this name"):
        ours.layout([spec, spec], {})
    with pytest.raises(FormatError, match="this name"):
        ours.layout([TensorSpec("__metadata__", BY_NAME["int8"], (2,))], {})
    with pytest.raises(DTypeError, match="complex128"):
        ours.layout([TensorSpec("w", BY_NAME["complex128"], (2,))], {})
    with pytest.raises(FormatError, match="surrogate"):
        ours.layout([spec], {"a": "\ud800"})


# --- hostile headers -------------------------------------------------------------------------


def raw(header: bytes | dict, data: bytes = b"") -> bytes:
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header)) + header + data


def entry(dtype: object, shape: object, *offsets: object) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


BAD = {
    "nothing": b"",
    "seven bytes": b"\0" * 7,
    "no header": struct.pack("<Q", 0),
    "header past the end": struct.pack("<Q", 100) + b"{}",
    "header over the bound": struct.pack("<Q", 100_000_001) + b"{}",
    "header length overflows": b"\xff" * 8 + b"{}",
    "list": raw(b"[]"),
    "number": raw(b"1"),
    "cut JSON": raw(b'{"a":'),
    "two JSON values": raw(b"{}{}"),
    "not UTF-8": raw(b'{"\xff":1}'),
    "byte order mark": raw(b"\xef\xbb\xbf{}"),
    "deep": raw(b'{"a":' + b"[" * 100_000),
    "huge integer": raw(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}'),
    "surrogate": raw(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"a"),
    "NaN": raw(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"a"),
    "unknown dtype": raw({"a": entry("F3", [1], 0, 1)}, b"a"),
    "dtype no string": raw({"a": entry(["U8"], [1], 0, 1)}, b"a"),
    "shape a string": raw({"a": entry("U8", "1", 0, 1)}, b"a"),
    "float length": raw({"a": entry("U8", [1.0], 0, 1)}, b"a"),
    "negative length": raw({"a": entry("U8", [-1], 0, 1)}, b"a"),
    "minus zero": raw(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'),
    "true as length": raw({"a": entry("U8", [True], 0, 1)}, b"a"),
    "null as length": raw({"a": entry("U8", [None], 0, 1)}, b"a"),
    "shape overflows": raw({"a": entry("U8", [2**40, 2**40, 0], 0, 0)}),
    "bits overflow": raw({"a": entry("F64", [2**60], 0, 0)}),
    "one offset": raw({"a": entry("U8", [1], 0)}, b"a"),
    "three offsets": raw({"a": entry("U8", [1], 0, 1, 2)}, b"a"),
    "offsets backwards": raw({"a": entry("U8", [1], 1, 0)}, b"a"),
    "too few bytes": raw({"a": entry("F32", [1], 0, 3)}, b"abc"),
    "past the end": raw({"a": entry("U8", [4], 0, 4)}, b"abc"),
    "trailing byte": raw({"a": entry("U8", [2], 0, 2)}, b"abc"),
    "hole": raw({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"abc"),
    "hole first": raw({"a": entry("U8", [1], 1, 2)}, b"ab"),
    "overlap": raw({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"abc"),
    "the same bytes": raw({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 0, 2)}, b"ab"),
    "missing field": raw({"a": {"dtype": "U8", "shape": [0]}}),
    "entry null": raw({"a": None}),
    "metadata no strings": raw({"__metadata__": {"a": 1}}),
    "metadata a list": raw({"__metadata__": ["a"]}),
    "field twice": raw(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"dtype":"U8"}}', b"a"),
}

# What the library takes and this reader does not, each because the file says two things or nobody can load it.
STRICTER = {
    "tensor twice": raw(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
        b"a",
    ),
    "metadata key twice": raw(b'{"__metadata__":{"a":"1","a":"2"}}'),
    "unknown field": raw({"a": {**entry("U8", [1], 0, 1), "strides": [1]}}, b"a"),
    "entry as a list": raw(b'{"a":["U8",[1],[0,1]]}', b"a"),
    "33 dimensions": raw({"a": entry("U8", [1] * 33, 0, 1)}, b"a"),
    "no framework's dtype": raw({"a": entry("F4", [2], 0, 1)}, b"a"),
    "length over 63 bits": raw({"a": entry("U8", [0, 2**63], 0, 0)}),
}

GOOD = {
    "nothing in it": raw(b"{}"),
    "white space": raw(b' {"a" : {"dtype":"U8","shape":[1],"data_offsets":[0,1]}}\n\t ', b"a"),
    "metadata null": raw({"__metadata__": None, "a": entry("U8", [1], 0, 1)}, b"a"),
    "unordered header": raw({"b": entry("U8", [1], 1, 2), "a": entry("U8", [1], 0, 1)}, b"ab"),
    "empty tensors anywhere": raw(
        {"z": entry("F32", [0], 1, 1), "a": entry("U8", [1], 0, 1), "e": entry("F32", [7, 0], 0, 0)}, b"a"
    ),
    "not aligned": raw({"a": entry("BOOL", [1], 0, 1), "b": entry("F32", [1], 1, 5)}, b"\1abcd"),
    "empty name": raw({"": entry("U8", [1], 0, 1)}, b"a"),
    "control characters in a name": raw({"\x1b[2J": entry("U8", [1], 0, 1)}, b"a"),
}


def library_opens(path) -> bool:
    try:
        with safetensors.safe_open(path, "np"):
            return True
    except safetensors.SafetensorError:
        return False


@pytest.mark.parametrize("name", BAD)
def test_refused_as_by_the_library(tmp_path, name):
    path = tmp_path / "f"
    path.write_bytes(BAD[name])
    assert not library_opens(path)
    with pytest.raises(FormatError) as caught:
        ours.read(path)
    assert caught.value.where["file"] == path


@pytest.mark.parametrize("name", STRICTER)
def test_refused_though_the_library_is_silent(tmp_path, name):
    path = tmp_path / "f"
    path.write_bytes(STRICTER[name])
    assert library_opens(path)
    with pytest.raises(FormatError):
        ours.read(path)


@pytest.mark.parametrize("name", GOOD)
def test_taken_as_by_the_library(tmp_path, name):
    path = tmp_path / "f"
    path.write_bytes(GOOD[name])
    real = safetensors.torch.load(path.read_bytes())
    inventory = ours.read(path)
    assert {n: (tuple(t.shape), t.numpy().tobytes()) for n, t in real.items()} == {
        n: (s.spec.shape, read_words(s).tobytes()) for n, s in inventory.tensors.items()
    }


def test_errors_name_the_tensor(tmp_path):
    (tmp_path / "f").write_bytes(BAD["overlap"])
    with pytest.raises(FormatError) as caught:
        ours.read(tmp_path / "f")
    assert caught.value.where["tensor"] == "b"


def test_mindspores_packed_integers_are_named(tmp_path):
    (tmp_path / "f").write_bytes(raw({"__metadata__": {"a": "Int4"}, "a": entry("I8", [1], 0, 1)}, b"a"))
    with pytest.raises(UnsupportedError, match="4-bit"):
        ours.read(tmp_path / "f")


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_mutated_files_agree_with_the_library(tmp_path_factory, data):
    """On any file, what the library refuses is refused here, and what both take is the same."""
    base = bytearray(data.draw(st.sampled_from(list({**GOOD, **BAD, **STRICTER}.values()))))
    for _ in range(data.draw(st.integers(0, 3))):
        if not base:
            break
        at = data.draw(st.integers(0, len(base) - 1))
        how = data.draw(st.sampled_from(["set", "delete", "insert"]))
        if how == "set":
            base[at] = data.draw(st.integers(0, 255))
        elif how == "delete":
            del base[at]
        else:
            base[at:at] = data.draw(st.sampled_from([b"0", b"9", b",", b"}", b"-", b'"', b"\x00", b"\xc3\xa9"]))
    path = tmp_path_factory.mktemp("m") / "f"
    path.write_bytes(base)
    try:
        inventory = ours.read(path)
    except (FormatError, UnsupportedError):
        return
    with safetensors.safe_open(path, "np") as real:
        assert set(real.keys()) == inventory.tensors.keys()
        assert (real.metadata() or {}) == inventory.strings
        for name, source in inventory.tensors.items():
            part = real.get_slice(name)
            assert (tuple(part.get_shape()), part.get_dtype()) == (source.spec.shape, source.spec.dtype.safetensors)
