"""Runs the ckptbridge command in this process, as a shell would see it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ckptbridge.cli.main import main


@dataclass(frozen=True)
class Result:
    """What a shell sees of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Standard output, which must be one JSON object and nothing else."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


Run = Callable[..., Result]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """``run("convert", "pt2ms", source, ...)``; a traceback anywhere is a failure."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call(*args: object) -> Result:
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main([str(a) for a in args])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        code = exit_.value.code
        assert isinstance(code, int)
        return Result(code, out, err)

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)
