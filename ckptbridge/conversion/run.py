"""Carry a plan out: bytes into a hidden folder, digests beside them, provenance, sync, one rename."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ckptbridge.conversion import journal
from ckptbridge.conversion.cast import CastCount
from ckptbridge.conversion.checksums import check_crcs
from ckptbridge.conversion.copier import lay_out, write_at, write_records
from ckptbridge.conversion.destination import embedded, seal_file
from ckptbridge.conversion.digests import content_digest
from ckptbridge.conversion.journal import Finished, Found, Journal
from ckptbridge.conversion.plan import Plan
from ckptbridge.conversion.provenance import FILE_NAME
from ckptbridge.conversion.reading import digest_tensors, equal_tensors
from ckptbridge.conversion.request import Request
from ckptbridge.conversion.sources import SourceFiles
from ckptbridge.conversion.staging import JOURNAL, Staging
from ckptbridge.conversion.tally import Progress, Tally
from ckptbridge.conversion.trail import trail_after
from ckptbridge.conversion.worker import Worker
from ckptbridge.conversion.writeback import sync
from ckptbridge.errors import CoverageError, DTypeError, InterruptedByUser, OutputError
from ckptbridge.formats import mindspore_ckpt, shards
from ckptbridge.formats.tensors import TensorSpec

_WAITING = 4  # buffers that may wait for their digest


@dataclass(frozen=True)
class Summary:
    """What a conversion did. ``kept`` are the bytes that it took over from a run that was stopped."""

    plan: Plan
    provenance: Mapping[str, Any]
    tensors: int
    nbytes: int
    seconds: float
    overflow: int
    underflow: int
    kept: int = 0
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The summary as ``--json`` prints it."""
        return {
            "destination": str(self.plan.destination),
            "files": [file.name for file in self.plan.files],
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "kept": self.kept,
            "seconds": round(self.seconds, 3),
            "overflow": self.overflow,
            "underflow": self.underflow,
            "notes": [*self.plan.notes, *self.notes],
            "dropped": {d.name: d.reason for d in self.plan.dropped},
            "missing_allowed": list(self.plan.absent),
            "provenance": self.provenance,
        }


def run(plan: Plan, request: Request, progress: Progress | None = None) -> Summary:
    """Write what the plan says. ``progress`` is called with the number of bytes that have just been placed.

    The destination appears whole, by one rename, or not at all. Stopped by a signal, what is finished stays in a
    hidden folder, for the same request with ``resume``; without it, and after an error, nothing stays. Raises
    OutputError, SourceChangedError, CoverageError (tied tensors that differ), DTypeError (a cast that lost values)
    and InterruptedByUser.
    """
    started = time.monotonic()
    staging = Staging(plan.destination, plan.directory, request.overwrite, request.resume)
    log: Journal | None = None
    try:
        found = _leftover(plan, request, staging)
        staging.require_room(room_needed(plan))
    except BaseException as e:
        staging.keep()  # nothing has been done yet, and what an earlier run left may still be wanted
        if isinstance(e, OSError):
            raise staging.error(e) from None
        raise
    try:
        if request.digest != "none":
            log = Journal(staging.folder / JOURNAL, journal.identity(plan, request), request.digest)
        done = _carry_out(plan, request, staging, log, found, progress)
        staging.commit()
    except OSError as e:
        raise _failed(e, staging, log, found) from None
    except InterruptedByUser as e:
        raise _stopped(e, plan, staging, log, found) from None
    except KeyboardInterrupt:  # where no handler of this project's is installed
        _keep(staging, log, found)
        raise
    finally:
        if log is not None:
            log.close()
        staging.discard()
    lost, kept, provenance = done.lost, done.kept, done.provenance
    return Summary(
        plan,
        provenance,
        len(plan.records),
        plan.nbytes,
        time.monotonic() - started,
        lost.overflow,
        lost.underflow,
        kept,
        (*found.notes(kept, request.resume), *_changed(plan, provenance)),
    )


@dataclass(frozen=True, slots=True)
class _Done:
    """What was written: the finished record, what casts lost, and how many bytes an earlier run had written."""

    provenance: dict[str, Any]
    lost: CastCount
    kept: int


