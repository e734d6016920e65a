"""Inventory × entries → plan."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptbridge.conversion.destination import destination_of, output_files, refuse_source
from ckptbridge.conversion.matching import Matcher
from ckptbridge.conversion.plan import FileStat, Plan
from ckptbridge.conversion.request import Request, Understood, understand
from ckptbridge.conversion.trail import changes, trail_before
from ckptbridge.errors import SourceChangedError


def make_plan(request: Request) -> Plan:
    """The plan of a conversion; reads headers only, writes nothing."""
    before = {path: (stat.st_size, stat.st_mtime_ns) for path, stat in _candidates(request.source)}
    plan = plan_from(understand(request), request)
    for path, stat in plan.stats.items():
        if before.get(path) not in (None, (stat.size, stat.mtime_ns)):
            raise SourceChangedError(
                "A source file changed while its header was read.",
                remedy="Run the command again when nothing writes to the file.",
                file=path,
            )
    return plan


def _candidates(source: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The files that a source may consist of, as they are now: itself, or those of its directory or an index's."""
    folder = source if source.is_dir() else source.parent
    with suppress(OSError):  # the reader says what is wrong
        for path in folder.iterdir() if source.is_dir() or source.suffix == ".json" else [source]:
            with suppress(OSError):
                yield path, path.stat()


def _stats(paths: Iterable[Path]) -> dict[Path, FileStat]:
    found = {}
    for path in paths:
        try:
            stat = path.stat()
        except OSError as e:
            raise SourceChangedError(
                f"A source file is there no more: {e.strerror}.", remedy="Check the source, and run again.", file=path
            ) from None
        found[path] = FileStat(stat.st_size, stat.st_mtime_ns)
    return found


def plan_from(known: Understood, request: Request) -> Plan:
    """The plan for a source that is already understood."""
    destination = destination_of(request)
    refuse_source(destination, known.inventory.files)
    matcher = Matcher(known, request)
    matcher.match()
    order = {name: k for k, name in enumerate(known.inventory.tensors)}
    records = sorted(
        matcher.records, key=lambda r: (min((order[s.spec.name] for s in r.sources), default=0), r.spec.name)
    )
    config = _written_config(known.config, matcher)
    trail = trail_before(known, request, config, matcher.dropped, matcher.comparisons, matcher.absent, records)
    files = output_files(destination, records, request, trail)
    return Plan(
        direction=known.direction,
        inventory=known.inventory,
        stats=_stats(known.inventory.files),
        expansion=known.expansion,
        destination=destination.path,
        directory=destination.directory,
        format=destination.format,
        files=files,
        dropped=tuple(matcher.dropped),
        comparisons=tuple(matcher.comparisons),
        absent=tuple(matcher.absent),
        allowed=matcher.allowed,
        changes=changes(records),
        config=config,
        provenance=trail,
        notes=(*known.notes, *matcher.unmatched()),
    )


def _written_config(config: Mapping[str, Any] | None, matcher: Matcher) -> Mapping[str, Any] | None:
    """The config that describes the output: its dtype follows --dtype, its quantisation is gone when the words are."""
    if config is None:
        return None
    written = dict(config)
    if matcher.cast is not None:
        written.update({key: matcher.cast.name for key in ("torch_dtype", "dtype") if key in written})
    if matcher.dequantised:
        written.pop("quantization_config", None)
    return written
