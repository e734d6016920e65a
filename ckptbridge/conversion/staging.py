"""The output while it is made: a hidden folder beside the destination, locked, and renamed when whole.

``.ckptbridge-NAME.partial`` holds everything until it is on disk; then one rename makes it visible.
A leftover of that name is from a run that was stopped, and the next run removes it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
from pathlib import Path

from ckptbridge.conversion.provenance import FILE_NAME
from ckptbridge.errors import OutputError

_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def partial_path(destination: Path) -> Path:
    """The hidden folder in which a destination is made."""
    return destination.parent / f".ckptbridge-{destination.name}.partial"


class Staging:
    """A locked, empty folder for one output; :meth:`commit` makes the output appear, :meth:`discard` removes it.

    Raises OutputError when the destination exists, cannot be written, or is being written by another run.
    """

    def __init__(self, destination: Path, directory: bool, overwrite: bool) -> None:
        self.destination = destination
        self.directory = directory
        self.overwrite = overwrite
        self.path = partial_path(destination)
        check_destination(destination, directory, overwrite)
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            self._fd = self._lock()
            self._clear()
        except OSError as e:
            raise write_error(e, destination) from None

    def _lock(self) -> int:
        while True:
            self.path.mkdir(exist_ok=True)
            try:
                fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # another run has just finished
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise OutputError(
                    "Another conversion is writing to this destination.",
                    remedy="Wait for it, or choose another destination.",
                    file=self.destination,
                ) from None
            try:
                if os.path.samestat(os.fstat(fd), self.path.stat()):
                    return fd
            except FileNotFoundError:
                pass
            os.close(fd)  # the folder was renamed between the two calls

    def _clear(self) -> None:
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def require_room(self, nbytes: int) -> None:
        """Raise OutputError unless the file system has ``nbytes`` free."""
        free = shutil.disk_usage(self.path).free
        if free < nbytes:
            raise OutputError(
                f"The output needs {nbytes} bytes and the file system has {free} free.",
                remedy="Free some room, or write to another file system.",
                file=self.destination,
                needed=nbytes,
                free=free,
            )

    def write(self, name: str, data: bytes) -> None:
        """Write a small file and sync it."""
        fd = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    def commit(self) -> None:
        """Make the output appear under its name, in one rename, and sync the folder."""
        try:
            os.fsync(self._fd)
            if self.directory:
                self._commit_directory()
            else:
                self._commit_file()
            os.close(self._fd)
            self._fd = -1
            _sync_folder(self.destination.parent)
        except OSError as e:
            raise write_error(e, self.destination) from None

    def _commit_directory(self) -> None:
        if self.overwrite and self.destination.is_dir():
            _rename(self.path, self.destination, _RENAME_EXCHANGE)
            shutil.rmtree(self.path)  # the old output now
            return
        os.rename(self.path, self.destination)  # fails on a folder that is not empty

    def _commit_file(self) -> None:
        flags = 0 if self.overwrite else _RENAME_NOREPLACE
        _rename(self.path / self.destination.name, self.destination, flags)
        self.path.rmdir()

    def discard(self) -> None:
        """Remove everything that was made, unless it has been committed."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


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
            remedy="Choose another name; a name ending in .ckpt, .safetensors or .bin is written as one file.",
            file=destination,
        )
    there = sorted(os.listdir(destination))
    if not there:
        return
    if not overwrite:
        raise OutputError(
            "The destination exists and is not empty.", remedy="Give --overwrite to replace it.", file=destination
        )
    foreign = [name for name in there if name not in _own_files(destination)]
    if foreign:
        raise OutputError(
            f"The destination holds '{foreign[0]}', which no conversion wrote"
            + (f" (and {len(foreign) - 1} more)." if len(foreign) > 1 else "."),
            remedy="Move it away or choose another destination: --overwrite replaces a former output, nothing else.",
            file=destination,
        )


def _own_files(directory: Path) -> set[str]:
    """The files that a former conversion wrote into a directory, by its ckptbridge.json."""
    try:
        record = json.loads((directory / FILE_NAME).read_text(encoding="utf-8"))
        files = record["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()
    return {FILE_NAME, *(name for name in files if isinstance(name, str))} if isinstance(files, list) else set()


def write_error(e: OSError, destination: Path) -> OutputError:
    """An OutputError for what the operating system said while writing."""
    reason = e.strerror or str(e)
    if e.errno == errno.ENOSPC:
        free = shutil.disk_usage(destination.parent if destination.parent.is_dir() else "/").free
        return OutputError(
            "The file system is full.",
            remedy="Free some room, or write to another file system.",
            file=destination,
            free=free,
        )
    if e.errno == errno.EDQUOT:
        return OutputError("The disk quota is used up.", remedy="Free some room, or ask for more.", file=destination)
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


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _rename(source: Path, destination: Path, flags: int) -> None:
    """Linux's renameat2; where it or the flag is missing, the nearest that plain renames offer."""
    if flags:
        try:
            call = ctypes.CDLL(None, use_errno=True).renameat2
        except AttributeError:
            call = None
        if call is not None:
            if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(destination), flags) == 0:
                return
            number = ctypes.get_errno()
            if number not in (errno.ENOSYS, errno.EINVAL):
                raise OSError(number, os.strerror(number), str(destination))
    if flags == _RENAME_EXCHANGE:
        aside = source.with_name(source.name + ".old")
        os.rename(destination, aside)
        os.rename(source, destination)
        os.rename(aside, source)
        return
    if flags == _RENAME_NOREPLACE and os.path.lexists(destination):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(destination))
    os.rename(source, destination)
