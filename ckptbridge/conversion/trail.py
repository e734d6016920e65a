"""Writing the provenance record: what is known before the bytes move, and what follows after."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import ckptbridge
from ckptbridge.conversion import provenance
from ckptbridge.conversion.cast import lossless
from ckptbridge.conversion.digests import placeholder
from ckptbridge.conversion.plan import Change, Comparison, Dropped, Record
from ckptbridge.conversion.request import Request, Understood
from ckptbridge.formats.dtypes import DType, dtype_named

_Step = Literal["cast", "dequantise"]


def trail_before(
    known: Understood,
    request: Request,
    config: Mapping[str, Any] | None,
    dropped: Sequence[Dropped],
    comparisons: Sequence[Comparison],
    absent: Sequence[str],
    records: Sequence[Record],
) -> dict[str, Any]:
    """The record with placeholders for digests and counts, so that its length is known."""
    algorithm = request.digest
    digest = placeholder(algorithm) if algorithm != "none" else ""
    expansion = known.expansion
    written = request.destination.parent
    record: dict[str, Any] = {
        "tool": provenance.TOOL,
        "schema": provenance.SCHEMA,
        "version": ckptbridge.__version__,
        "framework": "mindspore" if known.direction == "pt2ms" else "pytorch",
        "direction": known.direction,
        "table": {
            "name": expansion.table.name,
            "digest": expansion.table.digest,
            "shipped": request.mapping is None,
        },
        "target": expansion.table.target,
        "layout": dict(expansion.layout),
        "roots": dict(expansion.roots),
        "config": dict(config) if config is not None else None,
        "source": os.path.relpath(request.source, written),
        "sources": [{"name": p.name, "size": p.stat().st_size, "digest": digest} for p in known.inventory.files],
        "content": {"pt": digest, "ms": digest},
        "tensors": len(records),
        "dropped": {d.name: d.reason for d in dropped},
        "absent": list(absent),
        "tied": _tied(known, comparisons),
        "lossy": [
            {"step": c.step, "from": c.source, "to": c.target, "tensors": c.tensors}
            for c in changes(records)
            if c.lossy
        ],
        "lost": {"overflow": 0, "underflow": 0},
        "dtype": dtype_named(request.dtype).name if request.dtype is not None else None,
        "keep_quantized": request.keep_quantized,
        "notes": dict(request.provenance),
        "history": _history(known),
    }
    return record


def trail_after(
    trail: Mapping[str, Any],
    sources: Mapping[str, str],
    content: Mapping[str, str],
    counts: Mapping[str, int],
) -> dict[str, Any]:
    """The finished record: digests by source file name, content digests by side, values lost by casts."""
    done = dict(trail)
    done["sources"] = [{**s, "digest": sources.get(s["name"], "")} for s in trail["sources"]]
    done["content"] = {side: content.get(side, "") for side in ("pt", "ms")}
    done["lost"] = {key: counts.get(key, 0) for key in trail["lost"]}
    return done


def _tied(known: Understood, comparisons: Sequence[Comparison]) -> dict[str, str]:
    """PyTorch names that were equal copies: those found now, or those that the source remembers."""
    if known.direction == "pt2ms":
        return {c.tensor.spec.name: c.reference.spec.name for c in comparisons}
    return dict(known.carried.tied) if known.carried is not None else {}


def changes(records: Sequence[Record]) -> tuple[Change, ...]:
    """The changes of dtype; lossy ones are those after which the source's words cannot be had back."""
    found: dict[tuple[_Step, DType, DType], set[str]] = {}
    for record in records:
        for k, source in enumerate(record.sources):
            scaled = bool(record.scales) and record.scales[k] is not None
            if scaled or source.spec.dtype != record.spec.dtype:
                step: _Step = "dequantise" if scaled else "cast"
                found.setdefault((step, source.spec.dtype, record.spec.dtype), set()).add(source.spec.name)
    made = (
        Change(step, a.name, b.name, len(names), step == "dequantise" or not lossless(a, b))
        for (step, a, b), names in found.items()
    )
    return tuple(sorted(made, key=lambda change: (change.step, change.source, change.target)))


def _history(known: Understood) -> list[Any]:
    if known.carried is not None:
        return known.carried.history
    text = provenance.foreign(known.inventory)
    return [{"tool": "unknown", "append_info": text}] if text is not None else []
