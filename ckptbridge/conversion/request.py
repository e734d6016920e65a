"""What the user asked for, and what it means for this source: inventory, config, table, layout.

Nothing is guessed: the table comes from the model type and the target, or from the source's own
provenance; what cannot be known is an error that names the option to give.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ckptbridge.conversion import provenance
from ckptbridge.conversion.config import read_config
from ckptbridge.conversion.plan import Direction
from ckptbridge.errors import CkptBridgeError, CoverageError, UsageError
from ckptbridge.formats.detect import open_inventory
from ckptbridge.formats.tensors import Inventory
from ckptbridge.tables import catalog, generic
from ckptbridge.tables.expand import Expansion, choose_roots, expand
from ckptbridge.tables.proof import prove
from ckptbridge.tables.table import Table, load_table


@dataclass(frozen=True)
class Request:
    """The options of a conversion; the command line's, one to one."""

    source: Path
    destination: Path
    direction: Direction
    target: str | None = None
    layout: Mapping[str, str] = field(default_factory=dict)
    mapping: Path | None = None
    config: Path | None = None
    format: str | None = None
    dtype: str | None = None
    keep_quantized: bool = False
    max_shard_size: int | None = None
    allow_missing: tuple[str, ...] = ()
    allow_unexpected: tuple[str, ...] = ()
    allow_overflow: bool = False
    provenance: Mapping[str, str] = field(default_factory=dict)
    overwrite: bool = False
    resume: bool = False
    crc: bool = False
    digest: str = "blake3"
    key: str | None = None


@dataclass(frozen=True)
class Understood:
    """A source together with the proved correspondence that converts it."""

    direction: Direction
    inventory: Inventory
    config: Mapping[str, Any] | None
    expansion: Expansion
    carried: provenance.Carried | None
    notes: tuple[str, ...]

    @property
    def source_side(self) -> str:
        return "pt" if self.direction == "pt2ms" else "ms"


def understand(request: Request, judged: provenance.Carried | None = None) -> Understood:
    """Open the source, find config and table, expand the table and prove it.

    ``judged`` is the record of a conversion that was made of this source and is judged: it says what a MindSpore
    checkpoint's own record says otherwise, and goes before the config beside the weights.
    Raises the error family: what cannot be known from source, config and options is never assumed.
    """
    inventory = open_inventory(request.source, request.key)
    if request.key is not None and inventory.format != "bin":
        raise UsageError(
            f"Only a .bin holds several state dicts, and the source is {inventory.format}.",
            remedy="Leave --key out.",
            option="--key",
        )
    carried = provenance.read(inventory, request.source)
    side: Literal["pt", "ms"] = "pt" if request.direction == "pt2ms" else "ms"
    _check_direction(request, inventory, carried, judged)
    says = judged if judged is not None else carried if side == "ms" else None
    config = find_config(request, says)
    table = find_table(request, config, says)
    notes = list(inventory.notes)
    layout = dict(request.layout)
    roots: Mapping[str, str] = {}
    if says is not None:
        notes += _disagreements(request, says, table)
        if says.table == table.name:
            layout = {**says.layout, **layout}
            roots = says.roots if side == "ms" else {}
    if request.mapping is None and (misfit := catalog.misfit(table, config or {})):
        notes.append(misfit)
    if table is generic.TABLE:
        shapes = {name: tensor.spec.shape for name, tensor in inventory.tensors.items()}
        expansion = generic.expand_generic(side, shapes, layout)
    else:
        try:
            chosen = choose_roots(table, side, inventory.tensors.keys(), roots)
        except CoverageError as error:
            back = other_direction(request.direction, table, config or {}, layout, inventory.tensors)
            if not back:
                raise
            raise CoverageError(
                f"{error.what} The source's names are those of the table's other side.",
                remedy=f"Use 'ckptbridge convert {back}'.",
                **{"file": request.source, **error.where},
            ) from None
        expansion = expand(table, config or {}, layout, chosen)
    prove(expansion)
    return Understood(request.direction, inventory, config, expansion, carried, tuple(notes))


def _disagreements(request: Request, carried: provenance.Carried, table: Table) -> list[str]:
    """Notes on where the options, or the table as it is now, are not what the provenance says.

    Raises UsageError for options that contradict it: rows in a wrong order have the right shape. Only who says all
    that the provenance would, table and config, is taken to know better.
    """
    given = {"--mapping": request.mapping, "--target": request.target}
    option = next((name for name, value in given.items() if value is not None), None)
    aside = option is not None and (request.config is not None or carried.config is None)
    notes = []
    if carried.table != table.name:
        said = f"The provenance says the table {carried.table}"
        if option == "--target" and not aside:
            raise UsageError(
                f"{said}, and --target says {request.target}.",
                remedy="Leave --target out. If the provenance is wrong, give --config FILE as well: the options then "
                "go before it.",
                option=f"--target {request.target}",
                file=request.source,
            )
        return [f"{said}; {table.name} was taken, as the options say."]
    for key, value in request.layout.items():
        recorded = carried.layout.get(key, value)
        if recorded == value:
            continue
        if not aside:
            full = "--mapping FILE" if carried.custom_table else f"--target {table.target}"
            full += " and --config FILE" if carried.config is not None else ""
            raise UsageError(
                f"The provenance says {key}={recorded}, and --layout says {key}={value}.",
                remedy=f"Leave --layout {key}={value} out. If the provenance is wrong, give {full} as well: the "
                "options then go before it.",
                option=f"--layout {key}={value}",
                file=request.source,
            )
        notes.append(f"The provenance says {key}={recorded}; {key}={value} was taken, as the options say.")
    if carried.table_digest != table.digest:
        notes.append(
            f"The table {table.name} has changed since this checkpoint was written "
            f"({carried.table_digest[:19]}... then, {table.digest[:19]}... now)."
        )
    return notes


