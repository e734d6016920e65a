"""What may be replaced at a destination, and what the operating system's refusals mean."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from ckptbridge.conversion.provenance import FILE_NAME
from ckptbridge.errors import OutputError


def check_destination(destination: Path, directory: bool, overwrite: bool) -> None:
    """Raise OutputError when the destination exists and may not be replaced."""
    if not os.path.lexists(destination):
        return
    if not directory:
        if destination.is_dir():
            raise OutputError(
                "The destination is a directory, and its name says that a file is meant.",
                remedy="Choose another name.",
                file=destination,
            )
        if not overwrite:
            raise OutputError("The destination exists.", remedy="Give --overwrite to replace it.", file=destination)
        return
    if not destination.is_dir():
        raise OutputError(
            "The destination exists and is not a directory.",
            remedy="Choose another name; under one that ends in .safetensors, for example, a file is written.",
            file=destination,
        )
    there = sorted(os.listdir(destination))
    if not there:
        return
    own = _own_files(destination)
    foreign = [name for name in there if name not in own]
    if foreign:
        raise OutputError(
            f"The destination holds '{foreign[0]}', which no conversion wrote"
            + (f" (and {len(foreign) - 1} more)." if len(foreign) > 1 else "."),
            remedy="Move it away or choose another destination: --overwrite replaces a file, or a folder that a "
            "conversion wrote, nothing else.",
            file=destination,
        )
    if not overwrite:
        raise OutputError(
            "The destination exists and is not empty.", remedy="Give --overwrite to replace it.", file=destination
        )


def _own_files(directory: Path) -> set[str]:
    """The files that a former conversion wrote into a directory, by its ckptbridge.json."""
    try:
        record = json.loads((directory / FILE_NAME).read_text(encoding="utf-8"))
        files = record["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()
    return {FILE_NAME, *(name for name in files if isinstance(name, str))} if isinstance(files, list) else set()


def write_error(e: OSError, destination: Path, needed: int | None = None) -> OutputError:
    """An OutputError for what the operating system said while writing; ``needed`` is the output's size in bytes."""
    reason = e.strerror or str(e)
    if e.errno == errno.ENOSPC:
        room = _room(destination)
        full = (
            "The file system has no room for more files." if room and not room.f_favail else "The file system is full."
        )
        return OutputError(
            full,
            remedy="Free some room, or write to another file system.",
            file=destination,
            needed=needed,
            free=room.f_bavail * room.f_frsize if room else None,
        )
    if e.errno == errno.EDQUOT:
        return OutputError(
            "The disk quota is used up.",
            remedy="Free some room, ask for more, or write elsewhere.",
            file=destination,
            needed=needed,
        )
    if e.errno == errno.EFBIG:
        return OutputError(
            "The file system, or a limit of this user (ulimit -f), takes no file of that size.",
            remedy="Write to another file system, or a directory of shards: --format safetensors --max-shard-size 2GB",
            file=destination,
            needed=needed,
        )
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return OutputError(
            f"The destination cannot be written: {reason}.",
            remedy="Choose a destination that you may write to.",
            file=destination,
        )
    if e.errno in (errno.EEXIST, errno.ENOTEMPTY):
        return OutputError(
            "The destination appeared while the conversion ran.",
            remedy="Give --overwrite to replace it.",
            file=destination,
        )
    return OutputError(
        f"Writing failed: {reason}.",
        remedy="Mend what the system reports, and run again.",
        file=e.filename or destination,
    )


def _room(destination: Path) -> os.statvfs_result | None:
    for folder in destination.absolute().parents:
        try:
            return os.statvfs(folder)
        except OSError:
            continue
    return None
