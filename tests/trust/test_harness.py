"""The harness sees every call that changes files: counted beside the system's own account of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from faults import FEW, Scenario, drive
from tiny import Sources

CHANGING = (
    *("openat", "write", "pwrite64", "pwritev", "copy_file_range", "ftruncate", "truncate", "fallocate", "fsync"),
    *("fdatasync", "mkdir", "mkdirat", "rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat"),
    *("rmdir", "symlink", "symlinkat", "sendfile", "splice", "fchmod", "chmod"),
)
SAME = {"openat": "open", "pwrite64": "pwrite", "mkdirat": "mkdir", "unlinkat": "unlink", "rmdir": "unlink"}
SAME |= {"replace": "rename"}


@pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")
@pytest.mark.parametrize("scenario", FEW, ids=lambda s: s.id)
def test_what_strace_sees(scenario: Scenario, sources: Sources, folder: Path) -> None:
    request = scenario.request(sources, folder)
    request["arguments"].append("--quiet")
    request.pop("stretch")
    seen = Counter(SAME.get(name, name) for name, *_ in drive(request)["undisturbed"]["calls"])
    here = Path(request["folder"])
    shutil.rmtree(here)
    shutil.copytree(request["former"], here)
    trace = folder / "trace"
    line = ["strace", "-f", "-y", "-o", str(trace), "-e", f"trace={','.join(CHANGING)}", sys.executable]
    subprocess.run([*line, "-m", "ckptbridge", *request["arguments"]], check=True, capture_output=True, timeout=120)
    found: Counter[str] = Counter()
    for entry in trace.read_text().splitlines():
        call = re.match(r"\d+\s+(\w+)\(", entry)
        if call and str(here) in entry and (call[1] != "openat" or "O_CREAT" in entry):
            found[SAME.get(call[1], call[1])] += 1
    assert found == seen
