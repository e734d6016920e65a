"""The static proof of one table on many configs, in every layout: ``ckptbridge mappings check``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ckptbridge.errors import ConfigError, ProofError, UsageError
from ckptbridge.tables import catalog
from ckptbridge.tables.expand import expand
from ckptbridge.tables.messages import located, shorten
from ckptbridge.tables.proof import Proof, prove
from ckptbridge.tables.published import NamedConfig, published_configs
from ckptbridge.tables.table import Table


@dataclass(frozen=True, slots=True)
class Case:
    """What a table was expanded for. ``config`` is "" when the table needs none."""

    config: str
    layout: Mapping[str, str]
    roots: Mapping[str, str]

    def __str__(self) -> str:
        options = [f"{key}={value}" for key, value in self.layout.items()]
        options += [f"{key}='{value}'" for key, value in self.roots.items()]
        return ", ".join([self.config or "no config", *options])


@dataclass(frozen=True, slots=True)
class Checked:
    """How many cases hold, the proof of the largest, and the first that does not with its counter-example."""

    table: Table
    configs: tuple[str, ...]
    proved: int
    largest: Proof | None
    failed: Case | None
    counter_example: ProofError | None

    def to_dict(self) -> dict[str, object]:
        """The result as ``--json`` prints it."""
        return {
            "table": self.table.name,
            "file": self.table.path.name,
            "proved": self.counter_example is None,
            "configs": list(self.configs),
            "cases": self.proved,
            "pt_names": self.largest.pt_names if self.largest else 0,
            "ms_names": self.largest.ms_names if self.largest else 0,
            "elements": self.largest.elements if self.largest else 0,
            "failed": str(self.failed) if self.failed else None,
            "counter_example": self.counter_example.to_dict() if self.counter_example else None,
        }


def tables_for(configs: Sequence[NamedConfig]) -> tuple[Table, ...]:
    """Every shipped table; with ``configs``, those that serve one of their model types.

    Raises UsageError for a config whose model type no table serves.
    """
    if not configs:
        return catalog.shipped()
    for config in configs:
        model_type = config.values.get("model_type")
        if model_type not in catalog.model_types():
            raise UsageError(
                f"No shipped table serves the model type {shorten(model_type)}.",
                file=config.name,
                remedy="'ckptbridge mappings list' shows which there are; name a table FILE of your own.",
            )
    wanted = {config.values["model_type"] for config in configs}
    return tuple(table for table in catalog.shipped() if not wanted.isdisjoint(table.model_types))


def check(table: Table, configs: Sequence[NamedConfig] = ()) -> Checked:
    """Prove ``table`` on ``configs``, or on the published ones of its model types when none are given.

    A table that no published config fits is proved without one, if it needs none. Raises UsageError
    when it does, and ConfigError, naming the config, for one that lacks what the table asks for.
    """
    chosen = configs or [c for c in published_configs() if c.values.get("model_type") in table.model_types]
    names = tuple(config.name for config in chosen)
    largest: Proof | None = None
    proved = 0
    for config in chosen or [NamedConfig("", {})]:
        for layout, roots in _variants(table):
            case = Case(config.name, layout, roots)
            try:
                with located(config=case):
                    proof = prove(expand(table, config.values, layout, roots))
            except ProofError as error:
                return Checked(table, names, proved, largest, case, error)
            except ConfigError as error:
                if chosen:
                    raise
                raise UsageError(
                    f"No published config is one of {table.name}'s, and it needs one: {error.what}",
                    remedy="Give a model's config.json with --config.",
                    **{**error.where, "file": table.path.name},
                ) from error
            proved += 1
            if largest is None or proof.elements > largest.elements:
                largest = proof
    return Checked(table, names, proved, largest, None, None)


def _variants(table: Table) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Every combination of layout options with the first choice of each root; then each other choice once."""
    first = {key: root.choices[0] for key, root in table.roots.items()}
    for values in product(*table.layout.values()):
        yield dict(zip(table.layout, values, strict=True)), first
    default = {key: values[0] for key, values in table.layout.items()}
    for key, root in table.roots.items():
        for choice in root.choices[1:]:
            yield default, {**first, key: choice}
