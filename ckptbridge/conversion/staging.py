"""The output while it is made: a hidden folder beside the destination, locked, out of which one rename takes it.

``.ckptbridge-NAME.partial`` holds ``output`` (the folder that will appear, or a folder with the file), the
``journal`` of what is finished, and ``former``: the output that is being replaced, where a file system
cannot exchange two names. What a run that was stopped has left is gone on with, or removed by the next run;
a ``former`` whose name is free again is first put back.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from ckptbridge.conversion.interrupts import uninterrupted
from ckptbridge.conversion.replacing import check_destination, write_error
from ckptbridge.conversion.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2
from ckptbridge.errors import OutputError

JOURNAL = "journal"
_OUTPUT = "output"
_FORMER = "former"
# What file systems without locks say (NFS without lockd, Lustre without its option).
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}
_CANNOT_RENAME = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}
_CANNOT_LINK = {errno.ENOSYS, errno.EPERM, errno.ENOTSUP}


def partial_path(destination: Path) -> Path:
    """The hidden folder in which a destination is made."""
    return destination.parent / f".ckptbridge-{destination.name}.partial"


class Staging:
    """A locked folder for one output: ``path`` is where its files are written.

    What an earlier run left is there until :meth:`clear`. :meth:`commit` makes the output appear; :meth:`discard`
    removes everything; :meth:`keep` leaves it for a run that resumes. Raises OutputError when the destination exists,
    cannot be written, or is being written by another run.
    """

    def __init__(self, destination: Path, directory: bool, overwrite: bool, resume: bool = False) -> None:
        self.destination = destination
        self.directory = directory
        self.overwrite = overwrite
        self.folder = partial_path(destination)
        self.path = self.folder / _OUTPUT
        self.committed = False
        self._fd = -1
        self._needed: int | None = None
        check_destination(destination, directory, overwrite)
        try:
            with uninterrupted():
                _make_folders(destination.parent)
                self._fd = self._lock(resume)
            self._put_back()
            check_destination(destination, directory, overwrite)  # again: another run may have finished meanwhile
        except BaseException as e:
            self.keep()
            if isinstance(e, OSError):
                raise self.error(e) from None
            raise

    def _lock(self, resume: bool) -> int:
        while True:
            fresh = _make(self.folder)
            try:
                fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # another run has just finished
            try:
                self._check_owner(os.fstat(fd))
                self._flock(fd, fresh or resume)
                if os.path.samestat(os.fstat(fd), os.stat(self.folder)):
                    return fd
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # the folder was removed between the two calls

    def _check_owner(self, status: os.stat_result) -> None:
        """In a folder where everybody writes, somebody else could have put it there to have its contents removed."""
        if status.st_uid != os.geteuid():
            raise OutputError(
                "The folder in which this output would be made belongs to another user.",
                remedy="Choose another destination, or remove that folder.",
                file=self.folder,
            )

    def _flock(self, fd: int, certain: bool) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                "Another conversion is writing to this destination.",
                remedy="Wait for it, or choose another destination.",
                file=self.destination,
            ) from None
        except OSError as e:
            if e.errno not in _NO_LOCKS:
                raise
            if not certain:  # whoever makes the folder has it: the best that can be had without locks
                raise OutputError(
                    "An unfinished output is there, and this file system has no locks that would tell "
                    "whether a conversion is still writing it.",
                    remedy="If none is, remove the folder, or go on with --resume.",
                    file=self.folder,
                ) from None

    def _put_back(self) -> None:
        """An output that was moved away to be replaced, and was not, comes back."""
        former = self.folder / _FORMER
        if not os.path.lexists(former):
            return
        if os.path.lexists(self.destination):
            _remove(former)  # it was replaced, and only this was left to do
            return
        os.rename(former, self.destination)
        sync_folder(self.destination.parent)

    def clear(self, wanted: set[str] | None = None) -> None:
        """Make the folder of the output, and remove what an earlier run left: all, or all but the ``wanted`` files."""
        if wanted is None:
            with os.scandir(self.folder) as entries:
                for entry in list(entries):
                    _remove(entry.path)
        _make(self.path)
        with os.scandir(self.path) as entries:
            for entry in list(entries):
                if wanted is None or entry.name not in wanted or not entry.is_file(follow_symlinks=False):
                    _remove(entry.path)

    def require_room(self, nbytes: int) -> None:
        """Raise OutputError unless the file system has room for ``nbytes``, of which a part may be there already."""
        self._needed = nbytes
        usage = shutil.disk_usage(self.path)
        with os.scandir(self.path) as entries:
            there = sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries)
        # A file system that tells no size at all (some in user space) cannot be asked.
        if usage.total and usage.free < nbytes - there:
            raise OutputError(
                f"The output needs {nbytes - there} bytes and the file system has {usage.free} free.",
                remedy="Free some room, or write to another file system.",
                file=self.destination,
                needed=nbytes - there,
                free=usage.free,
            )

    def write(self, name: str, data: bytes) -> None:
        """Write a small file of the output and sync it."""
        fd = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
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
            with uninterrupted():
                if self.overwrite:  # somebody could have put files of his own there meanwhile
                    check_destination(self.destination, self.directory, True)
                sync_folder(self.path)
                if self.directory:
                    self._commit_directory()
                else:
                    self._commit_file()
                self.committed = True
                sync_folder(self.destination.parent)
        except OSError as e:
            if self.committed:
                raise OutputError(
                    f"The output is there and whole, but the disk did not confirm its name: {e.strerror}.",
                    remedy="Run 'sync', and see what the system's log says of the disk.",
                    file=self.destination,
                ) from None
            raise self.error(e) from None
        self.discard()

    def _commit_directory(self) -> None:
        if not (self.overwrite and os.path.lexists(self.destination)):
            os.rename(self.path, self.destination)  # fails on a folder that is not empty
            return
        try:
            renameat2(self.path, self.destination, RENAME_EXCHANGE)  # the former output goes with the hidden folder
        except OSError as e:
            if e.errno not in _CANNOT_RENAME:
                raise
            # Stopped between the two, the former output is in the hidden folder, and the next run puts it back.
            os.rename(self.destination, self.folder / _FORMER)
            os.rename(self.path, self.destination)

    def _commit_file(self) -> None:
        made = self.path / self.destination.name
        if self.overwrite:
            os.rename(made, self.destination)
            return
        try:
            renameat2(made, self.destination, RENAME_NOREPLACE)
        except OSError as e:
            if e.errno not in _CANNOT_RENAME:
                raise
            self._link(made)

    def _link(self, made: Path) -> None:
        """A link fails where the name is taken, as the rename would have; a plain rename would replace."""
        try:
            os.link(made, self.destination, follow_symlinks=False)
        except OSError as e:
            if e.errno not in _CANNOT_LINK:
                raise
            if os.path.lexists(self.destination):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self.destination)) from None
            os.rename(made, self.destination)

    def discard(self) -> None:
        """Remove the hidden folder and what is in it."""
        if self._fd < 0:
            return
        with uninterrupted():
            with suppress(OSError):  # what stays is named so that it can be told, and the next run removes it
                if not self.committed:
                    self._put_back()
                shutil.rmtree(self.folder)
            os.close(self._fd)
            self._fd = -1

    def keep(self) -> None:
        """Leave what is there for a run with ``resume``."""
        if self._fd < 0:
            return
        for empty in (self.path, self.folder):
            with suppress(OSError):  # it is not
                os.rmdir(empty)
        os.close(self._fd)
        self._fd = -1

    def error(self, e: OSError) -> OutputError:
        """An OutputError for what the operating system said while writing."""
        return write_error(e, self.destination, self._needed)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno != errno.EINVAL:  # file systems that cannot sync a folder say this
            raise
    finally:
        os.close(fd)


def _make(path: Path) -> bool:
    """Make a folder; False when something is there already."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return False
    return True


def _make_folders(path: Path) -> None:
    """Make a folder and those above it, each durable."""
    missing = [p for p in (path, *path.parents) if not os.path.lexists(p)]
    for folder in reversed(missing):
        _make(folder)
        sync_folder(folder.parent)
    if not stat.S_ISDIR(os.stat(path).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def _remove(path: str | Path) -> None:
    if stat.S_ISDIR(os.lstat(path).st_mode):
        shutil.rmtree(path)
    else:
        os.unlink(path)
