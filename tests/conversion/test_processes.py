"""What only a process of its own shows: imports, memory, and how it ends when it is stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import assert_same_words, leftovers, load_ckpt, random_arrays, save_hf
from published_models import decoder_shapes, tiny_config

CONFIG = tiny_config("llama", "plain")

# The packages that a base installation lacks: importing one fails, as it would there.
WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "mindspore", "transformers", "mindformers"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


def python(code: str, *args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, **options)


# --- imports ---------------------------------------------------------------------------------

CONVERT = """
import sys, ckptbridge
source, folder = sys.argv[1:]
ckptbridge.convert(source, folder + "/ms.ckpt", direction="pt2ms")
ckptbridge.convert(folder + "/ms.ckpt", folder + "/pt", direction="ms2pt")
ckptbridge.convert(folder + "/ms.ckpt", folder + "/pt.bin", direction="ms2pt")
ckptbridge.convert(folder + "/pt.bin", folder + "/cast.ckpt", direction="pt2ms", dtype="bf16", allow_overflow=True,
                   config=source + "/config.json")
assert ckptbridge.open_checkpoint(folder + "/ms.ckpt")["decoder.final_layernorm.weight"].numpy().shape == (18,)
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""


def test_no_framework_is_imported_and_none_is_needed(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "hf", random_arrays(decoder_shapes(CONFIG)), CONFIG)
    for k, preface in enumerate(("", WITHOUT)):
        folder = tmp_path / str(k)
        folder.mkdir()
        ran = python(preface + CONVERT, source, folder)
        assert ran.returncode == 0, ran.stderr
        assert not {"torch", "mindspore", "transformers"} & set(ran.stdout.split())
    assert_same_words(load_ckpt(tmp_path / "0" / "ms.ckpt"), load_ckpt(tmp_path / "1" / "ms.ckpt"))


def test_help_and_a_dry_run_import_nothing_heavy(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "hf", random_arrays(decoder_shapes(CONFIG)), CONFIG)
    heavy = {"torch", "mindspore", "transformers", "ml_dtypes", "safetensors", "tqdm", "blake3", "scipy"}
    code = """
import sys
from ckptbridge.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(*sys.modules, sep="\\n", file=sys.stderr)
"""
    for args in (
        ("--help",),
        ("convert", "pt2ms", "--help"),
        ("convert", "pt2ms", source, tmp_path / "o", "--dry-run"),
    ):
        ran = python(code, *args)
        assert ran.returncode == 0, ran.stderr
        assert not heavy & {line.split(".")[0] for line in ran.stderr.splitlines()}


# --- memory ----------------------------------------------------------------------------------

MODEL = {
    "model_type": "llama",
    "vocab_size": 40_000,
    "hidden_size": 1024,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
}


def sparse_model(folder: Path, config: dict[str, Any], dtype: str = "BF16", itemsize: int = 2) -> Path:
    """A model whose file is a header and a hole: as large as it says, and quick to make. Its words are all zero."""
    folder.mkdir()
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in decoder_shapes(config).items():
        size = int(np.prod(shape)) * itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + at)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


WATCHED = """
import re, sys, threading, time
from ckptbridge.cli.main import main
peak = 0
def watch():
    global peak
    while True:
        with open("/proc/self/status") as file:
            peak = max(peak, int(re.search(r"RssAnon:\\s+(\\d+) kB", file.read()).group(1)) * 1024)
        time.sleep(0.001)
threading.Thread(target=watch, daemon=True).start()
try:
    main(sys.argv[1:])
finally:
    print(peak, file=sys.stderr)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(
    ("more", "back"),
    [((), False), (("--dtype", "float32"), False), (("--format", "safetensors"), True)],
    ids=["fused", "cast", "and back"],
)
def test_memory_does_not_hold_the_model(more: tuple[str, ...], back: bool, tmp_path: Path) -> None:
    """300 MB of anonymous memory for a model of 386 MB with its rows interleaved; it takes far less."""
    source = sparse_model(tmp_path / "hf", MODEL)
    assert (source / "model.safetensors").stat().st_size > 386e6
    runs = [("pt2ms", source, tmp_path / "ms", *more)]
    if back:
        runs.append(("ms2pt", tmp_path / "ms", tmp_path / "back"))
    for args in runs:
        ran = python(WATCHED, "convert", *args, "--quiet")
        assert ran.returncode == 0, ran.stderr
        assert int(ran.stderr) < 300e6
    if back:
        assert sum(p.stat().st_size for p in (tmp_path / "back").iterdir()) > 386e6


def test_a_single_tensor_larger_than_the_limit_passes_under_it(tmp_path: Path) -> None:
    """RLIMIT_DATA bounds what the process may have for itself; one tensor of the model alone is larger."""
    config = {**MODEL, "vocab_size": 200_000, "intermediate_size": 64, "num_hidden_layers": 1}
    source = sparse_model(tmp_path / "hf", config)
    code = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (350_000_000,) * 2)\n"
    code += "import sys; from ckptbridge.cli.main import main; main(sys.argv[1:])"
    ran = python(code, "convert", "pt2ms", source, tmp_path / "o.ckpt", "--quiet")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (tmp_path / "o.ckpt").stat().st_size > 800e6


# --- stopping --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("name", ["out.ckpt", "out"])
def test_a_stopped_conversion_leaves_nothing_that_looks_finished(
    number: signal.Signals, name: str, tmp_path: Path
) -> None:
    config = {**MODEL, "num_hidden_layers": 40}
    source = sparse_model(tmp_path / "hf", config)
    out = tmp_path / "here" / name
    out.parent.mkdir()
    line = [sys.executable, "-m", "ckptbridge", "convert", "pt2ms", str(source), str(out)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30
        while not any(p.is_file() and p.stat().st_blocks > 20_000 for p in out.parent.rglob("*")):
            assert process.poll() is None, "it was over before it could be stopped"
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(number)
        asked = time.monotonic()
        stdout, stderr = process.communicate(timeout=30)
        took = time.monotonic() - asked
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + number
    assert number.name in stderr
    assert "Traceback" not in stderr
    assert stdout == ""
    assert list(out.parent.iterdir()) == []
    assert took < 5  # a second or so; a loaded machine gets more


def test_a_killed_conversion_leaves_what_the_next_run_removes(tmp_path: Path) -> None:
    source = sparse_model(tmp_path / "hf", MODEL)
    out = tmp_path / "out.ckpt"
    line = [sys.executable, "-m", "ckptbridge", "convert", "pt2ms", str(source), str(out), "--quiet"]
    process = subprocess.Popen(line)
    try:
        while not leftovers(tmp_path):
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    assert not out.exists()
    assert leftovers(tmp_path) != []
    assert subprocess.run(line, check=False, timeout=60).returncode == 0
    assert leftovers(tmp_path) == []
    assert out.stat().st_size > 386e6


def test_of_two_runs_to_one_destination_one_is_told(tmp_path: Path) -> None:
    source = sparse_model(tmp_path / "hf", MODEL)
    out = tmp_path / "out.ckpt"
    line = [sys.executable, "-m", "ckptbridge", "convert", "pt2ms", str(source), str(out)]
    results: list[subprocess.CompletedProcess[str]] = []

    def go() -> None:
        results.append(subprocess.run(line, capture_output=True, text=True, timeout=120, check=False))

    threads = [threading.Thread(target=go) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(r.returncode for r in results) == [0, 2]
    (told,) = [r.stderr for r in results if r.returncode == 2]
    assert "Another conversion" in told or "exists" in told
    assert leftovers(tmp_path) == []
    assert out.stat().st_size > 386e6
