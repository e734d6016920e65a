"""A model's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptbridge.errors import ConfigError

MAX_CONFIG_BYTES = 16 << 20
_MEND = "Mend it, or give another with --config."


def read_config(path: Path) -> Mapping[str, Any]:
    """Read a config.json. Raises ConfigError, with line and column where there are any, when it is no JSON object."""
    if path.is_dir():
        path = path / "config.json"
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError("The config is larger than any model's.", remedy="Give another with --config.", file=path)
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(
            f"The config cannot be read: {e.strerror}.",
            remedy="Make it readable, or give another with --config.",
            file=path,
        ) from None
    except json.JSONDecodeError as e:
        raise ConfigError(
            f"The config is not valid JSON: {e.msg}.", remedy=_MEND, file=path, line=e.lineno, column=e.colno
        ) from None
    except (ValueError, RecursionError):  # not UTF-8, a number without end, or brackets without end
        raise ConfigError("The config is not valid JSON.", remedy=_MEND, file=path) from None
    if not isinstance(data, dict):
        raise ConfigError("The config is not a JSON object.", remedy=_MEND, file=path)
    return data
