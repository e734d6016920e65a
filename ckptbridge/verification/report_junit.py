"""The report as JUnit XML: one test case for each group of like tensors, each stage, each check.

The layout that Jenkins, GitLab and GitHub's report actions read: ``testsuites/testsuite/testcase``
with ``failure``, ``error`` (could not be judged) or ``skipped`` inside.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass

from ckptbridge.errors import printable
from ckptbridge.verification.report import ForwardSection, TensorResult, VerifyReport, WeightsSection

_LISTED = 20


@dataclass(frozen=True, slots=True)
class _Case:
    suite: str
    name: str
    outcome: str = ""  # "", "failure", "error", "skipped"
    message: str = ""
    text: str = ""


def to_junit(report: VerifyReport) -> str:
    """The XML document, to be written as UTF-8."""
    cases = list(_cases(report))
    root = ET.Element("testsuites", _counts(cases), name="ckptbridge verify")
    for suite in dict.fromkeys(case.suite for case in cases):
        own = [case for case in cases if case.suite == suite]
        element = ET.SubElement(root, "testsuite", _counts(own), name=f"ckptbridge.{suite}")
        for case in own:
            item = ET.SubElement(element, "testcase", classname=f"ckptbridge.{suite}", name=_clean(case.name), time="0")
            if case.outcome:
                child = ET.SubElement(item, case.outcome, message=_clean(case.message), type=suite)
                child.text = _clean(case.text or case.message)
    ET.indent(root)
    # Declared by hand: ElementTree would name the locale's encoding on Python 3.10.
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _counts(cases: list[_Case]) -> dict[str, str]:
    return {
        "tests": str(len(cases)),
        "failures": str(sum(c.outcome == "failure" for c in cases)),
        "errors": str(sum(c.outcome == "error" for c in cases)),
        "skipped": str(sum(c.outcome == "skipped" for c in cases)),
        "time": "0",
    }


def _clean(text: str) -> str:
    """``text`` without what XML 1.0 forbids: control characters (line breaks stay), surrogates, U+FFFE, U+FFFF."""
    lines = "\n".join(printable(line) for line in text.split("\n"))
    return lines.replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff")


def _cases(report: VerifyReport) -> Iterator[_Case]:
    if report.weights is not None:
        yield from _weights(report.weights)
    if report.forward is not None:
        yield from _forward(report.forward)
    for control in report.controls:
        name = f"{control.fault} in {control.tensor}"
        if control.caught:
            yield _Case("control", name)
        else:
            yield _Case("control", name, "error", "The verdict does not turn: this fault would pass.", control.note)
    if not report.sections:
        yield _Case("verify", "something was checked", "error", report.reason)


def _weights(section: WeightsSection) -> Iterator[_Case]:
    groups: dict[str, list[TensorResult]] = {}
    for tensor in section.tensors:
        groups.setdefault(group_of(tensor.name), []).append(tensor)
    for group, tensors in groups.items():
        bad = [t for t in tensors if not t.ok]
        if not bad:
            yield _Case("weights", group)
            continue
        lines = [_line(t) for t in bad[:_LISTED]]
        if len(bad) > _LISTED:
            lines.append(f"... and {len(bad) - _LISTED} more")
        yield _Case("weights", group, "failure", f"{len(bad)} of {len(tensors)} tensors are wrong", "\n".join(lines))
    if section.verdict != "holds" and all(t.ok for t in section.tensors):
        outcome = "failure" if section.verdict == "fails" else "error"
        yield _Case("weights", "all tensors", outcome, section.reason)


def group_of(name: str) -> str:
    """A tensor's name with each number between dots as ``*``: one group for all layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _line(t: TensorResult) -> str:
    parts = [f"{t.name}: {t.status}"]
    if t.differing:
        parts.append(f"{t.differing} of {t.elements} elements")
    if t.first_difference is not None:
        parts.append(f"first at {list(t.first_difference)}")
    if t.max_abs is not None:
        parts.append(f"max |a-b| {t.max_abs:.3e}")
    if t.note:
        parts.append(t.note)
    return ", ".join(parts)


def _forward(section: ForwardSection) -> Iterator[_Case]:
    outcome = {"holds": "", "fails": "failure", "unjudged": "error"}[section.verdict]
    text = "\n".join(part for part in (section.reason, section.message, *section.hints) if part)
    yield _Case("forward", f"logits agree ({section.dtype})", outcome, section.reason, text)
    for side, same in section.repeatable.items():
        yield _Case(
            "forward", f"two runs of {side} are identical", "" if same else "error", "" if same else section.reason
        )
    # A stage outside the noise is a failure only of a forward that fails, and only the first: the rest follow from it.
    for stage in section.stages:
        message = f"max |a-b| {stage.metrics.max_abs:.3e}, noise below {stage.noise:.1e}"
        if section.verdict != "fails" or stage.quiet:
            yield _Case("stages", stage.name)
        elif stage.name == section.first_bad:
            yield _Case("stages", stage.name, "failure", message, section.message)
        else:
            yield _Case("stages", stage.name, "skipped", f"after {section.first_bad}: {message}")
