"""Casts against torch's, exact arithmetic, and their counts."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptbridge.conversion.cast import FLOAT_TARGETS, CastCount, cast_target, cast_words, check_cast, lossless
from ckptbridge.errors import DTypeError
from ckptbridge.formats.dtypes import BY_NAME, dtype_named

SIXTEEN_BITS = np.arange(1 << 16, dtype=np.uint16)
RNG = np.random.default_rng(7)


def torch_cast(words: np.ndarray, source: str, target: str) -> np.ndarray:
    """What torch makes of the words, as float64 values."""
    signed = torch.from_numpy(words.view(np.uint8 if words.itemsize == 1 else f"i{words.itemsize}").copy())
    return signed.view(getattr(torch, source)).to(getattr(torch, target)).double().numpy()


def values(words: np.ndarray, dtype: str) -> np.ndarray:
    return torch_cast(words, dtype, "float64")


@pytest.mark.parametrize("target", FLOAT_TARGETS)
@pytest.mark.parametrize("source", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"])
def test_every_small_word_is_cast_as_torch_does(source: str, target: str) -> None:
    words = SIXTEEN_BITS if BY_NAME[source].itemsize == 2 else np.arange(256, dtype=np.uint8)
    got, _ = cast_words(words, BY_NAME[source], BY_NAME[target])
    assert got.dtype == BY_NAME[target].word
    assert np.array_equal(values(got, target), torch_cast(words, source, target), equal_nan=True)


@pytest.mark.parametrize("target", ["float16", "bfloat16", "float64"])
def test_random_float32_words_are_cast_as_torch_does(target: str) -> None:
    words = RNG.integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    got, _ = cast_words(words, BY_NAME["float32"], BY_NAME[target])
    assert np.array_equal(values(got, target), torch_cast(words, "float32", target), equal_nan=True)


def test_ties_go_to_even_and_nan_stays_nan() -> None:
    words = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF], np.uint32)
    got, lost = cast_words(words, BY_NAME["float32"], BY_NAME["bfloat16"])
    assert got[:3].tolist() == [0x3F80, 0x3F82, 0x3F81]
    assert np.isnan(values(got[3:5], "bfloat16")).all()
    assert got[5] == 0x7F80
    assert lost == CastCount(overflow=1, underflow=0)


@given(st.lists(st.floats(width=64, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_float64_to_bfloat16_rounds_once(numbers: list[float]) -> None:
    words = np.array(numbers).view(np.uint64)
    got, _ = cast_words(words, BY_NAME["float64"], BY_NAME["bfloat16"])
    for x, word in zip(numbers, got.tolist(), strict=True):
        chosen = values(np.array([word], np.uint16), "bfloat16")[0]
        if not np.isfinite(chosen):
            # Halfway between the largest bfloat16 and the next power of two, or beyond.
            assert abs(Fraction(x)) >= Fraction(2) ** 128 - Fraction(2) ** 119
            continue
        error = abs(Fraction(x) - Fraction(float(chosen)))
        magnitude = word & 0x7FFF
        for neighbour in {max(0, magnitude - 1), min(0x7F7F, magnitude + 1)} - {magnitude}:
            other = float(values(np.array([neighbour | word & 0x8000], np.uint16), "bfloat16")[0])
            distance = abs(Fraction(x) - Fraction(other))
            assert error < distance or (error == distance and magnitude % 2 == 0)


def test_a_double_rounding_trap_is_avoided() -> None:
    # A hair above the middle of two bfloat16s: float32 would round it to the middle, then to even (down).
    words = np.array([1.0 + 2.0**-8 + 2.0**-40]).view(np.uint64)
    got, _ = cast_words(words, BY_NAME["float64"], BY_NAME["bfloat16"])
    assert got.tolist() == [0x3F81]


def test_overflow_and_underflow_are_counted_apart_from_infinities_and_zeros() -> None:
    numbers = np.array([1e5, -1e5, 1e-9, -1e-9, 0.0, -0.0, np.inf, -np.inf, np.nan, 1.0], np.float32)
    got, lost = cast_words(numbers.view(np.uint32), BY_NAME["float32"], BY_NAME["float16"])
    assert lost == CastCount(overflow=2, underflow=2)
    assert np.isinf(values(got, "float16")[[0, 1, 6, 7]]).all()


def test_lossless_casts_count_nothing_and_come_back() -> None:
    for source, target in [("bfloat16", "float32"), ("float16", "float32"), ("float16", "float64")]:
        assert lossless(BY_NAME[source], BY_NAME[target])
        there, lost = cast_words(SIXTEEN_BITS, BY_NAME[source], BY_NAME[target])
        back, _ = cast_words(there, BY_NAME[target], BY_NAME[source])
        number = ~np.isnan(values(SIXTEEN_BITS, source))
        assert not lost
        assert np.array_equal(back[number], SIXTEEN_BITS[number])
    assert not lossless(BY_NAME["float16"], BY_NAME["bfloat16"])
    assert not lossless(BY_NAME["bfloat16"], BY_NAME["float16"])


def test_integers_are_cast_only_when_they_fit() -> None:
    fits = np.array([-5, 7], np.int64).view(np.uint64)
    got, _ = cast_words(fits, BY_NAME["int64"], BY_NAME["int32"])
    assert got.view(np.int32).tolist() == [-5, 7]
    with pytest.raises(DTypeError, match="do not fit"):
        cast_words(np.array([1 << 40], np.uint64), BY_NAME["int64"], BY_NAME["int32"])


@pytest.mark.parametrize(("source", "target"), [("int64", "float32"), ("bool", "bfloat16"), ("float32", "int8")])
def test_what_is_no_number_of_that_kind_is_never_cast(source: str, target: str) -> None:
    with pytest.raises(DTypeError, match="no cast"):
        check_cast(BY_NAME[source], BY_NAME[target])


@pytest.mark.parametrize(
    ("name", "sources", "what"),
    [
        ("int8", ["bfloat16", "int64"], "There is no cast from bfloat16 to int8."),
        ("float8_e4m3fn", ["float32", "float16"], "There is no cast from float16 or float32 to float8_e4m3fn."),
        ("bool", ["int64"], "There is no cast from a floating dtype to bool."),
        ("floaty", ["float32"], "There is no dtype 'floaty'."),
    ],
)
def test_what_nothing_is_cast_to_is_said_of_the_option(name: str, sources: list[str], what: str) -> None:
    with pytest.raises(DTypeError) as caught:
        cast_target(name, (BY_NAME[source] for source in sources))
    assert caught.value.what == what
    assert caught.value.where == {"option": f"--dtype {name}"}
    offered = caught.value.remedy.partition(": ")[2].partition(";")[0].split(", ")
    assert [cast_target(word, ()).name for word in offered] == list(FLOAT_TARGETS)


def test_short_names_of_dtypes() -> None:
    assert dtype_named("bf16") is BY_NAME["bfloat16"]
    with pytest.raises(DTypeError, match="no dtype 'float12'"):
        dtype_named("float12")
