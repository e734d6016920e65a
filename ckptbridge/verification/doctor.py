"""What of this machine works: the packages, really imported in processes of their own, and what they find.

Needs none of them itself, so that it can say what is missing. Untested for want of the hardware: what
it says of CUDA devices, Ascend devices and an installed CANN.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckptbridge.verification.numerics import ENVIRONMENT, UNSET

TIME_LIMIT = 180.0  # seconds for one import; a cold one from a network file system takes a minute
_AT_ONCE = 2

_OLDER_NUMPY = "pip install 'numpy>=1.26,<2'"

# name, who needs it, the least version, how to install it
_PACKAGES: tuple[tuple[str, str, tuple[int, int], str], ...] = (
    ("numpy", "needed for everything", (1, 26), _OLDER_NUMPY),
    ("torch", "needed by verify", (2, 1), "pip install 'ckptbridge[torch]'"),
    ("mindspore", "needed by verify", (2, 10), "pip install 'ckptbridge[mindspore]'"),
    ("transformers", "needed by verify", (4, 57), "pip install 'ckptbridge[verify]'"),
    ("mindformers", "not needed here: its networks read what is converted for them", (0, 0), "pip install mindformers"),
)
_PYTHON = (3, 10)
_CANN = Path("/usr/local/Ascend/ascend-toolkit/latest")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something found that does not work, and the command that mends it."""

    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Package:
    """A package: whether it is there, works, and what devices it sees; ``needed_for`` and ``install`` if it is not."""

    name: str
    found: bool
    version: str
    devices: tuple[str, ...]
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]
    needed_for: str
    install: str

    @property
    def usable(self) -> bool:
        return self.found and not self.problems


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that was found. ``cann`` is its path and version, "" where there is none; ``numerics`` the environment
    variables as they stand, with what ``verify`` sets them to."""

    python: str
    executable: str
    packages: tuple[Package, ...]
    cann: str
    npus: int
    numerics: tuple[tuple[str, str, str], ...]
    problems: tuple[tuple[str, Problem], ...]

    @property
    def exit_code(self) -> int:
        return 1 if self.problems else 0

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as ``--json`` prints it."""
        return {
            "ok": not self.problems,
            "python": self.python,
            "executable": self.executable,
            "packages": {
                p.name: {
                    "found": p.found,
                    "version": p.version or None,
                    "usable": p.usable,
                    "devices": list(p.devices),
                    "notes": list(p.notes),
                    "install": None if p.found else p.install,
                }
                for p in self.packages
            },
            "cann": self.cann or None,
            "npus": self.npus,
            "numerics": {name: {"now": now, "verify_sets": value} for name, now, value in self.numerics},
            "problems": [{"where": where, "what": p.what, "remedy": p.remedy} for where, p in self.problems],
        }


def diagnose(environment: Mapping[str, str] | None = None, limit: float = TIME_LIMIT) -> Diagnosis:
    """Look at everything; ``environment`` is what the packages are tried with (default: this process's own).

    Each package is imported in a child process with a time limit of ``limit`` seconds.
    """
    env = dict(os.environ if environment is None else environment)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        needs = pool.submit(probe, "needs", env, limit)
        packages = tuple(pool.map(lambda entry: _package(*entry, env=env, limit=limit), _PACKAGES))
        own = needs.result()
    cann, npus = _find_cann(env), len(list(Path("/dev").glob("davinci[0-9]*")))
    problems = [("python", p) for p in _python_problems()]
    if not packages[0].found:
        problems.append(("numpy", Problem("It is not installed, and everything needs it.", packages[0].install)))
    # NumPy comes first: without it the others fail, too.
    problems += [(package.name, problem) for package in packages for problem in package.problems]
    problems += [("ckptbridge", p) for p in _problems(own, "pip install --force-reinstall ckptbridge")]
    problems += [("CANN", p) for p in _cann_problems(packages, cann, npus)]
    numerics = tuple((name, env.get(name, UNSET), value) for name, value, _, _ in ENVIRONMENT)
    return Diagnosis(platform.python_version(), sys.executable, packages, cann, npus, numerics, tuple(problems))


