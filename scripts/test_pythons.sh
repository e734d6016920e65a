#!/usr/bin/env bash
# The base package's tests, with its base dependencies only, on every Python from 3.10 to 3.12 that this machine has.
# What needs torch or MindSpore is left to scripts/test.sh.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
ran=0
for version in 3.10 3.11 3.12; do
    python=
    for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
        if "$candidate" -c '' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "== Python $version: not here"
        continue
    fi
    venv=$root/.venv-$version
    echo "== $("$python" --version)"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet install -e . pytest pytest-timeout hypothesis einx
    "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/tables tests/test_errors.py tests/mappings/test_decoder_and_bert_tables.py \
        tests/mappings/test_readme.py tests/base
    ran=$((ran + 1))
done
[ "$ran" -gt 0 ] || { echo "no Python from 3.10 to 3.12 was found" >&2; exit 2; }
