#!/usr/bin/env bash
# Compares the tables with MindFormers' own converters, and runs MindFormers' own networks on what they made, in an
# environment of its own (.venv-peer): MindFormers has other pins than this project. Arguments go to pytest:
# bash scripts/peer_mindformers.sh -k qwen3
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
stamp=.venv-peer/.ckptbridge-peer
want=$(cat constraints.txt setup.cfg scripts/peer_mindformers.sh | sha256sum)
if ! { [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; }; then
    python=${PYTHON:-}
    for candidate in python3.11 python3.10 python3.12 python3; do
        if [ -z "$python" ] && "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null; then
            python=$candidate
        fi
    done
    if [ -z "$python" ]; then
        echo "peer: Python 3.10 to 3.12 is needed; set PYTHON to one." >&2
        exit 2
    fi
    [ -x .venv-peer/bin/python ] || "$python" -m venv .venv-peer
    pip() { .venv-peer/bin/python -m pip --disable-pip-version-check --quiet --quiet "$@"; }
    # MindFormers 2.1.0 asks for MindSpore 2.11 and pyarrow 23; on 2.10 its import takes these.
    pip install mindspore==2.10.0 torch==2.13.0 numpy==1.26.4 transformers==5.24.0 'pyarrow<22' 'opencv-python-headless<4.12' \
        deprecated ftfy jieba rouge_chinese sentencepiece tiktoken setproctitle tensorboardX datasets pybind11 pyyaml \
        pytest 2> >(grep -v -e 'dependency resolver' -e '^mindformers .* requires' >&2)
    pip install --no-deps mindformers==2.1.0 mindpet
    pip install -c constraints.txt -e .
    echo "$want" >"$stamp"
fi
# MindFormers writes its logs below the working directory.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
GLOG_v=3 LOG_MF_PATH="$work" "$root/.venv-peer/bin/python" -m pytest -q -p no:cacheprovider \
    -c "$root/pyproject.toml" --rootdir "$root" "$root/tests/peer" "$@"
