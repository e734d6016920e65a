"""What must not grow: memory, imports, and the work of planning. Nothing here fails on a time.

The checkpoints are headers over holes, larger than the limit of memory, so that whatever held one would show.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from benchmark import inputs
from benchmark.measure import CommandFailed, run

from ckptbridge.conversion.planner import make_plan
from ckptbridge.conversion.request import Request

MIB = 1 << 20
LIMIT = 300_000_000  # bytes of anonymous memory at the peak
MODEL = 420 * MIB  # more than the limit, whichever way it is held
CKPTBRIDGE = [sys.executable, "-m", "ckptbridge"]


def peak(*arguments: object) -> int:
    """The peak of a command's anonymous memory; it must end with exit code 0."""
    return run([*CKPTBRIDGE, *map(str, arguments)]).memory


def sparse(folder: Path, checkpoint: inputs.Checkpoint) -> Path:
    return inputs.write(folder, checkpoint, shards=2, sparse=True)


def test_the_measure_sees_what_a_process_holds() -> None:
    held = run([sys.executable, "-c", f"import time; x = b'x' * {LIMIT}; time.sleep(0.2)"])
    assert held.memory >= LIMIT
    with pytest.raises(CommandFailed, match="exit code 3"):
        run([sys.executable, "-c", "raise SystemExit(3)"])


