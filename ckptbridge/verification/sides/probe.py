"""Whether one package works: imported and used, in a process of its own.

:mod:`ckptbridge.verification.doctor` runs this file's text as ``python -c TEXT PACKAGE``, so it needs nothing but
the standard library and the package itself. It prints one JSON object: ``version``, ``devices`` and
``problems`` (what is wrong, and the command that mends it), or ``error`` when the import fails.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

_OLDER_NUMPY = "pip install 'numpy>=1.26,<2'"


def _numpy() -> dict[str, Any]:
    import numpy as np

    if float(np.arange(4, dtype=np.float64).sum()) != 6.0:
        return _answer(np.__version__, [], [("It adds wrongly.", "pip install --force-reinstall 'numpy>=1.26,<2'")])
    return _answer(np.__version__, [], [])


def _needs() -> dict[str, Any]:
    """What ckptbridge itself imports, beside NumPy."""
    from importlib import import_module

    problems = []
    for module, package in (
        *(("click", "click"), ("tqdm", "tqdm"), ("safetensors", "safetensors"), ("blake3", "blake3")),
        ("ml_dtypes", "ml-dtypes"),
        ("tomllib" if sys.version_info >= (3, 11) else "tomli", "tomli"),
    ):
        try:
            import_module(module)
        except Exception as error:
            problems.append((f"{module} cannot be imported: {_say(error)}", f"pip install --force-reinstall {package}"))
    return _answer("", [], problems)


def _torch() -> dict[str, Any]:
    import torch

    problems = []
    product = torch.eye(2, dtype=torch.float64) @ torch.ones(2, 2, dtype=torch.float64)
    if not bool((product == 1).all()):
        problems.append(("It multiplies wrongly.", "pip install --force-reinstall torch"))
    try:
        torch.ones(2).numpy()
    except RuntimeError as error:  # a torch of before NumPy 2
        problems.append((f"It cannot hand tensors to NumPy: {_say(error)}", "pip install --upgrade torch"))
    devices = ["CPU"]
    if torch.cuda.is_available():
        devices += [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    return _answer(torch.__version__, devices, problems)


def _mindspore() -> dict[str, Any]:
    import mindspore as ms
    import numpy as np

    problems = []
    one = ms.Tensor(np.ones((2, 2)), ms.float64)
    if not bool((ms.ops.matmul(one, one).asnumpy() == 2).all()):
        problems.append(("It multiplies wrongly.", "pip install --force-reinstall 'mindspore>=2.10'"))
    trap = _bfloat16(ms)
    if trap:
        problems.append((trap, _OLDER_NUMPY))
    devices = ["CPU"]
    for name in ("ascend", "gpu"):
        context = getattr(ms.device_context, name, None)
        if context is not None and context.is_available():
            devices.append(f"{'Ascend' if name == 'ascend' else 'GPU'} ({context.device_count()})")
    return {**_answer(ms.__version__, devices, problems), "notes": [] if trap else ["bfloat16 tensors read back"]}


def _bfloat16(ms: Any) -> str:
    """What is wrong with reading a bfloat16 tensor; "" when its value comes back."""
    import numpy as np

    try:
        value = ms.Tensor([1.5], ms.bfloat16).asnumpy()
        if float(value.astype(np.float32)[0]) == 1.5:
            return ""
        what = f"1.5 comes back as {value[0]!r}"
    except Exception as error:
        what = _say(error)
    return f"A bfloat16 tensor cannot be read with NumPy {np.__version__}: {what}"


def _transformers() -> dict[str, Any]:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM  # the package itself loads nothing before it is used

    assert AutoConfig and AutoModelForCausalLM
    return _answer(transformers.__version__, [], [])


def _mindformers() -> dict[str, Any]:
    import mindformers

    return _answer(mindformers.__version__, [], [])


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "needs": _needs,
    "numpy": _numpy,
    "torch": _torch,
    "mindspore": _mindspore,
    "transformers": _transformers,
    "mindformers": _mindformers,
}


def _answer(version: str, devices: list[str], problems: list[tuple[str, str]]) -> dict[str, Any]:
    return {"version": version, "devices": devices, "problems": problems}


def _say(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def main(name: str) -> None:
    """Print what the probe ``name`` finds; whatever else is printed goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        found = PROBES[name]()
    except BaseException as error:
        found = {"error": _say(error)}
    out.write(json.dumps(found))
    out.flush()
    os._exit(0)  # what a backend does at exit is not judged here, and could hang


if __name__ == "__main__":
    main(sys.argv[1])
