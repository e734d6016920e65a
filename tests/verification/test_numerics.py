"""The numerics guard on the real backends: it takes effect, and leaves no trace."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from ckptbridge.verification.numerics import ENVIRONMENT, deterministic

torch = pytest.importorskip("torch")
ms = pytest.importorskip("mindspore")

X = np.array([-30.0, -1.5, 0.0, 0.25, 7.0], np.float32)


def traced_torch_silus() -> list[bool]:
    """Whether each way to call SiLU is composed of sigmoid and product, as PyTorch's dispatcher sees it."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers.activations import ACT2FN

    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    ways = [
        torch.nn.functional.silu,
        torch.nn.SiLU(),
        torch.nn.SiLU(inplace=True),
        ACT2FN["silu"],
        ACT2FN["swish"],
    ]
    composed = []
    for way in ways:
        with Watch() as watch:
            way(torch.tensor(X))
        fused = any("aten.silu" in name for name in watch.seen)
        assert fused != any("aten.sigmoid" in name for name in watch.seen)
        composed.append(not fused)
    return composed


def test_torch_silu_is_composed_inside_and_fused_outside() -> None:
    assert traced_torch_silus() == [False] * 5
    with deterministic(mindspore=False):
        assert traced_torch_silus() == [True] * 5
    assert traced_torch_silus() == [False] * 5


def test_torch_silu_inplace_writes_and_returns_its_argument() -> None:
    with deterministic(mindspore=False):
        for call in (lambda t: torch.nn.functional.silu(t, inplace=True), torch.nn.SiLU(inplace=True)):
            x = torch.tensor(X)
            y = call(x)
            assert y is x
            assert torch.equal(x, torch.tensor(X) * torch.sigmoid(torch.tensor(X)))
        kept = torch.tensor(X)
        assert torch.nn.functional.silu(kept) is not kept and torch.equal(kept, torch.tensor(X))


def test_functions_copied_into_other_modules_are_replaced_and_restored() -> None:
    import types

    holder = types.ModuleType("somebody_elses_model")
    holder.activation = torch.nn.functional.silu  # type: ignore[attr-defined]
    sys.modules["somebody_elses_model"] = holder
    original = torch.nn.functional.silu
    try:
        with deterministic(mindspore=False):
            assert holder.activation is torch.nn.functional.silu is not original
        assert holder.activation is torch.nn.functional.silu is original
    finally:
        del sys.modules["somebody_elses_model"]


def mindspore_silus() -> list[object]:
    from mindspore import mint, nn, ops

    return [
        ops.silu,
        ops.function.silu,
        mint.nn.functional.silu,
        nn.SiLU(),
        mint.nn.SiLU(),
        mint.nn.SiLU(inplace=True),
        ops.auto_generate.SiLU(),
        lambda t: mint.nn.functional.silu(t, inplace=True),
    ]


def test_mindspore_silu_is_sigmoid_times_x_every_way() -> None:
    from mindspore import Tensor, mint, ops

    expected = (Tensor(X) * ops.sigmoid(Tensor(X))).asnumpy()
    functions = (ops.silu, ops.function.nn_func.silu, mint.nn.functional.silu, ops.auto_generate.SiLU.__call__)
    sigmoid = ops.sigmoid
    with deterministic(torch=False):
        for silu in mindspore_silus():
            calls = []

            def counted(x, calls=calls):  # type: ignore[no-untyped-def]
                calls.append(x)
                return sigmoid(x)

            ops.sigmoid = counted
            try:
                x = Tensor(X)
                y = silu(x)  # type: ignore[operator]
            finally:
                ops.sigmoid = sigmoid
            assert len(calls) == 1
            np.testing.assert_array_equal(y.asnumpy(), expected)
        x = Tensor(X)
        assert mint.nn.functional.silu(x, inplace=True) is x
        np.testing.assert_array_equal(x.asnumpy(), expected)
    after = (ops.silu, ops.function.nn_func.silu, mint.nn.functional.silu, ops.auto_generate.SiLU.__call__)
    assert all(old is new for old, new in zip(functions, after, strict=True))


