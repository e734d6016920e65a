"""The activation kernels of both backends, each against the exact value: which one is at fault.

Two backends that disagree do not say who is wrong. So every kernel is held against the formula in
NumPy (longdouble where the platform has it) on the inputs *as rounded to the dtype*, and the verdict
names the kernels that leave the bound

    |kernel - exact| <= atol + 4 eps(dtype) * scale,   scale = max(1, |exact|)

with the largest |exact| of the row where values of a row are combined (in float16 and bfloat16 no
kernel can do better than its dtype's rounding, whatever atol). A kernel inside the bound and still
worse than 64 eps of its dtype is called imprecise. Errors are told as |kernel - exact| / scale:
absolute for values below 1, relative above. Separately, layers are
built with each framework's defaults: where a framework computes exactly what its own default says,
and that default is another, it is a *default that differs*, no kernel fault.

Run this outside :func:`ckptbridge.verification.numerics.deterministic`, which replaces SiLU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckptbridge.errors import UsageError
from ckptbridge.verification.encoding import encode
from ckptbridge.verification.metrics import check_tolerances
from ckptbridge.verification.reference import CASES, EPS, Case, gelu, gelu_tanh, layer_norm, rounded
from ckptbridge.verification.sides.kernels import Floats, KernelSet, NoKernel

DTYPES = ("float64", "float32", "float16", "bfloat16")
_BOUND_EPS = 4.0
_IMPRECISE_EPS = 64.0


@dataclass(frozen=True, slots=True)
class KernelResult:
    """One kernel in one dtype. ``status``: ok, imprecise, fault, missing.

    ``error`` is its largest error against the exact value, over the scale (see the module's text), at
    input ``at`` (the first argument). ``note`` says why it is missing, or what else was seen.
    """

    side: str
    case: str
    kernel: str
    dtype: str
    status: str
    error: float | None
    at: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """What networks use on the two sides, against each other (the first kernel that each side has)."""

    case: str
    dtype: str
    torch: str
    mindspore: str
    error: float | None
    at_fault: str  # "", "torch", "mindspore", "both"; "unknown" if a side has no kernel


@dataclass(frozen=True, slots=True)
class DefaultResult:
    """A layer with default settings: ``differs``, ``same``, or ``fault`` (not even its own default's formula)."""

    layer: str
    status: str
    max_abs: float
    torch: str
    mindspore: str
    remedy: str


@dataclass(frozen=True, slots=True)
class ActivationReport:
    """``holds``: no kernel that the backends have leaves its bound, and there was something to compare."""

    atol: float
    versions: Mapping[str, str]
    devices: Mapping[str, str]
    kernels: tuple[KernelResult, ...]
    pairs: tuple[Pair, ...]
    defaults: tuple[DefaultResult, ...]

    @property
    def faults(self) -> tuple[KernelResult, ...]:
        return tuple(k for k in self.kernels if k.status == "fault")

    @property
    def holds(self) -> bool | None:
        """None if no case has a kernel on both sides."""
        if self.faults or any(d.status == "fault" for d in self.defaults):
            return False
        return True if any(p.error is not None for p in self.pairs) else None

    @property
    def exit_code(self) -> int:
        return {True: 0, False: 1, None: 2}[self.holds]


def run(
    atol: float = 1e-4, dtypes: Sequence[str] = DTYPES, device: str = "cpu", ms_device: str = "CPU"
) -> ActivationReport:
    """Compares all kernels on the real backends. Raises UsageError, BackendError."""
    from ckptbridge.verification.sides import mindspore_kernels, torch_kernels

    return check(torch_kernels.kernel_set(device), mindspore_kernels.kernel_set(ms_device), atol, dtypes)


def check(torch: KernelSet, mindspore: KernelSet, atol: float, dtypes: Sequence[str] = DTYPES) -> ActivationReport:
    """As :func:`run`, for given kernel sets."""
    check_tolerances(atol, 0.0)
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise UsageError(f"Activations are not compared in '{dtype}'.", remedy=f"Use: {', '.join(DTYPES)}.")
    kernels: list[KernelResult] = []
    pairs = []
    for dtype in dtypes:
        for case in CASES:
            inputs = {name: rounded(x, dtype) for name, x in case.inputs(dtype).items()}
            exact = case.exact(inputs)
            sides = [list(_run_side(side, case, dtype, inputs, exact, atol)) for side in (torch, mindspore)]
            kernels += [result for side in sides for result, _ in side]
            pairs.append(_pair(case, dtype, *sides))
    return ActivationReport(
        atol=atol,
        versions={side.name: side.version for side in (torch, mindspore)},
        devices={side.name: side.device for side in (torch, mindspore)},
        kernels=tuple(kernels),
        pairs=tuple(pairs),
        defaults=tuple(_compare_defaults(torch, mindspore)),
    )


Outcome = tuple[KernelResult, "Floats | None"]


def _run_side(
    side: KernelSet, case: Case, dtype: str, inputs: Mapping[str, Floats], exact: Floats, atol: float
) -> Iterator[Outcome]:
    for kernel, function in side.kernels[case.name].items():
        try:
            found = side.run(function, inputs, dtype)
        except NoKernel as error:
            yield KernelResult(side.name, case.name, kernel, dtype, "missing", None, None, str(error)), None
            continue
        if found.shape != exact.shape:
            note = f"shape {list(found.shape)} for {list(exact.shape)}"
            yield KernelResult(side.name, case.name, kernel, dtype, "fault", np.inf, None, note), None
            continue
        yield _judged(side.name, case, kernel, dtype, inputs, exact, found, atol), found


def _judged(
    side: str,
    case: Case,
    kernel: str,
    dtype: str,
    inputs: Mapping[str, Floats],
    exact: Floats,
    found: Floats,
    atol: float,
) -> KernelResult:
    eps = EPS[dtype]
    scale = np.abs(exact) if case.elementwise else np.abs(exact).max(axis=-1, keepdims=True)
    scale = np.maximum(scale, 1.0)
    with np.errstate(all="ignore"):
        error = _distance(found, exact)
        excess = error - (atol + _BOUND_EPS * eps * scale)
        largest = float((error / scale).max())
    worst = np.unravel_index(int(excess.argmax()), exact.shape)
    status = "fault" if excess.max() > 0 else "imprecise" if largest > _IMPRECISE_EPS * eps else "ok"
    first = next(iter(inputs.values()))
    at = float(first[worst]) if first.shape == exact.shape else None
    return KernelResult(side, case.name, kernel, dtype, status, largest, at, _note(exact, found, dtype, first))


def _distance(a: Floats, b: Floats) -> Floats:
    """|a - b|: 0 for equal infinities, infinite for NaN."""
    apart = np.where(a == b, 0.0, np.abs(a - b))
    return np.where(np.isnan(apart), np.inf, apart)


def _note(exact: Floats, found: Floats, dtype: str, first: Floats) -> str:
    notes = []
    broken = int(np.count_nonzero(~np.isfinite(found) & np.isfinite(exact)))
    if broken:
        notes.append(f"{broken} results are not finite")
    tiny = (np.abs(first) > 0) & (np.abs(first) < SMALLEST_NORMAL[dtype]) if first.shape == exact.shape else None
    if tiny is not None and (tiny & (rounded(exact, dtype) != 0)).any() and not found[tiny].any():
        notes.append("denormal inputs are taken as 0")
    return ", ".join(notes)


SMALLEST_NORMAL = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-14, "bfloat16": 2.0**-126}


def _pair(case: Case, dtype: str, torch: list[Outcome], mindspore: list[Outcome]) -> Pair:
    left, right = (next(((r, x) for r, x in side if x is not None), None) for side in (torch, mindspore))
    if left is None or right is None:
        names = [found[0].kernel if found else "" for found in (left, right)]
        return Pair(case.name, dtype, names[0], names[1], None, "unknown")
    (a, x), (b, y) = left, right
    with np.errstate(all="ignore"):
        apart = float((_distance(x, y) / np.maximum(1.0, np.abs(x))).max())
    bad = [side for side, result in (("torch", a), ("mindspore", b)) if result.status == "fault"]
    return Pair(case.name, dtype, a.kernel, b.kernel, apart, "both" if len(bad) == 2 else "".join(bad))


# --- defaults that differ -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KnownDefault:
    """A layer whose default settings differ, and each framework's own formula."""

    layer: str
    inputs: Callable[[], Floats]
    torch: str
    mindspore: str
    torch_exact: Callable[[Floats], Floats]
    mindspore_exact: Callable[[Floats], Floats]
    remedy: str
    stages: tuple[str, ...]  # words in the names of the stages where it would show
    sizes: tuple[float, float]  # how large it shows, roughly


KNOWN_DEFAULTS = (
    KnownDefault(
        layer="LayerNorm",
        inputs=lambda: 0.02 * np.random.default_rng(0).standard_normal((8, 64)),
        torch="eps 1e-5",
        mindspore="epsilon 1e-7",
        torch_exact=lambda x: layer_norm(x, 1e-5),
        mindspore_exact=lambda x: layer_norm(x, 1e-7),
        remedy="Build mindspore.nn.LayerNorm with epsilon=1e-5 (or what the model's config says).",
        stages=("norm", "ln"),
        sizes=(1e-4, 1.0),
    ),
    KnownDefault(
        layer="GELU",
        inputs=lambda: np.linspace(-4, 4, 801).reshape(1, -1),
        torch="erf",
        mindspore="tanh approximation",
        torch_exact=gelu,
        mindspore_exact=gelu_tanh,
        remedy="Use mindspore.nn.GELU(approximate=False).",
        stages=("mlp", "act", "gelu", "ffn"),
        sizes=(5e-5, 2e-3),
    ),
)


def _compare_defaults(torch: KernelSet, mindspore: KernelSet) -> Iterator[DefaultResult]:
    for known in KNOWN_DEFAULTS:
        x = rounded(known.inputs(), "float32")
        try:
            a, b = (s.run(s.defaults[known.layer](x.shape[-1]), {"x": x}, "float32") for s in (torch, mindspore))
        except NoKernel:
            continue
        # Loose: kernels are judged above; here only, whether each side computes its own default's formula.
        own = np.allclose(a, known.torch_exact(x), 0, 1e-4), np.allclose(b, known.mindspore_exact(x), 0, 1e-4)
        apart = float(np.abs(a - b).max())
        status = "same" if apart <= 1e-5 else "differs" if all(own) else "fault"
        yield DefaultResult(known.layer, status, apart, known.torch, known.mindspore, known.remedy)


def hints(stage: str, max_abs: float) -> tuple[str, ...]:
    """Known default differences that a forward error of this size at this stage may come from."""
    found = []
    for known in KNOWN_DEFAULTS:
        low, high = known.sizes
        if low <= max_abs <= high and any(word in stage.lower() for word in known.stages):
            found.append(
                f"{known.layer}'s default differs: {known.torch} in PyTorch, {known.mindspore} in MindSpore."
                f" {known.remedy}"
            )
    return tuple(found)


# --- rendering ------------------------------------------------------------------------------


def to_dict(report: ActivationReport) -> dict[str, object]:
    """The report as JSON's own types; a number that is not finite is its name."""
    return {"holds": report.holds, "exit_code": report.exit_code, **encode(report)}


def render_text(report: ActivationReport) -> str:
    """The report for a terminal: what is at fault first, then one line a case, then the defaults."""
    verdict = {True: "HOLDS", False: "FAILS", None: "NOT JUDGED"}[report.holds]
    sides = " · ".join(f"{name} {version} on {report.devices[name]}" for name, version in report.versions.items())
    lines = [f"activations: {verdict}   atol {report.atol:.0e}   {sides}"]
    lines += [
        f"  at fault: {k.side} {k.kernel} in {k.dtype}: {k.error:.3e} off"
        + (f" at x = {k.at:.6g}" if k.at is not None else "")
        + (f" ({k.note})" if k.note else "")
        for k in report.faults
    ]
    lines.append("")
    dtypes = list(dict.fromkeys(p.dtype for p in report.pairs))
    lines.append("  torch against mindspore (absolute below 1, relative above; - no kernel)")
    lines.append(f"  {'':12}" + "".join(f"{dtype:>12}" for dtype in dtypes))
    table = {(p.case, p.dtype): p for p in report.pairs}
    for case in dict.fromkeys(p.case for p in report.pairs):
        cells = [table[case, dtype] for dtype in dtypes]
        texts = [f"{'! ' if c.at_fault not in ('', 'unknown') else ''}{_number(c.error)}" for c in cells]
        lines.append(f"  {case:12}" + "".join(f"{text:>12}" for text in texts))
    imprecise = [k for k in report.kernels if k.status == "imprecise"]
    if imprecise:
        lines += ["", "  inside the bound, and far from what the dtype can do:"]
        lines += [f"    {k.side} {k.kernel} in {k.dtype}: {_number(k.error)} off" for k in imprecise]
    missing = _missing(report)
    if missing:
        lines += ["", "  not compared, no kernel on this device:", *(f"    {line}" for line in missing)]
    lines += ["", "  defaults that differ (no kernel fault):"]
    lines += [
        f"    {d.layer}: {d.torch} in PyTorch, {d.mindspore} in MindSpore, {_number(d.max_abs)} apart. {d.remedy}"
        for d in report.defaults
        if d.status == "differs"
    ] or ["    none"]
    lines += [
        f"    {d.layer}: FAULT, not even its own default's formula ({_number(d.max_abs)} apart)"
        for d in report.defaults
        if d.status == "fault"
    ]
    return "\n".join(lines)


def _missing(report: ActivationReport) -> list[str]:
    """Which side has no kernel at all for which cases, a line for each dtype."""
    lines = []
    for dtype in dict.fromkeys(p.dtype for p in report.pairs):
        for side in report.versions:
            cases = [p.case for p in report.pairs if p.dtype == dtype and not getattr(p, side)]
            if cases:
                lines.append(f"{side} {dtype}: {', '.join(cases)}")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"
