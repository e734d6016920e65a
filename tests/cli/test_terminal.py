"""The terminal: other encodings, pipes, suggestions for slips of the keyboard, and shell completion."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

Run = Callable[..., Any]

# What a terminal can be: the variables, and the encoding in which its output must then make sense.
ENCODINGS = {
    "ascii": ({"PYTHONIOENCODING": "ascii"}, "utf-8"),  # click writes UTF-8 where Python believes in ASCII
    "latin-1": ({"PYTHONIOENCODING": "latin-1"}, "latin-1"),
    # As it is, Python takes UTF-8 for the locale C.
    "C": ({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, "utf-8"),
}


def shell(*arguments: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(
        [sys.executable, "-m", "ckptbridge", *map(str, arguments)],
        env={**os.environ, **(env or {})},
        capture_output=True,
        check=False,
    )
    assert b"Traceback" not in done.stderr, done.stderr.decode(errors="replace")
    assert b"not foreseen" not in done.stderr, done.stderr.decode(errors="replace")
    return done


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network under a path, with names and strings, that few encodings have."""
    folder = tmp_path_factory.mktemp("模型 é")
    tensors = {"层.weight": np.ones((2, 3), np.float32), "层.bias": np.ones(2, np.float32)}
    save_file(tensors, folder / "a.safetensors", {"né": "wörd 模"})
    save_file({**tensors, "层.bias": np.zeros(2, np.float32)}, folder / "b.safetensors")
    return folder


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_no_command_fails_for_an_encoding(foreign: Path, tmp_path: Path, encoding: str) -> None:
    env, reads = ENCODINGS[encoding]
    a, b, ckpt = foreign / "a.safetensors", foreign / "b.safetensors", tmp_path / "模.ckpt"
    for code, arguments in (
        (0, ("inspect", a)),
        (0, ("inspect", a, "--tree")),
        (0, ("inspect", a, "--stats")),
        (1, ("diff", a, b)),
        (0, ("convert", "pt2ms", a, ckpt, "--target", "nn", "--dry-run")),
        (0, ("convert", "pt2ms", a, ckpt, "--target", "nn")),
        (0, ("verify", a, ckpt, "--level", "weights")),
        (1, ("verify", b, ckpt, "--level", "weights")),
        (0, ("inspect", ckpt)),
        (2, ("inspect", foreign / "nîcht da 模")),
        (2, ("convert", "pt2ms", a, ckpt, "--target", "模")),
        (2, ("inspekt模",)),
        (0, ("mappings", "list")),
        (0, ("mappings", "show", "gpt2", "nn")),
        (2, ("mappings", "show", "模")),
        (0, ("--help",)),
        (0, ("convert", "pt2ms", "--help")),
    ):
        done = shell(*arguments, env=env)
        assert done.returncode == code, (arguments, done.stderr)
        (done.stdout + done.stderr).decode(reads)


def test_names_that_the_encoding_lacks_stay_readable(foreign: Path) -> None:
    done = shell("inspect", foreign / "a.safetensors", env={"PYTHONIOENCODING": "latin-1"})
    text = done.stdout.decode("latin-1")
    assert "\\u5c42.weight" in text and "wörd \\u6a21" in text


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_json_says_the_same_in_every_encoding(foreign: Path, encoding: str) -> None:
    env, _ = ENCODINGS[encoding]
    found = json.loads(shell("inspect", foreign / "a.safetensors", "--json", env=env).stdout.decode("ascii"))
    assert {t["name"] for t in found["tensors"]} == {"层.weight", "层.bias"}
    table = json.loads(shell("mappings", "show", "gpt2", "nn", "--json", env=env).stdout.decode("ascii"))
    assert table["family"] == "gpt2"


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}, {"FORCE_COLOR": "1", "TERM": "xterm-256color"}])
def test_nothing_is_coloured(foreign: Path, env: Mapping[str, str]) -> None:
    for arguments in (("inspect", foreign / "a.safetensors"), ("mappings", "list"), ("--help",), ("inspect", "/none")):
        done = shell(*arguments, env=env)
        assert b"\x1b" not in done.stdout + done.stderr


def test_a_reader_that_goes_away_is_no_error(foreign: Path) -> None:
    for arguments in ("mappings list", f"inspect '{foreign}/a.safetensors'"):
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; '{sys.executable}' -m ckptbridge {arguments} | true; echo $?"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        assert done.stdout.strip() in ("0", "141")


# --- progress --------------------------------------------------------------------------------


