"""Makes the plain modules of this room and of two others importable; folders in memory, and small models there."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

for room in ("mappings", "conversion", "trust"):
    sys.path.insert(0, str(Path(__file__).parents[1] / room))

from tiny import Sources, make_sources  # noqa: E402


@pytest.fixture(scope="session")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on a file system in memory, where syncs take no time; any folder where there is none."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path_factory.mktemp("memory")
        return
    with tempfile.TemporaryDirectory(prefix="ckptbridge-tests-", dir=shared) as folder:
        Path(folder).chmod(0o755)  # other users are tried too
        yield Path(folder)


@pytest.fixture
def folder(memory: Path) -> Iterator[Path]:
    """A new folder there, which goes with the test."""
    with tempfile.TemporaryDirectory(dir=memory) as made:
        yield Path(made)


@pytest.fixture(scope="session")
def sources(memory: Path) -> Sources:
    return make_sources(memory / "sources")
