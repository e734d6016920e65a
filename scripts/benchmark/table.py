"""Results as a Markdown table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmark.measure import Spread
from benchmark.rows import Row


@dataclass(frozen=True)
class Result:
    """A row's numbers: its value, seconds of ours and of what stands beside it, peak memory in bytes.

    ``others`` is the largest share of the processors that anything else took during a run.
    """

    row: Row
    value: Spread
    ours: Spread
    baseline: Spread | None
    bare: Spread | None  # ours / bare loop
    memory: int
    others: float

    @property
    def holds(self) -> bool | None:
        """Whether the median is within the bound; None without a bound."""
        return None if self.row.bound is None else self.value.median <= self.row.bound

    def to_dict(self) -> dict[str, Any]:
        return {
            "key": self.row.key,
            "what": self.row.title,
            "value": self.row.value,
            "beside": self.row.beside,
            "bound": self.row.bound,
            "holds": self.holds,
            "result": asdict(self.value),
            "seconds": asdict(self.ours),
            "baseline_seconds": asdict(self.baseline) if self.baseline else None,
            "ratio_to_bare_calls": asdict(self.bare) if self.bare else None,
            "peak_anonymous_bytes": self.memory,
            "others_share": round(self.others, 3),
            "bytes": self.row.nbytes,
            "command": self.row.ours,
        }


HEADER = (
    "| what | beside | bound | median (least to most) | seconds | / bare calls | peak memory | others |\n"
    "|---|---|---|---|---|---|---|---|"
)


def line(result: Result) -> str:
    """A row of the Markdown table."""
    row = result.row
    mark = {True: "", False: " **over**", None: ""}[result.holds]
    cells = [
        row.title,
        row.beside or "-",
        "-" if row.bound is None else f"≤ {_value(row, row.bound)}",
        f"{_spread(row, result.value)}{mark}",
        f"{result.ours.median:.2f}" + (f" : {result.baseline.median:.2f}" if result.baseline else ""),
        f"{result.bare.median:.2f}" if result.bare else "-",
        f"{result.memory / 1e6:.0f} MB" if result.memory else "-",
        f"{result.others:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def failed_line(row: Row, why: str) -> str:
    """A row that could not be measured."""
    return f"| {row.title} | - | - | not measured: {why} | - | - | - | - |"


def _value(row: Row, value: float) -> str:
    return f"{value:.2f}" if row.value == "ratio" else f"{value:.2f} s"


def _spread(row: Row, spread: Spread) -> str:
    return f"{_value(row, spread.median)} ({spread.low:.2f} to {spread.high:.2f})"


def document(
    results: Sequence[Result], failed: Mapping[str, str], machine: Mapping[str, Any], runs: int
) -> dict[str, Any]:
    """Everything, as ``--json`` keeps it."""
    return {
        "machine": dict(machine),
        "runs": runs,
        "rows": [result.to_dict() for result in results],
        "failed": dict(failed),
    }
