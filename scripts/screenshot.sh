#!/usr/bin/env bash
# Renders an HTML report to a PNG with headless Chromium (Debian's package).
#   scripts/screenshot.sh REPORT.html OUT.png [light|dark] [WIDTHxHEIGHT]
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: scripts/screenshot.sh REPORT.html OUT.png [light|dark] [WIDTHxHEIGHT]" >&2
    exit 2
fi
page=$(realpath "$1")
picture=$(realpath -m "$2")
scheme=${3:-light}
size=${4:-1100x1600}

if ! command -v chromium >/dev/null; then
    echo "chromium is missing; installing Debian's package" >&2
    apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >&2
fi

profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
flags=(--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking
    --disable-component-update --disable-sync "--user-data-dir=$profile" --hide-scrollbars
    "--window-size=${size/x/,}" "--screenshot=$picture")
case $scheme in
light) ;;
dark) flags+=(--blink-settings=preferredColorScheme=0) ;;
*)
    echo "the colour scheme is light or dark, not '$scheme'" >&2
    exit 2
    ;;
esac
timeout 120 chromium "${flags[@]}" "file://$page" 2>/dev/null
[ -s "$picture" ] || {
    echo "chromium wrote no picture" >&2
    exit 2
}
echo "$picture"
