"""The forward level: both backends get the same tokens, and their logits and stages are compared."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptbridge.errors import ConfigError, UsageError
from ckptbridge.tables.expand import Expansion
from ckptbridge.verification.control import run_control
from ckptbridge.verification.golden import Golden, check_belongs, read_golden, write_golden
from ckptbridge.verification.metrics import Judgement, Metrics, compare, compare_logits, judge
from ckptbridge.verification.noise import NoiseFloor, judge_with_noise, noise_floor
from ckptbridge.verification.options import ForwardOptions
from ckptbridge.verification.report import ControlResult, ForwardSection, StageResult, forward_section, stage_noise
from ckptbridge.verification.sides import user
from ckptbridge.verification.sides.stages import Stages

Array = npt.NDArray[Any]
Forward = Callable[[Array], Stages]

DEFAULT_LENGTH = 512
MINDFORMERS = "mindformers"  # the built-in name that --ms-net takes besides MODULE:FUNCTION


@dataclass(frozen=True)
class Model:
    """What both sides have in common: the config, and the table that leads from one to the other."""

    config: Mapping[str, Any]
    expansion: Expansion


@dataclass(frozen=True)
class Reference:
    """The PyTorch side's run; ``floor`` is its float64 run where the compute dtype is lower.

    ``repeatable`` says whether two runs gave the same bits; None for a run of another time, from a golden file.
    ``belongs`` says whether it is known to be of the checkpoint that is judged.
    """

    tokens: Array
    stages: Stages
    floor: Stages | None
    repeatable: bool | None
    belongs: bool


@dataclass(frozen=True)
class ForwardResult:
    """The forward level's section, and the negative control's results where it was asked for."""

    section: ForwardSection
    controls: tuple[ControlResult, ...]


def check_options(options: ForwardOptions) -> None:
    """Raises UsageError for options that exclude each other, BackendError for a network that is not installed."""
    if options.prove and options.ms_net is not None:
        raise UsageError("--prove needs the networks of this tool.", remedy="Leave --ms-net out.", option="--prove")
    if options.ms_net != MINDFORMERS:
        return
    from ckptbridge.verification.nets import mindformers

    if options.dtype != "float32":
        raise UsageError(
            f"MindFormers' networks are computed in float32 here, and {options.dtype} is asked for.",
            remedy="Give --dtype float32.",
            option="--ms-net",
        )
    mindformers.check_installed()


def notes_of(options: ForwardOptions) -> tuple[str, ...]:
    """What a reader of the report must know of the chosen networks."""
    if options.ms_net == MINDFORMERS and options.ms_device == "CPU":
        return (
            "MindFormers' own network computed the MindSpore side, on the CPU with stand-ins for its Ascend kernels.",
        )
    return ()


def choose_tokens(config: Mapping[str, Any], options: ForwardOptions) -> Array:
    """Token ids (batch, length): from a file, or random by the seed, 512 a sequence where the model allows."""
    if options.tokens is not None:
        return read_tokens(options.tokens)
    vocab = config.get("vocab_size") or config.get("padded_vocab_size")
    if not isinstance(vocab, int) or vocab < 1:
        raise ConfigError("The config does not say the vocabulary's size (vocab_size).", remedy="Give --tokens FILE.")
    longest = config.get("max_position_embeddings") or config.get("n_positions") or config.get("seq_length")
    reserved = 2 if config.get("model_type") == "roberta" else 0  # positions before the first token's
    allowed = longest - reserved if isinstance(longest, int) else DEFAULT_LENGTH
    length = options.length or min(DEFAULT_LENGTH, allowed)
    if options.batch < 1 or length < 1:
        raise UsageError("There must be at least one token.", remedy="Give --batch and --length from 1 up.")
    return np.random.default_rng(options.seed).integers(0, vocab, (options.batch, length), dtype=np.int64)


def read_tokens(path: Path) -> Array:
    """Token ids from a .npy file, or a JSON list of numbers or of lists of them. Raises UsageError otherwise."""
    import json

    try:
        if path.read_bytes()[:6] == b"\x93NUMPY":
            tokens = np.load(path, allow_pickle=False)
        else:
            tokens = np.array(json.loads(path.read_text(encoding="utf-8")))
        if tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2) or tokens.size == 0:
            raise ValueError
    except (OSError, ValueError, RecursionError):
        raise UsageError(
            "The token file does not hold token ids.",
            remedy="Give a .npy file or a JSON list: integers, or equally long lists of integers.",
            file=path,
        ) from None
    ids: Array = tokens.reshape(-1, tokens.shape[-1]).astype(np.int64)
    return ids


def reference_run(path: Path | None, model: Model, options: ForwardOptions, content: str) -> Reference:
    """Run the PyTorch side, or read its run from the golden file; write that file when it is not there yet.

    ``content`` is the content digest of the PyTorch side, "" where it is not known.
    """
    if options.golden is not None and options.golden.exists():
        golden = read_golden(options.golden)
        belongs = check_belongs(options.golden, golden, content, model.config)
        if golden.dtype != options.dtype:
            raise UsageError(
                f"The golden file was computed in {golden.dtype}, and {options.dtype} is asked for.",
                remedy=f"Give --dtype {golden.dtype}.",
                file=options.golden,
            )
        return Reference(golden.tokens, golden.stages, golden.floor, None, belongs)
    if path is None:
        raise UsageError(
            "There is no PyTorch side to compare with.", remedy="Name the PyTorch checkpoint, or give --golden FILE."
        )
    tokens = choose_tokens(model.config, options)
    stages, repeatable = _twice(lambda: _pytorch(path, model.config, options, options.dtype), tokens)
    floor = None
    if options.dtype != "float64":
        floor = _pytorch(path, model.config, options, "float64")(tokens)
        gc.collect()
    if options.golden is not None:
        from ckptbridge.verification.environment import versions

        write_golden(
            options.golden,
            Golden(tokens, stages, floor, options.dtype, dict(model.config), content, path.name, versions()),
        )
    return Reference(tokens, stages, floor, repeatable, True)


def run_forward(ms: Path, reference: Reference, model: Model, options: ForwardOptions) -> ForwardResult:
    """Run the MindSpore side on the reference's tokens and judge it."""
    floor = _floor(reference, options)
    own = options.ms_net is None
    side: Any = _mindspore_side(ms, model, options) if own else None
    known: tuple[str, ...] = ()
    forward: Forward
    if own:
        forward = side.forward
    elif options.ms_net == MINDFORMERS:
        theirs = _mindformers_side(ms, model, options, reference.tokens)
        forward, known = theirs.forward, theirs.notes
    else:
        forward = _user_net(ms, model, options)
    stages = forward(reference.tokens)
    repeatable = {"MindSpore": _same(stages, forward(reference.tokens))}
    if reference.repeatable is not None:
        repeatable = {"PyTorch": reference.repeatable, **repeatable}
    metrics = _logits(stages, reference, options)
    section = forward_section(
        dtype=options.dtype,
        tokens=_described(reference, options),
        metrics=metrics,
        atol=options.atol,
        rtol=options.rtol,
        equal_nan=options.equal_nan,
        floor=floor,
        stages=_stages(stages, reference, options),
        repeatable=repeatable,
        hints=(*known, *hints(metrics, model.config, options.equal_nan)),
    )
    controls: tuple[ControlResult, ...] = ()
    if options.prove:

        def judged(changed: Any) -> tuple[Metrics, Judgement]:
            found = _logits(changed.forward(reference.tokens), reference, options)
            if floor is None:
                return found, judge(found, options.atol, options.rtol, equal_nan=options.equal_nan)
            return found, judge_with_noise(found, floor, options.atol, options.rtol, equal_nan=options.equal_nan)

        controls = run_control(side, model.expansion, judged, options.bitwise)
    return ForwardResult(section, controls)


