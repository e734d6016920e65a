"""One flipped bit in every byte of a header and in sampled bytes of the data: what tells, and what nothing can tell."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny import Sources

import ckptbridge
from ckptbridge.conversion import provenance
from ckptbridge.conversion.checksums import check_crcs
from ckptbridge.conversion.digests import content_digest
from ckptbridge.conversion.plan import FileStat
from ckptbridge.conversion.reading import digest_tensor
from ckptbridge.conversion.sources import SourceFiles
from ckptbridge.errors import CkptBridgeError, FormatError
from ckptbridge.formats.detect import open_inventory
from ckptbridge.formats.tensors import Inventory

SAMPLES = 200


def content_of(inventory: Inventory) -> str:
    stats = {path: path.stat() for path in inventory.files}
    with SourceFiles({path: FileStat(s.st_size, s.st_mtime_ns) for path, s in stats.items()}) as files:
        digests = [(t.spec, digest_tensor(t, files, "blake3")) for t in inventory.tensors.values()]
    return content_digest("blake3", digests)


def told_by(path: Path, side: str, original: str) -> str:
    """What tells that a file is not as it was written; "harmless" when no tensor is another."""
    try:
        inventory = open_inventory(path)
    except CkptBridgeError:
        return "reader"
    stats = {file: FileStat(file.stat().st_size, file.stat().st_mtime_ns) for file in inventory.files}
    try:
        with SourceFiles(stats) as files:
            check_crcs(inventory, files)
    except CkptBridgeError:
        return "crc"
    now = content_of(inventory)
    carried = provenance.read(inventory, path if path.is_dir() else path.parent)
    recorded = carried.record.get("content") if carried is not None else None
    if isinstance(recorded, dict) and recorded.get(side) not in (None, now):
        return "digest"
    return "harmless" if now == original else "nothing"


def flips(path: Path, spans: list[tuple[int, int]]) -> list[tuple[str, int, int]]:
    """(where, offset, bit): each byte of the header once, and samples of the data."""
    chance = random.Random(0)
    inside = bytearray(path.stat().st_size)
    for start, stop in spans:
        inside[start:stop] = b"\1" * (stop - start)
    header = [at for at, data in enumerate(inside) if not data]
    data = chance.sample([at for at, data in enumerate(inside) if data], SAMPLES)
    return [("header", at, chance.randrange(8)) for at in header] + [("data", at, chance.randrange(8)) for at in data]


@dataclass(frozen=True)
class Judged:
    """What told of the flips in the header, by offset, and of those in the data, counted."""

    header: dict[int, str]
    data: Counter[str]

    def outside(self, start: int, stop: int) -> Counter[str]:
        """What told of the header's flips that are not between the offsets."""
        return Counter(what for at, what in self.header.items() if not start <= at < stop)


def judge(path: Path, side: str, whole: Path) -> Judged:
    """Flip bits of ``path``, a file of the checkpoint ``whole``."""
    original = content_of(open_inventory(whole))
    spans = [(s.offset, s.offset + s.nbytes) for t in open_inventory(path).tensors.values() for s in t.segments]
    judged = Judged({}, Counter())
    with path.open("r+b") as file:
        for where, at, bit in flips(path, spans):
            file.seek(at)
            (byte,) = file.read(1)
            for value in (byte ^ (1 << bit), byte):
                file.seek(at)
                file.write(bytes([value]))
                file.flush()
                if value == byte:
                    continue
                what = told_by(whole, side, original)
                if where == "header":
                    judged.header[at] = what
                else:
                    judged.data[what] += 1
    assert content_of(open_inventory(whole)) == original
    return judged


def test_a_ckpt(sources: Sources, folder: Path) -> None:
    """Its own digest tells of the tensors; of what the record says besides, nothing does."""
    path = folder / "a.ckpt"
    ckptbridge.convert(sources.hf, path, direction="pt2ms", mapping=sources.table)
    judged = judge(path, "ms", path)
    assert judged.data == {"digest": SAMPLES}
    last = path.read_bytes().rindex(b"append_info") - 6  # where the record begins, the last one of the file
    assert judged.outside(last, path.stat().st_size) == {"reader": 71, "digest": 30}
    assert set(judged.header.values()) == {"reader", "digest", "harmless"}


