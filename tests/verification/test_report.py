"""The report: its verdict, what each rendering says, and that nothing hostile gets through."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from xml.dom import minidom

import numpy as np
import pytest

from ckptbridge.errors import FormatError
from ckptbridge.verification import report_json
from ckptbridge.verification.metrics import compare, compare_logits, judge
from ckptbridge.verification.noise import noise_floor
from ckptbridge.verification.report import (
    ControlResult,
    StageResult,
    TensorResult,
    VerifyReport,
    forward_section,
    rejudge,
    stage_noise,
    unjudged_forward,
    weights_section,
    worst_first,
)
from ckptbridge.verification.report_html import to_html
from ckptbridge.verification.report_json import from_json, to_json
from ckptbridge.verification.report_junit import group_of, to_junit
from ckptbridge.verification.report_text import render_text

HOSTILE = "</title><script>alert(1)</script>&\x1b[31m\u202e\x00\ud800\uffff]]>\"' onload=x"


def load_samples() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sample_reports", Path(__file__).with_name("sample_reports.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


samples = load_samples()


@pytest.fixture(scope="module")
def passing() -> VerifyReport:
    return samples.sample_report()


@pytest.fixture(scope="module")
def failing() -> VerifyReport:
    return samples.sample_report(fault_in=7)


@pytest.fixture(scope="module")
def hostile(failing: VerifyReport) -> VerifyReport:
    assert failing.weights is not None and failing.forward is not None
    tensors = tuple(replace(t, name=t.name + HOSTILE, note=HOSTILE) for t in failing.weights.tensors)
    stages = tuple(replace(s, name=s.name + HOSTILE, feeds=(HOSTILE,)) for s in failing.forward.stages)
    return replace(
        failing,
        pytorch=HOSTILE,
        mindspore=HOSTILE,
        weights=replace(failing.weights, tensors=tensors, notes=(HOSTILE,), digests={HOSTILE: HOSTILE}),
        forward=replace(failing.forward, stages=stages, message=HOSTILE, hints=(HOSTILE,), tokens=HOSTILE),
        controls=(ControlResult(HOSTILE, HOSTILE, False, math.inf, HOSTILE),),
        provenance={HOSTILE: [HOSTILE]},
        notes=(HOSTILE,),
        tool=HOSTILE,
    )


# --- the verdict ------------------------------------------------------------------------------


def test_verdict_and_exit_code(passing: VerifyReport, failing: VerifyReport) -> None:
    assert (passing.verdict, passing.exit_code, passing.reason) == ("holds", 0, "")
    assert (failing.verdict, failing.exit_code) == ("fails", 1)
    assert failing.reason.startswith("Weights: 2 of 26 tensors") and "Forward: The largest |a-b|" in failing.reason
    assert (VerifyReport("a", "b").verdict, VerifyReport("a", "b").exit_code) == ("unjudged", 2)


def test_a_level_that_could_not_run_leaves_the_claim_unjudged_unless_another_fails(passing, failing) -> None:
    missing = unjudged_forward("MindSpore is not installed.", dtype="float64")
    report = replace(passing, forward=missing)
    assert report.exit_code == 2 and report.reason == "Forward: MindSpore is not installed."
    assert replace(failing, forward=missing).exit_code == 1


def test_a_seeded_fault_that_would_pass_leaves_the_claim_unjudged() -> None:
    report = samples.sample_report(hole=True)
    assert report.exit_code == 2 and "one expert's transpose" in report.reason


def test_no_tensor_in_common_is_a_failure() -> None:
    assert weights_section([]).verdict == "fails"
    only_dropped = weights_section([TensorResult("", ("inv_freq",), "dropped", note="derived")])
    assert only_dropped.verdict == "fails" and "in common" in only_dropped.reason


def test_worst_first() -> None:
    tensors = [
        TensorResult("fine", (), "equal"),
        TensorResult("small", (), "differs", max_abs=1e-3),
        TensorResult("large", (), "differs", max_abs=2.0),
        TensorResult("gone", (), "missing"),
    ]
    assert [t.name for t in worst_first(tensors)] == ["gone", "large", "small", "fine"]


def test_the_first_bad_stage_is_named_with_its_layer_and_tensors(failing: VerifyReport) -> None:
    section = failing.forward
    assert section is not None and section.first_bad == "layers.7.attention"
    assert "layer 7, attention" in section.message
    assert "decoder.layers.7.self_attention.linear_qkv.weight" in section.message
    assert "The 22 stages before it" in section.message


def one_stage(judged: np.ndarray, reference: np.ndarray, dtype: str = "float64") -> StageResult:
    m = compare(judged, reference, atol=1e-5)
    return StageResult("layers.0", m, stage_noise(dtype, m))


def test_noise_of_a_stage_follows_its_values_and_its_measured_floor() -> None:
    x = np.linspace(-1e4, 1e4, 101)
    assert one_stage(x * (1 + 1e-13), x).quiet  # 1e-9 off at 1e4: rounding
    assert not one_stage(x / 1e4 + 1e-8, x / 1e4).quiet
    assert not one_stage(np.where(x == 0, np.nan, x), x).quiet
    m = compare(x, x + 1.0, atol=1.0)
    assert stage_noise("float32", m) == pytest.approx(1e-4 * m.ref_max) and stage_noise("float32", m, 0.5) == 2.0


def test_a_stage_above_the_noise_is_a_remark_when_the_logits_agree() -> None:
    x = np.random.default_rng(0).standard_normal((4, 8))
    metrics = compare_logits(x + 1e-7, x, atol=1e-5)
    section = forward_section(dtype="float64", tokens="", metrics=metrics, atol=1e-5, stages=[one_stage(x + 1e-7, x)])
    assert section.verdict == "holds" and section.first_bad == "layers.0"
    report = VerifyReport("a", "b", forward=section)
    assert "<failure" not in to_junit(report) and "leaves the noise" in render_text(report)


def test_a_side_that_does_not_repeat_itself_is_not_judged(failing: VerifyReport) -> None:
    section = failing.forward
    assert section is not None and section.metrics is not None
    unsteady = forward_section(
        dtype="float64",
        tokens="",
        metrics=section.metrics,
        atol=1e-5,
        repeatable={"PyTorch": True, "MindSpore": False},
    )
    assert unsteady.verdict == "unjudged" and "MindSpore" in unsteady.reason and "PyTorch" not in unsteady.reason


# --- judged again -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("atol", "rtol"), [(1e-15, 0.0), (1e-5, 0.0), (20.0, 0.0), (0.0, 1e-9), (0.0, 1e6), (1.0, 0.5)]
)
def test_a_saved_report_is_judged_at_other_tolerances_as_the_logits_would_be(failing, passing, atol, rtol) -> None:
    for report, fault in ((passing, None), (failing, 7)):
        a, b = samples.forward(True, fault)["logits"], samples.forward(False)["logits"]
        expected = bool((np.abs(a - b) <= atol + rtol * np.abs(b)).all())
        again = rejudge(from_json(to_json(report)), atol, rtol)
        assert again.forward is not None and (again.forward.verdict == "holds") is expected
        assert again.weights == report.weights


def test_a_low_precision_report_is_judged_again_with_its_floor() -> None:
    rng = np.random.default_rng(0)
    b = rng.standard_normal((50, 40))
    floor = noise_floor("float32", compare_logits(b + 2e-5 * rng.uniform(-1, 1, b.shape), b, atol=0.0))
    metrics = compare_logits(b + 6e-5 * rng.uniform(-1, 1, b.shape), b, atol=1e-5)
    section = forward_section(dtype="float32", tokens="", metrics=metrics, atol=1e-5, floor=floor)
    assert section.verdict == "holds" and section.judgement is not None and section.judgement.atol == 1e-4
    assert judge(metrics, 1e-5).holds is False
    again = rejudge(from_json(to_json(VerifyReport("a", "b", forward=section))), 1e-6)
    assert again.verdict == "holds" and "widened by the noise floor" in to_html(again)


# --- JSON -------------------------------------------------------------------------------------


def test_json_returns_the_same_report(passing: VerifyReport, failing: VerifyReport) -> None:
    for report in (passing, failing, samples.sample_report(hole=True), VerifyReport("a", "b")):
        assert from_json(to_json(report)) == report


def test_json_holds_infinities_and_the_outcome(failing: VerifyReport) -> None:
    metrics = compare(np.array([1.0, np.inf]), np.array([0.0, 65504.0]), atol=1.0)
    section = forward_section(dtype="float64", tokens="", metrics=metrics, atol=1.0)
    report = replace(failing, forward=section)
    data = json.loads(to_json(report), parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))
    assert data["forward"]["metrics"]["max_rel"] == "inf"
    assert (data["verdict"], data["exit_code"], data["schema"]) == ("fails", 1, 1)
    assert from_json(to_json(report)) == report


def test_the_schema_text_names_every_field() -> None:
    text = report_json.__doc__ or ""
    assert all(re.search(rf"\b{f.name}\b", text) for f in fields(VerifyReport))


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.pop("weights"),
        lambda d: d.update(extra=1),
        lambda d: d.update(schema=2),
        lambda d: d.pop("verdict"),
        lambda d: d["weights"].update(verdict="perhaps"),
        lambda d: d["forward"]["metrics"].update(count="many"),
        lambda d: d["forward"]["metrics"].update(count=True),
        lambda d: d["forward"]["metrics"].update(frontier=[[1.0]]),
        lambda d: d["forward"]["metrics"].update(max_abs=None),
        lambda d: d.update(controls={}),
        lambda d: d.update(environment=[]),
    ],
)
def test_damaged_json_is_refused_with_a_sentence(passing: VerifyReport, damage) -> None:
    data = json.loads(to_json(passing))
    damage(data)
    with pytest.raises(FormatError):
        from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000, "\x00"])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        from_json(text)


# --- terminal ---------------------------------------------------------------------------------


def test_the_summary_fits_a_screen_and_says_what_counts(passing: VerifyReport, failing: VerifyReport) -> None:
    good, bad = render_text(passing), render_text(failing)
    assert len(good.splitlines()) <= 24 and len(bad.splitlines()) <= 30
    assert good.splitlines()[0] == "verify: HOLDS" and "25 of 25 tensors equal bit for bit, 1 dropped" in good
    assert "5 of 5 seeded faults caught" in good and "top-1 100.00%" in good
    assert bad.splitlines()[0] == "verify: DOES NOT HOLD"
    for needed in ("missing    output_layer.weight", "first at [256, 0]", "layers.7.attention", "Tensors that feed it"):
        assert needed in bad


def test_many_bad_tensors_are_cut_and_counted() -> None:
    section = weights_section([TensorResult(f"t.{k}", (), "differs", max_abs=float(k)) for k in range(40)])
    text = render_text(VerifyReport("a", "b", weights=section))
    assert len(text.splitlines()) < 12 and "... and 35 more" in text and "t.39" in text and "t.5:" not in text


def test_nothing_hostile_reaches_a_terminal(hostile: VerifyReport) -> None:
    text = render_text(hostile)
    assert not [c for c in text if (ord(c) < 32 and c != "\n") or c in "\u202e\x7f"]


# --- JUnit ------------------------------------------------------------------------------------


def cases(text: str) -> dict[tuple[str, str], ET.Element]:
    return {(c.attrib["classname"], c.attrib["name"]): c for c in ET.fromstring(text).iter("testcase")}


def test_junit_counts_what_it_holds(failing: VerifyReport, hostile: VerifyReport) -> None:
    for report in (failing, hostile, samples.sample_report(hole=True), VerifyReport("a", "b")):
        text = to_junit(report)
        minidom.parseString(text.encode("utf-8"))
        root = ET.fromstring(text.encode("utf-8"))
        assert root.tag == "testsuites"
        for element in (root, *root.iter("testsuite")):
            for tag, attribute in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
                assert int(element.attrib[attribute]) == len(list(element.iter(tag)))
            assert int(element.attrib["tests"]) == len(list(element.iter("testcase")))
        bad = bool(list(root.iter("failure")) + list(root.iter("error")))
        assert bad == (report.exit_code != 0)


def test_junit_has_a_case_for_each_group_stage_and_check(passing: VerifyReport, failing: VerifyReport) -> None:
    group = ("ckptbridge.weights", "decoder.layers.*.self_attention.linear_qkv.weight")
    good, bad = cases(to_junit(passing)), cases(to_junit(failing))
    assert len(good[group]) == 0
    (failure,) = bad[group]
    assert failure.attrib["message"] == "1 of 12 tensors are wrong" and "decoder.layers.7." in (failure.text or "")
    assert len(bad["ckptbridge.stages", "layers.6.mlp"]) == 0
    assert bad["ckptbridge.stages", "layers.7.attention"][0].tag == "failure"
    assert bad["ckptbridge.stages", "layers.7.mlp"][0].tag == "skipped"  # what follows is no second fault
    assert bad["ckptbridge.forward", "logits agree (float64)"][0].tag == "failure"
    assert ("ckptbridge.forward", "two runs of MindSpore are identical") in good
    assert sum(name == "ckptbridge.control" for name, _ in good) == 5


def test_groups() -> None:
    assert group_of("decoder.layers.12.mlp.experts.3.w1") == "decoder.layers.*.mlp.experts.*.w1"
    assert group_of("conv1.weight") == "conv1.weight"


# --- HTML -------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a browser would make of the page: tags, attributes, text, and whether the tags nest."""

    VOID = frozenset({"meta", "br", "wbr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_fetches_and_runs_nothing(failing: VerifyReport, hostile: VerifyReport) -> None:
    for report in (failing, hostile, samples.sample_report(hole=True), VerifyReport("a", "b")):
        text = to_html(report)
        text.encode("utf-8")
        page = Page(text)
        assert not {"script", "link", "img", "iframe", "object", "base", "form"} & {tag for tag, _ in page.tags}
        names = {name for _, attributes in page.tags for name in attributes}
        assert not [n for n in names if n.startswith("on") or n in ("src", "href", "style", "xlink:href")]
        style = text[text.index("<style>") : text.index("</style>")]
        assert "url(" not in style and "@import" not in style and "http" not in style


def test_hostile_names_are_shown_as_text(hostile: VerifyReport) -> None:
    page = Page(to_html(hostile))
    assert "<script>alert(1)</script>" in page.text
    assert not [c for c in page.text if (ord(c) < 32 and c != "\n") or c in "\u202e\x7f"]


def test_the_page_holds_what_the_reader_needs(failing: VerifyReport, passing: VerifyReport) -> None:
    page = Page(to_html(failing))
    for needed in (
        "Does not hold",
        "2 wrong, worst first",
        "model.layers.7.self_attn.k_proj.weight",
        "2093056 of 4194304",
        "content digests of the two sides are each its own",
        "leaves the noise at layers.7.attention",
        "MS_ASCEND_CHECK_OVERFLOW_MODE",
        "not possible here",
        '"target": "mindformers"',
        "exit code 1",
        "2.10.0",
    ):
        assert needed in page.text, needed
    text = to_html(passing)
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    assert "Holds" in Page(text).text and "wrong, worst first" not in text


def marks(text: str) -> dict[str, tuple[float, float, str]]:
    """Of each mark of the plot: x and y of its middle or tip, and its classes, by stage."""
    found = {}
    for classes, title, shape in re.findall(r'<g class="([\w ]+)"><title>([^:]+):[^<]*</title>(<[^>]+>)</g>', text):
        numbers = [float(n) for n in re.findall(r"-?\d+\.\d", shape)]
        offset = (
            4.0 if "<rect" in shape else 0.0 if "<circle" in shape else 5.5 if classes.endswith("attention") else 6.0
        )
        found[title] = (numbers[0] + (4.0 if "<rect" in shape else 0.0), numbers[1] + offset, classes)
    return found


def test_the_plot_is_logarithmic_and_in_order(failing: VerifyReport) -> None:
    section = failing.forward
    assert section is not None
    found = marks(to_html(failing))
    assert list(found) == [s.name for s in section.stages]
    xs = [x for x, _, _ in found.values()]
    assert xs == sorted(xs) and len(set(xs)) == len(xs)
    drawn = [(s.metrics.max_abs, found[s.name]) for s in section.stages if s.metrics.max_abs > 0]
    logs, ys = [math.log10(v) for v, _ in drawn], [y for _, (_, y, _) in drawn]
    slope, intercept = np.polyfit(logs, ys, 1)
    assert slope < 0  # larger errors are drawn higher
    np.testing.assert_allclose(ys, slope * np.array(logs) + intercept, atol=0.2)
    tolerance = re.search(r'<line class="atol" x1="[\d.]+" y1="([\d.]+)"', to_html(failing))
    assert tolerance is not None
    assert float(tolerance[1]) == pytest.approx(slope * math.log10(1e-5) + intercept, abs=0.2)
    assert next(name for name, (_, _, c) in found.items() if c.startswith("loud")) == section.first_bad


def test_the_plot_shows_nan_at_the_top_and_zero_at_the_bottom() -> None:
    x = np.ones((2, 3))
    noise = 1e-9
    stages = [
        StageResult("embedding", compare(x, x, atol=1e-5), noise),
        StageResult("layers.0", compare(x + 1e-12, x, atol=1e-5), noise),
        StageResult("logits", compare(x * np.nan, x, atol=1e-5), noise),
    ]
    metrics = compare_logits(x * np.nan, x, atol=1e-5)
    section = forward_section(dtype="float64", tokens="", metrics=metrics, atol=1e-5, stages=stages)
    found = marks(to_html(VerifyReport("a", "b", forward=section)))
    bottom, middle, top = (found[name][1] for name in ("embedding", "layers.0", "logits"))
    assert top < middle < bottom and found["logits"][2].startswith("loud")
    assert "6 NaN in MindSpore, 0 in PyTorch" in section.message


def test_a_plot_of_one_stage_and_one_of_hundreds() -> None:
    x = np.ones((2, 3))
    for count in (1, 400):
        stages = [StageResult(f"layers.{k}", compare(x, x, atol=0.0), 0.0) for k in range(count)]
        metrics = compare_logits(x, x, atol=0.0)
        section = forward_section(dtype="float64", tokens="", metrics=metrics, atol=0.0, stages=stages)
        text = to_html(VerifyReport("a", "b", forward=section))
        assert len(marks(text)) == count
        assert len(re.findall('class="tick" text-anchor="middle"', text)) <= 16
