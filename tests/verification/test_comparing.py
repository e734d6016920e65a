"""What one comparison counts, against the values themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ckptbridge.formats.dtypes import BY_NAME
from ckptbridge.verification.comparing import Found


def words_of(values: torch.Tensor, offset: int) -> np.ndarray:
    """The tensor's words, ``offset`` bytes into a buffer, as a file may have them."""
    data = values.contiguous().view(torch.uint8).numpy()
    buffer = np.zeros(data.size + 16, np.uint8)
    buffer[offset : offset + data.size] = data
    size = values.element_size()
    return np.ndarray(values.numel(), f"<u{size}", buffer.data, offset)


@pytest.mark.parametrize("offset", [0, 1, 2])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("odd", [[], ["inf"], ["-inf"], ["nan"], ["-nan"], ["inf", "-inf", "nan", "-nan", "nan"]])
def test_every_nan_and_infinity_is_counted(name: str, odd: list[str], offset: int) -> None:
    dtype = getattr(torch, name)
    info = torch.finfo(dtype)
    values = torch.tensor([0.0, -0.0, 1.5, -1.5, info.max, info.min, info.tiny, -info.tiny], dtype=dtype)
    strange = torch.tensor([abs(float(o.strip("-"))) for o in odd], dtype=dtype)
    strange = torch.where(torch.tensor([o.startswith("-") for o in odd], dtype=torch.bool), -strange, strange)
    values = torch.cat([values, strange])
    found = Found()
    found.compare(0, words_of(values, 0), words_of(values, offset), BY_NAME[name])
    assert found.nan == int(torch.isnan(values).sum()) and found.inf == int(torch.isinf(values).sum())
    assert found.differing == 0 and found.first is None


@pytest.mark.parametrize("offset", [0, 1])
def test_differences_are_counted_and_placed(offset: int) -> None:
    expected = torch.arange(100, dtype=torch.bfloat16)
    actual = expected.clone()
    actual[[7, 30, 31]] += 2
    found = Found()
    found.compare(1000, words_of(expected, 0), words_of(actual, offset), BY_NAME["bfloat16"])
    assert (found.differing, found.first, found.max_abs) == (3, 1007, 2.0)
    assert found.index_in((20, 100)) == (10, 7)
