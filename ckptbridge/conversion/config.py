"""A model's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptbridge.errors import ConfigError

MAX_CONFIG_BYTES = 16 << 20


def read_config(path: Path) -> Mapping[str, Any]:
    """Read a config.json. Raises ConfigError when it is not a JSON object."""
    if path.is_dir():
        path = path / "config.json"
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(
                "The config is larger than any model's.", remedy="Name the model's config.json.", file=path
            )
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(
            f"The config cannot be read: {e.strerror}.", remedy="Name the model's config.json.", file=path
        ) from None
    except (ValueError, RecursionError):
        raise ConfigError("The config is not valid JSON.", remedy="Name the model's config.json.", file=path) from None
    if not isinstance(data, dict):
        raise ConfigError("The config is not a JSON object.", remedy="Name the model's config.json.", file=path)
    return data
