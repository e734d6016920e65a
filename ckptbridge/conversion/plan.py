"""The plan: what goes where, by which rule, decided from headers alone. Frozen and printable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ckptbridge.formats.tensors import FileLayout, Inventory, TensorSource, TensorSpec
from ckptbridge.tables.axes import Block
from ckptbridge.tables.expand import Expansion

Direction = Literal["pt2ms", "ms2pt"]

# The formats that each direction writes, those that the side's framework reads; the default first.
FORMATS: Mapping[Direction, tuple[str, ...]] = {"pt2ms": ("ckpt", "safetensors"), "ms2pt": ("safetensors", "bin")}
# A destination with such a suffix, in any case, is one file of that format.
SUFFIXES = {".ckpt": "ckpt", ".safetensors": "safetensors", ".bin": "bin", ".pt": "bin", ".pth": "bin"}


def file_suffixes(direction: Direction) -> tuple[str, ...]:
    """The suffixes of the single files that a direction writes."""
    return tuple(suffix for suffix, format_name in SUFFIXES.items() if format_name in FORMATS[direction])


@dataclass(frozen=True, slots=True)
class Scale:
    """Block scales of a quantised source: element (r, c) is multiplied by ``tensor[r // rows, c // columns]``."""

    tensor: TensorSource
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Record:
    """One target tensor as a view over sources.

    ``blocks`` lead from ``sources`` (their left side) to the target (their right side).
    ``scales[k]`` belongs to ``sources[k]``; the tuple is empty where nothing is dequantised.
    """

    spec: TensorSpec
    sources: tuple[TensorSource, ...]
    blocks: tuple[Block, ...]
    rule: str
    axes: str
    scales: tuple[Scale | None, ...] = ()

    @property
    def cast(self) -> bool:
        """Whether words change their type on the way."""
        return any(source.spec.dtype != self.spec.dtype for source in self.sources)

    @property
    def renamed_from(self) -> str | None:
        """The source tensor whose bytes the record carries over unchanged, if there is one."""
        if len(self.sources) != 1 or len(self.blocks) != 1 or self.cast or any(self.scales):
            return None
        source = self.sources[0]
        left, right = self.blocks[0].left, self.blocks[0].right
        plain = source.contiguous and source.spec.shape == self.spec.shape and left.axes == right.axes
        return source.spec.name if plain and not any(left.start) else None


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A weights file to be written: its records in order, and its geometry."""

    name: str
    records: tuple[Record, ...]
    layout: FileLayout


@dataclass(frozen=True, slots=True)
class Dropped:
    """A source tensor that is not converted, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Allowed:
    """Source tensors that are absent or left out because something allows it: an option's pattern, the provenance."""

    kind: Literal["absent", "left out"]
    by: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """How many source tensors change their words from one dtype to another, by a cast or by dequantisation."""

    step: Literal["cast", "dequantise"]
    source: str
    target: str
    tensors: int
    lossy: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """A source tensor that must equal another one before it may be left out."""

    tensor: TensorSource
    reference: TensorSource
    rule: str


@dataclass(frozen=True, slots=True)
class FileStat:
    """A source file as it was when the plan was made."""

    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Plan:
    """Everything that a conversion will do.

    ``destination`` is the file or, where ``directory`` holds, the folder that will appear.
    """

    direction: Direction
    inventory: Inventory
    stats: Mapping[Path, FileStat]
    expansion: Expansion
    destination: Path
    directory: bool
    format: str
    files: tuple[OutputFile, ...]
    dropped: tuple[Dropped, ...]
    comparisons: tuple[Comparison, ...]
    absent: tuple[str, ...]
    allowed: tuple[Allowed, ...]
    changes: tuple[Change, ...]
    config: Mapping[str, Any] | None
    provenance: Mapping[str, Any]  # all that is known before the bytes move
    notes: tuple[str, ...]

    @cached_property
    def records(self) -> tuple[Record, ...]:
        return tuple(record for file in self.files for record in file.records)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all target tensors."""
        return sum(record.spec.nbytes for record in self.records)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON shows it."""
        return {
            "direction": self.direction,
            "source": str(self.inventory.path),
            "source_format": self.inventory.format,
            "destination": str(self.destination),
            "format": self.format,
            "table": self.expansion.table.name,
            "layout": dict(self.expansion.layout),
            "sizes": dict(self.expansion.sizes),
            "bytes": self.nbytes,
            "files": [
                {
                    "name": file.name,
                    "size": file.layout.size,
                    "tensors": [
                        {
                            "name": r.spec.name,
                            "dtype": r.spec.dtype.name,
                            "shape": list(r.spec.shape),
                            "from": [
                                {"name": s.spec.name, "dtype": s.spec.dtype.name, "shape": list(s.spec.shape)}
                                for s in r.sources
                            ],
                            "rule": r.rule,
                            "axes": r.axes,
                        }
                        for r in file.records
                    ],
                }
                for file in self.files
            ],
            "dropped": [{"name": d.name, "reason": d.reason} for d in self.dropped],
            "compared": [{"name": c.tensor.spec.name, "with": c.reference.spec.name} for c in self.comparisons],
            "missing_allowed": list(self.absent),
            "notes": list(self.notes),
        }
