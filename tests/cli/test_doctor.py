"""``doctor``: what it finds here, judged by asking the packages themselves, and what it says of broken ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from ckptbridge.cli.doctor import _lines
from ckptbridge.verification.doctor import _find_cann, diagnose, probe
from ckptbridge.verification.numerics import ENVIRONMENT

Run = Callable[..., Any]


@lru_cache(maxsize=1)
def doctor() -> tuple[int, str, str]:
    """One run of the command for all tests: it imports every package there is."""
    done = subprocess.run(
        [sys.executable, "-m", "ckptbridge", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def packages() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(doctor()[1])["packages"]
    return found


@pytest.mark.parametrize("name", ["numpy", "torch", "mindspore", "transformers"])
def test_versions_are_those_that_are_installed(name: str) -> None:
    found = packages()[name]
    assert (found["found"], found["usable"]) == (True, True)
    assert found["version"].split("+")[0] == version(name).split("+")[0]


def test_what_is_not_installed_is_no_problem() -> None:
    try:
        version("mindformers")
    except ImportError:
        found = packages()["mindformers"]
        assert (found["found"], found["usable"]) == (False, False)
        assert found["install"]
    code, out, err = doctor()
    assert (code, err) == (0, "")
    assert json.loads(out)["problems"] == []


def test_devices_are_those_that_the_backends_see() -> None:
    import torch

    expected = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    assert packages()["torch"]["devices"] == ["CPU", *expected]
    assert packages()["mindspore"]["devices"][0] == "CPU"


def test_the_bfloat16_trap_is_sprung_and_not_deduced() -> None:
    """What doctor says is what happens to a user here, whichever NumPy there is."""
    import mindspore as ms

    try:
        reads = float(ms.Tensor([1.5], ms.bfloat16).asnumpy()[0]) == 1.5
    except TypeError:
        reads = False
    assert (
        ("bfloat16 tensors read back" in packages()["mindspore"]["notes"]) == reads == packages()["mindspore"]["usable"]
    )


def test_a_broken_package_is_a_problem_with_its_remedy(ckptbridge: Run, tmp_path: Path) -> None:
    """Real packages, put before the installed ones: one that fails, one that crashes, one that is too old."""
    for name, text in (
        ("torch", "raise ImportError('libcudart.so.12: cannot open shared object file')"),
        ("mindspore", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"),
        ("transformers", "__version__ = '4.0.1'\nAutoConfig = AutoModelForCausalLM = object"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    found = diagnose({**os.environ, "PYTHONPATH": str(tmp_path)})
    problems = {where: (p.what, p.remedy) for where, p in found.problems}
    assert found.exit_code == 1
    assert problems.keys() == {"torch", "mindspore", "transformers"}
    assert "libcudart.so.12" in problems["torch"][0] and problems["torch"][1].startswith("pip install")
    assert f"ended with {-11}" in problems["mindspore"][0]
    assert problems["transformers"] == ("Version 4.0.1 is older than 4.57.", "pip install 'transformers>=4.57'")
    text = "\n".join(_lines(found))
    assert "torch         " in text and "BROKEN, see below" in text
    assert "problem: torch: It cannot be used: ImportError: libcudart" in text
    assert "  mend it: pip install 'transformers>=4.57'" in text


def test_an_import_that_never_ends_is_ended(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)")
    start = time.monotonic()
    found = probe("torch", {**os.environ, "PYTHONPATH": str(tmp_path)}, limit=1.0)
    assert found == {"error": "The import did not end within 1 s."}
    assert time.monotonic() - start < 30


def test_what_a_package_prints_does_not_disturb(tmp_path: Path) -> None:
    (tmp_path / "mindformers.py").write_text("print('welcome')\nimport os\nos.write(1, b'hello')\n__version__ = '9'")
    found = probe("mindformers", {**os.environ, "PYTHONPATH": str(tmp_path)}, limit=60)
    assert found == {"version": "9", "devices": [], "problems": []}


def test_the_current_folder_is_not_where_packages_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("before Python 3.11 the current folder cannot be left out")
    (tmp_path / "numpy.py").write_text("raise ImportError('not the real one')")
    monkeypatch.chdir(tmp_path)
    assert probe("numpy", os.environ, limit=60)["problems"] == []


def test_numerics_switches_as_they_stand(tmp_path: Path) -> None:
    env = {**os.environ, "HCCL_DETERMINISTIC": "false", "LCCL_DETERMINISTIC": "1"}
    for name in ("torch", "mindspore", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise ImportError")  # quick: they are not what is asked about
    found = diagnose({**env, "PYTHONPATH": str(tmp_path)})
    switches = {name: (now, value) for name, now, value in found.numerics}
    assert switches.keys() == {name for name, _, _, _ in ENVIRONMENT}
    assert switches["HCCL_DETERMINISTIC"] == ("false", "true")
    text = "\n".join(_lines(found))
    assert "HCCL_DETERMINISTIC             false (verify: true)" in text
    assert "LCCL_DETERMINISTIC             1\n" in text


def test_cann_by_its_environment(tmp_path: Path) -> None:
    folder = tmp_path / "aarch64-linux"
    folder.mkdir()
    (folder / "ascend_toolkit_install.info").write_text("package_name=Ascend-cann-toolkit\nversion=8.1.RC1\n")
    assert _find_cann({"ASCEND_HOME_PATH": str(tmp_path)}) == f"8.1.RC1 in {tmp_path}"
    assert "8.1" not in _find_cann({"ASCEND_HOME_PATH": str(tmp_path / "nowhere")})


def test_without_numpy_doctor_still_speaks_and_the_rest_points_to_it(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('numpy is broken here')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "ckptbridge"]
    done = subprocess.run([*command, "doctor", "--json"], env=env, capture_output=True, text=True, check=False)
    problems = json.loads(done.stdout)["problems"]
    assert done.returncode == 1
    assert (problems[0]["where"], "numpy is broken here" in problems[0]["what"]) == ("numpy", True)
    assert problems[0]["remedy"] == "pip install 'numpy>=1.26,<2' --force-reinstall"
    other = subprocess.run([*command, "inspect", __file__], env=env, capture_output=True, text=True, check=False)
    assert other.returncode == 2
    assert "ckptbridge doctor" in other.stderr and "Traceback" not in other.stderr
