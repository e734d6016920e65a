"""What passes is counted and digested: progress, per-tensor digests and CRCs, beside the copy."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from ckptbridge.conversion.digests import new_hasher
from ckptbridge.conversion.plan import Record
from ckptbridge.conversion.worker import Worker

Progress = Callable[[int], object]

_STEP = 512 << 10  # bytes that are digested and then summed while they are in the cache


class Tally:
    """Digests (hex) and CRC-32s of the target tensors by name, and the number of bytes placed.

    ``algorithm`` "none" digests nothing. ``worker`` does the work, in order.
    """

    def __init__(self, worker: Worker, algorithm: str, crcs: bool, progress: Progress | None) -> None:
        self._worker = worker
        self._algorithm = algorithm
        self._with_crc = crcs
        self._progress = progress
        self.digests: dict[str, str] = {}
        self.crcs: dict[str, int] = {}
        self.bytes = 0
        self.lossy_names: dict[str, None] = {}  # in the order in which they were written

    def moved(self, nbytes: int) -> None:
        """Count bytes that are in place."""
        self.bytes += nbytes
        if self._progress is not None:
            self._progress(nbytes)

    def lossy(self, record: Record) -> None:
        """A cast of the record lost values."""
        self.lossy_names[record.spec.name] = None

    def kept(self, record: Record, digest: str, crc: int) -> None:
        """Take a record that an earlier run has written."""
        self.digests[record.spec.name] = digest
        self.crcs[record.spec.name] = crc
        self.moved(record.spec.nbytes)

    def settle(self) -> None:
        """Wait until all that has passed is digested."""
        self._worker.settle()

    def begin(self) -> Seen:
        """Takes the bytes of one target tensor, in order; :meth:`end` when they have all passed."""
        return Seen(self._worker, "" if self._algorithm == "none" else self._algorithm, self._with_crc)

    def end(self, record: Record, seen: Seen) -> None:
        """All bytes of the record have passed."""
        self._worker.put(lambda: self._finish(record.spec.name, seen))

    def _finish(self, name: str, seen: Seen) -> None:
        if seen.hasher is not None:
            self.digests[name] = seen.hasher.hexdigest()
        if self._with_crc:
            self.crcs[name] = seen.crc


class Seen:
    """Takes the bytes of one tensor as they pass."""

    def __init__(self, worker: Worker, algorithm: str, crc: bool) -> None:
        self._worker = worker
        self._with_crc = crc
        self.hasher = new_hasher(algorithm) if algorithm else None
        self.crc = 0

    def update(self, data: memoryview) -> None:
        """Take the next bytes; they must not change afterwards."""
        if self.hasher is not None or self._with_crc:
            self._worker.put(lambda: self._take(data))

    def _take(self, data: memoryview) -> None:
        step = _STEP if self._with_crc else len(data) or 1
        for at in range(0, len(data), step):
            part = data[at : at + step]
            if self.hasher is not None:
                self.hasher.update(part)
            if self._with_crc:
                self.crc = zlib.crc32(part, self.crc)
