"""One run of a command: wall time, and the peak of the memory that the kernel cannot drop."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_SAMPLE = 0.01  # seconds between two looks at the memory


class CommandFailed(Exception):
    """A measured command did not end with exit code 0."""


@dataclass(frozen=True)
class Taken:
    """Seconds of wall time, and the peak of RssAnon in bytes (file-backed pages do not count).

    ``others`` is the share of the machine's processors that everything else took meanwhile, 0 to 1.
    """

    seconds: float
    memory: int
    others: float


def run(command: Sequence[str]) -> Taken:
    """Run a command as its own process; raises CommandFailed, with the end of what it said.

    A command whose last line is ``seconds N`` has measured itself, and that counts.
    """
    cores = os.cpu_count() or 1
    busy, own, started = _busy(), _children(), time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL) as child:
        watch = _Watch(child.pid)
        out, _ = child.communicate()
        seconds = time.perf_counter() - started
        peak = watch.stop()
    others = max(0.0, _busy() - busy - (_children() - own)) / (seconds * cores)
    if child.returncode:
        raise CommandFailed(
            f"{' '.join(command)}: exit code {child.returncode}\n{out.decode(errors='replace')[-2000:]}"
        )
    last = out.decode(errors="replace").strip().rpartition("\n")[2]
    return Taken(float(last.split()[1]) if last.startswith("seconds ") else seconds, peak, others)


def wait_for_idle(limit: float) -> None:
    """Wait until the processors have been nine tenths idle for half a second, at most ``limit`` seconds."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        busy = _busy()
        time.sleep(0.5)
        if _busy() - busy < 0.1 * 0.5 * (os.cpu_count() or 1):
            return


def _busy() -> float:
    """Seconds that all processors together have been busy."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Watch:
    """Samples RssAnon of a process until it is stopped."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLE):
            self._peak = max(self._peak, anonymous_bytes(self._status))

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self._peak


def anonymous_bytes(status: Path) -> int:
    """RssAnon from a /proc/PID/status file; 0 when the process is gone."""
    try:
        lines = status.read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)


def clear(paths: Iterable[Path]) -> None:
    """Remove outputs, and let the disk finish what it has."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    os.sync()


def read_through(paths: Iterable[Path], cold: bool) -> None:
    """Put files into the page cache, or out of it, so that every run begins in the same state."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if not file.is_file():
                continue
            with file.open("rb", buffering=0) as opened:
                if cold:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    continue
                while opened.read(16 << 20):
                    pass


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of several measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def machine() -> dict[str, str | int]:
    """What the numbers were taken on."""
    fields = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "processor": fields.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(kib / (1 << 20)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def file_system(path: Path) -> str:
    """The type of the file system that holds ``path``."""
    best, kind = "", ""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, name, *_ = line.split()
        if path.resolve().is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, name
    return kind
