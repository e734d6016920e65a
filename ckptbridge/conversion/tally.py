"""What passes is counted and digested: progress, per-tensor digests and CRCs, on threads beside the copy."""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptbridge.conversion.digests import new_hasher
from ckptbridge.conversion.plan import Record
from ckptbridge.formats.tensors import TensorSpec

Progress = Callable[[int], None]
_WAITING = 4  # buffers that may wait for their digest


class Tally:
    """Digests of the target tensors and the number of bytes moved.

    ``algorithm`` "none" digests nothing; ``crcs`` asks for each tensor's CRC-32 besides. The work is
    done by one thread, in order; it holds at most a few buffers.
    """

    def __init__(
        self, algorithm: str, crcs: bool, progress: Progress | None, known: Callable[[Record], str | None]
    ) -> None:
        self._algorithm = algorithm
        self._crcs = crcs
        self._progress = progress
        self._known = known
        self.digests: dict[str, str] = {}
        self.specs: dict[str, TensorSpec] = {}
        self.crcs: dict[str, int] = {}
        self.bytes = 0
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING)
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="digests", daemon=True)
        self._thread.start()

    def moved(self, nbytes: int) -> None:
        """Count bytes that are in place."""
        self.bytes += nbytes
        if self._progress is not None:
            self._progress(nbytes)

    @contextmanager
    def record(self, record: Record) -> Iterator[Seen]:
        """The bytes of one target tensor, in order."""
        name = record.spec.name
        self.specs[name] = record.spec
        digest = self._algorithm != "none" and self._known(record) is None
        seen = Seen(self._algorithm if digest else "", self._crcs, self._put)
        yield seen
        self._put(lambda: self._finish(name, seen))

    def _finish(self, name: str, seen: Seen) -> None:
        if seen.hasher is not None:
            self.digests[name] = seen.hasher.hexdigest()
        if self._crcs:
            self.crcs[name] = seen.crc

    def _put(self, job: Callable[[], None]) -> None:
        if self._failed is not None:
            raise self._failed
        self._queue.put(job)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if self._failed is None:
                try:
                    job()
                except BaseException as e:  # handed to the thread that waits
                    self._failed = e

    def close(self) -> None:
        """Wait for the digests."""
        self._queue.put(None)
        self._thread.join()
        if self._failed is not None:
            raise self._failed


class Seen:
    """Takes the bytes of one tensor as they pass."""

    def __init__(self, algorithm: str, crc: bool, put: Callable[[Callable[[], None]], None]) -> None:
        self.hasher = new_hasher(algorithm) if algorithm else None
        self.crc = 0
        self._with_crc = crc
        self._put = put

    def update(self, data: memoryview) -> None:
        """Take the next bytes; they must not change afterwards."""
        if self.hasher is not None or self._with_crc:
            self._put(lambda: self._take(data))

    def _take(self, data: memoryview) -> None:
        if self.hasher is not None:
            self.hasher.update(data)
        if self._with_crc:
            self.crc = zlib.crc32(data, self.crc)
