"""The files of verify's --report, --junit and --html: none tells of an earlier run, and none replaces anything else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ckptbridge.errors import CkptBridgeError, OutputError, UsageError

if TYPE_CHECKING:
    from ckptbridge.verification.report import VerifyReport

# How the files begin that verify writes; an empty one is nobody's loss.
_BEGINNINGS = (b'{\n "actions":', b'<?xml version="1.0" encoding="UTF-8"?>\n<testsuites', b"<!doctype html>")


class ReportFiles:
    """The destinations by option name; None where an option is not given.

    Raises UsageError for one path given twice, and for a file that is no report: a slip of the keyboard must not cost
    a checkpoint.
    """

    def __init__(self, options: Mapping[str, Path | None]) -> None:
        self._paths = {name: path for name, path in options.items() if path is not None}
        seen: dict[Path, str] = {}
        for name, path in self._paths.items():
            first = seen.setdefault(path.resolve(), name)
            if first != name:
                raise UsageError(
                    f"--{first} and --{name} name one file.", remedy="Name two.", option=f"--{name}", file=path
                )
            if path.is_file() and not _is_report(path):
                raise UsageError(
                    "There is a file which no verify has written.",
                    remedy="Name another place, or remove it.",
                    option=f"--{name}",
                    file=path,
                )

    def claim(self) -> None:
        """Remove the reports of an earlier run; raises OutputError where none can be written."""
        for path in self._paths.values():
            if path.is_file() or not path.exists():  # a pipe or a device stays as it is
                _put(path, "")
                path.unlink()

    def write(self, result: VerifyReport) -> None:
        """Write what was found."""
        for name, path in self._paths.items():
            _put(path, _rendered(name, result))

    def write_error(self, paths: tuple[Path, ...], error: CkptBridgeError) -> None:
        """Write that nothing could be judged, wherever that is possible."""
        if self._paths:
            from ckptbridge.verification.session import unjudged

            result = unjudged(paths, error)
            for name, path in self._paths.items():
                with suppress(OutputError):  # there is an error to be told already
                    _put(path, _rendered(name, result))


def _rendered(name: str, result: VerifyReport) -> str:
    from ckptbridge.verification.report_html import to_html
    from ckptbridge.verification.report_json import to_json
    from ckptbridge.verification.report_junit import to_junit

    return {"report": to_json, "junit": to_junit, "html": to_html}[name](result)


def _is_report(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        start = file.read(64)
        return not start or start.lower().startswith(tuple(b.lower() for b in _BEGINNINGS))
    return False


def _put(path: Path, text: str) -> None:
    """Write the file whole or not at all; a pipe or a device, as it is."""
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else str(e)
        raise OutputError(f"The report cannot be written: {reason}.", remedy="Name another place.", file=path) from None