def other_direction(
    direction: Direction,
    table: Table,
    config: Mapping[str, Any],
    layout: Mapping[str, str],
    names: Collection[str],
    fitting: int = 0,
) -> Direction | None:
    """The opposite of ``direction``, if most ``names`` fit it, and more than the ``fitting`` ones that fit here."""
    if table is generic.TABLE:
        return None
    back: Direction = "ms2pt" if direction == "pt2ms" else "pt2ms"
    side = "ms" if back == "ms2pt" else "pt"
    try:
        expansion = expand(table, config, layout, choose_roots(table, side, names))
    except CkptBridgeError:
        return None
    known = expansion.by_ms if side == "ms" else expansion.by_pt
    there = sum(name in known for name in names)
    return back if there > max(fitting, len(names) // 2) else None


def _check_direction(
    request: Request, inventory: Inventory, carried: provenance.Carried | None, judged: provenance.Carried | None
) -> None:
    if request.direction == "pt2ms" and inventory.format == "ckpt":
        raise UsageError(
            "The source is a MindSpore .ckpt, and pt2ms reads PyTorch checkpoints.",
            remedy="Use 'ckptbridge convert ms2pt'.",
            file=request.source,
        )
    if request.direction == "ms2pt" and inventory.format == "bin":
        raise UsageError(
            "The source is a PyTorch .bin, and ms2pt reads MindSpore checkpoints.",
            remedy="Use 'ckptbridge convert pt2ms'.",
            file=request.source,
        )
    known = carried is not None or judged is not None or request.target is not None or request.mapping is not None
    if request.direction == "ms2pt" and not known and inventory.strings.get("format") == "pt":
        raise UsageError(
            "The source is PyTorch's, as its safetensors say (format 'pt'), and ms2pt reads MindSpore checkpoints.",
            remedy="Use 'ckptbridge convert pt2ms'. If it is a MindSpore checkpoint all the same, say which "
            "convention it follows with --target, and give --config.",
            file=request.source,
        )
    written = carried.record.get("direction") if carried is not None else None
    if written == request.direction:
        back, side = ("ms2pt", "MindSpore") if written == "pt2ms" else ("pt2ms", "PyTorch")
        raise UsageError(
            f"The source was written by {written}, so it is the {side} side already.",
            remedy=f"Use 'ckptbridge convert {back}'.",
            file=request.source,
        )


def find_config(request: Request, says: provenance.Carried | None) -> Mapping[str, Any] | None:
    """The model's config: the one given; the one that a provenance ``says``; or the config.json beside the weights."""
    if request.config is not None:
        return read_config(request.config)
    if says is not None and says.config is not None:
        return says.config
    source = request.source
    beside = (source if source.is_dir() else source.parent) / "config.json"
    return read_config(beside) if beside.is_file() else None


def find_table(request: Request, config: Mapping[str, Any] | None, says: provenance.Carried | None) -> Table:
    """The mapping table: the file given, the one that a provenance ``says``, or the one for model type and target."""
    if request.mapping is not None:
        return load_table(request.mapping)
    target = request.target
    if target is None and says is not None:
        if says.custom_table:
            raise UsageError(
                f"The checkpoint was written with a table of the user's own, '{says.table}'.",
                remedy="Give that table with --mapping FILE.",
                file=request.source,
            )
        family, _, target = says.table.partition("/")
        return generic.TABLE if says.table == generic.TABLE.name else catalog.find(family, target)
    if request.direction == "ms2pt" and target is None:
        raise UsageError(
            "The checkpoint carries no provenance, so its target layout is not known.",
            remedy="Say which convention it follows with --target (and --layout), and give --config; "
            "if it is a PyTorch checkpoint, use 'ckptbridge convert pt2ms'.",
            file=request.source,
        )
    model_type = (config or {}).get("model_type")
    if target == generic.TARGET and model_type not in catalog.model_types():
        return generic.TABLE
    if not isinstance(model_type, str):
        raise UsageError(
            "The model type is not known: there is no config.json beside the weights."
            if config is None
            else "The model type is not known: the config has no 'model_type'.",
            remedy="Give the model's config.json with --config, or a table of your own with --mapping; "
            "for a network of torch.nn layers that no family covers, give --target nn.",
            file=request.source,
        )
    return catalog.find(model_type, target)
