"""How far two arrays are apart, in a form that can be judged again at any tolerance.

``a`` is the side under judgement (MindSpore), ``b`` the reference (PyTorch). An element is in order
if ``|a - b| <= atol + rtol * |b|``, written so that NaN never is; an infinity must stand in the same
place with the same sign. All arithmetic is float64, a chunk at a time.

Whether every element passes depends, for all tolerances at once, on a handful of elements: those on
the upper hull of the points ``(|b|, |a - b|)``. ``max(|a - b| - rtol * |b|)`` over all elements is a
linear function's maximum, and so is reached on that hull, whatever ``rtol >= 0``. The hull is what
:class:`Metrics` keeps (``frontier``), which makes a saved report exact to judge again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ckptbridge.errors import DTypeError, ShapeError, UsageError

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float64]

# float16's largest value: what a device in saturation mode writes where infinity belongs.
SATURATED = 65504.0
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Oddities:
    """How many elements of one side are not ordinary numbers (``saturated``: exactly +-65504)."""

    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    saturated: int = 0

    def __add__(self, other: Oddities) -> Oddities:
        return Oddities(
            self.nan + other.nan,
            self.posinf + other.posinf,
            self.neginf + other.neginf,
            self.saturated + other.saturated,
        )

    @property
    def nonfinite(self) -> int:
        return self.nan + self.posinf + self.neginf


@dataclass(frozen=True, slots=True)
class TokenMetrics:
    """What only logits have: one distribution a token.

    ``kl_*`` is KL(reference || judged) in nats a token; None if some token has no distribution (NaN,
    +Inf). ``top1`` is the share of tokens whose most likely entry agrees, ``top5`` the mean share of
    the five most likely ones in common; equal values may be taken in any order. ``top1_margin`` is
    the largest margin by which the reference prefers its own first choice where the sides differ.
    """

    tokens: int
    kl_max: float | None
    kl_mean: float | None
    kl_worst_token: int | None
    top1: float
    top5: float
    top1_margin: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """The distance of two arrays of one shape.

    ``max_abs``, ``mean_abs``, ``rms`` and ``max_rel`` (against |b|; infinite where b is 0 and a is
    not) are over the elements finite on both sides. ``nan_one`` counts NaN on one side only,
    ``nan_both`` on both; ``inf_mismatch`` counts infinities without their equal on the other side.
    ``cosine`` is None if a side is all zero or not finite. ``worst`` is the index of the element
    furthest above its tolerance. ``frontier`` holds ``(|b|, |a - b|)``, see the module's text.
    """

    shape: tuple[int, ...]
    count: int
    atol: float
    rtol: float
    exceeding: int
    max_abs: float
    mean_abs: float
    max_rel: float
    rms: float
    ref_max: float
    ref_std: float
    cosine: float | None
    worst: tuple[int, ...] | None
    worst_a: float | None
    worst_b: float | None
    a: Oddities
    b: Oddities
    nan_one: int
    nan_both: int
    inf_mismatch: int
    frontier: tuple[tuple[float, float], ...]
    tokens: TokenMetrics | None = None

    def needed_atol(self, rtol: float = 0.0) -> float:
        """The smallest atol at which every finite element passes at ``rtol``."""
        return max((d - rtol * b for b, d in ((0.0, 0.0), *self.frontier)))


@dataclass(frozen=True, slots=True)
class Judgement:
    """``holds`` is None if the data cannot tell; ``reasons`` are sentences, one a cause."""

    holds: bool | None
    atol: float
    rtol: float
    needed_atol: float
    reasons: tuple[str, ...] = ()


def check_tolerances(atol: float, rtol: float) -> None:
    """Raises UsageError unless both are finite and not negative."""
    for name, value in (("atol", atol), ("rtol", rtol)):
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(
                f"The tolerance {name} = {value} is not a number from 0 up.",
                remedy=f"For example: --{name} 1e-5.",
                option=f"--{name}",
            )


def judge(metrics: Metrics, atol: float, rtol: float = 0.0, *, equal_nan: bool = False) -> Judgement:
    """Whether every element passes at these tolerances; the same answer from a saved report.

    ``equal_nan`` accepts NaN in the same place on both sides. Nothing compared does not hold.
    """
    check_tolerances(atol, rtol)
    reasons = []
    if metrics.count == 0:
        reasons.append("There is nothing to compare: the arrays are empty.")
    if metrics.nan_one:
        reasons.append(f"{metrics.nan_one} elements are NaN on one side only.")
    if metrics.nan_both and not equal_nan:
        reasons.append(f"{metrics.nan_both} elements are NaN on both sides.")
    if metrics.inf_mismatch:
        reasons.append(f"{metrics.inf_mismatch} infinities have no equal on the other side{_saturation(metrics)}.")
    if not all(d <= atol + rtol * b for b, d in metrics.frontier):
        reasons.append(
            f"The largest |a-b| is {metrics.max_abs:.2e}; it would take atol {metrics.needed_atol(rtol):.2e}"
            f" to pass (judged at atol {atol:.0e}, rtol {rtol:g})."
        )
    return Judgement(not reasons, atol, rtol, metrics.needed_atol(rtol), tuple(reasons))


def _saturation(metrics: Metrics) -> str:
    for side, odd in (("judged", metrics.a), ("reference", metrics.b)):
        if odd.saturated:
            return f", and {odd.saturated} elements of the {side} side are exactly +-65504: the device saturates"
    return ""


# --- comparing ------------------------------------------------------------------------------


def compare(a: Array, b: Array, *, atol: float, rtol: float = 0.0, equal_nan: bool = False) -> Metrics:
    """The distance of ``a`` from the reference ``b``: any equal shapes, any real dtype.

    ``atol`` and ``rtol`` decide ``exceeding`` and ``worst`` only. Raises ShapeError, DTypeError
    (complex), UsageError (tolerances).
    """
    check_tolerances(atol, rtol)
    if a.shape != b.shape:
        raise ShapeError(f"Shapes differ: {list(a.shape)} (judged) and {list(b.shape)} (reference).")
    for side in (a, b):
        if side.dtype.kind in "cOSU":
            raise DTypeError(f"Arrays of dtype {side.dtype} cannot be compared as real numbers.")
    total = _Sums()
    with np.errstate(all="ignore"):  # overflow and NaN are counted, not warned about
        for start, x, y in _chunks(a, b):
            _accumulate(total, start, x, y, atol, rtol, equal_nan)
    worst: tuple[int, ...] | None = None
    worst_a = worst_b = None
    if total.worst is not None:
        worst = tuple(int(k) for k in np.unravel_index(total.worst, a.shape))
        worst_a, worst_b = float(a[worst]), float(b[worst])
    n = max(total.finite, 1)
    mean_b = total.sum_b / n
    norm = math.sqrt(total.aa) * math.sqrt(total.bb)
    whole = total.finite == a.size and math.isfinite(norm) and norm > 0
    return Metrics(
        shape=tuple(a.shape),
        count=a.size,
        atol=atol,
        rtol=rtol,
        exceeding=total.exceeding,
        max_abs=total.max_abs,
        mean_abs=total.sum_abs / n,
        max_rel=total.max_rel,
        rms=math.sqrt(total.dd / n),
        ref_max=total.ref_max,
        ref_std=math.sqrt(max(total.bb / n - mean_b * mean_b, 0.0)),
        cosine=max(-1.0, min(1.0, total.ab / norm)) if whole else None,
        worst=worst,
        worst_a=worst_a,
        worst_b=worst_b,
        a=total.odd_a,
        b=total.odd_b,
        nan_one=total.nan_one,
        nan_both=total.nan_both,
        inf_mismatch=total.inf_mismatch,
        frontier=tuple(zip(total.hull[0].tolist(), total.hull[1].tolist(), strict=True)),
    )


def compare_logits(a: Array, b: Array, *, atol: float, rtol: float = 0.0, equal_nan: bool = False) -> Metrics:
    """As :func:`compare`, for logits of shape (..., vocabulary): adds the per-token metrics."""
    metrics = compare(a, b, atol=atol, rtol=rtol, equal_nan=equal_nan)
    if a.ndim == 0 or a.size == 0:
        return metrics
    return replace(metrics, tokens=_token_metrics(a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])))


class _Sums:
    """What is added up over the chunks."""

    def __init__(self) -> None:
        self.finite = self.exceeding = self.nan_one = self.nan_both = self.inf_mismatch = 0
        self.max_abs = self.max_rel = self.sum_abs = self.dd = self.ref_max = 0.0
        self.aa = self.bb = self.ab = self.sum_b = 0.0
        self.worst: int | None = None
        self.worst_by = -math.inf
        self.odd_a = Oddities()
        self.odd_b = Oddities()
        self.hull: tuple[Floats, Floats] = (np.empty(0), np.empty(0))


def _chunks(a: Array, b: Array) -> Iterator[tuple[int, Floats, Floats]]:
    """(flat start, a, b) as float64, about a million elements at a time."""
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    for start in range(0, flat_a.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        yield start, flat_a[part].astype(np.float64), flat_b[part].astype(np.float64)


def _accumulate(total: _Sums, start: int, x: Floats, y: Floats, atol: float, rtol: float, equal_nan: bool) -> None:
    total.odd_a += _oddities(x)
    total.odd_b += _oddities(y)
    nan_x, nan_y = np.isnan(x), np.isnan(y)
    total.nan_one += int(np.count_nonzero(nan_x ^ nan_y))
    total.nan_both += int(np.count_nonzero(nan_x & nan_y))
    inf = (np.isinf(x) | np.isinf(y)) & ~(nan_x | nan_y)
    same_inf = inf & (x == y)
    total.inf_mismatch += int(np.count_nonzero(inf & ~same_inf))

    finite = np.isfinite(x) & np.isfinite(y)
    size, diff = np.abs(y), np.abs(x - y)
    excess = diff - (atol + rtol * size)
    # 'Not within', since a NaN is never beyond; and 'finite', since rtol times infinity allows anything.
    fine = (finite & (diff <= atol + rtol * size)) | same_inf
    if equal_nan:
        fine |= nan_x & nan_y
    total.exceeding += int(np.count_nonzero(~fine))
    rank = np.where(fine & ~finite, -np.inf, np.where(finite, excess, np.inf))
    top = int(np.argmax(rank))
    if rank[top] > total.worst_by:
        total.worst, total.worst_by = start + top, float(rank[top])

    if not finite.all():
        x, y, size, diff = x[finite], y[finite], size[finite], diff[finite]
    if not x.size:
        return
    total.finite += x.size
    total.max_abs = max(total.max_abs, float(diff.max()))
    total.ref_max = max(total.ref_max, float(size.max()))
    total.sum_abs += float(diff.sum())
    total.dd += float(np.dot(diff, diff))
    total.sum_b += float(y.sum())
    total.aa += float(np.dot(x, x))
    total.bb += float(np.dot(y, y))
    total.ab += float(np.dot(x, y))
    relative = np.where(diff == 0, 0.0, diff / size)
    total.max_rel = max(total.max_rel, float(relative.max()))
    if total.hull[0].size:  # what lies under the hull so far cannot be on the next one; saves the sort
        above = diff > np.interp(size, *total.hull, left=-1.0)
        size, diff = size[above], diff[above]
    total.hull = _upper_hull(np.concatenate((total.hull[0], size)), np.concatenate((total.hull[1], diff)))


def _oddities(x: Floats) -> Oddities:
    return Oddities(
        nan=int(np.count_nonzero(np.isnan(x))),
        posinf=int(np.count_nonzero(np.isposinf(x))),
        neginf=int(np.count_nonzero(np.isneginf(x))),
        saturated=int(np.count_nonzero(np.abs(x) == SATURATED)),
    )


def _upper_hull(size: Floats, diff: Floats) -> tuple[Floats, Floats]:
    """The points of which one maximises ``diff - rtol * size`` for every ``rtol >= 0``.

    First those that no point of smaller or equal size exceeds in diff, then their upper convex hull
    (Andrew's monotone chain). Ordered by size; both coordinates rise.
    """
    # Right of the highest point nothing can matter; left of it, what lies above the running maximum.
    keep = size <= size[diff == diff.max()].min()
    size, diff = size[keep], diff[keep]
    order = np.lexsort((-diff, size))
    size, diff = size[order], diff[order]
    rising = np.ones(size.size, dtype=bool)
    rising[1:] = diff[1:] > np.maximum.accumulate(diff)[:-1]
    hull: list[tuple[float, float]] = []
    for point in zip(size[rising].tolist(), diff[rising].tolist(), strict=True):
        while len(hull) >= 2 and not _convex(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return np.array([p[0] for p in hull]), np.array([p[1] for p in hull])


def _convex(p: tuple[float, float], q: tuple[float, float], r: tuple[float, float]) -> bool:
    """Whether ``q`` lies above the line from ``p`` to ``r``.

    Slopes, not products: the coordinates may be as large or as small as floats get.
    """
    return (q[1] - p[1]) / (q[0] - p[0]) > (r[1] - q[1]) / (r[0] - q[0])


# --- logits ---------------------------------------------------------------------------------


def _token_metrics(a: Array, b: Array) -> TokenMetrics:
    tokens, vocabulary = a.shape
    kl, top1, top5, margin = (np.empty(tokens) for _ in range(4))
    rows = max(1, _CHUNK // vocabulary)
    with np.errstate(all="ignore"):
        for start in range(0, tokens, rows):
            part = slice(start, start + rows)
            x, y = a[part].astype(np.float64), b[part].astype(np.float64)
            kl[part] = _kl(x, y)
            top1[part], margin[part] = _top1(x, y)
            top5[part] = _overlap(x, y, min(5, vocabulary))
    known = not np.isnan(kl).any()
    return TokenMetrics(
        tokens=tokens,
        kl_max=float(kl.max()) if known else None,
        kl_mean=float(kl.mean()) if known else None,
        kl_worst_token=int(kl.argmax()) if known else None,
        top1=float(top1.mean()),
        top5=float(top5.mean()),
        top1_margin=float(margin.max()),
    )


def _log_softmax(x: Floats) -> Floats:
    shifted = x - x.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), dtype=np.float64)


def _kl(a: Floats, b: Floats) -> Floats:
    """KL(b || a) a row, NaN where a row has no distribution.

    With u = log p_a - log p_b and both summing to 1, sum p_b (-u) = sum p_b (e^u - 1 - u): every term
    is at least 0, so that tiny distances do not drown in cancellation.
    """
    log_a, log_b = _log_softmax(a), _log_softmax(b)
    p_a, p_b = np.exp(log_a), np.exp(log_b)
    u = log_a - log_b
    terms = np.where(np.abs(u) < 0.5, p_b * (np.expm1(u) - u), p_a - p_b - p_b * u)
    terms = np.where(p_b == 0, p_a, terms)
    kl = np.maximum(terms.sum(axis=-1), 0.0)
    undefined = np.isnan(log_a).any(axis=-1) | np.isnan(log_b).any(axis=-1)
    return np.where(undefined, np.nan, kl)


def _top1(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """(1.0 where a first choice is shared, the reference's margin where none is), a row."""
    best_b = b.max(axis=-1, keepdims=True)
    first_a = a == a.max(axis=-1, keepdims=True)  # no element at all where a row holds NaN
    shared = (first_a & (b == best_b)).any(axis=-1)
    taken = np.where(first_a, b, -np.inf).max(axis=-1)
    margin = np.where(shared, 0.0, best_b[:, 0] - taken)
    return shared.astype(np.float64), np.where(np.isnan(margin), np.inf, margin)


def _overlap(a: Floats, b: Floats, k: int) -> Floats:
    """The largest share of ``k`` that a choice of the k largest of ``a`` and one of ``b`` have in common."""
    sure_a, tied_a, open_a = _largest(a, k)
    sure_b, tied_b, open_b = _largest(b, k)

    def both(p: npt.NDArray[np.bool_], q: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        return np.asarray(np.count_nonzero(p & q, axis=-1), dtype=np.int64)

    # Each open place of one side is best spent on what the other side has for sure, then on what both may take.
    from_a = np.minimum(open_a, both(tied_a, sure_b))
    from_b = np.minimum(open_b, both(sure_a, tied_b))
    free = np.minimum(np.minimum(open_a - from_a, open_b - from_b), both(tied_a, tied_b))
    return np.asarray((both(sure_a, sure_b) + from_a + from_b + free) / k, dtype=np.float64)


def _largest(x: Floats, k: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Of each row: what is surely among the k largest, what ties for the last places, how many those are."""
    kth = np.partition(x, x.shape[-1] - k, axis=-1)[:, -k][:, None]
    sure, tied = x > kth, x == kth
    return sure, tied, np.where(tied.any(axis=-1), k - np.count_nonzero(sure, axis=-1), 0)