def _carry_out(
    plan: Plan, request: Request, staging: Staging, log: Journal | None, found: Found, progress: Progress | None
) -> _Done:
    """Everything but the rename."""
    with SourceFiles(plan.stats) as files, _background(files) as pool:
        for path in plan.inventory.files:
            files.map(path)  # opened here: the table of open files is not shared between threads while it grows
        checked = pool.submit(check_crcs, plan.inventory, files)
        _compare(plan, files)
        digests = _start_digests(plan, files, request.digest, pool)
        lost, kept, tally = _write(plan, request, files, staging, log, found, progress)
        if lost and not request.allow_overflow:
            raise _lossy_error(lost, list(tally.lossy_names))
        checked.result()
        provenance = _finish_trail(plan, request.digest, digests.result() if digests else None, tally, lost)
        files.check_unchanged()
    _seal(plan, request, staging, provenance, tally)
    _small_files(plan, staging, provenance)
    return _Done(provenance, lost, kept)


@contextmanager
def _background(files: SourceFiles) -> Iterator[ThreadPoolExecutor]:
    """A thread that digests sources; when the conversion ends early, so does it, at its next piece."""
    with ThreadPoolExecutor(1, "sources") as pool:
        try:
            yield pool
        except BaseException:
            files.stop()
            raise


def _leftover(plan: Plan, request: Request, staging: Staging) -> Found:
    """What an earlier run had finished, if that is wanted; else its leftover is removed."""
    found = Found({})
    if request.resume and request.digest == "none":
        found = Found({}, "with --digest none nothing of it can be checked")
    elif request.resume:
        found = journal.read(staging.folder / JOURNAL, journal.identity(plan, request))
    staging.clear({file.name for file in plan.files} if found.finished else None)
    return found


def _stopped(
    e: InterruptedByUser, plan: Plan, staging: Staging, log: Journal | None, found: Found
) -> InterruptedByUser:
    """The same, with what is there now."""
    if staging.committed:
        return InterruptedByUser(e.signal, remedy="The output was complete by then.", file=plan.destination)
    if not _keep(staging, log, found):
        return InterruptedByUser(e.signal, remedy="Nothing was left behind; run the same command again.")
    return InterruptedByUser(
        e.signal,
        remedy="Run the same command with --resume to go on with what is kept; without it, it starts anew. "
        "Remove the kept folder if you do neither.",
        finished=f"{log.nbytes} of {plan.nbytes} bytes" if log is not None and log.nbytes else None,
        kept=staging.folder,
    )


def _failed(e: OSError, staging: Staging, log: Journal | None, found: Found) -> OutputError:
    """What the system said, and what is kept: a full disk can be made room on."""
    error = staging.error(e)
    if not _keep(staging, log, found):
        return error
    remedy = f"{error.remedy} Then go on with --resume: what is finished is kept until you do, or remove it."
    return OutputError(error.what, remedy=remedy, **error.where, kept=staging.folder)


def _keep(staging: Staging, log: Journal | None, found: Found) -> bool:
    """Leave what is finished, if anything is, for a run that resumes: of this run, or of one that it resumed."""
    begun = log is not None and log.begun
    if staging.committed or not (log.nbytes if log is not None and begun else found.finished):
        return False
    staging.keep()
    return True


def room_needed(plan: Plan) -> int:
    """The bytes that the output takes."""
    strings = embedded(plan.format, plan.direction, plan.provenance)
    total = sum(len(data) for data in _small(plan, plan.provenance).values())
    for file in plan.files:
        end = file.layout.size
        for offset, data in seal_file(plan.format, file.layout, strings, [0] * len(file.records)):
            end = max(end, offset + len(data))
        total += end
    return total


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
    plan: Plan, files: SourceFiles, algorithm: str, pool: ThreadPoolExecutor
) -> Future[dict[str, str]] | None:
    if algorithm == "none":
        return None
    carried = {record.renamed_from for record in plan.records}  # their bytes pass anyway
    rest = [tensor for name, tensor in plan.inventory.tensors.items() if name not in carried]
    return pool.submit(digest_tensors, rest, files, algorithm)


