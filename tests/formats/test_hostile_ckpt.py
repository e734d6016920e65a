"""Malformed and hostile .ckpt files: refused with the tensor and the offset; and what MindSpore says to the rest."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptbridge.errors import FormatError, UnsupportedError
from ckptbridge.formats import mindspore_ckpt
from ckptbridge.formats.dtypes import BY_MINDSPORE
from ckptbridge.formats.lazy import read_words

# --- an encoder of its own, which can also do wrong ------------------------------------------


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def block(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def rec(tag: bytes = b"w", content: bytes = bytes(8), dims=(2,), kind: bytes = b"Float32") -> bytes:
    tensor = b"".join(b"\x08" + varint(d % 2**64) for d in dims) + block(2, kind) + block(3, content)
    return block(1, block(1, tag) + block(2, tensor))


GOOD = rec()
W = block(1, b"w")
TENSOR = b"\x08\x02" + block(2, b"Float32") + block(3, bytes(8))

BAD = {
    "nothing": b"",
    "a cut length": b"\x0a",
    "a length past the end": b"\x0a\x7fabc",
    "a huge length": b"\x0a" + b"\xff" * 9 + b"\x01" + b"abc",
    "a cut record": GOOD[:-1],
    "a byte too many": GOOD + b"\0",
    "a second record cut": GOOD + rec(b"v")[:-3],
    "a varint of eleven bytes": b"\x0a" + b"\x80" * 10 + b"\x01",
    "a varint over 64 bits": b"\x0a" + b"\xff" * 9 + b"\x7f",
    "a padded varint": b"\x0a\x80\x00",
    "an empty record": b"\x0a\x00",
    "many empty records": b"\x0a\x00" * 100_000,
    "no tag": block(1, block(2, TENSOR)),
    "an empty tag": rec(b""),
    "no tensor": block(1, W),
    "two tags": block(1, W + W + block(2, TENSOR)),
    "two tensors": block(1, W + block(2, TENSOR) + block(2, TENSOR)),
    "no type": block(1, W + block(2, b"\x08\x02" + block(3, bytes(8)))),
    "no content": block(1, W + block(2, b"\x08\x02" + block(2, b"Float32"))),
    "two types": block(1, W + block(2, TENSOR + block(2, b"Float32"))),
    "two contents": block(1, W + block(2, TENSOR + block(3, b""))),
    "an unknown field of the file": block(2, b""),
    "an unknown field of a record": block(1, W + block(2, TENSOR) + block(4, b"")),
    "an unknown field of a tensor": block(1, W + block(2, TENSOR + block(4, b""))),
    "a number as record": b"\x08\x01",
    "a number as tag": block(1, b"\x08\x01" + block(2, TENSOR)),
    "a number as tensor": block(1, W + b"\x10\x01"),
    "a number as content": block(1, W + block(2, b"\x08\x02" + block(2, b"Float32") + b"\x18\x01")),
    "a group": b"\x0b\x0c",
    "a 32-bit dim": block(1, W + block(2, b"\x0d\x01\0\0\0" + TENSOR)),
    "field number 0": block(0, b""),
    "a negative dim": rec(dims=(-2,)),
    "two negative dims": rec(dims=(-1, -2)),
    "dims that overflow": rec(dims=(2**62, 2**62)),
    "dims that overflow, then vanish": rec(content=b"", dims=(2**62, 2**62, 0)),
    "dims times itemsize overflows": rec(dims=(2**62,)),
    "many dims": rec(content=bytes(4), dims=(1,) * 100),
    "many packed dims": block(1, W + block(2, block(1, b"\x01" * 10**6) + block(2, b"Int8") + block(3, b"a"))),
    "a cut packed dim": block(1, W + block(2, block(1, b"\x80") + block(2, b"Int8") + block(3, b"a"))),
    "content too short": rec(content=bytes(4)),
    "content too long": rec(content=bytes(12)),
    "content for a scalar too long": rec(dims=()),
    "content for an empty tensor": rec(dims=(0, 3)),
    "half an element": rec(content=bytes(6)),
    "a tag that is not UTF-8": rec(b"\xff\xfe"),
    "a tag of 100 kB": rec(b"a" * 100_000),
    "an unknown type": rec(kind=b"Float31"),
    "a type that is not UTF-8": rec(kind=b"\xff"),
    "complex": rec(content=bytes(16), kind=b"Complex64"),
    "packed 4-bit integers": rec(content=b"a", dims=(1,), kind=b"Int4"),
    "a foreign prefix": rec(kind=b"numpy.float32"),
    "a duplicate beside": GOOD + GOOD,
    "a duplicate apart": GOOD + rec(b"v") + GOOD,
    "a duplicate of an empty tensor": rec(content=b"", dims=(0,)) * 2,
    "a duplicate scalar": rec(content=bytes(4), dims=()) * 2,
    "a string and a tensor": rec(b"w", "é".encode("utf-32-le"), (0,), b"str") + GOOD,
    "a string twice": rec(b"s", b"a\0\0\0", (0,), b"str") * 2,
    "a string that is no UTF-32": rec(b"s", b"\xff" * 4, (0,), b"str"),
    "a string of 5 bytes": rec(b"s", b"a\0\0\0a", (0,), b"str"),
    "slices that cut an element": rec(content=bytes(6)) + rec(content=bytes(2)),
    "slices of different dims": rec(content=bytes(4)) + rec(content=bytes(4), dims=(1, 2)),
    "slices of different types": rec(content=bytes(4)) + rec(content=bytes(4), kind=b"Int32"),
    "slices apart": rec(content=bytes(4)) + rec(b"v") + rec(content=bytes(4)),
    "slices with a string between": rec(content=bytes(4)) + rec(b"s", b"a\0\0\0", (0,), b"str") + rec(content=bytes(4)),
    "a slice too many": rec(content=bytes(4)) * 3,
    "an empty slice of a small tensor": GOOD + rec(content=b""),
    "a crc trailer alone": b"crc_num" + bytes(10),
    "a crc trailer twice": GOOD + b"crc_num" + bytes(10) + b"crc_num" + bytes(10),
    "a crc trailer within a record": GOOD[:-8] + b"crc_num" + bytes(10),
    "a cut crc trailer": GOOD + b"crc_num" + bytes(9),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_with_a_place(tmp_path, name):
    path = tmp_path / "f.ckpt"
    path.write_bytes(BAD[name])
    tracemalloc.start()
    with pytest.raises(FormatError) as caught:
        mindspore_ckpt.read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.where["file"] == path
    assert peak < 8 << 20
    if name not in ("nothing", "a crc trailer alone"):
        assert "offset" in caught.value.where


def test_errors_name_the_tensor_and_the_type(tmp_path):
    (tmp_path / "f").write_bytes(rec(b"a.b", kind=b"Float31"))
    with pytest.raises(FormatError, match="Float31") as caught:
        mindspore_ckpt.read(tmp_path / "f")
    assert caught.value.where["tensor"] == "a.b"


def test_a_missing_slice_is_told_from_a_duplicate(tmp_path):
    (tmp_path / "f").write_bytes(rec(content=bytes(4)))
    with pytest.raises(FormatError) as caught:
        mindspore_ckpt.read(tmp_path / "f")
    assert "slice is missing" in caught.value.remedy
    (tmp_path / "f").write_bytes(GOOD + GOOD)
    with pytest.raises(FormatError, match="Two entries"):
        mindspore_ckpt.read(tmp_path / "f")


def test_terminal_escapes_and_path_separators_are_data(tmp_path):
    (tmp_path / "f").write_bytes(rec("../\x1b[2J\u202e".encode()) * 2)
    with pytest.raises(FormatError) as caught:
        mindspore_ckpt.read(tmp_path / "f")
    assert "\x1b" not in str(caught.value)
    assert "\u202e" not in str(caught.value)
    assert "\\x1b" in str(caught.value)


def test_a_billion_records_are_bounded(tmp_path, monkeypatch):
    """The bound itself, made small; and the walk up to it takes time linear in the records."""
    monkeypatch.setattr(mindspore_ckpt, "MAX_RECORDS", 100)
    path = tmp_path / "f"
    path.write_bytes(b"".join(rec(b"w%d" % k, b"", (0,)) for k in range(101)))
    with pytest.raises(FormatError, match="more than 100 records"):
        mindspore_ckpt.read(path)
    path.write_bytes(b"".join(rec(b"w%d" % k, b"", (0,)) for k in range(100)))
    assert len(mindspore_ckpt.read(path).tensors) == 100


def test_many_slices_do_not_hang(tmp_path):
    """A walk that is quadratic in the slices of a tensor would take minutes here."""
    count = 60_000
    (tmp_path / "f").write_bytes(rec(content=b"a", dims=(count,), kind=b"Int8") * count)
    assert len(mindspore_ckpt.read(tmp_path / "f").tensors["w"].segments) == count


@pytest.mark.parametrize("place", range(len(GOOD)))
def test_every_flipped_bit_is_told_by_the_crc(tmp_path, place):
    path = tmp_path / "f"
    path.write_bytes(GOOD)
    whole = GOOD + mindspore_ckpt.crc_trailer(path)
    for bit in range(8):
        for at in {place, len(GOOD) + place} & set(range(len(whole))):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << bit
            path.write_bytes(flipped)
            with pytest.raises(FormatError):
                mindspore_ckpt.read(path, verify_crc=True)


@pytest.mark.parametrize(
    ("content", "shape"),
    [
        (rec(), (2,)),
        (rec(content=bytes(4), dims=()), ()),
        (rec(content=bytes(4), dims=(0,)), ()),  # how earlier versions wrote a scalar
        (rec(content=b"", dims=(0,)), (0,)),
        (rec(kind=b"mindspore.float32"), (2,)),
        (rec(kind=b"mindspore.bool_", content=b"\1\0"), (2,)),
        (rec(content=bytes(4)) * 2, (2,)),  # slices of any size, as MindSpore's loader takes them
        (block(1, W + block(2, block(1, b"\x02") + block(2, b"Float32") + block(3, bytes(8)))), (2,)),  # packed dims
        (block(1, block(2, block(3, bytes(8)) + block(2, b"Float32") + b"\x08\x02") + W), (2,)),  # any order
    ],
)
def test_taken(tmp_path, content, shape):
    (tmp_path / "f").write_bytes(content)
    source = mindspore_ckpt.read(tmp_path / "f").tensors["w"]
    assert source.spec.shape == shape
    assert sum(segment.nbytes for segment in source.segments) == source.spec.nbytes


# --- against the real one --------------------------------------------------------------------


def load_with_mindspore(path: Path) -> dict[str, object] | None:
    import mindspore

    try:
        return mindspore.load_checkpoint(str(path), crc_check=True)
    except (ValueError, TypeError, RuntimeError, KeyError):
        return None


_KINDS = [*(d.mindspore for d in BY_MINDSPORE.values())]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_mutated_files_agree_with_mindspore(tmp_path_factory, data):
    """What MindSpore refuses is refused here; what both take has the same names, shapes, dtypes and bytes."""
    pytest.importorskip("mindspore")
    records = []
    for k in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(_KINDS))
        shape = tuple(data.draw(st.lists(st.integers(1, 3), max_size=3)))
        raw = bytes(range(1, 200))[: int(np.prod(shape)) * BY_MINDSPORE[kind].itemsize]
        raw = raw if kind != "Bool" else b"\1" * len(raw)
        records.append(rec(b"w%d" % k, raw, shape, kind.encode()))
    whole = bytearray(b"".join(records))
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from([whole[at] ^ 1, 0x80, 0])))
    path = tmp_path_factory.mktemp("m") / "f.ckpt"
    path.write_bytes(whole)
    try:
        inventory = mindspore_ckpt.read(path, verify_crc=True)
    except (FormatError, UnsupportedError):
        return
    loaded = load_with_mindspore(path)
    assert loaded is not None
    ours = {**inventory.tensors, **inventory.scalars}
    assert ours.keys() | inventory.strings.keys() == loaded.keys()
    for name, text in inventory.strings.items():
        assert loaded[name] == text
    for name, source in ours.items():
        if source.spec.numel == 0:
            continue  # MindSpore makes a scalar of (0,)
        real = loaded[name]
        assert (real.shape, str(real.dtype)) == (source.spec.shape, source.spec.dtype.mindspore)
        assert real.asnumpy().tobytes() == read_words(source).tobytes()
