"""What is finished of an output, so that a run that was stopped can be gone on with.

The journal is a file of JSON lines beside the unfinished output. The first line says what is being made, of what and
how; each further one names a stretch of records that is in place, with its content digest and what its casts lost.
Nothing in it is believed: a stretch is kept when its bytes, read again, have the digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptbridge import __version__
from ckptbridge.conversion.cast import CastCount
from ckptbridge.conversion.digests import content_digest, new_hasher
from ckptbridge.conversion.plan import FileStat, OutputFile, Plan, Record
from ckptbridge.conversion.reading import tensor_bytes
from ckptbridge.conversion.request import Request
from ckptbridge.conversion.sources import SourceFiles
from ckptbridge.conversion.tally import Tally
from ckptbridge.errors import OutputError
from ckptbridge.formats.tensors import Place, Segment, TensorSource

STRETCH_BYTES = 1 << 30
_SCHEMA = 1
_MAX_BYTES = 256 << 20
# Options that say where and how often, not what is made; the contents of tables and configs are in the plan.
_NO_MATTER = {"source", "destination", "mapping", "config", "overwrite", "resume"}


@dataclass(frozen=True, slots=True)
class Stretch:
    """The records from ``first`` up to ``last`` of an output file, which are finished together."""

    number: int
    file: OutputFile
    first: int
    last: int

    @property
    def records(self) -> Sequence[Record]:
        return self.file.records[self.first : self.last]

    @property
    def nbytes(self) -> int:
        return sum(record.spec.nbytes for record in self.records)


def stretches(files: Sequence[OutputFile], nbytes: int) -> Iterator[Stretch]:
    """The records of all files, cut at the ends of files and, within, wherever ``nbytes`` are reached."""
    number = 0
    for file in files:
        first = size = 0
        for k, record in enumerate(file.records, 1):
            size += record.spec.nbytes
            if size >= nbytes and k < len(file.records):
                yield Stretch(number, file, first, k)
                number, first, size = number + 1, k, 0
        yield Stretch(number, file, first, len(file.records))
        number += 1


@dataclass(frozen=True, slots=True)
class Finished:
    """What a journal's line says of a stretch."""

    content: str
    lost: CastCount


@dataclass(frozen=True, slots=True)
class Found:
    """A leftover's journal: the finished stretches by number; or why there is nothing to go on with."""

    finished: Mapping[int, Finished]
    reason: str = ""

    def notes(self, kept: int, asked: bool) -> list[str]:
        """Why nothing was kept, when that was asked for."""
        if kept or not asked:
            return []
        reason = self.reason or "none of its bytes are those that its journal names"
        return [f"There was nothing to resume: {reason}."]


def identity(plan: Plan, request: Request) -> dict[str, Any]:
    """What is made, of what and how, as far as it decides the output's bytes."""
    options = {f.name: getattr(request, f.name) for f in dataclasses.fields(request) if f.name not in _NO_MATTER}
    whole = {key: value for key, value in plan.to_dict().items() if key not in ("source", "destination", "notes")}
    text = json.dumps([whole, plan.provenance, plan.config], sort_keys=True)
    made: dict[str, Any] = json.loads(
        json.dumps(
            {
                "schema": _SCHEMA,
                "version": __version__,
                "sources": {path.name: [stat.size, stat.mtime_ns] for path, stat in plan.stats.items()},
                "table": [plan.expansion.table.name, plan.expansion.table.digest],
                "options": options,
                "stretch": STRETCH_BYTES,
                "plan": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
            }
        )
    )
    return made


