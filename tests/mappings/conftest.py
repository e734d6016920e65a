"""Makes the plain modules of this room importable: the oracles and the judge."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
