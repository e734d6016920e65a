"""Runs the command line in this process, as a shell would see it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from ckptbridge.cli.main import main


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def ckptbridge(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ran]]:
    """``ckptbridge("mappings", "list")`` gives exit code, standard output and standard error."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(a) for a in arguments])
        captured = capsys.readouterr()
        code = caught.value.code
        assert isinstance(code, int)
        assert "Traceback" not in captured.err
        return Ran(code, captured.out, captured.err)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