def test_a_ckpt_with_crc(sources: Sources, folder: Path) -> None:
    """Every bit is told, whatever it is of."""
    path = folder / "a.ckpt"
    ckptbridge.convert(sources.hf, path, direction="pt2ms", mapping=sources.table, crc=True)
    judged = judge(path, "ms", path)
    assert judged.data == {"crc": SAMPLES}
    assert set(judged.header.values()) == {"reader", "crc"}


def test_safetensors(sources: Sources, folder: Path) -> None:
    """As a .ckpt: only in the metadata a flip can stay unseen."""
    path = folder / "a.safetensors"
    ckptbridge.convert(sources.hf, path, direction="pt2ms", mapping=sources.table)
    judged = judge(path, "ms", path)
    assert judged.data == {"digest": SAMPLES}
    data = path.read_bytes()
    start, stop = data.index(b'"__metadata__"'), data.index(b'"embedding.table"')
    outside = judged.outside(start, stop)
    assert outside.keys() <= {"reader", "digest"}
    assert outside["reader"] > 200
    assert set(judged.header.values()) == {"reader", "digest", "harmless"}


def test_a_bin(sources: Sources, folder: Path) -> None:
    """Its zip has the CRC-32 of each record. Nothing else of the zip is told that does not lead to a tensor.

    Times, attributes, the copies of sizes and checksums in local headers and at the end, padding.
    """
    path = folder / "a.bin"
    ckptbridge.convert(sources.ckpt, path, direction="ms2pt", mapping=sources.table)
    judged = judge(path, "pt", path)
    assert judged.data == {"crc": SAMPLES}
    assert Counter(judged.header.values()) == {"reader": 1240, "crc": 5, "harmless": 686}


def test_a_bin_of_the_older_form_alone(sources: Sources, folder: Path) -> None:
    """Nothing in the file is compared with its data: it has no checksum."""
    path = folder / "a.bin"
    ckptbridge.convert(sources.ckpt, folder / "new.bin", direction="ms2pt", mapping=sources.table)
    torch.save(torch.load(folder / "new.bin"), path, _use_new_zipfile_serialization=False)
    judged = judge(path, "pt", path)
    assert judged.data == {"nothing": SAMPLES}


# --- the commands say so ---------------------------------------------------------------------


def flip(path: Path) -> None:
    """One bit of the last tensor's last byte."""
    (tensor,) = list(open_inventory(path).tensors.values())[-1:]
    segment = tensor.segments[-1]
    with segment.path.open("r+b") as file:
        file.seek(segment.offset + segment.nbytes - 1)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("form", ["ckpt", "safetensors", "bin"])
def test_a_conversion_back_and_verify_tell(form: str, sources: Sources, folder: Path) -> None:
    back = form == "bin"
    direction, other = ("ms2pt", "pt2ms") if back else ("pt2ms", "ms2pt")
    source = sources.ckpt if back else sources.hf
    made = folder / "made"
    ckptbridge.convert(source, made, direction=direction, format=form, mapping=sources.table)
    sides = [str(made), str(source)] if back else [str(source), str(made)]
    verify = ["verify", *sides, "--level", "weights", "--mapping", str(sources.table), "--json"]
    assert command(verify) == 0
    summary = ckptbridge.convert(made, folder / "good", direction=other, mapping=sources.table)
    assert summary.notes == ()
    flip(made)
    assert command(verify) == 1
    if back:  # a .bin has checksums of its own
        with pytest.raises(FormatError, match="CRC-32"):
            ckptbridge.convert(made, folder / "bad", direction=other, mapping=sources.table)
        assert not (folder / "bad").exists()
        return
    summary = ckptbridge.convert(made, folder / "bad", direction=other, mapping=sources.table)
    assert "not those that its provenance records" in summary.notes[0]


def command(arguments: list[str]) -> int:
    ran = subprocess.run(
        [sys.executable, "-m", "ckptbridge", *arguments], capture_output=True, check=False, timeout=120
    )
    return ran.returncode
