"""The report as one self-contained HTML page: no scripts, nothing fetched, light and dark, printable."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from ckptbridge.errors import printable
from ckptbridge.verification.metrics import Metrics
from ckptbridge.verification.report import (
    ForwardSection,
    TensorResult,
    Verdict,
    VerifyReport,
    WeightsSection,
    short,
    worst_first,
)
from ckptbridge.verification.report_css import CSS
from ckptbridge.verification.report_plot import stage_plot

_SHOUT: dict[Verdict, str] = {"holds": "Holds", "fails": "Does not hold", "unjudged": "Could not be judged"}
_SHOWN = 500  # tensors and stages listed; the rest is in the JSON


def to_html(report: VerifyReport) -> str:
    """The page."""
    body = "\n".join(_page(report))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_SHOUT[report.verdict]}: {_t(report.mindspore)}</title>\n"
        f"<style>\n{CSS}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _page(report: VerifyReport) -> Iterator[str]:
    yield f'<header class="{report.verdict}">'
    yield f"<p>Claim: the two checkpoints are the same model.</p><h1>{_SHOUT[report.verdict]}</h1>"
    if report.reason:
        yield f'<p class="reason">{_t(report.reason)}</p>'
    yield '<dl class="sides">'
    yield f"<dt>PyTorch</dt><dd>{_code(report.pytorch)}</dd><dt>MindSpore</dt><dd>{_code(report.mindspore)}</dd></dl>"
    yield "</header>"
    yield from _summary(report)
    if report.weights is not None:
        yield from _weights(report.weights)
    if report.forward is not None:
        yield from _forward(report.forward)
    yield from _controls(report)
    yield from _surroundings(report)


# --- the pieces -----------------------------------------------------------------------------


def _summary(report: VerifyReport) -> Iterator[str]:
    cards = []
    if report.weights is not None:
        value, _, below = report.weights.tally.partition(" tensors ")
        cards.append((report.weights.verdict, "Weights", value, f"tensors {below}"))
    if report.forward is not None:
        m, used = report.forward.metrics, report.forward.judgement
        value = "not run" if m is None else short(m.max_abs)
        limit = f"largest |a-b| of the logits; tolerance {used.atol:.0e}" if used else "logits"
        cards.append((report.forward.verdict, "Forward", value, limit))
    if report.controls:
        caught = sum(c.caught for c in report.controls)
        verdict: Verdict = "holds" if caught == len(report.controls) else "unjudged"
        cards.append((verdict, "Negative control", f"{caught} of {len(report.controls)}", "seeded faults caught"))
    yield '<section class="cards">'
    for verdict, title, value, below in cards:
        yield (
            f'<div class="card {verdict}"><h2>{title}</h2><p class="value">{_t(value)}</p>'
            f'<p>{_t(below)}</p><p class="word">{_SHOUT[verdict].lower()}</p></div>'
        )
    yield "</section>"


def _forward(section: ForwardSection) -> Iterator[str]:
    yield "<section><h2>Forward</h2>"
    steady = [side for side, same in section.repeatable.items() if same]
    repeated = f" Two runs gave the same bits on: {', '.join(steady)}." if steady else ""
    about = ", ".join(part for part in (section.tokens, f"computed in {section.dtype}") if part)
    yield f"<p>{_t(about)}.{_t(repeated)} a is MindSpore, b is PyTorch.</p>"
    if section.message:
        kind = "alarm" if section.verdict == "fails" else "remark"
        yield f'<p class="{kind}">{_t(section.message)}</p>'
    if section.verdict != "holds":
        yield from (f'<p class="remark">Hint: {_t(hint)}</p>' for hint in section.hints)
    plot = stage_plot(section)
    if plot:
        yield f"<figure>{plot}<figcaption>{_LEGEND}</figcaption></figure>"
    if section.metrics is not None:
        yield from _metrics(section, section.metrics)
    if section.stages:
        yield "<details><summary>All stages</summary>"
        rows = [
            (
                _code(s.name),
                short(s.metrics.max_abs),
                short(s.metrics.rms),
                short(s.metrics.ref_max),
                short(s.noise),
                "" if s.quiet else "<b>above the noise</b>",
                "<br>".join(_code(f) for f in s.feeds),
            )
            for s in section.stages[:_SHOWN]
        ]
        heads = ("stage", "max |a-b|", "rms", "max |b|", "noise below", "", "fed by")
        yield from _table(heads, rows, numeric=(1, 2, 3, 4), loud=[not s.quiet for s in section.stages[:_SHOWN]])
        yield "</details>"
    yield "</section>"


_LEGEND = (
    '<span class="key">&#9650; attention</span> <span class="key">&#9632; MLP</span> '
    '<span class="key">&#9679; block output</span> <span class="key">&#9670; embedding, norm, logits</span> '
    '<span class="key"><i class="loudkey"></i> above the noise</span> '
    '<span class="key"><i class="noisekey"></i> rounding stays below</span> '
    '<span class="key"><i class="atolkey"></i> tolerance of the logits</span>'
)


def _metrics(section: ForwardSection, m: Metrics) -> Iterator[str]:
    used = section.judgement
    rows: list[tuple[str, str, str]] = [
        ("max |a-b|", short(m.max_abs), _where(m)),
        ("smallest atol that passes", short(m.needed_atol(section.rtol)), f"at rtol {section.rtol:g}"),
        ("mean |a-b|", short(m.mean_abs), ""),
        ("rms", short(m.rms), ""),
        ("max relative", short(m.max_rel), "against |b|"),
        (
            "cosine",
            "undefined" if m.cosine is None else f"{m.cosine:.12f}",
            "told, not judged: it lets real faults pass",
        ),
    ]
    if used:
        rows.insert(1, ("judged at", f"atol {used.atol:.1e}, rtol {used.rtol:g}", _asked(section)))
    if m.tokens is not None:
        t = m.tokens
        rows += [
            ("KL max, a token", "undefined" if t.kl_max is None else short(t.kl_max), "KL(b || a), nats"),
            ("KL mean", "undefined" if t.kl_mean is None else short(t.kl_mean), ""),
            ("top-1 agreement", f"{t.top1:.2%}", f"{t.tokens} tokens; ties as ties"),
            ("top-5 agreement", f"{t.top5:.2%}", ""),
        ]
    for side, odd in (("a", m.a), ("b", m.b)):
        if odd.nonfinite or odd.saturated:
            counts = f"{odd.nan} NaN, {odd.posinf} +Inf, {odd.neginf} -Inf, {odd.saturated} at ±65504"
            rows.append((f"odd values in {side}", counts, ""))
    if section.floor is not None:
        rows.append(("noise floor", short(section.floor.max_abs), f"PyTorch in {section.floor.dtype} against float64"))
    yield from _table(("logits", "", ""), [(_t(a), _t(b), _t(c)) for a, b, c in rows], numeric=(1,))


def _asked(section: ForwardSection) -> str:
    used = section.judgement
    if used is None or (used.atol, used.rtol) == (section.atol, section.rtol):
        return "as asked"
    return f"asked: atol {section.atol:.1e}, rtol {section.rtol:.1e}; widened by the noise floor"


def _where(m: Metrics) -> str:
    if m.worst is None or m.worst_a is None or m.worst_b is None:
        return ""
    return f"worst at {list(m.worst)}: a = {m.worst_a:.17g}, b = {m.worst_b:.17g}"


def _weights(section: WeightsSection) -> Iterator[str]:
    bad = [t for t in worst_first(section.tensors) if not t.ok]
    fine = [t for t in section.tensors if t.ok]
    yield "<section><h2>Weights</h2>"
    yield from (f'<p class="remark">{_t(note)}</p>' for note in section.notes)
    if section.digests:
        same = len(set(section.digests.values())) == 1
        # Two right sides have other names and rows, and so other digests: no reader should take that for a fault.
        why = "are equal" if same else "are each its own, since names or rows differ between the sides"
        yield f"<p>The content digests of the two sides {why} (independent of the file format):</p><dl>"
        yield from (f"<dt>{_t(side)}</dt><dd>{_code(digest)}</dd>" for side, digest in section.digests.items())
        yield "</dl>"
    if bad:
        yield f"<h3>{len(bad)} wrong, worst first</h3>"
        yield from _tensor_table(bad)
    if fine:
        yield f"<details><summary>{len(fine)} as the table says</summary>"
        yield from _tensor_table(fine)
        yield "</details>"
    yield "</section>"


def _tensor_table(tensors: Sequence[TensorResult]) -> Iterator[str]:
    rows = []
    for t in tensors[:_SHOWN]:
        first = "" if t.first_difference is None else str(list(t.first_difference))
        odd = ", ".join(f"{n} {name}" for n, name in ((t.nan, "NaN"), (t.inf, "Inf")) if n)
        name = "".join(f'<br><small class="from">{_code(source)}</small>' for source in t.sources)
        name = _code(t.name) + name if t.name else name.removeprefix("<br>")
        rows.append(
            (
                name,
                _t(t.status),
                _t(f"{t.dtype} {list(t.shape)}" if t.dtype else ""),
                f"{t.differing} of {t.elements}" if t.differing else "",
                _t(first),
                "" if t.max_abs is None else short(t.max_abs),
                _t(", ".join(part for part in (odd, t.note) if part)),
            )
        )
    heads = ("tensor, and what it is made of", "status", "type", "differing", "first", "max |a-b|", "")
    yield from _table(heads, rows, numeric=(2, 3, 4, 5), loud=[not t.ok for t in tensors[:_SHOWN]])
    if len(tensors) > _SHOWN:
        yield f"<p>{len(tensors) - _SHOWN} more are in the JSON report.</p>"


def _controls(report: VerifyReport) -> Iterator[str]:
    if not report.controls:
        return
    yield "<section><h2>Negative control</h2>"
    yield "<p>One fault at a time, put into this model in memory: does the verdict turn?</p>"
    rows = [
        (
            _t(c.fault),
            _code(c.tensor),
            "" if c.max_abs is None else short(c.max_abs),
            "caught" if c.caught else "<b>would pass</b>",
            _t(c.note),
        )
        for c in report.controls
    ]
    heads = ("fault", "tensor", "max |a-b|", "", "")
    yield from _table(heads, rows, numeric=(2,), loud=[not c.caught for c in report.controls])
    yield "</section>"


def _surroundings(report: VerifyReport) -> Iterator[str]:
    env = report.environment
    yield "<section><h2>Environment</h2>"
    facts = [*env.versions.items(), *((f"{side} device", device) for side, device in env.devices.items())]
    facts += [(name, text) for name, text in (("platform", env.platform), ("command", env.command)) if text]
    yield from _table(("", ""), [(_t(name), _code(value)) for name, value in facts])
    yield from (f'<p class="remark">{_t(note)}</p>' for note in report.notes)
    if report.actions:
        applied = sum(a.applied for a in report.actions)
        yield f"<h3>Switches: {applied} of {len(report.actions)} set</h3>"
        rows = [
            (_code(a.switch), _t(a.old), _t(a.new), "set" if a.applied else "not possible here", _t(a.note))
            for a in report.actions
        ]
        yield from _table(("switch", "was", "wanted", "", ""), rows)
    if report.provenance:
        text = json.dumps(report.provenance, indent=2, sort_keys=True, ensure_ascii=False)
        yield "<h3>Provenance</h3>"
        yield f"<pre>{chr(10).join(_t(line) for line in text.splitlines())}</pre>"
    yield f"<footer>{_t(report.tool)} · report schema {report.schema} · exit code {report.exit_code}</footer></section>"


# --- small things ---------------------------------------------------------------------------


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int] = (), loud: Sequence[bool] = ()
) -> Iterator[str]:
    """Cells are HTML already; heads are text. Columns without any content are left out."""
    rows = list(rows)
    used = [n for n in range(len(heads)) if any(row[n] for row in rows)]
    yield '<div class="scroll"><table>'
    if any(heads):
        yield "<thead><tr>" + "".join(f"<th>{_t(heads[n])}</th>" for n in used) + "</tr></thead>"
    yield "<tbody>"
    for k, row in enumerate(rows):
        cells = "".join(f'<td class="n">{row[n]}</td>' if n in numeric else f"<td>{row[n]}</td>" for n in used)
        yield f'<tr class="loud">{cells}</tr>' if k < len(loud) and loud[k] else f"<tr>{cells}</tr>"
    yield "</tbody></table></div>"


def _t(text: str) -> str:
    return escape(printable(text))


def _code(text: str) -> str:
    """Names may break after their dots and slashes (which copies out unchanged)."""
    return f"<code>{_t(text).replace('.', '.<wbr>').replace('/', '/<wbr>')}</code>"
