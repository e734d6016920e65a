"""What the user asked for, and what it means for this source: inventory, config, table, layout.

Nothing is guessed: the table comes from the model type and the target, or from the source's own
provenance; what cannot be known is an error that names the option to give.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ckptbridge.conversion import provenance
from ckptbridge.conversion.config import read_config
from ckptbridge.conversion.plan import Direction
from ckptbridge.errors import UsageError
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


def understand(request: Request) -> Understood:
    """Open the source, find config and table, expand the table and prove it.

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
    _check_direction(request, inventory, carried)
    config = find_config(request, carried)
    table = find_table(request, config, carried)
    side: Literal["pt", "ms"] = "pt" if request.direction == "pt2ms" else "ms"
    notes = list(inventory.notes)
    layout = dict(request.layout)
    roots: Mapping[str, str] = {}
    if carried is not None and side == "ms" and carried.table == table.name:
        layout = {**carried.layout, **layout}
        roots = carried.roots
        if carried.table_digest != table.digest:
            notes.append(
                f"The table {table.name} has changed since this checkpoint was written "
                f"({carried.table_digest[:19]}... then, {table.digest[:19]}... now)."
            )
    if table is generic.TABLE:
        shapes = {name: tensor.spec.shape for name, tensor in inventory.tensors.items()}
        expansion = generic.expand_generic(side, shapes, layout)
    else:
        expansion = expand(table, config or {}, layout, choose_roots(table, side, inventory.tensors.keys(), roots))
    prove(expansion)
    return Understood(request.direction, inventory, config, expansion, carried, tuple(notes))


def _check_direction(request: Request, inventory: Inventory, carried: provenance.Carried | None) -> None:
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
    written = carried.record.get("direction") if carried is not None else None
    if written == request.direction:
        back, side = ("ms2pt", "MindSpore") if written == "pt2ms" else ("pt2ms", "PyTorch")
        raise UsageError(
            f"The source was written by {written}, so it is the {side} side already.",
            remedy=f"Use 'ckptbridge convert {back}'.",
            file=request.source,
        )


def find_config(request: Request, carried: provenance.Carried | None) -> Mapping[str, Any] | None:
    """The model's config: the one given; a MindSpore checkpoint's own record; or the config.json beside the weights."""
    if request.config is not None:
        return read_config(request.config)
    if request.direction == "ms2pt" and carried is not None and carried.config is not None:
        return carried.config
    source = request.source
    beside = (source if source.is_dir() else source.parent) / "config.json"
    return read_config(beside) if beside.is_file() else None


def find_table(request: Request, config: Mapping[str, Any] | None, carried: provenance.Carried | None) -> Table:
    """The mapping table: the file given, or the shipped one for the model type and target."""
    if request.mapping is not None:
        return load_table(request.mapping)
    target = request.target
    if request.direction == "ms2pt" and target is None:
        if carried is None:
            raise UsageError(
                "The checkpoint carries no provenance, so its target layout is not known.",
                remedy="Say which convention it follows with --target (and --layout), and give --config.",
                file=request.source,
            )
        family, _, target = carried.table.partition("/")
        if carried.custom_table:
            raise UsageError(
                f"The checkpoint was written with a table of the user's own, '{carried.table}'.",
                remedy="Give that table with --mapping FILE.",
                file=request.source,
            )
        return generic.TABLE if carried.table == generic.TABLE.name else catalog.find(family, target)
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
