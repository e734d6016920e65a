"""The result of ``ckptbridge verify`` as plain frozen data, and the verdict that follows from it.

The renderings live beside this module: ``report_text`` (terminal), ``report_json``,
``report_junit``, ``report_html``. In all of them ``a`` is MindSpore, the side under judgement, and
``b`` PyTorch, the reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ckptbridge.verification.metrics import Judgement, Metrics, judge
from ckptbridge.verification.noise import FACTOR, NoiseFloor, judge_with_noise
from ckptbridge.verification.numerics import Action

SCHEMA = 1

Verdict = Literal["holds", "fails", "unjudged"]
EXIT_CODES: Mapping[Verdict, int] = {"holds": 0, "fails": 1, "unjudged": 2}

# What is left of an intermediate result's error when nothing is wrong, over its largest value; each with room.
_STAGE_NOISE = {"float64": 1e-9, "float32": 1e-4, "float16": 3e-2, "bfloat16": 0.2}


@dataclass(frozen=True, slots=True)
class TensorResult:
    """One tensor of the weights level: ``name`` is the side's that the conversion wrote, ``sources`` the other's.

    ``step`` is what the conversion declared to do to its values (a cast, a dequantisation), if anything.
    ``status``: equal, dropped (by a rule; ``note`` says why), differs, missing, unexpected, shape, dtype.
    ``differing`` counts elements with other bits, ``first_difference`` is the index of the first, ``max_abs``
    the largest difference of values. ``nan`` and ``inf`` count those in the file.
    """

    name: str
    sources: tuple[str, ...]
    status: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    elements: int = 0
    differing: int = 0
    first_difference: tuple[int, ...] | None = None
    max_abs: float | None = None
    nan: int = 0
    inf: int = 0
    note: str = ""
    step: str = ""

    @property
    def ok(self) -> bool:
        return self.status in ("equal", "dropped")


@dataclass(frozen=True, slots=True)
class WeightsSection:
    """``digests``: content digests by side (``PyTorch``, ``MindSpore``); ``reason`` unless it holds."""

    verdict: Verdict
    reason: str
    tensors: tuple[TensorResult, ...]
    digests: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def tally(self) -> str:
        """``311 of 311 tensors equal bit for bit, 40 of them after cast float32 -> bfloat16, 2 dropped by rule``."""
        dropped = sum(t.status == "dropped" for t in self.tensors)
        equal = [t for t in self.tensors if t.status == "equal"]
        steps = Counter(t.step for t in equal if t.step)
        tail = "".join(f", {count} of them after {step}" for step, count in steps.items())
        tail += f", {dropped} dropped by rule" if dropped else ""
        return f"{len(equal)} of {len(self.tensors) - dropped} tensors equal bit for bit{tail}"


@dataclass(frozen=True, slots=True)
class StageResult:
    """An intermediate result; ``noise`` is the largest ``max_abs`` that is still rounding; ``feeds`` its tensors."""

    name: str
    metrics: Metrics
    noise: float
    feeds: tuple[str, ...] = ()

    @property
    def quiet(self) -> bool:
        m = self.metrics
        return not (m.nan_one or m.nan_both or m.inf_mismatch) and m.max_abs <= self.noise


@dataclass(frozen=True, slots=True)
class ForwardSection:
    """The logits' judgement, and where the error first leaves the noise (``first_bad``, with a message).

    ``atol`` and ``rtol`` are what was asked; ``judgement`` carries what was used. ``repeatable`` says
    by side whether two runs gave the same bits. ``tokens`` describes the input.
    """

    verdict: Verdict
    reason: str
    dtype: str
    tokens: str
    atol: float
    rtol: float
    equal_nan: bool
    metrics: Metrics | None
    judgement: Judgement | None
    floor: NoiseFloor | None = None
    stages: tuple[StageResult, ...] = ()
    first_bad: str = ""
    message: str = ""
    repeatable: Mapping[str, bool] = field(default_factory=dict)
    hints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ControlResult:
    """One seeded fault; ``max_abs`` is the error it caused, ``caught`` whether the verdict turned."""

    fault: str
    tensor: str
    caught: bool
    max_abs: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Environment:
    """Versions by package, devices by side, the platform, and the command line."""

    versions: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)
    platform: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Everything one ``verify`` found. ``provenance`` is the JSON object that the checkpoint carries.

    ``error`` says why nothing could be judged, where that is so.
    """

    pytorch: str
    mindspore: str
    weights: WeightsSection | None = None
    forward: ForwardSection | None = None
    controls: tuple[ControlResult, ...] = ()
    actions: tuple[Action, ...] = ()
    environment: Environment = field(default_factory=Environment)
    provenance: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tool: str = ""
    error: str = ""
    schema: int = SCHEMA

    @property
    def sections(self) -> tuple[tuple[str, Verdict, str], ...]:
        """(name, verdict, reason) of each level that ran; the negative control if it was asked for.

        A fault that the control seeds and the check lets pass leaves the claim unjudged: on this model
        agreement does not rule that fault out.
        """
        found: list[tuple[str, Verdict, str]] = []
        if self.weights is not None:
            found.append(("weights", self.weights.verdict, self.weights.reason))
        if self.forward is not None:
            found.append(("forward", self.forward.verdict, self.forward.reason))
        if self.controls:
            holes = [c.fault for c in self.controls if not c.caught]
            reason = f"On this model the check would not notice: {', '.join(holes)}." if holes else ""
            found.append(("control", "unjudged" if holes else "holds", reason))
        return tuple(found)

    @property
    def verdict(self) -> Verdict:
        """fails if a level fails, else unjudged if one is or none ran, else holds."""
        verdicts = [verdict for _, verdict, _ in self.sections]
        if "fails" in verdicts:
            return "fails"
        return "unjudged" if "unjudged" in verdicts or not verdicts else "holds"

    @property
    def reason(self) -> str:
        """Why, in the words of the levels that decide; empty if it holds."""
        if not self.sections:
            return self.error or "Nothing was checked."
        deciding = [(name, why) for name, verdict, why in self.sections if verdict == self.verdict and why]
        return " ".join(f"{name.capitalize()}: {why}" for name, why in deciding)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]


