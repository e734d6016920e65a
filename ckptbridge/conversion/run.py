"""Carry a plan out: bytes into a hidden folder, digests beside them, provenance, sync, one rename."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any

from ckptbridge.conversion.cast import CastCount
from ckptbridge.conversion.copier import write_at, write_file
from ckptbridge.conversion.destination import embedded, seal_file
from ckptbridge.conversion.digests import content_digest
from ckptbridge.conversion.plan import Plan, Record
from ckptbridge.conversion.provenance import FILE_NAME
from ckptbridge.conversion.reading import digest_tensors, equal_tensors
from ckptbridge.conversion.request import Request
from ckptbridge.conversion.sources import SourceFiles
from ckptbridge.conversion.staging import Staging, write_error
from ckptbridge.conversion.tally import Progress, Tally
from ckptbridge.conversion.trail import trail_after
from ckptbridge.conversion.worker import Worker
from ckptbridge.errors import CoverageError, DTypeError
from ckptbridge.formats import mindspore_ckpt, shards
from ckptbridge.formats.tensors import TensorSpec

_WAITING = 4  # buffers that may wait for their digest


@dataclass(frozen=True)
class Summary:
    """What a conversion did."""

    plan: Plan
    provenance: Mapping[str, Any]
    tensors: int
    nbytes: int
    seconds: float
    overflow: int
    underflow: int

    def to_dict(self) -> dict[str, Any]:
        """The summary as ``--json`` prints it."""
        return {
            "destination": str(self.plan.destination),
            "files": [file.name for file in self.plan.files],
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "seconds": round(self.seconds, 3),
            "overflow": self.overflow,
            "underflow": self.underflow,
            "notes": list(self.plan.notes),
            "dropped": {d.name: d.reason for d in self.plan.dropped},
            "missing_allowed": list(self.plan.absent),
            "provenance": self.provenance,
        }


def run(plan: Plan, request: Request, progress: Progress | None = None) -> Summary:
    """Write what the plan says. ``progress`` is called with the number of bytes that have just been placed.

    The destination appears whole, by one rename, or not at all. Raises OutputError, SourceChangedError,
    CoverageError (tied tensors that differ) and DTypeError (a cast that lost values).
    """
    started = time.monotonic()
    staging = Staging(plan.destination, plan.directory, request.overwrite)
    try:
        staging.require_room(sum(file.layout.size for file in plan.files))
        with (
            SourceFiles(plan.stats) as files,
            ThreadPoolExecutor(1, "sources") as pool,
            _set_at_end(Event()) as over,  # before the pool waits: a stopped run does not digest to the end
        ):
            _check_crc(plan)
            _compare(plan, files)
            digests = _start_digests(plan, files, request.digest, pool, over)
            lost, tally = _write(plan, request, files, staging, progress)
            if lost and not request.allow_overflow:
                raise _lossy_error(lost)
            provenance = _finish_trail(plan, request.digest, digests.result() if digests else None, tally, lost)
            files.check_unchanged()
        _seal(plan, request, staging, provenance, tally)
        _small_files(plan, staging, provenance)
        staging.commit()
    except OSError as e:
        raise write_error(e, plan.destination) from None
    finally:
        staging.discard()
    return Summary(
        plan, provenance, len(plan.records), plan.nbytes, time.monotonic() - started, lost.overflow, lost.underflow
    )


def _compare(plan: Plan, files: SourceFiles) -> None:
    for pair in plan.comparisons:
        if not equal_tensors(pair.tensor, pair.reference, files):
            name, reference = pair.tensor.spec.name, pair.reference.spec.name
            raise CoverageError(
                f"'{name}' differs from '{reference}', to which the config ties it.",
                remedy="If both are meant, set tie_word_embeddings to false in the config (--config); "
                f"if '{name}' is stale, take it out of the checkpoint.",
                tensor=name,
                rule=pair.rule,
            )


def _start_digests(
    plan: Plan, files: SourceFiles, algorithm: str, pool: ThreadPoolExecutor, over: Event
) -> Future[dict[str, str]] | None:
    if algorithm == "none":
        return None
    for path in plan.inventory.files:
        files.map(path)  # opened here: the table of open files is not shared between threads while it grows
    return pool.submit(digest_tensors, plan.inventory.tensors.values(), files, algorithm, over)


@contextmanager
def _set_at_end(event: Event) -> Iterator[Event]:
    try:
        yield event
    finally:
        event.set()


def _check_crc(plan: Plan) -> None:
    """A .ckpt that has a crc trailer must agree with it; one without is unverified."""
    if plan.inventory.format == "ckpt":
        for path in plan.inventory.files:
            mindspore_ckpt.check_crc(path)


def _write(
    plan: Plan, request: Request, files: SourceFiles, staging: Staging, progress: Progress | None
) -> tuple[CastCount, Tally]:
    lost = CastCount()
    with Worker("digests", _WAITING) as worker:
        tally = Tally(worker, request.digest, any(f.layout.needs_crc for f in plan.files), progress, renamed_from)
        for file in plan.files:
            fd = os.open(staging.path / file.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                lost += write_file(file, fd, files, tally)
            finally:
                os.close(fd)
    return lost, tally


def renamed_from(record: Record) -> str | None:
    """The source tensor whose bytes a record carries over unchanged, if there is one."""
    if len(record.sources) != 1 or len(record.blocks) != 1 or record.cast or any(record.scales):
        return None
    source = record.sources[0]
    view = record.blocks[0].left, record.blocks[0].right
    plain = source.contiguous and source.spec.shape == record.spec.shape and view[0].axes == view[1].axes
    return source.spec.name if plain and not any(view[0].start) else None


def _finish_trail(
    plan: Plan, algorithm: str, sources: Mapping[str, str] | None, tally: Tally, lost: CastCount
) -> dict[str, Any]:
    counts = {"overflow": lost.overflow, "underflow": lost.underflow}
    if sources is None:
        return trail_after(plan.provenance, {}, {}, counts)
    here, there = ("pt", "ms") if plan.direction == "pt2ms" else ("ms", "pt")
    written = []
    for record in plan.records:
        name = renamed_from(record)
        digest = tally.digests[record.spec.name] if name is None else sources[name]
        written.append((record.spec, digest))
    content = {
        here: content_digest(algorithm, ((t.spec, sources[n]) for n, t in plan.inventory.tensors.items())),
        there: content_digest(algorithm, written),
    }
    return trail_after(plan.provenance, _file_digests(plan, algorithm, sources), content, counts)


def _file_digests(plan: Plan, algorithm: str, sources: Mapping[str, str]) -> dict[str, str]:
    """The content digest of each source file's tensors, by file name."""
    inside: dict[str, list[tuple[TensorSpec, str]]] = {path.name: [] for path in plan.inventory.files}
    for name, tensor in plan.inventory.tensors.items():
        inside[tensor.segments[0].path.name if tensor.segments else plan.inventory.files[0].name].append(
            (tensor.spec, sources[name])
        )
    return {name: content_digest(algorithm, tensors) for name, tensors in inside.items()}


