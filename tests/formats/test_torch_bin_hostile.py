"""Hostile and damaged .bin files: nothing runs, nothing grows, and what was found is said."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
import time
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Set
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptbridge.errors import CkptBridgeError, FormatError
from ckptbridge.formats import pickles, torch_bin, wrappers
from ckptbridge.formats.lazy import read_words

FORMS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "older"])
PROTO = b"\x80\x02"


def zip_file(path: Path, code: bytes, storages: dict[str, bytes] | None = None) -> Path:
    """A file of the zip form with the pickle ``code``."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", code)
        archive.writestr("a/version", "3\n")
        for key, data in (storages or {}).items():
            archive.writestr(f"a/data/{key}", data)
    return path


def older_file(path: Path, code: bytes) -> Path:
    """A file of the older form with the pickle ``code`` and no storages."""
    head = (torch_bin.MAGIC_NUMBER, torch_bin.PROTOCOL_VERSION, {"little_endian": True})
    path.write_bytes(b"".join(pickle.dumps(v, protocol=2) for v in head) + code + pickle.dumps([], protocol=2))
    return path


def tensor_code(
    offset: object = 0, size: object = (2,), stride: object = (1,), numel: object = 2, key: str = "0", kind: str = ""
) -> bytes:
    """The pickler's opcodes for a tensor, with anything in the place of its numbers."""

    def dumped(value: object) -> bytes:
        # Without PROTO and STOP, and without the memo, which would collide.
        return pickletools.optimize(pickle.dumps(value, protocol=2))[2:-1]

    pid = b"(X\x07\x00\x00\x00storagectorch\n" + (kind or "FloatStorage").encode() + b"\n" + dumped(key)
    pid += b"X\x03\x00\x00\x00cpu" + dumped(numel) + b"tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + dumped(offset) + dumped(size) + dumped(stride) + b"\x89}tR"


def state_code(*entries: bytes) -> bytes:
    """The pickle of {"a": first entry, "b": second ...}."""
    items = [b"X\x01\x00\x00\x00" + bytes([97 + k]) + entry for k, entry in enumerate(entries)]
    return PROTO + b"}(" + b"".join(items) + b"u."


def refused(path: Path, what: str = "") -> CkptBridgeError:
    with pytest.raises(CkptBridgeError, match=what or None) as error:
        torch_bin.read(path)
    assert error.value.remedy and str(path) in str(error.value)
    return error.value


# --- nothing runs ----------------------------------------------------------------------------