def flags() -> tuple[object, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        dict(os.environ),
        torch.nn.functional.silu,
    )


def test_everything_is_restored_even_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INF_NAN_MODE_ENABLE", "0")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.delenv("LCCL_DETERMINISTIC", raising=False)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = flags()
        with pytest.raises(KeyError), deterministic():
            assert {n: os.environ[n] for n, *_ in ENVIRONMENT} == {n: v for n, v, *_ in ENVIRONMENT}
            assert flags()[:4] == (True, False, False, False)
            raise KeyError("inside")
        assert flags() == before
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.use_deterministic_algorithms(False)


def test_guards_nest_and_mindspores_once_only_switch_is_reported() -> None:
    with deterministic() as outer:
        silu = torch.nn.functional.silu
        with deterministic() as inner:
            assert torch.nn.functional.silu is not silu
        assert torch.nn.functional.silu is silu
    (again,) = [a for a in inner.actions if a.switch == "mindspore.set_deterministic"]
    assert again.applied and again.old == "ON" and "once a process" in again.note
    assert [a.switch for a in outer.actions] == [a.switch for a in inner.actions]
    # On the CPU HF32 does not exist; the report must not claim it was switched.
    hf32 = [a for a in outer.actions if "hf32" in a.switch]
    assert len(hf32) == 2 and not any(a.applied for a in hf32)


def test_only_the_named_backend_is_touched() -> None:
    with deterministic(torch=False) as done:
        assert "CUBLAS_WORKSPACE_CONFIG" not in [a.switch for a in done.actions]
        assert not any("torch" in a.switch for a in done.actions)
    with deterministic(mindspore=False) as done:
        assert not any("mindspore" in a.switch or "ASCEND" in a.switch for a in done.actions)


def run_fresh(program: str) -> str:
    """The program's output from a process in which nothing is imported yet."""
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_environment_is_set_before_the_backend_is_imported() -> None:
    # An import hook notes the environment at the moment MindSpore's package is looked for.
    out = run_fresh(
        """
        import os, sys
        class Note:
            def find_spec(self, name, path=None, target=None):
                if name == "mindspore":
                    print("at import", os.environ.get("MS_ASCEND_CHECK_OVERFLOW_MODE"))
        sys.meta_path.insert(0, Note())
        from ckptbridge.verification.numerics import deterministic
        assert "mindspore" not in sys.modules
        with deterministic(torch=False) as done:
            pass
        (mode,) = [a for a in done.actions if a.switch == "MS_ASCEND_CHECK_OVERFLOW_MODE"]
        print("late" if "already imported" in mode.note else "in time", mode.old)
        (once,) = [a for a in done.actions if a.switch == "mindspore.set_deterministic"]
        print(once.old, once.new, once.applied)
        """
    )
    assert "at import INFNAN_MODE" in out and "in time unset" in out and "OFF ON True" in out


@pytest.mark.parametrize(("missing", "extra"), [("torch", "ckptbridge[torch]"), ("mindspore", "ckptbridge[mindspore]")])
def test_a_missing_backend_names_the_extra_and_leaves_no_trace(missing: str, extra: str) -> None:
    out = run_fresh(
        f"""
        import os, sys
        sys.modules["{missing}"] = None  # what Python itself uses for "cannot be imported"
        from ckptbridge.errors import BackendError
        from ckptbridge.verification.numerics import deterministic
        before = dict(os.environ)
        try:
            with deterministic({missing}=True, {"mindspore" if missing == "torch" else "torch"}=False):
                print("entered")
        except BackendError as error:
            print(error.remedy, dict(os.environ) == before)
        """
    )
    assert extra in out and "True" in out and "entered" not in out
