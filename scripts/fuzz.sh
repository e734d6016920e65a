#!/usr/bin/env bash
# Fuzzes every target for SECONDS, one after another, or those that are named: bash scripts/fuzz.sh 600 [safetensors ckpt ...]
# Corpora grow in build/fuzz; what breaks a target is written there as crash-*, timeout-* or oom-*, and the script fails.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:?usage: scripts/fuzz.sh SECONDS [TARGET ...]}
shift
bash scripts/setup.sh verify,dev,fuzz
python=.venv/bin/python
if [ $# -eq 0 ]; then
    mapfile -t targets < <(PYTHONPATH=tests/fuzz $python -c 'import fuzz_targets; print(*fuzz_targets.TARGETS, sep="\n")')
    set -- "${targets[@]}"
fi
# The fuzzer ends without a chance to clean up, so its folder is made, and removed, here.
TMPDIR=$(mktemp -d -p "$([ -w /dev/shm ] && echo /dev/shm || echo "${TMPDIR:-/tmp}")")
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
failed=()
for target in "$@"; do
    work=build/fuzz/$target
    mkdir -p "$work/corpus"
    $python tests/fuzz/fuzz.py "$target" --seeds "$work/corpus" 2>"$work/log"
    cp -r "tests/data/found/$target/." "$work/corpus" 2>/dev/null || true
    echo "== $target, $seconds s"
    $python tests/fuzz/fuzz.py "$target" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -max_len=16384 \
        -artifact_prefix="$work/" -print_final_stats=1 "$work/corpus" >"$work/log" 2>&1 || failed+=("$target")
    grep -aE 'stat::(number_of_executed_units|peak_rss_mb)|Uncaught|Error: |SUMMARY|Test unit written' "$work/log" || true
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "fuzz: failed: ${failed[*]}; see build/fuzz/*/log" >&2
    exit 1
fi
