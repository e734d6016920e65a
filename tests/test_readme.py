"""Both READMEs are kept true: each command block runs, the session is what a terminal shows, the tables are complete.

Lines that install packages, and the completion of zsh and fish where these are missing, are checked for syntax only.

The blocks of a section run one after the other, in a folder that holds small models under the names of the READMEs.
"""

from __future__ import annotations

import doctest
import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "mappings"))

import readme_models

from ckptbridge.cli.main import cli, main
from ckptbridge.errors import CkptBridgeError
from ckptbridge.tables import catalog

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
# Blocks that set a shell up: the script that click prints is looked at instead.
COMPLETION = "## Shell completion"
SHOWN = ("toml", "text")  # blocks that are no commands


@dataclass(frozen=True)
class Block:
    section: str
    language: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks, each with the heading above it."""
    section, language, lines = "", None, []
    for line in page.splitlines():
        if line.startswith("```"):
            if language is None:
                language, lines = line[3:], []
            else:
                yield Block(section, language, "".join(f"{line}\n" for line in lines))
                language = None
        elif language is not None:
            lines.append(line)
        elif line.startswith("## "):
            section = line
    assert language is None, "a block is not closed"


BLOCKS = list(blocks(README))
SECTIONS = list(dict.fromkeys(b.section for b in BLOCKS if b.language == "bash" and b.section != COMPLETION))


def shell(text: str, folder: Path, *, check_only: bool = False) -> subprocess.CompletedProcess[str]:
    """``text`` as a bash script; the commands are those of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "GLOG_v": "3", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    line = ["bash", *(["-n"] if check_only else []), "-euo", "pipefail", "-c", text]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    readme_models.make(folder)
    made = shell("ckptbridge convert pt2ms Qwen3-8B converted.ckpt --quiet", folder)
    assert made.returncode == 0, made.stderr
    readme_models.trained_by_mindspore(folder / "converted.ckpt", folder / "trained.ckpt")
    # What a network of the user's own saves before training: another convention's names, other values.
    made = shell("ckptbridge convert pt2ms Qwen3-8B flat.ckpt --quiet --target flat", folder)
    assert made.returncode == 0, made.stderr
    readme_models.trained_by_mindspore(folder / "flat.ckpt", folder / "network.ckpt")
    (folder / "flat.ckpt").unlink()
    shutil.copytree(folder / "Qwen3-8B", folder / "Qwen3-8B-copy")
    return folder


@pytest.fixture
def folder(models: Path, tmp_path: Path) -> Path:
    """The models in a folder of one's own, with the repository's scripts."""
    place = tmp_path / "work"
    shutil.copytree(models, place, symlinks=True)
    (place / "scripts").symlink_to(ROOT / "scripts")
    return place


