"""How the errors of a table gain their place, and a misspelt name its right one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

from ckptbridge.errors import ConfigError, ProofError, ShapeError, TableError


@contextmanager
def located(**where: object) -> Iterator[None]:
    """Add ``where`` to the errors that come from inside; what the error already says wins."""
    try:
        yield
    except (TableError, ConfigError, ProofError, ShapeError) as error:
        raise type(error)(error.what, remedy=error.remedy, **{**where, **error.where}) from error


def suggestion(word: str, known: Iterable[str]) -> str:
    """``"Did you mean 'axes'?"``, or nothing when no name is near."""
    # The comparison is quadratic in the length: a name from elsewhere may be very long.
    close = get_close_matches(word[:100], sorted(known), n=1, cutoff=0.6)
    return f"Did you mean '{close[0]}'?" if close else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """``"Did you mean 'axes'?"``, or the names there are when none is near, or nothing."""
    names = sorted(known)
    listed = f"There is: {', '.join(names[:40])}{' ...' if len(names) > 40 else ''}." if names else ""
    return suggestion(word, names) or listed


def shorten(value: object, limit: int = 60) -> str:
    """``repr(value)``, cut: it may come from a hostile file."""
    # A container's repr is built whole before it is cut, so only its kind is shown when it is large.
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        value = value[:limit]
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