# --- building the sections ------------------------------------------------------------------


def worst_first(tensors: Sequence[TensorResult]) -> tuple[TensorResult, ...]:
    """What is wrong first, the largest error first (a tensor without one before all), else in file order."""
    return tuple(sorted(tensors, key=lambda t: (t.ok, -(float("inf") if t.max_abs is None else t.max_abs))))


def weights_section(
    tensors: Sequence[TensorResult], digests: Mapping[str, str] | None = None, notes: Sequence[str] = ()
) -> WeightsSection:
    """The weights level from its tensors. No tensor in common is a failure, not an empty success."""
    bad = [t for t in worst_first(tensors) if not t.ok]
    if bad:
        names = ", ".join(t.name for t in bad[:3]) + (" ..." if len(bad) > 3 else "")
        compared = sum(t.status != "dropped" for t in tensors)
        reason = f"{len(bad)} of {compared} tensors are not what the table says: {names}."
    elif not any(t.status == "equal" for t in tensors):
        reason = "The two checkpoints have no tensor in common."
    else:
        reason = ""
    return WeightsSection("fails" if reason else "holds", reason, tuple(tensors), dict(digests or {}), tuple(notes))


def short(value: float) -> str:
    """A number for people: 12.6, 0.00312, 3.3e-14."""
    return f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"


def stage_noise(dtype: str, metrics: Metrics, floor: float | None = None) -> float:
    """The largest ``max_abs`` that is still rounding at a stage computed in ``dtype``.

    ``floor``: the stage's measured floor (PyTorch's run in ``dtype`` against float64), if there is one.
    """
    assumed = _STAGE_NOISE[dtype] * max(1.0, metrics.ref_max)
    return assumed if floor is None else max(FACTOR * floor, 2.0**-52 * metrics.ref_max)


