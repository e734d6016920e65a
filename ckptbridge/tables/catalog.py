"""Which tables are shipped, and which one a model type and a target mean.

Only the top of each file is read to find a table; the whole of it only when it is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from ckptbridge.errors import UsageError
from ckptbridge.tables.messages import located, nearest, shorten, suggestion
from ckptbridge.tables.sections import Head, parse_head
from ckptbridge.tables.sources import parse_toml, read_text, shipped_directory
from ckptbridge.tables.table import Table, load_table


def shipped() -> tuple[Table, ...]:
    """Every shipped table, by family and target."""
    return tuple(_load(path) for path, _ in _heads())


def families() -> tuple[str, ...]:
    """The families there are tables of."""
    return tuple(sorted({head.family for _, head in _heads()}))


def model_types() -> tuple[str, ...]:
    """The model types (config.json) that some table serves."""
    return tuple(sorted({name for _, head in _heads() for name in head.model_types}))


def targets(model_type: str) -> tuple[str, ...]:
    """The targets that there are for a model type (or family), the default first; empty when it is unknown."""
    heads = [head for _, head in _serving(model_type)]
    return tuple(head.target for head in sorted(heads, key=lambda head: (not head.default, head.target)))


def misfit(table: Table, config: Mapping[str, object]) -> str:
    """A sentence on a config that names another model type than the table's; an empty string for one that fits."""
    model_type = config.get("model_type")
    if model_type is None or not table.model_types or model_type in (*table.model_types, table.family):
        return ""
    served = ", ".join(table.model_types)
    return f"The config is one of the model type {shorten(model_type)}, and the table {table.name} is for {served}."


def find(model_type: str, target: str | None = None, *, asked_by: str = "--target") -> Table:
    """The table of a model type (or family) and a target, or the default one.

    Raises UsageError, with what there is and the nearest name, for a pair that does not exist; ``asked_by`` is what
    the user gives the target by.
    """
    serving = _serving(model_type)
    if not serving:
        raise UsageError(
            f"There is no table for the model type '{model_type}'.",
            remedy=f"{nearest(model_type, {*model_types(), *families()})} "
            "A table of your own is given by --mapping; 'ckptbridge mappings list' shows the shipped ones.",
        )
    chosen = [path for path, head in serving if (head.default if target is None else head.target == target)]
    listed = ", ".join(targets(model_type))
    place = {"option" if asked_by.startswith("-") else "argument": asked_by}
    if not chosen and target is not None:
        raise UsageError(
            f"There is no table from '{model_type}' to the target '{target}'.",
            remedy=f"Targets of {model_type}: {listed}. {suggestion(target, targets(model_type))}".rstrip(),
            **place,
        )
    if len(chosen) != 1:
        raise UsageError(
            f"The model type '{model_type}' has no default target.",
            remedy=f"Give {asked_by}, one of: {listed}.",
            **place,
        )
    return _load(chosen[0])


def _serving(model_type: str) -> list[tuple[Path, Head]]:
    by_type = [(path, head) for path, head in _heads() if model_type in head.model_types]
    return by_type or [(path, head) for path, head in _heads() if model_type == head.family]


@lru_cache(maxsize=256)
def _load(path: Path) -> Table:
    return load_table(path)


@lru_cache(maxsize=1)
def _heads() -> tuple[tuple[Path, Head], ...]:
    """What the top of every shipped table says, by family and target."""
    found = []
    for path in shipped_directory().glob("*.toml"):
        with located(file=path.name):
            found.append((path, parse_head(parse_toml(_top(read_text(path, path.name)), path.name))))
    return tuple(sorted(found, key=lambda item: (item[1].family, item[1].target)))


def _top(text: str) -> str:
    """The lines above the first section: TOML has the keys of the root table only there."""
    lines = text.splitlines()
    end = next((k for k, line in enumerate(lines) if line.startswith("[")), len(lines))
    return "\n".join(lines[:end])
