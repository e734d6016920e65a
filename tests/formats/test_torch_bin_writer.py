"""The .bin writer: torch.save's own bytes, which torch loads with weights_only and as a memory map."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptbridge.errors import FormatError
from ckptbridge.formats import torch_bin, torch_zip
from ckptbridge.formats.dtypes import BY_NAME, BY_TORCH, DTYPES
from ckptbridge.formats.tensors import FileLayout, Segment, TensorSpec

SERIALIZATION_ID = b"archive/.data/serialization_id"
SHAPES = [(3, 5), (), (0, 4), (4, 0, 2), (1,), (2, 3, 4, 5), (300,), (70000,)]


def specs_of(state: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(n, BY_TORCH[str(t.dtype)[len("torch.") :]], tuple(t.shape)) for n, t in state.items()]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def write(path: Path, state: Mapping[str, torch.Tensor]) -> FileLayout:
    layout = torch_zip.layout(specs_of(state), {})
    contents = [raw(tensor) for tensor in state.values()]
    runs = list(layout.fixed)
    for places, data in zip(layout.places, contents, strict=True):
        runs += [(place.offset, data[place.start : place.start + place.nbytes]) for place in places]
    runs += torch_zip.seal(layout, {}, [zlib.crc32(data) for data in contents])
    put(path, layout.size, runs)
    return layout


def put(path: Path, size: int, runs: Sequence[tuple[int, bytes]]) -> None:
    with path.open("wb") as file:
        file.truncate(size)
        for offset, data in runs:
            file.seek(offset)
            file.write(data)


def random_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = getattr(torch, BY_NAME[name].torch)
    flat = torch.randint(0, 2 if name == "bool" else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


@pytest.fixture
def state() -> OrderedDict[str, torch.Tensor]:
    """Every dtype with every shape, under plain and unusual names."""
    made = OrderedDict((f"{d}.{k}", random_tensor(d.name, shape)) for d in DTYPES for k, shape in enumerate(SHAPES))
    made["größe.重み.\U0001f9ee"] = torch.ones(2)
    made[""] = torch.zeros(3)
    made["long." * 60] = torch.zeros(1)
    return made


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_it(tmp_path: Path, state: OrderedDict[str, torch.Tensor], mmap: bool) -> None:
    path = tmp_path / "a.bin"
    write(path, state)
    loaded = torch.load(path, weights_only=True, mmap=mmap)
    assert type(loaded) is OrderedDict and list(loaded) == list(state)
    for name, tensor in state.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert loaded[name].stride() == tensor.stride() and raw(loaded[name]) == raw(tensor)


def test_it_is_what_torch_saves(tmp_path: Path, state: OrderedDict[str, torch.Tensor]) -> None:
    assert_equal_to_torch(tmp_path / "a.bin", state)


def assert_equal_to_torch(path: Path, state: OrderedDict[str, torch.Tensor]) -> None:
    """Equal bytes up to torch's last record; and the directory, apart from that record's entry."""
    layout = write(path, state)
    ours, theirs = path.read_bytes(), io.BytesIO()
    torch.save(state, theirs)
    real = theirs.getvalue()
    assert ours[: layout.size] == real[: layout.size]
    with zipfile.ZipFile(theirs) as archive:
        start, last = archive.start_dir, archive.infolist()[-1]
        assert last.filename.encode() == SERIALIZATION_ID and last.header_offset == layout.size
    length = real.rindex(SERIALIZATION_ID) - 46 - start
    assert ours[layout.size : layout.size + length] == real[start : start + length]


@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 1001, 2500])
def test_any_number_of_tensors(tmp_path: Path, count: int) -> None:
    state = OrderedDict((f"layer.{k}.weight", torch.tensor(float(k))) for k in range(count))
    assert_equal_to_torch(tmp_path / "a.bin", state)


@settings(max_examples=40, deadline=None)
@given(
    named=st.dictionaries(
        # Names of one Latin-1 character are shared objects in CPython, so its pickler may write them once.
        st.text(min_size=2, max_size=30).filter(lambda name: name not in ("storage", "cpu")),
        st.tuples(st.sampled_from(sorted(BY_NAME)), st.lists(st.integers(0, 5), max_size=5)),
        max_size=6,
    )
)
def test_random_states_are_what_torch_saves(
    tmp_path_factory: pytest.TempPathFactory, named: dict[str, tuple[str, list[int]]]
) -> None:
    state = OrderedDict((name, random_tensor(dtype, tuple(shape))) for name, (dtype, shape) in named.items())
    assert_equal_to_torch(tmp_path_factory.mktemp("bin") / "a.bin", state)


def test_the_zip_is_a_good_one(tmp_path: Path, state: OrderedDict[str, torch.Tensor]) -> None:
    path = tmp_path / "a.bin"
    write(path, state)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
        for k, tensor in enumerate(state.values()):
            assert archive.read(f"archive/data/{k}") == raw(tensor)


def test_wrong_checksums_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    layout = write(path, {"w": torch.ones(4)})
    with path.open("r+b") as file:
        file.seek(layout.places[0][0].offset)
        file.write(b"\x01")
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() == "archive/data/0"


def test_our_reader_finds_every_tensor_where_it_was_put(tmp_path: Path, state: OrderedDict[str, torch.Tensor]) -> None:
    path = tmp_path / "a.bin"
    layout = write(path, state)
    inventory = torch_bin.read(path)
    assert [source.spec for source in inventory.tensors.values()] == specs_of(state) == list(layout.specs)
    for source, places in zip(inventory.tensors.values(), layout.places, strict=True):
        assert source.contiguous and source.offset == 0
        if places:
            assert source.segments == (Segment(path, places[0].offset, places[0].nbytes),)
            assert places[0].start == 0 and places[0].offset % 64 == 0
        else:
            assert source.spec.numel == 0
    assert inventory.aliases == {} and inventory.notes == ()


def test_the_bytes_are_the_same_every_time(tmp_path: Path, state: OrderedDict[str, torch.Tensor]) -> None:
    write(tmp_path / "a.bin", state)
    write(tmp_path / "b.pt", state)
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_the_runs_of_bytes_fill_the_file_without_overlap(state: OrderedDict[str, torch.Tensor]) -> None:
    layout = torch_zip.layout(specs_of(state), {})
    runs = [(offset, len(data)) for offset, data in layout.fixed]
    runs += [(place.offset, place.nbytes) for places in layout.places for place in places]
    runs += [(offset, len(data)) for offset, data in torch_zip.seal(layout, {}, [0] * len(state))]
    at = 0
    for offset, nbytes in sorted(run for run in runs if run[1]):
        assert offset == at
        at += nbytes
    assert at > layout.size and layout.needs_crc


@pytest.mark.parametrize("names", [["a", "a"], ["\ud800"]])
def test_impossible_names(names: list[str]) -> None:
    with pytest.raises(FormatError) as error:
        torch_zip.layout([TensorSpec(name, BY_NAME["float32"], (1,)) for name in names], {})
    assert error.value.where["tensor"] == names[0] and error.value.remedy


def test_strings_have_no_room() -> None:
    with pytest.raises(FormatError, match="no room for strings"):
        torch_zip.layout([], {"ckptbridge": "{}"})
    with pytest.raises(FormatError, match="no room for strings"):
        torch_zip.seal(torch_zip.layout([], {}), {"ckptbridge": "{}"}, [])


def mapped(zeros: Path, spec: TensorSpec) -> torch.Tensor:
    """A tensor over a sparse file, whose pages are never touched."""
    dtype = getattr(torch, spec.dtype.torch)
    if not spec.numel:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.from_file(str(zeros), shared=True, size=spec.nbytes, dtype=torch.uint8).view(dtype).view(spec.shape)


def test_beyond_four_gigabytes(tmp_path: Path) -> None:
    """Sizes and offsets over 32 bits, against a file that torch itself laid out: sparse, only headers are written."""
    shapes = {
        "small": ("int16", (5,)),
        "large": ("uint8", (5 << 30,)),
        "behind": ("float32", (3, 5)),
        "empty": ("float32", (0, 2)),
        "edge": ("int8", ((1 << 32) - 1,)),
        "newer": ("uint16", ((1 << 31) + 7,)),
        "last": ("float64", ()),
    }
    zeros = tmp_path / "zeros"
    specs = [TensorSpec(name, BY_NAME[dtype], shape) for name, (dtype, shape) in shapes.items()]
    state = OrderedDict((spec.name, mapped(zeros, spec)) for spec in specs)
    theirs, path = tmp_path / "archive.bin", tmp_path / "ours.bin"
    try:
        with torch.serialization.skip_data():
            torch.save(state, theirs)
        layout = torch_zip.layout(specs, {})
        # Under skip_data torch leaves the checksums of the data 0.
        sealed = torch_zip.seal(layout, {}, [0] * len(state))
        put(path, layout.size, [*layout.fixed, *sealed])
        assert theirs.stat().st_blocks < 1000 and path.stat().st_blocks < 1000
        with theirs.open("rb") as file, zipfile.ZipFile(theirs) as real, zipfile.ZipFile(path) as ours:
            assert real.infolist()[-1].header_offset == layout.size > 12 << 30
            for offset, data in (*layout.fixed, *sealed[:-1]):
                file.seek(offset)
                assert file.read(len(data)) == data
            directory = real.fp
            assert directory is not None
            directory.seek(real.start_dir)
            length = sealed[-1][1].index(b"PK\x06\x06")
            assert directory.read(length) == sealed[-1][1][:length]
            assert ours.start_dir == layout.size
            assert [(i.filename, i.file_size, i.header_offset) for i in ours.infolist()] == [
                (i.filename, i.file_size, i.header_offset) for i in real.infolist()[:-1]
            ]
        # Both files by our reader, and ours by torch, which maps it and reads nothing.
        inventories = [torch_bin.read(file) for file in (path, theirs)]
        for inventory in inventories:
            found = [s.segments[0].offset for s in inventory.tensors.values() if s.spec.numel]
            assert found == [places[0].offset for places in layout.places if places]
        with path.open("r+b") as file:
            file.seek(layout.places[-1][0].offset)
            file.write(torch.tensor(2.5, dtype=torch.float64).numpy().tobytes())
        loaded = torch.load(path, weights_only=True, mmap=True)
        assert loaded["last"].item() == 2.5 and loaded["large"].shape == (5 << 30,)
        assert list(loaded) == list(state)
    finally:
        for made in (theirs, path, zeros):
            made.unlink(missing_ok=True)
