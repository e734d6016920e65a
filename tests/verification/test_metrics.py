"""Metrics and judgement, against element-by-element Python and brute force."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptbridge.errors import CkptBridgeError, DTypeError, ShapeError, UsageError
from ckptbridge.verification import metrics as metrics_module
from ckptbridge.verification.metrics import Metrics, compare, compare_logits, judge
from ckptbridge.verification.noise import LIMITS, NoiseFloor, judge_with_noise, noise_floor

INF, NAN = math.inf, math.nan

special = st.sampled_from([0.0, -0.0, 1.0, -1.0, 65504.0, -65504.0, INF, -INF, NAN, 5e-324, 1.7e308, -1.7e308])
number = st.one_of(special, st.floats(-100, 100), st.floats(width=64))
tolerance = st.one_of(st.just(0.0), st.floats(0, 1e3), st.sampled_from([1e-5, 1e-3, 1.0]))


def in_order(a: float, b: float, atol: float, rtol: float, equal_nan: bool) -> bool | None:
    """The definition, one element, in exact arithmetic; None where rounding may decide."""
    if math.isnan(a) or math.isnan(b):
        return equal_nan and math.isnan(a) and math.isnan(b)
    if math.isinf(a) or math.isinf(b):
        return a == b
    distance = abs(Fraction(a) - Fraction(b))
    allowed = Fraction(atol) + Fraction(rtol) * abs(Fraction(b))
    margin = max(distance, allowed) * Fraction(1, 2**40) + Fraction(1, 2**1060)
    if abs(distance - allowed) <= margin and distance != 0:
        return None
    return distance <= allowed


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(number, number), min_size=1, max_size=12), tolerance, tolerance, tolerance, st.booleans())
def test_a_saved_metric_is_judged_like_its_elements_at_any_tolerance(pairs, taken, atol, rtol, equal_nan) -> None:
    a, b = (np.array(side) for side in zip(*pairs, strict=True))
    expected = [in_order(x, y, atol, rtol, equal_nan) for x, y in pairs]
    found = judge(compare(a, b, atol=taken, rtol=taken), atol, rtol, equal_nan=equal_nan).holds
    if False in expected:
        assert found is False
    elif None not in expected:
        assert found is True


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(number, number), min_size=1, max_size=12), tolerance, tolerance)
def test_exceeding_counts_the_elements_that_are_out_of_order(pairs, atol, rtol) -> None:
    a, b = (np.array(side) for side in zip(*pairs, strict=True))
    expected = [in_order(x, y, atol, rtol, False) for x, y in pairs]
    found = compare(a, b, atol=atol, rtol=rtol).exceeding
    assert expected.count(False) <= found <= expected.count(False) + expected.count(None)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    b = rng.standard_normal((40, 30)) * 10.0 ** rng.integers(-6, 3, (40, 30))
    a = b + 1e-4 * rng.standard_normal(b.shape)
    a[3, 7], b[5, 5] = NAN, INF
    whole = compare_logits(a, b, atol=1e-4, rtol=1e-3)
    monkeypatch.setattr(metrics_module, "_CHUNK", 37)
    parts = compare_logits(a, b, atol=1e-4, rtol=1e-3)
    assert parts.frontier == whole.frontier and len(whole.frontier) > 1
    assert (parts.exceeding, parts.worst, parts.max_abs, parts.a, parts.b) == (
        whole.exceeding,
        whole.worst,
        whole.max_abs,
        whole.a,
        whole.b,
    )
    assert parts.rms == pytest.approx(whole.rms) and parts.mean_abs == pytest.approx(whole.mean_abs)


@pytest.mark.parametrize("rtol", [0.0, 1e-6, 1e-3, 0.5, 10.0])
def test_needed_atol_is_the_smallest_that_passes(rtol: float) -> None:
    rng = np.random.default_rng(2)
    b = rng.standard_normal(5000) * 10.0 ** rng.integers(-8, 3, 5000)
    a = b + 1e-3 * rng.standard_normal(5000)
    m = compare(a, b, atol=1e-5)
    brute = max(0.0, float((np.abs(a - b) - rtol * np.abs(b)).max()))
    assert m.needed_atol(rtol) == pytest.approx(brute, rel=1e-12, abs=1e-300)
    assert judge(m, brute * (1 + 1e-9), rtol).holds
    if brute:
        assert not judge(m, brute * (1 - 1e-9), rtol).holds


def test_plain_numbers() -> None:
    a, b = np.array([1.0, 2.0, 3.5, -4.0]), np.array([1.0, 2.5, 3.0, 0.0])
    m = compare(a, b, atol=1e-5)
    assert (m.max_abs, m.mean_abs, m.max_rel) == (4.0, 1.25, INF)
    assert m.rms == pytest.approx(math.sqrt((0.25 + 0.25 + 16) / 4))
    assert m.worst == (3,) and (m.worst_a, m.worst_b) == (-4.0, 0.0)
    assert m.exceeding == 3 and m.ref_max == 3.0 and m.ref_std == pytest.approx(np.std(b))
    assert m.cosine == pytest.approx(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)))


def test_worst_is_what_is_furthest_above_its_own_tolerance() -> None:
    # The first element differs more, and is allowed to.
    m = compare(np.array([[1000.5, 1.0]]), np.array([[1000.0, 0.9]]), atol=0.0, rtol=1e-3)
    assert m.max_abs == pytest.approx(0.5) and m.worst == (0, 1) and m.exceeding == 1


def test_infinity_that_became_65504_and_nan_that_became_0_fail() -> None:
    m = compare(np.array([65504.0, 0.0]), np.array([INF, NAN]), atol=1e30, rtol=1.0)
    verdict = judge(m, 1e30, 1.0, equal_nan=True)
    assert verdict.holds is False and "saturates" in " ".join(verdict.reasons)
    assert (m.a.saturated, m.b.posinf, m.b.nan) == (1, 1, 1)
    swapped = judge(compare(np.array([INF, NAN]), np.array([65504.0, 0.0]), atol=1.0), 1e30, 1.0, equal_nan=True)
    assert swapped.holds is False


@pytest.mark.parametrize(("a", "b"), [([NAN], [1.0]), ([1.0], [NAN]), ([NAN], [NAN]), ([INF], [-INF]), ([INF], [1.0])])
def test_nan_and_misplaced_infinity_never_pass(a: list[float], b: list[float]) -> None:
    m = compare(np.array(a), np.array(b), atol=1.0)
    assert judge(m, 1e300, 1e300).holds is False and m.exceeding == 1 and m.worst == (0,)


def test_equal_infinities_pass_and_equal_nan_only_on_demand() -> None:
    assert judge(compare(np.array([INF, -INF]), np.array([INF, -INF]), atol=0.0), 0.0).holds
    both = compare(np.array([NAN, 1.0]), np.array([NAN, 1.0]), atol=0.0)
    assert judge(both, 0.0).holds is False and judge(both, 0.0, equal_nan=True).holds is True
    assert compare(np.array([NAN]), np.array([NAN]), atol=0.0, equal_nan=True).exceeding == 0


def test_nothing_compared_does_not_hold() -> None:
    assert judge(compare(np.empty((0, 4)), np.empty((0, 4)), atol=1.0), 1.0).holds is False


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ShapeError):
        compare(np.zeros(3), np.zeros((3, 1)), atol=1.0)
    with pytest.raises(DTypeError):
        compare(np.zeros(3, np.complex64), np.zeros(3, np.complex64), atol=1.0)
    for atol in (-1.0, NAN, INF):
        with pytest.raises(UsageError):
            compare(np.zeros(1), np.zeros(1), atol=atol)
    with pytest.raises(CkptBridgeError):
        judge(compare(np.zeros(1), np.zeros(1), atol=1.0), 1.0, NAN)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.bool_])
def test_any_real_dtype(dtype: type) -> None:
    a = np.array([0, 1, 1, 0]).astype(dtype)
    m = compare(a, np.array([0, 1, 0, 0]).astype(dtype), atol=0.0)
    assert (m.exceeding, m.max_abs, m.worst) == (1, 1.0, (2,))


# --- per token --------------------------------------------------------------------------------


def tokens_of(a: np.ndarray, b: np.ndarray) -> metrics_module.TokenMetrics:
    found = compare_logits(a, b, atol=1.0).tokens
    assert found is not None
    return found


def exact_kl(a: np.ndarray, b: np.ndarray) -> float:
    """KL(b || a) in longdouble, term by term."""
    p, q = (np.exp(x.astype(np.longdouble) - x.max()) for x in (b, a))
    p, q = p / p.sum(), q / q.sum()
    return float((p * np.log(p / q)).sum())


def test_kl_of_far_and_near_distributions() -> None:
    rng = np.random.default_rng(3)
    b = 3 * rng.standard_normal((5, 40))
    a = 3 * rng.standard_normal((5, 40))
    expected = [exact_kl(x, y) for x, y in zip(a, b, strict=True)]
    found = tokens_of(a, b)
    assert found.kl_max == pytest.approx(max(expected)) and found.kl_mean == pytest.approx(np.mean(expected))
    assert found.kl_worst_token == int(np.argmax(expected))


def test_kl_of_distributions_nearer_than_float64_resolves_naively() -> None:
    rng = np.random.default_rng(4)
    b = rng.standard_normal((1, 1000))
    d = 1e-10 * rng.standard_normal((1, 1000))
    p = np.exp(b) / np.exp(b).sum()
    second_order = float(0.5 * ((p * d * d).sum() - (p * d).sum() ** 2))
    assert tokens_of(b + d, b).kl_max == pytest.approx(second_order, rel=1e-3, abs=0.0)
    assert tokens_of(b, b).kl_max == 0.0


def test_kl_with_masked_and_extreme_entries() -> None:
    masked = np.array([[0.0, 1.0, -INF]])
    assert tokens_of(masked, masked).kl_max == 0.0
    assert tokens_of(masked, np.array([[0.0, 1.0, 0.0]])).kl_max == INF
    assert tokens_of(np.array([[0.0, -2000.0]]), np.array([[-2000.0, 0.0]])).kl_max == pytest.approx(2000.0)
    broken = tokens_of(np.array([[NAN, 1.0], [0.0, 1.0]]), np.array([[0.0, 1.0], [0.0, 1.0]]))
    assert broken.kl_max is None and broken.top1 == 0.5


def test_first_choice_with_ties() -> None:
    b = np.array([[1.0, 1.0, 0.0], [2.0, 1.0, 0.0], [0.0, 1.0, 3.0]])
    a = np.array([[0.9, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 5.0, 5.0]])
    found = tokens_of(a, b)
    assert found.top1 == pytest.approx(2 / 3) and found.top1_margin == 1.0


def brute_overlap(a: np.ndarray, b: np.ndarray, k: int) -> int:
    def choices(x: np.ndarray) -> list[set[int]]:
        best = sorted(x, reverse=True)[:k]
        return [set(c) for c in itertools.combinations(range(len(x)), k) if sorted(x[list(c)], reverse=True) == best]

    return max(len(p & q) for p in choices(a) for q in choices(b))


def test_top5_takes_ties_in_favour() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.integers(0, 4, (60, 8)).astype(float), rng.integers(0, 4, (60, 8)).astype(float)
    expected = np.mean([brute_overlap(x, y, 5) / 5 for x, y in zip(a, b, strict=True)])
    assert tokens_of(a, b).top5 == pytest.approx(expected)
    assert tokens_of(a[:, :3], b[:, :3]).top5 == 1.0  # fewer entries than five: all of them


# --- the noise floor --------------------------------------------------------------------------


def logits_and(noise: float, flip_margin: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(6)
    b = rng.standard_normal((200, 300))
    b[np.arange(200), b.argmax(-1)] += flip_margin  # a clear first choice
    return b + noise * rng.uniform(-1, 1, b.shape), b


def with_floor(dtype: str, floor: float, error: float, atol: float = 1e-5) -> bool | None:
    low, high = logits_and(floor)
    a, b = logits_and(error)
    measured = noise_floor(dtype, compare_logits(low, high, atol=atol))
    return judge_with_noise(compare_logits(a, b, atol=atol), measured, atol).holds


@pytest.mark.parametrize(
    ("dtype", "floor", "error", "expected"),
    [
        ("float32", 2e-5, 8e-5, True),  # two correct implementations
        ("float32", 2e-5, 1.5e-1, False),  # a real fault
        ("float32", 2e-5, 5e-3, False),
        ("float32", 1e-3, 3e-3, True),  # a noisier model: the limit follows its floor ...
        ("float32", 1e-3, 6e-3, False),
        ("float32", 0.2, 0.1, None),  # ... and where the floor drowns faults, agreement says nothing
        ("float32", 0.2, 2.0, False),
        ("float16", 1e-2, 2e-2, True),
        ("float16", 1e-2, 1.5e-1, False),
        ("bfloat16", 1e-2, 1e-2, None),
        ("bfloat16", 1e-2, 1.0, False),
    ],
)
def test_low_precision_is_judged_against_its_own_floor(
    dtype: str, floor: float, error: float, expected: bool | None
) -> None:
    assert with_floor(dtype, floor, error) is expected


def test_the_floor_never_excuses_what_is_not_a_number() -> None:
    a, b = logits_and(1e-6)
    a[0, 0] = NAN
    floor = NoiseFloor("bfloat16", max_abs=10.0, kl_max=1.0, top1=0.5, sigma=1.0)
    assert judge_with_noise(compare_logits(a, b, atol=1.0), floor, 1.0).holds is False


def test_float16_wants_98_percent_of_the_first_choices() -> None:
    b = np.zeros((100, 4))
    b[:, 0], b[:, 1] = 1.0, 0.99
    b[:, 2] = -3.0
    a = b.copy()
    a[:3, [0, 1]] = a[:3, [1, 0]]
    floor = NoiseFloor("float16", max_abs=0.02, kl_max=1e-5, top1=1.0, sigma=float(b.std()))
    verdict = judge_with_noise(compare_logits(a, b, atol=1e-5), floor, 1e-5)
    assert verdict.holds is False and "97.0%" in " ".join(verdict.reasons)
    a[2] = b[2]
    assert judge_with_noise(compare_logits(a, b, atol=1e-5), floor, 1e-5).holds is True


def test_a_dtype_without_limits_is_refused() -> None:
    assert set(LIMITS) == {"float32", "float16", "bfloat16"}
    with pytest.raises(DTypeError):
        noise_floor("float64", compare(np.zeros(1), np.zeros(1), atol=1.0))


def test_metrics_are_frozen_plain_data() -> None:
    m: Metrics = compare(np.zeros(2), np.ones(2), atol=1.0)
    with pytest.raises(AttributeError):
        m.max_abs = 0.0  # type: ignore[misc]
    assert type(m.max_abs) is float and type(m.count) is int