def probe(name: str, environment: Mapping[str, str], limit: float) -> dict[str, Any]:
    """What ``sides/probe.py`` finds of a package in a child process; "error" also tells of a crash, or of no answer."""
    text = (Path(__file__).parent / "sides" / "probe.py").read_text(encoding="utf-8")
    # The current folder must not be where packages are taken from; and MindSpore's log would only hide the answer.
    env = {"GLOG_v": "3", **environment, "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", text, name], env=env, capture_output=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"The import did not end within {limit:g} s."}
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
    return {"error": f"Its process ended with {done.returncode}: {last[0] if last else 'without a word'}"[:400]}


def _package(
    name: str, needed_for: str, least: tuple[int, int], install: str, *, env: Mapping[str, str], limit: float
) -> Package:
    try:
        there = find_spec(name) is not None
    except (ImportError, ValueError):
        there = False
    if not there:
        return Package(name, False, "", (), (), (), needed_for, install)
    found = probe(name, env, limit)
    reinstall = f"pip install --force-reinstall '{name}>={least[0]}.{least[1]}'" if least != (0, 0) else install
    if name == "numpy":
        reinstall = f"{_OLDER_NUMPY} --force-reinstall"
    problems = _problems(found, reinstall)
    version = str(found.get("version", "")) or _recorded_version(name)
    if not problems and _first_two(version) < least:
        wanted = f"{least[0]}.{least[1]}"
        problems.append(Problem(f"Version {version} is older than {wanted}.", f"pip install '{name}>={wanted}'"))
    devices, notes = tuple(found.get("devices", ())), tuple(found.get("notes", ()))
    return Package(name, True, version, devices, notes, tuple(problems), needed_for, install)


def _problems(found: Mapping[str, Any], remedy: str) -> list[Problem]:
    if "error" in found:
        return [Problem(f"It cannot be used: {found['error']}", remedy)]
    return [Problem(what, command) for what, command in found.get("problems", ())]


def _recorded_version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _first_two(version: str) -> tuple[int, int]:
    """Major and minor number; large ones where a version does not say, for it is not to be called old."""
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return (1 << 30, 0)
    return int(parts[0]), int(parts[1])


def _python_problems() -> list[Problem]:
    if sys.version_info >= _PYTHON:
        return []
    wanted = f"{_PYTHON[0]}.{_PYTHON[1]}"
    return [Problem(f"Python {platform.python_version()} is older than {wanted}.", f"Use Python {wanted} or later.")]


def _find_cann(environment: Mapping[str, str]) -> str:
    """CANN's folder and version, as its environment script or its usual place say; "" without it."""
    named = (environment.get("ASCEND_HOME_PATH"), environment.get("ASCEND_TOOLKIT_HOME"))
    for folder in (*(Path(name) for name in named if name), _CANN):
        if not folder.is_dir():
            continue
        for info in (*folder.glob("*/ascend_toolkit_install.info"), *folder.glob("*/version.info")):
            for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
                key, _, value = line.partition("=")
                if key.strip().lower() == "version" and value:
                    return f"{value.strip()} in {folder}"
        return str(folder)
    return ""


def _cann_problems(packages: tuple[Package, ...], cann: str, npus: int) -> list[Problem]:
    """CANN or NPUs that the MindSpore here does not get to."""
    mindspore = next(p for p in packages if p.name == "mindspore")
    if not mindspore.usable or any(device.startswith("Ascend") for device in mindspore.devices):
        return []
    if npus and not cann:
        return [Problem(f"There are {npus} NPUs, and CANN is not found.", "Install CANN's toolkit and its kernels.")]
    if cann and npus:
        script = _CANN.parent / "set_env.sh"
        return [Problem("MindSpore finds no Ascend device, though CANN and NPUs are there.", f"source {script}")]
    return []