class Runs:
    """Pickles to a call."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def calls(canary: Path) -> list[Runs]:
    touch = f"open({str(canary)!r}, 'w').close()"
    return [
        Runs(os.system, f"touch {canary}"),
        Runs(exec, touch),
        Runs(eval, touch),
        Runs(open, str(canary), "w"),
        Runs(os.mkdir, str(canary)),
        Runs(getattr, Runs(__import__, "os"), "system"),
        Runs(torch.save, 1, str(canary)),
    ]


@pytest.mark.parametrize("k", range(6))
def test_the_canary_works(tmp_path: Path, k: int) -> None:
    canary = tmp_path / "canary"
    pickle.loads(pickle.dumps(calls(canary)[k]))
    assert canary.exists() or k == 5  # which has no effect of its own, and imports


@FORMS
@pytest.mark.parametrize("k", range(7))
def test_no_call_is_made(tmp_path: Path, k: int, zipped: bool) -> None:
    canary, path = tmp_path / "canary", tmp_path / "a.pt"
    state = {"w": torch.ones(2), "hook": calls(canary)[k]}
    torch.save({"model": state, "evil": calls(canary)[k]}, path, _use_new_zipfile_serialization=zipped)
    inventory = torch_bin.read(path)
    assert not canary.exists()
    assert list(inventory.tensors) == ["w"]
    assert any("neither imported nor called" in note for note in inventory.notes)


@FORMS
def test_no_call_in_odd_places_is_made(tmp_path: Path, zipped: bool) -> None:
    # As a dict key, as a tensor's argument, by STACK_GLOBAL, by BUILD, as a persistent id, at the very top.
    canary = tmp_path / "canary"
    command = pickle.dumps(f"touch {canary}", protocol=2)[2:-1]
    system = b"cposix\nsystem\n"
    call = system + command + b"\x85R"
    codes = [
        PROTO + call + b".",
        PROTO + b"}" + call + b"K\x01s.",
        PROTO + b"ctorch._utils\n_rebuild_tensor_v2\n(" + call + b"tR.",
        PROTO + call + b"Q.",
        b"\x80\x04X\x05\x00\x00\x00posixX\x06\x00\x00\x00system\x93" + command + b"\x85R.",
        PROTO + b"cargparse\nNamespace\n)\x81}X\x0c\x00\x00\x00__setstate__" + system + b"sb.",
        PROTO + b"ctorch._tensor\n_rebuild_from_type_v2\n(" + system + b"ctorch\nTensor\n" + command + b"\x85}tR.",
        PROTO + b"ccollections\ndefaultdict\n" + system + b"\x85RX\x01\x00\x00\x00ah0s.",
    ]
    for k, code in enumerate(codes):
        path = zip_file(tmp_path / f"{k}.pt", code) if zipped else older_file(tmp_path / f"{k}.pt", code)
        refused(path)
        assert not canary.exists()


def test_names_reach_the_terminal_escaped(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(1)}, "\x1b[2J\u202eevil": 1}
    path = tmp_path / "a.pt"
    torch.save(state, path)
    assert not any(c in note for note in torch_bin.read(path).notes for c in ("\x1b", "\u202e"))


# --- nothing grows ---------------------------------------------------------------------------


def peak(path: Path) -> int:
    """Bytes allocated at most while the file is read, whatever comes of it."""
    tracemalloc.start()
    try:
        with pytest.raises(CkptBridgeError):
            torch_bin.read(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


NESTED = {
    "lists": b"]" * 50_000 + b"a" * 49_999,
    "tuples": b")" + b"\x85" * 50_000,
    "dicts": b"}" + b"K\x01}" * 50_000 + b"s" * 50_000,
}


@pytest.mark.parametrize("code", NESTED.values(), ids=NESTED.keys())
@FORMS
def test_deep_nesting(tmp_path: Path, code: bytes, zipped: bool) -> None:
    make = zip_file if zipped else older_file
    assert peak(make(tmp_path / "a.pt", PROTO + code + b".")) < 200 * len(code)
    beside = state_code(tensor_code(), code)
    refused(zip_file(tmp_path / "b.pt", beside, {"0": bytes(8)}), "nested more than")


def test_deeply_nested_stubs_and_marks(tmp_path: Path) -> None:
    # C((C((C(...),),),),): each instance an argument of the next.
    stubs = b"cm\nC\nq\x000" + b"h\x00" * 50_000 + b")" + b"\x81\x85" * 50_000
    refused(zip_file(tmp_path / "s.pt", PROTO + stubs + b"."), "no tensors")
    refused(zip_file(tmp_path / "m.pt", PROTO + b"(" * 100_000), "nested more than 1000 deep")


def test_shared_and_recursive_objects_are_walked_once(tmp_path: Path) -> None:
    # 60 pairs, each of twice the one before: 2**60 leaves. And a list that holds itself.
    pairs = b"N" + b"2\x86" * 60
    lists = b"]q\x00h\x00a"
    for k, code in enumerate((pairs, lists, b"}" + pairs + b"K\x01s", b"}(X\x01\x00\x00\x00a" + pairs + b"u")):
        started = time.monotonic()
        refused(zip_file(tmp_path / f"{k}.pt", PROTO + code + b"."), "no tensors")
        assert time.monotonic() - started < 5


def test_modules_in_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrappers, "MAX_MODULES", 10_000)
    # A module tree of 40 levels whose two children are one object each: 2**40 names.
    leaf = b"ctorch.nn\nM\n)\x81}(X\x0b\x00\x00\x00_parameters}X\x08\x00\x00\x00_modules}ub"
    level = (
        b"\x85q\x010ctorch.nn\nM\n)\x81}(X\x0b\x00\x00\x00_parameters}X\x08\x00\x00\x00_modules}("
        b"X\x01\x00\x00\x00ah\x02X\x01\x00\x00\x00bh\x02uub"
    )
    code = PROTO + leaf + (b"q\x02" + level) * 40 + b"."
    refused(zip_file(tmp_path / "m.pt", code), "nested too deeply, or in each other")


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (b"\x8b\xff\xff\xff\x7f", "integer has 2147483647 bytes"),
        (b"\x8b\x00\x00\x00\x80", "integer has -2147483648 bytes"),
        (b"\x8b\x00\x04\x00\x00" + b"\x7f" * 1024, "integer has 1024 bytes"),
        (b"I" + b"9" * 1000 + b"\n", "text form"),
        (b"L" + b"9" * 5000 + b"L\n", "longer than"),
        (b"I--5\n", "text form"),
        (b"X\xff\xff\xff\xff", "reaches past"),
        (b"\x8d" + b"\xff" * 8, "reaches past"),
        (b"\x8e" + b"\xff" * 7 + b"\x7f", "reaches past"),
        (b"\x96" + b"\xff" * 8, "reaches past"),
        (b"B\xff\xff\xff\x7f", "reaches past"),
        (b"X\x05\x00\x00\x00ab", "ends within|reaches past"),
        (b"X\x02\x00\x00\x00\xff\xfe", "UTF-8"),
        (b"h\x07", "Memo entry 7"),
        (b"j\xff\xff\xff\xff", "Memo entry 4294967295"),
        (b"r\xff\xff\xff\xff", "stack"),
        (b"0", "mark"),
        (b"t", "mark"),
        (b"NNR", "no tuple"),
        (b"N)R", "neither a class"),
        (b"Na", "stack|no list"),
        (b"NNa", "no list"),
        (b"NNNs", "no dict"),
        (b"}(Nu", "pairs"),
        (b"}]Ns", "cannot be one"),
        (b"}}Ns", "cannot be one"),
        (b"NNb", "State is set"),
        (b"\x82\x01", "0x82"),
        (b"\x97", "0x97"),
        (b"S'a'\n", "0x53"),
        (b"\x80\x09", "protocol is 9"),
        (b"c" + b"a" * 5000 + b"\nb\n", "longer than"),
        (b"c\xff\nb\n", "proper name"),
        (b"NN\x93", "proper name"),
        (b"NQ", "persistent id"),
        (b"X\x05\x00\x00\x00hello\x85Q", "names no storage"),
        (b"", "ends within|stack"),
    ],
)
@FORMS
def test_malformed_pickles(tmp_path: Path, code: bytes, what: str, zipped: bool) -> None:
    make = zip_file if zipped else older_file
    # The older form has its list of keys behind the pickle, so "past the end" is further away there.
    path = make(tmp_path / "a.pt", PROTO + code + (b"." if code else b""))
    error = refused(path, what if zipped else "")
    assert isinstance(error, FormatError) and "offset" in error.where
    assert peak(path) < 2_000_000


def test_large_memo_numbers_take_no_room(tmp_path: Path) -> None:
    code = PROTO + b"N" + b"".join(b"r" + struct.pack("<I", 2**32 - 1 - k) for k in range(1000)) + b"."
    assert peak(zip_file(tmp_path / "a.pt", code)) < 2_000_000


def test_long_strings_are_passed_over_unread(tmp_path: Path) -> None:
    # A string of 8 GB in a sparse file, among the weights.
    path = older_file(tmp_path / "a.pt", b"")
    head = path.read_bytes()[: -len(pickle.dumps([], protocol=2))]
    length = 8 << 30
    start = head + PROTO + b"\x8e" + struct.pack("<Q", length)
    with path.open("wb") as file:
        file.write(start)
        file.truncate(len(start) + length)
        file.seek(0, os.SEEK_END)
        file.write(b"." + pickle.dumps([], protocol=2))
    try:
        assert peak(path) < 2_000_000
    finally:
        path.unlink()


def test_containers_copied_again_and_again(tmp_path: Path) -> None:
    # A list of 1000 pairs, made into an OrderedDict 100,000 times at three bytes each.
    pairs = b"](" + b"".join(b"M" + struct.pack("<H", k) + b"N\x86" for k in range(1000)) + b"e\x85q\x010"
    for kind in (b"ccollections\nOrderedDict\nq\x000", b"c__builtin__\nset\nq\x000"):
        code = PROTO + kind + pairs + b"(" + b"h\x00h\x01R" * 100_000 + b"l."
        path = zip_file(tmp_path / "a.pt", code)
        refused(path, "copied more often")
        assert peak(path) < 20_000_000


def test_keys_that_collide_take_no_quadratic_time(tmp_path: Path) -> None:
    # All hash to 0: CPython would compare each with all before it.
    keys = b"".join(b"\x8a\x0c" + ((k << 61) - k).to_bytes(12, "little") + b"N" for k in range(1, 50_000))
    started = time.monotonic()
    refused(zip_file(tmp_path / "a.pt", PROTO + b"}(" + keys + b"u."), "no tensors")
    assert time.monotonic() - started < 5


def test_the_number_of_opcodes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "MAX_OPCODES", 1000)
    refused(zip_file(tmp_path / "a.pt", PROTO + b"N0" * 500 + b"N."), "more than 1000 opcodes")


# --- tensors that leave their storage --------------------------------------------------------


def test_the_handmade_tensor_is_a_good_one(tmp_path: Path) -> None:
    path = zip_file(tmp_path / "a.pt", state_code(tensor_code()), {"0": np.array([1, 2], "<f4").tobytes()})
    assert torch.load(path, weights_only=True)["a"].tolist() == [1, 2]
    assert list(torch_bin.read(path).tensors) == ["a"]


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"offset": 1}, "Element 2 is outside storage '0' of 2 elements"),
        ({"offset": -1}, "do not fit"),
        ({"offset": 1 << 62}, "outside"),
        ({"offset": 1 << 70}, "do not fit"),
        ({"offset": True}, "do not fit"),
        ({"offset": 0.0}, "do not fit"),
        ({"size": (3,)}, "outside"),
        ({"size": (-2,)}, "negative"),
        ({"size": (1 << 62, 1 << 62), "stride": (0, 0)}, "overflows"),
        ({"size": (1 << 40, 1 << 40, 0), "stride": (0, 0, 0)}, "overflows"),
        ({"size": (1,) * 33, "stride": (1,) * 33}, "malformed"),
        ({"size": ("2",)}, "malformed"),
        ({"size": None}, "malformed"),
        ({"stride": (-1,)}, "negative"),
        ({"stride": (2,)}, "outside"),
        ({"stride": (1 << 62,)}, "outside"),
        ({"stride": (1, 1)}, "do not fit"),
        ({"numel": 3}, "12 bytes is 8 bytes long"),
        ({"numel": 1}, "outside"),
        ({"numel": -2}, "persistent id"),
        ({"numel": 1 << 80}, "persistent id"),
        ({"key": "1"}, "missing"),
        ({"key": "../0"}, "missing"),
        ({"kind": "LongStorage"}, "16 bytes is 8 bytes long"),
        ({"kind": "Linear"}, "no storage type"),
    ],
)
def test_tensors_that_leave_their_storage(tmp_path: Path, fields: dict[str, object], what: str) -> None:
    code = state_code(tensor_code(**fields))  # type: ignore[arg-type]
    refused(zip_file(tmp_path / "a.pt", code, {"0": bytes(8)}), what)


def test_the_error_names_the_tensor(tmp_path: Path) -> None:
    path = zip_file(tmp_path / "a.pt", state_code(tensor_code(), tensor_code(size=(3,))), {"0": bytes(8)})
    assert refused(path).where["near"] == "b"


def test_a_tensor_that_a_newer_torch_makes_is_not_passed_over(tmp_path: Path) -> None:
    code = state_code(tensor_code(), tensor_code().replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"))
    error = refused(zip_file(tmp_path / "a.pt", code, {"0": bytes(8)}), "_rebuild_tensor_v9, which is not read")
    assert error.where["tensor"] == "b"


@pytest.mark.parametrize("module", ["torchi", "torch\x0b", "torch.(", "nptorch", "torch."])
def test_a_storage_of_another_module_is_none(tmp_path: Path, module: str) -> None:
    code = tensor_code().replace(b"ctorch\nFloatStorage\n", b"c" + module.encode() + b"\nFloatStorage\n")
    refused(zip_file(tmp_path / "a.pt", state_code(code), {"0": bytes(8)}), "no storage type")


@pytest.mark.parametrize("module", ["torch", "torch.cuda", "torch_npu.npu"])
def test_a_storage_of_any_of_torchs_devices_is_one(tmp_path: Path, module: str) -> None:
    code = tensor_code().replace(b"ctorch\nFloatStorage\n", b"c" + module.encode() + b"\nFloatStorage\n")
    path = zip_file(tmp_path / "a.pt", state_code(code), {"0": bytes(8)})
    assert len(torch_bin.read(path).tensors) == 1


def test_one_storage_described_in_two_ways(tmp_path: Path) -> None:
    code = state_code(tensor_code(), tensor_code(kind="IntStorage"))
    refused(zip_file(tmp_path / "a.pt", code, {"0": bytes(8)}), "described in two ways")


def test_the_older_form_s_storages(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.arange(5.0)}, path, _use_new_zipfile_serialization=False)
    good = path.read_bytes()
    torch_bin.read(path)
    for bad, what in (
        (good[:-1], "should have 5 elements"),
        (good[:-28] + struct.pack("<q", 6) + good[-20:], "should have 5 elements"),
        (good[:-28] + struct.pack("<q", -1) + good[-20:], "should have 5 elements"),
        (good[:-28], "file ends"),
    ):
        path.write_bytes(bad)
        refused(path, what)
    path.write_bytes(good + b"tail")
    assert any("4 bytes follow" in note for note in torch_bin.read(path).notes)
    keys = good.rindex(b"\x80\x02]")
    key = good[keys:-28]
    path.write_bytes(good[:keys] + b"\x80\x02]." + good[-28:])
    refused(path, "missing in the list")
    listed = key[:-1].replace(b"]q\x00", b"]q\x00(")[:-1]  # the key, from the mark on, before its APPEND
    path.write_bytes(good[:keys] + listed + b"h\x01e." + good[-28:])
    refused(path, "listed twice")


# --- the zip ---------------------------------------------------------------------------------


def saved(path: Path) -> bytes:
    torch.save(OrderedDict(weight=torch.arange(3.0), bias=torch.ones(2)), path)
    return path.read_bytes()


def test_compressed_records_and_zip_bombs(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", PROTO + b"N0" * 10_000_000 + b"N.")
    assert path.stat().st_size < 100_000
    assert peak(path) < 2_000_000
    error = refused(path, "'a/data.pkl' is compressed")
    assert "zip -0" in error.remedy
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", state_code(tensor_code()))
        archive.writestr("a/data/0", bytes(8), zipfile.ZIP_DEFLATED)
    refused(path, "'a/data/0' is compressed")


@pytest.mark.parametrize("name", ["/a/data/1", "a/../../x", "..", "a\\..\\x", "C:/x", "../a/data/0"])
def test_names_that_lead_out(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", state_code(tensor_code()))
        archive.writestr("a/data/0", bytes(8))
        archive.writestr(name, b"x")
    refused(path, "leads out")


def test_duplicate_records(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive, pytest.warns(UserWarning):
        archive.writestr("a/data.pkl", state_code(tensor_code()))
        archive.writestr("a/data.pkl", state_code(tensor_code()))
    refused(path, "Two zip records")


def test_two_folders_with_a_pickle(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", state_code(tensor_code()))
        archive.writestr("b/data.pkl", state_code(tensor_code()))
    refused(path, "no PyTorch checkpoint")


def patched(data: bytes, at: int, form: str, value: int) -> bytes:
    new = struct.pack(form, value)
    return data[:at] + new + data[at + len(new) :]


def central(data: bytes, name: bytes) -> int:
    """Offset of the central header of ``name``."""
    return data.rindex(name) - 46


def test_overlapping_records(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    data = saved(path)
    with zipfile.ZipFile(path) as archive:
        info = {i.filename[-1]: i for i in archive.infolist() if "/data/" in i.filename}
    # data/0 grown over the header of data/1.
    size = central(data, b"a/data/0") + 20
    path.write_bytes(patched(patched(data, size, "<I", 200), size + 4, "<I", 200))
    refused(path, "overlap")
    # Two entries, one extent.
    path.write_bytes(patched(data, central(data, b"a/data/1") + 42, "<I", info["0"].header_offset))
    refused(path, "disagrees")


@pytest.mark.parametrize(
    ("field", "form", "value", "what"),
    [
        (42, "<I", 10_000_000, "outside"),
        (42, "<I", 0xFFFFFFFF, "outside|lacks"),
        (24, "<I", 10_000_000, "compressed"),
        (8, "<H", 0x809, "encrypted"),
        (10, "<H", 8, "compressed"),
        (34, "<H", 3, "volumes"),
        (28, "<H", 60000, "malformed"),
        (30, "<H", 60000, "malformed"),
    ],
)
def test_malformed_directories(tmp_path: Path, field: int, form: str, value: int, what: str) -> None:
    path = tmp_path / "a.pt"
    data = saved(path)
    path.write_bytes(patched(data, central(data, b"a/data/0") + field, form, value))
    refused(path, what)


def test_sizes_beyond_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    data = saved(path)
    at = central(data, b"a/data/0")
    path.write_bytes(patched(patched(data, at + 20, "<I", 1 << 30), at + 24, "<I", 1 << 30))
    refused(path, "outside the file")


def test_data_before_and_after(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    data = saved(path)
    path.write_bytes(data + b"x")
    refused(path)
    path.write_bytes(data[:4] + data)
    refused(path)


def test_every_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    data = saved(path)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CkptBridgeError):
            torch_bin.read(path)


def test_every_cut_of_the_older_form(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CkptBridgeError):
            torch_bin.read(path)


def test_every_flipped_bit(tmp_path: Path) -> None:
    """One bit at a time: the file is refused, or what is read is the same.

    Bits of the tensors' own bytes are not looked at; they are what content digests are for.
    """
    path = tmp_path / "a.pt"
    data = saved(path)
    good = torch_bin.read(path)
    with path.open("r+b", buffering=0) as file:
        for at, byte in enumerate(data):
            # Each bit where the geometry is, one of eight elsewhere.
            for bit in range(8) if at > 640 else (at % 8,):
                file.seek(at)
                file.write(bytes([byte ^ 1 << bit]))
                try:
                    inventory = torch_bin.read(path)
                except CkptBridgeError:
                    continue
                assert inventory == good, f"byte {at}, bit {bit}"
            file.seek(at)
            file.write(bytes([byte]))
    assert torch_bin.read(path) == good


def test_flipped_bits_of_the_older_form_raise_nothing_else(tmp_path: Path) -> None:
    """There is no checksum here: names and numbers can change unnoticed, but no other error comes out."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    data = bytearray(path.read_bytes())
    refusals = 0
    for at in range(len(data)):
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        data[at] ^= 1 << at % 8
        try:
            torch_bin.read(path)
        except CkptBridgeError:
            refusals += 1
    assert refusals > len(data) / 2