def read(path: Path, wanted: Mapping[str, Any]) -> Found:
    """The journal of a leftover.

    Raises OutputError when it belongs to another conversion: what was finished of that one is not thrown away unasked.
    """
    try:
        if os.stat(path, follow_symlinks=False).st_size > _MAX_BYTES:
            return Found({}, "its journal is larger than any")
        lines = path.read_bytes().split(b"\n")[:-1]  # a line without its end was cut
    except FileNotFoundError:
        return Found({}, "no earlier run left a part that was finished")
    found = _json(lines[0]) if lines else None
    if not isinstance(found, dict):
        return Found({}, "its journal is damaged")
    difference = _difference(found, wanted)
    if difference:
        raise OutputError(
            f"The unfinished output belongs to another conversion: {difference}.",
            remedy="Give the options of the first run to go on with it, or leave --resume out to start anew.",
            file=path.parent,
        )
    finished = {}
    for line in lines[1:]:
        entry = _json(line)
        try:
            lost = CastCount(int(entry["overflow"]), int(entry["underflow"]))
            finished[int(entry["stretch"])] = Finished(str(entry["content"]), lost)
        except (TypeError, KeyError, ValueError):
            continue
    return Found(finished, "" if finished else "no part of it was finished")


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """In words, the first thing in which two conversions differ; empty when they are the same."""
    if found.get("schema") != wanted["schema"] or found.get("version") != wanted["version"]:
        return f"it was begun by version {found.get('version')}"
    old, new = found.get("options"), wanted["options"]
    if not isinstance(old, dict):
        return "its options are not known"
    for key, value in new.items():
        if old.get(key) != value:
            return f"{key} was {json.dumps(old.get(key))} and is {json.dumps(value)}"
    if found.get("sources") != wanted["sources"]:
        return "the source's files are others, or have changed since"
    if found.get("table") != wanted["table"]:
        return "the table is another, or has changed since"
    return "" if found == dict(wanted) else "the plan differs (the config, or what the source holds)"


def still_there(found: Found, plan: Plan, folder: Path, algorithm: str, tally: Tally) -> dict[int, Finished]:
    """The finished stretches whose bytes are in place; their digests and checksums go to ``tally``."""
    kept = {}
    for stretch in stretches(plan.files, STRETCH_BYTES):
        claimed = found.finished.get(stretch.number)
        if claimed is not None and _in_place(stretch, claimed, folder / stretch.file.name, algorithm, tally):
            kept[stretch.number] = claimed
    return kept


def _in_place(stretch: Stretch, claimed: Finished, path: Path, algorithm: str, tally: Tally) -> bool:
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if status.st_size < stretch.file.layout.size:
        return False
    seen = []
    with SourceFiles({path: FileStat(status.st_size, status.st_mtime_ns)}) as files:
        for record, places in zip(
            stretch.records, stretch.file.layout.places[stretch.first : stretch.last], strict=True
        ):
            hasher, crc = new_hasher(algorithm), 0
            for data in tensor_bytes(_written(record, places, path), files):
                hasher.update(data)
                if stretch.file.layout.needs_crc:
                    crc = zlib.crc32(data, crc)
            seen.append((record, hasher.hexdigest(), crc))
    if content_digest(algorithm, ((record.spec, digest) for record, digest, _ in seen)) != claimed.content:
        return False
    for record, digest, crc in seen:
        tally.kept(record, digest, crc)
    return True


def _written(record: Record, places: Sequence[Place], path: Path) -> TensorSource:
    """A record as it lies in the output."""
    return TensorSource(record.spec, tuple(Segment(path, place.offset, place.nbytes) for place in places))


class Journal:
    """Writes the journal of a run, line by line. Nothing is synced: what got lost is written again."""

    def __init__(self, path: Path, made: Mapping[str, Any], algorithm: str) -> None:
        self._algorithm = algorithm
        self.nbytes = 0  # of all finished stretches
        self.begun = False  # whether it stands for the output, in the place of an earlier run's
        beside = path.with_name(path.name + ".new")
        self._fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._line(made)
        self._beside, self._path = beside, path

    def begin(self, kept: Mapping[int, Finished], plan: Plan) -> None:
        """Take over what an earlier run finished; from here on this journal stands for the output."""
        for stretch in stretches(plan.files, STRETCH_BYTES):
            if stretch.number in kept:
                self._entry(stretch, kept[stretch.number])
        os.replace(self._beside, self._path)
        self.begun = True

    def finished(self, stretch: Stretch, tally: Tally, lost: CastCount) -> None:
        """Note that a stretch is in place."""
        digests = ((record.spec, tally.digests[record.spec.name]) for record in stretch.records)
        self._entry(stretch, Finished(content_digest(self._algorithm, digests), lost))

    def _entry(self, stretch: Stretch, done: Finished) -> None:
        self._line(
            {
                "stretch": stretch.number,
                "content": done.content,
                "overflow": done.lost.overflow,
                "underflow": done.lost.underflow,
            }
        )
        self.nbytes += stretch.nbytes

    def _line(self, value: Mapping[str, Any]) -> None:
        view = memoryview(json.dumps(value).encode() + b"\n")
        while view:
            view = view[os.write(self._fd, view) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
