"""The activation check on the real backends, with formulas held against mpmath and faults put into kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ckptbridge.errors import UsageError
from ckptbridge.verification import activations, reference
from ckptbridge.verification.activations import ActivationReport, check, hints, render_text
from ckptbridge.verification.sides.kernels import KernelSet, NoKernel

torch = pytest.importorskip("torch")
ms = pytest.importorskip("mindspore")
mpmath = pytest.importorskip("mpmath")


@pytest.fixture(scope="module")
def sets() -> tuple[KernelSet, KernelSet]:
    from ckptbridge.verification.sides import mindspore_kernels, torch_kernels

    return torch_kernels.kernel_set(), mindspore_kernels.kernel_set()


@pytest.fixture(scope="module")
def report(sets: tuple[KernelSet, KernelSet]) -> ActivationReport:
    return check(*sets, 1e-4)


# --- the reference ----------------------------------------------------------------------------

SCALAR = {
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
    "gelu": lambda x: x * mpmath.ncdf(x),
    "gelu_tanh": lambda x: x / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3))),
    "softplus": lambda x: mpmath.log(1 + mpmath.exp(x)),
    "tanh": mpmath.tanh,
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
}


@pytest.mark.parametrize("name", SCALAR)
def test_scalar_formulas_against_mpmath(name: str) -> None:
    (case,) = [c for c in reference.CASES if c.name == name]
    x = np.array([-700.0, -40.0, -12.0, -5.0, -1.0, -1e-3, -1e-300, 0.0, 5e-324, 1e-12, 0.5, 3.0, 11.0, 40.0, 1e30])
    found = case.exact({"x": x.reshape(1, -1)})[0]
    with mpmath.workdps(400):
        expected = np.array([float(SCALAR[name](mpmath.mpf(v))) for v in x])
    # In the tail of the GELUs the argument's own rounding is magnified (erfc), and 1 + tanh cancels.
    np.testing.assert_allclose(found, expected, rtol=4e-15, atol=1e-17 if "gelu" in name else 5e-324)


def exact_row(name: str, inputs: dict[str, list[Any]]) -> list[Any]:
    x = inputs["x"]
    if name == "softmax":
        top = max(x)
        e = [mpmath.exp(v - top) for v in x]
        return [v / mpmath.fsum(e) for v in e]
    if name == "rms_norm":
        length = mpmath.sqrt(mpmath.fsum(v * v for v in x) / len(x) + mpmath.mpf("1e-6"))
        return [v / length * w for v, w in zip(x, inputs["weight"], strict=True)]
    if name == "layer_norm":
        mean = mpmath.fsum(x) / len(x)
        spread = mpmath.sqrt(mpmath.fsum((v - mean) ** 2 for v in x) / len(x) + mpmath.mpf("1e-5"))
        return [(v - mean) / spread * w + b for v, w, b in zip(x, inputs["weight"], inputs["bias"], strict=True)]
    half = len(x) // 2
    turned = [(x[k] + 1j * x[k + half]) * mpmath.expj(inputs["angle"][k]) for k in range(half)]
    return [z.real for z in turned] + [z.imag for z in turned]


@pytest.mark.parametrize("name", ["softmax", "rms_norm", "layer_norm", "rope"])
def test_row_formulas_against_mpmath(name: str) -> None:
    (case,) = [c for c in reference.CASES if c.name == name]
    inputs = case.inputs("float32")
    found = case.exact(inputs)
    with mpmath.workdps(40):
        for row in range(7):
            picked = {k: [mpmath.mpf(v) for v in (x[row] if x.ndim == 2 else x)] for k, x in inputs.items()}
            expected = np.array([float(v) for v in exact_row(name, picked)])
            np.testing.assert_allclose(found[row], expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", activations.DTYPES)
def test_the_inputs_reach_large_tiny_and_denormal_values(dtype: str) -> None:
    x = reference.rounded(reference.line(dtype), dtype)
    tiny = np.abs(x[x != 0])
    assert np.isfinite(x).all() and np.isfinite(reference.rounded(2 * x, dtype)).all()
    assert tiny.min() < activations.SMALLEST_NORMAL[dtype] and tiny.max() > 1e4
    assert np.signbit(x[x == 0]).any() and not np.signbit(x[x == 0]).all()


def test_rounding_is_torchs() -> None:
    x = np.concatenate((np.random.default_rng(0).standard_normal(2000) * 10.0 ** np.arange(-40, 40).repeat(25), [0.0]))
    for dtype in activations.DTYPES:
        expected = torch.from_numpy(x).to(getattr(torch, dtype)).double().numpy()
        np.testing.assert_array_equal(reference.rounded(x, dtype), expected)


# --- the real backends ------------------------------------------------------------------------


def test_every_case_runs_in_every_float_that_the_cpu_has(report: ActivationReport) -> None:
    for dtype in ("float64", "float32", "float16"):
        compared = {p.case for p in report.pairs if p.dtype == dtype and p.error is not None}
        assert compared == {c.name for c in reference.CASES}
    assert all(k.status != "missing" for k in report.kernels if k.side == "torch")


def test_float64_agrees_closely(report: ActivationReport) -> None:
    assert all(p.error < 1e-11 for p in report.pairs if p.dtype == "float64")  # type: ignore[operator]


def test_mindspores_float32_tanh_is_named(report: ActivationReport) -> None:
    assert {(k.side, k.case, k.dtype) for k in report.faults} == {("mindspore", "tanh", "float32")}
    assert report.holds is False and report.exit_code == 1
    assert [p.at_fault for p in report.pairs if (p.case, p.dtype) == ("tanh", "float32")] == ["mindspore"]
    text = render_text(report)
    assert "FAILS" in text.splitlines()[0] and "mindspore ops.tanh in float32: 1.00" in text


def test_a_wider_tolerance_holds(sets: tuple[KernelSet, KernelSet]) -> None:
    wide = check(*sets, 2e-4, ("float32",))
    assert wide.holds is True and wide.exit_code == 0 and "HOLDS" in render_text(wide)
    # Inside the bound, and still told: 1e-4 is 840 times what float32 can do.
    assert {k.case for k in wide.kernels if k.status == "imprecise"} == {"tanh"}


def test_imprecise_float64_kernels_are_told(report: ActivationReport) -> None:
    imprecise = {k.kernel for k in report.kernels if k.status == "imprecise" and k.dtype == "float64"}
    assert "ops.softplus" in imprecise and "mint.nn.functional.softplus" not in imprecise


def test_known_defaults_are_no_kernel_faults(report: ActivationReport) -> None:
    found = {d.layer: d for d in report.defaults}
    assert found["LayerNorm"].status == found["GELU"].status == "differs"
    assert 1e-2 < found["LayerNorm"].max_abs < 1e-1 and 3e-4 < found["GELU"].max_abs < 6e-4
    assert "epsilon=1e-5" in render_text(report) and "approximate=False" in render_text(report)


def test_the_sizes_of_the_known_default_differences() -> None:
    # Inputs of standard deviation 0.02 through LayerNorm: 1e-7 against 1e-5 shows as some 1e-2.
    x = (0.02 * np.random.default_rng(3).standard_normal((4, 64))).astype(np.float32)
    theirs = ms.nn.LayerNorm((64,))(ms.Tensor(x)).asnumpy()
    ours = torch.nn.LayerNorm(64)(torch.tensor(x)).detach().numpy()
    apart = float(np.abs(theirs - ours).max())
    assert 2e-2 < apart < 6e-2 and hints("layers.3.final_norm", apart) and not hints("layers.3.mlp", apart)
    x = np.linspace(-4, 4, 9).astype(np.float32)
    apart = float(np.abs(ms.nn.GELU()(ms.Tensor(x)).asnumpy() - torch.nn.GELU()(torch.tensor(x)).numpy()).max())
    assert 4.0e-4 < apart < 4.2e-4
    (hint,) = hints("layers.0.mlp", apart)
    assert "approximate=False" in hint
    exact = ms.nn.GELU(approximate=False)(ms.Tensor(x)).asnumpy()
    assert np.abs(exact - torch.nn.GELU()(torch.tensor(x)).numpy()).max() < 1e-6


# --- faults put in ----------------------------------------------------------------------------


def with_kernel(side: KernelSet, case: str, function: Callable[..., Any]) -> KernelSet:
    return replace(side, kernels={**side.kernels, case: {"seeded": function}})


def blamed(left: KernelSet, right: KernelSet, case: str) -> str:
    found = check(left, right, 1e-4, ("float64",))
    (pair,) = [p for p in found.pairs if p.case == case]
    assert (found.holds is False) == (pair.at_fault in ("torch", "mindspore", "both"))
    return pair.at_fault


def test_the_side_at_fault_is_named(sets: tuple[KernelSet, KernelSet]) -> None:
    left, right = sets
    tanh_gelu = {"torch": left.kernels["gelu_tanh"], "mindspore": right.kernels["gelu_tanh"]}
    wrong_left = with_kernel(left, "gelu", next(iter(tanh_gelu["torch"].values())))
    wrong_right = with_kernel(right, "gelu", next(iter(tanh_gelu["mindspore"].values())))
    assert blamed(wrong_left, right, "gelu") == "torch"
    assert blamed(left, wrong_right, "gelu") == "mindspore"
    # Both wrong alike: they agree with each other, and are still wrong.
    assert blamed(wrong_left, wrong_right, "gelu") == "both"


def test_swapped_rope_halves_and_a_wrong_eps_are_faults(sets: tuple[KernelSet, KernelSet]) -> None:
    left, right = sets
    rope = left.kernels["rope"]["composed"]
    assert blamed(with_kernel(left, "rope", lambda x, angle: rope(x, -angle)), right, "rope") == "torch"
    norm = torch.nn.functional.rms_norm
    wrong = with_kernel(left, "rms_norm", lambda x, weight: norm(x, (64,), weight, 1e-5))
    assert blamed(wrong, right, "rms_norm") == "torch"


@pytest.mark.parametrize(
    "broken",
    [lambda x: x * float("nan"), lambda x: x[:, :5], lambda x: torch.where(x > 5, torch.inf, torch.sigmoid(x))],
    ids=["nan", "shape", "inf"],
)
def test_results_that_are_no_numbers_or_no_such_shape_are_faults(
    sets: tuple[KernelSet, KernelSet], broken: Callable[..., Any]
) -> None:
    left, right = sets
    found = check(with_kernel(left, "sigmoid", broken), right, 1e-4, ("float64",))
    (fault,) = found.faults
    assert (fault.side, fault.kernel, fault.error) == ("torch", "seeded", np.inf) and fault.note


def test_a_layer_that_is_not_even_its_own_default_is_a_fault(sets: tuple[KernelSet, KernelSet]) -> None:
    left, right = sets
    odd = replace(right, defaults={**right.defaults, "LayerNorm": lambda width: ms.nn.LayerNorm((width,), epsilon=0.1)})
    found = check(left, odd, 2e-4, ("float64",))
    assert {d.layer: d.status for d in found.defaults} == {"LayerNorm": "fault", "GELU": "differs"}
    assert found.holds is False
    alike = replace(right, defaults={**right.defaults, "GELU": lambda width: ms.nn.GELU(approximate=False)})
    assert {d.layer: d.status for d in check(left, alike, 2e-4, ("float64",)).defaults}["GELU"] == "same"


def test_no_kernel_is_no_verdict(sets: tuple[KernelSet, KernelSet]) -> None:
    left, right = sets

    def none(*_: object) -> Any:
        raise NoKernel("no such device")

    found = check(left, replace(right, run=none), 1e-4, ("float32",))
    assert found.holds is None and found.exit_code == 2 and {p.at_fault for p in found.pairs} == {"unknown"}
    text = render_text(found)
    assert "NOT JUDGED" in text and "mindspore float32: silu, gelu" in text


def test_a_failed_kernel_does_not_spoil_the_next(sets: tuple[KernelSet, KernelSet]) -> None:
    _, right = sets
    x = {"x": np.array([[0.5, -1.0]])}
    for _ in range(5):
        with pytest.raises(NoKernel, match="Sigmoid"):
            right.run(right.kernels["silu"]["ops.silu"], x, "bfloat16")
        found = right.run(right.kernels["sigmoid"]["ops.sigmoid"], x, "float64")
        np.testing.assert_allclose(found, 1 / (1 + np.exp(-x["x"])), rtol=1e-14)


def test_bad_calls_are_refused(sets: tuple[KernelSet, KernelSet]) -> None:
    with pytest.raises(UsageError, match="int8"):
        check(*sets, 1e-4, ("int8",))
    with pytest.raises(UsageError):
        check(*sets, float("nan"))
