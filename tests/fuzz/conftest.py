"""Makes this room's plain modules importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
