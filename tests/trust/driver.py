"""A program of its own: conversions in forked children, each stopped, failed or watched at a call that changes files.

``python driver.py`` reads JSON requests, one a line, from standard input and writes an answer to each. Forked children
start in milliseconds, so that every call of a conversion can be the last one. It must not fork where threads run.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import blake3

from ckptbridge.cli import convert, show  # noqa: F401 - so that children need not import them
from ckptbridge.cli.main import main
from ckptbridge.conversion import copier, journal, planner, run, staging  # noqa: F401
from ckptbridge.conversion.plan import Plan
from ckptbridge.conversion.request import Request
from ckptbridge.formats import torch_bin  # noqa: F401

# What changes files or makes changes durable; os.open only where it makes a file.
CALLS = (
    *("open", "write", "pwrite", "copy_file_range", "ftruncate", "fsync"),
    *("mkdir", "rename", "replace", "link", "unlink", "rmdir"),
)
REAL_UNLINK = os.unlink
MAKE_PLAN = planner.make_plan
STRETCH_BYTES = journal.STRETCH_BYTES
DATA = ("write", "pwrite")  # what can be done by half
TWO_FILES = ("copy_file_range", "rename", "replace", "link", "renameat2")


class Watch:
    """Counts the calls, and at the one with number ``at`` does what it was told."""

    def __init__(self, at: int = -1, action: str = "", detail: str = "") -> None:
        self.at = at
        self.action = action
        self.detail = detail  # the name of an errno, or a source file's path
        self.calls: list[list[str]] = []
        self._lock = threading.Lock()

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **keywords)
            with self._lock:
                number = len(self.calls)
                files = args[:2] if name in TWO_FILES else args[:1]
                self.calls.append([name, *map(described, files)])
                here = number == self.at
            if not here:
                return real(*args, **keywords)
            if self.action == "torn" and name in ("write", "pwrite"):
                half = memoryview(args[1])[: len(args[1]) // 2]
                real(args[0], half, *args[2:])
            if self.action in ("kill", "torn"):
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()
            if self.action == "fail":
                number = getattr(errno, self.detail)
                raise OSError(number, os.strerror(number), described(args[0]))
            if self.action == "cut":
                os.truncate(self.detail, os.stat(self.detail).st_size // 2)
            elif self.action == "grow":
                with open(self.detail, "ab") as file:  # noqa: PTH123
                    file.write(b"x")
            elif self.action == "vanish":
                REAL_UNLINK(self.detail)
            else:
                os.kill(os.getpid(), getattr(signal, self.action))
            return real(*args, **keywords)

        return call


def described(value: int | str | os.PathLike[str]) -> str:
    """A descriptor's file, by name."""
    return os.readlink(f"/proc/self/fd/{value}") if type(value) is int else os.fspath(value)  # type: ignore[arg-type]


def no_such_call(*_: Any) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def child(arguments: list[str], watch: Watch, request: dict[str, Any]) -> dict[str, Any]:
    """Run the command in a fork. The exit status, what it printed, and the calls it made."""
    return start(arguments, watch, request)()


def start(
    arguments: list[str], watch: Watch, request: dict[str, Any], gate: int | None = None, delay: float = 0
) -> Callable[[], dict[str, Any]]:
    """The same, begun: what is returned waits for the end. A ``gate`` is read from first, and then ``delay`` passes."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        with tempfile.TemporaryFile("w+") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            for name in CALLS:
                setattr(os, name, watch.wrap(name, getattr(os, name)))
            exchange = request.get("exchange", True)
            staging.renameat2 = watch.wrap("renameat2", staging.renameat2) if exchange else no_such_call
            if "file_size" in request:
                resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_size"],) * 2)
            if "uid" in request:
                os.setuid(request["uid"])
            if gate is not None:
                os.read(gate, 1)
                time.sleep(delay)
            code = 99
            try:
                main(arguments)
            except SystemExit as e:
                code = int(e.code or 0)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                out.seek(0)
                report = {"code": code, "text": out.read(), "calls": watch.calls}
                with open(write, "wb") as pipe:  # noqa: PTH123
                    pipe.write(json.dumps(report).encode())
                os._exit(0)
    os.close(write)

    def finish() -> dict[str, Any]:
        with open(read, "rb") as pipe:  # noqa: PTH123
            data = pipe.read()
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            return {"code": -os.WTERMSIG(status), "text": "", "calls": []}
        return dict(json.loads(data))

    return finish


def race(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Several commands at once, started in the same moment and, by round, up to some milliseconds apart."""
    chance = random.Random(0)
    rounds = []
    for _ in range(request["rounds"]):
        folder = prepare(Path(request["folder"]), request.get("former"))
        gate, opener = os.pipe()
        spread = chance.choice((0, 0.003, 0.03))
        running = [start(a, Watch(), request, gate, chance.random() * spread) for a in request["race"]]
        os.write(opener, b"x" * len(running))
        done = [finish() for finish in running]
        os.close(gate)
        os.close(opener)
        rounds.append(
            {"codes": [d["code"] for d in done], "texts": [d["text"] for d in done], "after": snapshot(folder)}
        )
    return rounds


