"""The public functions; ``ckptbridge`` itself offers them, imported on first use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ckptbridge.conversion.plan import Direction
from ckptbridge.conversion.planner import make_plan
from ckptbridge.conversion.request import Request
from ckptbridge.conversion.run import Summary, run
from ckptbridge.errors import UsageError
from ckptbridge.verification.handoff import Overrides
from ckptbridge.verification.options import ForwardOptions
from ckptbridge.verification.report import VerifyReport
from ckptbridge.verification.session import Level, run_verify

StrPath = str | os.PathLike[str]


def convert(
    source: StrPath,
    destination: StrPath,
    *,
    direction: Direction,
    target: str | None = None,
    layout: Mapping[str, str] | None = None,
    mapping: StrPath | None = None,
    config: StrPath | None = None,
    format: str | None = None,
    dtype: str | None = None,
    keep_quantized: bool = False,
    max_shard_size: int | None = None,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    allow_overflow: bool = False,
    provenance: Mapping[str, str] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    crc: bool = False,
    digest: str = "blake3",
    key: str | None = None,
    progress: Callable[[int], object] | None = None,
) -> Summary:
    """Convert a checkpoint; the keywords are the options of ``ckptbridge convert``.

    ``direction`` is "pt2ms" or "ms2pt"; ``max_shard_size`` is in bytes; ``progress`` is called with the
    number of bytes that have just been placed. Returns what was done: the plan, the provenance,
    numbers of tensors and bytes, seconds, and the values that a cast lost. Raises CkptBridgeError's
    family, and leaves no output behind when it does; stopped by KeyboardInterrupt it leaves what is finished in a
    hidden folder, for the same call with ``resume``.

    >>> import numpy, safetensors.numpy
    >>> weights = {"norm.weight": numpy.ones(3, "float32"), "norm.bias": numpy.zeros(3, "float32")}
    >>> safetensors.numpy.save_file(weights, "model.safetensors")
    >>> done = convert("model.safetensors", "model.ckpt", direction="pt2ms", target="nn")
    >>> done.tensors, done.nbytes
    (2, 24)
    >>> [record.spec.name for record in done.plan.records]
    ['norm.beta', 'norm.gamma']
    """
    if direction not in ("pt2ms", "ms2pt"):
        raise UsageError(f"There is no direction '{direction}'.", remedy="Use 'pt2ms' or 'ms2pt'.")
    request = Request(
        source=Path(source),
        destination=Path(destination),
        direction=direction,
        target=target,
        layout=dict(layout or {}),
        mapping=Path(mapping) if mapping is not None else None,
        config=Path(config) if config is not None else None,
        format=format,
        dtype=dtype,
        keep_quantized=keep_quantized,
        max_shard_size=max_shard_size,
        allow_missing=tuple(allow_missing),
        allow_unexpected=tuple(allow_unexpected),
        allow_overflow=allow_overflow,
        provenance=dict(provenance or {}),
        overwrite=overwrite,
        resume=resume,
        crc=crc,
        digest=digest,
        key=key,
    )
    return run(make_plan(request), request, progress)


def verify(
    *checkpoints: StrPath,
    level: Level = "all",
    atol: float = 1e-5,
    rtol: float = 0.0,
    dtype: str = "float64",
    tokens: StrPath | None = None,
    batch: int = 1,
    length: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    ms_device: str = "CPU",
    pt_model: str | None = None,
    ms_net: str | None = None,
    golden: StrPath | None = None,
    prove: bool = False,
    equal_nan: bool = False,
    target: str | None = None,
    layout: Mapping[str, str] | None = None,
    mapping: StrPath | None = None,
    config: StrPath | None = None,
    key: str | None = None,
) -> VerifyReport:
    """Judge a handoff; the keywords are the options of ``ckptbridge verify``.

    ``checkpoints`` are the PyTorch and the MindSpore side, or one of them where its provenance names
    the other, or none for the current folder. The report's ``verdict`` is "holds", "fails" or
    "unjudged". Raises CkptBridgeError's family when nothing can be judged.

    >>> import numpy, safetensors.numpy
    >>> weights = {"norm.weight": numpy.ones(3, "float32"), "norm.bias": numpy.zeros(3, "float32")}
    >>> safetensors.numpy.save_file(weights, "model.safetensors")
    >>> _ = convert("model.safetensors", "model.ckpt", direction="pt2ms", target="nn")
    >>> report = verify("model.safetensors", "model.ckpt", level="weights")
    >>> report.verdict, report.exit_code
    ('holds', 0)
    """
    options = ForwardOptions(
        atol=atol,
        rtol=rtol,
        dtype=dtype,
        tokens=_path(tokens),
        batch=batch,
        length=length,
        seed=seed,
        device=device,
        ms_device=ms_device,
        pt_model=pt_model,
        ms_net=ms_net,
        golden=_path(golden),
        equal_nan=equal_nan,
        prove=prove,
        bitwise=level == "all",
    )
    overrides = Overrides(target, dict(layout or {}), _path(mapping), _path(config), key)
    result = run_verify(tuple(Path(p) for p in checkpoints), level, overrides, options)
    if not isinstance(result, VerifyReport):
        raise UsageError(
            f"Only the PyTorch side is here: its run was written to {result.path}, and nothing was judged.",
            remedy="Verify with the golden file where the MindSpore checkpoint is.",
        )
    return result


def _path(value: StrPath | None) -> Path | None:
    return Path(value) if value is not None else None
