"""The one exception family: each error says what happened, where, and what to do.

Commands print these and nothing else; ``exit_code`` is what the process returns. Codes are stable
names for scripts (``--json`` carries them) and are listed in the README.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import ClassVar

# Control characters in names from files must not reach a terminal.
_ESCAPES = {c: f"\\x{c:02x}" for c in (*range(0x20), *range(0x7F, 0xA0))}
# Bidirectional overrides can make a printed name read as another one.
_ESCAPES |= {c: f"\\u{c:04x}" for c in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F)}
# Undecodable bytes of a file name arrive as lone surrogates, which no stream can encode.
_ESCAPES |= {c: f"\\u{c:04x}" for c in range(0xD800, 0xE000)}


def printable(text: object) -> str:
    """``text`` with control characters, direction overrides and surrogates escaped, safe for a terminal."""
    return str(text).translate(_ESCAPES)


class CkptBridgeError(Exception):
    """Something that cannot be done or judged.

    ``what`` is one sentence; ``remedy`` says what to do next (without one,
    what usually helps with errors of this kind); the keyword fields (``file``,
    ``tensor``, ``rule``, ``offset``, ``option`` ...) say where, and reach ``--json`` unchanged.
    """

    code: ClassVar[str] = "error"
    usual_remedy: ClassVar[str] = "Check the call against 'ckptbridge --help'."
    exit_code: int = 2

    def __init__(self, what: str, *, remedy: str = "", **where: object) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy or self.usual_remedy
        self.where: Mapping[str, object] = {k: v for k, v in where.items() if v is not None}

    def __str__(self) -> str:
        lines = [printable(self.what)]
        lines += [f"  {key}: {printable(value)}" for key, value in self.where.items()]
        if self.remedy:
            # A remedy may hold several lines (a rule to paste); each is escaped by itself.
            first, *rest = self.remedy.splitlines()
            lines.append(f"  remedy: {printable(first)}")
            lines += [f"    {printable(line)}" for line in rest]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """The error as ``--json`` prints it."""
        return {
            "code": self.code,
            "what": self.what,
            "where": {k: v if isinstance(v, (int, float, bool)) else str(v) for k, v in self.where.items()},
            "remedy": self.remedy,
        }


class UsageError(CkptBridgeError):
    """The call does not fit together: a wrong option, or two that exclude each other."""

    code = "usage"
    usual_remedy = "Check the call against 'ckptbridge COMMAND --help'."


class FormatError(CkptBridgeError):
    """A file is not what its format requires, or holds what it must not."""

    code = "format"
    usual_remedy = "Get the file again from where it came; 'ckptbridge inspect' says what it holds."


class UnsupportedError(CkptBridgeError):
    """A file is recognised, and this tool does not convert such files."""

    code = "unsupported"
    usual_remedy = "Convert it to a plain state dict with the tool that wrote it."


class TableError(CkptBridgeError):
    """A mapping table is malformed; the fields name file, rule number and field."""

    code = "table"
    usual_remedy = "Correct the table; mappings/README.md teaches its language."


class ProofError(CkptBridgeError):
    """A mapping table is well formed and still not a bijection for this config."""

    code = "proof"
    usual_remedy = "Correct the table; 'ckptbridge mappings check FILE' proves it again."


class ConfigError(CkptBridgeError):
    """The model's config lacks a value that the table needs, or holds an impossible one."""

    code = "config"
    usual_remedy = "Correct the model's config.json, or give another with --config."


class CoverageError(CkptBridgeError):
    """Tensors that the table expects are missing, or tensors are there that it does not know."""

    code = "coverage"
    usual_remedy = "Compare the names with 'ckptbridge inspect' and 'ckptbridge mappings show'."


class ShapeError(CkptBridgeError):
    """A tensor's shape is not the one that table and config require."""

    code = "shape"
    usual_remedy = "Check that the config belongs to the checkpoint."


class DTypeError(CkptBridgeError):
    """A dtype that the target format cannot hold, or a cast that would lose what must not be lost."""

    code = "dtype"
    usual_remedy = "Choose another --dtype or another format."


class OutputError(CkptBridgeError):
    """The output cannot be written: it exists, is not permitted, or there is no room."""

    code = "output"
    usual_remedy = "Choose a destination that can be written."


class SourceChangedError(CkptBridgeError):
    """A source file vanished or changed between planning and reading."""

    code = "source-changed"
    usual_remedy = "Run again when nothing writes to the source."


class BackendError(CkptBridgeError):
    """A framework that a step needs is missing or does not work."""

    code = "backend"
    usual_remedy = "'ckptbridge doctor' says what is installed and works."


class InternalError(CkptBridgeError):
    """Something that this project did not foresee: a fault in it, or a machine that gave out."""

    code = "internal"

    def __init__(self, cause: Exception) -> None:
        if isinstance(cause, MemoryError):
            super().__init__("There is not enough memory.", remedy="Close other programs, or take a larger machine.")
        else:
            super().__init__(
                f"Something that was not foreseen: {type(cause).__name__}: {cause}",
                remedy="Run again as 'ckptbridge --debug ...' to see where, and report it with that text.",
            )


class InterruptedByUser(CkptBridgeError):
    """The run was stopped by a signal; the exit code is the shell's 128 + its number."""

    code = "interrupted"

    def __init__(self, number: int, *, remedy: str = "Run the same command again.", **where: object) -> None:
        super().__init__(f"Stopped by {signal.Signals(number).name}.", remedy=remedy, **where)
        self.signal = number
        self.exit_code = 128 + number
