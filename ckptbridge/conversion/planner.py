"""Inventory × entries → plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptbridge.conversion.destination import destination_of, output_files, refuse_source
from ckptbridge.conversion.matching import Matcher
from ckptbridge.conversion.plan import FileStat, Plan
from ckptbridge.conversion.request import Request, Understood, understand
from ckptbridge.conversion.trail import trail_before


def make_plan(request: Request) -> Plan:
    """The plan of a conversion; reads headers only, writes nothing."""
    return plan_from(understand(request), request)


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
    stats = {}
    for path in known.inventory.files:
        stat = path.stat()
        stats[path] = FileStat(stat.st_size, stat.st_mtime_ns)
    return Plan(
        direction=known.direction,
        inventory=known.inventory,
        stats=stats,
        expansion=known.expansion,
        destination=destination.path,
        directory=destination.directory,
        format=destination.format,
        files=files,
        dropped=tuple(matcher.dropped),
        comparisons=tuple(matcher.comparisons),
        absent=tuple(matcher.absent),
        config=config,
        provenance=trail,
        notes=known.notes,
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