def _write(
    plan: Plan,
    request: Request,
    files: SourceFiles,
    staging: Staging,
    log: Journal | None,
    found: Found,
    progress: Progress | None,
) -> tuple[CastCount, int, Tally]:
    """All weights files but what is sealed at the end; what casts lost, and the bytes that were there already."""
    with Worker("digests", _WAITING) as worker:
        tally = Tally(worker, request.digest, any(f.layout.needs_crc for f in plan.files), progress)
        kept: Mapping[int, Finished] = {}
        if log is not None:
            kept = journal.still_there(found, plan, staging.path, request.digest, tally)
            log.begin(kept, plan)
        taken_over = tally.bytes
        lost = CastCount()
        for file, parts in groupby(journal.stretches(plan.files, journal.STRETCH_BYTES), lambda part: part.file):
            fd = os.open(staging.path / file.name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                lay_out(file, fd)
                for part in parts:
                    if part.number in kept:
                        lost += kept[part.number].lost
                        continue
                    lossy = write_records(file, part.first, part.last, fd, files, tally)
                    tally.settle()
                    if log is not None:
                        log.finished(part, tally, lossy)
                    lost += lossy
            finally:
                os.close(fd)
    return lost, taken_over, tally


def _finish_trail(
    plan: Plan, algorithm: str, sources: Mapping[str, str] | None, tally: Tally, lost: CastCount
) -> dict[str, Any]:
    counts = {"overflow": lost.overflow, "underflow": lost.underflow}
    if sources is None:
        return trail_after(plan.provenance, {}, {}, counts)
    here, there = ("pt", "ms") if plan.direction == "pt2ms" else ("ms", "pt")
    known = dict(sources)
    for record in plan.records:
        name = record.renamed_from
        if name is not None:
            known[name] = tally.digests[record.spec.name]
    content = {
        here: content_digest(algorithm, ((t.spec, known[n]) for n, t in plan.inventory.tensors.items())),
        there: content_digest(algorithm, ((r.spec, tally.digests[r.spec.name]) for r in plan.records)),
    }
    return trail_after(plan.provenance, _file_digests(plan, algorithm, known), content, counts)


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
            sync(fd)
        finally:
            os.close(fd)


def _small_files(plan: Plan, staging: Staging, provenance: Mapping[str, Any]) -> None:
    for name, data in _small(plan, provenance).items():
        staging.write(name, data)


def _small(plan: Plan, provenance: Mapping[str, Any]) -> dict[str, bytes]:
    """The files beside the weights of a directory."""
    if not plan.directory:
        return {}
    small = {}
    if plan.config is not None:
        small["config.json"] = _pretty(plan.config)
    if len(plan.files) > 1:
        small.update([_index(plan)])
    names = sorted([*(file.name for file in plan.files), *small])
    small[FILE_NAME] = _pretty({**provenance, "files": names})
    return small


def _index(plan: Plan) -> tuple[str, bytes]:
    """The index of shards, under the name that the target side reads."""
    weight_map = {record.spec.name: file.name for file in plan.files for record in file.records}
    if plan.direction == "pt2ms":
        return "param_name_map.json", shards.param_name_map_json(weight_map, plan.nbytes)
    stem = "model.safetensors" if plan.format == "safetensors" else "pytorch_model.bin"
    return f"{stem}.index.json", shards.index_json(weight_map, plan.nbytes)


def _pretty(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _changed(plan: Plan, provenance: Mapping[str, Any]) -> list[str]:
    """Notes on a source whose tensors are not those that its own provenance describes."""
    history = provenance.get("history")
    last = history[-1] if isinstance(history, list) and history else None
    claimed = last.get("content") if isinstance(last, dict) else None
    side = "pt" if plan.direction == "pt2ms" else "ms"
    then = claimed.get(side) if isinstance(claimed, dict) else None
    now = provenance["content"][side]
    if not isinstance(then, str) or not now or then == now or then.partition(":")[0] != now.partition(":")[0]:
        return []
    return [
        f"The source's tensors are not those that its provenance records ({then[:23]}... then, {now[:23]}... now): "
        "it was trained further, or damaged, after it was written."
    ]


def _lossy_error(lost: CastCount, names: list[str]) -> DTypeError:
    """``names`` are those of this run; what an earlier one lost is known by number alone."""
    return DTypeError(
        f"The cast would turn {lost.overflow} finite value(s) into infinity "
        f"and {lost.underflow} non-zero value(s) into zero.",
        remedy="Choose a wider --dtype, or give --allow-overflow if that is acceptable.",
        tensors=", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or None,
        overflow=lost.overflow,
        underflow=lost.underflow,
    )
