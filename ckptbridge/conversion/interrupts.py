"""Short steps that a signal must not cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT and SIGTERM that come within the block are handled after it.

    Python runs handlers on the main thread alone, so on others there is nothing to do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = {number: signal.signal(number, lambda n, frame: came.append((n, frame))) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for came_first, frame in came[:1]:
        first = before[signal.Signals(came_first)]
        if callable(first):
            first(came_first, frame)
        else:
            signal.raise_signal(came_first)
