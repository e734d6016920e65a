"""The fuzz targets without a fuzzer: their seeds, what the fuzzer once found, and mutations for some seconds."""

from __future__ import annotations

import random
import time
from pathlib import Path

import fuzz_targets
import pytest

FOUND = Path(__file__).parents[1] / "data" / "found"
SECONDS = 2.0


def corpus(name: str) -> list[bytes]:
    _, seeds = fuzz_targets.TARGETS[name]
    return [*seeds(), *(path.read_bytes() for path in sorted((FOUND / name).glob("*")))]


@pytest.mark.parametrize("name", fuzz_targets.TARGETS)
def test_seeds_and_what_was_found(name: str) -> None:
    target, _ = fuzz_targets.TARGETS[name]
    for data in corpus(name):
        target(data)
    target(b"")


def test_what_was_found_belongs_to_a_target() -> None:
    assert {path.parent.name for path in FOUND.glob("*/*")} <= fuzz_targets.TARGETS.keys()


@pytest.mark.parametrize("name", fuzz_targets.TARGETS)
def test_mutations(name: str) -> None:
    target, _ = fuzz_targets.TARGETS[name]
    known = corpus(name)
    chance = random.Random(name)
    deadline = time.monotonic() + SECONDS
    count = 0
    while time.monotonic() < deadline or count < 50:
        data = mutated(known, chance)
        try:
            target(data)
        except BaseException as e:
            raise AssertionError(f"{type(e).__name__}: {e}, by {data!r}") from e
        count += 1


def mutated(known: list[bytes], chance: random.Random) -> bytes:
    """One of the known inputs with a few bytes changed, removed, repeated, or exchanged for another's."""
    data = bytearray(chance.choice(known))
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        at, size = chance.randrange(len(data) + 1), chance.choice((1, 1, 2, 4, 8, 32))
        other = chance.choice(known)
        start = chance.randrange(len(other) + 1)
        how = chance.randrange(6)
        if how == 0 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif how == 1:
            data[at : at + size] = chance.randbytes(size)
        elif how == 2:
            del data[at : at + size]
        elif how == 3:
            data[at:at] = data[max(0, at - size) : at]
        elif how == 4:
            data[at : at + size] = other[start : start + size]
        else:
            data[at : at + size] = chance.choice((b"\0", b"\xff", b"9", b"-1", b"\x7f", b"{", b"(")) * size
    return bytes(data)
