"""What is common to tests that stop or fail conversions: the scenarios, and the driver."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import select
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tiny import Sources

DRIVER = Path(__file__).with_name("driver.py")
TIMEOUT = 600.0  # seconds for an answer


@functools.lru_cache(maxsize=1)
def _driver() -> subprocess.Popen[str]:
    line = [sys.executable, str(DRIVER)]
    driver = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=_errors(), text=True)
    atexit.register(driver.kill)
    return driver


@functools.lru_cache(maxsize=1)
def _errors() -> IO[str]:
    return tempfile.TemporaryFile("w+")


def drive(request: dict[str, Any]) -> dict[str, Any]:
    """The driver's answer to a request."""
    driver = _driver()
    assert driver.stdin is not None and driver.stdout is not None
    print(json.dumps(request), file=driver.stdin, flush=True)
    ready, _, _ = select.select([driver.stdout], [], [], TIMEOUT)
    answer = driver.stdout.readline() if ready else ""
    if not answer:
        driver.kill()
        _driver.cache_clear()
        _errors().seek(0)
        raise AssertionError(f"the driver gave no answer to {request}: {_errors().read()}")
    return dict(json.loads(answer))


def snapshot(folder: Path) -> dict[str, str]:
    """As the driver sees it: digests of all files below a folder; of folders the word ``folder``."""
    found = sorted(folder.rglob("*"))
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "folder"
        for p in found
    }


@dataclass(frozen=True)
class Scenario:
    """A conversion to ``out``, a name with or without suffix; ``exchange`` whether names can be exchanged."""

    direction: str
    out: str
    options: tuple[str, ...] = ()
    overwrite: bool = False
    exchange: bool = True

    @property
    def id(self) -> str:
        words = [self.direction, self.out, *self.options[1:2]]
        words += ["overwrite"] * self.overwrite + ["plain renames"] * (not self.exchange)
        return " ".join(words)

    def request(self, sources: Sources, folder: Path) -> dict[str, Any]:
        """The request to run it undisturbed; an overwriting one finds the other model's output."""
        here = folder / "here"
        source, other = (
            (sources.hf, sources.other_hf) if self.direction == "pt2ms" else (sources.ckpt, sources.other_ckpt)
        )
        options = [*self.options, "--mapping", str(sources.table)]
        arguments = ["convert", self.direction, str(source), str(here / self.out), *options]
        request: dict[str, Any] = {"folder": str(here), "exchange": self.exchange, "stretch": 4000, "planned": True}
        if self.overwrite:
            former = folder / "former"
            drive({"folder": str(former), "arguments": [*arguments[:2], str(other), str(former / self.out), *options]})
            request["former"] = str(former)
            arguments.append("--overwrite")
        return request | {"arguments": arguments}


_SHARDS = ("--max-shard-size", "6000")
_KINDS: list[tuple[str, str, tuple[str, ...]]] = [
    ("pt2ms", "out.ckpt", ("--crc",)),
    ("pt2ms", "out", ()),
    ("pt2ms", "out.safetensors", ()),
    ("pt2ms", "out", ("--format", "safetensors", *_SHARDS)),
    ("ms2pt", "out.safetensors", ()),
    ("ms2pt", "out", ("--format", "safetensors", *_SHARDS)),
    ("ms2pt", "out.bin", ()),
    ("ms2pt", "out", ("--format", "bin", *_SHARDS)),
]
# One of each format and direction, files and shards.
FEW = [Scenario(*_KINDS[k], overwrite=True) for k in (0, 3, 4, 7)]
SCENARIOS = [Scenario(*kind, overwrite=overwrite) for kind in _KINDS for overwrite in (False, True)]
SCENARIOS += [
    Scenario("pt2ms", "out.ckpt", exchange=False),
    Scenario("pt2ms", "out", overwrite=True, exchange=False),
]


def of_the_output(snapshot: dict[str, str]) -> dict[str, str]:
    """What a user sees: everything but the hidden folders of unfinished outputs."""
    return {name: value for name, value in snapshot.items() if not name.startswith(".ckptbridge-")}
