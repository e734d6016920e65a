"""The report on one terminal screen."""

from __future__ import annotations

from collections.abc import Iterator

from ckptbridge.errors import printable
from ckptbridge.verification.metrics import Metrics
from ckptbridge.verification.report import ForwardSection, VerifyReport, WeightsSection, short, worst_first

_SHOUT = {"holds": "HOLDS", "fails": "DOES NOT HOLD", "unjudged": "COULD NOT BE JUDGED"}
_WORST = 5
_WIDTH = 100


def render_text(report: VerifyReport) -> str:
    """At most some 25 lines, safe for a terminal; no trailing newline."""
    return "\n".join(printable(line) for line in _lines(report))


def _lines(report: VerifyReport) -> Iterator[str]:
    yield f"verify: {_SHOUT[report.verdict]}"
    yield f"  PyTorch    {report.pytorch}"
    yield f"  MindSpore  {report.mindspore}"
    if report.weights is not None:
        yield from _weights(report.weights)
    if report.forward is not None:
        yield from _forward(report.forward)
    if report.controls:
        holes = [c for c in report.controls if not c.caught]
        yield f"  control    {len(report.controls) - len(holes)} of {len(report.controls)} seeded faults caught"
        yield from (f"    HOLE     {c.fault} in {c.tensor} would pass" for c in holes)
    if report.actions:
        applied = sum(a.applied for a in report.actions)
        yield f"  numerics   {applied} of {len(report.actions)} switches set" + _not_applied(report)
    for note in report.notes:
        yield f"  note       {note}"
    if not report.sections:
        yield f"  {report.reason}"


def _not_applied(report: VerifyReport) -> str:
    left = [a.switch.rsplit(".", 1)[-1] for a in report.actions if not a.applied]
    return f"; not here: {', '.join(left)}" if left else ""


def _weights(section: WeightsSection) -> Iterator[str]:
    yield f"  weights    {section.verdict}: {section.tally}"
    if section.reason and not any(not t.ok for t in section.tensors):
        yield f"    {section.reason}"
    bad = [t for t in worst_first(section.tensors) if not t.ok]
    for t in bad[:_WORST]:
        yield f"    {t.status:10} {t.name}{_detail(t.differing, t.elements, t.first_difference, t.max_abs, t.note)}"
    if len(bad) > _WORST:
        yield f"    ... and {len(bad) - _WORST} more (see --report)"
    for side, digest in section.digests.items():
        yield f"    digest   {digest}  ({side})"


def _detail(differing: int, elements: int, first: tuple[int, ...] | None, max_abs: float | None, note: str) -> str:
    parts = []
    if differing:
        parts.append(f"{differing} of {elements} elements")
    if first is not None:
        parts.append(f"first at {list(first)}")
    if max_abs is not None:
        parts.append(f"max |a-b| {short(max_abs)}")
    if note:
        parts.append(note)
    return f": {', '.join(parts)}" if parts else ""


def _forward(section: ForwardSection) -> Iterator[str]:
    yield (
        f"  forward    {section.verdict}: {section.dtype}, {section.tokens}"
        if section.tokens
        else (f"  forward    {section.verdict}: {section.dtype}")
    )
    if section.metrics is not None:
        yield from _metrics(section, section.metrics)
    if section.reason and section.verdict != "holds":
        yield from _wrapped(section.reason, "    ")
    if section.message:
        yield from _wrapped(section.message, "    ")
    for hint in section.hints if section.verdict != "holds" else ():
        yield from _wrapped(f"hint: {hint}", "    ")
    unsteady = [side for side, same in section.repeatable.items() if not same]
    if section.repeatable and not unsteady:
        yield f"    each side ran twice with the same bits ({', '.join(section.repeatable)})"


def _metrics(section: ForwardSection, m: Metrics) -> Iterator[str]:
    used = section.judgement
    limits = f"   judged at atol {used.atol:.1e}, rtol {used.rtol:g}" if used else ""
    if m.nan_one or m.inf_mismatch or (m.nan_both and not section.equal_nan):
        passes = "no atol passes: not all are finite numbers"
    else:
        passes = f"smallest atol that passes {m.needed_atol(section.rtol):.2e}"
    yield f"    max |a-b| {m.max_abs:.2e}{limits}   {passes}"
    if used is not None and (used.atol > section.atol or used.rtol > section.rtol):
        yield (
            f"    atol {section.atol:.1e}, rtol {section.rtol:g} were asked for, which correct kernels in "
            f"{section.dtype} do not reach"
        )
    cosine = "-" if m.cosine is None else f"{m.cosine:.10f}"
    yield f"    mean {m.mean_abs:.1e}   rms {m.rms:.1e}   max relative {m.max_rel:.1e}   cosine {cosine}"
    if m.tokens is not None:
        t = m.tokens
        kl = "undefined" if t.kl_max is None or t.kl_mean is None else f"max {t.kl_max:.1e}, mean {t.kl_mean:.1e}"
        yield f"    KL {kl}   top-1 {t.top1:.2%}   top-5 {t.top5:.2%}   ({t.tokens} tokens)"
    odd = [
        f"{name}: {o.nan} NaN, {o.posinf + o.neginf} Inf, {o.saturated} at +-65504"
        for name, o in (("MindSpore", m.a), ("PyTorch", m.b))
        if o.nonfinite or o.saturated
    ]
    if odd:
        yield f"    {'; '.join(odd)}"
    if section.floor is not None:
        yield f"    noise floor of {section.floor.dtype}, measured on the PyTorch side: {section.floor.max_abs:.1e}"


def _wrapped(text: str, indent: str) -> Iterator[str]:
    import textwrap

    # Names are long and must stay whole, to be copied.
    yield from textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
