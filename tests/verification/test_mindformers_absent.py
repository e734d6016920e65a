"""``--ms-net mindformers`` where MindFormers is not installed, and with a compute type that it does not have here."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from ckptbridge.errors import BackendError, UsageError
from ckptbridge.verification.forward import check_options
from ckptbridge.verification.options import ForwardOptions


@pytest.mark.skipif(find_spec("mindformers") is not None, reason="mindformers is installed")
def test_missing_package_is_named_with_its_installation() -> None:
    with pytest.raises(BackendError, match="'mindformers'") as caught:
        check_options(ForwardOptions(ms_net="mindformers", dtype="float32"))
    assert "pip install --no-deps mindformers==2.1.0" in caught.value.remedy


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_only_float32(dtype: str) -> None:
    with pytest.raises(UsageError, match=f"{dtype} is asked for") as caught:
        check_options(ForwardOptions(ms_net="mindformers", dtype=dtype))
    assert caught.value.remedy == "Give --dtype float32."


def test_a_network_of_the_users_own_is_not_held_to_it() -> None:
    check_options(ForwardOptions(ms_net="mine:load", dtype="float64"))
