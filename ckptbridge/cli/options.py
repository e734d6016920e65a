"""Option types that several commands share."""

from __future__ import annotations

import click

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}


class KeyValue(click.ParamType):  # type: ignore[type-arg]
    """``KEY=VALUE`` as a pair."""

    name = "key=value"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, equals, rest = str(value).partition("=")
        if not equals or not key:
            self.fail(f"'{value}' is not of the form KEY=VALUE.", param, ctx)
        return key.strip(), rest.strip()


def unique_keys(ctx: click.Context, param: click.Parameter, pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """The callback of a repeatable :class:`KeyValue` option: a dict, if no key is given twice."""
    found: dict[str, str] = {}
    for key, value in pairs:
        if key in found:
            raise click.BadParameter(f"'{key}' is given twice.", ctx, param)
        found[key] = value
    return found


class Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes, such as ``5GB`` (10^9) or ``512MiB`` (2^20)."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().upper()
        digits = text.rstrip("KMGTIB ")
        unit = text[len(digits) :].strip()
        try:
            size = int(float(digits) * _UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            self.fail(f"'{value}' is not a size; write it as 5GB or 512MiB.", param, ctx)
        if size <= 0:
            self.fail(f"'{value}' is not a positive size.", param, ctx)
        return size
