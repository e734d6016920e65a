#!/usr/bin/env bash
# The whole check: linter, types, tests. Arguments go to pytest: bash scripts/test.sh tests/formats -k bin
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh verify,dev
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# Two processes: MindSpore takes seconds to come up in each.
exec .venv/bin/python -m pytest -q -n 2 --dist loadfile --durations=15 -m "not soak and not bench" "$@"