CONVERSIONS: dict[str, tuple[Callable[[], inputs.Checkpoint], tuple[str, ...]]] = {
    "fused": (lambda: inputs.llama(MODEL), ("pt2ms", "out.ckpt", "--target", "mindformers")),
    "experts transposed": (lambda: inputs.deepseek_v3(MODEL), ("pt2ms", "out.ckpt")),
    "widened": (lambda: inputs.llama(MODEL // 2), ("pt2ms", "out.ckpt", "--target", "hf", "--dtype", "float32")),
    "narrowed": (lambda: inputs.llama(MODEL, "F32"), ("pt2ms", "out.ckpt", "--target", "hf", "--dtype", "bfloat16")),
    "dequantised": (lambda: inputs.deepseek_v3(MODEL, fp8=True), ("pt2ms", "out.ckpt")),
    ".bin out": (lambda: inputs.llama(MODEL), ("ms2pt", "out", "--target", "hf", "--format", "bin")),
    "one tensor, renamed": (lambda: inputs.one_large_tensor(1024 * MIB), ("pt2ms", "out.ckpt", "--target", "hf")),
    "one tensor, cast": (
        lambda: inputs.one_large_tensor(512 * MIB),
        ("pt2ms", "out.ckpt", "--target", "hf", "--dtype", "float32"),
    ),
}


@pytest.mark.parametrize("what", CONVERSIONS)
def test_a_conversion_holds_little(tmp_path: Path, what: str) -> None:
    make, (direction, out, *options) = CONVERSIONS[what]
    source = sparse(tmp_path / "source", make())
    assert peak("convert", direction, source, tmp_path / out, "--quiet", *options) < LIMIT


def test_verifying_weights_holds_little(tmp_path: Path) -> None:
    source = sparse(tmp_path / "source", inputs.llama(MODEL))
    peak("convert", "pt2ms", source, tmp_path / "out.ckpt", "--quiet", "--target", "mindformers")
    assert peak("verify", source, tmp_path / "out.ckpt", "--level", "weights", "--quiet") < LIMIT


def published(layers: int | None = None) -> inputs.Checkpoint:
    """DeepSeek-V3 as published, or its first layers."""
    configs = Path(__file__).parents[1] / "mappings" / "configs"
    config: dict[str, Any] = json.loads((configs / "deepseek-v3.json").read_text())
    config.pop("quantization_config")
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    return config, inputs.deepseek_tensors(config)


def test_planning_the_largest_published_model_holds_little(tmp_path: Path) -> None:
    checkpoint = published()
    assert sum(t.nbytes for t in checkpoint[1]) > 1.3e12
    source = inputs.write(tmp_path / "source", checkpoint, shards=163, sparse=True)
    assert peak("convert", "pt2ms", source, tmp_path / "out.ckpt", "--dry-run", "--quiet") < LIMIT


def test_the_work_of_planning_is_linear_in_the_tensors(tmp_path: Path) -> None:
    calls = []
    for layers in (6, 9, 12):  # the first three are dense
        source = inputs.write(tmp_path / str(layers), published(layers), shards=layers, sparse=True)
        request = Request(source=source, destination=tmp_path / "out.ckpt", direction="pt2ms")
        make_plan(request)  # what is made once is made now
        calls.append(_calls(lambda request=request: make_plan(request)))
    # The same number of tensors more is the same number of calls more.
    assert calls[2] - calls[1] < 1.05 * (calls[1] - calls[0])


def _calls(function: Callable[[], object]) -> int:
    """How many functions are called, Python's and C's: work, without a clock."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


# --- imports ---------------------------------------------------------------------------------

FRAMEWORKS = ("torch", "mindspore", "transformers", "mindformers")
_WATCHED = """
import json, sys
for name in {absent!r}:
    sys.modules[name] = None  # as if it were not installed
from ckptbridge.cli.main import main
try:
    main({arguments!r})
finally:
    loaded = {{name for name, module in sys.modules.items() if module}}
    names = {{name if name.startswith("ckptbridge.") else name.partition(".")[0] for name in loaded}}
    print(json.dumps(sorted(names)), file=sys.stderr)
"""


def imported(arguments: Sequence[object], absent: Sequence[str] = FRAMEWORKS) -> set[str]:
    """The top-level modules that a command imports, and those of this package; ``absent`` counts as not installed."""
    code = _WATCHED.format(absent=tuple(absent), arguments=[str(a) for a in arguments])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.strip().splitlines()[-1]))


def test_help_imports_next_to_nothing() -> None:
    heavy = {*FRAMEWORKS, "numpy", "safetensors", "ml_dtypes", "tqdm", "blake3"}
    for arguments in (["--help"], ["--version"]):
        assert not imported(arguments, absent=()) & heavy


def test_no_framework_is_imported_where_none_is_needed(tmp_path: Path) -> None:
    source = inputs.write(tmp_path / "source", inputs.one_large_tensor(4096 * 64), shards=2, sparse=True)
    ckpt = tmp_path / "out.ckpt"
    commands: list[list[object]] = [
        ["convert", "pt2ms", source, ckpt, "--target", "mindformers", "--quiet"],
        ["convert", "ms2pt", ckpt, tmp_path / "back", "--quiet"],
        ["convert", "ms2pt", ckpt, tmp_path / "bin", "--format", "bin", "--quiet"],
        ["convert", "pt2ms", tmp_path / "bin", tmp_path / "again.ckpt", "--dtype", "float16", "--quiet"],
        ["verify", source, ckpt, "--level", "weights", "--quiet"],
        ["inspect", ckpt],
        ["mappings", "list"],
    ]
    for command in commands:
        assert not imported(command) & set(FRAMEWORKS), command
        if command[0] in ("convert", "inspect"):  # not even where they are installed
            if command[0] == "convert":
                command = [*command, "--overwrite"]
            assert not imported(command, absent=()) & set(FRAMEWORKS), command


def test_the_weights_level_waits_for_nothing_of_the_forward(tmp_path: Path) -> None:
    source = inputs.write(tmp_path / "source", inputs.one_large_tensor(4096 * 64), shards=2, sparse=True)
    imported(["convert", "pt2ms", source, tmp_path / "m.ckpt", "--quiet"])
    found = imported(["verify", source, tmp_path / "m.ckpt", "--level", "weights", "--quiet"], absent=())
    assert "ckptbridge.verification.weights" in found
    assert not found & {"ckptbridge.verification.forward", "ckptbridge.conversion.run"}
