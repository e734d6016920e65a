"""What a user gets: the wheel and the source archive hold every module and table, and work where they are installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckptbridge
from ckptbridge.tables.sources import shipped_directory

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the repository's list of files")


def tracked(*folders: str) -> list[str]:
    """The files that belong to the project, whatever else lies about."""
    line = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    listed = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [name for name in listed if name and (ROOT / name).is_file()]


def run(*line: object, **options: Any) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run([*map(str, line)], capture_output=True, text=True, timeout=300, check=False, **options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


def build_wheel(source: Path, folder: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet")
    run(*pip, "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as git has it, elsewhere, so that a build leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("source")
    for name in tracked():
        if not name.startswith(("tests/", ".")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


def expected_files() -> set[str]:
    """Every module, and everything of mappings/ that is no script, as an installation lays it out."""
    found = set(tracked("ckptbridge"))
    return found | {f"ckptbridge/{name}" for name in tracked("mappings")}


def test_the_wheel_holds_every_module_and_table_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
        (metadata,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        (entry_points,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
        about = Parser().parsestr(archive.read(metadata).decode())
        entries = archive.read(entry_points).decode()
    assert names == expected_files()
    assert about["Name"] == "ckptbridge"
    assert about["Version"] == ckptbridge.__version__
    assert "ckptbridge = ckptbridge.cli.main:main" in entries
    needs = {
        line.split(";")[0].split(">")[0] for line in about.get_all("Requires-Dist") or () if "extra ==" not in line
    }
    assert {n.strip() for n in needs} == {"numpy", "click", "tqdm", "safetensors", "ml-dtypes", "blake3", "tomli"}


def test_the_source_archive_gives_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    code = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"
    run(sys.executable, "-c", code, tmp_path, cwd=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    (folder,) = (tmp_path / "unpacked").iterdir()
    again = build_wheel(folder, tmp_path / "again")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as two:
        assert one.namelist() == two.namelist()
        assert all(one.read(n) == two.read(n) for n in one.namelist() if not n.endswith("RECORD"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "bert", "vocab_size": 7, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 0}
    config |= {"max_position_embeddings": 5, "type_vocab_size": 2}
    shapes = {"word": 7, "position": 5, "token_type": 2}
    arrays = {f"embeddings.{k}_embeddings.weight": np.ones((n, 4), np.float32) for k, n in shapes.items()}
    arrays |= {f"embeddings.LayerNorm.{k}": np.ones(4, np.float32) for k in ("weight", "bias")}
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


WHERE = "import ckptbridge, ckptbridge.tables.sources as s; print(ckptbridge.__file__); print(s.shipped_directory())"
TABLES = "from ckptbridge.tables.catalog import shipped; print(*sorted((t.name, t.digest) for t in shipped()))"


def test_an_installed_copy_finds_its_own_tables_and_converts(wheel: Path, model: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    env = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    # An editable installation of this environment comes after the path; what is found must be the copy.
    found = run(sys.executable, "-c", WHERE, env=env, cwd=tmp_path).stdout.split()
    assert found == [str(site / "ckptbridge" / "__init__.py"), str(site / "ckptbridge" / "mappings")]
    here = run(sys.executable, "-c", TABLES, cwd=tmp_path).stdout
    assert run(sys.executable, "-c", TABLES, env=env, cwd=tmp_path).stdout == here
    command = (sys.executable, "-m", "ckptbridge", "convert")
    planned = run(*command, "pt2ms", model, "out.ckpt", "--dry-run", env=env, cwd=tmp_path).stdout
    assert "embeddings.word_embeddings.embedding_table" in planned
    run(*command, "pt2ms", model, "out.ckpt", env=env, cwd=tmp_path)
    run(*command, "ms2pt", "out.ckpt", "back", env=env, cwd=tmp_path)
    assert (tmp_path / "back" / "model.safetensors").exists()


def test_this_environment_finds_its_tables_too() -> None:
    """Here the package is installed as scripts/setup.sh does it: editable, its tables read from the checkout."""
    folder = shipped_directory()
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert {name.removeprefix("mappings/") for name in tracked("mappings")} <= there
    origin = json.loads(distribution("ckptbridge").read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable") and origin["url"] == ROOT.as_uri():
        assert folder.samefile(ROOT / "mappings")


def test_type_hints_are_announced(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert "ckptbridge/py.typed" in archive.namelist()