@pytest.fixture
def terminal(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.chdir(folder)
    yield Terminal(folder, capfd)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@dataclass(frozen=True)
class Terminal:
    """Runs the lines of a block: ckptbridge's in this process, which has its backends up already, others in bash."""

    folder: Path
    capture: pytest.CaptureFixture[str]

    def run(self, line: str) -> None:
        words = shlex.split(line, comments=True)
        if not words or words[:2] == ["pip", "install"]:
            assert shell(line, self.folder, check_only=True).returncode == 0
        elif words[0] == "ckptbridge":
            with pytest.raises(SystemExit) as ended:
                main(words[1:])
            said = "".join(self.capture.readouterr())
            assert ended.value.code == 0, f"{line}\n{said}"
            assert "Traceback" not in said
        else:
            ran = shell(line, self.folder)
            assert ran.returncode == 0, line + ran.stdout + ran.stderr


@pytest.mark.parametrize("section", SECTIONS)
def test_the_command_blocks_of_a_section_run(section: str, terminal: Terminal) -> None:
    for block in BLOCKS:
        if (block.section, block.language) == (section, "bash"):
            for line in block.text.replace("\\\n", " ").splitlines():
                terminal.run(line)


def test_every_block_is_of_a_kind_that_a_test_looks_at() -> None:
    for block in BLOCKS:
        known = {"bash", "console", "python", *SHOWN} | ({"zsh", "fish"} if block.section == COMPLETION else set())
        assert block.language in known, block


def test_a_handoff_that_fails_fails_the_ci_script_and_leaves_its_reports(folder: Path) -> None:
    script = "bash scripts/ci_handoff.sh Qwen3-8B qwen3.ckpt"
    # Rounding alone is more than nothing: with no tolerance at all, the claim does not hold.
    failed = shell(f"{script} --layout mlp=contiguous -- --atol 0 --length 16", folder)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "<failure" in (folder / "qwen3.ckpt.junit.xml").read_text(encoding="utf-8")
    assert "<html" in (folder / "qwen3.ckpt.html").read_text(encoding="utf-8")
    assert '"verdict": "fails"' in (folder / "qwen3.ckpt.json").read_text(encoding="utf-8")
    assert shell(script, folder).returncode == 2  # the output exists
    assert "ended with exit code 2" in (folder / "qwen3.ckpt.junit.xml").read_text(encoding="utf-8")
    assert not (folder / "qwen3.ckpt.json").exists()
    assert shell("bash scripts/ci_handoff.sh Qwen3-8B", folder).returncode == 2


@pytest.mark.parametrize("shell_name", ["bash", "zsh", "fish"])
def test_completion_is_printed_for_each_shell_as_the_page_says(shell_name: str, tmp_path: Path) -> None:
    source = f"_CKPTBRIDGE_COMPLETE={shell_name}_source ckptbridge"
    [block] = [b for b in BLOCKS if b.section == COMPLETION and b.language == shell_name]
    assert source in block.text
    ran = shell(source, tmp_path)
    assert ran.returncode == 0 and "_ckptbridge_completion" in ran.stdout
    if shell_name == "bash":
        assert shell(block.text, tmp_path).returncode == 0
    elif shutil.which(shell_name):
        checked = subprocess.run([shell_name, "-n", "-c", block.text], capture_output=True, check=False)
        assert checked.returncode == 0


# --- the session -------------------------------------------------------------------------------------------------


def steady(text: str) -> str:
    """A terminal's text without what differs between machines and runs: times, digests, sizes of rounding errors."""
    text = re.sub(r"in \d+\.\d s", "in T s", text)
    text = re.sub(r"blake3:[0-9a-f]{64}", "blake3:DIGEST", text)
    return re.sub(r"\d\.\d+e-(1[0-9]|[23]\d)", "TINY", text)


def session(page: str) -> str:
    [found] = re.findall(r"<!-- session -->\n```console\n(.*?)```\n<!-- /session -->", page, re.DOTALL)
    return str(found)


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="runs in the .venv that scripts/setup.sh makes")
def test_the_session_is_what_a_terminal_shows(tmp_path: Path) -> None:
    ran = shell(f"bash '{ROOT / 'scripts' / 'session.sh'}'", tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert steady(ran.stdout) == steady(session(README)), "bash scripts/session.sh --write"


# --- Python ------------------------------------------------------------------------------------------------------


def run_examples(text: str, name: str, known: dict[str, object]) -> int:
    """The examples of a text, carried out; returns how many there were."""
    examples = doctest.DocTestParser().get_doctest(text, known, name, None, None)
    said: list[str] = []
    failed, tried = doctest.DocTestRunner().run(examples, out=said.append)
    assert not failed, "".join(said)
    return tried


def test_the_python_example_runs(models: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    [block] = [b for b in BLOCKS if b.language == "python"]
    assert run_examples(block.text, "README.md", {}) > 5


@pytest.mark.parametrize(
    ("module", "name"),
    [("ckptbridge.api", "convert"), ("ckptbridge.api", "verify"), ("ckptbridge.formats.lazy", "open_checkpoint")],
)
def test_the_examples_of_the_public_functions_run(
    module: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    known = vars(importlib.import_module(module))
    assert run_examples(known[name].__doc__, name, dict(known)) > 3


# --- what the pages say ------------------------------------------------------------------------------------------


def family(cls: type[CkptBridgeError]) -> Iterator[type[CkptBridgeError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from family(child)


def first_cells(page: str, heading: str) -> list[str]:
    """The first cells of the table below the line that begins with ``heading``."""
    lines = page.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(heading))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(line.split("|")[1].strip().strip("`"))
    return rows


def test_the_error_table_lists_every_code_once() -> None:
    codes = {cls.code for cls in family(CkptBridgeError) if cls.__module__.startswith("ckptbridge.")}
    for page, heading in ((README, "| code |"), (CHINESE, "| 代码 |")):
        listed = first_cells(page, heading)
        assert sorted(listed) == sorted(codes)


def test_the_families_targets_and_layout_options_are_those_that_are_shipped() -> None:
    families, options = {}, {}
    for name in catalog.families():
        for target in catalog.targets(name):
            families.setdefault(target, set()).add(name)
            options |= catalog.find(name, target).layout
    assert set(first_cells(README, "| target |")) == families.keys()
    assert set(first_cells(README, "| layout option |")) == options.keys()
    [listed] = re.findall(r"^Families: (.*?)\. ", README, re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"\w+", re.sub(r"\(.*?\)", "", listed))) == set.union(*families.values())


def all_options(command: click.Command) -> Iterator[str]:
    context = click.Context(command)
    for parameter in command.get_params(context):
        yield from parameter.opts
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from all_options(child)


@pytest.mark.parametrize("page", [README, CHINESE], ids=["English", "Chinese"])
def test_every_option_on_the_page_exists(page: str) -> None:
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page)) <= set(all_options(cli))


def commands(text: str) -> list[str]:
    return [line.split("  #")[0].rstrip() for line in text.splitlines()]


def test_the_chinese_page_has_the_same_commands_and_session() -> None:
    known = [commands(b.text) for b in BLOCKS]
    for block in blocks(CHINESE):
        if block.language not in SHOWN:
            assert commands(block.text) in known, block.text
    assert session(CHINESE) == session(README)


@pytest.mark.parametrize("page", [README, CHINESE], ids=["English", "Chinese"])
def test_what_the_page_points_at_is_there(page: str) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", page):
        assert (ROOT / link).is_file(), link
    for path in re.findall(r"(?:bash|python) (scripts/\w+\.\w+)|`(scripts/\w+\.\w+)", page):
        assert (ROOT / max(path)).is_file(), path
    for script in ("quickstart", "test", "setup", "session", "ci_handoff", "screenshot"):
        checked = subprocess.run(["bash", "-n", ROOT / "scripts" / f"{script}.sh"], check=False)
        assert checked.returncode == 0
