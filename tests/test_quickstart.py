"""The quickstart, as a user runs it: on published weights, judged by other libraries than the project's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="runs in the .venv that scripts/setup.sh makes")
def test_the_quickstart_ends_well_twice(tmp_path: Path) -> None:
    for _ in range(2):  # a second run replaces the first one's results
        line = ["bash", str(ROOT / "scripts" / "quickstart.sh"), str(tmp_path / "a folder")]
        ran = subprocess.run(line, capture_output=True, text=True, timeout=600, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "all 104 tensors are bit-identical to the published file (90856960 bytes)" in ran.stdout
        assert "mindspore 2.10.0 loads 104 parameters" in ran.stdout
        assert "bert/nn" in ran.stdout
        assert "Traceback" not in ran.stdout + ran.stderr
