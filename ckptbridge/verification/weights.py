"""The weights level: every tensor of one side is made again from the other and compared bit for bit.

What the table says of a source tensor is carried out in memory, a piece at a time, and compared with
what the other checkpoint holds. A declared cast or dequantisation is carried out on the source and
must give the same bits. There is no tolerance. Two threads, each with a few buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ckptbridge.conversion.digests import content_digest, new_hasher
from ckptbridge.conversion.matching import Matcher
from ckptbridge.conversion.plan import FileStat, Record
from ckptbridge.conversion.reading import digest_tensor, digest_tensors, equal_tensors
from ckptbridge.conversion.request import Request, Understood
from ckptbridge.conversion.sources import SourceFiles
from ckptbridge.conversion.tally import Progress
from ckptbridge.formats.tensors import Inventory, TensorSource
from ckptbridge.verification.comparing import Found, compare_tensor
from ckptbridge.verification.report import TensorResult, WeightsSection, weights_section

NO_CAST = ", and no cast is declared"
_THREADS = 2
_LARGE = 64 << 20  # bytes: tensors of so many go first, so that no thread ends with one while the other has nothing


@dataclass(frozen=True, slots=True)
class Outcome:
    """A tensor's result, and the digests of the bytes that were read on the way (hex, by side and name).

    ``result`` is None for a tensor that was digested and nothing else.
    """

    result: TensorResult | None
    digests: Mapping[tuple[str, str], str]


def content_of(inventory: Inventory, algorithm: str = "blake3") -> str:
    """The tagged content digest of a checkpoint; reads all of it."""
    with SourceFiles(_stats(inventory.files)) as files:
        digests = digest_tensors(inventory.tensors.values(), files, algorithm)
    return content_digest(algorithm, ((t.spec, digests[n]) for n, t in inventory.tensors.items()))


def compare_weights(
    known: Understood,
    request: Request,
    other: Inventory,
    recorded: Mapping[str, str],
    algorithm: str,
    progress: Progress | None = None,
) -> WeightsSection:
    """Compare ``known``'s side, taken through its table, with the checkpoint ``other``.

    ``request`` holds the options of the conversion that is judged (its cast, what it left out).
    ``recorded`` are the content digests by side that the provenance claims, tagged, where there are any.
    ``progress`` is called with the number of bytes of a tensor that has been compared.
    """
    matcher = Matcher(known, request)
    matcher.match()
    here, there = ("pt", "ms") if known.direction == "pt2ms" else ("ms", "pt")
    stats = _stats([*known.inventory.files, *other.files])
    with SourceFiles(stats) as files, ThreadPoolExecutor(_THREADS, "verify") as pool:
        for path in stats:
            files.map(path)  # opened before there are threads
        comparing = _Comparing(files, other, here, there, algorithm)
        renamed = {record.renamed_from for record in matcher.records}
        jobs = [(record.spec.nbytes, partial(comparing.record, record)) for record in matcher.records]
        jobs += [
            (t.spec.nbytes, partial(comparing.digest, here, t))
            for n, t in known.inventory.tensors.items()
            if n not in renamed
        ]
        jobs.sort(key=lambda job: -(job[0] // _LARGE))
        outcomes = []
        for (nbytes, _), outcome in zip(jobs, pool.map(lambda job: job[1](), jobs), strict=True):
            outcomes.append(outcome)
            if progress is not None and outcome.result is not None:
                progress(nbytes)
        digests = {key: d for outcome in outcomes for key, d in outcome.digests.items()}
        for side, inventory in ((here, known.inventory), (there, other)):
            rest = [t for n, t in inventory.tensors.items() if (side, n) not in digests]
            for outcome in pool.map(partial(comparing.digest, side), rest):
                digests.update(outcome.digests)
        results = [outcome.result for outcome in outcomes if outcome.result is not None]
        results += _left_out(matcher, files, other)
        files.check_unchanged()
    content = {
        side: content_digest(algorithm, ((t.spec, digests[side, n]) for n, t in inventory.tensors.items()))
        for side, inventory in ((here, known.inventory), (there, other))
    }
    section = weights_section(
        results, {"PyTorch": content["pt"], "MindSpore": content["ms"]}, _notes(known, recorded, content)
    )
    return _against_record(section, content, recorded)


def _stats(paths: Sequence[Path]) -> dict[Path, FileStat]:
    found = {}
    for path in paths:
        stat = path.stat()
        found[path] = FileStat(stat.st_size, stat.st_mtime_ns)
    return found


def _notes(known: Understood, recorded: Mapping[str, str], content: Mapping[str, str]) -> list[str]:
    notes = list(known.notes)
    if any(recorded.get(side) == content[side] for side in content):
        notes.append("The content digest is the one that the provenance records.")
    return notes


def _against_record(section: WeightsSection, content: Mapping[str, str], recorded: Mapping[str, str]) -> WeightsSection:
    """Equal tensors whose content is not what the provenance claims were changed together after the conversion."""
    for side, name in (("pt", "PyTorch"), ("ms", "MindSpore")):
        claimed = recorded.get(side, "")
        same_algorithm = claimed.partition(":")[0] == content[side].partition(":")[0]
        if claimed and same_algorithm and claimed != content[side] and section.verdict == "holds":
            reason = (
                f"The {name} side's content digest is {content[side][:23]}..., and the provenance records "
                f"{claimed[:23]}...: the checkpoint was changed after the conversion."
            )
            return replace(section, verdict="fails", reason=reason)
    return section


def _left_out(matcher: Matcher, files: SourceFiles, other: Inventory) -> list[TensorResult]:
    """What the table drops, what the other checkpoint has besides, and tied copies that are no copies."""
    results = [TensorResult(dropped.name, (), "dropped", note=dropped.reason) for dropped in matcher.dropped]
    for pair in matcher.comparisons:
        if not equal_tensors(pair.tensor, pair.reference, files):
            name, reference = pair.tensor.spec.name, pair.reference.spec.name
            results.append(
                TensorResult(name, (reference,), "differs", note=f"should equal '{reference}' ({pair.rule})")
            )
    expected = {record.spec.name for record in matcher.records}
    entries = matcher.known.expansion.by_ms if matcher.from_pt else matcher.known.expansion.by_pt
    for name, tensor in other.tensors.items():
        if name in expected:
            continue
        entry = entries.get(name)
        spec = tensor.spec
        if entry is not None and entry.kind in ("drop", "tied"):
            reason = entry.rule.drop or f"tied to '{entry.tied_pt}'"
            results.append(TensorResult(name, (), "dropped", spec.dtype.name, spec.shape, note=reason))
        else:
            results.append(
                TensorResult(name, (), "unexpected", spec.dtype.name, spec.shape, spec.numel, note="made by no rule")
            )
    return results


class _Comparing:
    """Compares records with the tensors of the other checkpoint."""

    def __init__(self, files: SourceFiles, other: Inventory, here: str, there: str, algorithm: str) -> None:
        self._files = files
        self._other = other
        self._here = here
        self._there = there
        self._algorithm = algorithm

    def digest(self, side: str, source: TensorSource) -> Outcome:
        """A tensor's digest alone."""
        return Outcome(None, {(side, source.spec.name): digest_tensor(source, self._files, self._algorithm)})

    def record(self, record: Record) -> Outcome:
        """What the other checkpoint holds for a record, against what it should."""
        spec = record.spec
        sources = tuple(s.spec.name for s in record.sources)
        base = TensorResult(
            spec.name, sources, "equal", spec.dtype.name, spec.shape, spec.numel, step=_declared(record)
        )
        actual = self._other.tensors.get(spec.name)
        if actual is None:
            return Outcome(replace(base, status="missing", note=f"'{spec.name}' is not there ({record.rule})"), {})
        if actual.spec.shape != spec.shape:
            note = f"expected {list(spec.shape)}, found {list(actual.spec.shape)}"
            return Outcome(replace(base, status="shape", shape=actual.spec.shape, note=note), {})
        if actual.spec.dtype != spec.dtype:
            note = f"expected {spec.dtype}, found {actual.spec.dtype}{NO_CAST}"
            return Outcome(replace(base, status="dtype", dtype=actual.spec.dtype.name, note=note), {})
        return self._compared(record, actual, base)

    def _compared(self, record: Record, actual: TensorSource, base: TensorResult) -> Outcome:
        hasher = new_hasher(self._algorithm)
        found = compare_tensor(record, actual, self._files, hasher.update)
        digests = {(self._there, record.spec.name): hasher.hexdigest()}
        origin = record.renamed_from
        if origin is not None and not found.differing:
            digests[self._here, origin] = digests[self._there, record.spec.name]
        return Outcome(_result(base, found), digests)


def _declared(record: Record) -> str:
    """What the conversion does to a tensor's values, in words."""
    if any(record.scales):
        return f"dequantisation to {record.spec.dtype}"
    return f"cast {record.sources[0].spec.dtype} -> {record.spec.dtype}" if record.cast else ""


def _result(base: TensorResult, found: Found) -> TensorResult:
    return replace(
        base,
        status="differs" if found.differing else "equal",
        differing=found.differing,
        first_difference=found.index_in(base.shape),
        max_abs=found.max_abs,
        nan=found.nan,
        inf=found.inf,
    )
