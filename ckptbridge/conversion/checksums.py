"""The CRC-32s that files carry of their own bytes, checked as they are read."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

from ckptbridge.conversion.sources import SourceFiles
from ckptbridge.errors import FormatError
from ckptbridge.formats import mindspore_ckpt, torch_bin
from ckptbridge.formats.tensors import Checksum, Inventory

_STEP = 4 << 20  # bytes between two looks at whether the conversion still wants to know
_CLAIMED: dict[str, Callable[[Path], list[Checksum]]] = {
    "ckpt": mindspore_ckpt.checksums,
    "bin": torch_bin.checksums,
}


def check_crcs(inventory: Inventory, files: SourceFiles) -> None:
    """Compare the inventory's files with their checksums; those of a format that has none are not read.

    Raises FormatError for bytes that are not what they were when the file was written. The libraries look at a .ckpt's
    trailer when they are asked to, and at those of a .bin never.
    """
    claimed = _CLAIMED.get(inventory.format)
    for path in inventory.files if claimed is not None else ():
        for checksum in claimed(path) if claimed is not None else ():
            _check(path, checksum, files)


def _check(path: Path, checksum: Checksum, files: SourceFiles) -> None:
    crc = 0
    end = checksum.offset + checksum.nbytes
    for at in range(checksum.offset, end, _STEP):
        crc = zlib.crc32(files.view(path, at, min(_STEP, end - at)), crc)
    if crc != checksum.crc:
        raise FormatError(
            f"The CRC-32 of {checksum.what} is {crc:08x}, and was {checksum.crc:08x} when the file was written.",
            remedy="The file was damaged, or changed in place, since; fetch it again. "
            "If the change was meant, load the file and save it anew.",
            file=path,
            offset=checksum.offset,
        )
