"""``inspect --stats``: the numbers against NumPy's, and the memory that they take."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

Run = Callable[..., Any]
Array = np.ndarray[Any, Any]


def look(run: Run, path: Path) -> dict[str, dict[str, Any]]:
    """The tensors of ``inspect --stats --json`` by name."""
    ran = run("inspect", path, "--stats", "--json")
    assert (ran.code, ran.err) == (0, "")
    return {tensor["name"]: tensor for tensor in json.loads(ran.out)["tensors"]}


def expected(values: Array) -> dict[str, Any]:
    """The statistics by NumPy, in float64, of finite values alone."""
    wide = values.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    moments = dict.fromkeys(("min", "max", "mean", "std"), None)
    if finite.size:
        moments = {"min": finite.min(), "max": finite.max(), "mean": finite.mean(), "std": finite.std()}
    counts = {
        "zeros": int((wide == 0).sum()),
        "nan": int(np.isnan(wide).sum()),
        "inf": int(np.isinf(wide).sum()),
    }
    return {**moments, **counts}


def test_statistics_are_numpys_in_float64(ckptbridge: Run, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    odd = rng.standard_normal(1000).astype(np.float32)
    odd[[3, 5, 700]] = np.nan, np.inf, -np.inf
    arrays: dict[str, Array] = {
        # Longer than one step of the computation, and not a multiple of it.
        "long": (rng.standard_normal((701, 523)) * 0.02).astype(np.float32),
        # The naive sum of squares has no correct digit here.
        "far": 1e9 + rng.standard_normal(300_000),
        "half": rng.standard_normal(999).astype(np.float16),
        "odd": odd,
        "nothing": np.full(4, np.nan, np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "int": rng.integers(-100, 100, 2000, dtype=np.int64),
        "byte": rng.integers(0, 255, 2000, dtype=np.uint8),
        "flags": rng.integers(0, 2, 50).astype(np.bool_),
        "scalar": np.array(2.5, np.float32),
    }
    save_file(arrays, tmp_path / "m.safetensors")
    found = {n: row["stats"] for n, row in look(ckptbridge, tmp_path / "m.safetensors").items()}
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        wanted = expected(array)
        for key, value in wanted.items():
            if key in ("mean", "std") and value is not None:
                assert found[name][key] == pytest.approx(value, rel=1e-11, abs=1e-14), (name, key)
            else:
                assert found[name][key] == value, (name, key)


def test_statistics_of_bfloat16_float8_and_strided_tensors(ckptbridge: Run, tmp_path: Path) -> None:
    import torch

    torch.manual_seed(0)
    tensors = {
        "bf16": torch.randn(300, 7).to(torch.bfloat16),
        "fp8": torch.randn(64).to(torch.float8_e4m3fn),
        "turned": torch.randn(30, 50).t(),
        "strided": torch.randn(40)[::3],
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    torch.save(tensors, tmp_path / "m.pt")
    found = look(ckptbridge, tmp_path / "m.pt")
    assert "stats" not in found.pop("complex")
    for name, row in found.items():
        wanted = expected(tensors[name].to(torch.float64).numpy())
        assert row["stats"]["min"] == wanted["min"] and row["stats"]["max"] == wanted["max"]
        assert row["stats"]["mean"] == pytest.approx(wanted["mean"], rel=1e-11, abs=1e-14)
        assert row["stats"]["std"] == pytest.approx(wanted["std"], rel=1e-11)


def test_statistics_that_overflow_are_left_out_of_json(ckptbridge: Run, tmp_path: Path) -> None:
    save_file({"a": np.array([1.7e308, -1.7e308, 1.7e308])}, tmp_path / "m.safetensors")
    row = look(ckptbridge, tmp_path / "m.safetensors")["a"]
    assert (row["stats"]["max"], row["stats"]["std"]) == (1.7e308, None)


def test_statistics_as_text_name_what_is_not_finite(ckptbridge: Run, tmp_path: Path) -> None:
    save_file({"a.b": np.array([1, np.nan, 0, np.inf], np.float32)}, tmp_path / "m.safetensors")
    row = ckptbridge("inspect", tmp_path / "m.safetensors", "--stats").out.splitlines()[-1]
    assert row.split() == ["0", "1", "0.5", "0.5", "1", "a.b", "float32", "[4]", "1", "NaN,", "1", "Inf"]


def test_statistics_take_no_more_memory_for_a_larger_tensor(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}'
    peaks = []
    for megabytes in (8, 256):
        path = tmp_path / f"{megabytes}.safetensors"
        nbytes = megabytes << 20
        text = header % (nbytes // 4, nbytes)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + nbytes)  # a hole: zeros without the space for them
        script = (
            "import resource, sys\n"
            "import ckptbridge\n"
            "row = ckptbridge.inspect(sys.argv[1], stats=True).statistics['a']\n"
            "assert row.zeros == row.elements\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 40 << 10  # KiB
