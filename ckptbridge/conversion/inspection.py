"""What a checkpoint is, from its headers: contents, provenance, and the tables that know its names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptbridge.conversion import provenance
from ckptbridge.conversion.config import read_config
from ckptbridge.errors import CkptBridgeError, UsageError
from ckptbridge.formats.detect import open_inventory
from ckptbridge.formats.tensors import Inventory, TensorSpec
from ckptbridge.tables.recognise import Candidate, Side, recognise

if TYPE_CHECKING:
    from ckptbridge.conversion.statistics import Statistics

StrPath = str | os.PathLike[str]

_MAX_STRING = 200  # characters of a string entry that are shown
_SHOWN_SCALARS = 100
_SEARCHED = 1000  # names among which the nearest is looked for


@dataclass(frozen=True)
class Step:
    """One conversion that led to a checkpoint, as its provenance claims; "" and 0 where that says nothing."""

    tool: str
    direction: str
    table: str
    layout: Mapping[str, str]
    source: str
    files: int
    dtype: str
    lossy: tuple[str, ...]
    dropped: int
    notes: Mapping[str, str]

    def to_dict(self) -> dict[str, object]:
        """The step as JSON shows it."""
        return {
            "tool": self.tool,
            "direction": self.direction,
            "table": self.table,
            "layout": dict(self.layout),
            "source": self.source,
            "files": self.files,
            "dtype": self.dtype or None,
            "lossy": list(self.lossy),
            "dropped": self.dropped,
            "notes": dict(self.notes),
        }


@dataclass(frozen=True)
class Inspection:
    """What :func:`inspect` found.

    ``tensors`` are those that ``--tensors`` asks for, in file order, and ``statistics`` belongs to
    them; all counts are of the whole checkpoint. ``shards`` are (file, bytes on disk). ``aliases``
    maps a name to the one whose storage it shares, ``tied`` a name that the provenance remembers as
    an equal copy to the one that was kept. ``history`` is oldest first. ``model_type`` is the
    config's, "" without one; ``candidates`` are the tables that know the names, and why.
    """

    path: Path
    format: str
    shards: tuple[tuple[Path, int], ...]
    count: int
    parameters: int
    nbytes: int
    dtypes: Mapping[str, int]
    tensors: tuple[TensorSpec, ...]
    aliases: Mapping[str, str]
    tied: Mapping[str, str]
    strings: Mapping[str, str]
    scalars: Mapping[str, object]
    notes: tuple[str, ...]
    history: tuple[Step, ...]
    model_type: str
    candidates: tuple[Candidate, ...]
    statistics: Mapping[str, Statistics] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The inspection as ``--json`` prints it."""
        tensors = []
        for spec in self.tensors:
            row: dict[str, object] = {
                "name": spec.name,
                "dtype": spec.dtype.name,
                "shape": list(spec.shape),
                "nbytes": spec.nbytes,
            }
            if spec.name in self.statistics:
                row["stats"] = self.statistics[spec.name].to_dict()
            tensors.append(row)
        return {
            "path": str(self.path),
            "format": self.format,
            "shards": [{"file": str(path), "nbytes": nbytes} for path, nbytes in self.shards],
            "count": self.count,
            "parameters": self.parameters,
            "nbytes": self.nbytes,
            "dtypes": dict(self.dtypes),
            "aliases": dict(self.aliases),
            "tied": dict(self.tied),
            "strings": dict(self.strings),
            "scalars": dict(self.scalars),
            "notes": list(self.notes),
            "history": [step.to_dict() for step in self.history],
            "model_type": self.model_type or None,
            "tables": [candidate.to_dict() for candidate in self.candidates],
            "tensors": tensors,
        }


