"""A thread that does jobs in order, with few waiting: what it holds is bounded, and what it raises is raised again."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType

Job = Callable[[], None]


class Worker:
    """Jobs in order on one thread. An error stops the work and is raised by the next call or at the end.

    ``waiting`` bounds the jobs in the queue, and with them the buffers that they hold.
    """

    def __init__(self, name: str, waiting: int) -> None:
        self._queue: queue.Queue[Job | None] = queue.Queue(waiting)
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job, waiting for room."""
        if self._failed is not None:
            raise self._failed
        self._queue.put(job)

    def settle(self) -> None:
        """Wait until the jobs queued so far are done."""
        self._queue.join()
        if self._failed is not None:
            raise self._failed

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if self._failed is None:
                try:
                    job()
                except BaseException as e:  # raised again on the thread that waits
                    self._failed = e
            self._queue.task_done()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None and self._failed is None:
            self._failed = error  # what waits is not worth doing any more
        self._queue.put(None)
        self._thread.join()
        if error is None and self._failed is not None:
            raise self._failed