def hints(metrics: Metrics, config: Mapping[str, Any], equal_nan: bool = False) -> tuple[str, ...]:
    """What is known to look like the error that was found."""
    found = []
    if metrics.nan_both and not metrics.nan_one and not equal_nan:
        found.append("NaN stands in the same places on both sides; --equal-nan takes that for equal.")
    activation = str(config.get("hidden_act") or config.get("activation_function") or "")
    if activation == "gelu" and 1e-5 < metrics.max_abs < 1e-1:
        found.append("mindspore.nn.GELU() is the tanh approximation by default (4e-4 off torch.nn.GELU()).")
    if ("layer_norm_eps" in config or "layer_norm_epsilon" in config) and 1e-5 < metrics.max_abs < 1.0:
        found.append("mindspore.nn.LayerNorm has epsilon 1e-7 by default, torch.nn.LayerNorm 1e-5.")
    if metrics.a.saturated and metrics.b.posinf + metrics.b.neginf:
        found.append("65504 stands where PyTorch has infinity: the device saturates (MS_ASCEND_CHECK_OVERFLOW_MODE).")
    return tuple(found)


# --- the sides --------------------------------------------------------------------------------


def _pytorch(path: Path, config: Mapping[str, Any], options: ForwardOptions, dtype: str) -> Forward:
    if options.pt_model is not None:
        return user.pytorch_function(options.pt_model, path, config, dtype, options.device)
    from ckptbridge.verification.sides import pytorch

    return pytorch.load(path, config, dtype, options.device).forward


