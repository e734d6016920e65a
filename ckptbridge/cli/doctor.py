"""``ckptbridge doctor``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ckptbridge.verification.doctor import Diagnosis, Package


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object. Example: --json | jq .problems")
def command(as_json: bool) -> int:
    """Say what of this machine works: each package is really imported and used, in a process of its own.

    Exit code 0: nothing that was found is broken; 1: something is, with the command that mends it.

    Example: ckptbridge doctor
    """
    from ckptbridge.errors import printable
    from ckptbridge.verification.doctor import diagnose

    if sys.stderr.isatty():
        click.echo("importing torch, mindspore and what else is there; this takes a moment ...", err=True)
    found = diagnose()
    if as_json:
        click.echo(json.dumps(found.to_dict()))
    else:
        click.echo("\n".join(printable(line) for line in _lines(found)))
    return found.exit_code


def _lines(found: Diagnosis) -> Iterator[str]:
    yield f"{'python':13} {found.python:12} {found.executable}"
    for package in found.packages:
        yield f"{package.name:13} {package.version or '-':12} {_state(package)}"
    yield f"{'CANN':13} {found.cann or 'not found'}" + (f", {found.npus} NPUs" if found.npus else "")
    yield ""
    yield "environment variables of numerics; verify sets them for its own run:"
    width = max(len(name) for name, _, _ in found.numerics)
    for name, now, value in found.numerics:
        yield f"  {name:{width}}  {now}" + ("" if now == value else f" (verify: {value})")
    yield ""
    for where, problem in found.problems:
        yield f"problem: {where}: {problem.what}"
        yield f"  mend it: {problem.remedy}"
    if not found.problems:
        yield "nothing that was found is broken"


def _state(package: Package) -> str:
    if not package.found:
        return f"not installed; {package.needed_for}: {package.install}"
    if package.problems:
        return "BROKEN, see below"
    works = f"works on {', '.join(package.devices)}" if package.devices else "works"
    return ", ".join([works, *package.notes])
