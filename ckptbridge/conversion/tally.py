"""What passes is counted and digested: progress, per-tensor digests and CRCs, beside the copy."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from ckptbridge.conversion.digests import new_hasher
from ckptbridge.conversion.plan import Record
from ckptbridge.conversion.worker import Worker

Progress = Callable[[int], None]


class Tally:
    """Digests (hex) and CRC-32s of the target tensors by name, and the number of bytes placed.

    ``algorithm`` "none" digests nothing; records for which ``known`` gives a source tensor are not
    digested, because their bytes are that tensor's. ``worker`` does the work, in order.
    """

    def __init__(
        self,
        worker: Worker,
        algorithm: str,
        crcs: bool,
        progress: Progress | None,
        known: Callable[[Record], str | None],
    ) -> None:
        self._worker = worker
        self._algorithm = algorithm
        self._with_crc = crcs
        self._progress = progress
        self._known = known
        self.digests: dict[str, str] = {}
        self.crcs: dict[str, int] = {}
        self.bytes = 0

    def moved(self, nbytes: int) -> None:
        """Count bytes that are in place."""
        self.bytes += nbytes
        if self._progress is not None:
            self._progress(nbytes)

    def begin(self, record: Record) -> Seen:
        """Takes the bytes of one target tensor, in order; :meth:`end` when they have all passed."""
        digest = self._algorithm != "none" and self._known(record) is None
        return Seen(self._worker, self._algorithm if digest else "", self._with_crc)

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
        if self.hasher is not None:
            self.hasher.update(data)
        if self._with_crc:
            self.crc = zlib.crc32(data, self.crc)
