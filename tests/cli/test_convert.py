"""``convert`` as a shell sees it: what it prints where, exit codes, dry runs, progress."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptbridge.cli.convert import command
from ckptbridge.conversion.plan import file_suffixes

Run = Callable[..., Any]

# A Llama of two layers. Its shapes are written out: names that the table does not enumerate would be refused.
CONFIG = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 6,
    "intermediate_size": 5,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 4,
}
LAYER = {
    "input_layernorm.weight": (6,),
    "post_attention_layernorm.weight": (6,),
    "self_attn.q_proj.weight": (12, 6),
    "self_attn.k_proj.weight": (4, 6),
    "self_attn.v_proj.weight": (4, 6),
    "self_attn.o_proj.weight": (6, 12),
    "mlp.gate_proj.weight": (5, 6),
    "mlp.up_proj.weight": (5, 6),
    "mlp.down_proj.weight": (6, 5),
}
SHAPES = {"model.embed_tokens.weight": (11, 6), "model.norm.weight": (6,), "lm_head.weight": (11, 6)} | {
    f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()
}
NBYTES = 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({n: np.ones(s, np.float32) for n, s in SHAPES.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def shell(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ckptbridge", *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, **options)


# --- what is printed -------------------------------------------------------------------------


def test_the_last_line_says_what_was_written(ckptbridge: Run, model: Path, tmp_path: Path) -> None:
    ran = ckptbridge("convert", "pt2ms", model, tmp_path / "out.ckpt")
    assert ran.code == 0
    # 9 tensors of a layer become 6: q, k, v are one, gate and up are one.
    expected = rf"wrote {re.escape(str(tmp_path))}/out\.ckpt: 15 tensors, 2\.9 kB \({NBYTES} bytes\), in \d+\.\d s\n"
    assert re.fullmatch(expected, ran.out)
    assert "llama/mindformers" in ran.err
    assert "attention=interleaved" in ran.err
    assert "21 tensors" in ran.err
    assert "\r" not in ran.err and "%" not in ran.err  # no progress: standard error is no terminal


def test_json_is_one_object_and_nothing_else(ckptbridge: Run, model: Path, tmp_path: Path) -> None:
    ran = ckptbridge("convert", "pt2ms", model, tmp_path / "out", "--json")
    assert (ran.code, ran.err) == (0, "")
    told = json.loads(ran.out)
    assert told["destination"] == str(tmp_path / "out")
    assert told["files"] == ["model.ckpt"]
    assert (told["tensors"], told["bytes"]) == (15, NBYTES)
    assert told["provenance"]["table"]["name"] == "llama/mindformers"
    back = json.loads(ckptbridge("convert", "ms2pt", tmp_path / "out", tmp_path / "back", "--json").out)
    assert (back["tensors"], back["bytes"]) == (21, NBYTES)


def test_quiet_says_nothing(ckptbridge: Run, model: Path, tmp_path: Path) -> None:
    ran = ckptbridge("convert", "pt2ms", model, tmp_path / "out.ckpt", "--quiet")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert (tmp_path / "out.ckpt").exists()
    ran = ckptbridge("convert", "pt2ms", model, tmp_path / "two.ckpt", "-q", "--dry-run")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert not (tmp_path / "two.ckpt").exists()


def test_lost_values_are_shown(ckptbridge: Run, model: Path, tmp_path: Path) -> None:
    arrays = {n: np.ones(s, np.float32) for n, s in SHAPES.items()}
    arrays["lm_head.weight"][0, :3] = 1e6, -1e6, 1e-20
    save_file(arrays, model / "model.safetensors")
    ran = ckptbridge("convert", "pt2ms", model, tmp_path / "o.ckpt", "--dtype", "fp16", "--allow-overflow")
    assert ran.code == 0
    assert ran.out.endswith("; 2 value(s) became infinite and 1 zero\n")


def test_casts_are_said(ckptbridge: Run, model: Path, tmp_path: Path) -> None:
    said = ckptbridge("convert", "pt2ms", model, tmp_path / "o.ckpt", "--dtype", "bf16").err.splitlines()
    assert said[3] == "cast    float32 -> bfloat16 (21 tensors, lossy)"
    said = ckptbridge("convert", "ms2pt", tmp_path / "o.ckpt", tmp_path / "back", "--dtype", "fp32").err.splitlines()
    assert said[3] == "cast    bfloat16 -> float32 (15 tensors, lossless)"
    assert "cast " not in ckptbridge("convert", "pt2ms", model, tmp_path / "same.ckpt").err


def test_what_is_absent_or_left_out_by_permission_is_said(ckptbridge: Run, model: Path, tmp_path: Path) -> None:
    arrays = {n: np.ones(s, np.float32) for n, s in SHAPES.items() if n != "lm_head.weight"}
    arrays |= {f"ema.{i}.decay": np.ones(1, np.float32) for i in range(3)}
    save_file(arrays, model / "model.safetensors")
    options = ("--allow-missing", "lm_head.*", "--allow-unexpected", "ema.*", "--allow-unexpected", "nothing*")
    ran = ckptbridge("convert", "pt2ms", model, tmp_path / "o.ckpt", *options)
    assert ran.code == 0
    assert [line for line in ran.err.splitlines() if line.startswith("note")] == [
        "note    --allow-unexpected 'nothing*' matched no unexpected tensor.",
        "note    1 tensor absent, allowed by --allow-missing 'lm_head.*': lm_head.weight",
        "note    3 tensors left out, allowed by --allow-unexpected 'ema.*': ema.{0..2}.decay",
    ]
    ran = ckptbridge("convert", "ms2pt", tmp_path / "o.ckpt", tmp_path / "back")
    assert ran.code == 0
    assert "note    1 tensor absent, allowed by the provenance: output_layer.weight\n" in ran.err


# --- dry runs --------------------------------------------------------------------------------


def test_a_dry_run_shows_what_goes_where_and_writes_nothing(ckptbridge: Run, model: Path, tmp_path: Path) -> None:
    before = files(tmp_path)
    ran = ckptbridge("convert", "pt2ms", model, tmp_path / "new" / "out.ckpt", "--dry-run")
    assert (ran.code, files(tmp_path)) == (0, before)
    text = " ".join(ran.out.split())
    assert "decoder.layers.{0..1}.self_attention.linear_qkv.weight float32[20, 6] x2" in text
    assert "model.layers.{0..1}.self_attn.q_proj.weight, model.layers.{0..1}.self_attn.k_proj.weight" in text
    assert "(g r d) h, (g 1 d) h, (g 1 d) h -> (g (r + 1 + 1) d) h" in text
    assert "mindformers_gqa.toml rule 1" in text
    assert "nothing was written" in ran.out.splitlines()[-1]


def test_a_dry_run_as_json(ckptbridge: Run, model: Path, tmp_path: Path) -> None:
    before = files(tmp_path)
    ran = ckptbridge("convert", "pt2ms", model, tmp_path / "out", "--dry-run", "--json", "--dtype", "bf16")
    assert (ran.code, ran.err, files(tmp_path)) == (0, "", before)
    (file,) = json.loads(ran.out)["files"]
    assert file["name"] == "model.ckpt"
    made = {tensor["name"]: tensor for tensor in file["tensors"]}
    qkv = made["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert (qkv["dtype"], qkv["shape"]) == ("bfloat16", [20, 6])
    assert [s["name"].split(".")[-2] for s in qkv["from"]] == ["q_proj", "k_proj", "v_proj"]
    assert sum(len(tensor["from"]) for tensor in made.values()) == len(SHAPES)


@pytest.mark.parametrize("name", ["out.ckpt", "out.safetensors", "out"])
def test_a_dry_run_announces_the_whole_output(ckptbridge: Run, model: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    told = json.loads(ckptbridge("convert", "pt2ms", model, out, "--dry-run", "--json").out)
    last = ckptbridge("convert", "pt2ms", model, out, "--dry-run").out.splitlines()[-1]
    assert ckptbridge("convert", "pt2ms", model, out).code == 0
    written = sum(p.stat().st_size for p in (out.iterdir() if out.is_dir() else [out]))
    assert (told["bytes"], told["room"]) == (NBYTES, written)
    assert last.startswith(f"15 tensors, 2.9 kB of weights, {written / 1000:.1f} kB in all, would be written to ")


def test_a_dry_run_says_that_the_destination_exists(ckptbridge: Run, model: Path, tmp_path: Path) -> None:
    assert ckptbridge("convert", "pt2ms", model, tmp_path / "out.ckpt").code == 0
    before = (tmp_path / "out.ckpt").read_bytes()
    ran = ckptbridge("convert", "pt2ms", model, tmp_path / "out.ckpt", "--dry-run")
    assert ran.code == 2
    assert "--overwrite" in ran.err
    ran = ckptbridge("convert", "pt2ms", model, tmp_path / "out.ckpt", "--dry-run", "--overwrite")
    assert ran.code == 0
    assert (tmp_path / "out.ckpt").read_bytes() == before


def test_what_is_dropped_or_missing_stands_in_the_plan(ckptbridge: Run, model: Path, tmp_path: Path) -> None:
    arrays = {n: np.ones(s, np.float32) for n, s in SHAPES.items() if n != "lm_head.weight"}
    arrays |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32) for i in range(2)}
    arrays["ema.decay"] = np.ones(1, np.float32)
    save_file(arrays, model / "model.safetensors")
    options = ("--allow-missing", "lm_head.*", "--allow-unexpected", "ema.*", "--dry-run")
    ran = ckptbridge("convert", "pt2ms", model, tmp_path / "out.ckpt", *options)
    assert ran.code == 0
    assert "model.layers.{0..1}.self_attn.rotary_emb.inv_freq: recomputed from rope_theta" in ran.out
    assert "ema.decay: allowed by --allow-unexpected 'ema.*'" in ran.out
    assert "missing, allowed: 1\n  lm_head.weight" in ran.out


# --- terminals and pipes ---------------------------------------------------------------------


def test_progress_shows_on_a_terminal_only(tmp_path: Path) -> None:
    """Bytes and rate on standard error; standard output has the last line and nothing else."""
    folder = tmp_path / "hf"
    folder.mkdir()
    wide = {**CONFIG, "vocab_size": 700_000}
    shapes = {**SHAPES, "model.embed_tokens.weight": (700_000, 6), "lm_head.weight": (700_000, 6)}
    save_file({n: np.zeros(s, np.float32) for n, s in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(wide))
    terminal, stderr = pty.openpty()
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    try:
        line = [sys.executable, "-m", "ckptbridge", "convert", "pt2ms", str(folder), str(tmp_path / "out.ckpt")]
        ran = subprocess.run(line, stdout=subprocess.PIPE, stderr=stderr, timeout=60, check=False)
        os.close(stderr)
        shown = b""
        while True:
            try:
                data = os.read(terminal, 65536)
            except OSError:  # how Linux says that the other end is closed
                break
            if not data:
                break
            shown += data
    finally:
        os.close(terminal)
    assert ran.returncode == 0
    assert ran.stdout.startswith(b"wrote ")
    assert ran.stdout.count(b"\n") == 1
    assert re.search(rb"\d+%.*\d+(\.\d+)?[kM]?/33\.6M.*B/s", shown), shown


def test_names_from_a_file_do_not_reach_the_terminal_raw(ckptbridge: Run, model: Path, tmp_path: Path) -> None:
    arrays = {n: np.ones(s, np.float32) for n, s in SHAPES.items()}
    save_file(arrays | {"evil\x1b[2J\u202e": np.ones(1, np.float32)}, model / "model.safetensors")
    ran = ckptbridge("convert", "pt2ms", model, tmp_path / "out.ckpt")
    assert ran.code == 2
    assert r"evil\x1b[2J\u202e" in ran.err
    assert "\x1b" not in ran.err and "\u202e" not in ran.err


def test_a_terminal_that_knows_ascii_only_gets_ascii(model: Path, tmp_path: Path) -> None:
    arrays = {n: np.ones(s, np.float32) for n, s in SHAPES.items()}
    save_file(arrays | {"poids.é.→": np.ones(1, np.float32)}, model / "model.safetensors")
    env = {**os.environ, "PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "0", "LC_ALL": "C"}
    options = ("convert", "pt2ms", model, tmp_path / "o.ckpt")
    for more, code in (
        ((), 2),
        (("--json",), 2),
        (("--allow-unexpected", "poids*", "--dry-run"), 0),
        (("--allow-unexpected", "poids*", "--dry-run", "--json"), 0),
        (("--allow-unexpected", "poids*", "--provenance", "wer=Jürgen", "--json"), 0),
    ):
        ran = shell(*options, *more, env=env)
        assert ran.returncode == code, ran
        assert "Traceback" not in ran.stderr
        assert "poids" in ran.stdout + ran.stderr
        if "--json" in more:
            assert "poids.é.→" in str(json.loads(ran.stdout))


def test_a_reader_that_goes_away_is_no_error(model: Path, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    line = [sys.executable, "-m", "ckptbridge", "convert", "pt2ms", model, tmp_path / "o.ckpt", "--dry-run"]
    try:
        ran = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(write)
    assert ran.returncode == 141
    assert ran.stderr == ""


def test_debug_shows_where_an_error_comes_from(model: Path, tmp_path: Path) -> None:
    options = ("convert", "pt2ms", model, tmp_path / "o.ckpt", "--dtype", "floaty")
    assert "Traceback" not in shell(*options).stderr
    ran = shell("--debug", *options)
    assert "Traceback" in ran.stderr
    assert "floaty" in ran.stderr


# --- help ------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["pt2ms", "ms2pt"])
def test_every_option_is_explained_by_an_example(direction: str) -> None:
    documented = {
        *("--target", "--layout", "--mapping", "--config", "--format", "--dtype", "--allow-overflow"),
        *("--max-shard-size", "--dry-run", "--allow-missing", "--allow-unexpected", "--provenance"),
        *("--overwrite", "--json", "--quiet", "--key", "--digest"),
        *(("--crc", "--keep-quantized") if direction == "pt2ms" else ()),
    }
    sub = command.commands[direction]
    options = {p.opts[0]: p for p in sub.params if p.opts[0].startswith("--")}
    assert documented <= options.keys()
    for name, option in options.items():
        assert "Example: " in option.help, name  # type: ignore[attr-defined]
    assert "Example: ckptbridge convert" in (sub.help or "")


def test_the_help_says_what_each_direction_writes(ckptbridge: Run) -> None:
    there = " ".join(ckptbridge("convert", "pt2ms", "--help").out.split())
    back = " ".join(ckptbridge("convert", "ms2pt", "--help").out.split())
    assert "[ckpt|safetensors]" in there and "[safetensors|bin]" in back
    assert f"DST ending in {' or '.join(file_suffixes('pt2ms'))} is one file" in there
    *others, last = file_suffixes("ms2pt")
    assert f"DST ending in {', '.join(others)} or {last} is one file" in back
    assert "Cut a directory of safetensors into shards" in there and "--format safetensors --max-shard-size" in there
    assert "--overwrite Replace a file, or a folder that a conversion wrote." in there


def test_help_is_quick_to_reach(ckptbridge: Run) -> None:
    for args in (("--help",), ("convert", "--help"), ("convert", "pt2ms", "-h"), ("--version",)):
        ran = ckptbridge(*args)
        assert (ran.code, ran.err) == (0, "")
        assert "ckptbridge" in ran.out
    assert ckptbridge("convrt").code == 2
