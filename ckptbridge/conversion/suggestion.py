"""A table suggested for two checkpoints on disk."""

from __future__ import annotations

from pathlib import Path

from ckptbridge.conversion.probe import ValueProbe
from ckptbridge.errors import CoverageError, OutputError
from ckptbridge.formats.detect import open_inventory
from ckptbridge.formats.tensors import Inventory
from ckptbridge.tables.name_classes import Spec
from ckptbridge.tables.suggest import Suggestion, suggest
from ckptbridge.tables.suggest_text import to_toml


def suggest_table(pt: Path, ms: Path) -> tuple[Suggestion, str]:
    """What corresponds in two checkpoints, and the TOML table that says so.

    Raises the family of format errors for what cannot be read, and CoverageError when nothing pairs.
    """
    inventories = open_inventory(pt), open_inventory(ms)
    with ValueProbe(*inventories) as probe:
        found = suggest(_specs(inventories[0]), _specs(inventories[1]), probe)
    if not found.pairings:
        raise CoverageError(
            "No tensor of one checkpoint could be one of the other, by name and shape or by value.",
            remedy="Check with 'ckptbridge inspect' that both are of one model.",
            pt=pt,
            ms=ms,
        )
    return found, to_toml(found, (pt.name, ms.name))


def write_table(text: str, path: Path, overwrite: bool) -> None:
    """Write a table file. Raises OutputError when it is there already, or cannot be written."""
    try:
        with path.open("w" if overwrite else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise OutputError("The file is there already.", remedy="Give --overwrite.", file=path) from None
    except OSError as error:
        raise OutputError(f"The table cannot be written: {error.strerror}.", file=path) from None


def _specs(inventory: Inventory) -> dict[str, Spec]:
    return {name: Spec(t.spec.shape, t.spec.dtype.name) for name, t in inventory.tensors.items()}
