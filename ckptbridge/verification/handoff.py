"""Which two checkpoints are compared, which of them was made from the other, and by which conversion."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptbridge.conversion import provenance
from ckptbridge.conversion.plan import Direction
from ckptbridge.conversion.provenance import Carried
from ckptbridge.conversion.request import Request, Understood, find_config, understand
from ckptbridge.errors import CkptBridgeError, ConfigError, UsageError
from ckptbridge.formats.detect import open_inventory
from ckptbridge.formats.tensors import Inventory


@dataclass(frozen=True)
class Overrides:
    """What the command line says about the conversion, where the provenance does not or should not."""

    target: str | None = None
    layout: Mapping[str, str] | None = None
    mapping: Path | None = None
    config: Path | None = None
    key: str | None = None


@dataclass(frozen=True)
class Side:
    """One checkpoint: where it is, what it holds, and the provenance it carries."""

    path: Path
    inventory: Inventory
    carried: Carried | None


@dataclass(frozen=True)
class Handoff:
    """Two sides, one of which may be elsewhere; ``known`` is the source side with its proved table.

    ``request`` has the options of the judged conversion, ``recorded`` the content digests by side
    ("pt", "ms") that it claims, and ``record`` its provenance.
    """

    pt: Side | None
    ms: Side | None
    known: Understood
    request: Request
    recorded: Mapping[str, str]
    record: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def made(self) -> Side | None:
        """The side that the conversion wrote."""
        return self.ms if self.known.direction == "pt2ms" else self.pt


def find_handoff(paths: Sequence[Path], overrides: Overrides, alone: bool) -> Handoff:
    """The handoff that ``paths`` name: two checkpoints, one with provenance, or none for the current folder.

    ``alone`` says that a golden file stands for the side that is not here. Raises UsageError when a side
    cannot be found, and the errors of reading and of the table.
    """
    if len(paths) > 2:
        raise UsageError("At most two checkpoints are compared.", remedy="Give PT and MS, one of them, or none.")
    if not paths:
        if not Path(provenance.FILE_NAME).is_file():
            raise UsageError(
                "There is no ckptbridge.json in this folder.",
                remedy="Name the checkpoints: ckptbridge verify PT MS.",
                file=Path.cwd(),
            )
        paths = [Path()]
    notes: list[str] = []
    sides = [_open(path, overrides.key) for path in paths]
    if len(sides) == 2:
        pt, ms = sides
        if _side_of(pt) == "ms" and _side_of(ms) != "ms":
            pt, ms = ms, pt
            notes.append("The MindSpore checkpoint was named first; the two were taken the other way round.")
        elif _side_of(pt) == _side_of(ms) != "" and overrides.target is None and overrides.mapping is None:
            name = "PyTorch" if _side_of(pt) == "pt" else "MindSpore"
            raise UsageError(
                f"Both checkpoints are {name}'s, by their formats, marks or provenance.",
                remedy="Compare the two with 'ckptbridge diff', without --through-table; "
                "or, where one is the other side under the same names, give --target hf.",
                file=paths[1],
            )
        return _both(pt, ms, overrides, notes)
    return _one(sides[0], overrides, alone, notes)


def _open(path: Path, key: str | None) -> Side:
    inventory = open_inventory(path, key)
    return Side(path, inventory, provenance.read(inventory, path))


def _side_of(side: Side) -> str:
    """ "pt" or "ms" by the file's format, mark or provenance; "" when nothing tells."""
    if side.inventory.format != "safetensors":
        return "ms" if side.inventory.format == "ckpt" else "pt"
    mark = side.inventory.strings.get("format")
    if mark in ("pt", "ms"):
        return mark
    if side.carried is not None:
        return "ms" if side.carried.record.get("direction") == "pt2ms" else "pt"
    return ""


def _one(side: Side, overrides: Overrides, alone: bool, notes: list[str]) -> Handoff:
    which = _side_of(side)
    direction = side.carried.record.get("direction") if side.carried is not None else None
    made = direction == ("pt2ms" if which == "ms" else "ms2pt")
    if made and side.carried is not None:
        other = _recorded_source(side, side.carried)
        if other is not None:
            notes.append(f"The other side is the one that the provenance names: {other.path}")
            pt, ms = (other, side) if which == "ms" else (side, other)
            return _both(pt, ms, overrides, notes)
    if not alone:
        raise UsageError(
            "There is only one checkpoint, and the other side is not where its provenance says."
            if made
            else "There is only one checkpoint, and it carries no provenance that names the other.",
            remedy="Name both: ckptbridge verify PT MS; or give --golden FILE.",
            file=side.path,
        )
    notes.append(f"Only the {'MindSpore' if which == 'ms' else 'PyTorch'} side is here: its weights are not compared.")
    own: Direction = "ms2pt" if which == "ms" else "pt2ms"
    request = _request(side, side, own, overrides, None)
    known = understand(request)
    record = side.carried.record if side.carried is not None else {}
    pt_side, ms_side = (None, side) if which == "ms" else (side, None)
    return Handoff(pt_side, ms_side, known, request, _recorded(record) if made else {}, record, tuple(notes))


