"""The rows of the benchmark: what is run, beside which baseline, within which bound."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmark.inputs import GIB
from benchmark.stock import CKPTBRIDGE, Stock

Command = list[str]
HERE = Path(__file__).parent
_BARE = [sys.executable, str(HERE / "bare.py")]
_LEGACY = ("--target", "mindformers-legacy")
_MCORE = ("--target", "mindformers")


@dataclass(frozen=True)
class Row:
    """One line of the table: a command, and what it is held against.

    ``value`` is "ratio" (ours / baseline), "difference" (ours - baseline, in seconds) or "seconds" (ours
    alone); it should be at most ``bound``, where there is one. ``reads`` are brought into the page cache
    before every run (with ``cold`` out of it), ``writes`` removed. ``bare`` is a loop of system calls that
    moves the same bytes.
    """

    key: str
    title: str
    ours: Command
    value: Literal["ratio", "difference", "seconds"]
    bound: float | None
    baseline: Command | None = None
    beside: str = ""
    reads: tuple[Path, ...] = ()
    writes: tuple[Path, ...] = ()
    bare: Command | None = None
    nbytes: int = 0
    cold: bool = False


def copy_command(source: Path, destination: Path) -> Command:
    """COPY: a copy as durable as a conversion."""
    if source.is_dir():
        return ["sh", "-c", 'cp -r "$1" "$2" && sync "$2"/*', "sh", str(source), str(destination)]
    return ["sh", "-c", 'cp "$1" "$2" && sync "$2"', "sh", str(source), str(destination)]


def size(path: Path) -> int:
    """Bytes of a file, or of a folder's files."""
    return sum(p.stat().st_size for p in path.iterdir()) if path.is_dir() else path.stat().st_size


def _conversion(
    key: str, title: str, bound: float | None, stock: Stock, source: Path, *options: str, like: Path | None = None
) -> Row:
    """A conversion beside COPY of ``like``, which is the source unless given. Keys ending in -back are ms2pt."""
    like = like or source
    back = "-back" in key or key.startswith("bin-out")
    written, copied, bare = stock.work / ("out" if back else "out.ckpt"), stock.work / "copy", stock.work / "bare.out"
    return Row(
        key,
        title,
        [*CKPTBRIDGE, "convert", "ms2pt" if back else "pt2ms", str(source), str(written), "--quiet", *options],
        "ratio",
        bound,
        copy_command(like, copied),
        "COPY" if like == source else "COPY of the output",
        (source, like),
        (written, copied, bare),
        [*_BARE, str(like), str(bare)],
        size(like),
    )


def _renames(s: Stock) -> Iterable[Row]:
    yield _conversion("rename", "pt2ms, renames only (`mindformers-legacy`)", 1.1, s, s.llama, *_LEGACY)
    yield _conversion("rename-back", "ms2pt of that", 1.1, s, s.legacy_ckpt)


def _fused(s: Stock) -> Iterable[Row]:
    yield _conversion("fused", "pt2ms, qkv and fc1 interleaved (`mindformers`)", 1.2, s, s.llama, *_MCORE)
    yield _conversion("fused-back", "ms2pt of that", 1.2, s, s.fused_ckpt)


def _experts(s: Stock) -> Iterable[Row]:
    yield _conversion("experts", "pt2ms, experts stacked and transposed (`deepseek_v3`)", 2.0, s, s.moe)
    yield _conversion("experts-back", "ms2pt of that", 2.0, s, s.moe_ckpt)


def _bins(s: Stock) -> Iterable[Row]:
    yield _conversion("bin-in", "`.bin` in, renames only", 1.1, s, s.bin, *_LEGACY)
    yield _conversion("bin-in-fused", "`.bin` in, fused", 1.2, s, s.bin, *_MCORE)
    yield _conversion("bin-out", "`.bin` out, renames only", 1.1, s, s.legacy_ckpt, "--format", "bin")
    yield _conversion("bin-out-fused", "`.bin` out, split again", 1.2, s, s.fused_ckpt, "--format", "bin")


def _casts(s: Stock) -> Iterable[Row]:
    widen = ("--dtype", "float32")
    yield _conversion("widen", "`--dtype float32` of bfloat16", 1.5, s, s.llama, *_LEGACY, *widen, like=s.llama_float32)
    yield _conversion(
        "narrow", "`--dtype bfloat16` of float32", 1.5, s, s.llama_float32, *_LEGACY, "--dtype", "bfloat16"
    )


def _fp8(s: Stock) -> Iterable[Row]:
    yield _conversion("fp8", "float8 dequantised to bfloat16", 3.0, s, s.moe_fp8, like=s.dequantised_ckpt)


