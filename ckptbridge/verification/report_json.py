"""The report as JSON, and back.

The file is one object, ``VerifyReport`` field by field (see ``report.py`` and ``metrics.py`` for what
each means), with three derived fields at the top for readers that only want the outcome:

    schema       1; a reader must refuse a number it does not know
    verdict      "holds", "fails" or "unjudged"
    exit_code    0, 1 or 2
    reason       why, unless it holds
    pytorch, mindspore        the two sides, as the user named them
    weights      null or {verdict, reason, digests, notes, tensors: [{name, sources, status, ...}]}; a name
                 is of the side that the conversion wrote, its sources of the other
    forward      null or {verdict, reason, dtype, tokens, atol, rtol, metrics, floor, judgement,
                 stages: [{name, metrics, noise, feeds}], first_bad, message, repeatable, hints}
    controls     [{fault, tensor, caught, max_abs, note}]
    actions      [{switch, old, new, applied, note}]
    environment  {versions, devices, platform, command}
    provenance, notes, tool
    error        why nothing could be judged, or ""

``metrics.frontier`` is a list of pairs (|b|, |a-b|): every element passes at (atol, rtol) if
and only if all of these do (and ``nan_one``, ``nan_both``, ``inf_mismatch`` are 0), which is how a
report is judged again without its logits. JSON has no infinity or NaN: numbers that are, are the strings
"inf", "-inf" and "nan".
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from ckptbridge.errors import FormatError
from ckptbridge.verification.encoding import encode
from ckptbridge.verification.report import SCHEMA, VerifyReport

_DERIVED = ("verdict", "exit_code", "reason")


def to_json(report: VerifyReport) -> str:
    """The report as indented JSON with sorted keys."""
    return json.dumps(to_dict(report), indent=1, sort_keys=True, allow_nan=False) + "\n"


def to_dict(report: VerifyReport) -> dict[str, object]:
    """The report as JSON's own types."""
    derived = {name: getattr(report, name) for name in _DERIVED}
    return {**derived, **encode(report)}


def from_json(text: str) -> VerifyReport:
    """The report in ``text``. Raises FormatError for anything that is not a report of this schema."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"The report is not JSON: {error}", remedy="Give a file that --report wrote.") from error
    if not isinstance(data, dict) or "verdict" not in data:
        raise FormatError("The file is JSON and no verify report.", remedy="Give a file that --report wrote.")
    if data.get("schema") != SCHEMA:
        raise FormatError(
            f"The report has schema {data.get('schema')!r}; this version reads {SCHEMA}.",
            remedy="Use the ckptbridge version that wrote it, or verify again.",
        )
    report = _decode(VerifyReport, {k: v for k, v in data.items() if k not in _DERIVED}, "report")
    return typing.cast(VerifyReport, report)


def _decode(kind: Any, value: Any, at: str) -> Any:
    """``value`` as the type ``kind``: the dataclasses of a report and what they are made of."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (kind,) = (a for a in arguments if a is not type(None))
        return _decode(kind, value, at)
    if origin is typing.Literal:
        if value not in arguments:
            raise _wrong(at, " or ".join(map(str, arguments)))
        return value
    if kind is object:
        return value
    if is_dataclass(kind):
        return _decode_dataclass(typing.cast("type[Any]", kind), _expect(dict, value, at), at)
    if origin is tuple:
        items = _expect(list, value, at)
        kinds = [arguments[0]] * len(items) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) != len(items):
            raise _wrong(at, f"a list of {len(kinds)}")
        return tuple(_decode(k, item, f"{at}[{n}]") for n, (k, item) in enumerate(zip(kinds, items, strict=True)))
    if origin is not None and issubclass(origin, Mapping):
        return {k: _decode(arguments[1], v, f"{at}.{k}") for k, v in _expect(dict, value, at).items()}
    if kind is float:
        if value in ("inf", "-inf", "nan"):
            return float(value)
        return float(_expect((int, float), value, at))
    return _expect(kind, value, at)


def _decode_dataclass(kind: type[Any], data: dict[str, Any], at: str) -> Any:
    hints = typing.get_type_hints(kind)
    unknown, missing = set(data) - set(hints), set(hints) - set(data)
    if unknown or missing:
        raise _wrong(f"{at}.{min(unknown or missing)}", "no such field" if unknown else "a value")
    return kind(**{name: _decode(hints[name], data[name], f"{at}.{name}") for name in hints})


def _expect(kind: Any, value: Any, at: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _wrong(at, getattr(kind, "__name__", "number"))
    return value


def _wrong(at: str, expected: str) -> FormatError:
    return FormatError(f"The report is damaged at {at}: expected {expected}.", remedy="Verify again.")
