"""Makes this room's plain modules importable, and those of tests/mappings: models and layouts written out by hand."""

import sys
from pathlib import Path

for room in ("mappings", "conversion"):
    sys.path.insert(0, str(Path(__file__).parents[1] / room))

from command import run  # noqa: E402, F401 - a fixture of this room
