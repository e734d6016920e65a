"""The configs of published models that are shipped with the tables: what proofs are run on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ckptbridge.tables.sources import shipped_directory


@dataclass(frozen=True, slots=True)
class NamedConfig:
    """A model's config under the name that messages call it."""

    name: str
    values: Mapping[str, object]


@lru_cache(maxsize=1)
def published_configs() -> tuple[NamedConfig, ...]:
    """The published configs, by name: heads, layers and sizes, without what moves no tensor."""
    directory = shipped_directory() / "configs"
    return tuple(NamedConfig(path.stem, json.loads(path.read_text())) for path in sorted(directory.glob("*.json")))
