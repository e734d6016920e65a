"""The wrong files that people have, given to the command: each is named, with what to do, without a traceback."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command import Run, run  # noqa: F401 - a fixture
from safetensors.numpy import save_file

WEIGHT = {"a.weight": np.ones(2, np.float32)}


def lfs(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 12345\n")


def html(path: Path) -> None:
    path.write_text("<!DOCTYPE html>\n<html><title>Sign in</title></html>")


def empty(path: Path) -> None:
    path.touch()


def zero(path: Path) -> None:
    path.mkdir()
    save_file(WEIGHT, path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def fsdp(path: Path) -> None:
    path.mkdir()
    (path / ".metadata").write_bytes(b"x")
    (path / "__0_0.distcp").write_bytes(b"x")


def ranks(path: Path) -> None:
    for k in range(2):
        (path / f"rank_{k}").mkdir(parents=True)
        save_file(WEIGHT, path / f"rank_{k}" / "net.safetensors")


def encrypted(path: Path) -> None:
    path.write_bytes(b"\xd8\x5e\x3a\x7f" + bytes(60))


def adapter(path: Path) -> None:
    path.mkdir()
    save_file({"base_model.model.q.lora_A.weight": np.ones((2, 2), np.float32)}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text("{}")


def optimizer(path: Path) -> None:
    save_file({"moment1.a.weight": np.ones(2, np.float32), "moment2.a.weight": np.ones(2, np.float32)}, path)


def gguf(path: Path) -> None:
    path.write_bytes(b"GGUF" + bytes(60))


def torchscript(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("data.pkl", "constants.pkl", "version"):
            archive.writestr(f"m/{name}", b"\x80\x02}.")
        archive.writestr("m/code/__torch__.py", "")


def bomb(path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(50_000_000))
    path.write_bytes(buffer.getvalue())


CASES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "git-LFS pointer": (lfs, "git-LFS pointer", "git lfs pull"),
    "web page": (html, "web page", "download again"),
    "empty file": (empty, "empty", "ownload"),
    "ZeRO shards": (zero, "ZeRO", "zero_to_fp32.py"),
    "FSDP shards": (fsdp, "FSDP", "dcp_to_torch"),
    "slices of ranks": (ranks, "rank_0, rank_1", "unified_safetensors"),
    "encrypted": (encrypted, "encrypted (AES-GCM)", "dec_key"),
    "adapter": (adapter, "adapter", "merge_and_unload"),
    "optimizer state": (optimizer, "optimizer state", "parameters"),
    "GGUF": (gguf, "GGUF", "original"),
    "TorchScript": (torchscript, "TorchScript", "state_dict"),
    "zip bomb": (bomb, "compressed", ""),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("direction", ["pt2ms", "ms2pt"])
def test_is_named_with_a_remedy(direction: str, name: str, tmp_path: Path, run: Run) -> None:  # noqa: F811
    make, what, remedy = CASES[name]
    path = tmp_path / "there"
    make(path)
    result = run("convert", direction, path, tmp_path / "out")
    assert result.code == 2
    assert result.out == ""
    assert what in result.err
    assert remedy in result.err
    assert "remedy: " in result.err
    assert str(path) in result.err
    result = run("convert", direction, path, tmp_path / "out", "--json")
    assert result.code == 2
    error = result.json["error"]
    assert what in error["what"]
    assert remedy in error["remedy"]
    assert error["code"] in ("unsupported", "format")
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize(
    "error", [ValueError("odd"), MemoryError(), OSError(5, "Input/output error"), RecursionError()]
)
def test_what_nobody_foresaw(error: Exception, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    from ckptbridge.conversion import planner

    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(planner, "make_plan", fail)
    result = run("convert", "pt2ms", tmp_path, tmp_path / "out", "--json")
    assert result.code == 2
    assert result.json["error"]["code"] == "internal"
    assert "memory" in result.err if isinstance(error, MemoryError) else "--debug" in result.err


def test_names_in_a_file_do_not_steer_the_terminal(tmp_path: Path, run: Run) -> None:  # noqa: F811
    save_file({"a\x1b[2J\x07\u202eb": np.ones(2, np.float32)}, tmp_path / "x.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama\\u001b[31m"}')
    result = run("convert", "pt2ms", tmp_path / "x.safetensors", tmp_path / "out")
    assert result.code == 2
    assert "\x1b" not in result.err
    assert not set(result.err) & {chr(c) for c in (0x07, 0x202E)}


def test_debug_shows_the_traceback_and_keeps_the_exit_code(tmp_path: Path) -> None:
    line = [
        sys.executable,
        "-m",
        "ckptbridge",
        "--debug",
        "convert",
        "pt2ms",
        str(tmp_path / "none"),
        str(tmp_path / "o"),
    ]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2
    assert "Traceback" in ran.stderr
    assert "remedy: " in ran.stderr