def on_a_terminal(*arguments: object) -> str:
    """What a command writes to standard error when that is a terminal; it ends with 0."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-m", "ckptbridge", *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=theirs
    ) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # how Linux says that the other end is closed
                break
            if not part:
                break
            said += part
    os.close(ours)
    assert process.returncode == 0, said.decode()
    return said.decode()


def test_a_terminal_sees_progress_to_the_end_and_a_pipe_none(tmp_path: Path) -> None:
    a, ckpt = tmp_path / "a.safetensors", tmp_path / "a.ckpt"
    save_file({f"l{i}.weight": np.full((1000, 1000), i, np.float32) for i in range(3)}, a)
    for arguments in (
        ("convert", "pt2ms", a, ckpt, "--target", "nn", "--layout", "embedding=none", "--overwrite"),
        ("verify", a, ckpt, "--level", "weights"),
        ("diff", a, ckpt, "--through-table"),
        ("diff", a, a),
        ("inspect", a, "--stats"),
    ):
        said = on_a_terminal(*arguments)
        assert "%|" in said and "12.0M" in said and "B/s" in said, arguments
        assert b"B/s" not in shell(*arguments).stderr
        if arguments[0] in ("convert", "verify", "diff"):
            assert on_a_terminal(*arguments, "--quiet") == ""


# --- slips of the keyboard -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("convrt",), "Did you mean 'convert'?"),
        (("inspct", "x"), "Did you mean 'inspect'?"),
        (("dif", "x", "y"), "Did you mean 'diff'?"),
        (("xyzzy",), "There is: convert, diff, doctor, inspect, mappings, verify."),
        (("convert", "pt2m", "x", "y"), "Did you mean 'pt2ms'?"),
        (("mappings", "shw"), "Did you mean 'show'?"),
        (("mappings", "show", "qwn3"), "Did you mean 'qwen3'?"),
        (("mappings", "show", "qwen3", "mindformer"), "Did you mean 'mindformers'?"),
        (("convert", "pt2ms", "x", "y", "--taret", "z"), "Did you mean '--target'?"),
        (("inspect", "x", "--tre"), "'--tree'"),
        (("verify", "--levl", "all"), "'--level'"),
    ],
)
def test_the_nearest_right_word_is_suggested(ckptbridge: Run, arguments: tuple[str, ...], said: str) -> None:
    ran = ckptbridge(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_a_target_and_a_layout_are_suggested_for_a_model(ckptbridge: Run, tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": np.ones((2, 2), np.float32)}, tmp_path / "model.safetensors")
    config = Path(__file__).parents[1] / "data" / "configs" / "qwen3-0.6b.json"
    for option, said in (
        (("--target", "mindformer"), "Did you mean 'mindformers'?"),
        (("--target", "mindformers", "--layout", "atention=contiguous"), "Did you mean 'attention'?"),
        (("--target", "mindformers", "--layout", "mlp=contigous"), "interleaved, contiguous"),
        (("--target", "xyzzy"), "Targets of qwen3: mindformers, flat, hf."),
    ):
        ran = ckptbridge("convert", "pt2ms", tmp_path, tmp_path / "x.ckpt", "--config", config, *option)
        assert ran.code == 2
        assert said in ran.err


# --- completion ------------------------------------------------------------------------------


def complete(kind: str, words: str, at: str) -> list[str]:
    env = {"_CKPTBRIDGE_COMPLETE": f"{kind}_complete", "COMP_WORDS": words, "COMP_CWORD": at}
    return shell(env=env).stdout.decode().splitlines()


@pytest.mark.parametrize("kind", ["bash", "zsh", "fish"])
def test_the_completion_script_is_printed(kind: str) -> None:
    script = shell(env={"_CKPTBRIDGE_COMPLETE": f"{kind}_source"}).stdout.decode()
    assert "_CKPTBRIDGE_COMPLETE" in script and f"{kind}_complete" in script


@pytest.mark.parametrize(
    ("words", "at", "expected"),
    [
        ("ckptbridge ", "1", {"convert", "verify", "inspect", "diff", "doctor", "mappings"}),
        ("ckptbridge ins", "1", {"inspect"}),
        ("ckptbridge inspect --", "2", {"--tensors", "--stats", "--tree", "--key", "--json", "--help"}),
        ("ckptbridge convert pt2ms --ta", "3", {"--target"}),
        ("ckptbridge diff a b --thr", "4", {"--through-table"}),
        ("ckptbridge verify --level ", "3", {"weights", "forward", "all"}),
        ("ckptbridge convert pt2ms --format ", "4", {"ckpt", "safetensors"}),
        ("ckptbridge convert ms2pt --format ", "4", {"safetensors", "bin"}),
    ],
)
def test_commands_options_and_choices_complete(words: str, at: str, expected: set[str]) -> None:
    assert {line.partition(",")[2] for line in complete("bash", words, at)} == expected


def test_zsh_and_fish_complete_the_same() -> None:
    assert "--through-table" in complete("zsh", "ckptbridge diff a b --thr", "4")
    assert any("--through-table" in line for line in complete("fish", "ckptbridge diff a b --thr", "--thr"))


def test_bash_itself_completes(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("ckptbridge")
    if shutil.which("bash") is None or not command.exists():
        pytest.skip("there is no bash, or ckptbridge is not installed as a command")
    script = (
        'eval "$(_CKPTBRIDGE_COMPLETE=bash_source ckptbridge)"\n'
        "COMP_WORDS=(ckptbridge inspect --st); COMP_CWORD=2\n"
        "_ckptbridge_completion ckptbridge\n"
        'echo "${COMPREPLY[@]}"'
    )
    env = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--stats"]