def _seal(plan: Plan, request: Request, staging: Staging, provenance: Mapping[str, Any], tally: Tally) -> None:
    strings = embedded(plan.format, plan.direction, provenance)
    for file in plan.files:
        path = staging.path / file.name
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            crcs = [tally.crcs[r.spec.name] for r in file.records] if file.layout.needs_crc else None
            for offset, data in seal_file(plan.format, file.layout, strings, crcs):
                write_at(fd, data, offset)
            if request.crc:
                write_at(fd, mindspore_ckpt.crc_trailer(path), os.fstat(fd).st_size)
            os.fsync(fd)
        finally:
            os.close(fd)


def _small_files(plan: Plan, staging: Staging, provenance: Mapping[str, Any]) -> None:
    if not plan.directory:
        return
    small = {}
    if plan.config is not None:
        small["config.json"] = _pretty(plan.config)
    if len(plan.files) > 1:
        small.update([_index(plan)])
    names = sorted([*(file.name for file in plan.files), *small])
    small[FILE_NAME] = _pretty({**provenance, "files": names})
    for name, data in small.items():
        staging.write(name, data)


def _index(plan: Plan) -> tuple[str, bytes]:
    """The index of shards, under the name that the target side reads."""
    weight_map = {record.spec.name: file.name for file in plan.files for record in file.records}
    if plan.direction == "pt2ms":
        return "param_name_map.json", shards.param_name_map_json(weight_map, plan.nbytes)
    stem = "model.safetensors" if plan.format == "safetensors" else "pytorch_model.bin"
    return f"{stem}.index.json", shards.index_json(weight_map, plan.nbytes)


def _pretty(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _lossy_error(lost: CastCount) -> DTypeError:
    return DTypeError(
        f"The cast would turn {lost.overflow} finite value(s) into infinity "
        f"and {lost.underflow} non-zero value(s) into zero.",
        remedy="Choose a wider --dtype, or give --allow-overflow if that is acceptable.",
        overflow=lost.overflow,
        underflow=lost.underflow,
    )