def forward_section(
    *,
    dtype: str,
    tokens: str,
    metrics: Metrics,
    atol: float,
    rtol: float = 0.0,
    equal_nan: bool = False,
    floor: NoiseFloor | None = None,
    stages: Sequence[StageResult] = (),
    repeatable: Mapping[str, bool] | None = None,
    hints: Sequence[str] = (),
) -> ForwardSection:
    """Judges the logits, and finds the first stage that leaves the noise.

    In float64 against the tolerances alone, below against the noise ``floor`` too. A side whose two
    runs differ leaves the claim unjudged.
    """
    if floor is None:
        judgement = judge(metrics, atol, rtol, equal_nan=equal_nan)
    else:
        judgement = judge_with_noise(metrics, floor, atol, rtol, equal_nan=equal_nan)
    verdict: Verdict = {True: "holds", False: "fails", None: "unjudged"}[judgement.holds]  # type: ignore[assignment]
    reason = " ".join(judgement.reasons)
    unsteady = [side for side, same in (repeatable or {}).items() if not same]
    if unsteady:
        verdict = "unjudged"
        reason = f"Two runs of the same input differ on: {', '.join(unsteady)}. Nothing can be compared with that."
    bad = next((k for k, stage in enumerate(stages) if not stage.quiet), None)
    return ForwardSection(
        verdict=verdict,
        reason=reason,
        dtype=dtype,
        tokens=tokens,
        atol=atol,
        rtol=rtol,
        equal_nan=equal_nan,
        metrics=metrics,
        judgement=judgement,
        floor=floor,
        stages=tuple(stages),
        first_bad="" if bad is None else stages[bad].name,
        message="" if bad is None else _stage_message(stages, bad),
        repeatable=dict(repeatable or {}),
        hints=tuple(hints),
    )


def _stage_message(stages: Sequence[StageResult], bad: int) -> str:
    stage, m = stages[bad], stages[bad].metrics
    if m.nan_one or m.nan_both or m.inf_mismatch:
        what = f"{m.a.nan} NaN in MindSpore, {m.b.nan} in PyTorch, {m.inf_mismatch} infinities out of place"
    else:
        what = f"max |a-b| {short(m.max_abs)}, where rounding stays below {stage.noise:.1e}"
    parts = [f"The error leaves the noise at {describe_stage(stage.name)}: {what}."]
    if bad:
        quiet = max(s.metrics.max_abs for s in stages[:bad])
        parts.append(f"The {bad} stages before it agree to {quiet:.1e}.")
    if stage.feeds:
        parts.append(f"Tensors that feed it: {', '.join(stage.feeds)}.")
    return " ".join(parts)


def describe_stage(name: str) -> str:
    """``layers.3.attention`` as ``layers.3.attention (layer 3, attention)``; other names unchanged."""
    parts = name.split(".")
    if len(parts) >= 2 and parts[0] == "layers" and parts[1].isdigit():
        return f"{name} (layer {parts[1]}, {parts[2] if len(parts) > 2 else 'output'})"
    return name


def rejudge(report: VerifyReport, atol: float, rtol: float = 0.0) -> VerifyReport:
    """The report with its logits judged at other tolerances. The weights level has none, and stays."""
    old = report.forward
    if old is None or old.metrics is None:
        return report
    new = forward_section(
        dtype=old.dtype,
        tokens=old.tokens,
        metrics=old.metrics,
        atol=atol,
        rtol=rtol,
        equal_nan=old.equal_nan,
        floor=old.floor,
        stages=old.stages,
        repeatable=old.repeatable,
        hints=old.hints,
    )
    return replace(report, forward=new)


def unjudged_forward(
    reason: str, *, dtype: str, tokens: str = "", atol: float = 0.0, rtol: float = 0.0
) -> ForwardSection:
    """A forward level that could not run, and why."""
    return ForwardSection("unjudged", reason, dtype, tokens, atol, rtol, False, None, None)