def snapshot(folder: Path) -> dict[str, str]:
    """Digests of all files below a folder, by relative path; of folders the word ``folder``."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if stat.S_ISREG(path.lstat().st_mode):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "folder" if path.is_dir() else "other"
    return found


def prepare(folder: Path, former: str | None) -> Path:
    """An empty folder, or one with a copy of a former output."""
    if folder.exists():
        shutil.rmtree(folder)
    if former is None:
        folder.mkdir(parents=True)
    else:
        shutil.copytree(former, folder)
    return folder


def warm_up(arguments: list[str], planned: bool) -> None:
    """Load once what every child needs, without a thread; where it is ``planned``, make the plan once, too."""
    blake3.blake3(b"")
    plans: list[Plan] = []

    def remembered(request: Request) -> Plan:
        if not plans:
            plans.append(MAKE_PLAN(request))
        return plans[0]

    planner.make_plan = remembered if planned else MAKE_PLAN
    if arguments[0] == "convert":
        with suppress(SystemExit):
            main([*arguments, "--dry-run", "--quiet"])
    gc.disable()  # children that live for milliseconds need no collection, and share more memory without
    gc.freeze()


def carry_out(request: dict[str, Any]) -> Any:
    """What the request asks for.

    ``folder`` is where the destination is, emptied first unless ``as_it_is``; ``former`` a folder to be copied there;
    ``arguments`` of the command; ``then`` those of the run that follows, if one does, every second time or always
    with --resume; ``between`` is the point at which one more run stops before. ``points`` are (number of a call,
    action, detail) triples; "all" stands for every call of an undisturbed run with the action given. ``restore`` are a
    source's copy and the source. ``file_size`` and ``uid`` are limits that the children get. ``race`` are the arguments
    of commands to run at once, for so many ``rounds``. Where all of it is of one plan, ``planned`` saves the planning.
    """
    journal.STRETCH_BYTES = request.get("stretch", STRETCH_BYTES)
    folder, former = Path(request["folder"]), request.get("former")
    if not request.get("as_it_is"):
        prepare(folder, former)
    warm_up(request["arguments"], request.get("planned", False))
    whole = child(request["arguments"], Watch(), request)
    answer: dict[str, Any] = {"undisturbed": whole, "wanted": snapshot(folder), "results": []}
    points = request.get("points", [])
    if points and points[0] == "all":
        _, action, *more = points
        step = request.get("step", 1)
        names = [name for name, *_ in whole["calls"]]
        points = [[n, action, *more] for n in range(0, len(names), step) if action != "torn" or names[n] in DATA]
    for point in points:
        if not request.get("as_it_is"):
            prepare(folder, former)
        if "restore" in request:
            shutil.copy2(*request["restore"])
        first = child(request["arguments"], Watch(*point), request)
        result = {"at": point[0], "code": first["code"], "text": first["text"], "after": snapshot(folder)}
        if "between" in request:
            # A run that resumes is stopped too, at its own call of that number.
            middle = child([*request["then"], "--resume"], Watch(*request["between"]), request)
            result |= {"between": middle["code"], "between_text": middle["text"], "after": snapshot(folder)}
        if "then" in request:
            resumes = request.get("resume", point[0] % 2)
            then = request["then"] + (["--resume"] if resumes else [])
            second = child(then, Watch(), request)
            result |= {"then": second["code"], "then_text": second["text"], "finally": snapshot(folder)}
            result["then_calls"] = second["calls"]
        answer["results"].append(result)
    if "race" in request:
        answer["rounds"] = race(request)
    return answer


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a warm-up prints is no answer
    for line in sys.stdin:
        print(json.dumps(carry_out(json.loads(line))), file=answers, flush=True)
