"""A table's text: the TOML file, and the parts that it includes, merged."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath

from ckptbridge.errors import TableError
from ckptbridge.tables.messages import nearest, shorten

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

MAX_BYTES = 256 * 1024  # of one file; the longest shipped table has a tenth of it
MAX_LINE = 4000  # characters; the TOML parser takes quadratic time over long dotted keys
MAX_FILES = 50
SCHEMA = 1

# What the top of a table says about itself; a part has none of it.
HEAD = ("family", "model_types", "target", "default")
SECTIONS = ("index", "sizes", "defaults", "layout", "strings", "roots", "fp8")
KEYS = ("schema", *HEAD, "summary", "include", *SECTIONS, "rule")


@dataclass(frozen=True, slots=True)
class RawRule:
    """A ``[[rule]]`` as written: its number in its file, from 1."""

    number: int
    file: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Source:
    """A table with its parts merged and not yet understood: ``head`` and ``sections`` are as TOML gives them."""

    head: Mapping[str, object]
    sections: Mapping[str, Mapping[str, object]]
    rules: tuple[RawRule, ...]

    @property
    def digest(self) -> str:
        """``sha256:`` over what was written, whatever the files are called and wherever they lie."""
        contents = {"head": self.head, "sections": self.sections, "rules": [r.fields for r in self.rules]}
        text = json.dumps(contents, sort_keys=True, separators=(",", ":"), default=str)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def shipped_directory() -> Path:
    """Where the shipped tables are: the installed package ``ckptbridge.mappings``."""
    return Path(str(resources.files("ckptbridge.mappings")))


def parse_toml(text: str, file: str) -> dict[str, object]:
    """TOML text as a dictionary. Raises TableError naming ``file`` and, from the parser, the line."""
    try:
        parsed: dict[str, object] = tomllib.loads(text)
    except RecursionError:
        raise TableError("The table is nested too deeply.", file=file) from None
    except ValueError as error:  # TOMLDecodeError, or an integer of more digits than Python reads
        raise TableError(f"The table is not valid TOML: {error}.", file=file) from None
    return parsed


def read_text(path: Path, file: str) -> str:
    """A table file's text. Raises TableError when it cannot be read, is too long, or is not UTF-8."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise TableError(f"The table cannot be read: {error.strerror}.", file=path) from None
    if len(raw) > MAX_BYTES:
        raise TableError(f"The table is longer than {MAX_BYTES} bytes.", file=file)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TableError("The table is not UTF-8.", file=file, offset=error.start) from None
    if any(len(line) > MAX_LINE for line in text.splitlines()):
        raise TableError(f"A line of the table is longer than {MAX_LINE} characters.", file=file)
    return text


Parsed = dict[Path, dict[str, object]]
"""Files that were read already, by their resolved path."""


def read_source(path: Path, parsed: Parsed | None = None) -> Source:
    """Read a table and everything that it includes; files in ``parsed`` are not read again, others put there.

    Included files come first, in order; of the sections, the later file wins key by key; rules are
    appended. A file that is reached twice counts once. Raises TableError for what cannot be read or
    parsed, an unknown section, an include that is missing, outside its tree, or a loop.
    """
    reader = _Reader(path.resolve().parent, {} if parsed is None else parsed)
    head = reader.add(path, path.name, ())
    return Source(head, reader.sections, tuple(reader.rules))


class _Reader:
    """Collects files in the order in which they count."""

    def __init__(self, tree: Path, parsed: Parsed) -> None:
        self.tree = tree
        self.parsed = parsed
        self.done: set[Path] = set()
        self.sections: dict[str, dict[str, object]] = {name: {} for name in SECTIONS}
        self.rules: list[RawRule] = []

    def add(self, path: Path, file: str, within: tuple[Path, ...]) -> dict[str, object]:
        """Read ``path``, its includes first; returns what its top says, but for the sections."""
        real = path.resolve()
        if real in within:
            raise TableError(f"'{file}' includes itself by way of other files.", file=within[-1].name, field="include")
        if real in self.done:
            return {}
        if len(self.done) + len(within) >= MAX_FILES:
            raise TableError(f"The table includes more than {MAX_FILES} files.", file=file, field="include")
        if real not in self.parsed:
            self.parsed[real] = parse_toml(read_text(path, file), file)
        data = self.parsed[real]
        _check_keys(data, file, part=bool(within))
        for name in _strings(data.get("include", []), file):
            found, shown = self.find(name, real.parent, file)
            self.add(found, shown, (*within, real))
        self.done.add(real)
        for section in SECTIONS:
            self.merge(section, _table(data.get(section, {}), file, section))
        rules = data.get("rule", [])
        if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
            raise TableError("Rules are written as [[rule]].", file=file, field="rule")
        self.rules += [RawRule(k, file, rule) for k, rule in enumerate(rules, 1)]
        return {key: data[key] for key in (*HEAD, "summary") if key in data}

    def merge(self, section: str, entries: dict[str, object]) -> None:
        """The later file wins key by key; [roots.NAME] is a section too."""
        merged = self.sections[section]
        for key, value in entries.items():
            old = merged.get(key)
            nested = section == "roots" and isinstance(old, dict) and isinstance(value, dict)
            merged[key] = {**old, **value} if nested else value  # type: ignore[dict-item]

    def find(self, name: str, folder: Path, file: str) -> tuple[Path, str]:
        """An included file: beside the including one, else below the table's folder, else among the shipped tables."""
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name or not name.isprintable():
            raise TableError(
                f"'{name}' is not a path below the table's own folder.",
                file=file,
                field="include",
                remedy="Give a relative path without '..'.",
            )
        shipped = shipped_directory().resolve()
        for base in (folder, self.tree, shipped):
            candidate = base / pure
            if candidate.is_file():
                # A symbolic link must not lead out of the tree either.
                real = candidate.resolve()
                for root in (self.tree, shipped):
                    if real.is_relative_to(root):
                        return real, real.relative_to(root).as_posix()
                raise TableError(f"'{name}' leads out of the table's own folder.", file=file, field="include")
        raise TableError(
            f"The included file '{name}' does not exist.",
            file=file,
            field="include",
            remedy="It is looked for beside the including file, in the table's folder, and among the shipped tables.",
        )


def _check_keys(data: Mapping[str, object], file: str, part: bool) -> None:
    for key in data:
        if key not in KEYS:
            raise TableError(f"'{key}' is not part of a table.", file=file, field=key, remedy=nearest(key, KEYS))
        if part and key in HEAD:
            raise TableError(f"An included part has no '{key}'.", file=file, field=key, remedy="Take it out.")
    schema = data.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise TableError(
            f"The schema is {shorten(schema)}; this version reads schema {SCHEMA}."
            if "schema" in data
            else "The file has no schema.",
            file=file,
            field="schema",
            remedy=f"Write 'schema = {SCHEMA}' at the top.",
        )


def _strings(value: object, file: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TableError("Includes are a list of strings.", file=file, field="include")
    return value


def _table(value: object, file: str, section: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TableError(f"[{section}] is a table of keys and values.", file=file, field=section)
    return value