OPCODES = [bytes([code]) for code in pickles._OPS] + [b"."]
PARTS = st.one_of(
    st.sampled_from(OPCODES),
    st.binary(max_size=3),
    st.sampled_from(
        [b"K\x01", b"h\x00", b"q\x00", b"cm\nC\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"X\x01\x00\x00\x00a"]
    ),
    st.sampled_from([b"ccollections\nOrderedDict\n", b"ctorch._tensor\n_rebuild_from_type_v2\n", b"(K\x01K\x02t"]),
    st.sampled_from([tensor_code(), b"]K\x01a", b"}X\x01\x00\x00\x00aK\x01s", b"c__builtin__\nset\n"]),
)


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(PARTS, max_size=40))
def test_random_pickles_raise_nothing_else(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "a.pt"
    zip_file(path, PROTO + b"".join(parts) + b".", {"0": bytes(8)})
    try:
        torch_bin.read(path)
    except CkptBridgeError as error:
        str(error)


# --- against the real one --------------------------------------------------------------------


def pickles_of_torch() -> list[tuple[bytes, dict[str, bytes]]]:
    """The pickle and the storages of files with views, ties, several dtypes, and a wrapper."""
    base = torch.arange(12.0)
    state: dict[str, object] = {"w": base.view(3, 4), "v": base[2:6], "t": base.view(3, 4).t()}
    state |= {"b": torch.ones(2, dtype=torch.bfloat16), "i": torch.tensor(3), "e": torch.empty(0, 2)}
    made = []
    for value in (state, OrderedDict(state), {"state_dict": state, "epoch": 3, "lr": [0.1, None, True, "x"]}):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        with zipfile.ZipFile(buffer) as archive:
            folder = archive.namelist()[0].partition("/")[0]
            keys = [n.rpartition("/")[2] for n in archive.namelist() if n.startswith(f"{folder}/data/")]
            storages = {key: archive.read(f"{folder}/data/{key}") for key in keys}
            made.append((archive.read(f"{folder}/data.pkl"), storages))
    return made


SAVED = pickles_of_torch()
# torch's restricted unpickler lacks some opcodes of older pickles; and whether a tensor wants a gradient is no weight.
NARROWER = ("Unsupported operand", "can require gradients")
# What torch does not import it refuses; here it is named and passed over.
PASSED_OVER = ("neither imported nor called", "that are no tensors, skipped")


@given(data=st.data())
@settings(max_examples=1500, deadline=None)
def test_mutated_pickles_agree_with_torch(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """What both take is the same; what torch refuses is refused here, or passed over and said."""
    code, storages = data.draw(st.sampled_from(SAVED))
    mutated = bytearray(code)
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(2, len(mutated) - 1))
        how = data.draw(st.sampled_from(["flip", "set", "delete", "repeat"]))
        if how == "flip":
            mutated[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "set":
            mutated[at] = data.draw(st.integers(0, 255))
        elif how == "delete":
            del mutated[at : at + data.draw(st.sampled_from([1, 2, 5]))]
        else:
            start = data.draw(st.integers(0, len(mutated) - 1))
            mutated[at:at] = mutated[start : start + data.draw(st.sampled_from([1, 2, 5, 20]))]
    path = zip_file(tmp_path_factory.mktemp("m") / "a.pt", bytes(mutated), storages)
    try:
        ours = torch_bin.read(path)
    except CkptBridgeError:
        return
    try:
        real = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        said = [*NARROWER] if any(reason in str(error) for reason in NARROWER) else []
        said += [note for note in ours.notes if any(words in note for words in PASSED_OVER)]
        assert said, error
        return
    found = tensors_by_name(real, ours.tensors.keys())
    assert found is not None
    for name, source in ours.tensors.items():
        tensor = found[name]
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{source.spec.dtype.name}", source.spec.shape)
        assert tensor.numel() == 0 or torch_bytes(tensor) == read_words(source).tobytes()


def tensors_by_name(value: object, names: Set[str]) -> dict[str, torch.Tensor] | None:
    """The dict of tensors with just these names, wherever it lies in what torch loaded."""
    if isinstance(value, dict):
        tensors = {k: v for k, v in value.items() if isinstance(v, torch.Tensor)}
        if tensors.keys() == names:
            return tensors
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((found for v in inner if (found := tensors_by_name(v, names)) is not None), None)


def torch_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