def _mindspore_side(ms: Path, model: Model, options: ForwardOptions) -> Any:
    from ckptbridge.verification.sides import mindspore

    return mindspore.load(
        ms, model.config, model.expansion.table.target, model.expansion.layout, options.dtype, options.ms_device
    )


def _mindformers_side(ms: Path, model: Model, options: ForwardOptions, tokens: Array) -> Any:
    from ckptbridge.verification.nets import mindformers

    batch, length = tokens.shape
    expansion = model.expansion
    return mindformers.load(
        ms, model.config, expansion.table.target, expansion.layout, (batch, length), options.ms_device
    )


def _user_net(ms: Path, model: Model, options: ForwardOptions) -> Forward:
    return user.mindspore_function(str(options.ms_net), ms, model.config, options.dtype, options.ms_device)


def _twice(load: Callable[[], Forward], tokens: Array) -> tuple[Stages, bool]:
    """Two runs, and whether they gave the same bits. The model is gone afterwards."""
    forward = load()
    first = forward(tokens)
    same = _same(first, forward(tokens))
    del forward
    gc.collect()
    return first, same


def _same(a: Stages, b: Stages) -> bool:
    return a.values.keys() == b.values.keys() and all(
        a.values[k].shape == b.values[k].shape and a.values[k].tobytes() == b.values[k].tobytes() for k in a.values
    )


# --- comparing --------------------------------------------------------------------------------


def _logits(stages: Stages, reference: Reference, options: ForwardOptions) -> Metrics:
    return compare_logits(
        stages.logits, reference.stages.logits, atol=options.atol, rtol=options.rtol, equal_nan=options.equal_nan
    )


def _floor(reference: Reference, options: ForwardOptions) -> NoiseFloor | None:
    if options.dtype == "float64":
        return None
    if reference.floor is None:
        raise UsageError(
            f"The golden file has no noise floor for {options.dtype}.", remedy="Write it again with this version."
        )
    against = compare_logits(reference.stages.logits, reference.floor.logits, atol=options.atol)
    return noise_floor(options.dtype, against)


def _stages(stages: Stages, reference: Reference, options: ForwardOptions) -> list[StageResult]:
    """The stages that both sides have, in the order of computation."""
    found = []
    for name, value in stages.values.items():
        other = reference.stages.values.get(name)
        if other is None or other.shape != value.shape:
            continue
        metrics = compare(value, other, atol=options.atol, rtol=options.rtol, equal_nan=options.equal_nan)
        own_floor = None
        if reference.floor is not None and name in reference.floor.values:
            own_floor = compare(other, reference.floor.values[name], atol=options.atol).max_abs
        noise = stage_noise(options.dtype, metrics, own_floor)
        found.append(StageResult(name, metrics, noise, stages.feeds.get(name, ())))
    return found


def _described(reference: Reference, options: ForwardOptions) -> str:
    if reference.repeatable is None:
        origin = "of the golden file"
    elif options.tokens is not None:
        origin = f"from {options.tokens.name}"
    else:
        origin = f"random, seed {options.seed}"
    batch, length = reference.tokens.shape
    return f"{batch} x {length} tokens, {origin}"