def _verify(s: Stock) -> Iterable[Row]:
    pairs = (
        ("verify", "`verify --level weights`, renames", s.llama, s.legacy_ckpt),
        ("verify-fused", "`verify --level weights`, fused", s.llama, s.fused_ckpt),
        ("verify-experts", "`verify --level weights`, experts", s.moe, s.moe_ckpt),
    )
    for key, title, pt, ms in pairs:
        both = (str(pt), str(ms))
        command = [*CKPTBRIDGE, "verify", *both, "--level", "weights", "--quiet"]
        reading = [*_BARE, "--read", *both]
        for suffix, where, cold in (("", "from the page cache", False), ("-cold", "from the disk", True)):
            yield Row(
                f"{key}{suffix}",
                f"{title}, {where}",
                command,
                "ratio",
                1.5,
                reading,
                "reading both once",
                (pt, ms),
                nbytes=size(pt) + size(ms),
                cold=cold,
            )


def _start(s: Stock) -> Iterable[Row]:
    bare = [sys.executable, "-c", "import click, numpy"]
    beside = "above `python -c 'import click, numpy'`"
    yield Row("help", "`ckptbridge --help`", [*CKPTBRIDGE, "--help"], "difference", 0.15, bare, beside)
    file = s.thousand_tensors
    yield Row(
        "inspect",
        "`ckptbridge inspect` of a 1000-tensor file",
        [*CKPTBRIDGE, "inspect", str(file)],
        "difference",
        0.5,
        bare,
        beside,
        (file,),
    )


def _plan(s: Stock) -> Iterable[Row]:
    for layers in (15, 30, None):
        path = s.published("deepseek-v3", layers)
        yield Row(
            f"plan-{layers or 'all'}",
            f"planning DeepSeek-V3 with its proof, {f'{layers} layers' if layers else '671B'}",
            [*CKPTBRIDGE, "convert", "pt2ms", str(path), str(s.work / "none.ckpt"), "--dry-run"],
            "seconds",
            None if layers else 5.0,
        )


def _growth(s: Stock) -> Iterable[Row]:
    for nbytes in s.sizes.growth:
        label = f"{nbytes / GIB:g} GiB"
        yield _conversion(f"growth-{nbytes / GIB:g}", f"growth: fused, {label}", 1.2, s, s.llama_of(nbytes), *_MCORE)


def _large(s: Stock) -> Iterable[Row]:
    """For their memory. A copy of these holes would copy nothing, so none stands beside them."""
    tensor = f"one tensor of {s.sizes.tensor / GIB:g} GiB"
    yield _large_one("large-tensor", f"{tensor}, renamed", s, s.one_large_tensor, *_LEGACY)
    yield _large_one("large-cast", f"{tensor}, cast to float16", s, s.one_large_tensor, *_LEGACY, "--dtype", "float16")
    yield _large_one("large-file", f"a file of {s.sizes.file / GIB:g} GiB, fused", s, s.large_file, *_MCORE)


def _large_one(key: str, title: str, stock: Stock, source: Path, *options: str) -> Row:
    out = stock.work / "out.ckpt"
    command = [*CKPTBRIDGE, "convert", "pt2ms", str(source), str(out), "--quiet", *options]
    return Row(key, title, command, "seconds", None, writes=(out,), nbytes=size(source))


def _peers(s: Stock) -> Iterable[Row]:
    """What people use today, beside COPY; each counts its call alone."""
    copy, out = s.work / "copy", s.work / "out.ckpt"
    plans: list[tuple[str, str, str, Path]] = [
        ("safetensors_load_save", "`safetensors` load_file and save_file", sys.executable, s.llama),
        ("mindspore_save", "`mindspore.save_checkpoint` (float32)", sys.executable, s.llama_float32),
        ("mindspore_load", "`mindspore.load_checkpoint`", sys.executable, s.legacy_ckpt),
        ("mindformers", "MindFormers' `convert_pt_to_ms`", s.peer_python, s.llama),
    ]
    for name, title, python, source in plans:
        yield Row(
            name,
            title,
            [python, str(HERE / "peers.py"), name, str(source), str(out)],
            "ratio",
            None,
            copy_command(source, copy),
            "COPY",
            (source,),
            (out, copy),
            nbytes=size(source),
        )


GROUPS: dict[str, Callable[[Stock], Iterable[Row]]] = {
    "rename": _renames,
    "fused": _fused,
    "experts": _experts,
    "bin": _bins,
    "cast": _casts,
    "fp8": _fp8,
    "verify": _verify,
    "start": _start,
    "plan": _plan,
    "growth": _growth,
    "large": _large,
    "peers": _peers,
}
