"""Coverage-guided fuzzing of one target: ``python tests/fuzz/fuzz.py TARGET [libFuzzer's options and corpus folders]``.

With ``--seeds FOLDER`` the seeds of the target are written there and nothing else is done.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ckptbridge"]):
    import fuzz_targets


def main() -> None:
    name, *options = sys.argv[1:]
    target, seeds = fuzz_targets.TARGETS[name]
    if options[:1] == ["--seeds"]:
        for k, seed in enumerate(seeds()):
            (Path(options[1]) / f"seed-{k}").write_bytes(seed)
        return
    atheris.Setup([sys.argv[0], *options], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