def _recorded_source(side: Side, carried: Carried) -> Side | None:
    """The source that the provenance names, relative to where the output lies, if it is there and has those sizes."""
    named = carried.record.get("source")
    if not isinstance(named, str):
        return None
    path = side.path.resolve().parent / named
    if not path.exists():
        return None
    try:
        found = _open(path, None)
    except CkptBridgeError:
        return None
    return found if _made_from(carried, found) else None


def _made_from(carried: Carried, source: Side) -> bool:
    """Whether a provenance names a checkpoint's files, by name and size."""
    recorded = carried.record.get("sources")
    if not isinstance(recorded, list):
        return False
    names = {(s.get("name"), s.get("size")) for s in recorded if isinstance(s, dict)}
    return names == {(p.name, p.stat().st_size) for p in source.inventory.files}


def _both(pt: Side, ms: Side, overrides: Overrides, notes: list[str]) -> Handoff:
    back = pt.carried is not None and pt.carried.record.get("direction") == "ms2pt" and _made_from(pt.carried, ms)
    source, made, direction = (ms, pt, "ms2pt") if back else (pt, ms, "pt2ms")
    carried = made.carried
    if carried is not None and carried.record.get("direction") != direction:
        carried = None
    if carried is None:
        notes.append(
            "No provenance says how one was made from the other: the table is chosen by model type and options."
        )
    elif not _made_from(carried, source):
        notes.append("The provenance names other source files than those compared here (by name and size).")
    request = _request(source, made, "ms2pt" if back else "pt2ms", overrides, carried)
    judged = _with_source_config(request, carried, notes) if carried is not None else None
    known = understand(request, judged)
    record = carried.record if carried is not None else {}
    absent = _names(record.get("absent"))
    if absent:
        notes.append(f"{len(absent)} tensor(s) are absent, as the provenance declares.")
    return Handoff(pt, ms, known, request, _recorded(record), record, tuple(notes))


# What a conversion itself changes in a config, and what says nothing of the model.
_CHANGEABLE = frozenset(
    ["quantization_config", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures"]
)


def _with_source_config(request: Request, carried: Carried, notes: list[str]) -> Carried:
    """The record with the config that the conversion used: the output's, and what the source was quantised by.

    A config.json beside the weights that is another is noted.
    """
    if carried.config is None or request.config is not None:
        return carried
    try:
        beside = find_config(request, None)
    except ConfigError:  # it was not the one that was used
        beside = None
    if beside is None:
        return carried
    differing = differing_keys(beside, carried.config)
    if differing:
        notes.append(
            f"Judged by the config that the conversion recorded; the config.json beside '{request.source}' "
            f"differs in: {', '.join(differing)}."
        )
    quantised = {k: beside[k] for k in ("quantization_config",) if k in beside}
    return replace(carried, config={**quantised, **carried.config})


def differing_keys(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The keys of two configs whose values differ, but for those that a conversion changes."""
    return sorted(k for k in (a.keys() | b.keys()) - _CHANGEABLE if a.get(k) != b.get(k))


def _recorded(record: Mapping[str, Any]) -> dict[str, str]:
    """The content digests by side that a provenance claims."""
    content = record.get("content")
    return {k: v for k, v in content.items() if isinstance(v, str)} if isinstance(content, dict) else {}


def _request(source: Side, made: Side, direction: Direction, overrides: Overrides, carried: Carried | None) -> Request:
    """The judged conversion's options, from its provenance, under what the command line says."""
    request = Request(
        source=source.path,
        destination=made.path,
        direction=direction,
        target=overrides.target,
        layout=dict(overrides.layout or {}),
        mapping=overrides.mapping,
        config=overrides.config,
        key=overrides.key,
    )
    if carried is None:
        return request
    record = carried.record
    dtype = record.get("dtype")
    return replace(
        request,
        dtype=dtype if isinstance(dtype, str) else None,
        keep_quantized=record.get("keep_quantized") is True,
        allow_missing=_names(record.get("absent")),
        allow_unexpected=_names(record.get("dropped")),
    )


def _names(value: object) -> tuple[str, ...]:
    """Names as globs that match just them."""
    return (
        tuple(glob.escape(name) for name in value if isinstance(name, str)) if isinstance(value, (list, dict)) else ()
    )
