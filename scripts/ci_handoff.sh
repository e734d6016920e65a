#!/usr/bin/env bash
# A handoff as a CI job, on any runner: converts SRC to DST, judges the result, and leaves the reports beside it:
# DST.junit.xml, DST.html and DST.json. The exit code is verify's: 0 it holds, 1 it does not, 2 it cannot be judged.
#   scripts/ci_handoff.sh SRC DST [OPTIONS OF convert] [-- OPTIONS OF verify]
#   scripts/ci_handoff.sh Qwen3-8B qwen3.ckpt --layout attention=contiguous -- --atol 1e-5
# The direction is pt2ms; for the way back: DIRECTION=ms2pt scripts/ci_handoff.sh qwen3.ckpt Qwen3-8B-tuned
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n '2,6s/^# //p' "$0" >&2
    exit 2
fi
source=$1
destination=${2%/}
shift 2
convert=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    convert+=("$1")
    shift
done
if [ $# -gt 0 ]; then shift; fi

# A conversion that fails is in the test report, too, so that a job that publishes it shows no earlier one.
mkdir -p "$(dirname "$destination")"
rm -f "$destination.junit.xml" "$destination.html" "$destination.json"
ckptbridge convert "${DIRECTION:-pt2ms}" "$source" "$destination" "${convert[@]}" || {
    code=$?
    cat >"$destination.junit.xml" <<XML
<?xml version="1.0" encoding="UTF-8"?>
<testsuites tests="1" errors="1"><testsuite name="ckptbridge.convert" tests="1" errors="1">
<testcase classname="ckptbridge.convert" name="the conversion is done"><error message="ckptbridge convert ended with exit code $code; its message is in the log"/></testcase>
</testsuite></testsuites>
XML
    exit $code
}
exec ckptbridge verify "$source" "$destination" \
    --junit "$destination.junit.xml" --html "$destination.html" --report "$destination.json" "$@"
