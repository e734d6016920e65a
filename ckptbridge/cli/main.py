"""The ``ckptbridge`` command: finds the subcommand, prints errors, sets the exit code."""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import click

from ckptbridge import __version__
from ckptbridge.errors import (
    BackendError,
    CkptBridgeError,
    InternalError,
    InterruptedByUser,
    OutputError,
    UsageError,
    printable,
)

# Subcommands are imported when they are called, so that --help stays quick.
_COMMANDS = {
    "convert": ("ckptbridge.cli.convert", "Convert a checkpoint: pt2ms or ms2pt."),
    "verify": ("ckptbridge.cli.verify", "Judge a handoff: weights bit for bit, logits on both backends."),
    "inspect": ("ckptbridge.cli.inspect", "Look into a checkpoint: contents, history, statistics, fitting tables."),
    "diff": ("ckptbridge.cli.diff", "Compare two checkpoints, across formats and, by a table, across sides."),
    "doctor": ("ckptbridge.cli.doctor", "Say what of this machine works: packages, devices, numerics switches."),
    "mappings": ("ckptbridge.cli.mappings", "List, show, prove and suggest mapping tables."),
}


class _ReaderGone(Exception):
    """Whoever read our output has gone."""


class _LazyGroup(click.Group):
    """A group whose commands are imported on use."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # click would exit with 1, which says that a claim does not hold.
            raise _ReaderGone from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(_COMMANDS[cmd_name][0])
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if args[:2] == ["verify", "activations"] and not os.path.exists("activations"):  # noqa: PTH110 - no import for it
            from ckptbridge.cli.verify import activations

            return "verify activations", activations, args[2:]
        if name not in _COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            from ckptbridge.tables.messages import nearest

            # click would look for the nearest among commands that are imported, and there are none.
            raise click.UsageError(f"No such command '{printable(name)}'. {nearest(name, _COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ckptbridge")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Hand model checkpoints between PyTorch and MindSpore: exactly, and with proof.

    Exit codes: 0 done or holds, 1 the claim does not hold, 2 cannot be done or judged, 130 and 143 stopped by
    SIGINT and SIGTERM.
    """
    ctx.obj = debug


_PATIENCE = 5.0  # seconds for a clean stop; some launchers send a signal twice at once
_asked: list[tuple[float, int]] = []


def _stop(number: int, frame: FrameType | None) -> None:
    """Stop cleanly; a signal long after the first one ends the process at once, which loses nothing either."""
    _asked.append((time.monotonic(), number))
    if len(_asked) == 1:
        raise InterruptedByUser(number)
    if _asked[-1][0] - _asked[0][0] > _PATIENCE:
        os._exit(128 + number)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit. No error reaches the user as a traceback, unless --debug asks for it."""
    arguments = list(sys.argv[1:] if args is None else args)
    _asked.clear()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A name that the terminal's encoding lacks is escaped; it must not end the command.
            stream.reconfigure(errors="backslashreplace")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        code = cli.main(arguments, prog_name="ckptbridge", standalone_mode=False)
    except click.exceptions.Exit as e:
        code = e.exit_code
    except click.ClickException as e:
        e.show()
        code = 2
        if "--json" in arguments:
            _print_json(UsageError(e.format_message(), remedy="See --help."))
    except _ReaderGone:
        # Say nothing more, and let no flush fail at exit.
        sys.stdout = sys.stderr = open("/dev/null", "w")  # noqa: SIM115, PTH123
        code = 141
    except Exception as e:
        if "--debug" in arguments:
            traceback.print_exc()
        error = as_ours(e)
        click.echo(f"error: {error}", err=True)
        code = error.exit_code
        if "--json" in arguments:
            _print_json(error)
    if args is None and _asked:
        # A framework that is torn down while it works, or while it is being imported, ends the process with an abort.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)
    sys.exit(code if isinstance(code, int) else 0)


# What the place of an output can bring about; what else the system says was not foreseen.
_OF_THE_PLACE = frozenset([errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS])


def as_ours(e: Exception) -> CkptBridgeError:
    """What the user is told of an error, which may be from outside the family."""
    if _asked and (isinstance(e, BackendError) or not isinstance(e, CkptBridgeError)):
        # A library that was stopped in the middle of something, its own import included, says so in its own way.
        return InterruptedByUser(_asked[0][1])
    if isinstance(e, CkptBridgeError):
        return e
    if isinstance(e, ImportError):
        return BackendError(
            f"A package cannot be imported: {e}.", remedy="'ckptbridge doctor' says what is broken, and what mends it."
        )
    if isinstance(e, OSError) and e.errno in _OF_THE_PLACE:
        return OutputError(
            f"The system says: {e.strerror}.",
            remedy="Make room there, or see to the permission, and run again.",
            file=e.filename if e.filename is not None else "standard output",
        )
    return InternalError(e)


def _print_json(e: CkptBridgeError) -> None:
    import json

    click.echo(json.dumps({"error": e.to_dict()}))


if __name__ == "__main__":
    main()
