"""The per-stage error as an inline SVG: stages along x, max |a-b| along a logarithmic y."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from ckptbridge.errors import printable
from ckptbridge.verification.report import ForwardSection, StageResult

_WIDTH, _HEIGHT = 960, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 18, 30, 58
_LOWEST = 1e-18  # an error of 0 has no logarithm: it sits on the axis, which is labelled 0
_LABELS = 14


@dataclass(frozen=True, slots=True)
class _Axes:
    """From data to the drawing: stage number to x, error to y, over the decades ``low`` to ``high``."""

    count: int
    low: int
    high: int

    @property
    def bottom(self) -> float:
        return _HEIGHT - _BOTTOM

    @property
    def pitch(self) -> float:
        return (_WIDTH - _LEFT - _RIGHT) / self.count

    def x(self, k: int) -> float:
        return _LEFT + self.pitch * (k + 0.5)

    def y(self, value: float) -> float:
        if value <= 0:
            return self.bottom
        share = 1.0 if value == math.inf else (math.log10(value) - self.low) / (self.high - self.low)
        return _TOP + (self.bottom - _TOP) * (1 - min(max(share, 0.0), 1.0))


def stage_plot(section: ForwardSection) -> str:
    """The SVG element, styled by the page's CSS classes; empty without stages."""
    return "\n".join(_plot(section)) if section.stages else ""


def _plot(section: ForwardSection) -> Iterator[str]:
    stages = section.stages
    atol = section.judgement.atol if section.judgement else section.atol
    errors = [s.metrics.max_abs for s in stages]
    known = [v for v in (*errors, *(s.noise for s in stages), atol) if 0 < v < math.inf]
    low = math.floor(math.log10(max(min(known, default=1e-12), _LOWEST))) - 1
    axes = _Axes(len(stages), low, math.ceil(math.log10(max(known, default=1.0))) + 1)
    yield (
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'aria-label="Largest error at each stage of the forward, on a logarithmic axis">'
    )
    yield from _grid(axes)
    yield from _limits(axes, stages, atol)
    yield from _first_bad(axes, section)
    for k, stage in enumerate(stages):
        yield _mark(stage, axes.x(k), axes.y(_shown(stage)))
    yield from _names(axes, stages)
    yield "</svg>"


def _shown(stage: StageResult) -> float:
    """What is not a number is drawn at the top."""
    m = stage.metrics
    return math.inf if m.nan_one or m.nan_both or m.inf_mismatch or math.isnan(m.max_abs) else m.max_abs


def _line(css: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _label(css: str, anchor: str, x: float, y: float, text: str, turn: int = 0) -> str:
    turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return f'<text class="{css}" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}"{turned}>{_text(text)}</text>'


def _grid(axes: _Axes) -> Iterator[str]:
    step = max(1, (axes.high - axes.low) // 8)
    for power in range(axes.low, axes.high + 1, step):
        at = axes.y(10.0**power)
        yield _line("grid", _LEFT, at, _WIDTH - _RIGHT, at)
        yield _label("tick", "end", _LEFT - 8, at + 4, "0" if power == axes.low else f"1e{power}")


def _limits(axes: _Axes, stages: tuple[StageResult, ...], atol: float) -> Iterator[str]:
    steps = []
    for k, stage in enumerate(stages):
        at, middle = axes.y(stage.noise), axes.x(k)
        steps += [f"{middle - axes.pitch / 2:.1f},{at:.1f}", f"{middle + axes.pitch / 2:.1f},{at:.1f}"]
    yield f'<polyline class="noise" points="{" ".join(steps)}"/>'
    if atol > 0:
        at = axes.y(atol)
        yield _line("atol", _LEFT, at, _WIDTH - _RIGHT, at)
        yield _label("atolname", "start", _LEFT + 4, at - 5, f"tolerance of the logits {atol:.0e}")


def _first_bad(axes: _Axes, section: ForwardSection) -> Iterator[str]:
    for k, stage in enumerate(section.stages):
        if stage.name == section.first_bad:
            at = axes.x(k)
            yield _line("first", at, _TOP, at, axes.bottom)
            anchor = "end" if at > _WIDTH / 2 else "start"
            yield _label("firstname", anchor, at, _TOP - 10, f"leaves the noise at {stage.name}")
            return


def kind_of(stage: str) -> str:
    """``attention``, ``mlp``, ``block`` (a layer's output), or ``other``."""
    parts = stage.split(".")
    if len(parts) == 3 and parts[2] in ("attention", "mlp"):
        return parts[2]
    return "block" if len(parts) == 2 and parts[1].isdigit() else "other"


def _mark(stage: StageResult, x: float, y: float) -> str:
    kind = kind_of(stage.name)
    shape = {
        "attention": f'<path d="M{x:.1f} {y - 5.5:.1f}l5.5 10h-11z"/>',
        "mlp": f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>',
        "block": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>',
        "other": f'<path d="M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z"/>',
    }[kind]
    told = f"{stage.name}: max |a-b| {stage.metrics.max_abs:.2e}, rounding stays below {stage.noise:.1e}"
    state = "quiet" if stage.quiet else "loud"
    return f'<g class="{state} {kind}"><title>{_text(told)}</title>{shape}</g>'


def _names(axes: _Axes, stages: tuple[StageResult, ...]) -> Iterator[str]:
    """Below the axis: stages outside the layers by name, of the layers their numbers, thinned out."""
    layers: dict[str, list[float]] = {}
    for k, stage in enumerate(stages):
        parts = stage.name.split(".")
        if parts[0] == "layers" and len(parts) > 1:
            layers.setdefault(parts[1], []).append(axes.x(k))
        else:
            yield _label("tick", "end", axes.x(k) + 4, axes.bottom + 16, stage.name, turn=-35)
    step = max(1, math.ceil(len(layers) / _LABELS))
    for n, (layer, places) in enumerate(layers.items()):
        if n % step == 0:
            yield _label("tick", "middle", (places[0] + places[-1]) / 2, axes.bottom + 18, layer)
    if layers:
        every = [place for places in layers.values() for place in places]
        yield _label("tick", "middle", (min(every) + max(every)) / 2, axes.bottom + 38, "layer")


def _text(value: str) -> str:
    return escape(printable(value))