def inspect(
    path: StrPath,
    *,
    tensors: str | None = None,
    stats: bool = False,
    key: str | None = None,
    progress: Callable[[int], object] | None = None,
) -> Inspection:
    """Look into a checkpoint file or directory; only ``stats`` reads more than headers.

    ``tensors`` is a glob over names; ``stats`` computes each such tensor's statistics, streamed, and
    ``progress`` is called with the number of bytes just read; ``key`` chooses among a .bin's state
    dicts. Raises CkptBridgeError's family: for what is no checkpoint, and for a glob that matches nothing.
    """
    return inspect_inventory(open_for_inspection(Path(path), key), Path(path), tensors, stats, progress)


def open_for_inspection(path: Path, key: str | None) -> Inventory:
    """The inventory; raises UsageError for a ``key`` where there is nothing to choose from, and reading's errors."""
    inventory = open_inventory(path, key)
    if key is not None and inventory.format != "bin":
        raise UsageError(
            f"Only a .bin holds several state dicts, and this is {inventory.format}.",
            remedy="Leave --key out.",
            option="--key",
        )
    return inventory


def inspect_inventory(
    inventory: Inventory,
    path: Path,
    glob: str | None = None,
    stats: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Inspection:
    """The same for an inventory that is open already."""
    chosen = selected(inventory, glob)
    carried = provenance.read(inventory, path)
    model_type = _model_type(path, carried)
    dtypes: dict[str, int] = {}
    for tensor in inventory.tensors.values():
        dtypes[tensor.spec.dtype.name] = dtypes.get(tensor.spec.dtype.name, 0) + 1
    found: Mapping[str, Statistics] = {}
    if stats:
        from ckptbridge.conversion.plan import FileStat
        from ckptbridge.conversion.sources import SourceFiles
        from ckptbridge.conversion.statistics import all_statistics

        statuses = {p: p.stat() for p in inventory.files}
        with SourceFiles({p: FileStat(s.st_size, s.st_mtime_ns) for p, s in statuses.items()}) as files:
            found = all_statistics([inventory.tensors[spec.name] for spec in chosen], files, progress)
            files.check_unchanged()
    return Inspection(
        path=path,
        format=inventory.format,
        shards=tuple((p, p.stat().st_size) for p in inventory.files),
        count=len(inventory.tensors),
        parameters=sum(t.spec.numel for n, t in inventory.tensors.items() if n not in inventory.aliases),
        nbytes=inventory.nbytes,
        dtypes=dtypes,
        tensors=chosen,
        aliases=inventory.aliases,
        tied=carried.tied if carried is not None else {},
        strings={k: v for k, v in inventory.strings.items() if k != provenance.TAG or carried is None},
        scalars=scalar_values(inventory),
        notes=inventory.notes,
        history=tuple(_step(record) for record in (carried.history if carried is not None else ())),
        model_type=model_type,
        candidates=_candidates(inventory, carried, model_type),
        statistics=found,
    )


def selected(inventory: Inventory, glob: str | None) -> tuple[TensorSpec, ...]:
    """The tensors whose names match ``glob``, all without one. Raises UsageError when none does."""
    specs = tuple(tensor.spec for tensor in inventory.tensors.values())
    if glob is None:
        return specs
    chosen = tuple(spec for spec in specs if fnmatchcase(spec.name, glob))
    if not chosen:
        from ckptbridge.tables.messages import suggestion

        near = suggestion(glob, islice(inventory.tensors, _SEARCHED))
        raise UsageError(
            f"No tensor's name matches '{glob}'.",
            remedy=f"A glob must match the whole name, as '*norm*' does. {near}".rstrip(),
            option="--tensors",
        )
    return chosen


# --- what the config, the provenance and the names say ---------------------------------------


def _model_type(path: Path, carried: provenance.Carried | None) -> str:
    """The model type of the recorded config, or of the config.json beside the weights."""
    config: Mapping[str, Any] | None = carried.config if carried is not None else None
    beside = (path if path.is_dir() else path.parent) / "config.json"
    if config is None and beside.is_file():
        config = read_config(beside)
    value = (config or {}).get("model_type")
    return value if isinstance(value, str) else ""


def sides(inventory: Inventory, carried: provenance.Carried | None) -> tuple[Side, ...]:
    """Which side a checkpoint is of: by its format, its mark or its provenance; both when nothing tells."""
    if inventory.format != "safetensors":
        return ("ms",) if inventory.format == "ckpt" else ("pt",)
    if carried is not None:
        return ("ms",) if carried.record.get("direction") == "pt2ms" else ("pt",)
    match inventory.strings.get("format"):
        case "pt":
            return ("pt",)
        case "ms" | "mindspore":
            return ("ms",)
    return ("pt", "ms")


def _candidates(inventory: Inventory, carried: provenance.Carried | None, model_type: str) -> tuple[Candidate, ...]:
    on = sides(inventory, carried)
    found = recognise(inventory.tensors, on, model_type) if model_type else ()
    if not found:  # no config, one that belongs to something else, or a model type without a table
        found = recognise(inventory.tensors, on)
    return found if found or "pt" not in on or not inventory.tensors else (_of_layers(inventory),)


def _of_layers(inventory: Inventory) -> Candidate:
    """Whether the table for any network of torch.nn layers takes the tensors as they are."""
    from ckptbridge.tables import generic

    total = len(inventory.tensors)
    try:
        generic.expand_generic("pt", {name: tensor.spec.shape for name, tensor in inventory.tensors.items()})
        reasons: tuple[str, ...] = ("every tensor is one of a torch.nn layer, told apart by names and shapes",)
        fits = True
    except CkptBridgeError as error:
        reasons, fits = (error.what, "'ckptbridge convert pt2ms' with --target nn says what to give."), False
    return Candidate(generic.FAMILY, generic.TARGET, False, "pt", fits, total if fits else 0, total, reasons)


def scalar_values(inventory: Inventory) -> dict[str, object]:
    """The values of the training state that stands among the weights, as JSON has them."""
    if not inventory.scalars:
        return {}
    from ckptbridge.formats.lazy import LazyTensor

    values: dict[str, object] = {}
    for name, source in list(inventory.scalars.items())[:_SHOWN_SCALARS]:
        value = LazyTensor(source).numpy().reshape(-1)[:1].tolist() if source.spec.numel == 1 else []
        number = value[0] if value else None
        finite = isinstance(number, (bool, int)) or (isinstance(number, float) and abs(number) < float("inf"))
        values[name] = number if finite else str(number)
    return values


def _step(record: object) -> Step:
    """One entry of a history; it comes from a file, so nothing of it is taken for granted."""
    entry: Mapping[str, Any] = record if isinstance(record, dict) else {"append_info": record}
    table = entry.get("table")
    sources = entry.get("sources")
    dropped = entry.get("dropped")
    tool = _text(entry.get("tool"))
    notes = _texts(entry.get("notes"))
    if "append_info" in entry:
        notes = {**notes, "append_info": _text(entry["append_info"]) or str(entry["append_info"])[:_MAX_STRING]}
    return Step(
        tool=f"{tool} {_text(entry.get('version'))}".strip() or "unknown",
        direction=_text(entry.get("direction")),
        table=_text(table.get("name")) if isinstance(table, dict) else "",
        layout=_texts(entry.get("layout")),
        source=_text(entry.get("source")),
        files=len(sources) if isinstance(sources, list) else 0,
        dtype=_text(entry.get("dtype")),
        lossy=_lossy(entry.get("lossy")),
        dropped=len(dropped) if isinstance(dropped, (dict, list)) else 0,
        notes=notes,
    )


def _lossy(value: object) -> tuple[str, ...]:
    steps = []
    for item in value if isinstance(value, list) else []:
        if isinstance(item, dict):
            step, a, b, n = (item.get(key) for key in ("step", "from", "to", "tensors"))
            steps.append(f"{n} tensors {step} from {a} to {b}"[:_MAX_STRING])
    return tuple(steps)


def _text(value: object) -> str:
    return value[:_MAX_STRING] if isinstance(value, str) else ""


def _texts(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    return {str(k)[:_MAX_STRING]: v[:_MAX_STRING] for k, v in value.items() if isinstance(v, str)}
